"""Does Muon learn in fewer steps than AdamW? On the same batches, each at the best of the same learning rates.

    python -m benchmarks.muon [--steps 300] [--seeds 3] [--lr 7.5e-4 1.5e-3 3e-3 6e-3 1.2e-2] [--folder F]
                              [--section.key=value ...]

Trains configs/tiny.toml with the options given. The rate is chosen with seed 0 by the last validation loss. Prints a
JSON object a line: of each rate that loss, and of each seed both last losses and the step at which Muon's validation
loss, between evaluations on a straight line, falls below AdamW's last one; the learning-rate schedule is the same, so
Muon's rate is still higher there.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from benchmarks import count
from options import positive

REPO = pathlib.Path(__file__).resolve().parent.parent
RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)


def validation(folder: pathlib.Path, name: str, *options: str) -> list[tuple[int, float]]:
    """(step, validation loss) of every evaluation of a run; a run that fails, such as by diverging, has an infinite
    one."""
    command = [REPO / "run_train.sh", REPO / "configs/tiny.toml", f"--run.output_dir={folder}", f"--run.name={name}",
               "--log.tensorboard=false", "--checkpoint=off", "--eval.every_steps=10", *options]
    done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, "PYTHON": sys.executable})
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    found = [(row["step"], row["loss"]) for row in rows if row["kind"] == "eval" and row["loss"] is not None]
    return found if done.returncode == 0 and found else [(0, float("inf"))]


def reaches(curve: list[tuple[int, float]], loss: float) -> float | None:
    """The step at which a curve first is as low."""
    for (before, higher), (step, lower) in itertools.pairwise(curve):
        if lower <= loss:
            return before + (step - before) * min(1.0, (higher - loss) / (higher - lower))
    return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("--steps", 300), ("--seeds", 3)):
        parser.add_argument(flag, type=count, default=default)
    parser.add_argument("--lr", type=positive, nargs="+", default=RATES)
    parser.add_argument("--folder", help="for the runs, kept; absent: a temporary one")
    args, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, curves = pathlib.Path(args.folder or temporary).absolute(), {}

        def run(optimizer: str, lr: float, seed: int) -> list[tuple[int, float]]:
            return validation(folder, f"{optimizer}-{lr:g}-{seed}", f"--optim.name={optimizer}", f"--optim.lr={lr}",
                              f"--run.seed={seed}", f"--train.steps={args.steps}", *options)

        best = {}
        for optimizer in ("adamw", "muon"):
            for lr in args.lr:
                curve = curves[optimizer, lr, 0] = run(optimizer, lr, 0)
                print(json.dumps({"optimizer": optimizer, "lr": lr, "loss": round(curve[-1][1], 4)}), flush=True)
            best[optimizer] = min(args.lr, key=lambda lr: curves[optimizer, lr, 0][-1][1])
        shares = []
        for seed in range(args.seeds):
            adamw, muon = (curves.get((name, lr, seed)) or run(name, lr, seed) for name, lr in best.items())
            step = reaches(muon, adamw[-1][1])
            shares.append(step / args.steps if step else float("inf"))
            print(json.dumps({"seed": seed, "lr": best, "adamw": round(adamw[-1][1], 4), "muon": round(muon[-1][1], 4),
                              "muon reaches it at step": step and round(step, 1)}), flush=True)
        print(json.dumps({"steps, relative to AdamW": round(statistics.median(shares), 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
