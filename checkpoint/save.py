"""Writes checkpoints, from all ranks together, and removes old ones."""

import json
import logging
import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils.serialization import config as torch_config

import config
from checkpoint import catalog
from checkpoint.load import first_cause
from checkpoint.manifest import MANIFEST, STATE, hash_files, render_manifest
from system import files

MIB = 2**20
# torch 2.11 also reuses a plan that failed
# pyrefly: ignore[unsupported-operation]  # TorchVersion allows it
CACHES_PLANS = torch.__version__ >= (2, 12)
log = logging.getLogger("train")


class SaveFailed(Exception):
    """At least one rank could not write a checkpoint; earlier ones are untouched. Raised on all
    ranks."""


class Saver:
    """Writes and removes a run's checkpoints. All ranks must call its methods together, from one
    thread at a time (any thread: it has its own process group). They raise SaveFailed on all ranks
    or on none."""

    def __init__(self, cfg: config.Config, verified: int, extra_files: list[pathlib.Path]):
        """verified: a step whose checkpoint is known to be good. extra_files (the tokenizer) are
        copied into each."""
        assert cfg.checkpoint  # without [checkpoint] nothing is saved
        self.cfg = cfg
        self.options = cfg.checkpoint
        self.verified = {verified}
        # kept: the folder of prepared data may be deleted while a run reads its open files
        self.extra_files = contents_of(extra_files)
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self.group = group
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.stopping = False  # the run is stopping: purging is left to the next launch

    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the checkpoint of a step. `state` must be JSON-serializable. before_publishing is
        called on rank 0; an OSError of it fails the save. Raises FloatingPointError if an update
        from finite gradients made weights or moments non-finite: these are never saved."""
        final = catalog.path_of(self.cfg, step)
        temporary = catalog.temporary_of(self.cfg, step)
        writer = Writer(temporary)

        def write_shards() -> None:
            # The tensors are flat. The plan of a run's first save is reused: making one takes rank 0
            # ten seconds for Llama 3 8B on 512 ranks, while all wait.
            planner = DefaultSavePlanner(flatten_state_dict=False, enable_plan_caching=CACHES_PLANS)
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)

        def publish() -> None:
            entries = {}
            for entries_of_rank in entries_by_rank:
                entries |= entries_of_rank
            write_manifest(temporary, self.extra_files, state, entries)
            before_publishing()
            files.publish(temporary, final)

        try:
            self._on_all_ranks(lambda: self._make_folder(temporary, tensors), only=0)
            with ThreadPoolExecutor(1) as pool:  # overlaps the NaN/Inf check with the write
                finite = pool.submit(_all_finite, tensors)
                self._on_all_ranks(write_shards)
            if not all(self._on_all_ranks(finite.result)):
                raise FloatingPointError(
                    f"step {step}: the update made weights that are not finite, and they were not "
                    "saved; a lower optim.lr or a longer warm-up may help"
                )
            # each rank hashes the files that it wrote, while they are still in its page cache
            entries_by_rank = self._on_all_ranks(lambda: hash_files(temporary, writer.files))
            self._on_all_ranks(publish, only=0)
        except SaveFailed as error:
            raise SaveFailed(f"{final}: {error}") from None
        finally:
            if self.rank == 0:  # a no-op once published
                shutil.rmtree(temporary, ignore_errors=True)
        self.verified.add(step)

    def _make_folder(self, temporary: pathlib.Path, tensors: dict[str, Tensor]) -> None:
        """Makes the folder to write to, empty. Raises OSError if the disk has too little room."""
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        # numel() of a DTensor is the full size
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        # each shard also has a header, and an entry in the metadata
        needed = size + 4096 * len(tensors) * self.ranks
        free = shutil.disk_usage(temporary).free
        if needed > free:
            raise OSError(f"needs {needed / MIB:,.1f} MiB, {free / MIB:,.1f} MiB are free")

    def _on_all_ranks(self, work: Callable[[], Any], only: int | None = None) -> list:
        """Runs `work` on all ranks, or only on rank `only`. Returns its results by rank. Raises
        SaveFailed on all ranks if it failed on any."""
        value = problem = None
        try:
            if only in (None, self.rank):
                value = work()
        except dcp.CheckpointException as error:  # a BaseException
            problem = first_cause(error)
        except Exception as error:
            problem = f"rank {self.rank}: {type(error).__name__}: {error}"
        answers: list = [None] * self.ranks
        dist.all_gather_object(answers, (value, problem), group=self.group)
        problems = [problem for _, problem in answers if problem]
        if problems:
            raise SaveFailed(problems[0])
        return [value for value, _ in answers]

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """The result of `work` on rank 0, on all ranks. Raises SaveFailed on all if it failed."""
        return self._on_all_ranks(work, only=0)[0]

    def purge(self) -> None:
        """Removes the checkpoints before the last keep_last good ones, except milestones. Those
        that this launch has not verified yet are verified before they count."""
        keep_last = self.options.keep_last
        if not keep_last:
            return
        good = 0
        try:
            for step in reversed(self._on_rank_zero(lambda: catalog.steps(self.cfg))):
                if self._on_rank_zero(lambda: self.stopping):  # all ranks must agree
                    return
                is_milestone = config.is_due(step, self.options.keep_every_steps)
                if good < keep_last:
                    good += self._is_good(step)
                elif not is_milestone:
                    self._on_rank_zero(lambda step=step: catalog.remove(self.cfg, step))
        except SaveFailed as error:  # the new checkpoint is safe; the next purge tries again
            log.warning("old checkpoints could not be removed: %s", error)

    def _is_good(self, step: int) -> bool:
        if step not in self.verified:
            path = catalog.path_of(self.cfg, step)
            by_rank = self._on_all_ranks(lambda: catalog.problems_of(path, self.rank, self.ranks))
            problems = [problem for problems in by_rank for problem in problems]
            if problems:
                log.warning("kept, but not counted as a checkpoint: %s", "; ".join(problems))
                return False
            self.verified.add(step)
        return True


def _all_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether this rank's shards hold neither NaN nor infinity."""
    extremes = []
    for tensor in tensors.values():
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if shard.numel():
            # aminmax() propagates NaN and infinity, in a tenth of isfinite()'s time
            smallest, largest = shard.aminmax()
            extremes += [smallest.float(), largest.float()]
    if not extremes:
        return True
    return bool(torch.stack(extremes).isfinite().all())  # stacked: a single device sync


class Writer(FileSystemWriter):
    """A DCP storage writer with one file per rank. Unlike FileSystemWriter, it holds one tensor at
    a time in host memory instead of pinning all of them (pytorch issue 195982), reports failed
    writes (issue 191391), and keeps the folder's path, which will change, out of the metadata."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder, thread_count=1, overwrite=False)
        self.files: list[str] = []  # this rank's: one, or none if it has nothing to write

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            self.files = [name]
            # torch's zip files have a CRC-32 of each tensor, which no reader checks. The manifest's
            # SHA-256 replaces it.
            with (
                (pathlib.Path(self.path) / name).open("wb") as file,
                # pyrefly: ignore[missing-attribute]  # torch adds patch() at run time
                torch_config.patch("save.compute_crc32", False),
            ):
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    begin = file.tell()
                    _save_tensor(tensor, file)
                    size = file.tell() - begin
                    results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
                file.flush()
                files.sync_handle(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _save_tensor(tensor: Tensor, file: IO[bytes]) -> None:
    """torch.save() of a tensor's own elements. Raises OSError."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    if is_view:  # torch.save would write the entire storage
        tensor = tensor.clone()
    try:
        torch.save(tensor, file)
    except RuntimeError as error:  # torch hides a full disk behind "unexpected pos 704 vs 598"
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def contents_of(paths: list[pathlib.Path]) -> dict[str, bytes]:
    """The content of files, by name."""
    return {path.name: path.read_bytes() for path in paths}


def write_manifest(
    folder: pathlib.Path, extra_files: dict[str, bytes], state: dict, entries: dict[str, dict]
) -> None:
    """Completes a checkpoint whose tensors are written and hashed (`entries` of the manifest): adds
    state, tokenizer (`extra_files`, by name) and manifest, and syncs each file."""
    for name, content in extra_files.items():
        (folder / name).write_bytes(content)
    (folder / STATE).write_text(json.dumps(state, indent=2))
    names = [*extra_files, STATE, ".metadata"]
    (folder / MANIFEST).write_bytes(render_manifest(entries | hash_files(folder, names)))
    for name in [*names[:-1], MANIFEST]:  # DCP has already synced .metadata
        files.sync(folder / name)
