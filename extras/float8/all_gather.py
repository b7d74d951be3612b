"""Implements parallel.float8. With the recipe "tensorwise", FSDP2 all-gathers matrices in float8.

An all-reduce gives all ranks the amax of each full matrix, by which they scale their shards.
Parameters, gradients and optimizer state keep their dtypes. This uses FSDP2's all-gather
extensions: a shard's fsdp_pre_all_gather() returns the tensors to all-gather, and
fsdp_post_all_gather() builds the unsharded parameter from them.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config
from extras.float8.matmul import (
    E4M3,
    Float8Linear,
    Float8Matmul,
    Float8Weight,
    factor_of,
    round_to,
    use_float8,
)
from model.llama import Llama
from model.loss import compiled
from parallel.replicated import replicated_parameters


def apply_float8(model: Llama, p: config.Parallel, device_type: str) -> None:
    """Replaces linear layers of the blocks by Float8Linear ones, in place.

    Call it before fully_shard().
    """
    use_float8(model.blocks, p.float8, device_type)
    if p.compile:
        # if Dynamo traces into it, torch 2.11 loses its gradients
        torch.compiler.allow_in_graph(Float8Matmul)
    replicated = replicated_parameters(model, p)
    for linear in tensorwise(model):
        if linear.weight not in replicated:
            model.after_weight_update = update_scales
            # update_scales() turns the shards into Float8Shards once they have storage
            weight = linear.weight.detach().as_subclass(MetaFloat8Weight)
            linear.weight = nn.Parameter(weight, linear.weight.requires_grad)


def tensorwise(model: Llama) -> list[Float8Linear]:
    """The linear layers with the recipe "tensorwise"."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    return [layer for layer in layers if layer.recipe == "tensorwise"]


def cast(shard: Tensor, factor: Tensor) -> Tensor:
    """Rounds a shard to float8, viewed as uint8, which every backend can send."""
    return round_to(shard, factor, E4M3).view(torch.uint8)


class Float8AllGather(Tensor):
    """A parameter (N, K) with FSDP2's all-gather extensions."""

    all_gather_dtype = E4M3  # for all_gather_dtype() in parallel/fsdp.py
    factor: Tensor  # (1, 1), the scale before rounding; update_scales() sets it

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
        """The shard in float8, padded to the size of the largest shard, as FSDP2 requires.

        On a GPU, where float8 requires compile, one kernel reads the float32 shard and writes one
        byte per weight.
        """
        shard = self.detach()
        if self.is_cuda and len(shard):
            # View the shard as rows of 16, which divides a matrix's columns. So one graph serves
            # all shapes, and its kernel knows that it may load and store several values at once.
            # Without .data, the graph would also depend on the original shape.
            rows = shard.view(-1, 16).data
            values = compiled(cast)(rows, self.factor).view(shard.shape)
        else:
            values = cast(shard, self.factor)
        largest_shard = math.ceil(size[0] / mesh.size())
        padding = largest_shard - len(values)
        if padding:
            values = F.pad(values, (0, 0, 0, padding))
        return (values,), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        if out is None:  # first all-gather; later ones reuse the same memory
            return Float8Weight(gathered[0].view(E4M3), dtype), ()


class Float8Shard(Float8AllGather):
    """A local shard of a matrix. Operations on it return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]  # as torch's own do


class MetaFloat8Weight(Float8AllGather):
    """A full matrix on the meta device.

    Operations on it preserve the type, so that fully_shard() finds the extensions on its shard.
    """


@torch.no_grad()
def update_scales(model: Llama) -> None:
    """Updates the scales of all matrices that are all-gathered in float8, with one all-reduce.

    This is the model's after_weight_update. It does not synchronize with the device.
    """
    layers: list[Float8Linear] = []
    weights: list[DTensor] = []
    for layer in tensorwise(model):
        weight = layer.weight
        assert not isinstance(weight, Float8Weight), "call reshard() before"
        if isinstance(weight, DTensor):  # else it is replicated
            layers.append(layer)
            weights.append(weight)
    if not layers:
        return
    mesh = weights[0].device_mesh
    shards = [weight._local_tensor.as_subclass(Float8Shard) for weight in weights]

    # with fewer rows than ranks, some shards are empty
    not_empty = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
    amax = torch.stack(torch._foreach_norm(not_empty, math.inf))  # (number of matrices)
    if mesh.size(mesh.ndim - 1) > 1:  # only over shards: replicas are equal
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))

    factors = list(factor_of(amax, E4M3)[:, None, None])  # (1, 1) each
    # give each its own memory, since graphs depend on whether an offset is 0, 1 or larger
    factors = torch._foreach_mul(factors, 1.0)
    inverse_scales = torch._foreach_reciprocal(factors)
    for weight, shard, factor in zip(weights, shards, factors):
        weight._local_tensor = shard
        shard.factor = factor
    for layer, inverse_scale in zip(layers, inverse_scales):
        layer.inverse_scale = inverse_scale
