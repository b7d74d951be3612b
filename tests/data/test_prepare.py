"""Text -> token files: the bytes are a function of the text, whatever happens meanwhile."""

import array
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import config
import tools.prepare.prepare
from config import ConfigError
from tools.prepare.begin import alone, begin_all, check_files, write_manifest
from data.dataset import open_dataset
from data.folder import (
    MANIFEST,
    common_tokenizer,
    folder_name,
    is_prepared,
    manifest_of,
    separated,
)
from tools.prepare.prepare import encoded_in_order, main, prepare, start_pool
from tools.prepare.writer import TokenWriter
from system import processes
from tests.conftest import make_config, needs_extra, refuses, run_tool, words

BORDERS = [0, 4096, 8192, 16384, 24576]  # tokens, as small_borders() sets them
TOKEN_FILES = ("train.bin", "train.ends.bin", "heldout.bin", "heldout.ends.bin")
TEXTS = [words(i, 60 + 37 * i % 50) for i in range(200)]
WRONG = '{"text": 5}\n'
Text = tuple[config.Data, int]
Configure = Callable[..., Text]
ByHand = Callable[..., dict[str, bytes]]


@pytest.fixture(autouse=True)
def small_borders(monkeypatch):
    """Some kilobytes of text have several segments and many records."""
    for module in ("data.order", "tools.prepare.prepare"):
        monkeypatch.setattr(f"{module}.HELD_OUT_OF", BORDERS[2])
    monkeypatch.setattr("tools.prepare.prepare.BATCH_CHARACTERS", 4000)
    monkeypatch.setattr("tools.prepare.prepare.RECORD_SECONDS", 0.0)
    processes.warn_once.cache_clear()


def as_rows(texts: Sequence[str | None]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    """TEXTS in two files, of which b.jsonl is read first."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "b.jsonl").write_text(as_rows(TEXTS[:100]))
    (folder / "c.jsonl").write_text(as_rows(TEXTS[100:]))
    return folder


def text_of(vocab_size: int = 320, **options: Any) -> Text:
    """Options of [data], and a model's vocab_size."""
    cfg = make_config(model={"vocab_size": vocab_size}, data=options)
    return cfg.data, vocab_size


@pytest.fixture
def configure(source, prepared, tmp_path) -> Configure:
    """Of `source`, with the tokenizer of `prepared`, into tmp_path/out."""

    def configured(**options: Any) -> Text:
        tokenizer = str(prepared / "tokenizer.model")
        given: dict[str, Any] = {"source": str(source), "path": str(tmp_path / "out")}
        return text_of(**given | {"tokenizer": tokenizer} | options)

    return configured


@pytest.fixture
def command(configure, tmp_path) -> list[str]:
    """The arguments of `python -m data.prepare`."""
    data, _ = configure()
    (tmp_path / "c.toml").write_text(config.to_toml(make_config(data=config.to_dict(data))))
    return [str(tmp_path / "c.toml")]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TOKEN_FILES}


@pytest.fixture
def by_hand(prepared) -> ByHand:
    """What a plain loop makes of texts."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "tokenizer.model"))

    def token_files(texts: list[str], max_tokens: float = float("inf")) -> dict[str, bytes]:
        tokens = {"train": array.array("H"), "heldout": array.array("H")}
        ends = {"train": array.array("q"), "heldout": array.array("q")}
        for text in texts:
            if len(tokens["train"]) >= max_tokens:
                break
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_held_out = int.from_bytes(digest, "big") % 25 == 0
            split = "heldout" if is_held_out and len(tokens["train"]) < BORDERS[2] else "train"
            tokens[split].extend([model.bos_id(), *model.encode(text), model.eos_id()])
            ends[split].append(len(tokens[split]))
        by_name = {f"{split}.bin": tokens[split].tobytes() for split in tokens}
        return by_name | {f"{split}.ends.bin": ends[split].tobytes() for split in ends}

    return token_files


# Bytes are a function of the text


@pytest.mark.quick
def test_token_files_and_their_record_are_those_of_a_plain_loop(configure, by_hand):
    (folder,) = prepare(*configure())
    expected = by_hand(TEXTS)
    assert contents(folder) == expected
    manifest = manifest_of(folder)
    train = expected["train.bin"]
    segments = [train[2 * begin : 2 * end] for begin, end in itertools.pairwise(BORDERS)]
    hashes = [hashlib.sha256(segment).hexdigest() for segment in segments if segment]
    assert manifest["segments"] == hashes and len(hashes) > 3
    held_out = expected["heldout.bin"]
    digest = hashlib.sha256(held_out).hexdigest()
    assert manifest["validation"] == ["heldout", 0, len(held_out) // 2, digest]
    assert manifest["tokens"] == {"train": len(train) // 2, "heldout": len(held_out) // 2}
    assert sum(manifest["documents"].values()) == 200 and manifest["complete"]
    assert not manifest["file_start"]  # which depends on when it was recorded


@pytest.mark.parametrize("workers, characters", [(1, 1), (2, 700), (4, 4000), (3, 1 << 18)])
def test_bytes_do_not_depend_on_threads_and_batches(
    workers, characters, configure, by_hand, monkeypatch
):
    monkeypatch.setattr("tools.prepare.prepare.BATCH_CHARACTERS", characters)
    assert contents(*prepare(*configure(), workers=workers)) == by_hand(TEXTS)


@pytest.mark.parametrize("limit", [2000, 9000])
@pytest.mark.parametrize("characters", [1 << 18, 4000, 1])
def test_max_tokens_end_the_text_at_a_document(limit, characters, configure, by_hand, monkeypatch):
    """What is held out ends there, too."""
    monkeypatch.setattr("tools.prepare.prepare.BATCH_CHARACTERS", characters)
    assert contents(*prepare(*configure(max_tokens=limit))) == by_hand(TEXTS, limit)


def test_a_wrong_row_behind_max_tokens_is_not_asked_for(configure, source, by_hand):
    break_at(source / "b.jsonl", 60)
    assert contents(*prepare(*configure(max_tokens=2000), workers=4)) == by_hand(TEXTS, 2000)


# What is held out


@pytest.mark.parametrize("held_out, expected", [(1, ["train", 495, 500]), (2, ["heldout", 0, 2])])
def test_validation_text_has_an_input_and_its_target(held_out, expected, configure):
    ((folder, _),) = begin_all(*configure())
    writer = TokenWriter(folder)
    writer.append("heldout", bytes(2 * held_out))
    writer.append("train", bytes(2 * 500))
    writer.complete()
    assert manifest_of(folder)["validation"][:3] == expected


@pytest.mark.parametrize(
    "whole_documents, sizes, first, end",
    [
        (False, [60] * 200, 8111, 8192),  # the last hundredth of the first 8192 tokens
        (True, [60] * 200, 8100, 8160),  # the document that ends in these
        (True, [20] * 600, 8100, 8180),  # also the one that 8111 cuts
        (True, [8100, 92, 100], 8100, 8192),
        (True, [8000, 400], 0, 8000),  # none ends in these: the last one before
        (True, [9000], 0, 0),
    ],
)
def test_without_a_document_by_hash_the_last_of_the_first_tokens_are_held_out(
    whole_documents, sizes, first, end, configure
):
    ((folder, _),) = begin_all(*configure())
    writer = TokenWriter(folder, whole_documents)
    ids = os.urandom(2 * sum(sizes))
    for border, size in zip(itertools.accumulate(sizes), sizes):
        writer.append("train", ids[2 * (border - size) : 2 * border])
    writer.complete()
    digest = hashlib.sha256(ids[2 * first : 2 * end]).hexdigest()
    assert manifest_of(folder)["validation"] == ["train", first, end, digest]


def test_with_validation_text_of_ones_own_nothing_else_is_held_out(configure, by_hand, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(as_rows(TEXTS[50:70]))
    (folder,) = prepare(*configure(validation=str(path)))
    assert manifest_of(folder)["documents"] == {"train": 200, "heldout": 20}
    for name, texts in (("heldout.bin", TEXTS[50:70]), ("train.bin", TEXTS)):
        expected = by_hand(texts)
        size = len(expected["train.bin"]) + len(expected["heldout.bin"])
        assert (folder / name).stat().st_size == size
    path.write_text(as_rows(TEXTS[50:71]))
    with refuses("own.jsonl was changed"):
        prepare(*configure(validation=str(path)))
    path.unlink()  # it was read
    prepare(*configure(validation=str(path)))


def test_validation_text_may_be_the_source_itself(configure, source):
    (folder,) = prepare(*configure(validation=str(source)))
    assert manifest_of(folder)["documents"] == {"train": 200, "heldout": 200}
    assert (folder / "train.bin").read_bytes() == (folder / "heldout.bin").read_bytes()


@pytest.mark.parametrize(
    "validation, expected",
    [
        ("no-such-split", ["validation = no-such-split", "no such file", "has splits"]),
        ("none.jsonl", ["none.jsonl", "no such file"]),
        ("empty.jsonl", ["validation = .*empty.jsonl", "nothing to evaluate"]),
        ("wrong.jsonl", ["wrong.jsonl", "3", "must be text"]),
    ],
)
def test_wrong_validation_text_is_refused(validation, expected, configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text(as_rows([""]))
    (tmp_path / "wrong.jsonl").write_text(as_rows(TEXTS[:2]) + WRONG)
    text = configure(validation=validation)
    with refuses(*expected):
        prepare(*text)
    if validation == "wrong.jsonl":
        (tmp_path / "wrong.jsonl").write_text(as_rows(TEXTS[:3]))
        (folder,) = prepare(*text)
        assert manifest_of(folder)["documents"] == {"train": 200, "heldout": 3}


# Killed


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Operations:
    """Counts changes of files below a folder, and syncs, before and after; kills before one."""

    def __init__(self) -> None:
        self.folder = "none"
        self.left = 0  # operations up to the one that is killed
        self.kill: Callable[[], object] = self.raise_killed
        sys.addaudithook(self.audit)  # which cannot be taken away

    def raise_killed(self) -> None:
        self.folder = "none"
        raise Killed

    def audit(self, name: str, arguments: tuple) -> None:
        if name not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            return
        changes = name != "open" or (arguments[2] or 0) & os.O_ACCMODE
        if changes and str(arguments[0]).startswith(self.folder):
            self.count()

    def fsync(self, handle: int) -> None:
        self.count()
        self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0 and self.folder != "none":
            self.kill()


@pytest.fixture(scope="module")
def installed_operations() -> Operations:
    return Operations()


@pytest.fixture
def operations(installed_operations, monkeypatch) -> Operations:
    monkeypatch.setattr(os, "fsync", installed_operations.fsync)
    return installed_operations


def lose_unsynced(folder: pathlib.Path, expected: dict[str, bytes]) -> None:
    """Checks that what is recorded is in the files, and writes over what is not, as a power cut
    may."""
    if not folder.exists():
        return
    manifest = manifest_of(folder)
    for split in ("train", "heldout"):
        recorded = {
            f"{split}.bin": 2 * manifest["tokens"][split],
            f"{split}.ends.bin": 8 * manifest["documents"][split],
        }
        for name, size in recorded.items():
            (folder / name).touch()
            content = (folder / name).read_bytes()[:size]
            assert content == expected[name][:size]
            (folder / name).write_bytes(content + b"\xff" * 1234)


@pytest.mark.parametrize("validation", [None, "own.jsonl"])
def test_killed_between_any_two_file_operations_it_resumes_to_equal_bytes(
    validation, operations, configure, tmp_path, monkeypatch
):
    monkeypatch.setattr("tools.prepare.prepare.BATCH_CHARACTERS", 20_000)
    processes = itertools.count()  # which resumes is another one than was killed
    monkeypatch.setattr("system.processes.process_name", lambda: f"host-{next(processes)}")
    monkeypatch.chdir(tmp_path)
    pathlib.Path("own.jsonl").write_text(as_rows(TEXTS[:40]))
    (straight,) = prepare(*configure(validation=validation, path=str(tmp_path / "straight")))
    folder = tmp_path / "killed/out"
    text = configure(validation=validation, path=str(folder))

    def is_killed_at(operation: int) -> bool:
        operations.folder = str(folder.parent)
        operations.left = operation
        try:
            prepare(*text, workers=1)
        except Killed:
            return True
        operations.folder = "none"
        return False

    operation = 1
    while is_killed_at(operation):
        lose_unsynced(folder, contents(straight))
        prepare(*text, workers=1)
        assert contents(folder) == contents(straight)
        assert (folder / MANIFEST).read_bytes() == (straight / MANIFEST).read_bytes()
        assert {path.name for path in folder.parent.iterdir()} == {"out", ".out.lock"}
        assert not list(folder.glob(".*"))
        shutil.rmtree(folder.parent)
        operation += 1
    assert operation > 50


def fork(work: Callable[[], object]) -> int:
    """Starts work() in a fork of this process, which exits with what it returns. Its id."""
    pid = os.fork()
    if pid == 0:
        code: object = 99
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        os._exit(code if isinstance(code, int) else 0)
    return pid


def exit_code(pid: int) -> int:
    """Waits for it. A signal's number is negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_bytes_are_synced_before_they_are_recorded(configure, monkeypatch):
    synced = {}
    recorded = []
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        real_fsync(handle)
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced[path.name] = os.fstat(handle).st_size

    def checked_write(folder: pathlib.Path, manifest: dict) -> None:
        for split in ("train", "heldout"):
            assert synced[f"{split}.bin"] >= 2 * manifest["tokens"][split]
            assert synced[f"{split}.ends.bin"] >= 8 * manifest["documents"][split]
        recorded.append(manifest["tokens"]["train"])
        write_manifest(folder, manifest)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("tools.prepare.writer.write_manifest", checked_write)
    prepare(*configure())
    assert len(recorded) > 5 and recorded == sorted(recorded)


def test_token_files_that_were_cut_are_refused(configure):
    (folder,) = prepare(*configure())
    manifest = manifest_of(folder)
    for name in TOKEN_FILES:
        write_manifest(folder, manifest | {"complete": False})
        size = (folder / name).stat().st_size
        os.truncate(folder / name, size - 1)
        with refuses(f"{name}: has fewer than its {size} recorded bytes", "delete"):
            prepare(*configure())
        os.truncate(folder / name, size)


@needs_extra("chat")
def test_a_killed_process_of_the_pool_ends_preparing(configure):
    """The launcher starts it again."""
    text, _ = configure(format="messages")
    pool = start_pool(text, 1)
    preparation = SimpleNamespace(encode=signal.raise_signal)
    batch: Any = SimpleNamespace(preparation=preparation, documents=signal.SIGKILL)
    with pytest.raises(OSError, match="a process that tokenizes was killed"):
        next(encoded_in_order(pool, iter([batch])))


# data.bad_rows = "skip"


@pytest.mark.parametrize("name", ["b.csv", "own.jsonl"])
def test_wrong_rows_are_left_out_and_counted_whatever_happens_meanwhile(
    name, operations, configure, source, by_hand, monkeypatch, capfd
):
    """Of texts to train on, and of validation texts: killed again and again by SIGKILL, one or two
    records further each time."""
    monkeypatch.chdir(source.parent)
    texts: list[str | None] = [*TEXTS]
    texts[57:57] = [None, None]
    for path in source.iterdir():
        path.write_text("")
    (source / "b.csv").write_text("\n".join(text or '"a"b' for text in ["text", *texts]))
    (source.parent / "own.jsonl").write_text(as_rows(texts))
    options = {"bad_rows": "skip", "validation": None if name == "b.csv" else "own.jsonl"}
    (straight,) = prepare(*configure(path="straight", **options))
    manifest = manifest_of(straight)
    assert manifest["rows"] == [202, 2]
    assert manifest.get("validation_rows") == (None if name == "b.csv" else [202, 2])
    assert "(0.990%) are wrong and left out" in capfd.readouterr().err
    if name == "b.csv":
        assert contents(straight) == by_hand(TEXTS)
    text = configure(path=str(source.parent / "out"), **options)
    ((folder, _),) = begin_all(*text)

    def killed_prepare() -> None:
        operations.folder = str(folder.parent)
        operations.left = 30
        operations.kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        prepare(*text, workers=1)

    records = set()
    while exit_code(fork(killed_prepare)) == -signal.SIGKILL:
        lose_unsynced(folder, contents(straight))
        records.add(manifest_of(folder)["tokens"]["train"])
    assert len(records) > 5 and contents(folder) == contents(straight)
    assert (folder / MANIFEST).read_bytes() == (straight / MANIFEST).read_bytes()


@pytest.mark.parametrize("name", ["source", "own.jsonl"])
def test_more_wrong_rows_are_refused_at_the_end(name, configure, source, monkeypatch):
    monkeypatch.chdir(source.parent)
    (source.parent / "own.jsonl").write_text(as_rows(TEXTS))
    options = {"bad_rows": "skip", "validation": None if name == "source" else "own.jsonl"}
    path = source / "b.jsonl" if name == "source" else source.parent / name
    path.write_text(path.read_text() + 3 * WRONG)
    with refuses(f"{name}: 3 of the first 203 rows are wrong"):
        prepare(*configure(**options))
    assert not is_prepared(*configure(**options))


def test_more_wrong_rows_are_refused_where_max_tokens_end_the_text(configure, source):
    (source / "b.jsonl").write_text(WRONG + as_rows(TEXTS[:100]))
    with refuses(r"1 of the first \d\d rows are wrong"):
        prepare(*configure(bad_rows="skip", max_tokens=2000))


# Wrong rows


def break_at(path: pathlib.Path, row: int, wrong: str = WRONG) -> list[str]:
    """Replaces a row by a wrong one. Returns the rows as they were."""
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[: row - 1], wrong, *rows[row:]]))
    return rows


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name, row", [("b", 1), ("b", 57), ("b", 100), ("c", 1), ("c", 99)])
def test_a_wrong_row_is_named_and_once_it_is_mended_preparing_resumes(
    name, row, workers, configure, source, by_hand
):
    rows = break_at(source / f"{name}.jsonl", row)
    with refuses(f"{name}.jsonl", str(row), "must be text"):
        prepare(*configure(), workers=workers)
    documents = sum(manifest_of(source.parent / "out")["documents"].values())
    assert documents == row - 1 + 100 * (name == "c")  # all before it is recorded
    (source / f"{name}.jsonl").write_text("".join(rows))
    assert contents(*prepare(*configure(), workers=workers)) == by_hand(TEXTS)


def test_a_row_that_is_mended_without_a_change_of_size_is_read_again(configure, source, by_hand):
    same_size = json.dumps({"body": TEXTS[159]}) + "\n"
    rows = break_at(source / "c.jsonl", 60, same_size)
    with refuses("c.jsonl", "60", "no field 'text'"):
        prepare(*configure())
    (source / "c.jsonl").write_text("".join(rows))
    assert contents(*prepare(*configure())) == by_hand(TEXTS)


@pytest.mark.parametrize("rows_kept", [slice(40), slice(None, None, -1), slice(1, None)])
def test_a_mended_file_with_other_text_before_the_row_is_refused(rows_kept, configure, source):
    rows = break_at(source / "c.jsonl", 60)
    with refuses("c.jsonl", "60"):
        prepare(*configure())
    (source / "c.jsonl").write_text("".join(rows[rows_kept]))
    for _ in range(2):
        with refuses("c.jsonl: has other text", "restore it", "--data.path=.*out-2"):
            prepare(*configure())


def test_what_was_not_read_yet_may_change(configure, source, by_hand):
    rows = break_at(source / "b.jsonl", 60)
    with refuses("b.jsonl", "60"):
        prepare(*configure())
    (source / "b.jsonl").write_text("".join([*rows[:59], *rows[70:]]))
    (source / "c.jsonl").write_text(as_rows(TEXTS[100:133]))
    expected = by_hand([*TEXTS[:59], *TEXTS[70:133]])
    assert contents(*prepare(*configure())) == expected


def test_a_mended_file_is_read_again_without_those_before_it(configure, source, by_hand):
    rows = break_at(source / "c.jsonl", 60)
    with refuses("c.jsonl", "60"):
        prepare(*configure())
    (source / "c.jsonl").write_text("".join(rows))
    (source / "b.jsonl").unlink()
    assert contents(*prepare(*configure())) == by_hand(TEXTS)


# The source's files


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_file_that_was_read_and_has_another_size_is_refused(is_complete, configure, source):
    rows = break_at(source / "c.jsonl", 60)
    with refuses("c.jsonl", "60"):
        prepare(*configure())
    if is_complete:
        (source / "c.jsonl").write_text("".join(rows))
        prepare(*configure())
    (source / "b.jsonl").write_text(as_rows(TEXTS[:99]))
    with refuses("b.jsonl was changed", "restore", "prepare it anew", "--data.path=") as refused:
        prepare(*configure())
    (source / "c.jsonl").write_text("".join(rows))
    path = str(refused.value).partition("--data.path=")[2]
    assert prepare(*configure(path=path)) == [source.parent / "out-2"]


def test_files_behind_max_tokens_may_change(configure, source):
    (folder,) = prepare(*configure(max_tokens=2000))
    (source / "c.jsonl").unlink()
    (source / "c.jsonl").write_text(as_rows(TEXTS[:3]))
    assert prepare(*configure(max_tokens=2000)) == [folder]
    (source / "b.jsonl").write_text(as_rows(TEXTS[:99]))
    with refuses("b.jsonl was changed"):
        prepare(*configure(max_tokens=2000))


def test_a_file_that_changes_while_it_is_read_is_refused(configure, source, monkeypatch):
    def change_and_check(*arguments: Any) -> None:
        (source / "c.jsonl").write_text(as_rows(TEXTS))
        check_files(*arguments)

    monkeypatch.setattr("tools.prepare.prepare.check_files", change_and_check)
    with refuses("c.jsonl was changed"):
        prepare(*configure())
    assert not is_prepared(*configure())


def test_an_added_file_is_refused_and_one_that_was_read_may_be_gone(configure, source):
    (folder,) = prepare(*configure())
    (source / "b.jsonl").unlink()
    prepare(*configure())
    (source / "d.jsonl").write_text(as_rows(["more"]))
    with refuses("d.jsonl was added"):
        prepare(*configure())
    shutil.rmtree(source)
    assert prepare(*configure()) == [folder]


@pytest.mark.parametrize(
    "content, is_tokenizer_given, vocab_size, expected",
    [
        ("", True, 320, ["in.jsonl: holds no text"]),
        (as_rows([""] * 5), True, 320, ["in.jsonl: holds no text"]),
        ("", False, 320, ["holds no text to train a tokenizer on$"]),
        (as_rows(["good text"]), False, 320, ["vocab_size = 320", "too little", "--model.vocab"]),
        (as_rows(TEXTS), False, 10, ["vocab_size = 10", r"smallest .*vocab_size=\d+$"]),
        (WRONG, False, 320, ["in.jsonl", "1", "must be text"]),
    ],
)
def test_too_little_text_is_refused(
    content, is_tokenizer_given, vocab_size, expected, prepared, tmp_path
):
    (tmp_path / "in.jsonl").write_text(content)
    options = {"source": str(tmp_path / "in.jsonl"), "path": str(tmp_path / "out")}
    if is_tokenizer_given:
        options["tokenizer"] = str(prepared)
    with refuses(*expected):
        prepare(*text_of(vocab_size, **options))
    assert (tmp_path / "out").exists() == is_tokenizer_given
    (tmp_path / "in.jsonl").write_text(as_rows(TEXTS))
    prepare(*text_of(**options))


# Which folder


def test_each_option_that_determines_the_bytes_determines_the_folder(prepared):
    def name(option: str, value: object, rows: int = 320) -> str:
        options = {"source": "a.jsonl", option: value}
        return folder_name(*text_of(rows, **options))

    determining = {
        "source": "b.jsonl",
        "subset": "de",
        "split": "test",
        "text_field": "body",
        "tokenizer": str(prepared),
        "max_tokens": 7,
        "validation": "c.jsonl",
        "bad_rows": "skip",
    }
    plain = name("source", "a.jsonl")
    names = [
        plain,
        name("source", "a.jsonl", rows=640),
        *itertools.starmap(name, determining.items()),
    ]
    assert len({*names}) == len(names)
    for option, value in (("order", "growing"), ("document_mask", True), ("path", "here")):
        assert name(option, value) == plain
    # the model may have more rows than a tokenizer that is named
    assert name("tokenizer", str(prepared), rows=640) == name("tokenizer", str(prepared))


def test_a_folder_of_another_configuration_is_refused_by_each_option(configure, prepared, tmp_path):
    """A tokenizer counts by its content, wherever it lies."""
    copy = shutil.copy(prepared / "tokenizer.model", tmp_path / "copy.model")
    (folder,) = prepare(*configure())
    assert prepare(*configure(tokenizer=str(copy))) == [folder]
    with pytest.raises(ConfigError) as refused:
        prepare(*configure(max_tokens=7, bad_rows="skip"))
    assert [re.sub(".* with |, the.*", "", problem) for problem in refused.value.problems] == [
        "max_tokens = None",
        "bad_rows = None",
    ]


@pytest.mark.parametrize(
    "name, content, expected",
    [
        (MANIFEST, "not JSON", ["manifest.json: is no record of prepared data", "move .*out away"]),
        (MANIFEST, "[]", ["is no record of prepared data"]),
        (MANIFEST, '{"files": {}}', ["is no record of prepared data"]),
        (MANIFEST, '{"identity": {"format": 4}}', ["another version", "format 4", "delete"]),
        ("notes.txt", "mine", ["out: exists but holds no prepared data", "move it away"]),
    ],
)
def test_a_folder_of_something_else_is_left_alone(name, content, expected, configure, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    with refuses(*expected):
        prepare(*configure())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_refused(path, configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses("path", "is the current folder or /"):
        prepare(*configure(path=path))


def test_a_complete_folder_needs_no_lock(configure, monkeypatch):
    """As on a disk that can only be read."""
    prepare(*configure())
    monkeypatch.setattr("system.files.lock", lambda path: pytest.fail("was locked"))
    prepare(*configure())


# A mixture


@pytest.fixture
def mixture(tmp_path) -> Configure:
    """Two sources of 100 texts, into tmp_path/mixed."""
    (tmp_path / "a.jsonl").write_text(as_rows(TEXTS[:100]))
    (tmp_path / "b.jsonl").write_text(as_rows(TEXTS[100:]).replace('"text"', '"body"'))

    def configured(**options: Any) -> Text:
        sources = [
            {"source": str(tmp_path / "a.jsonl"), "weight": 3.0, "max_tokens": 3000},
            {"source": str(tmp_path / "b.jsonl"), "weight": 1.0, "text_field": "body"},
        ]
        given: dict[str, Any] = {"sources": sources, "path": str(tmp_path / "mixed")}
        return text_of(**given | options)

    return configured


@pytest.mark.parametrize(
    "characters, from_a, from_b", [(400, 100, 100), (90_000, 34, 12), (120_000, 25, 9)]
)
def test_a_mixture_has_one_tokenizer_of_the_start_of_each_source(
    characters, from_a, from_b, mixture, tmp_path, monkeypatch
):
    """Of 4 million characters by the weights, up to the document with which a source has its
    share."""
    trained_on: list[str] = []

    def train(texts: list[str], vocab_size: int) -> bytes:
        trained_on.extend(texts)
        return real_train([*texts, *TEXTS], vocab_size)

    real_train = data.tokenizer_training.train_tokenizer
    monkeypatch.setattr("data.tokenizer_training.train_tokenizer", train)
    texts = {field: [field * (characters // 4)] * 100 for field in ("text", "body")}
    for name, field in (("a", "text"), ("b", "body")):
        rows = [json.dumps({field: text}) for text in texts[field]]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    text = mixture()
    assert not is_prepared(*text)
    folders = [folder for folder, _ in begin_all(*text)]
    assert trained_on == [*texts["text"][:from_a], *texts["body"][:from_b]]
    path = common_tokenizer(*text)
    assert path
    for folder in folders:
        assert (folder / "tokenizer.model").read_bytes() == path.read_bytes()


def test_sources_are_prepared_side_by_side(mixture, prepared, monkeypatch):
    monkeypatch.setattr("tools.prepare.prepare.BATCH_CHARACTERS", 1000)
    recorded = []
    real_record = TokenWriter.record

    def record(writer: TokenWriter) -> None:
        recorded.append("a" if "a.jsonl" in writer.folder.name else "b")
        real_record(writer)

    monkeypatch.setattr(TokenWriter, "record", record)
    prepare(*mixture(tokenizer=str(prepared)), workers=1)
    assert recorded[:6] == ["a", "b"] * 3


def test_options_that_a_source_leaves_out_are_those_of_data():
    given = {"subset": "en", "text_field": "body", "max_tokens": 9, "bad_rows": "skip"}
    other = {"subset": "de", "text_field": "text", "max_tokens": 7, "bad_rows": "refuse"}
    cfg = make_config(data={**given, "sources": [{"source": "a"}, {"source": "b", **other}]})
    first, second = map(config.to_dict, separated(cfg.data))
    assert first.items() >= given.items() and second.items() >= other.items()


def test_a_mixture_is_prepared_anew_next_to_the_folder_of_all(mixture, prepared, tmp_path):
    text = mixture(tokenizer=str(prepared))
    prepare(*text)
    (tmp_path / "b.jsonl").write_text("")
    with refuses("b.jsonl was changed", f"--data.path={tmp_path}/mixed-2$"):
        prepare(*text)


def test_two_sources_of_one_name_go_by_their_folders(mixture, prepared, tmp_path):
    sources = [{"source": f"{tmp_path}/a.jsonl", "max_tokens": limit} for limit in (500, 3000)]
    data, vocab_size = mixture(sources=sources, tokenizer=str(prepared))
    names = [folder.name for folder in prepare(data, vocab_size)]
    assert open_dataset(make_config(data=config.to_dict(data))).names == names


# Several processes


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_processes_at_once_write_what_one_does(
    has_locks, configure, by_hand, monkeypatch, capfd
):
    """Without locks one may fail over the other's temporary file, and is started again."""
    text = configure()
    if not has_locks:
        monkeypatch.setattr("system.files.lock", lambda path: SimpleNamespace(release=lambda: None))
        begin_all(*text)
    pids = [fork(lambda: prepare(*text, workers=1)) for _ in range(2)]
    codes = [exit_code(pid) for pid in pids]
    if has_locks:
        assert codes == [0, 0] and capfd.readouterr().err.count("tokens to train on") == 1
    assert contents(*prepare(*text)) == by_hand(TEXTS)


def test_a_source_that_another_process_prepares_is_waited_for(configure, capfd):
    text = configure()
    ((folder, _),) = begin_all(*text)
    with alone(folder):
        thread = threading.Thread(target=prepare, args=[*text, 1])
        thread.start()
        waiting = f"waiting for {processes.process_name()}, which prepares {folder}"
        output = ""
        while waiting not in output:
            output += capfd.readouterr().err
        assert not any(manifest_of(folder)["documents"].values())
    thread.join()
    assert is_prepared(*text)


def test_a_record_is_never_lowered(configure):
    ((folder, _),) = begin_all(*configure())
    ahead = TokenWriter(folder)
    behind = TokenWriter(folder)
    for writer, documents in ((ahead, 5), (behind, 3)):
        for _ in range(documents):
            writer.append("train", bytes(2 * 10))
        writer.record()
    assert manifest_of(folder)["tokens"]["train"] == 50


def test_a_folder_that_is_begun_anew_while_it_is_written_is_left_alone(configure):
    ((folder, _),) = begin_all(*configure())
    writer = TokenWriter(folder)
    writer.append("train", bytes(20))
    shutil.rmtree(folder)
    begin_all(*configure())
    with refuses("was deleted or begun anew"):
        writer.record()
    assert manifest_of(folder)["tokens"]["train"] == 0


# The command


def test_a_complete_folder_is_compared_with_its_hashes(command, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(command) == 0
    assert main(command) == 0
    for name, token, expected in (
        ("train.bin", 5000, "train.bin: tokens 4096 to 8192 were changed"),
        ("heldout.bin", 9, "heldout.bin: tokens 0 to"),
    ):
        before = (folder / name).read_bytes()
        changed = bytearray(before)
        changed[2 * token] ^= 1
        (folder / name).write_bytes(changed)
        assert run_tool(main, *command) == 2
        error = capsys.readouterr().err
        assert expected in error and f"delete {folder} to prepare it again" in error
        (folder / name).write_bytes(before)
    (folder / "train.bin").unlink()
    assert run_tool(main, *command) == 2
    assert "train.bin: is missing" in capsys.readouterr().err


@pytest.mark.quick
def test_the_cores_of_the_ranks_are_not_for_threads_that_tokenize(monkeypatch):
    monkeypatch.setattr("tools.prepare.prepare.usable_cores", lambda: 192)
    assert [tools.prepare.prepare.worker_count(ranks) for ranks in (0, 150, 192)] == [64, 42, 1]
