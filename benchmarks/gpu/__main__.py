"""The first hour on a GPU: does it train, how fast, and as planned? docs/cluster.md explains it.

    ./run_train.sh -m benchmarks.gpu [--seconds 600] [--json gpu.json] [--only GROUP ...]
    ./run_train.sh -m benchmarks.gpu --tiny        tiny sizes, to see that all of it runs

Without a GPU the sizes are always tiny.

First it checks the machine, trains configs/tiny.toml next to a CPU, and runs the tests marked gpu.
Then it times arms (arms.py): train.py's step as configured, with options changed, and
benchmarks/overhead.py's bare loop, each next to its plan; and the parts of a step alone
(benchmarks/kernels.py). The most informative come first, and what time does not allow is skipped.
Clocks and power are read, never set. --reduce-scatter-buffers=2 and
--separate-reduce-scatter-group try FSDP2's settings for slow networks; on several GPUs
benchmarks.step does.

The JSON file is replaced after every arm. Started again with the same file, the program continues:
it keeps every arm that has a result, and measures what was skipped, cut off or failed. The file is
of one device, one set of versions and options, and one state of the code. For any other it is
refused; --afresh begins it anew.

Each group runs in a process of its own. A new process continues the group after a crash, after an
arm that took more than a quarter of --seconds, or where memory was not freed.
"""

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

import system
from benchmarks.gpu import processes, report
from benchmarks.gpu.arms import GROUPS
from benchmarks.gpu.measure import Work
from benchmarks.step import add_experiments, experiments
from config import ConfigError


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    parser.add_argument("--afresh", action="store_true", help="begin the JSON file anew")
    parser.add_argument(
        "--only", choices=GROUPS, nargs="+", default=[*GROUPS], help="groups of arms, in this order"
    )
    parser.add_argument("--tiny", action="store_true")
    add_experiments(parser)
    return parser.parse_args(argv)


def earlier_rows(path: pathlib.Path, conditions: dict[str, Any]) -> list[dict]:
    """The rows of a file that an earlier start has begun; none without a file.

    Raises ConfigError if it is no such file, or of other conditions.
    """
    if not path.exists():
        return []
    earlier = system.read_json(path)
    if not {"measured_under", "rows"} <= earlier.keys():
        raise ConfigError(
            f"{path}: was not written by benchmarks.gpu; name another --json, or pass --afresh to "
            "replace it"
        )
    differences = []
    for name in sorted({*conditions, *earlier["measured_under"]}):
        then = earlier["measured_under"].get(name)
        now = conditions.get(name)
        if then != now:
            differences.append(f"{name} was {then}, is {now}")
    if differences:
        raise ConfigError(
            f"{path}: measured under other conditions ({'; '.join(differences)}); name another "
            "--json, or pass --afresh to replace it"
        )
    return [row for row in earlier["rows"] if row["arm"] in GROUPS.get(row["group"], {})]


class Report:
    """The rows so far, and their file."""

    def __init__(self, path: pathlib.Path | None, facts: dict[str, Any], rows: list[dict]):
        self.path = path
        self.facts = facts
        self.rows = rows

    def write(self) -> None:
        if self.path:
            content = json.dumps({**self.facts, "rows": self.rows}, indent=1)
            system.write_atomic(self.path, content)

    def add(self, row: dict) -> None:
        """Adds a row, in place of an earlier one of the same arm."""
        others = [
            old for old in self.rows if (old["group"], old["arm"]) != (row["group"], row["arm"])
        ]
        self.rows = report.in_order([*others, row])
        self.write()
        print(report.line(row), file=sys.stderr, flush=True)

    def without_result(self, group: str) -> list[str]:
        """The arms of a group that have to be measured."""
        have = {row["arm"] for row in self.rows if row["group"] == group and report.has_result(row)}
        return [arm for arm in GROUPS[group] if arm not in have]

    def needs_no_runs(self) -> bool:
        """Whether no check of training is left to do on this machine."""
        done = set()
        for row in self.rows:
            if row["group"] == "training" and row["status"].startswith(("ok", "skipped: needs")):
                done.add(row["arm"])
        return done == {*GROUPS["training"]}


def title_of(tiny: bool, device: str) -> str:
    if tiny:
        name = "GPU" if device == "cuda" else "CPU"
        return f"tiny sizes on a {name}: no figure of a GPU"
    return "full sizes on a GPU"


def begin(args: argparse.Namespace, work: Work) -> tuple[Report, Work]:
    """The report to continue, and the work with the sizes that this device takes. Raises
    ConfigError."""
    conditions = processes.identify(work)
    status = conditions.pop("status")
    if status != "ok":
        raise ConfigError(status.removeprefix("refused: "))
    tiny = args.tiny or conditions["device"] != "cuda"
    conditions |= {"tiny": tiny, "fsdp": work.fsdp}
    rows = []
    if args.json and not args.afresh:
        rows = earlier_rows(args.json, conditions)
    facts = {
        "what": title_of(tiny, conditions["device"]),
        "seconds": args.seconds,
        "measured_under": conditions,
    }
    begun = Report(args.json, facts, rows)
    try:
        begun.write()
    except OSError as error:
        raise ConfigError(f"{args.json}: cannot be written: {error.strerror}") from None
    return begun, Work(**{**vars(work), "tiny": tiny})


def measure(args: argparse.Namespace, settings: dict, runs: pathlib.Path) -> Report:
    """Measures what is left to do. runs: the folder for runs of train.py. Raises ConfigError."""
    deadline = time.time() + args.seconds
    work = Work("", [], deadline, args.seconds, str(runs.absolute()), args.tiny, settings)
    begun, work = begin(args, work)
    if begun.rows:
        results = sum(map(report.has_result, begun.rows))
        print(f"{args.json}: continues; {results} arms have a result", file=sys.stderr)
    for group in args.only:
        arms = begun.without_result(group)
        processes.run_group(Work(**{**vars(work), "group": group, "arms": arms}), begun.add)
    if begun.needs_no_runs():
        shutil.rmtree(runs, ignore_errors=True)
    return begun


def main(argv: list[str]) -> int:
    args = arguments(argv)
    try:
        settings = experiments(args)
        if args.json:
            done = measure(args, settings, args.json.with_name(f"{args.json.name}.runs"))
        else:
            with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
                done = measure(args, settings, pathlib.Path(folder) / "runs")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{done.facts['what']}\n\n{report.text(done.rows)}")
    return int(any(row["status"].startswith("failed") for row in done.rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
