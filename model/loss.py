"""Cross entropy as (sum, count), chunked over tokens: only one chunk's logits exist at a time.

Shapes: N tokens, C tokens of a chunk, D model dimension, V vocabulary (with tensor parallelism, the
local rows of it).

Besides inputs and gradients, memory holds C * V logits in the weight's dtype, which their gradient
overwrites. Eager mode adds C * V in float32. Several chunks add V * D for the weight's gradient in
float32. Compiled on a GPU, the elementwise part between the matmuls reads the logits two or three
times and writes them once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from config import IGNORE

# Sums over tokens by name. "loss" is minimized. Any others are parts of it, only logged.
LossSums = dict[str, Tensor]

# Tokens of a chunk. Large on a GPU, as each chunk costs a pass over the (V, D) gradient: compiled
# at V = 128,256, bfloat16 logits take 2 GiB. Small on a CPU, so that a small vocabulary's logits
# fit its cache.
CHUNK = {"cpu": 256, "cuda": 2048, "cuda compiled": 8192}


@dataclass(frozen=True)
class Shard:
    """The rows of the vocabulary that `weight` holds: here all.

    parallel/tensor.py derives a class for a part of them. With it, all ranks compute the same loss,
    and each rank's gradient of x is partial: it must be summed over the ranks.
    """

    first: int  # of the local rows

    def combine(
        self, row_max: Tensor, exp_sum: Tensor, target_logit: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From the softmax over the local rows to that over all; every tensor is (C, 1).

        Takes what softmax_parts() returns, with target_logit 0 where the target is not a local row.
        Returns logsumexp and the target's logit over all rows, and the sum of all exponentials
        relative to the local row_max.
        """
        return exp_sum.log() + row_max, target_logit, exp_sum


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    compile: bool = False,
    shard: Shard | None = None,
) -> tuple[LossSums, Tensor]:
    """({"loss": sum over the tokens, in float32}, number of valid targets) of logits x @ weight.T.

    x (N, D) and weight (V, D) have one dtype. targets (N) are IGNORE where there is none. Returns
    sums, not means: averaging means over unequal token counts would be wrong.
    """
    if not x.is_cuda and x.dtype == torch.float32:
        compile = False  # eager is faster
    if chunk is None:
        chunk = CHUNK["cuda compiled" if x.is_cuda and compile else x.device.type]
    if shard is None:
        shard = Shard(0)
    loss = _ChunkedCrossEntropy.apply(
        x, weight, targets, chunk, compile, shard, torch.is_grad_enabled()
    )
    return {"loss": loss}, (targets != IGNORE).sum()


def softmax_parts(logits: Tensor, index: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(exponentials, row_max, exp_sum, target_logit) in float32 of logits (C, V), targets (C, 1).

    exponentials (C, V) are exp(logits - row_max). The other three are (C, 1). Overwrites float32
    logits. Compiled, exponentials are None: recomputing them costs less than saving them.
    """
    wide = logits.float()
    row_max = wide.amax(-1, keepdim=True)
    target_logit = wide.gather(-1, index)
    if torch.compiler.is_compiling():
        return None, row_max, (wide - row_max).exp().sum(-1, keepdim=True), target_logit
    exponentials = wide.sub_(row_max).exp_()
    return exponentials, row_max, exponentials.sum(-1, keepdim=True), target_logit


class ChunkSoftmax(NamedTuple):
    """What logits_gradient() needs of a chunk: logits and exponentials (C, V), the others (C,
    1)."""

    logits: Tensor
    index: Tensor  # the target's local row, or any where the target is not local
    exponentials: Tensor | None
    row_max: Tensor  # over the local rows
    exp_sum: Tensor  # over all rows, relative to row_max
    target_logit: Tensor  # the logit at index
    is_local: Tensor  # 1.0 where index is the target's


def logits_gradient(
    logits: Tensor,
    index: Tensor,
    exponentials: Tensor | None,
    row_max: Tensor,
    exp_sum: Tensor,
    target_logit: Tensor,
    is_local: Tensor,
    scale: Tensor,
) -> Tensor:
    """The loss's gradient with respect to the logits, (softmax - one-hot) * scale; overwrites them.

    The first seven are ChunkSoftmax's. scale (C, 1) is 0 where there is no target.
    """
    factor = scale / exp_sum
    # in float32: softmax - 1 of a confident prediction cancels
    at_target = (target_logit - row_max).exp() * factor - scale * is_local
    if exponentials is None:
        # One in-place kernel. For scatter_() Inductor would allocate a second (C, V) buffer and
        # copy it back.
        columns = torch.arange(logits.shape[-1], device=logits.device)
        elsewhere = (logits.float() - row_max).exp() * factor
        return logits.copy_(torch.where(columns == index, at_target, elsewhere))
    logits.copy_(exponentials.mul_(factor))
    return logits.scatter_(-1, index, at_target.to(logits.dtype))


@functools.cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


def chunk_loss(
    x: Tensor, weight: Tensor, targets: Tensor, shard: Shard, softmax_of: Callable
) -> tuple[Tensor, Tensor, ChunkSoftmax]:
    """(loss, valid, softmax) of a chunk x (C, D) with targets (C).

    loss is summed over the chunk; valid (C, 1) is 1.0 where there is a target. softmax_of is
    softmax_parts(), compiled or not.
    """
    targets = targets[:, None]  # (C) -> (C, 1)
    valid = (targets != IGNORE).float()
    row = targets - shard.first
    is_local = ((row >= 0) & (row < len(weight))).float()
    index = row.clamp(0, len(weight) - 1)

    logits = x @ weight.T  # (C, D) -> (C, V)
    exponentials, row_max, exp_sum, target_logit = softmax_of(logits, index)
    logsumexp, logit_of_all, exp_sum = shard.combine(row_max, exp_sum, target_logit * is_local)
    loss = ((logsumexp - logit_of_all) * valid).sum()
    softmax = ChunkSoftmax(logits, index, exponentials, row_max, exp_sum, target_logit, is_local)
    return loss, valid, softmax


def add_weight_gradient(w_grad: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds gradient.T @ x, from (C, V) and (C, D), to w_grad (V, D) in float32."""
    if x.is_cuda and x.dtype != torch.float32:
        torch.addmm(w_grad, gradient.T, x, out_dtype=torch.float32, out=w_grad)
    else:
        w_grad.addmm_(gradient.T.float(), x.float())  # a CPU must upcast first


class _ChunkedCrossEntropy(torch.autograd.Function):
    """A single chunk saves its logits for backward, which applies its scale to them.

    With several, forward computes the gradients while a chunk's logits exist. Recomputing the
    logits in backward would cost a third more in the head. The head's backward follows immediately,
    so gradients live no longer.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        compile: bool,
        shard: Shard,
        grad_enabled: bool,  # of the caller: it is off in here
    ) -> Tensor:
        needs_x = grad_enabled and ctx.needs_input_grad[0]
        needs_weight = grad_enabled and ctx.needs_input_grad[1]
        softmax_of = compiled(softmax_parts) if compile else softmax_parts
        ctx.logits_gradient = compiled(logits_gradient) if compile else logits_gradient
        ctx.weight_dtype = weight.dtype
        ctx.single_chunk = len(x) <= chunk

        if ctx.single_chunk:
            loss, valid, softmax = chunk_loss(x, weight, targets, shard, softmax_of)
            if needs_x or needs_weight:
                ctx.save_for_backward(x, weight, valid, *softmax)
            return loss

        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_grad = torch.empty_like(x) if needs_x else None
        # Accumulated over chunks in float32, and rounded once, in backward. bfloat16 would lose
        # each chunk's low bits.
        w_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            loss, valid, softmax = chunk_loss(x[rows], weight, targets[rows], shard, softmax_of)
            total += loss
            if needs_x or needs_weight:
                gradient = ctx.logits_gradient(*softmax, valid)  # (C, V)
                if x_grad is not None:
                    torch.mm(gradient, weight, out=x_grad[rows])
                if w_grad is not None:
                    add_weight_gradient(w_grad, gradient, x[rows])
                del gradient
            del softmax  # with its logits, before the next chunk's matmul
        ctx.save_for_backward(x_grad, w_grad)
        return total

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch passes one gradient per output
    def backward(ctx, scale: Tensor):
        if ctx.single_chunk:
            x, weight, valid, *softmax = ctx.saved_tensors
            gradient = ctx.logits_gradient(*softmax, valid * scale)  # (C, V)
            x_grad = gradient @ weight if ctx.needs_input_grad[0] else None
            w_grad = gradient.T @ x if ctx.needs_input_grad[1] else None
        else:
            x_grad, w_grad = ctx.saved_tensors
            if x_grad is not None:
                x_grad = x_grad.mul_(scale)
            if w_grad is not None:
                # scaled and rounded in one pass
                rounded = torch.empty_like(w_grad, dtype=ctx.weight_dtype)
                w_grad = torch.mul(w_grad, scale, out=rounded)
        return x_grad, w_grad, None, None, None, None, None
