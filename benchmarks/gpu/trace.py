"""Where a step's time goes on this device: by kernel and stream, and idle."""

import pathlib
import tempfile
from collections import defaultdict

import torch

from benchmarks.step import build, random_batch, synchronize
from config import Config
from extras.profiler.profiler import DEVICE, STEPS, Event, read, time_by_row
from parallel.fsdp import unshard_first_units
from parallel.mesh import World
from train import training_step

SHOWN = 60  # kernels, the longest first


def trace(cfg: Config, world: World, each: float) -> dict:
    """Milliseconds of a step of two micro-batches by kind of work, and its kernels."""
    model, optimizer, guard = build(cfg, world)
    batch = random_batch(cfg, world, 2)

    def train(step: int) -> None:
        unshard_first_units(model, cfg.parallel)
        training_step(model, optimizer, guard, batch, step, cfg, world)
        synchronize(world.device)

    for step in (1, 2, 3):
        train(step)
    profiler = torch.profiler.profile(acc_events=True)  # else torch 2.11 warns
    with profiler, torch.profiler.record_function(STEPS):
        train(4)
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = read(path)

    return {"milliseconds": time_by_row(events), "kernels": by_kernel(events)}


def by_kernel(events: list[Event]) -> dict[str, tuple[int, float]]:
    """(number, milliseconds) of the kernels on each stream that take longest. Of those that
    overlap, both count."""
    number: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event.category in DEVICE:
            kernel = f"{event.name[:90]}, stream {event.thread}"
            number[kernel] += 1
            spent[kernel] += (event.end - event.begin) / 1e3
    longest = sorted(spent, key=lambda kernel: -spent[kernel])[:SHOWN]
    return {kernel: (number[kernel], spent[kernel]) for kernel in longest}
