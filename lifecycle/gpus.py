"""This machine's GPUs, by CUDA_VISIBLE_DEVICES, nvidia-smi and device files: without torch, which
takes seconds to import."""

import functools
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess

import config

DEVICE_FILES = pathlib.Path("/dev")
AMD_NODES = pathlib.Path("/sys/class/kfd/kfd/topology/nodes")  # some are CPUs
SMI_SECONDS = 30.0  # a driver that hangs never answers


def nvidia_smi(options: str) -> list[str]:
    """Lines of its output; none where the program is missing."""
    program = shutil.which("nvidia-smi")
    return _output(program, options).splitlines() if program else []


@functools.cache  # it takes up to seconds on a node of eight GPUs
def _output(program: str, options: str) -> str:
    command = [program, *options.split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {SMI_SECONDS:g} s"
    return done.stdout  # what is wrong, too


def listed_gpus() -> int:
    """How many GPUs the driver has, usable or not."""
    if is_for_amd():
        return len(_amd_gpus())
    listed = sum(line.startswith("GPU") for line in nvidia_smi("--list-gpus"))
    # nvidia-smi is missing in a bare container, and fails after an update of the driver
    return listed or len(_device_files())


def visible_gpus() -> int:
    """How many GPUs a process sees: as CUDA does, those of CUDA_VISIBLE_DEVICES before the first
    invalid name."""
    chosen = chosen_gpus()
    if chosen is None:
        return listed_gpus()
    count = 0
    for name in chosen.split(","):
        # a number, or GPU- or MIG- and a UUID
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name.strip()):
            break
        count += 1
    return count


def chosen_gpus() -> str | None:
    """The value of CUDA_VISIBLE_DEVICES; None if it is not set."""
    names = ["CUDA_VISIBLE_DEVICES"]
    if is_for_amd():
        names += ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    for name in names:
        if name in os.environ:
            return os.environ[name]
    return None


def trains_on_gpus(cfg: config.Config) -> bool:
    """Whether a run would train on this machine's GPUs."""
    return cfg.run.device == "cuda" or (cfg.run.device == "auto" and visible_gpus() > 0)


def has_slices() -> bool:
    """Whether a GPU is divided (MIG): a process sees one slice, of all GPUs."""
    return any(line.strip().startswith("MIG") for line in nvidia_smi("--list-gpus"))


def driver_version() -> str:
    lines = nvidia_smi("--query-gpu=driver_version --format=csv,noheader")
    return lines[0] if lines else "unknown"


def describe_driver(listed: int) -> str:
    """How many GPUs the driver lists, and its versions."""
    driver = f"driver {driver_version()}"
    supported = re.search(r"CUDA Version: ([\d.]+)", "".join(nvidia_smi("")))
    if supported:
        driver += f", for CUDA up to {supported[1]}"
    lines = nvidia_smi("--list-gpus")
    if any(line.startswith("GPU") for line in lines):
        return f"nvidia-smi lists {listed} GPUs ({driver})"
    tool = f'nvidia-smi says "{lines[0]}"' if lines else "without nvidia-smi"
    return f"this machine has {listed} GPUs ({tool})"


def is_for_amd() -> bool:
    """Whether the installed torch is a build for ROCm."""
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def _amd_gpus() -> list[pathlib.Path]:
    """A file of each AMD GPU's number, which a CPU's is 0 in."""
    gpus = []
    for file in AMD_NODES.glob("*/gpu_id"):
        if file.read_text().strip() not in ("", "0"):
            gpus.append(file)
    return gpus


def _device_files() -> list[pathlib.Path]:
    """The device files of NVIDIA's GPUs that this process may open: a job's control group allows
    those of its own GPUs."""
    files = []
    for path in DEVICE_FILES.glob("nvidia[0-9]*"):
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError:
            continue
        files.append(path)
    return files
