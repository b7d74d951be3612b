"""Context parallelism: each rank has a part of every sequence. Its queries attend to the full sequence's keys, values.

These are all-gathered over cp, as in Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2): GQA makes them small,
and any mask works. Zig-zag chunking balances causal work: of 2 x cp chunks, rank i has chunks i and 2 cp - 1 - i. This
helps because FlexAttention skips fully masked blocks.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from model.attention import BlockMask, attention, make_mask, mask_mod
from model.llama import Llama
from parallel.activation_checkpoint import is_checkpointed
from parallel.collectives import Group, all_gather, gathered, group_of
from parallel.mesh import World


def own_cp_positions(world: World, seq_len: int) -> Tensor:
    """Positions (T / cp) in the sequence of this rank's tokens."""
    chunks, rank = torch.arange(seq_len).chunk(2 * world.cp), world.mesh.get_local_rank("cp")
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def own_part(tensors: tuple[Tensor, ...], world: World) -> tuple[Tensor, ...]:
    """Of what inputs_and_targets() returns of full sequences (data/loader.py), this rank's tokens: inputs, targets and
    positions (B, T / cp). Documents stay full, since the mask needs the document of every key."""
    inputs, targets, *where = tensors
    own = own_cp_positions(world, inputs.shape[1])
    # repeat(), not expand(): an expanded tensor could not be pinned
    positions = where[0][:, own] if where else own.repeat(len(inputs), 1)
    return inputs[:, own], targets[:, own], positions, *where[1:]


def apply_context_parallelism(
    model: Llama, recompute: str | int, seq_len: int, world: World
) -> None:
    """Replaces each block's attention, in place: local queries attend to all-gathered keys and values."""
    cp_positions = own_cp_positions(world, seq_len).to(world.device)
    causal = local_mask(None, cp_positions, seq_len)
    model.build_mask = lambda documents: (
        causal if documents is None else local_mask(documents, cp_positions, seq_len)
    )
    for i, block in enumerate(model.blocks):
        block.attention.attend = functools.partial(
            context_parallel_attention,
            group=group_of(world.mesh["cp"]),
            regather=not is_checkpointed(recompute, i),
        )


def local_mask(documents: Tensor | None, cp_positions: Tensor, seq_len: int) -> Tensor | BlockMask:
    """The mask of local queries (T / cp) over all keys (T). documents (B, T): of the full sequence; None: causal."""
    batch = 1 if documents is None else len(documents)
    return make_mask(
        local_mask_mod(documents, cp_positions),
        batch,
        len(cp_positions),
        seq_len,
        cp_positions.device,
    )


def local_mask_mod(documents: Tensor | None, cp_positions: Tensor) -> Callable[..., Tensor]:
    rule = mask_mod(documents)
    return lambda b, h, q, k: rule(b, h, cp_positions[q], k)


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask, group: Group, regather: bool
) -> Tensor:
    """attention() of local q (B, H, T, E) over the full sequence; k and v (B, K, T, E) are local, too."""
    with gathered(
        functools.partial(all_gather_sequence, group=group), torch.cat([k, v], dim=1), regather
    ) as whole:
        keys, values = whole.chunk(2, dim=1)  # (B, K, cp T, E) each
        return attention(q, keys, values, mask)


def all_gather_sequence(part: Tensor, group: Group) -> Tensor:
    """All-gathers every rank's (B, K, T, E) into (B, K, cp T, E), reordered from zig-zag to sequence order."""
    ranks = [rank.chunk(2, dim=2) for rank in all_gather(part, 0, group).chunk(group.size)]
    return torch.cat(
        [*(first for first, _ in ranks), *(second for _, second in reversed(ranks))], dim=2
    )
