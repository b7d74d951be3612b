"""A rank's device, and whether it supports what is configured."""

import re

import torch

import config
from config import ConfigError
from lifecycle.gpus import chosen_gpus, describe_driver, has_slices, listed_gpus, visible_gpus
from parallel.mesh import has_native_bfloat16
from schema import together

NEW_TILES = (8, 0)  # compute capability from which FlexAttention's tiles depend on the GPU
TILE = 64  # queries, and keys, of a tile before that


def pick_device(cfg: config.Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError if cuda is requested but unavailable, if torch
    cannot use the GPUs of this machine, if there are too few, or if they do not support what is
    configured."""
    if cfg.run.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # CUDA_VISIBLE_DEVICES may hide them: that is deliberate
        listed = listed_gpus() if visible_gpus() else 0
        if cfg.run.device == "auto" and not listed:
            return torch.device("cpu")
        raise ConfigError(
            f'[run] device = "{cfg.run.device}": {why_no_gpu(listed)}; --run.device=cpu trains '
            "without one"
        )
    if local_rank >= torch.cuda.device_count():
        slices = ""
        if has_slices():
            slices = " (of GPUs that are divided, MIG, a process sees one slice)"
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has "
            f"{torch.cuda.device_count()}{where_chosen()}{slices}; start fewer processes (NPROC)"
        )
    device = torch.device("cuda", local_rank)
    together(
        lambda: check_kernels(device),
        lambda: config.check_for_gpus(cfg),
        lambda: check_bfloat16(cfg, device),
        lambda: check_shared_memory(cfg, device),
        lambda: check_float8(cfg, device),
    )
    return device


def describe(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"


def check_kernels(device: torch.device) -> None:
    """Raises ConfigError if torch was built without kernels for this GPU."""
    architectures = torch.cuda.get_arch_list()
    if not architectures or torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    if not any(runs_on(name, capability) for name in architectures):
        raise ConfigError(
            f"{describe(device)}: torch {torch.__version__} has kernels for "
            f"{', '.join(architectures)} alone; PYTHON=/path/to/python selects a Python whose torch "
            "has them for this GPU; --run.device=cpu trains without one"
        )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels for an architecture, such as sm_86, run on a GPU: within one major version on
    newer GPUs too; those of an intermediate form, such as compute_90, on all that are newer."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture)
    if not match:
        return False
    built_for = (int(match[2]), int(match[3]))
    is_same_major = built_for[0] == capability[0]
    return built_for <= capability and (is_same_major or match[1] == "compute")


def check_bfloat16(cfg: config.Config, device: torch.device) -> None:
    """Raises ConfigError if a GPU only emulates bfloat16: Inductor refuses it, and no fused kernel
    of attention supports it."""
    if cfg.parallel.param_dtype == "bfloat16" and not has_native_bfloat16(device):
        raise ConfigError(
            f'[parallel] param_dtype = "bfloat16": needs a GPU of compute capability 8.0 (Ampere) or '
            f"more; this one is {describe(device)}; --parallel.param_dtype=float32"
        )


def check_shared_memory(cfg: config.Config, device: torch.device) -> None:
    """Raises ConfigError if a GPU has too little shared memory for FlexAttention in float32: for a
    tile of queries, one of keys, and their scores."""
    capability = torch.cuda.get_device_capability(device)
    if cfg.parallel.param_dtype == "bfloat16" or not config.masks_attention(cfg):
        return  # "auto" is float32 there
    if capability >= NEW_TILES or torch.version.hip:
        return
    head_dim = cfg.model.width_per_head
    width = 1 << (head_dim - 1).bit_length()  # Triton's blocks are powers of two wide
    needed = 4 * (2 * TILE * width + TILE * TILE)
    properties = torch.cuda.get_device_properties(device)
    available = properties.shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute]
    if needed > available:
        raise ConfigError(
            f"[model] head_dim: heads are {head_dim} wide; context parallelism and document masks "
            f"in float32 (FlexAttention) need {needed:,} bytes of shared memory, and this GPU, "
            f"{describe(device)}, has {available:,}"
        )


def check_float8(cfg: config.Config, device: torch.device) -> None:
    """Raises ConfigError if a GPU has no float8 units."""
    recipe = cfg.parallel.float8
    if recipe != "none" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f'[parallel] float8 = "{recipe}": needs a GPU of compute capability 8.9 (Ada, Hopper) '
            f"or more; this one is {describe(device)}"
        )


def where_chosen() -> str:
    chosen = chosen_gpus()
    return "" if chosen is None else f", with CUDA_VISIBLE_DEVICES={chosen}"


def why_no_gpu(listed: int) -> str:
    """Why torch cannot use a GPU, and what to change. listed: how many the driver has, unless they
    are hidden."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    torch_build = f"torch {torch.__version__}, built for {build}"
    if not listed:
        return (
            f"this machine has no usable GPU: {torch_build}, finds none{where_chosen()}, and "
            "nvidia-smi lists none"
        )
    return (
        f"{describe_driver(listed)}, but {torch_build}, can use none{where_chosen()}; install a torch "
        "build for a CUDA version that this driver supports, a newer driver, or on a data center's "
        "GPU NVIDIA's package for forward compatibility (cuda-compat)"
    )
