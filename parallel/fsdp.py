"""FSDP2: which modules form a unit, its mixed precision, and prefetch.

The modules of a unit are all-gathered and resharded together: embedding, each block, head. Each rank keeps a contiguous
dim-0 shard of every parameter. In each micro-batch a unit goes through

    all-gather -> forward -> reshard -> all-gather -> backward -> reshard -> reduce-scatter of the gradients

(HSDP adds an all-reduce over the replicas). Two units differ: the head is kept from forward to backward, which begins
with it (tied, until the end: the embedding's part comes last); an untied embedding is not all-gathered in backward.
Options change this, too: reshard_after_forward = false keeps every unit for its backward, `replicated` leaves
parameters out, sync_every_micro_batch = false reduces in the last micro-batch alone. The root holds no parameter, but
FSDP2's hooks around a whole forward and backward.

At depth 0 FSDP2 issues a unit's all-gather when the host reaches it; in backward also that of the block before. On a
GPU the host runs ahead of the device, so an all-gather overlaps with the unit before. Explicit prefetch of depth n
(prefetch_forward, prefetch_backward) also issues those of the n units that follow in that pass. It helps where the host
is slow relative to the kernels, or a unit computes for less time than its all-gather takes (several nodes: depth 2). It
costs memory for that many full units.
"""

import contextlib
import fnmatch
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import config
from model.llama import Llama
from parallel.mesh import World, fsdp_mesh
from parallel.torch_patches import allow_integer_parameters


def units(model: Llama) -> list[tuple[str, list[nn.Module]]]:
    """(name, modules) of each unit in forward order. Tied embedding and head share a weight, so they form one unit."""
    blocks = [[block] for block in model.blocks]
    if model.config.tie_embeddings:
        modules = [[model.embedding, model.head], *blocks]
    else:
        modules = [[model.embedding], *blocks, [model.head]]
    return [*zip(config.unit_names(model.config), modules, strict=True)]


def unit_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a unit's modules; a tied one is listed once."""
    return list(dict.fromkeys(param for module in modules for param in module.parameters()))


def apply_fsdp(model: Llama, p: config.Parallel, world: World) -> None:
    """Shards every unit in place: parameters become DTensors on fsdp_mesh(world), except those of `replicated`."""
    replicated = replicated_parameters(model, p)
    # pinned: the GPU's copies do not block the host
    mesh, pin = (fsdp_mesh(world), world.device.type == "cuda")
    if replicated:
        from parallel.replicated import cast_at_access

        cast_at_access(
            model,
            replicated,
            [(modules, unit_dtypes(p, name)[0]) for name, modules in units(model)],
        )
    offload = CPUOffloadPolicy(pin_memory=pin) if p.cpu_offload else OffloadPolicy()
    allowed = contextlib.nullcontext()
    if not all(param.is_floating_point() for param in model.parameters()):  # NF4's codes
        allowed = allow_integer_parameters()
    with allowed:
        for name, modules in units(model):
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                # Don't reshard the unit with the head (the last, or the tied one): backward begins with it.
                reshard_after_forward=False if model.head in modules else p.reshard_after_forward,
                mp_policy=mixed_precision(p, name),
                offload_policy=offload,
                ignored_params=replicated,
            )
    residual_dtype = getattr(torch, p.output_dtype or p.param_dtype)
    for module in (model.embedding, *model.blocks):
        module.register_forward_hook(partial(cast_residual, residual_dtype))
    if not model.config.tie_embeddings:
        model.embedding.set_unshard_in_backward(False)  # a lookup's backward needs no weight
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        ignored_params=replicated,
    )
    set_prefetch(model, p)


def replicated_parameters(model: Llama, p: config.Parallel) -> set[nn.Parameter]:
    """The parameters of the option `replicated`: every rank holds them in full, and FSDP2 ignores them."""
    if not p.replicated:
        return set()
    from parallel.replicated import matching_parameters

    return matching_parameters(model, p)


def unit_dtypes(p: config.Parallel, unit: str) -> tuple[torch.dtype, torch.dtype]:
    """(param_dtype, reduce_dtype) of a unit: those of the options, or float32 where `keep_fp32` matches the unit."""
    if any(fnmatch.fnmatchcase(unit, pattern) for pattern in p.keep_fp32):
        return torch.float32, torch.float32
    return getattr(torch, p.param_dtype), getattr(torch, p.reduce_dtype)


def all_gather_dtype(param: Tensor, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype that a parameter is all-gathered in, given its unit's param_dtype. A local tensor with FSDP2's
    all-gather extensions names its own. FSDP2 does not cast integers, except in torch 2.11: bytes are sent in
    param_dtype there, which represents 0 to 255 exactly."""
    if own := getattr(getattr(param, "_local_tensor", param), "all_gather_dtype", None):
        return own
    casts_integers = torch.__version__ < (2, 12)  # pyrefly: ignore[unsupported-operation]  # TorchVersion allows it
    return param_dtype if param.is_floating_point() or casts_integers else param.dtype


def mixed_precision(p: config.Parallel, unit: str) -> MixedPrecisionPolicy:
    """A unit's mixed precision. Inputs are never cast: RMSNorm accepts the residual stream in any dtype, and the RoPE
    tables must stay float32. Outputs are cast by cast_residual()."""
    param_dtype, reduce_dtype = unit_dtypes(p, unit)
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )


@torch.compiler.disable  # around a compiled block it would be a graph of its own
def cast_residual(
    dtype: torch.dtype, module: nn.Module, inputs: tuple, output: Tensor | tuple
) -> Tensor | tuple:
    """Forward hook: casts the residual stream to output_dtype. FSDP2's own cast would round a block's terms of the
    loss, too, which stay in float32."""
    return (output[0].to(dtype), *output[1:]) if isinstance(output, tuple) else output.to(dtype)


def set_prefetch(model: Llama, p: config.Parallel) -> None:
    """Sets explicit prefetch of prefetch_forward and prefetch_backward units. Depth 0 keeps FSDP2's implicit prefetch:
    no unit ahead in forward, one in backward."""
    forward = [modules[0] for _, modules in units(model)]
    backward = forward[::-1]
    if model.config.tie_embeddings:
        # the tied unit holds the head: it is first in backward and still unsharded
        backward = [backward[-1], *backward[:-1]]
    for i, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + p.prefetch_forward])
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + p.prefetch_backward])


def unshard_first_units(model: Llama, p: config.Parallel) -> None:
    """Issues the all-gathers of the first units, so that they overlap with the host's wait for its batch."""
    for _, modules in units(model)[: p.prefetch_forward]:
        modules[0].unshard(async_op=True)


def set_gradient_sync(
    model: FSDPModule, p: config.Parallel, world: World, last_micro_batch: bool
) -> None:
    """Call before each micro-batch: with sync_every_micro_batch every backward reduces gradients, else only that of the
    step's last. Deferred, unsharded gradients of the full model accumulate in reduce_dtype; HSDP defers only the
    all-reduce."""
    if p.sync_every_micro_batch:
        return
    if world.dp_replicate == 1:  # read from the mesh: the option may be "auto"
        model.set_requires_gradient_sync(last_micro_batch)
    else:
        model.set_requires_all_reduce(last_micro_batch)


def reshard(model: Llama) -> None:
    """Reshards the units that a forward pass without backward left unsharded: parameters are DTensors again."""
    for _, modules in units(model):
        modules[0].reshard()
