"""How tools find and read a checkpoint: verify, generate, export."""

import pathlib

import config
from checkpoint.catalog import NAME, problems_of, read_state, readable, step_folders
from checkpoint.manifest import STATE
from config import ConfigError
from files import print_error


@readable()
def checkpoints_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The folder itself if it is a checkpoint, good or bad, else the checkpoints of the run in it, ascending. Raises
    ConfigError if there is none, or the folder cannot be read."""
    if path.is_dir() and (
        NAME.fullmatch(path.name) or (path / STATE).exists() or (path / ".metadata").exists()
    ):
        return [path]
    if found := step_folders(path / "checkpoints") or step_folders(path):
        return [folder for _, folder in found]
    raise ConfigError(f"{path}: is neither a checkpoint nor a run with one")


def find(path: pathlib.Path) -> pathlib.Path:
    """`path` itself if it is a checkpoint, else its run's newest good one; verifies it and prints skipped ones to
    stderr. Raises ConfigError if there is none, or none is good."""
    for folder in reversed(checkpoints_of(path)):
        if not (problems := problems_of(folder)):
            return folder
        for problem in problems:
            print_error(f"corrupt, skipped: {problem}")
    raise ConfigError(f"{path}: no good checkpoint")


def read_config(folder: pathlib.Path, base: str | None = None) -> config.Config:
    """The configuration that a checkpoint was trained with, for using its weights. Drops model.init_from, which may be
    gone or changed, unless adapters need it as their base. `base`: the current path of that base.
    Raises ConfigError."""
    tables = read_state(folder)["config"]
    if base and not tables.get("lora"):
        raise ConfigError(f"--base: {folder} has no [lora]: its weights are whole")
    trained_on = None
    if isinstance(model := tables.get("model"), dict):
        trained_on = model.pop("init_from", None) if base or not tables.get("lora") else None
        if base:
            model["init_from"] = base
    try:
        return config.from_dict(tables, str(folder / STATE), saved=True)
    except ConfigError as error:
        if base and all(
            problem.startswith(f"{folder / STATE}: [model]") for problem in error.problems
        ):
            raise ConfigError(
                f"--base {base}: is another model than {trained_on}, for which {folder} has adapters; "
                "name the folder with that one"
            ) from None
        raise
