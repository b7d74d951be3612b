"""FSDP2: units, their mixed precision, and prefetch.

A unit is a group of modules whose parameters are all-gathered and resharded together: the
embedding, each block, the head. Each rank stores a contiguous dim-0 shard of every parameter.
In each micro-batch a unit goes through

    all-gather -> forward -> reshard -> all-gather -> backward -> reshard -> reduce-scatter

The reduce-scatter averages gradients. With HSDP, an all-reduce over the replicas follows.
Exceptions:

- The head stays unsharded between forward and backward, because backward begins with it. If it is
  tied, its unit stays unsharded until the end of backward, when the embedding's gradient is computed.
- If the embedding's unit is only a lookup table, it is not all-gathered in backward: the gradient of
  a lookup reads no weight.
- With reshard_after_forward = false, every unit stays unsharded until its backward.
- With gather_once, every unit stays unsharded from its first forward to the backward of the step's
  last micro-batch.
- Without gather_once, the first prefetch_forward + 1 units stay unsharded from their backward to the
  next micro-batch's forward.
- With sync_every_micro_batch = false, only the step's last micro-batch reduces gradients.
- FSDP2 ignores the parameters that `replicated` names: they belong to no unit.

The root unit has no parameters. Its hooks prepare and finish the model's forward and backward.

Prefetch: at depth 0 FSDP2 issues a unit's all-gather when the host reaches the unit, and in
backward also that of the next unit. On a GPU the host runs ahead of the device, so an all-gather
overlaps with the previous unit's computation. Explicit prefetch of depth n (prefetch_forward,
prefetch_backward) also issues the all-gathers of the next n units. This helps if the host is slow
relative to the kernels, or if a unit computes for less time than its all-gather takes (several
nodes: depth 2). It costs memory for n more unsharded units.
"""

import fnmatch
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

import config
from config import ConfigError
from model.llama import Llama, named_parameters
from parallel.mesh import World, fsdp_mesh
from parallel.torch_patches import (
    IS_TORCH_2_11,
    accept_integer_parameters,
    free_reduce_scatter_inputs,
    share_classes,
)


def units(model: Llama) -> list[tuple[str, list[nn.Module]]]:
    """(name, modules) of each unit in forward order.

    Tied embedding and head share a weight, so they form one unit.
    """
    blocks = [[block] for block in model.blocks]
    if model.config.tie_embeddings:
        modules = [[model.embedding, model.head], *blocks]
    else:
        modules = [[model.embedding], *blocks, [model.head]]
    return list(zip(config.unit_names(model.config), modules, strict=True))


def unit_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a unit's modules. A tied parameter is listed once."""
    return list(nn.ModuleList(modules).parameters())


def apply_fsdp(model: Llama, p: config.Parallel, world: World) -> None:
    """Shards every unit in place.

    Parameters become DTensors on fsdp_mesh(world), except replicated ones. Raises ConfigError for a
    parameter that is not in exactly one unit.
    """
    check_units(model)
    mesh = fsdp_mesh(world)
    replicated: set[nn.Parameter] = set()
    if p.replicated:
        from parallel.replicated import cast_at_access, replicated_parameters

        replicated = replicated_parameters(model, p)
        for name, modules in units(model):
            cast_at_access(modules, replicated, unit_dtypes(p, name)[0])
        share_classes(model)

    offload = OffloadPolicy()
    if p.cpu_offload:
        # Copies between a GPU and pinned host memory do not block the host.
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")

    accept_integer_parameters()
    for name, modules in units(model):
        # Don't reshard the unit with the head after forward: backward begins with it.
        reshard = p.reshard_after_forward and model.head not in modules
        fully_shard(
            modules,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=mixed_precision(p, name),
            offload_policy=offload,
            ignored_params=replicated,
        )
    # The root comes last. It takes over all units inside it.
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        ignored_params=replicated,
    )

    if is_lookup(model):
        model.embedding.set_unshard_in_backward(False)
    cast_residual_stream(model, p)
    set_prefetch(model, p)
    # The previous micro-batch left its last reduce-scatter running (set_communication). The forward
    # of all blocks has hidden it, and the head's backward, often the peak, needs its memory.
    model.head.register_forward_pre_hook(lambda *_: free_reduce_scatter_inputs(model))
    if p.one_memory_pool and world.device.type == "cuda":
        from parallel.memory_pool import share_pool

        share_pool([modules for _, modules in units(model)])


def check_units(model: Llama) -> None:
    """Raises ConfigError for a parameter that is in no unit, or in two."""
    unit_of: dict[nn.Parameter, str] = {}
    names = {parameter: name for name, parameter in named_parameters(model)}
    for unit, modules in units(model):
        for parameter in unit_parameters(modules):
            if parameter in unit_of:
                raise ConfigError(
                    f"{names[parameter]}: the units {unit_of[parameter]} and {unit} share it, but FSDP2 "
                    "shards a parameter in one unit: give each its own, or make the modules one unit "
                    "(parallel/fsdp.py: units)"
                )
            unit_of[parameter] = unit
    for parameter, name in names.items():
        if parameter not in unit_of:
            raise ConfigError(
                f"{name}: belongs to no unit, so the root would keep it unsharded through forward and "
                "backward: move it to a module of a unit, or add its module to one (parallel/fsdp.py: "
                "units)"
            )


def is_lookup(model: Llama) -> bool:
    """Whether the embedding's unit only looks up rows of one table: then its backward reads no weight.
    It does if the head is tied, or if a fork normalizes or projects the rows."""
    _, modules = units(model)[0]
    plain_forward = type(model.embedding).forward is nn.Embedding.forward
    return plain_forward and len(unit_parameters(modules)) == 1


def set_prefetch(model: Llama, p: config.Parallel) -> None:
    """Sets explicit prefetch of prefetch_forward and prefetch_backward units.

    Depth 0 keeps FSDP2's implicit prefetch: no unit in forward, one in backward.
    """
    # FSDP2 attaches a unit's state to the first of its modules.
    forward = [modules[0] for _, modules in units(model)]
    for i, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + p.prefetch_forward])

    # The tied unit holds the head, so it is first in backward, too. Backward does not reach the first
    # units if they are frozen.
    tied = model.config.tie_embeddings
    backward = [forward[0 if tied else -1], *reversed(model.blocks[first_in_backward(model) :])]
    if not tied and any(parameter.requires_grad for parameter in model.embedding.parameters()):
        backward.append(model.embedding)
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + p.prefetch_backward])
    # Nothing follows the last unit. Without a list, FSDP2 would all-gather the unit whose forward
    # preceded this unit's: the previous micro-batch's or evaluation's head, or a frozen unit.
    backward[-1].set_modules_to_backward_prefetch([backward[-1]])


def first_in_backward(model: Llama) -> int:
    """The index of the first block that backward reaches: everything before it is frozen."""
    for i, module in enumerate([model.embedding, *model.blocks]):
        if any(parameter.requires_grad for parameter in module.parameters()):
            return max(0, i - 1)
    return len(model.blocks)


# Mixed precision


def unit_dtypes(p: config.Parallel, unit: str) -> tuple[torch.dtype, torch.dtype]:
    """(param_dtype, reduce_dtype) of a unit.

    Both are float32 if a pattern of `keep_fp32` matches the unit.
    """
    if any(fnmatch.fnmatchcase(unit, pattern) for pattern in p.keep_fp32):
        return torch.float32, torch.float32
    return getattr(torch, p.param_dtype), getattr(torch, p.reduce_dtype)


def mixed_precision(p: config.Parallel, unit: str) -> MixedPrecisionPolicy:
    """A unit's mixed precision.

    FSDP2 never casts inputs: RMSNorm accepts the residual stream in any dtype, and the RoPE tables
    must stay in float32. cast_residual() casts outputs.
    """
    param_dtype, reduce_dtype = unit_dtypes(p, unit)
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )


def cast_residual_stream(model: Llama, p: config.Parallel) -> None:
    """Makes the embedding and each block return the residual stream in output_dtype."""
    dtype = getattr(torch, p.output_dtype or p.param_dtype)
    for module in (model.embedding, *model.blocks):
        module.register_forward_hook(partial(cast_residual, dtype))


@torch.compiler.disable  # it runs outside the compiled block, and would compile to another graph
def cast_residual(
    dtype: torch.dtype, module: nn.Module, inputs: tuple, output: Tensor | tuple
) -> Tensor | tuple:
    """Forward hook that casts the residual stream.

    A block may return (x, terms of the loss). The terms stay in float32. MixedPrecisionPolicy's
    output_dtype would round them.
    """
    if isinstance(output, tuple):
        x, *terms = output
        return x.to(dtype), *terms
    return output.to(dtype)


def all_gather_dtype(param: Tensor, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP2 all-gathers a parameter of a unit with this param_dtype."""
    local = param._local_tensor if isinstance(param, DTensor) else param
    if hasattr(local, "all_gather_dtype"):  # FSDP2's extensions: extras/float8/all_gather.py
        return local.all_gather_dtype
    # torch 2.11 casts integers, too. Every param_dtype represents bytes exactly.
    return param_dtype if param.is_floating_point() or IS_TORCH_2_11 else param.dtype


# Called in each step


def unshard_first_units(model: Llama, p: config.Parallel) -> None:
    """Issues the all-gathers of the first units, to overlap them with loading the batch."""
    for _, modules in units(model)[: p.prefetch_forward]:
        modules[0].unshard(async_op=True)


def set_communication(
    model: Llama, p: config.Parallel, world: World, last_micro_batch: bool
) -> None:
    """Call before each micro-batch: sets what its backward reduces, and which units it leaves
    unsharded for the next micro-batch. The step's last micro-batch leaves none.

    With sync_every_micro_batch each micro-batch reduces gradients, else only the step's last one.
    Until then, unsharded gradients of the full model accumulate in reduce_dtype. HSDP defers only the
    all-reduce.

    A communicator runs one collective at a time, in the order of issue. So the first all-gather of a
    micro-batch waits for the last reduce-scatter of the previous one, the embedding's, which is
    large. To hide both, the first prefetch_forward + 1 units stay unsharded: the forward of the last
    of these issues that first all-gather, and overlaps with it.
    """
    if not p.sync_every_micro_batch:
        if world.dp_replicate == 1:  # from the mesh: the option may be "auto"
            model.set_requires_gradient_sync(last_micro_batch)
        else:
            model.set_requires_all_reduce(last_micro_batch)
    # The end of a step's last backward waits for all reductions. An earlier one need not: its last
    # reduce-scatter overlaps with the next forward, and keeps its input until the head's forward
    # (apply_fsdp). With replicas, every unit would keep its input.
    overlaps = world.dp_replicate == 1 and world.fsdp_size > 1
    model.set_is_last_backward(last_micro_batch or not overlaps)

    unsharded = units(model) if p.gather_once else units(model)[: p.prefetch_forward + 1]
    for _, modules in unsharded:
        modules[0].set_reshard_after_backward(last_micro_batch)
        if p.gather_once and not last_micro_batch:  # a single micro-batch reshards as without it
            modules[0].set_reshard_after_forward(False)
    if is_lookup(model):
        # Issues its all-gather for the next forward before the reduction of its gradient, not after.
        model.embedding.set_unshard_in_backward(not last_micro_batch)


def reshard(model: Llama) -> None:
    """Reshards the units that a forward without a backward left unsharded."""
    for _, modules in units(model):
        modules[0].reshard()
