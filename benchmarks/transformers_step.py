"""Times the training step against transformers' LlamaForCausalLM in a plain loop.

    ./run_train.sh -m benchmarks.transformers_step
    torchrun --nproc-per-node 2 -m benchmarks.transformers_step --parallel.dp_replicate=2 --parallel.dp_shard=1
    torchrun --nproc-per-node 2 -m benchmarks.transformers_step --steps 100 --parallel.reshard_after_forward=false

Both have the sizes of configs/tiny.toml, the same weights and batches of random tokens. They train
in float32, with a rank's batch as one micro-batch. Ours is train.py's training_step(), without
rows, evaluation or checkpoints. Theirs is forward with labels, backward, torch's clip_grad_norm_
and fused AdamW, on several ranks under DistributedDataParallel. They take turns, step by step, and
of several ranks the slowest counts. Fails where losses differ. Needs transformers
(tests/requirements.txt).
"""

import argparse
import math
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import config
from benchmarks import count
from config import ConfigError
from data.loader import Batch, inputs_and_targets
from extras.huggingface import config as hf_config
from extras.huggingface.weights import hf_name
from model.build import meta_model
from optim import Progress, UpdateGuard, build_optimizer
from parallel.fsdp import unshard_first_units
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from parallel.ranks import all_gather_objects, rank_and_size
from run.rank import distributed
from train import training_step

TINY = pathlib.Path(__file__).parent.parent / "configs/tiny.toml"
WARM_UP = 5  # steps
Step = Callable[[int, Batch], Tensor]  # trains one; the loss, a mean over the rank's tokens


def our_step(cfg: config.Config, world: World, weights: dict[str, Tensor]) -> Step:
    """weights: by transformers' names."""

    def read(name: str, offsets: tuple[int, ...], out: Tensor) -> None:
        shard = tuple(slice(start, start + size) for start, size in zip(offsets, out.shape))
        out.copy_(weights[hf_name(name)][shard])

    model = meta_model(cfg.model)
    device = storage_device(cfg.parallel, world)
    parallelize(model, cfg, world)
    materialize(model, 0, device, read)
    optimizer = build_optimizer(model, cfg.optim)
    guard = UpdateGuard(optimizer, device, 0, Progress())

    def step(number: int, batch: Batch) -> Tensor:
        unshard_first_units(model, cfg.parallel)
        sums, _ = training_step(model, optimizer, guard, batch, number, cfg, world)
        return sums["loss"] * world.dp_size / batch.valid_tokens

    return step


def their_step(cfg: config.Config, world: World, theirs: LlamaForCausalLM) -> Step:
    o = cfg.optim
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    not_decayed = [p for p in theirs.parameters() if p.ndim < 2]
    model: nn.Module = theirs.to(world.device).train()
    if world.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": o.weight_decay},
            {"params": not_decayed, "weight_decay": 0.0},
        ],
        o.lr,
        o.betas,
        o.eps,
        fused=True,
    )

    def step(number: int, batch: Batch) -> Tensor:
        ((tokens, targets),) = batch.micro_batches
        tokens = tokens.to(world.device)
        targets = targets.to(world.device)  # shifted already
        loss = model(tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


Pairs = list[tuple[float, float]]  # seconds of (ours, theirs) for each step


def measure(cfg: config.Config, world: World, steps: int) -> tuple[Pairs, Pairs]:
    """(by the clock, in CPU time of all threads), of the slowest rank. Raises ArithmeticError where
    the losses differ."""
    t = cfg.train
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**hf_config.render(cfg.model, t.seq_len, "float32", {})))
    arms = (our_step(cfg, world, theirs.state_dict()), their_step(cfg, world, theirs))
    generator = torch.Generator().manual_seed(world.dp_rank)
    clock = []
    cpu = []
    for number in range(1, WARM_UP + steps + 1):
        ids = torch.randint(
            cfg.model.vocab_size, (t.micro_batch_size, t.seq_len + 1), generator=generator
        )
        batch = Batch([inputs_and_targets(ids)], config.tokens_per_step(cfg.train), 0)
        losses = [0.0, 0.0]
        clock_seconds = [0.0, 0.0]
        cpu_seconds = [0.0, 0.0]
        order = (0, 1) if number % 2 else (1, 0)
        for arm in order:
            dist.barrier()
            clock_began = time.perf_counter()
            cpu_began = time.process_time()
            losses[arm] = arms[arm](number, batch).item()  # waits for the device
            clock_seconds[arm] = time.perf_counter() - clock_began
            cpu_seconds[arm] = time.process_time() - cpu_began
        if not math.isclose(*losses, rel_tol=1e-3):
            raise ArithmeticError(f"step {number}: loss {losses[0]}, of transformers {losses[1]}")
        if number > WARM_UP:
            clock.append(clock_seconds)
            cpu.append(cpu_seconds)
    return slowest(all_gather_objects(clock)), slowest(all_gather_objects(cpu))


def slowest(ranks: list[list[list[float]]]) -> Pairs:
    """The largest seconds of all ranks, of each step and arm."""
    pairs = []
    for step in zip(*ranks):
        ours, theirs = zip(*step)
        pairs.append((max(ours), max(theirs)))
    return pairs


def ratio(pairs: Pairs) -> float:
    """Of medians."""
    ours, theirs = zip(*pairs)
    return statistics.median(ours) / statistics.median(theirs)


def interval(pairs: Pairs, draws: int = 2000) -> tuple[float, float]:
    """95 % of ratio(), by bootstrap of the pairs."""
    chance = random.Random(0)
    drawn = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    return drawn[draws // 40], drawn[-1 - draws // 40]


def report(pairs: Pairs) -> str:
    low, high = interval(pairs)
    return f"ratio {ratio(pairs):.3f} ({low:.3f} ... {high:.3f})"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=count, default=60)
    args, overrides = parser.parse_known_args(argv)
    ranks = rank_and_size()[2]
    try:
        # a constant learning rate, as theirs, so low that rounding does not add up
        options = [
            "--parallel.param_dtype=float32",
            "--optim.schedule=constant",
            "--optim.warmup_steps=0",
            "--optim.lr=1e-4",
            *overrides,
        ]
        rank_batch_size = config.load(str(TINY), options).train.global_batch_size // ranks
        cfg = config.load(str(TINY), [*options, f"--train.micro_batch_size={rank_batch_size}"])
        with distributed(cfg) as world:
            clock, cpu = measure(cfg, world, args.steps)
    except (ConfigError, ArithmeticError) as error:
        print(error, file=sys.stderr)
        return 1
    if world.rank == 0:
        ours, theirs = zip(*clock)
        their_name = "transformers with DDP" if ranks > 1 else "transformers"
        print(
            f"{ranks} x {world.device.type} ({world.dp_replicate} replicas x {world.dp_shard} "
            f"shards), {args.steps} steps of {config.tokens_per_step(cfg.train):,} tokens: "
            f"{1000 * statistics.median(ours):.1f} ms, {their_name} "
            f"{1000 * statistics.median(theirs):.1f} ms"
        )
        print(f"CPU time: {report(cpu)}")
        print(report(clock))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
