"""The house's own rules: who imports whom, what stands at the top, what the README says."""

import ast
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tokenize

import pytest
import tomli

from tests.conftest import REPO, launch, make_config

LINES, CODE_LINES = 6700, 4790  # of the core, as reached when the house was rebuilt
FOLDERS = ("model", "parallel", "data", "checkpoint", "lifecycle")
FILES = ("files", "options", "hf_config", "config", "optim", "metrics", "evaluate", "train")
BASE = {"files", "options", "hf_config", "config"}
ALLOWED = {
    "files": set(),
    "options": {"files"},
    "hf_config": {"options"},
    "config": {"options", "hf_config"},
    "model": BASE,
    "data": BASE,
    "optim": BASE,
    "parallel": BASE | {"model"},
    "metrics": BASE | {"parallel"},  # of it the mesh alone
    "checkpoint": BASE | {"parallel", "model"},
    "lifecycle": BASE | {"parallel", "model", "metrics", "checkpoint"},
}
ALLOWED["evaluate"] = BASE | {*FOLDERS, "optim", "metrics"}
ALLOWED["train"] = ALLOWED["evaluate"] | {"evaluate"}
SOURCES = sorted(p for pattern in (*(f"{f}.py" for f in FILES), *(f"{f}/*.py" for f in FOLDERS))
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
    core = {path for path in tracked if not path.startswith(("tests/", "benchmarks/"))}
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


def test_the_model_knows_nothing_of_ranks():
    for path in (REPO / "model").glob("*.py"):
        assert "torch.distributed" not in path.read_text().replace('"torch.distributed is disabled"', "")


def test_the_environment_is_read_by_the_mesh_and_the_launch_alone():
    for path in SOURCES:
        if path.name not in ("mesh.py", "launch.py", "command.py"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_the_top_holds_what_the_architecture_names():
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout.split()
    top = {path.split("/")[0] for path in tracked}
    assert top == {"train.py", "run_train.sh", "files.py", "config.py", "optim.py", "metrics.py", "checkpoint",
                   "lifecycle", "model", "parallel", "data", "configs", "tests", "benchmarks", "docs", "README.md",
                   "LICENSE", "options.py", "hf_config.py", "evaluate.py", "pyproject.toml", "requirements.txt", ".ci",
                   ".gitignore"}
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
    assert max(lines.values()) <= 360 and lines[REPO / "train.py"] <= 200, max(lines, key=lines.get)


def test_nothing_is_left_unfinished():
    for path in [*SOURCES, REPO / "run_train.sh", *DOCS]:
        assert not re.search(r"\b(TODO|FIXME|XXX|raise NotImplementedError|[A-Z]+_FIGURES)\b", path.read_text()), path


# The README: each code block is labelled, and a test does with it what its label says.

BLOCK = re.compile(r"^```(.*?)\n(.*?)^```", re.M | re.S)
DOCS = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
LABELS = {"full-state", "output", "run", "dry-run", "needs-a-cluster", "needs-lm-eval", "table"}


def blocks() -> list[tuple[str, str, str]]:
    return [(path.name, label.strip(), text) for path in DOCS for label, text in BLOCK.findall(path.read_text())]


def test_every_block_has_a_label():
    assert blocks() and all(label.split()[-1] in LABELS and len(label.split()) == 2 for _, label, _ in blocks())


def test_every_table_is_one_that_is_read():
    found = [text for _, label, text in blocks() if label == "toml table"]
    assert found and all(make_config(**tomli.loads(text)) for text in found)


def commands(text: str) -> list[str]:
    """A line each, or a here-document with its command."""
    found = re.findall(r"^.*<<'END'\n(?:.*\n)*?END$|^.+$", text.replace("\\\n", " "), re.M)
    return [line.split("  #")[0].strip() for line in found if line.strip() and not line.startswith("#")]


def short(command: str) -> str:
    """The same command, with less validation text, and fewer steps where it trains."""
    if "run_train.sh" in command and not re.search(r"-m |--setup|--dry-run|--help", command):
        command = f"{command} --eval.batches=2"
    if command == "./tests/run.sh":
        return f"{command} tests/test_metrics.py -k console_line"  # not this test again
    if "run_train.sh" in command and not re.search(r"-m |--setup|--dry-run|--eval-only|--help|--train.steps", command):
        return f"{command} --train.steps=5"
    return command


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository as a newcomer has it: tracked files alone."""
    folder = tmp_path_factory.mktemp("clone") / "repo"
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout.split()
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, folder / name)
    return folder


def run_in(folder: pathlib.Path, command: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHON": sys.executable})


def test_run_blocks_run(clone):
    """In the order of the documents, since later ones use what earlier ones made."""
    ran = 0
    for name, label, text in blocks():
        if label.split()[-1] == "run":
            for command in commands(text):
                done = run_in(clone, short(command))
                assert done.returncode == 0, f"{name}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
                ran += 1
    assert ran >= 5


def test_dry_run_blocks_give_a_plan(clone):
    found = [c for _, label, text in blocks() if label.split()[-1] == "dry-run" for c in commands(text)]
    for command in found:
        done = run_in(clone, command if "--dry-run" in command else f"{command} --dry-run --world-size 8")
        assert done.returncode in (0, 3) and "parameters" in done.stdout, f"{command}\n{done.stderr}"
    assert found


def test_cluster_blocks_name_what_is_there():
    for _, label, text in blocks():
        if label.split()[-1] == "needs-a-cluster":
            for command in commands(text):
                for word in re.findall(r"configs/\w+\.toml|run_train\.sh", command):
                    assert (REPO / word).exists(), command


def test_setup_prints_the_python_as_its_last_line():
    done = launch("--setup")
    assert done.returncode == 0 and pathlib.Path(done.stdout.splitlines()[-1]).exists()


def test_help_of_the_launcher():
    done = launch("--help")
    assert done.returncode == 0 and "sbatch" in done.stdout and "--section.key=value" in done.stdout


@pytest.mark.parametrize("variables", [{"PYTHON": "no-such-python"}, {"NPROC": "many"}])
def test_launcher_says_what_is_wrong_with_its_environment(variables):
    done = launch("configs/tiny.toml", **variables)
    assert done.returncode == 2 and "run_train.sh:" in done.stderr and "Traceback" not in done.stderr
