"""The first hour on a GPU, as one command: python -m benchmarks.gpu. docs/cluster.md explains it.

arms.py         the table: each arm is a command and what it answers
__main__.py     runs what lacks a result, each in a process, next to its plan; the JSON file, tables
parts.py        arms that measure the machine and a step's parts alone
checks.py       arms that train configs/tiny.toml next to a CPU
rank_of_many.py one GPU as rank 0 of many, a program of its own; slept_network.py: its collectives
"""

import contextlib
import statistics
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def polled(uuid: str | None) -> Iterator[dict]:
    """Yields a dictionary. At the end it holds the medians of this GPU's clock, power and
    temperature, read once a second by nvidia-smi."""
    medians: dict[str, float] = {}
    if not uuid:
        yield medians
        return
    query = ["--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", f"--id=GPU-{uuid}", *query, "--loop=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield medians
        process.kill()
        samples = [line.split(",") for line in process.communicate()[0].splitlines()]
    with contextlib.suppress(ValueError):  # "[N/A]"
        for name, values in zip(("sm_mhz", "watt", "celsius"), zip(*samples)):
            medians[name] = statistics.median(map(float, values))
