"""Options of earlier versions: a run that was saved with them resumes, and a new run is told what to write."""

import logging
import pathlib
from typing import Any

from schema import Given, flatten, place, toml

log = logging.getLogger("train")


def current(name: str, value: Any) -> tuple[str, Any]:
    """The name and value that an option of an earlier version has in this one."""
    if name == "parallel.unsharded":
        return "parallel.replicated", value
    if name == "parallel.reshard_after_forward" and type(value) is int and value > 1:
        return name, True  # until 2026-11 an integer resharded to that many ranks
    return name, value


def renew(given: Given) -> dict[str, str]:
    """Gives options their current names and values. Returns a problem for each, by its current name: of a new run."""
    found = {}
    for name, value in [*given.raw.items()]:
        now, new = current(name, value)
        if (now, new) != (name, value):
            origin = given.origins[now] = given.origins.pop(name)
            del given.raw[name], given.problems[name]  # unknown, or of the wrong type
            given.add(now, new)
            found[now] = (
                f"{origin}: {place(name)} = {toml(value)}: is an earlier version's, with which only a run "
                f"that has checkpoints resumes; write {now.partition('.')[2]} = "
                f"{toml(given.values.get(now))}"
            )
    return found


def log_changes(checkpoint: pathlib.Path, saved: dict) -> None:
    """Warns of values that a checkpoint was trained with, by its tables, and that this version does not have."""
    if changed := [
        f"{name} = {toml(value)}, and resumes with {toml(current(name, value)[1])}"
        for name, value in flatten(saved).items()
        if current(name, value)[1] != value
    ]:
        log.warning("%s was trained by an earlier version with %s", checkpoint, "; ".join(changed))
