"""This machine's GPUs, by CUDA_VISIBLE_DEVICES and nvidia-smi: without torch, which takes seconds to import."""

import itertools
import os
import shutil
import subprocess


def nvidia_smi(option: str) -> list[str]:
    """Lines of its output; none where the program is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return []
    return subprocess.run(
        ["nvidia-smi", *option.split()], capture_output=True, text=True
    ).stdout.splitlines()


def listed_gpus() -> int:
    """How many GPUs the driver has, usable or not."""
    return sum(line.startswith("GPU") for line in nvidia_smi("--list-gpus"))


def visible_gpus() -> int:
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # as CUDA does
        return len([*itertools.takewhile(lambda name: name and name[0] != "-", chosen.split(","))])
    return listed_gpus()


def driver_version() -> str:
    return next(iter(nvidia_smi("--query-gpu=driver_version --format=csv,noheader")), "unknown")
