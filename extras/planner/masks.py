"""FlexAttention's masks in a plan: no tensors, but the share of the scores that each keeps, by its rule."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

import model.attention
from model.attention import make_mask

MOST_PAIRS = 2**26  # evaluated; of more, every n-th row of blocks


class PlannedMask(BlockMask):
    """Stands in for a BlockMask: what the plan needs of it."""

    def __init__(self, share: float, by_data: bool):
        # of the scores that it keeps; whether that depends on data
        self.share, self.by_data = (share, by_data)


class ZerosForData(TorchDispatchMode):
    """Replaces tensors without values by zeros. With zeros for document numbers, a sequence is one document."""

    used = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*tree_map(self.value, args), **tree_map(self.value, kwargs or {}))

    def value(self, x: Any) -> Any:
        if isinstance(x, Tensor) and (isinstance(x, FakeTensor) or x.is_meta):
            self.used = True
            return torch.zeros(x.shape, dtype=x.dtype)
        return x


def planned_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    **unused: Any,
) -> PlannedMask:
    """create_block_mask() without its tensors. FlexAttention computes each block with a pair that the rule keeps."""
    rows, columns = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    starts = range(0, Q_LEN, rows)
    every = min(len(starts), max(1, (H or 1) * Q_LEN * KV_LEN // MOST_PAIRS))
    kept = total = 0
    with _disable_current_modes(), ZerosForData() as data:
        first, heads = torch.zeros((), dtype=torch.int64), torch.arange(H or 1)[:, None, None]
        keys = torch.arange(KV_LEN)
        for start in starts[every // 2 :: every]:
            queries = torch.arange(start, min(start + rows, Q_LEN))[:, None]
            pairs = mask_mod(first, heads, queries, keys).expand(H or 1, len(queries), KV_LEN)
            # (H, blocks)
            blocks = F.pad(pairs.any(1), (0, -KV_LEN % columns)).unflatten(1, (-1, columns)).any(2)
            kept, total = kept + int(blocks.sum()), total + blocks.numel()
    return PlannedMask(kept / total, data.used)


def planned_attention(
    counter: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: PlannedMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unused: Any,
) -> Tensor:
    """flex_attention() as a kernel of SDPA, of which the counter counts the share that the mask keeps."""
    counter.by_data |= block_mask is not None and block_mask.by_data
    with mock.patch.object(counter, "share", 1.0 if block_mask is None else block_mask.share):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )


def mask_on_gpu(*args: Any, **kwargs: Any) -> Tensor | BlockMask:
    """make_mask() of a GPU."""

    def on_gpu(x: Any) -> Any:
        return torch.device("cuda") if isinstance(x, torch.device) else x

    return make_mask(*map(on_gpu, args), **{name: on_gpu(x) for name, x in kwargs.items()})


def everywhere(stand_ins: dict[Callable, Callable]) -> list:
    """Patches that replace functions in every module that has imported them, a fork's too."""
    found = {id(function): stand_in for function, stand_in in stand_ins.items()}
    return [
        mock.patch.object(module, name, found[id(value)])
        for module in [*sys.modules.values()]
        if isinstance(module, ModuleType) and module.__name__ != __name__
        for name, value in [*vars(module).items()]
        if id(value) in found
    ]


def flex_attention_patches(counter: Any) -> list:
    """Patches that select a GPU's masks and attention, and count them. counter: has `share` and `by_data`, see
    Counted."""
    return [
        mock.patch.object(model.attention, "_compiled", lambda function: function),
        *everywhere(
            {
                make_mask: mask_on_gpu,
                create_block_mask: planned_mask,
                flex_attention: functools.partial(planned_attention, counter),
            }
        ),
    ]
