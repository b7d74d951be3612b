"""Attention and its masks.

Shapes: B batch, T tokens, H query heads, K key/value heads, E head dimension.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Grouped-query attention of q (B, H, T, E) to k and v (B, K, T, E); returns (B, H, T, E).

    mask comes from make_mask(). None is the plain causal mask; a single query, in generation, attends
    to all keys.
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Eager flex_attention materializes the score matrix, so it is compiled on its own if the block
        # is not compiled. On a CPU, where only tests come here, its backward cannot be compiled.
        is_alone = q.is_cuda and not torch.compiler.is_compiling()
        flex = _compiled(flex_attention) if is_alone else flex_attention
        # pyrefly: ignore[bad-return]  # torch 2.11 declares no overloads
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)

    if grouped and q.is_cuda and q.dtype == torch.float32:
        # No fused kernel of torch 2.11 to 2.13 supports GQA in float32, and the unfused one saves
        # the score matrix. Repeated keys and values cost little in comparison.
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)  # (B, K, T, E) -> (B, H, T, E)
        v = v.repeat_interleave(groups, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, enable_gqa=grouped
    )


def mask_mod(documents: Tensor | None) -> Callable[..., Tensor]:
    """FlexAttention's mask_mod(b, h, q, k): whether the query at q attends to the key at k.

    Causal. With document numbers (B, T), a query attends only to keys of its document.
    """

    def rule(b: Tensor, h: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
        causal = q >= k
        if documents is None:
            return causal
        return causal & (documents[b, q] == documents[b, k])

    return rule


def document_mask(documents: Tensor) -> Tensor | BlockMask:
    """The attention mask of full sequences with document numbers (B, T)."""
    batch, length = documents.shape
    return make_mask(mask_mod(documents), batch, length, length, documents.device)


def make_mask(
    rule: Callable[..., Tensor], batch: int, queries: int, keys: int, device: torch.device
) -> Tensor | BlockMask:
    """Builds the mask for attention() from a mask_mod. batch = 1 broadcasts over the batch.

    On a GPU the mask is a BlockMask (https://arxiv.org/abs/2412.05496), which needs no tensor of
    queries x keys. Elsewhere it is booleans (B, 1, queries, keys), True where a query attends.
    """
    if device.type == "cuda":
        return _compiled(create_block_mask)(rule, batch, None, queries, keys, device)
    b = torch.arange(batch, device=device)[:, None, None]  # (B, 1, 1)
    q = torch.arange(queries, device=device)[:, None]  # (queries, 1)
    k = torch.arange(keys, device=device)  # (keys)
    mask = rule(b, None, q, k)  # (queries, keys), with documents (B, queries, keys)
    return mask.expand(batch, -1, -1)[:, None]  # (B, 1, queries, keys)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)  # a run's shapes are static
