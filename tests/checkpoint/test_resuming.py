"""Whole runs that are started again."""

import json
import pathlib
from collections.abc import Callable

import pytest

import config
from tests.checkpoint.conftest import flip_last_byte
from tests.conftest import (
    content,
    launch,
    make_config,
    rows,
    token_ids,
    train_run,
    write_prepared,
)
from tests.distributed import run_on_ranks


class Run:
    """outputs/r, trained on ranks; each call starts it again."""

    def __init__(self, write_config: Callable, outputs: pathlib.Path):
        self.write_config = write_config
        self.folder = outputs / "r"

    def __call__(self, ranks: int = 1, **sections: dict) -> None:
        cfg = config.load(str(self.write_config("r", **sections)))
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
    assert run.saved() == [name(6), name(7)]
    assert run.steps("eval") == [4, 7]
    train(8, resume=6)
    assert run.saved() == [name(6), name(7, ".superseded"), name(8)]
    assert run.steps() == [*range(1, 9)]
    assert run.steps("eval") == [4, 8]
    train(9, seq_len=16, allow_changed=["train.seq_len"])
    assert [row["tokens"] for row in rows(run.folder)][-2:] == [8 * 8 * 32, 8 * 8 * 32 + 8 * 16]


def test_epochs_count_what_was_read_also_with_other_weights(run, tmp_path):
    sources = []
    for name, weight in ("a", 1.0), ("b", 1.0):
        documents = [*token_ids(10, 500).numpy()]
        data = {"path": str(tmp_path / name)}
        write_prepared(make_config(data=data), documents, documents[:1], identity=None)
        sources.append({"source": data["path"], "weight": weight})
    run(data={"sources": sources}, checkpoint={})
    sources[0]["weight"] = 3.0
    allowed = {"allow_changed": ["data.sources"]}
    run(data={"sources": sources}, checkpoint=allowed, train={"steps": 6})
    samples = (10 * 500 - 1) // 32  # of an epoch of each
    epochs = [[*row["epochs"].values()] for row in rows(run.folder)]
    assert epochs[3] == [16 / samples, 16 / samples]
    assert epochs[5] == [28 / samples, 20 / samples]


def test_run_moves_from_mesh_to_mesh(write_config, tmp_path):
    """Its data, losses, norms and evaluations are those of one process without a break."""
    meshes = [
        (1, {}),
        (4, {"tp": 2}),
        (2, {"cp": 2}),
        (2, {"cpu_offload": True, "dp_replicate": 2}),
    ]

    def train(name: str, steps: int, ranks: int, **parallel: object) -> None:
        path = write_config(
            name,
            train={"steps": steps, "micro_batch_size": 1},
            optim={"schedule_steps": len(meshes)},
            parallel=parallel,
            checkpoint={},
            eval={"every_steps": 1},
        )
        cfg = config.load(str(path))
        run_on_ranks(ranks, lambda world: train_run(cfg, world))

    train("whole", len(meshes), 1)
    for step, (ranks, parallel) in enumerate(meshes, 1):
        train("moved", step, ranks, **parallel)
    for kind, keys in ("train", ["batch_digest", "loss", "grad_norm"]), ("eval", ["loss"]):
        whole = rows(tmp_path / "outputs/whole", kind)
        moved = rows(tmp_path / "outputs/moved", kind)
        assert len(whole) == len(moved) == len(meshes)
        for expected, found in zip(whole, moved):
            for key in keys:
                assert found[key] == pytest.approx(expected[key], rel=1e-5), (found["step"], key)


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
    data = {"source": "other.jsonl", "path": str(tmp_path / "other")}
    documents = [*token_ids(10, 500).numpy()]
    write_prepared(make_config(data=data), documents, documents[:1], tokenizer="another hash")
    both = {"allow_changed": ["data.source", "data.tokenizer"]}
    with pytest.raises(pytest.fail.Exception, match=r"of another tokenizer .*\S*outputs/r\W"):
        run(data=data, train={"steps": 5}, checkpoint=both)
    data["path"] = str(tmp_path / "again")
    write_prepared(make_config(data=data), documents, documents[:1])
    run(data=data, train={"steps": 5}, checkpoint=both)
    assert run.steps() == [1, 2, 3, 4, 5]


def test_refused_launch_says_why_and_changes_nothing(write_config, tmp_path):
    path = write_config("r", checkpoint={"save_every_steps": 2, "keep_last": 2})
    assert launch(path).returncode == 0
    before = content(tmp_path / "outputs")
    shapes = ["--model.ffn_dim=96", '--checkpoint.allow_changed=["model.ffn_dim"]']
    for arguments, message in [
        (["--checkpoint.resume=3"], "resume = 3"),
        (["--checkpoint.resume=never"], "never"),
        (["--train.seq_len=16"], "train.seq_len = 16"),
        ([f"--run.output_dir={path}"], "must be a folder"),
        (["--checkpoint=off"], "[checkpoint] is off"),
        (["--run.device=cuda", "--checkpoint.resume=3"], "resume = 3"),  # and of the device
        (["--train.steps=9", *shapes], "this model's is torch.float32 [96"),
        (["--eval-only", "--model.norm_eps=0.5"], "model.norm_eps = 0.5"),
        (["--train.steps=9", '--model.freeze=["embedding.*"]'], "model.freeze"),
    ]:
        done = launch(path, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = launch(path, "--eval-only", "--checkpoint.resume=2", nproc=2)
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 2, done.stderr
    assert content(tmp_path / "outputs") == before
