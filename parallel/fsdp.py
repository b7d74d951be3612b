"""FSDP2: which modules make a unit, in which precision, what stays gathered, and what is gathered ahead.

A unit is what is gathered, computed and freed together: embedding, each block, head. Each rank keeps 1/N of the rows
of every parameter. Per micro-batch a unit's life is

    all-gather -> forward -> free -> all-gather -> backward -> reduce-scatter of the gradients -> free

and the root unit, which holds no parameter, only carries the hooks of the whole.

Implicit or explicit prefetch: by itself FSDP2 issues a unit's all-gather when its forward begins. On a GPU that
overlaps with the unit before, since the host runs ahead of the device; it is enough while the host does. Explicit
prefetch (depth 1 and more) issues the all-gathers of the next units before a unit computes: it wins where the host is
slow against the kernels (small batches, many small units), where one unit's computation is shorter than one
all-gather (several nodes: depth 2), and it costs the memory of that many gathered units.
"""

import fnmatch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import config
from config import ConfigError
from model.llama import Llama
from parallel.materialize import named_parameters
from parallel.mesh import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def units(model: Llama) -> list[tuple[str, list[nn.Module]]]:
    """(name, modules) of each unit in forward order. Tied embedding and head share a matrix, so they are one unit."""
    blocks = [(f"blocks.{i}", [block]) for i, block in enumerate(model.blocks)]
    if model.config.tie_embeddings:
        named = [("embedding+head", [model.embedding, model.head]), *blocks]
    else:
        named = [("embedding", [model.embedding]), *blocks, ("head", [model.head])]
    assert [name for name, _ in named] == config.unit_names(model.config)
    return named


def apply_fsdp(model: Llama, p: config.Parallel, world: World) -> None:
    """Shards every unit in place. The parameters become DTensors of placements (Replicate, Shard(0)), or (Shard(0))."""
    whole = unsharded_parameters(model, p)
    mesh, pin = shard_mesh(world), world.device.type == "cuda"  # pinned pages a GPU can copy without the host
    offload = CPUOffloadPolicy(pin_memory=pin) if p.cpu_offload else OffloadPolicy()
    for name, modules in units(model):
        holds_head = model.head in modules
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            # Backward begins with the head: what it would free after forward, it would gather again at once.
            reshard_after_forward=False if holds_head else p.reshard_after_forward,
            mp_policy=precision(p, name, holds_head),
            offload_policy=offload,
            ignored_params=whole,
        )
    if model.config.tie_embeddings:  # one policy for both: what it does for the head's sake, a hook undoes here
        stream = DTYPES[p.output_dtype or p.param_dtype]
        model.embedding.register_forward_hook(lambda module, inputs, output: output.to(stream))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), ignored_params=whole)
    set_prefetch(model, p)


def unsharded_parameters(model: Llama, p: config.Parallel) -> set[nn.Parameter]:
    """The vectors that `unsharded` keeps whole, in float32, on every rank. FSDP2 knows nothing of them: nobody gathers
    them, and nobody but reduce_unsharded() reduces their gradients.

    It saves little (norms are small, and travel with their unit's matrices anyway), but parameters that a kernel or a
    hook must find whole at any time need it. Not for matrices: sharding is for those, and two of one product would
    differ in dtype. Raises ConfigError.
    """
    names = dict(named_parameters(model))
    found: set[nn.Parameter] = set()
    for pattern in p.unsharded:
        matching = fnmatch.filter(names, pattern)
        if not matching or any(names[name].ndim > 1 for name in matching):
            raise ConfigError(f"[parallel] unsharded: {pattern!r} must match vectors and nothing else, as "
                              f"'*norm.weight'; it matches {', '.join(matching[:3]) or 'nothing'}")
        found |= {names[name] for name in matching}
    return found


def reduce_unsharded(model: nn.Module) -> None:
    """Averages the gradients of unsharded parameters over all ranks, as FSDP2 does with the others. Once a step, after
    the last micro-batch: they were summed on each rank until then."""
    gradients = [q.grad for q in model.parameters() if q.grad is not None and not isinstance(q, DTensor)]
    if gradients and dist.get_world_size() > 1:
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, dist.ReduceOp.AVG)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            g.copy_(part.view_as(g))


def shard_mesh(world: World) -> DeviceMesh:
    """Replicas need a mesh of two dimensions; without them one dimension spares FSDP2 an all-reduce over one rank."""
    return world.mesh if world.size > world.shards else world.mesh["dp_shard"]


def kept_in_fp32(unit: str, p: config.Parallel) -> bool:
    return any(fnmatch.fnmatchcase(unit, pattern) for pattern in p.keep_fp32)


def precision(p: config.Parallel, unit: str, holds_head: bool) -> MixedPrecisionPolicy:
    """A unit's dtypes: parameters are kept in float32 and gathered in param_dtype; gradients are reduced in
    reduce_dtype; the stream leaves in output_dtype, but for the head, whose loss stays float32.

    Inputs are never cast: RMSNorm takes the stream in any dtype, and the rotary tables must stay float32.
    """
    keep = kept_in_fp32(unit, p)
    return MixedPrecisionPolicy(
        param_dtype=torch.float32 if keep else DTYPES[p.param_dtype],
        reduce_dtype=torch.float32 if keep else DTYPES[p.reduce_dtype],
        output_dtype=None if holds_head else DTYPES[p.output_dtype or p.param_dtype],
        cast_forward_inputs=False,
    )


def set_prefetch(model: Llama, p: config.Parallel) -> None:
    """Explicit prefetch: before a unit computes, the all-gathers of the next `depth` units are issued. Depth 0 leaves
    FSDP2's own order: none ahead in forward, one ahead in backward."""
    forward = [modules[0] for _, modules in units(model)]
    # Backward meets them in reverse, but for a tied unit, which holds the head: it comes first and stays gathered.
    backward = [forward[0], *forward[:0:-1]] if model.config.tie_embeddings else forward[::-1]
    for i, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + p.prefetch_forward])
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + p.prefetch_backward])


def unshard_first_units(model: Llama, p: config.Parallel) -> None:
    """Issues the all-gathers of the first units, so that they run while the host waits for its batch."""
    for _, modules in units(model)[: p.prefetch_forward]:
        modules[0].unshard(async_op=True)


def set_gradient_sync(model: FSDPModule, p: config.Parallel, world: World, last_micro_batch: bool) -> None:
    """Says before a micro-batch whether its backward reduces gradients: always, or in the step's last one only.

    Deferred, the gradients of the whole model pile up unsharded on every rank in reduce_dtype. With replicas only the
    all-reduce between them is deferred, and gradients stay sharded within a replica.
    """
    if p.sync_every_micro_batch:
        return
    if world.size == world.shards:  # and not by the option, which may be "auto"
        model.set_requires_gradient_sync(last_micro_batch)
    else:
        model.set_requires_all_reduce(last_micro_batch)


def reshard(model: Llama) -> None:
    """Frees what a forward pass without backward left gathered, so that parameters are DTensors again."""
    for _, modules in units(model):
        modules[0].reshard()
