"""What this process runs on: versions, the device, the attention kernel, a collective."""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import REPO
from benchmarks.gpu.training import FailedCheck
from benchmarks.kernels import heads
from config import Config
from parallel.mesh import World
from run.environment import environment
from run.rank import pick_device


def nvidia_smi(options: str) -> str:
    """The first line of its output."""
    output = subprocess.check_output(["nvidia-smi", *options.split()], text=True)
    return output.splitlines()[0]


def identity() -> dict:
    """Under what figures are comparable: the code, the versions, the device.

    Raises ConfigError where this machine lists a GPU that torch cannot use.
    """
    device = pick_device("auto", 0)
    facts = {
        "device": device.type,
        "code": digest_of_code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "uuid": str(properties.uuid),
            "driver": nvidia_smi("--query-gpu=driver_version --format=csv,noheader"),
        }
    return facts


def digest_of_code() -> str:
    """SHA-256 over the repository's Python files and configurations. Needs no git."""
    paths = [*REPO.glob("*.py"), *REPO.glob("configs/*.toml")]
    for package in REPO.glob("*/__init__.py"):
        paths += package.parent.rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(REPO)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def machine(cfg: Config, world: World, each: float) -> dict:
    """Versions, memory, and the attention kernel that torch chooses."""
    facts = environment([platform.node()], world.device)
    facts["uncommitted"] = bool(facts["uncommitted"])
    for package in ("triton", "torchtitan"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    problems = []
    for part in (device_facts, attention_kernel):
        try:
            facts |= part(cfg, world)
        except Exception as error:  # the profiler needs more of a driver than training does
            problems.append(f"{part.__name__}: {type(error).__name__}: {error}")
    operators = facts.get("attention_operators")
    if facts.get("capability", [0])[0] == 9 and operators and "cudnn" not in str(operators):
        problems.append(
            "attention does not run on cuDNN, the fastest of torch's here: is an older one loaded?"
        )
    if problems:
        facts["marked"] = "; ".join(problems)
    return facts


def device_facts(cfg: Config, world: World) -> dict:
    """What CUDA and nvidia-smi report of the first GPU; nothing on a CPU."""
    if world.device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    uuid = torch.cuda.get_device_properties(0).uuid
    smi = nvidia_smi(f"--id=GPU-{uuid} --query-gpu=power.limit,clocks.max.sm --format=csv,noheader")
    return {
        "gpus": torch.cuda.device_count(),
        "driver": nvidia_smi("--query-gpu=driver_version --format=csv,noheader"),
        "capability": torch.cuda.get_device_capability(),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": torch.cuda.nccl.version(),
        "free_gib": free / 2**30,
        "total_gib": total / 2**30,
        "power_limit_and_highest_clock": smi[0] if smi else None,
    }


def attention_kernel(cfg: Config, world: World) -> dict:
    """The operators and kernels of one call of causal attention, from a trace."""
    q, k, v = heads(cfg, world)
    for _ in range(2):  # the first call loads and chooses
        with torch.profiler.profile(acc_events=True) as profile:  # else torch 2.11 warns
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    events = profile.key_averages()
    operators = [e.key for e in events if e.key.startswith("aten::_scaled_dot_product_")]
    kernels = [e.key for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"attention_operators": operators, "attention_kernels": kernels}


def collective(cfg: Config, world: World, each: float) -> dict:
    """Whether NCCL (on a CPU: gloo) starts and adds, on this one rank."""
    values = torch.arange(1024.0, device=world.device)
    dist.all_reduce(values)
    total = values.sum().item()
    if total != 1023 * 512:
        raise FailedCheck(f"the sum is {total}, not {1023 * 512}")
    return {"backend": dist.get_backend_config()}


# name: (function, configuration)
ENVIRONMENT = {"machine": (machine, "llama8b"), "collective": (collective, "tiny")}
