"""Attention: its kernels, and the mask and positions that keep it inside a document.

Shapes: B batch, T tokens, H heads, K key/value heads, E width of a head.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def positions(documents: Tensor) -> Tensor:
    """Place of each token in its document (B, T), from 0, of document numbers (B, T) that rise from left to right."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)  # (B, T)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - (place * begins).cummax(dim=1).values


def document_mask(documents: Tensor) -> Tensor | BlockMask:
    """What attend() takes for document numbers (B, T): a token sees those of its document up to itself.

    On a GPU a BlockMask (https://arxiv.org/abs/2412.05496), by which the kernel leaves out what is masked; it is made
    block by block, so that no (T, T) tensor exists. Elsewhere a plain (B, 1, T, T) of booleans, True where it sees.
    """
    batch, length = documents.shape
    if documents.is_cuda:
        return _compiled(create_block_mask)(sees(documents), batch, None, length, length, documents.device)
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()  # (T, T)
    return (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]


def sees(documents: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same rule for one pair of tokens, as FlexAttention asks for it."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return rule


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Grouped-query attention of q (B, H, T, E) over k and v (B, K, T, E), under a mask or, without one, causal."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Uncompiled it would make all scores; a compiled block compiles it along. On a CPU it cannot be trained
        # compiled, and only tests come here.
        flex = _compiled(flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)  # once: a run's shapes do not change
