"""The optimizer, its parameter groups, clipping, and the learning rate as a pure function of the step."""

import logging
import math
from collections.abc import Iterable
from typing import Literal, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config
from model.llama import after_weight_update, named_parameters

log = logging.getLogger("train")

NORM_ROW = 4096  # elements whose squares are added up in float32
TARGETLESS_LIMIT = 100  # steps without a target in a row that end a run


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


def build_optimizer(
    model: nn.Module, o: config.Optim, seed: int = 0, compile: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of the model's trainable parameters, with its state initialized, so that a checkpoint can load into
    it: AdamW, or for name = "muon" Muon, which leaves to AdamW what is not a matrix of a block."""
    names = {p: name for name, p in named_parameters(model) if p.requires_grad}
    if o.name == "muon":
        from extras.optimizers.muon import Muon

        optimizer = Muon(
            names, o, seed, compile, lambda others: build_adamw(others, o, seed, compile)
        )
    else:
        optimizer = build_adamw(names, o, seed, compile)
    if any(hasattr(module, "after_weight_update") for module in model.modules()):
        optimizer.register_step_post_hook(lambda *unused: after_weight_update(model))
    return optimizer


def build_adamw(
    names: dict[nn.Parameter, str], o: config.Optim, seed: int, compile: bool
) -> torch.optim.Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) over these parameters, with its state: torch's fused AdamW on shards, or
    for state_dtype = "bfloat16" BFloat16AdamW, which takes seed and compile. Norm weights are scales, and get no weight
    decay."""
    groups = [
        {"params": [p for p in names if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in names if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups, options = (
        [group for group in groups if group["params"]],
        {"lr": o.lr, "betas": o.betas, "eps": o.eps},
    )
    if o.state_dtype == "bfloat16":
        from extras.optimizers.adamw_bfloat16 import BFloat16AdamW

        optimizer = BFloat16AdamW(groups, names, seed, compile, **options)
    else:
        optimizer = ShardedAdamW(groups, **options, fused=True)
    for p in names:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, dtype=getattr(torch, o.state_dtype)),
            "exp_avg_sq": torch.zeros_like(p, dtype=getattr(torch, o.state_dtype)),
        }
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


class FiniteGuard:
    """Keeps non-finite gradients out of the weights, without waiting for the device: torch's fused optimizers leave
    weights and state untouched if `found_inf` is set. The host reads the flag one step late, and before every save.
    Other optimizers ignore it: for them the host waits, and skips their step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        limit: int,
        skipped: int = 0,
        in_a_row: int = 0,
    ):
        """limit: steps in a row that may be skipped; one more stops the run. skipped, in_a_row: of the run so far. The
        attributes of these names hold the counts without the last update."""
        self.limit, self.skipped, self.in_a_row = limit, skipped, in_a_row
        self.found = torch.zeros((), device=device)
        self.on_host = torch.zeros((), pin_memory=device.type == "cuda")
        # torch.cpu's does nothing: the host's copies are done
        self.copied = torch.get_device_module(device).Event()
        self.pending: int | None = None  # the step whose flag is being copied
        self.skips_by_itself = False
        if scales_by_itself(optimizer):
            self.skips_by_itself = True
            optimizer.found_inf = self.found

    def may_update(self, step: int, norm: Tensor) -> bool:
        """Whether to call the optimizer's step(); the same on all ranks. norm: the gradient norm over all ranks, which
        is non-finite if any gradient is."""
        self.check()
        self.found.copy_(~norm.isfinite())
        self.on_host.copy_(self.found, non_blocking=True)
        self.copied.record()
        self.pending = step
        return self.skips_by_itself or not self._found_on_host()

    def _found_on_host(self) -> bool:
        self.copied.synchronize()
        return bool(self.on_host.item())

    def counts(self) -> tuple[int, int]:
        """(updates skipped so far, of these in a row at the end), after check()."""
        self.check()
        return self.skipped, self.in_a_row

    def check(self) -> None:
        """Counts the last update if it was skipped: waits for it. Raises FloatingPointError if the updates skipped in a
        row exceed the limit."""
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
                + (
                    f"; train.skip_nonfinite = {self.limit} steps in a row were skipped already"
                    if self.limit
                    else "; train.skip_nonfinite = N would skip up to N such steps in a row"
                )
            )


class NoTargets(Exception):
    """Too many steps in a row had no token with a loss. Other data or another train.seq_len would help, a restart
    would not."""


class TargetlessSteps:
    """Counts the steps in which no token has a loss. They update nothing."""

    def __init__(self, total: int = 0, in_a_row: int = 0):
        """Of the run so far."""
        self.total, self.in_a_row = total, in_a_row

    def count(self, step: int, valid_tokens: int) -> None:
        """valid_tokens: of the step's global batch, so all ranks count the same. Raises NoTargets after
        TARGETLESS_LIMIT such steps in a row."""
        if valid_tokens:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= TARGETLESS_LIMIT:
            raise NoTargets(
                f"step {step}: no token of the last {self.in_a_row} steps has a loss, and nothing was updated; usual "
                "causes: train.seq_len cuts conversations before the assistant's turn, or data.document_mask meets "
                "documents of one token; raise train.seq_len, or look at the data: ./run_train.sh -m data.show "
                f"CONFIG --step {step}"
            )
        if self.total.bit_count() == 1:  # 1, 2, 4, 8, ...
            log.warning(
                "step %d: no token of the batch has a loss, nothing was updated (such steps so far: %d)",
                step,
                self.total,
            )


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
def clip_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | Literal["off"]
) -> Tensor:
    """Clips the gradients to a norm of max_norm over all ranks ("off": does not); returns the norm before clipping. An
    optimizer that supports it scales them in its update, which saves reading and writing them once."""
    norm = gradient_norm(model.parameters())
    if max_norm != "off":
        scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        if scales_by_itself(optimizer):
            optimizer.grad_scale = scale
        else:
            torch._foreach_div_(
                [_local(p.grad) for p in model.parameters() if p.grad is not None], scale
            )
    return norm


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all these parameters' gradients over all ranks, a float32 scalar on their device. All-reduces one
    number for each set of mesh dimensions that gradients are sharded over."""
    groups: dict[
        tuple[dist.ProcessGroup, ...], list[Tensor]
    ] = {}  # local parts, by what they are sharded over
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
    return tuple(
        g.device_mesh.get_group(dim)
        for dim, placement in enumerate(g.placements)
        if not placement.is_replicate() and g.device_mesh.size(dim) > 1
    )


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
        norms += [
            torch.linalg.vector_norm(flat[:end].view(-1, NORM_ROW), dim=1),
            torch.linalg.vector_norm(flat[end:], dim=0, keepdim=True),
        ]
    return torch.cat(norms).double().square().sum()
