"""Which checkpoints a run has, which one to go on from, which stay. Reads no tensors."""

import contextlib
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator

import config
import options
from checkpoint.manifest import MANIFEST, CorruptCheckpoint, check_sizes, read_json, read_manifest, verify
from config import ConfigError

STATE, STATE_LIMIT = "state.json", 2**20  # bytes
NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.step-\d{8,}\.tmp")
# What decides weights and data order. The rest (steps, intervals, ranks, precision, learning rate) may change.
GUARDED = re.compile(r"model\..*|data\.(?!path$).*|run\.seed|train\.(seq_len|global_batch_size)")

# What another preparation of the data follows from: who allows it to change allows that.
PREPARED = re.compile(r"data\.(sources?|subset|split|text_field|tokenizer|max_tokens)|model\.vocab_size")
# What decides the outputs of given weights: an evaluation under another would look right and be wrong.
SAME_OUTPUTS = re.compile(r"model\.(?!init_from$|freeze$).*|data\.tokenizer")

NO_OPTIMIZER = ("holds weights without the state of an optimizer, as python -m model.hf import makes it: no run can go "
                "on from it; start one from the Hugging Face folder itself, with model.init_from")


def root(cfg: config.Config) -> pathlib.Path:
    return config.run_folder(cfg) / "checkpoints"


def path_of(cfg: config.Config, step: int) -> pathlib.Path:
    return root(cfg) / f"step-{step:08d}"


def temporary_of(cfg: config.Config, step: int) -> pathlib.Path:
    return root(cfg) / f".step-{step:08d}.tmp"


@contextlib.contextmanager
def _told(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None


def step_folders(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """(step, path), ascending, of all that is named as a checkpoint, good or bad. Links and files are none of ours.
    Raises ConfigError where the folder cannot be read."""
    with _told(folder):
        named = [(NAME.fullmatch(entry.name), entry) for entry in (folder.iterdir() if folder.is_dir() else ())]
        return sorted((int(name[1]), entry) for name, entry in named
                      if name and entry.is_dir() and not entry.is_symlink())


def steps(cfg: config.Config) -> list[int]:
    """Raises ConfigError where there are links to checkpoints and no checkpoint: not a fresh start, unasked."""
    found = [step for step, _ in step_folders(root(cfg))]
    links = [] if found or not root(cfg).is_dir() else [
        entry.name for entry in root(cfg).iterdir() if NAME.fullmatch(entry.name) and entry.is_symlink()]
    if links:
        raise ConfigError(f"{root(cfg)}: {', '.join(sorted(links))}: links are not followed; move the checkpoints "
                          "themselves here, or the links away")
    return found


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Whether a folder was made to be one, good or bad. Raises ConfigError where it cannot be read."""
    with _told(folder):
        return folder.is_dir() and bool(NAME.fullmatch(folder.name) or any(
            (folder / name).exists() for name in (STATE, ".metadata")))


def read_state(folder: pathlib.Path) -> dict:
    """state.json: {"step": int, "config": {...}, ...}. Raises ConfigError."""
    try:
        return _state(folder)
    except CorruptCheckpoint as error:
        raise ConfigError(str(error)) from None


def _state(folder: pathlib.Path) -> dict:
    state, _ = read_json(folder, STATE, STATE_LIMIT)
    if not (isinstance(state, dict) and type(state.get("step")) is int and isinstance(state.get("config"), dict)):
        raise CorruptCheckpoint(f"{folder / STATE}: expected an object with step and config")
    return state


def read_config(folder: pathlib.Path) -> config.Config:
    """The configuration that a checkpoint was made with, to use its weights: where they once came from
    (model.init_from) is left out, and that folder may be gone or changed. Raises ConfigError."""
    tables = read_state(folder)["config"]
    if isinstance(model := tables.get("model"), dict):
        tables = {**tables, "model": {key: value for key, value in model.items() if key != "init_from"}}
    return config.from_dict(tables, str(folder / STATE))


def at_first_sight(folder: pathlib.Path) -> list[str]:
    """What is wrong with a checkpoint, short of hashing its files: in no time, whatever its size."""
    try:
        files = read_manifest(folder)
        if problems := [f"{folder / MANIFEST}: {name} is not in it" for name in (STATE, ".metadata")
                        if name not in files] or list(check_sizes(folder, files).values()):
            return problems
        step = _state(folder)["step"]
    except CorruptCheckpoint as error:
        return [str(error)]
    named = NAME.fullmatch(folder.name)
    return [f"{folder}: expected step {int(named[1])}, found step {step}"] if named and int(named[1]) != step else []


def problems_of(folder: pathlib.Path, share: int = 0, shares: int = 1) -> list[str]:
    """All that is wrong with a checkpoint, every byte of it read; of `shares` callers each reads its share."""
    return verify(folder, share, shares) or at_first_sight(folder)


def choose(cfg: config.Config, found: list[int], problems_with: Callable[[pathlib.Path], list[str]]
           ) -> tuple[int, dict[int, list[str]]]:
    """(the step to go on from, 0 for none; what is wrong with those that were passed over).

    `found`: the run's steps(), as one rank has seen them. Raises ConfigError where what `resume` says does not fit
    what is there, and where all are bad: a run never begins anew unasked.
    """
    folder = root(cfg)
    if cfg.checkpoint is None:
        if found:
            raise ConfigError(f"{folder}: holds checkpoints, but [checkpoint] is off; leave it on to go on from them, "
                              "choose another run.name, or move them away")
        return 0, {}
    resume = cfg.checkpoint.resume
    if resume == "never" and found:
        raise ConfigError(f'[checkpoint] resume = "never": {folder} holds checkpoints; choose another run.name, or '
                          "move them away")
    if isinstance(resume, int) and resume not in found:
        raise ConfigError(f"[checkpoint] resume = {resume}: {folder} has no such checkpoint; it has "
                          f"{', '.join(map(str, found)) or 'none'}")
    step, bad = newest_good(cfg, [resume] if isinstance(resume, int) else found, problems_with)
    if step == 0 and 0 in found:
        raise ConfigError(f"{path_of(cfg, 0)}: {NO_OPTIMIZER}")
    return step, bad


def newest_good(cfg: config.Config, found: list[int], problems_with: Callable[[pathlib.Path], list[str]]
                ) -> tuple[int, dict[int, list[str]]]:
    """(the highest step without problems, the problems of those above it); (0, {}) where there is none at all."""
    bad: dict[int, list[str]] = {}
    for step in reversed(found):
        if not (problems := problems_with(path_of(cfg, step))):
            return step, bad
        bad[step] = problems
    if bad:
        raise ConfigError(*(problem for problems in bad.values() for problem in problems),
                          f"{root(cfg)}: no good checkpoint of {', '.join(map(str, bad))}; choose another with "
                          "checkpoint.resume, or move the damaged ones away to begin anew")
    return 0, {}


def find(path: pathlib.Path) -> pathlib.Path:
    """The folder itself where it is a checkpoint, else the newest good one of that run: verified; those that are
    passed over are told on stderr. Raises ConfigError where there is none, or it is damaged."""
    candidates = [path] if is_checkpoint(path) else [p for _, p in step_folders(path / "checkpoints")]
    if not candidates:
        raise ConfigError(f"{path}: is neither a checkpoint nor a run with one")
    found: list[str] = []
    for folder in reversed(candidates):
        if not (problems := problems_of(folder)):
            for problem in found:
                print(f"damaged, passed over: {problem}", file=sys.stderr)
            return folder
        found += problems
    raise ConfigError(*found)


def check_same_run(cfg: config.Config, step: int, guarded: re.Pattern = GUARDED) -> None:
    """Raises ConfigError naming every option that decides weights or data order (or is one of `guarded`) and differs
    from the checkpoint's."""
    if not step:
        return
    allowed = cfg.checkpoint.allow_changed if cfg.checkpoint else ()
    folder = path_of(cfg, step)
    before, now = config.to_flat(read_state(folder)["config"]), config.to_flat(config.to_dict(cfg))
    changed = [key for key in sorted(before.keys() | now.keys()) if guarded.fullmatch(key)
               and before.get(key) != now.get(key) and key not in allowed]
    if changed:
        raise ConfigError(*(
            f"{key} = {now.get(key)}: {folder} was trained with {before.get(key)}; go on with that, choose another "
            f'run.name, or allow it: checkpoint.allow_changed = ["{key}"]' for key in changed))


def check_same_data(cfg: config.Config, step: int, fingerprint: list[dict]) -> None:
    """Raises ConfigError, naming what differs, where the prepared data is not what the checkpoint of a step was trained
    on."""
    before = read_state(path_of(cfg, step)).get("data") if step else None
    if not before or before == fingerprint or any(map(PREPARED.fullmatch, cfg.checkpoint.allow_changed)):
        return
    changed = [f"{len(before)} sources, now {len(fingerprint)}"] if len(before) != len(fingerprint) else []
    for old, new in zip(before, fingerprint):
        source, old, new = new["identity"]["source"], options.flatten(old), options.flatten(new)
        changed += [f"{source}: {key} was {old.get(key)}, is {new.get(key)}" for key in sorted(old | new)
                    if old.get(key) != new.get(key) and not isinstance(new.get(key), dict)]
    raise ConfigError(f"{path_of(cfg, step)}: was trained on other data: {'; '.join(changed)}; choose another "
                      'run.name, or allow it: checkpoint.allow_changed = ["data.source"]')


def set_aside(cfg: config.Config, step: int, bad: Iterable[int]) -> None:
    """Renames the checkpoints after the step that training goes on from, and the bad ones. Rank 0 only."""
    for other, folder in step_folders(root(cfg)):
        if other > step or other in bad:
            ending, n = "corrupt" if other in bad else "superseded", 0
            while (target := folder.with_name(f"{folder.name}{f'.{n}' if n else ''}.{ending}")).exists():
                n += 1
            folder.rename(target)


def remove(cfg: config.Config, step: int) -> None:
    """Removes a checkpoint. Renamed first: what is half removed must not look like one."""
    if temporary_of(cfg, step).exists():
        shutil.rmtree(temporary_of(cfg, step))
    shutil.rmtree(path_of(cfg, step).rename(temporary_of(cfg, step)))


def remove_unfinished(cfg: config.Config) -> None:
    """Removes what a killed save or removal has left. Rank 0 only, while nothing is being saved."""
    for entry in list(root(cfg).iterdir()) if root(cfg).is_dir() else ():
        if TEMPORARY.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
