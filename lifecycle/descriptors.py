"""A rank's limit of open files, usually 1,024: gloo keeps one to each other rank of each group, and a run of many ranks
would end in an error that names no limit.
"""

import math
import os
import resource

import config
from config import ConfigError


def descriptors(
    cfg: config.Config, shape: tuple[int, int, int, int], rank: int, trains: bool = True
) -> int:
    """How many file descriptors this rank will open to reach the others. Counted in /proc/self/fd: a gloo group of g
    ranks, g + 3; the store's client, 1, its server with a connection from every rank, ranks + 9."""
    size = math.prod(shape)
    # the default group, and that of saves
    groups = [size] * (2 if trains and cfg.checkpoint else 1)
    # build_mesh() and fsdp_mesh(): the default group serves a dimension of all ranks, and cp or tp of 1 have none
    groups += [degree for degree in shape[:2] if degree != size] + [
        degree for degree in shape[2:] if 1 < degree < size
    ]
    groups += [shape[1] * shape[2]] if shape[2] > 1 and shape[1] * shape[2] != size else []
    client = "RANK" in os.environ  # else one process, without a server
    server = client and rank == 0 and os.getenv("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return sum(group + 3 for group in groups) + client + server * (size + 9)


def raise_limit(
    cfg: config.Config, shape: tuple[int, int, int, int], rank: int, trains: bool
) -> None:
    """Raises this process's soft limit of open files to the hard one; trains: and does not only evaluate. Raises
    ConfigError if that is too low. A run may open more: TensorBoard's files, and NCCL's sockets, whose number is not
    known here."""
    # three of its log, one saved; rank 0's lock and rows, and it copies files
    files = (7 if rank == 0 else 4) if trains else 0
    # of each source the tokens and the documents' ends, for training and validation
    files += 4 * max(1, len(cfg.data.sources))
    if cfg.data.order == "growing":
        files += 2  # to the process that prepares
    needed, size = descriptors(cfg, shape, rank, trains) + files, math.prod(shape)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # with that of the listing: gloo, too, opens one more for a moment
    needed += len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"rank {rank} of {size} needs {needed:,} file descriptors or more, and its hard limit is {hard:,}: raise "
            f"it to {2 * needed:,} with `ulimit -n` (or nofile in /etc/security/limits.conf, or LimitNOFILE of the "
            "service that starts it; SLURM takes the submitting shell's limit, unless PropagateResourceLimits excludes "
            "it)"
        )
