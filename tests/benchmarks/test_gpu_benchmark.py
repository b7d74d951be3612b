"""benchmarks/gpu.py at tiny sizes, and what it does where arms fail, hang or find no time."""

import json
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import config
from benchmarks import gpu, step
from benchmarks.kernels import CEILINGS, TIMINGS, milliseconds
from benchmarks.step import build, step_of
from tests import cases
from tests.conftest import REPO, make_config
from tests.warm import warm_python

pytestmark = pytest.mark.early


def run(folder, capsys, *arguments: str) -> tuple[list[str], dict]:
    """(lines printed, content of the JSON file)."""
    assert gpu.main(["--tiny", f"--json={folder / 'gpu.json'}", *arguments]) == 0
    return capsys.readouterr().out.splitlines(), json.loads((folder / "gpu.json").read_text())


def check(lines: list[str], report: dict, groups: list[str]) -> None:
    """All that is asked for was measured and printed."""
    rows = {(row["group"], row["arm"]): row for row in report["rows"]}
    assert [*rows] == [(group, arm) for group in groups for arm in gpu.GROUPS[group]]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows) - len(CEILINGS)
    assert lines[0] == report["what"] and "no figure of a GPU" in lines[0]
    tried = [
        config.load(str(gpu.CONFIGS / "llama1b.toml"), [*gpu.COMMON, *row["changes"]])
        for row in rows.values()
        if row["group"] == "options"
    ]
    assert {cfg.train.micro_batch_size for cfg in tried} == {1, 2, 4, 8}
    assert {cfg.parallel.recompute for cfg in tried} == {"none", "elementwise", "selective", "full"}
    assert {cfg.optim.state_dtype for cfg in tried} == {"float32", "bfloat16"}
    for option in ("reshard_after_forward", "sync_every_micro_batch", "compile"):
        assert {getattr(cfg.parallel, option) for cfg in tried} == {False, True}
    assert len({str(cfg) for cfg in tried}) == len(tried) - 1  # two are as shipped

    loss = {}  # by model and micro-batch
    for (_, arm), row in rows.items():
        if arm in CEILINGS:
            continue
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
    assert all(max(found) - min(found) < gpu.SAME_LOSS for found in loss.values())
    assert len({round(loss["llama1b", size][0], 2) for size in (1, 2, 4, 8)}) == 4  # other batches


@pytest.mark.slow
def test_all_of_it_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # of the others each starts one more process
    groups = ["ceilings", "1B", "adapters", "options", "more"]
    lines, report = run(tmp_path, capsys, "--seconds=400", "--only", *groups)
    check(lines, report, groups)
    rows = {row["arm"]: row for row in report["rows"]}
    assert report["what"] == "tiny sizes on a CPU: no figure of a GPU"
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
    assert (
        rows["update"]["parameters"] == 512 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 3 * 64
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_of_it_on_a_gpu(tmp_path, capsys):
    check(*run(tmp_path, capsys, "--seconds=550"), [*gpu.GROUPS])


@pytest.mark.slow
def test_no_time(tmp_path, capsys):
    _, report = run(tmp_path, capsys, "--seconds=0")
    assert {row["status"] for row in report["rows"]} == {"skipped: time"}
    assert len(report["rows"]) == sum(map(len, gpu.GROUPS.values()))
    # in a process that has begun
    done = subprocess.run(
        [
            warm_python(),
            "-m",
            "benchmarks.gpu",
            "--tiny",
            "--group=3B",
            "--first=1",
            "--deadline=1",
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"status": "skipped: time"}
    ] * 2


@pytest.mark.parametrize(
    "script, expected",
    [
        # the first arm crashes, the second frees no memory, the third is well
        (
            'case $3 in *0) kill -9 $$;; *) echo "{\\"status\\": \\"ok\\"}"; exit 3;; esac',
            ["failed: its process ended with -9", "ok", "ok"],
        ),
        (
            'echo "{\\"status\\": \\"ok\\"}"; exec sleep 60',
            ["ok", "cut off: time", "skipped: time"],
        ),
    ],
    ids=["crash", "hang"],
)
def test_processes(monkeypatch, tmp_path, script, expected):
    python = tmp_path / "python"  # called as: python -m benchmarks.gpu --group=1B --first=0 ...
    python.write_text(f"#!/bin/bash\nset -- $1 $3 $4\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    rows, began = [], time.time()
    gpu.run_group("1B", began + (1 if "sleep" in script else 60), True, rows.append, [])
    assert [row["status"] for row in rows] == expected
    assert [row["arm"] for row in rows] == [*gpu.GROUPS["1B"]] and rows[0]["model"] == "llama1b"
    assert time.time() - began < 20


def test_experiments_of_fsdp2_reach_the_model(monkeypatch, tmp_path):
    """From the command line to each process, from there to each arm, and from there to FSDP2."""
    python = tmp_path / "python"
    given = []
    called = []
    row = 'echo "{\\"status\\": \\"ok\\"}"\n'
    rows = row * len(gpu.GROUPS["1B"])
    python.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/words\n{rows}')
    python.chmod(0o755)
    for name in ("set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group"):
        # from torch 2.13 on
        monkeypatch.setattr(
            FSDPModule, name, lambda self, value, name=name: called.append((name, value)), False
        )
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        assert not gpu.main(
            ["--tiny", "--only=1B", "--reduce-scatter-buffers=2", "--separate-reduce-scatter-group"]
        )
    words = (tmp_path / "words").read_text().split()[2:]
    monkeypatch.setattr(gpu, "run_arms", lambda *of: given.append(of[-1]))
    assert gpu.main(words) == 0
    assert given == [
        {"set_reduce_scatter_max_input_buffers": 2, "set_separate_reduce_scatter_group": True}
    ]
    monkeypatch.setattr(
        gpu,
        "measure_by_size",
        lambda cfg, world, bare, settings: {"loss": build(make_config(), world, settings) and 0.0},
    )
    with cases.fake_process_group(1) as world:
        assert gpu.attempt("1B", gpu.SHIPPED, gpu.COMMON, world, 0.01, given[0])["status"] == "ok"
    assert called == [*given[0].items()]


@pytest.mark.parametrize(
    "main, first", [(gpu.main, "--tiny"), (step.main, str(gpu.CONFIGS / "tiny.toml"))]
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
        (row(gpu.AGAIN, 101.0), 1.01, None),
        (row(gpu.AGAIN, 98.0), 0.98, "not steady"),
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
    gpu.compare(other, rows)
    assert other.get("vs_shipped") == (speed and pytest.approx(speed))
    assert other.get("marked", "None").startswith(str(mark))


def test_timings():
    assert 5 <= milliseconds(lambda: time.sleep(0.01), 0.05) <= 100
    # fifteen of each model, two of three attentions in two sizes, copy, losses, norm and two updates
    assert TIMINGS == 3 * 15 + 2 * 2 * 3 + 1 + 4 + 3
