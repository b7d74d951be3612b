"""A failure: what ends a rank that hangs, and how the launcher finds the root cause.

Each rank has a file in the attempt's folder, outputs/RUN/.attempt-ID/error-N. Its first line says where
the rank is, as JSON, and is overwritten as each phase is entered. Below it stands why the rank failed:

- a rank that raises writes its error (fail());
- a rank that exceeds a phase's timeout has its stacks written by faulthandler, which ends it. That
  is a thread in C, which runs even if the main thread holds the GIL and waits for a hanging GPU;
- of a rank that a signal killed, torchrun writes that (write_killed());
- a rank that is stopped, or was killed after another failed, has nothing.

The launcher reads these files once its child has exited. The root cause is that of the rank with the
least progress: if one hangs, the others enter another phase and wait for it there.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import time
from typing import Any, NamedTuple

LINE_BYTES = 160  # the first line is padded to this length
TIMEOUT = "Timeout ("  # what faulthandler writes first
BEFORE = ("start", "restore")  # the phases before the ranks take the run's folder
EXITED = "exited"  # the phase of a rank that is through


class RankOutcome(NamedTuple):
    """What a rank's error file says: where the rank was, and why it failed."""

    rank: int
    step: int
    phase: str
    progress: int  # phases entered: comparable between ranks
    time: float  # when the phase was entered, or of the failure
    exit_code: int = 1  # in the phase EXITED that of the run
    start: int = 0  # in the phase EXITED: the step that the attempt resumed after
    signal: int = 0  # in the phase EXITED: that stopped the run
    retryable: bool = True  # a restart may help
    text: str = ""  # why it failed; empty if nothing was written

    @property
    def place(self) -> str:
        return f"rank {self.rank}, step {self.step}, phase {self.phase}"

    @property
    def is_timeout(self) -> bool:
        return self.text.startswith(TIMEOUT)

    @property
    def innermost_frame(self) -> str:
        """What the main thread, which faulthandler writes last, was doing at the timeout."""
        stack = self.text.rpartition("Thread 0x")[2]
        return stack.partition("\n")[2].partition("\n")[0].strip()


class Watchdog:
    """Tracks this rank's phase, and ends the process if the phase exceeds its timeout."""

    def __init__(self, rank: int, attempt: pathlib.Path | None):
        """attempt: its folder; None without a launcher: stacks go to stderr."""
        self.rank = rank
        self.step = 0
        self.phase = "start"
        self.progress = 0
        self.file: int | None = None  # a file descriptor
        if attempt:
            self.path = attempt / f"error-{rank}"
            with contextlib.suppress(OSError):  # a full disk
                self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                os.write(self.file, b" " * LINE_BYTES + b"\n")

    def enter(self, phase: str, seconds: float, step: int | None = None, **more: Any) -> None:
        """The main thread enters a phase, and must enter the next within `seconds`. more: of
        RankOutcome."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.progress += 1
        self._write_line(**more)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file or 2)  # 30 us

    def _write_line(self, **more: Any) -> None:
        """Microseconds: the page is in memory, the block allocated."""
        if self.file is None:
            return
        line = {"rank": self.rank, "step": self.step, "phase": self.phase}
        line |= {"progress": self.progress, "time": round(time.time(), 3), **more}
        with contextlib.suppress(OSError):
            os.pwrite(self.file, json.dumps(line).ljust(LINE_BYTES).encode(), 0)

    def fail(self, text: str, exit_code: int, retryable: bool) -> bool:
        """Reports why this rank failed. Returns whether a launcher can read it. The process must
        still end within the phase's timeout."""
        self._write_line(exit_code=exit_code, retryable=retryable)
        try:
            # it may have been deleted or moved with the run's folder
            if self.file is None or not self.path.exists():
                return False
            return os.write(self.file, text.encode()) > 0
        except OSError:
            return False


def write_killed(attempt: pathlib.Path, rank: int, number: int) -> None:
    """Writes that a signal ended a rank."""
    name = signal.Signals(number).name
    reason = " (is the host out of memory?)" if number == signal.SIGKILL else ""
    with contextlib.suppress(OSError), (attempt / f"error-{rank}").open("a") as file:
        file.write(f"killed by {name}{reason}")


def read_rank_outcomes(attempt: pathlib.Path) -> list[RankOutcome]:
    """Those of all ranks, the one with the least progress first, then the earliest."""
    outcomes = []
    for path in attempt.glob("error-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # a rank that has just begun
            line, _, text = path.read_text(errors="replace").partition("\n")
            if text.startswith(TIMEOUT):
                text += "no progress since then: this rank hangs, or waits for another that does"
            outcomes.append(RankOutcome(**json.loads(line), text=text.strip()))
    return sorted(outcomes, key=lambda outcome: (outcome.progress, outcome.time))
