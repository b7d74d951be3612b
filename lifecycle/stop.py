"""Stop requests: all ranks stop after the same step.

Imports torch in only one method: signal handlers are installed before the slow import of torch.
"""

import os
import pathlib
import signal
import time
from typing import Any

from lifecycle import SIGNALS, TWICE_SECONDS


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
