"""Differentiable collectives for tensors that are sharded along one dimension.

They also work under torch.compile.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the gradients of the operators below
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# The functional collectives, which torch.compile traces and DTensor uses.
ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """The process group of one mesh dimension, in the form that torch's operators take."""

    rank: int
    size: int
    name: str


def group_of(mesh: DeviceMesh) -> Group:
    """The Group of a 1-D mesh."""
    return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's x, concatenated along dim (not negative) in rank order.

    A view of the collective's output, without a copy, if the dimensions before dim are 1.
    """
    full = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    shards = full.unflatten(0, (group.size, -1))  # (ranks * A, ...) -> (ranks, A, ...)
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's shard, along dim (not negative), of the sum of all ranks' x.

    Copies nothing before the collective if the dimensions before dim are 1.
    """
    shards = x.unflatten(dim, (group.size, -1)).movedim(dim, 0)  # (ranks, A, ...)
    rows = shards.flatten(0, 1).contiguous()  # (ranks * A, ...)
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", group.size, group.name))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x. For use without gradients: backward would sum them, too."""
    return ops.wait_tensor(ops.all_reduce(x, "sum", group.name))


@contextlib.contextmanager
def all_gathered(
    gather: Callable[[Tensor], Tensor], shard: Tensor, regather: bool
) -> Iterator[Tensor]:
    """Yields gather(shard). With regather, what autograd saves of it within the context is freed.

    Autograd then keeps only the local shard, and backward all-gathers it again
    (https://arxiv.org/abs/2205.05198, section 4.2.2). Activation memory falls with the number of
    ranks. A checkpointed block needs no regather, since it recomputes the all-gather. In a compiled
    block the compiler decides.
    """
    full = gather(shard)
    if not regather or torch.compiler.is_compiling():
        yield full
        return
    regathered = _Regathered(gather, shard.detach(), full)
    with torch.autograd.graph.saved_tensors_hooks(regathered.pack, regathered.unpack):
        yield full


class View(NamedTuple):
    """Where a saved tensor lies in the all-gathered tensor's storage."""

    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


class _Regathered:
    """Saved-tensor hooks: save views of an all-gathered tensor without its storage.

    The first view that backward unpacks all-gathers the shard again. The result is dropped when
    backward has unpacked as many views as forward packed.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor], shard: Tensor, full: Tensor):
        self.gather = gather
        self.shard = shard
        # Identifies the storage by its address. A reference would keep the memory.
        self.storage = full.untyped_storage()._cdata
        self.packed = 0  # views
        self.unpacked = 0
        self.full: Tensor | None = None  # all-gathered again

    def pack(self, tensor: Tensor) -> Tensor | View:
        if tensor.untyped_storage()._cdata != self.storage:
            # Saving the tensor itself would leak a reference cycle if backward never runs.
            return tensor.detach()
        self.packed += 1
        return View(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.full is None:
            self.full = self.gather(self.shard)
        tensor = self.full.as_strided(*saved)
        self.unpacked += 1
        if self.unpacked % self.packed == 0:  # backward may run several times
            self.full = None
        return tensor
