"""Compares checkpoints with their manifests.

    python -m checkpoint verify DIR      DIR: a checkpoint, or a run (verifies all of its checkpoints)

Exits with 0 if all are good, 1 if any is not (it names each bad file), 2 if there is nothing to
verify.
"""

import argparse
import pathlib

from checkpoint.catalog import problems_of
from checkpoint.manifest import read_manifest
from checkpoint.newest import checkpoints_of
from config import Problems, run_tool
from system import print_line


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint", description=__doc__.splitlines()[0]
    )
    parser.add_argument("command", choices=["verify"])
    parser.add_argument(
        "folder", type=pathlib.Path, metavar="DIR", help="a checkpoint, or a run's folder"
    )
    args = parser.parse_args(argv)
    return verify(args.folder)


def verify(folder: pathlib.Path) -> int:
    """Prints what is wrong with each checkpoint, and returns the exit code."""
    good = 0
    bad = 0
    for path in checkpoints_of(folder):
        sizes: list[int] = []
        try:
            problems = problems_of(path)
            if not problems:
                sizes = [entry["size"] for entry in read_manifest(path).values()]
        except Problems as error:  # unreadable, but not necessarily corrupt
            problems = [*error.problems]
        if problems:
            print_line("\n  ".join([f"{path}: BAD", *problems]))
            bad += 1
        else:
            print_line(f"{path}: good, {len(sizes)} files, {sum(sizes):,} bytes")
            good += 1
    print_line(f"{good} good, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    run_tool(main)
