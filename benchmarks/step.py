"""Times the training step of any configuration on whatever device is there.

    ./run_train.sh -m benchmarks.step configs/tiny.toml
    ./run_train.sh -m benchmarks.step configs/llama1b.toml --steps 20 --parallel.compile=true
    torchrun --nproc-per-node 8 -m benchmarks.step configs/llama8b.toml

The step is train.py's own training_step(), on random tokens, without rows, evaluation or
checkpoints. The first step compiles, some more warm up; then each is timed with a device
synchronization. --composed, one process: steps of one micro-batch and of three. Their slope is the
time of a micro-batch, their intercept the optimizer's with the synchronization, and from these
follows the configured step. --bare times a bare loop (bare_step) on the same model instead.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import config
from data.loader import Batch, inputs_and_targets
from metrics import peak_flops, peak_memory_gib
from model.build import meta_model
from model.llama import Llama, flops_per_token
from optim import Progress, UpdateGuard, build_optimizer
from parallel.context import shard_sequences
from parallel.fsdp import unshard_first_units
from parallel.materialize import ReadShard, materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from run.rank import distributed, resolve_param_dtype
from tools.planner.arguments import positive_integer
from train import training_step

Step = Callable[[int, Batch], Tensor]  # trains one, by its number; the loss, per token of the rank


def sharded(cfg: config.Config, world: World, read: ReadShard | None = None) -> Llama:
    model = meta_model(cfg.model, cfg.lora)
    parallelize(model, cfg, world)
    materialize(model, cfg.run.seed, storage_device(cfg.parallel, world), read)
    return model


def with_optimizer(model: Llama, cfg: config.Config, world: World) -> tuple[Llama, Any, Any]:
    """(model, optimizer, guard), as train.py makes them."""
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, cfg.parallel.compile)
    guard = UpdateGuard(optimizer, storage_device(cfg.parallel, world), 0, Progress())
    return model, optimizer, guard


def our_step(model: Llama, cfg: config.Config, world: World) -> Step:
    parts = with_optimizer(model, cfg, world)

    def step(number: int, batch: Batch) -> Tensor:
        unshard_first_units(model, cfg.parallel)
        sums, _ = training_step(*parts, batch, number, cfg, world)
        return sums["loss"] * world.dp_size * world.cp / batch.valid_tokens

    return step


def bare_step(model: Llama, cfg: config.Config, world: World) -> Step:
    """The loop as one writes it first, on this repository's sharded model; for one process."""
    o = cfg.optim
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, o.lr, o.betas, o.eps, o.weight_decay, fused=True)

    def step(number: int, batch: Batch) -> Tensor:
        losses = []
        for tokens, targets in batch.micro_batches:
            on_device = (x.to(world.device, non_blocking=True) for x in (tokens, targets))
            sums, _ = model(*on_device)
            (sums["loss"] / batch.valid_tokens).backward()
            losses.append(sums["loss"].detach())
        torch.nn.utils.clip_grad_norm_(parameters, float(cfg.train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum() / batch.valid_tokens

    return step


def random_batch(cfg: config.Config, world: World, accumulation: int) -> Batch:
    """The same random micro-batch so many times, on the device."""
    size = config.micro_batch_size(cfg.train, world.dp_size)
    length = cfg.train.seq_len
    generator = torch.Generator().manual_seed(world.dp_rank)
    ids = torch.randint(cfg.model.vocab_size, (size, length + 1), generator=generator)
    tensors = inputs_and_targets(ids)
    tensors = shard_sequences(tensors, world) if world.cp > 1 else tensors
    micro_batch = tuple(tensor.to(world.device) for tensor in tensors)
    return Batch([micro_batch] * accumulation, accumulation * size * length * world.dp_size, 0)


def synchronize(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(step: Callable, batches: list, device: torch.device) -> tuple[list[float], list]:
    """The seconds of each step(number, batch), and what it returned."""
    seconds, losses = [], []
    for number, batch in enumerate(batches, 1):
        dist.barrier()
        began = synchronize(device)
        losses.append(step(number, batch))
        seconds.append(synchronize(device) - began)
    return seconds, losses


def measure(cfg: config.Config, world: World, args: argparse.Namespace) -> dict:
    """A row of figures."""
    model = sharded(cfg, world)
    step = bare_step(model, cfg, world) if args.bare else our_step(model, cfg, world)
    accumulation = config.accumulation_steps(cfg.train, world.dp_size)
    sizes = [accumulation] * (1 + args.warm_up + args.steps)
    if args.composed:  # the first 3 steps of one micro-batch, and the first of three, warm up
        sizes = [1] * (3 + args.steps) + [3] * (1 + args.steps)
    batches = {size: random_batch(cfg, world, size) for size in set(sizes)}
    seconds, losses = timed(step, [batches[size] for size in sizes], world.device)
    timing = spread(seconds[-args.steps :])
    parts: dict[str, Any] = {"step_seconds": timing["median"], "spread": timing}
    if args.composed:
        one = spread(seconds[3 : 3 + args.steps])
        parts = compose(one["median"], timing["median"], accumulation)
        parts |= {"seconds_of_one": one, "seconds_of_three": timing}
    on_gpu = world.device.type == "cuda"
    tokens = config.tokens_per_step(cfg.train)
    rate = tokens / world.size / parts["step_seconds"] if "step_seconds" in parts else None
    flops, peak = flops_per_token(model, cfg.train.seq_len), peak_flops(world.device)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "ranks": world.size,
        "tokens_per_step": tokens,
        "micro_batch_size": config.micro_batch_size(cfg.train, world.dp_size),
        "first_step_seconds": seconds[0],
        **parts,
        "tokens_per_second_per_device": rate,
        "mfu": rate * flops / peak if rate and peak else None,
        "peak_gib": peak_memory_gib(world.device),
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        "loss": losses[min(7, len(losses) - 1)].item(),  # of step 8, where there are as many
    }


def compose(one: float, three: float, micro_batches: int) -> dict:
    """Seconds of a step of so many micro-batches, and of its parts, from steps of one and three."""
    micro_batch = (three - one) / 2
    parts = {"micro_batch_seconds": micro_batch, "optimizer_seconds": one - micro_batch}
    if micro_batch <= 0:
        return parts | {"marked": "noise: three micro-batches took no longer than one"}
    return parts | {"step_seconds": one + micro_batch * (micro_batches - 1)}


def spread(seconds: list[float]) -> dict:
    ordered = sorted(seconds)
    p5, p95 = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return {"median": statistics.median(ordered), "p5": p5, "p95": p95}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--steps", type=positive_integer, default=20)
    parser.add_argument("--warm-up", type=int, default=5, help="steps after the first")
    parser.add_argument("--composed", action="store_true", help="of steps of two sizes")
    parser.add_argument("--bare", action="store_true", help="a bare loop instead of train.py's")
    args, overrides = parser.parse_known_args(argv)
    cfg = config.load(args.config, ["--run.device=auto", *overrides])
    with distributed(cfg) as world:
        row = measure(resolve_param_dtype(cfg, world), world, args)
    if world.rank == 0:
        print(json.dumps(row, indent=1))
    return 0


if __name__ == "__main__":
    config.run_tool(main)
