"""float8 = "tensorwise" over ranks: FSDP2 all-gathers a matrix in 8 bits, by a scale that all ranks have agreed on.

Parameters, gradients and optimizer state stay as they are. FSDP2 asks a shard that has fsdp_pre_all_gather() what to
send, and fsdp_post_all_gather() what to make of what came.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model.float8 import E4M3, Float8Weight, factor_of, round_to
from model.llama import Linear, Llama


class SentIn8Bits:
    factor: Tensor  # (1, 1), set by update_scales()

    def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
        """As bytes, of which every backend can send any number; padded to the longest shard, as FSDP2 has it."""
        values = round_to(self, self.factor, E4M3).view(torch.uint8)
        rows = -(-size[0] // mesh.size())
        return (F.pad(values, (0, 0, 0, rows - len(values))),), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        if out is None:  # the first time; later ones are in the same memory
            return Float8Weight(gathered[0].view(E4M3), dtype), ()


class Shard(SentIn8Bits, Tensor):
    """This rank's rows of a matrix. What is made of them is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class OnMeta(SentIn8Bits, Tensor):
    """A matrix before fully_shard(), which looks at what it makes of it: that is of this type, too."""


def send_in_8_bits(model: Llama, unsharded: set[nn.Parameter]) -> None:
    """Before fully_shard(). Storage, which comes afterwards, is made Shards by update_scales()."""
    for linear in tensorwise(model):
        if linear.weight not in unsharded:
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(OnMeta), linear.weight.requires_grad)


def tensorwise(model: Llama) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear) and module.float8 == "tensorwise"]


@torch.no_grad()
def update_scales(model: Llama) -> None:
    """The scales of all matrices that are sent in 8 bits, by one all-reduce. For whoever has written weights: they hold
    until the next time. Nothing here waits for the device."""
    assert not any(isinstance(linear.weight, Float8Weight) for linear in tensorwise(model)), "call reshard() before"
    linears = [linear for linear in tensorwise(model) if isinstance(linear.weight, DTensor)]
    if not linears:
        return
    for linear in linears:
        linear.weight._local_tensor = linear.weight._local_tensor.as_subclass(Shard)
    shards, mesh = [linear.weight._local_tensor for linear in linears], linears[0].weight.device_mesh
    # of a few rows on many ranks some have none
    largest = torch.stack(torch._foreach_norm([s if s.numel() else s.new_zeros(1) for s in shards], math.inf))
    if mesh.size(mesh.ndim - 1) > 1:  # over the shards; replicas have the same
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))
    for linear, shard, factor in zip(linears, shards, factor_of(largest, E4M3)[:, None, None]):
        shard.factor, linear.scale = factor, factor.reciprocal()
