"""benchmarks.gpu at tiny sizes; what it does where arms fail, hang or find no time; that it continues."""

import json
import math
import sys

import pytest

import config
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import arms, checks, parts
from tests.conftest import REPO

pytestmark = pytest.mark.early


def test_each_arm_of_the_table_exists_and_changes_something():
    for arm in arms.ARMS:
        if arm.kind == "check":
            assert callable(getattr(checks.Runs, arm.target))
            continue
        assert arm.kind == "step" or arm.kind in parts.PARTS
        path, common = str(REPO / f"configs/{arm.target}.toml"), arms.COMMON.split()
        options = [option for option in arm.options if option != "--bare"]
        changed = config.load(path, [*common, *options]) != config.load(path, common)
        assert changed == bool(options), arm.name


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path, groups = tmp_path / "gpu.json", ["environment", "training", "tests", "1B", "ceilings"]
    assert gpu.main(["--seconds=1200", f"--json={path}", "--only", *groups]) == 0
    rows = {row["arm"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == [arm.name for arm in arms.ARMS if arm.group in groups]
    assert "no figure of a GPU" in capsys.readouterr().out.splitlines()[0]
    skipped = {"two GPUs": "skipped: needs two GPUs", "marked gpu": "skipped: needs a GPU"}
    for name, row in rows.items():
        assert row["status"] == skipped.get(name, "ok"), row
    assert "flash_attention_for_cpu" in str(rows["machine"]["attention_operators"])
    assert rows["as shipped"]["vs_shipped"] == 1 and rows["bare loop"]["vs_shipped"] > 0
    # the same weights, trained on the same batch; the bare AdamW decays norms, too
    assert abs(rows["as shipped"]["loss"] - rows["bare loop"]["loss"]) < gpu.SAME_LOSS
    assert abs(rows["as shipped"]["loss"] - rows["more at once"]["loss"]) > 1e-3
    for name, steps in ("train, save", range(5, 9)), ("resume", range(9, 13)):
        assert [*rows[name]["losses"]] == [str(step) for step in steps]
        assert rows[name]["largest_difference"] < 1e-4  # the same computation
    assert rows["read"]["output"][-1] == "3 good, 0 bad"


@pytest.mark.parametrize(
    "script, status",
    [
        ("echo warned; echo '{}'", "ok"),
        ("exec sleep 60", "failed: no answer in 1 s: killed"),
        ("kill -9 $$", "failed: exit code -9: "),
        ("echo 'no such option' >&2; exit 2", "refused: no such option"),
        ("echo 'torch.OutOfMemoryError: CUDA' >&2; exit 1", "out of memory"),
    ],
)
def test_how_a_process_ends_is_its_status(monkeypatch, tmp_path, script, status):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert gpu.answer(["module"], 1.0 if "sleep" in script else 60.0)["status"] == status


def test_what_failed_is_measured_again_unless_conditions_differ(monkeypatch, tmp_path):
    path, conditions = tmp_path / "gpu.json", {"status": "ok", "device": "cpu", "torch": "2"}
    statuses = iter(["refused: x", "failed: y", "skipped: z", "failed: no answer", "ok", "ok"])

    def answer(argv: list[str], seconds: float) -> dict:
        if argv[-1] == "conditions":
            return dict(conditions)
        return {"status": next(statuses), "is_bare": "--bare" in argv}

    monkeypatch.setattr(gpu, "answer", answer)
    for seconds, code, expected in (
        (600, 1, ["refused: x", "failed: y", "skipped: z"]),
        (0, 0, ["refused: x", "skipped: time", "skipped: time"]),
        (20, 0, ["refused: x", "cut off: time", "ok"]),  # less than an arm may take
        (600, 0, ["refused: x", "ok", "ok"]),
    ):
        assert gpu.main([f"--json={path}", "--only", "3B", f"--seconds={seconds}"]) == code
        rows = json.loads(path.read_text())["rows"]
        assert [row["status"] for row in rows] == expected
    assert [row["is_bare"] for row in rows] == [False, False, True]
    conditions["torch"] = "3"
    with pytest.raises(config.ConfigError, match="other conditions .torch was 2"):
        gpu.main([f"--json={path}"])
    assert json.loads(path.read_text())["rows"] == rows


def test_a_plan_of_the_same_options_stands_next_to_what_is_measured(monkeypatch):
    asked = {}

    def answer(argv: list[str], seconds: float, *before: str) -> dict:
        asked[argv[0]] = argv
        planned = {"status": "ok", "peak_gib": 1.0, "step_seconds": 4.0}
        return planned if argv[0] == "tools.planner" else {**planned, "peak_gib": 2.0}

    monkeypatch.setattr(gpu, "answer", answer)
    (arm,) = [arm for arm in arms.ARMS if arm.name == "float8=rowwise"]
    conditions = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.1}
    row = gpu.measure(arm, conditions, False, "runs", 60.0)
    assert row["note"] == "8 of 32 layers" and "--gpu=H100" in asked["tools.planner"]
    for option in ("--model.n_layers=8", "--parallel.float8=rowwise", *arms.COMMON.split()):
        assert option in asked["tools.planner"] and option in asked["benchmarks.step"]
    shown = gpu.line({"group": "8B", "arm": arm.name, **row})
    assert "peak_gib 2.000 (2.000 of the plan)" in shown and "8 of 32 layers" in shown


@pytest.mark.parametrize(
    "arm, seconds, loss, size, mark",
    [
        ("x", 0.5, 7.0, 2, None),
        ("x", 0.5, 7.03, 2, "void"),
        ("x", 0.5, math.nan, 2, "void"),
        ("x", 0.5, 7.03, 4, None),  # another batch
        ("as shipped, again", 1.01, 7.0, 2, None),
        ("as shipped, again", 1.02, 7.0, 2, "not steady"),
    ],
)
def test_speed_is_compared_with_the_last_one_as_shipped(arm, seconds, loss, size, mark):
    def row(arm: str, seconds: float, loss: float, size: int, config: str = "1B") -> dict:
        speed = {"step_seconds": seconds, "tokens_per_second_per_device": 1 / seconds}
        return {"config": config, "arm": arm, "loss": loss, "micro_batch_size": size, **speed}

    shipped = [row("as shipped", 9.0, 7.0, 2), row("as shipped", 1.0, 7.0, 2)]
    last = row(arm, seconds, loss, size)
    gpu.compare([*shipped, row("as shipped", 5.0, 9.0, 2, "3B"), last])
    assert last["vs_shipped"] == pytest.approx(1 / seconds)
    assert last.get("marked", "None").startswith(str(mark))


@pytest.mark.parametrize("kind, value", [("train", 6.04), ("train", math.nan), ("eval", 6.1)])
def test_losses_that_differ_fail(tmp_path, kind, value):
    rows = {("train", step): 6.0 for step in range(5, 9)} | {("eval", 8): 6.0}
    for name, changed in (("cpu", {}), ("device", {(kind, 8): value})):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "metrics.jsonl").open("w") as file:
            for (of, step), loss in (rows | changed).items():
                file.write(json.dumps({"kind": of, "step": step, "loss": loss}) + "\n")
    runs = checks.Runs(tmp_path, "cpu", [])
    with pytest.raises(RuntimeError, match=f"step 8: {kind} loss {value:.4f}, on the CPU 6.0000"):
        runs.compared("device", range(5, 9))
    assert runs.compared("device", range(5, 8))["largest_difference"] == 0
