"""Sends a run's rows to Weights & Biases or Trackio (`log.tracker`).

A process beside rank 0 follows metrics.jsonl. So a tracker that is slow, hangs or fails costs training nothing, and the
next launch sends what this one could not. tracker.json in the run's folder has the id of the run there, by which every
launch continues it, and how far the rows were sent.
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
from typing import Any, NoReturn

import files
import schema

PROCESS = "from extras.reports.tracker import main; sys.exit(main(*sys.argv[1:]))"
CLOSE_SECONDS = 5.0  # for the last rows, at the end of a run
HELD_SECONDS = 5.0  # an evaluation that takes no longer is sent with the row of its step

log = logging.getLogger("train")


class Tracker:
    """Rank 0's end. Whatever becomes of the process, it costs one warning."""

    def __init__(self, folder: pathlib.Path, name: str, start: int, kept: int):
        """Rows of steps after `start` were dropped from metrics.jsonl; `kept` are left."""
        self.name, self.log = name, folder / "logs" / "tracker.log"
        with self.log.open("ab") as output:
            # nothing is ever written to its stdin: once this is closed, or this process has died, no row follows
            self.process = subprocess.Popen(
                [*files.python_command(PROCESS), folder, str(start), str(kept)],
                stderr=output,
                stdin=subprocess.PIPE,
            )
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        if self.process.wait():
            *_, last = ["no output", *self.log.read_text(errors="replace").splitlines()]
            log.warning(
                "%s lacks rows of this launch, which the next one sends: %s (%s)",
                self.name,
                last,
                self.log,
            )

    def close(self) -> None:
        """Waits until the last rows are sent, CLOSE_SECONDS at most."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.thread.join(CLOSE_SECONDS + 1)


# What the process does


closed = threading.Event()


def end_in_time() -> None:
    """Waits for the end of stdin, and ends this process some time later, even if the tracker hangs."""
    sys.stdin.read()
    closed.set()
    time.sleep(CLOSE_SECONDS)
    fail(f"the last rows were not taken within {CLOSE_SECONDS:g} s")


def fail(text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    os._exit(1)  # runs no hook of the tracker's, which may hang


def follow(path: pathlib.Path) -> Iterator[dict | None]:
    """Yields the rows of metrics.jsonl, and None whenever there is none to read yet; ends when no row follows."""
    rest, ended = b"", False
    with path.open("rb") as file:
        while True:
            block = file.read(1 << 20)
            *lines, rest = (rest + block).split(b"\n")
            yield from map(json.loads, lines)
            if not block:
                if ended:
                    return
                yield None
                ended = closed.wait(0.5)


def steps(path: pathlib.Path) -> Iterator[list[dict]]:
    """Yields the rows of a step together, but holds them no longer than HELD_SECONDS."""
    held: list[dict] = []
    since = 0.0
    for row in follow(path):
        if held and (
            time.monotonic() - since > HELD_SECONDS
            if row is None
            else row["step"] != held[0]["step"]
        ):
            yield held
            held = []
        if row is not None:
            held, since = [*held, row], since if held else time.monotonic()
    if held:
        yield held


def scalars(row: dict) -> dict[str, float]:
    """A row's numbers by name, as TensorBoard gets them: train/loss."""
    return {
        f"{row['kind']}/{key}": value
        for key, value in schema.flatten(row).items()
        if isinstance(value, int | float) and key not in ("step", "batch_digest")
    }


def open_wandb(
    project: str, name: str, run: str, settings: dict, folder: pathlib.Path, rewind: int | None
) -> Any:
    import wandb

    given: dict[str, Any] = {
        "project": project,
        "name": name,
        "id": run,
        "config": settings,
        "dir": str(folder),
    }
    if rewind is not None:
        # wandb ignores steps before its last one; only some of its servers can go back
        return wandb.init(**given, resume_from=f"{run}?_step={rewind}")
    return wandb.init(**given, resume="allow")


def open_trackio(
    project: str, name: str, run: str, settings: dict, folder: pathlib.Path, rewind: int | None
) -> Any:
    import trackio

    if rewind is not None:
        # it would draw both rows of a step, and can remove a run only as a whole
        for found in trackio.Api().runs(project):
            if found.name == run:
                found.delete()
    return trackio.init(project=project, name=run, config=settings, resume="allow")


OPEN: dict[str, Callable] = {"wandb": open_wandb, "trackio": open_trackio}


def send(folder: pathlib.Path, start: int, kept: int) -> None:
    settings = schema.read_toml(str(folder / "config.toml"))
    name, project = settings["log"]["tracker"], settings["log"].get("project", "fsdp2")
    path = folder / "tracker.json"
    # a killed launch's process may still be sending
    held = files.lock(folder / ".tracker.lock", timeout=-1)
    every = json.loads(path.read_bytes()) if path.exists() else {}
    state = every.setdefault(
        name, {"id": f"{settings['run']['name']}-{secrets.token_hex(4)}", "rows": 0, "step": 0}
    )
    files.write_atomic(path, json.dumps(every))
    about = project, settings["run"]["name"], state["id"], settings, folder
    sent, skipped = state["rows"], -1  # rows that are there already, or are of steps up to this one
    if sent > kept:  # the launch before was ahead of its last checkpoint
        try:
            run = OPEN[name](*about, rewind=start)
            sent = kept if name == "wandb" else 0
        except Exception as error:
            print(
                f"{name} keeps the rows of steps {start + 1} to {state['step']} of the launch before: {error}",
                file=sys.stderr,
            )
            run, sent, skipped = OPEN[name](*about, rewind=None), kept, state["step"]
    else:
        run = OPEN[name](*about, rewind=None)
    print(f"{name}: {getattr(run, 'url', None) or state['id']}", flush=True)
    seen = 0
    for rows in steps(folder / "metrics.jsonl"):
        step, new = rows[0]["step"], rows[max(0, sent - seen) :]
        seen += len(rows)
        if new and step > skipped:
            # written first: after a kill between the two, a missing row is better than a row twice
            state.update(rows=seen, step=step)
            files.write_atomic(path, json.dumps(every))
            run.log({key: value for row in new for key, value in scalars(row).items()}, step=step)
    run.finish()
    held.release()


def main(folder: str, start: str, kept: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # for the ranks, whose last rows are sent, too
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_in_time, daemon=True).start()
    try:
        send(pathlib.Path(folder), int(start), int(kept))
    except BaseException as error:
        fail(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return 0
