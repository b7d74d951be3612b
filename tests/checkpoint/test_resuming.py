"""Whole runs that are started again."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import config
from tests.checkpoint.conftest import flip_last_byte
from tests.conftest import content, launch, make_config, rows, token_ids, train_run, write_prepared
from tests.distributed import run_on_ranks


class Run:
    """outputs/NAME, trained on ranks; each call starts it again."""

    def __init__(self, write_config: Callable, outputs: pathlib.Path, name: str = "r"):
        self.write_config = write_config
        self.folder = outputs / name

    def __call__(self, ranks: int = 1, **sections: dict) -> None:
        cfg = config.load(str(self.write_config(self.folder.name, **sections)))
        run_on_ranks(ranks, lambda world: train_run(cfg, world))

    def steps(self, kind: str = "train") -> list[int]:
        return [row["step"] for row in rows(self.folder, kind)]

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


@pytest.fixture
def run(write_config, tmp_path) -> Run:
    return Run(write_config, tmp_path / "outputs")


def name(step: int, ending: str = "") -> str:
    return f"step-{step:08d}{ending}"


def prepare_other(path: pathlib.Path, source: str = "other.jsonl", **changes: Any) -> dict:
    """[data] with a folder of ten documents of 500 tokens. changes: of its manifest."""
    data = {"source": source, "path": str(path)}
    documents = [*token_ids(10, 500).numpy()]
    write_prepared(make_config(data=data), documents, documents[:1], **changes)
    return data


def test_resuming_drops_what_came_later(run):
    def train(steps: int, seq_len: int = 32, **checkpoint: object) -> None:
        run(
            train={"steps": steps, "seq_len": seq_len},
            optim={"schedule_steps": 20},
            checkpoint={"save_every_steps": 2, "keep_last": 2, **checkpoint},
            eval={"every_steps": 4},
        )

    train(7)
    assert (run.saved(), run.steps("eval")) == ([name(6), name(7)], [4, 7])
    train(8, resume=6)
    assert run.saved() == [name(6), name(7, ".superseded"), name(8)]
    assert (run.steps(), run.steps("eval")) == ([*range(1, 9)], [4, 8])
    train(9, seq_len=16, allow_changed=["train.seq_len"])
    assert [row["tokens"] for row in rows(run.folder)][-2:] == [8 * 8 * 32, 8 * 8 * 32 + 8 * 16]


def test_epochs_count_what_was_read_also_with_other_weights(run, tmp_path):
    paths = [prepare_other(tmp_path / name, identity=None)["path"] for name in "ab"]
    for steps, weight in (4, 1.0), (6, 3.0):
        sources = [{"source": paths[0], "weight": weight}, {"source": paths[1]}]
        allowed = {"allow_changed": ["data.sources"]}
        run(data={"sources": sources}, checkpoint=allowed, train={"steps": steps})
    samples = (10 * 500 - 1) // 32  # of an epoch of each
    epochs = [[*row["epochs"].values()] for row in rows(run.folder)]
    assert epochs[3] == [16 / samples, 16 / samples]
    assert epochs[5] == [28 / samples, 20 / samples]


MESHES = [
    (1, {}),
    (4, {"tp": 2}),
    (2, {"cp": 2, "reshard_after_forward": False}),
    (2, {"cpu_offload": True, "dp_replicate": 2}),
]


def test_checkpoint_resumes_on_any_mesh(run, write_config, tmp_path):
    """Data, losses, norms and evaluations are those of one process without a break. An evaluation before
    the save leaves no tensor out."""

    def train(run: Run, ranks: int, steps: int, **parallel: object) -> None:
        run(
            ranks,
            train={"steps": steps, "micro_batch_size": 1},
            optim={"schedule_steps": len(MESHES)},
            parallel=parallel,
            checkpoint={},
            eval={"every_steps": 1},
        )

    whole = Run(write_config, tmp_path / "outputs", "whole")
    train(whole, 1, len(MESHES))
    for step, (ranks, parallel) in enumerate(MESHES, 1):
        train(run, ranks, step, **parallel)
    for kind, keys in ("train", ["batch_digest", "loss", "grad_norm"]), ("eval", ["loss"]):
        expected = rows(whole.folder, kind)
        found = rows(run.folder, kind)
        assert len(expected) == len(found) == len(MESHES)
        for key in keys:
            values = [row[key] for row in expected]
            assert [row[key] for row in found] == pytest.approx(values, rel=1e-5), key


def test_corrupt_last_checkpoint_is_set_aside_and_trained_again(run):
    run(checkpoint={"save_every_steps": 2})
    flip_last_byte(run.folder / f"checkpoints/{name(4)}/__0_0.distcp")
    run(2, checkpoint={"save_every_steps": 2})
    assert run.saved() == [name(2), name(4), name(4, ".corrupt")]
    assert run.steps() == [1, 2, 3, 4]


def test_what_a_killed_run_left_undone_is_done(run):
    """Evaluation, purge and status after the last save; and the second time nothing."""
    sections = {"checkpoint": {"keep_last": 1}, "eval": {}}
    run(**sections)
    metrics = run.folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"train"' in line))
    (run.folder / f"checkpoints/.{name(9)}.tmp").mkdir()
    status = run.folder / "status.json"
    for _ in range(2):
        status.write_text(json.dumps({**json.loads(status.read_text()), "state": "running"}))
        run(**sections)
        assert (run.steps(), run.steps("eval"), run.saved()) == ([1, 2, 3, 4], [4], [name(4)])
        assert json.loads(status.read_text())["state"] == "finished"


def test_tokens_of_another_tokenizer_are_refused_even_where_other_data_is_allowed(run, tmp_path):
    run(checkpoint={})
    both = {"allow_changed": ["data.source", "data.tokenizer"]}
    other = prepare_other(tmp_path / "other", tokenizer="another hash")
    with pytest.raises(pytest.fail.Exception, match=r"of another tokenizer .*\S*outputs/r\W"):
        run(data=other, train={"steps": 5}, checkpoint=both)
    run(data=prepare_other(tmp_path / "again"), train={"steps": 5}, checkpoint=both)
    assert run.steps() == [1, 2, 3, 4, 5]


def test_refused_launch_says_why_and_changes_nothing(write_config, tmp_path):
    path = write_config("r", checkpoint={"save_every_steps": 2, "keep_last": 2})
    assert launch(path).returncode == 0
    before = content(tmp_path / "outputs")
    for arguments, message in [
        ("--run.device=cuda --checkpoint.resume=3", "resume = 3"),  # and of the device
        ('--model.ffn_dim=96 --checkpoint.allow_changed=["model.ffn_dim"]', "is torch.float32 [96"),
        ("--eval-only --model.norm_eps=0.5", "model.norm_eps = 0.5"),
        ('--model.freeze=["embedding.*"]', "model.freeze"),
    ]:
        done = launch(path, "--train.steps=9", *arguments.split())
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr
    done = launch(path, "--eval-only", "--checkpoint.resume=2", nproc=2)
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 2, done.stderr
    assert content(tmp_path / "outputs") == before
