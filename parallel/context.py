"""Context parallelism: each rank holds a part of every sequence and attends to the full sequence.

Keys and values are all-gathered over cp, as in Llama 3 (https://arxiv.org/abs/2407.21783, section
3.3.2). GQA keeps them small, and any mask works. Zig-zag sharding balances causal attention: a
sequence is cut into 2 cp chunks, and rank i holds chunks i and 2 cp - 1 - i. FlexAttention skips
fully masked blocks, so all ranks compute the same number of blocks.

Shapes: B batch, T tokens of the full sequence, T / cp tokens of this rank, H query heads, K
key/value heads, E head dimension.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from config import ConfigError
from model.attention import BlockMask, attention, make_mask, mask_mod
from model.llama import Llama
from parallel.collectives import Group, all_gather, group_of
from parallel.mesh import World


def local_positions(world: World, seq_len: int) -> Tensor:
    """The positions (T / cp) of this rank's tokens in the full sequence."""
    chunks = torch.arange(seq_len).chunk(2 * world.cp)
    rank = world.mesh.get_local_rank("cp")
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def shard_sequences(tensors: tuple[Tensor, ...], world: World) -> tuple[Tensor, ...]:
    """Selects this rank's tokens of full sequences.

    tensors: inputs and targets, under a document mask also positions and documents, (B, T) each, from
    inputs_and_targets() in data/loader.py. Returns inputs, targets and positions (B, T / cp), and
    documents (B, T): the mask needs the document of every key.
    """
    inputs, targets, *of_documents = tensors
    local = local_positions(world, inputs.shape[1])
    if of_documents:
        positions, documents = of_documents
        return inputs[:, local], targets[:, local], positions[:, local], documents
    # repeat(), not expand(): an expanded tensor cannot be pinned.
    positions = local.repeat(len(inputs), 1)
    return inputs[:, local], targets[:, local], positions


def apply_context_parallelism(model: Llama, seq_len: int, world: World) -> None:
    """Replaces each block's attention, in place: local queries, all-gathered keys and values.

    Raises ConfigError if a block's Attention.attend is not attention().
    """
    positions = local_positions(world, seq_len).to(world.device)
    causal_mask = local_mask(None, positions, seq_len)

    def build_mask(documents: Tensor | None) -> Tensor | BlockMask:
        if documents is None:
            return causal_mask
        return local_mask(documents, positions, seq_len)

    model.build_mask = build_mask
    attend = partial(context_parallel_attention, group=group_of(world.mesh["cp"]))
    for i, block in enumerate(model.blocks):
        if block.attention.attend is not attention:
            raise ConfigError(
                f"[parallel] cp = {world.cp}: would replace blocks.{i}.attention.attend; write a rule on "
                "positions into model/attention.py: mask_mod(), since a rank's queries are two separate "
                "pieces of the text; write any other change into attention(), which cp calls with them, "
                "all keys and a mask"
            )
        block.attention.attend = attend


def local_mask(documents: Tensor | None, positions: Tensor, seq_len: int) -> Tensor | BlockMask:
    """The mask of local queries at these positions (T / cp) over all keys (T).

    documents (B, T): of the full sequence; None for plain causal attention.
    """
    batch = 1 if documents is None else len(documents)
    return make_mask(
        local_mask_mod(documents, positions), batch, len(positions), seq_len, positions.device
    )


def local_mask_mod(documents: Tensor | None, positions: Tensor) -> Callable[..., Tensor]:
    """The full sequence's mask_mod(), as a function of the local query's index."""
    full_mask_mod = mask_mod(documents)
    return lambda b, h, q, k: full_mask_mod(b, h, positions[q], k)


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask, group: Group
) -> Tensor:
    """attention() of local queries to the full sequence's keys and values.

    q (B, H, T / cp, E), k and v (B, K, T / cp, E) are local. Returns (B, H, T / cp, E).
    """
    local = torch.cat([k, v], dim=1)  # (B, 2 K, T / cp, E): one collective for both
    keys, values = all_gather_sequence(local, group).chunk(2, dim=1)  # (B, K, T, E) each
    return attention(q, keys, values, mask)


def all_gather_sequence(x: Tensor, group: Group) -> Tensor:
    """All-gathers x (B, K, T / cp, E) to (B, K, T, E), and restores the sequence's order."""
    early_chunks = []
    late_chunks = []
    for shard in all_gather(x, 0, group).chunk(group.size):  # (cp B, ...) -> (B, K, T / cp, E)
        early, late = shard.chunk(2, dim=2)  # (B, K, T / (2 cp), E) each
        early_chunks.append(early)
        late_chunks.append(late)
    return torch.cat([*early_chunks, *reversed(late_chunks)], dim=2)
