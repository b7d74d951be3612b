"""Differentiable collectives for tensors that are sharded along one dimension. torch.compile can trace
them."""

from typing import NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the gradients of the operators below
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# The functional collectives, which torch.compile traces and DTensor uses.
ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """The process group of one mesh dimension, as arguments of torch's operators."""

    rank: int
    size: int
    name: str


def group_of(mesh: DeviceMesh) -> Group:
    """The Group of a 1-D mesh."""
    return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's x, concatenated along dim (not negative) in rank order.

    Returns a view of the collective's output, not a copy, if all dimensions before dim have size 1.
    """
    full = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    shards = full.unflatten(0, (group.size, -1))  # (ranks * A, ...) -> (ranks, A, ...)
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's shard, along dim (not negative), of the sum of all ranks' x.

    Copies nothing before the collective if all dimensions before dim have size 1.
    """
    shards = x.unflatten(dim, (group.size, -1)).movedim(dim, 0)  # (ranks, A, ...)
    rows = shards.flatten(0, 1).contiguous()  # (ranks * A, ...)
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", group.size, group.name))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x. Only for tensors without gradients: backward would sum them again."""
    return ops.wait_tensor(ops.all_reduce(x, "sum", group.name))
