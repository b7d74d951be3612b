"""Simulates one training step of rank 0 at any world size, on tensors without storage: memory, work, communication.

The real program runs on torch's fake tensors and fake process group: the model on meta, parallelize(), the optimizer.
Counted sees every operator with its inputs and outputs, so this file does not describe the model a second time. Only a
few of the identical blocks run; the others are counted as copies of those in the middle.

A GPU's step takes the GPU's code paths (gpu_code_paths): attention, masks and loss differ on a CPU. A compiled block
runs eagerly but is counted as Inductor would run it: matrix products, attention and collectives write their outputs,
and float32 intermediates stay in registers. Without activation checkpointing it also saves the products' inputs.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter

import config
from model.float8 import use_float8
from model.llama import Llama, meta_model
from model.loss import CHUNK
from optim import BFloat16AdamW, build_optimizer, clip_gradients
from parallel.activation_checkpoint import apply_activation_checkpointing, checkpointed, is_checkpointed
from parallel.float8 import Float8AllGather, update_scales
from parallel.fsdp import set_gradient_sync, unshard_first_units
from parallel.materialize import allocate
from parallel.mesh import World, build_mesh
from parallel.parallelize import parallelize
from parallel.planner.counted import Counted, Phase


class FakeFloat8Shard(Float8AllGather, FakeTensor):
    """parallel/float8.py's Float8Shard as a fake tensor."""


@dataclass(frozen=True)
class Step:
    phases: list[Phase]
    held: Counter  # bytes of this rank's parameters, gradients and optimizer state between steps
    optimizer: str
    state_is_made: bool  # for every trainable parameter

    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak.total())


def simulate(cfg: config.Config, ranks: int, on_gpu: bool = True, whole: bool = False) -> Step:
    """No process group may exist yet. whole: run every block. Raises ConfigError for an invalid mesh."""
    p, blocks = cfg.parallel, cfg.model.n_layers
    period = p.recompute if isinstance(p.recompute, int) else 1
    edge = max(p.prefetch_forward, p.prefetch_backward, 1)  # blocks whose prefetch involves the embedding or the head
    few = 2 * edge + 1 + period
    few += (blocks - few) % period
    numbered = any({*"0123456789?["} & {*pattern} for pattern in (*cfg.model.freeze, *p.keep_fp32, *p.unsharded))
    whole = whole or numbered or few >= blocks
    # drop what DTensor caches for an earlier simulation's meshes, whose process groups are destroyed
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world = World(0, ranks, torch.device("cpu"), build_mesh("cpu", config.mesh_shape(cfg, ranks)))
        if not whole:
            found, of_blocks = run(replace(cfg, model=replace(cfg.model, n_layers=few)), world, on_gpu)
            whole = any(kind != "all_reduce" for _, kind, _ in found.phases[-1].sent)  # its optimizer sends matrices
        if whole:
            return run(cfg, world, on_gpu)[0]
    finally:
        dist.destroy_process_group()
    middle, times = range(edge + 1, edge + 1 + period), (blocks - few) // period
    more = [sum(counts, Counter()) for counts in zip(*(of_blocks[i] for i in middle))]
    return extrapolated(found, *more, middle, times, blocks)


def extrapolated(step: Step, more: Counter, taken: Counter, middle: range, times: int, blocks: int) -> Step:
    """The step of a model of so many blocks, by `times` more copies of the middle ones. more, taken: what these hold,
    see held()."""
    order = []  # of the phases in the longer step, each with the one that it follows in this one
    for before, phase in zip([Phase("start"), *step.phases], step.phases):
        order.append((before, phase))
        if phase.name in (f"forward block {middle[-1]}", f"backward block {middle[0]}"):
            order += order[-len(middle) :] * times
    numbers = {"forward": itertools.cycle(range(blocks)), "backward": itertools.cycle(reversed(range(blocks)))}
    found, end = [], plus(Counter(), taken, times)
    for before, phase in order:  # each changes the memory that the last one leaves
        offset = plus(end, before.end, -1)
        end = plus(phase.end, offset)
        if not phase.end["reductions"]:  # FSDP2 drops those of all replicated units at once, after backward
            end["reductions"] = 0
        kind, _, block = phase.name.partition(" block ")
        name = f"{kind} block {next(numbers[kind])}" if block else phase.name
        found.append(replace(phase, name=name, peak=plus(phase.peak, offset), end=end))
    held = plus(step.held, more, times)
    update = found[-1]  # its work grows with the parameters
    share = held["parameters"] / step.held["parameters"]
    scales = {key: more["scales"] for key in update.sent if key == ("dp_shard", "all_reduce", "bytes")}
    found[-1] = replace(update, end=Counter({**update.end, "gradients": 0}), sent=plus(update.sent, scales, times),
                        work=Counter({kind: share * work for kind, work in update.work.items()}))
    return replace(step, phases=found, held=held)


def plus(a: Counter, b: Mapping, times: int = 1) -> Counter:
    """a + times * b; unlike Counter's own +, keeps negative counts. Keys keep their order."""
    return Counter({key: a.get(key, 0) + times * b.get(key, 0) for key in {**a, **b}})


def run(cfg: config.Config, world: World, on_gpu: bool) -> tuple[Step, list[tuple[Counter, Counter]]]:
    """The step, and what each block holds, see Counted.held()."""
    p, sequences = cfg.parallel, config.micro_batch_size(cfg, world.dp_size)
    dimensions = {world.mesh[name].get_group().group_name: name for name in ("dp_replicate", "cp", "tp")
                  if world.mesh[name].size() > 1}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    on_host = {"parameters", "optimizer state", "gradients"} if p.cpu_offload else set()
    counted = Counted(fake, dimensions, on_host, granularity=512 if on_gpu else 1)
    with contextlib.ExitStack() as stack:
        for patch in [*without_storage(counted), *(gpu_code_paths(cfg, counted) if on_gpu else ())]:
            stack.enter_context(patch)
        model = meta_model(cfg.model, cfg.lora)
        parallelize(model, replace(cfg, parallel=replace(p, compile=False)), world)
        model.head.compile_loss = p.compile and on_gpu
        stack.enter_context(fake)
        stack.enter_context(counted)
        allocate(model, torch.device("cpu"))
        optimizer = build_optimizer(model, cfg.optim)
        if p.compile and isinstance(optimizer, BFloat16AdamW):
            optimizer.update = partial(one_kernel, counted, optimizer.update)
        stateless = [param for param in model.parameters() if param.requires_grad and not optimizer.state.get(param)]
        update_scales(model)
        begin = watch(model, counted, p.compile and on_gpu)
        # Micro-batches that are alike run once; with sync_every_micro_batch, with gradients of an earlier one.
        accumulation = config.accumulation_steps(cfg, world.dp_size)
        passes = {True: accumulation} if p.sync_every_micro_batch else {False: accumulation - 1, True: 1}
        if accumulation > 1 and p.sync_every_micro_batch:
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.requires_grad else None
        *of_blocks, (held, _) = [counted.held(module, optimizer) for module in (*model.blocks, model)]
        for last, counted.times in [(last, times) for last, times in passes.items() if times]:
            begin("batch")
            unshard_first_units(model, p)
            set_gradient_sync(model, p, world, last)
            ids = torch.zeros(sequences, cfg.train.seq_len // world.cp, dtype=torch.int64)
            model(ids, ids)[0]["loss"].backward()
        counted.times = 1
        begin("update")
        if p.cpu_offload:
            counted.on_host.add("working memory")  # the norm and the update are computed there
        clip_gradients(model, optimizer, cfg.train.max_grad_norm)
        optimizer.step()
        update_scales(model)
        optimizer.zero_grad()
        begin("end")
    return Step(counted.phases[1:-1], held, type(optimizer).__name__, not stateless), of_blocks


def without_storage(counted: Counted) -> list:
    """Patches for code that needs tensor values or another tensor class, or that bypasses the dispatcher."""
    whole = ShardingPropagator._propagate_tensor_meta_non_cached  # DTensor's shape propagation: global shapes
    resize = torch.UntypedStorage.resize_
    return [
        mock.patch("optim.shard_offset", lambda *unused: torch.zeros(4, dtype=torch.int32)),
        mock.patch.object(FakeTensor, "as_subclass", lambda t, kind: setattr(t, "__class__", FakeFloat8Shard) or t),
        mock.patch.object(ShardingPropagator, whole.__name__, lambda *args: counted.unseen(whole, *args)),
        mock.patch.object(torch.UntypedStorage, "resize_", lambda *of: counted.resized(resize(*of))),
    ]


def watch(model: Llama, counted: Counted, compiled: bool) -> Callable[[str], None]:
    """Adds hooks that begin a phase at the forward and at the backward of embedding, head and each block. Returns what
    begins a phase of any name."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    sharded = [param for group in groups if group for param in group.fsdp_params]
    deferred = "reductions" if counted.on_host else "gradients"  # on the device, also where sharded ones are offloaded

    def begin(name: str) -> None:
        counted.mark((param.grad for param in model.parameters()), "gradients")
        # FSDP2 accumulates in the unsharded parameters' own gradients where these have the dtype of the reduction
        counted.mark((param.unsharded_accumulated_grad for param in sharded), deferred)
        counted.mark((param.unsharded_param.grad for param in sharded if hasattr(param, "_unsharded_param")), deferred)
        counted.mark((getattr(param, "_sharded_post_forward_param_data", None) for param in sharded), "gathered units")
        counted.mark((t for param in sharded for t in getattr(param, "all_gather_outputs", ())), "gathered units")
        counted.begin(name)
        counted.fused = compiled and "block" in name

    def before(name: str, module: nn.Module, args: tuple) -> None:
        begin(f"forward {name}")
        if getattr(module, "keeps_inputs", False):
            counted.keeping = counted.kept[f"backward {name}"] = []

    def after(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        counted.keeping = None
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                counted.mark([tensor], "working memory")  # also in float32: it leaves a compiled block's registers
                tensor.register_hook(lambda gradient: begin(f"backward {name}"))

    modules = {"embedding": model.embedding, "head": model.head}
    for name, module in [*modules.items(), *((f"block {i}", block) for i, block in enumerate(model.blocks))]:
        module.register_forward_pre_hook(partial(before, name), prepend=True)
        module.register_forward_hook(partial(after, name))
    return begin


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Stands in for FlexAttention: half of all pairs, which is what a document mask needs at most."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def gpu_code_paths(cfg: config.Config, counted: Counted) -> list:
    """Patches that select the GPU's code paths, and count what cfg compiles as if it were compiled."""
    patches = [
        mock.patch.object(FakeTensor, "is_cuda", True),
        mock.patch("torch.addmm", partial(wide_addmm, counted)),
        mock.patch.dict(CHUNK, cpu=CHUNK["cuda"]),
        mock.patch("parallel.parallelize.use_float8", lambda blocks, recipe, _: use_float8(blocks, recipe, "cuda")),
        mock.patch("parallel.context.make_mask", lambda *unused: None),
        mock.patch("parallel.context.attention", causal_attention),
    ]
    if cfg.parallel.compile:
        patches += [
            mock.patch("parallel.parallelize.apply_activation_checkpointing", partial(keep_products, counted)),
            # a block that is not checkpointed does not repeat its all-gathers in backward either
            mock.patch("parallel.tensor.is_checkpointed", lambda *unused: True),
            mock.patch("parallel.context.is_checkpointed", lambda *unused: True),
            mock.patch("model.loss.compiled", partial(partial, one_kernel, counted)),
        ]
    return patches


def one_kernel(counted: Counted, function: Callable, *args: Any) -> Any:
    """function(*args) as one compiled kernel, which does not materialize intermediates."""
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        result = counted.unseen(function, *args)
    counted.phases[-1].work["moved"] += sum(t.nbytes for t in tree_iter((args, result)) if isinstance(t, Tensor))
    counted.mark(tree_iter(result), "working memory")
    return result


def wide_addmm(counted: Counted, total: Tensor, a: Tensor, b: Tensor, **unused: Any) -> Tensor:
    """The loss's torch.addmm() with out_dtype and out=total, for which torch 2.11 cannot infer shapes."""
    counted.compute(torch.ops.aten.mm.default, (a, b), total)
    return total


def keep_products(counted: Counted, model: Llama, setting: str | int, tp: int) -> None:
    """apply_activation_checkpointing() for compiled blocks. A block that it leaves alone saves what "elementwise"
    saves, and the products' inputs (watch). Its backward recomputes the rest, but repeats no collective."""
    def recomputing(flag: bool) -> Callable:
        return lambda *unused: setattr(counted, "recomputing", flag and counted.phases[-1].name.startswith("backward"))

    apply_activation_checkpointing(model, setting, tp)
    for i in [i for i in range(len(model.blocks)) if not is_checkpointed(setting, i)]:
        model.blocks[i].register_forward_pre_hook(recomputing(True))
        model.blocks[i].register_forward_hook(recomputing(False), always_call=True)
        model.blocks[i] = checkpointed(model.blocks[i], "elementwise", tp)
        model.blocks[i].keeps_inputs = True
