"""Text -> token files: their bytes are a function of the text, whoever prepares them, and whatever happens meanwhile;
a folder that exists is that of its source as it is now, or refused."""

import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import config
from data.folder import manifest_of
from data.tokens import stream_of
from launch import launch
from system import warn_once
from tests.conftest import make_config, refuses, words
from tools.prepare import parts
from tools.prepare.folders import create_folders
from tools.prepare.parts import TokenWriter, hold_out_end
from tools.prepare.prepare import main, prepare
from tools.prepare.row_format import Texts
from tools.prepare.source import ByteRange, documents, list_files

TEXTS = [words(i, 60 + 37 * i % 50) for i in range(200)]
WRONG = '{"text": 5}\n'


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Some kilobytes of text are several parts."""
    monkeypatch.setattr(Texts, "part_bytes", 10_000)
    monkeypatch.setattr(parts, "CHUNK_CHARACTERS", 2000)


def as_rows(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    """TEXTS in files of 16 kB, 5 and 50 kB, in this order."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name, first, stop in (("b", 0, 45), ("c", 45, 60), ("h", 60, 200)):
        (folder / f"{name}.jsonl").write_text(as_rows(TEXTS[first:stop]))
    return folder


@pytest.fixture
def data_of(source, prepared, tmp_path) -> Callable[..., config.Data]:
    """Of `source`, with the tokenizer of `prepared`, into a folder of tmp_path."""

    def configured(name: str = "out", **options: Any) -> config.Data:
        given = {"source": str(source), "path": str(tmp_path / name), "tokenizer": str(prepared)}
        return make_config(data=given | options).data

    return configured


def prepare_data(data: config.Data, cores: int = 1, **task: Any) -> pathlib.Path:
    (folder,) = prepare(data, 320, cores, **task)
    return folder


def streams(folder: pathlib.Path) -> dict[str, list[list[int]]]:
    """The documents of each stream."""
    found = {}
    for split in ("train", "heldout"):
        stream = stream_of(folder, manifest_of(folder), split, 320)
        ids = stream.read(0, stream.length).tolist()
        found[split] = [ids[begin:end] for begin, end in stream.documents(0, stream.length)]
    return found


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def by_hand(prepared) -> Callable[..., dict[str, list[list[int]]]]:
    """What a plain loop makes of TEXTS, of which 45 are the first part's."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "tokenizer.model"))

    def plain(max_tokens: float = float("inf")) -> dict:
        found: dict[str, list[list[int]]] = {"train": [], "heldout": []}
        for number, text in enumerate(TEXTS):
            if sum(map(len, found["train"])) >= max_tokens:
                break
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_held_out = int.from_bytes(digest, "big") % 25 == 0 and number < 45
            ids = [model.bos_id(), *model.encode(text), model.eos_id()]
            found["heldout" if is_held_out else "train"].append(ids)
        return found

    return plain


@pytest.mark.quick
def test_documents_are_those_of_a_plain_loop(data_of, by_hand):
    folder = prepare_data(data_of())
    assert streams(folder) == by_hand()
    manifest = manifest_of(folder)
    assert manifest["rows"] == 200 and manifest["complete"] and len(manifest["files"]) == 3
    assert len(manifest["token_files"]["train"]) == 5


def test_bytes_do_not_depend_on_the_number_of_processes(data_of):
    assert contents(prepare_data(data_of("alone"))) == contents(prepare_data(data_of(), 3))


@pytest.mark.quick
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_tasks_prepare_the_parts_in_any_order(order, data_of, tmp_path):
    for number in order:
        folder = prepare_data(data_of(), task=(number, 3))
        assert not manifest_of(folder)["complete"]
    assert len([*(tmp_path / "out").glob("*.json")]) == 1 + 5
    assert contents(prepare_data(data_of())) == contents(prepare_data(data_of("alone")))


@pytest.mark.quick
@pytest.mark.parametrize("limit", [3700, 5000, 9000])
@pytest.mark.parametrize("characters", [1, 1 << 18])
def test_max_tokens_end_the_text_at_a_document(limit, characters, data_of, by_hand, monkeypatch):
    monkeypatch.setattr(parts, "CHUNK_CHARACTERS", characters)
    folder = prepare_data(data_of(max_tokens=limit))
    assert streams(folder) == by_hand(limit)
    needed = len(manifest_of(folder)["token_files"]["train"])
    assert len([*folder.glob("train-*.json")]) == needed


def test_two_at_once_write_equal_bytes(data_of):
    pids = []
    for _ in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            prepare_data(data_of(), task=(0, 1))
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert contents(prepare_data(data_of())) == contents(prepare_data(data_of("alone")))


@pytest.mark.quick
@pytest.mark.parametrize("name, end", [("a.jsonl", "\n"), ("b.jsonl", "\n\n"), ("a.parquet", "")])
def test_each_row_of_a_divided_file_is_in_one_range(name, end, tmp_path):
    texts = [words(i, i % 7) + str(i) for i in range(40)]
    path = tmp_path / name
    path.write_text(end.join(json.dumps({"text": text}) for text in texts))
    if name == "a.parquet":
        table = pytest.importorskip("pyarrow").table({"text": texts})
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=3)
    data = make_config(data={"source": str(path)}).data
    ((file,), _) = list_files(data)
    for size in (1, 2, 7, 50, 333, 1000, 9999):
        borders = range(0, file.size, size)
        ranges = [ByteRange(file, a, b) for a, b in itertools.zip_longest(borders, borders[1:])]
        assert [*itertools.chain(*(documents(data, [r]) for r in ranges))] == texts


# What is held out

HELD_OUT = [  # whole_documents, sizes of the documents, the first token that is held out
    (False, [60] * 200, 12_000 - 120),
    (False, [50, 100, 350], 495),
    (True, [8000, 400], 8000),
    (False, [1], 0),
]


@pytest.mark.quick
@pytest.mark.parametrize("whole_documents, sizes, first", HELD_OUT)
def test_without_a_document_by_hash_the_end_of_the_first_part_is_held_out(
    whole_documents, sizes, first, tmp_path
):
    train, heldout = (TokenWriter(tmp_path / f"{split}.bin", "uint16") for split in "ab")
    ids = np.arange(sum(sizes), dtype=np.uint16)
    ends = [*itertools.accumulate(sizes)]
    for end, size in zip(ends, sizes):
        train.append(ids[end - size : end].tobytes(), 10 * size)
    hold_out_end(train, heldout, whole_documents)
    train.publish(counts_bytes=False)
    heldout.publish(counts_bytes=True)
    assert np.fromfile(tmp_path / "a.bin", np.uint16).tolist() == ids[:first].tolist()
    assert np.fromfile(tmp_path / "b.bin", np.uint16).tolist() == ids[first:].tolist()
    assert train.ends.tolist() == sorted({*(end for end in ends if end <= first), first} - {0})
    assert heldout.ends.tolist() == [end - first for end in ends if end > first]
    assert np.fromfile(tmp_path / "b.sizes.bin", "<i8").sum() == 10 * (sum(sizes) - first)


def test_with_validation_text_of_ones_own_nothing_else_is_held_out(data_of, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(as_rows(TEXTS[50:130]))
    folder = prepare_data(data_of(validation=str(own)))
    assert [*map(len, streams(folder).values())] == [200, 80]
    assert len(manifest_of(folder)["token_files"]["heldout"]) == 2
    own.write_text(as_rows(TEXTS[50:131]))
    with refuses("own.jsonl was changed"):
        prepare_data(data_of(validation=str(own)))


# Wrong rows, changed files


@pytest.mark.parametrize("cores", [1, 2])
def test_wrong_rows_are_all_named_and_a_mended_file_alone_is_prepared_again(cores, data_of, source):
    files = [source / "b.jsonl", source / "c.jsonl"]
    right = [file.read_text() for file in files]
    for file, text in zip(files, right):
        file.write_text(text + WRONG)
    with refuses(r"b\.jsonl: row 46: .*must be text", r"c\.jsonl: row 16: "):
        prepare_data(data_of(), cores)
    folder = source.parent / "out"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("train-*.json")}
    assert len(before) == 3
    for file, text in zip(files, right):
        file.write_text(text)
    assert streams(prepare_data(data_of(), cores)) == streams(prepare_data(data_of("straight")))
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_at_most_one_row_in_a_hundred_is_left_out(data_of, source, by_hand):
    path = source / "b.jsonl"
    path.write_text(WRONG + path.read_text() + WRONG)
    folder = prepare_data(data_of(bad_rows="skip"))
    assert streams(folder) == by_hand()
    assert (manifest_of(folder)["rows"], manifest_of(folder)["wrong"]) == (202, 2)
    path.write_text(path.read_text() + WRONG)
    with refuses("3 of 203 rows are wrong"):
        prepare_data(data_of("other", bad_rows="skip"))


def test_a_byte_that_was_changed_is_found_by_its_hash(data_of, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(make_config(data=config.to_dict(data_of()))))
    assert main([str(path)]) == main([str(path)]) == 0
    with (tmp_path / "out/train-00002.bin").open("r+b") as file:
        file.write(b"xy")
    with refuses("train-00002.bin: was changed since"):
        main([str(path)])


# Killed


def killed_at(operation: int, folder: str, work: Callable[[], Any]) -> bool:
    """Whether a process that works was killed before so many changes of files below a folder."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    left = operation

    def audit(name: str, arguments: tuple) -> None:
        nonlocal left
        changes = name in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        if name == "open":
            changes = bool((arguments[2] or 0) & os.O_ACCMODE)
        if changes and str(arguments[0]).startswith(folder):
            left -= 1
            if not left:
                os._exit(9)  # buffers are lost, and nothing is cleaned up

    sys.addaudithook(audit)
    work()
    os._exit(0)


def test_killed_between_any_two_file_operations_it_resumes_to_equal_bytes(
    data_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(Texts, "part_bytes", 20_000)
    straight = contents(prepare_data(data_of("straight")))
    killed = data_of("killed/out")
    for operation in itertools.count(1):
        if not killed_at(operation, str(tmp_path / "killed"), lambda: prepare_data(killed)):
            break
        assert contents(prepare_data(killed)) == straight
        shutil.rmtree(tmp_path / "killed")
    assert operation > 30


@pytest.mark.quick
def test_a_window_may_lie_in_several_parts(data_of):
    folder = prepare_data(data_of())
    stream = stream_of(folder, manifest_of(folder), "train", 320)
    texts = streams(folder)["train"]
    ids = [*itertools.chain(*texts)]
    begins = [0, *itertools.accumulate(map(len, texts))]
    draw = np.random.default_rng(0)
    for start, size in draw.integers(1, 4000, (200, 2)) + [[4000, 0]]:
        stop = int(start + size)
        assert stream.read(int(start), stop).tolist() == ids[start:stop]
        inside = [begin for begin in begins if start < begin < stop]
        assert stream.documents(int(start), stop) == [*zip([start, *inside], [*inside, stop])]


# A folder and its source

CHANGES = [
    (lambda source: (source / "c.jsonl").unlink(), "c.jsonl was removed", None),
    (lambda source: (source / "d.jsonl").write_text(WRONG), "d.jsonl was added", None),
    (lambda source: (source / "b.jsonl").write_text(WRONG), "b.jsonl was changed", None),
    (lambda source: os.utime(source / "b.jsonl"), None, "1 of 3 .* written anew .*/b.jsonl"),
    (shutil.rmtree, None, "the files of its train text are gone"),
    (lambda source: None, None, None),
]


@pytest.mark.quick
@pytest.mark.parametrize("change, problem, line", CHANGES)
def test_source_that_changed_since_is_refused_or_logged(
    change, problem, line, data_of, source, capfd
):
    prepare_data(data_of())
    warn_once.cache_clear()
    capfd.readouterr()
    change(source)
    if problem:
        with refuses(problem, "--data.path=.*out-2"):
            prepare_data(data_of())
        return
    prepare_data(data_of())
    log = capfd.readouterr().err
    assert re.search(line, log) if line else not log


@pytest.mark.quick
def test_each_launch_compares_the_source_with_its_text(data_of, source, capfd):
    cfg = make_config(data=config.to_dict(data_of()))
    prepare_data(cfg.data)
    launch.prepare(cfg, "", [])
    (source / "c.jsonl").unlink()
    with refuses("is not prepared, see above"):
        launch.prepare(cfg, "", [])
    assert "c.jsonl was removed" in capfd.readouterr().err


B, C = {"source": "b.jsonl", "weight": 0.5}, {"source": "c.jsonl", "weight": 0.5}
MIXTURE = {"source": None, "tokenizer": None}
OVERLAPS = [
    ({"source": "*.jsonl", "validation": "link.jsonl"}, "is in data.source and data.validation"),
    ({"sources": [{**B, "source": "*.jsonl"}, C], **MIXTURE}, "is in sources 1 and 2"),
    ({"sources": [{**B, "validation": "c.jsonl"}, C], **MIXTURE}, "data.source and data.valid"),
    ({"path": "out"}, r"\[data\] path: out lies in data.source"),
]


@pytest.mark.quick
@pytest.mark.parametrize("options, problem", OVERLAPS)
def test_file_that_is_read_for_two_purposes_is_refused(
    options, problem, data_of, source, tmp_path, monkeypatch
):
    """By its real path; before a tokenizer is trained."""
    monkeypatch.chdir(source)
    (source / "b.jsonl").rename(tmp_path / "elsewhere.jsonl")
    for name in ("b.jsonl", "link.jsonl"):
        (source / name).symlink_to(tmp_path / "elsewhere.jsonl")
    with refuses(problem):
        create_folders(data_of(**options), 320)


COLUMNS = [
    ({"body": "a", "id": 1}, {}, 'body, id; try data.text_field = "body"$'),
    ({"talk": [{}]}, {"format": "messages"}, 'talk; try data.messages_field = "talk"$'),
    ({"instruction": "a", "output": "b"}, {}, 'try data.format = "alpaca"$'),
]


@pytest.mark.quick
@pytest.mark.parametrize("row, options, problem", COLUMNS)
def test_first_row_without_the_column_is_refused_with_the_option_to_paste(
    row, options, problem, data_of, source
):
    """Even where wrong rows are left out."""
    for path in source.iterdir():
        path.write_text(json.dumps(row))
    with refuses("row 1: has no field .*, but ", problem):
        create_folders(data_of(bad_rows="skip", **options), 320)
