"""Context parallelism: each rank has a part of every sequence, and attends from it to the keys and values of the whole.

They are all-gathered over cp, as Llama 3 does (https://arxiv.org/abs/2407.21783, section 3.3.2): grouped heads make
them small, and any mask goes with it. The sequence is cut into 2 cp chunks, of which rank i has i and 2 cp - 1 - i: so
all ranks have the same work under a causal mask, which FlexAttention does not do where it masks.
"""

import functools

import torch
from torch import Tensor

from model.attention import BlockMask, attention, document_mask, make_mask, mask_mod
from model.llama import Llama
from parallel.activation_checkpoint import is_checkpointed
from parallel.collectives import Gather, Group, gathered, group_of
from parallel.mesh import World


def own_places(world: World, seq_len: int) -> Tensor | None:
    """(T / cp) places in the sequence of this rank's tokens; None: it has them all."""
    if world.cp == 1:
        return None
    chunks, rank = torch.arange(seq_len).chunk(2 * world.cp), world.mesh.get_local_rank("cp")
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def apply_context_parallelism(model: Llama, recompute: str | int, seq_len: int, world: World) -> None:
    """Makes attention, in place, that of this rank's part of the sequence over the whole."""
    if world.cp == 1:
        return
    places = own_places(world, seq_len).to(world.device)
    causal = make_mask(mask_mod(None, places), 1, len(places), seq_len, world.device)
    model.mask_of = lambda documents: causal if documents is None else document_mask(documents, places)
    for i, block in enumerate(model.blocks):
        block.attention.attend = functools.partial(attend, group=group_of(world.mesh["cp"]),
                                                   keep_part=not is_checkpointed(recompute, i))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask, group: Group, keep_part: bool) -> Tensor:
    """attention() of q (B, H, T, E) over the whole sequence, of which q, k and v (B, K, T, E) hold own_places()."""
    with gathered(functools.partial(in_order, group=group), torch.cat([k, v], dim=1), keep_part) as whole:
        return attention(q, *whole.chunk(2, dim=1), mask)  # over (B, K, cp T, E)


def in_order(part: Tensor, group: Group) -> Tensor:
    """(B, K, cp T, E) in the order of the sequence, of every rank's (B, K, T, E)."""
    ranks = [rank.chunk(2, dim=2) for rank in Gather.apply(part, 0, group).chunk(group.size)]
    return torch.cat([*(first for first, _ in ranks), *(second for _, second in reversed(ranks))], dim=2)
