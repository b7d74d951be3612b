"""The process group of a run: each rank's device, on which all ranks must agree before it exists,
and its end."""

import contextlib
import datetime
import gc
import json
import os
import platform
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import config
from config import ConfigError
from files import print_error
from lifecycle import SIGNALS
from lifecycle.device import pick_device
from parallel.mesh import World, build_mesh
from parallel.ranks import NOTICE_SECONDS, check_same_on_all_ranks, printed_if_long, rank_and_size
from parallel.torch_patches import set_default_timeout, shield_compilers

# where a process finds the others
FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# paths may differ: each node may have a local copy
ON_THIS_NODE = ("data.path", "data.tokenizer", "model.init_from", "lora.init_from")
MACOS_FILES = 10_240  # its OPEN_MAX, as many as a process may open there


def shared_options(cfg: config.Config) -> dict[str, Any]:
    """Every option by name, except paths that may differ between nodes."""
    options = config.SCHEMA.complete(config.to_dict(cfg))
    return {name: value for name, value in options.items() if name not in ON_THIS_NODE}


def agree_on_device(cfg: config.Config, store: dist.Store) -> torch.device:
    """This rank's device. Raises the ConfigErrors of all ranks on every rank, or one if their types
    differ. Through the store: a process group with NCCL on some ranks only would hang."""
    rank, local_rank, size = rank_and_size()
    device = None
    report: dict[str, Any] = {"type": None, "host": platform.node(), "problems": ()}
    try:
        device = pick_device(cfg, local_rank)
        report["type"] = device.type
    except ConfigError as error:
        report["problems"] = error.problems
    problems = problems_of_devices(all_gather_reports(store, rank, size, report))
    if problems:
        if store.add("devices read", 1) == size:
            store.set("devices read by all", "")
        if rank == 0:  # its process serves the store
            store.wait(["devices read by all"])
        raise ConfigError(*problems)
    assert device is not None  # else there would be problems
    return device


def all_gather_reports(store: dist.Store, rank: int, size: int, report: dict) -> list[dict]:
    """Every rank's report, in rank order."""
    store.set(f"device of rank {rank}", json.dumps(report))
    if rank == 0:  # gathers for all: else the store would answer size x size requests
        keys = [f"device of rank {number}" for number in range(size)]
        report_missing(store, keys)
        texts = store.multi_get(keys)
        store.set("devices", json.dumps([json.loads(text) for text in texts]))
    return json.loads(store.get("devices"))


def report_missing(store: dist.Store, keys: list[str]) -> None:
    """Waits a while for the ranks' keys, in rank order. Prints whose are missing then."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            listed = ", ".join(missing[:8])
            print_error(f"waiting for the device of rank {listed} ({len(missing)} in all)")
            return
        time.sleep(0.02)


def problems_of_devices(reports: list[dict]) -> list[str]:
    """Why ranks could not pick a device, each problem once; else the first rank whose device is of
    another type."""
    problems = []
    for report in reports:
        host = f"{report['host']}: " if len(reports) > 1 else ""
        problems += [f"{host}{problem}" for problem in report["problems"]]
    if problems:
        return list(dict.fromkeys(problems))
    first = reports[0]
    for rank, report in enumerate(reports):
        if report["type"] != first["type"]:
            return [
                f"rank {rank} on {report['host']} would train on {report['type']}, rank 0 on "
                f"{first['host']} on {first['type']}: all need the same type of device; set "
                "run.device, or mend the node"
            ]
    return []


def check_launcher() -> None:
    """Raises ConfigError if the variables of a launcher are incomplete or make no sense."""
    given = {}
    for name in (*FROM_LAUNCHER, "LOCAL_RANK"):
        if name in os.environ:
            given[name] = os.environ[name]
    is_one_of_several = bool(given.keys() & {"RANK", "WORLD_SIZE"})  # the others may be left over
    if has_numbers(given) and (not is_one_of_several or is_complete(given)):
        return
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    raise ConfigError(
        f"{shown}: a launcher sets all of {', '.join(FROM_LAUNCHER)}, with RANK below WORLD_SIZE; "
        "torchrun does, and ./run_train.sh, which starts all processes of this machine"
    )


def has_numbers(given: dict[str, str]) -> bool:
    """Whether a launcher's variables are numbers where they have to be."""
    return all(value.isdecimal() for name, value in given.items() if name != "MASTER_ADDR")


def is_complete(given: dict[str, str]) -> bool:
    """Whether a launcher's variables say who a process is, and where the others meet."""
    if not all(given.get(name) for name in FROM_LAUNCHER):
        return False
    return int(given["RANK"]) < int(given["WORLD_SIZE"]) and int(given["MASTER_PORT"]) < 2**16


def set_determinism(run: config.Run) -> None:
    torch.manual_seed(run.seed)
    if run.deterministic:
        torch.use_deterministic_algorithms(True)  # called only on request: it imports the compiler
        # else each all-gather's buffer would first be filled with NaN, to show reads of what
        # nothing wrote
        # pyrefly: ignore[missing-attribute]  # torch adds it at run time
        torch.utils.deterministic.fill_uninitialized_memory = False


def raise_file_limit() -> None:
    """Raises this process's limit of open files, usually 1,024, to the hard one where the system
    allows it: gloo keeps a connection to each other rank of each group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = hard
    if hard == resource.RLIM_INFINITY:  # on macOS, which allows no process that many
        wanted = max(soft, MACOS_FILES)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def distributed(
    cfg: config.Config, while_connecting: contextlib.AbstractContextManager | None = None
) -> Iterator[World]:
    """Initializes the process group, and destroys it on exit. Raises ConfigError for a mesh or
    device that is invalid or unavailable, and if ranks have different devices or options.

    while_connecting: entered while this rank waits for the others to be started."""
    check_launcher()
    with while_connecting or contextlib.nullcontext():
        world = connect(cfg)
    yield world
    # Not reached after an exception: the other ranks may never reach the barrier, so the process
    # just exits.
    # Frees FSDP2's buffers: gloo aborted in one of five runs that destroyed the group before.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def connect(cfg: config.Config) -> World:
    """Initializes the process group, once all ranks have been started. Raises ConfigError as
    distributed() does."""
    rank, _, size = rank_and_size()
    shape = config.mesh_shape(cfg, size)
    raise_file_limit()
    timeout = datetime.timedelta(seconds=config.longest_timeout(cfg))
    if "RANK" in os.environ:
        host = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"waiting for the other ranks to connect at {host}: this is rank 0 of {size}"
        if rank:
            text = f"waiting for rank 0 to listen at {host}: this is rank {rank} of {size}"
        with printed_if_long(text):
            store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    else:
        store = dist.HashStore()
    device = agree_on_device(cfg, store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # FlexAttention is compiled on a GPU even if blocks are not
    uses_flex = device.type == "cuda" and (cfg.data.document_mask or cfg.parallel.cp > 1)
    if cfg.parallel.compile or uses_flex:
        shield_compilers(SIGNALS)
    set_determinism(cfg.run)
    # gloo next to NCCL: flags, metadata and offloaded tensors are reduced on the host, without
    # waiting for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    set_default_timeout(timeout)
    text = f"waiting for gloo to connect rank {rank} to all {size} (GLOO_SOCKET_IFNAME?)"
    with printed_if_long(text):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        check_same_on_all_ranks("configuration and options", shared_options(cfg))
    return World(rank, size, device, build_mesh(device.type, shape))
