"""Tools by their short names: what run_train.sh hands over."""

import json
import shutil
import sys

import pytest

from tests.conftest import REPO, launch

pytestmark = pytest.mark.quick


# stands for Python: prints its arguments, but where run_train.sh asks it for its version and packages
PYTHON = f"""#!{sys.executable}
import json, sys
if sys.argv[2].startswith("import s") and sys.argv[3:4] != ["torch"]:
    print(json.dumps(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    "words, module",
    [
        (["-m", "prepare", "a b"], ["prepare", "a b"]),
        (["c.toml", "--dry-run"], ["planner", "c.toml", "--dry-run"]),
        (["c.toml", "--help", "optim"], ["train", "c.toml", "--help", "optim"]),
    ],
)
def test_run_train_hands_over(tmp_path, words, module):
    for name in ("run_train.sh", "train.py", "tools/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    (tmp_path / "tools/planner").mkdir()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    done = launch(*words, repo=tmp_path, PYTHON=str(tmp_path / "python"))
    expected = [str(tmp_path), "tools", *module]
    assert json.loads(done.stdout.splitlines()[-1]) == expected, done.stderr
