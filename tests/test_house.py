"""The house's own rules: who imports whom, what stands at the top. A fork with other rules may
delete this file: nothing else depends on it."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import REPO

pytestmark = pytest.mark.quick

# Each room imports only from the floors before its own. data/hub.py, which downloads by id, stands below config.py,
# which pins ids.
FLOORS = [
    ("files",),
    ("schema",),
    ("data.hub",),
    ("config",),
    ("model",),
    ("parallel",),
    ("data", "optim"),
    ("checkpoint",),
    ("metrics",),
    ("run",),
    ("generate", "evaluate"),
    ("train",),
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Functions of tools, which may import upwards as their main() may.
TOOLS = {"data": {"main"}, "generate": {"main"}}


def tracked() -> list[str]:
    """The repository's files, but for those that were removed."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True
    ).stdout.split()
    return [name for name in names if (REPO / name).exists()]


SOURCES = [
    name
    for name in tracked()
    if name.endswith(".py") and not name.startswith(("tests/", "benchmarks/"))
]


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


MODULES = {module_of(path) for path in SOURCES}


def floor_of(module: str) -> int:
    return FLOOR[module] if module in FLOOR else FLOOR[module.partition(".")[0]]


def imports(tree: ast.AST) -> set[str]:
    """The modules of this repository that a tree imports, wherever in it."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            modules |= inner or {node.module}
    return {module for module in modules if module in MODULES or module.startswith("extras.")}


def imports_of_tools(tree: ast.AST, room: str) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in TOOLS.get(room, ()):
            modules |= imports(node)
    return modules


def imports_at_top(tree: ast.Module) -> set[str]:
    modules = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules |= imports(node)
    return modules


@pytest.mark.parametrize("path", [path for path in SOURCES if not path.startswith("extras/")])
def test_imports_point_one_way(path):
    """The core imports an extra inside the function where its option is on."""
    if path == "minimal.py":
        assert not imports(ast.parse((REPO / path).read_text()))
        return
    module = module_of(path)
    room = module.partition(".")[0]
    tree = ast.parse((REPO / path).read_text())
    others = {
        other
        for other in imports(tree) - imports_of_tools(tree, room)
        if other == "data.hub" or other.partition(".")[0] not in (room, "extras")
    }
    upwards = {other for other in others - {module} if floor_of(other) >= floor_of(module)}
    assert not upwards, f"{module} may not import {upwards}"
    assert not [other for other in imports_at_top(tree) if other.startswith("extras.")]


@pytest.mark.parametrize("path", [path for path in SOURCES if path.startswith("extras/")])
def test_extras_import_each_other_inside_functions(path):
    own = ".".join(path.split("/")[:2])
    for module in imports_at_top(ast.parse((REPO / path).read_text())):
        assert not module.startswith("extras.") or f"{module}.".startswith(f"{own}."), module


def test_imports_make_no_circle():
    """Between files, wherever the imports stand, but for those of tools, and of extras by the core."""
    graph = {}
    for path in SOURCES:
        tree = ast.parse((REPO / path).read_text())
        module = module_of(path)
        tools = imports_of_tools(tree, module.partition(".")[0])
        graph[module] = imports(tree) - tools - {module}
        if not path.startswith("extras/"):
            graph[module] = {other for other in graph[module] if not other.startswith("extras.")}
    while graph:
        ends = {module for module, imported in graph.items() if not imported & graph.keys()}
        assert ends, f"a circle among {sorted(graph)}"
        for module in ends:
            del graph[module]


def test_the_model_knows_nothing_of_ranks():
    for path in (REPO / "model").glob("*.py"):
        text = path.read_text().replace('"torch.distributed is disabled"', "")
        assert "torch.distributed" not in text


def test_the_environment_is_read_where_processes_start():
    for path in SOURCES:
        starts = ("run/", "parallel/ranks.py", "minimal.py", "extras/preflight/")
        if not path.startswith(starts):
            text = (REPO / path).read_text()
            assert "os.environ" not in text and "getenv" not in text, path


def test_the_top_holds_what_the_architecture_names():
    files = """
        train.py minimal.py evaluate.py generate.py optim.py metrics.py config.py schema.py files.py
        run_train.sh README.md CONTRIBUTING.md LICENSE pyproject.toml requirements.txt
        .gitattributes .gitignore .git-blame-ignore-revs .pre-commit-config.yaml
    """
    folders = """
        model parallel data checkpoint run configs docs benchmarks tests .ci .github
    """
    top = {name.split("/")[0] for name in tracked()}
    assert top - {"extras"} == {*files.split(), *folders.split()}
    assert not {name.removesuffix(".py") for name in top} & set(sys.stdlib_module_names)


def test_nothing_is_left_unfinished():
    pages = [path for path in tracked() if path.endswith(".md")]
    for path in [*SOURCES, "run_train.sh", *pages]:
        unfinished = r"\b(TODO|FIXME|XXX|raise NotImplementedError|[A-Z]+_FIGURES)\b"
        assert not re.search(unfinished, (REPO / path).read_text()), path
