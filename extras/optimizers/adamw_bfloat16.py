"""optim.state_dtype = "bfloat16": AdamW with bfloat16 moments, rounded stochastically."""

import math
import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from optim import local_tensor


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with bfloat16 moments and float32 parameters.

    Gradient and state take 8 bytes per parameter; with float32 moments it is 12. Compiled, an
    update is one pass of 20 bytes per parameter, clipping included.

    Moments are rounded stochastically, which is unbiased. Rounded to nearest, a moment could never
    change by less than 2^-9 of itself, as the second one has to at beta2 = 0.999. The random bits
    are a hash of (seed, parameter name, step, moment, index of the element in the full parameter),
    so they do not depend on the mesh, and a resumed run draws the same ones.
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
        self.offsets = {p: shard_offset(p, f"{seed} {name}") for p, name in names.items()}

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
                    self.offsets[p],
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                )


def as_2d(t: Tensor) -> Tensor:
    """This rank's shard of a tensor in two dimensions: its first, and all others flattened."""
    local = local_tensor(t)
    rows = local.shape[0] if local.ndim else 1
    return local.view(rows, -1)


def shard_offset(p: nn.Parameter, key: str) -> Tensor:
    """What random_bits() needs to know of this rank's shard: four int32 on the parameter's device.

    They are the row and column of as_2d() at which the shard begins, the number of columns of the
    full parameter, and a hash of the key.
    """
    row, column = 0, 0
    if isinstance(p, DTensor) and p.ndim:
        _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        row = offset[0]
        if p.ndim > 1:
            column = offset[1] * math.prod(p.shape[2:])
    columns = math.prod(p.shape[1:])
    numbers = torch.tensor([row, column, columns, zlib.crc32(key.encode())], device="cpu")
    return numbers.to(torch.int32).to(p.device)  # the upper half of 32 bits wraps around


def update_bfloat16(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    lr: Tensor,
    offset: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """BFloat16AdamW's update of one parameter, in place.

    The first four tensors are (R, C), the next four scalars. offset: from shard_offset().
    """
    g = grad / grad_scale
    first = beta1 * exp_avg.float() + (1 - beta1) * g
    second = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
    unbiased_first = first / bias_correction(beta1, step)
    unbiased_second = second / bias_correction(beta2, step)
    change = unbiased_first / (unbiased_second.sqrt() + eps)
    new = p - lr * (change + weight_decay * p)

    bits = random_bits(p, step, offset)
    new_first = stochastic_round(first, bits & 0xFFFF)
    new_second = stochastic_round(second, bits >> 16 & 0xFFFF)
    skip = found_inf > 0
    p.copy_(torch.where(skip, p, new))
    exp_avg.copy_(torch.where(skip, exp_avg, new_first))
    exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, new_second))


def bias_correction(beta: float, step: Tensor) -> Tensor | float:
    """1 - beta ** step, which expm1 computes precisely."""
    return -torch.expm1(step * math.log(beta)) if beta else 1.0


def random_bits(p: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    """int32 for each element of p (R, C): a hash of the step and of what shard_offset() holds."""
    row, column, columns, key = offset.unbind()
    row = row + torch.arange(p.shape[0], dtype=torch.int32, device=p.device)[:, None]  # (R, 1)
    column = column + torch.arange(p.shape[1], dtype=torch.int32, device=p.device)  # (C)
    seed = hash32(key ^ hash32(step.to(torch.int32)))
    return hash32((row * columns + column) ^ seed)


def hash32(x: Tensor) -> Tensor:
    """A bijection of int32 in which every bit depends on every other.

    https://github.com/skeeto/hash-prospector
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D  # masked: a shift of a negative number brings ones in
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, away from zero with the truncated fraction as probability.

    noise: int32 in 0 ... 65,535.
    """
    bits = x.view(torch.int32) + noise
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)
