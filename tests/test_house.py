"""The house's own rules: who imports whom, what stands at the top. A fork with other rules may
delete this file: nothing else depends on it."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest
import tomli

from tests.rooms import OPTIONAL, REPO

# Each room imports only from the floors before its own.
FLOORS = [
    ("files",),
    ("options",),
    ("config",),
    ("ranks",),
    ("model", "data"),
    ("adamw_bfloat16", "muon", "optim", "parallel"),
    ("checkpoint",),
    ("planner", "huggingface", "migrate", "metrics", "board", "tracker"),
    ("lifecycle",),
    ("evaluate", "conversation", "generate", "report"),
    ("train",),
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Functions of tools, which may import upwards as their main() may.
TOOLS = {
    "lifecycle": {"check_launch"},
    "huggingface": {"main"},
    "generate": {"main"},
    "data": {"main"},
}
SOURCES = sorted(
    path
    for room in FLOOR
    for path in (REPO.glob(f"{room}.py"), REPO.glob(f"{room}/**/*.py"))
    for path in path
)


def name_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in SOURCES}


def is_optional(module: str) -> bool:
    """Whether `rm` may remove it: the others import it inside a function, where its option is on."""
    return any(
        f"{module}.".startswith(f"{room.removesuffix('.py').replace('/', '.')}.")
        for room in OPTIONAL
    )


def tracked() -> list[str]:
    """The repository's files, but for those that were removed."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True
    ).stdout.split()
    return [name for name in names if (REPO / name).exists()]


def imports(tree: ast.AST) -> set[str]:
    """The modules of this repository that a tree imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES) or {node.module}
    return found & MODULES


def of_tools(tree: ast.AST, room: str) -> set[str]:
    return {
        module
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in TOOLS.get(room, ())
        for module in imports(node)
    }


def test_the_rule_covers_every_source_file():
    core = {
        path
        for path in tracked()
        if path.endswith(".py") and not path.startswith(("tests/", "benchmarks/"))
    }
    core -= {"minimal.py"}
    assert core == {str(p.relative_to(REPO)) for p in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO)))
def test_imports_point_one_way(path):
    """Optional rooms are imported inside functions from anywhere, and by each other as by all."""
    tree, name = ast.parse(path.read_text()), name_of(path)
    room = name.partition(".")[0]
    top = {
        module
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in imports(node)
    }
    upwards = {
        module
        for module in imports(tree) - of_tools(tree, room)
        if module.partition(".")[0] != room and FLOOR[module.partition(".")[0]] >= FLOOR[room]
    }
    assert all(is_optional(module) for module in upwards), f"{name} may not import {upwards}"
    assert not upwards & top
    if not is_optional(name):
        assert not {module for module in top if is_optional(module)}


def test_imports_make_no_circle():
    """Between files, wherever the imports stand, but for those of tools."""
    graph = {}
    for path in SOURCES:
        tree, name = ast.parse(path.read_text()), name_of(path)
        graph[name] = imports(tree) - of_tools(tree, name.partition(".")[0]) - {name}
    while graph:
        ends = {name for name, found in graph.items() if not found & graph.keys()}
        assert ends, f"a circle among {sorted(graph)}"
        graph = {name: found for name, found in graph.items() if name not in ends}


def test_the_type_checker_passes_without_optional_rooms():
    settings = tomli.loads((REPO / "pyproject.toml").read_text())["tool"]["pyrefly"]
    modules = {
        room.removesuffix(".py").replace("/", ".")
        for room in {*OPTIONAL} - {"benchmarks", "minimal.py"}
    }
    assert {*settings["ignore-missing-imports"]} == {f"{module}.*" for module in modules}


def test_the_model_knows_nothing_of_ranks():
    for path in (REPO / "model").glob("*.py"):
        assert "torch.distributed" not in path.read_text().replace(
            '"torch.distributed is disabled"', ""
        )


def test_the_environment_is_read_by_the_mesh_and_the_launch_alone():
    for path in SOURCES:
        if path.name not in (
            "parallel/ranks.py",
            "process_group.py",
            "gpus.py",
            "launch.py",
            "checks.py",
            "command.py",
            "descriptors.py",
            "slurm.py",
        ):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_the_top_holds_what_the_architecture_names():
    top = {path.split("/")[0] for path in tracked()} | {
        room for room in OPTIONAL if "/" not in room
    }
    assert top == {
        "train.py",
        "run_train.sh",
        "files.py",
        "config.py",
        "optim.py",
        "metrics.py",
        "checkpoint",
        "lifecycle",
        "model",
        "parallel",
        "data",
        "configs",
        "tests",
        "benchmarks",
        "docs",
        "README.md",
        "LICENSE",
        "schema.py",
        "evaluate.py",
        "generate.py",
        "parallel/ranks.py",
        "minimal.py",
        "planner",
        "extras/optimizers/adamw_bfloat16.py",
        "extras/optimizers/muon.py",
        "extras/chat/terminal.py",
        "extras/reports/report.py",
        "board.py",
        "extras/reports/tracker.py",
        "huggingface",
        "migrate",
        "pyproject.toml",
        "requirements.txt",
        ".ci",
        ".gitignore",
        ".git-blame-ignore-revs",
        ".github",
        ".pre-commit-config.yaml",
        "CONTRIBUTING.md",
    }
    assert not {name.removesuffix(".py") for name in top} & set(sys.stdlib_module_names)


def test_nothing_is_left_unfinished():
    docs = [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md")]
    for path in [*SOURCES, REPO / "run_train.sh", *docs]:
        assert not re.search(
            r"\b(TODO|FIXME|XXX|raise NotImplementedError|[A-Z]+_FIGURES)\b", path.read_text()
        ), path
