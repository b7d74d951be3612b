"""Float8 matmuls (https://arxiv.org/abs/2209.05433) with dynamic scaling of each operand.

    x (M, K) @ weight (N, K).T    each operand is scaled so that its amax becomes float8's maximum,
                                  and rounded to 8 bits; sums are in float32; the result is
                                  multiplied by the inverse scales

Two recipes, named as in torchao (https://github.com/pytorch/ao/tree/main/torchao/float8):

    tensorwise    one scale per tensor. e4m3 (3 mantissa bits, 2^-9 ... 448) for inputs and weights;
                  e5m2 (2 bits, 2^-16 ... 57,344) for gradients, whose small values would underflow
                  in e4m3
    rowwise       one scale per row along the contracted dimension, so forward and the two matmuls
                  of backward each compute their own scales. e4m3 throughout, since a row has less
                  dynamic range than a tensor. Scales are powers of two, so that a value rounds the
                  same along rows and columns

On a GPU, torch._scaled_mm multiplies. Elsewhere the same 8-bit values are multiplied in float32,
which represents their products exactly.

Shapes: M tokens, K input features, N output features.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from config import ConfigError
from model.llama import Linear, check_has_weight_alone

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
aten = torch.ops.aten


class Scaled(NamedTuple):
    """A matrix in float8, and the float32 factor that restores its values."""

    values: Tensor
    inverse_scale: Tensor  # (1, 1), or one per row or column

    def t(self) -> "Scaled":
        return Scaled(self.values.t(), self.inverse_scale.t())


def float8_matrices(blocks: nn.Module, recipe: str, device_type: str) -> list[Linear]:
    """The linear layers to multiply in float8.

    The kernels require that 16 divides both dimensions. On a GPU, the layers must also be large
    enough to be faster in float8.
    """
    if recipe == "none":
        return []
    chosen = []
    for module in blocks.modules():
        if not isinstance(module, Linear):
            continue
        n = module.out_features
        k = module.in_features
        if n % 16 or k % 16:
            continue
        if device_type != "cuda" or is_faster(n, k, recipe):
            chosen.append(module)
    return chosen


def is_faster(n: int, k: int, recipe: str) -> bool:
    """Whether a weight (N, K) multiplies faster in float8 than in bfloat16.

    This is torchao 0.18's rule, from timings on an H100 (_auto_filter_for_recipe in
    float8_linear_utils).
    """
    if recipe == "tensorwise":
        return k > 4096 or n > 1024
    return n > 2048 and k > 1024 and (n > 4096 or k > 2048)


def use_float8(blocks: nn.Module, recipe: str, device_type: str) -> None:
    """Replaces the layers of float8_matrices() by Float8Linear, in place.

    Raises ConfigError if there are none.
    """
    chosen = float8_matrices(blocks, recipe, device_type)
    if recipe != "none" and not chosen:
        raise ConfigError(
            f'[parallel] float8 = "{recipe}": no matrix of the blocks is one for 8 bits: 16 must '
            "divide both sides, and on a GPU they must be large enough to win "
            '(extras/float8/matmul.py); use "none"'
        )
    for path, module in list(blocks.named_modules()):
        if module in chosen:
            check_has_weight_alone(module, path, f'[parallel] float8 = "{recipe}"')
            parent, _, name = path.rpartition(".")
            setattr(blocks.get_submodule(parent), name, Float8Linear(module, recipe))


class Float8Weight(Tensor):
    """A weight that was all-gathered in float8. Its `dtype` is the dtype of its gradient.

    The layer stores the scale. torch.compile mistracks weights with two inner tensors, and saves a
    transposed copy of some for backward.
    """

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
        # FSDP2 calls only these
        if operator in (aten.detach.default, aten.alias.default, aten.as_strided.default):
            return cls(operator(weight.qdata, *rest), weight.dtype)
        raise TypeError(f"{operator} of a weight in 8 bits")


def factor_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scale that maps the amax `largest` to the dtype's maximum.

    Computed in float64, because compiled float32 division is off by one bit.
    """
    return (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()


def round_to(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    # before torch 2.12, the conversion turned larger values into NaN
    return (x.float() * factor).clamp(-limit, limit).to(dtype)


def scaled(x: Tensor, dtype: torch.dtype, rowwise: bool, dim: int) -> Scaled:
    """Quantizes x. `dim` is the contracted dimension, over which rowwise computes the amax."""
    amax = x.abs().amax(dim if rowwise else (0, 1), keepdim=True)
    factor = factor_of(amax, dtype)
    if rowwise:  # round down to a power of two: clear the mantissa
        factor = (factor.view(torch.int32) & -0x800000).view(torch.float32)
    return Scaled(round_to(x, factor, dtype), factor.reciprocal())


def scaled_weight(weight: Tensor, inverse_scale: Tensor | None, rowwise: bool, dim: int) -> Scaled:
    """scaled() for a weight. A Float8Weight is already quantized, with this inverse scale."""
    if isinstance(weight, Float8Weight):
        assert inverse_scale is not None
        return Scaled(weight.qdata, inverse_scale)
    return scaled(weight, E4M3, rowwise, dim)


def scaled_matmul(x: Scaled, y: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """(M, K) @ (K, N) -> (M, N).

    fast=True sets use_fast_accum, which sums with fewer bits. Like torchao, only forward uses it.
    """
    a, a_scale = x
    b, b_scale = y
    if not a.is_cuda:
        return (a.float() @ b.float() * (a_scale * b_scale)).to(dtype)
    # the kernels support only these layouts
    a = a.contiguous()
    b = b.t().contiguous().t()
    if b_scale.numel() == 1 or fast or takes_row_scales(a.device):
        out = torch._scaled_mm(
            a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    else:
        # scales that are powers of two may be applied afterwards
        one = torch.ones((1, 1), device=a.device)
        out = torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        out = out * (a_scale * b_scale)
    return out.to(dtype)


def takes_row_scales(device: torch.device) -> bool:
    """Whether the GPU is fast with one scale per row and without fast accumulation.

    On GPUs of compute capability 9, with CUDA 12.9 or later, torch calls cuBLAS for it. Elsewhere
    torch uses its own kernel, which is slow without fast accumulation.
    """
    if device.type != "cuda" or torch.version.cuda is None:  # a plan, or an AMD GPU
        return False
    cuda = tuple(int(number) for number in torch.version.cuda.split("."))
    return cuda >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9


class Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, inverse_scale: Tensor | None, rowwise: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, inverse_scale)
        ctx.rowwise = rowwise
        a = scaled(x, E4M3, rowwise, 1)
        b = scaled_weight(weight, inverse_scale, rowwise, 1).t()
        return scaled_matmul(a, b, x.dtype, fast=True)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch passes one gradient per output
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse_scale = ctx.saved_tensors
        rowwise = ctx.rowwise
        grad_dtype = E4M3 if rowwise else E5M2
        x_grad = None
        weight_grad = None
        if ctx.needs_input_grad[0]:
            a = scaled(grad, grad_dtype, rowwise, 1)
            b = scaled_weight(weight, inverse_scale, rowwise, 0)
            x_grad = scaled_matmul(a, b, x.dtype)  # (M, N) @ (N, K)
        if ctx.needs_input_grad[1]:
            a = scaled(grad, grad_dtype, rowwise, 0).t()
            b = scaled(x, E4M3, rowwise, 0)
            weight_grad = scaled_matmul(a, b, x.dtype)  # (N, M) @ (M, K)
        return x_grad, weight_grad, None, None


class Float8Linear(Linear):
    """A linear layer that multiplies in float8. It takes over the weight of the layer that it
    replaces."""

    matmuls: ClassVar = {aten._scaled_mm.default}

    def __init__(self, plain: Linear, recipe: str):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features)
        self.init = plain.init
        self.weight = plain.weight
        self.recipe = recipe
        # for a weight that is all-gathered in float8; update_scales() in all_gather.py sets it
        self.inverse_scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # access it once, since each access casts replicated parameters
        return float8_linear(x.to(weight.dtype), weight, self.inverse_scale, self.recipe)


def float8_linear(x: Tensor, weight: Tensor, inverse_scale: Tensor | None, recipe: str) -> Tensor:
    """x (..., K) @ weight (N, K).T -> (..., N) in x's dtype. A Float8Weight needs its
    inverse_scale."""
    rows = x.flatten(0, -2)  # (..., K) -> (M, K)
    out = Float8Matmul.apply(rows, weight, inverse_scale, recipe == "rowwise")
    return out.unflatten(0, x.shape[:-1])  # (M, N) -> (..., N)
