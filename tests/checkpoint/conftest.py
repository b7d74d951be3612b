"""Checkpoints as tests make them: a real one of some ranks, and folders that only look like one."""

import json
import pathlib

import pytest

import config
from checkpoint import catalog
from checkpoint.catalog import root_of
from checkpoint.load import tensors_of
from checkpoint.save import Saver
from data.dataset import Dataset, Sample
from optim import build_optimizer
from tests.conftest import build, hashes, make_config, seal, token_ids
from tests.distributed import run_on_ranks


def run_config(folder: pathlib.Path, **sections: dict) -> config.Config:
    """Of the run folder/r, which saves and resumes."""
    run = {"name": "r", "output_dir": str(folder), **sections.pop("run", {})}
    return make_config(run=run, checkpoint=sections.pop("checkpoint", {}), **sections)


class NoData(Dataset):
    def sample(self, number: int) -> Sample:
        raise IndexError(number)

    def validation(self) -> list:
        return []

    def identities(self) -> list[dict]:
        return []


def no_data(cfg: config.Config) -> Dataset:
    return NoData()


def make_checkpoint(cfg: config.Config, step: int, **state: object) -> pathlib.Path:
    """A folder that passes as a checkpoint, without tensors."""
    folder = catalog.path_of(root_of(cfg), step)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    content = {"step": step, "config": config.to_dict(cfg), **state}
    (folder / "state.json").write_text(json.dumps(content))
    seal(folder)
    return folder


def flip_last_byte(path: pathlib.Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def train_and_save(world, folder: pathlib.Path) -> dict[str, str]:
    """Three steps of AdamW, saved as folder/r/checkpoints/step-00000003; its tensors' hashes."""
    cfg = run_config(folder)
    model = build(cfg, world)
    optimizer = build_optimizer(model, cfg.optim)
    for ids in token_ids(3, 4, 17):
        model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = tensors_of(model, optimizer)
    assert cfg.checkpoint
    saver = Saver(root_of(cfg), cfg.checkpoint, [])
    saver.write(3, tensors, {"step": 3, "config": config.to_dict(cfg)})
    return hashes(tensors)


def save_on_ranks(ranks: int, folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
    """(a real checkpoint, its tensors' hashes)."""
    digests = run_on_ranks(ranks, train_and_save, folder)[0]
    return folder / "r/checkpoints/step-00000003", digests


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> dict[int, tuple[pathlib.Path, dict[str, str]]]:
    """By the number of ranks that saved it: (a real checkpoint, its tensors' hashes). Copy to change."""
    return {ranks: save_on_ranks(ranks, tmp_path_factory.mktemp("saved")) for ranks in (1, 2, 4)}
