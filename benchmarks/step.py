"""Times the training step of any configuration on whatever device is there.

    python -m benchmarks.step configs/tiny.toml
    python -m benchmarks.step configs/tiny.toml --reduce-scatter-buffers 2 --separate-reduce-scatter-group
    python -m benchmarks.step configs/llama1b.toml --steps 20 --json --parallel.compile=true
    torchrun --nproc-per-node 8 -m benchmarks.step configs/llama8b.toml

Random tokens unless --real (prepared data). The step is train.py's own training_step(), without
rows, evaluation or checkpoints. The first step, which compiles, is timed separately. Some more warm
up. Then each step is timed with a device synchronization: median and spread, tokens/s, MFU, peak
memory.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import config
from benchmarks import count
from benchmarks.overhead import BareLoop
from config import ConfigError
from data.dataset import open_dataset
from data.loader import Batch, Loader, inputs_and_targets
from metrics import peak_flops, peak_memory_gib
from model.build import meta_model
from model.llama import Llama, flops_per_token, parameter_count
from optim import Progress, UpdateGuard, build_optimizer
from parallel.context import shard_sequences
from parallel.fsdp import unshard_first_units
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from run.rank import distributed, resolve_param_dtype
from train import training_step

EXPERIMENTS = {
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
}


def add_experiments(parser: argparse.ArgumentParser) -> None:
    """Options for FSDP2's experimental settings, which may help where steps wait for reductions.
    See experiments()."""
    parser.add_argument(
        "--reduce-scatter-buffers", type=count, help="in flight at a time; FSDP2 has one"
    )
    parser.add_argument(
        "--separate-reduce-scatter-group", action="store_true", help="a process group of their own"
    )


def experiments(args: argparse.Namespace) -> dict[str, int | bool]:
    """{method of FSDPModule: its argument} of the options. Raises ConfigError for each that this
    torch lacks."""
    settings = {}
    problems = []
    for option, method in EXPERIMENTS.items():
        value = getattr(args, option)
        if not value:
            continue
        settings[method] = value
        if not hasattr(FSDPModule, method):
            problems.append(
                f"--{option.replace('_', '-')}: torch {torch.__version__} has no "
                f"FSDPModule.{method}(), which came with 2.13"
            )
    if problems:
        raise ConfigError(*problems)
    return settings


def build(
    cfg: config.Config, world: World, settings: dict[str, int | bool] | None = None
) -> tuple[Llama, torch.optim.Optimizer, UpdateGuard]:
    """What train.py trains, with fresh weights. settings: from experiments()."""
    device = storage_device(cfg.parallel, world)
    model = meta_model(cfg.model, cfg.lora)
    parallelize(model, cfg, world)
    for method, value in (settings or {}).items():
        getattr(model, method)(value)
    materialize(model, cfg.run.seed, device)
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, cfg.parallel.compile)
    return model, optimizer, UpdateGuard(optimizer, device, 0, Progress())


def random_batch(cfg: config.Config, world: World, accumulation: int) -> Batch:
    """The same random micro-batch so many times, on the device."""
    size = config.micro_batch_size(cfg.train, world.dp_size)
    length = cfg.train.seq_len
    generator = torch.Generator().manual_seed(world.dp_rank)
    ids = torch.randint(cfg.model.vocab_size, (size, length + 1), generator=generator)
    tensors = inputs_and_targets(ids)
    if world.cp > 1:
        tensors = shard_sequences(tensors, world)
    micro_batch = tuple(tensor.to(world.device) for tensor in tensors)
    return Batch([micro_batch] * accumulation, accumulation * size * length * world.dp_size, 0)


def synchronize(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    cfg: config.Config, world: World, steps: int, warm_up: int, real: bool, settings: dict
) -> dict:
    """Times the steps and returns a row of figures. settings: from experiments()."""
    t = cfg.train
    model, optimizer, guard = build(cfg, world, settings)
    accumulation = config.accumulation_steps(cfg.train, world.dp_size)
    micro_batch_size = config.micro_batch_size(cfg.train, world.dp_size)
    if real:
        dataset = open_dataset(cfg)
        batches = loader = Loader(dataset, cfg.train, world)
    else:
        batches = itertools.repeat(random_batch(cfg, world, accumulation))

    seconds = []
    for step in range(1, 1 + 1 + warm_up + steps):
        dist.barrier()
        began = synchronize(world.device)
        unshard_first_units(model, cfg.parallel)
        batch = next(batches)
        if real:
            batch.valid_tokens *= world.dp_size  # of this rank; the others have as many, or about
        sums, _ = training_step(model, optimizer, guard, batch, step, cfg, world)
        seconds.append(synchronize(world.device) - began)
    guard.check()
    if real:
        loader.close()

    tokens = t.seq_len // world.cp * micro_batch_size * accumulation  # of this rank
    timed = spread(seconds[1 + warm_up :])
    rate = config.tokens_per_step(cfg.train) / world.size / timed["median"]
    flops = flops_per_token(model, t.seq_len)
    peak = peak_flops(world.device)
    if world.device.type == "cuda":
        device_name = torch.cuda.get_device_name()
    else:
        device_name = platform.processor() or "cpu"
    return {
        "configuration": cfg.run.name,
        "parameters": parameter_count(model),
        "ranks": world.size,
        "seq_len": t.seq_len,
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": accumulation,
        "tokens_per_step": config.tokens_per_step(cfg.train),
        "param_dtype": cfg.parallel.param_dtype,
        "recompute": cfg.parallel.recompute,
        "compile": cfg.parallel.compile,
        "data": "real" if real else "random",
        "device": device_name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "first_step_seconds": seconds[0],
        **{f"step_seconds_{name}": value for name, value in timed.items()},
        "timed_steps": steps,
        "tokens_per_second_per_device": rate,
        "mfu": rate * flops / peak if peak else None,
        "peak_memory_gib": peak_memory_gib(world.device),
        "last_loss": sums["loss"].item() / tokens,
    }


def measure_by_size(
    cfg: config.Config,
    world: World,
    bare: bool,
    settings: dict,
    timed: int = 8,
    sequences: int = 16,
) -> dict:
    """One process's speed and memory. The loss is that of step 8.

    Times steps of one micro-batch and of three. Their slope is the time of a micro-batch and their
    intercept that of the optimizer. From these follows a step of `sequences` sequences.
    bare: times benchmarks/overhead.py's loop on the same model instead of train.py's step.
    """
    size = config.micro_batch_size(cfg.train, 1)
    length = cfg.train.seq_len
    # the first 3 steps of one micro-batch, and the first of three, warm up
    micro_batches = [1] * (3 + timed) + [3] * (1 + timed)
    losses = {}
    batches = {step: random_batch(cfg, world, n) for step, n in enumerate(micro_batches, 1)}
    if bare:
        loop = BareLoop(cfg, world, batches)
        model, train = loop.model, loop.step
    else:
        model, optimizer, guard = build(cfg, world, settings)

        def train(step: int) -> None:
            unshard_first_units(model, cfg.parallel)
            sums, _ = training_step(model, optimizer, guard, batches[step], step, cfg, world)
            losses[step] = sums["loss"]

    seconds = []
    for step in batches:
        began = synchronize(world.device)
        train(step)
        seconds.append(synchronize(world.device) - began)
    loss = loop.loss(8) if bare else losses[8].item() / batches[8].valid_tokens
    one = spread(seconds[3 : 3 + timed])
    three = spread(seconds[-timed:])
    figures = step_of(one["median"], three["median"], sequences / size)
    if "step_seconds" in figures:
        rate = sequences * length / figures["step_seconds"]
        peak = peak_flops(world.device)
        figures["tokens_per_second"] = rate
        figures["mfu"] = rate * flops_per_token(model, length) / peak if peak else None
    reserved_gib = None
    if world.device.type == "cuda":
        reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    return figures | {
        "micro_batch_size": size,
        "seconds_of_one": one,
        "seconds_of_three": three,
        "first_step_seconds": seconds[0],
        "loss": loss,
        "peak_gib": peak_memory_gib(world.device),
        "reserved_gib": reserved_gib,
    }


def step_of(one: float, three: float, micro_batches: float) -> dict:
    """Seconds of a step of so many micro-batches, and of its parts, from those of steps of one and
    of three."""
    micro_batch = (three - one) / 2
    figures = {"micro_batch_seconds": micro_batch, "optimizer_seconds": one - micro_batch}
    if micro_batch <= 0:
        return figures | {"marked": "noise: three micro-batches took no longer than one"}
    return figures | {"step_seconds": one + micro_batch * (micro_batches - 1)}


def spread(seconds: list[float]) -> dict:
    timed = sorted(seconds)
    return {
        "median": statistics.median(timed),
        "p5": timed[len(timed) // 20],
        "p95": timed[-1 - len(timed) // 20],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--steps", type=count, default=20)
    parser.add_argument("--warm-up", type=int, default=5, help="steps after the first")
    parser.add_argument(
        "--real", action="store_true", help="read the configuration's prepared data"
    )
    parser.add_argument("--json", action="store_true")
    add_experiments(parser)
    args, overrides = parser.parse_known_args(argv)
    try:
        settings = experiments(args)
        cfg = config.load(args.config, ["--run.device=auto", *overrides])
        with distributed(cfg) as world:
            row = measure(
                resolve_param_dtype(cfg, world),
                world,
                args.steps,
                args.warm_up,
                args.real,
                settings,
            )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if world.rank == 0:
        if args.json:
            print(json.dumps(row))
        else:
            for key, value in row.items():
                print(f"{key:<30} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
