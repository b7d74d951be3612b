"""Attention kernels, the causal document mask, and what the model needs of a KV cache.

Shapes: B batch, T tokens, S cached positions (columns), H query heads, K key/value heads, E head dimension.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def mask_mod(documents: Tensor | None) -> Callable[..., Tensor]:
    """A FlexAttention mask_mod: causal, and within the query's document if document numbers (B, T) are given."""

    def rule(b: Tensor, h: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
        return q >= k if documents is None else (q >= k) & (documents[b, q] == documents[b, k])

    return rule


def document_mask(documents: Tensor) -> Tensor | BlockMask:
    batch, length = documents.shape
    return make_mask(mask_mod(documents), batch, length, length, documents.device)


def make_mask(
    rule: Callable, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor | BlockMask:
    """Builds the mask for attention(): on a GPU a BlockMask (https://arxiv.org/abs/2412.05496), which needs no (Q, T)
    tensor; elsewhere booleans (B, 1, Q, T), True where a query attends. batch = 1 broadcasts over the batch."""
    if device.type == "cuda":
        return _compiled(create_block_mask)(rule, batch, None, queries, keys, device)
    row, query, key = (torch.arange(n, device=device) for n in (batch, queries, keys))
    return rule(row[:, None, None], None, query[:, None], key).expand(batch, -1, -1)[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Grouped-query attention of q (B, H, T, E) over k and v (B, K, T, E) with this mask; causal if it is None."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Eager flex_attention materializes the score matrix; inside a compiled block it is compiled with the block.
        # Its backward cannot be compiled on a CPU; only tests run this branch on one.
        flex = (
            _compiled(flex_attention)
            if q.is_cuda and not torch.compiler.is_compiling()
            else flex_attention
        )
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # No fused kernel of torch 2.11 to 2.13 supports GQA in float32, and the unfused one saves the score matrix.
        # Repeated keys and values cost little in comparison.
        groups = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)  # a run's shapes are static


class KVCache(Protocol):
    """The keys and values of one block, in generation (generate.py)."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v (B, K, T, E) as new columns; returns all columns so far (B, K, S, E)."""


class Cache(Protocol):
    """The KV caches of all blocks: a pass computes only the new tokens."""

    blocks: list[KVCache]

    def advance(self, new: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Starts a pass over `new` columns. Returns its mask, None or (B, 1, 1, S); positions (B, T); and, within
        these columns, the index of each row's newest token (B, 1)."""
