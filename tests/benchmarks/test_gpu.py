"""benchmarks.gpu at tiny sizes; that it continues; what it compares."""

import json

import pytest

import config
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import arms, checks

pytestmark = pytest.mark.early


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path, groups = tmp_path / "gpu.json", ["environment", "training", "tests", "1B", "ceilings"]
    assert gpu.main(["--seconds=1200", f"--json={path}", "--only", *groups]) == 0
    rows = {row["arm"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == [arm.name for arm in arms.ARMS if arm.group in groups]
    skipped = {"two GPUs": "skipped: needs two GPUs", "marked gpu": "skipped: needs a GPU"}
    for name, row in rows.items():
        assert row["status"] == skipped.get(name, "ok"), row
    # the same weights, trained on the same batch; the bare AdamW decays norms, too
    assert abs(rows["as shipped"]["loss"] - rows["bare loop"]["loss"]) < gpu.SAME_LOSS
    assert abs(rows["as shipped"]["loss"] - rows["more at once"]["loss"]) > 1e-3
    for name, steps in ("train, save", range(5, 9)), ("resume", range(9, 13)):
        assert [*rows[name]["losses"]] == [str(step) for step in steps]
        assert rows[name]["largest_difference"] < 1e-4  # the same computation
    assert rows["read"]["output"][-1] == "3 good, 0 bad"


def test_what_failed_is_measured_again_unless_conditions_differ(monkeypatch, tmp_path):
    path, conditions = tmp_path / "gpu.json", {"device": "cpu", "torch": "2"}
    statuses = iter(["refused: x", "failed: y", "skipped: z", "ok", "ok"])

    def answer(argv: list[str], seconds: float) -> dict:
        return (
            {"status": "ok", **conditions} if "conditions" in argv else {"status": next(statuses)}
        )

    monkeypatch.setattr(gpu, "answer", answer)
    again = ["refused: x", "ok", "ok"]
    for code, expected in (1, ["refused: x", "failed: y", "skipped: z"]), (0, again), (0, again):
        assert gpu.main([f"--json={path}", "--only", "3B"]) == code
        assert [row["status"] for row in json.loads(path.read_text())["rows"]] == expected
    conditions["torch"] = "3"
    with pytest.raises(config.ConfigError, match="other conditions .torch was 2"):
        gpu.main([f"--json={path}"])


def test_losses_that_differ_fail(tmp_path):
    for name, last in (("cpu", 6.0), ("device", 6.04)):
        (tmp_path / name).mkdir()
        rows = [
            {"kind": "train", "step": 7, "loss": 6.0},
            {"kind": "train", "step": 8, "loss": last},
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    runs = checks.Runs(tmp_path, "cpu", [])
    with pytest.raises(RuntimeError, match="step 8: train loss 6.0400, on the CPU 6.0000"):
        runs.compared("device", range(7, 9))
    assert runs.compared("device", range(7, 8))["largest_difference"] == 0


def test_speed_is_compared_with_the_last_one_as_shipped():
    def row(arm: str, seconds: float, loss: float, size: int = 2, of: str = "1B") -> dict:
        speed = {"step_seconds": seconds, "tokens_per_second_per_device": 1 / seconds}
        return {"config": of, "arm": arm, "loss": loss, "micro_batch_size": size, **speed}

    shipped = [row("as shipped", 9.0, 7.0), row("as shipped", 1.0, 7.0)]
    others = [row("x", 0.5, 7.0), row("void", 0.5, 7.03), row("of another batch", 0.5, 7.03, 4)]
    gpu.compare([*shipped, row("as shipped", 5.0, 9.0, of="3B"), *others])
    assert [row["vs_shipped"] for row in others] == [2.0] * 3
    assert [row["arm"] for row in others if "marked" in row] == ["void"]
