"""AdamW, its parameter groups, clipping, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config

# Those that update an element from its own gradient and state: sharded, they communicate nothing.
ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)
NORM_ROW = 4096  # elements whose squares are added up in float32


def learning_rate(o: config.Optim, end: int, step: int) -> float:
    """Learning rate of a step (from 1): linear warm-up to `lr`, decay to lr * min_lr_ratio at `end`, then flat."""
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    # wsd: stable until its last decay_steps, the others begin to fall at the end of the warm-up
    start = end - o.decay_steps if o.schedule == "wsd" else o.warmup_steps
    done = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    cosine, straight = (1 + math.cos(math.pi * done)) / 2, 1 - done
    left = {"constant": 1.0, "cosine": cosine, "linear": straight, "wsd": straight}[o.schedule]
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * left)


def build_optimizer(model: nn.Module, o: config.Optim) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) over the model's trainable parameters, fused, with its state made.

    Norms' weights are scales, and do not decay. The state is made here, so that a checkpoint can be read into it.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trainable if p.ndim >= 2], "weight_decay": o.weight_decay},
              {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
    for p in trainable:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


class FiniteGuard:
    """Keeps non-finite gradients out of the weights, without waiting for the device: torch's fused optimizers leave
    weights and state untouched where `found_inf` is set. The host reads it a step late, and before every save. Other
    optimizers do not look at it: for them the host waits, and leaves out their step."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, limit: int, skipped: int = 0,
                 in_a_row: int = 0):
        """limit: steps in a row that may be skipped; one more stops the run. skipped, in_a_row: of the run so far."""
        self.limit, self.skipped, self.in_a_row = limit, skipped, in_a_row
        self.found = torch.zeros((), device=device)
        self.on_host = torch.zeros((), pin_memory=device.type == "cuda")
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self.pending: int | None = None  # the step whose flag is being copied
        self.skips_by_itself = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's mark of those that do
        if self.skips_by_itself:
            optimizer.found_inf, optimizer.grad_scale = self.found, None

    def counts(self) -> dict[str, int]:
        """What a checkpoint keeps. Call check() first."""
        return {"skipped_steps": self.skipped, "skipped_in_a_row": self.in_a_row}

    def may_update(self, step: int, norm: Tensor) -> bool:
        """Whether to call the optimizer's step(), the same on all ranks. norm: the gradient's over all ranks, which is
        not finite where any gradient is not."""
        self.check()
        self.found.copy_(~norm.isfinite())
        self.on_host.copy_(self.found, non_blocking=True)
        if self.copied:
            self.copied.record()
        self.pending = step
        return self.skips_by_itself or not self._found_on_host()

    def _found_on_host(self) -> bool:
        if self.copied:
            self.copied.synchronize()
        return bool(self.on_host.item())

    def check(self) -> None:
        """Raises FloatingPointError where the last update was skipped and no more may be."""
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


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float | str) -> Tensor:
    """Scales the gradients so that their norm over all ranks is at most max_norm ("off": leaves them); returns the norm
    from before."""
    norm = gradient_norm(model.parameters())
    if max_norm != "off":
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        torch._foreach_mul_([_local(p.grad) for p in model.parameters() if p.grad is not None], scale)
    return norm


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all these parameters' gradients over all ranks, a float32 scalar on their device. One all-reduce of
    one number per set of dimensions sharded over."""
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
    """Of all elements: a float64 scalar on their device.

    torch's float32 norm on a CPU adds up in one float32: off by 1e-5 at a million elements, 2e-4 at eight million; its
    float64 norm is twenty times slower. So there: float32 norms of short rows, added up in float64.
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
