"""A run's checkpoints: saved in the training thread or behind it; those that need not stay removed."""

import contextlib
import pathlib
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config
from checkpoint import catalog
from checkpoint.load import first_cause, tensors_of
from checkpoint.manifest import hash_files
from checkpoint.writer import Writer, sync, write_manifest

MIB = 2**20


class SaveFailed(Exception):
    """A checkpoint could not be written, on any rank; the earlier ones are as they were. Raised on all ranks."""


class Saver:
    """Saves a run's checkpoints. Every method but wait() is called by all ranks together, and raises SaveFailed on all
    of them or on none.

    With async_save the training thread waits for a copy of the shards into host memory, which stays allocated; the
    rest happens in a thread, with a process group of its own. One save at a time: a new one waits for the last.
    """

    def __init__(self, cfg: config.Config, verified: Collection[int], extra_files: list[pathlib.Path]):
        """`verified`: steps whose checkpoints are known to be good. extra_files (the tokenizer) are copied along."""
        self.cfg, self.extra_files, self.verified = cfg, extra_files, set(verified)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.longest_timeout(cfg)))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.staged: dict[str, Tensor] = {}
        self.device: torch.device | None = None  # of the GPU that it is copied from
        self.hurried = False  # somebody waits for the end: what may be left for the next launch is left
        self.thread: threading.Thread | None = None
        self.outcome: tuple[int, BaseException | None] | None = None  # (step, error), until asked for
        self.warnings: list[str] = []
        self.before_publishing: Callable[[], Any] = lambda: None  # on rank 0; may refuse with an OSError

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, purge: bool = True
             ) -> None:
        """Writes the checkpoint of a step; `state` must be JSON. Its success or failure is in poll() or finish()."""
        assert self.outcome is None and self.thread is None, "finish() the last save first"
        tensors = tensors_of(model, optimizer)
        if self.cfg.checkpoint.async_save:
            tensors = self._stage(tensors)
            self.thread = threading.Thread(target=self._run, args=(step, tensors, state, purge), name="saver")
            self.thread.start()
        else:
            self._run(step, tensors, state, purge)

    def poll(self) -> int | None:
        """The step that has been saved since the last question, None for none yet. Raises SaveFailed, and
        FloatingPointError where an update from finite gradients has made weights or moments that are not: no checkpoint
        may hold them."""
        if self.thread and self.thread.is_alive():
            return None
        return self.finish()

    def finish(self) -> int | None:
        """As poll(), but waits for a save under way."""
        if self.thread:
            self.thread.join()
        self.thread, outcome, self.outcome = None, self.outcome, None
        if outcome and outcome[1]:
            raise outcome[1]
        return outcome and outcome[0]

    def wait(self, seconds: float | None = None) -> None:
        """Lets a save under way end, well or not; from any thread."""
        if thread := self.thread:
            thread.join(seconds)

    def _run(self, step: int, tensors: dict[str, Tensor], state: dict, purge: bool) -> None:
        if self.device:  # each thread has a current device of its own, and DCP looks at it
            torch.cuda.set_device(self.device)
        try:
            self._write(step, tensors, state)
            self.outcome = (step, None)
        except BaseException as error:
            self.outcome = (step, error)
            return
        if purge:
            self.purge()

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors in host memory, sharded as they are. The memory is kept for the next save: fresh pages
        would cost as much again as the copy."""
        local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        if not self.staged:
            self.staged = {name: torch.empty_like(t, device="cpu") for name, t in local.items()}
            self.device = next((t.device for t in local.values() if t.is_cuda), None)
            for held in self.staged.values() if self.device else ():
                # pinned where it lies: torch's own pinned memory comes in powers of two
                torch.cuda.cudart().cudaHostRegister(held.data_ptr(), held.nbytes, 0)
        for name, held in self.staged.items():
            held.copy_(local[name], non_blocking=True)
        if self.device:
            torch.cuda.current_stream(self.device).synchronize()
        # Not DTensor.from_local: that would move the copy back to the mesh's device.
        return {name: DTensor(self.staged[name], t._spec, requires_grad=False) if isinstance(t, DTensor)
                else self.staged[name] for name, t in tensors.items()}

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict) -> None:
        final, temporary = catalog.path_of(self.cfg, step), catalog.temporary_of(self.cfg, step)

        def make_room() -> None:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            size = sum(t.numel() * t.element_size() for t in tensors.values())  # of a DTensor: the whole, once
            # beside its bytes each shard has a header and an entry in the metadata
            needed, free = size + 4096 * len(tensors) * self.ranks, shutil.disk_usage(temporary).free
            if needed > free:
                raise OSError(f"needs {needed / MIB:,.1f} MiB, {free / MIB:,.1f} MiB are free")

        def publish() -> None:
            entries = {name: entry for part in hashed for name, entry in part.items()}
            # a network's file system may not have listed all files to the rank that made them
            if missing := writer.files - entries.keys():
                raise OSError(f"{', '.join(sorted(missing))} cannot be seen by who wrote it")
            write_manifest(temporary, self.extra_files, state, entries)
            for folder in final.absolute().parents[3:]:  # with output_dir folders above it may be new
                with contextlib.suppress(OSError):  # what refuses, another user's or read-only, is not
                    sync(folder)
            self.before_publishing()
            temporary.rename(final)
            try:
                for folder in (final.parent, *final.absolute().parents[1:3]):  # the run's first save made them all
                    sync(folder)
            except OSError:
                final.rename(temporary)
                raise

        writer = Writer(temporary)
        try:
            self._together(make_room, only=0)
            with ThreadPoolExecutor(1) as beside:  # the disk is slower than the look at what goes there
                finite = beside.submit(_all_finite, tensors)
                self._together(lambda: dcp.save(tensors, storage_writer=writer, process_group=self.group))
            if not all(self._together(finite.result)):
                raise FloatingPointError(f"step {step}: the update made weights that are not finite, and they were not "
                                         "saved; a lower optim.lr or a longer warm-up may help")
            # by the rank that wrote them, while they are in its memory still
            hashed = self._together(lambda: hash_files(temporary, [p.name for p in temporary.glob(
                f"__{self.rank}_*.distcp")]))
            self._together(publish, only=0)
        except (SaveFailed, FloatingPointError) as error:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, SaveFailed):
                raise SaveFailed(f"{final}: {error}") from None
            raise
        self.verified.add(step)

    def _together(self, work: Callable[[], Any], only: int | None = None) -> list:
        """What `work` returned, by rank; with `only` it runs on that rank alone. Raises SaveFailed on all ranks where
        it failed on any."""
        answer = [None, None]
        try:
            if only in (None, self.rank):
                answer[0] = work()
        except dcp.CheckpointException as error:  # a BaseException
            answer[1] = first_cause(error)
        except Exception as error:
            answer[1] = f"rank {self.rank}: {type(error).__name__}: {error}"
        answers: list = [None] * self.ranks
        dist.all_gather_object(answers, answer, group=self.group)
        if failed := [error for _, error in answers if error]:
            raise SaveFailed(failed[0])
        return [value for value, _ in answers]

    def purge(self) -> None:
        """Removes the checkpoints before the last keep_last good ones, but for milestones. What this launch has not
        seen to be good is verified before it counts."""
        last, every, good = self.cfg.checkpoint.keep_last, self.cfg.checkpoint.keep_every_steps, 0
        if not last:
            return
        try:
            for step in reversed(self._together(lambda: catalog.steps(self.cfg), only=0)[0]):
                if self._together(lambda: self.hurried, only=0)[0]:  # as rank 0 sees it: all must do the same
                    return
                if good == last:
                    if not (every and step % every == 0):
                        self._together(lambda step=step: catalog.remove(self.cfg, step), only=0)
                elif step in self.verified or self._is_good(step):
                    self.verified.add(step)
                    good += 1
        except SaveFailed as error:  # the new checkpoint is safe; removing is tried again after the next
            self.warnings.append(f"old checkpoints could not be removed: {error}")

    def _is_good(self, step: int) -> bool:
        found = self._together(lambda: catalog.problems_of(catalog.path_of(self.cfg, step), self.rank, self.ranks))
        problems = [problem for part in found for problem in part]
        self.warnings += [f"kept, but not counted as a checkpoint: {problem}" for problem in problems]
        return not problems


def _all_finite(tensors: dict[str, Tensor]) -> bool:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    # NaN and infinity both show in the extremes, for a tenth of isfinite()'s time; one wait for the device, not many
    extremes = [part.float() for t in local if t.numel() for part in t.aminmax()]
    return bool(torch.stack(extremes).isfinite().all()) if extremes else True
