"""Datasets and ids of a Hugging Face hub, against tests/hub.py: the same text whatever fails, or
one clear line."""

import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import config
from config import Given
from extras.huggingface import hub
from tests.conftest import REPO, words
from tests.hub import LOST, Hub

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("datasets")
from pyarrow import parquet  # noqa: E402

TEXTS = [words(i, 5 + i % 80) + "é猫" for i in range(900)]
CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*
  - split: validation
    path: en/val*
- config_name: tables
  data_files: tables/*
---
"""
# Answers each line of stdin, {"data": options, "files": those that were listed before}
CHILD = """
import json, sys, time
import config
from tools.prepare.source import Position, SourceReader, SourceFile, list_files

time.sleep = lambda seconds: None  # between the tries of the hub's library
for line in sys.stdin:
    request = json.loads(line)
    answer = {}
    try:
        d = config.Data(**request["data"])
        answer["files"], answer["commit"] = request["files"], None
        if not answer["files"]:
            answer["files"], answer["commit"] = list_files(d, request["revision"])
        files = [SourceFile(*file) for file in answer["files"]]
        source = SourceReader(d, files, Position(*request["position"]))
        answer["texts"] = []
        for text in source:
            answer["texts"].append(text)
            answer["position"] = source.position
    except config.ConfigError as error:
        answer["refused"] = str(error)
    except OSError as error:
        answer["failed"] = f"{error.filename}: {error.strerror}"
    print(json.dumps(answer), flush=True)
"""


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), buffer, row_group_size=70)
    return buffer.getvalue()


EN = {
    "README.md": CARD,
    "en/train-0.jsonl": lines(TEXTS[:400]),
    "en/train-1.jsonl": lines(TEXTS[400:]),
    "en/val.jsonl": lines(["held out"]),
    "tables/a.xml": b"<a/>",
}
# by repository; `datasets` takes the files of a repository for of one kind
REPOSITORIES = {
    "gz": {"0.json.gz": gzip.compress(lines(TEXTS[:500])), "1.json.gz": gzip.compress(lines(TEXTS[500:]))},
    "zst": {"a.jsonl.zst": pyarrow.compress(lines(TEXTS), "zstd", asbytes=True)},
    "parquet": {"0.parquet": table(TEXTS[:600]), "1.parquet": table(TEXTS[600:])},
    "csv": {"a.csv": b"text\n" + "\n".join(TEXTS).encode()},
    "xml": {"a.xml": b"<a/>"},
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as running:
        running.commit("datasets/me/texts", EN, token="secret")
        for name, files in REPOSITORIES.items():
            running.commit(f"datasets/me/{name}", files)
        converted = {f"{name}/train/0000.parquet": table([name]) for name in ("en", "fr")}
        running.commit("datasets/me/xml", converted, branch="refs/convert/parquet")
        yield running


class Client:
    """A process that reads datasets of the hub."""

    def __init__(self, server: Hub, home: pathlib.Path, **options: Any):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=REPO,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | server.environment(home, **options),
        )

    def read(
        self,
        source: str = "me/texts",
        files: list | None = None,
        position: tuple = (0, 0),
        revision: str | None = None,
        **data: str,
    ) -> dict[str, Any]:
        """{"texts", "files", "commit", "position"}; what was read before it failed, and why."""
        assert self.process.stdin and self.process.stdout
        if source == "me/texts":
            data = {"subset": "en", **data}
        request = {
            "data": {"source": source, **data},
            "files": files,
            "position": position,
            "revision": revision,
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def client(server, tmp_path_factory) -> Iterator[Client]:
    client = Client(server, tmp_path_factory.mktemp("client"), token="secret")
    yield client
    client.close()


@pytest.mark.parametrize("source", ["me/texts", "me/gz", "me/zst", "me/parquet", "me/csv"])
def test_a_dataset_is_streamed_by_the_hash_of_its_files_names(client, server, source):
    before = len(server.requests)
    answer = client.read(source)
    assert sorted(answer["texts"]) == sorted(TEXTS)
    root = f"hf://datasets/{source}@{answer['commit']}/"
    names = [path.removeprefix(root) for path, _, _ in answer["files"]]
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    first = {"en/train-1.jsonl": 400, "1.json.gz": 500, "1.parquet": 600}.get(names[0], 0)
    assert answer["texts"][0] == TEXTS[first]
    # from any position on, without a look at the files before it
    resumed = client.read(source, answer["files"], (len(names) - 1, 50))
    assert resumed["texts"] == answer["texts"][-len(resumed["texts"]) :]
    assert any("Range" not in request for request in server.requests[before:])


def test_a_moved_branch_changes_nothing(client, server):
    begun = client.read(split="validation")
    moved = server.commit("datasets/me/texts", {**EN, "en/val.jsonl": lines(["another"])})
    assert client.read(files=begun["files"])["texts"] == ["held out"]
    again = client.read(split="validation")
    assert (again["texts"], again["commit"]) == (["another"], moved)
    pinned = client.read(split="validation", revision=begun["commit"])
    assert pinned["texts"] == ["held out"]
    old = client.read(f"me/texts@{begun['commit']}", subset="en", split="validation")
    assert old["texts"] == ["held out"]


def test_a_lost_network_fails_to_be_retried_and_reading_resumes(client, server):
    """In the second file; the first is not asked for again."""
    whole = client.read()
    path, _, _ = whole["files"][1]
    name = path.rpartition("/")[2]
    for fault in (LOST, 503):
        server.fault = lambda request, fault=fault: fault if name in request.path else None
        failed = client.read(files=whole["files"])
        assert failed["failed"].startswith(f"{path}: rows from 1 on: cannot be read: ")
        assert failed["texts"] == whole["texts"][: len(failed["texts"])] != []
        server.fault = lambda request: None
        resumed = client.read(files=whole["files"], position=failed["position"])
        assert failed["texts"] + resumed["texts"] == whole["texts"]


@pytest.mark.parametrize(
    "source, data, problem",
    [
        ("me/missing", {}, "RepositoryNotFoundError"),
        ("me/xml", {}, "has hf://datasets/me/xml@.*/a.xml; of a dataset, .*try --data.source="),
        ("me/texts", {"subset": "tables"}, "try --data.source=me/texts@refs/convert/parquet"),
        ("me/texts", {"subset": "fr"}, "BuilderConfig 'fr' not found"),
        ("me/texts", {"split": "dev"}, "split = dev: me/texts has train, validation"),
        ("me/texts@v1", {"subset": "en"}, "RevisionNotFoundError"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_remedy(client, source, data, problem):
    refused = client.read(source, **data)["refused"]
    assert re.search(problem, refused), refused
    assert "[data] s" in refused and "\n" not in refused


def test_other_files_are_read_as_the_hub_converted_them(client):
    """One subset of them, whose files lie in a folder of its name."""
    for subset in ("en", "fr"):
        assert client.read("me/xml@refs/convert/parquet", subset=subset)["texts"] == [subset]
    for data, problem in (
        ({}, "data.subset must select one of en, fr"),
        ({"subset": "en", "split": "dev"}, "split = dev: me/xml@refs/convert/parquet has train"),
    ):
        assert problem in client.read("me/xml@refs/convert/parquet", **data)["refused"]


def test_wrong_text_of_a_dataset_is_not_retried(client, server):
    for content, problem in (
        (b'{"text": 3}', "row 1: field 'text' must be text"),
        (lines(["a"]) + b'{"text": "\xff"}', "row 2: is not valid JSON"),
    ):
        server.commit("datasets/me/wrong", {"a.jsonl": content})
        assert f"a.jsonl: {problem}" in client.read("me/wrong")["refused"]
    server.commit("datasets/me/wrong", {"a.parquet": table(TEXTS)[:-9]})
    assert "a.parquet: rows from 1 on: cannot be read: Arrow" in client.read("me/wrong")["refused"]


def test_a_private_dataset_and_a_machine_without_a_network(server, tmp_path):
    for options, problem in (
        ({}, "RepositoryNotFoundError: 401"),
        ({"offline": True}, "OfflineModeIsEnabled"),
    ):
        stranger = Client(server, tmp_path, **options)
        refused = stranger.read()["refused"]
        stranger.close()
        assert problem in refused and "log in with `hf auth login`" in refused
        assert "hf download --repo-type dataset me/texts --local-dir FOLDER" in refused


# Ids of models and tokenizers


def test_what_is_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "Qwen/Qwen3-0.6B",
        "meta-llama/Llama-3.1-8B@main",
        f"a/b@{'0' * 40}",
        "a/b@refs/pr/1",
    ):
        assert hub.is_id(name)
    (tmp_path / "here/Qwen").mkdir(parents=True)
    others = "Qwen3-0.6B /a/b ./a/b ../a a/b/c a/ a/tokenizer.model a/b.json ~/a here/Qwen"
    for name in others.split():
        assert not hub.is_id(name) and hub.local(name) == pathlib.Path(name)


NEWEST = "c" * 40
OLD = "1" * 40


@pytest.mark.parametrize(
    "given, recorded, expected",
    [
        ("a/b", f"a/b@{OLD}", f"a/b@{OLD}"),
        ("a/b", f"a/c@{OLD}", f"a/b@{NEWEST}"),
        ("a/b", "a/b", f"a/b@{NEWEST}"),
        ("a/b", None, f"a/b@{NEWEST}"),
        ("a/b@main", f"a/b@{OLD}", f"a/b@{NEWEST}"),
        (f"a/b@{'2' * 40}", f"a/b@{OLD}", f"a/b@{'2' * 40}"),
    ],
)
def test_an_id_is_pinned_to_the_run_s_commit_or_the_newest(
    given, recorded, expected, tmp_path, monkeypatch
):
    if recorded:
        (tmp_path / "r").mkdir()
        (tmp_path / "r/config.toml").write_text(f'[data]\ntokenizer = "{recorded}"\n')
    monkeypatch.setattr(hub, "snapshot", lambda name, files: pathlib.Path(NEWEST))
    values = {"run.output_dir": str(tmp_path), "run.name": "r", "data.tokenizer": given}
    options = Given(config.SCHEMA, "x.toml", values, {"data.tokenizer": "x.toml"})
    hub.pin(options, "data.tokenizer")
    assert options.values["data.tokenizer"] == expected
