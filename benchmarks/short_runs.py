"""Many short runs on two processes: each must exit 0, leave no process behind and print no traceback.

python benchmarks/short_runs.py --runs 50
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks import count  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=count, default=50)
    runs, failures, began = parser.parse_args().runs, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            command = [
                REPO / "run_train.sh",
                REPO / "configs/tiny.toml",
                "--train.steps=3",
                f"--run.name=r{number}",
                f"--run.output_dir={folder}",
                "--train.seq_len=64",
                "--log.tensorboard=false",
            ]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=REPO,
                env={**os.environ, "NPROC": "2", "PYTHON": sys.executable},
            )
            left = subprocess.run(
                ["pgrep", "-f", f"{folder}"], capture_output=True, text=True
            ).stdout.split()
            if (
                done.returncode
                or left
                or "Traceback" in done.stdout + done.stderr
                or "terminate" in done.stderr
            ):
                failures.append(number)
                print(
                    f"run {number}: exit {done.returncode}, left {left}\n{done.stdout}{done.stderr}",
                    flush=True,
                )
    print(
        f"{runs - len(failures)} of {runs} runs ended well, {(time.monotonic() - began) / runs:.1f} s each"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
