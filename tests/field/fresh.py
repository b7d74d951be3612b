"""Situations from reports of other trainers: paths, and folders with more than the training data."""

import json
import pathlib
import shutil

from tests.conftest import words
from tests.field.situation import DONE, Situation

ROWS = "".join(json.dumps({"text": words(i, 60)}) + "\n" for i in range(200))
# the beginning of the file that macOS stores beside another one on a disk that isn't its own
APPLE_DOUBLE = b"\0\5\26\7\0\2\0\0Mac OS X        \0\2"


def only_home_has_runs(folder: pathlib.Path) -> None:
    assert (folder / "home/runs/field/status.json").is_file()
    assert not (folder / "~").exists()


def nothing_was_made(folder: pathlib.Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["base.toml"]


def hidden_beside_rows(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_text(ROWS)
    (path / "._a.jsonl").write_bytes(APPLE_DOUBLE)
    shutil.copytree(path, path / ".ipynb_checkpoints")


SITUATIONS = [
    Situation(
        "paths that begin with ~",
        "base.toml --data.source=~/mine.jsonl --run.output_dir=~/runs",
        (DONE,),
        {"home/mine.jsonl": ROWS},
        environment={"HOME": "home"},
        check=only_home_has_runs,
    ),
    Situation(
        "a path with a variable, which no shell has replaced",
        "base.toml --run.output_dir=$SCRATCH/runs",
        ('[run] output_dir = "$SCRATCH/runs": only a shell replaces variables',),
        exit_code=2,
        check=nothing_was_made,
    ),
    Situation(
        "folders in a bucket",
        "base.toml --run.output_dir=gs://bucket/runs --data.source=s3://bucket/mine.jsonl",
        (
            'output_dir = "gs://bucket/runs": is a URL',
            'source = "s3://bucket/mine.jsonl": is a URL',
        ),
        exit_code=2,
        check=nothing_was_made,
    ),
    Situation(
        "a folder from a Mac and a notebook, with hidden files beside the rows",
        "base.toml --data.source=mine",
        (DONE,),
        {"mine": hidden_beside_rows},
    ),
    Situation(
        "a folder with a training, a validation and a test split",
        "base.toml --data.source=mine",
        (
            "[data] source = mine: holds train.jsonl and test.jsonl",
            "--data.source='mine/train.jsonl'",
        ),
        {"mine/train.jsonl": ROWS, "mine/val.jsonl": ROWS, "mine/test.jsonl": ROWS},
        exit_code=2,
    ),
    Situation(
        "a folder with a license beside the rows",
        "base.toml --data.source=mine",
        ("[data] source = mine: holds a.jsonl and LICENSE.txt",),
        {"mine/a.jsonl": ROWS, "mine/LICENSE.txt": "Permission is hereby granted"},
        exit_code=2,
    ),
    Situation(
        "two files in braces, of which a shell makes two options",
        "base.toml --data.source=a.jsonl --data.source=b.jsonl",
        ("--data.source is given 2 times; the last counts: b.jsonl", DONE),
        {"a.jsonl": ROWS, "b.jsonl": ROWS},
    ),
]
