"""How tools find and read a checkpoint: verify, generate, export. Training imports none of this."""

import pathlib
from collections.abc import Callable
from typing import Any

import config
from checkpoint import catalog
from checkpoint.manifest import METADATA, STATE
from config import ConfigError
from system import print_error


def checkpoints_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The folder itself if it is a checkpoint, good or bad, else the checkpoints of the run in it,
    in ascending order. Raises ConfigError if there is none, or the folder cannot be read."""
    is_checkpoint = (path / STATE).exists() or (path / METADATA).exists()
    if path.is_dir() and (catalog.NAME.fullmatch(path.name) or is_checkpoint):
        return [path]
    for root in (path / "checkpoints", path):
        folders = [catalog.path_of(root, step) for step in catalog.steps(root)]
        if folders:
            return folders
    raise ConfigError(f"{path}: is neither a checkpoint nor a run with one")


def read_newest(path: pathlib.Path, read: Callable[[pathlib.Path], Any]) -> Any:
    """read(`path`) if that is a checkpoint, else read(its run's newest good one). Verifies it, and
    prints to stderr which ones it skips. Raises ConfigError if there is none, or none is good."""
    for folder in reversed(checkpoints_of(path)):
        problems = catalog.problems_of(folder)
        if not problems:
            return read(folder)
        for problem in problems:
            print_error(f"corrupt, skipped: {problem}")
    raise ConfigError(f"{path}: no good checkpoint")


def read_config(folder: pathlib.Path, base: str | None = None) -> config.Config:
    """The configuration that a checkpoint was trained with, for using its weights. Drops
    model.init_from, which may be gone or changed, unless adapters need it as their base. `base`:
    the current path of that base. Raises ConfigError."""
    tables = catalog.read_state(folder)["config"]
    if base and not tables.get("lora"):
        raise ConfigError(f"--base: {folder} has no [lora]: its weights are whole")
    model = tables.get("model")
    if isinstance(model, dict) and base:
        model["init_from"] = base
    elif isinstance(model, dict) and not tables.get("lora"):
        model.pop("init_from", None)
    return config.from_resolved(tables, str(folder / STATE))
