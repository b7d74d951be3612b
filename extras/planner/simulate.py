"""Simulates one training step of rank 0 at any world size, on tensors without storage: memory, work, communication.

The real program runs on torch's fake tensors and fake process group: the model on meta, parallelize(), the optimizer.
Counted sees every operator with its inputs and outputs, so this file does not describe the model a second time. Only a
few of the identical blocks run; the others are counted as copies of those in the middle.

A GPU's step takes the GPU's code paths, and counts what is compiled as such: gpu_paths.py.
"""

import contextlib
import functools
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter

import config
from config import ConfigError
from extras.planner.blocks import kinds_of_blocks, shortened
from extras.planner.counted import Counted, Phase
from extras.planner.gpu_paths import gpu_code_paths, one_kernel
from model.build import meta_model
from model.llama import Llama, after_weight_update
from optim import build_optimizer, clip_gradients
from parallel.fsdp import set_gradient_sync, unshard_first_units
from parallel.materialize import allocate
from parallel.mesh import World, build_mesh
from parallel.parallelize import parallelize


@dataclass(frozen=True)
class Step:
    phases: list[Phase]
    held: Counter  # bytes of this rank's parameters, gradients and optimizer state between steps
    optimizer: str
    state_is_made: bool  # for every trainable parameter
    first: dict[str, str]  # where each uncounted operator is called first
    masks_by_data: bool  # whether what a mask of FlexAttention keeps depends on data

    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak.total())


def simulate(cfg: config.Config, ranks: int, on_gpu: bool = True, whole: bool = False) -> Step:
    """No process group may exist yet. whole: run every block. Raises ConfigError for an invalid mesh, and for a model
    whose shapes depend on values."""
    p, blocks = cfg.parallel, cfg.model.n_layers
    if p.cp > 1:
        import parallel.context  # noqa: F401 - before the patches of what it imports: it would keep the stand-ins
    # blocks whose prefetch involves the embedding or the head
    edge = max(p.prefetch_forward, p.prefetch_backward, 1)
    # drop what DTensor caches for an earlier simulation's meshes, whose process groups are destroyed
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world = World(
            0, ranks, torch.device("cpu"), build_mesh("cpu", config.mesh_shape(cfg, ranks))
        )
        few = (
            None
            if whole
            else shortened(functools.partial(kinds_of_blocks, cfg, world, on_gpu), blocks, edge)
        )
        if few:
            found, of_blocks = run(
                replace(cfg, model=replace(cfg.model, n_layers=few.blocks)), world, on_gpu
            )
            # of an optimizer by elements, unless it multiplies or sends matrices
            update = found.phases[-1]
            by_elements = not update.work["products"] and all(
                kind == "all_reduce" for _, kind, _ in update.sent
            )
            if by_elements and repeats(found.phases, few.middle):
                more, taken = (
                    sum(counts, Counter()) for counts in zip(*(of_blocks[i] for i in few.middle))
                )
                return extrapolated(
                    found, more, taken, few.middle, (blocks - few.blocks) // len(few.middle), blocks
                )
        return run(cfg, world, on_gpu)[0]
    finally:
        dist.destroy_process_group()


def repeats(phases: list[Phase], middle: range) -> bool:
    """Whether the middle blocks work and send as do as many that follow them: what tells blocks apart, but not in
    their forward's operators, shows here."""

    def of_blocks(first: int) -> list[tuple]:
        names = {
            f"{way} block {first + i}": (way, i)
            for way in ("forward", "backward")
            for i in range(len(middle))
        }
        found = [(names[phase.name], phase) for phase in phases if phase.name in names]
        return sorted(
            (
                name,
                phase.times,
                *(
                    sorted((+counts).items())
                    for counts in (phase.work, phase.sent, phase.uncounted)
                ),
            )
            for name, phase in found
        )

    return of_blocks(middle.start) == of_blocks(middle.stop)


def extrapolated(
    step: Step, more: Counter, taken: Counter, middle: range, times: int, blocks: int
) -> Step:
    """The step of a model of so many blocks, by `times` more copies of the middle ones. more, taken: what these hold,
    see held()."""
    order = []  # of the phases in the longer step, each with the one that it follows in this one
    for before, phase in zip([Phase("start"), *step.phases], step.phases):
        order.append((before, phase))
        if phase.name in (f"forward block {middle[-1]}", f"backward block {middle[0]}"):
            order += order[-len(middle) :] * times
    numbers = {
        "forward": itertools.cycle(range(blocks)),
        "backward": itertools.cycle(reversed(range(blocks))),
    }
    found, end = [], plus(Counter(), taken, times)
    for before, phase in order:  # each changes the memory that the last one leaves
        offset = plus(end, before.end, -1)
        end = plus(phase.end, offset)
        if not phase.end["reductions"]:
            # FSDP2 drops those of all replicated units at once, after backward
            end["reductions"] = 0
        kind, _, block = phase.name.partition(" block ")
        name = f"{kind} block {next(numbers[kind])}" if block else phase.name
        found.append(replace(phase, name=name, peak=plus(phase.peak, offset), end=end))
    held = plus(step.held, more, times)
    update = found[-1]  # its work grows with the trained parameters
    share = held["gradients"] / step.held["gradients"]
    scales = {
        key: more["scales"] for key in update.sent if key == ("dp_shard", "all_reduce", "bytes")
    }
    found[-1] = replace(
        update,
        end=Counter({**update.end, "gradients": 0}),
        sent=plus(update.sent, scales, times),
        work=Counter({kind: share * work for kind, work in update.work.items()}),
        uncounted=Counter({name: round(share * calls) for name, calls in update.uncounted.items()}),
    )
    return replace(step, phases=found, held=held)


def plus(a: Counter, b: Mapping, times: int = 1) -> Counter:
    """a + times * b; unlike Counter's own +, keeps negative counts. Keys keep their order."""
    return Counter({key: a.get(key, 0) + times * b.get(key, 0) for key in {**a, **b}})


def run(
    cfg: config.Config, world: World, on_gpu: bool
) -> tuple[Step, list[tuple[Counter, Counter]]]:
    """The step, and what each block holds, see Counted.held()."""
    p, sequences = cfg.parallel, config.micro_batch_size(cfg, world.dp_size)
    dimensions = {
        str(world.mesh[name].get_group().group_name): name
        for name in ("dp_replicate", "cp", "tp")
        if world.mesh[name].size() > 1
    }
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    on_host = {"parameters", "optimizer state", "gradients"} if p.cpu_offload else set()
    counted = Counted(fake, dimensions, on_host, granularity=512 if on_gpu else 1)
    with contextlib.ExitStack() as stack:
        for patch in [
            values_refused(counted),
            *without_storage(counted),
            *(gpu_code_paths(cfg, counted) if on_gpu else ()),
        ]:
            stack.enter_context(patch)
        model = meta_model(cfg.model, cfg.lora)
        parallelize(model, replace(cfg, parallel=replace(p, compile=False)), world)
        counted.names = {
            module: name.replace("_checkpoint_wrapped_module.", "")
            for name, module in model.named_modules()
        }
        model.head.compile_loss = p.compile and on_gpu
        stack.enter_context(fake)
        stack.enter_context(counted)
        allocate(model, torch.device("cpu"))
        with mock.patch(
            "torch.compile", lambda update, **unused: functools.partial(one_kernel, counted, update)
        ):
            optimizer = build_optimizer(model, cfg.optim, compile=p.compile)
        stateless = [
            param
            for param in model.parameters()
            if param.requires_grad and not optimizer.state.get(param)
        ]
        after_weight_update(model)
        begin = watch(model, counted, p.compile and on_gpu)
        # Micro-batches that are alike run once; with sync_every_micro_batch, with gradients of an earlier one.
        accumulation = config.accumulation_steps(cfg, world.dp_size)
        passes = (
            {True: accumulation} if p.sync_every_micro_batch else {False: accumulation - 1, True: 1}
        )
        if accumulation > 1 and p.sync_every_micro_batch:
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.requires_grad else None
        *of_blocks, (held, _) = [
            counted.held(module, optimizer) for module in (*model.blocks, model)
        ]
        for last, counted.times in [(last, times) for last, times in passes.items() if times]:
            begin("batch")
            unshard_first_units(model, p)
            set_gradient_sync(model, p, world, last)
            ids = torch.zeros(sequences, cfg.train.seq_len // world.cp, dtype=torch.int64)
            documents = (
                torch.zeros(sequences, cfg.train.seq_len, dtype=torch.int64)
                if cfg.data.document_mask
                else None
            )
            positions = torch.zeros_like(ids) if world.cp > 1 or cfg.data.document_mask else None
            model(ids, ids, positions, documents)[0]["loss"].backward()
        counted.times = 1
        begin("update")
        if p.cpu_offload:
            counted.on_host.add("working memory")  # the norm and the update are computed there
        clip_gradients(model, optimizer, cfg.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        begin("end")
    return Step(
        counted.phases[1:-1],
        held,
        type(optimizer).__name__,
        not stateless,
        counted.first,
        counted.by_data,
    ), of_blocks


@contextlib.contextmanager
def values_refused(counted: Counted) -> Iterator[None]:
    """Turns torch's errors about operators that need values, which fake tensors lack, into a ConfigError."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        frames, trace = [], error.__traceback__
        while trace:
            frames, trace = [*frames, trace.tb_frame], trace.tb_next
        module = next(filter(None, map(counted.module_of, reversed(frames))), "the step")
        # torch 2.11's checkpoint() leaves its hooks set while they exist
        traceback.clear_frames(error.__traceback__)
        raise ConfigError(
            f"--dry-run: {error.func} in {module}, {counted.phases[-1].name}: a plan has shapes and no "
            "values, which this operator needs (or it has no fake implementation); the model trains, but "
            "cannot be planned; torch's grouped_mm(), or a multiplication by a mask, has fixed shapes"
        ) from None


def without_storage(counted: Counted) -> list:
    """Patches for code that needs tensor values or another tensor class, or that bypasses the dispatcher."""
    # DTensor's shape propagation: global shapes
    whole = ShardingPropagator._propagate_tensor_meta_non_cached
    resize = torch.UntypedStorage.resize_
    rounded = config.has_extra("optimizers")
    return [
        *[
            mock.patch(
                "extras.optimizers.adamw_bfloat16.shard_offset",
                lambda *unused: torch.zeros(4, dtype=torch.int32),
            )
        ]
        * rounded,
        mock.patch.object(
            FakeTensor,
            "as_subclass",
            lambda t, kind: setattr(t, "__class__", fake_class(kind)) or t,
        ),
        mock.patch.object(
            ShardingPropagator, whole.__name__, lambda *args: counted.unseen(whole, *args)
        ),
        mock.patch.object(
            torch.UntypedStorage, "resize_", lambda *of: counted.resized(resize(*of))
        ),
    ]


@functools.cache
def fake_class(kind: type) -> type:
    """A tensor class, such as extras/float8/all_gather.py's Float8Shard, as a class of fake tensors."""
    return type(
        f"Fake{kind.__name__}",
        (*(base for base in kind.__bases__ if base is not Tensor), FakeTensor),
        {},
    )


def watch(model: Llama, counted: Counted, compiled: bool) -> Callable[[str], None]:
    """Adds hooks that begin a phase at the forward and at the backward of embedding, head and each block. Returns what
    begins a phase of any name."""
    groups = [
        m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)
    ]
    sharded = [param for group in groups if group for param in group.fsdp_params]
    # on the device, also where sharded ones are offloaded
    deferred = "reductions" if counted.on_host else "gradients"

    def begin(name: str) -> None:
        counted.mark((param.grad for param in model.parameters()), "gradients")
        # FSDP2 accumulates in the unsharded parameters' own gradients where these have the dtype of the reduction
        counted.mark((param.unsharded_accumulated_grad for param in sharded), deferred)
        counted.mark(
            (param.unsharded_param.grad for param in sharded if hasattr(param, "_unsharded_param")),
            deferred,
        )
        counted.mark(
            (getattr(param, "_sharded_post_forward_param_data", None) for param in sharded),
            "gathered units",
        )
        counted.mark(
            (t for param in sharded for t in getattr(param, "all_gather_outputs", ())),
            "gathered units",
        )
        counted.begin(name)
        counted.fused = compiled and "block" in name

    def before(name: str, module: nn.Module, args: tuple) -> None:
        begin(f"forward {name}")
        if getattr(module, "keeps_inputs", False):
            counted.keeping = counted.kept[f"backward {name}"] = []

    def backward(name: str, gradient: Tensor) -> None:
        if counted.phases[-1].name != f"backward {name}":
            # once, if the block returns terms of the loss, too
            begin(f"backward {name}")

    def after(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        counted.keeping = None
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # also in float32: it leaves a compiled block's registers
                counted.mark([tensor], "working memory")
                tensor.register_hook(functools.partial(backward, name))

    modules = {"embedding": model.embedding, "head": model.head}
    for name, module in [
        *modules.items(),
        *((f"block {i}", block) for i, block in enumerate(model.blocks)),
    ]:
        module.register_forward_pre_hook(functools.partial(before, name), prepend=True)
        module.register_forward_hook(functools.partial(after, name))
    return begin
