"""Does a long run's memory grow? Trains many tiny steps with many saves and samples the ranks' resident memory.

    python benchmarks/long_run.py --steps 2000 --saves 50 [--ranks 1] [--async-save]

Prints the median resident memory of each tenth of the run and the growth after the first tenth; exits with 1 where that
is above two percent.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks import count  # noqa: E402


def resident_mib(pid: int) -> float:
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def ranks_of(marker: str) -> list[int]:
    """Processes whose own script is train.py and whose arguments hold the marker."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if marker in words and any(word.endswith("/train.py") for word in words[:3]):
            found.append(int(entry.parent.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=2000)
    parser.add_argument("--saves", type=count, default=50)
    parser.add_argument("--ranks", type=count, default=1)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args()

    import torch

    with tempfile.TemporaryDirectory() as folder:
        marker = f"--run.output_dir={folder}"
        process = subprocess.Popen(
            [
                REPO / "run_train.sh",
                REPO / "configs/tiny.toml",
                marker,
                f"--train.steps={args.steps}",
                "--model.dim=32",
                "--model.n_layers=2",
                "--model.n_heads=2",
                "--model.n_kv_heads=1",
                "--model.ffn_dim=64",
                "--train.seq_len=32",
                "--log.every_steps=1",
                "--eval=off",
                "--checkpoint.keep_last=2",
                f"--checkpoint.save_every_steps={args.steps // args.saves}",
                f"--checkpoint.async_save={str(args.async_save).lower()}",
            ],
            cwd=REPO,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHON": sys.executable, "NPROC": str(args.ranks)},
        )
        # (step, MiB of all ranks)
        metrics, samples = (pathlib.Path(folder) / "tiny/metrics.jsonl", [])
        while process.poll() is None:
            time.sleep(0.1)
            try:
                step = json.loads(metrics.read_text().splitlines()[-1])["step"]
                samples.append((step, sum(resident_mib(pid) for pid in ranks_of(marker))))
            except (OSError, ValueError, IndexError):
                continue  # not yet, or no more
    if process.returncode:
        return process.returncode
    tenths = [
        [mib for step, mib in samples if part * args.steps < 10 * step <= (part + 1) * args.steps]
        for part in range(10)
    ]
    medians = [statistics.median(part) for part in tenths if part]
    growth = max(medians[1:]) / medians[1] - 1
    print(
        f"torch {torch.__version__}, {args.ranks} ranks, {args.steps} steps, {args.saves} saves"
        f"{' behind the training' * args.async_save}, {len(samples)} samples"
    )
    print("resident MiB by tenths:", " ".join(f"{mib:.1f}" for mib in medians))
    print(f"growth after the first tenth: {growth:.2%}")
    return 0 if growth < 0.02 and len(medians) == 10 else 1


if __name__ == "__main__":
    sys.exit(main())
