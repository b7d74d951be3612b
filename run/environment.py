"""The environment of a launch (environment.json), and the log of each rank."""

import logging
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import Any

import torch

import system
from metrics import log

REPO = pathlib.Path(__file__).parent.parent
GIT_SECONDS = 10.0  # a network disk may hang, or a repository be huge
DIFF_BYTES = 2**16  # the rest of a larger diff is cut: each launch stores one


def environment(hosts: list[str], device: torch.device) -> dict[str, Any]:
    """The machines, versions and code of a launch. hosts: the host of each rank."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("diff", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hosts": sorted(set(hosts)),
        "machine": platform.machine(),
        "gpu": gpu.name if gpu else None,
        "gpu_memory_gib": gpu.total_memory / 2**30 if gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": len(hosts),
    }


def git(*words: str) -> str | None:
    """The output of a git command in this repository; None if it fails or hangs."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=REPO, capture_output=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout[:DIFF_BYTES].decode(errors="replace").strip()


def start_logging(folder: pathlib.Path, rank: int) -> None:
    """Has this rank log to logs/rank-N.log. Rank 0 also logs to the console. The other ranks redirect
    stdout and stderr to their logs."""
    path = folder / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(exist_ok=True)
        # It appends, even after another program has truncated the file.
        in_file = logging.FileHandler(path)
    except OSError as error:  # a full disk
        system.print_error(f"{path}: {error.strerror}; this launch has none")
        in_file = logging.FileHandler(os.devnull)
    in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    # A full disk or a closed terminal neither stops the run nor prints tracebacks.
    logging.raiseExceptions = False
    log.handlers = [in_file]
    if rank == 0:
        log.handlers.append(logging.StreamHandler(sys.stdout))
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        # pyrefly: ignore[missing-attribute]  # the stream is open
        os.dup2(in_file.stream.fileno(), stream.fileno())
