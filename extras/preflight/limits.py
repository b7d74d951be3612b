"""What a process may use: open files, locked memory, shared memory, memory."""

import contextlib
import math
import os
import pathlib
import resource
from collections.abc import Iterator

import config
from extras.preflight.finding import Finding, error, trains_on_gpus, warning
from extras.preflight.sizes import GIB, gib, sizes
from run.command import Ranks
from system.machine import control_groups

# Open files of rank 0, of so many ranks: its store has a connection to each, and so has each of the
# process groups that every run makes. Measured; those of NCCL, tp and cp come on top.
FILES_OF_RANK = 4
FILES = 30
# what NVIDIA recommends for containers (docker run --shm-size)
SHARED_MEMORY = 1 * GIB
PROCESS = GIB // 4  # of a rank without a model, at least: 0.5 GiB were measured
MIB = 2**20
UNLIMITED = 2**60  # control groups of version 1 write a number of about 2^63
ADAPTERS = pathlib.Path("/sys/class/infiniband")
SHARED_FILES = "/dev/shm"
MEMORY_OF_MACHINE = pathlib.Path("/proc/meminfo")


def open_files(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """The hard limit, to which each rank raises its own, against what gloo opens."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_RANK * ranks.total + FILES
    if limit != resource.RLIM_INFINITY and needed > limit:
        enough = 2 ** math.ceil(math.log2(2 * needed))
        yield error(
            f"RLIMIT_NOFILE = {limit}: rank 0 of {ranks.total} opens {needed} files and more "
            f"(connections of gloo); raise the hard limit: ulimit -Hn {enough}, or LimitNOFILE="
            f"{enough} of the service that starts jobs"
        )


def locked_memory(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Of which InfiniBand needs as much as NCCL's buffers take."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_adapters = ADAPTERS.is_dir() and any(ADAPTERS.iterdir())
    if ranks.nodes == 1 or not has_adapters or not trains_on_gpus(cfg):
        return
    if limit != resource.RLIM_INFINITY:
        yield warning(
            f"RLIMIT_MEMLOCK = {limit // 1024} KiB: NCCL's buffers for InfiniBand are locked in "
            "memory, and more of them than that fail; ulimit -l unlimited, or "
            "LimitMEMLOCK=infinity of the service that starts jobs"
        )


def shared_memory(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Which Docker limits to 64 MiB."""
    if ranks.local == 1 or not trains_on_gpus(cfg):
        return
    size = 0
    with contextlib.suppress(OSError):
        disk = os.statvfs(SHARED_FILES)
        size = disk.f_blocks * disk.f_frsize
    if size < SHARED_MEMORY:
        yield warning(
            f"{SHARED_FILES} holds {size // MIB} MiB: NCCL may connect the {ranks.local} ranks of a "
            "node through it, and needs up to 1 GiB; docker run --ipc=host, or --shm-size=1g"
        )


def host_memory(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """The least that the ranks of this machine need, against the least of its limits."""
    limit, source = memory_limit(os.environ)
    share = ranks.local / ranks.total  # of the states, if they are sharded over all ranks
    whole = sizes(cfg, limit / 2)
    needed = ranks.local * PROCESS
    reason = "the ranks of a node"
    if not trains_on_gpus(cfg) or cfg.parallel.cpu_offload:
        needed += whole.states * share
        reason += ", with parameters, gradients and optimizer state,"
    elif cfg.checkpoint and cfg.checkpoint.async_save:
        needed += whole.checkpoint * share
        reason += ", with a copy of what is saved ([checkpoint] async_save),"
    if needed > limit:
        yield error(
            f"{source}: {gib(limit)} of memory, and {reason} need {gib(needed)} or more; ask for "
            "more (sbatch --mem=0: all of the node's; docker run --memory), or train on more nodes"
        )


def memory_limit(environ: os._Environ[str]) -> tuple[float, str]:
    """(bytes that the processes of this machine may use, with swap; which limit that is)."""
    memory = swap = math.inf
    with contextlib.suppress(OSError, ValueError):
        rows = [line.split() for line in MEMORY_OF_MACHINE.read_text().splitlines()]
        kib = {row[0]: int(row[1]) for row in rows}
        memory = kib["MemTotal:"] * 1024
        swap = kib["SwapTotal:"] * 1024
    limits: list[tuple[float, str]] = [(memory + swap, "this machine")]
    for group in control_groups("memory"):
        size = group_limit(group, swap)
        if size:
            limits.append((size, f"control group {group}"))
    of_node = environ.get("SLURM_MEM_PER_NODE", "")
    if of_node.isdecimal() and int(of_node):  # 0: all
        limits.append((int(of_node) * MIB, f"SLURM_MEM_PER_NODE = {of_node}"))
    of_core = environ.get("SLURM_MEM_PER_CPU", "")
    cores = environ.get("SLURM_CPUS_ON_NODE", "")
    if of_core.isdecimal() and cores.isdecimal() and int(of_core):
        name = f"SLURM_MEM_PER_CPU = {of_core}, SLURM_CPUS_ON_NODE = {cores}"
        limits.append((int(of_core) * int(cores) * MIB, name))
    return min(limits)


def group_limit(group: pathlib.Path, swap: float) -> float | None:
    """A control group's limit in bytes, with its swap; None if it has none. swap: the machine's."""
    memory = read_limit(group / "memory.max")  # version 2
    if memory is not None:
        of_swap = read_limit(group / "memory.swap.max")
        return memory + (swap if of_swap is None else of_swap)
    with_swap = read_limit(group / "memory.memsw.limit_in_bytes")  # version 1
    if with_swap is not None:
        return with_swap
    memory = read_limit(group / "memory.limit_in_bytes")
    return None if memory is None else memory + swap


def read_limit(file: pathlib.Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        size = int(file.read_text())
        if size < UNLIMITED:
            return size
    return None
