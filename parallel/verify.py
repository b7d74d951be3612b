"""Verifies at start-up, on every rank, that the model is sharded as configured.

Without this, such errors are silent. FSDP2 does not reduce gradients of a parameter that it
ignores, so replicas diverge. A parameter outside every unit belongs to the root, which keeps it
unsharded through forward and backward.
"""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import config
from model.llama import Llama, named_parameters
from parallel.fsdp import (
    all_gather_dtype,
    replicated_parameters,
    unit_dtypes,
    unit_parameters,
    units,
)
from parallel.materialize import CHECK_CHUNK, shard_shape_and_offset
from parallel.mesh import World, fsdp_mesh


def verify_sharding(model: Llama, p: config.Parallel, world: World) -> list[dict]:
    """Returns the unit map, one row per unit.

    Raises RuntimeError naming the first parameter that is not sharded as configured, or that
    differs between replicas.
    """
    names = {parameter: name for name, parameter in named_parameters(model)}
    replicated = replicated_parameters(model, p)
    mesh, placements = expected_placements(model, world)

    rows = []
    owned = set()
    for unit, modules in units(model):
        parameters = unit_parameters(modules)
        owned.update(parameters)
        shards = []
        for param in parameters:
            if param not in replicated:
                name = names[param]
                shards.append(checked_shard(param, name, mesh, placements[name]))
        param_dtype, _ = unit_dtypes(p, unit)
        is_kept = model.head in modules or not p.reshard_after_forward
        rows.append(unit_row(unit, shards, param_dtype, is_kept, world))
    for param, name in names.items():
        if param not in owned:
            fault = "belongs to no unit: the root keeps it gathered through forward and backward"
            raise sharding_error(name, fault)

    # Replicas are equal over each dimension that does not shard a parameter; those of the option
    # `replicated` on all ranks.
    for dim in range(mesh.ndim):
        replicas = {}
        for param, name in names.items():
            if param not in replicated and placements[name][dim].is_replicate():
                replicas[name] = param
        check_replicas(replicas, mesh.get_group(dim))
    replicas = {name: param for param, name in names.items() if param in replicated}
    check_replicas(replicas, dist.group.WORLD)
    return rows


def expected_placements(
    model: Llama, world: World
) -> tuple[DeviceMesh, dict[str, tuple[Placement, ...]]]:
    """The mesh of the sharded parameters, and the placements of each on it, by name."""
    mesh = fsdp_mesh(world)
    placements: tuple[Placement, ...] = (Shard(0),)
    if world.dp_replicate > 1:
        placements = (Replicate(), Shard(0))
    if world.tp > 1:
        from parallel.tensor import placements_with_tp

        return placements_with_tp(model, mesh, placements, world)
    return mesh, {name: placements for name, _ in named_parameters(model)}


def unit_row(
    unit: str, shards: list[DTensor], param_dtype: torch.dtype, is_kept: bool, world: World
) -> dict:
    """A unit's row of the unit map. is_kept: it stays unsharded between forward and backward."""
    gathered_bytes = 0
    for param in shards:
        numel = param.numel()
        if param.placements[-1].is_shard():
            numel //= world.tp  # FSDP2 all-gathers only tp's local shard
        gathered_bytes += numel * all_gather_dtype(param, param_dtype).itemsize
    return {
        "unit": unit,
        "parameters": sum(param.numel() for param in shards),
        "local_bytes": sum(param.to_local().nbytes for param in shards),
        "gathered_bytes": gathered_bytes,
        "policy": "kept through backward" if is_kept else "freed after forward",
    }


def sharding_error(name: str, fault: str) -> RuntimeError:
    return RuntimeError(f"sharding is not as configured: {name}: {fault}")


def checked_shard(
    param: nn.Parameter, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """The parameter, if its mesh, placements and local shard are as expected."""
    if not isinstance(param, DTensor):
        kind = type(param.data).__name__
        raise sharding_error(name, f"is a {kind}, not a DTensor: it is not sharded")
    if param.device_mesh != mesh:
        raise sharding_error(name, f"is on mesh {param.device_mesh}, not on {mesh}")
    if tuple(param.placements) != placements:
        raise sharding_error(name, f"has placements {param.placements}, not {placements}")
    local = param.to_local()
    if local.is_meta:
        raise sharding_error(name, "is on meta: it has no storage")
    shape, offset = shard_shape_and_offset(param)
    if local.shape != shape:
        raise sharding_error(
            name, f"has shard {tuple(local.shape)}, not {tuple(shape)} from {offset}"
        )
    return param


def check_replicas(parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Compares two bitwise checksums of every local tensor across the ranks of a group."""
    if not parameters or dist.get_world_size(group) == 1:
        return
    sums = []
    for param in parameters.values():
        local = param.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        sums.append(checksums(local))
    # Equal on all ranks if the smallest and the largest are.
    low = torch.stack(sums).cpu()  # (parameters, 2)
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group)
    are_equal = (low == high).all(dim=1)  # (parameters)
    for name, is_equal in zip(parameters, are_equal.tolist()):
        if not is_equal:
            raise sharding_error(name, "differs between replicas")


def checksums(local: Tensor) -> Tensor:
    """Two checksums of a tensor's bits, (2) of int64.

    The first is the sum of all elements' bits, each as an integer. The second weights them by their
    positions, and so detects swapped values. Chunks bound the memory: the positions of all elements
    would take 8 bytes each.
    """
    integer_dtype = getattr(torch, f"int{8 * local.itemsize}")
    bits = local.contiguous().view(integer_dtype).flatten()
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), CHECK_CHUNK):
        chunk = bits[start : start + CHECK_CHUNK]
        positions = torch.arange(start + 1, start + 1 + len(chunk), device=bits.device)
        sums[0] += chunk.sum()
        sums[1] += positions.mul_(chunk).sum()
        del positions  # before the next chunk's take as much memory
    return sums


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError unless the optimizer holds exactly the model's trainable parameters.

    It must have state for all of them, or for none. Do not call this between forward and backward,
    when the model may hold unsharded parameters.
    """
    names = {}
    trainable = set()  # ids
    stateless = []
    for name, param in named_parameters(model):
        if not param.requires_grad:
            names[id(param)] = f"{name}, which is frozen"
            continue
        names[id(param)] = name
        trainable.add(id(param))
        if not optimizer.state.get(param):
            stateless.append(name)
    held = {id(param): entry for entry, param in optimizer_entries(optimizer)}

    missing = [name for key, name in names.items() if key in trainable and key not in held]
    foreign = []
    for key, entry in held.items():
        if key not in trainable:
            foreign.append(f"{entry} ({names.get(key, 'unknown')})")
    if missing or foreign:
        raise RuntimeError(
            "the optimizer does not hold the model's trainable parameters. "
            f"It lacks {len(missing)}: {', '.join(missing[:8])}. "
            f"It holds {len(foreign)} others: {', '.join(foreign[:8])}. "
            "Made before sharding it would keep the full weights and never train the model: make "
            "it after sharding, or shard within extras.migrate.rebind.rebind_optimizer(model, optimizer)"
        )
    if 0 < len(stateless) < len(trainable):
        raise RuntimeError(
            f"the optimizer has state, but none for {', '.join(stateless[:8])}: checkpoints would "
            "lose what it makes later; make it in optim.build_optimizer"
        )


def optimizer_entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """(its position and shape, parameter) of every parameter that the optimizer holds."""
    entries = []
    for i, group in enumerate(optimizer.param_groups):
        for j, param in enumerate(group["params"]):
            entries.append((f"param_groups[{i}]['params'][{j}] {tuple(param.shape)}", param))
    return entries


def unit_table(rows: list[dict]) -> str:
    """The unit map as a table. Consecutive equal units share a line."""
    lines = [f"{'unit':<24}{'parameters':>15}{'here, MiB':>12}{'gathered, MiB':>15}  policy"]
    for _, equal_rows in itertools.groupby(rows, key=lambda row: {**row, "unit": ""}):
        first, *rest = equal_rows
        name = first["unit"]
        if rest:
            name = f"{name} ... {rest[-1]['unit']}"
        local_mib = first["local_bytes"] / 2**20
        gathered_mib = first["gathered_bytes"] / 2**20
        lines.append(
            f"{name:<24}{first['parameters']:>15,}{local_mib:>12,.1f}{gathered_mib:>15,.1f}"
            f"  {first['policy']}"
        )
    return "\n".join(lines)
