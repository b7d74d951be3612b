"""Rows, console, environment and log."""

import io
import json
import math
import pathlib
import resource
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import config
import metrics
import run.environment
from data.dataset import Dataset
from metrics import Recorder, Rows, console_line
from optim import Progress
from run.environment import environment
from tests.conftest import make_config, rows
from tests.distributed import distributed

CPU = torch.device("cpu")


def recorder_of(cfg: config.Config, folder: pathlib.Path, rank: int = 0, size: int = 1) -> Recorder:
    """Of a rank on a CPU. An epoch has 100 samples, a step one."""
    world: Any = SimpleNamespace(rank=rank, size=size, dp_size=size, cp=1, tp=1, device=CPU)
    dataset: Any = mock.Mock(Dataset, epochs=lambda samples, _: samples / 100)
    dataset.by_source.return_value = {}
    seconds: Any = Counter()
    return Recorder(cfg, world, folder, Progress(), dataset, seconds)


def log_step(recorder: Recorder, step: int, loss: float = 0, valid: int = 1, **stop: bool) -> None:
    """Counts a step with this sum of its tokens' losses, and a block's term of half of it."""
    batch = SimpleNamespace(digest=0, valid_tokens=valid)
    sums = {"loss": torch.tensor(float(loss)), "balance": torch.tensor(loss / 2)}
    scalars = {"grad_norm": torch.tensor(0.5), "lr": 0.1}
    recorder.log_step(Progress(step, samples=step, tokens=10 * step), batch, sums, scalars, **stop)


def figures_of(folder: pathlib.Path, *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in rows(folder)]


def write_steps(recorder: Rows, *steps: int, kind: str = "train") -> None:
    for step in steps:
        recorder.write({"kind": kind, "step": step})


# metrics.jsonl


@pytest.mark.quick
def test_resume_drops_later_rows_and_a_truncated_line(tmp_path):
    first = Rows(tmp_path, False, 0)
    for step in (1, 2, 3):
        write_steps(first, step)
        write_steps(first, step, kind="eval")
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4}')  # without its newline
    later = Rows(tmp_path, False, 4)
    later.close()
    assert not later.is_evaluated
    assert len(rows(tmp_path)) == len(rows(tmp_path, "eval")) == 3
    again = Rows(tmp_path, False, 2)
    assert again.is_evaluated
    write_steps(again, 3)
    again.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    kept = [(row["kind"], row["step"]) for row in map(json.loads, lines)]
    assert kept == [("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("train", 3)]


@pytest.mark.quick
def test_rows_of_a_power_cut_are_skipped(tmp_path):
    row = b'{"kind": "eval", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(row + b"\0\0\xff\n" + row.replace(b"1", b"3") + b"\0")
    Rows(tmp_path, False, 2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == row


@pytest.mark.quick
def test_numbers_keep_their_precision_and_non_finite_ones_are_null(tmp_path):
    recorder = Rows(tmp_path, False, 0)
    row = {"kind": "train", "step": 1, "loss": 0.1 + 0.2}
    recorder.write({**row, "norm": math.nan, "by_source": {"a": math.inf, "b": 1.5}})
    recorder.close()
    (written,) = rows(tmp_path)
    assert written == {**row, "norm": None, "by_source": {"a": None, "b": 1.5}}


def test_rows_that_cannot_be_written_wait(tmp_path):
    """A disk that is full, takes half a row, and has room again: by the limit of a file's size."""
    recorder = Rows(tmp_path, False, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        write_steps(recorder, 1)
        with pytest.raises(OSError):
            recorder.sync()  # and with it the checkpoint of these steps
        write_steps(recorder, *range(2, 1000))  # several times what Python buffers by default
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_steps(recorder, 1000)
    recorder.close()
    assert figures_of(tmp_path, "step") == [(step,) for step in range(1, 1001)]


def test_sync_from_another_thread_neither_doubles_nor_drops_rows(tmp_path):
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            time.sleep(0.01)
            return super().write(data)

    recorder = Rows(tmp_path, False, 0)
    recorder.file = io.BufferedWriter(Slow(tmp_path / "metrics.jsonl", "ab"))
    with ThreadPoolExecutor(1) as other:
        for step in range(1, 31):
            syncing = other.submit(recorder.sync)
            write_steps(recorder, step)
            syncing.result()
    assert figures_of(tmp_path, "step") == [(step,) for step in range(1, 31)]


def test_tensorboard_gets_finite_numbers_until_it_fails(tmp_path, monkeypatch):
    board = mock.Mock()
    board.add_scalar.side_effect = [None, None, RuntimeError("its folder is gone")]
    writer = mock.Mock(return_value=board)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", writer)
    recorder = Rows(tmp_path, True, 7)
    recorder.write({"kind": "train", "step": 8, "loss": 1.0, "gate": {"a": 2, "b": math.inf}})
    recorder.write({"kind": "train", "step": 9, "batch_digest": 3, "loss": 3.0})
    recorder.write({"kind": "train", "step": 10, "loss": 4.0})
    recorder.close()
    assert writer.call_args.kwargs == {"purge_step": 8}
    added = [call.args for call in board.add_scalar.call_args_list]
    assert added == [("train/loss", 1.0, 8), ("train/gate.a", 2, 8), ("train/loss", 3.0, 9)]
    assert len(rows(tmp_path)) == 3


# Figures of a row


@pytest.mark.quick
def test_times_leave_out_what_is_not_training(tmp_path, monkeypatch):
    """A step of 3 s, 1 of them waiting for data, then 10 s of evaluation or save."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 100.0)
    monkeypatch.setattr(metrics, "flops_per_token", lambda model, seq_len: 7)
    cfg = make_config(train={"steps": 4}, log={"every_steps": 3})
    recorder = recorder_of(cfg, tmp_path)
    for step in (1, 2, 3, 4):
        recorder.seconds["data"] += 1
        now[0] += 3
        log_step(recorder, step)
        recorder.seconds["evaluation" if step % 2 else "save"] += 10
        now[0] += 10
    times = figures_of(tmp_path, "step", "step_seconds", "data_seconds")
    assert times == [(1, 3, 1), (3, 3, 1), (4, 3, 1)]
    rate = 8 * 32 / 3
    speed = figures_of(tmp_path, "tokens_per_second_per_device", "mfu")
    assert speed == [(rate, pytest.approx(rate * 7 / 100))] * 3


@distributed(ranks=2)
def test_speed_is_that_of_the_slowest_rank(world, tmp_path, monkeypatch):
    """A step of 1 s on rank 0, of 3 s on rank 1."""
    now = iter([0, 1 + 2 * world.rank, 9])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    log_step(recorder_of(make_config(), tmp_path, world.rank, 2), 1)
    if world.rank == 0:
        assert figures_of(tmp_path, "tokens_per_second_per_device") == [(8 * 32 / 2 / 3,)]


@pytest.mark.quick
def test_loss_is_the_steps_and_its_mean_that_of_all_since_the_last_row(tmp_path):
    """A step without a target has none, whatever its sum holds, and leaves the mean alone. A stop ends a row."""
    losses = [(math.nan, 0), (6.0, 2), (10.0, 4), (8.0, 5), (7.0, 0)]
    recorder = recorder_of(make_config(train={"steps": 9}, log={"every_steps": 3}), tmp_path)
    for step, (total, count) in enumerate(losses, 1):
        log_step(recorder, step, total, count, stopping=step == 5)
    shown = figures_of(tmp_path, "step", "steps", "loss", "balance", "loss_mean", "epochs")
    third = (3, 2, 2.5, 1.25, 16 / 6, 0.03)
    assert shown == [(1, 1, None, None, None, 0.01), third, (5, 2, None, None, 1.6, 0.05)]


PEAKS = {"NVIDIA H100 PCIe": 756, "NVIDIA H100 80GB HBM3": 989, "NVIDIA GH200 480GB": 989}


@pytest.mark.quick
def test_peaks_are_those_of_the_data_sheets():
    """In TFLOP/s. Of a slice, or another chip whose name begins alike, none."""
    for name, peak in PEAKS.items():
        assert metrics.data_sheet_peak(name) == peak * 1e12, name
    for name in ("RTX 4090 D", "H100 80GB HBM3 MIG 3g.40gb", "Other GPU"):
        assert metrics.data_sheet_peak(name) is None, name


@pytest.mark.quick
def test_console_line_has_at_most_100_columns():
    row = {"step": 7, "loss_mean": 11.56789, "grad_norm": math.inf, "step_seconds": 2.0}
    row |= {"tokens_per_second_per_device": 12345.6, "peak_memory_gib": 141.23, "mfu": None}
    line = console_line(row, 1_799_999)
    assert line.endswith("  left 999h59m")
    assert "loss 11.5679  grad   inf  12,346 tokens/s/device  141.2 GiB" in line
    assert len(line) <= 100
    assert "loss    none" in console_line(row | {"loss_mean": None}, 3600)


# environment.json


def test_environment_has_what_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(run.environment, "REPO", tmp_path)
    (tmp_path / "file").write_bytes(b"before\n")
    for words in ("init -q", "add .", "-c user.name=me -c user.email=me@here commit -qm all"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "file").write_bytes(b"after \xff\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    launch = environment(["a"], CPU)
    assert "+after \N{REPLACEMENT CHARACTER}" in launch["uncommitted"].splitlines()
    assert len(launch["commit"]) == 40
