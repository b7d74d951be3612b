"""Text -> token files: the bytes are a function of the text, whatever happens meanwhile."""

import array
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import config
import files
from config import ConfigError
from data.begin import begin_all, check_files, take_lock
from data.folder import (
    MANIFEST,
    common_tokenizer,
    folder_name,
    is_prepared,
    manifest_of,
    source_folders,
    source_names,
    sources_of,
    write_manifest,
)
from data.prepare import Batch, encoded_in_order, main, prepare, start_pool
from data.writer import TokenWriter
from tests.conftest import make_config, needs_extra, refuses, words

BORDERS = [0, 4096, 8192, 16384, 24576]  # tokens, as small_borders() sets them
TOKEN_FILES = ("train.bin", "train.ends.bin", "heldout.bin", "heldout.ends.bin")


@pytest.fixture(autouse=True)
def small_borders(monkeypatch):
    """Some kilobytes of text have several segments and many records."""
    monkeypatch.setattr("data.order.FIRST_BORDER", 4096)
    monkeypatch.setattr("data.order.BORDER_STEP", 8192)
    for module in ("order", "writer", "prepare"):
        monkeypatch.setattr(f"data.{module}.HELD_OUT_OF", 4096)
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", 4000)
    monkeypatch.setattr("data.prepare.RECORD_SECONDS", 0.0)
    files.warn_once.cache_clear()


FIRST_TEXTS = [words(i, 60 + 37 * i % 50) for i in range(100)]
MORE_TEXTS = [words(i, 60 + 37 * i % 50) for i in range(100, 200)]
TEXTS = [*FIRST_TEXTS, *MORE_TEXTS]


def as_rows(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    """Two files, of which b.jsonl is read first."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "b.jsonl").write_text(as_rows(FIRST_TEXTS))
    (folder / "c.jsonl").write_text(as_rows(MORE_TEXTS))
    return folder


@pytest.fixture
def configure(source, prepared, tmp_path) -> Callable[..., config.Config]:
    """Of `source`, with the tokenizer of `prepared`, into tmp_path/out."""

    def configure_data(**data: object) -> config.Config:
        tokenizer = str(prepared / "tokenizer.model")
        given = {"source": str(source), "path": str(tmp_path / "out"), "tokenizer": tokenizer}
        return make_config(data={**given, **data})

    return configure_data


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TOKEN_FILES}


@pytest.fixture
def by_hand(prepared) -> Callable[..., dict[str, bytes]]:
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
            split = "heldout" if is_held_out and len(tokens["train"]) < BORDERS[1] else "train"
            tokens[split].extend([model.bos_id(), *model.encode(text), model.eos_id()])
            ends[split].append(len(tokens[split]))
        return {
            "train.bin": tokens["train"].tobytes(),
            "train.ends.bin": ends["train"].tobytes(),
            "heldout.bin": tokens["heldout"].tobytes(),
            "heldout.ends.bin": ends["heldout"].tobytes(),
        }

    return token_files


# Bytes are a function of the text


@pytest.mark.quick
def test_token_files_and_record_are_those_of_a_plain_loop(configure, by_hand):
    (folder,) = prepare(configure())
    expected = by_hand(TEXTS)
    assert contents(folder) == expected and len(expected["heldout.bin"]) > 100
    manifest = manifest_of(folder)
    train = expected["train.bin"]
    segments = [train[2 * a : 2 * b] for a, b in itertools.pairwise(BORDERS)]
    hashes = [hashlib.sha256(segment).hexdigest() for segment in segments if segment]
    assert manifest["segments"] == hashes and len(hashes) > 3
    held_out = expected["heldout.bin"]
    digest = hashlib.sha256(held_out).hexdigest()
    assert manifest["validation"] == ["heldout", 0, len(held_out) // 2, digest]
    assert manifest["tokens"] == {"train": len(train) // 2, "heldout": len(held_out) // 2}
    assert sum(manifest["documents"].values()) == 200 and manifest["complete"]


@pytest.mark.parametrize("workers, characters", [(1, 1), (2, 700), (4, 4000), (3, 1 << 18)])
def test_bytes_do_not_depend_on_threads_and_batches(
    workers, characters, configure, by_hand, monkeypatch
):
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", characters)
    (folder,) = prepare(configure(), workers)
    assert contents(folder) == by_hand(TEXTS)


def write_gzip(path: pathlib.Path) -> None:
    path.with_suffix(".json.gz").write_bytes(gzip.compress(as_rows(TEXTS).encode()))


def write_array(path: pathlib.Path) -> None:
    path.with_suffix(".json").write_text(json.dumps([{"text": text} for text in TEXTS]))


def write_crlf(path: pathlib.Path) -> None:
    rows = as_rows(TEXTS).replace("\n", "\r\n\r\n")
    path.with_suffix(".jsonl").write_bytes(b"\xef\xbb\xbf" + rows.encode())


def write_parquet(path: pathlib.Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": [*range(200)], "text": TEXTS})
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=30)


def write_arrow(path: pathlib.Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(path))


@pytest.mark.parametrize("write", [write_gzip, write_array, write_crlf, write_parquet, write_arrow])
def test_bytes_do_not_depend_on_the_kind_of_file(write, configure, by_hand, tmp_path):
    write(tmp_path / "texts")
    (path,) = tmp_path.glob("texts*")
    (folder,) = prepare(configure(source=str(path)))
    assert contents(folder) == by_hand(TEXTS)


@pytest.mark.parametrize("limit", [2000, 9000])
@pytest.mark.parametrize("characters", [1 << 18, 4000, 1])
def test_max_tokens_end_the_text_at_a_document(limit, characters, configure, by_hand, monkeypatch):
    """What is held out ends there, too."""
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", characters)
    (folder,) = prepare(configure(max_tokens=limit))
    assert contents(folder) == by_hand(TEXTS, limit)


def test_text_of_which_the_tokenizer_makes_nothing_is_left_out(configure, tmp_path, capsys):
    import tokenizers

    model = tokenizers.models.WordLevel({"cat": 0, "?": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_text(as_rows(["cat sat", "  "] * 20))
    data = {"source": str(tmp_path / "in.jsonl"), "tokenizer": str(tmp_path / "tokenizer.json")}
    (folder,) = prepare(configure(**data))
    assert manifest_of(folder)["left_out"] == 20
    assert (folder / "train.bin").read_bytes() == array.array("H", [0, 1] * 20).tobytes()
    assert "has no EOS token" in capsys.readouterr().err


# What is held out


@pytest.mark.parametrize("held_out, expected", [(1, ["train", 495, 500]), (2, ["heldout", 0, 2])])
def test_validation_text_has_an_input_and_its_target(held_out, expected, configure):
    ((folder, _),) = begin_all(configure())
    writer = TokenWriter(folder)
    writer.append("heldout", bytes(2 * held_out))
    writer.append("train", bytes(2 * 500))
    writer.complete()
    assert manifest_of(folder)["validation"][:3] == expected


def test_without_a_document_that_is_held_out_the_last_hundredth_of_the_first_tokens_is(configure):
    ((folder, _),) = begin_all(configure())
    writer = TokenWriter(folder)
    ids = os.urandom(2 * 6000)
    for i in range(0, len(ids), 2 * 60):
        writer.append("train", ids[i : i + 2 * 60])
    writer.record()
    digest = hashlib.sha256(ids[2 * 4056 : 2 * 4096]).hexdigest()
    assert manifest_of(folder)["validation"] == ["train", 4056, 4096, digest]


@pytest.mark.parametrize(
    "sizes, first, end",
    [
        ([30] * 200, 4050, 4080),  # the only one that ends in tokens 4056 to 4096
        ([10] * 600, 4050, 4090),  # with the one that 4056 cuts
        ([4050, 46, 100], 4050, 4096),
        ([4000, 200], 0, 4000),  # none does: the last one before
        ([5000], 0, 0),
    ],
)
def test_conversations_are_held_out_whole(sizes, first, end, configure):
    ((folder, _),) = begin_all(configure())
    writer = TokenWriter(folder, whole_documents=True)
    for size in sizes:
        writer.append("train", bytes(2 * size))
    writer.complete()
    assert manifest_of(folder)["validation"][:3] == ["train", first, end]


def test_validation_text_of_ones_own(configure, by_hand, tmp_path):
    """Nothing else is held out, whatever its hash."""
    (tmp_path / "own.jsonl").write_text(as_rows(TEXTS[50:70]))
    (folder,) = prepare(configure(validation=str(tmp_path / "own.jsonl")))
    held_out = by_hand(TEXTS[50:70])
    train = by_hand(TEXTS)
    manifest = manifest_of(folder)
    assert manifest["documents"] == {"train": 200, "heldout": 20}
    sizes = {name: len(content) for name, content in contents(folder).items()}
    assert sizes["heldout.bin"] == len(held_out["heldout.bin"]) + len(held_out["train.bin"])
    assert sizes["train.bin"] == len(train["heldout.bin"]) + len(train["train.bin"])
    (tmp_path / "own.jsonl").write_text(as_rows(TEXTS[50:71]))
    with refuses("own.jsonl was changed"):
        prepare(configure(validation=str(tmp_path / "own.jsonl")))
    (tmp_path / "own.jsonl").unlink()  # what was read may be gone
    prepare(configure(validation=str(tmp_path / "own.jsonl")))


@pytest.mark.parametrize(
    "validation, expected",
    [
        ("no-such-split", ["validation = no-such-split", "no such file", "no such split"]),
        ("none.jsonl", ["none.jsonl", "no such file"]),
        ("empty.jsonl", ["validation = .*empty.jsonl", "nothing to evaluate"]),
        ("wrong.jsonl", ["wrong.jsonl", "3", "must be text"]),
    ],
)
def test_wrong_validation_text_is_refused(validation, expected, configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text(as_rows([""]))
    (tmp_path / "wrong.jsonl").write_text(as_rows(TEXTS[:2]) + '{"text": 5}\n')
    cfg = configure(validation=validation)
    with refuses(*expected):
        prepare(cfg)
    if validation == "wrong.jsonl":
        (tmp_path / "wrong.jsonl").write_text(as_rows(TEXTS[:3]))
        (folder,) = prepare(cfg)
        assert manifest_of(folder)["documents"] == {"train": 200, "heldout": 3}


# Killed


def in_fork(work: Callable[[], object]) -> int:
    """The exit status of a fork of this process that calls work(): minus a signal's number."""
    pid = os.fork()
    if pid == 0:
        code = 99
        with contextlib.suppress(BaseException):
            code = work() or 0
        os._exit(code if isinstance(code, int) else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Operations:
    """Counts changes of files below a folder, and syncs, before and after; kills before one."""

    def __init__(self) -> None:
        self.folder = "none"
        self.left = 0  # operations before the one that is killed
        self.kill: Callable[[], object] = self.stop
        sys.addaudithook(self.audit)

    def stop(self) -> None:
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
        sizes = {
            f"{split}.bin": 2 * manifest["tokens"][split],
            f"{split}.ends.bin": 8 * manifest["documents"][split],
        }
        for name, size in sizes.items():
            path = folder / name
            recorded = path.read_bytes()[:size] if path.exists() else b""
            assert recorded == expected[name][:size]
            path.write_bytes(recorded + b"\xff" * 1234)


@pytest.mark.parametrize("validation", [None, "own.jsonl"])
def test_killed_between_any_two_file_operations_it_resumes_to_equal_bytes(
    validation, operations, configure, tmp_path, monkeypatch
):
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", 20_000)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("own.jsonl").write_text(as_rows(TEXTS[:40]))
    (straight,) = prepare(configure(validation=validation, path=str(tmp_path / "straight")))
    path = tmp_path / "killed/out"
    cfg = configure(validation=validation, path=str(path))

    def is_killed_at(operation: int) -> bool:
        operations.folder = str(path.parent)
        operations.left = operation
        try:
            prepare(cfg, 1)
        except Killed:
            return True
        operations.folder = "none"
        return False

    operation = 1
    while is_killed_at(operation):
        lose_unsynced(path, contents(straight))
        prepare(cfg, 1)
        assert contents(path) == contents(straight)
        assert (path / MANIFEST).read_bytes() == (straight / MANIFEST).read_bytes()
        assert {each.name for each in path.parent.iterdir()} == {"out", ".out.lock"}
        assert not list(path.glob(".*"))
        shutil.rmtree(path.parent)
        operation += 1
    assert operation > 50


def test_killed_again_and_again_it_resumes_to_equal_bytes(operations, configure, by_hand):
    """The process, one or two records further each time."""
    cfg = configure()
    ((folder, _),) = begin_all(cfg)

    def killed_prepare() -> None:
        operations.folder = str(folder.parent)
        operations.left = 30
        operations.kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        prepare(cfg, 1)

    records = set()
    while in_fork(killed_prepare) == -signal.SIGKILL:
        lose_unsynced(folder, by_hand(TEXTS))
        records.add(manifest_of(folder)["tokens"]["train"])
    assert contents(folder) == by_hand(TEXTS) and len(records) > 5


def test_bytes_are_synced_before_they_are_recorded(configure, monkeypatch):
    synced = {}
    real_fsync = os.fsync
    real_write = write_manifest

    def fsync(handle: int) -> None:
        real_fsync(handle)
        name = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}")).name
        synced[name] = os.fstat(handle).st_size

    def checked_write(folder: pathlib.Path, manifest: dict) -> None:
        for split in ("train", "heldout"):
            assert synced[f"{split}.bin"] >= 2 * manifest["tokens"][split]
            assert synced[f"{split}.ends.bin"] >= 8 * manifest["documents"][split]
        recorded.append(manifest["tokens"]["train"])
        real_write(folder, manifest)

    recorded: list[int] = []
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("data.writer.write_manifest", checked_write)
    prepare(configure())
    assert len(recorded) > 5 and recorded == sorted(recorded)


def test_a_full_disk_ends_with_1_and_the_same_command_resumes(configure, tmp_path, by_hand, capfd):
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(configure()))

    def on_small_disk() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return main([str(path)])

    assert in_fork(on_small_disk) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"{tmp_path / 'out'}: File too large; the same command resumes"]
    assert main([str(path)]) == 0
    assert contents(tmp_path / "out") == by_hand(TEXTS)


@needs_extra("chat")
def test_a_killed_process_of_the_pool_ends_preparing(configure):
    pool = start_pool(configure(format="messages"), 1)
    batch: Any = Batch(SimpleNamespace(encode=signal.raise_signal), signal.SIGKILL)
    with pytest.raises(OSError, match="a process that tokenizes was killed"):
        next(encoded_in_order(pool, iter([batch])))


# Wrong rows


WRONG = '{"text": 5}\n'


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name, row", [("b", 1), ("b", 57), ("b", 100), ("c", 1), ("c", 99)])
def test_a_wrong_row_is_named_and_once_it_is_mended_preparing_resumes(
    name, row, workers, configure, source, by_hand
):
    path = source / f"{name}.jsonl"
    good = path.read_text()
    rows = good.splitlines(keepends=True)
    path.write_text("".join([*rows[: row - 1], WRONG, *rows[row:]]))
    with refuses(f"{name}.jsonl", str(row), "must be text"):
        prepare(configure(), workers)
    documents = sum(manifest_of(pathlib.Path(configure().data.path))["documents"].values())
    assert documents == row - 1 + 100 * (name == "c")  # all before it is recorded
    assert is_prepared(configure(), whole=False) == (documents > 0)
    path.write_text(good)
    (folder,) = prepare(configure(), workers)
    assert contents(folder) == by_hand(TEXTS)


def break_at(path: pathlib.Path, row: int, wrong: str = WRONG) -> list[str]:
    """Replaces a row by a wrong one. Returns the rows as they were."""
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[: row - 1], wrong, *rows[row:]]))
    return rows


def test_a_row_mended_without_a_change_of_size_is_read_again(configure, source, by_hand):
    rows = (source / "c.jsonl").read_text().splitlines(keepends=True)
    break_at(source / "c.jsonl", 60, rows[59].replace('"text"', '"body"'))
    with refuses("c.jsonl", "60", "no field 'text'"):
        prepare(configure())
    (source / "c.jsonl").write_text("".join(rows))
    assert contents(*prepare(configure())) == by_hand(TEXTS)


@pytest.mark.parametrize(
    "mended", [lambda rows: rows[:40], lambda rows: rows[::-1], lambda rows: rows[1:]]
)
def test_a_mended_file_with_other_text_before_the_row_is_refused(mended, configure, source):
    rows = break_at(source / "c.jsonl", 60)
    with refuses("c.jsonl", "60"):
        prepare(configure())
    (source / "c.jsonl").write_text("".join(mended(rows)))
    for _ in range(2):
        with refuses("c.jsonl: has other text", "restore it, or delete the folder"):
            prepare(configure())


def test_what_was_not_read_yet_may_change(configure, source, by_hand):
    rows = break_at(source / "b.jsonl", 60)
    with refuses("b.jsonl", "60"):
        prepare(configure())
    (source / "b.jsonl").write_text("".join([*rows[:59], *rows[70:]]))
    (source / "c.jsonl").write_text(as_rows(MORE_TEXTS[:33]))
    texts = [*FIRST_TEXTS[:59], *FIRST_TEXTS[70:], *MORE_TEXTS[:33]]
    assert contents(*prepare(configure())) == by_hand(texts)


def test_rows_left_out_are_counted_once_if_a_file_is_read_again(configure, source, tmp_path):
    import tokenizers

    model = tokenizers.models.WordLevel({"cat": 0, "?": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (source / "b.jsonl").write_text(as_rows(["cat " * 500, " "] * 30))
    rows = break_at(source / "b.jsonl", 51)
    cfg = configure(tokenizer=str(tmp_path / "tokenizer.json"))
    with refuses("b.jsonl", "51"):
        prepare(cfg)
    (source / "b.jsonl").write_text("".join(rows))
    (folder,) = prepare(cfg)
    assert manifest_of(folder)["left_out"] == 30


# The source's files


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_file_that_was_read_and_has_another_size_is_refused(is_complete, configure, source):
    rows = break_at(source / "c.jsonl", 60)
    with refuses("c.jsonl", "60"):
        prepare(configure())
    if is_complete:
        (source / "c.jsonl").write_text("".join(rows))
        prepare(configure())
    (source / "b.jsonl").write_text(as_rows([*FIRST_TEXTS, "more"]))
    with refuses("b.jsonl was changed", "restore", "delete the folder", "data.path"):
        prepare(configure())


def test_a_file_that_has_another_time_alone_is_taken_for_unchanged(configure, source, capsys):
    (folder,) = prepare(configure())
    before = contents(folder)
    os.utime(source / "b.jsonl", (1, 1))
    prepare(configure())
    assert "b.jsonl: has another time" in capsys.readouterr().err
    assert contents(folder) == before


def test_an_added_file_is_refused_and_one_that_was_read_may_be_gone(configure, source):
    (folder,) = prepare(configure())
    (source / "b.jsonl").unlink()
    prepare(configure())
    (source / "d.jsonl").write_text(as_rows(["more"]))
    with refuses("d.jsonl was added"):
        prepare(configure())
    shutil.rmtree(source)
    assert prepare(configure()) == [folder]


def test_a_file_that_changes_while_it_is_read_is_refused(configure, source, monkeypatch):
    def change_and_check(*arguments: Any) -> None:
        (source / "c.jsonl").write_text(as_rows(TEXTS))
        check_files(*arguments)

    monkeypatch.setattr("data.prepare.check_files", change_and_check)
    with refuses("c.jsonl was changed"):
        prepare(configure())
    assert not is_prepared(configure())


# Which folder


def test_each_option_that_determines_the_bytes_determines_the_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    def name(**data: object) -> str:
        return folder_name(make_config(data={"source": "a.jsonl", **data}))

    determining = {
        "source": "b.jsonl",
        "subset": "de",
        "split": "test",
        "text_field": "body",
        "tokenizer": str(tmp_path),
        "max_tokens": 7,
        "validation": "c.jsonl",
    }
    names = [name(), *(name(**{key: value}) for key, value in determining.items())]
    assert len({*names}) == len(names)
    for others in ({"order": "growing"}, {"document_mask": True}, {"path": "here"}):
        assert name(**others) == names[0]
    assert (
        folder_name(make_config(model={"vocab_size": 640}, data={"source": "a.jsonl"})) not in names
    )


def test_a_tokenizer_counts_by_its_content_wherever_it_lies(prepared, corpus, tmp_path):
    shutil.copy(prepared / "tokenizer.model", tmp_path / "copy.model")
    data = {"source": str(corpus), "path": str(prepared)}
    named = make_config(data={**data, "tokenizer": str(tmp_path / "copy.model")})
    assert prepare(named) == [prepared]  # it was trained for this folder
    (tmp_path / "copy.model").write_bytes(b"\n other")
    with refuses("was prepared with tokenizer = 'trained here'", "delete the folder or name"):
        prepare(named)


def test_a_folder_of_another_configuration_is_refused_by_each_option(configure, source, tmp_path):
    (folder,) = prepare(configure())
    with pytest.raises(ConfigError) as refused:
        prepare(configure(max_tokens=7, text_field="body"))
    remedy = "delete the folder or name another data.path"
    assert refused.value.problems == (
        f"{folder}: was prepared with text_field = 'text', the configuration says 'body'; {remedy}",
        f"{folder}: was prepared with max_tokens = None, the configuration says 7; {remedy}",
    )


@pytest.mark.parametrize(
    "content, expected",
    [
        ("not JSON", ["manifest.json: is no record of prepared data", "move .*out away"]),
        ("[]", ["is no record of prepared data"]),
        ('{"files": {}}', ["is no record of prepared data"]),
        ('{"identity": {"format": 4}}', ["another version", "format 4", "delete the folder"]),
        (None, ["out: exists but holds no prepared data", "move it away"]),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_alone(
    content, expected, configure, tmp_path
):
    (tmp_path / "out").mkdir()
    name = "notes.txt" if content is None else MANIFEST
    (tmp_path / "out" / name).write_text(content or "mine")
    with refuses(*expected):
        prepare(configure())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_refused(path, configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses("path", "is the current folder or /"):
        prepare(configure(path=path))


def test_a_complete_folder_needs_no_lock(configure, monkeypatch):
    """As on a disk that can only be read."""
    prepare(configure())
    monkeypatch.setattr("files.lock", lambda path: pytest.fail("was locked"))
    prepare(configure())


@pytest.mark.parametrize(
    "source, vocab_size, expected",
    [
        (as_rows(["a good text"]), 320, ["vocab_size = 320", "too little", "--model.vocab_size="]),
        (as_rows(TEXTS), 10, ["vocab_size = 10", "too small", "--model.vocab_size="]),
        (as_rows([""] * 5), 320, ["too little|holds no text|no tokenizer could be trained"]),
        ("", 320, ["too little|holds no text|no tokenizer could be trained"]),
        (WRONG, 320, ["in.jsonl", "1", "must be text"]),
    ],
)
def test_a_source_without_a_tokenizer_in_it_is_refused(source, vocab_size, expected, tmp_path):
    (tmp_path / "in.jsonl").write_text(source)
    data = {"source": str(tmp_path / "in.jsonl"), "path": str(tmp_path / "out")}
    with refuses(*expected):
        prepare(make_config(model={"vocab_size": vocab_size}, data=data))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", as_rows([""] * 5)])
def test_a_source_without_text_is_refused(text, configure, tmp_path):
    (tmp_path / "in.jsonl").write_text(text)
    with refuses("in.jsonl: holds no text"):
        prepare(configure(source=str(tmp_path / "in.jsonl")))


# A mixture


@pytest.fixture
def mixture(tmp_path) -> Callable[..., config.Config]:
    (tmp_path / "a.jsonl").write_text(as_rows(FIRST_TEXTS))
    (tmp_path / "b.jsonl").write_text(as_rows(MORE_TEXTS).replace('"text"', '"body"'))

    def configure_data(**data: object) -> config.Config:
        sources = [
            {"source": str(tmp_path / "a.jsonl"), "weight": 3.0, "max_tokens": 3000},
            {"source": str(tmp_path / "b.jsonl"), "weight": 1.0, "text_field": "body"},
        ]
        return make_config(data={"sources": sources, "path": str(tmp_path / "mixed"), **data})

    return configure_data


def test_a_mixture_has_one_tokenizer_of_all_sources_by_their_weights(mixture, monkeypatch):
    import data.tokenizer_training

    real = data.tokenizer_training.train_tokenizer
    trained_on = []

    def train(texts: list[str], vocab_size: int) -> bytes:
        trained_on.extend(texts)
        return real(trained_on, vocab_size)

    monkeypatch.setattr("data.tokenizer_training.train_tokenizer", train)
    cfg = mixture()
    assert not is_prepared(cfg)
    folders = prepare(cfg)
    assert trained_on == TEXTS  # less than the share of each
    trained = common_tokenizer(cfg).read_bytes()
    assert [(folder / "tokenizer.model").read_bytes() for folder in folders] == [trained] * 2
    assert is_prepared(cfg) and folders == [folder for folder, _ in source_folders(cfg)]
    assert 3000 <= manifest_of(folders[0])["tokens"]["train"] < 3200
    other = make_config(
        data={"sources": [{"source": str(cfg.data.sources[0].source)}], "path": cfg.data.path}
    )
    assert common_tokenizer(other) != common_tokenizer(cfg)


def test_a_tokenizer_is_trained_on_the_start_of_each_source(mixture, tmp_path, monkeypatch):
    """On 4 million characters in all, up to the document with which a source has its share."""
    texts = {"a": ["x" * 90_000] * 60, "b": ["y" * 110_000] * 60}
    for name, each in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(as_rows(each))
    trained_on = []
    monkeypatch.setattr(
        "data.tokenizer_training.train_tokenizer", lambda texts, _: trained_on.extend(texts) or b""
    )
    with contextlib.suppress(ConfigError):  # no tokenizer was made
        prepare(
            mixture(
                sources=[
                    {"source": f"{tmp_path}/a.jsonl", "weight": 3.0},
                    {"source": f"{tmp_path}/b.jsonl", "weight": 1.0},
                ]
            )
        )
    assert trained_on == [*texts["a"][:34], *texts["b"][:10]]  # 3.06 and 1.1 million


def test_sources_of_a_mixture_are_prepared_side_by_side(mixture, prepared, monkeypatch):
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", 1000)
    order = []
    real = TokenWriter.record

    def record(writer: TokenWriter) -> None:
        order.append("a" if "a.jsonl" in writer.folder.name else "b")
        real(writer)

    monkeypatch.setattr(TokenWriter, "record", record)
    prepare(mixture(tokenizer=str(prepared / "tokenizer.model")), 1)
    assert "".join(order).startswith("abab")


def test_a_wrong_row_of_one_source_keeps_what_was_read_of_the_others(mixture, prepared, tmp_path):
    rows = break_at(tmp_path / "b.jsonl", 50)
    cfg = mixture(tokenizer=str(prepared / "tokenizer.model"))
    with refuses("b.jsonl", "50"):
        prepare(cfg)
    for folder, _ in source_folders(cfg):
        assert sum(manifest_of(folder)["documents"].values()) > 20
    (tmp_path / "b.jsonl").write_text("".join(rows))
    prepare(cfg)
    assert is_prepared(cfg)


def test_options_that_a_source_of_a_mixture_leaves_out_are_those_of_data():
    given = {"subset": "en", "split": "dev", "text_field": "body", "max_tokens": 9}
    own = {"subset": "de", "split": "test", "text_field": "text", "max_tokens": 7}
    cfg = make_config(data={**given, "sources": [{"source": "a"}, {"source": "b", **own}]})
    first, second = (config.to_dict(each)["data"] for each in sources_of(cfg, None))
    assert first.items() >= given.items() and second.items() >= own.items()


def test_two_sources_of_one_name_go_by_their_folders(mixture, prepared, tmp_path):
    sources = [{"source": f"{tmp_path}/a.jsonl", "max_tokens": limit} for limit in (500, 3000)]
    cfg = mixture(sources=sources, tokenizer=str(prepared / "tokenizer.model"))
    assert source_names(cfg) == [folder.name for folder in prepare(cfg)]
    assert source_names(mixture()) == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]


# Several processes


def test_of_two_processes_one_prepares_and_both_end_well(configure, by_hand, capfd):
    cfg = configure()
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 99
            with contextlib.suppress(BaseException):
                prepare(cfg, 1)
                code = 0
            os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert contents(pathlib.Path(cfg.data.path)) == by_hand(TEXTS)
    assert capfd.readouterr().err.count("tokens to train on") == 1


def test_a_source_that_another_process_prepares_is_waited_for_last(mixture, prepared, capsys):
    """Two mixtures with sources in common would else wait for each other."""
    cfg = mixture(tokenizer=str(prepared / "tokenizer.model"))
    (first, _), (second, _) = begin_all(cfg)
    lock = take_lock(first)
    assert lock
    thread = threading.Thread(target=prepare, args=[cfg, 1])
    thread.start()
    while not manifest_of(second)["complete"]:
        time.sleep(0.01)
    assert not any(manifest_of(first)["documents"].values())
    lock.release()
    thread.join()
    assert is_prepared(cfg)
    assert f"waiting for {files.process_name()}, which prepares {first}" in capsys.readouterr().err


def test_without_locks_two_processes_write_equal_bytes(configure, by_hand, monkeypatch):
    monkeypatch.setattr("files.lock", lambda path: SimpleNamespace(release=lambda: None))
    cfg = configure()
    ((folder, _),) = begin_all(cfg)
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                prepare(cfg, 1)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    prepare(cfg)
    assert contents(folder) == by_hand(TEXTS)


def test_a_record_is_never_lowered(configure):
    ((folder, _),) = begin_all(configure())
    ahead = TokenWriter(folder)
    behind = TokenWriter(folder)
    for writer, documents in ((ahead, 5), (behind, 3)):
        for _ in range(documents):
            writer.append("train", bytes(2 * 10))
        writer.record()
    assert manifest_of(folder)["tokens"]["train"] == 50


def test_a_folder_that_is_begun_anew_while_it_is_written_is_left_alone(configure):
    ((folder, _),) = begin_all(configure())
    writer = TokenWriter(folder)
    writer.append("train", bytes(20))
    shutil.rmtree(folder)
    begin_all(configure())
    with refuses("was deleted or begun anew"):
        writer.record()
    assert manifest_of(folder)["tokens"]["train"] == 0


# The command


def test_a_complete_folder_is_compared_with_its_hashes(configure, tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(configure()))
    folder = tmp_path / "out"
    assert main([str(path)]) == 0
    assert main([str(path)]) == 0
    for name, token, expected in (
        ("train.bin", 5000, f"{folder}/train.bin: segment 1 (tokens 4096 to 8192) was changed"),
        ("heldout.bin", 9, f"{folder}/heldout.bin: the validation text (tokens 0 to"),
    ):
        content = bytearray((folder / name).read_bytes())
        content[2 * token] ^= 1
        (folder / name).write_bytes(content)
        assert main([str(path)]) == 2
        error = capsys.readouterr().err
        assert expected in error and f"delete {folder} to prepare it again" in error
        content[2 * token] ^= 1
        (folder / name).write_bytes(content)
    (folder / "train.bin").unlink()
    assert main([str(path)]) == 2
    assert "train.bin: is missing" in capsys.readouterr().err


def test_wrong_text_ends_the_command_with_2_and_a_line(configure, source, tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(configure()))
    break_at(source / "b.jsonl", 3)
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "b.jsonl" in line and "must be text" in line


def test_ctrl_c_ends_the_command_with_130(configure, tmp_path, capsys, monkeypatch):
    def interrupt(writer: TokenWriter) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenWriter, "record", interrupt)
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(configure()))
    assert main([str(path)]) == 130
    assert capsys.readouterr().err == "stopped; the same command resumes here\n"


class Clock(SimpleNamespace):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_the_first_batch_is_recorded_and_then_every_five_seconds(configure, monkeypatch, capsys):
    """A batch takes three. Every ten seconds a line is printed."""
    clock = Clock()
    recorded = []
    real_record = TokenWriter.record
    real_append = TokenWriter.append
    monkeypatch.setattr("data.prepare.time", clock)
    monkeypatch.setattr("data.prepare.RECORD_SECONDS", 5.0)
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", 1)
    monkeypatch.setattr("data.order.FIRST_BORDER", 1 << 22)

    def append(writer: TokenWriter, split: str, ids: bytes) -> None:
        clock.now += 3
        real_append(writer, split, ids)

    def record(writer: TokenWriter) -> None:
        recorded.append(clock.now)
        real_record(writer)

    monkeypatch.setattr(TokenWriter, "append", append)
    monkeypatch.setattr(TokenWriter, "record", record)
    prepare(configure(), 1)
    assert recorded == [*range(3, 600, 6), 600]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 50 + 1 and "source: " in lines[0] and lines[0].endswith("%")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(configure, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    prepare(configure(), has_bar=True)
    assert "source: " in terminal.getvalue() and " tokens/s" in terminal.getvalue()
    assert "\nprepared " in terminal.getvalue() or "\rprepared " in terminal.getvalue()
