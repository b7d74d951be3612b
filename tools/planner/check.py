"""Compares a run on GPUs with its `--dry-run` plan: peak memory and step time, printed, and kept in
plan.json of the run's folder, which the report shows. tools/follow.py starts it for a row."""

import json
import pathlib

import config
from tools.planner.devices import DEVICES, known_as
from tools.planner.plan import Asked, plan
from system.files import read_json, write_atomic
from system.processes import print_error, print_line

# relative to the plan; a warning is printed beyond
MEMORY_OFF = 0.05
TIME_OFF = 0.25


def plan_of(folder: pathlib.Path) -> dict:
    """The plan of a run on the machines of its newest launch. Raises ConfigError."""
    launch = read_json(folder / "environment.json")
    gpu = known_as(launch["gpu"], launch["gpu_memory_gib"])
    gpus_per_node = launch["ranks"] // len(launch["hosts"])
    asked = Asked(DEVICES[gpu] if gpu else None, gpus_per_node=gpus_per_node)
    return plan(config.load_resolved(str(folder / "config.toml")), launch["ranks"], asked)


def main(argv: list[str]) -> int:
    """RUN ROW, the row as JSON."""
    folder = pathlib.Path(argv[0])
    row = json.loads(argv[1])
    planned = plan_of(folder)
    figures = (
        ("peak memory, GiB", planned["peak_gib"], row["peak_memory_gib"], MEMORY_OFF),
        ("time of a step, s", planned["step_seconds"], row["step_seconds"], TIME_OFF),
    )
    comparison = {}
    for name, expected, measured, limit in figures:
        if not expected:  # the time on a GPU whose rates are unknown
            continue
        excess = measured / expected - 1
        comparison[name] = f"planned {expected:.4g}, measured {measured:.4g} ({excess:+.1%})"
        print_line(f"{name}: {comparison[name]}")
        if abs(excess) > limit:
            print_error(f"warning: {name} is more than {limit:.0%} off the plan")
    write_atomic(folder / "plan.json", json.dumps(comparison))
    return 0
