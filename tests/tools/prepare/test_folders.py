"""A folder that exists is that of its source as it is now, or refused, or told."""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from system import warn_once
from tests.conftest import launch, make_config, refuses, words
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
def options(source, prepared, tmp_path) -> Callable[..., dict]:
    """Of the section [data]."""

    def options_of(**changes: Any) -> dict:
        given = {"source": str(source), "path": str(tmp_path / "out"), "tokenizer": str(prepared)}
        return given | changes

    return options_of


def replaced(source: pathlib.Path) -> None:
    shutil.rmtree(source)
    write(source / "new.jsonl", 5)


def edited(source: pathlib.Path) -> None:
    text = (source / "a.jsonl").read_text()
    (source / "a.jsonl").write_text(text.replace("cat", "dog"))


CHANGES = [
    (replaced, "a.jsonl was removed", None),
    (lambda source: (source / "more/c.jsonl").unlink(), "more/c.jsonl was removed", None),
    (lambda source: (source / "a.jsonl").rename(source / "d.jsonl"), "a.jsonl was removed", None),
    (lambda source: write(source / "d.jsonl", 7), "d.jsonl was added", None),
    (lambda source: write(source / "b.jsonl", 1, 41), "b.jsonl was changed", None),
    (edited, None, "1 of 3 files were written anew at equal sizes .*source/a.jsonl"),
    (lambda source: os.utime(source / "b.jsonl"), None, "1 of 3 files were written anew"),
    (shutil.rmtree, None, "the files of its train text are gone"),
    (lambda source: None, None, None),
]


@pytest.mark.parametrize("change, problem, line", CHANGES)
def test_source_that_was_changed_since_is_refused_or_told(
    change, problem, line, options, source, capfd
):
    data = make_config(data=options()).data
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


@pytest.mark.parametrize(
    "changes, both",
    [
        ({"validation": "more/c.jsonl"}, "data.source and data.validation"),
        ({"source": "*.jsonl", "validation": "link.jsonl"}, "data.source and data.validation"),
        ({"sources": [{"source": "*.jsonl"}, {"source": "b.jsonl"}]}, "sources 1 and 2"),
        (
            {
                "sources": [
                    {"source": "a.jsonl", "validation": "b.jsonl"},
                    {"source": "b.jsonl"},
                ]
            },
            "data.source and data.validation",
        ),
    ],
)
def test_file_that_is_read_for_two_purposes_is_refused(
    changes, both, options, source, tmp_path, monkeypatch
):
    """By its real path; before a tokenizer is trained."""
    monkeypatch.chdir(source)
    (source / "link.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    (source / "a.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (source / "a.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    for entry in changes.get("sources", ()):
        entry["weight"] = 0.5
    given = options(**changes)
    if "sources" in changes:
        del given["source"], given["tokenizer"]
    with refuses(r"\.jsonl: is in ", both):
        create_folders(make_config(data=given).data, 320)


def test_folder_inside_its_source_is_refused(options, source):
    with refuses(r"\[data\] path: .*source/out lies in data.source"):
        create_folders(make_config(data=options(path=str(source / "out"))).data, 320)


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "row, data, option",
    [
        ({"body": "a", "id": 1}, {}, 'body, id; try data.text_field = "body"$'),
        ({"messages": [MESSAGE]}, {}, 'messages; try data.format = "messages"$'),
        ({"talk": [MESSAGE]}, {"format": "messages"}, 'talk; try data.messages_field = "talk"$'),
        ({"instruction": "a", "output": "b"}, {}, 'try data.format = "alpaca"$'),
        ({"prompt": "a", "response": "b"}, {}, 'try data.format = "prompt_completion"$'),
        ({"id": 1}, {}, "id; try another source: none of these columns holds text$"),
        ({"text": 5}, {}, None),  # a wrong row, of which others may not be
    ],
)
@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_first_row_without_the_column_is_refused_with_the_option_to_paste(
    row, data, option, bad_rows, options, source
):
    for path in sorted(source.rglob("*.jsonl")):
        path.write_text(f"{json.dumps(row)}\n" * 3)
    if data:
        data = {**data, "document_mask": True}
    parsed = make_config(data=options(bad_rows=bad_rows, **data)).data
    if option:
        with refuses("row 1: has no field .*, but ", option):
            create_folders(parsed, 320)
    else:
        create_folders(parsed, 320)


def test_each_launch_compares_the_source_with_its_text(options, source, write_config):
    path = write_config(data=options(), model={"vocab_size": 320}, train={"steps": 1})
    assert launch(path).returncode == 0
    replaced(source)
    done = launch(path, "--run.name=other")
    assert done.returncode == 2 and "a.jsonl was removed" in done.stderr
    shutil.rmtree(source)
    done = launch(path, "--run.name=other")
    assert done.returncode == 0 and "are gone: it is used as it is" in done.stderr
