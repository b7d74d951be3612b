"""Compares a run with its `--dry-run` plan: the peak memory of its first two steps, and its step time."""

import json
import logging
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import config
from extras.planner.devices import known_as
from extras.planner.plan import GIB
from parallel.mesh import World
from parallel.ranks import local_world_size

LATER = 30.0  # seconds after the second step; planning keeps a core busy, too much for a short run
MEMORY_OFF, TIME_OFF = 0.05, 0.25  # relative to the plan; a warning is logged beyond

log = logging.getLogger("train")


class PlanCheck:
    """Runs on rank 0 of a run on GPUs. A subprocess makes the plan while training continues: it needs a fake process
    group."""

    def __init__(self, cfg: config.Config, world: World, folder: pathlib.Path):
        self.cfg, self.world, self.folder = cfg, world, folder
        self.steps, self.since, self.measured = 0, 0.0, {}
        self.process: subprocess.Popen[str] | None = None
        self.first_row, self.done = True, False
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe could fill up before it is read

    def count_step(self) -> None:
        self.steps += 1
        if self.steps != 2:
            return
        self.since, device = time.perf_counter(), self.world.device
        self.measured = {
            "peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }

    def row(self, step: int, step_seconds: float) -> dict[str, Any] | None:
        """Takes each training row; returns the plan's row, once. step_seconds: the mean over the row's steps."""
        # it covers this launch's first step
        includes_compilation, self.first_row = (self.first_row, False)
        if self.done or includes_compilation:
            return None
        self.measured.setdefault("step_seconds", step_seconds)
        if self.process is None:
            if time.perf_counter() - self.since > LATER:
                try:
                    self.process = subprocess.Popen(
                        self.command(), stdout=subprocess.PIPE, stderr=self.errors, text=True
                    )
                except (
                    OSError
                ) as error:  # a limit of processes or memory: no reason to stop training
                    self.done = True
                    log.warning("the plan of this run could not be made: %s", error)
            return None
        if self.process.poll() is None:
            return None
        self.done = True
        if self.process.returncode == 2:
            # this model cannot be planned, which is no fault of the run
            self.errors.seek(0)
            log.info("no plan of this run: %s", self.errors.read().strip())
            return None
        assert self.process.stdout  # a pipe
        try:
            plan = json.loads(self.process.stdout.read())
        except ValueError:
            log.warning("the plan of this run could not be made: try %s", " ".join(self.command()))
            return None
        found = {
            "kind": "plan",
            "step": step,
            **self.measured,
            "planned_peak_gib": plan["peak_gib"],
            "planned_step_seconds": plan["step_seconds"],
        }
        self.tell(found)
        return found

    def command(self) -> list[str]:
        device = self.world.device
        gpu = known_as(
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_properties(device).total_memory / GIB,
        )
        return [
            sys.executable,
            str(pathlib.Path(__file__).parents[2] / "train.py"),
            str(self.folder / "config.toml"),
            f"--parallel.param_dtype={self.cfg.parallel.param_dtype}",
            "--dry-run",
            "--json",
            f"--world-size={self.world.size}",
            f"--gpus-per-node={local_world_size() or 8}",
            *([f"--gpu={gpu}"] if gpu else []),
        ]

    def tell(self, found: dict) -> None:
        log.info(
            "plan: peak %.2f GiB, measured %.2f (%.2f reserved)",
            found["planned_peak_gib"],
            found["peak_gib"],
            found["reserved_gib"],
        )
        if abs(found["peak_gib"] / found["planned_peak_gib"] - 1) > MEMORY_OFF:
            log.warning("warning: memory is more than %.0f %% off the plan", 100 * MEMORY_OFF)
        if planned := found["planned_step_seconds"]:
            log.info("plan: step %.3f s, measured %.3f", planned, found["step_seconds"])
            if abs(found["step_seconds"] / planned - 1) > TIME_OFF:
                log.warning(
                    "warning: the step's time is more than %.0f %% off the plan", 100 * TIME_OFF
                )

    def close(self) -> None:
        self.errors.close()
        if self.process:
            self.process.kill()  # a no-op if it has ended
            self.process.communicate()
