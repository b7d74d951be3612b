"""Stop requests, and the watchdog that ends a process without progress.

Imports torch in only one method: signal handlers are installed before the slow import of torch.
"""

import contextlib
import faulthandler
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TWICE_SECONDS = 5.0  # a second Ctrl-C within this time of the first quits at once
# how long after a phase's timeout a process ends in which no Python thread can run
FROZEN_SECONDS = 20.0
NOW = "now: rank {}, step {}, phase {} ({} phases begun)"  # a log's line on where the rank is


class Interrupted(BaseException):
    """A signal came before the ranks were started. Not a KeyboardInterrupt: once that has left an exec() of text, as
    dataclasses are made by, `python -m` ends by SIGINT, even if it was caught."""


class Interruption:
    """The launcher's signal handler until the ranks are started: records the latest signal, and raises Interrupted
    where that is safe. An interrupted import would leave a partly initialized module."""

    def __init__(self) -> None:
        self.asked, self.raises = 0, False

    def __call__(self, number: int, frame: Any = None) -> None:
        self.asked = number
        if self.raises:
            raise Interrupted

    def allow(self) -> None:
        """Allows it to raise from now on, and raises at once if a signal came earlier."""
        self.raises = True
        if self.asked:
            raise Interrupted


class StopRequest:
    """Stops all ranks at the same step, after a signal to any of them or a request in the launcher's file.

    A rank that stopped on its own would leave the others hanging in a collective. So the flag is all-reduced on the
    host, overlapped with the step: nothing waits for it, and it never waits for the device.
    """

    def __init__(self) -> None:
        self.received = 0  # a signal's number
        self.decided = 0  # the same, once all ranks have agreed
        self.file: pathlib.Path | None = None
        # no launcher and no torchrun: this process handles a second Ctrl-C itself
        self.standalone = False
        self.group, self.flag, self.work = None, None, None
        self.readiness = 0  # the greatest of any rank, as of the last finish_sync()
        self.text_differs = False  # between ranks, as of the last finish_sync()

    def listen(self) -> None:
        """Installs the handlers; the first signal counts."""
        last_interrupt = float("-inf")

        def note(number: int, frame: Any) -> None:
            nonlocal last_interrupt
            self.received = self.received or number
            if number == signal.SIGINT and self.standalone:
                if time.monotonic() - last_interrupt < TWICE_SECONDS:
                    os._exit(128 + number)
                last_interrupt = time.monotonic()

        for number in SIGNALS:
            signal.signal(number, note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until now

    def connect(self, group: Any, file: pathlib.Path | None) -> None:
        """Sets the gloo group of all ranks and, on rank 0, the launcher's file. Before this, no stop is decided."""
        self.group, self.file = group, file

    def start_sync(self, readiness: int = 0, text: int = 0) -> None:
        """Starts the all-reduce of the stop flag, and of what each rank reads next: Loader.readiness(), text_hash()."""
        import torch
        import torch.distributed as dist

        if self.group is None:
            return
        # open() instead of stat(): NFS fetches a file's new content on open, and caches its absence.
        if self.file and not self.received:
            self.received = read_stop(self.file)
        self.flag = torch.tensor([self.received, readiness, text, -text])  # their maxima
        if self.group.size() > 1:
            self.work = dist.all_reduce(
                self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def finish_sync(self) -> bool:
        """Waits for the all-reduce. Returns whether any rank had been asked to stop by the last start_sync()."""
        if self.work:
            self.work.wait()
        if self.flag is not None:
            received, self.readiness, greatest, least = self.flag.tolist()
            self.text_differs = self.readiness == 0 and greatest != -least
            self.flag, self.work, self.decided = None, None, max(self.decided, received)
        return self.decided > 0


def read_stop(file: pathlib.Path) -> int:
    """The signal number in a stop file, 0 for none."""
    try:
        text = file.read_bytes().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else signal.SIGTERM if text else 0


class Watchdog:
    """Tracks the current phase of this rank, and calls give_up when it exceeds its timeout.

    A thread cannot do that while the main thread holds Python's lock (the GIL), as Inductor's kernel launches do, which
    block when a GPU hangs and its queue is full. Then a C thread of faulthandler appends all threads' stacks to the log
    and ends the process. It knows neither step nor phase: each phase is written over the log's line NOW.
    """

    def __init__(self, give_up: Callable[[str], None]):
        """give_up: called in another thread with the main thread's stack and what happened; must not return."""
        self.step, self.name, self.progress, self.deadline = 0, "start", 0, float("inf")
        self.began, self.give_up, self.main = time.monotonic(), give_up, threading.get_ident()
        self.ended, self.rank = False, 0
        self.stacks, self.line_at = 2, 0  # stderr, until there is a log
        self.line: int | None = None  # the log's file descriptor
        self.fires = float("-inf")  # when the C thread would end the process
        threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def use_log(self, path: pathlib.Path, rank: int) -> None:
        """Adds the line NOW to the rank's log, and has stacks written to this log. A full disk stops nothing."""
        with contextlib.suppress(OSError):
            self.rank, self.line = rank, os.open(path, os.O_WRONLY)
            self.line_at = os.lseek(self.line, 0, os.SEEK_END)
            os.write(self.line, b" " * 99 + b"\n")
            self.stacks = os.open(path, os.O_WRONLY | os.O_APPEND)
        self.fires = float("-inf")

    def phase(self, name: str, seconds: float, step: int | None = None) -> None:
        """The main thread begins a phase, and must begin the next within `seconds`."""
        self.step, self.name, self.progress = (
            self.step if step is None else step,
            name,
            self.progress + 1,
        )
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        if self.line:
            with contextlib.suppress(OSError):
                # microseconds: the page is in memory, the place on the disk exists
                text = NOW.format(self.rank, self.step, name, self.progress)
                os.pwrite(self.line, text.ljust(99).encode(), self.line_at)
        # set again only where it would be too early or too late, not three times a step: it starts a thread
        if not FROZEN_SECONDS / 2 <= self.fires - self.deadline <= FROZEN_SECONDS * 1.25:
            self.end_if_frozen(seconds + FROZEN_SECONDS)

    def end_if_frozen(self, seconds: float) -> None:
        """Ends the process in `seconds`, unless the next phase begins."""
        self.fires = time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stacks)

    def stop(self) -> None:
        self.ended = True
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self.ended:
            time.sleep(0.2)
            if time.monotonic() > self.deadline and not self.ended:
                stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
                seconds = time.monotonic() - self.began
                self.give_up(
                    f"{stack}no progress for {seconds:.0f} s: another rank is gone or hangs, or this one does"
                )
