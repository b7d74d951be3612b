"""Every file-system call of a save, written down; and a disk that keeps of them what a crash or a power cut leaves."""

import builtins
import contextlib
import io
import os
import pathlib
import sys
import unittest
from collections.abc import Callable, Iterator

import torch

import config
from checkpoint import catalog
from checkpoint.checkpointer import Checkpointer
from checkpoint.load import restore, tensors_of
from checkpoint.save import Saver
from data.dataset import Dataset
from data.mixture import Mixture
from optim import build_optimizer
from parallel.ranks import on_rank_zero
from system import files
from tests.cases import build, digests, process_group
from tests.conftest import make_config

SMALL = {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 12, "vocab_size": 16}

# ("open", path, emptied?), made where it is missing · ("write", path, offset, bytes) · ("sync", path) ·
# ("rename", from, to) · ("mkdir" | "unlink" | "rmdir", path). Paths are relative, "." is the root.
Call = tuple
Tree = dict[str, bytes | None]  # path: a file's content, None for a folder


def configured(root: pathlib.Path, **checkpoint: int) -> config.Config:
    return make_config(
        model=SMALL, run={"name": "r", "output_dir": str(root / "all/runs")}, checkpoint=checkpoint
    )


# Writing down

# The interpreter's audit events, and which of their arguments is the folder's descriptor; 0: none.
CHANGES = {
    "os.rename": 2,
    "os.mkdir": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 0,
}


@contextlib.contextmanager
def recorded(root: pathlib.Path, calls: list[Call]) -> Iterator[None]:
    """Writes down every change below root, call by call as the kernel gets them. Raises where the interpreter's audit
    tells of one that was not written down."""
    root = root.resolve()
    within = []
    missed = []
    watching = True

    def name(path: object, dir_fd: int | None = None) -> str | None:
        """A path or descriptor's name below root; None: it lies elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = pathlib.Path(os.path.abspath(path))
        return str(path.relative_to(root)) if path.is_relative_to(root) else None

    def note(what: str, path: str | None, *more: object) -> None:
        if path is not None:
            calls.append((what, path, *more))

    def named(what: str) -> Callable:
        return lambda _, path, mode=0, dir_fd=None: note(what, name(path, dir_fd))

    def opened(
        _: int, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        if flags & (os.O_CREAT | os.O_TRUNC):
            note("open", name(path, dir_fd), bool(flags & os.O_TRUNC))

    def renamed(_: None, source: object, target: object) -> None:
        note("rename", name(source), name(target))

    def written(count: int, handle: int, *_: object) -> None:
        path = name(handle) if count else None
        if path is not None:
            offset = os.lseek(handle, 0, os.SEEK_CUR) - count
            with functions[io, "open"](
                f"/proc/self/fd/{handle}", "rb"
            ) as file:  # however the bytes came there
                note("write", path, offset, os.pread(file.fileno(), count, offset))

    def told(function: Callable, tell: Callable) -> Callable:
        """The function, and then tell(its result, its arguments); it is not told where it failed."""

        def call(*args: object, **kwargs: object) -> object:
            within.append(True)
            try:
                result = function(*args, **kwargs)
            finally:
                within.pop()
            tell(result, *args, **kwargs)
            return result

        return call

    class RawFile(io.FileIO):
        def write(self, data: bytes) -> int:
            count = super().write(data)
            written(count, self.fileno())
            return count

    def open_(
        file: object,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable | None = None,
    ) -> io.IOBase:
        """open(), of Python's own layers over a raw file that tells what it does."""
        if not set(mode) & set("wax+"):
            return functions[io, "open"](
                file, mode, buffering, encoding, errors, newline, closefd, opener
            )
        assert "+" not in mode and opener is None
        raw = told(RawFile, lambda _, path, how, closefd: note("open", name(path), how == "w"))(
            file, mode.strip("bt"), closefd
        )
        buffered = io.BufferedWriter(raw) if buffering else raw
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def watch(event: str, arguments: tuple) -> None:
        if not watching or within:
            return
        dir_fd = arguments[CHANGES[event]] if CHANGES.get(event) else -1
        changes = event in CHANGES or (
            event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        )
        if changes and name(arguments[0], None if dir_fd < 0 else dir_fd) is not None:
            missed.append((event, *arguments))

    told_to = {
        opened: ["open"],
        renamed: ["rename", "replace"],
        named("mkdir"): ["mkdir"],
        named("rmdir"): ["rmdir"],
        named("unlink"): ["unlink", "remove"],
        named("sync"): ["fsync", "fdatasync"],
        written: ["write", "writev", "sendfile"],
        lambda count, _, target, *more: written(count, target): ["copy_file_range"],
    }
    replacements = {(io, "open"): open_, (builtins, "open"): open_}
    for tell, names in told_to.items():
        for what in names:
            replacements[os, what] = told(getattr(os, what), tell)
    functions = {place: getattr(*place) for place in replacements}
    sys.addaudithook(watch)  # there is no taking it away; it is deaf afterwards
    try:
        for place, function in replacements.items():
            setattr(*place, function)
        yield
    finally:
        watching = False
        for place, function in functions.items():
            setattr(*place, function)
    assert not missed, f"not written down: {missed}"


# What a disk makes of it


class File:
    def __init__(self, content: bytes = b""):
        self.now, self.safe = content, content


class Folder:
    """Its names now, and those on the disk. In between: (old name or None, new name or None, which), one by one."""

    def __init__(self) -> None:
        self.now: dict[str, File | Folder] = {}
        self.safe: dict[str, File | Folder] = {}
        self.pending: list[tuple[str | None, str | None, File | Folder]] = []

    def change(self, old: str | None, new: str | None, node: "File | Folder") -> None:
        self.pending.append((old, new, node))
        replay([self.pending[-1]], self.now)

    def left(self, survives: Callable[[], bool]) -> "dict[str, File | Folder]":
        """The names after a power cut: on a journal's word those on the disk and of the others what it pleases."""
        return replay([change for change in self.pending if survives()], dict(self.safe))


def replay(changes: list[tuple], names: dict) -> dict:
    for old, new, node in changes:
        if old is None or names.get(old) is node:
            names.pop(old, None)
            if new is not None:
                names[new] = node
    return names


class Disk:
    """Promises what POSIX does and no more: content is on the disk after a file's fsync, names after a folder's."""

    def __init__(self, tree: Tree):
        self.root = Folder()
        for path, content in sorted(tree.items()):
            self.apply(("mkdir", path) if content is None else ("open", path, True))
            if content:
                self.apply(("write", path, 0, content))
        for path in ("", *tree):
            self.apply(("sync", path))

    def find(self, path: str) -> File | Folder:
        node = self.root
        for part in pathlib.PurePath(path).parts:
            node = node.now[part]
        return node

    def apply(self, call: Call) -> None:
        what, path, *more = call
        folder, name = self.find(os.path.dirname(path)), os.path.basename(path)
        if what == "open":
            if name not in folder.now:
                folder.change(None, name, File())
            if more[0]:
                folder.now[name].now = b""
        elif what == "write":
            (offset, data), file = more, folder.now[name]
            file.now = (
                file.now[:offset].ljust(offset, b"\0") + data + file.now[offset + len(data) :]
            )
        elif what == "sync":
            node = self.find(path)
            if isinstance(node, File):
                node.safe = node.now
            else:
                node.safe, node.pending = dict(node.now), []
        elif what == "rename":
            assert os.path.dirname(more[0]) == os.path.dirname(path)
            folder.change(name, os.path.basename(more[0]), folder.now[name])
        elif what == "mkdir":
            folder.change(None, name, Folder())
        else:
            node = folder.now[name]
            assert isinstance(node, File) if what == "unlink" else node.now == {}
            folder.change(name, None, node)

    def left(self, survives: Callable[[], bool], content: Callable[[File], bytes]) -> Tree:
        """All that can be read after a power cut. survives() of each name's change that is not on the disk; content(of
        each file)."""
        found: Tree = {}

        def visit(folder: Folder, path: pathlib.PurePath) -> None:
            for name, node in folder.left(survives).items():
                found[str(path / name)] = content(node) if isinstance(node, File) else None
                if isinstance(node, Folder):
                    visit(node, path / name)

        visit(self.root, pathlib.PurePath())
        return found

    def now(self) -> Tree:
        """All that can be read after the process is killed: the kernel lives and loses nothing."""
        return self.left(lambda: True, lambda file: file.now)


def read_tree(folder: pathlib.Path) -> Tree:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def write_tree(tree: Tree, folder: pathlib.Path) -> None:
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


# On ranks


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(
        0, SMALL["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(seed)
    )
    model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def train_and_save(
    cfg: config.Config,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    saver: Saver,
    step: int,
    purge: bool,
) -> dict[str, str]:
    """One step, and its checkpoint; hashes of the tensors."""
    train_step(model, optimizer, step)
    with unittest.TestCase().assertNoLogs("train", "WARNING"):
        saver.write(
            step, tensors_of(model, optimizer), {"step": step, "config": config.to_dict(cfg)}
        )
        if purge:
            saver.purge()
    return digests(tensors_of(model, optimizer))


def made_up_tokenizer(output: str) -> pathlib.Path:
    path = pathlib.Path(output) / "tokenizer.model"
    path.write_bytes(bytes(range(256)) * 5)
    return path


def record_a_save(
    output: str, earlier: list[int]
) -> tuple[Tree, list[Call], Tree, dict[int, dict[str, str]]]:
    """Saves the earlier steps and then, written down, step 3, which removes them. Returns the folder before it, the
    calls, the folder after it, and each step's tensors."""
    root, tokenizer = pathlib.Path(output) / "root", made_up_tokenizer(output)
    root.mkdir()
    cfg = configured(root, keep_last=1)
    calls = []
    wrote = {}
    with process_group() as world:
        model = build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
        saver = Saver(cfg, 0, [tokenizer])
        for step in earlier:
            wrote[step] = train_and_save(cfg, model, optimizer, saver, step, purge=False)
        if earlier:
            unfinished = catalog.temporary_of(cfg, 3)  # of a save that was killed
            unfinished.mkdir()
            (unfinished / "__0_0.distcp").write_bytes(b"cut")
        before = read_tree(root)
        content = tokenizer.read_bytes()
        tokenizer.unlink()  # as with prepared data that is deleted while the run goes on
        with recorded(root, calls):
            wrote[3] = train_and_save(cfg, model, optimizer, saver, 3, purge=True)
        tokenizer.write_bytes(content)
        del model, optimizer
    return before, calls, read_tree(root), wrote


def record_a_replacement(folder: pathlib.Path) -> tuple[Tree, list[Call]]:
    """(the folder before it, the calls) of files.write_atomic() over a file."""
    calls: list[Call] = []
    (folder / "rows").write_bytes(b"the old rows")
    before = read_tree(folder)
    with recorded(folder, calls):
        files.write_atomic(folder / "rows", b"the new ones")
    return before, calls


@contextlib.contextmanager
def stale_listing(folder: pathlib.Path) -> Iterator[None]:
    """From now on this process is shown the folder's names as they are now, as a client of a network file system may
    be that has them cached."""
    listdir = os.listdir
    scandir = os.scandir
    iterdir = pathlib.Path.iterdir
    with scandir(folder) as entries:
        old = list(entries)

    def is_it(path: object) -> bool:
        return not isinstance(path, int) and os.path.abspath(path) == os.path.abspath(folder)

    os.listdir = lambda path=".": [entry.name for entry in old] if is_it(path) else listdir(path)
    os.scandir = lambda path=".": (
        contextlib.nullcontext(iter(old)) if is_it(path) else scandir(path)
    )
    pathlib.Path.iterdir = lambda path: (
        (path / entry.name for entry in old) if is_it(path) else iterdir(path)
    )
    try:
        yield
    finally:
        os.listdir = listdir
        os.scandir = scandir
        pathlib.Path.iterdir = iterdir


def enter_with_a_stale_listing(output: str) -> dict:
    """Two ranks save steps 1 to 3 and keep two; rank 1 goes on seeing steps 1 and 2. They start again, and save a
    fourth. What this rank did and saw."""
    cfg = configured(pathlib.Path(output), keep_last=2)
    tokenizer = made_up_tokenizer(output)
    found = {}
    with process_group() as world, contextlib.ExitStack() as until_end:
        model = build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
        saver = Saver(cfg, 0, [tokenizer])
        for step in (1, 2):
            train_and_save(cfg, model, optimizer, saver, step, purge=True)
        if world.rank == 1:
            until_end.enter_context(stale_listing(catalog.root(cfg)))
        found["wrote"] = train_and_save(cfg, model, optimizer, saver, 3, purge=True)
        found["saw"] = catalog.steps(cfg)

        model = build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
        dataset = Dataset(cfg.data, cfg.train, [], Mixture([1]), [], [tokenizer])
        checkpointer = Checkpointer(cfg, world, dataset)
        on_rank_zero(checkpointer.tidy)
        found["start"], found["bad"] = checkpointer.start, checkpointer.corrupt
        restore(catalog.path_of(cfg, found["start"]), model, optimizer)
        found["read"] = digests(tensors_of(model, optimizer))
        train_and_save(
            cfg, model, optimizer, Saver(cfg, found["start"], [tokenizer]), 4, purge=True
        )
        del model, optimizer
    return found
