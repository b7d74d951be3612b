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
from system.processes import print_error

NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.step-\d{8,}\.tmp")
NO_OPTIMIZER = (
    "holds weights without the state of an optimizer, as ./run_train.sh -m huggingface import makes it: no run can "
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
    """(step, path) of every folder named like a checkpoint, good or bad, in ascending order. With
    links=True those of symlinks with such names instead. Raises ConfigError if the folder cannot
    be read."""
    if not folder.is_dir():
        return []
    steps_and_paths = []
    for entry in folder.iterdir():
        name = NAME.fullmatch(entry.name)
        is_wanted = entry.is_symlink() if links else entry.is_dir() and not entry.is_symlink()
        if name and is_wanted:
            steps_and_paths.append((int(name[1]), entry))
    return sorted(steps_and_paths)


def steps(cfg: config.Config) -> list[int]:
    """Steps of the run's checkpoints, in ascending order. Raises ConfigError if symlinks have later
    steps: a run must not silently start over, or from an older checkpoint."""
    saved = [step for step, _ in step_folders(root(cfg))]
    newest = max(saved, default=-1)
    later_links = [path.name for step, path in step_folders(root(cfg), links=True) if step > newest]
    if later_links:
        raise ConfigError(
            f"{root(cfg)}: {', '.join(later_links)}: links are not followed; move the checkpoints "
            "themselves here, or the links away"
        )
    return saved


def read_state(folder: pathlib.Path) -> dict:
    """state.json: {"step": int, "config": {...}, ...}. Raises CorruptCheckpoint."""
    text = manifest.read_small(folder, STATE, manifest.STATE_LIMIT)
    with contextlib.suppress(TypeError, KeyError, ValueError, RecursionError):
        state = json.loads(text)
        if type(state["step"]) is int and isinstance(state["config"], dict):
            return state
    raise CorruptCheckpoint(f"{folder / STATE}: expected an object with step and config")


def saved_param_dtype(cfg: config.Config) -> str | None:
    """The param_dtype of the run's newest checkpoint whose state can be read, or of the one that
    `resume` names; None without any."""
    resume = resume_option(cfg)
    for step in reversed(steps(cfg)):
        is_import = step == 0
        if is_import or (isinstance(resume, int) and step != resume):
            continue
        with contextlib.suppress(CorruptCheckpoint):
            saved = read_state(path_of(cfg, step))["config"]
            return config.values_of(saved)["parallel.param_dtype"]
    return None


def resume_option(cfg: config.Config) -> str | int | None:
    """checkpoint.resume: "auto", "never" or a step; None without [checkpoint]."""
    return cfg.checkpoint.resume if cfg.checkpoint else None


def problems_of(
    folder: pathlib.Path, share: int = 0, shares: int = 1, hashed: bool = True
) -> list[str]:
    """Everything wrong with a checkpoint, one line each: file, expected, found. Reads every byte
    (hashed=False: only compares sizes). Each of `shares` callers reads its share. Raises
    ConfigError if it cannot be read."""
    try:
        files = manifest.read_manifest(folder)
        parts = []
        for name, entry in sorted(files.items()):
            count = max(1, len(entry["sha256"])) if hashed else 1
            parts += [(folder, name, entry, part, hashed) for part in range(count)]
        problems = manifest.in_threads(problem_of_part, parts[share::shares])
        # a wrong size is reported once, not once per part
        problems = list(dict.fromkeys(filter(None, problems)))
        if problems:
            return problems
        step = read_state(folder)["step"]
    except CorruptCheckpoint as error:
        return [str(error)]
    name = NAME.fullmatch(folder.name)
    if name and int(name[1]) != step:
        return [f"{folder}: expected step {int(name[1])}, found step {step}"]
    return []


def problem_of_part(
    folder: pathlib.Path, name: str, entry: dict, part: int, hashed: bool
) -> str | None:
    """What is wrong with the part-th 64 MiB of a file, by its entry in the manifest."""
    expected_size = entry["size"]
    try:
        size = manifest.size_of(folder, name)
        if size != expected_size:
            return f"{folder / name}: expected {expected_size} bytes, found {size}"
        if not hashed or size == 0:
            return None
        expected_digest = entry["sha256"][part]
        digest = manifest.hash_part(folder, name, part)
    except CorruptCheckpoint as error:
        return str(error)
    if digest == expected_digest:
        return None
    begin = part * PART
    end = min(begin + PART, size)
    return (
        f"{folder / name}: bytes {begin} to {end - 1}: expected SHA-256 {expected_digest}, "
        f"found {digest}"
    )


# fast for a checkpoint of any size
problems_without_hashing = functools.partial(problems_of, hashed=False)


def choose(
    cfg: config.Config,
    saved: list[int],
    problems_with: Callable[[pathlib.Path], list[str]],
    evaluating: bool = False,
) -> tuple[int, dict[int, list[str]]]:
    """(newest good step; problems of the newer ones, by step) of the run's steps(), or of the one
    step that `resume` names. The step is 0 for a run without checkpoints.

    To resume, raises ConfigError if `resume` contradicts what is on disk, or if every checkpoint is
    bad: a run never silently starts over. To evaluate (evaluating=True), if there is no good one.
    """
    corrupt: dict[int, list[str]] = {}
    for step in reversed(candidates(cfg, saved, evaluating)):
        problems = problems_with(path_of(cfg, step))
        if problems:
            corrupt[step] = problems
        elif step or evaluating:
            return step, corrupt
        else:  # step 0 is an import
            raise ConfigError(f"{path_of(cfg, step)}: {NO_OPTIMIZER}")
    if not corrupt:
        return 0, {}
    lines = [problem for problems in corrupt.values() for problem in problems]
    raise ConfigError(
        *lines,
        f"{root(cfg)}: no good checkpoint of {', '.join(map(str, corrupt))}; choose another with "
        "checkpoint.resume, or move the damaged ones away to begin anew",
    )


def candidates(cfg: config.Config, saved: list[int], evaluating: bool) -> list[int]:
    """The steps of `saved` that a run may resume from, or evaluate. Raises ConfigError if `resume`
    contradicts what is on disk."""
    resume = resume_option(cfg)
    if evaluating and not saved:
        raise ConfigError(f"{root(cfg)}: holds no checkpoint to evaluate")
    if saved and not evaluating and resume in (None, "never"):
        setting = 'resume = "never"' if resume else "is off"
        raise ConfigError(
            f"{root(cfg)}: holds checkpoints, but [checkpoint] {setting}; resume from them with "
            'checkpoint.resume = "auto", choose another run.name, or move them away'
        )
    if not isinstance(resume, int):
        return saved
    if resume not in saved:
        steps_there = ", ".join(map(str, saved)) or "none"
        raise ConfigError(
            f"[checkpoint] resume = {resume}: {root(cfg)} has no such checkpoint; it has "
            f"{steps_there}"
        )
    return [resume]


def set_aside(cfg: config.Config, step: int, corrupt: Iterable[int]) -> None:
    """Renames the checkpoints after the step that training resumes from, and the corrupt ones. Rank
    0 only."""
    for other, folder in step_folders(root(cfg)):
        if other in corrupt:
            folder.rename(unused_name(folder, "corrupt"))
        elif other > step:
            folder.rename(unused_name(folder, "superseded"))


def unused_name(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """step-00000100.corrupt, or step-00000100.1.corrupt where that exists, and so on."""
    path = folder.with_name(f"{folder.name}.{ending}")
    number = 0
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}.{number}.{ending}")
    return path


def remove(cfg: config.Config, step: int) -> None:
    """Removes a checkpoint. Renames it first, so that a partly removed one does not look
    complete."""
    shutil.rmtree(path_of(cfg, step).rename(temporary_of(cfg, step)))


def remove_unfinished(cfg: config.Config) -> None:
    """Removes what a killed save or removal left behind. Rank 0 only, while no save is running."""
    if not root(cfg).is_dir():
        return
    for entry in list(root(cfg).iterdir()):
        if TEMPORARY.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)


# How tools find and read a checkpoint: verify, generate, export.


@readable()
def checkpoints_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The folder itself if it is a checkpoint, good or bad, else the checkpoints of the run in it,
    in ascending order. Raises ConfigError if there is none, or the folder cannot be read."""
    holds_checkpoint = (path / STATE).exists() or (path / ".metadata").exists()
    if path.is_dir() and (NAME.fullmatch(path.name) or holds_checkpoint):
        return [path]
    folders = step_folders(path / "checkpoints") or step_folders(path)
    if folders:
        return [folder for _, folder in folders]
    raise ConfigError(f"{path}: is neither a checkpoint nor a run with one")


def find(path: pathlib.Path) -> pathlib.Path:
    """`path` itself if it is a checkpoint, else its run's newest good one. Verifies it, and prints
    to stderr which ones it skips. Raises ConfigError if there is none, or none is good."""
    for folder in reversed(checkpoints_of(path)):
        problems = problems_of(folder)
        if not problems:
            return folder
        for problem in problems:
            print_error(f"corrupt, skipped: {problem}")
    raise ConfigError(f"{path}: no good checkpoint")


def read_config(folder: pathlib.Path, base: str | None = None) -> config.Config:
    """The configuration that a checkpoint was trained with, for using its weights. Drops
    model.init_from, which may be gone or changed, unless adapters need it as their base. `base`:
    the current path of that base. Raises ConfigError."""
    tables = read_state(folder)["config"]
    has_adapters = bool(tables.get("lora"))
    if base and not has_adapters:
        raise ConfigError(f"--base: {folder} has no [lora]: its weights are whole")
    trained_on = None
    model = tables.get("model")
    if isinstance(model, dict):
        if base:
            trained_on = model.get("init_from")
            model["init_from"] = base
        elif not has_adapters:
            model.pop("init_from", None)
    try:
        return config.from_dict(tables, str(folder / STATE), saved=True)
    except ConfigError as error:
        origin = f"{folder / STATE}: [model]"
        if base and all(problem.startswith(origin) for problem in error.problems):
            raise ConfigError(
                f"--base {base}: is another model than {trained_on}, for which {folder} has adapters; "
                "name the folder with that one"
            ) from None
        raise
