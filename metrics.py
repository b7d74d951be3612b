"""What a run tells: console line, metrics.jsonl, TensorBoard, a log per rank, environment.json, a profile."""

import contextlib
import json
import logging
import math
import os
import pathlib
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import config

log = logging.getLogger("train")

# Dense bfloat16 peak in FLOP/s by a part of the device's name, from data sheets. Unknown devices print no MFU.
# The first that fits counts. None: a device whose name holds another's.
PEAK_FLOPS = {"Laptop": None, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12,
              "H200": 989e12, "H800": 989e12, "GB200": 2500e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
              "L40S": 362e12, "RTX 4090": 165e12, "MI300X": 1307e12}


def peak_flops(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Highest use so far: of the GPU's allocator, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def start_logging(folder: pathlib.Path, rank: int) -> None:
    """Every rank logs to logs/rank-N.log; rank 0 to the console as well, the others send what they print there."""
    (folder / "logs").mkdir(exist_ok=True)
    in_file = logging.FileHandler(folder / "logs" / f"rank-{rank}.log")
    in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.raiseExceptions = False  # a full disk or a closed terminal is no reason to stop, nor to print tracebacks
    log.handlers = [in_file, logging.StreamHandler(sys.stdout)] if rank == 0 else [in_file]
    for stream in () if rank == 0 else (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(in_file.stream.fileno(), stream.fileno())


def environment(ranks: int, device: torch.device) -> dict:
    """Where and with what a launch ran."""
    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.check_output(["git", *words], cwd=pathlib.Path(__file__).parent, text=True,
                                           errors="replace", stderr=subprocess.DEVNULL).strip()
        return None

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": sys.argv, "commit": git("rev-parse", "HEAD"),
            "uncommitted": git("diff", "HEAD"), "python": platform.python_version(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "host": platform.node(), "machine": platform.machine(), "gpu": gpu,
            "cores": os.cpu_count(), "threads": torch.get_num_threads(), "ranks": ranks}


class Recorder:
    """Writes rows to metrics.jsonl, flushed one by one, and to TensorBoard. One rank makes it.

    A row that cannot be written waits for the next; training goes on.
    """

    def __init__(self, folder: pathlib.Path, settings: config.Log, start: int):
        """Goes on after step `start`: rows of later steps are dropped, so that (kind, step) never stands twice."""
        path = folder / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= start]
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name without the old rows
        temporary.rename(path)
        self.seen = {(row["kind"], row["step"]) for row in kept}
        self.file, self.waiting, self.board = path.open("ab", buffering=0), b"", None
        self.lock = threading.Lock()
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=start + 1)

    def write(self, row: dict) -> None:
        self.seen.add((row["kind"], row["step"]))
        try:
            self._flush(as_json(row).encode() + b"\n")
        except OSError as error:
            log.warning("metrics.jsonl: %s; its rows wait in memory", error)
        try:
            for key, value in row.items():
                if self.board and isinstance(value, int | float) and math.isfinite(value) and key not in (
                        "step", "batch_digest"):
                    self.board.add_scalar(f"{row['kind']}/{key}", value, row["step"])
        except Exception as error:  # its thread has met any error of the file system, and passes it on here
            self.board = None
            log.warning("TensorBoard: %s; it gets no more rows of this launch", error)

    def _flush(self, more: bytes = b"") -> None:
        with self.lock:  # a save behind the training syncs from its own thread
            self.waiting += more
            while self.waiting:  # a disk that fills up takes a part of them
                self.waiting = self.waiting[self.file.write(self.waiting) :]

    def sync(self) -> None:
        """Brings the rows to the disk. Raises OSError."""
        self._flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._flush()
            self.file.close()
        if self.board:
            with contextlib.suppress(Exception):
                self.board.close()


def read_rows(path: pathlib.Path) -> list[dict]:
    """Rows of a metrics.jsonl; lines that are none, as a last one that a kill cut short, are left out."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("kind"), str) and type(row.get("step")) is int:
                rows.append(row)
    return rows


def as_json(row: dict) -> str:
    """One line; numbers that are not finite, which JSON does not know, as null."""
    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(known(row), allow_nan=False)


class Timer:
    """Times of the steps since the last row, without what was excluded (saving, evaluating)."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.began, self.steps, self.seconds = time.perf_counter(), 0, {"data": 0.0, "excluded": 0.0}

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Books the time within as "data" (waited for the loader) or "excluded"."""
        began = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - began

    def means(self) -> dict[str, float]:
        """Seconds per step, and of them waiting for data."""
        total, steps = time.perf_counter() - self.began - self.seconds["excluded"], max(self.steps, 1)
        return {"step_seconds": total / steps, "data_seconds": self.seconds["data"] / steps}


def console_line(row: dict, steps: int) -> str:
    """A training row for a person."""
    mfu = f"{row['mfu']:6.1%}" if row["mfu"] is not None else "     -"
    minutes, seconds = divmod(round((steps - row["step"]) * row["step_seconds"]), 60)
    left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
    return (f"step {row['step']:>{len(str(steps))}}/{steps}  loss {row['loss']:7.4f}  grad {row['grad_norm']:6.2f}  "
            f"lr {row['lr']:.2e}  {row['tokens_per_second_per_device']:>9,.0f} tokens/s/device  mfu {mfu}  "
            f"mem {row['peak_memory_gib']:5.1f} GiB  left {left}")


class Profiler:
    """Traces some steps into profile/rank-N.json, for chrome://tracing or https://ui.perfetto.dev."""

    def __init__(self, settings: config.Profile | None, folder: pathlib.Path, rank: int):
        self.settings, self.path, self.trace = settings, folder / "profile" / f"rank-{rank}.json", None

    def before_step(self, step: int) -> None:
        if self.settings and step == self.settings.at_step:
            self.trace = torch.profiler.profile()
            self.trace.start()

    def after_step(self, step: int) -> None:
        if self.trace and step == self.settings.at_step + self.settings.steps - 1:
            self.trace.stop()
            self.path.parent.mkdir(exist_ok=True)
            self.trace.export_chrome_trace(str(self.path))
            log.info("profile of steps %d to %d: %s", self.settings.at_step, step, self.path)
