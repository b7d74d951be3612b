"""Datasets of a Hugging Face hub, against tests/hub.py: the same text whatever fails, or one clear line."""

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

from tests.conftest import REPO, words
from tests.hub import LOST, Hub

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("datasets")
from pyarrow import parquet  # noqa: E402

TEXTS = [words(i, 5 + i % 80) + "é猫" for i in range(900)]
CARD = b"""---
configs:
- config_name: en
  data_files: [{split: train, path: en/train-*}, {split: validation, path: en/val*}]
- config_name: tables
  data_files: tables/*
---
"""
# Answers each line of stdin, {"data": options, "files": those that were listed before}
CHILD = """
import json, sys, time
import config
from tools.prepare.source import ByteRange, SourceFile, documents, list_files

time.sleep = lambda seconds: None  # between the tries of the hub's library
for line in sys.stdin:
    request = json.loads(line)
    answer = {"files": request["files"], "commit": None, "texts": []}
    try:
        d = config.Data(**request["data"])
        if not answer["files"]:
            answer["files"], answer["commit"] = list_files(d, request["revision"])
        files = [SourceFile(*file) for file in answer["files"]]
        for text in documents(d, map(ByteRange, files)):
            answer["texts"].append(text)
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
FIRST, SECOND = lines(TEXTS[:500]), lines(TEXTS[500:])
# by repository; `datasets` takes the files of a repository for of one kind
REPOSITORIES = {
    "gz": {"0.json.gz": gzip.compress(FIRST), "1.json.gz": gzip.compress(SECOND)},
    "zst": {"a.jsonl.zst": pyarrow.compress(FIRST + SECOND, "zstd", asbytes=True)},
    "parquet": {"0.parquet": table(TEXTS[:600]), "1.parquet": table(TEXTS[600:])},
    "csv": {"a.csv": b"text\n" + "\n".join(TEXTS).encode()},
    "xml": {"a.xml": b"<a/>"},
    "wrong-type": {"a.jsonl": b'{"text": 3}'},
    "wrong-json": {"a.jsonl": lines(["a"]) + b'{"text": "\xff"}'},
    "cut": {"a.parquet": table(TEXTS)[:-9]},
}


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

    def read(self, source: str = "me/texts", *, files: Any = None, **data: Any) -> dict[str, Any]:
        """{"texts", "files", "commit"}; what was read before it failed, and why."""
        assert self.process.stdin and self.process.stdout
        revision = data.pop("revision", None)
        data = {"source": source, "subset": "en" if source == "me/texts" else None, **data}
        request = {"files": files, "revision": revision, "data": data}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def client(server, tmp_path_factory) -> Iterator[Client]:
    client = Client(server, tmp_path_factory.mktemp("client"), token="secret")
    yield client
    client.process.kill()


@pytest.mark.parametrize("source", ["me/texts", "me/gz", "me/zst", "me/parquet", "me/csv"])
def test_a_dataset_is_streamed_by_the_hash_of_its_files_names(client, source):
    answer = client.read(source)
    assert sorted(answer["texts"]) == sorted(TEXTS)
    root = f"hf://datasets/{source}@{answer['commit']}/"
    names = [path.removeprefix(root) for path, _, _ in answer["files"]]
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    first = {"en/train-1.jsonl": 400, "1.json.gz": 500, "1.parquet": 600}.get(names[0], 0)
    assert answer["texts"][0] == TEXTS[first]
    # the last file alone, as another process reads it
    last = client.read(source, files=answer["files"][-1:])
    assert last["texts"] == answer["texts"][-len(last["texts"]) :] != []


def test_a_moved_branch_changes_nothing(client, server):
    begun = client.read(split="validation")
    moved = server.commit("datasets/me/texts", {**EN, "en/val.jsonl": lines(["another"])})
    assert client.read(files=begun["files"])["texts"] == ["held out"]
    again = client.read(split="validation")
    assert (again["texts"], again["commit"]) == (["another"], moved)
    pinned = client.read(split="validation", revision=begun["commit"])
    assert pinned["texts"] == ["held out"]


@pytest.mark.parametrize("fault", [LOST, 503])
def test_a_lost_network_fails_to_be_retried(client, server, fault):
    """In the second file."""
    full = client.read()
    path, _, _ = full["files"][1]
    name = path.rpartition("/")[2]
    server.fault = lambda request: fault if name in request.path else None
    failed = client.read(files=full["files"])
    server.fault = lambda request: None
    assert failed["failed"].startswith(f"{path}: rows from 1: cannot be read: ")
    assert failed["texts"] == full["texts"][: len(failed["texts"])] != []
    assert client.read(files=full["files"])["texts"] == full["texts"]


CONVERTED = "me/xml@refs/convert/parquet"
REFUSED = [
    ("me/missing", {}, "RepositoryNotFoundError"),
    ("me/xml", {}, "has hf://datasets/me/xml@.*/a.xml; of a dataset, .*try --data.source="),
    ("me/texts", {"subset": "tables"}, "try --data.source=me/texts@refs/convert/parquet"),
    ("me/texts", {"subset": "fr"}, "BuilderConfig 'fr' not found"),
    ("me/texts", {"split": "dev"}, "split = dev: me/texts has train, validation"),
    ("me/texts@v1", {"subset": "en"}, "RevisionNotFoundError"),
    (CONVERTED, {}, "data.subset must select one of en, fr"),
    (CONVERTED, {"subset": "en", "split": "dev"}, f"split = dev: {CONVERTED} has train"),
    ("me/wrong-type", {}, "a.jsonl: row 1: field 'text' must be text"),
    ("me/wrong-json", {}, "a.jsonl: row 2: is not valid JSON"),
    ("me/cut", {}, "a.parquet: rows from 1: cannot be read: Arrow"),
]


@pytest.mark.parametrize("source, data, problem", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_remedy(client, source, data, problem):
    refused = client.read(source, **data)["refused"]
    assert re.search(problem, refused), refused
    assert "\n" not in refused and ("[data] s" in refused or "row" in problem)


@pytest.mark.parametrize("subset", ["en", "fr"])
def test_other_files_are_read_as_the_hub_converted_them(client, subset):
    """One subset of them, whose files lie in a folder of its name."""
    assert client.read(CONVERTED, subset=subset)["texts"] == [subset]


def test_a_machine_without_a_network_is_told_where_to_download(server, tmp_path):
    stranger = Client(server, tmp_path, offline=True)
    refused = stranger.read()["refused"]
    stranger.process.kill()
    assert "OfflineModeIsEnabled" in refused and "log in with `hf auth login`" in refused
    assert "hf download --repo-type dataset me/texts --local-dir FOLDER" in refused
