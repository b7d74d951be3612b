"""Sends a run's rows to Weights & Biases or Trackio (`log.tracker`), which continue a run by its id.

tracker-NAME.json in the run's folder stores that id, and the last row that was sent: a launch that
resumes from an earlier step sends the rows after it. follow.py starts this.
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
    """Sends those of a run's rows that its tracker does not have, if it has one."""
    options = config.read_toml(str(folder / "config.toml"))
    name = options["log"].get("tracker")
    if name is None:
        return
    lock = system.lock(folder / ".tracker.lock")  # raises if another process sends already
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
        # first: after a kill between the two, a missing row is better than a row twice
        state["sent"] = position
        system.write_atomic(path, json.dumps(state))
        run.log(numbers(row), step=row["step"])
    run.finish()
    lock.release()


def open_run(name: str, identity: str, options: dict, folder: str) -> Any:
    """The tracker's run, new or continued."""
    package = importlib.import_module(name)  # wandb or trackio
    identified: dict[str, str] = {"name": identity}
    if name == "wandb":
        identified = {"id": identity, "name": options["run"]["name"], "dir": folder}
    return package.init(project=PROJECT, config=options, resume="allow", **identified)


def numbers(row: dict) -> dict[str, float]:
    """The numbers of a row by name, as TensorBoard gets them: train/loss."""
    values = {}
    for key, value in config.flatten(row).items():
        if isinstance(value, int | float) and key not in ("step", "steps", "batch_digest"):
            values[f"{row['kind']}/{key}"] = value
    return values
