"""Times the training step against transformers' LlamaForCausalLM in a plain loop: same sizes, weights and batches.

    ./run_train.sh -m benchmarks.transformers_step
    torchrun --nproc-per-node 2 -m benchmarks.transformers_step --parallel.dp_replicate=2 --parallel.dp_shard=1
    torchrun --nproc-per-node 2 -m benchmarks.transformers_step --steps 100 --parallel.reshard_after_forward=false

Of configs/tiny.toml, in float32, with a rank's whole batch as one micro-batch, on random tokens. Ours is train.py's
training_step(), without rows, evaluation or checkpoints. Theirs: forward with labels, backward, torch's clip_grad_norm_
and fused AdamW; on several ranks under DistributedDataParallel. They take turns, step by step, and of several ranks the
slowest counts. Fails where losses differ. Needs transformers (tests/requirements.txt).
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
from lifecycle.process_group import distributed
from model.build import meta_model
from optim import FiniteGuard, build_optimizer
from parallel.fsdp import unshard_first_units
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from parallel.ranks import all_gather_objects, rank_and_size
from train import training_step

TINY = pathlib.Path(__file__).parent.parent / "configs/tiny.toml"
WARM_UP = 5  # steps
Step = Callable[[int, Batch], Tensor]  # trains one; the loss, a mean over the rank's tokens


def our_step(cfg: config.Config, world: World, weights: dict[str, Tensor]) -> Step:
    """weights: by transformers' names."""

    def read(name: str, offsets: tuple[int, ...], out: Tensor) -> None:
        out.copy_(
            weights[hf_name(name)][tuple(slice(o, o + size) for o, size in zip(offsets, out.shape))]
        )

    model, device = meta_model(cfg.model), storage_device(cfg, world)
    parallelize(model, cfg, world)
    materialize(model, 0, device, read)
    optimizer = build_optimizer(model, cfg.optim)
    guard = FiniteGuard(optimizer, device, 0)

    def step(number: int, batch: Batch) -> Tensor:
        unshard_first_units(model, cfg.parallel)
        sums, _ = training_step(model, optimizer, guard, batch, number, cfg, world)
        return sums["loss"] * world.dp_size / batch.valid_tokens

    return step


def their_step(cfg: config.Config, world: World, theirs: LlamaForCausalLM) -> Step:
    o, decayed = cfg.optim, [p for p in theirs.parameters() if p.ndim >= 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    model: nn.Module = theirs.to(world.device).train()
    if world.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": o.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        o.lr,
        o.betas,
        o.eps,
        fused=True,
    )

    def step(number: int, batch: Batch) -> Tensor:
        ((tokens, targets),) = batch.micro_batches
        tokens, targets = tokens.to(world.device), targets.to(world.device)
        loss = model(
            tokens, labels=targets, shift_labels=targets, use_cache=False
        ).loss  # shifted already
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(cfg: config.Config, world: World, steps: int) -> tuple[list[tuple[float, float]], ...]:
    """Seconds of (ours, theirs) for each step, by the clock and in CPU time of all threads. Raises ArithmeticError
    where the losses differ."""
    t = cfg.train
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**hf_config.render(cfg.model, t.seq_len, "float32", {})))
    both = our_step(cfg, world, theirs.state_dict()), their_step(cfg, world, theirs)
    generator = torch.Generator().manual_seed(world.dp_rank)
    seconds = []
    for number in range(1, WARM_UP + steps + 1):
        ids = torch.randint(
            cfg.model.vocab_size, (t.micro_batch_size, t.seq_len + 1), generator=generator
        )
        batch = Batch([inputs_and_targets(ids)], config.tokens_per_step(cfg), 0)
        losses, taken = [0.0, 0.0], [(0.0, 0.0)] * 2
        for arm in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            losses[arm] = both[arm](number, batch).item()  # waits for the device
            taken[arm] = time.perf_counter() - began, time.process_time() - worked
        if not math.isclose(*losses, rel_tol=1e-3):
            raise ArithmeticError(f"step {number}: loss {losses[0]}, of transformers {losses[1]}")
        seconds.append(taken)
    ranks = all_gather_objects(seconds[WARM_UP:])
    return tuple(
        [tuple(max(rank[i][arm][kind] for rank in ranks) for arm in (0, 1)) for i in range(steps)]
        for kind in (0, 1)
    )


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Of medians."""
    ours, theirs = zip(*pairs)
    return statistics.median(ours) / statistics.median(theirs)


def interval(pairs: list[tuple[float, float]], draws: int = 2000) -> tuple[float, float]:
    """95 % of ratio(), by bootstrap of the pairs."""
    chance = random.Random(0)
    drawn = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    return drawn[draws // 40], drawn[-1 - draws // 40]


def report(pairs: list[tuple[float, float]]) -> str:
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
        whole = config.load(str(TINY), options).train.global_batch_size // ranks
        cfg = config.load(str(TINY), [*options, f"--train.micro_batch_size={whole}"])
        with distributed(cfg) as world:
            clock, cpu = measure(cfg, world, args.steps)
    except (ConfigError, ArithmeticError) as error:
        print(error, file=sys.stderr)
        return 1
    if world.rank == 0:
        ours, theirs = (1000 * statistics.median(arm) for arm in zip(*clock))
        print(
            f"{ranks} x {world.device.type} ({world.dp_replicate} replicas x {world.dp_shard} shards), "
            f"{args.steps} steps of {config.tokens_per_step(cfg):,} tokens: {ours:.1f} ms, transformers "
            f"{'with DDP ' * (ranks > 1)}{theirs:.1f} ms"
        )
        print(f"CPU time: {report(cpu)}")
        print(report(clock))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
