"""Collectives that gradients flow through, for tensors that ranks share a dimension of; compiled, too."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

ops = torch.ops._c10d_functional  # what torch.compile traces, and what DTensor sends


class Group(NamedTuple):
    """One dimension of the mesh, as the operators below name it."""

    rank: int
    size: int
    name: str


def group_of(mesh: DeviceMesh) -> Group:
    """Of a mesh with one dimension."""
    return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's x, one after the other along dim."""
    found = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    return found if dim == 0 else torch.cat(found.chunk(group.size), dim)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along dim of the sum of every rank's x."""
    x = x if dim == 0 else torch.cat(x.chunk(group.size, dim))
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x. Without a gradient."""
    return ops.wait_tensor(ops.all_reduce(x, "sum", group.name))


class Gather(torch.autograd.Function):
    """all_gather(). What each rank computes with the whole adds up to the gradient of a part: a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.where = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return reduce_scatter(grad, *ctx.where), None, None


class Scatter(torch.autograd.Function):
    """reduce_scatter(), whose gradient every rank needs the whole of: an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.where = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return all_gather(grad, *ctx.where), None, None


@contextlib.contextmanager
def gathered(gather: Callable[[Tensor], Tensor], part: Tensor, keep_part: bool) -> Iterator[Tensor]:
    """gather(part). With keep_part, what is computed within keeps the part alone for backward, which gathers it again
    (https://arxiv.org/abs/2205.05198, section 4.2.2): what activations take falls with the number of ranks.

    A block that is recomputed in backward does that by itself. In a compiled one the compiler decides what is kept.
    """
    whole = gather(part)
    if not keep_part or torch.compiler.is_compiling():
        yield whole
        return
    storage, kept, used, again = whole.untyped_storage()._cdata, 0, 0, None
    part = part.detach()

    def pack(tensor: Tensor) -> Tensor | tuple:
        nonlocal kept
        if tensor.untyped_storage()._cdata != storage:
            return tensor.detach()  # itself it would hold the graph that holds it, where backward never comes
        kept += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Tensor | tuple) -> Tensor:
        nonlocal used, again
        if isinstance(packed, Tensor):
            return packed
        again = gather(part) if again is None else again
        view, used = again.as_strided(*packed), used + 1
        if used % kept == 0:  # the last that needs it
            again = None
        return view

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield whole
