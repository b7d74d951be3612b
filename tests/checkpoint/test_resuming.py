"""Whole runs that are started again."""

import json
import pathlib
from collections.abc import Callable

import pytest

import config
from tests.checkpoint.conftest import flip_last_byte
from tests.conftest import content, launch, rows, train_run
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
    launches = json.loads((run.folder / "environment.json").read_text())
    assert len(launches["earlier"]) == 2


def test_refused_launch_says_why_and_changes_nothing(write_config, tmp_path):
    path = write_config("r", checkpoint={"save_every_steps": 2, "keep_last": 2})
    assert launch(path).returncode == 0
    before = content(tmp_path / "outputs")
    for arguments, message in [
        ("--run.device=cuda --checkpoint.resume=3", "resume = 3"),  # and of the device
        ('--model.ffn_dim=96 --checkpoint.allow_changed=["model.ffn_dim"]', "is torch.float32 [96"),
        ("--eval-only --model.norm_eps=0.5", "model.norm_eps = 0.5"),
    ]:
        done = launch(path, "--train.steps=9", *arguments.split())
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr
    done = launch(path, "--eval-only", "--checkpoint.resume=2", nproc=2)
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 2, done.stderr
    assert content(tmp_path / "outputs") == before
