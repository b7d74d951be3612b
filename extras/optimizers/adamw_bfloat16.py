"""Implements optim.state_dtype = "bfloat16": AdamW with stochastically rounded bfloat16 moments."""

import math
import zlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from optim import local_tensor


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with bfloat16 moments and float32 parameters.

    Gradient and state take 8 bytes per parameter, versus 12 with float32 moments. A compiled
    update, including clipping, is one pass over 20 bytes per parameter.

    Stochastic rounding is unbiased. With rounding to nearest, a moment could never change by less
    than 2^-9 of its value, but the second moment has to at beta2 = 0.999. The random bits are a
    hash of (seed, parameter name, step, moment, index of the element in the full parameter). So
    they do not depend on the mesh, and a resumed run draws the same bits.
    """

    # torch's flag for optimizers that read grad_scale and found_inf
    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: list[dict],
        names: dict[nn.Parameter, str],
        seed: int,
        compile: bool,
        **options,
    ):
        super().__init__(groups, options)
        device = groups[0]["params"][0].device
        self.grad_scale = torch.ones((), device=device)  # gradients are divided by it
        self.found_inf = torch.zeros((), device=device)  # 1.0: skip the update
        self.update = update_bfloat16
        if compile:
            self.update = torch.compile(update_bfloat16, fullgraph=True, dynamic=True)
        self.numbers = {p: number_elements(p, f"{seed} {name}") for p, name in names.items()}

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore[bad-override]  # without a closure: nothing here passes one
        for group in self.param_groups:
            lr = torch.tensor(group["lr"])
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] += 1 - self.found_inf
                if not local_tensor(p).numel():  # with fewer rows than ranks, some shards are empty
                    continue
                self.update(
                    as_2d(p.detach()),
                    as_2d(p.grad),
                    as_2d(state["exp_avg"]),
                    as_2d(state["exp_avg_sq"]),
                    state["step"],
                    self.grad_scale,
                    self.found_inf,
                    lr,
                    self.numbers[p],
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                )


def as_2d(t: Tensor) -> Tensor:
    """This rank's shard of a tensor in two dimensions. Flattens all dimensions but the first."""
    local = local_tensor(t)
    # view(n, -1) would fail for an empty shard
    return local.view(local.shape[0], math.prod(local.shape[1:]))


class ElementNumbers(NamedTuple):
    """The elements of this rank's shard, for random_bits(), as int32 on the parameter's device.

    Element (i, j) of as_2d() has number rows[i] + columns[j] in the full parameter, modulo 2^32.

    These tensors are not computed in the update: with torch.arange and dynamic shapes, Inductor
    uses a 64-bit index in the compiled update, and Triton fails.
    """

    rows: Tensor  # (R, 1)
    columns: Tensor  # (C)
    key: Tensor  # scalar: a hash of the seed and the parameter's name


def number_elements(p: nn.Parameter, key: str) -> ElementNumbers:
    row, column = 0, 0
    if isinstance(p, DTensor):
        _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        row = offset[0]
        if p.ndim > 1:
            column = offset[1] * math.prod(p.shape[2:])
    full_columns = math.prod(p.shape[1:])
    shard_rows, shard_columns = as_2d(p.detach()).shape
    rows = (row + torch.arange(shard_rows, device="cpu"))[:, None] * full_columns
    columns = column + torch.arange(shard_columns, device="cpu")
    hashed = torch.tensor(zlib.crc32(key.encode()), device="cpu")
    # convert to int32 on the CPU, where the conversion drops higher bits
    return ElementNumbers(*(n.to(torch.int32).to(p.device) for n in (rows, columns, hashed)))


def update_bfloat16(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    lr: Tensor,
    numbers: ElementNumbers,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Updates one parameter for BFloat16AdamW, in place.

    The first four tensors are (R, C), the next four are scalars.
    """
    g = grad / grad_scale
    first = beta1 * exp_avg.float() + (1 - beta1) * g
    second = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
    unbiased_first = first / bias_correction(beta1, step)
    unbiased_second = second / bias_correction(beta2, step)
    change = unbiased_first / (unbiased_second.sqrt() + eps)
    new = p - lr * (change + weight_decay * p)

    bits = random_bits(step, numbers)
    new_first = stochastic_round(first, bits & 0xFFFF)
    new_second = stochastic_round(second, bits >> 16 & 0xFFFF)
    skip = found_inf > 0
    p.copy_(torch.where(skip, p, new))
    exp_avg.copy_(torch.where(skip, exp_avg, new_first))
    exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, new_second))


def bias_correction(beta: float, step: Tensor) -> Tensor | float:
    """1 - beta ** step, which expm1 computes precisely."""
    return -torch.expm1(step * math.log(beta)) if beta else 1.0


def random_bits(step: Tensor, numbers: ElementNumbers) -> Tensor:
    """(R, C) int32: a hash of the step, the key and each element's number."""
    seed = hash32(numbers.key ^ hash32(step.to(torch.int32)))
    return hash32((numbers.rows + numbers.columns) ^ seed)


def hash32(x: Tensor) -> Tensor:
    """A bijection of int32 in which every bit depends on every other.

    https://github.com/skeeto/hash-prospector
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D  # mask: shifting a negative number inserts ones
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """Rounds float32 to bfloat16. Rounds away from zero with the truncated fraction as probability.

    noise: int32 in 0 ... 65,535.
    """
    bits = x.view(torch.int32) + noise
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)
