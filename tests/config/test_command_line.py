"""Arguments, --help, exit codes."""

import errno
import os
import re
import subprocess
import sys

import pytest
import tomli

import config
from config.help import help_text
from tests.conftest import REPO, launch, make_config, run_tool

TINY = str(REPO / "configs/tiny.toml")


# arguments of train.py, key words of what it prints
COMMAND_LINES = [
    ([], "CONFIG"),
    ([TINY, "--=5", "--two"], "--=5, --two: unknown"),
    ([TINY, "x\x1b[31mred"], r"x\\x1b\[31mred: unknown"),
    ([TINY, "--train.steps\r=3"], r"steps\\r = 3: unknown option; did you mean train.st"),
    (["--help", "optm"], "--help optm: .*did you mean optim"),
    (["tiny", "--train.steps=0"], r"\[train\] steps = 0"),
    (["tini"], "tini: neither a file nor .*llama8b.*; did you mean tiny"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("words", "message"), COMMAND_LINES)
def test_wrong_command_line_exits_with_2_and_imports_no_torch(words, message, tmp_path):
    """And it prints no control character."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    command = [sys.executable, "-m", "train", *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=env)
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
    assert tomli.loads(help_text("optim.lr")) == {"optim": {"lr": 3e-4}}


@pytest.mark.quick
def test_help_searches_names_and_descriptions():
    found = {"lr": "lr muon_lr min_lr_ratio", "host": "cpu_offload", "eval": "every_steps batches"}
    for word, keys in found.items():
        assert re.findall(r"^  (\w+) = ", help_text(word), re.M) == keys.split()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (config.ConfigError("a\r", "b"), 2, "a\\r\nb\n"),
        (OSError(errno.ESTALE, "Stale", "a/b.json"), 1, "a/b.json: Stale; "),
    ],
)
def test_a_tool_reports_expected_errors_without_a_traceback(error, code, message, capsys):
    def main(argv: list[str]) -> int:
        raise error

    assert run_tool(main) == code
    assert capsys.readouterr().err.startswith(message)
