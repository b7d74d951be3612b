"""A run's checkpoints: chooses where to resume or what to evaluate, restores, saves when due."""

import contextlib
import itertools
import mmap
import pathlib
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config
from checkpoint import catalog, compare
from checkpoint.load import restore, tensors_of
from checkpoint.save import SaveFailed, Saver, try_disk
from config import ConfigError
from data.dataset import Dataset
from optim import Progress
from parallel.materialize import local_tensor
from parallel.mesh import World
from parallel.ranks import all_gather_objects, check_same_on_all_ranks, on_each_rank, on_rank_zero

ALIGNMENT = 64  # bytes, between tensors in one buffer


class Checkpointer:
    """All ranks must call its methods together, except prepare_folder() and wait(). Without
    [checkpoint], and for --eval-only, it saves nothing."""

    def __init__(
        self,
        cfg: config.Config,
        world: World,
        dataset: Dataset,
        evaluating: bool = False,
        report: Callable[[int, str | None], None] = lambda step, problem: None,
    ):
        """Chooses the checkpoint to resume from, or to evaluate. Writes nothing. report(step, problem)
        is called after each save, on rank 0, perhaps in another thread; problem is None if the save
        succeeded. Raises ConfigError if the folder belongs to another run, if none of its checkpoints
        is good, or if ranks have different data."""
        self.cfg = cfg
        self.world = world
        self.dataset = dataset
        self.report = report
        self.root = catalog.root_of(cfg)
        data = dataset.identities()
        check_same_on_all_ranks("prepared data", compare.by_source(data))
        self.saved, self.start, self.corrupt = compare.starting_point(
            cfg, evaluating, self._problems_on_all_ranks, on_rank_zero
        )
        self.folder = catalog.path_of(self.root, self.start)  # does not exist for a new run
        if not evaluating:
            on_rank_zero(lambda: compare.check_same_data(self.folder, cfg.checkpoint, data))
        on_rank_zero(lambda: compare.check_same_tokenizer(self.folder, data))
        self.saver: Saver | None = None
        if cfg.checkpoint and not evaluating:
            self.saver = Saver(self.root, cfg.checkpoint, dataset.tokenizer_files)
        self.background = futures.ThreadPoolExecutor(1, "saver")
        self.pending: futures.Future | None = None  # of the previous save; returns its problem
        # The shards that async_save copied last, in host memory.
        self.buffers: dict[str, Tensor] = {}
        self.unpinned: dict[int, str] = {}  # why a rank could not pin its buffers
        # The fingerprint of the adapters' frozen base; None without adapters.
        self.base: str | None = None

    def _problems_on_all_ranks(self, path: pathlib.Path) -> list[str]:
        """The problems of a checkpoint. Each rank hashes a share of it."""
        ours = on_each_rank(lambda: catalog.problems_of(path, self.world.rank, self.world.size))
        by_rank = itertools.chain.from_iterable(all_gather_objects(ours))
        return list(dict.fromkeys(by_rank))

    @property
    def problems(self) -> list[str]:
        """The problems of the corrupt checkpoints that are newer than the chosen one."""
        return list(itertools.chain.from_iterable(self.corrupt.values()))

    def prepare_folder(self) -> list[str]:
        """Renames checkpoints that are corrupt or later than `start`, and removes unfinished saves.
        Returns warnings. Rank 0 only, under the run's lock. Raises ConfigError if another run has
        saved here since `start` was chosen, and SaveFailed if a checkpoint cannot be written here."""
        if catalog.steps(self.root) != self.saved:
            raise ConfigError(
                f"{self.root}: another run has used this folder in the meantime; start again"
            )
        warnings = [f"corrupt, set aside: {problem}" for problem in self.problems]
        warnings += compare.changes_since(self.cfg, self.folder)
        warnings += compare.validation_change(self.cfg, self.folder)
        warnings += catalog.set_aside_unused(self.root, self.start, self.corrupt)
        warnings += catalog.remove_unfinished(self.root)
        if self.saver and self.start < self.cfg.train.steps:
            try_disk(self.root)
        for rank, problem in self.unpinned.items():
            warnings.append(
                f"async_save: rank {rank} cannot pin its copy of the shards ({problem}): its saves "
                "hold training up for longer"
            )
        if not self.cfg.checkpoint:
            warnings.append(
                "no [checkpoint]: nothing will be saved; --checkpoint.save_every_steps=100 adds one"
            )
        return warnings

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, base: str | None = None
    ) -> Progress:
        """Loads the chosen checkpoint, if any, into model and optimizer, and returns its progress.
        Also allocates async_save's host memory. base: the fingerprint of the frozen weights that
        adapters are trained on. Raises ConfigError if the checkpoint's adapters have another base."""
        self.base = base
        if self.saver and self.saver.settings.async_save:
            tensors = tensors_of(model, optimizer)
            problem = allocate_buffers(tensors, self.buffers)
            by_rank = enumerate(all_gather_objects(problem))
            self.unpinned = {rank: problem for rank, problem in by_rank if problem}
        if self.start not in self.saved:
            return Progress()
        on_rank_zero(lambda: compare.check_base(self.folder, self.cfg.model.init_from, self.base))
        restore(self.folder, model, optimizer)
        saved = on_rank_zero(lambda: catalog.read_state(self.folder))
        try:
            counts = {field.name: saved[field.name] for field in fields(Progress)}
        except KeyError as missing:
            raise ConfigError(
                f"{self.folder}: another version saved it: its state has no {missing}"
            ) from None
        return Progress(**counts)

    def is_due(self, step: int, stopping: bool) -> bool:
        if not self.saver:
            return False
        is_last = stopping or step == self.cfg.train.steps
        return is_last or config.is_due(step, self.saver.settings.save_every_steps)

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stopping: bool,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves a checkpoint. With async_save, training waits only for the copy of the shards to host
        memory. A save that fails is reported, and the next one tries again. Only the last save of a
        launch raises SaveFailed. Raises FloatingPointError if weights are not finite.

        stopping: whether the run stops after this step. before_publishing: called on rank 0 before
        the checkpoint is published; its OSError is only a warning."""
        saver = self.saver
        assert saver, "save() is for steps in which is_due()"
        # A purge that still runs in the background stops when it sees this.
        saver.stopping = stopping
        if self.pending:
            self.pending.result()
        tensors = tensors_of(model, optimizer)
        if saver.settings.async_save:
            tensors = staged(tensors, self.buffers, self.world.device)
        step = progress.step
        content = {
            **asdict(progress),
            "config": config.to_dict(self.cfg),
            "data": self.dataset.identities(),
            "base": self.base,
            "ranks": self.world.size,
            "torch": torch.__version__,
        }

        def work(saver: Saver) -> str | None:
            # DCP uses the current device, which is per thread. For a CPU this does nothing.
            torch.get_device_module(self.world.device).set_device(self.world.device)
            problem = None
            try:
                saver.write(step, tensors, content, before_publishing)
            except SaveFailed as error:
                problem = str(error)
            if self.world.rank == 0:
                self.report(step, problem)
            saver.purge()  # a no-op if the run is stopping
            return problem

        self.pending = self.background.submit(work, saver)
        is_last = stopping or step == self.cfg.train.steps
        if is_last or not saver.settings.async_save:
            problem = self.pending.result()
            if problem and is_last:
                raise SaveFailed(f"the last checkpoint was not saved: {problem}")

    def purge(self) -> None:
        """At the end of training: removes the checkpoints that keep_last and keep_every_steps do
        not keep."""
        if self.saver:
            self.saver.purge()

    def wait(self) -> None:
        """Waits until a pending save has succeeded or failed."""
        if self.pending:
            futures.wait([self.pending])


def staged(
    tensors: dict[str, Tensor], buffers: dict[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Copies the tensors to host memory for async_save, with the same sharding. Each save reuses the
    buffers: faulting in fresh pages would take as long as the copy itself."""
    allocate_buffers(tensors, buffers)  # for state that the optimizer has created since
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copies[name] = buffers[name].copy_(local_tensor(tensor), non_blocking=True)
        if isinstance(tensor, DTensor):
            # Not DTensor.from_local, which would move the copy back to the mesh's device.
            copies[name] = DTensor(buffers[name], tensor._spec, requires_grad=False)
    torch.get_device_module(device).synchronize()
    return copies


def allocate_buffers(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> str | None:
    """Adds buffers in host memory for the tensors that have none: views of one allocation, which is
    pinned if tensors are on a GPU. Returns why pinning failed, if it did: unpinned memory is only
    slower."""
    shards = {name: local_tensor(t) for name, t in tensors.items() if name not in buffers}
    if not shards:
        return None
    sizes = [-(-shard.nbytes // ALIGNMENT) * ALIGNMENT for shard in shards.values()]
    # These pages belong to this buffer alone, because a driver may refuse to pin a page twice. They
    # are written now, so that a lack of memory shows before training.
    pages = mmap.mmap(-1, sum(sizes) or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    for (name, shard), part in zip(shards.items(), memory[: sum(sizes)].split(sizes)):
        buffers[name] = part[: shard.nbytes].view(shard.dtype).view(shard.shape)
    is_on_gpu = any(shard.is_cuda for shard in shards.values())
    return pin(memory) if is_on_gpu else None


def pin(memory: Tensor) -> str | None:
    """Pins host memory in place, since torch's pinned allocator rounds up to powers of two. Returns
    CUDA's message if it refuses."""
    cuda: Any = torch.cuda.cudart()  # not None with a GPU
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) == 0:
        return None
    # CUDA keeps the error, and the next kernel launch raises it: this one.
    with contextlib.suppress(RuntimeError):
        torch.cuda._sleep(1)
    return str(cuda.cudaGetErrorString(error))
