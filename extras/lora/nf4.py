"""NF4: frozen weights in 4 bits (https://arxiv.org/abs/2305.14314), stored, all-gathered and offloaded as such.

A row of C weights is quantized in blocks of 64. A block stores its absmax in 8 bits. Each weight stores, in 4 bits, the
index of the codebook value nearest to weight / absmax. The absmax values of up to 256 blocks of one row share a range,
from their minimum to their maximum in 255 steps. This is the paper's double quantization, but within a row, so that the
bits do not depend on the number of ranks a matrix is sharded over. At C = 4,096 a weight takes 4.14 bits.

Both are uint8 tensors of R rows: codes (R, C / 2) and scales (R, C / 64 + 8 per range). FSDP2 shards them along dim 0
like any parameter and does not cast them (torch 2.11 does, to the unit's dtype, which holds every byte exactly).
"""

import functools
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ConfigError
from model.llama import Linear

BLOCK = 64  # weights that share an absmax
RANGE = 256  # blocks whose absmax values share a range
CHUNK = 2**20  # elements quantized at a time, rounded to full rows
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: appendix E of the paper, to four decimals
# as in torchao (https://github.com/pytorch/ao).
CODE_BOOK = (
    -1.0,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0.0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.7230,
    1.0,
)


def scale_bytes(columns: int) -> int:
    """Bytes of scales for a row of this many weights: one byte per block, two float32 per range."""
    blocks = columns // BLOCK
    return blocks + 8 * math.ceil(blocks / RANGE)


def codes_of(rows: Tensor) -> Tensor:
    """Quantizes float32 weights (R, C) to codes (R, C / 2)."""
    blocks = rows.unflatten(1, (-1, BLOCK))  # (R, C / 64, 64)
    magnitude = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo().tiny)
    scaled, book = blocks / magnitude, torch.tensor(CODE_BOOK)
    nearest = torch.zeros_like(scaled, dtype=torch.uint8)
    for middle in ((book[1:] + book[:-1]) / 2).tolist():
        # several times faster than a search per weight
        nearest += scaled > middle
    first, second = nearest.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return first << 4 | second


def scales_of(rows: Tensor) -> Tensor:
    """The scales (R, scale_bytes(C)) of float32 weights (R, C)."""
    steps, ranges = [], []
    for magnitude in rows.unflatten(1, (-1, BLOCK)).abs().amax(-1).split(RANGE, dim=1):
        # (R, up to 256)
        low, high = magnitude.aminmax(dim=1, keepdim=True)
        step = (high - low) * (1 / 255)  # not / 255, which GPU and CPU round differently
        steps.append(
            ((magnitude - low) / step.clamp(min=torch.finfo().tiny)).round().to(torch.uint8)
        )
        ranges += [low, step]
    return torch.cat([*steps, torch.cat(ranges, dim=1).view(torch.uint8)], dim=1)


def byte_values(device: torch.device) -> Tensor:
    """(256, 2): the two code book values that each byte of codes stands for."""
    book = torch.tensor(CODE_BOOK, device=device)
    return torch.stack([book.repeat_interleave(16), book.repeat(16)], dim=1)


# copying a table from the host synchronizes: once per device
kept_byte_values = functools.cache(byte_values)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    first: int = 0,
    values: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """The weights (R, C), computed in float32 and rounded once. For a column shard of codes, `first` is the index of
    its first block. values: byte_values() of this device. compiled: in one kernel."""
    scales = scales.to(torch.uint8)
    ranges = math.ceil(scales.shape[1] / (RANGE + 8))
    steps, low_and_step = scales.split([scales.shape[1] - 8 * ranges, 8 * ranges], dim=1)
    if any(place % 4 for place in (low_and_step.storage_offset(), *scales.stride()[:1])):
        # not aligned for float32
        low_and_step = low_and_step.clone(memory_format=torch.contiguous_format)
    values = byte_values(codes.device) if values is None else values
    function = compiled_dequantize() if compiled else _dequantize
    return function(codes, steps, low_and_step.view(torch.float32), values, dtype, first)


def _dequantize(
    codes: Tensor,
    steps: Tensor,
    low_and_step: Tensor,
    values: Tensor,
    dtype: torch.dtype,
    first: int,
) -> Tensor:
    """codes (R, C / 2), steps (R, blocks of the full row), low_and_step (R, 2 x ranges) of float32. The table and the
    floats are inputs: made in here, Inductor would give each part of them a kernel of its own."""
    low, step = low_and_step.unflatten(1, (-1, 2)).unbind(-1)  # (R, ranges)
    low, step = (t.repeat_interleave(RANGE, dim=1)[:, : steps.shape[1]] for t in (low, step))
    magnitude = torch.addcmul(low, step, steps.float())[
        :, first : first + codes.shape[1] * 2 // BLOCK
    ]
    weights = F.embedding(codes.to(torch.uint8).int(), values).view(len(codes), -1, BLOCK)
    return (weights * magnitude[..., None]).to(dtype).flatten(1)


@functools.cache
def compiled_dequantize() -> Callable[..., Tensor]:
    return torch.compile(_dequantize, fullgraph=True, dynamic=False)


@torch.library.custom_op("frozen::nf4_product", mutates_args=())
def product(
    x: Tensor, codes: Tensor, scales: Tensor, first: int, compiled: bool, transposed: bool = False
) -> Tensor:
    """x (..., C) @ weights.T, or if transposed x (..., R) @ weights, in x's dtype. The weights get no gradient.

    This is one opaque operator: otherwise torch.compile would save the dequantized weights for backward, in 16 bits or
    more. It saves the codes instead. compiled: dequantizes in one kernel.
    """
    weights = dequantize(codes, scales, x.dtype, first, kept_byte_values(codes.device), compiled)
    return x @ weights if transposed else F.linear(x, weights)


@product.register_fake
def _(
    x: Tensor, codes: Tensor, scales: Tensor, first: int, compiled: bool, transposed: bool = False
) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2 * codes.shape[1] if transposed else len(codes))


def _keep_codes(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, codes, scales, *ctx.rest, _ = inputs
    ctx.save_for_backward(codes, scales)


def _gradient(ctx: Any, grad: Tensor) -> tuple:
    return product(grad, *ctx.saved_tensors, *ctx.rest, True), None, None, None, None, None


product.register_autograd(_gradient, setup_context=_keep_codes)


class NF4Linear(Linear):
    """A frozen linear layer in NF4, in place of a plain one: `weight` holds the codes."""

    # for parameter_count(): how many weights it represents
    weights_per_element: ClassVar = {"weight": 2, "scales": 0}
    # for tensor parallelism: sharded along dimension 0 if the codes are
    sharded_with_weight = MappingProxyType({"scales": 0})
    matmuls: ClassVar = frozenset(
        {torch.ops.frozen.nf4_product.default}
    )  # for activation checkpointing

    def __init__(self, plain: Linear):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features, plain.init_std)
        rows, columns, device = plain.out_features, plain.in_features, plain.weight.device
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, scale_bytes(columns), dtype=torch.uint8, device=device)
        self.weight, self.scales = (
            nn.Parameter(codes, requires_grad=False),
            nn.Parameter(scales, requires_grad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return product(
            x, self.weight, self.scales, self.first_input // BLOCK, torch.compiler.is_compiling()
        )

    # pyrefly: ignore[bad-override-mutable-attribute]  # of a class, never set
    def quantize(
        self,
        name: str,
        offsets: tuple[int, ...],
        out: Tensor,
        read_or_draw: Callable[[str, tuple[int, ...], Tensor, torch.Size], None],
    ) -> None:
        """For initialize(): fills `out`, a rectangle of codes or scales, from the weight that read_or_draw() gives. It
        takes a few full rows at a time: this bounds memory, and the bits do not depend on the mesh."""
        weight, shape = (
            f"{name.rpartition('.')[0]}.weight",
            torch.Size((self.out_features, self.in_features)),
        )
        begin = 0
        for part in out.split(max(1, CHUNK // shape[1])):
            rows = torch.empty(len(part), shape[1], device=out.device)
            read_or_draw(weight, (offsets[0] + begin, 0), rows, shape)
            if not rows.sum().isfinite():
                raise ConfigError(f"{weight}: holds values that are not finite")
            packed = codes_of(rows) if name == weight else scales_of(rows)
            part.copy_(packed[:, offsets[1] :][:, : part.shape[1]])
            begin += len(part)

    def rounded(self, weight: Tensor) -> Tensor:
        """A float32 weight as this layer holds it."""
        return dequantize(codes_of(weight), scales_of(weight), torch.float32)
