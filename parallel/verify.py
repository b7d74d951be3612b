"""Verifies that the model is sharded as configured: at start-up, on every rank, before the first step.

These errors are silent otherwise: gradients of a parameter that FSDP2 ignores are never reduced, and replicas diverge;
a parameter outside every unit is the root's, which keeps it all-gathered through forward and backward.
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
from parallel.materialize import CHECK_CHUNK, local_rectangle
from parallel.mesh import World, fsdp_mesh


def verify_sharding(model: Llama, p: config.Parallel, world: World) -> list[dict]:
    """Returns the unit map, one row per unit. Raises RuntimeError naming the first parameter that is wrong."""
    names = {parameter: name for name, parameter in named_parameters(model)}
    owned, replicated, rows = set(), replicated_parameters(model, p), []
    mesh = fsdp_mesh(world)
    over_fsdp = (Replicate(), Shard(0)) if world.dp_replicate > 1 else (Shard(0),)
    expected: dict[str, tuple[Placement, ...]] = dict.fromkeys(names.values(), over_fsdp)
    if world.tp > 1:
        from parallel.tensor import placements_with_tp

        mesh, expected = placements_with_tp(model, mesh, expected, world)
    for unit, modules in units(model):
        owned.update(unit_parameters(modules))
        parameters = [
            _checked_shard(param, names[param], mesh, expected[names[param]])
            for param in unit_parameters(modules)
            if param not in replicated
        ]
        dtype = unit_dtypes(p, unit)[0]
        gathered = sum(
            param.numel()
            // (world.tp if param.placements[-1].is_shard() else 1)  # divided over tp
            * all_gather_dtype(param, dtype).itemsize
            for param in parameters
        )
        rows.append(
            {
                "unit": unit,
                "parameters": sum(param.numel() for param in parameters),
                "local_bytes": sum(param.to_local().nbytes for param in parameters),
                "gathered_bytes": gathered,
                "policy": "kept through backward"
                if model.head in modules or not p.reshard_after_forward
                else "freed after forward",
            }
        )
    for param, name in names.items():
        _require(
            param in owned,
            name,
            "belongs to no unit: the root keeps it gathered through forward and backward",
        )
    for dim in range(mesh.ndim):
        _check_replicas(
            {
                name: param
                for param, name in names.items()
                if param not in replicated and expected[name][dim].is_replicate()
            },
            mesh.get_group(dim),
        )
    _check_replicas(
        {name: param for param, name in names.items() if param in replicated}, dist.group.WORLD
    )
    return rows


def _require(holds: bool, name: str, fault: str) -> None:
    if not holds:
        raise RuntimeError(f"sharding is not as configured: {name}: {fault}")


def _checked_shard(
    param: nn.Parameter, name: str, mesh: DeviceMesh, expected: tuple[Placement, ...]
) -> DTensor:
    """Requires the configured mesh and placements, and a local shard that is exactly the rectangle that they imply."""
    _require(
        isinstance(param, DTensor),
        name,
        f"is a {type(param.data).__name__}, not a DTensor: it is not sharded",
    )
    assert isinstance(param, DTensor)
    _require(param.device_mesh == mesh, name, f"is on mesh {param.device_mesh}, not on {mesh}")
    _require(
        tuple(param.placements) == expected,
        name,
        f"has placements {param.placements}, not {expected}",
    )
    local, (shape, offsets) = param.to_local(), local_rectangle(param)
    _require(not local.is_meta, name, "is on meta: it has no storage")
    _require(
        local.shape == shape,
        name,
        f"has shard {tuple(local.shape)}, not {tuple(shape)} from {offsets}",
    )
    return param


def _check_replicas(parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Compares two bitwise checksums of every local tensor across the ranks of a group."""
    if not parameters or dist.get_world_size(group) == 1:
        return
    low = torch.stack(
        [
            checksums(param.detach().to_local() if isinstance(param, DTensor) else param.detach())
            for param in parameters.values()
        ]
    ).cpu()
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group)
    for name, same in zip(parameters, (low == high).all(dim=1).tolist()):
        _require(same, name, "differs between replicas")


def checksums(local: Tensor) -> Tensor:
    """(2) of int64: the sum of a tensor's bits, each element's as an integer, and the sum of these times their
    positions, which detects swapped values. Some elements at a time: all at once would take 8 bytes for each."""
    bits = local.contiguous().view(getattr(torch, f"int{8 * local.itemsize}")).flatten()
    found = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), CHECK_CHUNK):
        part = bits[start : start + CHECK_CHUNK]
        found[0] += part.sum()
        found[1] += (
            torch.arange(start + 1, start + 1 + len(part), device=bits.device).mul_(part).sum()
        )
    return found


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError unless the optimizer holds exactly the model's trainable parameters, with state for all or
    none. Do not call it between forward and backward: the model may then hold unsharded parameters."""
    names = {
        id(p): name if p.requires_grad else f"{name}, which is frozen"
        for name, p in named_parameters(model)
    }
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p): entry for entry, p in optimizer_entries(optimizer)}
    missing = [name for key, name in names.items() if key in trained and key not in held]
    foreign = [
        f"{entry} ({names.get(key, 'unknown')})"
        for key, entry in held.items()
        if key not in trained
    ]
    if missing or foreign:
        raise RuntimeError(
            "the optimizer does not hold the model's trainable parameters. "
            f"It lacks {len(missing)}: {', '.join(missing[:8])}. "
            f"It holds {len(foreign)} others: {', '.join(foreign[:8])}. "
            "Made before sharding it would keep the full weights and never train the model: make it after sharding, or "
            "shard within migrate.rebind.rebind_optimizer(model, optimizer)"
        )
    stateless = [
        name
        for name, p in named_parameters(model)
        if p.requires_grad and not optimizer.state.get(p)
    ]
    if 0 < len(stateless) < len(trained):
        raise RuntimeError(
            f"the optimizer has state, but none for {', '.join(stateless[:8])}: checkpoints would lose "
            "what it makes later; make it in optim.build_optimizer"
        )


def optimizer_entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """(description of its position, parameter) of every parameter that the optimizer holds."""
    return [
        (f"param_groups[{i}]['params'][{j}] {tuple(p.shape)}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    ]


def unit_table(rows: list[dict]) -> str:
    """The unit map as a readable table; consecutive equal blocks share a line."""
    lines = [f"{'unit':<24}{'parameters':>15}{'here, MiB':>12}{'gathered, MiB':>15}  policy"]
    for _, run in itertools.groupby(rows, key=lambda row: {**row, "unit": ""}):
        first, *rest = run
        name = f"{first['unit']} ... {rest[-1]['unit']}" if rest else first["unit"]
        lines.append(
            f"{name:<24}{first['parameters']:>15,}{first['local_bytes'] / 2**20:>12,.1f}"
            f"{first['gathered_bytes'] / 2**20:>15,.1f}  {first['policy']}"
        )
    return "\n".join(lines)
