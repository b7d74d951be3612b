"""What a crash, a power cut, a bad disk and a stale listing may do to checkpoints: nothing."""

import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

import system
from checkpoint import catalog
from checkpoint.catalog import root_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.load import restore, tensors_of
from model.llama import Llama
from optim import build_optimizer
from tests.checkpoint.conftest import Run, no_data, run_config
from tests.conftest import REPO, hashes
from tests.distributed import distributed

SMALL = {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 12, "vocab_size": 16}
Tree = dict[str, bytes | None]  # by path: a file's content, None for a folder
# whether names and content survive that were not synced; a killed process loses neither
SURVIVORS = {
    "kill": (True, True),
    "power cut": (False, False),
    "power cut, names survive": (True, False),
    "power cut, content survives": (False, True),
}
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="this Python's pathlib keeps the os functions it imported"
)


class Disk:
    """Promises what POSIX does and no more: a file's content is on the disk after its fsync, names after their
    folder's."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.synced: dict[int, bytes | dict[str, int]] = {}  # by inode number
        self.handles: list[int] = []
        for path in (root, *root.rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            self.sync(handle)
            os.close(handle)

    def sync(self, handle: int) -> None:
        self.handles.append(os.dup(handle))  # no other file gets its inode number
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}"))
        self.synced[path.stat().st_ino] = content_of(path)

    def left(self, names_survive: bool, content_survives: bool) -> Tree:
        """What can be read after a crash now."""
        found = self.synced
        for path in (self.root, *self.root.rglob("*")):
            found.setdefault(path.stat().st_ino, {} if path.is_dir() else b"")
        found = dict(found)
        for path in (self.root, *self.root.rglob("*")):
            if names_survive if path.is_dir() else content_survives:
                found[path.stat().st_ino] = content_of(path)
        tree: Tree = {}

        def visit(names: Any, folder: str) -> None:
            for name, number in names.items():
                content = found.get(number, b"")
                tree[folder + name] = None if isinstance(content, dict) else content
                if isinstance(content, dict):
                    visit(content, f"{folder}{name}/")

        visit(found[self.root.stat().st_ino], "")
        return tree


def content_of(path: pathlib.Path) -> bytes | dict[str, int]:
    """Of a folder the inode numbers, by name."""
    if path.is_dir():
        return {entry.name: entry.inode() for entry in os.scandir(path)}
    return path.read_bytes()


@contextmanager
def crashes(root: pathlib.Path) -> Iterator[dict[str, list[Tree]]]:
    """By kind of crash: what is left of root before each call that changes it, and at the end."""
    disk = Disk(root)
    left: dict[str, list[Tree]] = {kind: [] for kind in SURVIVORS}

    def note() -> None:
        for kind, survivors in SURVIVORS.items():
            left[kind].append(disk.left(*survivors))

    def noting(function: Callable) -> Callable:
        def call(*arguments, **options):
            note()
            result = function(*arguments, **options)
            if function.__name__ == "fsync":
                disk.sync(*arguments)
            return result

        return call

    with ExitStack() as patches:
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            patches.enter_context(mock.patch.object(os, name, noting(getattr(os, name))))
        yield left
    note()
    for handle in disk.handles:
        os.close(handle)


def write_tree(tree: Tree, folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def step_after(tree: Tree, folder: pathlib.Path, wrote: dict[int, dict[str, str]]) -> int:
    """The step that a run resumes after, decided, read and tidied up as a start does. Its tensors
    must be those that were saved, and no other checkpoint corrupt."""
    write_tree(tree, folder)
    cfg = run_config(folder, model=SMALL)
    root = root_of(cfg)
    saved = catalog.steps(root)
    assert [catalog.problems_of(catalog.path_of(root, step)) for step in saved] == [[]] * len(saved)
    step, corrupt = catalog.choose(root, saved, cfg.checkpoint, catalog.problems_of)
    if step:
        model = Llama(cfg.model)
        optimizer = build_optimizer(model, cfg.optim)
        restore(catalog.path_of(root, step), model, optimizer)
        assert hashes(tensors_of(model, optimizer)) == wrote[step]
    catalog.set_aside_unused(root, step, corrupt)
    assert catalog.remove_unfinished(root) == []
    assert [path for path in folder.rglob("*") if "tmp" in path.name] == []
    return step


@pytest.mark.parametrize("earlier", [[], [1, 2]], ids=["the first save", "a later save"])
@distributed(ranks=1)
def test_crash_at_any_call_of_a_save_leaves_the_old_checkpoint_or_the_new(world, tmp_path, earlier):
    """The new one for certain once the save has reported success."""
    root = tmp_path / "root"
    run = Run(world, root, model=SMALL, keep_last=1)
    wrote = {step: save(run, step) for step in earlier}
    leftover = catalog.temporary_of(run.root, 3)
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"cut")
    with crashes(root) as left:
        wrote[3] = save(run, 3)
    known: dict[tuple, int] = {}
    for kind, trees in left.items():
        steps = []
        for tree in trees:
            key = tuple(sorted(tree.items()))
            if key not in known:
                known[key] = step_after(tree, tmp_path / "copy", wrote)
            steps.append(known[key])
        assert steps == sorted(steps), kind
        assert {*steps} == {max(earlier, default=0), 3}, kind
    assert len(known) > 10


def save(run: Run, step: int) -> dict[str, str]:
    """The hashes of what is saved."""
    run.add(step)
    run.save(step)
    return hashes(run.tensors())


def test_file_that_is_replaced_is_the_old_one_or_the_new(tmp_path):
    (tmp_path / "rows").write_bytes(b"old")
    with crashes(tmp_path) as left:
        system.write_atomic(tmp_path / "rows", b"new")
    for kind, trees in left.items():
        assert {tree["rows"] for tree in trees} <= {b"old", b"new"}, kind
    assert left["kill"][-1]["rows"] == b"new"


@pytest.mark.quick
@distributed(ranks=2)
def test_ranks_resume_alike_though_one_sees_an_old_listing(world, tmp_path):
    """As a client of a network file system caches the names of a folder."""
    run = Run(world, tmp_path, model=SMALL)
    save(run, 1)
    entries = [*run.root.iterdir()]
    stale = mock.patch.object(pathlib.Path, "iterdir", lambda folder: iter(entries))
    save(run, 2)
    with stale if world.rank else ExitStack():
        assert catalog.steps(run.root) == ([1] if world.rank else [1, 2])
        assert Checkpointer(run.cfg, world, no_data()).start == 2


def test_every_damaged_file_is_found(folder):
    """By a flipped bit, cut, extended, rearranged, or missing."""
    chance = random.Random(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        half = len(content) // 2
        changes = [b"", content[:half], content[:-1], content + b"\0"]
        changes.append(content[half:] + content[:half])
        for bit in chance.choices(range(8 * len(content)), k=20):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            changes.append(bytes(flipped))
        for changed in [*changes, None]:
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            (problem,) = catalog.problems_of(folder)
            assert problem.startswith(f"{path}: "), (changed, problem)
        path.write_bytes(content)
    assert catalog.problems_of(folder) == []


@pytest.mark.nightly
def test_storm_of_kills():
    command = [sys.executable, "-m", "tests.checkpoint.kill_storm", "--kills=50"]
    done = subprocess.run(command, cwd=REPO, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
