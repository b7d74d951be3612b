"""Tensor parallelism (https://arxiv.org/abs/1909.08053): each rank holds a shard of every matrix and computes with it.

It includes sequence parallelism (https://arxiv.org/abs/2205.05198): outside attention and feed-forward, where tokens do
not interact, activations are sharded along the sequence. A block's forward over tp is

    norm -> all-gather -> colwise linear, local heads, rowwise linear -> reduce-scatter -> + residual -> norm -> ...

The embedding and the head are sharded over the vocabulary. Modules compute on plain tensors: local shards of weights,
and the activations that the functions below all-gather.
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
from files import print_error
from model import loss
from model.llama import Head, Linear, Llama
from model.loss import LossSums
from parallel.activation_checkpoint import is_checkpointed
from parallel.collectives import (
    Group,
    all_gather,
    all_reduce,
    gathered,
    group_of,
    ops,
    reduce_scatter,
)
from parallel.mesh import World
from parallel.ranks import local_world_size
from parallel.torch_patches import share_classes

# colwise, rowwise. For x @ weight.T: local output or input features
COLWISE, ROWWISE = (Shard(0), Shard(1))
# TP plan: each module's weight is sharded or replicated over tp. What a projection's `sharded_with_weight` names (its
# other parameters and submodules) is sharded along the same features, and so needs no collective of its own.
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


def placement_of(model: Llama, parameter: str) -> Placement | None:
    """The placement over tp of the parameter of this name; None if the TP plan has no entry."""
    module = parameter.removesuffix(".weight")
    path, _, name = module.rpartition(".")
    projection = model.get_submodule(path)
    if isinstance(projection, Linear) and name in projection.sharded_with_weight:
        placement = placement_of(model, path)
        same_features = placement == Shard(projection.sharded_with_weight[name])
        return placement if same_features else Replicate()
    return next(
        (
            placement
            for pattern, placement in TP_PLAN.items()
            if fnmatch.fnmatchcase(module, pattern)
        ),
        None,
    )


def placements_with_tp(
    model: Llama, mesh: DeviceMesh, over_fsdp: dict[str, tuple[Placement, ...]], world: World
) -> tuple[DeviceMesh, dict[str, tuple[Placement, ...]]]:
    """For parallel/verify.py: FSDP2's mesh and placements by parameter name, both with tp as the last dimension."""
    found: dict[str, tuple[Any, ...]] = {}  # _StridedShard is no Placement to a type checker
    for name, placements in over_fsdp.items():
        *outer, shards = placements
        over_tp = placement_of(model, name)
        # apply_tensor_parallelism() refuses such a model
        assert over_tp, f"{name}: is not in TP_PLAN"
        if over_tp == Shard(0):
            # FSDP2 shards tp's local rows: in the full tensor, one FSDP2 rank's rows are strided, not contiguous
            shards = _StridedShard(0, split_factor=world.tp)
        found[name] = (*outer, shards, over_tp)
    return DeviceMesh._concatenate([mesh, world.mesh["tp"]]), found


def apply_tensor_parallelism(model: Llama, recompute: str | int, world: World) -> None:
    """Shards weights, activations and loss over tp, in place. Parameters become DTensors on the mesh dimension tp.
    Raises ConfigError for parameters that the TP plan does not list."""
    if unknown := [
        name for name, _ in model.named_parameters() if placement_of(model, name) is None
    ]:
        raise ConfigError(
            f"[parallel] tp = {world.tp}: {', '.join(unknown[:3])}: TP_PLAN in parallel/tensor.py does "
            "not say how tp places it"
        )
    for name, projection in ("attention", "o_proj"), ("feed_forward", "down_proj"):
        if not all(hasattr(getattr(block, name), projection) for block in model.blocks):
            raise ConfigError(
                f"[parallel] tp = {world.tp}: a block's {name} has no {projection}, whose outputs tp sums"
                ": name the module that takes its place in apply_tensor_parallelism, parallel/tensor.py"
            )
    for warning in tp_warnings(world) if world.rank == 0 else ():
        print_error(warning)
    shard_weights(model, world)
    tp = SequenceParallel(group_of(world.mesh["tp"]))
    model.register_forward_pre_hook(tp.set_mode, with_kwargs=True)
    model.embedding.forward = tp.vocab_parallel_embedding(model.embedding)
    for i, block in enumerate(model.blocks):
        attention, feed_forward = block.attention, block.feed_forward
        for module, last in (attention, attention.o_proj), (feed_forward, feed_forward.down_proj):
            module.forward = tp.all_gather_input(
                module.forward, regather=not is_checkpointed(recompute, i)
            )
            last.register_forward_hook(lambda module, args, out: tp.scatter(out))
        # For activation checkpointing: o_proj's output is unreduced and of the full sequence, so save what the first
        # reduce-scatter makes of it: recomputing that would communicate again. Backward does not read the second's.
        attention.o_proj.keep_output = False
        block.keep_first = {ops.reduce_scatter_tensor.default}
    model.head.norm.register_forward_hook(lambda module, args, out: tp.gather(out))
    model.head.forward = tp.vocab_parallel_head(model.head)
    share_classes(model)


class ToLocal(nn.Module):
    """Parametrization: from a DTensor over tp to its local tensor, which the module computes with."""

    def __init__(self, placement: Placement):
        super().__init__()
        # Replicated weights see local tokens (a block's norms), local heads (those of queries and keys) or local
        # features (adapters): their gradient is Partial.
        self.gradient = (Partial(),) if placement.is_replicate() else (placement,)

    def forward(self, weight: DTensor) -> Tensor:
        return weight.to_local(grad_placements=self.gradient)


def shard_weights(model: Llama, world: World) -> None:
    sharded_weights: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for path, module in list(model.named_modules()):
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            placement = placement_of(model, f"{path}.{name}")
            assert placement  # as above
            if weight not in sharded_weights:
                sharded = distribute_tensor(
                    weight, world.mesh["tp"], [placement], src_data_rank=None
                )
                sharded_weights[weight] = nn.Parameter(sharded, weight.requires_grad)
            parametrize.register_parametrization(module, name, ToLocal(placement), unsafe=True)
            module.parametrizations[name].original = sharded_weights[weight]
        if isinstance(module, Linear) and placement_of(model, f"{path}.weight") == ROWWISE:
            module.first_input = world.mesh.get_local_rank("tp") * (module.in_features // world.tp)


@dataclass
class SequenceParallel:
    """Collectives on activations (B, T, D) around a module. Between modules, T is this rank's part of the sequence."""

    group: Group
    sharded: bool = True

    def set_mode(self, model: Llama, args: tuple, options: dict) -> None:
        """Before each forward pass: with a cache, activations are not sharded: a single token cannot be split."""
        self.sharded = options.get("cache") is None

    def gather(self, x: Tensor) -> Tensor:
        return all_gather(x, 1, self.group) if self.sharded else x

    def scatter(self, x: Tensor) -> Tensor:
        return reduce_scatter(x, 1, self.group) if self.sharded else all_reduce(x, self.group)

    def all_gather_input(self, forward: Callable, regather: bool) -> Callable:
        def wrapped(x: Tensor, *rest) -> Tensor | tuple:
            with gathered(self.gather, x, regather) as whole:
                out = forward(whole, *rest)
            if isinstance(out, tuple):
                # all ranks have all tokens in here: each counts its share of a term
                return out[0], {name: value / self.group.size for name, value in out[1].items()}
            return out

        return wrapped

    def total(self, terms: LossSums) -> LossSums:
        """The blocks' terms of the loss over all tp ranks. Each rank backpropagates through its own tokens' share."""
        ours = torch.stack([*terms.values()])
        return dict(zip(terms, ours + (all_reduce(ours.detach(), self.group) - ours.detach())))

    def vocab_parallel_embedding(self, embedding: nn.Embedding) -> Callable:
        rows, forward = embedding.num_embeddings // self.group.size, embedding.forward

        def wrapped(tokens: Tensor) -> Tensor:
            index = tokens - self.group.rank * rows
            own = (index >= 0) & (index < rows)
            # nonzero only on the owner
            found = self.scatter(forward(index.where(own, 0)) * own[..., None])
            # no view: an in-place operation on a unit's view would drop FSDP2's backward hooks
            return found.clone()

        return wrapped

    def vocab_parallel_head(self, head: Head) -> Callable:
        rows, forward = len(head.weight), head.forward
        head.shard = VocabularyShard(
            self.group.rank * rows, lambda x: all_gather(x[None], 0, self.group)
        )

        def wrapped(
            x: Tensor, targets: Tensor | None = None, terms: LossSums | None = None, **options
        ):
            found = forward(x, targets, terms and self.total(terms), **options)
            # without targets: logits
            return found if isinstance(found, tuple) else all_gather(found, -1, self.group)

        return wrapped


@dataclass(frozen=True)
class VocabularyShard(loss.Shard):
    """Each rank has rows of the vocabulary, and all get the same loss."""

    gather: Callable[[Tensor], Tensor]  # all-gather: (...) -> (ranks, ...)

    def combine(self, top: Tensor, sums: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # (ranks, C, 1)
        tops, sums, chosen = self.gather(torch.stack([top, sums, chosen])).unbind(1)
        highest = tops.amax(0)
        whole = (sums * (tops - highest).exp()).sum(0)
        # the last is inf if this rank's logits are far lower: softmax is 0
        return whole.log() + highest, chosen.sum(0), whole * (highest - top).exp()


def tp_warnings(world: World) -> list[str]:
    """A warning if tp groups span machines: every block waits for their collectives."""
    here = local_world_size()
    return (
        [
            f"warning: parallel.tp = {world.tp} does not divide the {here} ranks of a machine: its groups span machines"
            ", and every block waits for the network in between"
        ]
        if here % world.tp
        else []
    )
