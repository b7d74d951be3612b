"""The house's own rules: who imports whom, what stands at the top, how long it is. They keep this repository small; a
fork with other rules may delete this file: nothing else depends on it."""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize

import pytest

from tests.conftest import REPO

LINES, CODE_LINES = 10320, 7360  # of the core, as reached
FOLDERS = ("model", "parallel", "data", "checkpoint", "lifecycle")
FILES = ("files", "options", "hf_config", "config", "optim", "metrics", "evaluate", "train")
BASE = {"files", "options", "hf_config", "config"}
ALLOWED = {
    "files": set(),
    "options": {"files"},
    "hf_config": {"options"},
    "config": {"files", "options", "hf_config"},
    "model": BASE,
    "data": BASE,
    "optim": BASE | {"model"},  # of it the parameters' names
    "parallel": BASE | {"model", "optim"},  # of optim the optimizer of a simulated step
    "metrics": BASE | {"parallel"},  # of it the mesh, and a run's check of its plan
    "checkpoint": BASE | {"parallel", "model"},
    "lifecycle": BASE | {"parallel", "model", "metrics", "checkpoint"},
}
ALLOWED["evaluate"] = BASE | {*FOLDERS, "optim", "metrics"}
ALLOWED["train"] = ALLOWED["evaluate"] | {"evaluate"}
SOURCES = sorted(p for pattern in (*(f"{f}.py" for f in FILES), *(f"{f}/**/*.py" for f in FOLDERS))
                 for p in REPO.glob(pattern))


def place(path: pathlib.Path) -> str:
    return path.relative_to(REPO).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found & ALLOWED.keys()


def test_the_rule_covers_every_source_file():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=REPO, capture_output=True, text=True).stdout.split()
    core = {path for path in tracked if not path.startswith(("tests/", "benchmarks/", "minimal.py"))}
    assert core == {str(p.relative_to(REPO)) for p in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO)))
def test_imports_point_one_way(path):
    """Only a tool's main(), and what it alone calls, may import upwards: inside a function, in these files."""
    tree, here = ast.parse(path.read_text()), place(path)
    upwards = imports(tree) - ALLOWED[here] - {here}
    tools = {"lifecycle": {"check_launch", "check_device", "check_patterns", "usable"},
             "model": {"main", "export_checkpoint", "import_folder", "token_ids"}}
    inside = {name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in tools.get(here, ())
              for name in imports(node)}
    assert upwards <= inside, f"{here} may not import {upwards - inside}"
    top = {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in imports(node)}
    assert top <= ALLOWED[here] | {here}


def test_strategies_know_nothing_of_the_planner():
    for path in (REPO / "parallel").glob("*.py"):
        assert "planner" not in path.read_text(), path


def test_the_model_knows_nothing_of_ranks():
    for path in (REPO / "model").glob("*.py"):
        assert "torch.distributed" not in path.read_text().replace('"torch.distributed is disabled"', "")


def test_the_environment_is_read_by_the_mesh_and_the_launch_alone():
    for path in SOURCES:
        if path.name not in ("mesh.py", "gpus.py", "launch.py", "checks.py", "command.py"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_the_top_holds_what_the_architecture_names():
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout.split()
    top = {path.split("/")[0] for path in tracked}
    assert top == {"train.py", "minimal.py", "run_train.sh", "files.py", "config.py", "optim.py", "metrics.py",
                   "checkpoint", "lifecycle", "model", "parallel", "data", "configs", "tests", "benchmarks", "docs",
                   "README.md", "LICENSE", "options.py", "hf_config.py", "evaluate.py", "pyproject.toml",
                   "requirements.txt", ".ci", ".gitignore"}
    assert not {name.removesuffix(".py") for name in top} & set(sys.stdlib_module_names)


def code_lines(path: pathlib.Path) -> int:
    """Lines without blanks, comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".sh":
        return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


def test_core_stays_small():
    core = [*SOURCES, REPO / "run_train.sh"]
    lines = {path: len(path.read_text().splitlines()) for path in core}
    assert sum(lines.values()) <= LINES * 1.05 and sum(map(code_lines, core)) <= CODE_LINES * 1.05
    assert max(lines.values()) <= 450 and lines[REPO / "train.py"] <= 200, max(lines, key=lines.get)


def test_nothing_is_left_unfinished():
    docs = [REPO / "README.md", *(REPO / "docs").glob("*.md")]
    for path in [*SOURCES, REPO / "run_train.sh", *docs]:
        assert not re.search(r"\b(TODO|FIXME|XXX|raise NotImplementedError|[A-Z]+_FIGURES)\b", path.read_text()), path
