"""Suggests changes where a plan does not fit: plans each change, and names the fastest that fits.

Called by dry_run.py. alternatives() lists what would need less memory, changes() orders it into
changes of one option or of several, tried() makes the plan of each.
"""

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import config
from config import ConfigError
from extras.planner.devices import device
from extras.planner.plan import Asked, plan

# each saves fewer activations than the one before
RECOMPUTE = ("none", "elementwise", "selective", "full")
# dtypes of an adapter's base, each smaller than the one before
BASES = ("float32", "bfloat16", "nf4")
# options that combinations change, each combination one more of them than the one before
COMBINED = (
    "train.micro_batch_size",
    "parallel.recompute",
    "parallel.gather_once",
    "parallel.reshard_after_forward",
    "parallel.sync_every_micro_batch",
    "optim.state_dtype",
    "lora.base_dtype",
)


class Change(NamedTuple):
    overrides: tuple[str, ...]  # --section.key=value
    times: int = 1  # factor of the world size


def alternatives(cfg: config.Config, ranks: int, gpus_per_node: int) -> dict[str, list]:
    """The values of each option that need less memory than its value now, the least memory last."""
    p = cfg.parallel
    dp_size = math.prod(config.mesh_shape(cfg, ranks)[:2])
    sequences = config.micro_batch_size(cfg.train, dp_size)
    return {
        "train.micro_batch_size": [sequences >> n for n in range(1, sequences.bit_length())],
        "parallel.gather_once": after((True, False), p.gather_once),
        "parallel.reshard_after_forward": after((False, True), p.reshard_after_forward),
        "parallel.prefetch_forward": [1] if p.prefetch_forward > 1 else [],
        "parallel.prefetch_backward": [1] if p.prefetch_backward > 1 else [],
        "parallel.sync_every_micro_batch": after((False, True), p.sync_every_micro_batch),
        "parallel.recompute": after(RECOMPUTE, p.recompute),
        "optim.state_dtype": after(("float32", "bfloat16"), cfg.optim.state_dtype),
        "lora.base_dtype": after(BASES, cfg.lora.base_dtype) if cfg.lora else [],
        "parallel.tp": [n for n in (2, 4, 8) if n > p.tp and gpus_per_node % n == 0],
        "parallel.cp": [n for n in (2, 4, 8) if n > p.cp and n <= ranks],
        "parallel.cpu_offload": after((False, True), p.cpu_offload),
    }


def after(values: Sequence, current: Any) -> list:
    """The values after the current one; if it is not among them, all but the first."""
    first = values.index(current) + 1 if current in values else 1
    return list(values[first:])


def override(option: str, value: Any) -> str:
    # TOML writes true, not True
    return f"--{option}={str(value).lower()}"


def changes(cfg: config.Config, ranks: int, gpus_per_node: int) -> Iterator[Change]:
    """Changes of one option first, then growing combinations."""
    single = {}
    for option, values in alternatives(cfg, ranks, gpus_per_node).items():
        single[option] = [override(option, value) for value in values]
    for overrides in single.values():
        for each in overrides:
            yield Change((each,))
    for times in (2, 4, 8):
        yield Change((), times)

    together = [single[option][-1] for option in COMBINED if single[option]]
    for n in range(2, len(together) + 1):
        yield Change(tuple(together[:n]))
    for option in ("parallel.tp", "parallel.cp", "parallel.cpu_offload"):
        for each in single[option]:
            yield Change((*together, each))
    with_more_ranks = [tuple(together)]
    with_more_ranks += [(*together, each) for each in single["parallel.tp"]]
    for overrides in with_more_ranks:
        for times in (2, 4, 8, 16, 32, 64):
            yield Change(overrides, times)


def tried(ranks: int, args: Namespace, asked: Asked) -> Iterator[tuple[Change, dict]]:
    """The valid changes, each with its plan: every change of one option, then combinations.

    Combinations are tried if no change of one option fits without offload, up to the first that
    does. Speeds assume an H100 if no GPU is given.
    """
    asked = with_gpu(asked)
    cfg = config.load(args.config, args.overrides)
    one_fits = False
    for change in changes(cfg, ranks, asked.gpus_per_node):
        # the world size is an option, too
        options = len(change.overrides) + (change.times > 1)
        if one_fits and options > 1:
            return
        try:
            changed = config.load(args.config, [*args.overrides, *change.overrides])
            row = plan(changed, ranks * change.times, asked)
        except ConfigError:
            # for example, a degree that does not divide the heads or the batch
            continue
        if row["fits"] and speed(row) > 0:
            one_fits = True
        yield change, row


def with_gpu(asked: Asked) -> Asked:
    return replace(asked, gpu=asked.gpu or device("H100"), gpu_memory_gib=asked.memory_gib)


def gathered_once(
    change: Change, row: dict, ranks: int, args: Namespace, asked: Asked
) -> tuple[Change, dict] | None:
    """The change and gather_once with its plan, if that is faster and fits. row: the change's plan.

    None if it is on, or a step is one micro-batch.
    """
    overrides = (*change.overrides, override("parallel.gather_once", True))
    cfg = config.load(args.config, [*args.overrides, *change.overrides])
    if cfg.parallel.gather_once or row["accumulation_steps"] == 1:
        return None
    cfg = replace(cfg, parallel=replace(cfg.parallel, gather_once=True))
    once = plan(cfg, ranks * change.times, with_gpu(asked))
    if not once["fits"] or speed(once) <= speed(row):
        return None
    return Change(overrides, change.times), once


def words(change: Change, row: dict) -> str:
    """The change as arguments of the command line. row: its plan."""
    arguments = [*change.overrides]
    if change.times > 1:
        arguments.append(f"--world-size {row['world_size']}")
    return " ".join(arguments)


def speed(row: dict) -> float:
    """Tokens/s per GPU to rank plans by; 0 with offload, whose copies the plan does not time."""
    return 0.0 if row["host_gib"] else row["tokens_per_second_per_device"]


def fastest(tried: Iterable[tuple[Change, dict]]) -> tuple[Change, dict] | None:
    fitting = [(change, row) for change, row in tried if row["fits"]]
    return max(fitting, key=lambda each: speed(each[1]), default=None)


def advise(ranks: int, args: Namespace, asked: Asked) -> str:
    """A line for each change that was tried, and the fastest that fits."""
    plans = list(tried(ranks, args, asked))
    best = fastest(plans)
    once = gathered_once(*best, ranks, args, asked) if best else None
    if once:
        plans.append(once)
        best = once
    assumed = "" if asked.gpu else " (speeds: an H100's)"
    lines = [f"{ranks} ranks: what would change it, by the plan{assumed}"]
    for change, row in plans:
        rate = f"{speed(row):,.0f}" if speed(row) else "unknown"
        fits = "fits" if row["fits"] else ""
        lines.append(
            f"  {row['device_gib']:9.1f} GiB {rate:>9} tok/s a GPU   {fits:<6}{words(change, row)}"
        )
    if best is None:
        lines.append("nothing on this list fits: take GPUs with more memory, or a smaller model")
    else:
        lines.append(f"the fastest that fits: {words(*best)}")
    return "\n".join(lines)


def faster(row: dict, ranks: int, args: Namespace, asked: Asked) -> str:
    """A line on gather_once where the plan `row` fits and that would be faster; "" elsewhere."""
    once = gathered_once(Change(()), row, ranks, args, asked)
    if once is None:
        return ""
    change, row = once
    return (
        f"{ranks} ranks: faster, and fits: {words(change, row)} ({row['device_gib']:.1f} GiB, "
        f"{speed(row):,.0f} tok/s a GPU)\n"
    )
