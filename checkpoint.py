"""Save, find and restore checkpoints: tensors through torch.distributed.checkpoint, everything else as JSON.

checkpoints/step-00000100/ holds the tensors of every rank (*.distcp, .metadata), state.json and the tokenizer. It is
written beside under another name and renamed when all of it is on disk: a folder with that name is a whole checkpoint.
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import config
from config import ConfigError
from parallel.materialize import named_parameters

STATE = "state.json"
# What decides weights and data order. The rest (steps, intervals, ranks, precision, learning rate) may change.
GUARDED = re.compile(r"model\..*|data\.(?!path$).*|run\.seed|train\.(seq_len|global_batch_size)")


def root(cfg: config.Config) -> pathlib.Path:
    return config.run_folder(cfg) / "checkpoints"


def path_of(cfg: config.Config, step: int) -> pathlib.Path:
    return root(cfg) / f"step-{step:08d}"


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the whole checkpoints in a run's checkpoints folder, ascending."""
    entries = [(re.fullmatch(r"step-(\d{8,})", e.name), e) for e in (folder.iterdir() if folder.is_dir() else ())]
    return sorted(int(name[1]) for name, entry in entries if name and not entry.is_symlink()
                  and (entry / STATE).is_file() and (entry / ".metadata").is_file())


def choose(cfg: config.Config) -> int:
    """The step to go on from, 0 for none. Raises ConfigError where what `resume` says does not fit what is there."""
    if cfg.checkpoint is None:
        return 0
    steps, resume = saved_steps(root(cfg)), cfg.checkpoint.resume
    if resume == "never" and steps:
        raise ConfigError(f'[checkpoint] resume = "never": {root(cfg)} holds checkpoints; choose another run.name, or '
                          "move them away")
    if isinstance(resume, int) and resume not in steps:
        raise ConfigError(f"[checkpoint] resume = {resume}: {root(cfg)} has no such checkpoint; it has "
                          f"{', '.join(map(str, steps)) or 'none'}")
    start = resume if isinstance(resume, int) else max(steps, default=0)
    if start:
        _check_same_run(cfg, path_of(cfg, start))
    return start


def choose_for_evaluation(cfg: config.Config) -> int:
    if steps := saved_steps(root(cfg)):
        return max(steps)
    raise ConfigError(f"{root(cfg)}: holds no checkpoint to evaluate")


def find(path: pathlib.Path) -> pathlib.Path:
    """The folder itself where it is a checkpoint, else the newest of that run. Raises ConfigError."""
    if (path / STATE).is_file():
        return path
    if steps := saved_steps(path / "checkpoints"):
        return path / "checkpoints" / f"step-{steps[-1]:08d}"
    raise ConfigError(f"{path}: is neither a checkpoint nor a run with one")


def read_state(folder: pathlib.Path) -> dict:
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / STATE}: cannot be read: {error}") from None


def _check_same_run(cfg: config.Config, folder: pathlib.Path) -> None:
    """Raises ConfigError naming every option that decides weights or data order and differs from the checkpoint's."""
    before, now = config.to_flat(read_state(folder)["config"]), config.to_flat(config.to_dict(cfg))
    changed = [key for key in sorted(before.keys() | now.keys()) if GUARDED.fullmatch(key)
               and before.get(key) != now.get(key) and key not in cfg.checkpoint.allow_changed]
    if changed:
        raise ConfigError(*(
            f"{key} = {now.get(key)}: {folder} was trained with {before.get(key)}; go on with that, choose another "
            f'run.name, or allow it: checkpoint.allow_changed = ["{key}"]' for key in changed))


def check_same_data(cfg: config.Config, step: int, fingerprint: dict) -> None:
    """Raises ConfigError where the prepared data is not what the checkpoint of a step was trained on."""
    before = read_state(path_of(cfg, step)).get("data") if step else None
    if before and before != fingerprint and "data.source" not in cfg.checkpoint.allow_changed:
        changed = ", ".join(key for key in fingerprint if before.get(key) != fingerprint[key])
        raise ConfigError(f"{path_of(cfg, step)}: was trained on other data (its {changed} differ); choose another "
                          'run.name, or allow it: checkpoint.allow_changed = ["data.source"]')


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its name: "model.<parameter>" and "optim.<parameter>.<state>"."""
    found: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model):
        found[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            found |= {f"optim.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def save(cfg: config.Config, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict,
         extra_files: Iterable[pathlib.Path]) -> pathlib.Path:
    """Writes the checkpoint of a step, on all ranks together, and purges what keep_last lets go. `state` must be
    JSON; extra_files (the tokenizer) are copied along."""
    final, first = path_of(cfg, step), dist.get_rank() == 0
    temporary = final.with_name(f".{final.name}.tmp")
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    # One thread: with more, this writer reports success after a failed write (pytorch issue 191391).
    dcp.save(tensors_of(model, optimizer), storage_writer=FileSystemWriter(temporary, thread_count=1, overwrite=False))
    if first:
        for path in extra_files:
            shutil.copyfile(path, temporary / path.name)
        (temporary / STATE).write_text(json.dumps(state, indent=2))
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        temporary.rename(final)
        _sync(final.parent)
        purge(cfg)
    dist.barrier()
    return final


def _sync(path: pathlib.Path) -> None:
    """Makes a file's content, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def purge(cfg: config.Config) -> None:
    """Removes unfinished folders, and whole checkpoints beyond keep_last that are no milestones. Rank 0 only."""
    for entry in root(cfg).glob(".step-*.tmp"):
        shutil.rmtree(entry)
    last, every = cfg.checkpoint.keep_last, cfg.checkpoint.keep_every_steps
    for step in saved_steps(root(cfg))[:-last] if last else ():
        if not (every and step % every == 0):
            # renamed first: what is half removed must not look like a checkpoint, nor stand in a new one's way
            shutil.rmtree(path_of(cfg, step).rename(root(cfg) / f".step-{step:08d}.tmp"))


def restore(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads a checkpoint of any number of ranks into this model's shards. Raises ConfigError where it cannot be read,
    or names, shapes or types differ."""
    wanted, reader = tensors_of(model, optimizer), FileSystemReader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise ConfigError(f"{folder}: cannot be read: {error}") from None
    problems = [f"{folder}: has no {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"{folder}: has {name}, which this model does not" for name in stored.keys() - wanted.keys()
                 if optimizer is not None or name.startswith("model.")]
    for name in wanted.keys() & stored.keys():
        for what, ours, theirs in (("shape", wanted[name].shape, stored[name].size),
                                   ("type", wanted[name].dtype, stored[name].properties.dtype)):
            if ours != theirs:
                problems.append(f"{folder}: {name} has {what} {theirs}, this model's is {ours}")
    if problems:
        raise ConfigError(*sorted(problems))
    try:  # DCP copies into these tensors in place; without a process group it reads alone
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:  # a BaseException
        raise ConfigError(f"{folder}: cannot be read: {error}") from None


def set_aside(cfg: config.Config, step: int) -> None:
    """Renames the checkpoints after a step that training goes on from, and those that are not whole. Rank 0 only."""
    whole = saved_steps(root(cfg))
    for folder in list(root(cfg).glob("step-*")):
        if (name := re.fullmatch(r"step-(\d{8,})", folder.name)) and (int(name[1]) > step or int(name[1]) not in whole):
            ending, n = "superseded" if int(name[1]) in whole else "corrupt", 0
            while (target := folder.with_name(f"{folder.name}{f'.{n}' if n else ''}.{ending}")).exists():
                n += 1
            folder.rename(target)
