"""How ranks agree: all-gathered objects, decisions of rank 0, errors that every rank raises."""

import contextlib
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from config import ConfigError
from files import print_error
from schema import toml

NOTICE_SECONDS = 20.0  # a longer wait for other processes is reported


def rank_and_size() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun sets them; (0, 0, 1) without torchrun."""
    return (
        int(os.getenv("RANK", "0")),
        int(os.getenv("LOCAL_RANK", "0")),
        int(os.getenv("WORLD_SIZE", "1")),
    )


def local_world_size() -> int:
    """The number of ranks on this machine, as torchrun sets it; 0 if unset."""
    return int(os.getenv("LOCAL_WORLD_SIZE", "0"))


def torchrun_id() -> str | None:
    """Identifies this node's torchrun process, which outlives its ranks. None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    # Every container's torchrun may have the same process id, so its start time is added.
    start_time = ""
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{parent}/stat").read_text()
        # The command's name, in parentheses, may contain spaces. starttime is field 22 of proc(5).
        fields_after_name = stat.rpartition(")")[2].split()
        start_time = fields_after_name[19]
    return f"torchrun-{platform.node()}-{parent}-{start_time}".replace(".", "-")


@contextlib.contextmanager
def printed_if_long(text: str) -> Iterator[None]:
    """Prints whom this process waits for, if its body takes long: they may never have been
    started."""
    notice = threading.Timer(NOTICE_SECONDS, print_error, [text])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def all_gather_objects(value: Any) -> list:
    """Every rank's `value`, in rank order; [value] without a process group.

    Runs over gloo, and so does not wait for the GPU.
    """
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_each_rank(work: Callable[[], Any]) -> Any:
    """Runs `work` on this rank and returns its result.

    If `work` raises a ConfigError on any rank, every rank raises the problems of all ranks.
    """
    result = None
    problems: tuple[str, ...] = ()
    try:
        result = work()
    except ConfigError as error:
        problems = error.problems
    all_problems: list[str] = []
    for rank_problems in all_gather_objects(problems):
        all_problems.extend(rank_problems)
    if all_problems:
        raise ConfigError(*dict.fromkeys(all_problems))  # a problem of several ranks once
    return result


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0. Every rank returns its result, or raises its ConfigError.

    For decisions that ranks must agree on: each may see a different state of a shared disk.
    """
    result = on_each_rank(lambda: work() if dist.get_rank() == 0 else None)
    objects = [result]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
    return objects[0]


def check_same_on_all_ranks(subject: str, values: dict[str, Any]) -> None:
    """Raises ConfigError on every rank if any rank's values, by name, differ from rank 0's.

    Shards of one model would otherwise silently be trained in two ways.
    """
    expected = on_rank_zero(lambda: values)
    differences = []
    for name in {**expected, **values}:
        if values.get(name) != expected.get(name):
            ours = toml(values.get(name, "absent"))
            theirs = toml(expected.get(name, "absent"))
            differences.append(f"{name} = {ours}, rank 0 {theirs}")
    for rank, rank_differences in enumerate(all_gather_objects(differences)):
        if rank_differences:
            raise ConfigError(
                f"rank {rank} has {'; '.join(rank_differences)}: all nodes need the same {subject}"
            )
