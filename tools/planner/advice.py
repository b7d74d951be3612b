"""Suggests changes where a plan does not fit: plans each, and names the fastest that fits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import config
from config import ConfigError
from tools.planner.devices import device
from tools.planner.plan import Asked, plan

# The values of each option, each needing less memory than the one before.
OPTIONS = {
    "parallel.recompute": ("none", "elementwise", "selective", "full"),
    "parallel.gather_once": (True, False),
    "parallel.reshard_after_forward": (False, True),
    "parallel.sync_every_micro_batch": (False, True),
    "optim.state_dtype": ("float32", "bfloat16"),
    "lora.base_dtype": ("float32", "bfloat16", "nf4"),
    "parallel.tp": (1, 2, 4, 8),
    "parallel.cp": (1, 2, 4, 8),
    "parallel.cpu_offload": (False, True),
}
# of these the last, which change how a rank computes, are in no combination
ALONE = ("parallel.tp", "parallel.cp", "parallel.cpu_offload")
MORE_RANKS = (2, 4, 8, 16, 32, 64)

Change = tuple[tuple[str, ...], int]  # --section.key=value, and the factor of the world size


class Tried(NamedTuple):
    words: str  # the change, as arguments of the command line
    cfg: config.Config
    row: dict  # its plan

    @property
    def speed(self) -> float:
        """Tokens/s per GPU; 0 with offload, whose copies no plan times."""
        return 0.0 if self.row["host_gib"] else self.row["tokens_per_second_per_device"]


def alternatives(cfg: config.Config, row: dict) -> dict[str, list[str]]:
    """--section.key=value by option: its values after the current one. row: the plan of cfg."""
    current = config.values_of(config.to_dict(cfg))
    sequences = row["micro_batch_size"]
    values = {"train.micro_batch_size": [sequences >> n for n in range(1, sequences.bit_length())]}
    for option, ordered in OPTIONS.items():
        value = current[option]
        if value is not None:  # of a section that is off
            # of another value, such as recompute = 2, all but the first
            after = ordered.index(value) + 1 if value in ordered else 1
            values[option] = [*ordered[after:]]
    # TOML writes true, not True
    return {
        option: [f"--{option}={str(value).lower()}" for value in after]
        for option, after in values.items()
        if after
    }


def changes(cfg: config.Config, row: dict) -> Iterator[Change]:
    """Changes of one option first, then growing combinations, then these on more ranks."""
    by_option = alternatives(cfg, row)
    for overrides in by_option.values():
        for override in overrides:
            yield (override,), 1
    for times in MORE_RANKS[:3]:
        yield (), times
    together = [by_option[option][-1] for option in by_option if option not in ALONE]
    for count in range(2, len(together) + 1):
        yield tuple(together[:count]), 1
    for times in MORE_RANKS:
        yield tuple(together), times


def tried(row: dict, cfg: config.Config, asked: Asked) -> Iterator[Tried]:
    """The changes that need less memory, with their plans: combinations only if no change of one
    option fits. row: the plan of cfg. Speeds assume an H100 if no GPU is given."""
    asked = replace(asked, gpu=asked.gpu or device("H100"), gpu_memory_gib=asked.memory_gib)
    assert cfg.run.name  # the file's, unless said
    tables = config.to_dict(cfg)
    one_fits = False
    for overrides, times in changes(cfg, row):
        if one_fits and len(overrides) + (times > 1) > 1:
            return
        ranks = row["world_size"] * times
        try:
            changed = config.from_dict(tables, "the plan", overrides)
            changed_row = plan(changed, ranks, asked)
        except ConfigError:
            # for example, a degree that does not divide the heads or the batch
            continue
        if changed_row["device_gib"] < row["device_gib"]:
            words = [*overrides, f"--world-size {ranks}"] if times > 1 else overrides
            change = Tried(" ".join(words), changed, changed_row)
            one_fits |= changed_row["fits"] and change.speed > 0
            yield change


def advise(row: dict, cfg: config.Config, asked: Asked) -> str:
    """A line for each change that needs less, and the fastest that fits. row: the plan of cfg."""
    assumed = "" if asked.gpu else " (speeds: an H100's)"
    lines = [f"{row['world_size']} ranks: what would need less, by the plan{assumed}"]
    best = None
    for change in tried(row, cfg, asked):
        speed = f"{change.speed:,.0f}" if change.speed else "unknown"
        fits = "fits" if change.row["fits"] else ""
        gib = change.row["device_gib"]
        lines.append(f"  {gib:9.1f} GiB {speed:>9} tok/s a GPU   {fits:<6}{change.words}")
        if fits and (best is None or change.speed > best.speed):
            best = change
    if best is None:
        lines.append("nothing on this list fits: take GPUs with more memory, or a smaller model")
    else:
        lines.append(f"the fastest that fits: {best.words}")
    return "\n".join(lines)
