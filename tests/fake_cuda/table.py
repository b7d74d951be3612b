"""The plan beside torch's allocator, for every configuration at full size, as a table in Markdown.

python -m tests.fake_cuda.table [CONFIGURATION ...]         all, or these; about an hour on two cores
"""

import pathlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tests.fake_cuda import build, configurations
from tests.fake_cuda.configurations import GPUS, Case, Measured, Text

HEADER = """\
| configuration, GPUs | allocated peak: planned | by torch | ratio | reserved peak: planned | by torch | ratio \
| waits | launches |
|---|---|---|---|---|---|---|---|---|"""


def row(case: Case, measured: Measured) -> str:
    cells = [
        f"{case.name}, {GPUS[case.name]}, {case.mode}",
        f"{measured.planned_peak:.2f}",
        f"{measured.allocated:.2f}",
        f"{measured.peak_ratio:.3f}",
        f"{measured.planned_reserved:.2f}",
        f"{measured.reserved:.2f}",
        f"{measured.reserved_ratio:.3f}",
        f"{measured.waits}",
        f"{measured.launches}",
    ]
    return f"| {' | '.join(cells)} |"


def row_of(case: Case, text: Text, folder: pathlib.Path) -> str:
    try:
        return row(case, configurations.measure(case, text, folder))
    except configurations.RunFailed as error:
        print(f"{case}: {error}", file=sys.stderr)
        return f"| {case} | failed |"


def main(names: list[str]) -> int:
    unknown = set(names) - GPUS.keys()
    if unknown:
        print(f"no such configuration: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    try:
        build.build()
    except build.CannotBuild as error:
        print(error, file=sys.stderr)
        return 2
    cases = [case for case in configurations.all_cases() if not names or case.name in names]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = pathlib.Path(name)
        text = configurations.make_text()
        print("GiB; waits of the host and launches in one step\n")
        print(HEADER, flush=True)
        for line in pool.map(lambda case: row_of(case, text, folder), cases):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
