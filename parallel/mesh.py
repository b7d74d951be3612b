"""Process group, device and mesh of this process; the only reader of the launcher's environment variables."""

import contextlib
import datetime
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import config
from config import ConfigError


@dataclass(frozen=True)
class World:
    """What a process knows of the others. Data-parallel over all ranks: replicas times shards."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # ("dp_replicate", "dp_shard"): a replica is a full copy, sharded over dp_shard neighbours

    @property
    def shards(self) -> int:
        return self.mesh["dp_shard"].size()

    @property
    def shard_rank(self) -> int:
        return self.mesh["dp_shard"].get_local_rank()


def rank_and_size() -> tuple[int, int, int]:
    """(rank, local rank, ranks) as torchrun sets them; a plain `python train.py` is one rank."""
    return int(os.getenv("RANK", "0")), int(os.getenv("LOCAL_RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))


def pick_device(cfg: config.Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError where cuda is asked for and not there, or has too few GPUs."""
    wanted = cfg.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('[run] device = "cuda": this machine has no usable GPU; --run.device=cpu trains without one')
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"local rank {local_rank} has no GPU of its own: this machine has "
                          f"{torch.cuda.device_count()}; start fewer processes (NPROC)")
    return torch.device("cuda", local_rank)


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0 and returns its result on every rank; a ConfigError is raised on every rank.

    For all that must be decided once: ranks that each look at a shared disk may see different things.
    """
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except ConfigError as error:
            answer[1] = error.problems
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if answer[1]:
        raise ConfigError(*answer[1])
    return answer[0]


def all_gather_objects(value: Any) -> list:
    """Everybody's `value`, by rank, over the host's network: the GPU is not waited for."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def distributed(cfg: config.Config) -> Iterator[World]:
    """Starts the process group and ends it in good order. Everything that can be wrong is said before it starts."""
    rank, local_rank, size = rank_and_size()
    shape = config.mesh_shape(cfg, size)
    device = pick_device(cfg, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo beside NCCL: flags, metadata and offloaded tensors are reduced on the host, without waiting for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=config.longest_timeout(cfg)), **alone)
    yield World(rank, size, device, init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard")))
    # Not reached after an exception: then the other ranks do not come to the barrier, and the process just ends.
    # The collection lets go of FSDP2's buffers first; gloo aborted in one of five runs that destroyed the group with
    # them alive.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
