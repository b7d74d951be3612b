"""This machine's GPUs, by CUDA_VISIBLE_DEVICES and nvidia-smi: without torch, which takes seconds
to import."""

import os
import shutil
import subprocess


def nvidia_smi(options: str) -> list[str]:
    """Lines of its output; none where the program is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(["nvidia-smi", *options.split()], capture_output=True, text=True)
    return done.stdout.splitlines()


def listed_gpus() -> int:
    """How many GPUs the driver has, usable or not."""
    return sum(line.startswith("GPU") for line in nvidia_smi("--list-gpus"))


def visible_gpus() -> int:
    """How many GPUs a process sees: as CUDA does, those of CUDA_VISIBLE_DEVICES before the first
    invalid name."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return listed_gpus()
    count = 0
    for name in chosen.split(","):
        if not name or name.startswith("-"):
            break
        count += 1
    return count


def driver_version() -> str:
    lines = nvidia_smi("--query-gpu=driver_version --format=csv,noheader")
    return lines[0] if lines else "unknown"
