"""Datasets of a Hugging Face hub, against tests/hub.py: the same text whatever fails, or one clear line."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import REPO, words
from tests.hub import Hub

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("datasets")
from pyarrow import parquet  # noqa: E402

TEXTS = [words(i, 5 + i % 80) + "é猫" for i in range(900)]
CARD = b"""---
configs:
- config_name: en
  data_files: [{split: train, path: en/train-*}, {split: validation, path: en/val*}]
---
"""
CHILD = """
import json, sys, time
import config
from tools.prepare.source import ByteRange, documents, list_files

time.sleep = lambda seconds: None  # between the tries of the hub's library
answers = []
for revision, data in json.load(sys.stdin):
    answers.append(answer := {"texts": []})
    try:
        d = config.Data(**data)
        answer["files"], answer["commit"] = list_files(d, revision)
        for text in documents(d, map(ByteRange, answer["files"])):
            answer["texts"].append(text)
        answer["last"] = [*documents(d, [ByteRange(answer["files"][-1])])]  # as another process reads it
    except config.ConfigError as error:
        answer["refused"] = str(error)
    except OSError as error:
        answer["failed"] = f"{error.filename}: {error.strerror}"
print(json.dumps(answers))
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
}
FIRST, SECOND = lines(TEXTS[:500]), lines(TEXTS[500:])
# by repository; `datasets` takes the files of a repository for of one kind
REPOSITORIES = {
    "gz": {"0.json.gz": gzip.compress(FIRST), "1.json.gz": gzip.compress(SECOND)},
    "parquet": {"0.parquet": table(TEXTS[:600]), "1.parquet": table(TEXTS[600:])},
    "xml": {"a.xml": b"<a/>"},
    "lost": {"0.jsonl": FIRST, "1.jsonl": SECOND},
}
CONVERTED = "me/xml@refs/convert/parquet"
REFUSED = [
    ("me/xml", {}, "has hf://datasets/me/xml@.*/a.xml; of a dataset, .*try --data.source="),
    ("me/texts", {"subset": "en", "split": "dev"}, "split = dev: me/texts has train, validation"),
    (CONVERTED, {}, "data.subset must select one of en, fr"),
]
READ = [("me/texts", {"subset": "en"}), ("me/gz", {}), ("me/parquet", {})]
OTHERS = [("me/lost", {}), (CONVERTED, {"subset": "fr"}), ("me/moved", {})]


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> Callable[..., dict]:
    """(a source, its options) -> {"texts", "files", "commit"}: what a process read before it failed, and why.
    "pinned" is a commit of me/moved."""
    with Hub() as hub:
        hub.commit("datasets/me/texts", EN, token="secret")
        for name, files in REPOSITORIES.items():
            hub.commit(f"datasets/me/{name}", files)
        converted = {f"{name}/train/0000.parquet": table([name]) for name in ("en", "fr")}
        hub.commit("datasets/me/xml", converted, branch="refs/convert/parquet")
        first = hub.commit("datasets/me/moved", {"a.jsonl": lines(["first"])})
        hub.commit("datasets/me/moved", {"a.jsonl": lines(["second"])})
        hub.is_lost = re.compile("/datasets/me/lost/resolve/.*/1.jsonl").match
        given = [*READ, *OTHERS, *(row[:2] for row in REFUSED)]
        requests = [(None, {"source": source, **data}) for source, data in given]
        requests.append((first, {"source": "me/moved"}))
        command = [sys.executable, "-c", CHILD]
        env = os.environ | hub.environment(tmp_path_factory.mktemp("home"), token="secret")
        answers = subprocess.check_output(
            command, cwd=REPO, env=env, input=json.dumps(requests).encode()
        )
    found = zip([*given, ("pinned", {})], json.loads(answers), strict=True)
    by_key = {repr(key): answer for key, answer in found}
    return lambda *key: by_key[repr(key)]


@pytest.mark.parametrize("source, data", READ)
def test_a_dataset_is_streamed_by_the_hash_of_its_files_names(answer, source, data):
    found = answer(source, data)
    assert sorted(found["texts"]) == sorted(TEXTS)
    root = f"hf://datasets/{source}@{found['commit']}/"
    names = [path.removeprefix(root) for path, _, _ in found["files"]]
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    first = {"en/train-1.jsonl": 400, "1.json.gz": 500, "1.parquet": 600}.get(names[0], 0)
    assert found["texts"][0] == TEXTS[first]
    assert found["last"] == found["texts"][-len(found["last"]) :] != []


def test_a_commit_is_read_though_its_branch_has_moved(answer):
    assert answer("me/moved", {})["texts"] == ["second"]
    assert answer("pinned", {})["texts"] == ["first"]


def test_a_lost_network_fails_to_be_retried(answer):
    failed = answer("me/lost", {})
    path, _, _ = failed["files"][1]
    assert failed["failed"].startswith(f"{path}: rows from 1: cannot be read: ")
    assert failed["texts"] == TEXTS[:500]


@pytest.mark.parametrize("source, data, problem", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_remedy(answer, source, data, problem):
    refused = answer(source, data)["refused"]
    assert re.search(problem, refused) and "\n" not in refused, refused


def test_other_files_are_read_as_the_hub_converted_them(answer):
    """One subset of them, whose files lie in a folder of its name."""
    assert answer(CONVERTED, {"subset": "fr"})["texts"] == ["fr"]
