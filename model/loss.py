"""Cross entropy as (sum, count), chunked over tokens: float32 logits exist for one chunk at a time.

Shapes: N tokens, D width, V vocabulary, C tokens of a chunk.
"""

import torch
from torch import Tensor

from config import IGNORE

LossSums = dict[str, Tensor]  # over the tokens: "loss" is minimized, and has the others as its parts, to be logged
CHUNK = 2048  # tokens: 1 GiB of float32 logits at V = 128,256; smaller ones cost a pass over the (V, D) gradient each


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK) -> tuple[LossSums, Tensor]:
    """({"loss": sum over the tokens, in float32}, number of valid targets), scalars all, of logits x @ weight.T.

    x (N, D) and weight (V, D) of one dtype, targets (N) with IGNORE where there is none. Sums, not means: means of
    unequal parts cannot be averaged.
    """
    total = _ChunkedCrossEntropy.apply(x, weight, targets, chunk, torch.is_grad_enabled())
    return {"loss": total}, (targets != IGNORE).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, while a chunk's logits exist: recomputing them in backward would cost
    a third more in the head. Backward follows at once, so the gradients do not live longer."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, grad: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_grad = torch.empty_like(x) if grad and ctx.needs_input_grad[0] else None
        # Summed over the chunks in float32 and rounded once, in backward: bfloat16 would lose each chunk's low bits.
        w_grad = torch.zeros_like(weight, dtype=torch.float32) if grad and ctx.needs_input_grad[1] else None
        for start in range(0, len(x), chunk):
            part, target = x[start : start + chunk], targets[start : start + chunk]
            valid = (target != IGNORE)[:, None]  # (C, 1)
            index = target[:, None].clamp(min=0)  # (C, 1)
            logits = (part @ weight.T).float()  # (C, V)
            logits -= logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, index)  # (C, 1)
            sums = logits.exp_().sum(-1, keepdim=True)  # (C, 1); one exponential serves loss and gradient
            total += ((sums.log() - chosen) * valid).sum()
            if x_grad is None and w_grad is None:
                continue
            # d loss / d logits = softmax - one-hot, in place of the logits
            slope = logits.mul_(valid / sums).scatter_add_(-1, index, -valid.float()).to(x.dtype)
            if x_grad is not None:
                torch.mm(slope, weight, out=x_grad[start : start + chunk])
            if w_grad is not None and x.is_cuda and x.dtype != torch.float32:
                w_grad += torch.mm(slope.T, part, out_dtype=torch.float32)  # not rounded; a CPU has to widen first
            elif w_grad is not None:
                w_grad.addmm_(slope.T.float(), part.float())
        ctx.save_for_backward(x_grad, w_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):
        x_grad, w_grad = ctx.saved_tensors
        if x_grad is not None:
            x_grad = (x_grad * scale).to(x_grad.dtype)
        if w_grad is not None:
            w_grad = (w_grad * scale).to(ctx.weight_dtype)
        return x_grad, w_grad, None, None, None
