"""Sends a run's rows to Weights & Biases or Trackio (`log.tracker`).

A process next to rank 0 follows metrics.jsonl. So a tracker that is slow, hangs or fails costs
training nothing, and the next launch sends what this one could not. tracker.json in the run's
folder stores the tracker's id for the run, by which every launch continues it, and how many rows
were sent.
"""

import json
import logging
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import config
from system import files, processes

PROCESS = "from extras.reports.tracker import main; sys.exit(main(*sys.argv[1:]))"
PROJECT = "fsdp2"  # of the rows there
CLOSE_SECONDS = 5.0  # for the last rows, at the end of a run
HELD_SECONDS = 5.0  # an evaluation that takes no longer is sent with the row of its step

log = logging.getLogger("train")


class Tracker:
    """Rank 0's handle of the process. Whatever happens to the process costs one warning."""

    def __init__(self, folder: pathlib.Path, name: str, start: int, kept: int):
        """Rows of steps after `start` were dropped from metrics.jsonl; `kept` rows remain."""
        self.name = name
        self.log = folder / "logs" / "tracker.log"
        with self.log.open("ab") as output:
            # Nothing is ever written to its stdin. Once that is closed, also by the end of this
            # process, no row follows.
            self.process = subprocess.Popen(
                [*processes.python_command(PROCESS), folder, str(start), str(kept)],
                stderr=output,
                stdin=subprocess.PIPE,
            )
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        if self.process.wait() == 0:
            return
        lines = self.log.read_text(errors="replace").splitlines()
        log.warning(
            "%s lacks rows of this launch, which the next one sends: %s (%s)",
            self.name,
            lines[-1] if lines else "no output",
            self.log,
        )

    def close(self) -> None:
        """Waits until the last rows are sent, CLOSE_SECONDS at most."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.thread.join(CLOSE_SECONDS + 1)


# What the process does


closed = threading.Event()  # stdin is: no row follows


def exit_after_close() -> None:
    """Waits for the end of stdin, and CLOSE_SECONDS later ends this process, even if the tracker
    hangs."""
    sys.stdin.read()
    closed.set()
    time.sleep(CLOSE_SECONDS)
    fail(f"the last rows were not taken within {CLOSE_SECONDS:g} s")


def fail(text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    os._exit(1)  # runs none of the tracker's hooks, which may hang


def follow(path: pathlib.Path) -> Iterator[dict | None]:
    """Yields the rows of metrics.jsonl, and None whenever it has read all. Ends when no row
    follows."""
    incomplete = b""  # the last line, until its newline is written
    was_closed = False
    with path.open("rb") as file:
        while True:
            block = file.read(1 << 20)
            *lines, incomplete = (incomplete + block).split(b"\n")
            yield from map(json.loads, lines)
            if block:
                continue
            if was_closed:
                return
            yield None
            # read once more after the close, for rows that were written just before it
            was_closed = closed.wait(0.5)


def steps(path: pathlib.Path) -> Iterator[list[dict]]:
    """Yields the rows of a step together, but holds them no longer than HELD_SECONDS."""
    held: list[dict] = []
    since = 0.0  # when the first of them was read
    for row in follow(path):
        if row is None:
            is_due = time.monotonic() - since > HELD_SECONDS
        else:
            is_due = bool(held) and row["step"] != held[0]["step"]
        if held and is_due:
            yield held
            held = []
        if row is not None:
            if not held:
                since = time.monotonic()
            held.append(row)
    if held:
        yield held


def scalars(rows: list[dict]) -> dict[str, float]:
    """The numbers of a step's rows by name, as TensorBoard gets them: train/loss."""
    values = {}
    for row in rows:
        for key, value in config.flatten(row).items():
            if isinstance(value, int | float) and key not in ("step", "batch_digest"):
                values[f"{row['kind']}/{key}"] = value
    return values


class RunInfo(NamedTuple):
    """What a tracker gets when it opens a run."""

    project: str
    name: str
    id: str
    config: dict
    folder: pathlib.Path


def open_wandb(run: RunInfo, rewind: int | None) -> Any:
    """Opens a run, new or to be continued. `rewind`: without its rows after this step."""
    import wandb

    if rewind is None:
        resume = {"resume": "allow"}
    else:
        # wandb ignores steps before its last one; only some of its servers can go back
        resume = {"resume_from": f"{run.id}?_step={rewind}"}
    return wandb.init(
        project=run.project,
        name=run.name,
        id=run.id,
        config=run.config,
        dir=str(run.folder),
        **resume,
    )


def open_trackio(run: RunInfo, rewind: int | None) -> Any:
    """Opens a run, new or to be continued. `rewind`: empty, for all rows to be sent again."""
    import trackio

    if rewind is not None:
        # it would draw both rows of a step, and cannot remove single rows
        for existing in trackio.Api().runs(run.project):
            if existing.name == run.id:
                existing.delete()
    return trackio.init(project=run.project, name=run.id, config=run.config, resume="allow")


OPEN: dict[str, Callable[[RunInfo, int | None], Any]] = {
    "wandb": open_wandb,
    "trackio": open_trackio,
}


class Connection(NamedTuple):
    """A tracker's open run, and which rows it has already."""

    run: Any
    rows: int  # the first of metrics.jsonl
    step: int  # and those of steps up to this one


def connect(name: str, info: RunInfo, state: dict, start: int, kept: int) -> Connection:
    """Opens the run. If the launch before was ahead of its last checkpoint, the rows of steps after
    `start` are removed from the tracker, or stay there if it cannot remove them."""
    if state["rows"] <= kept:
        return Connection(OPEN[name](info, None), state["rows"], -1)
    try:
        run = OPEN[name](info, start)
    except Exception as error:
        print(
            f"{name} keeps the rows of steps {start + 1} to {state['step']} of the launch before: "
            f"{error}",
            file=sys.stderr,
        )
        return Connection(OPEN[name](info, None), kept, state["step"])
    return Connection(run, kept if name == "wandb" else 0, -1)


def send(folder: pathlib.Path, start: int, kept: int) -> None:
    """Sends the rows that the tracker does not have, until no row follows."""
    settings = config.read_toml(str(folder / "config.toml"))
    run_name = settings["run"]["name"]
    tracker = settings["log"]["tracker"]
    path = folder / "tracker.json"
    # the process of a killed launch may still be sending
    lock = files.lock(folder / ".tracker.lock", timeout=-1)
    states = json.loads(path.read_bytes()) if path.exists() else {}  # by tracker
    if tracker not in states:
        states[tracker] = {"id": f"{run_name}-{secrets.token_hex(4)}", "rows": 0, "step": 0}
    state = states[tracker]
    files.write_atomic(path, json.dumps(states))

    info = RunInfo(PROJECT, run_name, state["id"], settings, folder)
    run, rows_sent, step_sent = connect(tracker, info, state, start, kept)
    print(f"{tracker}: {getattr(run, 'url', None) or state['id']}", flush=True)
    rows_read = 0
    for rows in steps(folder / "metrics.jsonl"):
        step = rows[0]["step"]
        new = rows[max(0, rows_sent - rows_read) :]
        rows_read += len(rows)
        if new and step > step_sent:
            # written first: after a kill between the two, a missing row is better than a row twice
            state.update(rows=rows_read, step=step)
            files.write_atomic(path, json.dumps(states))
            run.log(scalars(new), step=step)
    run.finish()
    lock.release()


def main(folder: str, start: str, kept: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # they are for the ranks, whose last rows are to be sent, too
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=exit_after_close, daemon=True).start()
    try:
        send(pathlib.Path(folder), int(start), int(kept))
    except BaseException as error:
        fail(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return 0
