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
import time
from collections.abc import Iterator

import torch

import config

log = logging.getLogger("train")

# Dense bfloat16 peak of a device, FLOP/s, by a part of its name; data sheets. Unknown devices print no MFU.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12,
              "A100": 312e12, "A800": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "MI300X": 1307e12}


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Highest use so far: of the GPU's allocator, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def start_logging(folder: pathlib.Path, rank: int) -> None:
    """Every rank logs to logs/rank-N.log; rank 0 to the console as well, the others send what they print there."""
    (folder / "logs").mkdir(exist_ok=True)
    path = folder / "logs" / f"rank-{rank}.log"
    in_file = logging.FileHandler(path)
    in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers = [in_file]
    log.setLevel(logging.INFO)
    log.propagate = False
    if rank == 0:
        log.addHandler(logging.StreamHandler(sys.stdout))
    else:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(in_file.stream.fileno(), stream.fileno())


def environment(world_size: int, device: torch.device) -> dict:
    """Where and with what a launch ran."""
    repo = pathlib.Path(__file__).parent

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError):
            done = subprocess.run(["git", "-C", repo, *words], capture_output=True, text=True)
            return done.stdout if done.returncode == 0 else None
        return None

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": (git("rev-parse", "HEAD") or "").strip() or None,
        "uncommitted": git("diff", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": world_size,
    }


class Recorder:
    """Writes rows to metrics.jsonl, flushed one by one, and to TensorBoard. One rank makes it."""

    def __init__(self, folder: pathlib.Path, l: config.Log, start: int):
        """Goes on after step `start`: rows of later steps are dropped, so that (kind, step) never stands twice."""
        path = folder / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= start]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.rename(path)
        self.seen = {(row["kind"], row["step"]) for row in kept}
        self.file = path.open("a")
        self.board = None
        if l.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=start + 1)

    def write(self, row: dict) -> None:
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        self.seen.add((row["kind"], row["step"]))
        if self.board:
            for key, value in row.items():
                if isinstance(value, int | float) and key not in ("step", "batch_digest"):
                    self.board.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def sync(self) -> None:
        """Brings the rows to the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def read_rows(path: pathlib.Path) -> list[dict]:
    """Rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


class Timer:
    """Times of the steps since the last row, without what was excluded (saving, evaluating)."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.began, self.steps, self.data, self.excluded = time.perf_counter(), 0, 0.0, 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.data += time.perf_counter() - began

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - began

    def means(self) -> dict[str, float]:
        """Seconds per step, and of them waiting for data."""
        steps = max(self.steps, 1)
        return {"step_seconds": (time.perf_counter() - self.began - self.excluded) / steps,
                "data_seconds": self.data / steps}


def console_line(row: dict, steps: int) -> str:
    """A training row for a person."""
    mfu = f"{row['mfu']:6.1%}" if row["mfu"] is not None else "     -"
    return (f"step {row['step']:>{len(str(steps))}}/{steps}  loss {_number(row['loss'], '7.4f')}  "
            f"grad {_number(row['grad_norm'], '6.2f')}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_second_per_device']:>9,.0f} tokens/s/device  mfu {mfu}  "
            f"mem {row['peak_memory_gib']:5.1f} GiB  "
            f"left {_duration((steps - row['step']) * row['step_seconds'])}")


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Profiler:
    """Traces some steps into profile/rank-N.json, for chrome://tracing or https://ui.perfetto.dev."""

    def __init__(self, p: config.Profile | None, folder: pathlib.Path, rank: int):
        self.settings, self.path, self.trace = p, folder / "profile" / f"rank-{rank}.json", None

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
            self.trace = None
