"""How tools such as verify, generate and export find and read a checkpoint. Training does not import
this."""

import pathlib
from collections.abc import Callable
from typing import Any

import config
from checkpoint import catalog
from checkpoint.manifest import METADATA, STATE
from config import ConfigError
from system import print_error


def checkpoints_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints of a run's folder, in ascending order, or only `path` if it is a checkpoint. They
    may be bad. Raises ConfigError if there is none, or the folder cannot be read."""
    is_checkpoint = (path / STATE).exists() or (path / METADATA).exists()
    if path.is_dir() and (catalog.NAME.fullmatch(path.name) or is_checkpoint):
        return [path]
    for root in (path / "checkpoints", path):
        folders = [catalog.path_of(root, step) for step in catalog.steps(root)]
        if folders:
            return folders
    raise ConfigError(f"{path}: is neither a checkpoint nor a run with one")


def read_newest(path: pathlib.Path, read: Callable[[pathlib.Path], Any]) -> Any:
    """Calls read() with the newest good one of checkpoints_of(path), and returns its result. Verifies
    checkpoints, and prints which it skips. Raises ConfigError if none is good."""
    for folder in reversed(checkpoints_of(path)):
        problems = catalog.problems_of(folder)
        if not problems:
            return read(folder)
        for problem in problems:
            print_error(f"corrupt, skipped: {problem}")
    raise ConfigError(f"{path}: no good checkpoint")


def read_config(folder: pathlib.Path, base: str | None = None) -> config.Config:
    """The configuration that a checkpoint was trained with, to use its weights. Drops model.init_from,
    which may have moved or changed, unless it is the base of adapters. base: where this base is now.
    Raises ConfigError."""
    tables = catalog.read_state(folder)["config"]
    if base and not tables.get("lora"):
        raise ConfigError(f"--base: {folder} has no [lora]: its weights are whole")
    model = tables.get("model")
    if isinstance(model, dict) and base:
        model["init_from"] = base
    elif isinstance(model, dict) and not tables.get("lora"):
        model.pop("init_from", None)
    return config.from_resolved(tables, str(folder / STATE))
