"""Cross entropy as (sum, count), chunked over tokens: the logits of one chunk exist at a time.

Shapes: N tokens, D width, V vocabulary or the rows of it that this rank has, C tokens of a chunk.

Beside inputs and gradients it holds C * V logits in the weight's dtype (not compiled: and such in float32), over which
their gradient is written; of several chunks also V * D of the weight's gradient in float32. Compiled on a GPU, what
lies between the products reads the logits two or three times and writes them once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config import IGNORE

LossSums = dict[str, Tensor]  # over the tokens: "loss" is minimized, and has the others as its parts, to be logged
# Tokens. On a GPU many, as each chunk costs a pass over the (V, D) gradient: compiled at V = 128,256, 2 GiB of bfloat16
# logits. On a CPU few, so that the logits of a small vocabulary stay in its cache.
CHUNK = {"cpu": 256, "cuda": 2048, "cuda compiled": 8192}


@dataclass(frozen=True)
class VocabularyShard:
    """Where `weight` holds some rows of the vocabulary, and other ranks the others: all get the same loss, and a
    gradient of x that is to be added up over them."""

    first: int  # row of the vocabulary that this rank's begin with
    gather: Callable[[Tensor], Tensor]  # (...) -> (ranks, ...): every rank's


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None, compile: bool = False,
                          shard: VocabularyShard | None = None) -> tuple[LossSums, Tensor]:
    """({"loss": sum over the tokens, in float32}, number of valid targets), scalars all, of logits x @ weight.T.

    x (N, D) and weight (V, D) of one dtype, targets (N) with IGNORE where there is none. Sums, not means: means of
    unequal parts cannot be averaged.
    """
    compile = compile and (x.is_cuda or x.dtype != torch.float32)  # a CPU's own float32 kernels are faster
    chunk = chunk or CHUNK["cuda compiled" if x.is_cuda and compile else x.device.type]
    total = _ChunkedCrossEntropy.apply(x, weight, targets, chunk, compile, shard, torch.is_grad_enabled())
    return {"loss": total}, (targets != IGNORE).sum()


def softmax_parts(logits: Tensor, index: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(exponentials of the logits less their maximum, this maximum, their sum, the target's logit), in float32, of
    logits (C, V) and targets (C, 1); (C, 1) the last three. Float32 logits are written over. Compiled, there are no
    exponentials: they cost less to compute again than to keep."""
    wide = logits.float()
    top, chosen = wide.amax(-1, keepdim=True), wide.gather(-1, index)
    if torch.compiler.is_compiling():
        return None, top, (wide - top).exp().sum(-1, keepdim=True), chosen
    exponentials = wide.sub_(top).exp_()
    return exponentials, top, exponentials.sum(-1, keepdim=True), chosen


def to_slope(logits: Tensor, index: Tensor, exponentials: Tensor | None, top: Tensor, sums: Tensor, chosen: Tensor,
             own: Tensor, scale: Tensor) -> Tensor:
    """The gradient of the loss by the logits, (softmax - one-hot) * scale, written over the logits. (C, 1): chosen, the
    logit at index; own, 1.0 where that is the target's; scale."""
    factor = scale / sums
    at_target = (chosen - top).exp() * factor - scale * own  # in float32: of a sure prediction little is left
    if exponentials is None:
        exponentials = (logits.float() - top).exp()
    logits.copy_(exponentials.mul_(factor))
    return logits.scatter_(-1, index, at_target.to(logits.dtype))


@functools.cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Of several chunks the gradients are computed in the forward pass, while a chunk's logits exist: recomputing them
    in backward would cost a third more in the head. Backward follows at once, so the gradients do not live longer. A
    single chunk's logits wait for it, and for its scale."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, compile: bool,
                shard: VocabularyShard | None, grad: bool) -> Tensor:
        ctx.single, ctx.dtype = len(x) <= chunk, weight.dtype
        parts, ctx.to_slope = map(compiled if compile else lambda f: f, (softmax_parts, to_slope))
        needs_x, needs_weight = (grad and needed for needed in ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_grad = torch.empty_like(x) if needs_x and not ctx.single else None
        # Summed over the chunks in float32 and rounded once, in backward: bfloat16 would lose each chunk's low bits.
        w_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and not ctx.single else None
        for start in range(0, len(x), chunk):
            part, target = x[start : start + chunk], targets[start : start + chunk, None]
            valid, place = (target != IGNORE).float(), target - (shard.first if shard else 0)  # (C, 1)
            own = ((place >= 0) & (place < len(weight))).float()
            index = place.clamp(0, len(weight) - 1)
            logits = part @ weight.T  # (C, V)
            exponentials, top, sums, chosen = parts(logits, index)
            log_sum, of_target = sums.log() + top, chosen
            if shard:
                tops, sums_, logits_ = shard.gather(torch.stack([top, sums, chosen * own])).unbind(1)  # (ranks, C, 1)
                highest = tops.amax(0)
                whole = (sums_ * (tops - highest).exp()).sum(0)
                log_sum, of_target = whole.log() + highest, logits_.sum(0)
                sums = whole * (highest - top).exp()  # infinite where this rank's logits are far below: its share is 0
            total += ((log_sum - of_target) * valid).sum()
            if ctx.single and (needs_x or needs_weight):
                ctx.save_for_backward(x, weight, valid, logits, index, exponentials, top, sums, chosen, own)
                return total
            if x_grad is None and w_grad is None:
                continue
            slope = ctx.to_slope(logits, index, exponentials, top, sums, chosen, own, valid)
            if x_grad is not None:
                torch.mm(slope, weight, out=x_grad[start : start + chunk])
            if w_grad is not None and x.is_cuda and x.dtype != torch.float32:
                torch.addmm(w_grad, slope.T, part, out_dtype=torch.float32, out=w_grad)  # a CPU has to widen first
            elif w_grad is not None:
                w_grad.addmm_(slope.T.float(), part.float())
        ctx.save_for_backward(x_grad, w_grad)
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):
        if ctx.single:
            x, weight, valid, *parts = ctx.saved_tensors
            slope = ctx.to_slope(*parts, valid * scale)
            x_grad = slope @ weight if ctx.needs_input_grad[0] else None
            w_grad = slope.T @ x if ctx.needs_input_grad[1] else None
        else:
            x_grad, w_grad = ctx.saved_tensors
            if x_grad is not None:
                x_grad = x_grad.mul_(scale)
            if w_grad is not None:  # scaled and rounded in one pass
                w_grad = torch.mul(w_grad, scale, out=torch.empty_like(w_grad, dtype=ctx.dtype))
        return x_grad, w_grad, None, None, None, None, None
