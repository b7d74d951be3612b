"""CONTRIBUTING.md's rules of the house: what stands where, and who imports whom. Nothing else
depends on this file: a fork with other rules may delete it."""

import ast
import functools
import re
import subprocess

import pytest

from tests.conftest import REPO

pytestmark = pytest.mark.quick

# Imports point from a floor to those before it.
FLOORS = "system config model parallel optim,data checkpoint metrics run evaluate train launch"
FLOOR_OF = {room: n for n, rooms in enumerate(FLOORS.split()) for room in rooms.split(",")}


def tracked(*patterns: str) -> list[str]:
    """The repository's files, but for those that were removed; of a copy without git, none."""
    command = ["git", "ls-files", *patterns]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (REPO / name).exists()]


FILES = {  # by the module's name
    path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
    for path in tracked("*.py")
    if not path.startswith(("tests/", "benchmarks/", "docs/"))
}
EXTRAS = [module for module in FILES if module.startswith("extras.")]
TOOLS = [module for module in FILES if module.startswith("tools.")]
CORE = sorted(FILES.keys() - {*EXTRAS, *TOOLS, "extras", "tools", "minimal"})


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((REPO / FILES[module]).read_text())


def imports(node: ast.AST) -> set[str]:
    """The modules of this repository that a node imports itself."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & FILES.keys()
    if isinstance(node, ast.ImportFrom) and node.module:
        inside = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
        return inside or {node.module} & FILES.keys()
    return set()


def all_imports(module: str) -> set[str]:
    """Those in functions, too."""
    return set().union(*map(imports, ast.walk(tree_of(module)))) - {module}


def top_imports(module: str) -> set[str]:
    return set().union(*map(imports, tree_of(module).body))


def room_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("module", CORE)
def test_imports_point_one_way(module):
    """The core imports an extra inside the function where its option is on."""
    floor = FLOOR_OF[room_of(module)]
    rooms = {room_of(other) for other in all_imports(module)} - {room_of(module), "extras"}
    assert not {room for room in rooms if FLOOR_OF[room] >= floor}
    assert "extras" not in {room_of(other) for other in top_imports(module)}


def test_imports_make_no_circle():
    """Between files, wherever the imports stand; of the core, those of extras left out."""
    graph = {module: all_imports(module) - {*EXTRAS} for module in CORE}
    graph |= {module: all_imports(module) for module in EXTRAS + TOOLS}
    while graph:
        ends = {module for module, imported in graph.items() if not imported & graph.keys()}
        assert ends, f"a circle among {sorted(graph)}"
        for module in ends:
            del graph[module]


def test_only_tools_import_tools():
    for module in FILES.keys() - {*TOOLS}:
        assert "tools" not in {room_of(other) for other in all_imports(module)}, module


@pytest.mark.parametrize("module", EXTRAS)
def test_extras_import_each_other_inside_functions(module):
    folder = module.split(".")[1]
    others = {other.split(".")[1] for other in top_imports(module) & {*EXTRAS}}
    assert others <= {folder}


def test_model_knows_nothing_of_ranks():
    for path in tracked("model/*.py"):
        text = (REPO / path).read_text().replace('"torch.distributed is disabled"', "")
        assert "torch.distributed" not in text, path


def test_environment_is_read_where_processes_start():
    allowed = ("launch/", "run/", "system.py", "parallel/ranks.py", "minimal.py", "tools/")
    for path in FILES.values():
        reads = re.search("os.environ|getenv", (REPO / path).read_text())
        assert not reads or path.startswith(allowed), path


def test_readme_counts_the_lines_of_code():
    """Without blanks, comments and docstrings."""
    page = (REPO / "README.md").read_text().partition("## Read the code")[2]
    counts = re.findall(r"\[(`[^]]+`)\]\([^)]+\)\s\(([\d,]+)\)", page)
    assert len(counts) > 8
    for names, count in counts:
        rooms = tuple(re.findall("`(.+?)`", names))
        paths = [path for path in tracked("*.py") if path.startswith(rooms)]
        source = "".join((REPO / path).read_text() for path in paths)
        code = re.sub(r'^ *r?"""(?:.|\n)*?"""', "", source, flags=re.M)
        lines = len(re.findall(r"^ *[^#\s]", code, re.M))
        if paths:  # tools/ and extras/ may have been removed
            assert lines == pytest.approx(int(count.replace(",", "")), rel=0.05), names
