"""Writes checkpoints from all ranks together, in the training thread or in the background, and removes old ones."""

import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

import config
import files
from checkpoint import catalog
from checkpoint.load import first_cause
from checkpoint.manifest import hash_files
from checkpoint.writer import Writer, write_manifest

MIB = 2**20


class SaveFailed(Exception):
    """A checkpoint could not be written, on any rank; the earlier ones are as they were. Raised on all ranks."""


class Saver:
    """Writes and removes a run's checkpoints. Its methods are called by all ranks together, from any one thread at a
    time (it has a process group of its own), and raise SaveFailed on all of them or on none."""

    def __init__(self, cfg: config.Config, verified: int, extra_files: list[pathlib.Path]):
        """verified: a step whose checkpoint is known to be good. extra_files (the tokenizer) are copied into each."""
        self.cfg, self.verified, self.extra_files = cfg, {verified}, extra_files
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.longest_timeout(cfg)))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.hurried = False  # somebody waits for the end: purging is left to the next launch
        self.warnings: list[str] = []
        self.before_publishing: Callable[[], None] = lambda: None  # on rank 0; may refuse with an OSError

    def write(self, step: int, tensors: dict[str, Tensor], state: dict) -> None:
        """Writes the checkpoint of a step; `state` must be JSON. Raises FloatingPointError where an update from finite
        gradients has made weights or moments that are not: no checkpoint may hold them."""
        final, temporary = catalog.path_of(self.cfg, step), catalog.temporary_of(self.cfg, step)

        def make_room() -> None:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            size = sum(t.numel() * t.element_size() for t in tensors.values())  # of a DTensor: the full one, once
            # each shard also has a header, and an entry in the metadata
            needed, free = size + 4096 * len(tensors) * self.ranks, shutil.disk_usage(temporary).free
            if needed > free:
                raise OSError(f"needs {needed / MIB:,.1f} MiB, {free / MIB:,.1f} MiB are free")

        def publish() -> None:
            entries = {name: entry for part in hashed for name, entry in part.items()}
            # a network's file system may not have listed all files to the rank that made them
            if missing := writer.files - entries.keys():
                raise OSError(f"{', '.join(sorted(missing))} cannot be seen by who wrote it")
            write_manifest(temporary, self.extra_files, state, entries)
            self.before_publishing()
            files.publish(temporary, final)

        writer = Writer(temporary)
        try:
            self._together(make_room, only=0)
            with ThreadPoolExecutor(1) as pool:  # overlaps the NaN/Inf check with the write
                finite = pool.submit(_all_finite, tensors)
                self._together(lambda: dcp.save(tensors, storage_writer=writer, process_group=self.group))
            if not all(self._together(finite.result)):
                raise FloatingPointError(f"step {step}: the update made weights that are not finite, and they were not "
                                         "saved; a lower optim.lr or a longer warm-up may help")
            # by the rank that wrote them, while they are in its page cache still
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
        """Removes the checkpoints before the last keep_last good ones, except milestones. What this launch has not
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
        except SaveFailed as error:  # the new checkpoint is safe; the next purge tries again
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
