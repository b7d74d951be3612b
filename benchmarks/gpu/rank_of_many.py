"""One GPU as rank 0 of many: train.py's step through all of FSDP2, over a network that only sleeps.

    ./run_train.sh -m benchmarks.gpu.rank_of_many [--ranks 8] [--seconds 540] [--json FILE]
        [--buses 360 50] [--only ARM ...] [--config configs/llama8b.toml] [--section.key=value ...]

torch sends nothing at world size 1. Here the other ranks do not exist: torch's "fake" process
group, and slept_network.py for what FSDP2 sends. First each arm's memory, from an empty cache; then
rounds, in which each arm trains a step without and with each bus (GB/s that a rank sends; some arms
on the first alone). What a step takes longer with it is exposed communication. Not modeled: NCCL's
memory and multiprocessors, slow ranks, the gradient norm's all-reduce, values across ranks.
"""

import argparse
import faulthandler
import gc
import json
import os
import pathlib
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import config
import system
import train
from benchmarks.gpu import polled
from benchmarks.gpu.arms import COMMON, ON_A_CPU
from benchmarks.gpu.slept_network import Network, attach
from benchmarks.step import random_batch, sharded, synchronize, with_optimizer
from model.llama import Llama
from parallel.fsdp import set_communication, set_prefetch, units, unshard_first_units
from parallel.mesh import World, build_mesh

LONGEST = 5.0  # seconds that a step is given before one was timed


@dataclass(frozen=True)
class Arm:
    """Changes to the configuration's [parallel], and to set_communication()."""

    options: dict = field(default_factory=dict)
    fewer: int = 0  # units that do not stay unsharded for the next micro-batch
    defers: bool = True  # False: the end of each backward waits for its reductions
    micro_batches: int = 3
    all_buses: bool = False

    def set_communication(
        self, model: Llama, p: config.Parallel, world: World, last_micro_batch: bool
    ) -> None:
        """In place of parallel.fsdp's, which reads prefetch_forward for these units alone."""
        kept = replace(p, prefetch_forward=p.prefetch_forward - self.fewer)
        set_communication(model, kept, world, last_micro_batch)
        if not self.defers:
            model.set_is_last_backward(True)


ONCE = {"gather_once": True}
ARMS = {  # the most informative first
    "as shipped": Arm(all_buses=True),
    "one unit less unsharded": Arm(fewer=1),
    "not deferred": Arm(defers=False),
    "once": Arm(ONCE, all_buses=True),
    "1 micro-batch": Arm(micro_batches=1, all_buses=True),
    "prefetch 0": Arm({"prefetch_forward": 0, "prefetch_backward": 0}),
    "prefetch 2": Arm({"prefetch_forward": 2, "prefetch_backward": 2}, all_buses=True),
    "once, 1 micro-batch": Arm(ONCE, micro_batches=1),
    "once, reduced once": Arm({**ONCE, "sync_every_micro_batch": False}),
}


class Trainer:
    """The model, and the arm that it is set to."""

    def __init__(self, cfg: config.Config, world: World, network: Network):
        self.cfg, self.world, self.network = cfg, world, network
        self.parts = self.model, _, self.guard = with_optimizer(sharded(cfg, world), cfg, world)
        self.batches = {n: random_batch(cfg, world, n) for n in (1, 3)}
        self.number = 0  # of steps

    def set(self, arm: Arm) -> None:
        p = replace(self.cfg.parallel, **arm.options)
        self.arm, self.arm_cfg = arm, replace(self.cfg, parallel=p)
        train.set_communication = arm.set_communication
        set_prefetch(self.model, p)
        for _, modules in units(self.model):
            # which gather_once has changed
            reshard = p.reshard_after_forward and self.model.head not in modules
            modules[0].set_reshard_after_forward(reshard)
            attach(self.network, modules[0], p.one_memory_pool and self.network.on_gpu)

    def step(self, bus: float) -> dict[str, float]:
        self.network.bus = bus
        self.number += 1
        cfg, batch = self.arm_cfg, self.batches[self.arm.micro_batches]
        began = synchronize(self.world.device)
        unshard_first_units(self.model, cfg.parallel)
        sums, _ = train.training_step(*self.parts, batch, self.number, cfg, self.world)
        seconds = synchronize(self.world.device) - began
        self.guard.check()  # raises if a gradient is not finite
        tokens = batch.valid_tokens / self.world.dp_size
        row = {"seconds": seconds, "speed": tokens / seconds, "loss": sums["loss"].item() / tokens}
        return row | self.network.end_step()

    def memory(self, bus: float) -> dict[str, float]:
        """Peaks of two steps from an empty cache."""
        if self.network.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        steps = [self.step(bus) for _ in range(2)]
        figures = {"collectives": steps[1]["collectives"]}
        if self.network.on_gpu:
            figures["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            figures["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return figures


def write(path: pathlib.Path, facts: dict, arms: dict[str, dict]) -> None:
    """With the medians over the rounds, and what a step takes longer with a bus."""
    for row in arms.values():
        for bus, steps in row["steps"].items():
            figures = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
            pairs = zip(steps, row["steps"][0.0])
            longer = [with_bus["seconds"] - without["seconds"] for with_bus, without in pairs]
            row["figures"][bus] = figures | {"exposed": statistics.median(longer)}
    system.write_atomic(path, json.dumps(facts | {"arms": arms}, indent=1))


def words(figures: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.5g}" for key, value in figures.items()) or "-"


def measure(
    args: argparse.Namespace, cfg: config.Config, world: World, facts: dict, arms: dict[str, dict]
) -> None:
    network = Network(world.size, world.device)
    trainer = None
    usable = []
    for name, row in arms.items():
        if time.time() > args.deadline - 0.35 * args.seconds:
            break  # time for rounds is left
        try:
            trainer = trainer or Trainer(cfg, world, network)
            trainer.set(ARMS[name])
            row |= {"memory": trainer.memory(args.buses[0]), "status": "ok"}
            usable.append(name)
        except Exception as error:  # what it left of a step would disturb the next: a new model
            row["status"] = f"failed: {type(error).__name__}: {error}"[:300]
            traceback.print_exc()
            trainer = None
        gc.collect()
        write(args.json, facts, arms)
    for number in range(args.rounds):
        if not usable or time.time() + LONGEST > args.deadline:
            break
        trainer = trainer or Trainer(cfg, world, network)  # the last one may have failed
        for name in usable if number % 2 == 0 else usable[::-1]:
            steps = arms[name]["steps"]
            trainer.set(ARMS[name])
            for bus in [0.0, *(args.buses if ARMS[name].all_buses else args.buses[:1])]:
                earlier = steps.get(bus, [])
                longest = max((step["seconds"] for step in earlier), default=LONGEST)
                if time.time() + longest < args.deadline:
                    steps[bus] = [*earlier, trainer.step(bus)]
        write(args.json, facts, arms)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", default="configs/llama8b.toml")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--buses", type=float, nargs="+", default=[360.0, 50.0])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--json", type=pathlib.Path, default="rank_of_many.json")
    args, overrides = parser.parse_known_args(argv)
    args.deadline = time.time() + args.seconds
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run has it
    on_gpu = torch.cuda.is_available()
    own = ["--parallel.param_dtype=bfloat16"] if on_gpu else ON_A_CPU.split()
    batch = [f"--train.global_batch_size={3 * args.ranks}", "--train.micro_batch_size=1"]
    cfg = config.load(args.config, [*COMMON.split(), *batch, *own, *overrides])
    faulthandler.dump_traceback_later(args.seconds + 30, exit=True)  # a device that hangs
    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.get_device_module(device).set_device(device)
    world = World(
        0, args.ranks, device, build_mesh(device.type, config.mesh_shape(cfg, args.ranks))
    )
    gpu = torch.cuda.get_device_properties(0) if on_gpu else None
    facts = {"gpu": gpu and gpu.name, "torch": torch.__version__, "argv": argv}
    arms = {}
    for name in args.only:
        arms[name] = {"status": "skipped: time", "memory": {}, "steps": {}, "figures": {}}
    with polled(str(gpu.uuid) if gpu else None) as facts["polled"]:
        measure(args, cfg, world, facts, arms)
    write(args.json, facts, arms)  # with the clock
    for name, row in arms.items():
        print(f"{name}: {row['status']}: {words(row['memory'])}", flush=True)
        for bus, figures in row["figures"].items():
            print(f"  {bus:g} GB/s: {words(figures)}", flush=True)
    os._exit(0)  # at once: the device may not answer any more


if __name__ == "__main__":
    main(sys.argv[1:])
