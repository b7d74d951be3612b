"""Ends a rank that hangs, and writes the error files in which the launcher finds the root cause.

Each rank has an error file in the attempt's folder, outputs/RUN/.attempt-ID/error-N. Its first line
is JSON and says where the rank is. It is overwritten whenever the rank enters a phase. The lines
below say why the rank failed:

- If a rank raises, it writes its error (fail()).
- If a rank exceeds a phase's timeout, faulthandler writes its stacks and ends it. faulthandler is a
  thread in C, which runs even if the main thread holds the GIL and waits for a hanging GPU.
- If a signal killed a rank, torchrun's process writes that (write_killed()).
- If a rank was stopped, or killed after another failed, nothing is written.

The launcher reads these files once its child has exited. The root cause is the error of the rank with
the least progress: if one rank hangs, the others enter a later phase and wait for it there.
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
PHASES_BEFORE_RUN = ("start", "restore")  # until Run.begin(), which creates the run's folder
EXITED = "exited"  # the last phase, of a rank without an error


class RankOutcome(NamedTuple):
    """The content of a rank's error file: where the rank was, and why it failed."""

    rank: int
    step: int
    phase: str
    progress: int  # number of phases entered, which is comparable between ranks
    time: float  # when the rank entered the phase, or failed
    exit_code: int = 1  # in the phase EXITED, the run's
    start: int = 0  # in the phase EXITED, the step that the attempt resumed after
    signal: int = 0  # in the phase EXITED, the signal that stopped the run, or 0
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
        """Where the main thread was at the timeout. faulthandler writes its stack last."""
        stack = self.text.rpartition("Thread 0x")[2]
        return stack.partition("\n")[2].partition("\n")[0].strip()


class Watchdog:
    """Tracks this rank's phase, and ends the process if the phase exceeds its timeout."""

    def __init__(self, rank: int, attempt: pathlib.Path | None):
        """attempt: the attempt's folder. None without a launcher: stacks go to stderr."""
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
        """Call when the main thread enters a phase. It must enter the next one within `seconds`. more:
        further fields of RankOutcome."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.progress += 1
        self._write_line(**more)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file or 2)  # 30 us

    def _write_line(self, **more: Any) -> None:
        """Takes microseconds: the page is in memory and the block allocated."""
        if self.file is None:
            return
        line = {"rank": self.rank, "step": self.step, "phase": self.phase}
        line |= {"progress": self.progress, "time": round(time.time(), 3), **more}
        with contextlib.suppress(OSError):
            os.pwrite(self.file, json.dumps(line).ljust(LINE_BYTES).encode(), 0)

    def fail(self, text: str, exit_code: int, retryable: bool) -> bool:
        """Writes why this rank failed. Returns whether a launcher can read it. The phase's timeout
        still applies."""
        self._write_line(exit_code=exit_code, retryable=retryable)
        try:
            # The file may have been deleted, or moved with the run's folder.
            if self.file is None or not self.path.exists():
                return False
            return os.write(self.file, text.encode()) > 0
        except OSError:
            return False


def write_killed(attempt: pathlib.Path, rank: int, number: int) -> None:
    """Writes to a rank's error file that a signal killed it."""
    name = signal.Signals(number).name
    reason = " (is the host out of memory?)" if number == signal.SIGKILL else ""
    with contextlib.suppress(OSError), (attempt / f"error-{rank}").open("a") as file:
        file.write(f"killed by {name}{reason}")


def read_rank_outcomes(attempt: pathlib.Path) -> list[RankOutcome]:
    """The outcomes of all ranks, sorted by progress and then by time: the root cause comes first."""
    outcomes = []
    for path in attempt.glob("error-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # the rank has just started
            line, _, text = path.read_text(errors="replace").partition("\n")
            if text.startswith(TIMEOUT):
                text += "no progress since then: this rank hangs, or waits for another that does"
            outcomes.append(RankOutcome(**json.loads(line), text=text.strip()))
    return sorted(outcomes, key=lambda outcome: (outcome.progress, outcome.time))
