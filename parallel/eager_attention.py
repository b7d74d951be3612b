"""Saves FlexAttention under selective activation checkpointing, in blocks that are not compiled.

Such a FlexAttention is compiled alone, and checkpoint()'s policy sees none of its operators: it would
run again in backward. So a mode of torch intercepts the call itself. Of what attention saves for
backward, the output and its logsumexp stay. Its inputs are dropped, and recomputed with the rest of
the block. The recomputation takes the output instead of attending again.

Shapes: q (B, H, T, E), k and v (B, K, T, E), as in model/attention.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.attention import eager_flex_attention


def with_saved_attention(contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """checkpoint()'s contexts of one forward and of its recomputation, with attention saved.

    contexts: returns those of the policy.
    """
    forward, recomputation = contexts()
    outputs: list[Tensor] = []
    return entered(SaveAttention(outputs), forward), entered(
        ReplayAttention(outputs), recomputation
    )


@contextlib.contextmanager
def entered(mode: TorchFunctionMode, context: Any) -> Iterator[None]:
    with mode, context:
        yield


class SaveAttention(TorchFunctionMode):
    """In forward: keeps what attention returns."""

    def __init__(self, outputs: list[Tensor]):
        super().__init__()
        self.outputs = outputs

    def __torch_function__(self, function, types, args: tuple = (), kwargs=None):
        if function is not eager_flex_attention:
            return function(*args, **(kwargs or {}))
        *inputs, mask, grouped = args
        out = attend_on_recomputed(inputs, lambda q, k, v: function(q, k, v, mask, grouped))
        self.outputs.append(out.detach().requires_grad_(out.requires_grad))
        return out


class ReplayAttention(TorchFunctionMode):
    """In recomputation: returns what attention returned in forward, in the same order."""

    def __init__(self, outputs: list[Tensor]):
        super().__init__()
        self.outputs = iter(outputs)

    def __torch_function__(self, function, types, args: tuple = (), kwargs=None):
        if function is not eager_flex_attention:
            return function(*args, **(kwargs or {}))
        q, k, v, _mask, _grouped = args
        Recomputed.apply(q, k, v)  # hands them to the backward of forward's attention
        return next(self.outputs)


class Recomputed(torch.autograd.Function):
    """The identity. It saves its inputs for backward, which checkpoint() replaces by recomputed
    ones."""

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch passes one gradient per output
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def attend_on_recomputed(inputs: list[Tensor], attend: Callable[..., Tensor]) -> Tensor:
    """attend(*inputs), whose backward reads the inputs that checkpoint() recomputes, and all else
    that attention saves as it is."""
    inputs = list(Recomputed.apply(*inputs))
    node = inputs[0].grad_fn
    if node is None:
        return attend(*inputs)  # nothing is saved
    numbers = {where(x): number for number, x in enumerate(inputs)}

    def drop_inputs(x: Tensor) -> Tensor | int:
        return numbers.get(where(x), x)

    recomputed: list[Tensor] = []

    def take(saved: Tensor | int) -> Tensor:
        if not isinstance(saved, int):
            return saved
        if not recomputed:
            # once: checkpoint() allows no second time
            # pyrefly: ignore[missing-attribute]  # the node is the ctx of Recomputed
            recomputed.extend(node.saved_tensors)
        return recomputed[saved]

    with torch.autograd.graph.saved_tensors_hooks(drop_inputs, take):
        return attend(*inputs)


def where(x: Tensor) -> tuple:
    """Equal for tensors of the same elements in memory."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
