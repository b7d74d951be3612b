"""Compares a run's peak memory and step time on GPUs with its plan. Prints both, and writes them to
plan.json in the run's folder.

    python -m tools.planner.check RUN ROW      ROW: a training row of metrics.jsonl, as JSON
"""

import json
import pathlib

import config
from system import print_error, print_line, read_json, write_atomic
from tools.planner.devices import DEVICES, known_as, reached
from tools.planner.plan import Asked, plan

# Relative differences from the plan that cause a warning. A step may also be as slow as the lowest
# expected speed (devices.py).
MEMORY_OFF = 0.05
TIME_OFF = 0.25


def plan_of(folder: pathlib.Path, cfg: config.Config) -> dict:
    """Plans a run for the machines of its newest launch. Raises ConfigError and OSError."""
    launch = read_json(folder / "environment.json")
    gpu = known_as(launch["gpu"], launch["gpu_memory_gib"])
    gpus_per_node = launch["ranks"] // len(launch["hosts"])
    asked = Asked(DEVICES[gpu] if gpu else None, gpus_per_node=gpus_per_node)
    return plan(cfg, launch["ranks"], asked)


def compare(planned: dict, row: dict, cfg: config.Config) -> tuple[dict[str, str], list[str]]:
    """Returns (the comparison of each figure in words, by name; the warnings)."""
    lowest, _ = reached(cfg, planned["world_size"])
    time_off = max(TIME_OFF, 1 / lowest - 1)
    figures = (
        ("peak memory, GiB", planned["peak_gib"], row["peak_memory_gib"], MEMORY_OFF),
        ("time of a step, s", planned["step_seconds"], row["step_seconds"], time_off),
    )
    comparison = {}
    warnings = []
    for name, expected, measured, limit in figures:
        if not expected:  # step time is unknown without the GPU's rates
            continue
        excess = measured / expected - 1
        comparison[name] = f"planned {expected:.4g}, measured {measured:.4g} ({excess:+.1%})"
        if abs(excess) > limit:
            warnings.append(f"warning: {name} is more than {limit:.0%} off the plan")
    return comparison, warnings


def main(argv: list[str]) -> int:
    folder = pathlib.Path(argv[0])
    cfg = config.load_resolved(str(folder / "config.toml"))
    comparison, warnings = compare(plan_of(folder, cfg), json.loads(argv[1]), cfg)
    write_atomic(folder / "plan.json", json.dumps(comparison))
    for name, words in comparison.items():
        print_line(f"{name}: {words}")
    for warning in warnings:
        print_error(warning)
    return 0


if __name__ == "__main__":
    config.run_tool(main)
