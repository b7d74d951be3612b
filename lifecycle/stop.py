"""Stop requests: all ranks stop after the same step.

How a stop travels from the signal to the step:
1. A signal comes to the launcher. Before the ranks run, launch/interruption.py notes it. While they
   run, launch.py: StopForwarder writes its number into the stop file in the run's folder.
2. Rank 0 reads the stop file in each step. Its number becomes `received` there. On a rank that gets
   a signal itself, the handler sets `received`.
3. run.steps() begins each step with start_sync(), an all-reduce of `received`. At the step's end,
   run.agree_to_continue() calls finish_sync(), which takes the greatest of all ranks as `signal`.
   From then on, `agreed` is true on all ranks.
4. train.py saves after this step, and run.steps() ends. The run's status becomes "preempted", which
   the launcher turns into the exit code STOPPED.

Imports torch in only one method: signal handlers are installed before the slow import of torch.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from lifecycle import SIGNALS, TWICE_SECONDS


class StopRequest:
    """Stops all ranks at the same step, after a signal to any of them or a request in the
    launcher's file.

    A rank that stopped on its own would leave the others hanging in a collective. So the flag is
    all-reduced on the host, overlapped with the step. It never waits for the device.
    """

    def __init__(self) -> None:
        self.received = 0  # the signal that this rank knows of, by its number
        self.signal = 0  # the signal that all ranks have agreed to stop by
        self.file: pathlib.Path | None = None  # the stop file, which rank 0 reads
        # no launcher and no torchrun: this process handles a second Ctrl-C itself
        self.standalone = False
        self.group: Any = None  # of all ranks, over gloo
        self.flags: Any = None  # the tensor that is being all-reduced
        self.work: Any = None  # its all-reduce, with several ranks
        self.waits_for_text = False  # whether some rank's next batch is not prepared yet

    @property
    def agreed(self) -> bool:
        """Whether all ranks stop after this step."""
        return self.signal > 0

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

    @contextlib.contextmanager
    def ends_process(self) -> Iterator[None]:
        """TERM and INT, also one that came before, end this process at once. While a rank waits in
        C++ for others, which may never be started, a handler would not be called; and there is
        nothing to save yet."""
        handlers = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            handlers[number] = signal.signal(number, signal.SIG_DFL)
        if self.received in handlers:
            signal.raise_signal(self.received)
        yield
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def connect(self, group: Any, file: pathlib.Path | None) -> None:
        """Sets the gloo group of all ranks and, on rank 0, the launcher's file. Before this, no
        stop is agreed on."""
        self.group = group
        self.file = file

    def start_sync(self, waits_for_text: bool = False) -> None:
        """Starts the all-reduce of the stop flag, and of whether this rank's next batch is missing."""
        import torch
        import torch.distributed as dist

        if self.group is None:
            return
        # open() instead of stat(): NFS fetches a file's new content on open, and caches its
        # absence.
        if self.file and not self.received:
            self.received = read_stop(self.file)
        self.flags = torch.tensor([self.received, waits_for_text])
        if self.group.size() > 1:
            self.work = dist.all_reduce(
                self.flags, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def finish_sync(self) -> None:
        """Waits for the all-reduce, if one is under way. A signal after its start_sync() counts at
        the next."""
        if self.flags is None:
            return
        if self.work:
            self.work.wait()
        received, waits = self.flags.tolist()
        self.flags = None
        self.work = None
        self.signal = max(self.signal, received)
        self.waits_for_text = bool(waits)


def read_stop(file: pathlib.Path) -> int:
    """The signal number in a stop file, 0 for none."""
    try:
        text = file.read_bytes().strip()
    except OSError:
        return 0
    if not text:
        return 0
    return int(text) if text.isdigit() else signal.SIGTERM
