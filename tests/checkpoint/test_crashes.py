"""What a crash, a power cut, a bad disk and a stale listing may do to checkpoints: nothing."""

import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest

import config
import system
from checkpoint import catalog
from checkpoint.catalog import root_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.load import restore, tensors_of
from checkpoint.save import Saver
from model.llama import Llama
from optim import build_optimizer
from parallel.ranks import on_rank_zero
from tests.checkpoint.conftest import no_data, run_config
from tests.conftest import REPO, build, hashes
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
    """Promises what POSIX does and no more: a file's content is on the disk after its fsync, names
    after their folder's. By inode number."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.synced_files: dict[int, bytes] = {}
        self.synced_folders: dict[int, dict[str, int]] = {}
        self.folders: set[int] = set()
        self.handles: list[int] = []
        for path in (root, *root.rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            self.sync(handle)
            os.close(handle)

    def sync(self, handle: int) -> None:
        self.handles.append(os.dup(handle))  # no other file gets its inode number
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}"))
        number = path.stat().st_ino
        if path.is_dir():
            self.synced_folders[number] = names_in(path)
        else:
            self.synced_files[number] = path.read_bytes()

    def left(self, names_survive: bool, content_survives: bool) -> Tree:
        """What can be read after a crash now."""
        folders = dict(self.synced_folders)
        contents = dict(self.synced_files)
        for path in (self.root, *self.root.rglob("*")):
            number = path.stat().st_ino
            if path.is_dir():
                self.folders.add(number)
                if names_survive:
                    folders[number] = names_in(path)
            elif content_survives:
                contents[number] = path.read_bytes()
        tree: Tree = {}

        def visit(folder: int, path: str) -> None:
            for name, number in folders.get(folder, {}).items():
                is_folder = number in self.folders
                tree[path + name] = None if is_folder else contents.get(number, b"")
                if is_folder:
                    visit(number, f"{path}{name}/")

        visit(self.root.stat().st_ino, "")
        return tree


def names_in(folder: pathlib.Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


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


class Saves:
    """A model whose steps are saved, on this rank."""

    def __init__(self, cfg: config.Config, world):
        self.cfg = cfg
        self.model = build(cfg, world)
        self.optimizer = build_optimizer(self.model, cfg.optim)
        assert cfg.checkpoint
        self.saver = Saver(root_of(cfg), cfg.checkpoint, [])

    def save(self, step: int) -> dict[str, str]:
        """Hashes of the step's tensors."""
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        tensors = tensors_of(self.model, self.optimizer)
        self.saver.write(step, tensors, {"step": step, "config": config.to_dict(self.cfg)})
        self.saver.purge()
        return hashes(tensors)


@pytest.mark.parametrize("earlier", [[], [1, 2]], ids=["the first save", "a later save"])
@distributed(ranks=1)
def test_crash_at_any_call_of_a_save_leaves_the_old_checkpoint_or_the_new(world, tmp_path, earlier):
    """The new one for certain once the save has reported success."""
    root = tmp_path / "root"
    cfg = run_config(root, model=SMALL, checkpoint={"keep_last": 1})
    saves = Saves(cfg, world)
    wrote = {step: saves.save(step) for step in earlier}
    root_of(cfg).mkdir(parents=True, exist_ok=True)
    leftover = catalog.temporary_of(root_of(cfg), 3)
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"cut")
    with crashes(root) as left:
        wrote[3] = saves.save(3)
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


def test_file_that_is_replaced_is_the_old_one_or_the_new(tmp_path):
    (tmp_path / "rows").write_bytes(b"old")
    with crashes(tmp_path) as left:
        system.write_atomic(tmp_path / "rows", b"new")
    for kind, trees in left.items():
        assert {tree["rows"] for tree in trees} <= {b"old", b"new"}, kind
    assert left["kill"][-1]["rows"] == b"new"


@contextmanager
def stale_listing(folder: pathlib.Path) -> Iterator[None]:
    """The folder's names stay what they are now, as a client of a network file system caches
    them."""
    iterdir = pathlib.Path.iterdir
    entries = list(folder.iterdir())

    def stale(path: pathlib.Path) -> Iterator[pathlib.Path]:
        return iter(entries) if path == folder else iterdir(path)

    with mock.patch.object(pathlib.Path, "iterdir", stale):
        yield


@pytest.mark.quick
@distributed(ranks=2)
def test_ranks_agree_though_one_sees_an_old_listing(world, tmp_path):
    cfg = run_config(tmp_path, model=SMALL, checkpoint={"keep_last": 2})
    saves = Saves(cfg, world)
    root = root_of(cfg)
    saves.save(1)
    saves.save(2)
    with stale_listing(root) if world.rank else ExitStack():
        wrote = saves.save(3)
        assert catalog.steps(root) == ([2] if world.rank else [2, 3])
        checkpointer = Checkpointer(cfg, world, no_data(cfg))
        on_rank_zero(checkpointer.prepare_folder)
        assert (checkpointer.start, checkpointer.corrupt) == (3, {})
        restore(checkpointer.folder, saves.model, saves.optimizer)
        assert hashes(tensors_of(saves.model, saves.optimizer)) == wrote
        saves.save(4)
    if world.rank == 0:
        assert catalog.steps(root) == [3, 4]


@pytest.fixture
def folder(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved[2][0], tmp_path / "step-00000003")


def test_every_flipped_bit_is_found(folder):
    chance = random.Random(0)
    small = [folder / name for name in ("manifest.json", "state.json", ".metadata")]
    for path in [*small * 20, *chance.choices(sorted(folder.iterdir()), k=80)]:
        content = path.read_bytes()
        bit = chance.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        (problem,) = catalog.problems_of(folder)
        assert problem.startswith(f"{path}: "), (bit, problem)
        path.write_bytes(content)
    assert catalog.problems_of(folder) == []


def test_every_cut_longer_or_missing_file_is_found(folder):
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        half = len(content) // 2
        turned = content[half:] + content[:half]
        for damaged in (b"", content[:half], content[:-1], content + b"\0", turned, None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            (problem,) = catalog.problems_of(folder)
            assert problem.startswith(f"{path}: ")
            is_resized = damaged is not None and len(damaged) != len(content)
            if is_resized and path.name != "manifest.json":
                assert f"expected {len(content)} bytes, found {len(damaged)}" in problem
        path.write_bytes(content)
    assert catalog.problems_of(folder) == []


@pytest.mark.nightly
def test_storm_of_kills():
    command = [sys.executable, "-m", "tests.checkpoint.kill_storm", "--kills=50"]
    done = subprocess.run(command, cwd=REPO, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"[1-9]\d* of 50 .*resumed: .*[1-9].*\n0 problems", done.stdout)
    assert found, done.stdout
