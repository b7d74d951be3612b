"""Full fine-tuning, adapters, and adapters over a base in 4 bits, from one base on the same batches: their losses.

    python -m benchmarks.adapt [--base-steps 300] [--steps 200] [--rank 64] [--lr 3e-4] [--lora-lr 3e-3] [--suffix py]
                               [--folder F] [--section.key=value ...]

Trains configs/tiny.toml (with the options given) on Python's standard library, exports it, and continues from there on
other text: torch's own Python, or with --suffix h its C++. Prints a JSON object a line: of each way the mean training
loss of the last fifty steps, and its ratio to that of the way before it. Adapters want about ten times the learning
rate of full fine-tuning (https://arxiv.org/abs/2405.09673).
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

from benchmarks import count
from schema import positive

REPO = pathlib.Path(__file__).resolve().parent.parent
LAST = 50


def train(folder: pathlib.Path, name: str, *options: str) -> list[float]:
    """The loss of every step of a run."""
    command = [
        REPO / "run_train.sh",
        REPO / "configs/tiny.toml",
        f"--run.output_dir={folder}",
        f"--run.name={name}",
        "--log.every_steps=1",
        "--log.tensorboard=false",
        "--eval=off",
        *options,
    ]
    subprocess.run(
        command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHON": sys.executable}
    )
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


def write_sources(path: pathlib.Path, suffix: str, limit: int) -> None:
    """About so many characters of torch's own files, a document each."""
    left = limit
    with path.open("w") as file:
        for source in sorted(pathlib.Path(torch.__file__).parent.glob(f"**/*.{suffix}")):
            if left > 0:
                left -= file.write(json.dumps({"text": source.read_text(errors="ignore")}) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("--base-steps", 300), ("--steps", 200), ("--rank", 64)):
        parser.add_argument(flag, type=count, default=default)
    for flag, default in (("--lr", 3e-4), ("--lora-lr", 3e-3)):
        parser.add_argument(flag, type=positive, default=default)
    parser.add_argument(
        "--suffix", choices=("py", "h"), default="py", help="of the files to adapt to"
    )
    parser.add_argument("--folder", help="for the runs, kept; absent: a temporary one")
    args, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        train(folder, "base", f"--train.steps={args.base_steps}", *options)
        subprocess.run(
            [sys.executable, "-m", "extras.huggingface", "export", folder / "base", folder / "hf"],
            check=True,
            cwd=REPO,
            stdout=sys.stderr,
        )
        write_sources(folder / "other.jsonl", args.suffix, 8 * 2**20)
        other = [
            f"--train.steps={args.steps}",
            f"--data.source={folder / 'other.jsonl'}",
            f"--data.path={folder / 'data'}",
            f"--data.tokenizer={folder / 'base/tokenizer.model'}",
            f"--model.init_from={folder / 'hf'}",
            "--checkpoint=off",
            *options,
        ]
        before = None
        for name, more in (
            ("full", [f"--optim.lr={args.lr}"]),
            *(
                (
                    f"LoRA, {dtype}",
                    [
                        f"--optim.lr={args.lora_lr}",
                        f"--lora.rank={args.rank}",
                        f"--lora.base_dtype={dtype}",
                    ],
                )
                for dtype in ("bfloat16", "nf4")
            ),
        ):
            losses = train(folder, name.replace(", ", "-"), *other, *more)
            mean = sum(losses[-LAST:]) / len(losses[-LAST:])
            print(
                json.dumps(
                    {
                        "what": name,
                        "loss": round(mean, 4),
                        "first": round(losses[0], 4),
                        "to the one before": round(mean / (before or mean), 4),
                    }
                ),
                flush=True,
            )
            before = mean
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
