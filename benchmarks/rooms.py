"""Removes each optional room (tests/rooms.py) from a copy of the repository, and from one more all of them, and runs
the tests: all of them where all rooms are gone, else those that are not slow. Each row: the room removed; tests passed,
skipped and failed; seconds. Below it those that failed.

    python -m benchmarks.rooms                        # each and all: an hour on two cores
    python -m benchmarks.rooms planner generate.py    # these alone
    python -m benchmarks.rooms all -k training        # without all of them, the tests of this name
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from tests.rooms import OPTIONAL, copy_tracked


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", choices=[*OPTIONAL, "all"])
    parser.add_argument("-k", default="", metavar="NAMES", help="as pytest's")
    parser.add_argument("-n", default="2", metavar="PROCESSES", help="as pytest-xdist's")
    args, failed = parser.parse_args(argv), False
    print(f"{'without':24} {'passed':>7} {'skipped':>7} {'failed':>7} {'seconds':>7}", flush=True)
    for room in args.rooms or [*OPTIONAL, "all"]:
        with tempfile.TemporaryDirectory() as folder:
            copy = copy_tracked(pathlib.Path(folder, "repo"), OPTIONAL if room == "all" else [room])
            for command in (["init", "--quiet"], ["add", "--all"]):
                # some tests ask git for the files
                subprocess.run(["git", *command], cwd=copy, check=True)
            began, chosen = time.monotonic(), "" if room == "all" else "not slow"
            tests = [
                "-n",
                args.n,
                "--dist",
                "loadfile",
                "--no-loadscope-reorder",
                "-m",
                chosen,
                "-k",
                args.k,
            ]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *tests],
                cwd=copy,
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHON": sys.executable},
            )
        *_, last = ["", *done.stdout.splitlines()]
        counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", last)}
        wrong = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
        print(
            f"{room:24} {counts.get('passed', 0):7} {counts.get('skipped', 0):7} {wrong:7} "
            f"{time.monotonic() - began:7.0f}",
            flush=True,
        )
        if done.returncode:
            failed = True
            print(
                *re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
                or [done.stdout + done.stderr],
                sep="\n",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
