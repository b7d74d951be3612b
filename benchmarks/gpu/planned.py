"""What tools/planner predicts for an arm on one GPU, to set next to what is measured.

python -m benchmarks.gpu.planned GPU MEMORY_GIB CONFIG [--section.key=value ...]

A process of its own makes the plan, as that needs a fake process group.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

import config
from config import ConfigError
from system import die_with_parent

TIMEOUT = 60.0  # seconds that a measurement that is over waits for its plan


def predicted(gpu_name: str, memory_gib: float, path: str, overrides: list[str]) -> dict:
    """Peak, reserved memory and speed, by the plan. Times are those of a GPU that it knows."""
    from tools.planner.devices import device, known_as
    from tools.planner.plan import CONTEXT_GIB, Asked, plan

    known = known_as(gpu_name, memory_gib)
    asked = Asked(device(known) if known else None, memory_gib, gpus_per_node=1, on_gpu=True)
    row = plan(config.load(path, overrides), 1, asked)
    return {
        "peak_gib": row["peak_gib"],
        "reserved_gib": row["device_gib"] - CONTEXT_GIB,
        "step_seconds": row["step_seconds"],
        "tokens_per_second": row["tokens_per_second_per_device"],
    }


@contextlib.contextmanager
def plan_in_background(path: str, overrides: list[str]) -> Iterator[dict]:
    """Yields a dictionary. At the end it holds, as "planned", the prediction or why there is
    none."""
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / 2**30
    command = [sys.executable, "-m", "benchmarks.gpu.planned", properties.name, str(memory_gib)]

    def in_child() -> None:
        die_with_parent()
        os.nice(19)

    process = subprocess.Popen(
        [*command, path, *overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=in_child,
    )
    plan = {}
    try:
        yield plan
        output, errors = process.communicate(timeout=TIMEOUT)
        if process.returncode:
            last = errors.strip().split("\n")[-1]
            plan["planned"] = {"status": last or f"ended with {process.returncode}"}
        else:
            plan["planned"] = json.loads(output)
    except subprocess.TimeoutExpired:
        plan["planned"] = {"status": f"no plan in {TIMEOUT:.0f} s"}
    finally:
        process.kill()
        process.communicate()


def main(argv: list[str]) -> int:
    gpu_name, memory_gib, path, *overrides = argv
    try:
        print(json.dumps(predicted(gpu_name, float(memory_gib), path, overrides)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
