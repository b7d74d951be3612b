"""What a run reports: console, metrics.jsonl, a log per rank, environment.json."""

import contextlib
import hashlib
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
from typing import Any

import torch

import config
from data.dataset import Dataset
from model.llama import Llama, flops_per_token, parameter_count
from parallel.mesh import World
from parallel.ranks import all_gather_objects, on_rank_zero
from system import files, processes

log = logging.getLogger("train")

# Dense bfloat16 TFLOP/s by the data sheets, by part of the device's name of CUDA; the longest that
# matches counts.
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
ACCENT, NO_ACCENT = "\033[1;36m", "\033[0m"  # ANSI: bold cyan, and the default again
# bytes of rows that wait in memory while they cannot be written: tens of thousands
ROWS_KEPT = 2**24


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s by the data sheet; None, and so no MFU, for an unknown device."""
    if device.type != "cuda":
        return None
    return data_sheet_peak(torch.cuda.get_device_name(device))


def data_sheet_peak(name: str) -> float | None:
    """The dense bfloat16 peak of a device by its name of CUDA, such as "NVIDIA A100-SXM4-80GB", in
    FLOP/s."""
    if "Laptop" in name or "MIG" in name:  # another chip, or a slice, of the same name
        return None
    known = [chip for chip in PEAK_TFLOPS if chip in name]
    if not known:
        return None
    return PEAK_TFLOPS[max(known, key=len)] * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """Peak so far: of memory allocated on the GPU, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB; on macOS in bytes
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


class Accent(logging.Formatter):
    """For a terminal: the loss of a step in color."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return re.sub(r"^(step .*?loss +)([^\s,]+)", rf"\g<1>{ACCENT}\2{NO_ACCENT}", line)


def start_logging(folder: pathlib.Path, rank: int, color: bool) -> None:
    """Every rank logs to logs/rank-N.log; rank 0 also to the console, the others redirect stdout
    and stderr to it."""
    path = folder / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(exist_ok=True)
        in_file = logging.FileHandler(path)
    except OSError as error:  # a full disk
        processes.print_error(f"{path}: {error.strerror}; this launch has none")
        in_file = logging.FileHandler(os.devnull)
    in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    # a full disk or a closed terminal is no reason to stop, nor to print tracebacks
    logging.raiseExceptions = False
    if rank == 0:
        console = logging.StreamHandler(sys.stdout)
        if color:
            console.setFormatter(Accent())
        log.handlers = [in_file, console]
        return
    log.handlers = [in_file]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        # pyrefly: ignore[missing-attribute]  # it is open
        os.dup2(in_file.stream.fileno(), stream.fileno())


def environment(hosts: list[str], device: torch.device) -> dict:
    """The machines, versions and code of a launch. hosts: the host of each rank."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("diff", "HEAD"),
        "code": code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hosts": sorted(set(hosts)),
        "machine": platform.machine(),
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": len(hosts),
    }


def code() -> dict[str, str]:
    """A hash of each of this repository's files that this process has imported, by path."""
    repo = pathlib.Path(__file__).parent
    hashes = {}
    for module in list(sys.modules.values()):
        path = pathlib.Path(getattr(module, "__file__", None) or "/")
        is_ours = path.is_relative_to(repo) and "site-packages" not in path.parts
        if is_ours and path.is_file():  # it may have been removed since
            digest = hashlib.blake2b(path.read_bytes(), digest_size=8)
            hashes[str(path.relative_to(repo))] = digest.hexdigest()
    return dict(sorted(hashes.items()))


def changed_code(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A warning, if there is one, that a launch has other code than the launch before."""
    changed = [path for path, digest in before.items() if now.get(path, digest) != digest]
    if not changed:
        return []
    return [f"other code than the launch before: {', '.join(changed)} (environment.json)"]


def git(*words: str) -> str | None:
    """The output of a git command in this repository; None if it fails."""
    try:
        output = subprocess.check_output(
            ["git", *words],
            cwd=pathlib.Path(__file__).parent,
            text=True,
            errors="replace",
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.strip()


class Recorder:
    """Counts the steps and reports them. All ranks must call it alike; rank 0 writes rows and
    console."""

    def __init__(
        self,
        cfg: config.Config,
        world: World,
        folder: pathlib.Path,
        start: int,
        model: Llama,
        seconds: dict[str, float],
    ):
        """start: the step that training resumes after; seconds: Run.seconds, of which "data", the
        wait for the loader, is part of the steps, and "evaluation" and "save" are not."""
        self.cfg = cfg
        self.world = world
        self.folder = folder
        self.start = start
        self.flops_per_token = flops_per_token(model, cfg.train.seq_len)
        self.seconds = seconds
        self.rows: Rows | None = None  # on rank 0
        self.plan: Any = None  # on rank 0 of a run on GPUs: extras.planner.check.PlanCheck
        if world.rank == 0:
            self.rows = Rows(folder, cfg.log, start)
            if world.device.type == "cuda" and config.has_extra("planner"):
                from extras.planner.check import PlanCheck

                self.plan = PlanCheck(cfg, world, folder)
        self._begin_row()

    def _begin_row(self) -> None:
        """Begins to count the steps of the next row."""
        self.began = time.perf_counter()
        self.seconds_before = self.seconds.copy()
        self.steps = 0
        self.loss = torch.zeros(())  # the sum over the steps, on the device from the first step on
        self.valid_tokens = 0

    def _seconds_since_row(self, phase: str) -> float:
        return self.seconds[phase] - self.seconds_before[phase]

    def has_evaluation(self, step: int) -> bool:
        """Whether the rows on disk hold an evaluation of this step. Collective."""
        return on_rank_zero(lambda: has_row(self.folder / "metrics.jsonl", "eval", step))

    def log_step(
        self,
        step: int,
        tokens: int,
        batch: Any,
        sums: dict[str, torch.Tensor],
        scalars: dict[str, Any],
    ) -> None:
        """Counts a step. If a row is due, waits for the device, gathers every rank's figures and
        writes the row.

        tokens: trained on so far; batch: a data.loader.Batch; sums, scalars (or dictionaries of
        them): as training_step() returns them. The row holds them by name, the sums as means over
        the step's tokens, and as loss_mean the mean loss over the tokens of all steps since the
        last row. Without a target a mean is None.
        """
        self.steps += 1
        if batch.valid_tokens:  # else the sum holds no loss, only a block's terms, if any
            self.loss = self.loss + sums["loss"]
            self.valid_tokens += batch.valid_tokens
        if self.plan:
            self.plan.count_step()
        is_due = step % self.cfg.log.every_steps == 0 or step in (1, self.cfg.train.steps)
        if not is_due:
            return
        row = self._train_row(step, tokens, batch, sums, scalars)
        if self.rows:
            self.rows.write(row)
            is_first = step == self.start + 1  # which takes longer than those that follow
            log.info(console_line(row, self.cfg.train.steps, shows_time_left=not is_first))
            plan_row = self.plan.row(step, row["step_seconds"]) if self.plan else None
            if plan_row:
                self.rows.write(plan_row)
        self._begin_row()

    def _train_row(
        self,
        step: int,
        tokens: int,
        batch: Any,
        sums: dict[str, torch.Tensor],
        scalars: dict[str, Any],
    ) -> dict[str, Any]:
        """The row of the steps since the last one. Waits for the device. Collective."""
        world = self.world
        # item() waits until the device is done: before the clock is read
        counted = {
            "sums": {name: value.item() for name, value in sums.items()},
            "loss": self.loss.item(),
            "digest": batch.digest,
        }
        figures = self._figures()
        ranks = all_gather_objects(counted | figures)
        # tp ranks have the same sums, cp ranks those of their part of the sequence
        summing_ranks = ranks[:: world.tp]
        means = {}
        for name in sums:
            means[name] = mean([rank["sums"][name] for rank in summing_ranks], batch.valid_tokens)
        # the ranks of a tp or cp group have the same samples
        digest = sum(rank["digest"] for rank in ranks[:: world.cp * world.tp])

        slowest = {name: max(rank[name] for rank in ranks) for name in figures}
        rate = config.tokens_per_step(self.cfg.train) / world.size / slowest["step_seconds"]
        peak = peak_flops(world.device)
        row = {
            "kind": "train",
            "step": step,
            **means,
            "loss_mean": mean([rank["loss"] for rank in summing_ranks], self.valid_tokens),
            **{name: as_numbers(value) for name, value in scalars.items()},
            "tokens": tokens,
            "tokens_per_second_per_device": rate,
            "mfu": rate * self.flops_per_token / peak if peak else None,
            **figures,
            "epochs": batch.epochs,
        }
        if world.size > 1:
            row["slowest_rank"] = slowest
        row["batch_digest"] = digest % config.DIGEST_MODULUS
        return row

    def _figures(self) -> dict[str, float]:
        """This rank's time per step since the last row, without evaluations and saves, and its
        memory."""
        seconds = time.perf_counter() - self.began
        seconds -= self._seconds_since_row("evaluation") + self._seconds_since_row("save")
        return {
            "step_seconds": seconds / self.steps,
            "data_seconds": self._seconds_since_row("data") / self.steps,
            "peak_memory_gib": peak_memory_gib(self.world.device),
        }

    def log_evaluation(self, step: int, result: dict | None) -> None:
        """result: that of evaluate(), None if it was stopped."""
        if self.rows is None or result is None:
            return
        self.rows.write({"kind": "eval", "step": step, **result})
        for text in missing_losses(result):
            log.warning("step %d  %s", step, text)
        if result["loss"] is None:
            return
        line = f"step {step}  validation loss {result['loss']:.4f}"
        if not math.isnan(result["bits_per_byte"]):
            line += f", {result['bits_per_byte']:.4f} bits per byte"
        log.info(line)

    def log_start(self, model: Llama, units: str, dataset: Dataset, warnings: list[str]) -> None:
        """Logs the warnings, also of a warm-up that the run does not complete; the model's size, its
        parallelism and where it starts from; notes on the data; the table of units."""
        hosts = all_gather_objects(platform.node())
        if self.rows is None:
            return
        path = self.folder / "environment.json"
        before = files.read_json(path)
        launched = environment(hosts, self.world.device)
        launched["earlier"] = [*before.pop("earlier", []), before] if before else []
        files.write_if_possible(path, json.dumps(launched, indent=2))
        for text in (*warnings, *changed_code(before.get("code", {}), launched["code"])):
            log.warning(text)
        parameters = parameter_count(model)
        epochs = dataset.epochs(self.cfg.train.steps)
        world = self.world
        parallel = self.cfg.parallel
        mesh = f"{world.dp_replicate} replicas x {world.dp_shard} shards"
        if world.cp * world.tp > 1:
            mesh += f" x cp {world.cp} x tp {world.tp}"
        log.info(
            f"{self.folder}: {parameters:,} parameters on {world.size} x {world.device.type} "
            f"({mesh}), {parallel.param_dtype}"
        )
        log.info(", ".join(self._options()))
        if self.start:
            origin = f"resuming after step {self.start}"
        elif self.cfg.model.init_from:
            origin = f"from the weights of {self.cfg.model.init_from}"
        else:
            origin = "from fresh weights"
        if epochs is not None:
            origin = f"{shown_epochs(epochs)} in {self.cfg.train.steps:,} steps; {origin}"
        micro_batches = config.accumulation_steps(self.cfg.train, world.dp_size)
        sequences = config.micro_batch_size(self.cfg.train, world.dp_size)
        log.info(
            f"{config.tokens_per_step(self.cfg.train):,} tokens per step = {micro_batches} micro-batches x "
            f"{world.dp_size} data ranks x {sequences} sequences of {self.cfg.train.seq_len}; {origin}"
        )
        steps = self.cfg.train.steps
        warmup = self.cfg.optim.warmup_steps
        if warmup > steps:
            log.warning(
                f"the warm-up of {warmup:,} steps is longer than the run: the learning rate reaches "
                f"{100 * steps / warmup:.3g} % of its peak"
            )
        for text in (*dataset.notes(), units):
            log.info(text)

    def _options(self) -> list[str]:
        """What a run does for memory and speed."""
        parallel = self.cfg.parallel
        lora = self.cfg.lora
        options = [
            f"recompute {parallel.recompute}",
            f"prefetch {parallel.prefetch_forward} forward",
            f"{parallel.prefetch_backward} backward (0: implicit)",
        ]
        if parallel.compile:
            options.append("compiled")
        if parallel.float8 != "none":
            options.append(f"float8 {parallel.float8}")
        if parallel.cpu_offload:
            options.append("offloaded to the host")
        if lora:
            options.append(f"adapters of rank {lora.rank} over a base in {lora.base_dtype}")
        if not parallel.sync_every_micro_batch:
            options.append("reduced once a step")
        if parallel.gather_once:
            options.append("all-gathered once a step")
        return options

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
    """Writes metrics.jsonl, flushing each row, on rank 0. Rows that it cannot write stay in the
    file's buffer, and the next flush writes them. Also sends them to TensorBoard and the
    tracker."""

    def __init__(self, folder: pathlib.Path, settings: config.Log, start: int):
        """Drops the rows of steps after `start`, so that (kind, step) stays unique."""
        path = folder / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= start]
        files.write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        # has a lock: saves sync in their own thread
        self.file = path.open("ab", buffering=ROWS_KEPT)
        self.board: Board | None = None
        if settings.tensorboard:
            self.board = Board(folder / "tensorboard", start)
        self.tracker: Any = None  # extras.reports.tracker.Tracker, a process that follows the file
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
        try:
            self.file.flush()
            files.sync_handle(self.file.fileno())
        except OSError as error:
            error.filename = self.file.name  # it knows only the handle
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        if self.board:
            self.board.close()
        if self.tracker:
            self.tracker.close()


class Board:
    """TensorBoard: every finite number of a row, by its kind and name. If it fails, training
    continues without it."""

    def __init__(self, folder: pathlib.Path, start: int):
        """Drops the numbers of steps after `start`."""
        # a package that a run without it need not have
        from torch.utils.tensorboard import SummaryWriter

        self.writer: SummaryWriter | None = None
        try:
            self.writer = SummaryWriter(folder, purge_step=start + 1)
        except OSError as error:
            log.warning("TensorBoard: %s; training continues without it", error)

    def write(self, row: dict) -> None:
        if not self.writer:
            return
        try:
            for key, value in config.flatten(row).items():
                if key in ("step", "batch_digest"):
                    continue
                if isinstance(value, int | float) and math.isfinite(value):
                    self.writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])
        except Exception as error:  # it re-raises whatever its writer thread raised
            self.writer = None
            log.warning("TensorBoard: %s; it gets no more rows of this launch", error)

    def close(self) -> None:
        if self.writer:
            with contextlib.suppress(Exception):
                self.writer.close()


def read_rows(path: pathlib.Path) -> list[dict]:
    """Rows of a metrics.jsonl. Skips invalid lines, such as a last one that a kill truncated."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if is_row(row):
                rows.append(row)
    return rows


def is_row(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("kind"), str) and type(value.get("step")) is int


def has_row(path: pathlib.Path, kind: str, step: int) -> bool:
    """Whether a metrics.jsonl holds a row of this kind and step."""
    return any(row["kind"] == kind and row["step"] == step for row in read_rows(path))


def mean(sums: list[float], count: int) -> float | None:
    """The sum of the sums over the count; None for a count of 0."""
    if not count:
        return None
    return sum(sums) / count


def missing_losses(evaluation: dict) -> list[str]:
    """A line for each validation loss that an evaluation's result lacks: without a target there is
    none."""
    if evaluation["loss"] is None:
        return ["no validation loss: no token of the validation data has a loss"]
    lines = []
    for name, loss in evaluation.get("loss_by_source", {}).items():
        if loss is None:
            lines.append(
                f"no validation loss of {name}: no token of its validation data has a loss"
            )
    return lines


def as_numbers(value: Any) -> Any:
    """A scalar tensor as a number, also inside of dictionaries."""
    if isinstance(value, dict):
        return {key: as_numbers(inner) for key, inner in value.items()}
    return float(value)


def as_json(row: dict) -> str:
    """One line of JSON; non-finite numbers become null."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None))


def console_line(row: dict, steps: int, shows_time_left: bool = True) -> str:
    """At most 100 columns for up to 9,999,999 steps. Its loss is the mean over the steps since the
    last line."""
    loss = "   none"
    if row["loss_mean"] is not None:
        loss = f"{row['loss_mean']:7.4f}"
    unit = "tokens/s/device"
    if row["mfu"] is not None:
        unit = f"tok/s/GPU  mfu {row['mfu']:5.1%}"
    line = (
        f"step {row['step']:>{len(str(steps))}}/{steps}  loss {loss}  "
        f"grad {row['grad_norm']:5.2f}  {row['tokens_per_second_per_device']:>6,.0f} {unit}  "
        f"{row['peak_memory_gib']:4.1f} GiB"
    )
    if shows_time_left:
        line += f"  left {duration((steps - row['step']) * row['step_seconds'])}"
    return line


def shown_epochs(epochs: float | dict[str, float | None]) -> str:
    """0.62 epochs; of a mixture 1.2 epochs of web, 0.31 epochs of code."""
    if not isinstance(epochs, dict):
        return f"{epochs:.3g} epochs"
    shares = []
    for name, count in epochs.items():
        number = "an unknown part" if count is None else f"{count:.3g} epochs"
        shares.append(f"{number} of {name}")
    return ", ".join(shares)


def duration(seconds: float) -> str:
    """5m00s, 2h05m."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{minutes}m{seconds:02}s"
