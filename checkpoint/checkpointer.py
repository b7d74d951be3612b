"""A run's checkpoints as training sees them: where to resume, restoring, saving when due, how a save ended."""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from concurrent import futures

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config
from checkpoint import catalog
from checkpoint.load import OtherOptimizer, Reader, check_parameters, restore, tensors_of
from checkpoint.save import SaveFailed, Saver
from config import ConfigError
from model.hf_weights import Weights, fingerprint
from model.llama import meta_model
from parallel.mesh import World, all_gather_objects, has_bfloat16_units, on_rank_zero


@dataclasses.dataclass(frozen=True)
class State:
    """What training resumes from, next to weights and optimizer; the data order is a function of the step."""

    step: int = 0
    tokens: int = 0  # trained on so far; batch and length may have changed since
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


class Checkpointer:
    """Every method but wait() is called by all ranks together. Without [checkpoint] it saves nothing."""

    def __init__(self, cfg: config.Config, world: World, data: list[dict], extra_files: list[pathlib.Path]):
        """Chooses the checkpoint to resume from; changes nothing. data: the prepared data's fingerprint. Raises
        ConfigError where this is another run's folder, or no checkpoint in it is good."""
        self.world, self.data = world, data
        self.found = on_rank_zero(lambda: catalog.steps(cfg))
        self.start, self.corrupt = catalog.choose(cfg, self.found, lambda path: problems_on_all_ranks(path, world))
        on_rank_zero(lambda: self._check_choice(cfg))
        self.cfg = with_param_dtype(cfg, self.start, world)
        self.problems = [problem for problems in self.corrupt.values() for problem in problems]
        self.saver = Saver(cfg, self.start, extra_files) if cfg.checkpoint else None
        self.report: Callable[[int, str | None], None] = lambda step, problem: None  # of a save, on rank 0
        self.background = futures.ThreadPoolExecutor(1, "saver")
        self.pending: tuple[int, futures.Future] | None = None  # (step, the save of it) until it is reported
        self.staged: dict[str, Tensor] = {}
        self.base: str | None = None  # the fingerprint of a frozen base, which checkpoints of adapters name

    def _check_choice(self, cfg: config.Config) -> None:
        catalog.check_same_run(cfg, self.start)
        catalog.check_same_data(cfg, self.start, self.data)
        if self.start and cfg.checkpoint.allow_changed:  # it may allow what makes another model
            folder = catalog.path_of(cfg, self.start)
            check_parameters(folder, Reader(folder), meta_model(cfg.model, cfg.lora))

    def on_publish(self, work: Callable[[], None]) -> None:
        """work: done on rank 0 before a checkpoint is published; may refuse with an OSError."""
        if self.saver:
            self.saver.before_publishing = work

    def tidy(self) -> None:
        """Sets aside what is corrupt or later than `start`, and removes unfinished saves. On rank 0, under the run's
        lock. Raises ConfigError where another run has saved here since the choice."""
        if catalog.steps(self.cfg) != self.found:
            raise ConfigError(f"{catalog.root(self.cfg)}: another run has worked here meanwhile; start again")
        catalog.set_aside(self.cfg, self.start, self.corrupt)
        catalog.remove_unfinished(self.cfg)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: Weights | None = None) -> State:
        """Reads the chosen checkpoint into model and optimizer, where there is one. weights: those that were read
        besides. Raises ConfigError where they are not the base that the checkpoint's adapters belong to."""
        self.base = base_on_all_ranks(weights)
        if not self.start:
            return State()
        folder = catalog.path_of(self.cfg, self.start)
        on_rank_zero(lambda: catalog.check_base(folder, self.cfg.model.init_from, self.base))
        try:
            restore(folder, model, optimizer)
        except OtherOptimizer as error:
            changed = on_rank_zero(lambda: catalog.changed_options(self.cfg, self.start, re.compile(r"optim\..*")))
            raise ConfigError(f"{error}: continue with the one that it was trained with" + "".join(
                f"; {key} was {before}, is {now}" for key, (before, now) in changed.items())) from None
        known = on_rank_zero(lambda: catalog.read_state(folder))
        state = {f.name: known[f.name] for f in dataclasses.fields(State) if f.name in known}
        return State(**{"tokens": self.start * config.tokens_per_step(self.cfg), **state})

    def is_due(self, step: int, stopping: bool) -> bool:
        return bool(self.saver) and (stopping or step == self.cfg.train.steps
                                     or config.is_due(step, self.cfg.checkpoint.save_every_steps))

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer, stopping: bool) -> None:
        """With async_save training waits only for a copy of the shards in host memory. Raises SaveFailed where the last
        checkpoint of a launch cannot be written, and FloatingPointError where weights are not finite."""
        self.saver.hurried = stopping  # the save before this one may be purging still, and purging may read much
        self.log_last_save(wait=True)
        tensors = tensors_of(model, optimizer)
        if self.cfg.checkpoint.async_save:
            tensors = self._stage(tensors)
        content = {**dataclasses.asdict(state), "config": config.to_dict(self.cfg), "data": self.data,
                   "ranks": self.world.size, "torch": torch.__version__}
        if self.base:
            content["base"] = self.base

        def work() -> None:
            if self.world.device.type == "cuda":  # each thread has a current device of its own, and DCP looks at it
                torch.cuda.set_device(self.world.device)
            self.saver.write(state.step, tensors, content)
            self.saver.purge()  # but where the run is stopping

        self.pending = state.step, self.background.submit(work)
        if stopping or state.step == self.cfg.train.steps:
            self.log_last_save(wait=True, required=True)
        elif not self.cfg.checkpoint.async_save:
            self.wait()

    def log_last_save(self, wait: bool = False, required: bool = False) -> None:
        """Reports the previous save once it is done; wait=True blocks until it is. Where it failed, training continues
        and the next save is another chance, unless it is `required`: then SaveFailed is raised."""
        if not self.pending or not (wait or self.pending[1].done()):
            return
        (step, save), self.pending, problem = self.pending, None, None
        try:
            save.result()
        except SaveFailed as error:
            problem = str(error)
            if required:
                raise SaveFailed(f"the last checkpoint was not saved: {problem}") from None
        if self.world.rank == 0:
            self.report(step, problem)

    def purge(self) -> None:
        """At the end of training: removes the checkpoints that need not be kept."""
        if self.saver:
            self.saver.purge()

    def wait(self, seconds: float | None = None) -> None:
        """Waits for a pending save to end, well or not; from any thread."""
        if pending := self.pending:
            futures.wait([pending[1]], seconds)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors in host memory, sharded as they are. The memory is kept for the next save: fresh pages
        would cost as much again as the copy."""
        local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        for name, t in local.items():
            if name not in self.staged:
                held = self.staged[name] = torch.empty_like(t, device="cpu")
                if t.is_cuda and held.nbytes:  # pinned where it lies: torch's own pinned memory comes in powers of two
                    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), held.nbytes, 0))
            self.staged[name].copy_(t, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        # Not DTensor.from_local: that would move the copy back to the mesh's device.
        return {name: DTensor(self.staged[name], t._spec, requires_grad=False) if isinstance(t, DTensor)
                else self.staged[name] for name, t in tensors.items()}


def base_on_all_ranks(weights: Weights | None) -> str | None:
    """The fingerprint of a frozen base, of which each rank has read a part; None where there is none."""
    return fingerprint(all_gather_objects(weights.sums)) if weights and weights.sums is not None else None


def with_param_dtype(cfg: config.Config, step: int, world: World) -> config.Config:
    """The configuration with param_dtype = "auto" decided: as the checkpoint of this step has it; without one (0)
    bfloat16 where every rank's device has units for it, which emulated is slower than float32."""
    if cfg.parallel.param_dtype != "auto":
        return cfg
    if step:
        saved = on_rank_zero(lambda: catalog.read_state(catalog.path_of(cfg, step))["config"])
        dtype = config.SCHEMA.complete(saved)["parallel.param_dtype"]
    else:
        dtype = "bfloat16" if all(all_gather_objects(has_bfloat16_units(world.device))) else "float32"
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, param_dtype=dtype))


def problems_on_all_ranks(path: pathlib.Path, world: World) -> list[str]:
    """What is wrong with a checkpoint: rank 0 looks at it first, then each rank hashes its share."""
    return on_rank_zero(lambda: catalog.at_first_sight(path)) or [
        problem for rank in all_gather_objects(catalog.problems_of(path, world.rank, world.size)) for problem in rank]
