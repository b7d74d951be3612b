"""What the README and docs say, done; and the launcher's own answers."""

import functools
import importlib.metadata
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import tomli
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import config
from tests.conftest import REPO, copy_tracked, launch, make_config, needs_extra
from tests.run.test_pods import trainer_environment

pytestmark = [pytest.mark.early, pytest.mark.slow]

# A code block that a test runs or reads says so in its label.

BLOCK = re.compile(r"^```(.*?)\n(.*?)^```", re.M | re.S)
DOCS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
QUOTED = "python quoted "  # and the file


def blocks() -> list[tuple[str, str, str]]:
    found = []
    for path in DOCS:
        for label, text in BLOCK.findall(path.read_text()):
            found.append((path.name, label.strip(), text))
    return found


# of pages that speak of them
needs_every_extra = needs_extra(
    "chat",
    "float8",
    "huggingface",
    "lora",
    "migrate",
    "optimizers",
    "planner",
    "preflight",
    "reports",
)


def test_pods_run_what_is_there_with_the_variables_that_torchrun_reads():
    job, env = (yaml.safe_load(text) for _, label, text in blocks() if "kubernetes" in label)
    master, worker = job["spec"]["pytorchReplicaSpecs"].values()
    for pods in (master, worker):
        program, script, path, option = pods["template"]["spec"]["containers"][0]["command"]
        assert (program, script) == ("torchrun", "train.py")
        cfg = config.load(str(REPO / path), [option])
        assert cfg.run.output_dir == "/shared/outputs"
    assert (master["replicas"], worker["replicas"]) == (1, 3)
    given = [variable["name"] for variable in env["env"]]
    given.remove("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert sorted(given) == sorted(trainer_environment(0, "29500"))


def test_quoted_code_is_that_of_the_file():
    quotes = [
        (label.removeprefix(QUOTED), text)
        for _, label, text in blocks()
        if label.startswith(QUOTED)
    ]
    assert quotes and all(text in (REPO / name).read_text() for name, text in quotes)


def test_every_table_is_one_that_is_read():
    found = [text for _, label, text in blocks() if label == "toml table"]
    assert found and all(make_config(**tomli.loads(text)) for text in found)


def slugs(text: str) -> list[str]:
    """The anchors that GitHub gives a page's headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().replace(" ", "-")
        slug = re.sub(r"[^\w-]", "", words)
        again = sum(
            re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found
        )
        found.append(f"{slug}-{again}" if again else slug)
    return found


def test_relative_links_lead_somewhere():
    """To a file of the repository, and in a page to one of its headings."""
    repo, checked = REPO.resolve(), 0
    for path in DOCS:
        text = re.sub("`[^`\n]*`", "", BLOCK.sub("", path.read_text()))
        for link in re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:href|src|srcset)=\"([^\"]+)\"", text):
            target, _, anchor = "".join(link).partition("#")
            if re.match(r"\w+:", target):
                continue
            file = (path.parent / target).resolve() if target else path
            where = f"{path.name}: {''.join(link)}"
            assert file.is_relative_to(repo), where
            assert file.exists(), where
            assert not anchor or (file.suffix == ".md" and anchor in slugs(file.read_text())), where
            checked += 1
    assert checked > 20
    assert slugs("# `a.b`: c, d\n## Two\n## Two\n") == ["ab-c-d", "two", "two-1"]


def test_options_named_in_pages_exist():
    """`section.key`, or `--section.key=value`, unless it is a file, a module, or a function of optim.py."""
    functions, checked = re.findall(r"^def (\w+)", (REPO / "optim.py").read_text(), re.M), 0
    known = config.SCHEMA.options.keys() | config.SCHEMA.tables.keys()
    for path in DOCS:
        for section, key in re.findall(
            r"`(?:--)?([a-z]+)\.([a-z_0-9]+)(?=[`= ])", path.read_text()
        ):
            other = (
                key in ("py", "bin") or key in functions or (REPO / section / f"{key}.py").exists()
            )
            if section in config.SCHEMA.tables and not other:
                assert f"{section}.{key}" in known, f"{path.name}: {section}.{key}"
                checked += 1
    assert checked > 100


def commands(text: str) -> list[str]:
    """A line each, or a here-document with its command."""
    found = re.findall(r"^.*<<'END'\n(?:.*\n)*?END$|^.+$", text.replace("\\\n", " "), re.M)
    return [
        line if "<<'END'\n" in line else line.split("  #")[0].strip()
        for line in found
        if line.strip() and not line.startswith("#")
    ]


# run by a test that looks at what they print
ELSEWHERE = ("benchmarks.counted_step", "benchmarks.overhead")


def documented(tool: str) -> list[str]:
    """The arguments of the one command in the documents that runs this tool."""
    found = []
    for _, label, text in blocks():
        if label == "bash run":
            found += [command for command in commands(text) if f"-m {tool}" in command]
    assert len(found) == 1
    return found[0].split(f"-m {tool}")[1].split()


def short(command: str) -> str:
    """The same command, with less text of Python's library, and fewer steps where it trains, of fewer tokens but for
    the first; benchmarks of fewer bytes."""
    command = (
        re.sub(r"--mib \d+", "--mib 8", command)
        .replace("100_000_000", "5_000_000")
        .replace("-mb 8", "-mb 2")
    )
    command = command.replace("--ranks 1,2", "--ranks 1")
    if re.search(r"run_train\.sh(( -m data.*)? (configs/tiny|outputs/mixture)\.toml|$)", command):
        command = f"{command} --data.max_tokens=1_000_000"
    if "run_train.sh" in command and not re.search(r"-m |--setup|--dry-run|--help", command):
        command = f"{command} --eval.batches=2"
        if ".toml" in command:
            command = f"{command} --train.seq_len=64 --train.global_batch_size=2"
    if command == "./tests/run.sh --quick":
        return f"{command} --collect-only"
    if command.startswith("./tests/run.sh") and "--lint" not in command:
        return f"{command} -n 0 tests/test_metrics.py -k console_line"  # not this test again
    if "run_train.sh" in command and not re.search(
        r"-m |--setup|--dry-run|--eval-only|--help|--train.steps", command
    ):
        return f"{command} --train.steps=2"
    return command


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository as a newcomer has it: tracked files alone."""
    return copy_tracked(tmp_path_factory.mktemp("clone") / "repo")


@functools.cache
def hidden_packages() -> tempfile.TemporaryDirectory:
    """A folder for PYTHONPATH that hides what tests/requirements.txt installs and requirements.txt does not."""
    folder = tempfile.TemporaryDirectory(prefix="hidden-")
    of_runs, of_tests = (
        {Requirement(line).name for line in (REPO / name).read_text().splitlines()}
        for name in ("requirements.txt", "tests/requirements.txt")
    )
    for module, packages in importlib.metadata.packages_distributions().items():
        if {*packages} <= of_tests - of_runs:
            message = f"{module} is installed for the tests alone"
            pathlib.Path(folder.name, f"{module}.py").write_text(
                f"raise ModuleNotFoundError({message!r}, name={module!r})\n"
            )
    return folder


def run_in(folder: pathlib.Path, command: str) -> subprocess.CompletedProcess:
    """A documented command. tests/run.sh alone, which installs them, finds the packages of the tests."""
    environment = {**os.environ, "PYTHON": sys.executable}
    if "tests/run.sh" not in command:
        environment["PYTHONPATH"] = hidden_packages().name
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


def test_documented_commands_do_not_find_the_packages_of_the_tests(tmp_path):
    done = run_in(tmp_path, f"{sys.executable} -c 'import torch, pytest'")
    assert "No module" not in done.stderr and "pytest is installed for the tests" in done.stderr


def warnings_in(done: subprocess.CompletedProcess) -> list[str]:
    """Python's and those of torch's log, but not of a CUDA build that it finds no GPU."""
    return [
        line
        for line in [*done.stdout.splitlines(), *done.stderr.splitlines()]
        if "No CUDA runtime" not in line
        and re.search(r"^\S+:\d+: \w*Warning: |^(\[rank\d+\]:)?[WE]\d{4} \d\d:", line)
    ]


@needs_every_extra
def test_run_blocks_run(clone):
    """In the order of the documents, since later ones use what earlier ones made."""
    ran, tested = 0, set()
    for name, label, text in blocks():
        if label == "bash run":
            for command in commands(text):
                if any(f"-m {tool}" in command for tool in ELSEWHERE) or command in tested:
                    continue
                if "tests/run.sh" in command:  # the same whenever it is run
                    tested.add(command)
                done = run_in(clone, short(command))
                assert done.returncode == 0, (
                    f"{name}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
                )
                assert not warnings_in(done), f"{name}: {command}"
                ran += 1
    assert ran >= 5


@needs_every_extra
def test_dry_run_blocks_give_a_plan(clone):
    found = []
    for _, label, text in blocks():
        if label == "bash dry-run":
            found += commands(text)
    for command in found:
        # each of them looks for what to change
        command = command.replace("--world-size 8,16,32", "--world-size 32")
        if "--dry-run" not in command:
            command = f"{command} --dry-run --world-size 8"
        done = run_in(clone, command)
        assert done.returncode in (0, 3) and "parameters" in done.stdout, (
            f"{command}\n{done.stderr}"
        )
        assert not warnings_in(done), command
    assert found


def test_configurations_support_the_world_sizes_in_their_commands():
    checked = 0
    for path in REPO.glob("configs/*.toml"):
        for sizes in re.findall(r"^#   .* --world-size (\S+)", path.read_text(), re.M):
            cfg = config.load(str(path))
            for ranks in map(int, sizes.split(",")):
                config.micro_batch_size(cfg.train, math.prod(config.mesh_shape(cfg, ranks)[:2]))
                checked += 1
    assert checked > 20


def test_cluster_blocks_name_what_is_there():
    for _, label, text in blocks():
        if label == "bash needs-a-cluster":
            for command in commands(text):
                for word in re.findall(r"configs/[\w.-]+\.toml|run_train\.sh", command):
                    assert (REPO / word).exists(), command
                    if word.endswith(".toml"):
                        assert config.load(str(REPO / word), re.findall(r"--\w+\.\w+=\S+", command))


def test_setup_prints_the_python_as_its_last_line():
    done = launch("--setup")
    assert done.returncode == 0 and pathlib.Path(done.stdout.splitlines()[-1]).exists()


def test_help_of_the_launcher():
    done = launch("--help", PYTHONOPTIMIZE="2")  # a Python without docstrings
    assert done.returncode == 0 and "sbatch" in done.stdout and "--section.key=value" in done.stdout


def test_help_of_the_launcher_lists_the_tools():
    """Each file that runs as one, by a name that -m understands; of a section's help, none."""
    tools = launch("--help").stdout.partition("\nTools")[2].partition("\n\n")[0]
    named = dict(re.findall(r"^  (\S+) +(\S.*)$", tools, re.M))
    expected = set()
    for path in [*REPO.glob("*.py"), *REPO.glob("*/*.py"), *REPO.glob("extras/*/*.py")]:
        is_tool = re.search(r"^    (config\.)?run_tool\(main\)", path.read_text(), re.M)
        is_part = path.name != "__main__.py" and (path.parent / "__main__.py").exists()
        if is_tool and not is_part and "tests" not in path.parts[-2:]:
            expected.add(path.parent.name if path.name == "__main__.py" else path.stem)
    assert {name.rpartition(".")[2] for name in named} == expected and "generate" in expected
    assert all(len(sentence) > 15 and '"""' not in sentence for sentence in named.values())
    assert "Tools" not in launch("--help", "optim").stdout


def test_an_environment_that_was_not_finished_is_made_again(tmp_path):
    """With a Python that has no torch, and a pip that fails at first."""
    for name in ("run_train.sh", "requirements.txt", "train.py"):
        shutil.copy(REPO / name, tmp_path / name)
    python, calls = tmp_path / "bin/python3", tmp_path / "calls"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/bash
echo "$*" >>{calls}
case "$*" in
*packages.version*) exit 1;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
*requirements.txt*) test -e {tmp_path}/network;;
esac
""")
    python.chmod(0o755)

    def set_up(stderr: int = subprocess.PIPE) -> tuple[int, list[str], list[str]]:
        calls.write_text("")
        done = subprocess.run(
            [tmp_path / "run_train.sh", "--setup"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=tmp_path,
            env={"PATH": f"{python.parent}:{os.environ['PATH']}"},
        )
        assert calls.read_text().count("install --quiet") == calls.read_text().count("install") * (
            stderr < 0
        )
        return (
            done.returncode,
            done.stdout.splitlines()[-1:],
            re.findall("-m (venv|pip)", calls.read_text()),
        )

    made = 0, [str(tmp_path / ".venv/bin/python")]
    assert set_up() == (1, [], ["venv", "pip", "pip"])
    (tmp_path / "network").touch()
    assert set_up() == (*made, ["venv", "pip", "pip"]) and set_up() == (*made, [])
    with (tmp_path / "requirements.txt").open("a") as file:
        file.write("# another\n")
    assert set_up() == (*made, ["venv", "pip", "pip"])
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    terminal, child_end = os.openpty()
    assert set_up(child_end) == (*made, ["venv", "pip", "pip"])  # there pip shows its progress
    os.close(terminal)
    os.close(child_end)
    (tmp_path / ".venv.lock").unlink()
    (tmp_path / ".venv.lock").mkdir()  # cannot be opened, as in a repository that is another user's
    assert set_up() == (*made, [])


@pytest.mark.parametrize("name", ["requirements.txt", "tests/requirements.txt"])
def test_what_is_pinned_can_be_had_for_the_oldest_python_that_run_train_sh_takes(name):
    oldest = ".".join(
        re.search(r"version_info < \((\d+), (\d+)\)", (REPO / "run_train.sh").read_text()).groups()
    )
    pins, takes = map(Requirement, (REPO / name).read_text().splitlines()), {}
    for pin in pins:
        if not pin.marker or (
            pin.marker.evaluate() and pin.marker.evaluate({"python_version": oldest})
        ):
            found = importlib.metadata.distribution(pin.name)
            if found.version in pin.specifier:  # an environment of somebody's own may have another
                takes[pin.name] = oldest in SpecifierSet(found.metadata["Requires-Python"] or "")
    assert takes and all(takes.values()), takes


def test_the_workflow_runs_what_must_pass_on_the_oldest_python_and_a_new_one():
    """And once what remains without extras/."""
    jobs = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())["jobs"]
    assert os.access(REPO / ".ci/run", os.X_OK)
    macos = jobs["macos"]
    for job in jobs.values():
        checkout, setup, *_, run = job["steps"]
        assert job["timeout-minutes"] <= 180
        assert run == {"run": ".ci/run"} or job is macos
        assert "checkout" in checkout["uses"]
        packages = setup["with"]["cache-dependency-path"].split()
        assert all((REPO / name).exists() for name in packages)
    tests, core = jobs["tests"], jobs["core"]
    assert tests["strategy"]["matrix"] == {"python": ["3.10", "3.14"]}
    assert macos["runs-on"] == "macos-latest"
    for step in macos["steps"][2:]:
        shell, script, *_ = step["run"].removeprefix("NPROC=2 ").split()
        assert shell == "/bin/bash" and os.access(REPO / script, os.X_OK)
    assert tests["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"
    assert core["steps"][2] == {"run": "rm -r extras tests/extras"}


def test_commits_are_checked_by_the_tools_that_the_tests_run_at_their_versions():
    """The hook has no versions of its own: it runs tests/run.sh, which installs what tests/requirements.txt pins."""
    (repo,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repo["hooks"]
    assert (repo["repo"], hook["language"], hook["entry"]) == (
        "local",
        "system",
        "./tests/run.sh --lint",
    )
    before, after = (REPO / "tests/run.sh").read_text().split("== --lint ")
    tools = re.findall(r'"\$python" -m (\w+) check', before)
    assert tools == ["ruff", "pyrefly"] and "pytest" in after
    pinned = (REPO / "tests/requirements.txt").read_text().splitlines()
    assert all(any(line.startswith(f"{tool}==") for line in pinned) for tool in tools)


@pytest.mark.parametrize("variables", [{"PYTHON": "no-such-python"}, {"NPROC": "many"}])
def test_launcher_says_what_is_wrong_with_its_environment(variables):
    done = launch("configs/tiny.toml", **variables)
    assert (
        done.returncode == 2 and "run_train.sh:" in done.stderr and "Traceback" not in done.stderr
    )


def test_tools_of_extras_have_short_names(tmp_path):
    """Also where an earlier version left an empty folder of that name; a package keeps its own."""
    shutil.copy(REPO / "run_train.sh", tmp_path)
    for name in ("extras/huggingface/__main__.py", "extras/reports/report.py", "train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "extras/chat").mkdir()
    (tmp_path / "extras/chat/make_chat.py").touch()
    (tmp_path / "huggingface/__pycache__").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for short_name, module in {
        "huggingface": "extras.huggingface",
        "report": "extras.reports.report",
        "data.make_chat": "extras.chat.make_chat",
        "tensorboard.main": "tensorboard.main",
        "train": "train",
    }.items():
        done = subprocess.run(
            [tmp_path / "run_train.sh", "-m", short_name, "a b"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHON": str(python)},
        )
        assert done.stdout.endswith(f" {module} a b\n"), done.stderr
