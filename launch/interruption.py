"""Signals to the launcher before the ranks run. While they run, see launch.py: StopForwarder."""

import signal
from collections.abc import Callable
from typing import Any


class Interrupted(BaseException):
    """A signal came before the ranks were started. Not a KeyboardInterrupt: once that has left an
    exec() of text, as dataclasses are made by, `python -m` ends by SIGINT, even if it was
    caught."""


class Interruption:
    """The launcher's signal handler until the ranks run. It records the latest signal, and raises
    Interrupted where that is safe. An interrupted import would leave a partly initialized
    module."""

    def __init__(self) -> None:
        self.asked = 0  # the number of the latest signal that asks the launch to stop; 0 before any
        self.raises = False  # whether a signal raises Interrupted

    def __call__(self, number: int, frame: Any = None) -> None:
        self.asked = number
        if self.raises:
            raise Interrupted

    def allow(self) -> None:
        """From now on a signal raises Interrupted. Raises it at once if one came earlier."""
        self.raises = True
        if self.asked:
            raise Interrupted


def listen(handler: Callable | signal.Handlers) -> None:
    """Installs the handler of all signals that ask a launch to stop."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, handler)
    # under nohup it is ignored, and stays so
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)
