"""What a run reports: console, metrics.jsonl, a log per rank, environment.json."""

import contextlib
import json
import logging
import math
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

import config
import files
import schema
from parallel.mesh import World
from parallel.ranks import all_gather_objects, on_rank_zero

log = logging.getLogger("train")

# Dense bfloat16 TFLOP/s by the data sheets, by part of the device's name of CUDA; the longest that matches counts.
PEAK_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H200": 989,
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,
    "GB200": 2500,
    "L40S": 362,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX 5090": 209,
    "MI300X": 1307,
}
ACCENT = "\033[1;36m", "\033[0m"  # ANSI: bold cyan, and the default again
NO_VALIDATION_TARGET = "no validation loss: no token of the validation data has a loss"
# bytes of rows that wait in memory while they cannot be written: tens of thousands
ROWS_KEPT = 2**24


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s by the data sheet; None, and so no MFU, for an unknown device."""
    return data_sheet_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def data_sheet_peak(name: str) -> float | None:
    """The dense bfloat16 peak of a device by its name of CUDA, such as "NVIDIA A100-SXM4-80GB", in FLOP/s."""
    if "Laptop" in name or "MIG" in name:  # another chip, or a slice, of the same name
        return None
    known = [chip for chip in PEAK_TFLOPS if chip in name]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def peak_memory_gib(device: torch.device) -> float:
    """Peak so far: of memory allocated on the GPU, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


class Accent(logging.Formatter):
    """For a terminal: the loss of a step in color."""

    def format(self, record: logging.LogRecord) -> str:
        begin, end = ACCENT
        return re.sub(
            r"^(step .*?loss +)([^\s,]+)", rf"\g<1>{begin}\2{end}", super().format(record)
        )


def start_logging(folder: pathlib.Path, rank: int, color: bool) -> pathlib.Path:
    """Every rank logs to logs/rank-N.log; rank 0 also to the console, the others redirect stdout and stderr to it.
    Returns the log's path."""
    (folder / "logs").mkdir(exist_ok=True)
    in_file = logging.FileHandler(path := folder / "logs" / f"rank-{rank}.log")
    in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    # a full disk or a closed terminal is no reason to stop, nor to print tracebacks
    logging.raiseExceptions = False
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(Accent() if color else None)
    log.handlers = [in_file, console] if rank == 0 else [in_file]
    for stream in () if rank == 0 else (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(in_file.stream.fileno(), stream.fileno())  # pyrefly: ignore[missing-attribute]  # it is open
    return path


def environment(hosts: list[str], device: torch.device) -> dict:
    """The machines and versions of a launch. hosts: the host of each rank."""

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.check_output(
                ["git", *words],
                cwd=pathlib.Path(__file__).parent,
                text=True,
                errors="replace",
                stderr=subprocess.DEVNULL,
            ).strip()
        return None

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("diff", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hosts": sorted({*hosts}),
        "machine": platform.machine(),
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": len(hosts),
    }


class Recorder:
    """Times the steps and reports them. All ranks must call it alike; rank 0 writes rows and console."""

    def __init__(
        self,
        cfg: config.Config,
        world: World,
        folder: pathlib.Path,
        start: int,
        flops_per_token: int,
        phase: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        """start: the step that training resumes after; phase: the watchdog's, entered with what is timed."""
        self.cfg, self.world, self.folder, self.start, self.flops_per_token = (
            cfg,
            world,
            folder,
            start,
            flops_per_token,
        )
        self.phase, self.plan = phase, None
        self.rows = Rows(folder, cfg.log, start) if world.rank == 0 else None
        if self.rows and world.device.type == "cuda" and config.has_extra("planner"):
            from extras.planner.check import PlanCheck

            self.plan = PlanCheck(cfg, world, folder)
        self.restart_timer()

    def has_evaluation(self, step: int) -> bool:
        """Whether the rows on disk hold an evaluation of this step. Collective."""
        return on_rank_zero(
            lambda: any(
                row["kind"] == "eval" and row["step"] == step
                for row in read_rows(self.folder / "metrics.jsonl")
            )
        )

    def restart_timer(self) -> None:
        self.began, self.steps, self.seconds = time.perf_counter(), 0, defaultdict(float)
        # sums since the last row; loss becomes a device tensor
        self.loss, self.valid_tokens = (torch.zeros(()), 0)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Times its body as a phase of the watchdog: "data", the wait for the loader, or "evaluation" or "save", which
        are no part of the steps. Before these the device finishes the training that is queued on it, which is."""
        if phase != "data":
            torch.get_device_module(self.world.device).synchronize()
        began = time.perf_counter()
        with self.phase(phase):
            yield
        self.seconds[phase] += time.perf_counter() - began

    def log_step(
        self,
        step: int,
        tokens: int,
        batch: Any,
        sums: dict[str, torch.Tensor],
        scalars: dict[str, Any],
    ) -> None:
        """Counts a step. If a row is due, waits for the device, gathers every rank's figures and writes the row.

        tokens: trained on so far; batch: a data.loader.Batch; sums, scalars (or dictionaries of them): as
        training_step() returns them. The row holds them by name, the sums as means over the step's tokens, and as
        loss_mean the mean loss over the tokens of all steps since the last row. Without a target a mean is None.
        """
        self.steps += 1
        if batch.valid_tokens:  # else the sum holds no loss, only a block's terms, if any
            self.loss = self.loss + sums["loss"]
            self.valid_tokens += batch.valid_tokens
        if self.plan:
            self.plan.count_step()
        if step not in (1, self.cfg.train.steps) and step % self.cfg.log.every_steps:
            return
        # item() waits until the device is done
        ours = {
            "sums": {name: value.item() for name, value in sums.items()},
            "loss": self.loss.item(),
            "digest": batch.digest,
        }
        total = time.perf_counter() - self.began - self.seconds["evaluation"] - self.seconds["save"]
        figures = {
            "step_seconds": total / self.steps,
            "data_seconds": self.seconds["data"] / self.steps,
            "peak_memory_gib": peak_memory_gib(self.world.device),
        }
        ranks = all_gather_objects(ours | figures)
        slowest = {name: max(rank[name] for rank in ranks) for name in figures}
        w, peak = self.world, peak_flops(self.world.device)
        rate = config.tokens_per_step(self.cfg) / w.size / slowest["step_seconds"]
        row = {
            "kind": "train",
            "step": step,
            # tp ranks have the same sums, cp ranks those of their part of the sequence
            **{
                name: mean([rank["sums"][name] for rank in ranks[:: w.tp]], batch.valid_tokens)
                for name in sums
            },
            "loss_mean": mean([rank["loss"] for rank in ranks[:: w.tp]], self.valid_tokens),
            **{name: as_numbers(value) for name, value in scalars.items()},
            "tokens": tokens,
            "tokens_per_second_per_device": rate,
            "mfu": rate * self.flops_per_token / peak if peak else None,
            **figures,
            **({"slowest_rank": slowest} if self.world.size > 1 else {}),
            "batch_digest": sum(rank["digest"] for rank in ranks[:: w.cp * w.tp])
            % config.DIGEST_MODULUS,
        }
        if self.rows:
            self.rows.write(row)
            log.info(console_line(row, self.cfg.train.steps))
            if self.plan and (found := self.plan.row(step, figures["step_seconds"])):
                self.rows.write(found)
        self.restart_timer()

    def log_evaluation(self, step: int, found: dict | None) -> None:
        """found: the result of evaluate(), None if it was stopped."""
        if self.rows and found is not None:
            self.rows.write({"kind": "eval", "step": step, **found})
            bits = found["bits_per_byte"]
            if found["loss"] is None:
                log.warning("step %d  %s", step, NO_VALIDATION_TARGET)
                return
            log.info(
                "step %d  validation loss %.4f%s",
                step,
                found["loss"],
                "" if math.isnan(bits) else f", {bits:.4f} bits per byte",
            )

    def log_start(self, parameters: int, units: str, notes: list[str]) -> None:
        """Logs the model's size, its parallelism and where it starts from; notes on the data; the table of units."""
        if self.rows is None:
            return
        w, m, p, t, lora = (
            self.world,
            self.cfg.model,
            self.cfg.parallel,
            self.cfg.train,
            self.cfg.lora,
        )
        log.info(
            f"{self.folder}: {parameters:,} parameters on {w.size} x {w.device.type} ({w.dp_replicate} replicas x "
            f"{w.dp_shard} shards{f' x cp {w.cp} x tp {w.tp}' * (w.cp * w.tp > 1)}), {p.param_dtype}"
        )
        log.info(
            f"recompute {p.recompute}, prefetch {p.prefetch_forward} forward, {p.prefetch_backward} backward "
            f"(0: implicit){', compiled' * p.compile}{f', float8 {p.float8}' * (p.float8 != 'none')}"
            f"{', offloaded to the host' * p.cpu_offload}"
            f"{f', adapters of rank {lora.rank} over a base in {lora.base_dtype}' if lora else ''}"
            f"{', reduced once a step' * (not p.sync_every_micro_batch)}"
        )
        log.info(
            f"{config.tokens_per_step(self.cfg):,} tokens per step = "
            f"{config.accumulation_steps(self.cfg, w.dp_size)} micro-batches x {w.dp_size} data ranks x "
            f"{config.micro_batch_size(self.cfg, w.dp_size)} sequences of {t.seq_len}; "
            + (
                f"resuming after step {self.start}"
                if self.start
                else f"from the weights of {m.init_from}"
                if m.init_from
                else "from fresh weights"
            )
        )
        for text in (*notes, units):
            log.info(text)

    def sync(self) -> None:
        """Syncs the rows written so far to disk. Rank 0 only. Raises OSError."""
        assert self.rows is not None
        self.rows.sync()

    def close(self) -> None:
        if self.rows:
            self.rows.close()
        if self.plan:
            self.plan.close()


class Rows:
    """Writes metrics.jsonl, flushing each row, on rank 0. Rows that it cannot write stay in the file's
    buffer, and the next flush writes them."""

    def __init__(self, folder: pathlib.Path, settings: config.Log, start: int):
        """Drops the rows of steps after `start`, so that (kind, step) stays unique."""
        path = folder / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= start]
        files.write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        # has a lock: saves sync in their own thread
        self.file = path.open("ab", buffering=ROWS_KEPT)
        self.board: Any = None
        if settings.tensorboard:
            self.board = Board(folder / "tensorboard", start)
        self.tracker: Any = None
        if settings.tracker:
            from extras.reports.tracker import Tracker

            self.tracker = Tracker(folder, settings.tracker, start, len(kept))

    def write(self, row: dict) -> None:
        try:
            self.file.write(as_json(row).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            log.warning("metrics.jsonl: %s; its rows wait in memory", error)
        if self.board:
            self.board.write(row)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        for other in filter(None, (self.board, self.tracker)):
            other.close()


def read_rows(path: pathlib.Path) -> list[dict]:
    """Rows of a metrics.jsonl. Skips invalid lines, such as a last one that a kill truncated."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and isinstance(row.get("kind"), str)
                and type(row.get("step")) is int
            ):
                rows.append(row)
    return rows


def mean(sums: list[float], count: int) -> float | None:
    """The sum of the sums over the count; None for a count of 0."""
    return sum(sums) / count if count else None


def as_numbers(value: Any) -> Any:
    """A scalar tensor as a number, also inside of dictionaries."""
    return (
        {key: as_numbers(inner) for key, inner in value.items()}
        if isinstance(value, dict)
        else float(value)
    )


def as_json(row: dict) -> str:
    """One line of JSON; non-finite numbers become null."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None))


def console_line(row: dict, steps: int) -> str:
    """At most 100 columns for up to 9,999,999 steps. Its loss is the mean over the steps since the last line."""
    loss = "   none" if row["loss_mean"] is None else f"{row['loss_mean']:7.4f}"
    per = "tokens/s/device" if row["mfu"] is None else f"tok/s/GPU  mfu {row['mfu']:5.1%}"
    minutes, seconds = divmod(round((steps - row["step"]) * row["step_seconds"]), 60)
    left = f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{seconds:02}s"
    return (
        f"step {row['step']:>{len(str(steps))}}/{steps}  loss {loss}  "
        f"grad {row['grad_norm']:5.2f}  {row['tokens_per_second_per_device']:>6,.0f} {per}  "
        f"{row['peak_memory_gib']:4.1f} GiB  left {left}"
    )


log = logging.getLogger("train")


class Board:
    """Every finite number of a row, by its kind and name. If it fails, training goes on without it."""

    def __init__(self, folder: pathlib.Path, start: int):
        """Drops what it has of steps after `start`."""
        from torch.utils.tensorboard import (
            SummaryWriter,  # a package that a run without it need not have
        )

        self.writer: SummaryWriter | None = SummaryWriter(folder, purge_step=start + 1)

    def write(self, row: dict) -> None:
        if not self.writer:
            return
        try:
            for key, value in schema.flatten(row).items():
                if (
                    isinstance(value, int | float)
                    and math.isfinite(value)
                    and key not in ("step", "batch_digest")
                ):
                    self.writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])
        except Exception as error:  # it re-raises whatever its writer thread raised
            self.writer = None
            log.warning("TensorBoard: %s; it gets no more rows of this launch", error)

    def close(self) -> None:
        if self.writer:
            with contextlib.suppress(Exception):
                self.writer.close()
