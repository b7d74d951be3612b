"""Writes checkpoints, from all ranks together, and removes old ones."""

import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils.serialization import config as torch_config

import config
import files
from checkpoint import catalog
from checkpoint.load import first_cause, is_covered
from checkpoint.manifest import MANIFEST, STATE, hash_files, render_manifest

MIB = 2**20
log = logging.getLogger("train")


class SaveFailed(Exception):
    """At least one rank could not write a checkpoint; earlier ones are untouched. Raised on all ranks."""


class Saver:
    """Writes and removes a run's checkpoints. All ranks must call its methods together, from one thread at a time (any
    thread: it has its own process group). They raise SaveFailed on all ranks or on none."""

    def __init__(self, cfg: config.Config, verified: int, extra_files: list[pathlib.Path]):
        """verified: a step whose checkpoint is known to be good. extra_files (the tokenizer) are copied into each."""
        assert cfg.checkpoint  # without [checkpoint] nothing is saved
        self.cfg, self.options, self.verified, self.extra_files = (
            cfg,
            cfg.checkpoint,
            {verified},
            extra_files,
        )
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self.group = group
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.planner = CachedPlans()
        self.stopping = False  # the run is stopping: purging is left to the next launch

    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the checkpoint of a step; `state` must be JSON-serializable. before_publishing: called on rank 0; an
        OSError fails the save. Raises FloatingPointError if an update from finite gradients made weights or moments
        non-finite: these are never saved."""
        final, temporary = catalog.path_of(self.cfg, step), catalog.temporary_of(self.cfg, step)
        writer = Writer(temporary)

        def make_room() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            # numel() of a DTensor is the full size
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            # each shard also has a header, and an entry in the metadata
            needed, free = (
                size + 4096 * len(tensors) * self.ranks,
                shutil.disk_usage(temporary).free,
            )
            if needed > free:
                raise OSError(f"needs {needed / MIB:,.1f} MiB, {free / MIB:,.1f} MiB are free")

        def publish() -> None:
            hashed = {name: entry for of_rank in entries for name, entry in of_rank.items()}
            write_manifest(temporary, self.extra_files, state, hashed)
            before_publishing()
            files.publish(temporary, final)

        try:
            self._on_all_ranks(make_room, only=0)
            with ThreadPoolExecutor(1) as pool:  # overlaps the NaN/Inf check with the write
                finite = pool.submit(_all_finite, tensors)
                self._on_all_ranks(
                    lambda: dcp.save(
                        tensors,
                        storage_writer=writer,
                        planner=self.planner,
                        process_group=self.group,
                    )
                )
            if not all(self._on_all_ranks(finite.result)):
                raise FloatingPointError(
                    f"step {step}: the update made weights that are not finite, and they were not "
                    "saved; a lower optim.lr or a longer warm-up may help"
                )
            # each rank hashes the files that it wrote, while they are still in its page cache
            entries = self._on_all_ranks(lambda: hash_files(temporary, writer.files))
            self._on_all_ranks(publish, only=0)
        except SaveFailed as error:
            # ranks may have failed before or after they stored the plan
            self.planner = CachedPlans()
            raise SaveFailed(f"{final}: {error}") from None
        finally:
            if self.rank == 0:  # a no-op once published
                shutil.rmtree(temporary, ignore_errors=True)
        self.verified.add(step)

    def _on_all_ranks(self, work: Callable[[], Any], only: int | None = None) -> list:
        """Runs `work` on all ranks, or only on rank `only`. Returns its results by rank. Raises SaveFailed on all ranks
        if it failed on any."""
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
        if problems := [problem for _, problem in answers if problem]:
            raise SaveFailed(problems[0])
        return [value for value, _ in answers]

    def purge(self) -> None:
        """Removes the checkpoints before the last keep_last good ones, except milestones. Those that this launch has
        not verified yet are verified before they count."""
        last, every, good = self.options.keep_last, self.options.keep_every_steps, 0
        if not last:
            return
        try:
            for step in reversed(self._on_all_ranks(lambda: catalog.steps(self.cfg), only=0)[0]):
                if self._on_all_ranks(lambda: self.stopping, only=0)[0]:
                    # rank 0 decides: all ranks must agree
                    return
                if good < last:
                    good += self._is_good(step)
                elif not config.is_due(step, every):
                    self._on_all_ranks(lambda step=step: catalog.remove(self.cfg, step), only=0)
        except SaveFailed as error:  # the new checkpoint is safe; the next purge tries again
            log.warning("old checkpoints could not be removed: %s", error)

    def _is_good(self, step: int) -> bool:
        if step not in self.verified:
            path = catalog.path_of(self.cfg, step)
            found = self._on_all_ranks(lambda: catalog.problems_of(path, self.rank, self.ranks))
            if problems := [problem for rank in found for problem in rank]:
                log.warning("kept, but not counted as a checkpoint: %s", "; ".join(problems))
                return False
            self.verified.add(step)
        return True


def _all_finite(tensors: dict[str, Tensor]) -> bool:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    # aminmax() propagates NaN and infinity, in a tenth of isfinite()'s time; stacked, they need a single device sync
    extremes = [part.float() for t in local if t.numel() for part in t.aminmax()]
    return bool(torch.stack(extremes).isfinite().all()) if extremes else True


class Writer(FileSystemWriter):
    """A DCP storage writer with one file per rank. Unlike FileSystemWriter, it holds one tensor at a time in host
    memory instead of pinning all of them (pytorch issue 195982), reports failed writes (issue 191391), and keeps the
    folder's path, which will change, out of the metadata."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder, thread_count=1, overwrite=False)
        self.files: list[str] = []  # this rank's: one, or none if it has nothing to write

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            self.files = [name := f"{plan.storage_data.prefix}0.distcp"]
            # torch's zip files have a CRC-32 of each tensor that no reader checks; the manifest's SHA-256 replaces it
            with (
                (pathlib.Path(self.path) / name).open("wb") as file,
                # pyrefly: ignore[missing-attribute]  # torch adds patch() at run time
                torch_config.patch("save.compute_crc32", False),
            ):
                for item in plan.items:
                    begin = file.tell()
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    tensor = tensor.detach().cpu()
                    # for a view, torch.save would write its entire storage
                    whole = (
                        tensor.clone()
                        if tensor.untyped_storage().nbytes() != tensor.nbytes
                        else tensor
                    )
                    try:
                        torch.save(whole, file)
                    except (
                        RuntimeError
                    ) as error:  # torch hides a full disk behind "unexpected pos 704 vs 598"
                        raise (
                            error.__context__ if isinstance(error.__context__, OSError) else error
                        ) from None
                    size = file.tell() - begin
                    results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def write_manifest(
    folder: pathlib.Path, extra_files: list[pathlib.Path], state: dict, hashed: dict[str, dict]
) -> None:
    """Completes a checkpoint whose tensors are written and hashed: adds state, tokenizer, manifest; syncs each file."""
    for path in extra_files:
        shutil.copyfile(path, folder / path.name)
    (folder / STATE).write_text(json.dumps(state, indent=2))
    names = [path.name for path in extra_files] + [STATE, ".metadata"]
    (folder / MANIFEST).write_bytes(render_manifest(hashed | hash_files(folder, names)))
    for name in [*names[:-1], MANIFEST]:  # DCP has already synced .metadata
        files.sync(folder / name)


class CachedPlans(DefaultSavePlanner):
    """Plans a run's first save and reuses the plan: gathering, making and sending one takes rank 0 ten seconds for
    Llama 3 8B on 512 ranks, while all wait. If its tensors have changed, a rank sends its plan again.

    DCP's own enable_plan_caching caches on the class, for all savers of a process, and in torch 2.11 also failed plans.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)  # it is flat
        self.local_plan: SavePlan | None = None
        self.final_plan: SavePlan | None = None

    def create_local_plan(self) -> SavePlan:
        before, self.local_plan = self.local_plan, super().create_local_plan()
        return SavePlan([], usable=False) if self.local_plan == before else self.local_plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not any(plan.usable for plan in all_plans):
            return all_plans, self.metadata
        if not all(plan.usable for plan in all_plans):
            raise ValueError("the tensors to save have changed on some ranks only")
        all_plans, self.metadata = create_default_global_save_plan(
            self._dedup_save_plans(all_plans)
        )
        # DCP's own check takes time quadratic in the ranks. It also looks for overlaps, which chunks computed from the
        # same placements on all ranks cannot have.
        for name, item in self.metadata.state_dict_metadata.items():
            assert isinstance(item, TensorStorageMetadata)  # all that is saved are tensors
            if not is_covered(item):
                raise ValueError(
                    f"the ranks' shards of {name} do not make up its shape {tuple(item.size)}"
                )
        return all_plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self.final_plan = new_plan
        assert self.final_plan is not None  # the first plan is usable
        return super().finish_plan(self.final_plan)
