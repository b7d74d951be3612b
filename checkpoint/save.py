"""Writes checkpoints, from all ranks together, and removes old ones."""

import errno
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as torch_config

import config
import system
from checkpoint import catalog
from checkpoint.load import first_cause
from checkpoint.manifest import MANIFEST, METADATA, STATE, HashedFile, entry_of, render_manifest
from config import Problems
from parallel.materialize import local_tensor
from parallel.ranks import all_gather_objects, on_each_rank, on_rank_zero
from parallel.torch_patches import IS_TORCH_2_11

DISK_FULL_HINT = (
    "; an old checkpoint is removed once the new one is complete, so the disk needs room for one more "
    "than checkpoint.keep_last: keep fewer, free some space, or choose another run.output_dir"
)
log = logging.getLogger("train")


class SaveFailed(Problems):
    """At least one rank could not write a checkpoint. Earlier checkpoints are untouched. Raised on all
    ranks."""


class Saver:
    """Writes and removes a run's checkpoints. All ranks must call its methods together. Each may use
    any thread, but one at a time, since the Saver has its own process group. Methods raise SaveFailed
    on all ranks or on none."""

    def __init__(
        self, root: pathlib.Path, settings: config.Checkpoint, extra_files: Sequence[pathlib.Path]
    ):
        """root: the folder of the run's checkpoints. extra_files: the tokenizer, which is copied into
        each checkpoint."""
        self.root = root
        self.settings = settings
        # Read now, because the folder of prepared data may be deleted during the run.
        self.extra_files = {path.name: path.read_bytes() for path in extra_files}
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self.group = group
        self.stopping = False  # whether the run is stopping: then purge() does nothing

    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the checkpoint of a step. state: must be JSON-serializable. before_publishing: called
        on rank 0; its OSError is only a warning. Raises FloatingPointError if weights or optimizer
        state are not finite: these are never saved."""
        final = catalog.path_of(self.root, step)
        temporary: pathlib.Path | None = None

        def publish(folder: pathlib.Path, by_rank: list[tuple[bool, dict]]) -> None:
            entries: dict[str, dict] = {}
            for _, entries_of_rank in by_rank:
                entries |= entries_of_rank
            write_manifest(folder, self.extra_files, state, entries)
            try:
                before_publishing()
            except OSError as error:  # another file, perhaps on another disk
                problem = f"{error.filename}: {error.strerror}"
                log.warning(
                    "%s: its last rows are not on disk; step %d is saved anyway", problem, step
                )
            system.publish(folder, final)

        try:
            temporary = self._on_rank_zero(partial(make_folder, self.root, step))
            assert temporary
            written = self._on_each_rank(partial(self._write_shards, temporary, tensors))
            by_rank = all_gather_objects(written, self.group)
            if not all(finite for finite, _ in by_rank):
                raise FloatingPointError(
                    f"step {step}: the update made weights that are not finite, and they were not "
                    "saved; a lower optim.lr or a longer warm-up may help"
                )
            self._on_rank_zero(partial(publish, temporary, by_rank))
        except SaveFailed as error:
            problem = error.problems[0]
            is_full = any(os.strerror(n) in problem for n in (errno.ENOSPC, errno.EDQUOT))
            hint = DISK_FULL_HINT if is_full else ""
            raise SaveFailed(f"{final}: {problem}{hint}") from None
        finally:
            if temporary and dist.get_rank() == 0:  # does nothing once it is published
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_shards(
        self, folder: pathlib.Path, tensors: dict[str, Tensor]
    ) -> tuple[bool, dict[str, dict]]:
        """Writes this rank's shards. Returns whether they are finite, and the manifest's entries of
        its files."""
        writer = Writer(folder)
        # The tensors are flat already. Later saves reuse the first one's plan: for Llama 3 8B on 512
        # ranks, rank 0 needs ten seconds to make it while all wait. Not with torch 2.11, which would
        # also reuse a plan that failed.
        planner = DefaultSavePlanner(
            flatten_state_dict=False, enable_plan_caching=not IS_TORCH_2_11
        )
        with ThreadPoolExecutor(1) as pool:  # overlaps the NaN/Inf check with the write
            finite = pool.submit(all_finite, tensors)
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
            return finite.result(), writer.entries

    def _on_each_rank(self, work: Callable[[], Any]) -> Any:
        return on_each_rank(partial(save_or_fail, work), SaveFailed, self.group)

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        return on_rank_zero(partial(save_or_fail, work), SaveFailed, self.group)

    def purge(self) -> None:
        """Removes the checkpoints before the last keep_last, except milestones. The newest one is good:
        this launch has saved it, or verified it and resumed from it."""
        try:
            if self.settings.keep_last:
                self._on_rank_zero(partial(self._remove_before, self.settings.keep_last))
        except SaveFailed as error:  # the new checkpoint is safe; the next purge tries again
            log.warning("old checkpoints could not be removed: %s", error)

    def _remove_before(self, keep_last: int) -> None:
        for step in catalog.steps(self.root)[:-keep_last]:
            is_milestone = config.is_due(step, self.settings.keep_every_steps)
            if not is_milestone and not self.stopping:
                for problem in catalog.remove(self.root, step):
                    log.warning(problem)


def save_or_fail(work: Callable[[], Any]) -> Any:
    """The result of `work`. Turns its exceptions into SaveFailed, which names this rank."""
    try:
        return work()
    except dcp.CheckpointException as error:  # a BaseException
        raise SaveFailed(first_cause(error)) from None
    except Exception as error:
        raise SaveFailed(f"rank {dist.get_rank()}: {type(error).__name__}: {error}") from None


def try_disk(root: pathlib.Path) -> None:
    """Publishes and removes a small folder as a save does, to find before the first step whether the
    disk supports it. Raises SaveFailed."""
    try:
        folder = make_folder(root, 0)
        (folder / STATE).write_text("{}")
        system.sync(folder / STATE)
        trial = catalog.temporary_of(root, 0)
        system.publish(folder, trial)
        shutil.rmtree(trial)
    except OSError as error:
        problem = "its disk cannot write, sync, rename and remove a folder, as a checkpoint needs"
        raise SaveFailed(f"{root}: {problem}: {error.strerror}") from None


def make_folder(root: pathlib.Path, step: int) -> pathlib.Path:
    """Creates an empty folder under a temporary name, for the checkpoint of a step."""
    folder = catalog.temporary_of(root, step)
    folder.mkdir(parents=True)
    return folder


def all_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether this rank's shards hold neither NaN nor infinity."""
    extremes = []
    for tensor in tensors.values():
        shard = local_tensor(tensor)
        if shard.numel():
            # aminmax() propagates NaN and infinity, in a tenth of isfinite()'s time.
            smallest, largest = shard.aminmax()
            extremes += [smallest.float(), largest.float()]
    if not extremes:
        return True
    return bool(torch.stack(extremes).isfinite().all())  # stacked: a single device sync


class Writer(FileSystemWriter):
    """A DCP storage writer with one file per rank, which is hashed while it is written. Unlike
    FileSystemWriter, it holds one tensor at a time in host memory instead of pinning all of them
    (pytorch issue 195982), and reports failed writes (issue 191391). It does not write the folder's
    path, which will change, to the metadata."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder, thread_count=1, overwrite=False)
        self.entries: dict[str, dict] = {}  # of this rank's files: one, or none without shards

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            hashed = HashedFile(pathlib.Path(self.path) / name)
            # torch's zip files have a CRC-32 of each tensor, which no reader checks. The manifest has
            # a SHA-256 instead.
            # pyrefly: ignore[missing-attribute]  # torch adds patch() at run time
            with hashed.file, torch_config.patch("save.compute_crc32", False):
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    begin = hashed.size
                    save_tensor(tensor, hashed)
                    length = hashed.size - begin
                    info = _StorageInfo(name, begin, length)
                    results.append(WriteResult(item.index, length, info))
                hashed.flush()
                system.sync_handle(hashed.file.fileno())
            self.entries = {name: hashed.entry()}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def save_tensor(tensor: Tensor, file: HashedFile) -> None:
    """Calls torch.save() with the tensor's elements alone, not its storage. Raises OSError."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    if is_view:  # torch.save() would write the entire storage
        tensor = tensor.clone()
    try:
        # pyrefly: ignore[bad-argument-type]  # it needs write() and flush()
        torch.save(tensor, file)
    except RuntimeError as error:  # torch hides a full disk behind "unexpected pos 704 vs 598"
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_manifest(
    folder: pathlib.Path, extra_files: dict[str, bytes], state: dict, entries: dict[str, dict]
) -> None:
    """Completes a checkpoint: writes and syncs state, tokenizer and manifest. extra_files: the
    tokenizer's files by name. entries: the manifest's entries of the files with tensors."""
    contents = {**extra_files, STATE: json.dumps(state, indent=2).encode()}
    # DCP has written and synced .metadata
    entries = entries | {METADATA: entry_of((folder / METADATA).read_bytes())}
    entries |= {name: entry_of(content) for name, content in contents.items()}
    contents[MANIFEST] = render_manifest(entries)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        system.sync(folder / name)
