"""Suggests changes where a plan does not fit: plans each change, and names the fastest that fits."""

import math
import shlex
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace

import config
from config import ConfigError
from extras.planner.devices import device
from extras.planner.plan import Asked, plan

# each saves fewer activations than the one before
RECOMPUTE = ("none", "elementwise", "selective", "full")
# dtypes of an adapter's base, each smaller than the one before
BASES = ("float32", "bfloat16", "nf4")
Change = tuple[tuple[str, ...], int]  # (overrides, factor of the world size)


def changes(cfg: config.Config, ranks: int, gpus_per_node: int) -> Iterator[Change]:
    """Single changes first, then growing combinations."""
    p, sequences = (
        cfg.parallel,
        config.micro_batch_size(cfg, math.prod(config.mesh_shape(cfg, ranks)[:2])),
    )
    smaller = [
        f"--train.micro_batch_size={sequences >> n}" for n in range(1, sequences.bit_length())
    ]
    less = [
        f"--parallel.recompute={mode}"
        for mode in (
            RECOMPUTE[RECOMPUTE.index(p.recompute) + 1 :]
            if p.recompute in RECOMPUTE
            else RECOMPUTE[1:]
        )
    ]
    reshard = ["--parallel.reshard_after_forward=true"] * (not p.reshard_after_forward)
    ahead = [
        f"--parallel.{name}=1"
        for name in ("prefetch_forward", "prefetch_backward")
        if getattr(p, name) > 1
    ]
    sync = ["--parallel.sync_every_micro_batch=true"] * (not p.sync_every_micro_batch)
    moments = ["--optim.state_dtype=bfloat16"] * (cfg.optim.state_dtype != "bfloat16")
    bases = (
        [f"--lora.base_dtype={name}" for name in BASES[BASES.index(cfg.lora.base_dtype) + 1 :]]
        if cfg.lora
        else []
    )
    together = [
        name for names in (smaller, less, reshard, sync, moments, bases) for name in names[-1:]
    ]
    shared = [
        f"--parallel.{name}={degree}"
        for name in ("tp", "cp")
        for degree in (2, 4, 8)
        if getattr(p, name) < degree
        and (gpus_per_node % degree == 0 if name == "tp" else degree <= ranks)
    ]
    offload = ["--parallel.cpu_offload=true"] * (not p.cpu_offload)
    for name in (*smaller, *reshard, *ahead, *sync, *less, *moments, *bases, *shared, *offload):
        yield (name,), 1
    yield from (((), times) for times in (2, 4, 8))
    for n in range(2, len(together) + 1):
        yield tuple(together[:n]), 1
    for name in (*shared, *offload):
        yield (*together, name), 1
    for names in ([], *([name] for name in shared if ".tp=" in name)):
        yield from (((*together, *names), times) for times in (2, 4, 8, 16, 32, 64))


def tried(ranks: int, args: Namespace, asked: Asked) -> Iterator[tuple[Change, dict]]:
    """The valid changes, each with its plan: every single change; if none of them fits without offload, combinations
    up to the first that does. Speeds assume an H100 if no GPU is given."""
    asked = replace(asked, gpu=asked.gpu or device("H100"), gpu_memory_gib=asked.memory_gib)
    fits = False
    for overrides, times in changes(
        config.load(args.config, args.overrides), ranks, asked.gpus_per_node
    ):
        if fits and len(overrides) + (times > 1) > 1:
            return
        try:
            found = plan(
                config.load(args.config, [*args.overrides, *overrides]), ranks * times, asked
            )
        except ConfigError:  # for example, a degree that does not divide the heads or the batch
            continue
        fits |= found["fits"] and speed(found) > 0
        yield (overrides, times), found


def words(change: Change, found: dict) -> str:
    return " ".join([*change[0], *[f"--world-size {found['world_size']}"] * (change[1] > 1)])


def speed(found: dict) -> float:
    """Tokens/s per GPU to rank plans by; 0 with offload, since the plan lacks the time of host copies."""
    return 0.0 if found["host_gib"] else found["tokens_per_second_per_device"]


def fastest(tried: Iterable[tuple[Change, dict]]) -> tuple[Change, dict] | None:
    return max(
        (each for each in tried if each[1]["fits"]), key=lambda each: speed(each[1]), default=None
    )


def advise(ranks: int, args: Namespace, asked: Asked) -> str:
    found = [*tried(ranks, args, asked)]
    lines = [
        f"{ranks} ranks: what would change it, by the plan"
        + ("" if asked.gpu else " (speeds: an H100's)")
    ]
    for change, plan_ in found:
        rate = f"{speed(plan_):,.0f}" if speed(plan_) else "unknown"
        lines.append(
            f"  {plan_['device_gib']:9.1f} GiB {rate:>9} tok/s a GPU   {'fits' * plan_['fits']:<6}"
            f"{words(change, plan_)}"
        )
    best = fastest(found)
    return "\n".join(
        [
            *lines,
            f"the fastest that fits: {words(*best)}"
            if best
            else "nothing on this list fits: take GPUs with more memory, or a smaller model",
        ]
    )


def out_of_memory(cfg: config.Config, ranks: int, words: list[str]) -> str:
    """What to do when a run is out of memory: the first change of each option to try, and the dry run that plans them.
    words: the run's command line."""
    single = [
        names[0] for names, _ in changes(cfg, ranks, gpus_per_node=min(ranks, 8)) if len(names) == 1
    ]
    first = {name.partition("=")[0]: name for name in reversed(single)}
    command = shlex.join(
        ["./run_train.sh", *words, "--dry-run", f"--world-size={ranks}", "--gpu-memory-gib"]
    )
    return (
        f"to need less, try one of: {' '.join(reversed(first.values()))}, or more ranks\n"
        f"what each would need, and how fast it would be: {command} G"
    )
