"""The process group of a run: each rank's device, on which all ranks must agree before it exists, and its end."""

import contextlib
import datetime
import gc
import json
import os
import platform
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import config
from config import ConfigError
from lifecycle.gpus import driver_version, listed_gpus, visible_gpus
from parallel.mesh import World, build_mesh
from parallel.ranks import check_same_on_all_ranks, rank_and_size
from parallel.torch_patches import set_default_timeout

# paths may differ: each node may have a local copy
ON_THIS_NODE = ("data.path", "model.init_from", "lora.init_from")


def pick_device(cfg: config.Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError if cuda is requested but unavailable, if torch cannot use the GPUs
    of this machine, if there are too few, or if they do not support what is configured."""
    if cfg.run.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # CUDA_VISIBLE_DEVICES may hide them: that is deliberate
        listed = listed_gpus() if visible_gpus() else 0
        if cfg.run.device == "auto" and not listed:
            return torch.device("cpu")
        raise ConfigError(
            f'[run] device = "{cfg.run.device}": {why_no_gpu(listed)}; --run.device=cpu trains without '
            "one"
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has "
            f"{torch.cuda.device_count()}; start fewer processes (NPROC)"
        )
    config.check_for_gpus(cfg)
    if cfg.parallel.float8 != "none" and (found := torch.cuda.get_device_capability(local_rank)) < (
        8,
        9,
    ):
        raise ConfigError(
            f'[parallel] float8 = "{cfg.parallel.float8}": needs a GPU of compute capability 8.9 (Ada, '
            f"Hopper) or more; this one, {torch.cuda.get_device_name(local_rank)}, has "
            f"{found[0]}.{found[1]}"
        )
    return torch.device("cuda", local_rank)


def why_no_gpu(listed: int) -> str:
    """Why torch has no GPU here, of which nvidia-smi lists some or 0, and what to change."""
    built = f"torch {torch.__version__}, built for " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    )
    chosen = os.getenv("CUDA_VISIBLE_DEVICES")
    where = "" if chosen is None else f", with CUDA_VISIBLE_DEVICES={chosen}"
    if not listed:
        return (
            f"this machine has no usable GPU: {built}, finds none{where}, and nvidia-smi lists none"
        )
    return (
        f"nvidia-smi lists {listed} GPUs (driver {driver_version()}), but {built}, can use none{where}; install a "
        "torch build for a CUDA version that this driver supports, or a newer driver"
    )


def shared_options(cfg: config.Config) -> dict[str, Any]:
    """Every option by name, except paths that may differ between nodes."""
    options = config.SCHEMA.complete(config.to_dict(cfg))
    return {name: value for name, value in options.items() if name not in ON_THIS_NODE}


def agree_on_device(
    store: dist.Store, rank: int, size: int, pick: Callable[[], torch.device]
) -> torch.device:
    """This rank's device. Raises the ConfigErrors of all ranks on every rank, or one if their types differ. Through the
    store: a process group with NCCL on some ranks only would hang."""
    device, problems = None, ()
    try:
        device = pick()
    except ConfigError as error:
        problems = error.problems
    ours = {"type": device and device.type, "host": platform.node(), "problems": problems}
    store.set(f"device of rank {rank}", json.dumps(ours))
    if rank == 0:  # gathers for all: else the store would answer size x size requests
        found = store.multi_get([f"device of rank {number}" for number in range(size)])
        store.set("devices", json.dumps([json.loads(one) for one in found]))
    ranks = json.loads(store.get("devices"))
    problems = [
        f"{one['host']}: " * (size > 1) + problem for one in ranks for problem in one["problems"]
    ] or [
        f"rank {number} on {one['host']} would train on {one['type']}, rank 0 on {ranks[0]['host']} on "
        f"{ranks[0]['type']}: all need the same type of device; set run.device, or mend the node"
        for number, one in enumerate(ranks)
        if one["type"] != ranks[0]["type"]
    ][:1]
    if problems:
        if store.add("devices read", 1) == size:
            store.set("devices read by all", "")
        if rank == 0:  # its process serves the store
            store.wait(["devices read by all"])
        raise ConfigError(*dict.fromkeys(problems))
    assert device is not None  # else there would be problems
    return device


def set_determinism(run: config.Run) -> None:
    torch.manual_seed(run.seed)
    if run.deterministic:
        torch.use_deterministic_algorithms(True)  # called only on request: it imports the compiler
        # else each all-gather's buffer would first be filled with NaN, to show reads of what nothing wrote
        # pyrefly: ignore[missing-attribute]  # torch adds it at run time
        torch.utils.deterministic.fill_uninitialized_memory = False


def raise_file_limit() -> None:
    """Raises this process's limit of open files, usually 1,024, to the hard one: gloo keeps a connection to each other
    rank of each group."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def distributed(cfg: config.Config) -> Iterator[World]:
    """Initializes the process group, and destroys it on exit. Raises ConfigError for a mesh or device that is invalid
    or unavailable, and if ranks have different devices or options."""
    rank, local_rank, size = rank_and_size()
    shape = config.mesh_shape(cfg, size)
    raise_file_limit()
    timeout = datetime.timedelta(seconds=config.longest_timeout(cfg))
    store = (
        next(dist.rendezvous("env://", timeout=timeout))[0]
        if "RANK" in os.environ
        else dist.HashStore()
    )
    device = agree_on_device(store, rank, size, lambda: pick_device(cfg, local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    set_determinism(cfg.run)
    # gloo next to NCCL: flags, metadata and offloaded tensors are reduced on the host, without waiting for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    set_default_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    check_same_on_all_ranks("configuration and options", shared_options(cfg))
    yield World(rank, size, device, build_mesh(device.type, shape))
    # Not reached after an exception: the other ranks may never reach the barrier, so the process just exits.
    # Free FSDP2's buffers first: gloo aborted in one of five runs that destroyed the group while they were alive.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
