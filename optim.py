"""The optimizer, its parameter groups, gradient clipping and the learning rate; the guard against
non-finite updates; the counts of a run (Progress)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config
from config import ConfigError
from model.llama import after_weight_update, named_parameters, plain_name
from parallel.materialize import local_tensor

NORM_ROW = 4096  # elements whose squares are summed in float32


def learning_rate(o: config.Optim, end: int, step: int) -> float:
    """The learning rate of a step. Steps count from 1.

    It warms up linearly to `lr`, decays to lr * min_lr_ratio at the step `end`, then stays constant.
    """
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    # Only wsd has decay_steps, and it is constant before them. The others decay after the warm-up.
    decay_start = o.warmup_steps if o.decay_steps is None else end - o.decay_steps
    progress = (step - decay_start) / max(end - decay_start, 1)
    progress = min(max(progress, 0.0), 1.0)
    if o.schedule == "constant":
        factor = 1.0
    elif o.schedule == "cosine":
        factor = (1 + math.cos(math.pi * progress)) / 2
    else:  # linear, wsd
        factor = 1 - progress
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * factor)


def build_optimizer(
    model: nn.Module, o: config.Optim, seed: int = 0, compile: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of the model's trainable parameters: AdamW, or Muon for name = "muon".

    Its state is initialized, so that a checkpoint can be loaded into it.
    """
    names = {p: name for name, p in named_parameters(model) if p.requires_grad}
    if o.name == "muon":
        from extras.optimizers.muon import Muon

        optimizer = Muon(model, names, o, seed, compile)
    else:
        optimizer = build_adamw(names, o, seed, compile)
    for group in optimizer.param_groups:
        if group["lr"] != o.lr and "lr_ratio" not in group:
            raise ConfigError(
                f"a group of the optimizer has lr = {group['lr']}, which the schedule overwrites in each "
                'step: give the group "lr_ratio", by which the schedule is multiplied'
            )
    optimizer.register_step_post_hook(lambda *unused: after_weight_update(model))
    return optimizer


def build_adamw(
    names: dict[nn.Parameter, str], o: config.Optim, seed: int, compile: bool
) -> torch.optim.Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) over these parameters, with its state initialized.

    It is torch's fused AdamW on local shards, or BFloat16AdamW for state_dtype = "bfloat16". Only the
    latter uses seed and compile.
    """
    groups = parameter_groups(names, o.weight_decay)
    options = {"lr": o.lr, "betas": o.betas, "eps": o.eps}
    if o.state_dtype == "bfloat16":
        from extras.optimizers.adamw_bfloat16 import BFloat16AdamW

        optimizer = BFloat16AdamW(groups, names, seed, compile, **options)
    else:
        optimizer = ShardedAdamW(groups, **options, fused=True)

    state_dtype = getattr(torch, o.state_dtype)
    for p in names:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, dtype=state_dtype),
            "exp_avg_sq": torch.zeros_like(p, dtype=state_dtype),
        }
    return optimizer


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """The optimizer's parameter groups: matrices and embeddings with weight decay, norm weights, which
    are scales, without. No group is empty."""
    by_decay: dict[float, list[nn.Parameter]] = {}
    for p in parameters:
        by_decay.setdefault(weight_decay if p.ndim >= 2 else 0.0, []).append(p)
    return [{"params": group, "weight_decay": decay} for decay, group in by_decay.items()]


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW on each rank's local tensors.

    DTensors would give the same result. But in the first step they search for a sharding of the
    entire update (a second for 291 parameters), and in every step they dispatch for each parameter.
    """

    # torch passes all lists by position. Some versions pass one more.
    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:  # pyrefly: ignore[bad-override]
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_tensor(t) for t in tensors]
        return has_complex


class UpdateGuard:
    """Skips updates of non-finite gradients without waiting for the device.

    torch's fused optimizers leave weights and state untouched if `found_inf` is set. The host reads
    this flag one step late, and before every save. Other optimizers ignore the flag: for them the
    host waits and skips their step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        limit: int,
        progress: "Progress",
    ):
        """limit: how many updates in a row may be skipped; one more stops the run. progress: counts
        the skipped updates, one step late."""
        self.limit = limit
        self.progress = progress
        self.found_inf = torch.zeros((), device=device)
        self.on_host = torch.zeros((), pin_memory=device.type == "cuda")
        # A CPU's event does nothing: its copies are synchronous.
        self.copied = torch.get_device_module(device).Event()
        self.pending_step: int | None = None  # the step whose flag is being copied
        self.optimizer_skips = supports_amp_scaling(optimizer)
        if self.optimizer_skips:
            optimizer.found_inf = self.found_inf  # pyrefly: ignore[missing-attribute]

    def may_update(self, step: int, norm: Tensor) -> bool:
        """Checks the previous update, and returns whether to call the optimizer's step(). Equal on all
        ranks.

        norm: the gradient norm over all ranks. It is not finite if a gradient or a loss is not:
        training_step() in train.py then scales by NaN.
        """
        self.check()
        self.found_inf.copy_(~norm.isfinite())
        self.on_host.copy_(self.found_inf, non_blocking=True)
        self.copied.record()
        self.pending_step = step
        return self.optimizer_skips or not self._is_skipped()

    def _is_skipped(self) -> bool:
        self.copied.synchronize()
        return bool(self.on_host)

    def check(self) -> None:
        """Counts the last update in `progress`, as a checkpoint needs. Waits for the device.

        Raises FloatingPointError if more updates in a row were skipped than the limit.
        """
        step = self.pending_step
        if step is None:
            return
        self.pending_step = None
        progress = self.progress
        if not self._is_skipped():
            progress.skipped_in_a_row = 0
            return
        progress.skipped_in_a_row += 1
        progress.skipped_steps += 1
        if progress.skipped_in_a_row > self.limit:
            raise FloatingPointError(
                f"step {step}: the gradient is not finite, the weights were left as they were "
                f"before it; train.skip_nonfinite = {self.limit} such steps in a row may be skipped"
            )


@dataclass
class Progress:
    """The counts of a run. Every checkpoint stores them under these names."""

    step: int = 0  # the last one trained
    # Samples trained on. Not a function of `step`: a resume may change the batch size.
    samples: int = 0
    # Samples of each source of a mixture: a resume may change the weights.
    samples_by_source: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    skipped_steps: int = 0  # their gradient was not finite (UpdateGuard)
    skipped_in_a_row: int = 0
    targetless_steps: int = 0  # no token had a loss: nothing was updated

    def count_step(
        self, step: int, train: config.Train, valid_tokens: int, by_source: dict[str, int]
    ) -> None:
        """Counts a step, equally on all ranks. valid_tokens: targets of the global batch. by_source:
        its samples from each source of a mixture."""
        self.step = step
        self.samples += train.global_batch_size
        self.samples_by_source = add_counts(self.samples_by_source, by_source)
        self.tokens += config.tokens_per_step(train)
        self.targetless_steps += not valid_tokens


def add_counts(counts: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + more.get(name, 0) for name in counts | more}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets each group's learning rate: the schedule's, times the group's "lr_ratio" if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step() divides gradients by `grad_scale`, and does nothing if `found_inf` is set."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's flag


@torch.no_grad()
def clip_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | Literal["off"]
) -> Tensor:
    """Clips the gradients to a norm of max_norm over all ranks, unless it is "off". Returns the norm
    before clipping.

    A fused optimizer scales the gradients itself in its update, which saves a pass over them.
    """
    check_all_have_gradients(model)
    norm = gradient_norm(model.parameters())
    if max_norm == "off":
        return norm
    scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    if supports_amp_scaling(optimizer):
        optimizer.grad_scale = scale  # pyrefly: ignore[missing-attribute]
    else:
        gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, scale)
    return norm


def check_all_have_gradients(model: nn.Module) -> None:
    """Raises RuntimeError for a trained parameter that forward did not use: it would silently keep
    its initial value."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise RuntimeError(
            f"no gradient of {', '.join(map(plain_name, unused))} in this step: forward does not use it; "
            "use it in every step, or freeze it (model.freeze)"
        )


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all these parameters' gradients over all ranks, a float32 scalar on their device.

    All-reduces one number for each set of mesh dimensions that gradients are sharded over. torch's
    clip_grad_norm_ fails on gradients of several meshes.
    """
    # The local gradients, by the process groups that they are sharded over.
    sharded: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            sharded.setdefault(_sharded_over(p.grad), []).append(local_tensor(p.grad))
    if not sharded:
        return torch.zeros(())
    squares = []
    for groups, gradients in sharded.items():
        square = _sum_of_squares(gradients)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt().float()


def _sharded_over(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups that a gradient is sharded over, except those of one rank."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    dims = [dim for dim, p in enumerate(gradient.placements) if not p.is_replicate()]
    return tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of all elements, a float64 scalar on their device.

    On a CPU, torch's float32 norm accumulates in a single float32, with an error of 1e-5 for a
    million elements and 2e-4 for eight million. Its float64 norm is ten times slower. So on a CPU
    this sums float32 norms of short rows in float64.
    """
    if tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).double().square()
    norms = []
    for t in tensors:
        flat = t.reshape(-1)
        rows = len(flat) // NORM_ROW
        rest = flat[rows * NORM_ROW :]
        flat = flat[: rows * NORM_ROW].view(rows, NORM_ROW)
        norms.append(torch.linalg.vector_norm(flat, dim=1))  # (rows)
        norms.append(torch.linalg.vector_norm(rest, dim=0, keepdim=True))  # (1)
    return torch.cat(norms).double().square().sum()
