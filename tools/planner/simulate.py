"""Simulates one training step of rank 0 at any world size, on tensors without storage. Counts
memory, work and communication.

The real program runs on torch's fake tensors and fake process group: the model on the meta device,
parallelize(), the optimizer. Counted (counted.py) sees every operator with its inputs and outputs,
so this file does not describe the model a second time. Only a few of the identical blocks run
(blocks.py). The others are counted as copies of the middle blocks.

For a GPU, gpu_paths.py selects the GPU's code paths, and counts compiled code as compiled. plan.py
turns the step that simulate() returns into a plan.

Shapes: B sequences of a micro-batch, S tokens of a sequence, T = S / cp of them on a rank.
"""

import contextlib
import functools
import itertools
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
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
from model.build import meta_model
from model.llama import Llama, after_weight_update
from optim import build_optimizer, clip_gradients
from parallel.fsdp import set_communication, unshard_first_units
from parallel.materialize import allocate
from parallel.mesh import World, build_mesh
from parallel.parallelize import parallelize
from tools.planner.blocks import Shorter, kinds_of_blocks, shortened
from tools.planner.counted import COMPUTATION, ROUNDED_TO, STREAMS, Counted, ModuleState, Phase
from tools.planner.gpu_paths import gpu_code_paths, one_kernel


@dataclass(frozen=True)
class Step:
    phases: list[Phase]
    # bytes of this rank's parameters, gradients and optimizer state between steps
    held: Counter
    optimizer: str
    # whether the optimizer has created its state for every trainable parameter
    state_is_made: bool
    # whether a FlexAttention mask depends on data
    masks_depend_on_data: bool

    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak.total())

    def peak_of_pools(self) -> Counter:
        """The peak of each pool, in bytes."""
        peak = Counter()
        for phase in self.phases:
            # | takes the maximum for each pool
            peak |= phase.peak_of_pools
        return peak


def simulate(cfg: config.Config, ranks: int, on_gpu: bool = True, all_blocks: bool = False) -> Step:
    """Simulates one step of rank 0. all_blocks=True runs every block. No process group may exist
    yet. Raises ConfigError for an invalid mesh, and for a model whose shapes depend on values."""
    if cfg.parallel.cp > 1:
        # import it before its imports are patched, or it would keep the replacements
        import parallel.context  # noqa: F401
    # clear DTensor's caches: an earlier simulation's meshes have destroyed process groups
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    # TORCH_DISTRIBUTED_DEBUG=DETAIL would wrap the group in a group that needs a real store
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = build_mesh("cpu", config.mesh_shape(cfg, ranks))
        world = World(0, ranks, torch.device("cpu"), mesh)
        step = None
        if not all_blocks:
            step = simulate_fewer_blocks(cfg, world, on_gpu)
        if step is None:
            step, _ = run(cfg, world, on_gpu)
        return step
    finally:
        dist.destroy_process_group()


def simulate_fewer_blocks(cfg: config.Config, world: World, on_gpu: bool) -> Step | None:
    """Simulates the step with only a few blocks; None if the result would differ."""
    p = cfg.parallel
    blocks = cfg.model.n_layers
    # blocks whose prefetch involves the embedding or the head
    edge = max(p.prefetch_forward, p.prefetch_backward, 1)
    kinds_of = functools.partial(kinds_of_blocks, cfg, world, on_gpu)
    shorter = shortened(kinds_of, blocks, edge)
    if shorter is None:
        return None
    shorter_model = replace(cfg.model, n_layers=shorter.blocks)
    step, states = run(replace(cfg, model=shorter_model), world, on_gpu)
    update = step.phases[-1]
    if not is_elementwise(update) or not repeats(step.phases, shorter.middle):
        return None
    return extrapolated(step, states, shorter, blocks)


def is_elementwise(update: Phase) -> bool:
    """Whether the optimizer works element by element, without multiplying or sending matrices."""
    if update.work["matmuls"]:
        return False
    return all(kind == "all_reduce" for _, kind, _ in update.sent)


def repeats(phases: list[Phase], middle: range) -> bool:
    """Whether the blocks after the middle ones have the same work and communication.

    Blocks whose forward has the same operators may still differ, for example in backward. This
    check detects that.
    """
    following = range(middle.stop, middle.stop + len(middle))
    return counts_of_blocks(phases, middle) == counts_of_blocks(phases, following)


def counts_of_blocks(phases: list[Phase], blocks: range) -> list[tuple]:
    """The counts of each phase of these blocks, without memory, in a form that can be compared."""
    counts = []
    for phase in phases:
        direction, _, block = phase.name.partition(" block ")
        if not block or int(block) not in blocks:
            continue
        counters = (phase.work, phase.sent, phase.uncounted)
        # unary + drops zeros
        nonzero = [sorted((+counter).items()) for counter in counters]
        counts.append((direction, blocks.index(int(block)), phase.times, *nonzero))
    return sorted(counts)


def extrapolated(step: Step, states: list[ModuleState], shorter: Shorter, blocks: int) -> Step:
    """The step of a model with `blocks` blocks, from the step of the shorter model. Adds copies of
    the middle blocks. `states` has the state of each block of the shorter model."""
    middle = shorter.middle
    copies = (blocks - shorter.blocks) // len(middle)
    size = sum((states[i].size for i in middle), Counter())
    on_device = sum((states[i].on_device for i in middle), Counter())
    of_pools = sum((states[i].in_pools for i in middle), Counter())
    numbers = {
        "forward": itertools.cycle(range(blocks)),
        "backward": itertools.cycle(reversed(range(blocks))),
    }
    phases = []
    # bytes on the device before each phase, by kind and by pool
    live = plus(Counter(), on_device, copies)
    in_pools = plus(Counter(), of_pools, copies)
    # bytes of reductions between micro-batches: in the shorter step -> in this one. FSDP2 keeps
    # reductions of replicated units until the next micro-batch has reduced, then drops all at once.
    left = {0: 0}
    for before, phase in with_copies(step.phases, middle, copies):
        if phase.name in ("batch", "update"):
            reductions = left.setdefault(before.end["reductions"], live["reductions"])
            in_pools["reduce-scatter"] += reductions - live["reductions"]
            live["reductions"] = reductions
        # a phase changes memory by the same amount as in the shorter step
        offset = plus(live, before.end, -1)
        offset_of_pools = plus(in_pools, before.end_of_pools, -1)
        live = plus(phase.end, offset)
        in_pools = plus(phase.end_of_pools, offset_of_pools)
        name = phase.name
        direction, _, block = name.partition(" block ")
        if block:
            name = f"{direction} block {next(numbers[direction])}"
        phases.append(
            replace(
                phase,
                name=name,
                peak=plus(phase.peak, offset),
                end=live,
                peak_of_pools=plus(phase.peak_of_pools, offset_of_pools),
                end_of_pools=in_pools,
            )
        )
    held = plus(step.held, size, copies)
    growth = held["gradients"] / step.held["gradients"]
    phases[-1] = extrapolated_update(phases[-1], growth, copies * size["scales"])
    return replace(step, phases=phases, held=held)


def with_copies(phases: list[Phase], middle: range, copies: int) -> list[tuple[Phase, Phase]]:
    """The phases of the longer step as (previous phase in the shorter step, phase)."""
    last_of_forward = f"forward block {middle[-1]}"
    last_of_backward = f"backward block {middle[0]}"
    order = []
    before = Phase("start")
    for phase in phases:
        order.append((before, phase))
        if phase.name in (last_of_forward, last_of_backward):
            order += order[-len(middle) :] * copies
        before = phase
    return order


def extrapolated_update(update: Phase, growth: float, scales: int) -> Phase:
    """The update of a model with more blocks. Its work grows with the trained parameters.

    growth: the number of trained parameters, relative to the shorter model. scales: the bytes of
    float8 scales that the longer model has in addition.
    """
    sent = Counter(update.sent)
    all_reduced = ("dp_shard", "all_reduce", "bytes")
    if all_reduced in sent:
        sent[all_reduced] += scales
    return replace(
        update,
        end=Counter({**update.end, "gradients": 0}),
        sent=sent,
        work=Counter({kind: growth * work for kind, work in update.work.items()}),
        uncounted=Counter(
            {name: round(growth * calls) for name, calls in update.uncounted.items()}
        ),
    )


def plus(a: Counter, b: Mapping, times: int = 1) -> Counter:
    """a + times * b. Unlike Counter's +, keeps negative counts. Preserves the order of keys."""
    return Counter({key: a.get(key, 0) + times * b.get(key, 0) for key in {**a, **b}})


def run(cfg: config.Config, world: World, on_gpu: bool) -> tuple[Step, list[ModuleState]]:
    """Runs a step with every block of the model. Returns the step and the state of each block."""
    p = cfg.parallel
    counted = counter_for(world, p, on_gpu)
    patches = without_storage(cfg, counted)
    if on_gpu:
        patches += gpu_code_paths(cfg, counted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(values_refused(counted))
        for patch in patches:
            stack.enter_context(patch)
        model = sharded_meta_model(cfg, world, counted, on_gpu)

        stack.enter_context(counted.fake)
        stack.enter_context(counted)
        allocate(model, torch.device("cpu"))
        optimizer = optimizer_on_fakes(model, cfg, counted)
        trained = [param for param in model.parameters() if param.requires_grad]
        state_is_made = all(optimizer.state.get(param) for param in trained)
        after_weight_update(model)
        hooks = PhaseHooks(model, counted, compiled=p.compile and on_gpu)
        states = [counted.mark_state(block, optimizer) for block in model.blocks]
        held = counted.mark_state(model, optimizer).size
        run_step(model, optimizer, cfg, world, hooks)
    # without "start" and "end"
    step = Step(
        phases=counted.phases[1:-1],
        held=held,
        optimizer=type(optimizer).__name__,
        state_is_made=state_is_made,
        masks_depend_on_data=counted.mask_depends_on_data,
    )
    return step, states


def run_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    cfg: config.Config,
    world: World,
    hooks: "PhaseHooks",
) -> None:
    """Runs a step in phases, like training_step() in train.py."""
    p = cfg.parallel
    counted = hooks.counted
    micro_batches = distinct_micro_batches(config.accumulation_steps(cfg.train, world.dp_size))
    for number, times in enumerate(micro_batches, 1):
        counted.times = times
        hooks.begin("batch")
        adds = number > 1 and p.sync_every_micro_batch
        counted.pool_now = functools.partial(current_pool, model, p, adds)
        if number == 1:
            unshard_first_units(model, p)
        set_communication(model, p, world, last_micro_batch=number == len(micro_batches))
        # this variable keeps them alive during the update, as in a run
        inputs = micro_batch_inputs(cfg, world)
        model(*inputs)[0]["loss"].backward()
        counted.phases[-1].ends_reduced = model._get_fsdp_state()._state_ctx.is_last_backward
    counted.times = 1
    hooks.begin("update")
    if p.cpu_offload:
        # the norm and the update are computed on the host
        counted.on_host.add("working memory")
    clip_gradients(model, optimizer, cfg.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    hooks.begin("end")


def current_pool(model: Llama, p: config.Parallel, adds: bool) -> str:
    """The memory pool of the current stream. FSDP2 switches streams even on a CPU.

    `adds` says whether gradients are added to those of an earlier micro-batch.
    """
    now = torch.cpu.current_stream()
    # pyrefly: ignore[not-callable]  # a sharded model
    communication = model._get_fsdp_state()._comm_ctx
    # FSDP2 creates the streams in its first forward
    streams = {getattr(communication, name, None): pool for name, pool in STREAMS.items()}
    pool = streams.get(now, COMPUTATION)
    # like parallel/memory_pool.py
    becomes_gradient = pool == "reduce-scatter" and p.reduce_dtype == "float32" and not adds
    if p.one_memory_pool and (pool == "all-gather" or becomes_gradient):
        return COMPUTATION
    return pool


def counter_for(world: World, p: config.Parallel, on_gpu: bool) -> Counted:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    dimensions = {}
    for name in ("dp_replicate", "cp", "tp"):
        mesh = world.mesh[name]
        if mesh.size() > 1:
            dimensions[str(mesh.get_group().group_name)] = name
    on_host = set()
    if p.cpu_offload:
        on_host = {"parameters", "optimizer state", "gradients"}
    return Counted(fake, dimensions, on_host, granularity=ROUNDED_TO if on_gpu else 1)


def sharded_meta_model(cfg: config.Config, world: World, counted: Counted, on_gpu: bool) -> Llama:
    """The parallelized model on the meta device. Does not compile it: blocks run eagerly."""
    model = meta_model(cfg.model, cfg.lora)
    eager = replace(cfg.parallel, compile=False)
    parallelize(model, replace(cfg, parallel=eager), world)
    model.head.compile_loss = cfg.parallel.compile and on_gpu
    return model


def optimizer_on_fakes(model: Llama, cfg: config.Config, counted: Counted) -> torch.optim.Optimizer:
    """Builds the optimizer. Counts its update as one kernel if it would be compiled."""

    def compiled(update, **unused):
        return functools.partial(one_kernel, counted, update)

    with mock.patch("torch.compile", compiled):
        return build_optimizer(model, cfg.optim, compile=cfg.parallel.compile)


def distinct_micro_batches(accumulation: int) -> list[int]:
    """How often each simulated micro-batch occurs in a step. These are the first, one for all the
    identical ones in between, and the last."""
    if accumulation < 3:
        return [1] * accumulation
    return [1, accumulation - 2, 1]


def micro_batch_inputs(cfg: config.Config, world: World) -> tuple:
    """The model's arguments: tokens, targets, positions and document numbers."""
    sequences = config.micro_batch_size(cfg.train, world.dp_size)
    # (B, T); values do not matter, so these are the targets, too
    tokens = torch.zeros(sequences, cfg.train.seq_len // world.cp, dtype=torch.int64)
    documents = None
    if cfg.data.document_mask:
        # (B, S)
        documents = torch.zeros(sequences, cfg.train.seq_len, dtype=torch.int64)
    positions = None
    if world.cp > 1 or cfg.data.document_mask:
        # (B, T)
        positions = torch.zeros_like(tokens)
    return tokens, tokens, positions, documents


@contextlib.contextmanager
def values_refused(counted: Counted) -> Iterator[None]:
    """Raises ConfigError if an operator needs values, which fake tensors lack."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        # the hooks of torch 2.11's checkpoint() stay set as long as the frames exist
        traceback.clear_frames(error.__traceback__)
        raise ConfigError(
            f"--dry-run: {error.func} in the {counted.phases[-1].name}: a plan has shapes and no "
            "values, which this operator needs (or it has no fake implementation); the model "
            "trains, but cannot be planned; torch's grouped_mm(), or a multiplication by a mask, "
            "has fixed shapes"
        ) from None


def without_storage(cfg: config.Config, counted: Counted) -> list:
    """Patches for code that needs values or another tensor class, or bypasses the dispatcher."""
    # DTensor's shape propagation runs on global shapes, so it must not be counted
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    resize = torch.UntypedStorage.resize_

    def as_fake_subclass(tensor: FakeTensor, kind: type) -> FakeTensor:
        tensor.__class__ = fake_class(kind)
        return tensor

    patches: list[Any] = [
        mock.patch.object(FakeTensor, "as_subclass", as_fake_subclass),
        mock.patch.object(
            ShardingPropagator,
            propagate.__name__,
            lambda *args: counted.run_uncounted(propagate, *args),
        ),
        mock.patch.object(
            torch.UntypedStorage, "resize_", lambda *args: counted.resized(resize(*args))
        ),
    ]
    if cfg.optim.name == "muon" or cfg.optim.state_dtype == "bfloat16":
        from extras.optimizers import adamw_bfloat16

        def fake_numbers(p: nn.Parameter, key: str) -> adamw_bfloat16.ElementNumbers:
            """number_elements(), without the offset of a shard, which needs values."""
            rows, columns = adamw_bfloat16.as_2d(p.detach()).shape
            shapes = ((rows, 1), (columns,), ())
            return adamw_bfloat16.ElementNumbers(
                *(torch.zeros(s, dtype=torch.int32, device=p.device) for s in shapes)
            )

        patches.append(mock.patch.object(adamw_bfloat16, "number_elements", fake_numbers))
    return patches


@functools.cache
def fake_class(kind: type) -> type:
    """A class of fake tensors in place of a tensor class such as extras/float8's Float8Shard."""
    bases = [base for base in kind.__bases__ if base is not Tensor]
    return type(f"Fake{kind.__name__}", (*bases, FakeTensor), {})


class PhaseHooks:
    """Begins a phase at the forward and the backward of the embedding, the head and each block."""

    def __init__(self, model: Llama, counted: Counted, compiled: bool):
        """compiled: whether blocks are counted as compiled."""
        self.model = model
        self.counted = counted
        self.compiled = compiled
        # FSDP2's parameters
        self.sharded = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                if group:
                    self.sharded += group.fsdp_params
        # unsharded gradients are on the device even if sharded gradients are offloaded
        self.kind_of_unsharded = "reductions" if counted.on_host else "gradients"

        modules = {"embedding": model.embedding, "head": model.head}
        for i, block in enumerate(model.blocks):
            modules[f"block {i}"] = block
        for name, module in modules.items():
            before = functools.partial(self.before_forward, name)
            module.register_forward_pre_hook(before, prepend=True)
            module.register_forward_hook(functools.partial(self.after_forward, name))
        if compiled:
            model.head.norm.register_forward_pre_hook(self.before_norm)
            model.head.norm.register_forward_hook(self.after_norm)

    def before_norm(self, norm: nn.Module, args: tuple) -> None:
        self.counted.fused = True

    def after_norm(self, norm: nn.Module, args: tuple, output: Tensor) -> None:
        # count it even in float32, because it leaves the kernel
        self.counted.mark([output], "working memory")
        self.counted.fused = False

    def begin(self, name: str) -> None:
        """Marks gradients and FSDP2's buffers that the previous phase left, then begins a phase."""
        mark = self.counted.mark
        mark((param.grad for param in self.model.parameters()), "gradients")
        # the parameters of all-gathered units lack sharded gradients
        mark((param.sharded_param.grad for param in self.sharded), "gradients")
        # FSDP2 accumulates gradients in one of these two; in the second if it has the dtype of the
        # reduction
        for param in self.sharded:
            mark([param.unsharded_accumulated_grad], self.kind_of_unsharded)
            if hasattr(param, "_unsharded_param"):
                mark([param.unsharded_param.grad], self.kind_of_unsharded)
            mark([getattr(param, "_sharded_post_forward_param_data", None)], "gathered units")
            mark(getattr(param, "all_gather_outputs", ()), "gathered units")
        self.counted.begin(name)
        self.counted.fused = self.compiled and "block" in name

    def before_forward(self, name: str, module: nn.Module, args: tuple) -> None:
        self.begin(f"forward {name}")
        if module in self.counted.saving_blocks:
            self.counted.saving = []
            self.counted.saved_inputs[f"backward {name}"] = self.counted.saving

    def after_forward(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        self.counted.saving = None
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # count it even in float32, because it leaves a compiled block's registers
                self.counted.mark([tensor], "working memory")
                tensor.register_hook(functools.partial(self.before_backward, name))

    def before_backward(self, name: str, gradient: Tensor) -> None:
        # begin it only once if the block also returns terms of the loss
        if self.counted.phases[-1].name != f"backward {name}":
            self.begin(f"backward {name}")
