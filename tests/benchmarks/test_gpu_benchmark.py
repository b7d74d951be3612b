"""benchmarks.gpu at tiny sizes; what it does where arms fail, hang or find no time; that it continues."""

import contextlib
import io
import json
import math
import os
import subprocess
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
from benchmarks.kernels import TIMINGS, milliseconds
from benchmarks.step import build, step_of
from extras.profiler.profiler import Event
from tests import cases
from tests.conftest import REPO, make_config

pytestmark = pytest.mark.early

SKIPPED = {"two GPUs": "skipped: needs two GPUs"}
ON_A_CPU = {"status": "ok", "device": "cpu", "torch": "2"}


def run(folder, capsys, *arguments: str) -> tuple[list[str], dict]:
    """(lines printed, content of the JSON file)."""
    assert gpu.main(["--tiny", f"--json={folder / 'gpu.json'}", *arguments]) == 0
    return capsys.readouterr().out.splitlines(), json.loads((folder / "gpu.json").read_text())


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
    tried = [
        config.load(str(arms.CONFIGS / "llama1b.toml"), [*arms.COMMON, *row["changes"]])
        for row in rows.values()
        if row["group"] == "options"
    ]
    assert {cfg.train.micro_batch_size for cfg in tried} == {1, 2, 4, 8}
    assert {cfg.parallel.recompute for cfg in tried} == {"none", "elementwise", "selective", "full"}
    assert {cfg.optim.state_dtype for cfg in tried} == {"float32", "bfloat16"}
    for option in ("reshard_after_forward", "compile"):
        assert {getattr(cfg.parallel, option) for cfg in tried} == {False, True}
    assert len({str(cfg) for cfg in tried}) == len(tried) - 1  # two are as shipped

    loss = {}  # by model and micro-batch
    for row in trained:
        assert (
            row["seconds_of_one"]["p5"]
            <= row["seconds_of_one"]["median"]
            <= row["seconds_of_one"]["p95"]
        )
        assert row["first_step_seconds"] > 0 and row["peak_gib"] > 0
        loss.setdefault((row["model"], row["micro_batch_size"]), []).append(row["loss"])
        if "step_seconds" in row:  # else too noisy
            assert row["tokens_per_second"] == pytest.approx(16 * 32 / row["step_seconds"])
    # the same weights, trained on the same batch; torch's AdamW there decays norms too
    assert all(max(found) - min(found) < report.SAME_LOSS for found in loss.values())
    assert len({round(loss["llama1b", size][0], 2) for size in (1, 2, 4, 8)}) == 4  # other batches


@pytest.mark.slow
def test_all_of_it_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # of the others each starts one more process
    groups = ["environment", "ceilings", "1B", "faster", "adapters", "options"]
    lines, content = run(tmp_path, capsys, "--seconds=400", "--only", *groups)
    check(lines, content, groups)
    rows = {row["arm"]: row for row in content["rows"]}
    assert content["what"] == "tiny sizes on a CPU: no figure of a GPU"
    assert "flash_attention_for_cpu" in str(rows["machine"]["attention_operators"])
    # q and o, k and v, gate and up, down, head; the embedding is none
    products = rows["products of 8B"]["tflops"]
    assert {name.split(maxsplit=1)[1] for name in products} == {
        "64 x 64",
        "32 x 64",
        "128 x 64",
        "64 x 128",
        "512 x 64",
    }
    assert len(products) == 15 and all(value > 0 for value in products.values())
    # seven weights of a block, or four, three matmuls of each: 2 * 32 tokens a weight's element
    block = rows["block of 8B"]
    elements = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    for figures in (block["apart"], block["fused"]):
        flops = figures["tflops"] * 1e9 * figures["milliseconds"]
        assert flops == pytest.approx(3 * 2 * 32 * elements)
    assert len(rows["float8 products"]["tflops"]) == 3 * 2 * 2
    assert rows["trace"]["milliseconds"]["matrix products"] > 0
    assert (
        rows["update"]["parameters"] == 512 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 3 * 64
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_of_it_on_a_gpu(tmp_path, capsys):
    groups = [group for group in arms.GROUPS if group != "tests"]  # which would run this one
    lines, content = run(tmp_path, capsys, "--seconds=550", "--only", *groups)
    check(lines, content, groups)
    for row in content["rows"]:
        if arms.is_trained(row["group"], row["arm"]) and row["arm"] != arms.BARE:
            assert {"peak_gib", "reserved_gib"} <= row["measured_over_planned"].keys()


@pytest.mark.slow
def test_no_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", sys.executable)
    _, content = run(tmp_path, capsys, "--seconds=0")
    assert {row["status"] for row in content["rows"]} == {"skipped: time"}
    assert len(content["rows"]) == sum(map(len, arms.GROUPS.values()))
    # in a process that has begun
    begun = Work("3B", ["bare loop", "bare loop"], 1.0, 600.0, "runs", True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.measure", json.dumps(vars(begun))],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"status": "skipped: time"}
    ] * 2


@pytest.mark.parametrize("left, fit", [(50, ["once", "3B, once"]), (40, ["3B, once"]), (3, [])])
def test_arms_that_no_longer_fit_are_skipped_by_name(left, fit, monkeypatch):
    """Each has its own time: after one that is too long, a shorter one may fit."""
    monkeypatch.setattr(measure, "distributed", lambda cfg: contextlib.nullcontext(None))
    monkeypatch.setattr(measure, "attempt", lambda arm, work, world: {"status": "ok"})
    monkeypatch.setattr(measure.os, "_exit", lambda status: None)
    rows = io.StringIO()
    given = Work("faster", ["once", "3B, once"], time.time() + left, 560.0, "runs")
    measure.run_arms(given, rows)
    expected = {arm: "ok" if arm in fit else "skipped: time" for arm in given.arms}
    found = [json.loads(row)["status"] for row in rows.getvalue().splitlines()]
    assert found == [*expected.values()]


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


# A process of benchmarks.gpu that notes each arm. While the file `wait` exists, it answers the first and stays at the
# second until it is killed with its parent.
STANDS_IN = """#!{python} -IS
import json, os, sys, time
work = json.loads(sys.argv[3])
if work["group"] == "identity":
    print(json.dumps({identity}))
    sys.exit()
parent = os.getppid()
path = "{folder}/arms-" + os.environ["START"]
for arm in work["arms"]:
    with open(path, "a") as file:
        print(arm, file=file)
    while os.path.exists("{folder}/wait") and len(open(path).readlines()) > 1:
        time.sleep(0.02)
        if os.getppid() != parent:
            sys.exit()
    print(json.dumps({{"status": "ok"}}), flush=True)
sys.exit(3)
"""


def test_killed_after_any_arm_it_continues(tmp_path):
    python, path = tmp_path / "python", tmp_path / "gpu.json"
    python.write_text(STANDS_IN.format(python=sys.executable, identity=ON_A_CPU, folder=tmp_path))
    python.chmod(0o755)
    (tmp_path / "wait").touch()
    command = (
        f"import sys; sys.executable = {str(python)!r}; from benchmarks.gpu.__main__ import main; "
        f"sys.exit(main(['--json={path}', '--seconds=3600', '--only', 'environment', '3B']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    names = [*arms.GROUPS["environment"], *arms.GROUPS["3B"]]
    for number in range(1, len(names) + 1):
        environment["START"] = str(number)
        with subprocess.Popen([sys.executable, "-c", command], env=environment) as process:
            deadline = time.monotonic() + 60
            while len(json.loads(path.read_text())["rows"] if path.exists() else []) < number:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            process.kill()
        rows = json.loads(path.read_text())["rows"]
        assert [row["arm"] for row in rows] == names[:number]
        # the next may have begun before the kill
        begun = (tmp_path / f"arms-{number}").read_text().splitlines()
        assert begun in (names[number - 1 : number], names[number - 1 : number + 1])
    (tmp_path / "wait").unlink()
    environment["START"] = "last"
    assert subprocess.run([sys.executable, "-c", command], env=environment).returncode == 0
    assert not (tmp_path / "arms-last").exists()  # all had a result


@pytest.fixture
def identified(monkeypatch) -> dict:
    """What the device is found to be; no arm is measured, but all that were asked for are "ok"."""
    found = dict(ON_A_CPU)
    found["asked"] = []

    def run_group(work, add):
        for arm in work.arms:
            found["asked"].append((work.group, arm))
            add({"group": work.group, "model": "", "arm": arm, "status": "ok"})

    conditions = {name: value for name, value in found.items() if name != "asked"}
    found["conditions"] = conditions
    monkeypatch.setattr(processes, "identify", lambda work: dict(conditions))
    monkeypatch.setattr(processes, "run_group", run_group)
    return found


def test_what_failed_or_was_skipped_is_measured_again(identified, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--only=3B", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    statuses = ("refused: x", "failed: y", "skipped: time")
    for row, status in zip(content["rows"], statuses):
        row["status"] = status
    path.write_text(json.dumps(content))
    identified["asked"].clear()
    assert gpu.main(["--only=3B", f"--json={path}"]) == 0
    assert identified["asked"] == [("3B", arm) for arm in [*arms.GROUPS["3B"]][1:]]
    rows = json.loads(path.read_text())["rows"]
    assert [row["status"] for row in rows] == ["refused: x", "ok", "ok"]
    assert f"{path}: continues; 1 arms have a result" in capsys.readouterr().err


def test_a_file_of_other_conditions_is_kept(identified, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--only=3B", f"--json={path}"]) == 0
    written = path.read_text()
    identified["conditions"]["torch"] = "3"
    assert gpu.main(["--only=3B", f"--json={path}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"{path}: measured under other conditions (torch was 2, is 3); name another --json, or pass "
        "--afresh to replace it"
    )
    assert path.read_text() == written
    assert gpu.main(["--only=environment", "--afresh", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    assert {row["group"] for row in content["rows"]} == {"environment"}
    assert content["measured_under"]["torch"] == "3"
    path.write_text("mine")
    assert gpu.main([f"--json={path}"]) == 2 and path.read_text() == "mine"
    assert "was not written by benchmarks.gpu" in capsys.readouterr().err


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
def test_training_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
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
        ("eval", None, "step 8: no row of kind eval"),
    ],
)
def test_losses_that_differ_fail(tmp_path, kind, value, said):
    runs = training.Runs(tmp_path, [], [])
    for name in ("cpu", "device"):
        rows = {("train", step): 6.0 for step in range(5, 9)} | {("eval", 8): 6.0}
        if name == "device":
            rows[kind, 8] = value
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"kind": of, "step": step, "loss": loss})
            for (of, step), loss in rows.items()
            if loss is not None
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(training.FailedCheck, match=said):
        runs.compared("device", [5, 6, 7, 8])
    assert runs.compared("device", [5, 6, 7])["largest_difference"] == 0


def test_a_command_that_fails_is_named(tmp_path):
    runs = training.Runs(tmp_path, [], ["--run.device=cpu"])
    with pytest.raises(training.FailedCheck, match=r"exit code 2: .*no_such.*see .*x-3.log"):
        runs.train("x", 3, ["--train.no_such=1"])


def test_a_plan_stands_next_to_what_is_measured(monkeypatch):
    from tools.planner.devices import device
    from tools.planner.plan import Asked, plan

    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setattr(planned, "TIMEOUT", 300.0)
    path, overrides = str(REPO / "configs/llama1b.toml"), [*arms.COMMON, *arms.TINY]
    with planned.plan_in_background(path, overrides) as found:
        pass
    of_plan = plan(config.load(path, overrides), 1, Asked(device("H200"), gpus_per_node=1))
    row = {"peak_gib": 2 * of_plan["peak_gib"], "step_seconds": of_plan["step_seconds"] / 4}
    row |= found | {"reserved_gib": None}
    report.compare_with_plan(row)
    assert row["measured_over_planned"] == pytest.approx({"peak_gib": 2, "step_seconds": 0.25})
    row |= {"group": "1B", "model": "llama1b", "arm": "as shipped", "status": "ok"}
    assert report.text([row]).splitlines()[-1].endswith(" 0.250 |  |")
    with planned.plan_in_background(path, ["--model.n_heads=7"]) as refused:
        pass
    assert "n_heads" in refused["planned"]["status"]


def test_experiments_of_fsdp2_reach_the_model(monkeypatch, tmp_path):
    """From the command line to each process, from there to each arm, and from there to FSDP2."""
    python = tmp_path / "python"
    called = []
    row = 'echo "{\\"status\\": \\"ok\\"}"\n'
    rows = row * len(arms.GROUPS["1B"])
    python.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/words\n{rows}')
    python.chmod(0o755)
    for name in ("set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group"):
        # from torch 2.13 on
        monkeypatch.setattr(
            FSDPModule, name, lambda self, value, name=name: called.append((name, value)), False
        )
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        patch.setattr(processes, "identify", lambda work: dict(ON_A_CPU))
        assert not gpu.main(
            ["--tiny", "--only=1B", "--reduce-scatter-buffers=2", "--separate-reduce-scatter-group"]
        )
    words = json.loads((tmp_path / "words").read_text().split(maxsplit=2)[2])
    assert words["fsdp"] == {
        "set_reduce_scatter_max_input_buffers": 2,
        "set_separate_reduce_scatter_group": True,
    }
    monkeypatch.setattr(
        measure,
        "measure_by_size",
        lambda cfg, world, bare, settings: {"loss": build(make_config(), world, settings) and 0.0},
    )
    with cases.fake_process_group(1) as world:
        assert measure.attempt(arms.SHIPPED, Work(**words), world)["status"] == "ok"
    assert called == [*words["fsdp"].items()]


@pytest.mark.parametrize(
    "main, first", [(gpu.main, "--tiny"), (step.main, str(arms.CONFIGS / "tiny.toml"))]
)
def test_experiments_that_this_torch_lacks_are_refused_by_name(main, first, monkeypatch, capsys):
    for method in step.EXPERIMENTS.values():
        monkeypatch.delattr(FSDPModule, method, raising=False)
    assert main([first, "--reduce-scatter-buffers=2", "--separate-reduce-scatter-group"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        "--reduce-scatter-buffers: torch 2." in lines[0]
        and "set_reduce_scatter_max_input_buffers()" in lines[0]
    )
    assert (
        "--separate-reduce-scatter-group: torch" in lines[1]
        and "set_separate_reduce_scatter_group()" in lines[1]
    )


def test_a_step_from_two_sizes():
    """A micro-batch of 0.4 s and 0.1 s for the rest."""
    found = step_of(0.5, 1.3, 8)
    assert found == pytest.approx(
        {"micro_batch_seconds": 0.4, "optimizer_seconds": 0.1, "step_seconds": 3.3}
    )
    noise = step_of(0.5, 0.4, 8)
    assert "noise" in noise["marked"] and "step_seconds" not in noise


def row(arm: str, speed: float | None, loss: float = 7.0, size: int = 2) -> dict:
    return {
        "model": "1B",
        "arm": arm,
        "loss": loss,
        "micro_batch_size": size,
        **({} if speed is None else {"tokens_per_second": speed}),
    }


@pytest.mark.parametrize(
    "other, speed, mark",
    [
        (row("x", 110.0), 1.1, None),
        (row("x", 110.0, loss=7.03), 1.1, "void"),
        (row("x", 110.0, loss=float("nan")), 1.1, "void"),
        (row("x", 110.0, loss=7.03, size=4), 1.1, None),  # another batch
        (row("x", None), None, None),
        (row(arms.AGAIN, 101.0), 1.01, None),
        (row(arms.AGAIN, 98.0), 0.98, "not steady"),
    ],
)
def test_compared_with_as_shipped(other, speed, mark):
    other = dict(other)
    rows = [
        {"model": "", "arm": "loss"},
        row("as shipped", 90.0),
        {**row("as shipped", 9.0), "model": "3B"},
        row("as shipped", 100.0),
        row("as shipped", None),
        other,
    ]
    report.compare(other, rows)
    assert other.get("vs_shipped") == (speed and pytest.approx(speed))
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


def test_timings():
    assert 10 <= milliseconds(lambda: time.sleep(0.01), 0.05) < 10_000  # no microseconds
    # fifteen of each model, two of three attentions in two sizes, copy, losses, norm and two updates
    assert TIMINGS == 3 * 15 + 2 * 2 * 3 + 1 + 4 + 3
