"""One run, inside each rank and around the training: phases with timeouts, steps, the run's folder."""

import contextlib
import gc
import json
import platform
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import config
import metrics
from checkpoint import catalog
from checkpoint.checkpointer import Checkpointer
from checkpoint.save import SaveFailed
from config import Config
from metrics import log
from parallel.mesh import World
from parallel.ranks import all_gather_objects, on_rank_zero
from parallel.torch_patches import shorten_nccl_timeout
from run.environment import environment, start_logging
from run.folder import ENDING_SECONDS, RunLock
from run.watchdog import Watchdog
from system import listen, read_json, write_if_possible

DUMP_SECONDS = 60.0  # NCCL dumps its last collectives before the watchdog ends the process
GC_EVERY_STEPS = 100  # automatic garbage collection would stall each rank at a different time
# Phases that may compile, or wait for other ranks' slow phases.
SLOW_PHASES = ("start", "first step", "first evaluation batch", "end")


class StopFlag:
    """Whether a signal stops all ranks. It is all-reduced in each step, together with the number of
    targets, on the host, which does not wait for the device."""

    def __init__(self) -> None:
        self.received = 0  # the number of the first signal that this rank received, or 0
        self.signal = 0  # the number of the signal that stops all ranks, or 0

    def receive(self, number: int, frame: Any) -> None:
        """The signal handler of a rank."""
        self.received = self.received or number

    def all_reduce(self, count: int = 0) -> int:
        """Updates `signal`, and returns the sum of all ranks' counts. A signal that arrives during
        the call takes effect at the next. Collective."""
        # [0]: the count; [n]: how many ranks received signal n
        sums = torch.zeros(signal.NSIG, dtype=torch.int64)
        sums[0] = count
        if self.received:
            sums[self.received] = 1
        dist.all_reduce(sums)
        received = sums[1:].nonzero()
        if len(received):
            self.signal = int(received[-1]) + 1
        return int(sums[0])


class Run:
    """Everything about a run except the training itself. train() in train.py shows the order of its
    calls."""

    def __init__(self, cfg: Config, world: World, watchdog: Watchdog, attempt: Path | None):
        """attempt: the attempt's folder; None without a launcher."""
        self.cfg = cfg
        self.world = world
        self.watchdog = watchdog
        self.attempt = attempt
        self.folder = config.run_folder(cfg.run)
        self.stop_flag = StopFlag()
        self.seconds: dict[str, float] = defaultdict(float)  # spent so far, by phase()
        self.start = 0  # the step that training resumes after
        self.step = 0  # the last step trained, by this launch or an earlier one
        self.checkpointer: Checkpointer | None = None  # set by begin()
        self.run_lock: RunLock | None = None  # set by begin(), on rank 0
        self.traced: Callable[[int], Any] = contextlib.nullcontext  # traced(step) wraps each step
        if cfg.profile:
            from extras.profiler.profiler import Profiler

            self.traced = Profiler(cfg.profile, self.folder, world).traced

    @property
    def stops(self) -> bool:
        """Whether all ranks stop after this step."""
        return self.stop_flag.signal > 0

    def begin(self, checkpointer: Checkpointer) -> list[str]:
        """Locks the run's folder, writes the status and starts the logs. Nothing is created or changed
        before this, so invalid input loses nothing. Returns warnings for the log. Collective. Raises
        ConfigError."""
        self.checkpointer = checkpointer
        self.start = self.step = checkpointer.start
        self._enter("start", self.start)
        # From now on a signal asks to stop. The barrier: on all ranks, before rank 0 writes anything.
        listen(self.stop_flag.receive)
        dist.barrier()
        warnings = on_rank_zero(lambda: self._lock_and_fill_folder(checkpointer))
        self._enter("set-up")
        start_logging(self.folder, self.world.rank)
        hosts = all_gather_objects(platform.node())
        if self.run_lock:
            warnings += self._write_environment(hosts)
        return warnings

    def _lock_and_fill_folder(self, checkpointer: Checkpointer) -> list[str]:
        """On rank 0. Returns warnings. Raises ConfigError if another run uses the folder, and
        OSError."""
        attempt = self.attempt.name.removeprefix(".attempt-") if self.attempt else None
        run_lock = RunLock(self.folder, attempt)
        run_lock.acquire(ENDING_SECONDS)
        warnings = checkpointer.prepare_folder()
        for folder in self.folder.glob(".attempt-*"):
            if folder.name != f".attempt-{attempt}":  # its launcher was killed
                shutil.rmtree(folder, ignore_errors=True)
        write_if_possible(self.folder / "config.toml", config.to_toml(self.cfg))
        for path in checkpointer.dataset.tokenizer_files:
            write_if_possible(self.folder / path.name, path.read_bytes())
        metrics.drop_rows(self.folder / "metrics.jsonl", self.start)
        # The status comes last: the follower reads the other files once it sees it.
        run_lock.write_status("running", self.step)
        self.run_lock = run_lock
        return warnings

    def _write_environment(self, hosts: list[str]) -> Iterator[str]:
        """Writes environment.json, on rank 0. Yields warnings. hosts: the host of each rank."""
        path = self.folder / "environment.json"
        before = read_json(path)
        launch = environment(hosts, self.world.device)
        launch["earlier"] = [*before.pop("earlier", []), before] if before else []
        write_if_possible(path, json.dumps(launch, indent=2))
        if before.get("commit", launch["commit"]) != launch["commit"]:
            yield f"another commit than the launch before: {launch['commit']} (environment.json)"
        if self.cfg.log.tracker and not self.attempt:
            yield (
                f"log.tracker = {self.cfg.log.tracker}: without the launcher no row is sent; to send "
                f"them: {config.command('-m', 'follow', self.folder)}"
            )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives its body a timeout, and a name for the error file. Adds its time to `seconds`. After
        an exception the phase remains set, so that the error file names it."""
        # Work that is still queued on the GPU belongs to the steps, not to these phases.
        if name in ("evaluation", "save"):
            torch.get_device_module(self.world.device).synchronize()
        began = time.perf_counter()
        phase_before = self.watchdog.phase
        self._enter(name)
        yield
        self._enter(phase_before)
        self.seconds[name] += time.perf_counter() - began

    def _enter(self, phase: str, step: int | None = None) -> None:
        seconds = self.cfg.run.step_timeout_seconds
        if phase in SLOW_PHASES:
            seconds = self.cfg.run.start_timeout_seconds
        if phase in ("save", "restore"):
            seconds = self.cfg.run.start_timeout_seconds * 2  # may wait for the previous save
        self.watchdog.enter(phase, seconds, step)

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Yields each step to train, up to `last` or until all ranks agree to stop. Collective."""
        self.stop_flag.all_reduce()  # a signal may have arrived before
        gc.collect()
        gc.freeze()
        gc.disable()
        for step in range(first, last + 1):
            if self.stops:
                break
            self._enter("first step" if step == first else "step", step)  # the first may compile
            with self.traced(step):
                yield step
            self.step = step
            if step == first:
                timeout = self.cfg.run.step_timeout_seconds
                shorten_nccl_timeout(max(timeout / 2, timeout - DUMP_SECONDS))
            if step % GC_EVERY_STEPS == 0:
                gc.collect()
        self._enter("end")

    def agree(self, valid_tokens: int) -> int:
        """Call once a step. Returns the number of targets of all data ranks, and updates `stops`.
        valid_tokens: this rank's targets. Collective."""
        # cp and tp ranks count the same samples.
        return self.stop_flag.all_reduce(valid_tokens) // (self.world.cp * self.world.tp)

    def log_save(self, step: int, problem: str | None) -> None:
        """Logs whether the save of a step succeeded, on rank 0. problem: why it failed, or None."""
        assert self.run_lock
        if problem:
            log.error("not saved: %s", problem)
            self.run_lock.write_status("running", self.run_lock.step, not_saved=problem)
        else:
            log.info("saved %s", catalog.path_of(catalog.root_of(self.cfg), step))
            self.run_lock.write_status("running", step)

    def end(self) -> None:
        """Writes the final status, once all ranks have finished. Collective. Raises SaveFailed if the
        run was stopped and its steps are not saved, because [checkpoint] is off."""
        dist.barrier()
        if self.checkpointer and self.stops and not self.cfg.checkpoint:
            raise SaveFailed(
                f"stopped after step {self.step}; without [checkpoint] nothing is saved"
            )
        if self.run_lock is None:  # not rank 0, or --eval-only
            return
        if self.stops:
            name = signal.Signals(self.stop_flag.signal).name
            self.run_lock.write_status("preempted", self.step, signal=name)
            how = 'the same command resumes, with checkpoint.resume = "auto"'
            log.info("stopped after step %d by %s; %s", self.step, name, how)
        else:
            self.run_lock.write_status("finished", self.step)

    def fail(self, code: int) -> None:
        """Writes the status of a failure. First waits for a save in the background, which is valid
        whatever else failed."""
        if self.checkpointer:
            self.checkpointer.wait()
        if self.run_lock:
            self.run_lock.write_status("failed", self.run_lock.step, exit_code=code)
