"""Signals to the launcher before the ranks are started."""

from typing import Any


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
