"""Rows, logs and figures."""

import contextlib
import io
import json
import math
import os
import pty
import re
import resource
import subprocess
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import config
import metrics
from metrics import Recorder, Rows, console_line, read_rows
from tests.conftest import REPO, launch, make_config, needs_extra, rows
from tests.warm import warm_python


def test_rows_after_the_start_are_dropped_and_none_stands_twice(tmp_path):
    first = Rows(tmp_path, config.Log(tensorboard=False), 0)
    for step in (1, 2, 3):
        first.write({"kind": "train", "step": step, "loss": 1.0 / step})
    first.write({"kind": "eval", "step": 3, "loss": 0.1})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')  # a kill in the middle of a line
    again = Rows(tmp_path, config.Log(tensorboard=False), 2)
    again.write({"kind": "train", "step": 3, "loss": 0.5})
    again.close()
    assert [(r["kind"], r["step"], r["loss"]) for r in read_rows(tmp_path / "metrics.jsonl")] == [
        ("train", 1, 1.0),
        ("train", 2, 0.5),
        ("train", 3, 0.5),
    ]


def test_non_finite_numbers_are_null(tmp_path):
    recorder = Rows(tmp_path, config.Log(tensorboard=False), 0)
    recorder.write(
        {"kind": "train", "step": 1, "loss": math.nan, "by_source": {"a": math.inf, "b": 1.5}}
    )
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "kind": "train",
        "step": 1,
        "loss": None,
        "by_source": {"a": None, "b": 1.5},
    }


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    row = b'{"kind": "eval", "step": 1}'
    (tmp_path / "metrics.jsonl").write_bytes(
        b"\n".join([row, b"\xff\xfe", b"5", b'{"kind": "eval"}', b"[]", b""])
    )
    Rows(tmp_path, config.Log(tensorboard=False), 5).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == row + b"\n"


def test_numbers_keep_their_precision(tmp_path):
    recorder = Rows(tmp_path, config.Log(tensorboard=False), 0)
    recorder.write({"kind": "train", "step": 1, "loss": 0.1 + 0.2})
    recorder.close()
    assert read_rows(tmp_path / "metrics.jsonl")[0]["loss"] == 0.1 + 0.2


def test_times_leave_out_what_is_not_training(tmp_path, monkeypatch):
    """The clock is the test's: a step of 3 s, 1 of them waiting for data, and 10 s of evaluation that do not count. The
    other of two ranks takes twice as long, and counts for the speed."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        metrics,
        "all_gather_objects",
        lambda ours: [ours, {**ours, "step_seconds": 2 * ours["step_seconds"]}],
    )
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 100.0)
    cfg = make_config(train={"steps": 4}, log={"every_steps": 3})
    world = SimpleNamespace(rank=0, size=2, cp=1, tp=1, device=torch.device("cpu"))
    seconds = Counter()
    recorder = Recorder(cfg, world, tmp_path, 0, 7, seconds)
    for step in (1, 2, 3, 4):
        seconds["data"] += 1
        now[0] += 3
        recorder.log_step(
            step,
            0,
            SimpleNamespace(digest=0, valid_tokens=1, epochs=0.5),
            {"loss": torch.zeros(())},
            {"grad_norm": torch.zeros(()), "lr": 0.0},
        )
        seconds["evaluation" if step % 2 else "save"] += 10
        now[0] += 10
    recorder.close()
    assert [(row["step"], row["step_seconds"], row["data_seconds"]) for row in rows(tmp_path)] == [
        (1, 3, 1),
        (3, 3, 1),
        (4, 3, 1),
    ]
    rate = config.tokens_per_step(cfg) / 2 / 6
    for row in rows(tmp_path):
        assert row["tokens_per_second_per_device"] == rate and row["mfu"] == pytest.approx(
            rate * 7 / 100
        )
        assert row["slowest_rank"]["step_seconds"] == 6


# Of NVIDIA's and AMD's data sheets: dense bfloat16, TFLOP/s
SHEETS = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165,
    "AMD Instinct MI300X": 1307,
}


@pytest.mark.parametrize(
    "cp, tp, sums, digests",
    [
        (
            1,
            2,
            [30, 30, 50, 50],
            [3, 3, 4, 4],
        ),  # the ranks of a tp group have the same tokens and the same sums
        (
            2,
            1,
            [10, 20, 15, 35],
            [3, 3, 4, 4],
        ),  # those of a cp group the same samples, each a part of the sequence
        (2, 2, [30, 30, 50, 50], [7, 7, 7, 7]),
    ],
    ids=["tp", "cp", "tp and cp"],
)
@pytest.mark.parametrize("name", SHEETS)
def test_figures_of_gpus(tmp_path, monkeypatch, name, cp, tp, sums, digests):
    """Four ranks, each slower and fuller than the one before; 512 tokens, of which 40 have a target."""
    memory, now = 17 * 2**30, [0.0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        metrics,
        "all_gather_objects",
        lambda ours: [
            {
                "sums": {"loss": float(of_rank)},
                "loss": float(of_rank),
                "digest": digest,
                **{
                    key: ours[key] * (rank + 1)
                    for key in ("step_seconds", "data_seconds", "peak_memory_gib")
                },
            }
            for rank, (of_rank, digest) in enumerate(zip(sums, digests))
        ],
    )
    cfg = make_config(train={"global_batch_size": 16, "seq_len": 32, "micro_batch_size": None})
    device = torch.device("cuda", 0)
    recorder = Recorder(
        cfg,
        SimpleNamespace(rank=0, size=4, cp=cp, tp=tp, device=device),
        tmp_path,
        0,
        6_000_000_000,
        Counter(),
    )
    now[0] += 0.5
    recorder.log_step(
        1,
        512,
        SimpleNamespace(digest=digests[0], valid_tokens=40, epochs=0.5),
        {"loss": torch.tensor(sums[0])},
        {"grad_norm": torch.tensor(0.5), "lr": 0.1},
    )
    recorder.close()
    (row,) = rows(tmp_path)
    assert (
        row["loss"] == row["loss_mean"] == 2
        and row["batch_digest"] == 7
        and row["peak_memory_gib"] == 17
    )
    assert row["slowest_rank"] == {"step_seconds": 2, "data_seconds": 0, "peak_memory_gib": 68}
    # the slowest rank's 2 s for 512 tokens are 256 a second on four GPUs, at 6 GFLOP each
    assert row["tokens_per_second_per_device"] == 64
    assert row["mfu"] == pytest.approx(64 * 6e9 / (SHEETS[name] * 1e12), rel=1e-3)
    assert metrics.environment(["a"], device)["gpu"] == name


ROW = {
    "step": 7,
    "loss": 9.9,
    "loss_mean": 11.56789,
    "grad_norm": 1.2,
    "lr": 3e-4,
    "mfu": None,
    "tokens_per_second_per_device": 12345.6,
    "peak_memory_gib": 141.23,
    "step_seconds": 2.0,
}


@pytest.mark.parametrize(
    "changes, loss",
    [
        ({}, "loss 11.5679"),
        ({"mfu": 0.4321}, "loss 11.5679"),
        ({"loss_mean": math.nan, "grad_norm": math.inf}, "loss     nan"),
        ({"loss_mean": None}, "loss    none"),
    ],
)
def test_console_line(changes, loss):
    line = console_line({**ROW, **changes}, 3600)
    assert "step    7/3600" in line and "left 1h59m" in line
    assert ("12,346 tok/s/GPU  mfu 43.2%" if "mfu" in changes else "12,346 tokens/s/device") in line
    assert ("mfu" in line) == ("mfu" in changes)
    assert loss in line
    assert console_line({**ROW, **changes}, 10).endswith("left 0m06s")
    # a run without an end
    assert "left 51240955760304" in console_line({**ROW, **changes}, 2**63 - 1)


@pytest.mark.parametrize("mfu", [None, 0.4321])
def test_a_line_of_the_console_has_at_most_100_columns(mfu):
    assert len(console_line({**ROW, "grad_norm": 12.34, "mfu": mfu}, 1_799_999)) <= 100


def test_the_loss_of_a_row_is_its_steps_and_its_mean_that_of_all_steps_since_the_last_row(
    tmp_path, monkeypatch
):
    """Of steps with different numbers of tokens, on two ranks that have different parts of them."""
    losses, tokens = [[3.0, 5.0], [2.0, 4.0], [10.0, 20.0], [7.0, 1.0]], [4, 2, 10, 5]
    cfg = make_config(train={"steps": 4}, log={"every_steps": 3})
    recorders = [
        Recorder(
            cfg,
            SimpleNamespace(rank=rank, size=2, cp=1, tp=1, device=torch.device("cpu")),
            tmp_path,
            0,
            1,
            Counter(),
        )
        for rank in (0, 1)
    ]
    ours = []
    for rank in (1, 0):  # rank 0's row needs rank 1's figures
        monkeypatch.setattr(
            metrics,
            "all_gather_objects",
            lambda found, rank=rank: (
                ours.append(found) or [found] * 2 if rank else [found, ours.pop(0)]
            ),
        )
        for step in (1, 2, 3, 4):
            recorders[rank].log_step(
                step,
                0,
                SimpleNamespace(digest=0, valid_tokens=tokens[step - 1], epochs=0.5),
                {"loss": torch.tensor(losses[step - 1][rank])},
                {"grad_norm": 1.0, "lr": 0.1},
            )
    recorders[0].close()
    assert [(row["step"], row["loss"], row["loss_mean"]) for row in rows(tmp_path)] == [
        (1, 2.0, 2.0),
        (3, 3.0, 36 / 12),
        (4, 1.6, 1.6),
    ]


def test_a_step_without_a_target_has_no_loss_and_leaves_the_mean_alone(tmp_path):
    """Whatever its sum holds, such as a block's terms."""
    sums, tokens = [math.nan, 6.0, 5.0, 8.0, 7.0], [0, 2, 0, 5, 0]
    cfg = make_config(train={"steps": 5}, log={"every_steps": 3})
    world = SimpleNamespace(rank=0, size=1, cp=1, tp=1, device=torch.device("cpu"))
    recorder = Recorder(cfg, world, tmp_path, 0, 1, Counter())
    for step, (total, count) in enumerate(zip(sums, tokens), 1):
        recorder.log_step(
            step,
            0,
            SimpleNamespace(digest=0, valid_tokens=count, epochs=0.5),
            {"loss": torch.tensor(total)},
            {"grad_norm": 0.0, "lr": 0.1},
        )
    recorder.close()
    assert [(row["step"], row["loss"], row["loss_mean"]) for row in rows(tmp_path)] == [
        (1, None, None),
        (3, None, 3.0),
        (5, None, 1.6),
    ]


@pytest.mark.parametrize("no_color", [None, "1"])
def test_the_loss_is_colored_on_a_terminal_alone(write_config, tmp_path, no_color):
    terminal, child_end = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | (
        {"NO_COLOR": no_color} if no_color else {}
    )
    path = write_config("seen", train={"steps": 2})
    with subprocess.Popen(
        [warm_python(), "train.py", path], cwd=REPO, env=env, stdout=child_end, stdin=child_end
    ):
        os.close(child_end)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while read := os.read(terminal, 2**16):
                shown += read
    os.close(terminal)
    colored = re.findall(rb"step 2/2  loss +\x1b\[1;36m[0-9.]+\x1b\[0m  grad", shown)
    assert len(colored) == (not no_color) and shown.count(b"step 2/2  loss ") == 1
    logged = (tmp_path / "outputs/seen/logs/rank-0.log").read_text()
    assert "step 2/2  loss " in logged and "\x1b" not in logged


def test_the_environment_names_each_host_of_the_launch_once():
    found = metrics.environment(["b", "a", "b", "a"], torch.device("cpu"))
    assert found["hosts"] == ["a", "b"] and found["ranks"] == 4


def test_the_environment_has_what_is_not_committed(tmp_path, monkeypatch):
    """Staged or not."""
    monkeypatch.setattr(metrics, "__file__", str(tmp_path / "metrics.py"))
    files = [tmp_path / "staged", tmp_path / "changed"]

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=me", "-c", "user.email=me@here", *words],
            cwd=tmp_path,
            check=True,
        )

    git("init", "-q")
    for text in ("before", "after"):
        for path in files:
            path.write_bytes(f"{path.name} {text}\n".encode() + b"\xff\n")
        git("add", "staged")
        if text == "before":
            git("add", "changed")
            git("commit", "-qm", "all")
    found = metrics.environment(["a"], torch.device("cpu"))
    assert len(found["commit"]) == 40 and {"+staged after", "+changed after"} < {
        *found["uncommitted"].splitlines()
    }


def test_unknown_devices_have_no_peak(monkeypatch):
    assert metrics.peak_flops(torch.device("cpu")) is None
    for name, peak in [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GeForce RTX 5090", 209e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("Some Other GPU", None),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, n=name: n)
        assert metrics.peak_flops(torch.device("cuda", 0)) == peak


@needs_extra("reports")
def test_rows_at_the_steps_named_logs_of_every_rank_and_a_profile(write_config, tmp_path):
    path = write_config(
        "told",
        train={"steps": 7},
        log={"every_steps": 3, "tensorboard": True},
        profile={"at_step": 2, "steps": 2},
        eval={"every_steps": 5, "batches": 1},
    )
    done = launch(path, nproc=2)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs/told"
    assert [row["step"] for row in rows(folder)] == [1, 3, 6, 7]
    assert [row["step"] for row in rows(folder, "eval")] == [5, 7]
    assert list((folder / "tensorboard").iterdir())
    logged = (folder / "logs/rank-0.log").read_text()
    assert len(re.findall(r"^20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d+ step +\d/7 ", logged, re.M)) == 4
    assert (
        "parameters on 2 x cpu (1 replicas x 2 shards), " in done.stdout
        and (folder / "logs/rank-1.log").exists()
    )
    for rank in (0, 1):
        events = json.loads((folder / f"profile/rank-{rank}.json").read_text())["traceEvents"]
        assert any("all_gather" in event.get("name", "") for event in events)
        text = (folder / f"profile/rank-{rank}.txt").read_text()
        assert (text in done.stdout) == (rank == 0) and text in (
            folder / f"logs/rank-{rank}.log"
        ).read_text()
        ms = {
            name.strip(): float(value)
            for name, value in re.findall(r"^(.+?) +([0-9.]+) ms", text, re.M)
        }
        step, hidden = ms.pop("step"), ms.pop("communication, hidden")
        assert [*ms] == [
            "matrix products",
            "attention",
            "loss",
            "optimizer",
            "elementwise, copies",
            "communication, exposed",
            "idle",
        ]
        assert min(ms.values()) > 0 and 0 <= hidden < step
        assert sum(ms.values()) == pytest.approx(step, abs=0.01)  # of rounding
        length = {
            name: sum(e["dur"] for e in events if e.get("name") == name) / 2000
            for name in (
                "traced steps",
                "aten::linear",
                "MmBackward0",
                "Optimizer.step#ShardedAdamW.step",
            )
        }
        assert step == pytest.approx(length["traced steps"], abs=0.001)
        assert ms["optimizer"] >= length["Optimizer.step#ShardedAdamW.step"] - 0.001
        assert (
            length["aten::linear"]
            < ms["matrix products"]
            < length["aten::linear"] + length["MmBackward0"]
        )
    assert done.stdout.count("step 7/7") == 1


def test_rows_that_cannot_be_written_wait(tmp_path, caplog, monkeypatch):
    """A disk that is full, takes half a row, and has room again: by the limit of a file's size, which writes half."""
    monkeypatch.setattr(metrics.log, "propagate", True)
    recorder = Rows(tmp_path, config.Log(tensorboard=False), 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave_room(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        leave_room(0)
        recorder.write({"kind": "train", "step": 1})
        leave_room(10)
        recorder.write({"kind": "train", "step": 2})
        assert (
            "File too large" in caplog.text
            and (tmp_path / "metrics.jsonl").read_bytes() == b'{"kind": "'
        )
        with pytest.raises(OSError):
            recorder.sync()  # and with it the checkpoint of these steps
        for step in range(3, 1000):  # several times what Python buffers unless told otherwise
            recorder.write({"kind": "train", "step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    recorder.write({"kind": "train", "step": 1000})
    recorder.sync()
    recorder.close()
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 1001)]


def test_tensorboard_keeps_the_step_that_is_resumed_from(tmp_path, monkeypatch):
    purged = []
    monkeypatch.setattr(
        "torch.utils.tensorboard.SummaryWriter",
        lambda folder, purge_step: purged.append(purge_step),
    )
    Rows(tmp_path, config.Log(tensorboard=True), 7).close()
    assert purged == [8]  # it drops that step's rows and later ones'


def test_tensorboard_may_fail(tmp_path):
    class Broken:
        def add_scalar(self, *_: object) -> None:
            raise RuntimeError("its folder is gone")

    recorder = Rows(tmp_path, config.Log(tensorboard=True), 0)
    from metrics import Board

    assert type(recorder.board) is Board
    recorder.board.writer = Broken()
    recorder.write({"kind": "train", "step": 1, "loss": 1.0})
    recorder.write({"kind": "train", "step": 2, "loss": 1.0})
    recorder.close()
    assert recorder.board.writer is None and len(rows(tmp_path)) == 2


def test_what_a_step_returns_is_in_the_row_and_in_tensorboard(tmp_path, monkeypatch):
    """Sums as means over the step's tokens, of all ranks; scalars as they are; what is nested under both names."""
    monkeypatch.setattr(metrics, "all_gather_objects", lambda value: [value, value])
    world = SimpleNamespace(rank=0, size=2, cp=1, tp=1, device=torch.device("cpu"))
    from metrics import Board

    recorder, added = Recorder(make_config(), world, tmp_path, 0, 1, Counter()), {}
    recorder.rows.board = Board(tmp_path / "tensorboard", 0)
    monkeypatch.setattr(
        recorder.rows.board.writer,
        "add_scalar",
        lambda name, value, step: added.update({name: value}),
    )
    recorder.log_step(
        1,
        0,
        SimpleNamespace(digest=0, valid_tokens=10, epochs=0.5),
        {"loss": torch.tensor(30.0), "z_loss": torch.tensor(5.0)},
        {"grad_norm": torch.tensor(0.5), "lr": 0.1, "gate": {"blocks.0": torch.tensor(2.0)}},
    )
    recorder.log_evaluation(
        1, {"loss": 2.0, "bits_per_byte": 1.0, "loss_by_source": {"a.jsonl": 3.0}}
    )
    recorder.close()
    row = rows(tmp_path)[0]
    assert (row["loss"], row["z_loss"], row["grad_norm"], row["lr"]) == (6, 1, 0.5, 0.1)
    assert row["gate"] == {"blocks.0": 2} and added["train/gate.blocks.0"] == 2
    assert added["train/z_loss"] == 1 and added["eval/loss_by_source.a.jsonl"] == 3
    assert "train/slowest_rank.step_seconds" in added and "train/batch_digest" not in added


def test_a_sync_from_another_thread_neither_doubles_nor_drops_rows(tmp_path):
    recorder = Rows(tmp_path, config.Log(tensorboard=False), 0)

    class Slow(io.FileIO):
        def write(self, data: memoryview) -> int:
            time.sleep(0.01)
            return super().write(data)

    recorder.file.close()
    recorder.file, over = (
        io.BufferedWriter(Slow(tmp_path / "metrics.jsonl", "ab")),
        threading.Event(),
    )

    def sync() -> None:
        while not over.is_set():
            recorder.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    for step in range(1, 31):
        recorder.write({"kind": "train", "step": step})
    over.set()
    thread.join()
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 31))
