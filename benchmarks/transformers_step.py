"""Times the training step against transformers' LlamaForCausalLM in a plain loop.

    ./run_train.sh -m benchmarks.transformers_step
    torchrun --nproc-per-node 2 -m benchmarks.transformers_step --parallel.dp_replicate=2 --parallel.dp_shard=1

Both have the sizes of configs/tiny.toml, the same weights and random tokens, in float32, a rank's
batch as one micro-batch. Theirs is forward with labels, backward, torch's clip_grad_norm_ and fused
AdamW, on several ranks under DistributedDataParallel. They take turns; the slowest rank counts.
"""

import argparse
import math
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import config
from benchmarks import REPO, interval
from benchmarks.step import Step, our_step, sharded
from data.loader import Batch, inputs_and_targets
from extras.huggingface import config as hf_config
from extras.huggingface.weights import hf_name
from parallel.mesh import World
from parallel.ranks import all_gather_objects, rank_and_size
from run.rank import distributed
from tools.planner.arguments import positive_integer

WARM_UP = 5  # steps
Pairs = list[tuple[float, float]]  # seconds of (ours, theirs) for each step


def their_step(cfg: config.Config, world: World, theirs: LlamaForCausalLM) -> Step:
    o = cfg.optim
    model: nn.Module = theirs.to(world.device).train()
    if world.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    groups = []
    for is_matrix, decay in ((True, o.weight_decay), (False, 0.0)):
        params = [p for p in theirs.parameters() if (p.ndim >= 2) == is_matrix]
        groups.append({"params": params, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, o.lr, o.betas, o.eps, fused=True)

    def step(number: int, batch: Batch) -> Tensor:
        tokens, targets = (tensor.to(world.device) for tensor in batch.micro_batches[0])
        # targets are shifted already
        loss = model(tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(cfg.train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(cfg: config.Config, world: World, steps: int) -> Pairs:
    """Of the slowest rank. Raises ArithmeticError where the losses differ."""
    t = cfg.train
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**hf_config.render(cfg.model, t.seq_len, "float32", {})))
    weights = theirs.state_dict()

    def read(name: str, offsets: tuple[int, ...], out: Tensor) -> None:
        shard = tuple(slice(start, start + size) for start, size in zip(offsets, out.shape))
        out.copy_(weights[hf_name(name)][shard])

    ours = our_step(sharded(cfg, world, read), cfg, world)
    arms = (ours, their_step(cfg, world, theirs))
    generator = torch.Generator().manual_seed(world.dp_rank)
    shape = (config.micro_batch_size(t, world.dp_size), t.seq_len + 1)
    pairs = []
    for number in range(1, WARM_UP + steps + 1):
        ids = torch.randint(cfg.model.vocab_size, shape, generator=generator)
        batch = Batch([inputs_and_targets(ids)], config.tokens_per_step(t), 0)
        losses, seconds = [0.0, 0.0], [0.0, 0.0]
        for arm in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            losses[arm] = arms[arm](number, batch).item()  # waits for the device
            seconds[arm] = time.perf_counter() - began
        if not math.isclose(*losses, rel_tol=1e-3):
            raise ArithmeticError(f"step {number}: loss {losses[0]}, of transformers {losses[1]}")
        pairs.append(seconds)
    by_rank = all_gather_objects(pairs[WARM_UP:])
    return [tuple(map(max, zip(*step))) for step in zip(*by_rank)]


def ratio(pairs: Pairs) -> float:
    """Of medians."""
    ours, theirs = zip(*pairs)
    return statistics.median(ours) / statistics.median(theirs)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=positive_integer, default=60)
    args, overrides = parser.parse_known_args(argv)
    ranks = rank_and_size()[2]
    # a constant learning rate, as theirs, so low that rounding does not add up
    options = ["--parallel.param_dtype=float32", "--optim.schedule=constant", "--optim.lr=1e-4"]
    options += ["--optim.warmup_steps=0", *overrides]
    tiny = f"{REPO}/configs/tiny.toml"
    rank_batch_size = config.load(tiny, options).train.global_batch_size // ranks
    cfg = config.load(tiny, [*options, f"--train.micro_batch_size={rank_batch_size}"])
    with distributed(cfg) as world:
        pairs = measure(cfg, world, args.steps)
    if world.rank == 0:
        ours, theirs = (1000 * statistics.median(seconds) for seconds in zip(*pairs))
        low, high = interval(pairs, ratio)
        print(f"{ranks} x {world.device.type}: {ours:.1f} ms, transformers {theirs:.1f} ms")
        print(f"ratio {ratio(pairs):.3f} ({low:.3f} ... {high:.3f})")
    return 0


if __name__ == "__main__":
    config.run_tool(main)
