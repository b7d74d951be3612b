"""Differentiable collectives for tensors that are sharded along one dimension. They work under torch.compile, too."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the gradients of the operators below
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# functional collectives: torch.compile traces them, DTensor uses them
ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """One mesh dimension, in the form that the operators below take."""

    rank: int
    size: int
    name: str


def group_of(mesh: DeviceMesh) -> Group:
    """The Group of a 1-D mesh."""
    return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's x, concatenated along dim in rank order."""
    found = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    return found if dim == 0 else torch.cat(found.chunk(group.size), dim)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's shard, along dim, of the sum of all ranks' x."""
    x = x if dim == 0 else torch.cat(x.chunk(group.size, dim))
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x. For use without gradients: they would be summed, too."""
    return ops.wait_tensor(ops.all_reduce(x, "sum", group.name))


@contextlib.contextmanager
def gathered(gather: Callable[[Tensor], Tensor], part: Tensor, regather: bool) -> Iterator[Tensor]:
    """Yields gather(part). With regather, operations within it save only the local part; backward all-gathers it again
    (https://arxiv.org/abs/2205.05198, section 4.2.2): activation memory falls with the number of ranks.

    A checkpointed block does that anyway: it recomputes the all-gather. In a compiled one the compiler decides.
    """
    whole = gather(part)
    if not regather or torch.compiler.is_compiling():
        yield whole
        return
    # Autograd saves `whole` itself and views of it, all in one storage. Its address, an integer that keeps none alive,
    # tells them from other tensors. Once as many are restored as were saved, what backward all-gathered is dropped.
    storage, saved, restored, again = whole.untyped_storage()._cdata, 0, 0, None
    part = part.detach()

    def pack(tensor: Tensor) -> Tensor | tuple:
        nonlocal saved
        if tensor.untyped_storage()._cdata != storage:
            # saving the tensor itself would leak a reference cycle if backward never runs
            return tensor.detach()
        saved += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Tensor | tuple) -> Tensor:
        nonlocal restored, again
        if isinstance(packed, Tensor):
            return packed
        again = gather(part) if again is None else again
        view, restored = again.as_strided(*packed), restored + 1
        if restored % saved == 0:
            again = None
        return view

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield whole
