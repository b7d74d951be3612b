"""Which checkpoints a run has, what is wrong with them, which one to resume from, and which to keep.
Loads no tensors. root: the folder of a run's checkpoints.

A checkpoint may be a link to a folder, for example on another disk.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterable

import config
from checkpoint import manifest
from checkpoint.manifest import STATE, CorruptCheckpoint
from config import ConfigError

NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.step-(\d{8,})(\.\d+)?\.tmp")
NO_OPTIMIZER = (
    "holds weights without the state of an optimizer, as -m huggingface import makes it: no run can "
    "resume from it; start one from the Hugging Face folder itself, with model.init_from"
)


def root_of(cfg: config.Config) -> pathlib.Path:
    return config.run_folder(cfg.run) / "checkpoints"


def path_of(root: pathlib.Path, step: int) -> pathlib.Path:
    return root / f"step-{step:08d}"


def temporary_of(root: pathlib.Path, step: int) -> pathlib.Path:
    """An unused name for a checkpoint that is being written or removed."""
    return unused_name(root / f".step-{step:08d}", "tmp")


def unused_name(path: pathlib.Path, ending: str) -> pathlib.Path:
    """step-00000100.corrupt, or step-00000100.1.corrupt where that exists, and so on."""
    unused = path.with_name(f"{path.name}.{ending}")
    number = 0
    while os.path.lexists(unused):
        number += 1
        unused = path.with_name(f"{path.name}.{number}.{ending}")
    return unused


def steps(root: pathlib.Path) -> list[int]:
    """Steps of the folders named like checkpoints, good or bad, in ascending order. Raises
    ConfigError if `root` cannot be read."""
    numbers = []
    try:
        for entry in root.iterdir():
            name = NAME.fullmatch(entry.name)
            if name and (entry.is_symlink() or entry.is_dir()):
                numbers.append(int(name[1]))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise manifest.unreadable(root, error) from None
    return sorted(numbers)


def refuse_misplaced(root: pathlib.Path) -> None:
    """Raises ConfigError if a run has no checkpoints in `root`, but nearby, as after a careless copy:
    it would start over."""
    folders = [*root.glob("step-*"), *root.parent.glob("step-*"), *root.glob("checkpoints/step-*")]
    moves = []
    for folder in sorted(folders):
        name = re.fullmatch(r"step-(\d+)", folder.name)
        if name and (folder / STATE).is_file():
            moves.append(shlex.join(["mv", str(folder), str(path_of(root, int(name[1])))]))
    if moves:
        command = " && ".join([shlex.join(["mkdir", "-p", str(root)]), *moves])
        raise ConfigError(
            f"{root}: holds no checkpoint, but others lie nearby, and the run would start over; to "
            f"resume from them: {command}"
        )


def read_state(folder: pathlib.Path) -> dict:
    """state.json: {"step": int, "config": {...}, ...}. Raises CorruptCheckpoint."""
    text = manifest.read_file(folder, STATE)
    with contextlib.suppress(TypeError, KeyError, ValueError, RecursionError):
        state = json.loads(text)
        if type(state["step"]) is int and isinstance(state["config"], dict):
            return state
    raise CorruptCheckpoint(f"{folder / STATE}: expected an object with step and config")


# What is wrong


def wrong_sizes(folder: pathlib.Path) -> list[str]:
    """problems_of() a checkpoint, but only compares sizes."""
    return problems_of(folder, hashed=False)


def problems_of(
    folder: pathlib.Path, share: int = 0, shares: int = 1, hashed: bool = True
) -> list[str]:
    """Everything wrong with a checkpoint, a line each: file, expected, found. Hashes every byte, or
    with hashed=False only compares sizes, which is fast. Of `shares` callers, each reads a share.
    Raises ConfigError and UnreadableCheckpoint if the checkpoint cannot be read."""
    try:
        parts = []
        for name, entry in sorted(manifest.read_manifest(folder).items()):
            count = max(1, len(entry["sha256"])) if hashed else 1
            parts += [(folder, name, entry, part, hashed) for part in range(count)]
        problems = manifest.in_threads(problem_of_part, parts[share::shares])
        problems = list(dict.fromkeys(filter(None, problems)))  # all parts report a wrong size
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
    """What is wrong with the part-th 64 MiB of a file, compared with its entry in the manifest."""
    try:
        size = manifest.size_of(folder, name)
        if size != entry["size"]:
            return f"{folder / name}: expected {entry['size']} bytes, found {size}"
        if not hashed or size == 0:
            return None
        digest = manifest.hash_part(folder, name, part)
    except CorruptCheckpoint as error:
        return str(error)
    expected = entry["sha256"][part]
    if digest == expected:
        return None
    begin = part * manifest.PART
    end = min(begin + manifest.PART, size) - 1
    return f"{folder / name}: bytes {begin} to {end}: expected SHA-256 {expected}, found {digest}"


# Where to resume


def choose(
    root: pathlib.Path,
    saved: list[int],
    settings: config.Checkpoint | None,
    problems_with: Callable[[pathlib.Path], list[str]],
    evaluating: bool = False,
) -> tuple[int, dict[int, list[str]]]:
    """(newest good step, problems of newer steps). Chooses among the steps in `saved`, or takes the
    one that `resume` names. The step is 0 for a run without checkpoints. settings: [checkpoint].

    Raises ConfigError if `resume` contradicts what is on disk, or if every checkpoint is bad: a run
    never silently starts over. With evaluating=True, raises it if there is no good checkpoint.
    """
    corrupt: dict[int, list[str]] = {}
    for step in reversed(candidates(root, saved, settings, evaluating)):
        problems = problems_with(path_of(root, step))
        if problems:
            corrupt[step] = problems
        elif step or evaluating:
            return step, corrupt
        else:  # step 0: imported
            raise ConfigError(f"{path_of(root, step)}: {NO_OPTIMIZER}")
    if not corrupt:
        return 0, {}
    lines = [problem for problems in corrupt.values() for problem in problems]
    raise ConfigError(
        *lines,
        f"{root}: no good checkpoint of {', '.join(map(str, corrupt))}; choose another with "
        "checkpoint.resume, or move the damaged ones away to begin anew",
    )


def candidates(
    root: pathlib.Path, saved: list[int], settings: config.Checkpoint | None, evaluating: bool
) -> list[int]:
    """The steps in `saved` that a run may resume from, or evaluate. Raises ConfigError if `resume`
    contradicts what is on disk."""
    resume = settings.resume if settings else None
    if evaluating and not saved:
        raise ConfigError(f"{root}: holds no checkpoint to evaluate")
    if saved and not evaluating and resume in (None, "never"):
        setting = 'resume = "never"' if resume else "is off"
        raise ConfigError(
            f"{root}: holds checkpoints, but [checkpoint] {setting}; resume from them with "
            'checkpoint.resume = "auto", choose another run.name, or move them away'
        )
    if not isinstance(resume, int):
        return saved
    if resume not in saved:
        stored = ", ".join(map(str, saved)) or "none"
        raise ConfigError(
            f"[checkpoint] resume = {resume}: {root} has no such checkpoint; it has {stored}"
        )
    return [resume]


# What to keep. Rank 0 only, under the run's lock.


def set_aside_unused(root: pathlib.Path, step: int, corrupt: Iterable[int]) -> list[str]:
    """Renames corrupt checkpoints, and those later than `step`, from which training resumes. Returns
    a line about the latter, if there are any."""
    superseded = []
    for other in steps(root):
        folder = path_of(root, other)
        if other in corrupt:
            folder.rename(unused_name(folder, "corrupt"))
        elif other > step:
            superseded.append(folder.rename(unused_name(folder, "superseded")).name)
    if not superseded:
        return []
    names = ", ".join(superseded)
    return [f"{root}: resuming after step {step}, set aside, and never removed: {names}"]


def remove(root: pathlib.Path, step: int) -> list[str]:
    """Removes a checkpoint. Renames it first, so that a partly removed one does not look complete.
    Returns problems."""
    return remove_folder(path_of(root, step), temporary_of(root, step))


def remove_folder(folder: pathlib.Path, new_name: pathlib.Path | None = None) -> list[str]:
    """Removes a folder, or a link to one, and may rename it first. Returns problems: on NFS, another
    machine may have a file in it open."""
    try:
        if new_name:
            folder = folder.rename(new_name)
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        return [f"{folder}: cannot be removed: {error.strerror}"]
    return []


def remove_unfinished(root: pathlib.Path) -> list[str]:
    """Removes what a killed save or removal left behind. Call it while no save is running. Returns
    problems."""
    problems = []
    for entry in sorted(root.iterdir()) if root.is_dir() else []:
        if TEMPORARY.fullmatch(entry.name):
            problems += remove_folder(entry)
    return problems
