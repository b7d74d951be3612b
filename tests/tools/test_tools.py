"""Tools by their short names: what run_train.sh hands over."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tools.__main__ import module_of, tools

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "name, module",
    [
        ("report", "tools.report"),
        ("huggingface", "tools.huggingface"),
        ("migrate.from_fsdp1", "tools.migrate.from_fsdp1"),
        ("planner", "tools.planner"),
        ("checkpoint", "checkpoint"),
        ("tensorboard.main", "tensorboard.main"),
        ("tools.report", "tools.report"),
    ],
)
def test_short_name_of_a_module(name, module):
    assert module_of(name) == module


def test_list_names_every_tool_with_its_purpose():
    names = {"generate", "checkpoint", "prepare", "report", "huggingface", "planner", "show"}
    listed = tools()
    assert names <= listed.keys() and "planner.check" not in listed
    assert all(20 < len(purpose) < 110 for purpose in listed.values()), listed


def run(*words: str, repo: pathlib.Path = REPO, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [repo / "run_train.sh", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, **environ},
    )


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize(
    "words, module",
    [
        (["-m", "prepare", "a b"], ["prepare", "a b"]),
        (["-m", "report", "r", "--help"], ["report", "r", "--help"]),
        (["c.toml", "--dry-run"], ["planner", "c.toml", "--dry-run"]),
        (["c.toml", "--help", "optim"], ["train", "c.toml", "--help", "optim"]),
    ],
)
def test_run_train_hands_over(tmp_path, words, module, has_tools):
    """To the tools, or without them to the module of that name."""
    for name in ("run_train.sh", "train.py", *(["tools/__main__.py"] if has_tools else [])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    if has_tools:
        (tmp_path / "tools/planner").mkdir()
    python = tmp_path / "python"
    python.write_text(
        f'#!{sys.executable}\nimport json, sys\nif sys.argv[2][:8] != "import s" or len(sys.argv) > 3 '
        'and sys.argv[3] == "torch":\n    sys.exit()\nprint(json.dumps(sys.argv[3:]))\n'
    )
    python.chmod(0o755)
    done = run(*words, repo=tmp_path, PYTHON=str(python))
    if "--dry-run" in words and not has_tools:
        assert done.returncode == 2 and "needs tools/planner" in done.stderr
        return
    expected = [str(tmp_path), *(["tools"] if has_tools else []), *module]
    assert json.loads(done.stdout.splitlines()[-1]) == expected, done.stderr


def test_a_misspelt_tool_is_answered_with_the_nearest():
    done = run("-m", "generat")
    assert done.returncode == 2
    assert "-m generat: no such tool; did you mean generate?" in done.stderr
