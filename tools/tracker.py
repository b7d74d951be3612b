"""Sends a run's rows to Weights & Biases or Trackio (`log.tracker`). follow.py starts this.

tracker-NAME.json in the run's folder stores the tracker's id of the run, so that later launches
continue it. The file also stores the last row sent. A launch that resumes from an earlier step
sends only the rows after that row.
"""

import importlib
import json
import pathlib
import secrets
from collections.abc import Iterable
from typing import Any

import config
import system
from system import print_line

PROJECT = "fsdp2"


def send(folder: pathlib.Path, rows: Iterable[dict]) -> None:
    """Sends the rows that the run's tracker does not have yet. Does nothing without a tracker."""
    options = config.read_toml(str(folder / "config.toml"))
    name = options["log"].get("tracker")
    if name is None:
        return
    lock = system.lock(folder / ".tracker.lock")  # raises if another process is sending
    path = folder / f"tracker-{name}.json"
    new = {"id": f"{options['run']['name']}-{secrets.token_hex(4)}", "sent": [0, False]}
    state: dict[str, Any] = system.read_json(path) or new
    system.write_atomic(path, json.dumps(state))
    run = open_run(name, state["id"], options, str(folder))
    print_line(f"{name}: {getattr(run, 'url', None) or state['id']}")
    for row in rows:
        position = [row["step"], row["kind"] == "eval"]  # the evaluation of a step comes last
        if position <= state["sent"]:
            continue
        # Record the row before sending it: if a kill separates the two, a missing row is better
        # than a duplicate.
        state["sent"] = position
        system.write_atomic(path, json.dumps(state))
        run.log(numbers(row), step=row["step"])
    run.finish()
    lock.release()


def open_run(name: str, identity: str, options: dict, folder: str) -> Any:
    """Starts the tracker's run, or continues it."""
    package = importlib.import_module(name)  # wandb or trackio
    identified: dict[str, str] = {"name": identity}
    if name == "wandb":
        identified = {"id": identity, "name": options["run"]["name"], "dir": folder}
    return package.init(project=PROJECT, config=options, resume="allow", **identified)


def numbers(row: dict) -> dict[str, float]:
    """The numbers of a row, under the same names as in TensorBoard, such as train/loss."""
    values = {}
    for key, value in config.flatten(row).items():
        if isinstance(value, int | float) and key not in ("step", "steps", "batch_digest"):
            values[f"{row['kind']}/{key}"] = value
    return values
