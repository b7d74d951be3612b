"""What a run reports: console, metrics.jsonl, TensorBoard."""

import contextlib
import json
import logging
import math
import mmap
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import config
import system
from data.dataset import Dataset
from model.build import meta_model
from model.llama import Llama, flops_per_token, parameter_count
from optim import Progress, add_counts
from parallel.mesh import World
from parallel.ranks import all_gather_objects, on_rank_zero

log = logging.getLogger("train")

# Dense bfloat16 TFLOP/s by the data sheets, by a substring of CUDA's name of the device; the longest
# that matches counts.
PEAK_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H800 PCIe": 756,
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
# bytes of rows that wait in memory while they cannot be written: tens of thousands
ROWS_KEPT = 2**24
NO_TARGETS = "no validation loss: no token of the validation text has a loss"


class Recorder:
    """Counts the steps and reports them. All ranks must call it alike; rank 0 writes rows and
    console."""

    def __init__(
        self,
        cfg: config.Config,
        world: World,
        folder: pathlib.Path,
        progress: Progress,
        dataset: Dataset,
        seconds: dict[str, float],
    ):
        """progress: as of the step that training resumes after; seconds: Run.seconds, of which
        "data", the wait for the loader, is part of the steps, and "evaluation" and "save" are
        not."""
        self.cfg = cfg
        self.world = world
        self.folder = folder
        self.start = progress.step
        remaining_steps = max(0, cfg.train.steps - progress.step)
        # read when all steps are trained
        self.samples = progress.samples + remaining_steps * cfg.train.global_batch_size
        remaining = dataset.by_source(progress.samples, self.samples)
        self.samples_by_source = add_counts(progress.samples_by_source, remaining)
        self.dataset = dataset
        self.flops_per_token = flops_per_token(meta_model(cfg.model, cfg.lora), cfg.train.seq_len)
        self.seconds = seconds
        self.rows = Rows(folder, cfg.log.tensorboard, self.start) if world.rank == 0 else None
        self._begin_row()

    def _begin_row(self) -> None:
        """Begins to count the steps of the next row."""
        self.began = time.perf_counter()
        self.seconds_before = self.seconds.copy()
        self.steps = 0
        self.loss = torch.zeros(())  # the sum over the steps, on the device from the first step on
        self.valid_tokens = 0

    def _is_due(self, step: int) -> bool:
        return step % self.cfg.log.every_steps == 0 or step in (1, self.cfg.train.steps)

    def log_start(self, model: Llama, units: str, warnings: list[str]) -> None:
        """Logs the warnings; the model's size, its parallelism, where it starts from, and whether it
        ends in its warm-up; notes on the data; the table of units."""
        cfg = self.cfg
        world = self.world
        steps = cfg.train.steps
        if self.start:
            origin = f"resuming after step {self.start}"
        elif cfg.model.init_from:
            origin = f"from the weights of {cfg.model.init_from}"
        else:
            origin = "from fresh weights"
        epochs = self.dataset.epochs(self.samples, self.samples_by_source)
        origin = f"{shown_epochs(epochs)}{steps:,} steps; {origin}"
        mesh = f"{world.dp_replicate} replicas x {world.dp_shard} shards"
        if world.cp * world.tp > 1:
            mesh += f" x cp {world.cp} x tp {world.tp}"
        lines = [
            f"{self.folder}: {parameter_count(model):,} parameters on {world.size} x "
            f"{world.device.type} ({mesh}), {cfg.parallel.param_dtype}",
            f"{config.tokens_per_step(cfg.train):,} tokens per step = "
            f"{config.accumulation_steps(cfg.train, world.dp_size)} micro-batches x {world.dp_size} data "
            f"ranks x {config.micro_batch_size(cfg.train, world.dp_size)} sequences of "
            f"{cfg.train.seq_len}; {origin}",
        ]
        if self.rows is None:
            return
        warmup = cfg.optim.warmup_steps
        if warmup > steps:  # as in a short trial of a configuration
            share = f"{100 * steps / warmup:.3g} %"
            lines.append(f"the run ends in its warm-up of {warmup:,} steps, at {share} of the peak")
        for text in warnings:
            log.warning(text)
        for text in (*lines, *self.dataset.notes(), units):
            log.info(text)

    def log_step(
        self,
        progress: Progress,
        batch: Any,
        sums: dict[str, torch.Tensor],
        scalars: dict[str, Any],
        stopping: bool = False,
    ) -> None:
        """Counts a step. If a row is due, waits for the device, gathers every rank's figures and
        writes the row.

        progress: after the step; batch: a data.loader.Batch; sums, scalars (or dictionaries of
        them): as training_step() returns them; stopping: whether the run stops after this step.
        """
        step = progress.step
        self.steps += 1
        if batch.valid_tokens:  # else the sum holds no loss, only a block's terms, if any
            self.loss = self.loss + sums["loss"]
            self.valid_tokens += batch.valid_tokens
        if stopping or self._is_due(step):
            row = self._train_row(progress, batch, sums, scalars)
            if self.rows:
                self.rows.write(row)
                is_first = step == self.start + 1  # which takes longer than those that follow
                log.info(console_line(row, self.cfg.train.steps, shows_time_left=not is_first))
            self._begin_row()

    def _train_row(
        self,
        progress: Progress,
        batch: Any,
        sums: dict[str, torch.Tensor],
        scalars: dict[str, Any],
    ) -> dict[str, Any]:
        """The row of the steps since the last one. Waits for the device. Collective."""
        world = self.world
        # names that no block's term of the loss has
        counted = {"losses since the row": self.loss.item(), "batch digest": batch.digest}
        counted |= {name: value.item() for name, value in sums.items()}
        figures = self._figures()  # item() waited until the device is done: before the clock
        ranks = all_gather_objects((counted, figures))
        # tp ranks have the same sums, cp ranks those of their part of the sequence
        totals = {}
        for name in counted:
            totals[name] = sum(counted[name] for counted, _ in ranks[:: world.tp])
        # the ranks of a tp or cp group have the same samples
        digest = sum(counted["batch digest"] for counted, _ in ranks[:: world.cp * world.tp])
        seconds = max(figures["step_seconds"] for _, figures in ranks)
        rate = config.tokens_per_step(self.cfg.train) / world.size / seconds
        peak = peak_flops(world.device)
        row = {
            "kind": "train",
            "step": progress.step,
            "steps": self.steps,
            # of this step: the loss and a block's terms, over its tokens
            **{name: ratio(totals[name], batch.valid_tokens) for name in sums},
            # of all steps since the last row, over their tokens
            "loss_mean": ratio(totals["losses since the row"], self.valid_tokens),
            **{name: as_numbers(value) for name, value in scalars.items()},  # grad_norm, lr
            "tokens": progress.tokens,
            "tokens_per_second_per_device": rate,
            "mfu": rate * self.flops_per_token / peak if peak else None,
            **figures,  # of rank 0
            "epochs": self.dataset.epochs(progress.samples, progress.samples_by_source),
        }
        row["batch_digest"] = digest % config.DIGEST_MODULUS
        return row

    def _figures(self) -> dict[str, float]:
        """This rank's time per step since the last row, without evaluations and saves, and its
        memory."""
        spent = {name: self.seconds[name] - self.seconds_before[name] for name in self.seconds}
        seconds = time.perf_counter() - self.began
        seconds -= spent.get("evaluation", 0) + spent.get("save", 0)
        return {
            "step_seconds": seconds / self.steps,
            "data_seconds": spent.get("data", 0) / self.steps,
            "peak_memory_gib": peak_memory_gib(self.world.device),
        }

    def start_is_evaluated(self) -> bool:
        """Whether a launch before has evaluated the step that this one resumes after. Collective."""
        return on_rank_zero(lambda: self.rows is not None and self.rows.is_evaluated)

    def log_evaluation(self, step: int, result: dict | None) -> None:
        """result: that of an Evaluation, None if it was stopped."""
        if self.rows is None or result is None:
            return
        self.rows.write({"kind": "eval", "step": step, **result})
        if result["loss"] is None:
            log.warning("step %d  %s", step, NO_TARGETS)
            return
        line = f"step {step}  validation loss {result['loss']:.4f}"
        if not math.isnan(result["bits_per_byte"]):
            line += f", {result['bits_per_byte']:.4f} bits per byte"
        log.info(line)

    def sync(self) -> None:
        """Syncs the rows written so far to disk. Rank 0 only. Raises OSError."""
        assert self.rows is not None
        self.rows.sync()

    def close(self) -> None:
        if self.rows:
            self.rows.close()


class Rows:
    """Writes metrics.jsonl, flushing each row, and TensorBoard's files, on rank 0. If it cannot,
    training continues: rows of metrics.jsonl stay in the file's buffer for the next flush."""

    def __init__(self, folder: pathlib.Path, tensorboard: bool, start: int):
        """start: the step that training resumes after."""
        path = folder / "metrics.jsonl"
        # has a lock: saves sync in their own thread
        self.file = path.open("ab", buffering=ROWS_KEPT)
        self.is_evaluated = drop_rows(path, start)
        self.board: Any = None
        if tensorboard:
            # a package that a run without it need not have
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=start + 1)

    def write(self, row: dict) -> None:
        """Writes a row: to TensorBoard each finite number of it, by its kind and name."""
        try:
            self.file.write(as_json(row).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            log.warning("metrics.jsonl: %s; its rows wait in memory", error)
        try:
            for key, value in config.flatten(row).items() if self.board else ():
                is_number = isinstance(value, int | float) and math.isfinite(value)
                if is_number and key not in ("step", "steps", "batch_digest"):
                    self.board.add_scalar(f"{row['kind']}/{key}", value, row["step"])
        except Exception as error:  # it re-raises whatever its writer thread raised
            self.board = None
            log.warning("TensorBoard: %s; it gets no more rows of this launch", error)

    def sync(self) -> None:
        """Raises OSError."""
        try:
            self.file.flush()
            system.sync_handle(self.file.fileno())
        except OSError as error:
            error.filename = self.file.name  # it knows only the handle
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):  # as write(), which has warned
            self.file.close()
        if self.board:
            with contextlib.suppress(OSError):
                self.board.close()


def drop_rows(path: pathlib.Path, start: int) -> bool:
    """Drops the rows of steps after `start`, so that (kind, step) stays unique. Returns whether the
    evaluation of `start` is in the file. Raises OSError."""
    is_evaluated = False
    if not path.exists():
        return is_evaluated
    end = 0  # of the last row to keep
    for offset, row in rows_backwards(path):
        if row["step"] > start:
            continue
        end = end or offset
        if row["step"] < start:
            break
        is_evaluated |= row["kind"] == "eval"
    os.truncate(path, end)
    return is_evaluated


def rows_backwards(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
    """(where its line ends, row) of a metrics.jsonl, the last one first: a resume reads no more of a
    million rows than it drops."""
    if not path.stat().st_size:  # which cannot be mapped
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n") + 1  # a kill may have truncated the last line
        while end:
            begin = text.rfind(b"\n", 0, end - 1) + 1
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line
                row = json.loads(text[begin:end])
                yield end, {"step": row["step"], "kind": row["kind"]}
            end = begin


def read_rows(path: pathlib.Path) -> Iterator[dict]:
    """Rows of a metrics.jsonl. Skips invalid lines, such as a last one that a kill truncated."""
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def ratio(total: float, count: int) -> float | None:
    """total / count; None for a count of 0: without a target there is no mean."""
    return total / count if count else None


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


def shown_epochs(epochs: float | dict[str, float] | None) -> str:
    """0.62 epochs in; of a mixture 1.2 epochs of web, 0.31 epochs of code in; None: nothing."""
    if epochs is None:
        return ""
    if not isinstance(epochs, dict):
        return f"{epochs:.3g} epochs in "
    texts = [f"{count:.3g} epochs of {name}" for name, count in epochs.items()]
    return f"{', '.join(texts)} in "


def duration(seconds: float) -> str:
    """5m00s, 2h05m."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{minutes}m{seconds:02}s"


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s by the data sheet; None, and so no MFU, for an unknown device."""
    if device.type != "cuda":
        return None
    return data_sheet_peak(torch.cuda.get_device_name(device))


def data_sheet_peak(name: str) -> float | None:
    """The dense bfloat16 peak of a device by its name of CUDA, such as "NVIDIA A100-SXM4-80GB", in
    FLOP/s."""
    if {"Laptop", "MIG", "Ti", "D"} & {*name.split()}:  # another chip, or a slice, of the same name
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
