"""The option float8, and "tensorwise" with FSDP2: matrices are all-gathered in float8.

An all-reduce gives all ranks the amax of a full matrix, by which they scale their shards.
Parameters, gradients and optimizer state keep their dtypes. FSDP2's all-gather extensions do the
rest: a shard's fsdp_pre_all_gather() returns what to all-gather, fsdp_post_all_gather() builds the
unsharded parameter from it.
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
        # torch 2.11 loses its gradients when Dynamo traces into it
        torch.compiler.allow_in_graph(Float8Matmul)
    replicated = replicated_parameters(model, p)
    for linear in tensorwise(model):
        if linear.weight not in replicated:
            model.after_weight_update = update_scales
            # once there is storage, update_scales() makes Float8Shards of the shards
            weight = linear.weight.detach().as_subclass(MetaFloat8Weight)
            linear.weight = nn.Parameter(weight, linear.weight.requires_grad)


def tensorwise(model: Llama) -> list[Float8Linear]:
    """The linear layers of the recipe "tensorwise"."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    return [layer for layer in layers if layer.recipe == "tensorwise"]


def cast(shard: Tensor, factor: Tensor) -> Tensor:
    """To float8, viewed as uint8, which every backend can send."""
    return round_to(shard, factor, E4M3).view(torch.uint8)


class Float8AllGather(Tensor):
    """FSDP2's all-gather extensions, of a parameter (N, K)."""

    all_gather_dtype = E4M3  # for all_gather_dtype() in parallel/fsdp.py
    factor: Tensor  # (1, 1), what to multiply by before rounding; set by update_scales()

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
        """The shard in float8, padded to the largest shard, as FSDP2 requires.

        On a GPU, where float8 requires compile, one kernel reads the float32 shard and writes a
        byte a weight.
        """
        shard = self.detach()
        if self.is_cuda and len(shard):
            # Rows of 16, which divides a matrix's columns: one graph for all shapes, whose kernel
            # knows that it may load and store several values at once. .data: a graph would also
            # depend on the shape that was viewed.
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
    """The local shard of a matrix. Operations on it return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]  # as torch's own do


class MetaFloat8Weight(Float8AllGather):
    """A full matrix on meta.

    Operations on it keep the type, so that fully_shard() finds the extensions on its shard.
    """


@torch.no_grad()
def update_scales(model: Llama) -> None:
    """Updates the scales of all matrices that are all-gathered in float8, with one all-reduce.

    It is the model's after_weight_update. It does not wait for the device.
    """
    layers: list[Float8Linear] = []
    weights: list[DTensor] = []
    for layer in tensorwise(model):
        weight = layer.weight
        assert not isinstance(weight, Float8Weight), "call reshard() before"
        if isinstance(weight, DTensor):  # not if replicated
            layers.append(layer)
            weights.append(weight)
    if not layers:
        return
    mesh = weights[0].device_mesh
    shards = [weight._local_tensor.as_subclass(Float8Shard) for weight in weights]

    # with few rows on many ranks some shards are empty
    not_empty = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
    amax = torch.stack(torch._foreach_norm(not_empty, math.inf))  # (number of matrices)
    if mesh.size(mesh.ndim - 1) > 1:  # over shards only: replicas are equal
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))

    factors = list(factor_of(amax, E4M3)[:, None, None])  # (1, 1) each
    # each in memory of its own: graphs depend on whether an offset is 0, 1 or larger
    factors = torch._foreach_mul(factors, 1.0)
    inverse_scales = torch._foreach_reciprocal(factors)
    for weight, shard, factor in zip(weights, shards, factors):
        weight._local_tensor = shard
        shard.factor = factor
    for layer, inverse_scale in zip(layers, inverse_scales):
        layer.inverse_scale = inverse_scale
