"""What a crash, a power cut, a bad disk and a stale listing may do to checkpoints: nothing."""

import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import config
from checkpoint import catalog
from checkpoint.load import restore, tensors_of
from checkpoint.manifest import read_manifest
from model.llama import Llama
from optim import build_optimizer
from tests import crash_cases
from tests.cases import digests
from tests.conftest import REPO
from tests.crash_cases import Call, Disk, File, Tree, configured, write_tree

pytestmark = [pytest.mark.early, pytest.mark.slow]


@pytest.fixture(scope="module", params=[[], [1, 2]], ids=["the first save", "a later save"])
def save(request, on_ranks, tmp_path_factory):
    """(the folder before, the calls, the folder after, {step: hashes of its tensors})"""
    if sys.version_info < (3, 11):
        pytest.skip(
            "this Python's pathlib keeps the functions that it was imported with, and calls those"
        )
    return on_ranks(
        1, crash_cases.record_a_save, str(tmp_path_factory.mktemp("save")), request.param
    )[0]


def halved(calls: list[Call]) -> list[Call]:
    """Each write in two."""
    found = []
    for call in calls:
        if call[0] == "write" and len(call[3]) > 1:
            what, path, offset, data = call
            half = len(data) // 2
            found += [(what, path, offset, data[:half]), (what, path, offset + half, data[half:])]
        else:
            found.append(call)
    return found


def prefixes(save: tuple) -> Iterator[Disk]:
    """The disk before the first call, and after each."""
    disk = Disk(save[0])
    yield disk
    for call in halved(save[1]):
        disk.apply(call)
        yield disk


def start_up(tree: Tree, folder: pathlib.Path, wrote: dict[int, dict[str, str]]) -> int:
    """The step that a run with this folder goes on from: decided, read and tidied up as a start does. Its tensors must
    be those that were saved."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_tree(tree, folder)
    cfg = configured(folder)
    step, bad = catalog.choose(cfg, catalog.steps(cfg), catalog.problems_of)
    assert bad == {}
    if step:
        model = Llama(cfg.model)
        optimizer = build_optimizer(model, cfg.optim)
        restore(catalog.path_of(cfg, step), model, optimizer)
        assert digests(tensors_of(model, optimizer)) == wrote[step]
    catalog.set_aside(cfg, step, bad)
    catalog.remove_unfinished(cfg)
    assert catalog.choose(cfg, catalog.steps(cfg), catalog.problems_of) == (step, {})
    assert [p for p in folder.rglob("*") if "tmp" in p.name] == []
    return step


def test_all_calls_were_written_down(save):
    """What follows speaks of these calls alone: together they must make what the save made, to the byte."""
    before, calls, after, _ = save
    *_, disk = prefixes(save)
    assert disk.now() == after != before
    assert {"open", "write", "sync", "rename", "mkdir"} <= {call[0] for call in calls}
    assert any(
        call[:2] == ("rename", "all/runs/r/checkpoints/.step-00000003.tmp") for call in calls
    )
    assert ("rmdir" in {call[0] for call in calls}) == bool(before)


def newest_but_3(wrote: dict[int, dict[str, str]]) -> int:
    return max(wrote.keys() - {3}, default=0)


def test_killed_at_every_call_of_a_save(save, tmp_path):
    """The kernel lives on and loses nothing: the old checkpoint until the rename, from then on the new one. Nothing
    that is less bears a checkpoint's name, an old one half removed neither."""
    wrote, found = save[3], []
    for disk in prefixes(save):
        found.append(start_up(disk.now(), tmp_path / "copy", wrote))
        kept = catalog.step_folders(catalog.root(configured(tmp_path / "copy")))
        assert [problem for _, path in kept for problem in catalog.problems_of(path)] == []
    assert found == sorted(found) and set(found) == {newest_but_3(wrote), 3}, found


def may_be_left(file: File) -> list[bytes]:
    """Of a file that was not synced."""
    return [file.safe, file.now, bytes(len(file.now)), file.now[: len(file.now) // 2]]


POWER_CUTS = {  # of what is not synced: does a change of names survive, and what of a file's content
    "nothing": lambda coin: (lambda: False, lambda file: file.safe),
    "names": lambda coin: (lambda: True, lambda file: file.safe),
    "content": lambda coin: (lambda: False, lambda file: file.now),
    **{
        f"some {seed}": lambda coin: (
            lambda: coin.random() < 0.5,
            lambda file: file.now if file.now == file.safe else coin.choice(may_be_left(file)),
        )
        for seed in range(4)
    },
}


@pytest.mark.parametrize("what", POWER_CUTS)
def test_power_cut_at_every_call_of_a_save(save, tmp_path, what):
    """Always the old checkpoint or the new one; and the new one for certain once the save has reported success."""
    wrote = save[3]
    known = {}
    found = []
    survives, content = POWER_CUTS[what](random.Random(what))
    for disk in prefixes(save):
        tree = disk.left(survives, content)
        if (key := tuple(sorted(tree.items()))) not in known:
            known[key] = start_up(tree, tmp_path / "copy", wrote)
        found.append(known[key])
    assert set(found) == {newest_but_3(wrote), 3} and found[-1] == 3, found
    assert found == sorted(found) or what.startswith("some")


def test_power_cut_while_a_file_is_replaced(on_ranks, tmp_path):
    """As the rows of a run that goes on, and status.json: it is the old one or the new one, never less."""
    if sys.version_info < (3, 11):
        pytest.skip(
            "this Python's pathlib keeps the functions that it was imported with, and calls those"
        )
    before, calls = on_ranks(1, crash_cases.record_a_replacement, tmp_path)[0]
    for what, cut in POWER_CUTS.items():
        survives, content = cut(random.Random(what))
        found = [disk.left(survives, content)["rows"] for disk in prefixes((before, calls))]
        assert {*found} <= {b"the old rows", b"the new ones"} and found[0] == b"the old rows", what


# Two ranks' checkpoints


@pytest.fixture(scope="module")
def two_ranks(on_ranks, tmp_path_factory):
    """(folder of the run, what each rank did)"""
    folder = tmp_path_factory.mktemp("two")
    found = on_ranks(2, crash_cases.enter_with_a_stale_listing, str(folder), timeout=60)
    return config.run_folder(configured(folder)), found


@pytest.mark.quick
def test_ranks_agree_though_one_sees_an_old_listing(two_ranks):
    """Rank 1 alone would go on from step 2, and wait for ever for rank 0."""
    folder, (rank_0, rank_1) = two_ranks
    assert rank_0["saw"] == [2, 3] and rank_1["saw"] == [2]
    for rank in (rank_0, rank_1):
        assert (
            rank["start"] == 3
            and rank["bad"] == {}
            and rank["read"] == rank["wrote"] == rank_0["wrote"]
        )
    assert [
        (step, catalog.problems_of(path))
        for step, path in catalog.step_folders(folder / "checkpoints")
    ] == [(3, []), (4, [])]


@pytest.fixture
def checkpoint(two_ranks, tmp_path):
    """A copy, with every one of its files in the manifest."""
    folder = shutil.copytree(two_ranks[0] / "checkpoints/step-00000004", tmp_path / "step-00000004")
    names = {path.name for path in folder.iterdir()}
    assert (
        names
        == {*read_manifest(folder), "manifest.json"}
        >= {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json", "tokenizer.model"}
    )
    return folder


def test_every_flipped_bit_is_found(checkpoint):
    chance, files = random.Random(0), sorted(checkpoint.iterdir())
    small = [checkpoint / name for name in ("manifest.json", "state.json", ".metadata")]
    for path in [*small * 30, *chance.choices(files, k=110)]:
        content = path.read_bytes()
        bit = chance.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        problems = catalog.problems_of(checkpoint)
        assert len(problems) == 1 and problems[0].startswith(f"{path}: "), (
            path.name,
            bit,
            problems,
        )
        path.write_bytes(content)
    assert catalog.problems_of(checkpoint) == []


def test_every_cut_longer_or_missing_file_is_found(checkpoint):
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        half = len(content) // 2
        for damaged in (
            b"",
            content[:half],
            content[:-1],
            content + b"\0",
            content + b"\n",
            content[half:] + content[:half],
            None,
        ):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            problems = catalog.problems_of(checkpoint)
            assert len(problems) == 1 and problems[0].startswith(f"{path}: "), (path.name, problems)
            if (
                damaged is not None
                and len(damaged) != len(content)
                and path.name != "manifest.json"
            ):
                assert problems == [f"{path}: expected {len(content)} bytes, found {len(damaged)}"]
            path.write_bytes(content)
    assert catalog.problems_of(checkpoint) == []


@pytest.mark.nightly
def test_a_storm_of_kills():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kill_storm", "--kills=50", "--seed=7"],
        cwd=REPO,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0 and "50 kills: " in done.stdout, done.stdout + done.stderr
    assert re.search(r"inside a save.*from steps .*[1-9].*; 0 problems", done.stdout), done.stdout


LAUNCHER = """
import functools, os, subprocess, sys, time
from system.processes import die_with_parent

def late(parent):
    print("forked", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent(parent)

subprocess.run(["touch", sys.argv[1]], start_new_session=True, preexec_fn=functools.partial(late, os.getpid()))
"""


def test_a_launcher_killed_while_it_starts_its_ranks(tmp_path):
    """Between the fork and the request to die with it: the rank has another parent by then, and must not begin."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, tmp_path / "began"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout.readline() == "forked\n"
    launcher.kill()
    # at its end when the rank has ended too
    assert launcher.stdout.read() == "" and launcher.wait() == -signal.SIGKILL
    assert not (tmp_path / "began").exists()
