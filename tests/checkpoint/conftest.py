"""Checkpoints as tests make them: a real one of some ranks, and folders that only look like one."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import config
from checkpoint import catalog
from checkpoint.catalog import root_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.load import restore, tensors_of
from data.dataset import Dataset
from optim import Progress, build_optimizer
from tests.conftest import build, hashes, make_config, seal, token_ids
from tests.distributed import run_on_ranks


def run_config(folder: pathlib.Path, **sections: dict) -> config.Config:
    """Of the run folder/r, which saves and resumes."""
    run = {"name": "r", "output_dir": str(folder), **sections.pop("run", {})}
    return make_config(run=run, checkpoint=sections.pop("checkpoint", {}), **sections)


def no_data() -> Any:
    return mock.Mock(Dataset, identities=list, tokenizer_files=())


class Run:
    """A model, its optimizer and a checkpointer on this rank."""

    def __init__(self, world, folder: pathlib.Path, model: dict | None = None, **checkpoint):
        train = {"steps": 100}
        self.cfg = run_config(folder, model=model or {}, train=train, checkpoint=checkpoint)
        self.root = root_of(self.cfg)
        self.model = build(self.cfg, world)
        self.optimizer = build_optimizer(self.model, self.cfg.optim)
        self.reports: list[tuple[int, str | None]] = []
        self.checkpointer = Checkpointer(self.cfg, world, no_data())
        self.checkpointer.report = lambda step, problem: self.reports.append((step, problem))

    def save(self, step: int, stopping: bool = False, wait: bool = True, **options) -> None:
        progress = Progress(step, tokens=7 * step)
        self.checkpointer.save(progress, self.model, self.optimizer, stopping, **options)
        if wait:
            self.checkpointer.wait()
            dist.barrier()  # rank 0 removes what has failed

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.model, self.optimizer)

    @torch.no_grad()
    def add(self, value: float) -> None:
        for tensor in self.tensors().values():
            tensor.add_(value)

    def restored(self, step: int) -> dict[str, str]:
        restore(catalog.path_of(self.root, step), self.model, self.optimizer)
        return hashes(self.tensors())


def make_checkpoint(cfg: config.Config, step: int, **state: object) -> pathlib.Path:
    """A folder that passes as a checkpoint, without tensors."""
    folder = catalog.path_of(root_of(cfg), step)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    content = {"step": step, "config": config.to_dict(cfg), **state}
    (folder / "state.json").write_text(json.dumps(content))
    seal(folder)
    return folder


@contextlib.contextmanager
def unreadable(name: str, number: int) -> Iterator[None]:
    """Files whose path ends so cannot be opened."""
    opened = os.open

    def failing(path, *arguments, **options):
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    with mock.patch.object(os, "open", failing):
        yield


def flip_last_byte(path: pathlib.Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def train_and_save(world, folder: pathlib.Path) -> dict[str, str]:
    """Three steps of AdamW, saved as folder/r/checkpoints/step-00000003; its tensors' hashes."""
    run = Run(world, folder)
    for ids in token_ids(3, 4, 17):
        run.model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.save(3)
    return hashes(run.tensors())


def save_on_ranks(ranks: int, folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
    """(a real checkpoint, its tensors' hashes)."""
    digests = run_on_ranks(ranks, train_and_save, folder)[0]
    return folder / "r/checkpoints/step-00000003", digests


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> dict[int, tuple[pathlib.Path, dict[str, str]]]:
    """By the number of ranks that saved it: (a real checkpoint, its tensors' hashes). Copy to change."""
    return {ranks: save_on_ranks(ranks, tmp_path_factory.mktemp("saved")) for ranks in (1, 2, 4)}


@pytest.fixture
def folder(saved, tmp_path) -> pathlib.Path:
    """A copy of the checkpoint of two ranks."""
    return shutil.copytree(saved[2][0], tmp_path / "step-00000003")
