"""What a run reports: console, metrics.jsonl, TensorBoard."""

import contextlib
import json
import logging
import math
import os
import pathlib
import resource
import sys
import time
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

# Dense bfloat16 TFLOP/s from the data sheets. The keys are substrings of CUDA's device names. The
# longest match counts.
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
# Bytes of rows (tens of thousands) that wait in memory while they cannot be written.
BUFFER_BYTES = 2**24
NO_TARGETS = "no validation loss: no token of the validation text has a loss"


class Recorder:
    """Counts the steps and reports them. All ranks must call each method together. Rank 0 writes rows
    and console."""

    def __init__(
        self,
        cfg: config.Config,
        world: World,
        folder: pathlib.Path,
        progress: Progress,
        dataset: Dataset,
        seconds: dict[str, float],
    ):
        """progress: at the step that training resumes after. seconds: Run.seconds. Its phase "data",
        the wait for the loader, counts as part of the steps, but "evaluation" and "save" do not."""
        self.cfg = cfg
        self.world = world
        self.folder = folder
        self.start = progress.step
        remaining_steps = max(0, cfg.train.steps - progress.step)
        # How many samples will have been read when all steps are trained.
        self.samples = progress.samples + remaining_steps * cfg.train.global_batch_size
        remaining = dataset.by_source(progress.samples, self.samples)
        self.samples_by_source = add_counts(progress.samples_by_source, remaining)
        self.dataset = dataset
        self.flops_per_token = flops_per_token(meta_model(cfg.model, cfg.lora), cfg.train.seq_len)
        self.seconds = seconds
        self.rows = Rows(folder, cfg.log.tensorboard, self.start) if world.rank == 0 else None
        self._begin_row()

    def _begin_row(self) -> None:
        """Resets the counts for the next row."""
        self.began = time.perf_counter()
        self.seconds_before = self.seconds.copy()
        self.steps = 0
        self.loss = torch.zeros(())  # the sum over the steps; the first step moves it to the device
        self.valid_tokens = 0

    def log_start(self, model: Llama, units: str, warnings: list[str]) -> None:
        """Logs warnings, the model's size, the mesh, where training starts, notes on the data, and the
        table of units."""
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
        if warmup > steps:  # a short trial of a configuration
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

        progress: after the step. batch: a data.loader.Batch. sums, scalars: from training_step().
        stopping: whether the run stops after this step.
        """
        step = progress.step
        self.steps += 1
        if batch.valid_tokens:  # without targets there is no loss, but perhaps a block's terms
            self.loss = self.loss + sums["loss"]
            self.valid_tokens += batch.valid_tokens
        is_due = step % self.cfg.log.every_steps == 0 or step in (1, self.cfg.train.steps)
        if stopping or is_due:
            row = self._train_row(progress, batch, sums, scalars)
            if self.rows:
                self.rows.write(row)
                is_first = step == self.start + 1  # the first step takes longer
                log.info(console_line(row, self.cfg.train.steps, shows_time_left=not is_first))
            self._begin_row()

    def _train_row(
        self, progress: Progress, batch: Any, sums: dict[str, torch.Tensor], scalars: dict[str, Any]
    ) -> dict[str, Any]:
        """The row of the steps since the last one. Waits for the device. Collective."""
        world = self.world
        # These names have spaces, so that no block's term of the loss has them.
        counted = {"losses since the row": self.loss.item(), "batch digest": batch.digest}
        counted |= {name: value.item() for name, value in sums.items()}
        figures = self._figures()  # item() has waited for the device, so the time is complete
        ranks = all_gather_objects((counted, figures))
        # tp ranks hold equal sums. cp ranks hold the sums of their part of the sequence.
        counts = [counted for counted, _ in ranks[:: world.tp]]
        totals = {name: sum(count[name] for count in counts) for name in counted}
        # All cp and tp ranks of a data rank have the same samples.
        digest = sum(counted["batch digest"] for counted, _ in ranks[:: world.cp * world.tp])
        seconds = max(figures["step_seconds"] for _, figures in ranks)
        rate = config.tokens_per_step(self.cfg.train) / world.size / seconds
        peak = peak_flops(world.device)
        row = {
            "kind": "train",
            "step": progress.step,
            "steps": self.steps,
            # The loss and blocks' terms, as means over this step's tokens.
            **{name: ratio(totals[name], batch.valid_tokens) for name in sums},
            # The mean over the tokens of all steps since the last row.
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
        """This rank's peak memory, and its time per step since the last row, without evaluations and
        saves."""
        spent = {name: self.seconds[name] - self.seconds_before[name] for name in self.seconds}
        seconds = time.perf_counter() - self.began
        seconds -= spent.get("evaluation", 0) + spent.get("save", 0)
        return {
            "step_seconds": seconds / self.steps,
            "data_seconds": spent.get("data", 0) / self.steps,
            "peak_memory_gib": peak_memory_gib(self.world.device),
        }

    def start_is_evaluated(self) -> bool:
        """Whether an earlier launch has evaluated the step that this one resumes after. Collective."""
        return on_rank_zero(lambda: self.rows is not None and self.rows.is_evaluated)

    def log_evaluation(self, step: int, result: dict | None) -> None:
        """result: from Evaluation.result(); None if it was stopped."""
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
    """Writes metrics.jsonl, flushing each row, and TensorBoard's files, on rank 0. If writing fails,
    training continues, and the rows stay in the file's buffer until the next flush."""

    def __init__(self, folder: pathlib.Path, tensorboard: bool, start: int):
        """start: the step that training resumes after."""
        path = folder / "metrics.jsonl"
        # A buffered file has a lock, which it needs: saves call sync() from their thread.
        self.file = path.open("ab", buffering=BUFFER_BYTES)
        self.is_evaluated = drop_rows(path, start)
        self.board: Any = None
        if tensorboard:
            # Imported here, because a run without TensorBoard need not have the package.
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=start + 1)

    def write(self, row: dict) -> None:
        """Writes a row. TensorBoard gets its finite numbers, by kind and name."""
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
        except Exception as error:  # TensorBoard raises whatever its writer thread raised
            self.board = None
            log.warning("TensorBoard: %s; it gets no more rows of this launch", error)

    def sync(self) -> None:
        """Raises OSError."""
        try:
            self.file.flush()
            system.sync_handle(self.file.fileno())
        except OSError as error:
            error.filename = self.file.name  # errors of fsync() have no file name
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):  # write() has warned
            self.file.close()
        if self.board:
            with contextlib.suppress(OSError):
                self.board.close()


def drop_rows(path: pathlib.Path, start: int) -> bool:
    """Drops the rows of steps after `start`, so that (kind, step) stays unique, and a last line that a
    kill has cut. Returns whether the file has the evaluation of `start`. Raises OSError."""
    is_evaluated = False
    if not path.exists():
        return is_evaluated
    offset = 0
    end = 0  # of the last row to keep
    with path.open("rb") as file:
        for line in file:
            offset += len(line)
            with contextlib.suppress(ValueError, KeyError, TypeError):  # an invalid line
                row = json.loads(line)
                if row["step"] <= start and line.endswith(b"\n"):
                    end = offset
                    is_evaluated |= row["step"] == start and row["kind"] == "eval"
    os.truncate(path, end)
    return is_evaluated


def ratio(total: float, count: int) -> float | None:
    """total / count, or None if count is 0: without targets there is no mean."""
    return total / count if count else None


def as_numbers(value: Any) -> Any:
    """A scalar tensor as a number. Dictionaries of scalars may be nested."""
    if isinstance(value, dict):
        return {key: as_numbers(inner) for key, inner in value.items()}
    return float(value)


def as_json(row: dict) -> str:
    """One line of JSON. Non-finite numbers become null."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None))


def console_line(row: dict, steps: int, shows_time_left: bool = True) -> str:
    """A training row as text of at most 100 columns for up to 9,999,999 steps. Its loss is the mean
    over the steps since the last line."""
    loss = "   none" if row["loss_mean"] is None else f"{row['loss_mean']:7.4f}"
    unit = "tokens/s/device" if row["mfu"] is None else f"tok/s/GPU  mfu {row['mfu']:5.1%}"
    line = (
        f"step {row['step']:>{len(str(steps))}}/{steps}  loss {loss}  "
        f"grad {row['grad_norm']:5.2f}  {row['tokens_per_second_per_device']:>6,.0f} {unit}  "
        f"{row['peak_memory_gib']:4.1f} GiB"
    )
    if shows_time_left:
        line += f"  left {duration((steps - row['step']) * row['step_seconds'])}"
    return line


def shown_epochs(epochs: float | dict[str, float] | None) -> str:
    """As in "0.62 epochs in ", or "1.2 epochs of web, 0.31 epochs of code in " for a mixture."""
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
    """The device's dense bfloat16 FLOP/s by the data sheet. None, and so no MFU, if it is unknown."""
    if device.type != "cuda":
        return None
    return data_sheet_peak(torch.cuda.get_device_name(device))


def data_sheet_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s by CUDA's device name, such as "NVIDIA A100-SXM4-80GB", or None."""
    if {"Laptop", "MIG", "Ti", "D"} & {*name.split()}:  # another chip of this name, or a slice
        return None
    known = [chip for chip in PEAK_TFLOPS if chip in name]
    if not known:
        return None
    return PEAK_TFLOPS[max(known, key=len)] * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """The peak so far of memory allocated on the GPU or, on a CPU, of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB; on macOS in bytes
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
