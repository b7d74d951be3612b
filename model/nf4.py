"""NF4: frozen weights in 4 bits (https://arxiv.org/abs/2305.14314), kept, gathered and offloaded as such.

A row of C weights is cut into blocks of 64. Of a block is kept, in 8 bits, its largest magnitude, and of each weight,
in 4 bits, which value of the code book is nearest to weight / magnitude. The magnitudes of up to 256 blocks of one row
share a range, from the least to the greatest of them, in 255 steps; the paper's double quantization, but of a row
alone: the bits do not depend on how many ranks share a matrix. 4.14 bits a weight at C = 4,096.

Plain tensors of bytes, R rows of each: codes (R, C / 2), and scales (R, C / 64 + 8 a range): FSDP2 shards them by rows
as any parameter, and casts neither (torch 2.11 sends them as the unit's dtype, which holds every byte exactly).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # weights that share a magnitude
RANGE = 256  # blocks whose magnitudes share a range
# Quantiles of a normal distribution, scaled to -1 ... 1, with an exact zero: appendix E of the paper, to four places as
# torchao has them (https://github.com/pytorch/ao).
CODE_BOOK = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
             0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)


def scale_bytes(columns: int) -> int:
    """Bytes of scales for a row of so many weights: a byte a block, two float32 a range."""
    blocks = columns // BLOCK
    return blocks + 8 * math.ceil(blocks / RANGE)


def elements(name: str, p: Tensor) -> int:
    """Weights that a parameter stands for: codes are two in a byte, scales are none."""
    return p.numel() if p.dtype != torch.uint8 else 0 if name.endswith(".scales") else 2 * p.numel()


def codes_of(rows: Tensor) -> Tensor:
    """(R, C / 2), of weights (R, C) in float32."""
    blocks = rows.unflatten(1, (-1, BLOCK))  # (R, C / 64, 64)
    magnitude = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo().tiny)
    scaled, book = blocks / magnitude, torch.tensor(CODE_BOOK)
    nearest = torch.zeros_like(scaled, dtype=torch.uint8)
    for middle in ((book[1:] + book[:-1]) / 2).tolist():  # several times faster than to search each one's place
        nearest += scaled > middle
    first, second = nearest.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return first << 4 | second


def scales_of(rows: Tensor) -> Tensor:
    """(R, scale_bytes(C)), of weights (R, C) in float32."""
    steps, ranges = [], []
    for magnitude in rows.unflatten(1, (-1, BLOCK)).abs().amax(-1).split(RANGE, dim=1):  # (R, up to 256)
        low, high = magnitude.aminmax(dim=1, keepdim=True)
        step = (high - low) * (1 / 255)  # a GPU would divide by that otherwise than a CPU
        steps.append(((magnitude - low) / step.clamp(min=torch.finfo().tiny)).round().to(torch.uint8))
        ranges += [low, step]
    return torch.cat([*steps, torch.cat(ranges, dim=1).view(torch.uint8)], dim=1)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    """The weights (R, C), computed in float32 and rounded once. Of codes that are some columns of the whole, `first` is
    the number of their first block."""
    codes, scales = codes.to(torch.uint8), scales.to(torch.uint8)
    ranges = math.ceil(scales.shape[1] / (RANGE + 8))
    steps, low_and_step = scales.split([scales.shape[1] - 8 * ranges, 8 * ranges], dim=1)
    # a copy of its own: where these bytes lie, a float32 may not
    low_and_step = low_and_step.clone(memory_format=torch.contiguous_format).view(torch.float32)
    low, step = low_and_step.unflatten(1, (-1, 2)).unbind(-1)  # (R, ranges)
    low, step = (t.repeat_interleave(RANGE, dim=1)[:, : steps.shape[1]] for t in (low, step))
    magnitude = torch.addcmul(low, step, steps.float())[:, first : first + codes.shape[1] * 2 // BLOCK]
    # filled on the device: for a table copied from the host it would be waited for
    book = torch.stack([torch.full((), value, device=codes.device) for value in CODE_BOOK])
    pairs = torch.stack([book.repeat_interleave(16), book.repeat(16)], dim=1)  # (256, 2), by the byte
    weights = F.embedding(codes.int(), pairs).view(len(codes), -1, BLOCK)
    return (weights * magnitude[..., None]).to(dtype).flatten(1)


@functools.cache
def compiled_dequantize() -> Callable[..., Tensor]:
    return torch.compile(dequantize, fullgraph=True, dynamic=False)


@torch.library.custom_op("frozen::nf4_product", mutates_args=())
def product(x: Tensor, codes: Tensor, scales: Tensor, first: int, compiled: bool, transposed: bool = False) -> Tensor:
    """x (..., C) @ weights.T, or transposed x (..., R) @ weights, in x's dtype. No gradient of the weights.

    One operator, so that torch.compile does not see weights that forward and backward could share: it would keep them
    for backward, in 16 bits and more. It keeps the codes. compiled: the weights are made by one kernel.
    """
    weights = (compiled_dequantize() if compiled else dequantize)(codes, scales, x.dtype, first)
    return x @ weights if transposed else F.linear(x, weights)


@product.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, first: int, compiled: bool, transposed: bool = False) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2 * codes.shape[1] if transposed else len(codes))


def _keep_codes(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, codes, scales, *ctx.rest, _ = inputs
    ctx.save_for_backward(codes, scales)


def _gradient(ctx: Any, grad: Tensor) -> tuple:
    return product(grad, *ctx.saved_tensors, *ctx.rest, True), None, None, None, None, None


product.register_autograd(_gradient, setup_context=_keep_codes)
