"""Arguments, --help, exit codes."""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import tomli

import config
from config.command_line import config_path
from config.help import help_text
from tests.conftest import REPO, launch, make_config

TINY = str(REPO / "configs/tiny.toml")


def shell(*words: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *words]
    env = os.environ | variables
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=env)


# arguments of train.py, key words of what it prints
COMMAND_LINES = [
    ([], "CONFIG"),
    ([TINY, "--=5", "--two"], "--=5, --two: unknown"),
    ([TINY, "other.toml"], "other.toml: unknown; CONFIG comes first"),
    ([TINY, "\u2013-train.steps=3"], "train.steps=3: unknown"),
    ([TINY, "x\x1b[31mred"], r"x\\x1b\[31mred: unknown"),
    (["."], "cannot be read"),
    ([TINY, "--train.steps\r=3"], r"steps\\r = 3: unknown option; did you mean train.st"),
    ([TINY, "--data.source=a.txt\r"], r'source = "a.txt\\r": .*control characters'),
    ([TINY, f"--train.steps={'9' * 5000}"], "integer"),
    ([TINY, "--dry-run"], "--dry-run: unknown"),
    (["--help", "optm"], "--help optm: .*did you mean optim"),
    ([TINY, "--help=zebra"], "--help zebra: .*there are run, model"),
    (["tiny", "--train.steps=0"], r"\[train\] steps = 0"),
    (["tini"], "tini: neither a file nor .*llama8b.*; did you mean tiny"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("words", "message"), COMMAND_LINES)
def test_wrong_command_line_exits_with_2_and_imports_no_torch(words, message, tmp_path):
    """And it prints no control character."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = shell("-m", "train", *words, PYTHONPATH=f"{tmp_path}:{REPO}")
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr and not re.search("[\r\x1b]", done.stderr)


def test_launcher_refuses_before_it_makes_anything(tmp_path):
    """The caller's folder is where paths begin."""
    (tmp_path / "mine.toml").write_text(config.to_toml(make_config()).replace("= 4\n", "= 0\n", 1))
    done = launch("mine.toml", "--run.seed=x", "--run.speed=3", cwd=tmp_path, NPROC="two")
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("\n") == 4, done.stderr  # four problems, a line each
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    (tmp_path / "mine.toml").write_text(config.to_toml(make_config()))
    done = launch("mine.toml", "--data.source=nothing.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "nothing.jsonl: no such file" in done.stderr, done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.quick
def test_help_is_toml_of_every_option_within_100_columns():
    everything = help_text()
    assert max(map(len, everything.splitlines())) <= 100
    for section, values in config.to_dict(config.load(TINY)).items():
        assert help_text(section) in everything and f"[{section}]" in help_text(section)
        assert all(f"\n  {key} = " in help_text(section) for key in values)
    for table in ("[lora]", "[profile]", "[model.rope_scaling]", "[[data.sources]]"):
        assert f"\n{table}" in everything
    assert tomli.loads(help_text("optim.lr")) == {"optim": {"lr": 3e-4}}


# a word, the keys of the options that --help lists for it
SEARCHES = [
    ("optim.lr", ["lr"]),
    ("lr", ["lr", "muon_lr", "min_lr_ratio"]),
    ("Activation_check", ["recompute"]),
    ("host", ["cpu_offload"]),
    ("wandb", ["tracker"]),
    ("eval", ["every_steps", "batches"]),
]


@pytest.mark.quick
@pytest.mark.parametrize(("word", "keys"), SEARCHES)
def test_help_searches_names_and_descriptions(word, keys):
    assert re.findall(r"^  (\w+) = ", help_text(word), re.M) == keys


def test_a_file_comes_before_a_name_in_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_path("tiny") == TINY
    (tmp_path / "tiny").touch()
    assert config_path("tiny") == "tiny"


@pytest.mark.parametrize("folder", [".", "docs", "..", "/"])
def test_a_printed_command_works_from_the_folder_of_its_reader(folder, monkeypatch):
    monkeypatch.chdir(REPO / folder)
    words = shlex.split(config.command("-m", "tools.prepare", "a b"))
    assert words[1:] == ["-m", "tools.prepare", "a b"]
    assert "/" in words[0] and os.path.samefile(words[0], REPO / "run_train.sh")


def test_help_of_a_program_opens_with_its_commands():
    shown = shell("train.py", "--help").stdout
    assert shown.startswith("Trains") and shown.endswith(f"{help_text()}\n")
    assert shell("train.py", TINY, "--help").stdout == shown
    for words in (["--help", "lr"], ["--help=lr"]):
        assert shell("train.py", *words).stdout == f"{help_text('lr')}\n"


def test_run_train_may_be_called_through_a_link_and_with_any_cdpath(tmp_path):
    (tmp_path / "rt").symlink_to(REPO / "run_train.sh")
    variables = {**os.environ, "PYTHON": sys.executable, "CDPATH": f"{REPO.parent}:."}
    for script, cwd in (("./rt", tmp_path), (f"{REPO.name}/run_train.sh", REPO.parent)):
        command = ["bash", script, TINY, "--train.steps=0"]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=variables)
        assert done.returncode == 2 and "steps = 0" in done.stderr, done.stderr


# stands in for Python, its pip and uv
PYTHON = """#!/bin/bash
case "$*" in
*packages.version*) exit 1;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
"-m pip config list") echo "$SETTINGS";;
"-m pip install "*) echo pip >>calls;;
esac
"""
UV = "#!/bin/bash\necho uv >>calls; exit $UV_FAILS\n"


@pytest.mark.parametrize(
    ("settings", "uv_fails", "installers"),
    [
        ("global.timeout='60'", "0", "uv uv"),
        ("global.timeout='60'", "1", "uv pip uv pip"),
        (":env:.index-url='https://mirror/simple'", "0", "pip pip"),
        ("global.find-links='/wheels'", "0", "pip pip"),
    ],
)
def test_uv_installs_unless_pip_is_told_where_packages_are(
    tmp_path, settings, uv_fails, installers
):
    for name in ("run_train.sh", "requirements.txt", "train.py"):
        shutil.copy(REPO / name, tmp_path / name)
    for name, script in ("python3", PYTHON), ("uv", UV):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SETTINGS": settings, "UV_FAILS": uv_fails}
    command = [tmp_path / "run_train.sh", "--setup"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().split() == installers.split()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "ending", "message"),
    [
        (config.ConfigError("a\r", "b"), SystemExit(2), "a\\r\nb\n"),
        (OSError(errno.ESTALE, "Stale", "a/b.json"), SystemExit(1), "a/b.json: Stale; "),
        (OSError(errno.EISDIR, "Is a directory"), IsADirectoryError(), ""),
        (KeyboardInterrupt(), SystemExit(130), ""),
    ],
)
def test_a_tool_reports_expected_errors_without_a_traceback(error, ending, message, capsys):
    def main(argv: list[str]) -> int:
        raise error

    with pytest.raises(type(ending)) as raised:
        config.run_tool(main)
    assert getattr(raised.value, "code", None) == getattr(ending, "code", None)
    assert capsys.readouterr().err.startswith(message)
