"""Cross entropy as (sum, count), chunked over tokens: only one chunk's logits exist at a time.

Shapes: N tokens, D model dimension, V vocabulary or this rank's rows of it, C tokens of a chunk.

Besides inputs and gradients, memory holds C * V logits in the weight's dtype, which their gradient overwrites. Eager
mode adds C * V in float32; several chunks add V * D for the weight's gradient in float32. Compiled on a GPU, the
elementwise part between the matrix products reads the logits two or three times and writes them once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config import IGNORE

# summed over tokens. "loss" is minimized; any others are parts of it, only logged
LossSums = dict[str, Tensor]
# In tokens. Large on a GPU, as each chunk costs a pass over the (V, D) gradient: compiled at V = 128,256, bfloat16
# logits take 2 GiB. Small on a CPU, so that the logits of a small vocabulary fit its cache.
CHUNK = {"cpu": 256, "cuda": 2048, "cuda compiled": 8192}


@dataclass(frozen=True)
class Shard:
    """Which rows of the vocabulary `weight` has: all of them. parallel/tensor.py has a class for a part: all ranks get
    the same loss. Each rank's gradient of x is partial: it must be summed over the ranks."""

    first: int  # of the rows

    def combine(self, top: Tensor, sums: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(C, 1) each, from softmax_parts() of these rows; chosen: 0 where the target is not one of them. Returns
        logsumexp and target logit over all rows, and the sum of all exponentials relative to these rows' top."""
        return sums.log() + top, chosen, sums


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    compile: bool = False,
    shard: Shard | None = None,
) -> tuple[LossSums, Tensor]:
    """({"loss": sum over the tokens, in float32}, number of valid targets), as scalars, for logits x @ weight.T.

    x (N, D) and weight (V, D) have one dtype; targets (N) are IGNORE where there is none. Returns sums, not means:
    averaging means over unequal token counts would be wrong.
    """
    # eager float32 is faster on a CPU
    compile = compile and (x.is_cuda or x.dtype != torch.float32)
    chunk = chunk or CHUNK["cuda compiled" if x.is_cuda and compile else x.device.type]
    total = _ChunkedCrossEntropy.apply(
        x, weight, targets, chunk, compile, shard or Shard(0), torch.is_grad_enabled()
    )
    return {"loss": total}, (targets != IGNORE).sum()


def softmax_parts(logits: Tensor, index: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(exp(logits - max), max, sum of the exponentials, target logit) in float32, for logits (C, V) and target indices
    (C, 1); the last three are (C, 1). Overwrites float32 logits. Compiled, the exponentials are None: recomputing them
    costs less than saving them."""
    wide = logits.float()
    top, chosen = wide.amax(-1, keepdim=True), wide.gather(-1, index)
    if torch.compiler.is_compiling():
        return None, top, (wide - top).exp().sum(-1, keepdim=True), chosen
    exponentials = wide.sub_(top).exp_()
    return exponentials, top, exponentials.sum(-1, keepdim=True), chosen


def to_slope(
    logits: Tensor,
    index: Tensor,
    exponentials: Tensor | None,
    top: Tensor,
    sums: Tensor,
    chosen: Tensor,
    own: Tensor,
    scale: Tensor,
) -> Tensor:
    """The loss's gradient with respect to the logits, (softmax - one-hot) * scale; overwrites the logits. (C, 1) each:
    chosen, the logit at index; own, 1.0 where that is the target's logit; scale."""
    factor = scale / sums
    at_target = (chosen - top).exp() * factor - scale * own  # float32: confident predictions cancel
    if exponentials is None:
        # One in-place kernel. For scatter_() Inductor would allocate a second (C, V) buffer and copy it back.
        columns = torch.arange(logits.shape[-1], device=logits.device)
        elsewhere = (logits.float() - top).exp() * factor
        return logits.copy_(torch.where(columns == index, at_target, elsewhere))
    logits.copy_(exponentials.mul_(factor))
    return logits.scatter_(-1, index, at_target.to(logits.dtype))


@functools.cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """With several chunks, forward computes the gradients while a chunk's logits exist: recomputing the logits in
    backward would cost a third more in the head. The head's backward follows immediately, so gradients live no longer.
    With a single chunk, the logits are saved for backward, which applies its scale."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        compile: bool,
        shard: Shard,
        grad: bool,
    ) -> Tensor:
        ctx.single, ctx.dtype = len(x) <= chunk, weight.dtype
        parts, ctx.to_slope = map(compiled if compile else lambda f: f, (softmax_parts, to_slope))
        needs_x, needs_weight = (grad and needed for needed in ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_grad = torch.empty_like(x) if needs_x and not ctx.single else None
        # Accumulated over chunks in float32, rounded once, in backward: bfloat16 would lose each chunk's low bits.
        w_grad = (
            torch.zeros_like(weight, dtype=torch.float32)
            if needs_weight and not ctx.single
            else None
        )
        for start in range(0, len(x), chunk):
            logits = exponentials = slope = None  # free the previous chunk's before the next matmul
            part, target = x[start : start + chunk], targets[start : start + chunk, None]
            valid, place = (target != IGNORE).float(), target - shard.first  # (C, 1)
            own = ((place >= 0) & (place < len(weight))).float()
            index = place.clamp(0, len(weight) - 1)
            logits = part @ weight.T  # (C, V)
            exponentials, top, sums, chosen = parts(logits, index)
            log_sum, of_target, sums = shard.combine(top, sums, chosen * own)
            total += ((log_sum - of_target) * valid).sum()
            if ctx.single and (needs_x or needs_weight):
                ctx.save_for_backward(
                    x, weight, valid, logits, index, exponentials, top, sums, chosen, own
                )
                return total
            if x_grad is None and w_grad is None:
                continue
            slope = ctx.to_slope(logits, index, exponentials, top, sums, chosen, own, valid)
            if x_grad is not None:
                torch.mm(slope, weight, out=x_grad[start : start + chunk])
            if w_grad is not None and x.is_cuda and x.dtype != torch.float32:
                # a CPU must upcast first
                torch.addmm(w_grad, slope.T, part, out_dtype=torch.float32, out=w_grad)
            elif w_grad is not None:
                w_grad.addmm_(slope.T.float(), part.float())
        ctx.save_for_backward(x_grad, w_grad)
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient per output
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
