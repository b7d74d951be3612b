"""A folder that exists is that of its source as it is now, or refused; other differences are logged."""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import config
from launch import launch
from system import warn_once
from tests.conftest import make_config, refuses, words
from tools.prepare.folders import create_folders
from tools.prepare.prepare import prepare

pytestmark = pytest.mark.quick


def write(path: pathlib.Path, seed: int, texts: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": f"{seed} {words(seed + i, 30)}"}) for i in range(texts)]
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    for seed, name in enumerate(("a", "b", "more/c")):
        write(tmp_path / f"source/{name}.jsonl", seed)
    return tmp_path / "source"


@pytest.fixture
def configure(source, prepared, tmp_path) -> Callable[..., config.Config]:
    """changes: of [data]."""

    def configured(**changes: Any) -> config.Config:
        given = {"source": str(source), "path": str(tmp_path / "out"), "tokenizer": str(prepared)}
        return make_config(data=given | changes)

    return configured


CHANGES = [
    (lambda source: (source / "more/c.jsonl").unlink(), "more/c.jsonl was removed", None),
    (lambda source: write(source / "d.jsonl", 7), "d.jsonl was added", None),
    (lambda source: write(source / "b.jsonl", 1, 41), "b.jsonl was changed", None),
    (lambda source: os.utime(source / "b.jsonl"), None, "1 of 3 .* written anew .*/b.jsonl"),
    (shutil.rmtree, None, "the files of its train text are gone"),
    (lambda source: None, None, None),
]


@pytest.mark.parametrize("change, problem, line", CHANGES)
def test_source_that_changed_since_is_refused_or_logged(
    change, problem, line, configure, source, capfd
):
    data = configure().data
    prepare(data, 320, cores=1)
    warn_once.cache_clear()
    capfd.readouterr()
    change(source)
    if problem:
        with refuses(problem, "--data.path=.*out-2"):
            prepare(data, 320)
        return
    prepare(data, 320)
    log = capfd.readouterr().err
    assert re.search(line, log) if line else not log


def test_each_launch_compares_the_source_with_its_text(configure, source, capfd):
    cfg = configure()
    prepare(cfg.data, 320, cores=1)
    launch.prepare(cfg, "", [])
    (source / "a.jsonl").unlink()
    with refuses("is not prepared, see above"):
        launch.prepare(cfg, "", [])
    assert "a.jsonl was removed" in capfd.readouterr().err


A, B = {"source": "a.jsonl", "weight": 0.5}, {"source": "b.jsonl", "weight": 0.5}
MIXTURE = {"source": None, "tokenizer": None}
HELD_OUT_B = {"sources": [{**A, "validation": "b.jsonl"}, B], **MIXTURE}
OVERLAPS = [
    ({"source": "*.jsonl", "validation": "link.jsonl"}, "is in data.source and data.validation"),
    ({"sources": [{**A, "source": "*.jsonl"}, B], **MIXTURE}, "is in sources 1 and 2"),
    (HELD_OUT_B, "is in data.source and data.validation"),
    ({"path": "out"}, r"\[data\] path: out lies in data.source"),
]


@pytest.mark.parametrize("changes, problem", OVERLAPS)
def test_file_that_is_read_for_two_purposes_is_refused(
    changes, problem, configure, source, tmp_path, monkeypatch
):
    """By its real path; before a tokenizer is trained."""
    monkeypatch.chdir(source)
    (source / "a.jsonl").rename(tmp_path / "elsewhere.jsonl")
    for name in ("a.jsonl", "link.jsonl"):
        (source / name).symlink_to(tmp_path / "elsewhere.jsonl")
    with refuses(problem):
        create_folders(configure(**changes).data, 320)


ROWS = [
    ({"body": "a", "id": 1}, {}, 'body, id; try data.text_field = "body"$'),
    ({"talk": [{}]}, {"format": "messages"}, 'talk; try data.messages_field = "talk"$'),
    ({"instruction": "a", "output": "b"}, {}, 'try data.format = "alpaca"$'),
]


@pytest.mark.parametrize("row, data, option", ROWS)
def test_first_row_without_the_column_is_refused_with_the_option_to_paste(
    row, data, option, configure, source
):
    """Even where wrong rows are left out."""
    for path in source.rglob("*.jsonl"):
        path.write_text(f"{json.dumps(row)}\n" * 3)
    with refuses("row 1: has no field .*, but ", option):
        create_folders(configure(bad_rows="skip", **data).data, 320)
