"""What train.py's loop costs over a bare one on the same sharded model and the same data.

    ./run_train.sh -m benchmarks.overhead
    ./run_train.sh -m benchmarks.overhead --steps 1000 --log.every_steps=1

Ours is train.train() itself: loader, watchdog, vote to stop, guard, rows, console. After each of
its steps the bare loop (benchmarks/step.py) trains one on a model of its own, so that a slow moment
of the machine affects both. configs/tiny.toml with one short sequence, about 50 ms on a free core,
in one process, without evaluations and saves. Fails where the loops' losses differ.
"""

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator

from torch import Tensor

import config
from benchmarks import REPO, interval, read_rows
from benchmarks.step import Step, bare_step, sharded, synchronize
from data.dataset import open_dataset
from data.loader import Batch, Loader
from parallel.mesh import World
from run.rank import distributed
from run.run import Run
from run.watchdog import Watchdog
from tools.planner.arguments import positive_integer
from tools.prepare.prepare import prepare
from train import train

WARM_UP = 10  # steps
# One short sequence. A constant learning rate and one parameter group, as the bare loop has. The
# rate is so low that rounding does not add up.
OPTIONS = """--train.seq_len=64 --train.global_batch_size=1 --train.micro_batch_size=1
    --eval=off --checkpoint=off --parallel.param_dtype=float32 --optim.schedule=constant
    --optim.warmup_steps=0 --optim.lr=1e-4 --optim.weight_decay=0"""


class Alternating(Run):
    """A run that trains a step of the bare loop after each of its own, and times both."""

    def __init__(self, cfg: config.Config, world: World, bare: Step, batches: list[Batch]):
        super().__init__(cfg, world, Watchdog(world.rank, None), None)
        self.bare, self.batches = bare, batches
        self.pairs: dict[int, tuple[float, float]] = {}  # by step: (ours, bare)
        self.losses: dict[int, Tensor] = {}

    def steps(self, first: int, last: int) -> Iterator[int]:
        device = self.world.device
        began = synchronize(device)
        for step in super().steps(first, last):
            yield step
            between = synchronize(device)
            self.losses[step] = self.bare(step, self.batches[step - 1])
            end = synchronize(device)
            self.pairs[step] = (between - began, end - between)
            began = end


def measure(cfg: config.Config, world: World) -> dict[int, tuple[float, float]]:
    """Seconds of (ours, bare) by timed step. Raises ConfigError if the run failed, ArithmeticError
    if the loops did not compute the same."""
    last = cfg.train.steps
    loader = Loader(open_dataset(cfg), cfg.train, world)
    batches = list(itertools.islice(loader, last))
    loader.close()
    run_folder = config.run_folder(cfg.run)
    run_folder.mkdir(parents=True, exist_ok=True)
    run = Alternating(cfg, world, bare_step(sharded(cfg, world), cfg, world), batches)
    train(cfg, world, run)
    run.end()
    for row in read_rows(run_folder / "metrics.jsonl"):
        if row["kind"] == "train":
            loss, expected = row["loss"], run.losses[row["step"]].item()
            if not math.isclose(loss, expected, rel_tol=1e-3):
                problem = f"train.py's loss is {loss}, the bare loop's {expected}"
                raise ArithmeticError(f"step {row['step']}: {problem}")
    # the last is due for a row
    return {step: pair for step, pair in run.pairs.items() if WARM_UP < step < last}


def typical(steps: list[tuple[bool, float]]) -> float:
    """The mean of the medians of steps with a row and of those without, by their share. One median
    would leave out what every tenth step does. steps: (whether it writes a row, its overhead)."""
    mean = 0.0
    for kind in (True, False):
        values = [value for has_row, value in steps if has_row is kind]
        if values:
            mean += len(values) / len(steps) * statistics.median(values)
    return mean


def report(seconds: dict[int, tuple[float, float]], every: int) -> str:
    """overhead X % (A % ... B %), Y ms a step of Z ms. every: steps, of which one writes a row."""
    overheads = [(step % every == 0, ours - bare) for step, (ours, bare) in seconds.items()]
    bare_step = statistics.median(bare for _, bare in seconds.values())
    overhead = typical(overheads)
    low, high = (f"{100 * bound / bare_step:.2f} %" for bound in interval(overheads, typical))
    share = f"overhead {100 * overhead / bare_step:.2f} % ({low} ... {high})"
    return f"{share}, {1000 * overhead:.3f} ms a step of {1000 * bare_step:.1f} ms"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=positive_integer, default=200)
    args, overrides = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--run.output_dir={folder}", f"--data.path={folder}/data"]
        own.append(f"--train.steps={WARM_UP + args.steps + 1}")
        cfg = config.load(f"{REPO}/configs/tiny.toml", [*OPTIONS.split(), *own, *overrides])
        prepare(cfg.data, cfg.model.vocab_size)
        with distributed(cfg) as world:
            seconds = measure(cfg, world)
    print(report(seconds, cfg.log.every_steps))
    return 0


if __name__ == "__main__":
    config.run_tool(main)
