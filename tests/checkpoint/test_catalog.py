"""Which folders are checkpoints, which one a run resumes from, and what `checkpoint verify` says of them."""

import dataclasses
import errno
import hashlib
import itertools
import os
import subprocess
from unittest import mock

import pytest

import config
from checkpoint import __main__ as verify
from checkpoint import catalog, compare, manifest, save
from checkpoint.catalog import root_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.manifest import UnreadableCheckpoint
from checkpoint.newest import read_newest
from optim import Progress
from parallel.ranks import all_gather_objects
from tests.checkpoint.conftest import (
    flip_last_byte,
    make_checkpoint,
    no_data,
    run_config,
    unreadable,
)
from tests.conftest import make_config, mesh_for, refuses, seal
from tests.distributed import distributed

PART = 64 * 2**20


def choose(cfg: config.Config) -> tuple[int, dict[int, list[str]]]:
    root = root_of(cfg)
    return catalog.choose(root, catalog.steps(root), cfg.checkpoint, catalog.problems_of)


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
    newest = read_newest(tmp_path / "r", lambda folder: folder.name)
    assert newest == "step-123456789"


@pytest.mark.quick
def test_checkpoint_that_was_moved_and_linked_counts(tmp_path):
    cfg = run_config(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for step in (10, 20):
        folder = make_checkpoint(cfg, step)
        moved = folder.rename(tmp_path / "elsewhere" / folder.name)
        folder.symlink_to(moved)
    assert choose(cfg) == (20, {})
    catalog.remove(root_of(cfg), 20)
    assert (names_in(cfg), catalog.problems_of(moved)) == (["step-00000010"], [])
    (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
    with refuses("step-00000010: is a link to .*, which is not there"):
        choose(cfg)


def rendered(**metadata: object) -> str:
    """A manifest whose own hash is right, with this entry of .metadata."""
    entries = {"state.json": manifest.entry_of(b"x"), ".metadata": manifest.entry_of(b"x")}
    entries[".metadata"].update(metadata)
    return manifest.render_manifest(entries).decode()


CHANGED = "manifest.json: is not as it was written"
# file, its new content (None: removed), key words of the problem
DAMAGES = [
    (".metadata", "y", ".metadata: bytes 0 to 0: expected SHA-256"),
    ("state.json", '{"step": 31, "config": {}}', "expected step 30, found step 31"),
    ("manifest.json", None, "manifest.json: expected a regular file: No such file"),
    ("manifest.json", f"{rendered()} ", CHANGED),
    ("manifest.json", rendered(sha256=[]), CHANGED),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "content", "words"), DAMAGES, ids=lambda value: str(value)[:20])
def test_corrupt_checkpoint_is_named_and_the_previous_one_used(
    tmp_path, capsys, name, content, words
):
    cfg = run_config(tmp_path)
    for step in (10, 20, 30):
        folder = make_checkpoint(cfg, step)
    assert verify.main(["verify", str(tmp_path / "r")]) == 0
    (folder / name).unlink()
    if content:
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


def test_problem_of_a_large_file_names_the_64_mib(tmp_path, monkeypatch):
    folder = make_checkpoint(run_config(tmp_path), 10)
    (folder / "large").write_bytes(bytes(PART - 1) + b"ab" + bytes(PART))
    seal(folder)
    assert len(manifest.read_manifest(folder)["large"]["sha256"]) == 3
    with (folder / "large").open("r+b") as file:
        file.seek(PART + 2**21)
        file.write(b"x")
    (problem,) = catalog.problems_of(folder)
    assert f"large: bytes {PART} to {2 * PART - 1}: expected SHA-256" in problem
    os.truncate(folder / "large", 5)
    problems = [f"{folder / 'large'}: expected {2 * PART + 1} bytes, found 5"]
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
def test_error_of_the_disk_is_not_corruption(tmp_path):
    """It ends the attempt; the next one reads again."""
    cfg = run_config(tmp_path)
    for step in (10, 20):
        make_checkpoint(cfg, step)
    with unreadable("00000020/state.json", errno.ESTALE):
        with pytest.raises(UnreadableCheckpoint, match="cannot be read: Stale file handle"):
            choose(cfg)
        assert verify.main(["verify", str(tmp_path / "r")]) == 1
    assert choose(cfg) == (20, {})


@pytest.mark.quick
@pytest.mark.parametrize("function", ["fsync", "rename"])
@distributed(ranks=1)
def test_disk_that_cannot_hold_a_checkpoint_is_found_before_training(world, tmp_path, function):
    cfg = run_config(tmp_path, train={"steps": 4})
    (tmp_path / "r").mkdir()
    refused = mock.patch.object(os, function, side_effect=OSError(errno.ENOTSUP, "not supported"))
    with refused, pytest.raises(save.SaveFailed, match="its disk cannot .*: not supported"):
        Checkpointer(cfg, world, no_data()).prepare_folder()
    make_checkpoint(cfg, 4)
    with refused:
        Checkpointer(cfg, world, no_data()).prepare_folder()  # which saves no more


@pytest.mark.quick
def test_verify_refuses_what_has_no_checkpoint(tmp_path, prepared):
    for folder in (tmp_path, prepared):  # which has a manifest, too
        with refuses("is neither a checkpoint nor a run"):
            verify.main(["verify", str(folder)])


@pytest.mark.quick
def test_later_and_unfinished_checkpoints_are_moved_away(tmp_path):
    cfg = run_config(tmp_path)
    make_checkpoint(cfg, 10)
    for name in ("mine.tmp", ".step-00000010.tmp", ".step-00000030.1.tmp"):
        (root_of(cfg) / name).mkdir()
    for _ in range(2):
        make_checkpoint(cfg, 20)
        catalog.set_aside_unused(root_of(cfg), 10, {})
    assert catalog.remove_unfinished(root_of(cfg)) == []
    names = ["mine.tmp", "step-00000010"]
    assert names_in(cfg) == [*names, "step-00000020.1.superseded", "step-00000020.superseded"]


@pytest.mark.quick
def test_checkpoint_in_the_wrong_place_is_no_new_run(tmp_path):
    cfg = run_config(tmp_path)
    misplaced = tmp_path / "r/checkpoints/checkpoints/step-00000006"
    misplaced.parent.mkdir(parents=True)
    make_checkpoint(cfg, 6).rename(misplaced)
    with refuses("to resume from them: ") as refused:
        compare.starting_point(cfg, evaluating=False)
    subprocess.run(str(refused.value).rpartition(": ")[2], shell=True, check=True)
    assert compare.starting_point(cfg, evaluating=False) == ([6], 6, {})


@pytest.mark.quick
@distributed(ranks=1)
def test_checkpoint_of_another_run_meanwhile_is_not_set_aside(world, tmp_path):
    cfg = run_config(tmp_path)
    make_checkpoint(cfg, 1)
    late = Checkpointer(cfg, world, no_data())
    make_checkpoint(cfg, 2)
    with refuses("another run has used this folder"):
        late.prepare_folder()
    assert names_in(cfg) == ["step-00000001", "step-00000002"]


@pytest.mark.quick
@distributed(ranks=1)
def test_progress_is_restored_on_the_same_base_alone(world, tmp_path, monkeypatch):
    cfg = run_config(tmp_path)
    assert Checkpointer(cfg, world, no_data()).restore(None, None) == Progress()
    progress = Progress(10, tokens=77, skipped_steps=3, skipped_in_a_row=2)
    make_checkpoint(cfg, base="A", **dataclasses.asdict(progress))
    monkeypatch.setattr("checkpoint.checkpointer.restore", lambda *unused: None)
    assert Checkpointer(cfg, world, no_data()).restore(None, None, "A") == progress
    with refuses("its weights have the hash B, .*was trained on a base with A"):
        Checkpointer(cfg, world, no_data()).restore(None, None, "B")
    make_checkpoint(cfg, 20)
    with refuses("step-00000020: another version saved it: its state has no 'samples'"):
        Checkpointer(cfg, world, no_data()).restore(None, None)


@pytest.mark.quick
@distributed(ranks=1)
def test_ids_of_another_tokenizer_are_refused_even_where_other_data_is_allowed(world, tmp_path):
    cfg = run_config(tmp_path, checkpoint={"allow_changed": ["data.source", "data.tokenizer"]})
    make_checkpoint(cfg, 10, data=[{"source": "a", "tokenizer": "t"}])
    data = no_data()
    data.identities = lambda: [{"source": "b", "tokenizer": "t"}]
    assert Checkpointer(cfg, world, data).start == 10
    data.identities = lambda: [{"source": "b", "tokenizer": "u"}]
    with refuses(f'ids of another tokenizer .*data.tokenizer = "{tmp_path}/r"'):
        Checkpointer(cfg, world, data)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}], ids=str)
@distributed(ranks=2)
def test_each_file_is_hashed_by_exactly_one_rank(world, saved_by_two, parallel, monkeypatch):
    """Here every part is bad, and named by the one rank that has verified it."""
    folder, _ = saved_by_two
    cfg = run_config(folder.parent, parallel=parallel)
    verified = []
    note = lambda _, name, *of: verified.append(name) or name  # noqa: E731
    monkeypatch.setattr(catalog, "problem_of_part", note)
    problems = Checkpointer(cfg, mesh_for(cfg, world), no_data())._problems_on_all_ranks(folder)
    names = sorted([*itertools.chain.from_iterable(all_gather_objects(verified))])
    assert names == sorted(problems) == sorted(manifest.read_manifest(folder))
