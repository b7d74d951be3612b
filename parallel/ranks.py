"""How ranks agree: every rank's objects on all, decisions of rank 0, every rank's errors on all."""

import contextlib
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from config import ConfigError
from schema import toml


def rank_and_size() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun sets them; a plain `python train.py` runs one rank."""
    return (
        int(os.getenv("RANK", "0")),
        int(os.getenv("LOCAL_RANK", "0")),
        int(os.getenv("WORLD_SIZE", "1")),
    )


def local_world_size() -> int:
    """The number of ranks on this machine, as torchrun sets it; 0 if unset."""
    return int(os.getenv("LOCAL_WORLD_SIZE", "0"))


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
    differ = [
        f"{name} = {toml(ours.get(name, 'absent'))}, rank 0 {toml(first.get(name, 'absent'))}"
        for name in {**first, **ours}
        if ours.get(name) != first.get(name)
    ]
    for rank, found in enumerate(all_gather_objects(differ)):
        if found:
            raise ConfigError(f"rank {rank} has {'; '.join(found)}: all nodes need the same {what}")


def torchrun_id() -> str | None:
    """Names this node's torchrun process, which stays when it restarts its ranks; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, started = os.getppid(), ""
    with contextlib.suppress(OSError):  # in a container every torchrun may have the same number
        started = pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"torchrun-{platform.node()}-{parent}-{started}".replace(".", "-")
