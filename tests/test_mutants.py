"""The tools that choose tests: what they change, what they record, what they find."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import changed, lines, mutants
from tests.conftest import REPO

MODULE = '''\
"""A module."""


def total(values: list[int]) -> int:
    return sum(values) + 1


def unseen(values: list[int]) -> bool:
    return len(values) < 3
'''
TESTS = """\
import subprocess, sys

def test_total():
    program = "import amounts; assert amounts.total([1]) == 2"
    subprocess.run([sys.executable, "-c", program], check=True)

def test_unseen():
    program = "import amounts; amounts.unseen([])"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository with one module, whose test of total() starts a process, and what its suite showed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tests").mkdir()
    for name in ("__init__", "lines", "mutants", "changed", "warm"):
        shutil.copy2(REPO / f"tests/{name}.py", folder / "tests")
    (folder / "amounts.py").write_text(MODULE)
    (folder / "tests/test_all.py").write_text(TESTS)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (folder / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n.tests-lines*\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "All")
    run(folder, "tests.lines", "-q")
    run(folder, "tests.changed", "--write-map")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "The map")
    return folder


def git(folder, *words):
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


def run(folder, module, *words) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lines_that_another_process_ran_are_a_tests_own(project):
    record = lines.Record(**json.loads((project / ".tests-lines.json").read_text()))
    total = MODULE.splitlines().index("    return sum(values) + 1") + 1
    unseen = MODULE.splitlines().index("    return len(values) < 3") + 1
    assert record.tests_of("amounts.py", total) == {"tests/test_all.py::test_total"}
    assert record.tests_of("amounts.py", unseen) == {"tests/test_all.py::test_unseen"}
    assert record.tests_of("amounts.py", 2) == set()


def test_a_change_is_noticed_or_shown(project):
    """Of total() both the operator and the constant are noticed, of unseen() neither."""
    said = run(project, "tests.mutants", "4", "amounts.py", "--seed", "5", "--jobs", "1")
    assert said.count("test_total (") == 2
    assert said.endswith("\n2 of 4 noticed\n")
    assert "+    return len(values) <= 3\n" in said
    assert "+    return len(values) < 4\n" in said
    assert "sum(values) - 1" not in said
    assert (project / "amounts.py").read_text() == MODULE


def test_the_tests_of_a_changed_function_run(project):
    module = project / "amounts.py"
    assert "2 passed" in run(project, "tests.changed", "--quick")
    module.write_text(MODULE.replace("< 3", "< 2 + 1"))
    try:
        said = run(project, "tests.changed", "--changed", "-v")
    finally:
        module.write_text(MODULE)
    assert "changed since HEAD: amounts.py" in said
    assert "test_unseen PASSED" in said and "test_total" not in said


def test_what_the_map_does_not_know_is_chosen_too(project, tmp_path, monkeypatch):
    """A fork's own tests, new and changed ones, before those that the map knows, with any module; of a test file, what
    was changed."""
    folder = shutil.copytree(project, tmp_path / "fork")
    monkeypatch.setattr(changed, "REPO", folder)
    known = json.loads((folder / "tests/map.json").read_text())

    def chosen(file: str, line: str, limit: float = 60) -> tuple[set[str], set[str]]:
        choice = changed.Choice(known)
        text = (folder / file).read_text()
        choice.add(file, {text.splitlines().index(line) + 1})
        found = choice.within(limit)
        return tuple({test.partition("::test_")[2] for test in tests} for tests in found)

    inside, tests = "    return sum(values) + 1", "tests/test_all.py"
    assert chosen("amounts.py", inside) == ({"total"}, set())
    assert chosen("amounts.py", inside, limit=0) == (set(), {"total"})
    assert chosen(tests, '    program = "import amounts; amounts.unseen([])"') == (
        {"unseen"},
        set(),
    )
    assert chosen(tests, "import subprocess, sys") == ({"total", "unseen"}, set())
    (folder / "tests/test_own.py").write_text("def test_own():\n    pass\n")
    (folder / "own.py").write_text("X = 1\n")
    (folder / "tests/fake_cuda").mkdir()
    (folder / "tests/fake_cuda/test_elsewhere.py").write_text("def test_elsewhere():\n    pass\n")
    assert chosen("own.py", "X = 1") == ({"own"}, set())
    assert chosen("amounts.py", inside, limit=0) == ({"own"}, {"total"})
    (folder / tests).write_text(TESTS.replace("unseen([])", "unseen([1])"))
    assert chosen("own.py", "X = 1") == ({"own", "unseen"}, set())
    for test in known["tests"]:
        test[1] = 9.0 if "unseen" in test[0] else 5.0  # seconds
    shutil.copy(folder / "amounts.py", folder / "more.py")  # whose own tests are none of these
    known["functions"]["more.py"] = known["functions"]["amounts.py"]
    assert chosen("more.py", inside, limit=10) == ({"own", "unseen"}, {"total"})


def test_every_kind_of_change(tmp_path, monkeypatch):
    """Of a file in which each occurs once; annotations, texts of errors and docstrings stay as they are."""
    monkeypatch.setattr(mutants, "REPO", tmp_path)
    (tmp_path / "a.py").write_text(
        '"""No 1 < 2."""\n'
        "def f(x: int | None = None, *rest) -> str | None:\n"
        "    if x in rest:\n"
        "        raise ValueError(1 + 2)\n"
        "    g(x, key=torch.float32)\n"
        "    x.y = rest[x:]\n"
        "    assert x < 3\n"
        "    return any(rest) or -x * 2.5\n"
    )
    made = [change for change in mutants.Source("a.py").changes if change.compiles()]
    after = {change.applied().splitlines()[change.line - 1].strip() for change in made}
    assert after == {
        "if x not in rest:",
        "if (not (x in rest)):",
        "pass",
        "g(x)",
        "g(x, key=torch.bfloat16)",
        "x.y = rest[x + 1:]",
        "return all(rest) or -x * 2.5",
        "return any(rest) and -x * 2.5",
        "return any(rest) or -x // 2.5",
        "return any(rest) or -x * 3.5",
    }
    assert [change.line for change in made if change.text == "pass"] == [5, 6]


def test_functions_are_found_by_their_lines():
    text = """\
import a

@a.b
def f():
    def g():
        return 1

class C:
    x = 1
    def h(self):
        pass
"""
    assert changed.functions(text) == {3: "f", 4: "f", 5: "f", 6: "f", 10: "C.h", 11: "C.h"}
    assert changed.functions(text, bodies=True) == {5: "f", 6: "f", 11: "C.h"}
