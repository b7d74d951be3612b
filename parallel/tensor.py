"""Tensor parallelism (https://arxiv.org/abs/1909.08053): ranks compute with shards of matrices.

It includes sequence parallelism (https://arxiv.org/abs/2205.05198): outside attention and
feed-forward, tokens do not interact, so activations are sharded along the sequence. Each of a
block's two sublayers computes

    norm -> all-gather -> colwise linear -> local heads or features -> rowwise linear
         -> reduce-scatter -> + residual

The embedding and the head are sharded over the vocabulary. Modules compute with plain tensors: the
local shards of the weights, and activations that the functions below all-gather. With torch's
parallelize_module(), ColwiseParallel and RowwiseParallel they would compute with DTensors, which cost
host time in every operator and do not support a chunked loss over a sharded vocabulary.

Shapes: B batch, T tokens of the sequence, T / tp tokens of this rank, D model dimension, V
vocabulary, C tokens of a chunk of the loss.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import parametrize

from config import ConfigError
from model import loss
from model.llama import Embedding, Head, Linear, Llama, named_parameters
from model.loss import LossSums
from parallel.collectives import Group, all_gather, all_reduce, group_of, reduce_scatter
from parallel.mesh import World
from parallel.ranks import local_world_size
from parallel.torch_patches import share_classes
from system import print_error

# For x @ weight.T, colwise shards the output features and rowwise the input features.
COLWISE = Shard(0)
ROWWISE = Shard(1)
# The placement of each module's weight over tp. A module's `tp_dims` (model/llama.py) override it.
TP_PLAN = {
    "embedding": Shard(0),
    "blocks.*.attention_norm": Replicate(),
    "blocks.*.attention.[qkv]_proj": COLWISE,
    "blocks.*.attention.o_proj": ROWWISE,
    "blocks.*.attention.[qk]_norm": Replicate(),
    "blocks.*.feed_forward_norm": Replicate(),
    "blocks.*.feed_forward.gate_proj": COLWISE,
    "blocks.*.feed_forward.up_proj": COLWISE,
    "blocks.*.feed_forward.down_proj": ROWWISE,
    "head.norm": Replicate(),
    "head": Shard(0),
}
# Further parameters and layers inside a linear layer, by name. Each is sharded like the layer's
# weight if the weight has this placement, and else replicated. A bias, the scales of quantized rows,
# and an adapter's B have the layer's output features, and A has its input features.
WITH_WEIGHT = {"bias": COLWISE, "scales": COLWISE, "lora_a": ROWWISE, "lora_b": COLWISE}


def apply_tensor_parallelism(model: Llama, world: World) -> None:
    """Shards weights, activations and the loss over tp, in place.

    Parameters become DTensors on the mesh dimension tp. Raises ConfigError for a model that the TP
    plan does not cover.
    """
    check_tp_plan(model, world)
    if world.rank == 0 and local_world_size() % world.tp:
        print_error(
            f"warning: parallel.tp = {world.tp} does not divide the {local_world_size()} ranks of "
            "a machine: its groups span machines, and every block waits for the network in between"
        )
    shard_weights(model, world)

    tp = SequenceParallel(group_of(world.mesh["tp"]))
    model.embedding.forward = tp.vocab_parallel_embedding(model.embedding)
    for block in model.blocks:
        for sublayer, rowwise in (
            (block.attention, block.attention.o_proj),
            (block.feed_forward, block.feed_forward.down_proj),
        ):
            sublayer.forward = tp.all_gather_input(sublayer.forward)
            rowwise.register_forward_hook(tp.scatter_output)
        # Selective activation checkpointing saves the result of o_proj's reduce-scatter instead.
        block.attention.o_proj.keep_output = False
    model.head.norm.register_forward_hook(tp.gather_output)
    model.head.forward = tp.vocab_parallel_head(model.head)
    share_classes(model)


def check_tp_plan(model: Llama, world: World) -> None:
    """Raises ConfigError for a parameter that has no placement, or that every rank would add to the
    output."""
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        placement = placement_of(model, name)
        if placement is None:
            raise ConfigError(
                f"[parallel] tp = {world.tp}: {name}: nothing says how tp places it; add it to the "
                f'dict `tp_dims` in __init__ of its module, as "{attribute}": None (all of it on every '
                "rank) or 0 (dimension 0 sharded): model/llama.py"
            )
        if attribute == "weight" or not isinstance(model.get_submodule(path), nn.Linear):
            continue
        is_rowwise = placement_of(model, f"{path}.weight") == ROWWISE
        if is_rowwise and placement.is_replicate() and parameter.is_floating_point():
            raise ConfigError(
                f"[parallel] tp = {world.tp}: {name}: tp sums the outputs of this layer over its "
                "ranks, and so would add it once for each; add it after the layer, as a parameter "
                "of the module that calls it"
            )


# Weights


def placement_of(model: Llama, parameter: str) -> Placement | None:
    """A parameter's placement over tp, by its name; None if nothing defines one."""
    module_path, _, attribute = parameter.rpartition(".")
    tp_dims = getattr(model.get_submodule(module_path), "tp_dims", {})
    if attribute in tp_dims:
        dim = tp_dims[attribute]
        return Replicate() if dim is None else Shard(dim)
    path = parameter.removesuffix(".weight")
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if isinstance(parent, nn.Linear) and name in WITH_WEIGHT:
        placement = placement_of(model, f"{parent_path}.weight")
        return placement if placement in (None, WITH_WEIGHT[name]) else Replicate()
    for pattern, placement in TP_PLAN.items():
        if fnmatch.fnmatchcase(path, pattern):
            return placement
    return None


class ToLocal(nn.Module):
    """Parametrization: the module computes with the local tensor of its DTensor over tp."""

    def __init__(self, placement: Placement):
        super().__init__()
        self.grad_placement = placement
        if placement.is_replicate():
            # A replicated weight sees local tokens (a block's norms), local heads (the norms of
            # queries and keys) or local features (adapters). So its local gradient is one term of a
            # sum over tp.
            self.grad_placement = Partial()

    def forward(self, weight: DTensor) -> Tensor:
        return weight.to_local(grad_placements=(self.grad_placement,))


def shard_weights(model: Llama, world: World) -> None:
    """Replaces every parameter by a DTensor over tp, parametrized to its local tensor."""
    mesh = world.mesh["tp"]
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # so that tied weights stay tied
    for path, module in list(model.named_modules()):
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            placement = placement_of(model, f"{path}.{name}")
            assert placement, "check_tp_plan() refuses the model"
            if weight not in sharded:
                dtensor = distribute_tensor(weight, mesh, [placement], src_data_rank=None)
                sharded[weight] = nn.Parameter(dtensor, weight.requires_grad)
            # unsafe: the type and shape change, which torch would refuse.
            parametrize.register_parametrization(module, name, ToLocal(placement), unsafe=True)
            module.parametrizations[name].original = sharded[weight]
        if isinstance(module, Linear) and placement_of(model, f"{path}.weight") == ROWWISE:
            module.first_input = mesh.get_local_rank() * (module.in_features // world.tp)


def placements_with_tp(
    model: Llama, mesh: DeviceMesh, fsdp_placements: tuple[Placement, ...], world: World
) -> tuple[DeviceMesh, dict[str, tuple[Placement, ...]]]:
    """FSDP2's mesh with tp as its last dimension, and each parameter's placements on it, by name.

    For parallel/verify.py. mesh, fsdp_placements: FSDP2's, without tp.
    """
    *replicas, shards = fsdp_placements
    placements: dict[str, Any] = {}  # Any: to a type checker _StridedShard is not a Placement
    for name, _ in named_parameters(model):
        placement = placement_of(model, name)
        assert placement, "check_tp_plan() refuses the model"
        if placement == Shard(0):
            # FSDP2 shards tp's local rows, so an FSDP2 rank's rows are strided in the full tensor.
            strided = _StridedShard(0, split_factor=world.tp)
            placements[name] = (*replicas, strided, placement)
        else:
            placements[name] = (*replicas, shards, placement)
    return DeviceMesh._concatenate([mesh, world.mesh["tp"]]), placements


# Activations


@dataclass(frozen=True)
class SequenceParallel:
    """Collectives on activations: (B, T / tp, D) between modules, (B, T, D) within them."""

    group: Group

    def gather_output(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Forward hook: (B, T / tp, D) -> (B, T, D)."""
        return all_gather(output, 1, self.group)

    def scatter_output(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Forward hook: partial sums (B, T, D) -> sums (B, T / tp, D)."""
        return reduce_scatter(output, 1, self.group)

    def all_gather_input(self, forward: Callable) -> Callable:
        """Wraps the forward of attention or feed-forward: the new one takes the local tokens."""

        def forward_of_local_tokens(x: Tensor, *args) -> Tensor | tuple:
            output = forward(all_gather(x, 1, self.group), *args)
            if isinstance(output, tuple):
                # A fork's (x, terms). Every rank computes the terms of all tokens, so each counts
                # its share.
                x, terms = output
                return x, {name: term / self.group.size for name, term in terms.items()}
            return output

        return forward_of_local_tokens

    def vocab_parallel_embedding(self, embedding: Embedding) -> Callable:
        """The embedding's forward, from all tokens (B, T) to the local ones' x (B, T / tp, D)."""
        rows = embedding.num_embeddings // self.group.size
        first_row = self.group.rank * rows
        local_forward = embedding.forward

        def forward(tokens: Tensor) -> Tensor:
            row = tokens - first_row
            is_local = (row >= 0) & (row < rows)
            # The rows of other ranks are zeros here. The reduce-scatter adds them.
            x = local_forward(row.where(is_local, 0)) * is_local[..., None]  # (B, T, D)
            # clone(): a unit must not return a view. An in-place operation on it would drop FSDP2's
            # backward hooks.
            return reduce_scatter(x, 1, self.group).clone()

        return forward

    def vocab_parallel_head(self, head: Head) -> Callable:
        """The head's forward with local rows of the vocabulary. Every rank gets the same loss."""
        rows = len(head.weight)
        local_forward = head.forward
        head.shard = VocabularyShard(
            rows * self.group.size,
            rows * self.group.rank,
            lambda x: all_gather(x[None], 0, self.group),
        )

        def forward(
            x: Tensor, targets: Tensor | None = None, terms: LossSums | None = None, **by_token
        ) -> Tensor | tuple[LossSums, Tensor]:
            if terms:
                terms = self.sum_terms(terms)
            output = local_forward(x, targets, terms, **by_token)
            if isinstance(output, tuple):
                return output
            return all_gather(output, 2, self.group)  # logits (B, T, V / tp) -> (B, T, V)

        return forward

    def sum_terms(self, terms: LossSums) -> LossSums:
        """The blocks' terms of the loss, summed over all tp ranks.

        Gradients flow only into this rank's terms: each rank backpropagates its share.
        """
        local = torch.stack(list(terms.values()))
        other_ranks = all_reduce(local.detach(), self.group) - local.detach()
        return dict(zip(terms, local + other_ranks))


@dataclass(frozen=True)
class VocabularyShard(loss.Shard):
    """Each rank holds some rows of the vocabulary. All ranks get the same loss."""

    gather: Callable[[Tensor], Tensor]  # all-gathers (...) to (tp, ...)

    def sum(self, local: Tensor) -> Tensor:
        # All ranks compute the same loss from the sum, so each needs only its own term's gradient.
        return self.gather(local.detach()).sum(0) + (local - local.detach())

    def max(self, local: Tensor) -> Tensor:
        return self.gather(local.detach()).amax(0)
