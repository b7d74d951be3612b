"""Which folders are checkpoints, which one a run resumes from, and what `checkpoint verify` says of them."""

import dataclasses
import errno
import hashlib
import os
import pathlib
import subprocess
from unittest import mock

import pytest

import config
from checkpoint import __main__ as verify
from checkpoint import catalog, compare, manifest, newest, save
from checkpoint.catalog import root_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.manifest import UnreadableCheckpoint
from optim import Progress
from parallel.ranks import all_gather_objects
from tests.checkpoint.conftest import (
    NoData,
    flip_last_byte,
    make_checkpoint,
    run_config,
    unreadable,
)
from tests.conftest import make_config, mesh_for, refuses, seal
from tests.distributed import distributed

PART = 64 * 2**20


def choose(cfg: config.Config) -> tuple[int, dict[int, list[str]]]:
    root = root_of(cfg)
    return catalog.choose(root, catalog.steps(root), cfg.checkpoint, catalog.problems_of)


def newest_of(path: pathlib.Path) -> str:
    return newest.read_newest(path, lambda folder: folder.name)


def names_in(cfg: config.Config) -> list[str]:
    return sorted(path.name for path in root_of(cfg).iterdir())


@pytest.mark.quick
def test_only_folders_with_the_exact_name_count(tmp_path):
    cfg = run_config(tmp_path)
    assert choose(cfg) == (0, {})
    for step in (9, 123456789):
        make_checkpoint(cfg, step)
    for name in ("step-99", "step-00000100.bak", "step-00000012.corrupt", ".step-00000013.tmp"):
        (root_of(cfg) / name).mkdir()
    (root_of(cfg) / "step-00000200").write_text("a file")
    assert catalog.steps(root_of(cfg)) == [9, 123456789]
    assert choose(cfg) == (123456789, {})
    assert newest_of(tmp_path / "r") == "step-123456789"


@pytest.mark.quick
def test_checkpoint_that_was_moved_and_linked_counts(tmp_path):
    cfg = run_config(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (10, 20):
        folder = make_checkpoint(cfg, step)
        folder.symlink_to(folder.rename(elsewhere / folder.name))
    assert choose(cfg) == (20, {}) and newest_of(tmp_path / "r") == folder.name
    catalog.remove(root_of(cfg), 10)
    assert (names_in(cfg), catalog.problems_of(elsewhere / "step-00000010")) == ([folder.name], [])
    elsewhere.rename(tmp_path / "unmounted")
    with refuses("step-00000020: is a link to .*elsewhere.*, which is not there"):
        choose(cfg)


def rendered(**metadata: object) -> str:
    """A manifest whose own hash is right, with this entry of .metadata."""
    entries = {"state.json": manifest.entry_of(b"x"), ".metadata": manifest.entry_of(b"x")}
    entries[".metadata"].update(metadata)
    return manifest.render_manifest(entries).decode()


MISSING = "expected a regular file: No such file"
CHANGED = "manifest.json: is not as it was written"
# file, its new content (None: removed), key words of the problem
DAMAGES = [
    (".metadata", "y", ".metadata: bytes 0 to 0: expected SHA-256"),
    (".metadata", "xx", ".metadata: expected 1 bytes, found 2"),
    (".metadata", None, f".metadata: {MISSING}"),
    (".metadata", "a pipe", ".metadata: expected a regular file"),
    ("state.json", None, f"state.json: {MISSING}"),
    ("state.json", "[1]", "state.json: expected an object"),
    ("state.json", '{"step": "30", "config": {}}', "state.json: expected an object"),
    ("state.json", '{"step": 31, "config": {}}', "expected step 30, found step 31"),
    ("manifest.json", None, f"manifest.json: {MISSING}"),
    ("manifest.json", "[" * 200000, CHANGED),
    ("manifest.json", '{"files": [], "sha256": 1}', CHANGED),
    ("manifest.json", f"{rendered()} ", CHANGED),
    ("manifest.json", rendered(sha256=[]), CHANGED),
    ("manifest.json", rendered(sha256=["a", "b"]), CHANGED),
    ("manifest.json", rendered(size=10**400), CHANGED),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "content", "words"), DAMAGES, ids=lambda value: str(value)[:20])
def test_corrupt_checkpoint_is_named_and_the_previous_one_used(
    tmp_path, capsys, name, content, words
):
    cfg = run_config(tmp_path)
    for step in (10, 20, 30):
        folder = make_checkpoint(cfg, step)
    (folder / name).unlink()
    if content == "a pipe":
        os.mkfifo(folder / name)
    elif content:
        (folder / name).write_text(content)
    if content and name == "state.json":
        seal(folder)
    start, corrupt = choose(cfg)
    assert start == 20 and words in str(corrupt)
    assert verify.main(["verify", str(tmp_path / "r")]) == 1
    printed = capsys.readouterr().out
    assert words in printed and "2 good, 1 bad" in printed
    assert catalog.set_aside_unused(root_of(cfg), start, corrupt) == []
    assert names_in(cfg) == ["step-00000010", "step-00000020", "step-00000030.corrupt"]


def test_large_file_has_a_hash_for_each_64_mib(tmp_path, monkeypatch):
    folder = make_checkpoint(run_config(tmp_path), 10)
    content = bytes(PART - 1) + b"ab" + bytes(PART) + b"c"
    (folder / "large").write_bytes(content)
    seal(folder)
    parts = [content[begin : begin + PART] for begin in (0, PART, 2 * PART)]
    digests = [hashlib.sha256(part).hexdigest() for part in parts]
    assert manifest.read_manifest(folder)["large"]["sha256"] == digests
    with (folder / "large").open("r+b") as file:
        file.seek(PART + 2**21)
        file.write(b"x")
    (problem,) = catalog.problems_of(folder)
    assert f"large: bytes {PART} to {2 * PART - 1}: expected SHA-256" in problem
    os.truncate(folder / "large", 5)
    problems = [f"{folder / 'large'}: expected {len(content)} bytes, found 5"]
    assert catalog.problems_of(folder) == problems  # once, not once a part
    monkeypatch.setattr(manifest, "hash_part", None)
    assert catalog.wrong_sizes(folder) == problems


@pytest.mark.quick
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 50])
def test_file_is_hashed_part_by_part_while_it_is_written(tmp_path, monkeypatch, size):
    monkeypatch.setattr(manifest, "PART", 8)
    content = bytes(range(size))
    hashed = manifest.HashedFile(tmp_path / "file")
    for begin in range(0, size, 11):
        assert hashed.write(content[begin : begin + 11]) == len(content[begin : begin + 11])
    hashed.file.close()
    assert (tmp_path / "file").read_bytes() == content
    parts = [content[begin : begin + 8] for begin in range(0, size, 8)]
    digests = [hashlib.sha256(part).hexdigest() for part in parts]
    assert hashed.entry() == {"size": size, "sha256": digests} == manifest.entry_of(content)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_each_file_is_hashed_by_exactly_one_rank(folder, ranks):
    for name in manifest.read_manifest(folder):
        flip_last_byte(folder / name)
        by_rank = [catalog.problems_of(folder, rank, ranks) for rank in range(ranks)]
        named = [problems for problems in by_rank if f"{name}: bytes 0 to" in str(problems)]
        assert len(named) == 1, (name, by_rank)
        flip_last_byte(folder / name)


@pytest.mark.quick
def test_run_never_silently_starts_over(tmp_path):
    def resume(how: object) -> int:
        return choose(run_config(tmp_path, checkpoint={"resume": how}))[0]

    for step in (10, 20):
        flip_last_byte(make_checkpoint(run_config(tmp_path), step) / ".metadata")
    with refuses("00000020", "00000010", "no good checkpoint of 20, 10"):
        resume("auto")
    for step in (30, 40):
        make_checkpoint(run_config(tmp_path), step)
    assert resume(30) == 30
    for how, words in (10, "no good checkpoint of 10"), (7, "resume = 7: .* it has 10, 20, 30, 40"):
        with refuses(words):
            resume(how)
    with refuses('resume = "never"'):
        resume("never")
    with refuses("holds checkpoints", r"\[checkpoint\] is off"):
        choose(make_config(run={"name": "r", "output_dir": str(tmp_path)}))


@pytest.mark.quick
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_error_of_the_disk_is_not_corruption(tmp_path, error):
    """It ends the attempt; the next one reads again."""
    cfg = run_config(tmp_path)
    for step in (10, 20):
        make_checkpoint(cfg, step)
    with unreadable("00000020/state.json", error):
        with pytest.raises(UnreadableCheckpoint, match=f"cannot be read: {os.strerror(error)}"):
            choose(cfg)
        assert verify.main(["verify", str(tmp_path / "r")]) == 1
    assert choose(cfg) == (20, {})


@pytest.mark.quick
@pytest.mark.parametrize("function", ["mkdir", "fsync", "rename", "rmdir"])
@distributed(ranks=1)
def test_disk_that_cannot_hold_a_checkpoint_is_found_before_training(world, tmp_path, function):
    cfg = run_config(tmp_path, train={"steps": 4})
    (tmp_path / "r").mkdir()
    Checkpointer(cfg, world, NoData()).prepare_folder()
    assert names_in(cfg) == []  # of a good disk
    refused = mock.patch.object(os, function, side_effect=OSError(errno.ENOTSUP, "not supported"))
    with refused, pytest.raises(save.SaveFailed, match="its disk cannot .*: not supported"):
        Checkpointer(cfg, world, NoData()).prepare_folder()
    make_checkpoint(cfg, 4)
    with refused:
        Checkpointer(cfg, world, NoData()).prepare_folder()  # which saves no more


@pytest.mark.quick
def test_verify_refuses_what_has_no_checkpoint(tmp_path, prepared):
    assert (prepared / "manifest.json").exists()  # of prepared data
    for folder in (tmp_path, prepared):
        with refuses("is neither a checkpoint nor a run"):
            verify.main(["verify", str(folder)])
    denied = PermissionError(13, "Permission denied")
    with mock.patch.object(pathlib.Path, "iterdir", side_effect=denied), refuses("cannot be read"):
        verify.main(["verify", str(tmp_path)])


@pytest.mark.quick
def test_verify_counts(tmp_path, capsys):
    folder = make_checkpoint(run_config(tmp_path), 10)
    (folder / "large").write_bytes(bytes(12_345_678))
    (folder / "empty").touch()
    seal(folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json")
    assert verify.main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: good, 4 files, {size:,} bytes\n1 good, 0 bad\n"
    flip_last_byte(folder / "large")
    flip_last_byte(folder / ".metadata")
    assert verify.main(["verify", str(folder)]) == 1
    first, metadata, large, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (f"{folder}: BAD", "0 good, 1 bad")
    assert ".metadata: bytes" in metadata and "large: bytes" in large


@pytest.mark.quick
def test_later_and_unfinished_checkpoints_are_moved_away(tmp_path):
    cfg = run_config(tmp_path)
    make_checkpoint(cfg, 10)
    for _ in range(2):
        make_checkpoint(cfg, 20)
        (line,) = catalog.set_aside_unused(root_of(cfg), 10, {})
    assert line.endswith(": step-00000020.1.superseded")
    names = ["step-00000010", "step-00000020.1.superseded", "step-00000020.superseded"]
    assert names_in(cfg) == names
    for name in (".step-1.tmp", "mine.tmp", ".step-00000010.tmp", ".step-00000030.1.tmp"):
        (root_of(cfg) / name).mkdir()
    (root_of(cfg) / ".step-00000040.tmp").symlink_to(tmp_path)
    assert catalog.remove_unfinished(root_of(cfg)) == []
    assert names_in(cfg) == sorted([*names, ".step-1.tmp", "mine.tmp"])


@pytest.mark.quick
@pytest.mark.parametrize(
    "place", ["step-00000006", "checkpoints/checkpoints/step-00000006", "checkpoints/step-6"]
)
def test_checkpoint_in_the_wrong_place_is_no_new_run(tmp_path, place):
    cfg = run_config(tmp_path)
    misplaced = tmp_path / "r" / place
    misplaced.parent.mkdir(parents=True, exist_ok=True)
    make_checkpoint(cfg, 6).rename(misplaced)
    with refuses("to resume from them: ") as refused:
        compare.starting_point(cfg, evaluating=False)
    subprocess.run(str(refused.value).rpartition(": ")[2], shell=True, check=True)
    assert compare.starting_point(cfg, evaluating=False) == ([6], 6, {})


@pytest.mark.quick
def test_leftover_that_cannot_be_removed_is_a_warning(tmp_path):
    root = root_of(run_config(tmp_path))
    leftover = catalog.temporary_of(root, 10)
    (leftover / "busy").mkdir(parents=True)
    busy = OSError(errno.EBUSY, "Device or resource busy")
    with mock.patch.object(os, "rmdir", side_effect=busy):
        (warning,) = catalog.remove_unfinished(root)
    assert warning == f"{leftover}: cannot be removed: Device or resource busy"
    assert save.make_folder(root, 10).name == ".step-00000010.1.tmp"  # saved next to it
    assert catalog.remove_unfinished(root) == []


@pytest.mark.quick
@distributed(ranks=1)
def test_checkpoint_of_another_run_meanwhile_is_not_set_aside(world, tmp_path):
    cfg = run_config(tmp_path)
    make_checkpoint(cfg, 1)
    late = Checkpointer(cfg, world, NoData())
    make_checkpoint(cfg, 2)
    with refuses("another run has used this folder"):
        late.prepare_folder()
    catalog.temporary_of(root_of(cfg), 3).mkdir()
    resumed = run_config(tmp_path, checkpoint={"resume": 1})
    Checkpointer(resumed, world, NoData()).prepare_folder()
    assert names_in(cfg) == ["step-00000001", "step-00000002.superseded"]


@pytest.mark.quick
@distributed(ranks=1)
def test_progress_is_restored(world, tmp_path, monkeypatch):
    cfg = run_config(tmp_path)
    assert Checkpointer(cfg, world, NoData()).restore(None, None) == Progress()
    progress = Progress(10, tokens=77, skipped_steps=3, skipped_in_a_row=2)
    make_checkpoint(cfg, **dataclasses.asdict(progress))
    monkeypatch.setattr("checkpoint.checkpointer.restore", lambda *unused: None)
    assert Checkpointer(cfg, world, NoData()).restore(None, None) == progress


@pytest.mark.quick
@pytest.mark.parametrize(
    ("state", "base", "words"),
    [
        ({}, None, "step-00000010: another version saved it.*samples"),
        ({"base": "A"}, "B", "its weights have the hash B, .*was trained on a base with A"),
    ],
)
@distributed(ranks=1)
def test_state_that_does_not_fit_is_refused(world, tmp_path, monkeypatch, state, base, words):
    cfg = run_config(tmp_path)
    make_checkpoint(cfg, 10, **state)
    monkeypatch.setattr("checkpoint.checkpointer.restore", lambda *unused: None)
    with refuses(words):
        Checkpointer(cfg, world, NoData()).restore(None, None, base)


@pytest.mark.parametrize("parallel", [{}, {"cp": 2}, {"tp": 2}], ids=str)
@distributed(ranks=2)
def test_ranks_of_any_mesh_verify_each_part_once(world, saved_by_two, parallel, monkeypatch):
    """Here every part is bad, and named by the one rank that has verified it."""
    folder, _ = saved_by_two
    cfg = run_config(folder.parent, parallel=parallel)
    verified = []
    monkeypatch.setattr(
        catalog, "problem_of_part", lambda _, name, *of: verified.append(name) or name
    )
    problems = Checkpointer(cfg, mesh_for(cfg, world), NoData())._problems_on_all_ranks(folder)
    by_rank = all_gather_objects(verified)
    assert sorted(problems) == sorted([*by_rank[0], *by_rank[1]])
    assert sorted(problems) == sorted(manifest.read_manifest(folder))
