"""A context manager around one training run: locks its folder, watches its ranks, and records how
it ended."""

import contextlib
import errno
import gc
import json
import logging
import os
import pathlib
import platform
import signal
import time
from collections.abc import Iterator
from typing import IO

import filelock
import torch
import torch.distributed as dist

import config
import files
import metrics
from checkpoint.catalog import path_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.compare import changes_since, describe_changes, other_tokenizer
from config import ConfigError
from data.dataset import PreparedSource
from data.loader import Loader
from lifecycle import STOPPED, folder
from lifecycle.failure import Failure, exit_immediately, failure_of
from lifecycle.stop import StopRequest
from lifecycle.watchdog import FROZEN_SECONDS, Watchdog
from metrics import log
from parallel.mesh import World
from parallel.ranks import all_gather_objects, on_rank_zero, torchrun_id

WAIT_SECONDS = 0.2  # between the ranks' agreements on a stop while they wait for text
LOG_WAIT_SECONDS = 2.0  # a longer wait is logged
# Python's garbage collection; automatic, it would stall each rank at a different time
COLLECT_EVERY_STEPS = 100
RESTART_SECONDS = 30  # for the ranks before a restart to exit
# for a process to end once all is saved: rank 0, for which the others wait, still writes the report
EXIT_SECONDS = 300.0
NOTHING_SAVED = (
    "nothing will be saved: this configuration has no [checkpoint]; --checkpoint.save_every_steps=100 "
    "adds one"
)
# Phases that are not part of a step. They begin once the device has finished the steps queued on
# it, whose time would else count as that of the phase.
OUTSIDE_STEPS = ("evaluation", "save")


class Run:
    """All of a run that is not training.

        with Run(cfg, world, launch, stop_request) as run:
            run.attach(checkpointer)
            ...  # anything that may find invalid input
            run.claim_folder(tokenizer_files)
            for step in run.steps(1, 300, loader):
                with run.phase("data"):
                    ...
                run.agree_to_continue()

    On exit it writes status.json. An exception is logged, reported to the launcher and turned into
    SystemExit with the exit code; an expected error is logged without a traceback.
    """

    def __init__(self, cfg: config.Config, world: World, launch_id: str | None, stop: StopRequest):
        """launch_id: the launcher's id for this launch, None without a launcher."""
        self.cfg = cfg
        self.world = world
        self.launch_id = launch_id
        # recorded in the status: whose ranks have the folder (folder.py)
        self.holder = holder_of(launch_id)
        self.stop = stop  # run.stop.agreed: whether all ranks stop after this step
        self.folder = config.run_folder(cfg)
        self.step = 0  # the last step trained, by this launch or an earlier one
        self.timeouts = phase_timeouts(cfg)
        self.seconds = dict.fromkeys(self.timeouts, 0.0)  # spent in each phase() so far
        # set by attach(), claim_folder() and steps()
        self.checkpointer: Checkpointer | None = None
        self.lock: filelock.BaseFileLock | None = None  # on rank 0
        self.lock_file: IO | None = None  # the file that is locked
        self.loader: Loader | None = None
        self.next_step = 0  # whose text the ranks agree on
        self.awaited: PreparedSource | None = None  # the source whose text that step lacks here
        self.waits_logged = False
        self.failure: Exception | None = None  # why this rank cannot read its next batch

    def __enter__(self) -> "Run":
        self.watchdog = Watchdog(self._give_up)
        self._begin("start")
        return self

    def attach(self, checkpointer: Checkpointer) -> None:
        """Sets where the run resumes, and how it saves."""
        self.checkpointer = checkpointer
        self.step = checkpointer.start
        self.stop.standalone = self.holder is None and self.world.size == 1

    def claim_folder(self, tokenizer_files: list[pathlib.Path]) -> None:
        """Takes over the run's folder: the lock, the status, a log per rank. Nothing is created or
        changed before this, so invalid input loses nothing."""
        checkpointer = self.checkpointer
        assert checkpointer, "attach() comes before claim_folder()"
        hosts = all_gather_objects(platform.node())

        def take_folder() -> OSError | None:
            try:
                self._take_folder(checkpointer, tokenizer_files, hosts)
            except OSError as error:  # a full disk, perhaps: all ranks say so
                return error
            return None

        error = on_rank_zero(take_folder)
        if error:
            raise error
        log_file = metrics.start_logging(self.folder, self.world.rank, color_is_wanted())
        self.watchdog.use_log(log_file, self.world.rank)
        for problem in checkpointer.problems:
            log.warning("corrupt, set aside: %s", problem)
        changes = changes_since(self.cfg, self.step)
        if changes:
            log.warning(describe_changes(self.step, changes))
        if not self.cfg.checkpoint:
            log.warning(NOTHING_SAVED)
        warning = other_tokenizer(self.cfg, self.step, tokenizer_files)
        if warning:  # allow_changed may allow it
            log.warning(warning)
        stop_file = None
        if self.launch_id and self.world.rank == 0:
            stop_file = folder.stop_file(self.folder, self.launch_id)
        self.stop.connect(dist.group.WORLD, stop_file)

    def _take_folder(
        self, checkpointer: Checkpointer, tokenizer_files: list[pathlib.Path], hosts: list[str]
    ) -> None:
        status = folder.read_status(self.folder)
        # after a torchrun restart, the previous ranks may take a moment to exit, perhaps on another
        # node
        is_restart = self.holder is not None and status.get("launch") == self.holder
        seconds = RESTART_SECONDS if is_restart else 0
        folder.check_folder(self.folder, seconds)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder(seconds)
        checkpointer.tidy()
        folder.sweep(self.folder, self.launch_id)
        folder.write_status(self.folder, "running", self.step, self.holder)
        folder.write_config(self.cfg, self.step, changes_since(self.cfg, self.step))
        environment = metrics.environment(hosts, self.world.device)
        files.write_atomic(self.folder / "environment.json", json.dumps(environment, indent=2))
        for path in tokenizer_files:
            files.write_atomic(self.folder / path.name, path.read_bytes())

    def _lock_folder(self, seconds: float = 0) -> None:
        self.lock = folder.lock(self.folder, seconds)
        self.lock_file = (self.folder / ".lock").open()

    def _keep_folder(self) -> None:
        """Before a save, on rank 0: makes the folder anew if somebody has removed it. Raises
        ConfigError if another run has made it meanwhile."""
        if self.lock_file is None or folder.is_in_place(self.lock_file, self.folder / ".lock"):
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
        except ConfigError:
            self.lock = None  # the status is the other run's
            raise
        except OSError:
            return  # the save fails, too, and says why
        log.warning(
            "%s: was removed while this run works in it. Checkpoints are saved there again, but its "
            "rows and logs are lost; stop it and start the same command again to write new ones",
            self.folder,
        )

    def steps(self, first: int, last: int, loader: Loader) -> Iterator[int]:
        """Yields each step to train, up to `last` or until all ranks agree to stop. If a rank
        cannot read its next batch, raises why after the step before was saved."""
        self.loader = loader
        self.next_step = first
        self._start_sync()
        self.agree_to_continue()
        traced = contextlib.nullcontext
        if self.cfg.profile:
            from extras.reports.profiler import Profiler

            traced = Profiler(self.cfg.profile, self.folder, self.world, first).traced
        gc.collect()
        gc.freeze()
        gc.disable()
        for step in range(first, last + 1):
            if self.stop.agreed:
                break
            self._begin("first step" if step == first else "step", step)  # the first compiles
            self.next_step = step + 1
            self._start_sync()
            with traced(step):
                yield step
            self.step = step
            if step % COLLECT_EVERY_STEPS == 0:
                gc.collect()
        gc.enable()
        gc.unfreeze()
        if self.failure:
            raise self.failure
        if self.stop.agreed and self.step >= first and not self.cfg.checkpoint:
            # not a success: the exit code is that of a process that the signal ended
            raise KeyboardInterrupt(
                f"stopped after step {self.step} by signal {self.stop.signal}; without "
                "[checkpoint] nothing was saved"
            )
        self._begin("end")

    def _start_sync(self) -> None:
        """Starts to agree on a stop, and on whether to wait for text that is still prepared."""
        assert self.loader
        try:
            self.awaited = self.loader.missing(self.next_step)
        except (ConfigError, OSError) as error:  # all ranks stop, after a save
            self.failure = error
            self.stop.received = self.stop.received or signal.SIGTERM
        self.stop.start_sync(waits_for_text=self.awaited is not None)

    def agree_to_continue(self) -> None:
        """Finishes the all-reduce of the stop flags. It began with the step and overlaps it, so a
        signal during a step may count one step later. Then waits until every rank can read its next
        batch, or all agree to stop. Collective."""
        self.stop.finish_sync()
        if not self.stop.waits_for_text or self.stop.agreed:
            return
        began = time.monotonic()
        with self.phase("data"):
            while self.stop.waits_for_text and not self.stop.agreed:
                self._begin("data")  # the wait has a limit of its own
                time.sleep(WAIT_SECONDS)
                self._watch_wait(began)
                self._start_sync()
                self.stop.finish_sync()

    def _watch_wait(self, began: float) -> None:
        """Logs what all wait for; after run.start_timeout_seconds without a new record, stops."""
        source = self.awaited
        if source is None:
            return  # another rank waits
        now = time.monotonic()
        if not self.waits_logged and now > began + LOG_WAIT_SECONDS:
            self.waits_logged = True
            log.info("waiting for text: %s", source.progress())
        limit = self.cfg.run.start_timeout_seconds
        if now > max(began, source.changed) + limit:
            problem = f"nothing was prepared for {limit:.0f} s (run.start_timeout_seconds)"
            self.failure = OSError(errno.ETIMEDOUT, problem, str(source.folder))
            self.stop.received = self.stop.received or signal.SIGTERM

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives its body a timeout, and its name in a failure report. Adds its time to `seconds`.
        After an exception the phase stays the current one, for that report."""
        if name in OUTSIDE_STEPS:
            torch.get_device_module(self.world.device).synchronize()
        began = time.perf_counter()
        phase_before = self.watchdog.name
        self._begin(name)
        if name == "save":
            on_rank_zero(self._keep_folder)
        yield
        self._begin(phase_before)
        self.seconds[name] += time.perf_counter() - began

    def _begin(self, phase: str, step: int | None = None) -> None:
        self.watchdog.phase(phase, self.timeouts[phase], step)

    def log_save(self, step: int, problem: str | None) -> None:
        """Logs how the save of a step ended, on rank 0. problem: why it failed, None if it
        succeeded."""
        if problem:
            log.error("not saved, training continues: %s", problem)
        else:
            log.info("saved %s", path_of(self.cfg, step))
        with contextlib.suppress(OSError):
            if problem:
                saved = folder.read_status(self.folder).get("step", 0)
                folder.write_status(self.folder, "running", saved, self.holder, not_saved=problem)
            else:
                folder.write_status(self.folder, "running", step, self.holder)

    @property
    def exit_code(self) -> int:
        """This process's exit code. A stop is no success: Kubernetes, say, starts again only what
        failed. Our launcher reads it from the status instead, as its torchrun restarts what
        fails."""
        return STOPPED if self.stop.signal and self.launch_id is None else 0

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end()
            return
        if self.checkpointer is None and self.launch_id is None:
            # nothing has begun, and no launcher waits for a report
            self.watchdog.stop()
            return
        is_first_step = self.checkpointer is None or self.step == self.checkpointer.start
        failure = failure_of(error, self.cfg, self.world.size, self.stop.signal, is_first_step)
        self._fail(failure)
        if self.checkpointer:  # a save in the background is valid, whatever failed here
            self._begin("save")
            self.checkpointer.wait()
        self.watchdog.stop()
        raise SystemExit(failure.exit_code) from None

    def _end(self) -> None:
        self.watchdog.stop()
        if self.lock is None:  # not rank 0, or nothing has begun
            return
        state = "preempted" if self.stop.signal else "finished"
        if self.stop.signal:
            name = signal.Signals(self.stop.signal).name
            log.info("stopped after step %d by %s; %s", self.step, name, self._how_to_resume())
        try:
            folder.write_status(self.folder, state, self.step, self.holder)
        except OSError as error:  # without a status nobody would know: not a success
            log.error("%s/status.json cannot be written: %s", self.folder, error)
            raise SystemExit(1) from None
        if state == "finished" and not self.cfg.checkpoint:
            log.warning("finished without [checkpoint]: nothing was saved")
        if self.step and config.has_extra("reports"):
            from extras.reports.report import report_end

            report_end(self.cfg, state == "finished")
        self.lock.release()
        logging.shutdown()

    def watch_exit(self) -> None:
        """Ends this process, with its exit code, if what is left does not: the process group's end,
        or that of compile workers, which may wait for each other."""

        def leave(text: str) -> None:
            files.print_error(f"rank {self.world.rank}: is done, but did not end: {text}")
            exit_immediately(self.exit_code)

        Watchdog(leave).phase("exit", EXIT_SECONDS)

    def _how_to_resume(self) -> str:
        """What continues a run that was stopped."""
        checkpoint = self.cfg.checkpoint
        if checkpoint and checkpoint.resume != "auto":
            return "to resume, type the same command with --checkpoint.resume=auto"
        return "the same command resumes"

    def _fail(self, failure: Failure) -> None:
        """Reports a failure to the launcher, logs it, and records it in the status."""
        now = self.watchdog
        is_reported = self.launch_id is not None and folder.report_failure(
            self.folder,
            self.launch_id,
            self.world.rank,
            step=now.step,
            phase=now.name,
            progress=now.progress,
            exit_code=failure.exit_code,
            text=failure.text,
            final=failure.final,
        )
        if is_reported:
            # the launcher prints the root cause at the end: here it goes only into the rank's file
            log.handlers = [
                handler for handler in log.handlers if isinstance(handler, logging.FileHandler)
            ]
        if log.handlers or not is_reported:
            rank = self.world.rank
            log.error("rank %d, step %d, phase %s: %s", rank, now.step, now.name, failure.text)
        if self.lock is not None:
            with contextlib.suppress(OSError):
                step = folder.read_status(self.folder).get("step", 0)
                folder.write_status(
                    self.folder, "failed", step, self.holder, exit_code=failure.exit_code
                )

    def _give_up(self, text: str) -> None:
        """What the watchdog's thread does about a phase that exceeds its timeout."""
        self.watchdog.end_if_frozen(self.cfg.run.save_timeout_seconds + FROZEN_SECONDS)
        self._fail(Failure(1, text, final=False))
        if self.checkpointer:
            self.checkpointer.wait(self.cfg.run.save_timeout_seconds)
        exit_immediately(1)


def phase_timeouts(cfg: config.Config) -> dict[str, float]:
    """Seconds that each phase of a run may take, by name."""
    start = cfg.run.start_timeout_seconds
    step = cfg.run.step_timeout_seconds
    save = cfg.run.save_timeout_seconds
    kept = 0
    if cfg.checkpoint and cfg.checkpoint.keep_last:
        kept = cfg.checkpoint.keep_last
    return {
        "start": start,
        "first step": start,
        "first evaluation batch": start,
        "end": start,
        "step": step,
        "data": step,
        "evaluation": step,
        "evaluation batch": step,
        "restore": save,
        # a save waits for the previous one, and may then have to verify every checkpoint that it
        # keeps
        "save": save * (2 + kept),
    }


def holder_of(launch_id: str | None) -> str | None:
    """Who holds a run's folder while this process does: the launch, or without a launcher the
    torchrun process."""
    return launch_id or torchrun_id()


def color_is_wanted() -> bool:
    """Whether stdout is a terminal, and NO_COLOR (no-color.org) is not set."""
    return os.isatty(1) and not os.environ.get("NO_COLOR")
