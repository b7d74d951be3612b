"""A context manager around one training run: locks its folder, watches its ranks, and records how it ended."""

import contextlib
import gc
import json
import logging
import os
import pathlib
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

import config
import files
import metrics
from checkpoint.catalog import path_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.compare import other_tokenizer
from checkpoint.save import SaveFailed
from config import ConfigError
from data.background import PreparingFailed
from data.loader import FAILED, READY, WAITING, Loader
from lifecycle import INPUT_IS_WRONG, STOPPED, folder
from lifecycle.stop import StopRequest
from lifecycle.watchdog import FROZEN_SECONDS, Watchdog
from metrics import log
from optim import NoTargets
from parallel.mesh import World
from parallel.ranks import all_gather_objects, on_rank_zero, torchrun_id

WAIT_SECONDS = 0.2  # between the ranks' agreements on a stop while they wait for text
LOG_WAIT_SECONDS = 2.0  # a longer wait is logged
# Python's garbage collection; automatic, it would stall each rank at a different time
COLLECT_EVERY_STEPS = 100


class Run:
    """All of a run that is not training.

        with Run(cfg, world, launch, stop_request) as run:
            run.attach(checkpointer)
            ...  # anything that may find invalid input
            run.claim_folder(tokenizer_files)
            run.wait_for_text(loader)
            for step in run.steps(1, 300):
                with run.phase("data"):
                    ...

    On exit it writes status.json. An exception is logged, reported to the launcher and turned into SystemExit with the
    exit code; an error that a restart would not fix is logged without a traceback.
    """

    def __init__(self, cfg: config.Config, world: World, launch: str | None, stop: StopRequest):
        """launch: the launcher's id for this launch, None without a launcher."""
        self.holder = holder_of(launch)
        self.cfg, self.world, self.launch, self.stop = cfg, world, launch, stop
        self.folder = config.run_folder(cfg)
        self.step = 0  # the last step trained, by this launch or an earlier one
        self.checkpointer: Checkpointer | None = None
        self.lock = None
        start, step, save = (
            cfg.run.start_timeout_seconds,
            cfg.run.step_timeout_seconds,
            cfg.run.save_timeout_seconds,
        )
        # a save waits for the previous one, and may then have to verify every checkpoint that it keeps
        kept = cfg.checkpoint.keep_last or 0 if cfg.checkpoint else 0
        self.timeouts = {
            "start": start,
            "first step": start,
            "first evaluation batch": start,
            "end": start,
            "step": step,
            "data": step,
            "evaluation": step,
            "evaluation batch": step,
            "restore": save,
            "save": save * (2 + kept),
        }

    def __enter__(self) -> "Run":
        self.watchdog = Watchdog(self._give_up)
        self._phase("start")
        return self

    def attach(self, checkpointer: Checkpointer) -> None:
        """Sets where the run resumes, and how it saves."""
        self.checkpointer, self.step = checkpointer, checkpointer.start
        self.stop.standalone = self.holder is None and self.world.size == 1

    def claim_folder(self, tokenizer_files: list[pathlib.Path]) -> None:
        """Takes over the run's folder: the lock, the status, a log per rank. Nothing is created or changed before this,
        so invalid input loses nothing."""
        checkpointer = self.checkpointer
        assert checkpointer, "attach() comes before claim_folder()"
        checkpointer.report = self._log_save
        hosts = all_gather_objects(platform.node())
        on_rank_zero(lambda: self._take_folder(checkpointer, tokenizer_files, hosts))
        log_file = metrics.start_logging(self.folder, self.world.rank, color_is_wanted())
        self.watchdog.use_log(log_file, self.world.rank)
        for problem in checkpointer.problems:
            log.warning("corrupt, set aside: %s", problem)
        if warning := other_tokenizer(self.cfg, self.step, tokenizer_files):
            # which allow_changed may allow
            log.warning(warning)
        polled = (
            folder.stop_file(self.folder, self.launch)
            if self.launch and self.world.rank == 0
            else None
        )
        self.stop.connect(dist.group.WORLD, polled)

    def _take_folder(
        self, checkpointer: Checkpointer, tokenizer_files: list[pathlib.Path], hosts: list[str]
    ) -> None:
        # after a torchrun restart, the previous ranks may take a moment to exit, perhaps on another node
        seconds = (
            30
            if self.holder and folder.read_status(self.folder).get("launch") == self.holder
            else 0
        )
        folder.check_folder(self.folder, seconds)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = folder.lock(self.folder, seconds)
        checkpointer.tidy()
        folder.sweep(self.folder, self.launch)
        folder.write_status(self.folder, "running", self.step, self.holder)
        files.write_atomic(self.folder / "config.toml", config.to_toml(self.cfg))
        files.write_atomic(
            self.folder / "environment.json",
            json.dumps(metrics.environment(hosts, self.world.device), indent=2),
        )
        for path in tokenizer_files:
            files.write_atomic(self.folder / path.name, path.read_bytes())

    def wait_for_text(self, loader: Loader, timed: Callable | None = None) -> None:
        """Before the first step: waits until every rank can read its first batch and, if an evaluation is due, the
        validation text. Collective. timed: as agree_on_stop() takes it."""
        self.loader, self.begun = loader, self.step  # the last step that has begun
        self._start_sync()
        self.agree_on_stop(timed)

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Yields each step to train, up to `last` or until all ranks agree to stop. Raises what keeps a rank from
        reading the next batch, if preparing its text does, after the step before was saved."""
        traced = contextlib.nullcontext
        if self.cfg.profile:
            from extras.reports.profiler import Profiler

            traced = Profiler(self.cfg.profile, self.folder, self.world, first).traced
        gc.collect()
        gc.freeze()
        gc.disable()
        for step in range(first, last + 1):
            if self.stopping:
                break
            self._phase("first step" if step == first else "step", step)  # the first compiles
            self.begun = step
            self._start_sync()
            with traced(step):
                yield step
            self.step = step
            if step % COLLECT_EVERY_STEPS == 0:
                gc.collect()
        gc.enable()
        gc.unfreeze()
        if self.stop.readiness == FAILED:
            failures = list(filter(None, all_gather_objects(self.loader.failure)))
            raise next((e for e in failures if isinstance(e, ConfigError)), failures[0])
        if self.stopping and self.step >= first and not self.cfg.checkpoint:
            raise KeyboardInterrupt(
                f"stopped after step {self.step} by signal {self.stop.decided}; without "
                "[checkpoint] nothing was saved"
            )
        self._phase("end")

    def _start_sync(self) -> None:
        """Starts the all-reduce of the stop flag, and of whether the text that comes next can be read."""
        readiness = self.loader.readiness(self.begun)
        text = self.loader.text_hash(self.begun) if readiness == READY else 0
        self.stop.start_sync(readiness, text)

    def _finish_sync(self) -> None:
        self.stop.finish_sync()
        if self.stop.text_differs:
            self.loader.failure = self._difference_of_text()
            self.stop.readiness = FAILED

    def _difference_of_text(self) -> ConfigError:
        """Which nodes have prepared other text than the first one. Collective."""
        growing = self.loader.dataset.growing
        assert growing
        segments = growing.segments(self.begun + 1)
        (_, first), *others = all_gather_objects((platform.node(), segments))
        problems = []
        for host, theirs in others:
            for stream, ours, their in zip(growing.sources, first, theirs):
                differ = [i for i, pair in enumerate(zip(ours, their)) if pair[0] != pair[1]]
                if differ:
                    problems.append(
                        f"{host} has other text in segment {differ[0]} of {stream.folder} than "
                        "rank 0's node: the sources on their disks differ"
                    )
        validation = "the nodes have prepared other validation text than rank 0's"
        return ConfigError(*(dict.fromkeys(problems) or [validation]))

    def agree_on_stop(self, timed: Callable | None = None) -> None:
        """Finishes the all-reduce of the stop flags, if one is under way: it began with the step and overlaps it, so a
        signal during a step may count one step later. Then waits until every rank has its next batch, or all agree to
        stop. Collective. timed: given the name of a phase, a context manager that times it."""
        self._finish_sync()
        if self.stop.readiness != WAITING or self.stopping:
            return
        began, is_logged = time.monotonic(), False
        with (timed or self.phase)("data"):
            while self.stop.readiness == WAITING and not self.stopping:
                self._phase("data")  # the wait has a limit of its own: GrowingText.look()
                time.sleep(WAIT_SECONDS)
                if not is_logged and time.monotonic() > began + LOG_WAIT_SECONDS:
                    is_logged = True
                    log.info("waiting for text: %s", self.loader.waits_for(self.begun + 1))
                self._start_sync()
                self._finish_sync()

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop, as of the last agree_on_stop(): the same on all ranks."""
        return self.stop.decided > 0 or self.stop.readiness == FAILED

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives its body its own timeout, and its name in a failure report."""
        before = self.watchdog.name
        self._phase(name)
        yield
        self._phase(before)

    def _phase(self, name: str, step: int | None = None) -> None:
        self.watchdog.phase(name, self.timeouts[name], step)

    def _log_save(self, step: int, problem: str | None) -> None:
        """Logs how the save of a step ended, on rank 0; problem: why it failed, None if it succeeded."""
        if problem:
            log.error("not saved, training continues: %s", problem)
        else:
            log.info("saved %s", path_of(self.cfg, step))
        with contextlib.suppress(OSError):
            saved = folder.read_status(self.folder).get("step", 0) if problem else step
            more = {"not_saved": problem} if problem else {}
            folder.write_status(self.folder, "running", saved, self.holder, **more)

    @property
    def exit_code(self) -> int:
        """This process's exit code. A launcher reads STOPPED from the status; torchrun would take it for a failure."""
        return STOPPED if self.stop.decided and self.stop.standalone else 0

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end()
            return
        if self.checkpointer is None and self.launch is None:
            # nothing has begun, and no launcher waits for a report
            self.watchdog.stop()
            return
        final, code, text = True, 1, str(error)  # final: a restart cannot help
        if isinstance(error, ConfigError):
            code = INPUT_IS_WRONG
        elif isinstance(error, KeyboardInterrupt):
            code = 128 + (self.stop.decided or signal.SIGINT)
        elif isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
            # after the first step a restart may help: fragmentation, an evaluation, another process on the device
            final = self.checkpointer is None or self.step == self.checkpointer.start
            text = f"out of memory: {text}"
            with contextlib.suppress(Exception):
                # there may be too little memory left for this, or no planner
                from extras.planner.advice import out_of_memory

                text += "\n" + out_of_memory(
                    self.cfg, self.world.size, config.words_without("--launch=")
                )
        elif isinstance(error, SaveFailed | PreparingFailed):
            final = False
        elif not isinstance(error, FloatingPointError | NoTargets):
            final, text = False, "".join(traceback.format_exception(error)).rstrip()
        self._fail(code, text, final)
        if self.checkpointer:  # a save in the background is valid, whatever failed here
            self._phase("save")
            self.checkpointer.wait()
        self.watchdog.stop()
        raise SystemExit(code) from None

    def _end(self) -> None:
        self.watchdog.stop()
        if self.lock is None:  # not rank 0, or nothing has begun
            return
        if self.stop.decided:
            log.info(
                "stopped after step %d by %s", self.step, signal.Signals(self.stop.decided).name
            )
        try:
            state = "preempted" if self.stop.decided else "finished"
            folder.write_status(self.folder, state, self.step, self.holder)
        except OSError as error:  # without a status nobody would know: not a success
            log.error("%s/status.json cannot be written: %s", self.folder, error)
            raise SystemExit(1) from None
        if self.step and config.has_extra("reports"):
            from extras.reports.report import report_end

            report_end(self.cfg, state == "finished")
        self.lock.release()
        logging.shutdown()

    def _fail(self, code: int, text: str, final: bool) -> None:
        rank, at = self.world.rank, self.watchdog
        reported = self.launch and folder.report_failure(
            self.folder,
            self.launch,
            rank,
            step=at.step,
            phase=at.name,
            progress=at.progress,
            exit_code=code,
            text=text,
            final=final,
        )
        if reported:
            # the launcher prints the root cause at the end: here it goes only into the rank's file
            log.handlers = [
                handler for handler in log.handlers if isinstance(handler, logging.FileHandler)
            ]
        if log.handlers or not reported:
            log.error("rank %d, step %d, phase %s: %s", rank, at.step, at.name, text)
        if self.lock is not None:
            with contextlib.suppress(OSError):
                step = folder.read_status(self.folder).get("step", 0)
                folder.write_status(self.folder, "failed", step, self.holder, exit_code=code)

    def _give_up(self, text: str) -> None:
        self.watchdog.end_if_frozen(self.cfg.run.save_timeout_seconds + FROZEN_SECONDS)
        self._fail(1, text, final=False)
        if self.checkpointer:
            self.checkpointer.wait(self.cfg.run.save_timeout_seconds)
        exit_immediately(1)


def holder_of(launch: str | None) -> str | None:
    """Who has a run's folder while this process does: the launcher, or torchrun without one."""
    return launch or torchrun_id()


def final_exit_code(cfg: config.Config, launch: str | None) -> int | None:
    """The exit code of this launch's final failure, if torchrun restarted it although that cannot help; else None."""
    failures = folder.failures(config.run_folder(cfg), launch) if launch else []
    return next((failure["exit_code"] for failure in failures if failure["final"]), None)


def exit_immediately(code: int) -> NoReturn:
    """Exits a failed process immediately: teardown would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(code)


def color_is_wanted() -> bool:
    """Whether stdout is a terminal, and NO_COLOR (no-color.org) is not set."""
    return os.isatty(1) and not os.environ.get("NO_COLOR")
