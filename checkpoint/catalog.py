"""Which checkpoints a run has, which one to resume from, and which to keep. Loads no tensors."""

import contextlib
import functools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator

import config
from checkpoint import manifest
from checkpoint.manifest import PART, STATE, CorruptCheckpoint
from config import ConfigError
from files import print_error

NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.step-\d{8,}\.tmp")
NO_OPTIMIZER = (
    "holds weights without the state of an optimizer, as python -m huggingface import makes it: no run can "
    "resume from it; start one from the Hugging Face folder itself, with model.init_from"
)


def root(cfg: config.Config) -> pathlib.Path:
    return config.run_folder(cfg) / "checkpoints"


def path_of(cfg: config.Config, step: int) -> pathlib.Path:
    return root(cfg) / f"step-{step:08d}"


def temporary_of(cfg: config.Config, step: int) -> pathlib.Path:
    return root(cfg) / f".step-{step:08d}.tmp"


@contextlib.contextmanager
def readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None


@readable()
def step_folders(folder: pathlib.Path, links: bool = False) -> list[tuple[int, pathlib.Path]]:
    """(step, path) of every folder named like a checkpoint, good or bad, ascending; links=True: of symlinks with such
    names instead. Raises ConfigError if the folder cannot be read."""
    named = [
        (NAME.fullmatch(entry.name), entry)
        for entry in (folder.iterdir() if folder.is_dir() else ())
    ]
    return sorted(
        (int(name[1]), entry)
        for name, entry in named
        if name and entry.is_symlink() == links and (links or entry.is_dir())
    )


def steps(cfg: config.Config) -> list[int]:
    """Steps of the run's checkpoints, ascending. Raises ConfigError if symlinks come after them: neither a fresh start
    nor going back must be silent."""
    found = [step for step, _ in step_folders(root(cfg))]
    if links := [
        path.name
        for step, path in step_folders(root(cfg), links=True)
        if step > max(found, default=-1)
    ]:
        raise ConfigError(
            f"{root(cfg)}: {', '.join(links)}: links are not followed; move the checkpoints themselves "
            "here, or the links away"
        )
    return found


def read_state(folder: pathlib.Path) -> dict:
    """state.json: {"step": int, "config": {...}, ...}. Raises CorruptCheckpoint."""
    text = manifest.read_small(folder, STATE, manifest.STATE_LIMIT)
    with contextlib.suppress(TypeError, KeyError, ValueError, RecursionError):
        state = json.loads(text)
        if type(state["step"]) is int and isinstance(state["config"], dict):
            return state
    raise CorruptCheckpoint(f"{folder / STATE}: expected an object with step and config")


def saved_param_dtype(cfg: config.Config) -> str | None:
    """The param_dtype of the run's newest checkpoint whose state can be read, or of the one that `resume` names; None
    without any."""
    resume = cfg.checkpoint.resume if cfg.checkpoint else None
    for step in reversed(steps(cfg)):
        if step and (step == resume or not isinstance(resume, int)):
            with contextlib.suppress(CorruptCheckpoint):
                return config.SCHEMA.complete(read_state(path_of(cfg, step))["config"])[
                    "parallel.param_dtype"
                ]
    return None


def problems_of(
    folder: pathlib.Path, share: int = 0, shares: int = 1, hashed: bool = True
) -> list[str]:
    """Everything wrong with a checkpoint, one line each: file, expected, found. Reads every byte (hashed=False: only
    compares sizes); each of `shares` callers reads its share. Raises ConfigError if it cannot be read."""

    def check(name: str, part: int) -> str | None:
        size, digests = files[name]["size"], files[name]["sha256"]
        try:
            if (found := manifest.size_of(folder, name)) != size:
                return f"{folder / name}: expected {size} bytes, found {found}"
            if (
                hashed
                and size
                and (found := manifest.hash_part(folder, name, part)) != digests[part]
            ):
                return (
                    f"{folder / name}: bytes {part * PART} to {min((part + 1) * PART, size) - 1}: expected SHA-256 "
                    f"{digests[part]}, found {found}"
                )
        except CorruptCheckpoint as error:
            return str(error)

    try:
        files = manifest.read_manifest(folder)
        parts = [
            (name, part)
            for name, entry in sorted(files.items())
            for part in range(max(1, len(entry["sha256"])) if hashed else 1)
        ]
        problems = filter(None, manifest.in_threads(check, parts[share::shares]))
        if problems := list(dict.fromkeys(problems)):
            # a wrong size is reported once, not once per part
            return problems
        name, step = NAME.fullmatch(folder.name), read_state(folder)["step"]
    except CorruptCheckpoint as error:
        return [str(error)]
    return (
        [f"{folder}: expected step {int(name[1])}, found step {step}"]
        if name and int(name[1]) != step
        else []
    )


# fast for a checkpoint of any size
problems_without_hashing = functools.partial(problems_of, hashed=False)


def choose(
    cfg: config.Config,
    found: list[int],
    problems_with: Callable[[pathlib.Path], list[str]],
    evaluating: bool = False,
) -> tuple[int, dict[int, list[str]]]:
    """(the newest good step, 0 without any checkpoint; the problems of newer ones, by step): of the run's steps(), or
    of the step alone that `resume` names.

    To resume: raises ConfigError if `resume` contradicts what is on disk, or if every checkpoint is bad: a run never
    silently starts over. To evaluate (evaluating=True): if there is no good one.
    """
    resume = cfg.checkpoint.resume if cfg.checkpoint else None
    if evaluating and not found:
        raise ConfigError(f"{root(cfg)}: holds no checkpoint to evaluate")
    if found and not evaluating and resume in (None, "never"):
        setting = 'resume = "never"' if resume else "is off"
        raise ConfigError(
            f"{root(cfg)}: holds checkpoints, but [checkpoint] {setting}; resume from them with "
            'checkpoint.resume = "auto", choose another run.name, or move them away'
        )
    if isinstance(resume, int):
        if resume not in found:
            raise ConfigError(
                f"[checkpoint] resume = {resume}: {root(cfg)} has no such checkpoint; it has "
                f"{', '.join(map(str, found)) or 'none'}"
            )
        found = [resume]
    bad: dict[int, list[str]] = {}
    for step in reversed(found):
        if problems := problems_with(path_of(cfg, step)):
            bad[step] = problems
        elif step or evaluating:
            return step, bad
        else:  # step 0 is an import
            raise ConfigError(f"{path_of(cfg, step)}: {NO_OPTIMIZER}")
    if bad:
        raise ConfigError(
            *(problem for problems in bad.values() for problem in problems),
            (
                f"{root(cfg)}: no good checkpoint of {', '.join(map(str, bad))}; choose another with "
                f"checkpoint.resume, or "
                "move the damaged ones away to begin anew"
            ),
        )
    return 0, {}


def set_aside(cfg: config.Config, step: int, bad: Iterable[int]) -> None:
    """Renames the checkpoints after the step that training resumes from, and the bad ones. Rank 0 only."""
    for other, folder in step_folders(root(cfg)):
        if other > step or other in bad:
            ending, n = "corrupt" if other in bad else "superseded", 0
            while (
                target := folder.with_name(f"{folder.name}{f'.{n}' if n else ''}.{ending}")
            ).exists():
                n += 1
            folder.rename(target)


def remove(cfg: config.Config, step: int) -> None:
    """Removes a checkpoint. Renames it first, so that a partly removed one does not look complete."""
    shutil.rmtree(path_of(cfg, step).rename(temporary_of(cfg, step)))


def remove_unfinished(cfg: config.Config) -> None:
    """Removes what a killed save or removal left behind. Rank 0 only, while no save is running."""
    for entry in list(root(cfg).iterdir()) if root(cfg).is_dir() else ():
        if TEMPORARY.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)


# How tools find and read a checkpoint: verify, generate, export.


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
