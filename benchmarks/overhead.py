"""What train.py's loop costs over a bare one on the same sharded model and the same data.

    ./run_train.sh -m benchmarks.overhead
    ./run_train.sh -m benchmarks.overhead --steps 1000 --log.every_steps=1

Ours is train.train() itself: loader, watchdog, vote to stop, guard, rows, console. After each of
its steps the bare loop trains one step on a model of its own: forward, backward, torch's
clip_grad_norm_ and fused AdamW, batches in memory. So a slow moment of the machine affects both. At
two sizes: configs/tiny.toml's, and one short sequence, about 50 ms on a free core. One process,
without evaluations and saves. Fails where the two loops' losses differ.
"""

import argparse
import itertools
import math
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import config
from benchmarks import count
from config import ConfigError
from data.dataset import open_dataset
from data.loader import Batch, Loader
from metrics import read_rows
from model.build import meta_model
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from run.rank import distributed
from run.run import Run
from run.watchdog import Watchdog
from tools.prepare.prepare import prepare
from train import train

TINY = pathlib.Path(__file__).parent.parent / "configs/tiny.toml"
SIZES = {
    "tiny": [],
    "short": ["--train.seq_len=64", "--train.global_batch_size=1", "--train.micro_batch_size=1"],
}
WARM_UP = 10  # steps


class Alternating(Run):
    """A run that calls bare_step(step) after each of its own steps, and times both."""

    def __init__(self, cfg: config.Config, world: World, bare_step: Callable[[int], None]):
        super().__init__(cfg, world, Watchdog(world.rank, None), None)
        self.bare_step = bare_step
        # by step, (ours, bare) by the clock and in CPU time
        self.seconds_of_steps: dict[int, list[tuple[float, float]]] = {}

    def steps(self, *of: Any) -> Iterator[int]:
        began = self._now()
        for step in super().steps(*of):
            yield step
            between = self._now()
            self.bare_step(step)
            end = self._now()
            self.seconds_of_steps[step] = [(b - a, c - b) for a, b, c in zip(began, between, end)]
            began = end

    def _now(self) -> tuple[float, float]:
        """By the clock, and in CPU time of all threads."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


class BareLoop:
    """A loop as one writes it first, on this repository's sharded model."""

    def __init__(self, cfg: config.Config, world: World, batches: dict[int, Batch]):
        self.cfg = cfg
        self.world = world
        self.batches = batches
        self.losses: dict[int, list[torch.Tensor]] = {}  # sums of micro-batches, by step
        self.model = meta_model(cfg.model)
        parallelize(self.model, cfg, world)
        materialize(self.model, cfg.run.seed, storage_device(cfg.parallel, world))
        o = cfg.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), o.lr, o.betas, o.eps, o.weight_decay, fused=True
        )

    def step(self, step: int) -> None:
        batch = self.batches[step]
        losses = []
        for tokens, targets in batch.micro_batches:
            tokens = tokens.to(self.world.device, non_blocking=True)
            targets = targets.to(self.world.device, non_blocking=True)
            sums, _ = self.model(tokens, targets)
            (sums["loss"] / batch.valid_tokens).backward()
            losses.append(sums["loss"].detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[step] = losses

    def loss(self, step: int) -> float:
        """Per token."""
        return torch.stack(self.losses[step]).sum().item() / self.batches[step].valid_tokens


def measure(cfg: config.Config, world: World) -> dict[int, list[tuple[float, float]]]:
    """Seconds of (ours, bare) for each timed step, by the clock and in CPU time. Raises ConfigError
    if the run failed, ArithmeticError if the loops did not compute the same."""
    dataset = open_dataset(cfg)
    last = cfg.train.steps
    loader = Loader(dataset, cfg.train, world)
    bare = BareLoop(cfg, world, dict(enumerate(itertools.islice(loader, last), 1)))
    loader.close()
    run_folder = config.run_folder(cfg.run)
    run_folder.mkdir(parents=True, exist_ok=True)
    run = Alternating(cfg, world, bare.step)
    train(cfg, world, run)
    run.end()
    for row in read_rows(run_folder / "metrics.jsonl"):
        if row["kind"] != "train":
            continue
        expected = bare.loss(row["step"])
        if not math.isclose(row["loss"], expected, rel_tol=1e-3):
            raise ArithmeticError(
                f"step {row['step']}: train.py's loss is {row['loss']}, the bare loop's {expected}"
            )
    # the last is due for a row
    return {step: pair for step, pair in run.seconds_of_steps.items() if WARM_UP < step < last}


def typical(steps: dict[str, list[float]]) -> float:
    """The mean of the medians of steps with a row and of those without, by their share. One median
    would leave out what every tenth step does."""
    count = sum(map(len, steps.values()))
    mean = 0.0
    for values in steps.values():
        if values:
            mean += len(values) / count * statistics.median(values)
    return mean


def interval(steps: dict[str, list[float]], draws: int = 2000) -> tuple[float, float]:
    """95 % of typical(), by bootstrap."""
    chance = random.Random(0)
    drawn = []
    for _ in range(draws):
        sample = {}
        for kind, values in steps.items():
            if values:
                sample[kind] = chance.choices(values, k=len(values))
        drawn.append(typical(sample))
    drawn.sort()
    return drawn[draws // 40], drawn[-1 - draws // 40]


def report(name: str, seconds: dict[int, tuple[float, float]], every: int) -> str:
    """overhead X % (A % ... B %), Y ms a step. Prints what it is made of."""
    overheads: dict[str, list[float]] = {"with a row": [], "without": []}
    for step, (ours, bare) in seconds.items():
        kind = "without" if step % every else "with a row"
        overheads[kind].append(ours - bare)
    bare_step = statistics.median(bare for _, bare in seconds.values())
    for kind, values in overheads.items():
        if values:
            print(
                f"{name}: {len(values)} steps {kind}: {1000 * statistics.median(values):+.3f} ms "
                f"over a bare step of {1000 * bare_step:.1f} ms"
            )
    overhead = typical(overheads)
    low, high = interval(overheads)
    return (
        f"overhead {100 * overhead / bare_step:.2f} % ({100 * low / bare_step:.2f} % ... "
        f"{100 * high / bare_step:.2f} %), {1000 * overhead:.3f} ms a step"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument(
        "--sizes",
        type=lambda text: text.split(","),
        default=[*SIZES],
        help="the last line is of the last",
    )
    args, overrides = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        # A constant learning rate and one parameter group, as the bare loop has. The rate is so low
        # that rounding does not add up.
        common = [
            f"--run.output_dir={temporary}",
            f"--data.path={temporary}/data",
            "--eval=off",
            "--checkpoint=off",
            "--parallel.param_dtype=float32",
            f"--train.steps={WARM_UP + args.steps + 1}",
            "--optim.schedule=constant",
            "--optim.warmup_steps=0",
            "--optim.lr=1e-4",
            "--optim.weight_decay=0",
        ]
        try:
            for name in args.sizes:
                cfg = config.load(
                    str(TINY), [f"--run.name={name}", *common, *SIZES[name], *overrides]
                )
                prepare(cfg.data, cfg.model.vocab_size)
                with distributed(cfg) as world:
                    seconds = measure(cfg, world)
                clock = {step: by_clock for step, (by_clock, _) in seconds.items()}
                cpu = {step: in_cpu_time for step, (_, in_cpu_time) in seconds.items()}
                print(f"{name}, CPU time: {report(f'{name}, CPU time', cpu, cfg.log.every_steps)}")
                last = report(name, clock, cfg.log.every_steps)
                print(f"{name}: {last}")
        except (ConfigError, ArithmeticError) as error:
            print(error, file=sys.stderr)
            return 1
    print(last)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
