"""Starts the processes that measure (measure.py), and ends those that do not answer."""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks.gpu.arms import GROUPS
from benchmarks.gpu.measure import IDENTITY, REPORTED, Work

# share of --seconds that an arm may take, its process's start included
LIMIT = 0.25
LEAST_LIMIT = 30.0  # seconds
TO_END = 10.0  # seconds that a killed process has: one that waits for its driver cannot be killed


def limit_of(work: Work) -> float:
    """Seconds that an arm may take."""
    return max(LEAST_LIMIT, LIMIT * work.seconds)


@contextlib.contextmanager
def started(work: Work) -> Iterator[tuple[subprocess.Popen, queue.SimpleQueue]]:
    """A process that measures, and the lines that it prints, the last of which is None."""
    # as the launcher sets it
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "expandable_segments:True"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.measure", json.dumps(dataclasses.asdict(work))],
        env={"PYTORCH_ALLOC_CONF": allocator, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        yield process, lines
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TO_END)


def next_row(process: subprocess.Popen, lines: queue.SimpleQueue, work: Work) -> dict | None:
    """The next row of a process; None once it has ended, with all its arms or for a new one."""
    seconds = min(limit_of(work), work.deadline - time.time())
    try:
        line = lines.get(timeout=max(0.0, seconds))
    except queue.Empty:
        if time.time() >= work.deadline:
            return {"status": "cut off: time"}
        return {"status": f"failed: no answer in {seconds:.0f} s, a quarter of --seconds: killed"}
    if line is not None:
        return json.loads(line)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TO_END)
    if process.returncode == REPORTED:
        return None
    return {"status": f"failed: its process ended with {process.returncode}"}


def identify(work: Work) -> dict:
    """What environment.identity() finds, in a process of its own, or why it finds nothing."""
    deadline = time.time() + limit_of(work)  # however little time the arms have
    work = dataclasses.replace(work, group=IDENTITY, arms=[IDENTITY], deadline=deadline)
    with started(work) as (process, lines):
        row = next_row(process, lines, work)
    return row or {"status": "failed: it printed nothing"}


def run_group(work: Work, add: Callable[[dict], None]) -> None:
    """Starts processes until add() got a row for each arm of the work."""
    waiting = []
    for arm in work.arms:
        waiting.append({"group": work.group, "model": GROUPS[work.group][arm][0], "arm": arm})
    while waiting and time.time() < work.deadline:
        arms = [row["arm"] for row in waiting]
        with started(dataclasses.replace(work, arms=arms)) as (process, lines):
            while waiting:
                row = next_row(process, lines, work)
                if row is None:
                    break
                add(waiting.pop(0) | row)
                if is_over(row):
                    break
    for row in waiting:
        add(row | {"status": "skipped: time"})


def is_over(row: dict) -> bool:
    """Whether the process of this row prints no more."""
    return row["status"].startswith(("failed", "cut off"))
