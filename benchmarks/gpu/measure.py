"""A process of benchmarks.gpu: measures arms of a group one after the other, a row of JSON each.

python -m benchmarks.gpu.measure WORK        WORK: Work as JSON; processes.py starts it
"""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO
from unittest import mock

import torch

import config
from benchmarks.gpu import planned
from benchmarks.gpu.arms import (
    AGAIN,
    BARE,
    CHECKS,
    COMMON,
    CONFIGS,
    FASTER,
    GROUPS,
    ON_A_CPU,
    PARTS,
    TINY,
    WHOLE,
    is_trained,
)
from benchmarks.gpu.environment import identity
from benchmarks.gpu.training import FailedCheck, Runs, Skipped
from benchmarks.kernels import TIMINGS
from benchmarks.step import measure_by_size
from config import ConfigError
from parallel.mesh import World
from run.rank import distributed
from system import die_with_parent

FITS_8B = 120 * 2**30  # bytes of a GPU
REPORTED = 3  # exit status: the last arm has its row; what is left needs a new process
IDENTITY = "identity"  # a group of one arm, which is no arm of GROUPS


@dataclasses.dataclass(frozen=True)
class Work:
    """What a process has to measure."""

    group: str
    arms: list[str]
    deadline: float  # of all, Unix time
    seconds: float  # that all may take
    runs: str  # the folder of train.py's runs
    tiny: bool = False
    fsdp: dict = dataclasses.field(default_factory=dict)  # settings, from benchmarks.step

    @property
    def overrides(self) -> list[str]:
        overrides = list(COMMON)
        if self.tiny:
            overrides += TINY
        if not torch.cuda.is_available():
            overrides += ON_A_CPU
        return overrides


@contextlib.contextmanager
def polled(on_gpu: bool) -> Iterator[dict]:
    """Yields a dictionary. At the end it holds the medians of the GPU's clock, power and
    temperature, read once a second by nvidia-smi."""
    medians = {}
    samples = []
    over = threading.Event()
    names = {"clocks.sm": "sm_mhz", "power.draw": "watt", "temperature.gpu": "celsius"}

    def poll() -> None:
        command = [
            "nvidia-smi",
            f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}",
            f"--query-gpu={','.join(names)}",
            "--format=csv,noheader,nounits",
        ]
        while not over.wait(1):
            with contextlib.suppress(OSError, ValueError, subprocess.CalledProcessError):
                # none, or "[N/A]"
                answer = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
                samples.append([float(value) for value in answer.split(",")])

    thread = threading.Thread(target=poll, daemon=True)
    if on_gpu:
        thread.start()
    yield medians
    over.set()
    for name, values in zip(names.values(), zip(*samples)):
        medians[name] = statistics.median(values)


def runs_of(work: Work) -> Runs:
    """Where and how the checks train."""
    options = TINY if work.tiny else []
    if torch.cuda.is_available():
        device = ["--run.device=cuda", "--parallel.param_dtype=bfloat16", "--parallel.compile=true"]
    else:
        device = ["--run.device=cpu", *ON_A_CPU]
    return Runs(pathlib.Path(work.runs), options, device)


def function_of(arm: str, work: Work, cfg: config.Config, world: World) -> Callable[[], dict]:
    """What measures a part of a step, or trains."""
    if arm in PARTS:
        each = 0.01 if work.tiny else min(1.0, 0.03 * work.seconds / TIMINGS)
        return partial(PARTS[arm], cfg, world, each)
    return partial(measure_by_size, cfg, world, bare=arm == BARE, settings=work.fsdp)


def figures_of(arm: str, work: Work, world: World | None, row: dict) -> dict:
    """Measures an arm. A note about its size goes into the row."""
    if work.group in CHECKS:
        return CHECKS[work.group][arm](runs_of(work))
    assert world is not None
    name, changes = GROUPS[work.group][arm]
    overrides = [*work.overrides, *changes]
    plan = contextlib.nullcontext({})
    if world.device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats()
        small = torch.cuda.get_device_properties(0).total_memory < FITS_8B
        if small and name == "llama8b-h200":
            row["note"] = "8 of 32 layers"
            overrides.append("--model.n_layers=8")
        if is_trained(work.group, arm) and arm != BARE:
            # next to the compilation, on another core
            plan = planned.plan_in_background(str(CONFIGS / f"{name}.toml"), overrides)
    cfg = config.load(str(CONFIGS / f"{name}.toml"), overrides)
    whole = contextlib.nullcontext()
    if arm == WHOLE:
        whole = mock.patch("parallel.parallelize.HALVES", ())
    with plan as prediction, whole:
        figures = function_of(arm, work, cfg, world)()
    return figures | prediction


def attempt(arm: str, work: Work, world: World | None) -> dict:
    """A row with an arm's figures, or with the reason why there are none."""
    began = time.time()
    row = {"changes": GROUPS[work.group][arm][1]}
    with polled(world is not None and world.device.type == "cuda") as gpu:
        try:
            row |= figures_of(arm, work, world, row)
            row["status"] = "ok"
        except torch.OutOfMemoryError:
            row["status"] = "out of memory"
        except ConfigError as error:
            row["status"] = f"refused: {error}"
        except Skipped as error:
            row["status"] = f"skipped: {error}"
        except FailedCheck as error:
            row["status"] = f"failed: {error}"
        except Exception as error:
            traceback.print_exc()
            row["status"] = f"failed: {type(error).__name__}: {error}"
    return row | {"polled": gpu, "took_seconds": time.time() - began}


def needed(arm: str, work: Work, longest: float) -> float:
    """Seconds that an arm may need. longest: of the arms so far."""
    if work.group == "faster" and not work.tiny:
        _, _, seconds = FASTER[arm]
        return seconds
    return longest


def run_arms(work: Work, rows: TextIO) -> None:
    """Writes a row for each arm, until one has failed or has not freed its memory."""
    longest = 0.0  # seconds of an arm so far
    holds_device = contextlib.nullcontext(None)
    if work.group not in CHECKS:
        holds_device = distributed(config.load(str(CONFIGS / "tiny.toml"), ["--run.device=auto"]))
    with holds_device as world:
        on_gpu = world is not None and world.device.type == "cuda"
        for arm in work.arms:
            began = time.time()
            reserved = longest if AGAIN in work.arms and arm != AGAIN else 0
            if began + needed(arm, work, longest) + reserved < work.deadline:
                row = attempt(arm, work, world)
                longest = max(longest, time.time() - began)
            else:
                row = {"status": "skipped: time"}
            print(json.dumps(row), file=rows, flush=True)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            not_freed = on_gpu and torch.cuda.memory_allocated() > 2**30
            if row["status"].startswith("failed") or not_freed:
                break
        os._exit(REPORTED)  # at once: the device may not answer any more


def main(argv: list[str]) -> None:
    die_with_parent()
    # Other output goes to stderr. Compile workers, which may outlive us, don't keep the pipe open.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = Work(**json.loads(argv[0]))
    if work.group != IDENTITY:
        run_arms(work, rows)
        return
    try:
        row = {"status": "ok", **identity()}
    except ConfigError as error:
        row = {"status": f"refused: {error}"}
    print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
