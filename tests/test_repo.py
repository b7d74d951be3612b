"""What README.md and docs/ say, done; and run_train.sh's own answers."""

import functools
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

import pytest
import tomli
from packaging.requirements import Requirement

import config
from tests.conftest import REPO, copy_tracked, launch, make_config, needs_extra

pytestmark = [pytest.mark.early, pytest.mark.slow]

BLOCK = re.compile(r"^```(.*?)\n(.*?)^```", re.M | re.S)  # (label, text)
DOCS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
EXTRAS = re.findall(r"^\| `extras/(\w+)/", (REPO / "docs/fork.md").read_text(), re.M)
needs_tools = pytest.mark.skipif(not (REPO / "tools").exists(), reason="needs tools/")


def blocks(label: str) -> list[tuple[str, str, str]]:
    """(page, label, text) of the code blocks whose label begins so."""
    return [
        (path.name, *block)
        for path in DOCS
        for block in BLOCK.findall(path.read_text())
        if block[0].startswith(label)
    ]


def commands(text: str) -> list[str]:
    """A line each, or a here-document with its command."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^.*<<'END'\n(?:.*\n)*?END$|^[^#\n].*$", joined, re.M)
    return [line if "<<'END'" in line else line.split("  #")[0].strip() for line in lines]


def documented_commands(label: str) -> list[str]:
    return [command for _, _, text in blocks(label) for command in commands(text)]


def test_every_block_says_what_it_is():
    """A command that no test would run is noticed by its label."""
    needs = "needs-(a-gpu|a-cluster|a-tracker|lm-eval)"
    known = (
        rf"bash (run|dry-run|fork|fork-refused|{needs})|diff (fork|fork-convolution)|"
        r"python (quoted \S+|fork-source|fork-loss|full-state)|text output|"
        "toml table|yaml kubernetes"
    )
    for page, label, _ in blocks(""):
        assert re.fullmatch(known, label), f"{page}: {label}"


def test_quoted_code_is_that_of_the_file():
    for page, label, text in blocks("python quoted "):
        file = label.removeprefix("python quoted ")
        assert text in (REPO / file).read_text(), f"{page}: {file}"


def test_tables_are_valid():
    for _, _, text in blocks("toml table"):
        make_config(**tomli.loads(text))


def test_relative_links_lead_somewhere():
    for path in DOCS:
        text = re.sub("`[^`\n]*`", "", BLOCK.sub("", path.read_text()))
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            assert re.match(r"\w+:", link) or (path.parent / link).exists(), f"{path}: {link}"


def test_options_named_in_pages_exist():
    """`section.key` or `--section.key=value`, unless it is a file or a function of optim.py."""
    functions = re.findall(r"^def (\w+)", (REPO / "optim.py").read_text(), re.M)
    names = config.SCHEMA.options.keys() | config.SCHEMA.tables.keys()
    for path in DOCS:
        for table, key in re.findall(r"`(?:--)?([a-z]+)\.([a-z_0-9]+)(?=[`= ])", path.read_text()):
            is_file = key in ("py", "bin") or (REPO / table / f"{key}.py").exists()
            if table in config.SCHEMA.tables and not is_file and key not in functions:
                assert f"{table}.{key}" in names, path.name


def test_configurations_of_commands_that_are_not_run_load():
    for command in documented_commands("bash needs-"):
        named = r"(configs/\S+\.toml)|run_train\.sh (\w[\w.-]*)(?= |$)"
        for path, name in re.findall(named, command):
            path = path or f"configs/{name}.toml"
            config.load(str(REPO / path), re.findall(r"--\w+\.\w+=\S+", command))


# Commands, in a copy of the repository as a newcomer has it


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return copy_tracked(tmp_path_factory.mktemp("clone") / "repo")


@functools.cache
def without_test_packages() -> tempfile.TemporaryDirectory:
    """A folder for PYTHONPATH that hides what only tests/requirements.txt installs."""
    runs, tests = (
        {Requirement(line).name for line in (REPO / name).read_text().splitlines()}
        for name in ("requirements.txt", "tests/requirements.txt")
    )
    folder = tempfile.TemporaryDirectory(prefix="hidden-")
    for module, packages in importlib.metadata.packages_distributions().items():
        if {*packages} <= tests - runs:
            error = f"raise ModuleNotFoundError('only for tests', name={module!r})\n"
            pathlib.Path(folder.name, f"{module}.py").write_text(error)
    return folder


def run_in(folder: pathlib.Path, command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable}
    if "tests/run.sh" not in command:
        environment["PYTHONPATH"] = without_test_packages().name
    words = ["bash", "-c", command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment)


def shortened(command: str) -> str:
    """The command on less text, with fewer steps."""
    if command == "./tests/run.sh --quick":
        return f"{command} --collect-only"
    if command.startswith("./tests/run.sh") and "--lint" not in command:
        return f"{command} -n 0 tests/test_metrics.py -k console_line"
    reads_text = "--data.source=prepared" not in command
    if reads_text and re.search(
        r"run_train\.sh(( -m (prepare|show))? configs/tiny\.toml|$)", command
    ):
        command += " --data.max_tokens=300_000"
    if "run_train.sh" in command and not re.search("-m |--setup|--dry-run|--help", command):
        command += " --eval.batches=2"
        if ".toml" in command:
            command += " --train.seq_len=64 --train.global_batch_size=2"
        if not re.search("--eval-only|--train.steps", command):
            command += " --train.steps=2"
    return command


def warnings_of(done: subprocess.CompletedProcess) -> list[str]:
    """Python's and those of torch's log, but not that it finds no GPU."""
    pattern = r"^\S+:\d+: \w*Warning: .*|^(?:\[rank\d+\]:)?[WE]\d{4} \d\d:.*"
    found = re.findall(pattern, f"{done.stdout}\n{done.stderr}", re.M)
    return [line for line in found if "No CUDA runtime" not in line]


@needs_tools
@needs_extra(*EXTRAS)
def test_run_blocks_run(clone):
    """In the order of the pages, since later commands use what earlier ones made."""
    for command in dict.fromkeys(documented_commands("bash run")):
        if "benchmarks.overhead" in command:
            continue  # run by its test
        done = run_in(clone, shortened(command))
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert not warnings_of(done), command


@needs_tools
@needs_extra(*EXTRAS)
def test_dry_run_blocks_print_a_plan(clone):
    for command in dict.fromkeys(documented_commands("bash dry-run")):
        done = run_in(clone, command)
        assert done.returncode in (0, 3), f"{command}\n{done.stderr}"
        assert "parameters" in done.stdout
        assert not warnings_of(done), command


# run_train.sh


def test_help_has_commands_and_options():
    done = launch("--help")
    assert done.returncode == 0
    assert "sbatch" in done.stdout and "--section.key=value" in done.stdout
    assert "muon_lr" in launch("--help", "lr").stdout


def test_setup_prints_its_python_last():
    done = launch("--setup")
    assert done.returncode == 0 and pathlib.Path(done.stdout.splitlines()[-1]).exists()


# stand in for a Python without torch, its pip, and uv
PROGRAMS = {
    "python3": """#!/bin/bash
case "$*" in
*packages.version*) exit 1;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
"-m pip config list") echo "$SETTINGS";;
"-m pip install "*) echo pip >>calls; [[ $* != *requirements.txt || -e network ]];;
esac
""",
    "uv": "#!/bin/bash\necho uv >>calls; exit $UV_FAILS\n",
}


@pytest.fixture
def set_up(tmp_path) -> Callable[..., tuple[int, str]]:
    """run_train.sh --setup in a copy: its exit code, and who installed."""
    for name in ("run_train.sh", "requirements.txt", "train.py"):
        shutil.copy(REPO / name, tmp_path / name)
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)

    def run(settings: str = "", uv_fails: int = 1) -> tuple[int, str]:
        (tmp_path / "calls").write_text("")
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        env |= {"SETTINGS": settings, "UV_FAILS": str(uv_fails)}
        done = subprocess.run([tmp_path / "run_train.sh", "--setup"], cwd=tmp_path, env=env)
        return done.returncode, " ".join((tmp_path / "calls").read_text().split())

    return run


def test_unfinished_or_old_environment_is_made_again(set_up, tmp_path):
    """pip fails while there is no network."""
    both = "uv pip uv pip"  # torch, then the rest
    assert set_up() == (1, both)
    (tmp_path / "network").touch()
    assert set_up() == (0, both)
    assert set_up() == (0, "")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    assert set_up() == (0, both)
    (tmp_path / ".venv.lock").unlink()
    (tmp_path / ".venv.lock").mkdir()  # cannot be opened, as in another user's repository
    assert set_up() == (0, "")


def test_uv_installs_unless_pip_is_told_where_packages_are(set_up, tmp_path):
    (tmp_path / "network").touch()
    assert set_up(":env:.index-url='https://mirror/simple'", uv_fails=0) == (0, "pip pip")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    assert set_up("global.timeout='60'", uv_fails=0) == (0, "uv uv")
