"""Is the model spread as the configuration says? Checked at start-up, on every rank, before the first step.

What goes wrong here goes wrong silently: a parameter outside every unit is neither gathered nor reduced, replicas that
differ train different models, and memory is what it was before sharding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import config
from model.llama import Llama
from parallel.fsdp import DTYPES, kept_in_fp32, shard_mesh, units, unsharded_parameters
from parallel.materialize import first_row, named_parameters
from parallel.mesh import World


def verify_sharding(model: Llama, p: config.Parallel, world: World) -> list[dict]:
    """Returns the unit map: a row for each unit. Raises RuntimeError naming a parameter that is not what it should be:
    not sharded, on another mesh or with other placements, on meta, with other rows than the rule gives this rank, of
    another dtype than the rest of its unit, or with other values than its replicas have."""
    names = {parameter: name for name, parameter in named_parameters(model)}
    mesh = shard_mesh(world)
    expected = (Replicate(), Shard(0)) if mesh.ndim == 2 else (Shard(0),)
    owner, whole = {}, unsharded_parameters(model, p)
    rows = []
    for unit, modules in units(model):
        parameters = list(dict.fromkeys(q for module in modules for q in module.parameters()))
        owner |= dict.fromkeys(parameters, unit)
        parameters = [q for q in parameters if q not in whole]
        for q in parameters:
            _check_parameter(q, names[q], mesh, expected, world)
        dtypes = {q.dtype for q in parameters if q.requires_grad}
        _require(len(dtypes) < 2, names[parameters[0]], f"unit {unit} has trainable parameters of {dtypes}")
        wide = kept_in_fp32(unit, p) or p.param_dtype == "float32"
        rows.append({
            "unit": unit,
            "parameters": sum(q.numel() for q in parameters),
            "trainable": sum(q.numel() for q in parameters if q.requires_grad),
            "local_bytes": sum(q.to_local().nbytes for q in parameters),
            "gathered_bytes": sum(q.numel() for q in parameters) * (4 if wide else DTYPES[p.param_dtype].itemsize),
            "policy": "kept until backward" if model.head in modules or p.reshard_after_forward is False else
                      "freed after forward" if p.reshard_after_forward is True else
                      f"shards of {p.reshard_after_forward} after forward",
        })
    for q, name in names.items():
        _require(q in owner, name, "belongs to no unit: it would be neither gathered nor reduced")
    _check_replicas([q for q in names if q not in whole], names, world.mesh["dp_replicate"])
    _check_replicas(list(whole), names, None)
    return rows


def _require(holds: bool, name: str, fault: str) -> None:
    if not holds:
        raise RuntimeError(f"sharding is not as configured: {name}: {fault}")


def _check_parameter(q: nn.Parameter, name: str, mesh: DeviceMesh, expected: tuple, world: World) -> None:
    _require(isinstance(q, DTensor), name, f"is a {type(q.data).__name__}, not a DTensor: it is not sharded")
    _require(q.device_mesh == mesh, name, f"is on mesh {q.device_mesh}, not on {mesh}")
    _require(tuple(q.placements) == expected, name, f"has placements {q.placements}, not {expected}")
    local = q.to_local()
    _require(not local.is_meta, name, "is on meta: it has no storage")
    rows = first_row(q.shape[0], world.shards, world.shard_rank + 1) - first_row(
        q.shape[0], world.shards, world.shard_rank)
    _require(local.shape == (rows, *q.shape[1:]), name, f"has shard {tuple(local.shape)}, not {rows} rows")


def _check_replicas(parameters: list[nn.Parameter], names: dict, mesh: DeviceMesh | None) -> None:
    """Compares two checksums of the bits of every tensor over a mesh (None: all ranks). One pass, two numbers each."""
    group = mesh and mesh.get_group()
    if not parameters or dist.get_world_size(group) == 1:
        return
    sums = []
    for q in sorted(parameters, key=names.get):
        local = q.detach().to_local() if isinstance(q, DTensor) else q.detach()
        bits = local.contiguous().view(torch.int32).flatten().long()
        places = torch.arange(len(bits), device=bits.device) % 65521 + 1
        sums += [bits.sum(), (bits * places).sum()]
    low = torch.stack(sums).cpu()
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group)
    for i, q in enumerate(sorted(parameters, key=names.get)):
        same = torch.equal(low[2 * i : 2 * i + 2], high[2 * i : 2 * i + 2])
        _require(same, names[q], "differs between replicas")


def unit_table(rows: list[dict]) -> str:
    """The unit map for a person; runs of equal blocks share a line."""
    lines, last = [], None
    for row in rows:
        same = {key: value for key, value in row.items() if key != "unit"}
        if last and same == last[2]:
            last[1] = row["unit"]
        else:
            last = [row["unit"], row["unit"], same]
            lines.append(last)
    head = f"{'unit':<24}{'parameters':>15}{'here, MiB':>12}{'gathered, MiB':>15}  policy"
    return "\n".join([head, *(
        f"{first if first == end else f'{first} ... {end}':<24}{row['parameters']:>15,}"
        f"{row['local_bytes'] / 2**20:>12,.1f}{row['gathered_bytes'] / 2**20:>15,.1f}  {row['policy']}"
        for first, end, row in lines)])
