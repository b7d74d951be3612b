"""Rows, logs and figures."""

import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import math
import os
import pathlib
import pty
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import config
import metrics
from metrics import Board, Recorder, Rows, console_line, read_rows
from model.build import meta_model
from tests.conftest import REPO, launch, make_config, needs_extra, rows

pytestmark = pytest.mark.quick


def recorder_of(
    cfg: config.Config, folder: pathlib.Path, start: int = 0, seconds=None, **world: object
) -> Recorder:
    """A recorder of a rank, by default the only one, on a CPU."""
    alone = {"rank": 0, "size": 1, "dp_replicate": 1, "dp_shard": 1, "dp_size": 1, "cp": 1, "tp": 1}
    ours = SimpleNamespace(**{**alone, "device": torch.device("cpu"), **world})
    model = meta_model(cfg.model)
    return Recorder(cfg, ours, folder, start, model, Counter() if seconds is None else seconds)


def log_step(
    recorder: Recorder, step: int, loss: float = 0.0, valid_tokens: int = 1, **sums: torch.Tensor
) -> None:
    """Counts a step with this sum of its tokens' losses on this rank."""
    batch = SimpleNamespace(digest=0, valid_tokens=valid_tokens, epochs=step / 7)
    sums = {"loss": torch.tensor(loss), **sums}
    recorder.log_step(step, 0, batch, sums, {"grad_norm": torch.tensor(0.5), "lr": 0.1})


def log_start(recorder: Recorder, epochs: object = None, *notes: str) -> None:
    dataset = SimpleNamespace(epochs=lambda step: epochs, notes=lambda: [*notes])
    recorder.log_start(meta_model(recorder.cfg.model), "a table", dataset, ["a warning"])


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
    monkeypatch.setattr(metrics, "flops_per_token", lambda model, seq_len: 7)
    cfg = make_config(train={"steps": 4}, log={"every_steps": 3})
    seconds = Counter()
    recorder = recorder_of(cfg, tmp_path, seconds=seconds, size=2)
    for step in (1, 2, 3, 4):
        seconds["data"] += 1
        now[0] += 3
        log_step(recorder, step)
        seconds["evaluation" if step % 2 else "save"] += 10
        now[0] += 10
    recorder.close()
    assert [(row["step"], row["step_seconds"], row["data_seconds"]) for row in rows(tmp_path)] == [
        (1, 3, 1),
        (3, 3, 1),
        (4, 3, 1),
    ]
    rate = config.tokens_per_step(cfg.train) / 2 / 6
    for row in rows(tmp_path):
        assert row["tokens_per_second_per_device"] == rate and row["mfu"] == pytest.approx(
            rate * 7 / 100
        )
        assert row["slowest_rank"]["step_seconds"] == 6


@pytest.mark.parametrize(
    "cp, tp, sums, digests",
    [
        (
            1,
            2,
            [30, 30, 50, 50],
            [2**52 + 3, 2**52 + 3, 2**52 + 4, 2**52 + 4],
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
def test_figures_of_gpus(tmp_path, monkeypatch, cp, tp, sums, digests):
    """Four ranks, each slower and fuller than the one before; 512 tokens, of which 40 have a target."""
    memory, now = 17 * 2**30, [0.0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
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
    monkeypatch.setattr(metrics, "flops_per_token", lambda model, seq_len: 6_000_000_000)
    cfg = make_config(train={"global_batch_size": 16, "seq_len": 32, "micro_batch_size": None})
    device = torch.device("cuda", 0)
    recorder = recorder_of(cfg, tmp_path, size=4, cp=cp, tp=tp, device=device)
    now[0] += 0.5
    log_step(recorder, 1, sums[0], 40)
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
    assert row["mfu"] == pytest.approx(64 * 6e9 / (989e12), rel=1e-3)
    assert metrics.environment(["a"], device)["gpu"] == "NVIDIA H200"


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
    assert ("grad   inf " if "grad_norm" in changes else "grad  1.20 ") in line
    assert "  141.2 GiB  left" in line
    assert console_line({**ROW, **changes}, 10).endswith("left 0m06s")
    assert console_line({**ROW, **changes}, 10, shows_time_left=False).endswith("141.2 GiB")
    # a run without an end
    assert "left 51240955760304" in console_line({**ROW, **changes}, 2**63 - 1)


def test_a_duration_is_rounded_to_seconds_or_from_an_hour_on_cut_to_minutes():
    for seconds in (0, 0.4, 0.6, 59.4, 59.6, 61, 3599.4, 3599.6, 3660, 7_186, 36_059, 360_000):
        whole = math.floor(seconds + 0.5)
        hours, minutes = whole // 3600, whole % 3600 // 60
        shown = f"{hours}h{minutes:02}m" if hours else f"{minutes}m{whole % 60:02}s"
        assert metrics.duration(seconds) == shown


@pytest.mark.parametrize("mfu", [None, 0.4321])
def test_a_line_of_the_console_has_at_most_100_columns(mfu):
    assert len(console_line({**ROW, "grad_norm": 12.34, "mfu": mfu}, 1_799_999)) <= 100


def test_the_loss_of_a_row_is_its_steps_and_its_mean_that_of_all_steps_since_the_last_row(
    tmp_path, monkeypatch
):
    """Of steps with different numbers of tokens, on two ranks that have different parts of them."""
    losses, tokens = [[3.0, 5.0], [2.0, 4.0], [10.0, 20.0], [7.0, 1.0]], [4, 2, 10, 5]
    cfg = make_config(train={"steps": 4}, log={"every_steps": 3})
    recorders = [recorder_of(cfg, tmp_path, size=2, rank=rank) for rank in (0, 1)]
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
            log_step(recorders[rank], step, losses[step - 1][rank], tokens[step - 1])
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
    recorder = recorder_of(cfg, tmp_path)
    for step, (total, count) in enumerate(zip(sums, tokens), 1):
        log_step(recorder, step, total, count)
    recorder.close()
    found = rows(tmp_path)
    assert [(row["step"], row["loss"], row["loss_mean"]) for row in found] == [
        (1, None, None),
        (3, None, 3.0),
        (5, None, 1.6),
    ]
    assert [row["epochs"] for row in found] == [1 / 7, 3 / 7, 5 / 7]
    assert not any("slowest_rank" in row for row in found)  # of one rank
    assert recorder.plan is None  # a plan is compared with GPUs alone


def test_the_plans_check_counts_each_step_and_its_row_follows_that_of_the_step(tmp_path):
    class Check:
        counted = 0
        closed = False

        def count_step(self) -> None:
            self.counted += 1

        def row(self, step: int, seconds: float) -> dict | None:
            assert seconds > 0
            if step == 1:
                return None
            return {"kind": "plan", "step": step, "counted": self.counted}

        def close(self) -> None:
            self.closed = True

    cfg = make_config(train={"steps": 5}, log={"every_steps": 3})
    recorder = recorder_of(cfg, tmp_path)
    recorder.plan = Check()
    for step in range(1, 6):
        log_step(recorder, step)
    recorder.close()
    written = [
        (row["kind"], row["step"], row.get("counted"))
        for row in read_rows(tmp_path / "metrics.jsonl")
    ]
    assert written == [
        ("train", 1, None),
        ("train", 3, None),
        ("plan", 3, 3),
        ("train", 5, None),
        ("plan", 5, 5),
    ]
    assert recorder.plan.closed


@pytest.mark.parametrize("no_color", [None, "1"])
def test_the_loss_is_colored_on_a_terminal_alone(write_config, tmp_path, no_color):
    terminal, child_end = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | (
        {"NO_COLOR": no_color} if no_color else {}
    )
    path = write_config("seen", train={"steps": 2})
    with subprocess.Popen(
        [sys.executable, "train.py", path], cwd=REPO, env=env, stdout=child_end, stdin=child_end
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
    assert found["command"] == sys.argv and found["gpu"] is None
    assert (found["python"], found["torch"]) == (sys.version.split()[0], torch.__version__)
    began = datetime.datetime.strptime(found["time"], "%Y-%m-%dT%H:%M:%S%z")
    assert abs(began.timestamp() - time.time()) < 60


def test_the_environment_has_what_is_not_committed(tmp_path, monkeypatch):
    """Staged or not; and a hash of each file that is imported."""
    staged, imported = tmp_path / "staged", tmp_path / "metrics.py"
    monkeypatch.setattr(metrics, "__file__", str(imported))

    def git(*words: str) -> None:
        me = ["-c", "user.name=me", "-c", "user.email=me@here"]
        subprocess.run(["git", *me, *words], cwd=tmp_path, check=True)

    git("init", "-q")
    for path in (staged, imported):
        path.write_bytes(b"before \xff\n")
    git("add", ".")
    git("commit", "-qm", "all")
    for path in (staged, imported):
        path.write_bytes(f"{path.name} after ".encode() + b"\xff\n")
    git("add", "staged")
    found = metrics.environment(["a"], torch.device("cpu"))
    lines = found["uncommitted"].splitlines()
    assert {"+staged after \ufffd", "+metrics.py after \ufffd"} < {*lines}
    assert len(found["commit"]) == 40
    digest = hashlib.blake2b(imported.read_bytes(), digest_size=8).hexdigest()
    assert found["code"] == {"metrics.py": digest}


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
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("Some Other GPU", None),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, n=name: n)
        assert metrics.peak_flops(torch.device("cuda", 0)) == peak


@pytest.mark.parametrize(
    "cp, tp, mesh",
    [
        (1, 1, "2 replicas x 3 shards"),
        (1, 2, "2 replicas x 3 shards x cp 1 x tp 2"),
        (2, 4, "2 replicas x 3 shards x cp 2 x tp 4"),
    ],
)
def test_the_start_line_says_how_many_tokens_a_step_has_and_who_reads_them(
    tmp_path, monkeypatch, caplog, cp, tp, mesh
):
    """Six data ranks, which read ten sequences each: five times two, or all at once."""
    monkeypatch.setattr(metrics.log, "propagate", True)
    caplog.set_level("INFO")
    monkeypatch.setattr(metrics, "parameter_count", lambda model: 1_234_567)
    ranks = 6 * cp * tp
    sizes = {"size": ranks, "dp_replicate": 2, "dp_shard": 3, "dp_size": 6, "cp": cp, "tp": tp}
    for micro_batch, count in ((2, 5), (None, 1)):
        cfg = make_config(
            train={
                "steps": 1_500,
                "seq_len": 1_096,
                "global_batch_size": 60,
                "micro_batch_size": micro_batch,
            }
        )
        caplog.clear()
        recorder = recorder_of(cfg, tmp_path, 7, **sizes)
        log_start(recorder, {"web": 1.2345, "code": None}, "a note")
        recorder.close()
        warning, first, _, tokens, *rest = caplog.messages
        assert warning == "a warning"
        assert first == f"{tmp_path}: 1,234,567 parameters on {ranks} x cpu ({mesh}), float32"
        assert tokens == (
            f"{60 * 1_096:,} tokens per step = {count} micro-batches x 6 data ranks x {10 // count} "
            "sequences of 1096; 1.23 epochs of web, an unknown part of code in 1,500 steps; "
            "resuming after step 7"
        )
        assert rest == ["a note", "a table"]


def test_a_warm_up_that_the_run_does_not_complete_is_logged(tmp_path, monkeypatch, caplog):
    """With the share of the peak that the learning rate reaches."""
    monkeypatch.setattr(metrics.log, "propagate", True)
    for warmup, share in ((2000, "0.5 %"), (11, "90.9 %"), (10, None)):
        cfg = make_config(train={"steps": 10}, optim={"warmup_steps": warmup})
        caplog.clear()
        recorder = recorder_of(cfg, tmp_path)
        log_start(recorder)
        recorder.close()
        logged = [message for message in caplog.messages if "warm-up" in message]
        assert len(logged) == (share is not None)
        assert not logged or (f"{warmup:,} steps" in logged[0] and share in logged[0])


def test_the_start_line_says_where_the_weights_are_from_and_which_options_are_on(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(metrics.log, "propagate", True)
    caplog.set_level("INFO")

    def shown(cfg: config.Config, epochs: float | None) -> tuple[str, str]:
        """The options, and what the run starts from."""
        caplog.clear()
        recorder = recorder_of(cfg, tmp_path)
        log_start(recorder, epochs)
        recorder.close()
        _, _, options, tokens, *_ = caplog.messages
        return options, tokens.partition("; ")[2]

    plain = "recompute none, prefetch 1 forward, 1 backward (0: implicit)"
    cfg = make_config()
    assert shown(cfg, 0.61789) == (plain, "0.618 epochs in 4 steps; from fresh weights")
    imported = dataclasses.replace(cfg.model, init_from="a/base")
    cfg = dataclasses.replace(cfg, model=imported)
    assert shown(cfg, None) == (plain, "from the weights of a/base")
    parallel = dataclasses.replace(
        cfg.parallel,
        recompute=3,
        prefetch_forward=2,
        prefetch_backward=0,
        compile=True,
        float8="rowwise",
        cpu_offload=True,
        sync_every_micro_batch=False,
        gather_once=True,
    )
    cfg = dataclasses.replace(cfg, parallel=parallel, lora=config.Lora(rank=11, base_dtype="nf4"))
    assert shown(cfg, None)[0] == (
        "recompute 3, prefetch 2 forward, 0 backward (0: implicit), compiled, float8 rowwise, "
        "offloaded to the host, adapters of rank 11 over a base in nf4, reduced once a step, all-gathered once a "
        "step"
    )


def test_an_evaluation_is_logged_with_its_numbers_and_what_has_no_loss_is_named(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(metrics.log, "propagate", True)
    monkeypatch.setattr(metrics, "on_rank_zero", lambda work: work())
    caplog.set_level("INFO")
    recorder = recorder_of(make_config(), tmp_path)
    recorder.log_evaluation(2, None)  # a stop came
    assert not recorder.has_evaluation(2)
    result = {"loss": 2.71828, "bits_per_byte": 1.23456, "loss_by_source": {"a": None, "b": 2.5}}
    recorder.log_evaluation(3, result)
    recorder.log_evaluation(4, {"loss": 0.5, "bits_per_byte": math.nan})  # of conversations
    recorder.log_evaluation(5, {"loss": None, "bits_per_byte": math.nan})
    assert caplog.messages == [
        "step 3  no validation loss of a: no token of its validation data has a loss",
        "step 3  validation loss 2.7183, 1.2346 bits per byte",
        "step 4  validation loss 0.5000",
        "step 5  no validation loss: no token of the validation data has a loss",
    ]
    assert [row["loss"] for row in rows(tmp_path, "eval")] == [2.71828, 0.5, None]
    recorder.rows.write({"kind": "train", "step": 6})
    assert recorder.has_evaluation(3) and recorder.has_evaluation(5)
    assert not recorder.has_evaluation(6)
    recorder.close()


def test_the_first_step_of_a_launch_says_nothing_of_the_time_that_is_left(
    tmp_path, monkeypatch, caplog
):
    """It compiles. Here step 8 after one of 3 s a step: two steps are left."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(metrics.log, "propagate", True)
    caplog.set_level("INFO")
    recorder = recorder_of(make_config(train={"steps": 10}), tmp_path, 6)
    for step in (7, 8):
        now[0] += 3
        log_step(recorder, step)
    recorder.close()
    first, second = caplog.messages
    assert first.startswith("step  7/10  ") and first.endswith(" GiB")
    assert second.startswith("step  8/10  ") and second.endswith("  left 0m06s")


def check_console(console: str, folder: pathlib.Path, steps: int, shards: int) -> None:
    """Each number of the console is that of a row, or of a formula, as far as it is shown. Of a run of TINY."""
    attention = 48 * (2 * 4 * 12 + 2 * 2 * 12)  # four heads and two, 12 wide
    block = attention + 3 * 48 * 80 + 2 * 48
    parameters = 2 * 320 * 48 + 2 * block + 48
    mesh = f"{shards} x cpu (1 replicas x {shards} shards)"
    assert f"{folder}: {parameters:,} parameters on {mesh}, float32\n" in console
    passes = 8 // (2 * shards)
    assert (
        f"{8 * 32} tokens per step = {passes} micro-batches x {shards} data ranks x 2 sequences of 32; "
        in console
    )
    found = rows(folder)
    line = (
        rf"^step (\d)/{steps}  loss +([\d.]+)  grad +([\d.]+) +([\d,]+) tokens/s/device +([\d.]+) GiB"
        r"(?:  left (\d+)m(\d\d)s)?$"
    )
    lines = re.findall(line, console, re.MULTILINE)
    assert len(lines) == len(found)
    for row, (step, loss, norm, rate, memory, minutes, seconds) in zip(found, lines):
        assert int(step) == row["step"] and row["tokens"] == row["step"] * 8 * 32
        assert float(loss) == pytest.approx(row["loss_mean"], abs=5.1e-5)
        assert float(norm) == pytest.approx(row["grad_norm"], abs=5.1e-3)
        slowest = row["slowest_rank"]["step_seconds"]
        assert row["tokens_per_second_per_device"] == pytest.approx(8 * 32 / slowest / shards)
        assert float(rate.replace(",", "")) == pytest.approx(
            row["tokens_per_second_per_device"], abs=0.51
        )
        assert float(memory) == pytest.approx(row["peak_memory_gib"], abs=0.051)
        assert row["mfu"] is None
        assert bool(minutes) == (row["step"] > 1)
        if minutes:
            left = (steps - row["step"]) * row["step_seconds"]
            assert 60 * int(minutes) + int(seconds) == pytest.approx(left, abs=0.51)
    written = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(written) == len(found) + len(rows(folder, "eval"))  # and of no other kind
    for row in rows(folder, "eval"):
        assert (
            f"step {row['step']}  validation loss {row['loss']:.4f}, {row['bits_per_byte']:.4f} bits per byte\n"
            in console
        )


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
    assert (folder / "logs/rank-1.log").exists()
    check_console(done.stdout, folder, steps=7, shards=2)
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
    assert (
        "no [checkpoint]: nothing will be saved; --checkpoint.save_every_steps=100 adds one\n"
        in done.stdout
    )


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


def test_tensorboard_has_every_row_when_the_run_ends(tmp_path):
    recorder = Rows(tmp_path, config.Log(tensorboard=True), 0)
    recorder.write({"kind": "train", "step": 1, "loss": 1.0})
    recorder.write({"kind": "eval", "step": 1, "loss": 1.0})
    recorder.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    for name in (b"train/loss", b"eval/loss"):
        assert name in events.read_bytes()


def test_tensorboard_may_fail(tmp_path):
    class Broken:
        def add_scalar(self, *_: object) -> None:
            raise RuntimeError("its folder is gone")

    recorder = Rows(tmp_path, config.Log(tensorboard=True), 0)
    assert type(recorder.board) is Board
    recorder.board.writer = Broken()
    recorder.write({"kind": "train", "step": 1, "loss": 1.0})
    recorder.write({"kind": "train", "step": 2, "loss": 1.0})
    recorder.close()
    assert recorder.board.writer is None and len(rows(tmp_path)) == 2


def test_what_a_step_returns_is_in_the_row_and_in_tensorboard(tmp_path, monkeypatch):
    """Sums as means over the step's tokens, of all ranks; scalars as they are; what is nested under both names."""
    monkeypatch.setattr(metrics, "all_gather_objects", lambda value: [value, value])
    recorder, added = recorder_of(make_config(), tmp_path, size=2), {}
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
        {
            "grad_norm": torch.tensor(0.5),
            "lr": 0.1,
            "gate": {"blocks.0": torch.tensor(2.0), "blocks.1": torch.tensor(math.inf)},
        },
    )
    recorder.log_evaluation(
        1, {"loss": 2.0, "bits_per_byte": 1.0, "loss_by_source": {"a.jsonl": 3.0}}
    )
    recorder.close()
    row = rows(tmp_path)[0]
    assert (row["loss"], row["z_loss"], row["grad_norm"], row["lr"]) == (6, 1, 0.5, 0.1)
    assert row["gate"] == {"blocks.0": 2, "blocks.1": None}
    assert added["train/gate.blocks.0"] == 2 and "train/gate.blocks.1" not in added
    assert added["train/z_loss"] == 1 and added["eval/loss_by_source.a.jsonl"] == 3
    assert "train/slowest_rank.step_seconds" in added
    assert not added.keys() & {"train/batch_digest", "train/step", "train/kind"}


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
