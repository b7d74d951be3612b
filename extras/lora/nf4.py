"""NF4: frozen weights (https://arxiv.org/abs/2305.14314), stored and all-gathered in 4 bits.

A row of C weights is quantized in blocks of 64. A block stores its absmax in 8 bits. Each weight
stores, in 4 bits, the index of the code book value nearest to weight / absmax. The absmax values of
up to 256 blocks of one row share a range, from their minimum to their maximum in 255 steps. This is
the paper's double quantization, but within a row, so that the bits do not depend on the number of
ranks that a matrix is sharded over. At C = 4,096 a weight takes 4.14 bits.

A matrix is stored as two uint8 tensors:

    codes (R, C/2)                  two weights per byte
    scales (R, C/64 + 8 * ranges)   one byte per block, then two float32 per range: minimum and step

FSDP2 shards them along dim 0 like any parameter and does not cast them. (torch 2.11 casts them to
the unit's dtype, which represents every byte exactly.)

Shapes: R rows, C columns, N blocks of a row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ConfigError
from model.llama import Linear, check_has_weight_alone

BLOCK = 64  # number of weights that share an absmax
RANGE = 256  # number of blocks whose absmax values share a range
CHUNK = 2**20  # elements to quantize at a time, rounded to full rows
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: appendix E of the
# paper, to four decimals as in torchao (https://github.com/pytorch/ao).
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
    """The bytes of scales for a row of `columns` weights: one per block, two float32 per range."""
    blocks = columns // BLOCK
    return blocks + 8 * math.ceil(blocks / RANGE)


def codes_of(rows: Tensor) -> Tensor:
    """Quantizes float32 weights (R, C) to codes (R, C/2)."""
    blocks = rows.unflatten(1, (-1, BLOCK))  # (R, N, 64)
    absmax = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo().tiny)  # (R, N, 1)
    scaled = blocks / absmax
    book = torch.tensor(CODE_BOOK)
    index = torch.zeros_like(scaled, dtype=torch.uint8)
    # Counting the midpoints below each weight is several times faster than a search.
    for midpoint in ((book[1:] + book[:-1]) / 2).tolist():
        index += scaled > midpoint
    first, second = index.flatten(1).unflatten(1, (-1, 2)).unbind(-1)  # (R, C/2) each
    return first << 4 | second


def scales_of(rows: Tensor) -> Tensor:
    """The scales (R, scale_bytes(C)) of float32 weights (R, C)."""
    absmax = rows.unflatten(1, (-1, BLOCK)).abs().amax(-1)  # (R, C) -> (R, N, 64) -> (R, N)
    bytes_of_blocks = []
    ranges = []
    for in_range in absmax.split(RANGE, dim=1):  # (R, up to 256)
        low, high = in_range.aminmax(dim=1, keepdim=True)
        step = (high - low) * (1 / 255)  # not / 255, which GPU and CPU round differently
        steps = (in_range - low) / step.clamp(min=torch.finfo().tiny)
        bytes_of_blocks.append(steps.round().to(torch.uint8))
        ranges += [low, step]
    return torch.cat([*bytes_of_blocks, torch.cat(ranges, dim=1).view(torch.uint8)], dim=1)


def byte_values(device: torch.device) -> Tensor:
    """The two code book values that each byte of codes encodes, (256, 2)."""
    book = torch.tensor(CODE_BOOK, device=device)
    return torch.stack([book.repeat_interleave(16), book.repeat(16)], dim=1)


# copying the table from the host synchronizes, so do it once per device
cached_byte_values = functools.cache(byte_values)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    first_block: int = 0,
    values: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """The weights (R, C), computed in float32 and rounded once.

    `codes` may be a column shard, which begins at first_block; `scales` belong to full rows.
    `values` is byte_values() on this device. compiled=True uses one kernel.
    """
    scales = scales.to(torch.uint8)
    ranges = math.ceil(scales.shape[1] / (RANGE + 8))
    steps, low_and_step = scales.split([scales.shape[1] - 8 * ranges, 8 * ranges], dim=1)
    if low_and_step.storage_offset() % 4 or scales.stride(0) % 4:
        # align the bytes for float32
        low_and_step = low_and_step.clone(memory_format=torch.contiguous_format)
    if values is None:
        values = byte_values(codes.device)
    function = compiled_dequantize() if compiled else _dequantize
    return function(codes, steps, low_and_step.view(torch.float32), values, dtype, first_block)


def _dequantize(
    codes: Tensor,
    steps: Tensor,
    low_and_step: Tensor,
    values: Tensor,
    dtype: torch.dtype,
    first_block: int,
) -> Tensor:
    """Shapes: codes (R, C/2), steps (R, blocks of the full row), low_and_step (R, 2 * ranges) in
    float32.

    The table and the floats are inputs. If this function created them, Inductor would compute each
    part of them in a separate kernel.
    """
    blocks = codes.shape[1] * 2 // BLOCK
    low, step = low_and_step.unflatten(1, (-1, 2)).unbind(-1)  # (R, ranges) each
    low = low.repeat_interleave(RANGE, dim=1)[:, : steps.shape[1]]  # (R, blocks of the full row)
    step = step.repeat_interleave(RANGE, dim=1)[:, : steps.shape[1]]
    absmax = torch.addcmul(low, step, steps.float())
    absmax = absmax[:, first_block : first_block + blocks]  # (R, N)
    weights = F.embedding(codes.to(torch.uint8).int(), values)  # (R, C/2) -> (R, C/2, 2)
    weights = weights.view(len(codes), -1, BLOCK)  # (R, N, 64)
    return (weights * absmax[..., None]).to(dtype).flatten(1)  # (R, C)


@functools.cache
def compiled_dequantize() -> Callable[..., Tensor]:
    return torch.compile(_dequantize, fullgraph=True, dynamic=False)


@torch.library.custom_op("frozen::nf4_product", mutates_args=())
def nf4_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    first_block: int,
    compiled: bool,
    transposed: bool = False,
) -> Tensor:
    """x (..., C) @ weights.T or, if transposed, x (..., R) @ weights, in x's dtype.

    The weights get no gradient. This is one opaque operator, which saves the codes for backward.
    Otherwise torch.compile would save the dequantized weights, in 16 bits or more. compiled=True
    dequantizes in one kernel.
    """
    values = cached_byte_values(codes.device)
    weights = dequantize(codes, scales, x.dtype, first_block, values, compiled)
    return x @ weights if transposed else F.linear(x, weights)


@nf4_matmul.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    first_block: int,
    compiled: bool,
    transposed: bool = False,
) -> Tensor:
    columns = 2 * codes.shape[1] if transposed else len(codes)
    return x.new_empty(*x.shape[:-1], columns)


def _save_codes(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, codes, scales, ctx.first_block, ctx.compiled, _ = inputs
    ctx.save_for_backward(codes, scales)


def _gradient(ctx: Any, grad: Tensor) -> tuple:
    codes, scales = ctx.saved_tensors
    x_grad = nf4_matmul(grad, codes, scales, ctx.first_block, ctx.compiled, transposed=True)
    return x_grad, None, None, None, None, None


nf4_matmul.register_autograd(_gradient, setup_context=_save_codes)


def quantize_projections(module: nn.Module) -> None:
    """Replaces a module's children that are linear layers by NF4Linear, in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, Linear):
            check_has_weight_alone(child, name, '[lora] base_dtype = "nf4"')
            setattr(module, name, NF4Linear(child))


class NF4Linear(Linear):
    """A frozen linear layer in NF4, which replaces a plain one.

    `weight` (outputs, inputs / 2) stores the codes, and `scales` (outputs, scale_bytes(inputs)) the
    scales. Scales belong to full rows even if tensor parallelism shards the columns.
    """

    matmuls: ClassVar = {torch.ops.frozen.nf4_product.default}

    def __init__(self, plain: Linear):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features)
        self.init = plain.init
        rows, columns = plain.weight.shape
        device = plain.weight.device
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, scale_bytes(columns), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        first_block = self.first_input // BLOCK
        compiled = torch.compiler.is_compiling()
        return nf4_matmul(x, self.weight, self.scales, first_block, compiled)

    # pyrefly: ignore[bad-override-mutable-attribute]  # None for other layers
    def quantize(
        self,
        name: str,
        offsets: tuple[int, ...],
        out: Tensor,
        read_or_draw: Callable[[str, tuple[int, ...], Tensor, torch.Size], None],
    ) -> None:
        """Fills `out`, the rectangle at `offsets` of the parameter `name` (codes or scales).

        read_or_draw(name, offsets, out, shape) supplies the weight, see initialize() in
        parallel/materialize.py. Quantizes a few full rows at a time, which bounds memory and makes
        the bits independent of the mesh.
        """
        weight = f"{name.rpartition('.')[0]}.weight"
        shape = torch.Size((self.out_features, self.in_features))
        first_row, first_column = offsets
        for out_rows in out.split(max(1, CHUNK // shape[1])):
            rows = torch.empty(len(out_rows), shape[1], device=out.device)
            read_or_draw(weight, (first_row, 0), rows, shape)
            if not rows.sum().isfinite():
                raise ConfigError(f"{weight}: holds values that are not finite")
            packed = codes_of(rows) if name == weight else scales_of(rows)
            out_rows.copy_(packed[:, first_column : first_column + out.shape[1]])
            first_row += len(out_rows)

    def rounded(self, weight: Tensor) -> Tensor:
        return dequantize(codes_of(weight), scales_of(weight), torch.float32)
