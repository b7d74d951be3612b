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
WITH_PREFIX = ["report", "huggingface", "migrate.from_fsdp1", "planner"]
AS_THEY_ARE = ["checkpoint", "tensorboard.main", "tools.report"]


def test_short_name_of_a_module():
    assert [module_of(name) for name in WITH_PREFIX] == [f"tools.{name}" for name in WITH_PREFIX]
    assert [module_of(name) for name in AS_THEY_ARE] == AS_THEY_ARE


def test_list_names_every_tool_with_its_purpose():
    names = {"generate", "checkpoint", "prepare", "report", "huggingface", "planner", "show"}
    listed = tools()
    assert names <= listed.keys() and "planner.check" not in listed
    assert all(20 < len(purpose) < 110 for purpose in listed.values()), listed


def run(repo: pathlib.Path, python: object, words: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": str(python)}
    command = [repo / "run_train.sh", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# stands for Python: prints its arguments, but where run_train.sh asks it for its version and packages
PYTHON = f"""#!{sys.executable}
import json, sys
if sys.argv[2].startswith("import s") and sys.argv[3:4] != ["torch"]:
    print(json.dumps(sys.argv[3:]))
"""


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
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    done = run(tmp_path, tmp_path / "python", words)
    if "--dry-run" in words and not has_tools:
        assert done.returncode == 2 and "needs tools/planner" in done.stderr
        return
    expected = [str(tmp_path), *(["tools"] if has_tools else []), *module]
    assert json.loads(done.stdout.splitlines()[-1]) == expected, done.stderr


def test_a_misspelt_tool_is_answered_with_the_nearest():
    done = run(REPO, sys.executable, ["-m", "generat"])
    assert done.returncode == 2
    assert "-m generat: no such tool; did you mean generate?" in done.stderr
