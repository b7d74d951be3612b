"""The watchdog, which ends a process without progress."""

import contextlib
import faulthandler
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable

# how long after a phase's timeout a process ends in which no Python thread can run
FROZEN_SECONDS = 20.0
TICK_SECONDS = 0.2  # between two looks at the deadline
SUSPENDED_SECONDS = 5.0  # a longer time between two looks is one in which the process was stopped
NOW = "now: rank {}, step {}, phase {} ({} phases begun)"  # a log's line on where the rank is
NOW_BYTES = 99  # the line is padded to this length


class Watchdog:
    """Tracks the current phase of this rank, and calls give_up when it exceeds its timeout.

    A thread cannot do that while the main thread holds Python's lock (the GIL), as Inductor's
    kernel launches do, which block when a GPU hangs and its queue is full. Then a C thread of
    faulthandler appends all threads' stacks to the log and ends the process. It knows neither step
    nor phase: each phase overwrites the log's line NOW.
    """

    def __init__(self, give_up: Callable[[str], None]):
        """give_up: called in another thread with the main thread's stack and what happened; must
        not return."""
        self.give_up = give_up
        self.main_thread = threading.get_ident()
        self.step = 0
        self.name = "start"  # of the current phase
        self.progress = 0  # phases begun
        self.began = time.monotonic()
        self.deadline = float("inf")
        self.ended = False
        self.lock = threading.Lock()  # of the deadline, which both threads set
        self.rank = 0
        self.stacks = 2  # the file descriptor that stacks go to: stderr, until there is a log
        self.line: int | None = None  # a file descriptor of the log, for the line NOW
        self.line_at = 0  # the offset of that line
        self.fires = float("-inf")  # when the C thread would end the process
        threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def use_log(self, path: pathlib.Path, rank: int) -> None:
        """Adds the line NOW to the rank's log, and has stacks written to this log. A full disk
        stops nothing."""
        with contextlib.suppress(OSError):
            self.rank = rank
            self.line = os.open(path, os.O_WRONLY)
            self.line_at = os.lseek(self.line, 0, os.SEEK_END)
            os.write(self.line, b" " * NOW_BYTES + b"\n")
            self.stacks = os.open(path, os.O_WRONLY | os.O_APPEND)
        self.fires = float("-inf")

    def phase(self, name: str, seconds: float, step: int | None = None) -> None:
        """The main thread begins a phase, and must begin the next within `seconds`."""
        if step is not None:
            self.step = step
        self.name = name
        self.progress += 1
        if self.line:
            with contextlib.suppress(OSError):
                # takes microseconds: the page is in memory, the blocks are allocated
                text = NOW.format(self.rank, self.step, name, self.progress)
                os.pwrite(self.line, text.ljust(NOW_BYTES).encode(), self.line_at)
        with self.lock:
            self.began = time.monotonic()
            self.deadline = self.began + seconds
            # set again only where it would be too early or too late, not three times a step: it
            # starts a thread
            if not FROZEN_SECONDS / 2 <= self.fires - self.deadline <= FROZEN_SECONDS * 1.25:
                self.end_if_frozen(seconds + FROZEN_SECONDS)

    def end_if_frozen(self, seconds: float) -> None:
        """Ends the process in `seconds`, unless the next phase begins."""
        self.fires = time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stacks)

    def stop(self) -> None:
        self.ended = True
        faulthandler.cancel_dump_traceback_later()

    def _extend_if_suspended(self, last: float, now: float) -> None:
        """Between two looks at the deadline the process may have been stopped: by SIGSTOP, SLURM's
        suspend, docker pause. That time of the phase does not count, unless the C thread's time, of
        which it has FROZEN_SECONDS more, is over, too: nothing can hold that thread back."""
        with self.lock:
            seconds = now - max(last, self.began)  # it may have begun since
            if seconds <= SUSPENDED_SECONDS:
                return
            self.deadline += seconds
            if not self.ended and self.deadline < float("inf"):
                self.end_if_frozen(self.deadline - time.monotonic() + FROZEN_SECONDS)

    def _run(self) -> None:
        last = time.monotonic()
        while not self.ended:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._extend_if_suspended(last, now)
            last = now
            if now > self.deadline and not self.ended:
                frame = sys._current_frames()[self.main_thread]
                stack = "".join(traceback.format_stack(frame))
                seconds = time.monotonic() - self.began
                self.give_up(
                    f"{stack}no progress for {seconds:.0f} s: another rank is gone or hangs, or this "
                    "one does"
                )
