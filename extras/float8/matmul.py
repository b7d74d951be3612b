"""Float8 matrix products (https://arxiv.org/abs/2209.05433) with dynamic scaling of each operand.

    x (M, K) @ weight (N, K).T        each operand is scaled so that its amax becomes float8's maximum, and rounded to
                                      8 bits; sums are in float32; the result is multiplied by the inverse scales

Two recipes, named as in torchao (https://github.com/pytorch/ao/tree/main/torchao/float8):

    tensorwise    one scale per tensor. e4m3 (3 mantissa bits, 2^-9 ... 448) for inputs and weights; e5m2 (2 bits,
                  2^-16 ... 57,344) for gradients, whose small values would underflow in e4m3
    rowwise       one scale per row along the contracted dimension, so forward and the two products of backward
                  each scale their operands anew. e4m3 throughout: a row has less dynamic range than a tensor.
                  Scales are powers of two, so that a value rounds the same along rows and columns

On a GPU torch._scaled_mm multiplies. Elsewhere the same 8-bit values are multiplied in float32, which holds their
products exactly. Shapes: M tokens, K input features, N output features.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from config import ConfigError
from model.llama import Linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
aten = torch.ops.aten
# float8 values (M, N); inverse scale (1, 1), (M, 1) or (1, N) in float32
Scaled = tuple[Tensor, Tensor]


def float8_matrices(blocks: nn.Module, recipe: str, device_type: str) -> list[Linear]:
    """The linear layers to multiply in float8. 16 must divide both dimensions, as the kernels require. On a GPU they
    must be large enough to win: torchao 0.18's rule from H100 timings (float8_linear_utils: _auto_filter_for_recipe)
    skips K <= 4,096 with N <= 1,024 (tensorwise); N <= 2,048, K <= 1,024, N <= 4,096 with K <= 2,048 (rowwise).
    """

    def wins(n: int, k: int) -> bool:
        if device_type != "cuda":
            return True
        return (
            k > 4096 or n > 1024
            if recipe == "tensorwise"
            else n > 2048 and k > 1024 and (n > 4096 or k > 2048)
        )

    linears = (
        [module for module in blocks.modules() if isinstance(module, Linear)]
        if recipe != "none"
        else []
    )
    return [
        linear
        for linear in linears
        if (n := linear.out_features) % 16 == (k := linear.in_features) % 16 == 0 and wins(n, k)
    ]


def use_float8(blocks: nn.Module, recipe: str, device_type: str) -> None:
    """Replaces float8_matrices() by Float8Linear layers, in place. Raises ConfigError if there are none."""
    chosen = float8_matrices(blocks, recipe, device_type)
    if recipe != "none" and not chosen:
        raise ConfigError(
            f'[parallel] float8 = "{recipe}": no matrix of the blocks is one for 8 bits: 16 must divide '
            'both sides, and on a GPU they must be large enough to win (extras/float8/matmul.py); use "none"'
        )
    for path, linear in [*blocks.named_modules()]:
        if linear in chosen:
            parent, _, name = path.rpartition(".")
            setattr(blocks.get_submodule(parent), name, Float8Linear(linear, recipe))


class Float8Weight(Tensor):
    """A weight all-gathered in float8. It reports `dtype`, which its gradient has. The module holds the scale:
    torch.compile mistracks weights with two inner tensors, and saves a transposed copy of some for backward."""

    @staticmethod
    def __new__(cls, qdata: Tensor, dtype: torch.dtype):
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, dtype: torch.dtype):
        self.qdata = qdata

    def __repr__(self, **unused) -> str:
        return f"Float8Weight({self.qdata})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:  # for torch.compile
        return ["qdata"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, *unused
    ) -> "Float8Weight":
        return Float8Weight(inner["qdata"], dtype)

    @classmethod
    # pyrefly: ignore[bad-override]  # Tensor's is a placeholder without a signature
    def __torch_dispatch__(cls, operator, types, args, kwargs=None):
        weight, *rest = args
        if operator in (aten.detach.default, aten.alias.default, aten.as_strided.default):
            # all that FSDP2 calls
            return cls(operator(weight.qdata, *rest), weight.dtype)
        raise TypeError(f"{operator} of a weight in 8 bits")


def factor_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scale that maps the amax `largest` to the dtype's maximum. Computed in float64, because compiled
    float32 division is off by one bit."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()


def round_to(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # clamp: until torch 2.12 larger values became NaN
    return (x.float() * factor).clamp(-limit, limit).to(dtype)


def scaled(x: Tensor, dtype: torch.dtype, rowwise: bool, dim: int) -> Scaled:
    """Quantizes x. dim: the contracted dimension, along which rowwise takes the amax."""
    factor = factor_of(x.abs().amax(dim if rowwise else (0, 1), keepdim=True), dtype)
    if rowwise:  # round down to a power of two: clear the mantissa
        factor = (factor.view(torch.int32) & -0x800000).view(torch.float32)
    return round_to(x, factor, dtype), factor.reciprocal()


def transposed(x: Scaled) -> Scaled:
    return x[0].t(), x[1].t()


def product(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """(M, K) @ (K, N) -> (M, N). fast: use_fast_accum (sums with fewer bits), as torchao does in forward only."""
    (a, a_scale), (b, b_scale) = left, right
    if not a.is_cuda:
        return (a.float() @ b.float() * (a_scale * b_scale)).to(dtype)
    # the only layouts that the kernels take
    a, b, after = (a.contiguous(), b.t().contiguous().t(), None)
    if b_scale.numel() > 1 and not fast:
        # the rowwise kernel is slow here; apply power-of-two scales afterwards
        after, one = a_scale * b_scale, torch.ones((1, 1), device=a.device)
        a_scale, b_scale = one, one
    out = torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return (out if after is None else out * after).to(dtype)


def scaled_weight(weight: Tensor, scale: Tensor, rowwise: bool, dim: int) -> Scaled:
    return (
        (weight.qdata, scale)
        if isinstance(weight, Float8Weight)
        else scaled(weight, E4M3, rowwise, dim)
    )


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        ctx.rowwise = rowwise
        return product(
            scaled(x, E4M3, rowwise, 1),
            transposed(scaled_weight(weight, scale, rowwise, 1)),
            x.dtype,
            True,
        )

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch passes one gradient per output
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, weight, scale), rowwise, dtype = (
            ctx.saved_tensors,
            ctx.rowwise,
            E4M3 if ctx.rowwise else E5M2,
        )
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(
                scaled(grad, dtype, rowwise, 1), scaled_weight(weight, scale, rowwise, 0), x.dtype
            )
        if ctx.needs_input_grad[1]:
            of_weight = product(
                transposed(scaled(grad, dtype, rowwise, 0)), scaled(x, E4M3, rowwise, 0), x.dtype
            )
        return of_x, of_weight, None, None


class Float8Linear(Linear):
    """A linear layer that multiplies in float8, with the weight of the plain one that it replaces."""

    matmuls: ClassVar = frozenset({aten._scaled_mm.default})  # for activation checkpointing

    def __init__(self, plain: Linear, recipe: str):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features, plain.init_std)
        self.weight, self.recipe = plain.weight, recipe
        self.scale: Tensor | None = None  # of a weight that is all-gathered in float8

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # once: replicated parameters are cast at each access
        return float8_linear(x.to(weight.dtype), weight, self.scale, self.recipe)


def float8_linear(x: Tensor, weight: Tensor, scale: Tensor | None, recipe: str) -> Tensor:
    """x (..., K) @ weight (N, K).T -> (..., N) in x's dtype. scale: the inverse scale of a Float8Weight."""
    return Product.apply(x.flatten(0, -2), weight, scale, recipe == "rowwise").unflatten(
        0, x.shape[:-1]
    )
