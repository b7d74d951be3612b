"""Attention kernels, the mask that keeps attention inside a document, and generation's key/value cache.

Shapes: B batch, T tokens, S columns of the cache, H heads, K key/value heads, E width of a head.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def mask_mod(documents: Tensor | None, places: Tensor | None = None) -> Callable[[Tensor, ...], Tensor]:
    """FlexAttention's rule: query q attends to key k up to itself and, with document numbers (B, T), of its document.
    places (Q): of the queries in the sequence, where they are a part of it."""

    def rule(b: Tensor, h: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
        q = q if places is None else places[q]
        return q >= k if documents is None else (q >= k) & (documents[b, q] == documents[b, k])

    return rule


def document_mask(documents: Tensor, places: Tensor | None = None) -> Tensor | BlockMask:
    batch, length = documents.shape
    return make_mask(mask_mod(documents, places), batch, length if places is None else len(places), length,
                     documents.device)


def make_mask(rule: Callable, batch: int, queries: int, keys: int, device: torch.device) -> Tensor | BlockMask:
    """mask_mod() as attention() takes it: on a GPU a BlockMask (https://arxiv.org/abs/2412.05496), so that no (Q, T)
    tensor exists; elsewhere booleans (B, 1, Q, T), True where a query attends. batch 1: the same for any."""
    if device.type == "cuda":
        return _compiled(create_block_mask)(rule, batch, None, queries, keys, device)
    row, query, key = (torch.arange(n, device=device) for n in (batch, queries, keys))
    return rule(row[:, None, None], None, query[:, None], key).expand(batch, -1, -1)[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Grouped-query attention of q (B, H, T, E) over k and v (B, K, T, E), under a mask or, without one, causal."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Eager flex_attention materializes the score matrix; inside a compiled block it is compiled with the block.
        # A CPU cannot compile its backward; only tests come here on one.
        flex = _compiled(flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # No fused kernel of torch 2.11 to 2.13 takes groups in float32, and without one all scores are kept; repeated
        # keys and values cost little beside those.
        groups = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)  # a run's shapes are static


class KVCache:
    """One block's part of a Cache: keys and values (B, K, S, E), allocated in the dtype of the first pass."""

    def __init__(self, columns: int):
        self.columns, self.filled = columns, 0
        self.keys = self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v (B, K, T, E) as new columns; returns all columns so far."""
        if not self.filled:
            shape = (*k.shape[:2], self.columns, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        begin, self.filled = self.filled, self.filled + k.shape[2]
        self.keys[:, :, begin : self.filled] = k
        self.values[:, :, begin : self.filled] = v
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class Cache:
    """Keys and values of all tokens so far, so that a pass computes the new tokens only. For generation: no gradients.

    The first pass takes `lengths` tokens of each row, padded at the end, where causal attention does not see it. Each
    further pass takes one token of each row as one more column; a mask hides the padding, and positions continue from
    the row's own length. So a row's result does not depend on the other rows.
    """

    def __init__(self, lengths: list[int], columns: int, n_layers: int, device: torch.device):
        """columns: the most tokens of a row, padding included."""
        self.lengths = torch.tensor(lengths, device=device)[:, None]  # (B, 1), of the first pass
        self.filled, self.first = 0, 0  # first: columns of the first pass
        self.blocks = [KVCache(columns) for _ in range(n_layers)]

    def advance(self, new: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """A pass over `new` columns: its mask, None or (B, 1, 1, S); positions (B, T); the columns among them of each
        row's newest token (B, 1)."""
        begin, self.filled = self.filled, self.filled + new
        column = torch.arange(self.filled, device=self.lengths.device)
        if begin == 0:
            self.first = new
            return None, column.expand(len(self.lengths), -1), self.lengths - 1
        seen = (column < self.lengths) | (column >= self.first)  # (B, S)
        return seen[:, None, None], self.lengths + begin - self.first, torch.zeros_like(self.lengths)
