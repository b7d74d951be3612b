"""Follows a run: sends its rows to a tracker, compares it with its plan, writes its report.

    ./run_train.sh -m follow outputs/tiny

The launcher (launch/follower.py) starts it next to the ranks, and closes its stdin when the ranks
have ended. Started by hand, it sends the rows that the tracker lacks, and writes the report. It
reads only the run's folder: metrics.jsonl, status.json, config.toml and environment.json. A failure
here prints a line, and does not affect the run.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import config
from config import ConfigError, run_tool
from run.folder import read_status
from system import SIGNALS, print_error, print_line, python_command, read_json
from tools import report, tracker

POLL_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # timeout for sending the last rows
# Delay after a launch's first row. Planning keeps a core busy, too much for a short run.
COMPARE_SECONDS = 30.0
COMPARE = "import config; from tools.planner.check import main; config.run_tool(main)"


class Followed(NamedTuple):
    """A run, and the state of following it."""

    folder: pathlib.Path
    start: int  # the step that this launch resumed after
    ended: threading.Event  # the ranks will write no more rows
    failed: threading.Event  # a task failed, and printed a line

    def rows(self) -> Iterator[dict]:
        """Yields the rows of metrics.jsonl from the first on, as the ranks write them. Starts over
        if restarted ranks have truncated the file."""
        offset = 0
        while True:
            is_last = self.ended.is_set()  # check before reading, to see the last rows
            with contextlib.suppress(OSError):  # a network disk may fail for a moment
                for line in self._lines(offset):
                    offset = offset + len(line) if line else 0
                    with contextlib.suppress(ValueError):
                        yield json.loads(line)
            if is_last:
                return
            self.ended.wait(POLL_SECONDS)

    def _lines(self, offset: int) -> Iterator[bytes]:
        """Yields the complete lines from an offset on. If no line ends at the offset any more,
        yields an empty line and then all lines."""
        with (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, offset - 1))
            if offset and file.read(1) != b"\n":
                file.seek(0)
                yield b""
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                yield line


def send_rows(run: Followed) -> None:
    tracker.send(run.folder, run.rows())


def compare_with_plan(run: Followed) -> None:
    """Starts tools/planner/check.py if the run is on GPUs and is not short. Compares a later row
    than the launch's first, which includes compilation."""
    began = None
    for row in run.rows():
        if row["kind"] != "train" or row["step"] <= run.start:
            continue
        if began is None:
            began = time.monotonic()
            if not read_json(run.folder / "environment.json").get("gpu"):
                return
        elif run.ended.is_set() or time.monotonic() > began + COMPARE_SECONDS:
            command = [*python_command(COMPARE), str(run.folder), json.dumps(row)]
            subprocess.run(command, preexec_fn=partial(os.nice, 19), check=False)
            return


def write_report(run: Followed) -> None:
    path = run.folder / "metrics.jsonl"
    # otherwise the run failed before its first row, or its folder is gone, which the run reports
    if path.exists() and path.stat().st_size:
        report.write_report([run.folder])


def print_next(run: Followed) -> None:
    """After a run has finished, prints what the user may want next."""
    if read_status(run.folder).get("state") == "finished":
        page = run.folder / "report.html"
        cfg = config.load_resolved(str(run.folder / "config.toml"))
        print_line(report.what_next(cfg, page if page.exists() else None))


def attempt(work: Callable[[Followed], None], run: Followed) -> None:
    """Calls work(run). Prints an error as one line, since it must not end the run."""
    try:
        work(run)
    except Exception as error:
        run.failed.set()
        text = " ".join(str(error).split())
        print_error(
            f"{work.__name__}: {type(error).__name__}: {text}; to try again: "
            f"{config.command('-m', 'follow', run.folder)}"
        )


def follow(run: Followed) -> None:
    """Sends rows and compares with the plan until the run ends, then writes the report."""
    threads = []
    for work in (send_rows, compare_with_plan):
        threads.append(threading.Thread(target=attempt, args=(work, run), daemon=True))
        threads[-1].start()
    run.ended.wait()
    attempt(write_report, run)
    end = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if threads[0].is_alive():
        print_error(
            f"the last rows were not taken within {CLOSE_SECONDS:g} s; to send them: "
            f"{config.command('-m', 'follow', run.folder)}"
        )


def launched(folder: str, before: str) -> None:
    """Follows a launch once its ranks have claimed the run's folder, then ends the process.

    Until then, status.json has the id `before` of the previous launch.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the ranks handle it; send their last rows, too
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    status = _status_of_launch(pathlib.Path(folder), before, ended)
    has_begun = (pathlib.Path(folder) / "metrics.jsonl").exists()
    if status and (has_begun or status["state"] != "failed"):  # else the ranks never started
        run = Followed(pathlib.Path(folder), status["step"], ended, threading.Event())
        follow(run)
        attempt(print_next, run)
    sys.stdout.flush()
    os._exit(0)  # skips exit hooks of trackers, which may hang


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _status_of_launch(folder: pathlib.Path, before: str, ended: threading.Event) -> dict | None:
    """The first status of a launch; None if its ranks never claim the folder."""
    while True:
        is_last = ended.is_set()
        status = read_status(folder)
        if status.get("launch") not in (None, before):
            return status
        if is_last:
            return None
        ended.wait(POLL_SECONDS)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(f"usage: {config.command('-m', 'follow', 'RUN')}")
    folder = pathlib.Path(argv[0])
    if not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder}: is no run with rows")
    run = Followed(folder, 0, threading.Event(), threading.Event())
    run.ended.set()
    follow(run)
    return int(run.failed.is_set())


if __name__ == "__main__":
    run_tool(main)
