"""The process that prepares text in the background of a run: one on each machine, started by the
machine's first rank.

It reads the configuration as a line of JSON from stdin, and ends with the rank that started it. Its
arguments are the number of this machine's ranks, and the descriptor of a file for its report: a
JSON list of what is wrong. (Not stdout: a source of a fork's own may print.) Exit codes: 0 all is
prepared; 2 the text is wrong; 1 it failed otherwise, perhaps without a report.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

import config
import files
from config import ConfigError
from data.console import report
from data.encode import worker_count
from data.folder_names import source_folders
from data.prepare import prepare_text

FIRST_PAUSE = 1.0  # seconds between two starts of a process that is killed; doubles each time
LONGEST_PAUSE = 60.0
CHILD = "from data.background import main; main()"


class PreparingFailed(Exception):
    """Text cannot be prepared, for a reason that may pass: the text is not wrong."""


class Preparer:
    """Starts the process, and starts it again if it is killed."""

    def __init__(self, cfg: config.Config):
        self.cfg = cfg
        self.child: subprocess.Popen | None = None
        self.report_file: IO[bytes] | None = None  # a temporary file that the child writes
        self.pause = FIRST_PAUSE
        self.next_start = 0.0  # the earliest time of the next start, by time.monotonic()
        self.is_replaced = False

    def poll(self, is_needed: bool) -> None:
        """Starts the process if none runs. Does nothing but on the machine's first rank.

        is_needed: text is missing; otherwise only the last hashes are, and a failure is only
        logged. Raises ConfigError if the text is wrong, PreparingFailed if preparing failed
        otherwise.
        """
        from parallel.ranks import rank_and_size  # imports torch, which the launcher does without

        _, local_rank, _ = rank_and_size()
        if local_rank != 0:
            return
        exit_code = self.child.poll() if self.child else 0
        is_running = exit_code is None
        if is_running or time.monotonic() < self.next_start:
            return
        if exit_code > 0:
            self._fail(exit_code, is_needed)
            return
        was_killed = exit_code < 0
        if was_killed and not self.is_replaced:
            report(
                f"the process that prepares text was killed by signal {-exit_code} (is the host "
                "out of memory?); starting another"
            )
        self._start()

    def _fail(self, exit_code: int, is_needed: bool) -> None:
        assert self.report_file
        self.report_file.seek(0)
        problems = json.loads(self.report_file.read() or b"[]")
        if is_needed and exit_code == 2 and problems:
            raise ConfigError(*problems)
        text = "; ".join(problems) or f"the process that prepares text ended with code {exit_code}"
        if is_needed:
            raise PreparingFailed(text)
        report(text)
        self.next_start = float("inf")

    def _start(self) -> None:
        from parallel.ranks import local_world_size

        self.report_file = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
        handle = self.report_file.fileno()
        ranks = max(1, local_world_size())
        self.child = subprocess.Popen(
            [*files.python_command(CHILD), str(ranks), str(handle)],
            stdin=subprocess.PIPE,  # open as long as this process lives
            pass_fds=[handle],
        )
        assert self.child.stdin
        self.child.stdin.write(json.dumps(config.to_dict(self.cfg)).encode() + b"\n")
        self.child.stdin.flush()
        self.next_start = time.monotonic() + self.pause
        self.pause = min(LONGEST_PAUSE, 2 * self.pause)

    def replace(self) -> None:
        """Kills a process that may be stopped, once: the next poll() starts another."""
        if self.child and not self.is_replaced:
            self.is_replaced = True
            report("the process that prepares text stands still; starting another")
            self.child.kill()

    def close(self) -> None:
        """Ends the process, even if it is stopped."""
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
    # the pool of a process that is killed leaves semaphores, which Python's tracker removes, with a
    # warning
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    os.nice(19)  # in the rank's session: in one of its own, Linux would share the cores evenly
    cfg = config.from_dict(json.loads(sys.stdin.readline()), "of the run that waits")
    files.end_with_stdin()  # where there is no die_with_parent()
    ranks = int(sys.argv[1])
    report_handle = int(sys.argv[2])
    exit_code = 0
    problems = []
    try:
        prepare_text(source_folders(cfg), worker_count(ranks))
    except ConfigError as error:
        exit_code = 2
        problems = error.problems
    except OSError as error:
        exit_code = 1
        problems = [f"{error.filename}: text could not be prepared: {error.strerror}"]
    with os.fdopen(report_handle, "w") as report_file:
        json.dump(problems, report_file)
    sys.exit(exit_code)
