"""Process group, device and mesh of this process, by the environment variables that torchrun sets for its ranks."""

import contextlib
import datetime
import gc
import json
import math
import os
import platform
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import config
from config import ConfigError
from options import toml
from parallel.gpus import driver_version, listed_gpus, visible_gpus

ON_THIS_NODE = ("data.path", "model.init_from", "lora.init_from")  # paths may differ: each node may have a local copy
MESH_DIMS = ("dp_replicate", "dp_shard", "cp", "tp")  # outermost first: tp ranks are adjacent


@dataclass(frozen=True)
class World:
    """This process, its device and the mesh. The cp and tp ranks of one data-parallel rank process the same samples:
    to split or average over samples, use dp_rank and dp_size, not rank and size."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # always has all four dimensions of MESH_DIMS

    @property
    def dp_replicate(self) -> int:
        return self.mesh.size(0)

    @property
    def dp_shard(self) -> int:
        return self.mesh.size(1)

    @property
    def cp(self) -> int:
        return self.mesh.size(2)

    @property
    def tp(self) -> int:
        return self.mesh.size(3)

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """Ranks that FSDP2 averages gradients over."""
        return self.dp_size * self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.cp * self.tp)


def build_mesh(device_type: str, shape: tuple[int, int, int, int]) -> DeviceMesh:
    # A dimension of size 1 would still create one process group per rank; no collective ever runs over cp or tp of 1.
    alone = {name: "fake" for name, degree in zip(MESH_DIMS, shape) if degree == 1 and name in ("cp", "tp")}
    return init_device_mesh(device_type, shape, mesh_dim_names=MESH_DIMS, backend_override=alone)


def fsdp_mesh(world: World) -> DeviceMesh:
    """The mesh for FSDP2: dp_shard flattened with cp, because cp does not shard parameters. HSDP puts dp_replicate in
    front of it; a dp_replicate of 1 is left out, because it would cost an all-reduce over one rank."""
    shards = world.mesh["dp_shard", "cp"]._flatten("dp_shard_cp") if world.cp > 1 else world.mesh["dp_shard"]
    return DeviceMesh._concatenate([world.mesh["dp_replicate"], shards]) if world.dp_replicate > 1 else shards


def local_world_size() -> int:
    """The number of ranks on this machine, as torchrun sets it; 0 if unset."""
    return int(os.getenv("LOCAL_WORLD_SIZE", "0"))


def tp_warnings(world: World) -> list[str]:
    """A warning if tp groups span machines: every block waits for their collectives."""
    here = local_world_size()
    return [f"warning: parallel.tp = {world.tp} does not divide the {here} ranks of a machine: its groups span machines"
            ", and every block waits for the network in between"] if here % world.tp else []


def rank_and_size() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun sets them; a plain `python train.py` runs one rank."""
    return int(os.getenv("RANK", "0")), int(os.getenv("LOCAL_RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))


def pick_device(cfg: config.Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError if cuda is requested but unavailable, if torch cannot use the GPUs
    of this machine, if there are too few, or if they do not support what is configured."""
    if cfg.run.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        listed = listed_gpus() if visible_gpus() else 0  # CUDA_VISIBLE_DEVICES may hide them: that is deliberate
        if cfg.run.device == "auto" and not listed:
            return torch.device("cpu")
        raise ConfigError(f'[run] device = "{cfg.run.device}": {why_no_gpu(listed)}; --run.device=cpu trains without '
                          "one")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"local rank {local_rank} has no GPU of its own: this machine has "
                          f"{torch.cuda.device_count()}; start fewer processes (NPROC)")
    check_for_gpus(cfg)
    if cfg.parallel.float8 != "none" and (found := torch.cuda.get_device_capability(local_rank)) < (8, 9):
        raise ConfigError(f'[parallel] float8 = "{cfg.parallel.float8}": needs a GPU of compute capability 8.9 (Ada, '
                          f"Hopper) or more; this one, {torch.cuda.get_device_name(local_rank)}, has "
                          f"{found[0]}.{found[1]}")
    return torch.device("cuda", local_rank)


def why_no_gpu(listed: int) -> str:
    """Why torch has no GPU here, of which nvidia-smi lists some or 0, and what to change."""
    built = f"torch {torch.__version__}, built for " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs")
    chosen = os.getenv("CUDA_VISIBLE_DEVICES")
    where = "" if chosen is None else f", with CUDA_VISIBLE_DEVICES={chosen}"
    if not listed:
        return f"this machine has no usable GPU: {built}, finds none{where}, and nvidia-smi lists none"
    return (f"nvidia-smi lists {listed} GPUs (driver {driver_version()}), but {built}, can use none{where}; install a "
            "torch build for a CUDA version that this driver supports, or a newer driver")


def check_for_gpus(cfg: config.Config) -> None:
    """Raises ConfigError for what a CPU takes and no GPU does: narrow heads, float8 uncompiled."""
    if cfg.parallel.float8 != "none" and not cfg.parallel.compile:
        raise ConfigError(f'[parallel] float8 = "{cfg.parallel.float8}": goes with compile = true only on a GPU: '
                          "rounding to 8 bits, uncompiled, takes longer than the products save")
    if (cfg.parallel.cp > 1 or cfg.data.document_mask) and cfg.model.width_per_head < 16:
        raise ConfigError(f"[model] head_dim: heads are {cfg.model.width_per_head} wide; on a GPU, context parallelism "
                          "and document masks need 16 or more (FlexAttention)")


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return found.get("avx512_bf16", False) or found.get("amx_bf16", False)


def storage_device(cfg: config.Config, world: World) -> torch.device:
    """Where parameters, gradients and optimizer state are stored between steps."""
    return torch.device("cpu") if cfg.parallel.cpu_offload else world.device


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0; returns its result, or raises its ConfigError, on every rank. For decisions that ranks
    must agree on: each may see a different state of a shared disk."""
    answer = [on_each_rank(lambda: work() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    return answer[0]


def all_gather_objects(value: Any) -> list:
    """Every rank's `value`, in rank order, over gloo: does not wait for the GPU. Without a process group: [value]."""
    if not dist.is_initialized():
        return [value]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_each_rank(work: Callable[[], Any]) -> Any:
    """Runs `work` on this rank; returns its result, or raises the ConfigErrors of all ranks on every rank."""
    result, problems = None, ()
    try:
        result = work()
    except ConfigError as error:
        problems = error.problems
    if problems := [problem for rank in all_gather_objects(problems) for problem in rank]:
        raise ConfigError(*dict.fromkeys(problems))
    return result


def check_same_on_all_ranks(what: str, ours: dict[str, Any]) -> None:
    """Raises ConfigError on every rank if any rank's values, by name, differ from rank 0's: the shards of one model
    would silently be trained in two ways."""
    first = on_rank_zero(lambda: ours)
    differ = [f"{name} = {toml(ours.get(name, 'absent'))}, rank 0 {toml(first.get(name, 'absent'))}"
              for name in {**first, **ours} if ours.get(name) != first.get(name)]
    for rank, found in enumerate(all_gather_objects(differ)):
        if found:
            raise ConfigError(f"rank {rank} has {'; '.join(found)}: all nodes need the same {what}")


def shared_options(cfg: config.Config) -> dict[str, Any]:
    """Every option by name, except paths that may differ between nodes."""
    options = config.SCHEMA.complete(config.to_dict(cfg))
    return {name: value for name, value in options.items() if name not in ON_THIS_NODE}


def descriptors(cfg: config.Config, shape: tuple[int, int, int, int], rank: int, trains: bool = True) -> int:
    """How many file descriptors this rank will open to reach the others. Counted in /proc/self/fd: a gloo group of g
    ranks, g + 3; the store's client, 1, its server with a connection from every rank, ranks + 9."""
    size = math.prod(shape)
    groups = [size] * (2 if trains and cfg.checkpoint else 1)  # the default group, and that of saves
    # build_mesh() and fsdp_mesh(): the default group serves a dimension of all ranks, and cp or tp of 1 have none
    groups += [degree for degree in shape[:2] if degree != size] + [degree for degree in shape[2:] if 1 < degree < size]
    groups += [shape[1] * shape[2]] if shape[2] > 1 and shape[1] * shape[2] != size else []
    client = "RANK" in os.environ  # else one process, without a server
    server = client and rank == 0 and os.getenv("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return sum(group + 3 for group in groups) + client + server * (size + 9)


def raise_descriptor_limit(needed: int, rank: int, size: int) -> None:
    """Raises this process's soft limit of open files, usually 1,024, to the hard one. Raises ConfigError if that is too
    low. A run may open more: TensorBoard's files, and NCCL's sockets, whose number is not known here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed += len(os.listdir("/proc/self/fd"))  # with that of the listing: gloo, too, opens one more for a moment
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"rank {rank} of {size} needs {needed:,} file descriptors or more, and its hard limit is {hard:,}: raise "
            f"it to {2 * needed:,} with `ulimit -n` (or nofile in /etc/security/limits.conf, or LimitNOFILE of the "
            "service that starts it; SLURM takes the submitting shell's limit, unless PropagateResourceLimits excludes "
            "it)")


def agree_on_device(store: dist.Store, rank: int, size: int, pick: Callable[[], torch.device]) -> torch.device:
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
    problems = [f"{one['host']}: " * (size > 1) + problem for one in ranks for problem in one["problems"]] or [
        f"rank {number} on {one['host']} would train on {one['type']}, rank 0 on {ranks[0]['host']} on "
        f"{ranks[0]['type']}: all need the same type of device; set run.device, or mend the node"
        for number, one in enumerate(ranks) if one["type"] != ranks[0]["type"]][:1]
    if problems:
        if store.add("devices read", 1) == size:
            store.set("devices read by all", "")
        if rank == 0:  # its process serves the store
            store.wait(["devices read by all"])
        raise ConfigError(*dict.fromkeys(problems))
    return device


@contextlib.contextmanager
def distributed(cfg: config.Config, trains: bool = True) -> Iterator[World]:
    """Initializes the process group, and destroys it on exit. trains: and does not only evaluate. Raises ConfigError
    for a mesh or device that is invalid or unavailable, if the process may open too few files, and if ranks have
    different devices or options."""
    rank, local_rank, size = rank_and_size()
    shape = config.mesh_shape(cfg, size)
    files = trains * (7 if rank == 0 else 4)  # three of its log, one saved; rank 0's lock and rows, and it copies files
    raise_descriptor_limit(descriptors(cfg, shape, rank, trains) + files, rank, size)
    timeout = datetime.timedelta(seconds=config.longest_timeout(cfg))
    store = next(dist.rendezvous("env://", timeout=timeout))[0] if "RANK" in os.environ else dist.HashStore()
    device = agree_on_device(store, rank, size, lambda: pick_device(cfg, local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo next to NCCL: flags, metadata and offloaded tensors are reduced on the host, without waiting for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # DeviceMesh's groups take torch's default timeout, 30 minutes, not that of init_process_group(): set the default
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    check_same_on_all_ranks("configuration and options", shared_options(cfg))
    yield World(rank, size, device, build_mesh(device.type, shape))
    # Not reached after an exception: the other ranks may never reach the barrier, so the process just exits.
    # Free FSDP2's buffers first: gloo aborted in one of five runs that destroyed the group while they were alive.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
