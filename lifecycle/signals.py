"""Requests to stop, and the watchdog that ends a process which makes no progress.

Imports torch in one method only: signal handlers are installed before the seconds that torch takes to load.
"""

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
TWICE_SECONDS = 5.0  # a second Ctrl-C so soon after the first quits at once


class Interrupted(BaseException):
    """A signal came before the ranks were started."""


class Interruption:
    """The launcher's signal handler until the ranks are started: notes the latest, and raises Interrupted where that
    does no harm. An import that is interrupted leaves half a module."""

    def __init__(self) -> None:
        self.asked, self.raises = 0, False

    def __call__(self, number: int, frame: Any = None) -> None:
        self.asked = number
        if self.raises:
            raise Interrupted

    def allow(self) -> None:
        """From now on it may raise, and does for a signal that came earlier."""
        self.raises = True
        if self.asked:
            raise Interrupted


class StopRequest:
    """Asks all ranks to stop at the same step, on a signal to any of them or a word of the launcher in a file.

    A rank that stopped on its own would leave the others in a collective for ever. So the flag is all-reduced, on the
    host and while the step is under way: nothing waits for it, and never for the device.
    """

    def __init__(self) -> None:
        self.received = 0  # a signal's number
        self.decided = 0  # the same, once all ranks know
        self.file: pathlib.Path | None = None
        self.alone = False  # no launcher and no torchrun: a second Ctrl-C is this process's to handle
        self.group, self.flag, self.work = None, None, None

    def listen(self) -> None:
        """Installs the handlers; the first signal counts."""
        last_interrupt = float("-inf")

        def note(number: int, frame: Any) -> None:
            nonlocal last_interrupt
            self.received = self.received or number
            if number == signal.SIGINT and self.alone:
                if time.monotonic() - last_interrupt < TWICE_SECONDS:
                    os._exit(128 + number)
                last_interrupt = time.monotonic()

        for number in SIGNALS:
            signal.signal(number, note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until now

    def connect(self, group: Any, file: pathlib.Path | None) -> None:
        """The gloo group of all ranks and, on rank 0, the launcher's file. Until then nothing is decided."""
        self.group, self.file = group, file

    def start_sync(self) -> None:
        """Starts to ask all ranks."""
        import torch
        import torch.distributed as dist

        if self.group is None:
            return
        # Opened and not stat'ed: NFS fetches a file's new content when it is opened, and caches its absence.
        if self.file and not self.received:
            self.received = read_stop(self.file)
        self.flag = torch.tensor([self.received])
        if self.group.size() > 1:
            self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def finish_sync(self) -> bool:
        """Whether any rank had been asked to stop by the last start_sync(); waits for the answer."""
        if self.work:
            self.work.wait()
        if self.flag is not None:
            self.flag, self.work, self.decided = None, None, max(self.decided, int(self.flag))
        return self.decided > 0


def read_stop(file: pathlib.Path) -> int:
    """The signal's number that a stop file holds, 0 for none. Read in every step, hence by the shortest way."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return 0
    try:
        text = os.read(descriptor, 100).strip()
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    return int(text) if text.isdigit() else signal.SIGTERM if text else 0


class Watchdog:
    """Knows what this rank is doing, and reports when that takes too long."""

    def __init__(self, give_up: Callable[[str], None]):
        """give_up: called in another thread with what happened and where the main thread stands; must not return."""
        self.step, self.name, self.progress, self.deadline = 0, "start", 0, float("inf")
        self.began, self.give_up, self.main = time.monotonic(), give_up, threading.get_ident()
        self.ended = False
        threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def phase(self, name: str, seconds: float, step: int | None = None) -> None:
        """The main thread begins something, and should begin the next within so many seconds."""
        self.step, self.name, self.progress = self.step if step is None else step, name, self.progress + 1
        self.began = time.monotonic()
        self.deadline = self.began + seconds

    def stop(self) -> None:
        self.ended = True

    def _run(self) -> None:
        while not self.ended:
            time.sleep(0.2)
            if time.monotonic() > self.deadline and not self.ended:
                stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
                seconds = time.monotonic() - self.began
                self.give_up(f"{stack}no progress for {seconds:.0f} s: another rank is gone or hangs, or this one does")


def die_with_parent(parent: int | None = None) -> None:
    """Linux ends this process when its parent dies: no rank outlives a killed launcher, holding the folder's lock.
    `parent`: its id, where the caller knew it before the fork; it may have died since."""
    if sys.platform == "linux":
        import ctypes

        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
