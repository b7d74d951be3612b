"""One rank's process, after train.py has read its command line: device, process group, exit code."""

import contextlib
import datetime
import gc
import logging
import os
import pathlib
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import config
from config import Config, ConfigError, Problems
from metrics import log
from parallel.mesh import World, build_mesh, has_native_bfloat16
from parallel.ranks import (
    all_gather_objects,
    check_same_on_all_ranks,
    printed_if_long,
    rank_and_size,
)
from parallel.torch_patches import set_default_timeout, shield_compilers
from run.begin import ATTEMPT, check_not_one_of_several
from run.run import Run
from run.watchdog import EXITED, Watchdog
from system import (
    FINISHED,
    INPUT_IS_WRONG,
    NVIDIA,
    SIGNALS,
    STOPPED,
    has_driver,
    print_error,
    raise_file_limit,
)

EXIT_SECONDS = 60.0  # the process group and compile workers may hang when they end
# Paths that may differ between nodes: each node may have a local copy.
LOCAL_PATHS = ("data.path", "data.tokenizer", "model.init_from", "lora.init_from")


def main(args: Namespace, cfg: Config, train: Callable, evaluate: Callable) -> NoReturn:
    """Runs train(cfg, world, run), or with --eval-only evaluate(cfg, world, run), and exits."""
    gc.enable()
    attempt = pathlib.Path(os.environ[ATTEMPT]) if ATTEMPT in os.environ else None
    rank, _, _ = rank_and_size()
    watchdog = Watchdog(rank, attempt)
    watchdog.enter("start", cfg.run.start_timeout_seconds)
    work = evaluate if args.eval_only else train
    run = None
    try:
        if not attempt and "RANK" not in os.environ:  # neither our launcher nor torchrun started it
            check_not_one_of_several()
        with distributed(cfg) as world:
            cfg = resolve_param_dtype(cfg, world)
            run = Run(cfg, world, watchdog, attempt)
            work(cfg, world, run)
            run.end()
            code = STOPPED if run.stops else FINISHED
            outcome = {"exit_code": code, "start": run.start, "signal": run.stop_flag.signal}
            watchdog.enter(EXITED, EXIT_SECONDS, run.step, **outcome)
    except BaseException as error:
        exit_failed(error, run, watchdog)
    # Under the launcher every rank exits with 0, since torchrun kills the others when one fails.
    # Without the launcher a stop must not look like success: Kubernetes restarts only failures.
    exit_immediately(FINISHED if attempt else code)


@contextlib.contextmanager
def distributed(cfg: Config) -> Iterator[World]:
    """Opens the process group of all ranks, and closes it at the end of its body. Raises ConfigError
    for a mesh or device that is invalid or unavailable, and if ranks have different devices or
    options."""
    rank, local_rank, size = rank_and_size()
    shape = config.mesh_shape(cfg, size)
    device = pick_device(cfg.run.device, local_rank)
    if device.type == "cuda":
        config.check_for_gpus(cfg)
    raise_file_limit()  # gloo opens a connection to every other rank, for each group
    # FlexAttention is compiled on a GPU even if blocks are not
    if cfg.parallel.compile or (device.type == "cuda" and config.masks_attention(cfg)):
        shield_compilers(SIGNALS)
    torch.manual_seed(cfg.run.seed)
    if cfg.run.deterministic:  # only on request: it imports the compiler
        torch.use_deterministic_algorithms(True)
        # By default this would fill each all-gather's buffer with NaN first.
        # pyrefly: ignore[missing-attribute]  # torch adds it at run time
        torch.utils.deterministic.fill_uninitialized_memory = False
    # gloo next to NCCL: flags, metadata and offloaded tensors are reduced on the host, without
    # waiting for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=config.longest_timeout(cfg.run))
    set_default_timeout(timeout)
    store = None if "RANK" in os.environ else dist.HashStore()  # None: torchrun's, by environment
    text = f"rank {rank} waits for all {size} to connect, MASTER_ADDR={os.getenv('MASTER_ADDR')}"
    with printed_if_long(f"{text} (GLOO_SOCKET_IFNAME?)"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        check_same_on_all_ranks("configuration, options and devices", shared_options(cfg, device))
    yield World(rank, size, device, build_mesh(device.type, shape))
    # Not reached after an exception: the other ranks may never reach the barrier, so the process
    # just exits.
    gc.collect()  # frees FSDP2's buffers first: without this, gloo aborted one run in five
    dist.barrier()
    dist.destroy_process_group()


def shared_options(cfg: Config, device: torch.device) -> dict[str, Any]:
    """Every option that must be equal on all ranks, by name, and the type of device."""
    options = config.values_of(config.to_dict(cfg))
    shared = {name: value for name, value in options.items() if name not in LOCAL_PATHS}
    return shared | {"type of device": device.type}


def resolve_param_dtype(cfg: Config, world: World) -> Config:
    """The configuration with param_dtype = "auto" resolved: bfloat16 if every rank's device supports
    it natively. Prints a warning if bfloat16 is emulated, which is slower than float32."""
    dtype: Any = cfg.parallel.param_dtype
    is_native = has_native_bfloat16(world.device)
    if dtype == "auto":
        dtype = "bfloat16" if all(all_gather_objects(is_native)) else "float32"
    if dtype == "bfloat16" and world.rank == 0 and not is_native:
        print_error(
            '[parallel] param_dtype = "bfloat16": this device has no units for it, and emulating them '
            "is many times slower than --parallel.param_dtype=float32"
        )
    return replace(cfg, parallel=replace(cfg.parallel, param_dtype=dtype))


def pick_device(option: str, local_rank: int) -> torch.device:
    """Chooses this rank's device and makes it torch's current one. option: run.device. Raises
    ConfigError if the rank has no GPU."""
    cpu = torch.device("cpu")
    if option == "cpu" or (option == "auto" and not has_driver()):
        return cpu
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0  # torch itself warns why
    if option == "auto" and not count and not os.path.exists(NVIDIA):
        return cpu  # the other drivers may belong to graphics units that torch never uses
    if local_rank >= count:
        raise ConfigError(
            f'[run] device = "{option}": no GPU for local rank {local_rank}: torch '
            f"{torch.__version__}, built for CUDA {torch.version.cuda}, can use {count}; NPROC sets "
            "the number of processes, --run.device=cpu trains without GPUs"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def exit_failed(error: BaseException, run: Run | None, watchdog: Watchdog) -> NoReturn:
    """Reports an error to the launcher, to the rank's log and to the status, and exits."""
    code, text, retryable = describe(error, run)
    is_reported = watchdog.fail(text, code, retryable)
    if log.handlers:
        log.handlers = log.handlers[:1]  # only the rank's log, not the console
        log.error("step %d, phase %s: %s", watchdog.step, watchdog.phase, text)
    if run:
        run.fail(code)
    if not is_reported:  # else the launcher prints it, as its last lines
        print_error(text)
    exit_immediately(code)


def describe(error: BaseException, run: Run | None) -> tuple[int, str, bool]:
    """(exit code, text for the log, whether a restart may help) of an error."""
    text = config.removed_extra(error) or str(error)
    if isinstance(error, ConfigError) or config.removed_extra(error):
        return INPUT_IS_WRONG, text, False
    if isinstance(error, FloatingPointError):
        return 1, text, False
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        # After the first step a restart may help: another process used the device.
        has_trained = run is not None and run.step > run.start
        return 1, f"out of memory: {text}\nwhat would fit: {plan_command()}", has_trained
    if isinstance(error, Problems):  # of a disk, which may be temporary
        return 1, text, True
    if isinstance(error, OSError) and error.filename:
        return 1, f"{error.filename}: {error.strerror}", True
    return 1, "".join(traceback.format_exception(error)).rstrip(), True


def plan_command() -> str:
    """The command that plans this run for the memory of this GPU."""
    _, _, size = rank_and_size()
    words = [word for word in sys.argv[1:] if word != "--eval-only"]
    words += ["--dry-run", f"--world-size={size}"]
    if torch.cuda.is_initialized():
        _, total = torch.cuda.mem_get_info()
        words.append(f"--gpu-memory-gib={total / 2**30:.1f}")
    return config.command(*words)


def exit_immediately(code: int) -> NoReturn:
    """Ends this process without torch's teardown, which would wait for ranks that are gone."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
