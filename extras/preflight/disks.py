"""Room for checkpoints, and the cache of compiled kernels."""

import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import config
from checkpoint import catalog
from data.folder import is_prepared
from extras.preflight.finding import Finding, error, trains_on_gpus, warning
from extras.preflight.sizes import gib, sizes
from run.command import Ranks

NO_EXECUTION = getattr(os, "ST_NOEXEC", 0)  # not on macOS


def option_that_compiles(cfg: config.Config) -> str | None:
    """The option for which kernels are compiled on this machine, if there is one."""
    if cfg.parallel.compile:
        return "[parallel] compile = true"
    if not trains_on_gpus(cfg):  # where FlexAttention is compiled even if blocks are not
        return None
    if cfg.data.document_mask:
        return "[data] document_mask = true"
    if cfg.parallel.cp > 1:
        return f"[parallel] cp = {cfg.parallel.cp}"
    return None


def kernel_cache(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Compiled kernels are loaded from there, as libraries."""
    option = option_that_compiles(cfg)
    if not option:
        return
    for variable, folder in cache_folders().items():
        parent = existing(folder)
        cure = f"{variable}=FOLDER names another, on a disk of this node"
        if os.statvfs(parent).f_flag & NO_EXECUTION:
            yield error(f"{option}: {folder} is on a disk that is mounted noexec; {cure}")
        elif not os.access(parent, os.W_OK | os.X_OK):
            yield error(f"{option}: {folder} cannot be written to; {cure}")


def cache_folders() -> dict[str, pathlib.Path]:
    """The caches of Inductor and, if it has one of its own, Triton, by the variable that names
    each."""
    of_inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    folders = {"TORCHINDUCTOR_CACHE_DIR": pathlib.Path(of_inductor)}
    if os.environ.get("TRITON_CACHE_DIR"):
        folders["TRITON_CACHE_DIR"] = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
    return folders


def folders(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Whether a file can be written where the run and its text will be: a quota may be used up
    where the disk is not."""
    roots = {}
    if not is_prepared(cfg.data, cfg.model.vocab_size):
        roots[f"[data] path = {data_root(cfg)}"] = data_root(cfg)
    if cfg.checkpoint:
        roots[f"[run] output_dir = {cfg.run.output_dir}"] = pathlib.Path(cfg.run.output_dir)
    for name, folder in roots.items():
        try:
            with tempfile.TemporaryFile(dir=existing(folder)) as file:
                file.write(b"x")
                file.flush()
        except OSError as problem:
            yield error(f"{name}: cannot be written to: {problem.strerror}; name another folder")


def checkpoints(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Those that keep_last keeps, and one more: the oldest is removed once the newest is there."""
    if not cfg.checkpoint:
        return
    root = catalog.root_of(cfg)  # may be a link to another disk
    folder = existing(root)
    free = free_bytes(folder)
    there = len(catalog.steps(root))
    count = most_checkpoints(cfg)
    size = sizes(cfg, free / count).checkpoint
    missing = max(1, count - there)
    if missing * size <= free:
        return
    text = (
        f"[checkpoint] keep_last = {cfg.checkpoint.keep_last or 'all'}: {count} checkpoints of "
        f"{gib(size)}, of which {there} are there, and {gib(free)} are free in {folder}; lower "
        "keep_last, or name another run.output_dir"
    )
    yield error(text) if size > free and not there else warning(text)


def most_checkpoints(cfg: config.Config) -> int:
    """How many a run has at the same time, at most."""
    c = cfg.checkpoint
    assert c
    steps = cfg.train.steps
    saves = math.ceil(steps / c.save_every_steps) if c.save_every_steps else 1
    if not c.keep_last:
        return saves
    milestones = steps // c.keep_every_steps if c.keep_every_steps else 0
    return min(saves, c.keep_last + milestones + 1)


def data_root(cfg: config.Config) -> pathlib.Path:
    """Where the folders of token files are, or will be, and their locks."""
    if cfg.data.path and not cfg.data.sources:
        return pathlib.Path(cfg.data.path).absolute().parent
    return pathlib.Path(cfg.data.path or "prepared")


def free_bytes(folder: pathlib.Path) -> float:
    """Infinitely many on a file system without a size, as those of objects on a network may be."""
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else math.inf


def existing(folder: pathlib.Path) -> pathlib.Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
