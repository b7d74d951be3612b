"""AdamW, its parameter groups, clipping, and the learning rate as a pure function of the step."""

import math
import zlib
from collections.abc import Iterable
from typing import Literal, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import config
from model.llama import named_parameters, weights_changed

NORM_ROW = 4096  # elements whose squares are added up in float32


def learning_rate(o: config.Optim, end: int, step: int) -> float:
    """Learning rate of a step (from 1): linear warm-up to `lr`, decay to lr * min_lr_ratio at `end`, then flat."""
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    # wsd alone has decay_steps, and is constant until them; the others begin to decay after the warm-up
    start = o.warmup_steps if o.decay_steps is None else end - o.decay_steps
    done = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    cosine, straight = (1 + math.cos(math.pi * done)) / 2, 1 - done
    left = {"constant": 1.0, "cosine": cosine, "linear": straight, "wsd": straight}[o.schedule]
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * left)


def build_optimizer(model: nn.Module, o: config.Optim, seed: int = 0, compile: bool = False) -> torch.optim.Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) over the model's trainable parameters, with its state initialized:
    torch's fused AdamW on shards, or for state_dtype = "bfloat16" BFloat16AdamW, which takes seed and compile.

    Norm weights are scales, and get no weight decay. The state is created here so that a checkpoint can load into it.
    """
    names = {p: name for name, p in named_parameters(model) if p.requires_grad}
    groups = [{"params": [p for p in names if p.ndim >= 2], "weight_decay": o.weight_decay},
              {"params": [p for p in names if p.ndim < 2], "weight_decay": 0.0}]
    groups, options = [group for group in groups if group["params"]], {"lr": o.lr, "betas": o.betas, "eps": o.eps}
    if o.state_dtype == "bfloat16":
        optimizer = BFloat16AdamW(groups, names, seed, compile, **options)
    else:
        optimizer = ShardedAdamW(groups, **options, fused=True)
    for p in names:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, dtype=getattr(torch, o.state_dtype)),
            "exp_avg_sq": torch.zeros_like(p, dtype=getattr(torch, o.state_dtype)),
        }
    if any(hasattr(module, "weights_changed") for module in model.modules()):
        optimizer.register_step_post_hook(lambda *unused: weights_changed(model))
    return optimizer


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW on each rank's local tensors. On DTensors the result is the same, but they search for a sharding of
    the entire update in the first step (a second for 291 parameters), and go through each parameter in every step."""

    # torch passes all lists by position, and one more in some versions
    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:  # pyrefly: ignore[bad-override]
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(_local, tensors)
        return has_complex


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with bfloat16 moments and float32 parameters: 8 bytes of gradient and state per parameter; with float32
    moments it is 12. Compiled, an update is one pass of 20 bytes per parameter, clipping included.

    Moments are rounded stochastically, which is unbiased. Rounded to nearest, a moment could never change by less than
    2^-9 of itself, as the second one has to at beta2 = 0.999. The random bits are a hash of (seed, parameter name,
    step, moment, index of the element in the full parameter), so they do not depend on the mesh, and a resumed run
    draws the same ones.
    """

    _step_supports_amp_scaling = True  # torch's flag for optimizers that read grad_scale and found_inf

    def __init__(self, groups: list[dict], names: dict[nn.Parameter, str], seed: int, compile: bool, **options):
        super().__init__(groups, options)
        device = groups[0]["params"][0].device
        self.grad_scale = torch.ones((), device=device)  # gradients are divided by it
        self.found_inf = torch.zeros((), device=device)  # 1.0: skip the update
        self.update = torch.compile(update_bfloat16, fullgraph=True, dynamic=True) if compile else update_bfloat16
        self.place = {p: shard_offset(p, f"{seed} {name}") for p, name in names.items()}

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore[bad-override]  # without a closure: nothing here passes one
        for group in self.param_groups:
            lr, (beta1, beta2) = torch.tensor(group["lr"]), group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] += 1 - self.found_inf
                rows, grad, first, second = map(as_2d, (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
                if rows.numel():  # with fewer rows than ranks, some shards are empty
                    self.update(rows, grad, first, second, state["step"], self.grad_scale, self.found_inf, lr,
                                self.place[p], beta1, beta2, group["eps"], group["weight_decay"])


def as_2d(t: Tensor) -> Tensor:
    """This rank's shard of a tensor in two dimensions: its first, and all others."""
    local = _local(t.detach())
    return local.view(local.shape[0] if local.ndim else 1, -1) if local.numel() else local


def shard_offset(p: nn.Parameter, key: str) -> Tensor:
    """(4) of int32 on the parameter's device: where this rank's shard begins (row and column of as_2d), the number of
    columns of the full parameter, and a hash of the key."""
    row, column = 0, 0
    if isinstance(p, DTensor) and p.ndim:
        _, (row, *inner) = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        column = inner[0] * math.prod(p.shape[2:]) if inner else 0
    columns = math.prod(p.shape[1:])
    numbers = torch.tensor([row, column, columns, zlib.crc32(key.encode())], device="cpu")
    return numbers.to(torch.int32).to(p.device)  # the upper half of 32 bits wraps around


def update_bfloat16(p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, scale: Tensor,
                    found: Tensor, lr: Tensor, place: Tensor, beta1: float, beta2: float, eps: float,
                    weight_decay: float) -> None:
    """BFloat16AdamW's update of one parameter, in place. The first four tensors are (R, C), the next four scalars."""
    g = grad / scale
    first = beta1 * exp_avg.float() + (1 - beta1) * g
    second = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
    correction1, correction2 = (-torch.expm1(step * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
    change = first / correction1 / ((second / correction2).sqrt() + eps)
    new = p - lr * (change + weight_decay * p)

    row, column, columns, key = place.unbind()
    row = row + torch.arange(p.shape[0], dtype=torch.int32, device=p.device)[:, None]
    column = column + torch.arange(p.shape[1], dtype=torch.int32, device=p.device)
    bits = hash32(row * columns + column ^ hash32(key ^ hash32(step.to(torch.int32))))
    skip = found > 0
    p.copy_(torch.where(skip, p, new))
    exp_avg.copy_(torch.where(skip, exp_avg, stochastic_round(first, bits & 0xFFFF)))
    exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, stochastic_round(second, bits >> 16 & 0xFFFF)))


def hash32(x: Tensor) -> Tensor:
    """A bijection of int32 in which every bit depends on every other: https://github.com/skeeto/hash-prospector."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D  # masked: a shift of a negative number brings ones in
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, away from zero with the truncated fraction as probability; noise: int32 in 0 ... 65,535."""
    return (x.view(torch.int32) + noise & -0x10000).view(torch.float32).to(torch.bfloat16)


class FiniteGuard:
    """Keeps non-finite gradients out of the weights, without waiting for the device: torch's fused optimizers leave
    weights and state untouched if `found_inf` is set. The host reads the flag one step late, and before every save.
    Other optimizers ignore it: for them the host waits, and skips their step."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, limit: int, skipped: int = 0,
                 in_a_row: int = 0):
        """limit: steps in a row that may be skipped; one more stops the run. skipped, in_a_row: of the run so far. The
        attributes of these names hold the counts without the last update."""
        self.limit, self.skipped, self.in_a_row = limit, skipped, in_a_row
        self.found = torch.zeros((), device=device)
        self.on_host = torch.zeros((), pin_memory=device.type == "cuda")
        self.copied = torch.get_device_module(device).Event()  # torch.cpu's does nothing: the host's copies are done
        self.pending: int | None = None  # the step whose flag is being copied
        self.skips_by_itself = False
        if scales_by_itself(optimizer):
            self.skips_by_itself = True
            optimizer.found_inf = self.found

    def may_update(self, step: int, norm: Tensor) -> bool:
        """Whether to call the optimizer's step(); the same on all ranks. norm: the gradient norm over all ranks, which
        is non-finite if any gradient is."""
        self._count_last()
        self.found.copy_(~norm.isfinite())
        self.on_host.copy_(self.found, non_blocking=True)
        self.copied.record()
        self.pending = step
        return self.skips_by_itself or not self._found_on_host()

    def _found_on_host(self) -> bool:
        self.copied.synchronize()
        return bool(self.on_host.item())

    def counts(self) -> tuple[int, int]:
        """(updates skipped so far, of these in a row at the end), the last one included: waits for it. Raises
        FloatingPointError if those in a row exceed the limit."""
        self._count_last()
        return self.skipped, self.in_a_row

    def _count_last(self) -> None:
        if self.pending is None:
            return
        step, self.pending = self.pending, None
        if not self._found_on_host():
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.skipped += 1
        if self.in_a_row > self.limit:
            raise FloatingPointError(
                f"step {step}: the gradient is not finite, the weights were left as they were before it"
                + (f"; train.skip_nonfinite = {self.limit} steps in a row were skipped already" if self.limit else
                   "; train.skip_nonfinite = N would skip up to N such steps in a row"))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class ScalesByItself(Protocol):
    """An optimizer whose step() divides gradients by `grad_scale` and skips the update if `found_inf` is set."""

    grad_scale: Tensor
    found_inf: Tensor


def scales_by_itself(optimizer: torch.optim.Optimizer) -> TypeGuard[ScalesByItself]:
    """By torch's flag."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@torch.no_grad()
def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer,
                   max_norm: float | Literal["off"]) -> Tensor:
    """Clips the gradients to a norm of max_norm over all ranks ("off": does not); returns the norm before clipping. An
    optimizer that supports it scales them in its update, which saves reading and writing them once."""
    norm = gradient_norm(model.parameters())
    if max_norm != "off":
        scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        if scales_by_itself(optimizer):
            optimizer.grad_scale = scale
        else:
            torch._foreach_div_([_local(p.grad) for p in model.parameters() if p.grad is not None], scale)
    return norm


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all these parameters' gradients over all ranks, a float32 scalar on their device. All-reduces one
    number for each set of mesh dimensions that gradients are sharded over."""
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}  # local parts, by what they are sharded over
    for g in [p.grad for p in parameters if p.grad is not None]:
        groups.setdefault(_sharded_over(g), []).append(_local(g))
    sums = []
    for sharded_over, local in groups.items():
        sums.append(_sum_of_squares(local))
        for group in sharded_over:
            dist.all_reduce(sums[-1], group=group)
    return torch.stack(sums).sum().sqrt().float() if sums else torch.zeros(())


def _local(g: Tensor) -> Tensor:
    return g.to_local() if isinstance(g, DTensor) else g


def _sharded_over(g: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups that a gradient is sharded over, those of one rank left out."""
    if not isinstance(g, DTensor):
        return ()
    return tuple(g.device_mesh.get_group(dim) for dim, placement in enumerate(g.placements)
                 if not placement.is_replicate() and g.device_mesh.size(dim) > 1)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of all elements, a float64 scalar on their device.

    On CPU, torch's float32 norm accumulates in one float32: off by 1e-5 at a million elements, 2e-4 at eight million;
    its float64 norm is twenty times slower. So on CPU: float32 norms of short rows, summed in float64.
    """
    if tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).double().square()
    norms = []
    for t in tensors:
        flat = t.reshape(-1)
        end = len(flat) // NORM_ROW * NORM_ROW
        norms += [torch.linalg.vector_norm(flat[:end].view(-1, NORM_ROW), dim=1),
                  torch.linalg.vector_norm(flat[end:], dim=0, keepdim=True)]
    return torch.cat(norms).double().square().sum()
