"""The process that prepares text beside a run: one on each machine, started by its first rank.

It is told the configuration, as JSON in a line of stdin, and the number of this machine's ranks. It ends with its
starter. Exit codes: 0 all is prepared; 2 the text is wrong, 1 it failed otherwise: then stdout is a list of what is
wrong, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import config
import files
from config import ConfigError
from data.console import report
from data.encode import worker_count
from data.folder import prepared_parts
from data.prepare import prepare_text

LONGEST_PAUSE = 60.0  # seconds between two starts of a process that is killed
CHILD = "from data.background import main; main()"


class PreparingFailed(Exception):
    """Text cannot be prepared, for a reason that may pass: the text is not wrong."""


class Preparer:
    """Starts the process, and again if it is killed."""

    def __init__(self, cfg: config.Config):
        self.cfg = cfg
        self.child: subprocess.Popen | None = None
        self.problems: Any = None  # a file with what the child says at its end
        self.pause, self.next_start = 1.0, 0.0
        self.is_replaced = False

    def poll(self, is_needed: bool) -> None:
        """is_needed: text is missing; else only the last hashes are, and trouble is no more than reported. Raises
        ConfigError if the text is wrong, PreparingFailed if preparing failed otherwise."""
        from parallel.ranks import rank_and_size

        if rank_and_size()[1] != 0:
            return
        code = self.child.poll() if self.child else 0
        if code is None or time.monotonic() < self.next_start:
            return
        if code > 0:
            self._fail(code, is_needed)
            return
        if code < 0 and not self.is_replaced:
            report(
                f"the process that prepares text was killed by signal {-code} (is the host out of "
                "memory?); starting another"
            )
        self._start()

    def _fail(self, code: int, is_needed: bool) -> None:
        self.problems.seek(0)
        problems = json.loads(self.problems.read() or b"[]")
        if is_needed and code == 2 and problems:
            raise ConfigError(*problems)
        text = "; ".join(problems) or f"the process that prepares text ended with code {code}"
        if is_needed:
            raise PreparingFailed(text)
        report(text)
        self.next_start = float("inf")

    def replace(self) -> None:
        """Kills the process, once: the next poll() starts another."""
        if self.child and not self.is_replaced:
            self.is_replaced = True
            report("the process that prepares text stands still; starting another")
            self.child.kill()

    def _start(self) -> None:
        from parallel.ranks import local_world_size

        self.problems = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
        self.child = subprocess.Popen(
            [*files.python_command(CHILD), str(max(1, local_world_size()))],
            stdin=subprocess.PIPE,  # open as long as this process lives
            stdout=self.problems,
        )
        assert self.child.stdin
        self.child.stdin.write(json.dumps(config.to_dict(self.cfg)).encode() + b"\n")
        self.child.stdin.flush()
        self.next_start = time.monotonic() + self.pause
        self.pause = min(LONGEST_PAUSE, 2 * self.pause)

    def close(self) -> None:
        """Ends the process, also if it is stopped."""
        if self.child:
            self.child.kill()
            self.child.wait()
            assert self.child.stdin
            self.child.stdin.close()


def main() -> None:
    """What the process does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they are for the rank
        signal.signal(number, signal.SIG_IGN)
    files.die_with_parent()
    # the pool of a process that is killed leaves semaphores, which Python's tracker removes, with a warning
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    os.nice(19)  # in the rank's session: in one of its own, Linux would share the cores evenly
    cfg = config.from_dict(json.loads(sys.stdin.readline()), "of the run that waits")
    # where there is no die_with_parent()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    code, problems = 0, []
    try:
        prepare_text(prepared_parts(cfg), worker_count(int(sys.argv[1])))
    except ConfigError as error:
        code, problems = 2, error.problems
    except OSError as error:
        code, problems = 1, [f"{error.filename}: text could not be prepared: {error.strerror}"]
    print(json.dumps(problems))
    sys.exit(code)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)
