"""Text -> parts: their bytes are a function of the text, whoever prepares them, and whatever happens meanwhile."""

import hashlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import config
import system
from data.folder import manifest_of
from data.tokens import TokenStream, stream_of
from tests.conftest import make_config, refuses, words
from tools.prepare import parts
from tools.prepare.parts import TokenWriter, hold_out_end, parts_of
from tools.prepare.prepare import Preparation, main, prepare
from tools.prepare.row_format import Texts
from tools.prepare.source import ByteRange, SourceFile, documents, list_files

TEXTS = [words(i, 60 + 37 * i % 50) for i in range(200)]
WRONG = '{"text": 5}\n'
Text = tuple[config.Data, int]


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
def configure(source, prepared, tmp_path) -> Callable[..., Text]:
    """Of `source`, with the tokenizer of `prepared`, into tmp_path/out."""

    def configured(**options: Any) -> Text:
        given = {"source": str(source), "path": str(tmp_path / "out"), "tokenizer": str(prepared)}
        cfg = make_config(model={"vocab_size": 320}, data=given | options)
        return cfg.data, 320

    return configured


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
    """What a plain loop makes of texts, of which so many are the first part's."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "tokenizer.model"))

    def plain(texts: list[str], first_part: int, max_tokens: float = float("inf")) -> dict:
        found: dict[str, list[list[int]]] = {"train": [], "heldout": []}
        for number, text in enumerate(texts):
            if sum(map(len, found["train"])) >= max_tokens:
                break
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_held_out = int.from_bytes(digest, "big") % 25 == 0 and number < first_part
            ids = [model.bos_id(), *model.encode(text), model.eos_id()]
            found["heldout" if is_held_out else "train"].append(ids)
        return found

    return plain


def test_progress_is_in_tokens_parts_and_text_a_second(configure, monkeypatch, capfd):
    monkeypatch.setattr("tools.prepare.prepare.LOG_SECONDS", 0.001)
    data, vocab_size = configure()
    (folder,) = prepare(data, vocab_size)
    preparation = Preparation(folder, data)
    *done, last = [part for part in preparation.parts if part.split == "train"]
    for suffix in (".json", ".bin"):
        last.path(suffix).unlink()
    waits = iter([False, True])
    is_over: Any = types.SimpleNamespace(wait=lambda seconds: next(waits))
    preparation.print_progress(is_over)
    tokens = sum(length for _, _, length, *_ in manifest_of(folder)["token_files"]["train"][:-1])
    speed = sum(part.size for part in done) / 0.001 / 1e6
    expected = f"{tokens:,} tokens, {len(done)} of {len(done) + 1} parts, {speed:.1f} MB/s"
    assert expected in capfd.readouterr().err


# Bytes are a function of the text


@pytest.mark.quick
def test_documents_are_those_of_a_plain_loop(configure, by_hand):
    (folder,) = prepare(*configure())
    assert streams(folder) == by_hand(TEXTS, 45)
    manifest = manifest_of(folder)
    assert manifest["rows"] == 200 and manifest["complete"] and len(manifest["files"]) == 3
    assert len(manifest["token_files"]["train"]) == 5


@pytest.mark.parametrize("cores", [2, 3])
def test_bytes_do_not_depend_on_the_number_of_processes(cores, configure, tmp_path):
    (alone,) = prepare(*configure(path=str(tmp_path / "alone")), cores=1)
    (together,) = prepare(*configure(), cores=cores)
    assert contents(alone) == contents(together)


@pytest.mark.quick
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_tasks_prepare_the_parts_in_any_order(order, configure, tmp_path):
    (alone,) = prepare(*configure(path=str(tmp_path / "alone")), cores=1)
    folder = tmp_path
    for number in order:
        (folder,) = prepare(*configure(), cores=1, task=(number, 3))
        assert not manifest_of(folder)["complete"]
    assert len([*folder.glob("*.json")]) == 1 + 5
    prepare(*configure(), cores=1)
    assert contents(alone) == contents(folder)


@pytest.mark.quick
@pytest.mark.parametrize("limit", [3700, 5000, 9000])
@pytest.mark.parametrize("characters", [1, 1 << 18])
def test_max_tokens_end_the_text_at_a_document(limit, characters, configure, by_hand, monkeypatch):
    monkeypatch.setattr(parts, "CHUNK_CHARACTERS", characters)
    (folder,) = prepare(*configure(max_tokens=limit), cores=1)
    assert streams(folder) == by_hand(TEXTS, 45, limit)
    needed = len(manifest_of(folder)["token_files"]["train"])
    assert len([*folder.glob("train-*.json")]) == needed


def test_a_task_prepares_no_part_behind_max_tokens(configure):
    (folder,) = prepare(*configure(max_tokens=5000), cores=1, task=(0, 2))
    assert [path.stem for path in sorted(folder.glob("train-*.json"))] == [
        "train-00000",
        "train-00002",
    ]


def test_two_at_once_write_equal_bytes(configure, tmp_path):
    (alone,) = prepare(*configure(path=str(tmp_path / "alone")), cores=1)
    pids = []
    for _ in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            prepare(*configure(), cores=1, task=(0, 1))
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    (folder,) = prepare(*configure(), cores=1)
    assert contents(alone) == contents(folder)


# Which parts there are


@pytest.mark.quick
def test_parts_follow_from_the_sizes_alone(tmp_path):
    sizes = {
        "a.txt": 30,
        "b.jsonl": 60,
        "c.json.gz": 500,
        "d.jsonl": 450,
        "e.txt": 0,
        "f.parquet": 201,
    }
    source = [SourceFile(name, size) for name, size in sizes.items()]
    found = []
    for part in parts_of(tmp_path, "train", source, 100):
        found.append([(file.path, begin, end) for file, begin, end in part.ranges])
    assert found == [
        [("a.txt", 0, None), ("b.jsonl", 0, None), ("c.json.gz", 0, None)],
        *[[("d.jsonl", begin, begin + 112)] for begin in (0,)],
        [("d.jsonl", 112, 225)],
        [("d.jsonl", 225, 337)],
        [("d.jsonl", 337, None)],
        [("e.txt", 0, None), ("f.parquet", 0, 100)],
        [("f.parquet", 100, None)],
    ]


@pytest.mark.quick
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_each_row_of_a_divided_file_is_in_one_range(name, end, tmp_path):
    texts = [words(i, i % 7) + str(i) for i in range(40)]
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": text}) + end for text in texts).removesuffix("\n"))
    if name == "a.parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"text": texts})
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=3)
    data = make_config(data={"source": str(path)}).data
    ((file,), _) = list_files(data)
    for size in (1, 2, 7, 50, 333, 1000, 9999):
        borders = range(0, file.size, size)
        ranges = [ByteRange(file, a, b) for a, b in itertools.zip_longest(borders, borders[1:])]
        assert [*itertools.chain(*(documents(data, [r]) for r in ranges))] == texts


# What is held out


@pytest.mark.quick
@pytest.mark.parametrize(
    "whole_documents, sizes, first",
    [
        (False, [60] * 200, 12_000 - 120),
        (False, [50, 100, 350], 495),
        (True, [60] * 200, 12_000 - 120),
        (True, [70] * 200, 14_000 - 140),
        (True, [90] * 200, 18_000 - 180),
        (True, [8000, 400], 8000),
        (True, [9000], 0),
        (False, [1], 0),
    ],
)
def test_without_a_document_by_hash_the_end_of_the_first_part_is_held_out(
    whole_documents, sizes, first, tmp_path
):
    train, heldout = (TokenWriter(tmp_path / f"{split}.bin", "uint16") for split in "ab")
    ids = np.arange(sum(sizes), dtype=np.uint16)
    for end, size in zip(itertools.accumulate(sizes), sizes):
        train.append(ids[end - size : end].tobytes(), 10 * size)
    hold_out_end(train, heldout, whole_documents)
    train.publish(counts_bytes=False)
    heldout.publish(counts_bytes=True)
    assert np.fromfile(tmp_path / "a.bin", np.uint16).tolist() == ids[:first].tolist()
    assert np.fromfile(tmp_path / "b.bin", np.uint16).tolist() == ids[first:].tolist()
    ends = [*itertools.accumulate(sizes)]
    in_train = sorted({*(end for end in ends if end <= first), first} - {0})
    assert train.ends.tolist() == in_train
    assert heldout.ends.tolist() == [end - first for end in ends if end > first]
    assert np.fromfile(tmp_path / "b.sizes.bin", "<i8").sum() == 10 * (sum(sizes) - first)


def test_with_validation_text_of_ones_own_nothing_else_is_held_out(configure, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(as_rows(TEXTS[50:130]))
    (folder,) = prepare(*configure(validation=str(own)), cores=1)
    found = streams(folder)
    assert (len(found["train"]), len(found["heldout"])) == (200, 80)
    assert len(manifest_of(folder)["token_files"]["heldout"]) == 2
    own.write_text(as_rows(TEXTS[50:131]))
    with refuses("own.jsonl was changed"):
        prepare(*configure(validation=str(own)))


@pytest.mark.parametrize("text", ["", "wrong"])
def test_validation_text_without_a_token_is_refused(text, configure, tmp_path):
    (tmp_path / "own.jsonl").write_text(WRONG if text else as_rows([""]))
    expected = (
        "own.jsonl: row 1: .*must be text" if text else "own.jsonl: holds nothing to evaluate on"
    )
    with refuses(expected):
        prepare(*configure(validation=str(tmp_path / "own.jsonl")))


# Wrong rows, changed files


@pytest.mark.parametrize("cores", [1, 2])
def test_wrong_rows_are_all_named_and_a_mended_file_alone_is_prepared_again(
    cores, configure, source, tmp_path
):
    (straight,) = prepare(*configure(path=str(tmp_path / "straight")), cores=1)
    for name in ("b", "c"):
        lines = (source / f"{name}.jsonl").read_text().splitlines(True)
        lines[10] = WRONG
        (source / f"{name}.jsonl").write_text("".join(lines))
    with refuses(r"b\.jsonl: row 11: .*must be text", r"c\.jsonl: row 11: "):
        prepare(*configure(), cores=cores)
    folder = tmp_path / "out"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("train-*.json")}
    assert len(before) == 3
    (source / "b.jsonl").write_text(as_rows(TEXTS[:45]))
    (source / "c.jsonl").write_text(as_rows(TEXTS[45:60]))
    prepare(*configure(), cores=cores)
    assert streams(folder) == streams(straight)
    for name, time in before.items():
        assert (folder / name).stat().st_mtime_ns == time


@pytest.mark.parametrize("cores", [1, 3])
def test_a_part_behind_max_tokens_may_be_wrong(cores, configure, source, by_hand):
    path = source / "h.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join([*lines[:50], WRONG, *lines[50:]]))
    (folder,) = prepare(*configure(max_tokens=5000), cores=cores)
    assert streams(folder) == by_hand(TEXTS, 45, 5000)


@pytest.mark.parametrize("wrong", [2, 3])
def test_at_most_one_row_in_a_hundred_is_left_out(wrong, configure, source, by_hand, capfd):
    for name in "bch"[:wrong]:
        with (source / f"{name}.jsonl").open("a") as file:
            file.write(WRONG)
    if wrong == 3:
        with refuses("3 of 203 rows are wrong"):
            prepare(*configure(bad_rows="skip"))
        return
    (folder,) = prepare(*configure(bad_rows="skip"), cores=1)
    assert streams(folder) == by_hand(TEXTS, 45)
    assert "b.jsonl: row 46: field 'text' must be text, not int; left out" in capfd.readouterr().err
    assert (manifest_of(folder)["rows"], manifest_of(folder)["wrong"]) == (202, 2)


def test_a_byte_that_was_changed_is_found_by_its_hash(configure, tmp_path, capfd):
    data, _ = configure()
    path = tmp_path / "c.toml"
    path.write_text(
        config.to_toml(make_config(data=config.to_dict(data), model={"vocab_size": 320}))
    )
    assert main([str(path)]) == main([str(path)]) == 0
    assert "out is prepared: comparing its hashes" in capfd.readouterr().err
    with (tmp_path / "out/train-00002.bin").open("r+b") as file:
        file.write(b"xy")
    with refuses("train-00002.bin: was changed since"):
        main([str(path)])


# Killed


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Operations:
    """Counts changes of files below a folder, and syncs; kills before one."""

    def __init__(self) -> None:
        self.folder = "none"
        self.left = 0  # operations up to the one that is killed
        sys.addaudithook(self.audit)  # which cannot be taken away

    def audit(self, name: str, arguments: tuple) -> None:
        if name not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            return
        changes = name != "open" or (arguments[2] or 0) & os.O_ACCMODE
        if changes and str(arguments[0]).startswith(self.folder):
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0 and self.folder != "none":
            self.folder = "none"
            raise Killed


@pytest.fixture(scope="module")
def operations() -> Operations:
    return Operations()


def test_killed_between_any_two_file_operations_it_resumes_to_equal_bytes(
    operations, configure, tmp_path, monkeypatch
):
    # which resumes is another process than was killed
    monkeypatch.setattr(system, "process_name", lambda: f"host-{operations.folder == 'none'}")
    monkeypatch.setattr(os, "fsync", lambda handle: operations.count())
    monkeypatch.setattr(Texts, "part_bytes", 20_000)
    (straight,) = prepare(*configure(path=str(tmp_path / "straight")), cores=1)
    text = configure(path=str(tmp_path / "killed/out"))
    for operation in itertools.count(1):
        operations.folder = str(tmp_path / "killed")
        operations.left = operation
        try:
            (folder,) = prepare(*text, cores=1)
            break
        except Killed:
            (folder,) = prepare(*text, cores=1)
            assert contents(folder) == contents(straight)
            shutil.rmtree(tmp_path / "killed")
    operations.folder = "none"
    assert operation > 50


def test_a_killed_process_of_the_pool_ends_preparing(configure, monkeypatch):
    def killing(pool: Any) -> Any:
        pool.submit(signal.raise_signal, signal.SIGKILL)
        return pool

    monkeypatch.setattr(
        "tools.prepare.prepare.ProcessPoolExecutor",
        lambda *a: killing(processes_pool(*a)),
    )
    with pytest.raises(OSError, match="a process that tokenizes was killed"):
        prepare(*configure(), cores=2)


def processes_pool(*arguments: Any) -> Any:
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(*arguments)


# Reading


@pytest.mark.quick
def test_a_window_may_lie_in_several_parts(configure):
    (folder,) = prepare(*configure(), cores=1)
    stream = stream_of(folder, manifest_of(folder), "train", 320)
    texts = streams(folder)["train"]
    ids = [*itertools.chain(*texts)]
    begins = [0, *itertools.accumulate(map(len, texts))]
    draw = np.random.default_rng(0)
    for start, size in zip(draw.integers(0, len(ids) - 4000, 200), draw.integers(1, 4000, 200)):
        stop = int(start + size)
        assert stream.read(int(start), stop).tolist() == ids[start:stop]
        inside = [begin for begin in begins if start < begin < stop]
        assert stream.documents(int(start), stop) == [*zip([start, *inside], [*inside, stop])]


def test_parts_that_are_missing_or_cut_are_named(configure):
    (folder,) = prepare(*configure(), cores=1)
    path = folder / "train-00002.bin"
    os.truncate(path, path.stat().st_size - 2)
    (folder / "train-00003.bin").unlink()
    stream: TokenStream = stream_of(folder, manifest_of(folder), "train", 320)
    end = stream.file_ends[2]
    with refuses("train-00002.bin: ends before token"):
        stream.read(end - 5, end)
    with refuses("train-00003.bin: is missing"):
        stream.read(end, end + 1)
