"""Does Muon learn in fewer steps than AdamW? On the same batches, each at the best of the same learning rates.

    python -m benchmarks.muon [--text FILE] [--steps N] [--choose-steps N] [--seeds 3]
                              [--lr 1.5e-3 3e-3 6e-3 1.2e-2 2.4e-2] [--folder F] [--section.key=value ...]

Trains configs/tiny.toml, 300 steps. --text: nanoGPT's recipe for CPUs instead, 2,000 steps on the characters of a file,
of which the last tenth is for validation. The rate is chosen with seed 0 by the last validation loss, in runs of
--choose-steps (absent: --steps). Prints a JSON object a line: of each rate that loss, and of each seed both last losses
and the step at which Muon's validation loss, between evaluations on a straight line, falls below AdamW's last one; the
learning-rate schedule is the same, so Muon's rate is still higher there. Runs that are in the folder are not repeated.
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

import numpy

import config
from benchmarks import count
from data.identity import identity
from schema import positive

REPO = pathlib.Path(__file__).resolve().parent.parent
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
# https://github.com/karpathy/nanoGPT: README.md and config/train_shakespeare_char.py, as far as a Llama has it: with
# RMSNorm, RoPE, and SwiGLU of as many parameters; windows in random order where nanoGPT draws with replacement
NANOGPT = (
    "model.dim=128",
    "model.n_layers=4",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.ffn_dim=344",
    "train.seq_len=64",
    "train.global_batch_size=12",
    "optim.betas=[0.9,0.99]",
    "optim.warmup_steps=100",
    "parallel.param_dtype=float32",
    "eval.every_steps=50",
    "eval.batches=20",
)


def validation(folder: pathlib.Path, name: str, *options: str) -> list[tuple[int, float]]:
    """(step, validation loss) of every evaluation of a run; a run that fails, such as by diverging, has an infinite
    one."""
    command = [
        REPO / "run_train.sh",
        REPO / "configs/tiny.toml",
        f"--run.output_dir={folder}",
        f"--run.name={name}",
        "--log.tensorboard=false",
        "--checkpoint=off",
        "--eval.every_steps=10",
        *options,
    ]
    if not finished(folder / name):
        subprocess.run(command, stdout=sys.stderr, env={**os.environ, "PYTHON": sys.executable})
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    found = [
        (row["step"], row["loss"])
        for row in rows
        if row["kind"] == "eval" and row["loss"] is not None
    ]
    return found if found and finished(folder / name) else [(0, float("inf"))]


def finished(run: pathlib.Path) -> bool:
    status = run / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"


def characters(text: str, folder: pathlib.Path) -> list[str]:
    """Writes a text's characters as prepared data into a folder, if it is empty; returns the options that read it."""
    found = {character: i for i, character in enumerate(sorted(set(text)))}
    options = [f"model.vocab_size={len(found)}", "data.source=characters", f"data.path={folder}"]
    if not folder.exists():
        part = config.load(str(REPO / "configs/tiny.toml"), [f"--{option}" for option in options])
        ids, end = numpy.array([found[character] for character in text], "<u2"), len(text) * 9 // 10
        folder.mkdir(parents=True)
        for split, its in ("train", ids[:end]), ("heldout", ids[end:]):
            its.tofile(folder / f"{split}.bin")
            numpy.array([len(its)], "<u8").tofile(folder / f"{split}.ends.bin")
        manifest = {
            "identity": identity(part),
            "files": [],
            "vocab_size": len(found),
            "dtype": "uint16",
            "tokens": {"train": end, "heldout": len(text) - end},
            "sha256": {},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return options


def reaches(curve: list[tuple[int, float]], loss: float) -> float | None:
    """The step at which a curve first is as low."""
    for (before, higher), (step, lower) in itertools.pairwise(curve):
        if lower <= loss:
            return before + (step - before) * min(1.0, (higher - loss) / (higher - lower))
    return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("--steps", None), ("--choose-steps", None), ("--seeds", 3)):
        parser.add_argument(flag, type=count, default=default)
    parser.add_argument("--lr", type=positive, nargs="+", default=RATES)
    parser.add_argument(
        "--text", type=pathlib.Path, help="train nanoGPT's recipe on this file's characters"
    )
    parser.add_argument("--folder", help="for the runs, kept; absent: a temporary one")
    args, options = parser.parse_known_args(argv)
    steps = args.steps or (2000 if args.text else 300)
    with tempfile.TemporaryDirectory() as temporary:
        folder, curves = pathlib.Path(args.folder or temporary).absolute(), {}
        if args.text:
            of_text = (*NANOGPT, *characters(args.text.read_text(), folder / "characters"))
            options = [*(f"--{option}" for option in of_text), *options]

        def run(optimizer: str, lr: float, seed: int, steps: int) -> list[tuple[int, float]]:
            key = f"{optimizer}-{lr:g}-{seed}-{steps}"
            if key not in curves:
                curves[key] = validation(
                    folder,
                    key,
                    f"--optim.name={optimizer}",
                    f"--optim.lr={lr}",
                    f"--run.seed={seed}",
                    f"--train.steps={steps}",
                    *options,
                )
            return curves[key]

        best = {}
        for optimizer in ("adamw", "muon"):
            losses = {}
            for lr in args.lr:
                losses[lr] = run(optimizer, lr, 0, args.choose_steps or steps)[-1][1]
                print(
                    json.dumps({"optimizer": optimizer, "lr": lr, "loss": round(losses[lr], 4)}),
                    flush=True,
                )
            best[optimizer] = min(args.lr, key=lambda lr: losses[lr])
        shares = []
        for seed in range(args.seeds):
            adamw, muon = (run(name, lr, seed, steps) for name, lr in best.items())
            step = reaches(muon, adamw[-1][1])
            shares.append(step / steps if step else float("inf"))
            print(
                json.dumps(
                    {
                        "seed": seed,
                        "lr": best,
                        "adamw": round(adamw[-1][1], 4),
                        "muon": round(muon[-1][1], 4),
                        "muon reaches it at step": step and round(step, 1),
                    }
                ),
                flush=True,
            )
        print(json.dumps({"steps, relative to AdamW": round(statistics.median(shares), 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
