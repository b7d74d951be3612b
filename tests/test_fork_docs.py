"""docs/fork.md, followed in a copy of the repository: start, worked change. What it names exists."""

import re
import subprocess
import sys

import pytest

import config
from tests.conftest import REPO, copy_tracked, launch, rows
from tests.test_repo import BLOCK, commands, run_in

pytestmark = pytest.mark.early

PAGE = (REPO / "docs/fork.md").read_text()
START, CHANGE = [commands(text) for label, text in BLOCK.findall(PAGE) if label == "bash fork"]
(DIFF,) = [text for label, text in BLOCK.findall(PAGE) if label == "diff fork"]
(GATE,) = [text for label, text in BLOCK.findall(PAGE) if label == "diff fork-gate"]


@pytest.fixture(scope="module")
def fork(tmp_path_factory, corpus, prepared):
    """A copy in which the page's commands have run: the quick tests are only collected; of the change's, those on one
    and two ranks have run; and the runs take two steps on a small corpus."""
    if not config.has_extra("migrate"):
        pytest.skip("the page removes extras/migrate, which is gone")
    copy = copy_tracked(tmp_path_factory.mktemp("fork") / "repo")
    (copy / "outputs").mkdir()
    (copy / "outputs/relu2.diff").write_text(DIFF)
    for command in START + CHANGE:
        if "--quick" in command:
            command = f"{command} --collect-only"
        if "tests/run.sh" in command:
            command = f"{command} -n 0"
        command = command.replace("-k relu2", '-k "relu2 and not 4-relu2"')
        if "run_train.sh" in command:
            command = f"{command.replace('=20', '=2')} {small(corpus, prepared)}"
        done = run_in(copy, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
        if "4-relu2" in command:  # each line of the diff that is a test has run
            assert re.search(r"\n3 passed, \d+ deselected", done.stdout), done.stdout
    return copy


def small(corpus, prepared) -> str:
    """Options that make a run of configs/tiny.toml one of a second."""
    return (
        f"--data.source={corpus} --data.path={prepared} --model.vocab_size=320 --eval.batches=2 --train.seq_len=32 "
        "--train.global_batch_size=2"
    )


def test_a_gate_in_one_file_trains_alike_on_any_mesh(write_config, tmp_path):
    """Its initial value, 1, changes nothing before the first update."""
    copy = copy_tracked(tmp_path / "gated")
    (copy / "gate.diff").write_text(GATE)
    applied = run_in(copy, "git apply gate.diff")
    assert applied.returncode == 0, applied.stderr
    found = {}
    for name, repo, nproc, *options in (
        ("original", REPO, 1),
        ("one", copy, 1),
        ("two", copy, 2),
        ("tp", copy, 2, "--parallel.tp=2"),
    ):
        done = launch(write_config(name), *options, nproc=nproc, repo=repo)
        assert done.returncode == 0, done.stderr
        found[name] = [row["loss"] for row in rows(tmp_path / "outputs" / name)]
    assert found["one"] == pytest.approx(found["two"], rel=1e-5)
    assert found["one"] == pytest.approx(found["tp"], rel=1e-5)
    assert found["one"][0] == found["original"][0]
    assert found["one"][-1] != found["original"][-1]


def test_the_worked_change_changes_losses_while_it_is_on_alone(fork, write_config, tmp_path):
    """Off, they are the original's bit for bit; on, those of one and two ranks are equal."""
    found = {}
    for name, options, nproc, repo in (
        ("original", [], 1, REPO),
        ("off", [], 1, fork),
        ("on", ["--model.activation=relu2"], 1, fork),
        ("on two", ["--model.activation=relu2"], 2, fork),
    ):
        done = launch(write_config(name.replace(" ", "-")), *options, nproc=nproc, repo=repo)
        assert done.returncode == 0, done.stderr
        found[name] = [row["loss"] for row in rows(tmp_path / "outputs" / name.replace(" ", "-"))]
    assert len(found["off"]) == 4 and found["off"] == found["original"]
    assert found["on two"] == pytest.approx(found["on"], rel=1e-5)
    last_on, last_off = found["on"][-1], found["off"][-1]
    # fresh blocks add little to the residual stream, so not at first
    assert abs(last_on - last_off) > 2e-4 * last_off


@pytest.mark.slow
def test_what_the_worked_change_leaves_out_is_refused_by_name(fork, corpus, prepared):
    done = run_in(fork, "./run_train.sh -m huggingface export outputs/relu2 outputs/relu2-hf")
    assert done.returncode == 2 and "activation" in done.stderr and "not written" in done.stderr, (
        done.stderr
    )
    done = run_in(
        fork,
        f"./run_train.sh configs/tiny.toml --run.name=relu2 --train.steps=3 {small(corpus, prepared)}",
    )
    assert done.returncode == 2 and "model.activation = silu" in done.stderr, done.stderr


def test_the_source_of_text_passes_the_linter():
    """Which ./tests/run.sh asks first; tests/data/test_reading.py runs it."""
    (code,) = [text for label, text in BLOCK.findall(PAGE) if label == "python fork-source"]
    imports = "import sqlite3\nfrom typing import IO\n\nfrom data.rows import Rows\n\n\n"
    for words in ["check"], ["format", "--check"]:
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--stdin-filename", "data/articles.py", "-"],
            cwd=REPO,
            input=imports + code,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_what_the_page_names_exists():
    """Files, `file: name` in that file, and any other name somewhere in the code."""
    text = BLOCK.sub("", PAGE)
    names = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    code = {
        name: (REPO / name).read_text()
        for name in names
        if name.endswith((".py", ".sh"))
        and name != "tests/test_fork_docs.py"
        and (REPO / name).exists()
    }
    words = set(re.findall(r"\w+", " ".join(code.values())))
    files = pairs = others = 0
    for quoted in re.findall("`([^`]+)`", text):
        file, _, name = " ".join(quoted.split()).partition(": ")
        extra = re.match(r"(?:tests/)?extras/(\w+)", file)
        if extra and not config.has_extra(extra[1]):
            continue
        if re.fullmatch(r"[\w/.]+\.(py|md)", file) and ("/" in file or (REPO / file).exists()):
            assert (REPO / file).exists(), quoted
            files += 1
            if name:
                assert re.search(rf"\b{re.escape(name)}\b", code[file]), quoted
                pairs += 1
        elif not quoted.endswith((".py", ".bin", ".diff", ".toml", '"')):
            assert {*re.findall(r"[A-Za-z_]\w{3,}", quoted)} <= words | {
                "balance",
                "z_loss",
                "z_weight",
            }, quoted
            others += 1
    assert files > 60 and pairs > 25 and others > 50, (files, pairs, others)
