"""Preparation: whole or not at all, resumable, of one source or a mixture; wrong input named."""

import concurrent.futures.process
import contextlib
import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import unittest.mock
from types import SimpleNamespace

import pytest

import config
import files
from checkpoint import compare
from config import ConfigError
from data import encode
from data.console import progress, report
from data.cores import control_groups, usable_cores
from data.dataset import open_data, open_dataset
from data.encode import is_validation, worker_count
from data.folder import begin_all
from data.folder_names import data_folders, is_prepared, source_names
from data.identity import identity
from data.prepare import Preparation, Turn, _interleave, main, prepare, prepare_text
from data.record import MANIFEST, is_complete, read_manifest, write_manifest
from data.tokenizer import Tokenizer
from data.tokenizer_training import train_tokenizer
from data.tokens import open_stream
from data.writer import TokenWriter
from launch.checks import check_launch
from launch.command import Ranks
from tests.conftest import (
    REPO,
    config_for,
    launch,
    make_config,
    needs_extra,
    prepare_one,
    run_tool,
    words,
)
from tests.warm import warm_python

pytestmark = pytest.mark.early


@pytest.mark.quick
def test_validation_documents_are_chosen_by_their_text(corpus, prepared):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    held = [text for text in texts if is_validation(text)]
    manifest = read_manifest(prepared)
    assert manifest["documents"] == {"train": len(texts) - len(held), "heldout": len(held)} and held
    assert sum(is_validation(str(i)) for i in range(20_000)) == pytest.approx(200, abs=60)
    tokenizer, stream = (
        Tokenizer(prepared / "tokenizer.model"),
        open_stream(prepared, "validation", 320),
    )
    _, ids = stream.read(0, stream.length)
    expected = []
    for text in held:
        expected += [*tokenizer.bos, *tokenizer.encode([text])[0], *tokenizer.eos]
    assert ids.tolist() == expected


@pytest.fixture
def with_tokenizer(corpus, prepared, tmp_path):
    """A configuration whose data is to be prepared into tmp_path/out, with the tokenizer of `prepared`."""
    return config_for(corpus, tmp_path, tokenizer=str(prepared / "tokenizer.model"))


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.quick
def test_prepared_once(with_tokenizer, tmp_path, capsys):
    folder = prepare_one(with_tokenizer)
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    told = capsys.readouterr().err.splitlines()
    tokens, held_out = (
        (folder / f"{name}.bin").stat().st_size // 2 for name in ("train", "heldout")
    )
    # no progress of what takes no time
    assert told == [
        f"prepared {folder}: {tokens:,} tokens to train on, {held_out:,} for validation"
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"out", ".out.lock"}
    prepare_one(with_tokenizer)
    assert (
        not capsys.readouterr().err
        and {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    )


def test_identity_and_name_of_folders_made_before():
    """Written down from format 3's first release: prepared folders must be found again."""
    assert identity(make_config(data={"source": "a.jsonl", "max_tokens": 5})) == {
        "source": "a.jsonl",
        "subset": None,
        "split": "train",
        "text_field": "text",
        "tokenizer": "trained here",
        "vocab_size": 320,
        "max_tokens": 5,
        "format": 3,
    }
    cfg = make_config(data={"source": "a.jsonl", "max_tokens": 5})
    assert [str(folder) for folder in data_folders(cfg)] == ["prepared/a.jsonl-d0f2f8dad9f1"]


def test_name_of_a_mixture_s_tokenizer_made_before():
    from data.folder_names import common_tokenizer

    sources = [
        {"source": "a.jsonl", "weight": 0.7},
        {"source": "b/*.txt", "weight": 0.3, "max_tokens": 9},
    ]
    cfg = make_config(data={"sources": sources})
    assert str(common_tokenizer(cfg)) == "prepared/tokenizer-75cf6508cb91.model"


def folder_name(**data) -> str:
    return data_folders(make_config(data={"source": "a.jsonl", **data}))[0].name


OF_CONVERSATIONS = {"format", "messages_field", "chat_template"}


def test_each_option_of_the_data_decides_the_folder_or_changes_no_token(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    deciding = {
        "source": "b.jsonl",
        "subset": "de",
        "split": "test",
        "text_field": "body",
        "tokenizer": str(tmp_path),
        "max_tokens": 7,
        "order": "growing",
        "validation": "c.jsonl",
    }
    options = {field.name for field in dataclasses.fields(config.Data)}
    assert options == {*deciding, *OF_CONVERSATIONS, "path", "document_mask", "sources"}
    names = [folder_name(), *(folder_name(**{name: deciding[name]}) for name in deciding)]
    assert len({*names}) == len(names)
    assert folder_name(document_mask=True) == names[0]
    elsewhere = [make_config(data={"source": "a.jsonl", "path": path}) for path in (None, "here")]
    assert identity(elsewhere[0]) == identity(elsewhere[1])
    assert data_folders(make_config())[0].name.startswith("python-stdlib-")


@needs_extra("chat")
def test_each_option_of_conversations_decides_the_folder(tmp_path):
    """A template by its content, wherever it lies."""
    for name, content in {"a": "first", "copy": "first", "b": "second"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer.json").write_text("{}")

    def name(template: str = "a", **data) -> str:
        return folder_name(tokenizer=str(tmp_path), chat_template=str(tmp_path / template), **data)

    names = [name(format=each) for each in ("messages", "alpaca", "prompt_completion")]
    names += [name(messages_field=field) for field in ("turns", "messages")]
    names.append(name("b", format="alpaca"))
    assert len({*names}) == len(names)
    assert name("copy", format="alpaca") == names[1]


def test_a_tokenizer_is_identified_by_its_content_and_not_by_the_models_rows(tmp_path):
    """Of tokenizer_config.json too, which names the EOS token; one that is trained here is made for those rows."""

    def found(rows: int = 320, **data) -> dict:
        return identity(make_config(model={"vocab_size": rows}, data={"source": "a.jsonl", **data}))

    (tmp_path / "tokenizer.json").write_text("{}")
    given = {"tokenizer": str(tmp_path)}
    alone = found(**given)
    assert found(640, **given) == alone and found(640) != found()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    before = found(**given)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert len({each["tokenizer"] for each in (alone, before, found(**given))}) == 3


def test_another_python_has_another_library(monkeypatch):
    before = data_folders(make_config()), data_folders(make_config(data={"source": "a.jsonl"}))
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    after = data_folders(make_config()), data_folders(make_config(data={"source": "a.jsonl"}))
    assert after[0] != before[0] and after[1] == before[1]


def test_a_mixture_s_tokenizer_is_named_by_all_that_decides_the_text_it_is_trained_on():
    from data.folder_names import common_tokenizer

    def name(first: dict, second: dict, rows: int = 320, **data) -> str:
        sources = [{"source": "a.jsonl", **first}, {"source": "b.jsonl", **second}]
        cfg = make_config(model={"vocab_size": rows}, data={"sources": sources, **data})
        return common_tokenizer(cfg).name

    plain = {"weight": 0.7}, {"weight": 0.3}
    names = [
        name(*plain),
        name({"weight": 0.3}, {"weight": 0.7}),
        name({"weight": 0.7}, {"weight": 0.2}),
        name({"weight": 0.7, "max_tokens": 5}, plain[1]),
        name(*plain, text_field="body"),
        name(*plain, rows=640),
    ]
    assert len({*names}) == len(names) and name(*plain, document_mask=True) == names[0]


def test_what_a_source_leaves_out_is_that_of_the_table():
    from data.folder_names import sources_of

    given = {
        "subset": "en",
        "split": "test",
        "text_field": "body",
        "max_tokens": 9,
        "format": "text",
    }
    own = {
        "subset": "de",
        "split": "dev",
        "text_field": "content",
        "max_tokens": 7,
        "format": "text",
        "validation": "own.jsonl",
    }
    cfg = make_config(data={**given, "sources": [{"source": "a"}, {"source": "b", **own}]})
    first, second = (config.to_dict(part)["data"] for part in sources_of(cfg, None))
    assert first.items() >= given.items() and second.items() >= own.items()


def test_a_tokenizer_that_was_trained_for_a_folder_may_be_named_later(corpus, prepared, tmp_path):
    """The token files are the same; another one is refused."""
    given = {"source": str(corpus), "path": str(prepared)}
    tokenizer = tmp_path / "copy.model"
    tokenizer.write_bytes((prepared / "tokenizer.model").read_bytes())
    named = make_config(data={**given, "tokenizer": str(tokenizer)})
    assert (
        open_data(named, "train")[0].length == open_data(make_config(data=given), "train")[0].length
    )
    tokenizer.write_bytes(train_tokenizer(["the cat sat on the mat " * 99], 290))
    with pytest.raises(ConfigError, match="was prepared with tokenizer = 'trained here'"):
        open_data(named, "train")


def test_another_identity_in_the_same_folder_is_refused(corpus, tmp_path):
    prepare_one(config_for(corpus, tmp_path))
    with pytest.raises(ConfigError, match="max_tokens = None, the configuration says 7"):
        prepare_one(config_for(corpus, tmp_path, max_tokens=7))


def test_a_folder_that_is_a_link_to_a_disk_that_is_away_is_refused(corpus, tmp_path):
    cfg = config_for(corpus, tmp_path)
    pathlib.Path(cfg.data.path).symlink_to("/not/mounted")
    with pytest.raises(ConfigError, match="is a link to /not/mounted, which is not there"):
        prepare_one(cfg)


def test_an_identity_with_another_key_is_refused_in_both_directions(corpus, tmp_path):
    """A fork's option, which is in the identity only while it is on; one that is None counts as absent."""
    cfg = config_for(corpus, tmp_path)
    with_option = unittest.mock.patch(
        "data.identity.identity", lambda cfg: {**identity(cfg), "chat": "on", "turns": None}
    )
    folder = prepare_one(cfg)
    with with_option, pytest.raises(ConfigError) as refused:
        prepare_one(cfg)
    assert refused.value.problems == (
        f"{folder}: was prepared with chat = absent, the configuration says 'on'; delete "
        "the folder or name another data.path",
    )
    shutil.rmtree(folder)
    with (
        with_option,
        unittest.mock.patch("data.folder.identity", lambda cfg: {**identity(cfg), "chat": "on"}),
    ):
        prepare_one(cfg)
        assert prepare_one(cfg) == folder
    for check in prepare_one, lambda cfg: open_data(cfg, "train"):
        with pytest.raises(ConfigError, match="chat = 'on', the configuration says absent; delete"):
            check(cfg)


def test_a_folder_of_something_else_is_refused(corpus, tmp_path):
    cfg = config_for(corpus, tmp_path)
    folder = pathlib.Path(cfg.data.path)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"{folder}: is there but holds no prepared data"):
        prepare_one(cfg)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_refused(corpus, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    cfg = config_for(corpus, tmp_path)
    with pytest.raises(ConfigError, match="path = .*is the current folder or /; name one in it"):
        prepare_one(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=path)))


@pytest.mark.quick
def test_what_ends_the_command_is_a_line_and_a_code(corpus, tmp_path, monkeypatch, capsys):
    path = written(config_for(corpus, tmp_path), tmp_path)
    for raised, code, told in (
        (ConfigError("wrong"), 2, "wrong"),
        (KeyboardInterrupt, 130, "resumes here"),
    ):
        monkeypatch.setattr("data.prepare.prepare", unittest.mock.Mock(side_effect=raised))
        assert run_tool(main, path) == code
        printed = capsys.readouterr().err
        assert printed.endswith(f"{told}\n") and printed.count("\n") == 1


@pytest.mark.quick
def test_changed_source_is_noticed(corpus, tmp_path):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)
    prepare_one(config_for(copy, tmp_path))
    copy.write_text(copy.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match=r"copy\.jsonl: its text was changed after .*out was"):
        prepare_one(config_for(copy, tmp_path))
    shutil.copy(corpus, copy)  # as it was, but for its time
    before = read_manifest(tmp_path / "out")["files"]
    prepare_one(config_for(copy, tmp_path))
    after = read_manifest(tmp_path / "out")["files"]
    assert after != before and [entry[3] for entry in after] == [entry[3] for entry in before]
    copy.unlink()  # no longer needed
    prepare_one(config_for(copy, tmp_path))


def test_text_that_changed_while_it_was_prepared_stays_refused(corpus, tmp_path, monkeypatch):
    """What the first attempt records is not taken for the changed text by the next."""
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)
    complete = Preparation.complete

    def change_and_complete(preparation):
        copy.write_text(copy.read_text().replace('"text": "', '"text": "not ', 1))
        complete(preparation)

    with monkeypatch.context() as patch:
        patch.setattr(Preparation, "complete", change_and_complete)
        with pytest.raises(ConfigError, match=r"copy\.jsonl: its text was changed after"):
            prepare_one(config_for(copy, tmp_path))
    with pytest.raises(ConfigError, match=r"copy\.jsonl: its text was changed after"):
        prepare_one(config_for(copy, tmp_path))


@pytest.mark.quick
@pytest.mark.parametrize("characters", [1 << 18, 5000, 1])
def test_max_tokens_end_the_text_at_a_document(
    characters, corpus, with_tokenizer, prepared, tmp_path, monkeypatch
):
    """Also what is held out of it, however many documents are tokenized at once."""
    monkeypatch.setattr("data.encode.CHUNK", characters)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    tokenizer = Tokenizer(prepared / "tokenizer.model")
    documents = [[*tokenizer.bos, *ids, *tokenizer.eos] for ids in tokenizer.encode(texts)]
    held_out = [number for number, text in enumerate(texts) if is_validation(text)]
    train: list[int] = []
    for number in range(held_out[1]):  # the second one is the first that isn't read
        if number not in held_out:
            train += documents[number]
    data = dataclasses.replace(with_tokenizer.data, max_tokens=len(train))
    prepare_text(begin_all(dataclasses.replace(with_tokenizer, data=data)), 0)
    for split, expected in (("train", train), ("validation", documents[held_out[0]])):
        stream = open_stream(tmp_path / "out", split, 320)
        assert stream.read(0, stream.length)[1].tolist() == expected


@pytest.mark.parametrize("limit", [None, 3000])
def test_progress_is_the_larger_share_of_the_text_and_of_the_limit(
    limit, corpus, with_tokenizer, tmp_path, monkeypatch
):
    lines = corpus.read_text().splitlines(keepends=True)
    for name, part in {"a": lines[:31], "b": [], "c": lines[31:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    sizes = [(tmp_path / f"{name}.jsonl").stat().st_size for name in "abc"]
    told = []

    def progress(name: str, manifest: dict, share: float, before: int, seconds: float) -> str:
        file, _, _, byte, _ = manifest["place"]
        of_text = (sum(sizes[:file]) + byte) / sum(sizes)
        of_limit = manifest["tokens"]["train"] / limit if limit else 0
        told.append((share, max(of_text, min(1, of_limit))))
        return name

    monkeypatch.setattr("data.prepare.progress", progress)
    monkeypatch.setattr("data.prepare.LOG_SECONDS", 0.0)
    monkeypatch.setattr("data.encode.CHUNK", 1000)
    options = {"source": str(tmp_path / "?.jsonl"), "max_tokens": limit}
    data = dataclasses.replace(with_tokenizer.data, **options)
    prepare_text(begin_all(dataclasses.replace(with_tokenizer, data=data)), 0)
    assert len(told) > 5 and [share for share, _ in told] == [share for _, share in told]
    assert told[-1][0] == 1.0 if limit else told[-1][0] > 0.9


@pytest.mark.parametrize("terminal, pause", [(False, 12), (True, 3)])
def test_progress_is_told_every_ten_seconds_and_recorded_every_five(
    terminal, pause, with_tokenizer, monkeypatch
):
    """Reading a chunk takes three. A terminal's line is always new."""
    clock = SimpleNamespace(now=0)

    def timed(*arguments):
        for chunk in encode.chunks(*arguments):
            clock.now += 3
            yield chunk

    told, recorded = [], []
    record = TokenWriter.record
    monkeypatch.setattr(
        TokenWriter, "record", lambda writer: (recorded.append(clock.now), record(writer))
    )
    for name, value in {
        "data.encode.CHUNK": 5000,
        "data.prepare.chunks": timed,
        "data.prepare.on_terminal": lambda: terminal,
        "data.prepare.progress": lambda *unused: told.append(clock.now),
        "data.prepare.time": SimpleNamespace(monotonic=lambda: clock.now),
    }.items():
        monkeypatch.setattr(name, value)
    prepare_text(begin_all(with_tokenizer), 0)
    last_chunk = clock.now - 3  # the one behind it has no document
    assert last_chunk > 36
    assert told == [*range(pause, last_chunk + 1, pause)]
    assert recorded == [*range(6, last_chunk + 1, 6), clock.now]


class Endless:
    """A source that is not to be read for long."""

    revision, lists_wrong_rows = None, False

    def __iter__(self):
        for i in range(100):
            yield words(i, 100)
        raise AssertionError("is read on")

    def resume_state(self):
        return 0

    def fraction_read(self):
        return None

    files_to_record = fraction_read

    def compare_with_text(self, *unused, **options):
        return ()


def test_beyond_max_tokens_nothing_is_read(with_tokenizer, monkeypatch):
    """But for what the processes that tokenize, here one, are handed ahead."""
    monkeypatch.setattr("data.prepare.open_recorded", lambda *unused: Endless())
    monkeypatch.setattr("data.encode.CHUNK", 1000)
    monkeypatch.setattr("os.sched_getaffinity", lambda *unused: {0})
    cfg = dataclasses.replace(
        with_tokenizer, data=dataclasses.replace(with_tokenizer.data, max_tokens=200)
    )
    assert read_manifest(prepare_one(cfg))["tokens"]["train"] < 600


def test_text_of_which_a_tokenizer_leaves_nothing_is_no_document(tmp_path, capsys):
    """One without BOS and EOS, which is told."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    made = tokenizers.Tokenizer(models.WordLevel({"cat": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_text('{"text": "cat sat"}\n{"text": "  "}\n' * 20)
    folder = prepare_one(
        config_for(tmp_path / "in.jsonl", tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    )
    assert read_manifest(folder)["documents"] == {"train": 20, "heldout": 0}
    assert open_stream(folder, "train", 320).documents(0, 6) == [(0, 0, 2), (1, 2, 4), (2, 4, 6)]
    assert (
        "tokenizer.json: has no EOS token that is known, so nothing separates documents"
        in capsys.readouterr().err
    )


GOOD = json.dumps({"text": "some text that is good"}) + "\n"
BAD_INPUT = {
    "bad line after many": (GOOD * 60 + '{"body": "x"}\n', "line 61: has no field 'text'"),
    "nested without end": ("[" * 100_000 + "\n", "line 1: is not valid JSON"),
    "corrupt line": (GOOD * 6 + '{"text": "cut\n' + GOOD, "line 7: is not valid JSON"),
    "no such field": (GOOD + '{"body": "x"}\n', "line 2: has no field 'text'"),
    "number for text": (GOOD + '{"text": 5}\n', "line 2: field 'text' must be text, not int"),
    "null": (GOOD + '{"text": null}\n', "line 2: field 'text' must be text, not NoneType"),
    "list for a row": (GOOD + "[1]\n", "line 2: has no field"),
    "lone surrogate": (
        GOOD * 2 + '{"text": "a\\ud800"}\n',
        "line 3: is not valid Unicode: surrogates not allowed at character 1$",
    ),
    "empty file": ("", "holds no text"),
    "documents all empty": ('{"text": ""}\n' * 5, "holds no text"),
    "too little text": (
        GOOD,
        r"\[model\] vocab_size = 320: the text is too little.*the largest that works: --model.vocab_size=\d+",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_and_nothing_published(case, tmp_path):
    content, message = BAD_INPUT[case]
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepare_one(config_for(tmp_path / "in.jsonl", tmp_path))
    assert not (tmp_path / "out").exists() and not [
        p for p in tmp_path.iterdir() if p.name.endswith(".tmp")
    ]


@pytest.mark.parametrize("entries", [1, 2, 200])
def test_a_vocabulary_too_small_names_the_smallest_that_works(entries):
    texts = ["the cat sat on the mat\n"]
    with pytest.raises(ConfigError, match=rf"vocab_size = {entries}: too small") as told:
        train_tokenizer(texts, entries)
    assert train_tokenizer(
        texts,
        int(re.search(r"the smallest that works: --model.vocab_size=(\d+)$", str(told.value))[1]),
    )


def written(cfg, tmp_path):
    """The configuration as a file."""
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(cfg))
    return path


@pytest.mark.quick
def test_two_that_prepare_at_once(with_tokenizer, tmp_path):
    """Both end well, and one of them did the work."""
    command = [sys.executable, "-m", "data.prepare", written(with_tokenizer, tmp_path)]
    both = [
        subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert sum("prepared" in text and "to train on" in text for text in printed) == 1


WAITS = """
import sys, files, data.prepare as p
take = files.lock
def lock(path, timeout=0):
    if timeout: print("waits", flush=True)
    return take(path, timeout)
files.lock = lock
sys.exit(p.main(sys.argv[1:]))
"""


def test_a_second_that_prepares_waits_in_one_line(with_tokenizer, prepared, tmp_path):
    """The first is played by this process; the second finds its work done."""
    held = files.lock(tmp_path / ".out.lock")
    second = subprocess.Popen(
        [sys.executable, "-c", WAITS, written(with_tokenizer, tmp_path)],
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert second.stdout.readline() == "waits\n", second.communicate()
    shutil.copytree(prepared, tmp_path / "elsewhere")
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["identity"] = identity(with_tokenizer)
    (tmp_path / "elsewhere/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "elsewhere").rename(tmp_path / "out")
    before = content(tmp_path / "out")
    held.release()
    error = second.communicate()[1]
    assert (
        second.returncode == 0
        and error == f"waiting for another process that prepares {tmp_path / 'out'}\n"
    ), error
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("order", ["global", "growing"])
def test_a_relative_source_is_not_looked_for_elsewhere(
    order, corpus, tmp_path, prepared, monkeypatch
):
    """A folder's name looks like the id of a Hugging Face dataset where the folder is not."""
    (tmp_path / "texts").mkdir()
    shutil.copy(corpus, tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    tokenizer = str(prepared / "tokenizer.model")
    cfg = config_for("texts", tmp_path, order=order, tokenizer=tokenizer)
    begin_all(cfg)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as refused:
        prepare(cfg, whole=True)
    assert refused.value.problems == (
        "[data] source = texts: is not here, and was not read to its end; a relative path is one of the "
        f"folder that the command is started in, {tmp_path / 'elsewhere'}",
    )
    monkeypatch.chdir(tmp_path)
    assert is_complete(read_manifest(prepare(cfg, whole=True)[0]))


def test_a_second_that_waits_says_if_the_first_removed_the_folder(with_tokenizer, tmp_path):
    """As the first does if its text is wrong from the first row on; this process plays it."""
    path = written(with_tokenizer, tmp_path)
    begin_all(config.load(path))
    held = files.lock(tmp_path / ".out.lock")
    second = subprocess.Popen(
        [sys.executable, "-m", "data.prepare", path], cwd=REPO, stderr=subprocess.PIPE, text=True
    )
    assert "waiting for another process" in second.stderr.readline()
    shutil.rmtree(tmp_path / "out")
    error = second.communicate()[1]
    held.release()
    assert second.returncode == 2 and "out: another process removed it" in error, error


@pytest.mark.nightly
def test_killed_before_any_of_its_file_system_events_it_resumes_and_ends_the_same(
    with_tokenizer, tmp_path, monkeypatch
):
    """Dozens of kills: one at each event, and many of one preparation."""
    small = tmp_path / "small.jsonl"
    small.write_text("".join(json.dumps({"text": words(i, 300)}) + "\n" for i in range(60)))
    cfg = dataclasses.replace(
        with_tokenizer,
        data=dataclasses.replace(
            with_tokenizer.data,
            source=str(small),
            path=str(tmp_path / "killed/out"),
            order="growing",
        ),
    )
    for name, tokens in {"FIRST_BORDER": 4096, "BORDER_STEP": 4096}.items():
        monkeypatch.setattr(f"data.record.{name}", tokens)  # as tests/kill_cases.py does
    final = prepare(cfg, whole=True)[0].rename(tmp_path / "final")
    assert min(read_manifest(final)["documents"].values()) > 0
    shutil.rmtree(tmp_path / "killed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_cases", written(cfg, tmp_path), final],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["events"] > 50 and found["kills of one"] > 1, found


@pytest.mark.parametrize("seconds, times", [(0.0, 4), (5.0, 2)])
def test_what_a_preparation_says_it_has_is_on_disk(with_tokenizer, monkeypatch, seconds, times):
    """So that a power cut leaves no more in the manifest than in the files, and no folder that is not whole."""
    synced = {}
    said = set()
    fsync = os.fsync
    write = files.write_atomic
    publish = files.publish

    def noting(handle):
        fsync(handle)
        name = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}")).name
        synced[name.removeprefix(".").removesuffix(".tmp")] = os.fstat(handle).st_size

    def write_atomic(path, text, *temporary):
        if path.name == MANIFEST:
            state = json.loads(text)
            for split, tokens in state["tokens"].items():
                assert synced.get(f"{split}.bin", 0) == 2 * tokens
                assert synced.get(f"{split}.ends.bin", 0) == 8 * state["documents"][split]
            said.add(state["tokens"]["train"])
        write(path, text, *temporary)

    def published(temporary, final):
        assert {
            path.name: path.stat().st_size for path in temporary.iterdir()
        }.items() <= synced.items()
        publish(temporary, final)

    for name, value in {
        "data.prepare.SYNC_SECONDS": seconds,
        "data.encode.CHUNK": 20_000,
        "os.fsync": noting,
        "files.write_atomic": write_atomic,
        "files.publish": published,
    }.items():
        monkeypatch.setattr(name, value)
    prepare_one(with_tokenizer)
    assert len(said) >= times


KILLED = """
import os, signal, sys, files, data.encode, data.prepare
data.prepare.SYNC_SECONDS, data.encode.CHUNK, write, seen = 0, 20_000, files.write_atomic, []
def write_atomic(path, content, *temporary):
    write(path, content, *temporary)
    if path.name == data.record.MANIFEST:
        seen.append(path)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
files.write_atomic = write_atomic
data.prepare.main(sys.argv[1:])
"""


def test_the_processes_of_a_killed_preparation_end_with_it(with_tokenizer, tmp_path, capsys):
    """kill -9 of the real thing, with its pool, when it has noted progress for the fourth time."""
    # returns when all that hold the pipe have ended: the pool's too
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, written(with_tokenizer, tmp_path)],
        cwd=REPO,
        text=True,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = prepare_one(with_tokenizer)
    assert "resuming after" in capsys.readouterr().err and not (tmp_path / ".out.tmp").exists()
    straight = prepare_one(
        dataclasses.replace(
            with_tokenizer,
            data=dataclasses.replace(with_tokenizer.data, path=str(tmp_path / "straight")),
        )
    )
    assert content(folder) == content(straight)


def mixture(tmp_path, corpus, **data):
    if not (tmp_path / "other.jsonl").exists():
        (tmp_path / "other.jsonl").write_text(
            "".join(json.dumps({"body": words(-i, 30)}) + "\n" for i in range(200))
        )
    sources = [
        {"source": str(corpus), "weight": 0.75, "max_tokens": 3000},
        {"source": str(tmp_path / "other.jsonl"), "weight": 0.25, "text_field": "body"},
    ]
    return make_config(data={"sources": sources, "path": str(tmp_path / "mixed"), **data})


@pytest.mark.parametrize("vocab_size, characters", [(320, 4_000_000), (2_500, 5_000_000)])
def test_a_tokenizer_is_trained_on_the_start_of_each_source_by_its_weight(
    vocab_size, characters, tmp_path, monkeypatch
):
    """On whole documents, in their order, up to the one with which a source has its share."""
    weights = {"a.jsonl": 3.0, "b.jsonl": 1.0}
    expected = []
    for name, weight in weights.items():
        texts = [f"{name} {i} " + "x" * (50_000 + 1009 * i % 60_000) for i in range(89)]
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        share = characters * weight / 4.0
        read = 0
        for text in texts:
            if read < share:
                expected.append(text)
            read += len(text)
        assert read > share
    found = []
    monkeypatch.setattr(
        "data.tokenizer_training.train_tokenizer", lambda texts, _: found.extend(texts) or b""
    )
    sources = [
        {"source": str(tmp_path / name), "weight": weight} for name, weight in weights.items()
    ]
    data = {"sources": sources, "path": str(tmp_path / "mixed")}
    with pytest.raises(ConfigError):  # no tokenizer was made
        prepare(make_config(model={"vocab_size": vocab_size}, data=data))
    assert found == expected


def test_a_mixture_trains_one_tokenizer_and_keeps_its_sources_apart(corpus, tmp_path):
    cfg = mixture(tmp_path, corpus)
    assert not is_prepared(cfg)
    with pytest.raises(ConfigError, match="no prepared data"):
        data_folders(cfg)
    first, second = prepare(cfg)
    assert is_prepared(cfg) and data_folders(cfg) == [first, second]
    assert (first / "tokenizer.model").read_bytes() == (second / "tokenizer.model").read_bytes()
    assert 3000 <= read_manifest(first)["tokens"]["train"] < 3200
    assert read_manifest(second)["identity"]["text_field"] == "body"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mixed").rglob("*")}
    prepare(cfg)
    (tmp_path / "other.jsonl").unlink()  # the text is not needed any more
    assert prepare(cfg) == [first, second]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mixed").rglob("*")} == before


@pytest.mark.parametrize(
    "entries, order, million",
    [(320, "global", 4), (4000, "global", 8), (10_000, "growing", 8), (320, "growing", 4)],
)
def test_a_mixture_s_tokenizer_reads_of_each_source_its_share(
    entries, order, million, corpus, tmp_path, monkeypatch, capsys
):
    """Less where a run waits for it."""
    read: dict[str, int] = {}

    def endless(data: config.Data, *unused):
        while True:
            read[data.source] = read.get(data.source, 0) + 10**5
            yield "x" * 10**5

    def count(texts, vocab_size: int) -> bytes:
        for _ in texts:
            pass
        raise ConfigError("enough")

    monkeypatch.setattr("data.tokenizer_training.open_source", endless)
    monkeypatch.setattr("data.tokenizer_training.train_tokenizer", count)
    sources = [
        {"source": str(corpus), "weight": 30.0},
        {"source": str(corpus.parent), "weight": 70.0},
    ]
    with pytest.raises(ConfigError, match="enough"):
        prepare(
            make_config(
                model={"vocab_size": entries},
                data={"sources": sources, "path": str(tmp_path / "mixed"), "order": order},
            )
        )
    assert capsys.readouterr().err == (
        f"training a tokenizer of {entries:,} vocabulary entries on up to {million} MB of "
        f"{corpus}, {corpus.parent}\n"
    )
    assert read == {str(corpus): million * 3 * 10**5, str(corpus.parent): million * 7 * 10**5}


def test_a_source_prepared_once_serves_every_mixture(corpus, prepared, tmp_path):
    given = {"tokenizer": str(prepared / "tokenizer.model")}
    first = prepare(mixture(tmp_path, corpus, **given))
    made = [folder.stat().st_mtime_ns for folder in first]
    cfg = mixture(tmp_path, corpus, **given)
    heavier = [
        dataclasses.replace(source, weight=source.weight + 1) for source in cfg.data.sources[::-1]
    ]
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sources=tuple(heavier)))
    assert prepare(other) == first[::-1] and [folder.stat().st_mtime_ns for folder in first] == made


def test_parts_of_one_source_have_names_of_their_own(corpus, prepared, tmp_path):
    """As their losses are reported by name."""
    sources = [{"source": str(corpus), "max_tokens": limit} for limit in (500, 3000)]
    cfg = make_config(
        data={
            "sources": sources,
            "tokenizer": str(prepared / "tokenizer.model"),
            "path": str(tmp_path / "mixed"),
        }
    )
    folders = prepare(cfg)
    assert (
        source_names(cfg) == [folder.name for folder in folders]
        and len(set(source_names(cfg))) == 2
    )


def without_held_out(tmp_path: pathlib.Path, count: int = 5) -> pathlib.Path:
    """Texts none of which is held out by its hash."""
    texts = [text for text in (words(i, 60) for i in range(2 * count)) if not is_validation(text)]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:count]))
    return few


def test_a_folder_of_earlier_versions_without_validation_text(corpus, tmp_path, prepared):
    """It trains as it did; an evaluation is refused, unless another source of the mixture has text for it."""
    few = without_held_out(tmp_path)

    def check(*sources: pathlib.Path, **sections: dict) -> list[str]:
        cfg = make_config(
            run={"output_dir": str(tmp_path / "outputs"), "name": "r"},
            **sections,
            data={
                "sources": [{"source": str(source)} for source in sources],
                "path": str(tmp_path / "mixed"),
                "tokenizer": str(prepared / "tokenizer.model"),
            },
        )
        for folder in prepare(cfg):
            manifest = read_manifest(folder)
            manifest.pop("validation", None)
            files.write_atomic(folder / MANIFEST, json.dumps(manifest))
        assert check_launch(cfg, Ranks(1, 1, 0, None), config.parse_arguments(["x.toml"]))
        return open_dataset(cfg).notes

    assert check(few) == []
    [note] = check(corpus, few, eval={})
    assert note.startswith(str(tmp_path / "mixed"))
    assert "few.jsonl" in note and "it has no validation loss" in note
    with pytest.raises(ConfigError, match=r"mixed/.*: holds no validation text; delete the folder"):
        check(few, eval={})


@pytest.mark.parametrize("order", ["global", "growing"])
def test_something_is_always_held_out(order, tmp_path, prepared):
    """Of a text without a document for it the last hundredth; no window for training holds a token of it."""
    tokenizer = str(prepared / "tokenizer.model")
    cfg = config_for(without_held_out(tmp_path, 40), tmp_path, tokenizer=tokenizer, order=order)
    folder = prepare(cfg, whole=True)[0]
    manifest = read_manifest(folder)
    tokens = manifest["tokens"]["train"]
    assert manifest["tokens"]["heldout"] == 0
    assert manifest["validation"] == ["train", tokens - tokens // 100, tokens]
    stored = open_stream(folder, "train", 320)
    (held,) = open_data(cfg, "validation")
    assert held.length == tokens // 100 > 20
    assert held.read(0, held.length)[0] == (folder / "train.bin").read_bytes()[-2 * held.length :]
    assert held.documents(0, held.length)[0][1] == 0
    dataset = open_dataset(cfg)
    count = (tokens - held.length - 1) // 32
    windows = [dataset.order(number).window for number in range(count)]
    assert sorted(windows) == [*range(count)] and 32 * count < tokens - held.length
    assert dataset.order(count).epoch == 1 and stored.length == tokens


def test_what_is_held_out_of_the_first_tokens_leaves_the_rest(tmp_path, prepared, monkeypatch):
    """Windows that hold a token of it are left out, and those behind take their numbers."""
    monkeypatch.setattr("data.record.FIRST_BORDER", 2000)
    tokenizer = str(prepared / "tokenizer.model")
    cfg = config_for(without_held_out(tmp_path, 40), tmp_path, tokenizer=tokenizer)
    prepare_one(cfg)
    manifest = read_manifest(tmp_path / "out")
    assert manifest["validation"] == ["train", 1980, 2000]
    dataset, tokens = open_dataset(cfg), manifest["tokens"]["train"]
    whole = [k for k in range((tokens - 1) // 32) if 32 * k + 32 < 1980 or 32 * k >= 2000]
    places = [dataset.order(number) for number in range(2 * len(whole))]
    assert sorted(place.window for place in places[: len(whole)]) == whole
    assert {place.epoch for place in places[: len(whole)]} == {0} and places[-1].epoch == 1


@pytest.mark.parametrize("order", ["global", "growing"])
def test_validation_text_of_ones_own(order, corpus, tmp_path, prepared, monkeypatch):
    """Nothing else is held out; it is part of the identity, and watched as the source is."""
    monkeypatch.setattr("data.prepare.worker_count", lambda: 0)
    own = tmp_path / "own.jsonl"
    texts = [f"validation {words(i, 20)}" for i in range(30)]
    own.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(prepared / "tokenizer.model")
    cfg = config_for(
        corpus, tmp_path, tokenizer=str(tokenizer.path), order=order, validation=str(own)
    )
    folder = prepare(cfg, whole=True)[0]
    expected = []
    for text in texts:
        expected += [*tokenizer.bos, *tokenizer.encode([text])[0], *tokenizer.eos]
    (held,) = open_data(cfg, "validation")
    assert held.read(0, held.length)[1].tolist() == expected
    assert read_manifest(folder)["documents"]["train"] == len(corpus.read_text().splitlines())
    assert identity(cfg)["validation"] == str(own)
    own.write_text(own.read_text().replace("validation", "another"))
    with pytest.raises(ConfigError, match=r"own\.jsonl: its text was changed"):
        prepare(cfg)
    own.unlink()  # what was read may be gone, also if it cannot be told from a split's name
    (tmp_path / "held").mkdir()
    (tmp_path / "held/own.jsonl").write_text('{"text": "held out"}\n')
    (tmp_path / "of-folder").mkdir()
    monkeypatch.chdir(tmp_path)
    of_folder = config_for(
        *(corpus, tmp_path / "of-folder"),
        tokenizer=str(tokenizer.path),
        order=order,
        validation="held",
    )

    def killed(_: Preparation) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Preparation, "complete", killed)
        patch.setattr(Preparation, "_sync_is_due", lambda _: True)
        prepare(of_folder, whole=True)
    shutil.rmtree(tmp_path / "held")
    for _ in range(2):  # half prepared, and complete
        (folder,) = prepare(of_folder, whole=True)
        assert is_complete(read_manifest(folder))
    missing = config_for(corpus, tmp_path / "new", validation="no-such-split")
    with pytest.raises(ConfigError, match=r"validation = no-such-split: no such file"):
        prepare(missing)


def test_training_on_a_mixture_and_looking_at_it(corpus, tmp_path, write_config, capsys):
    import data.show

    cfg = mixture(tmp_path, corpus)
    path = write_config(
        "mixed",
        data={k: v for k, v in config.to_dict(cfg)["data"].items() if k != "source"},
        eval={},
        checkpoint={},
        train={"steps": 1},
        optim={"warmup_steps": 0},
    )
    done = launch(path)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "outputs/mixed/metrics.jsonl").read_text().splitlines()[-1])
    assert row["kind"] == "eval" and set(row["loss_by_source"]) == {
        str(corpus),
        str(tmp_path / "other.jsonl"),
    }
    # the mean over all tokens, not of the sources' means
    counts, losses = (
        [s.length - 1 for s in open_data(cfg, "validation")],
        [*row["loss_by_source"].values()],
    )
    assert row["loss"] == pytest.approx(
        sum(n * loss for n, loss in zip(counts, losses)) / sum(counts), rel=1e-6
    )
    assert row["loss"] != pytest.approx(sum(losses) / 2, rel=1e-6)
    if config.has_extra("planner"):
        plan = subprocess.run(
            [warm_python(), "train.py", path, "--dry-run", "--json"], cwd=REPO, capture_output=True
        )
        assert json.loads(plan.stdout)["steps_per_epoch"] > 1
    assert data.show.main([str(path), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    # the first step, unless it is said
    assert data.show.main([str(path)]) == 0 and capsys.readouterr().out == shown
    # three of four, of eight samples
    assert shown.count(f"of {corpus}") == 6 and shown.count("other.jsonl") == 2
    other = config.load(str(path), ['--data.sources=[{source = "python-stdlib"}]'])
    with pytest.raises(ConfigError, match=r"data\.sources"):
        compare.check_same_run(other, 1)


def test_other_data_is_refused_by_name(corpus, tmp_path, write_config):
    """The same configuration, and another corpus in the same place."""
    source = str(shutil.copy(corpus, tmp_path / "texts.jsonl"))
    path = write_config(
        "guarded",
        data={"source": source, "path": str(tmp_path / "tokens")},
        checkpoint={},
        train={"steps": 1},
        optim={"warmup_steps": 0},
    )
    assert launch(path).returncode == 0
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "texts.jsonl").write_text("".join(corpus.read_text().splitlines(True)[::-1]))
    done = launch(path, "--train.steps=2", "--optim.schedule_steps=1")
    assert done.returncode == 2 and "was trained on other data" in done.stderr, done.stderr
    assert "sha256.train.bin was" in done.stderr and "sha256.heldout.bin" in done.stderr, (
        done.stderr
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_overwrites_itself_on_a_terminal_and_is_lines_in_a_log(terminal, monkeypatch):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    for tokens in (400, 500):
        state = {
            "tokens": {"train": tokens - 9, "heldout": 9},
            "documents": {"train": tokens // 10 - 1, "heldout": 1},
        }
        report(progress("words", state, tokens / 1000, 100, 2.0), stays=False)
    report("done")
    found = stream.getvalue()
    assert found.count("\n") == (1 if terminal else len(found.splitlines())) and found.endswith(
        "done\n"
    )
    assert ("\r" in found) == terminal
    *_, before, last = [part for part in re.split(r"[\r\n]|\x1b\[K", found) if "words" in part]
    # a rate is of what was made now: 300 tokens in two seconds
    for part, share, tokens, rate, documents in (
        (before, "40%", "400/1.00k", "150 tokens/s", 40),
        (last, "50%", "500/1.00k", "200 tokens/s", 50),
    ):
        assert part.startswith(f"words:  {share}|")
        assert tokens in part and part.endswith(f"{rate}, {documents} documents]")


def test_an_error_is_printed_on_a_line_that_progress_left_clear(prepared, tmp_path, monkeypatch):
    """By the launcher as by data.prepare."""
    (tmp_path / "in.jsonl").write_text(GOOD * 99 + "[1]\n")
    for name, value in {
        "data.encode.CHUNK": 100,
        "os.sched_getaffinity": lambda *unused: {0},
        "data.prepare.time": SimpleNamespace(monotonic=itertools.count().__next__),
        "sys.stderr": Terminal(),
    }.items():
        monkeypatch.setattr(name, value)
    with pytest.raises(ConfigError, match="line 100: has no field"):
        prepare_one(
            config_for(tmp_path / "in.jsonl", tmp_path, tokenizer=str(prepared / "tokenizer.model"))
        )
    shown = sys.stderr.getvalue()
    assert " tokens/s" in shown and shown.endswith("\x1b[K\r"), shown


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-"])
def test_invalid_input_ends_a_tool_with_2_also_without_a_place_for_its_error(redirect):
    tool = "import config; config.run_tool(lambda argv: config.load('none.toml'))"
    command = f'{sys.executable} -c "{tool}" {redirect}'
    assert subprocess.run(command, shell=True, cwd=REPO, stdout=subprocess.DEVNULL).returncode == 2


def test_a_full_disk_and_a_closed_stderr_end_no_preparation(with_tokenizer, tmp_path):
    for redirect in ("2>/dev/full", "2>&-", ">&- 2>&-"):
        path = written(with_tokenizer, tmp_path)
        done = subprocess.run(
            ["bash", "-c", f"exec {sys.executable} -m data.prepare {path} {redirect}"],
            cwd=REPO,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and read_manifest(tmp_path / "out"), done.stderr
        shutil.rmtree(tmp_path / "out")


def test_a_full_disk_ends_in_a_line(corpus, prepared, write_config, tmp_path):
    path = write_config(
        "full",
        data={
            "source": str(corpus),
            "path": str(tmp_path / "out"),
            "tokenizer": str(prepared / "tokenizer.model"),
        },
    )
    limit = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); import config, data.prepare as p; "
        "config.run_tool(p.main)"
    )
    done = subprocess.run(
        [sys.executable, "-c", limit, path], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"{tmp_path / 'out'}: data could not be prepared: File too large"
    )
    assert main([str(path)]) == 0


def test_a_changed_file_is_noticed_at_the_next_start(prepared, corpus, tmp_path, capsys):
    copy = tmp_path / "out"
    shutil.copytree(prepared, copy)
    cfg = make_config(data={"source": str(corpus), "path": str(copy)})
    tokens = bytearray((copy / "train.bin").read_bytes())
    tokens[1000] ^= 1
    os.utime(copy / "train.bin")  # copied: hashed once, and found good
    prepare_one(cfg)
    printed = capsys.readouterr().err.splitlines()
    assert (
        len(printed) == 2
        and "train.bin: was copied or changed" in printed[0]
        and "unchanged" in printed[1]
    )
    (copy / "train.bin").write_bytes(tokens)
    with pytest.raises(ConfigError, match=r"train\.bin: was changed since it was prepared"):
        prepare_one(cfg)
    (copy / "heldout.ends.bin").unlink()
    with pytest.raises(ConfigError, match=r"heldout\.ends\.bin: is missing"):
        prepare_one(cfg)


class Killed(BaseException):
    """Nothing catches it, as nothing catches kill -9."""


def killed(*unused):
    raise Killed


@pytest.mark.quick
def test_killed_at_the_end_it_resumes_at_the_end(corpus, prepared, tmp_path, monkeypatch, capsys):
    cfg = config_for(corpus, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("data.prepare.sha256_of", killed)
        with pytest.raises(Killed):
            prepare_one(cfg)
    monkeypatch.setattr("data.folder.train_on_sources", killed)
    monkeypatch.setattr("data.writer.TokenWriter.append", killed)
    capsys.readouterr()
    assert content(prepare_one(cfg)) == content(prepared)
    assert capsys.readouterr().err.startswith(f"resuming after 400 documents of {corpus}\n")


@pytest.mark.parametrize("held_out", [0, 1, 2])
def test_what_is_held_out_has_an_input_and_its_target(held_out, with_tokenizer):
    """One token has none: then it is of train.bin."""
    [(folder, _)] = begin_all(with_tokenizer)
    writer = TokenWriter(folder, growing=False)
    if held_out:
        writer.append("heldout", bytes(2 * held_out))
    writer.append("train", bytes(2 * 500))
    writer.end()
    writer.close()
    expected = ["heldout", 0, 2] if held_out == 2 else ["train", 495, 500]
    assert read_manifest(folder)["validation"] == expected


@pytest.mark.parametrize(
    "sizes", [[37] * 40, [300, 690, 400], [990, 10, 5], [995, 5, 7], [400, 100], [7, 993]], ids=str
)
def test_conversations_are_held_out_whole(sizes, with_tokenizer, monkeypatch):
    """Those that hold a token of the last hundredth of the first tokens, here 1,000, and end in these; else the last
    that does."""
    monkeypatch.setattr("data.record.FIRST_BORDER", 1000)
    [(folder, _)] = begin_all(with_tokenizer)
    writer = TokenWriter(folder, growing=False, whole_documents=True)
    for size in sizes:
        writer.append("train", os.urandom(2 * size))
    writer.end()
    writer.close()
    end = min(1000, sum(sizes))
    first = end - end // 100
    borders = itertools.pairwise([0, *itertools.accumulate(sizes)])
    whole = [document for document in borders if document[1] <= end]
    held_out = [document for document in whole if document[1] > first] or whole[-1:]
    begin, end = held_out[0][0], held_out[-1][1]
    manifest = read_manifest(folder)
    assert manifest["validation"] == ["train", begin, end]
    text = (folder / "train.bin").read_bytes()[2 * begin : 2 * end]
    assert manifest["validation_hash"] == hashlib.sha256(text).hexdigest()


def test_token_files_end_where_their_record_does(with_tokenizer):
    """Behind it may be more, of an attempt on text that was mended since; where there is less, it is named."""
    [(folder, _)] = begin_all(with_tokenizer)

    def writer_of(documents: int) -> TokenWriter:
        writer = TokenWriter(folder, growing=False)
        for split in ("train", "heldout"):
            for _ in range(documents):
                writer.append(split, bytes(2 * 7))
        return writer

    first = writer_of(2)
    first.record()
    first.close()
    killed_later = writer_of(9)
    for file in killed_later.files:
        file.sync()
    killed_later.close()
    last = writer_of(3)
    last.end()
    last.close()
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.bin")}
    ends = dict.fromkeys(["train.ends.bin", "heldout.ends.bin"], 8 * 5)
    assert sizes == {"train.bin": 2 * 7 * 5, "heldout.bin": 2 * 7 * 5, **ends}
    for name, size in sizes.items():
        os.truncate(folder / name, size - 1)
        told = f"{name}: has {size - 1} bytes, of {size} that were written: it was cut or changed"
        with pytest.raises(ConfigError, match=told):
            TokenWriter(folder, growing=False)
        os.truncate(folder / name, size)
        # while it is written: what follows would hide the cut behind zeros
        writer = writer_of(1)
        os.truncate(folder / name, size - 1)
        with pytest.raises(ConfigError, match=told):
            writer.record()
        writer.close()
        os.truncate(folder / name, size)


def test_a_mixture_goes_on_that_was_killed_as_its_tokenizer_was_written(
    corpus, tmp_path, monkeypatch
):
    """Between any two of its files: a tokenizer is not there before what says on which text it was trained."""
    cfg = mixture(tmp_path, corpus)
    write = files.write_atomic
    written = []

    def write_atomic(path, content, *temporary):
        write(path, content, *temporary)
        written.append(path.name)
        raise Killed

    for times in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr("files.write_atomic", write_atomic)
            with pytest.raises(Killed):
                prepare(cfg)
        assert len(written) == times
    assert len(prepare(cfg)) == 2


def test_a_network_that_fails_loses_nothing_that_was_read(
    corpus, prepared, tmp_path, monkeypatch, capsys
):
    """Neither while a dataset is read, nor as it is opened to go on; a name that leads nowhere leaves nothing."""
    import datasets
    import huggingface_hub

    texts, reached = [json.loads(line)["text"] for line in corpus.read_text().splitlines()], [300]

    class Stream:
        place, info = 0, SimpleNamespace(splits=None)

        def __iter__(self):
            while self.place < reached[0]:
                self.place += 1
                yield {"text": texts[self.place - 1]}
            if reached[0] < len(texts):
                raise ConnectionError("the peer is gone")

        def state_dict(self) -> dict:
            return {"place": self.place}

        def load_state_dict(self, state: dict) -> None:
            self.place = state["place"]

    def load(*unused, **options) -> Stream:
        if not reached[0]:
            raise ConnectionError("no route")
        return Stream()

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name: SimpleNamespace(sha="commit")
    )
    told = []
    monkeypatch.setattr(
        "data.prepare.progress",
        lambda name, state, share, before, seconds: told.append(before) or "",
    )
    for name in "SYNC_SECONDS", "LOG_SECONDS":
        monkeypatch.setattr(f"data.prepare.{name}", 0.0)
    monkeypatch.setattr("data.encode.CHUNK", 5000)
    given = {"tokenizer": str(prepared / "tokenizer.model")}
    cfg = config_for("owner/name", tmp_path, **given)
    for rows_before_it_fails, error in ((300, "the peer is gone"), (0, "no route")):
        reached[0] = rows_before_it_fails
        with pytest.raises(
            ConfigError, match=f"source = owner/name: .*cannot be read: ConnectionError: {error}"
        ):
            prepare_one(cfg)
        assert json.loads((tmp_path / "out/manifest.json").read_text())["documents"]["train"] > 50
        assert "what was read of owner/name stays" in capsys.readouterr().err
    reached[0] = len(texts)
    kept = sum(json.loads((tmp_path / "out/manifest.json").read_text())["tokens"].values())
    folder = prepare_one(cfg)
    assert {*told} == {0, kept}  # a speed is of what is made now
    assert "resuming after" in capsys.readouterr().err
    assert all(
        (folder / name).read_bytes() == (prepared / name).read_bytes()
        for name in ("train.bin", "heldout.bin")
    )
    reached[0] = 0
    with pytest.raises(ConfigError, match="no route"):
        prepare_one(config_for("owner/nowhere", tmp_path / "new", **given))
    assert not (tmp_path / "new/out").exists()


def test_a_killed_preparation_whose_text_has_changed_is_refused_by_file(
    corpus, prepared, tmp_path, monkeypatch
):
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(corpus.read_text().splitlines(True)[::-1]))
    cfg = config_for(copy, tmp_path, tokenizer=str(prepared / "tokenizer.model"))
    with monkeypatch.context() as patched:
        patched.setattr("data.prepare.sha256_of", killed)
        with pytest.raises(Killed):
            prepare_one(cfg)
    before = content(tmp_path / "out")
    shutil.copy(corpus, copy)
    with pytest.raises(ConfigError, match=r"copy\.jsonl: its text was changed after"):
        prepare_one(cfg)
    assert content(tmp_path / "out") == before


def test_text_that_changes_meanwhile_is_not_published(corpus, prepared, tmp_path, monkeypatch):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)

    def append(*unused):
        with copy.open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")

    def chunks(*arguments):
        yield from encode.chunks(*arguments)
        append()

    monkeypatch.setattr("data.prepare.chunks", chunks)
    with pytest.raises(ConfigError, match=r"copy\.jsonl: its text was changed after"):
        prepare_one(config_for(copy, tmp_path, tokenizer=str(prepared / "tokenizer.model")))
    assert not is_complete(read_manifest(tmp_path / "out"))


@pytest.mark.quick
def test_a_prepared_mixture_takes_no_lock_and_watches_its_text(corpus, tmp_path, monkeypatch):
    cfg = mixture(tmp_path, corpus)
    folders = prepare(cfg)
    with monkeypatch.context() as patched:
        patched.setattr("files.lock", killed)  # on a disk that can only be read it would fail
        assert prepare(cfg) == folders
    with (tmp_path / "other.jsonl").open("a") as file:
        file.write(json.dumps({"body": "more"}) + "\n")
    shutil.rmtree(folders[1])
    with pytest.raises(
        ConfigError, match=r"other\.jsonl changed since this tokenizer was trained on it"
    ):
        prepare(cfg)


def test_sources_of_one_name_are_told_apart(corpus):
    twice = [{"source": str(corpus)}, {"source": str(corpus), "text_field": "body"}]
    assert source_names(make_config(data={"sources": [{"source": "a"}, {"source": "b"}]})) == [
        "a",
        "b",
    ]
    given = make_config(data={"sources": twice, "tokenizer": str(corpus)})
    assert len(set(source_names(given))) == 2 and source_names(make_config()) == []


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "not JSON",
        '{"files": {"a": 1}}',
        '{"identity": {}, "vocab_size": 5, "tokens": {}, "dtype": "uint16"}',
    ],
)
def test_somebody_elses_manifest_is_left_alone(content, corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is no manifest of prepared data; move .*out away"):
        prepare_one(config_for(corpus, tmp_path))
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=r"out/manifest\.json: cannot be read: Not a directory$"):
        prepare_one(config_for(corpus, tmp_path))


def test_data_of_another_configuration_is_refused_without_the_launcher_too(
    prepared, write_config, tmp_path
):
    path = write_config(
        "other", data={"source": "python-stdlib", "path": str(prepared)}, checkpoint={}
    )
    done = subprocess.run(
        [warm_python(), "train.py", path], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 2 and "was prepared with source = " in done.stderr, done.stderr
    assert not (tmp_path / "outputs").exists()
    with pytest.raises(ConfigError, match="was prepared with source = "):
        open_data(config.load(str(path), []), "train")


@pytest.mark.quick
def test_a_killed_process_of_the_pool_is_reported_and_loses_nothing(
    with_tokenizer, tmp_path, monkeypatch
):

    def broken(*unused):
        raise concurrent.futures.process.BrokenProcessPool

    with monkeypatch.context() as patched:
        patched.setattr("concurrent.futures.Future.result", broken)
        with pytest.raises(
            ConfigError,
            match=r"a process that tokenizes was killed \(is the host out of memory\?\)",
        ):
            prepare_one(with_tokenizer)
    assert (tmp_path / "out/manifest.json").exists()
    prepare_one(with_tokenizer)


def test_processes_that_are_killed_now_and_then_end_no_preparation(monkeypatch, capsys):
    """Twice over each of five chunks, which come in their order; three times over one is too often."""
    attempts: dict[str, int] = {}

    def result(text: str) -> encode.Encoded:
        attempts[text] = attempts.get(text, 0) + 1
        if attempts[text] <= kills:
            raise concurrent.futures.process.BrokenProcessPool
        return [(False, text.encode())]

    def submit(function: object, documents: list[str]) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: result(*documents))

    pool = SimpleNamespace(submit=submit, shutdown=lambda **options: None)
    monkeypatch.setattr("data.encode._start_pool", lambda workers: pool)
    kills = 2
    cut = [encode.Chunk([str(i)], len, None, None) for i in range(5)]
    done = [*encode.encode_in_order(iter(cut), 1)]
    assert done == [(chunk, [(False, str(i).encode())]) for i, chunk in enumerate(cut)]
    assert capsys.readouterr().err.count("was killed (is the host out of memory?); starting") == 10
    attempts.clear()
    kills = 3
    with pytest.raises(OSError, match="the same command resumes here"):
        next(encode.encode_in_order(iter(cut), 1))


class InChunks:
    """What _interleave() needs of a preparation: chunks of a letter, so many times, with their numbers."""

    def __init__(self, letter: str, sizes: list[int]):
        self.made = [
            encode.Chunk([letter * size], len, number, None) for number, size in enumerate(sizes)
        ]

    def chunks(self):
        return iter(self.made)


def test_sources_are_prepared_side_by_side():
    """The texts of neither are far ahead of the other's, while both last; each comes in its order."""
    read = {"a": 0, "b": 0}
    numbers: dict[str, list[int]] = {"a": [], "b": []}
    for chunk in _interleave([InChunks("a", [97] * 5), InChunks("b", [13] * 30)]):
        [text] = chunk.documents
        read[text[0]] += len(text)
        numbers[text[0]].append(chunk.target)
        if read["b"] < 13 * 30:
            assert abs(read["a"] - read["b"]) <= 97
    assert numbers == {"a": [*range(5)], "b": [*range(30)]}


def test_a_file_system_that_does_not_sync_folders_is_used(with_tokenizer, monkeypatch, capsys):
    """CIFS and gocryptfs refuse it, each with an error of its own; files are synced, and one line says so."""
    fsync = os.fsync
    for number in (errno.EINVAL, errno.EOPNOTSUPP):

        def refusing(handle, number=number):
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", refusing)
        files.warn_once.cache_clear()
        folder = prepare_one(with_tokenizer)
        assert capsys.readouterr().err.count("does not sync folders") == 1
        assert is_complete(read_manifest(folder))
        shutil.rmtree(folder)
    failing = unittest.mock.Mock(side_effect=OSError(5, "I/O"))
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(ConfigError, match="data could not be prepared: I/O"):
        prepare_one(with_tokenizer)
    assert failing.called


@pytest.mark.parametrize(
    "content, cores",
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}, 3),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_cores_are_those_that_a_container_may_use(content, cores, tmp_path, monkeypatch):
    """Of versions 1 and 2 of control groups; the ranks' are not for processes that tokenize."""
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("data.cores.control_groups", lambda *_: [tmp_path / "inner", tmp_path])
    monkeypatch.setattr("os.sched_getaffinity", lambda *unused: set(range(64)))
    assert usable_cores() == cores
    assert worker_count(ranks=8) == max(1, cores - 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda *unused: set(range(192)))
    monkeypatch.setattr("data.cores.control_groups", lambda *_: [])
    assert worker_count(ranks=8) == 64  # more could not be fed


def test_the_groups_of_a_container_are_found_by_their_names(tmp_path, monkeypatch):
    """A name may hold colons. In version 1 each controller has groups of its own."""
    monkeypatch.setattr("data.cores.GROUPS", tmp_path)
    monkeypatch.setattr("data.cores.MEMBERSHIP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("7:memory:/m\n4:cpu:/a/b\n0::/pods/cri:containerd:1\n")
    found = [group.relative_to(tmp_path) for group in control_groups("cpu")]
    expected = ["cpu/a/b", "cpu/a", "cpu", "pods/cri:containerd:1", "pods", "."]
    assert [*map(str, found)] == expected


def test_what_killed_processes_left_is_removed_and_nothing_else(with_tokenizer, tmp_path):
    """Of this machine, if the process is gone; and what an earlier version left."""
    host, gone = platform.node(), subprocess.Popen(["true"])
    gone.wait()
    left = [f".out.{host}-{gone.pid}.tmp", ".out.tmp"]
    stays = [f".out.{host}-{os.getppid()}.tmp", f".out.elsewhere-{gone.pid}.tmp", ".outer.tmp"]
    for name in left + stays:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").touch()
    prepare_one(with_tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.lock", *stays}


def test_a_lock_that_is_held_too_long_is_not_waited_for(
    with_tokenizer, tmp_path, monkeypatch, capsys
):
    """By a process that is stopped while it trains a tokenizer, perhaps."""
    held = files.lock(tmp_path / ".out.lock")
    monkeypatch.setattr("data.folder.BEGIN_SECONDS", 0.3)
    monkeypatch.setattr("data.prepare.HOLDER_SECONDS", 0.3)
    folder = prepare_one(with_tokenizer)
    told = capsys.readouterr().err
    assert f"{tmp_path / '.out.lock'}: held for 0 s: preparing {folder} too" in told
    assert is_complete(read_manifest(folder))
    held.release()


def test_a_process_that_records_now_and_then_is_waited_for(
    with_tokenizer, tmp_path, monkeypatch, capsys
):
    """Five minutes in all; a minute without a record is too long."""
    [(folder, _)] = begin_all(with_tokenizer)
    held = files.lock(tmp_path / ".out.lock")
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("data.prepare.time", SimpleNamespace(monotonic=lambda: clock.now))
    turn = Turn(folder)
    manifest = read_manifest(folder)

    def has_come() -> bool:
        clock.now += 1
        with contextlib.ExitStack() as locks:
            return turn.has_come(locks)

    for second in range(5 * 59 + 1):
        if second % 59 == 0:
            manifest["tokens"]["train"] += 1
            write_manifest(folder, manifest)
        assert not has_come()
    assert not any(has_come() for _ in range(60))
    assert capsys.readouterr().err == (
        f"waiting for another process that prepares {folder}: another process\n"
    )
    assert has_come()
    assert "has not recorded anything for 60 s\n" in capsys.readouterr().err
    held.release()
