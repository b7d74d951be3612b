"""Arms that measure the machine, and parts of a step alone. Data is random, as matmuls of zeros draw
less power, and so run faster.

python -m benchmarks.gpu.parts CONFIG PART [--section.key=value ...]        prints JSON
"""

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

import config
from config import Config
from model.build import meta_model
from parallel.mesh import World
from run.environment import environment
from run.rank import distributed, pick_device


def nvidia_smi(query: str) -> str:
    """What it answers of the first GPU that torch sees."""
    uuid = torch.cuda.get_device_properties(0).uuid
    words = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.check_output(words, text=True).strip()


def conditions() -> dict:
    """Under what figures are comparable: the code, the versions, the device. Raises ConfigError
    where this machine lists a GPU that torch cannot use."""
    device = pick_device("auto", 0)
    facts = environment([], device)
    names = ("commit", "uncommitted", "python", "torch", "cuda", "gpu", "gpu_memory_gib")
    found = {"device": device.type, **{name: facts[name] for name in names}}
    found["uncommitted"] = hashlib.sha256(str(found["uncommitted"]).encode()).hexdigest()
    if device.type == "cuda":
        found["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
        found["driver"] = nvidia_smi("driver_version")
    return found


def machine(cfg: Config, world: World) -> dict:
    """Versions, memory, and the attention kernel that torch chooses."""
    facts = environment([platform.node()], world.device)
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        facts |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
        facts |= {"cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version()}
        facts["power_limit_and_highest_clock"] = nvidia_smi("power.limit,clocks.max.sm")
    m, n = cfg.model, cfg.train.seq_len
    q, k = (normal(world, 1, heads, n, m.width_per_head) for heads in (m.n_heads, m.n_kv_heads))
    with torch.profiler.profile(acc_events=True) as profile:  # else torch 2.11 warns
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    operators = [e.key for e in profile.key_averages() if "_scaled_dot_product_" in e.key]
    return facts | {"attention_operators": operators}


def collective(cfg: Config, world: World) -> dict:
    """Whether NCCL (on a CPU: gloo) starts and adds, on this one rank."""
    values = torch.arange(1024.0, device=world.device)
    dist.all_reduce(values)
    if values.sum().item() != 1023 * 512:
        raise ArithmeticError(f"the sum is {values.sum().item()}, not {1023 * 512}")
    return {"backend": dist.get_backend_config()}


def milliseconds(work: Callable, world: World) -> float:
    """Median of a call, after a first one."""
    work()
    least = 0.3 if world.device.type == "cuda" else 0.01
    timer = Timer("work()", globals={"work": work})
    return 1e3 * timer.blocked_autorange(min_run_time=least).median


def normal(world: World, *shape: int) -> Tensor:
    return torch.randn(shape, device=world.device, dtype=torch.bfloat16)


def copy(cfg: Config, world: World) -> dict:
    """Bandwidth of a copy as large as an embedding in float32."""
    source = torch.empty(cfg.model.vocab_size * cfg.model.dim, device=world.device)
    ms = milliseconds(partial(torch.empty_like(source).copy_, source), world)
    return {"tb_per_second_read_and_written": 2 * source.nbytes / ms / 1e9}


def products(cfg: Config, world: World) -> dict:
    """TFLOP/s of each matmul of a model on one sequence."""
    n, tflops = cfg.train.seq_len, {}
    for rows, columns in {p.shape for p in meta_model(cfg.model).parameters() if p.ndim == 2}:
        weight, x = normal(world, rows, columns), normal(world, n, columns)
        gradient = normal(world, n, rows)  # of the output
        pairs = {"forward": (x, weight.T), "dgrad": (gradient, weight), "wgrad": (gradient.T, x)}
        for kind, (a, b) in pairs.items():
            ms = milliseconds(partial(torch.mm, a, b), world)
            tflops[f"{kind} {rows} x {columns}"] = 2 * n * rows * columns / ms / 1e9
    return {"tflops": tflops, "tokens": n}


PARTS = {f.__name__: f for f in (machine, collective, copy, products)}


def main(argv: list[str]) -> int:
    if argv == ["conditions"]:
        print(json.dumps(conditions()))
        return 0
    path, name, *overrides = argv
    cfg = config.load(path, overrides)
    with distributed(cfg) as world:
        print(json.dumps(PARTS[name](cfg, world)))
    return 0


if __name__ == "__main__":
    config.run_tool(main)
