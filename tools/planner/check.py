"""Compares a run with its `--dry-run` plan: the peak memory of its first two steps, and its step
time.

metrics.py gives each training row of a run on GPUs to PlanCheck, which
plans the run in a subprocess and writes one row of kind "plan".
"""

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
from parallel.mesh import World
from parallel.ranks import local_world_size
from system.processes import INPUT_IS_WRONG
from tools.planner.devices import known_as
from tools.planner.plan import GIB

# seconds after the second step; planning keeps a core busy, too much for a short run
LATER = 30.0
# relative to the plan; a warning is logged beyond
MEMORY_OFF = 0.05
TIME_OFF = 0.25

log = logging.getLogger("train")


class PlanCheck:
    """The check on rank 0 of a run on GPUs.

    A subprocess makes the plan while training continues: it needs a fake process group.
    """

    def __init__(self, cfg: config.Config, world: World, folder: pathlib.Path):
        """folder: of the run, which holds its config.toml."""
        self.cfg = cfg
        self.world = world
        self.folder = folder
        # of this launch
        self.steps = 0
        # when the second step ended
        self.since = 0.0
        # what the plan is compared with: GiB after the second step, seconds of a step
        self.measured: dict[str, float] = {}
        self.process: subprocess.Popen[str] | None = None
        # whether the next row is the launch's first
        self.first_row = True
        # whether the plan is compared, or cannot be made
        self.done = False
        # a pipe could fill up before it is read
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def count_step(self) -> None:
        self.steps += 1
        if self.steps != 2:
            return
        device = self.world.device
        self.since = time.perf_counter()
        self.measured = {
            "peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }

    def row(self, step: int, step_seconds: float) -> dict[str, Any] | None:
        """Call it for each training row. Returns the plan's row, once.

        step_seconds: the mean over the training row's steps.
        """
        # the launch's first step compiles
        includes_compilation = self.first_row
        self.first_row = False
        if self.done or includes_compilation:
            return None
        self.measured.setdefault("step_seconds", step_seconds)
        if self.process is None:
            if time.perf_counter() - self.since > LATER:
                self.start()
            return None
        if self.process.poll() is None:
            return None
        self.done = True
        plan = self.read_plan()
        if plan is None:
            return None
        row = {
            "kind": "plan",
            "step": step,
            **self.measured,
            "planned_peak_gib": plan["peak_gib"],
            "planned_step_seconds": plan["step_seconds"],
        }
        self.log_comparison(row)
        return row

    def start(self) -> None:
        """Starts the subprocess that makes the plan."""
        try:
            self.process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=self.errors, text=True
            )
        except OSError as error:
            # a limit of processes or memory: no reason to stop training
            self.done = True
            log.warning("the plan of this run could not be made: %s", error)

    def read_plan(self) -> dict[str, Any] | None:
        """What the subprocess has printed; None, and a line in the log, if it is not a plan."""
        # a pipe
        assert self.process and self.process.stdout
        if self.process.returncode == INPUT_IS_WRONG:
            # this model cannot be planned, which is no error of the run
            self.errors.seek(0)
            log.info("no plan of this run: %s", self.errors.read().strip())
            return None
        try:
            return json.loads(self.process.stdout.read())
        except ValueError:
            log.warning("the plan of this run could not be made: try %s", " ".join(self.command()))
            return None

    def command(self) -> list[str]:
        device = self.world.device
        memory_gib = torch.cuda.get_device_properties(device).total_memory / GIB
        gpu = known_as(torch.cuda.get_device_name(device), memory_gib)
        command = [
            sys.executable,
            str(pathlib.Path(__file__).parents[2] / "train.py"),
            str(self.folder / "config.toml"),
            f"--parallel.param_dtype={self.cfg.parallel.param_dtype}",
            "--dry-run",
            "--json",
            f"--world-size={self.world.size}",
            f"--gpus-per-node={local_world_size() or 8}",
        ]
        if gpu:
            command.append(f"--gpu={gpu}")
        return command

    def log_comparison(self, row: dict[str, Any]) -> None:
        """Logs plan and measurement, and warns where they differ."""
        peak, planned_peak = row["peak_gib"], row["planned_peak_gib"]
        log.info(
            "plan: allocated peak %.2f GiB, measured %.2f (%.2f reserved)",
            planned_peak,
            peak,
            row["reserved_gib"],
        )
        if abs(peak / planned_peak - 1) > MEMORY_OFF:
            log.warning("warning: memory is more than %.0f %% off the plan", 100 * MEMORY_OFF)
        seconds, planned_seconds = row["step_seconds"], row["planned_step_seconds"]
        if not planned_seconds:
            # the plan has no time for a GPU whose rates it does not know
            return
        log.info("plan: step %.3f s, measured %.3f", planned_seconds, seconds)
        if abs(seconds / planned_seconds - 1) > TIME_OFF:
            log.warning(
                "warning: the step's time is more than %.0f %% off the plan", 100 * TIME_OFF
            )

    def close(self) -> None:
        self.errors.close()
        if self.process:
            # does nothing if it has ended
            self.process.kill()
            self.process.communicate()
