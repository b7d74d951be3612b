"""benchmarks.gpu at tiny sizes; what it does where arms fail, hang or find no time; that it continues."""

import json
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import config
from benchmarks import step
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import arms, environment, measure, planned, processes, report, training
from benchmarks.gpu.measure import Work
from benchmarks.gpu.trace import by_kernel
from benchmarks.step import build, step_of
from extras.profiler.profiler import Event
from tests import cases
from tests.conftest import REPO, make_config
from tools.planner.devices import device
from tools.planner.plan import Asked, plan

pytestmark = pytest.mark.early

SKIPPED = {"two GPUs": "skipped: needs two GPUs"}
ON_A_CPU = {"status": "ok", "device": "cpu", "torch": "2"}


def run(folder, capsys, *arguments: str) -> tuple[list[str], dict]:
    """(lines printed, content of the JSON file)."""
    assert gpu.main(["--tiny", f"--json={folder / 'gpu.json'}", *arguments]) == 0
    return capsys.readouterr().out.splitlines(), json.loads((folder / "gpu.json").read_text())


@pytest.fixture
def on_a_cpu(monkeypatch) -> None:
    """In this process and in those that it starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def check(lines: list[str], content: dict, groups: list[str]) -> None:
    """All that is asked for was measured and printed."""
    rows = {(row["group"], row["arm"]): row for row in content["rows"]}
    expected = []
    for group in arms.GROUPS:
        if group in groups:
            expected += [(group, arm) for arm in arms.GROUPS[group]]
    assert [*rows] == expected
    for (_, arm), row in rows.items():
        assert row["status"] == "ok" or row["status"] == SKIPPED.get(arm)
    trained = [row for row in rows.values() if arms.is_trained(row["group"], row["arm"])]
    shown = len([line for line in lines if line.startswith("| llama")])
    assert len(trained) <= shown <= 2 * len(trained)  # once more with a plan
    assert lines[0] == content["what"] and "no figure of a GPU" in lines[0]
    losses = {}  # by model and micro-batch
    for row in trained:
        assert row["first_step_seconds"] > 0 and row["peak_gib"] > 0
        losses.setdefault((row["model"], row["micro_batch_size"]), []).append(row["loss"])
        if "step_seconds" in row:  # else too noisy
            assert row["tokens_per_second"] == pytest.approx(16 * 32 / row["step_seconds"])
    # the same weights, trained on the same batch; torch's AdamW there decays norms too
    assert all(max(each) - min(each) < report.SAME_LOSS for each in losses.values())
    assert (
        len({round(losses["llama1b", size][0], 2) for size in (1, 2, 4, 8)}) == 4
    )  # other batches


@pytest.mark.slow
def test_all_of_it_on_a_cpu(tmp_path, capsys, on_a_cpu):
    # of the others each starts one more process
    groups = ["environment", "ceilings", "1B", "faster", "adapters", "options"]
    lines, content = run(tmp_path, capsys, "--seconds=400", "--only", *groups)
    check(lines, content, groups)
    rows = {row["arm"]: row for row in content["rows"]}
    assert "flash_attention_for_cpu" in str(rows["machine"]["attention_operators"])
    # seven weights of a block, or four, three matmuls of each: 2 * 32 tokens a weight's element
    block = rows["block of 8B"]
    elements = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    for figures in (block["apart"], block["fused"]):
        flops = figures["tflops"] * 1e9 * figures["milliseconds"]
        assert flops == pytest.approx(3 * 2 * 32 * elements)
    assert rows["trace"]["milliseconds"]["matrix products"] > 0
    assert rows["update"]["parameters"] == 512 * 64 + elements + 3 * 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_of_it_on_a_gpu(tmp_path, capsys):
    groups = [group for group in arms.GROUPS if group != "tests"]  # which would run this one
    lines, content = run(tmp_path, capsys, "--seconds=550", "--only", *groups)
    check(lines, content, groups)
    for row in content["rows"]:
        if arms.is_trained(row["group"], row["arm"]) and row["arm"] != arms.BARE:
            assert {"peak_gib", "reserved_gib"} <= row["measured_over_planned"].keys()


@pytest.mark.parametrize(
    "script, expected",
    [
        # the first arm crashes, the second frees no memory, the third is well
        (
            'case $3 in *shipped*) kill -9 $$;; *) echo "{\\"status\\": \\"ok\\"}"; exit 3;; esac',
            ["failed: its process ended with -9", "ok", "ok"],
        ),
        (
            'echo "{\\"status\\": \\"ok\\"}"; exec sleep 60',
            ["ok", "cut off: time", "skipped: time"],
        ),
        (
            'case $3 in *shipped*) exec sleep 60;; *) echo "{\\"status\\": \\"ok\\"}"; exit 3;; esac',
            ["failed: no answer in 1 s, a quarter of --seconds: killed", "ok", "ok"],
        ),
    ],
    ids=["crash", "no time", "hang"],
)
def test_processes(monkeypatch, tmp_path, script, expected):
    python = tmp_path / "python"  # called as: python -m benchmarks.gpu.measure WORK
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(processes, "LEAST_LIMIT", 1.0)
    seconds = 4.0 if "failed: no answer" in expected[0] else 60.0
    rows = []
    deadline = time.time() + (1 if "cut off: time" in expected else 60)
    given = Work("1B", [*arms.GROUPS["1B"]], deadline, seconds, "runs", True)
    processes.run_group(given, rows.append)
    assert [row["status"] for row in rows] == expected
    assert [row["arm"] for row in rows] == [*arms.GROUPS["1B"]] and rows[0]["model"] == "llama1b"


@pytest.fixture
def identified(monkeypatch, tmp_path) -> dict:
    """What the device is found to be. No arm is measured: each is "ok", and in the file at once (a kill loses none)."""
    conditions = dict(ON_A_CPU)
    asked = []
    path = tmp_path / "gpu.json"

    def run_group(work, add):
        for arm in work.arms:
            asked.append((work.group, arm))
            add({"group": work.group, "model": "", "arm": arm, "status": "ok"})
            assert arm in [row["arm"] for row in json.loads(path.read_text())["rows"]]

    monkeypatch.setattr(processes, "identify", lambda work: dict(conditions))
    monkeypatch.setattr(processes, "run_group", run_group)
    return {"asked": asked, "conditions": conditions, "path": path}


def test_what_failed_or_was_skipped_is_measured_again(identified, capsys):
    path = identified["path"]
    assert gpu.main(["--only=3B", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    for row, status in zip(content["rows"], ("refused: x", "failed: y", "skipped: time")):
        row["status"] = status
    path.write_text(json.dumps(content))
    identified["asked"].clear()
    assert gpu.main(["--only=3B", f"--json={path}"]) == 0
    assert identified["asked"] == [("3B", arm) for arm in [*arms.GROUPS["3B"]][1:]]
    rows = json.loads(path.read_text())["rows"]
    assert [row["status"] for row in rows] == ["refused: x", "ok", "ok"]


def test_a_file_of_other_conditions_is_kept(identified, capsys):
    path = identified["path"]
    assert gpu.main(["--only=3B", f"--json={path}"]) == 0
    written = path.read_text()
    identified["conditions"]["torch"] = "3"
    assert gpu.main(["--only=3B", f"--json={path}"]) == 2
    assert "measured under other conditions (torch was 2, is 3)" in capsys.readouterr().err
    assert path.read_text() == written
    assert gpu.main(["--only=environment", "--afresh", f"--json={path}"]) == 0
    assert json.loads(path.read_text())["measured_under"]["torch"] == "3"
    path.write_text("mine")
    assert gpu.main([f"--json={path}"]) == 2 and path.read_text() == "mine"


@pytest.mark.parametrize(
    "status, path, said",
    [
        ("refused: torch can use none", "gpu.json", "torch can use none"),
        ("ok", "no/gpu.json", "no/gpu.json: cannot be written: No such file or directory"),
    ],
)
def test_it_ends_before_anything_is_measured(
    identified, tmp_path, monkeypatch, capsys, status, path, said
):
    monkeypatch.chdir(tmp_path)
    identified["conditions"]["status"] = status
    assert gpu.main([f"--json={path}"]) == 2
    assert capsys.readouterr().err == f"{said}\n" and not identified["asked"]


def test_code_is_known_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "REPO", tmp_path)
    (tmp_path / "room/inner").mkdir(parents=True)
    digests = set()
    for name in ("train.py", "room/__init__.py", "room/inner/a.py", "notes.md"):
        (tmp_path / name).write_text("1")
        digests.add(environment.digest_of_code())
    assert len(digests) == 3
    (tmp_path / "room/inner/a.py").write_text("2")
    assert environment.digest_of_code() not in digests


@pytest.mark.slow
def test_training_on_a_cpu(tmp_path, capsys, on_a_cpu):
    lines, content = run(tmp_path, capsys, "--seconds=400", "--only", "training", "tests")
    rows = {row["arm"]: row for row in content["rows"]}
    skipped = {**SKIPPED, "marked gpu": "skipped: needs a GPU"}
    for arm, row in rows.items():
        assert row["status"] == skipped.get(arm, "ok")
        assert sum(f": {arm}: " in line for line in lines) == 1
    assert [*rows] == [*training.TRAINING, *training.GPU_TESTS]
    for arm, steps in ("train, save", range(5, 9)), ("resume", range(9, 13)):
        assert [*rows[arm]["losses"]] == [str(step) for step in steps]
        assert rows[arm]["largest_difference"] < 1e-4  # the same computation
    assert rows["verify"]["output"][-1] == "3 good, 0 bad"
    assert not (tmp_path / "gpu.json.runs").exists()  # nothing is left to do


@pytest.mark.parametrize(
    "kind, value, said",
    [
        ("train", 6.0 + 2 * training.TOLERANCE, "step 8: train loss 6.0400, on the CPU 6.0000"),
        ("train", math.nan, "step 8: train loss nan"),
        ("eval", 6.1, "step 8: eval loss 6.1000"),
    ],
)
def test_losses_that_differ_fail(tmp_path, kind, value, said):
    runs = training.Runs(tmp_path, [], [])
    rows = {("train", step): 6.0 for step in range(5, 9)} | {("eval", 8): 6.0}
    for name, changed in (("cpu", {}), ("device", {(kind, 8): value})):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"kind": of, "step": step, "loss": loss})
            for (of, step), loss in (rows | changed).items()
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(training.FailedCheck, match=said):
        runs.compared("device", [5, 6, 7, 8])
    assert runs.compared("device", [5, 6, 7])["largest_difference"] == 0


def test_a_plan_stands_next_to_what_is_measured(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setattr(planned, "TIMEOUT", 300.0)
    path, overrides = str(REPO / "configs/llama1b.toml"), [*arms.COMMON, *arms.TINY]
    with planned.plan_in_background(path, overrides) as prediction:
        pass
    of_plan = plan(config.load(path, overrides), 1, Asked(device("H200"), gpus_per_node=1))
    row = {"peak_gib": 2 * of_plan["peak_gib"], "step_seconds": of_plan["step_seconds"] / 4}
    row |= prediction
    report.compare_with_plan(row)
    assert row["measured_over_planned"] == pytest.approx({"peak_gib": 2, "step_seconds": 0.25})
    with planned.plan_in_background(path, ["--model.n_heads=7"]) as refused:
        pass
    assert "n_heads" in refused["planned"]["status"]


def test_experiments_of_fsdp2_reach_the_model(monkeypatch):
    """From the command line to the work of each process, from there to each arm, and from there to FSDP2."""
    called = []
    for name in step.EXPERIMENTS.values():  # from torch 2.13 on
        note = lambda self, value, name=name: called.append((name, value))  # noqa: E731
        monkeypatch.setattr(FSDPModule, name, note, False)
    works = []
    monkeypatch.setattr(processes, "identify", lambda work: dict(ON_A_CPU))
    monkeypatch.setattr(processes, "run_group", lambda work, add: works.append(work))
    assert not gpu.main(
        ["--tiny", "--only=1B", "--reduce-scatter-buffers=2", "--separate-reduce-scatter-group"]
    )

    def measured(cfg, world, bare, settings):
        build(make_config(), world, settings)
        return {"loss": 0.0}

    monkeypatch.setattr(measure, "measure_by_size", measured)
    with cases.fake_process_group(1) as world:
        assert measure.attempt(arms.SHIPPED, works[0], world)["status"] == "ok"
    assert called == [*works[0].fsdp.items()] and dict(called).keys() == {
        *step.EXPERIMENTS.values()
    }


def test_a_step_from_two_sizes():
    """A micro-batch of 0.4 s and 0.1 s for the rest."""
    assert step_of(0.5, 1.3, 8) == pytest.approx(
        {"micro_batch_seconds": 0.4, "optimizer_seconds": 0.1, "step_seconds": 3.3}
    )
    noise = step_of(0.5, 0.4, 8)
    assert "noise" in noise["marked"] and "step_seconds" not in noise


def row(arm: str, speed: float, loss: float = 7.0, size: int = 2) -> dict:
    figures = {"loss": loss, "micro_batch_size": size, "tokens_per_second": speed}
    return {"model": "1B", "arm": arm, **figures}


@pytest.mark.parametrize(
    "other, mark",
    [
        (row("x", 110.0), None),
        (row("x", 110.0, loss=7.03), "void"),
        (row("x", 110.0, loss=float("nan")), "void"),
        (row("x", 110.0, loss=7.03, size=4), None),  # another batch
        (row(arms.AGAIN, 101.0), None),
        (row(arms.AGAIN, 98.0), "not steady"),
    ],
)
def test_speed_is_compared_with_the_last_one_as_shipped(other, mark):
    other = dict(other)
    of_3b = {**row("as shipped", 9.0), "model": "3B"}
    rows = [row("as shipped", 90.0), row("as shipped", 100.0), of_3b, other]
    report.compare(other, rows)
    assert other["vs_shipped"] == pytest.approx(other["tokens_per_second"] / 100)
    assert other.get("marked", "None").startswith(str(mark))


def test_kernels_are_told_apart_by_stream_and_the_longest_come_first():
    events = [
        Event("nvjet", "kernel", 7, 1000, 4000, 1),
        Event("aten::mm", "cpu_op", 1, 0, 9000, 1),
        Event("copy", "kernel", 7, 4000, 4500, 2),
        Event("nvjet", "kernel", 20, 2000, 3000, 3),
        Event("copy", "kernel", 7, 5000, 9000, 4),
    ]
    assert list(by_kernel(events).items()) == [
        ("copy, stream 7", (2, 4.5)),
        ("nvjet, stream 7", (1, 3.0)),
        ("nvjet, stream 20", (1, 1.0)),
    ]
