"""Processes: their exit codes, what they print, the signals that stop them, and how one ends with
its parent."""

import contextlib
import functools
import os
import pathlib
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

# exit codes
FINISHED = 0
INPUT_IS_WRONG = 2
STOPPED = 75  # EX_TEMPFAIL: start again to resume

MACOS_FILES = 10_240  # its OPEN_MAX, as many as a process may open there

# signals that ask to stop
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def printable(text: str) -> str:
    """Text that is safe on a terminal: control characters other than line ends and tabs are
    escaped."""
    safe = []
    for character in text:
        if character.isprintable() or character in "\n\t":
            safe.append(character)
        else:
            safe.append(character.encode("unicode_escape").decode())
    return "".join(safe)


def print_line(text: str) -> None:
    """Prints a line. It is not an error if the reader closes the pipe early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(text: str) -> None:
    """Prints a line to stderr. It is not an error if its terminal is closed, or its reader has
    ended. It may quote a path or a word of the command line: control characters are escaped."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # else Python would try to flush the line again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@functools.cache
def warn_once(text: str) -> None:
    """Prints a line to stderr, once in this process."""
    print_error(text)


def process_name() -> str:
    """Names this process among those that share a disk: in the names of temporary files."""
    return f"{platform.node()}-{os.getpid()}"


def listen(handler: Callable | signal.Handlers) -> None:
    """Installs the handler of all signals that ask to stop, and unblocks them."""
    for number in SIGNALS:
        # under nohup it is ignored, and stays so
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def raise_file_limit() -> None:
    """Raises this process's limit of open files, usually 1,024, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:  # on macOS, which allows no process that many
        hard = max(soft, MACOS_FILES)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def python_command(statements: str) -> list[str]:
    """The command of a process of its own that runs statements with this repository's modules. They
    need not be on Python's path: a rank that torchrun starts has them because its script, train.py,
    lies beside them."""
    repo = str(pathlib.Path(__file__).parent.parent)
    # Python 3.10 has the caller's folder in there, as ""
    modules = f"import sys; sys.path[:] = [{repo!r}, *filter(None, sys.path)]"
    return [sys.executable, "-c", f"{modules}; {statements}"]


def die_with_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent dies, even if it is stopped: no rank outlives a
    killed launcher and keeps the folder's lock. parent: its pid, if known before the fork; it may
    have died since. Elsewhere a thread of this process ends it, which a program that it executes
    does not have."""
    if sys.platform == "linux":
        import ctypes

        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
    elif parent is None:
        threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
