"""FSDP2: which modules make a unit, in which precision, what stays unsharded, and what is all-gathered ahead.

A unit is what is all-gathered, computed and resharded together: embedding, each block, head. Each rank keeps its shard,
a run of rows of every parameter. Per micro-batch a unit goes through

    all-gather -> forward -> reshard -> all-gather -> backward -> reduce-scatter of the gradients -> reshard

and the root unit, which holds no parameter, only carries the hooks of the whole model.

By itself FSDP2 issues a unit's all-gather when its forward begins; on a GPU that overlaps with the unit before, while
the host runs ahead of the device. Explicit prefetch (depth 1 and more) issues those of the next units first. It wins
where the host is slow against the kernels, or a unit's computation shorter than its all-gather (several nodes: depth
2), and costs the memory of that many unsharded units.
"""

import fnmatch
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param_module
from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard_module
from torch.nn.utils import parametrize

import config
from config import ConfigError
from model.llama import Llama, named_parameters
from parallel.float8 import send_in_8_bits
from parallel.mesh import World, fsdp_mesh


def units(model: Llama) -> list[tuple[str, list[nn.Module]]]:
    """(name, modules) of each unit in forward order. Tied embedding and head share a matrix, so they are one unit."""
    blocks = [[block] for block in model.blocks]
    if model.config.tie_embeddings:
        modules = [[model.embedding, model.head], *blocks]
    else:
        modules = [[model.embedding], *blocks, [model.head]]
    return [*zip(config.unit_names(model.config), modules, strict=True)]


def unit_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a unit's modules, a tied one once."""
    return list(dict.fromkeys(q for module in modules for q in module.parameters()))


def apply_fsdp(model: Llama, p: config.Parallel, world: World) -> None:
    """Shards every unit in place: parameters become DTensors on fsdp_mesh(world), but for those of `unsharded`."""
    unsharded = unsharded_parameters(model, p)
    send_in_8_bits(model, unsharded)
    mesh, pin = fsdp_mesh(world), world.device.type == "cuda"  # pinned pages a GPU can copy without the host
    offload = CPUOffloadPolicy(pin_memory=pin) if p.cpu_offload else OffloadPolicy()
    with one_mesh_to_reshard_to(), integers_as_parameters():
        for name, modules in units(model):
            holds_head = model.head in modules
            cast_unsharded(modules, unsharded, unit_dtypes(p, name)[0])
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                # Don't reshard the last unit after forward: backward needs it immediately.
                reshard_after_forward=False if holds_head else p.reshard_after_forward,
                mp_policy=precision(p, name, holds_head),
                offload_policy=offload,
                ignored_params=unsharded,
            )
    if model.config.tie_embeddings:  # one policy for both; the head's leaves outputs alone, so the embedding casts here
        stream = getattr(torch, p.output_dtype or p.param_dtype)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.to(stream))
    else:
        model.embedding.set_unshard_in_backward(False)  # a look-up's gradient needs no weight
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), ignored_params=unsharded)
    set_prefetch(model, p)


def one_mesh_to_reshard_to() -> AbstractContextManager:
    """Within, units that reshard to n ranks after forward share a mesh. fully_shard() would make one for each unit,
    with process groups of its own: six for each of 34 units on eight ranks, and on a GPU as many communicators, which
    run out (https://github.com/pytorch/pytorch/issues/153302). It has no argument for that, hence the patch."""
    made, original = {}, fully_shard_module._get_post_forward_mesh_info

    def shared(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if reshard_after_forward not in made:
            made[reshard_after_forward] = original(reshard_after_forward, mesh_info)
        return made[reshard_after_forward]

    return mock.patch.object(fully_shard_module, "_get_post_forward_mesh_info", shared)


def integers_as_parameters() -> AbstractContextManager:
    """Within, fully_shard() takes frozen integers, as NF4's bytes: torch 2.11 makes every shard a parameter that needs
    a gradient, which integers cannot, and only then looks whether it does."""
    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    return mock.patch.object(fsdp_param_module, "nn", SimpleNamespace(Parameter=parameter, Module=nn.Module))


def unsharded_parameters(model: Llama, p: config.Parallel) -> set[nn.Parameter]:
    """The frozen parameters that `unsharded` keeps whole on every rank; FSDP2 ignores them. Raises ConfigError for a
    pattern that matches nothing, or a trained parameter, whose gradient would not be reduced."""
    names, found = dict(named_parameters(model)), set()
    for pattern in p.unsharded:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"[parallel] unsharded: {pattern!r} matches none of {', '.join([*names][:3])}, ...")
        if trained := [name for name in matching if names[name].requires_grad]:
            raise ConfigError(f"[parallel] unsharded: {pattern!r} matches {', '.join(trained[:3])}, which is trained: "
                              "freeze it (model.freeze) or shard it")
        found |= {names[name] for name in matching}
    return found


class Cast(nn.Module):
    """A stored parameter -> what the forward pass sees of it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def cast_unsharded(modules: list[nn.Module], unsharded: set[nn.Parameter], dtype: torch.dtype) -> None:
    """Unsharded parameters compute in their unit's dtype, as FSDP2 casts the others, and like these are stored in
    float32, so that a checkpoint does not depend on what is sharded."""
    for module in [m for unit in modules for m in unit.modules()]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in unsharded and parameter.dtype != dtype and parameter.is_floating_point():
                parametrize.register_parametrization(module, name, Cast(dtype), unsafe=True)  # unsafe: changes dtype


def unit_dtypes(p: config.Parallel, unit: str) -> tuple[torch.dtype, torch.dtype]:
    """(param_dtype, reduce_dtype) of a unit: as the options say, or float32 where `keep_fp32` matches it."""
    if any(fnmatch.fnmatchcase(unit, pattern) for pattern in p.keep_fp32):
        return torch.float32, torch.float32
    return getattr(torch, p.param_dtype), getattr(torch, p.reduce_dtype)


def sent_dtype(q: nn.Parameter, param_dtype: torch.dtype) -> torch.dtype:
    """What a parameter is all-gathered as in a unit of this param_dtype: FSDP2 casts no integers (but torch 2.11 does,
    which holds NF4's bytes in any of these dtypes)."""
    return param_dtype if q.is_floating_point() or torch.__version__ < (2, 12) else q.dtype


def precision(p: config.Parallel, unit: str, holds_head: bool) -> MixedPrecisionPolicy:
    """A unit's dtypes. The residual stream leaves in output_dtype, but for the head, whose loss stays float32. Inputs
    are never cast: RMSNorm takes the residual stream in any dtype, and the rotary tables must stay float32."""
    param_dtype, reduce_dtype = unit_dtypes(p, unit)
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=None if holds_head else getattr(torch, p.output_dtype or p.param_dtype),
        cast_forward_inputs=False,
    )


def set_prefetch(model: Llama, p: config.Parallel) -> None:
    """Depth 0 leaves FSDP2's own order: none ahead in forward, one ahead in backward."""
    forward = [modules[0] for _, modules in units(model)]
    backward = forward[::-1]
    if model.config.tie_embeddings:  # that unit holds the head: backward begins with it, and it stays unsharded
        backward = [backward[-1], *backward[:-1]]
    for i, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + p.prefetch_forward])
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + p.prefetch_backward])


def unshard_first_units(model: Llama, p: config.Parallel) -> None:
    """Issues the all-gathers of the first units, so that they run while the host waits for its batch."""
    for _, modules in units(model)[: p.prefetch_forward]:
        modules[0].unshard(async_op=True)


def set_gradient_sync(model: FSDPModule, p: config.Parallel, world: World, last_micro_batch: bool) -> None:
    """Sets before a micro-batch whether its backward reduces gradients: always, or in the step's last one. Deferred,
    unsharded gradients of the whole model pile up in reduce_dtype; with replicas only their all-reduce is deferred."""
    if p.sync_every_micro_batch:
        return
    if world.dp_replicate == 1:  # the mesh's, since the option may be "auto"
        model.set_requires_gradient_sync(last_micro_batch)
    else:
        model.set_requires_all_reduce(last_micro_batch)


def reshard(model: Llama) -> None:
    """Reshards what a forward pass without backward left unsharded, so that parameters are DTensors again."""
    for _, modules in units(model):
        modules[0].reshard()
