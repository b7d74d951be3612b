"""docs/fork.md, followed in a copy of the repository. What it names exists."""

import pathlib
import re
import sqlite3
import subprocess
from typing import IO, Any

import pytest

from tests.conftest import REPO, copy_tracked, make_config, rows
from tests.test_repo import BLOCK, commands, run_in

pytestmark = [pytest.mark.early, pytest.mark.slow]

PAGE = (REPO / "docs/fork.md").read_text()


def blocks_of(label: str) -> str:
    return "".join(text for name, text in BLOCK.findall(PAGE) if name == label)


FOLLOWED = commands(blocks_of("bash fork"))
REFUSED = commands(blocks_of("bash fork-refused"))
WORDS = [  # of the refusals, in the page's order
    ("activaton", "did you mean model.activation"),
    ("activation", "relu3", "silu", "relu2"),
    ("model.activation", "silu", "relu2"),
    ("activation", "relu2", "not written"),
]


@pytest.fixture(scope="module")
def small(corpus, prepared) -> str:
    """Options that make a run of configs/tiny.toml one of a second."""
    return (
        f" --data.source={corpus} --data.path={prepared} --model.vocab_size=320 --eval.batches=2 "
        "--train.seq_len=32 --train.global_batch_size=2 --parallel.param_dtype=float32"
    )


@pytest.fixture(scope="module")
def fork(tmp_path_factory, small):
    """A copy in which the page's commands have run; the quick tests are only collected."""
    if not (REPO / "tools").exists():
        pytest.skip("the page removes tools/, which is gone")
    copy = copy_tracked(tmp_path_factory.mktemp("fork") / "repo")
    (copy / "outputs").mkdir()
    (copy / "outputs/relu2.diff").write_text(blocks_of("diff fork"))
    for command in FOLLOWED:
        if "tests/run.sh" in command:
            command += " -n 0"
        if "--quick" in command:
            command += " --collect-only"
        if "configs/tiny.toml" in command:
            command += small
        done = run_in(copy, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
        assert "-k relu2" not in command or "\n1 passed" in done.stdout
    return copy


def losses(fork: pathlib.Path, name: str) -> list[float]:
    return [row["loss"] for row in rows(fork / "outputs" / name)]


def test_worked_change_trains_the_same_on_two_ranks_and_other_than_without_it(fork, small):
    command = "./run_train.sh configs/tiny.toml --run.name=silu --train.steps=20"
    assert run_in(fork, command + small).returncode == 0
    on, on_two, off = (losses(fork, name) for name in ("relu2", "relu2-on-two", "silu"))
    assert len(on) > 2 and on_two == pytest.approx(on, rel=1e-5)
    # fresh blocks add little to the residual stream, so not at first
    assert abs(on[-1] - off[-1]) > 2e-4 * off[-1]


def test_convolution_trains_the_same_on_two_ranks(fork, small):
    diff = blocks_of("diff fork-convolution")
    subprocess.run(["git", "apply"], input=diff, cwd=fork, text=True, check=True)
    command = "./run_train.sh configs/tiny.toml --train.steps=20" + small
    for ranks in (1, 2):
        done = run_in(fork, f"NPROC={ranks} {command} --run.name=mixed-{ranks}")
        assert done.returncode == 0, done.stderr
    undone = ["git", "apply", "--reverse"]  # other tests have the fork as it was
    subprocess.run(undone, input=diff, cwd=fork, text=True, check=True)
    assert losses(fork, "mixed-2") == pytest.approx(losses(fork, "mixed-1"), rel=1e-5)
    assert losses(fork, "mixed-1")[-1] != pytest.approx(losses(fork, "relu2")[-1], rel=1e-4)


def test_source_of_text_is_read(tmp_path, monkeypatch):
    """On articles that are stored in another order than they are read."""
    pytest.importorskip("tools.prepare")
    from tools.prepare import rows as readers
    from tools.prepare.source import ByteRange, SourceFile, documents

    names: dict[str, Any] = {"sqlite3": sqlite3, "IO": IO, "Rows": readers.Rows}
    exec(blocks_of("python fork-source"), names)
    monkeypatch.setitem(readers.READERS, ".db", names["article_rows"])
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE articles (id INTEGER, body TEXT)")
        articles = [(8, "second"), (5, "first"), (11, "third")]
        database.executemany("INSERT INTO articles VALUES (?, ?)", articles)
    data = make_config(data={"source": str(tmp_path)}).data
    files = [ByteRange(SourceFile(str(tmp_path / "a.db")))]
    assert list(documents(data, files)) == ["first", "second", "third"]


@pytest.mark.parametrize("command, words", list(zip(REFUSED, WORDS, strict=True)))
def test_forgotten_step_is_refused_by_name(fork, small, command, words):
    if "configs/tiny.toml" in command:
        command += small
    done = run_in(fork, command)
    assert done.returncode == 2
    assert re.search(".*".join(words), done.stderr, re.S), done.stderr


def test_what_the_page_names_exists():
    """Files; `file: name` in that file. extras/ and tools/ may have been removed."""
    named = 0
    for quoted in re.findall("`([^`]+)`", BLOCK.sub("", PAGE)):
        file, _, name = " ".join(quoted.split()).partition(": ")
        if re.fullmatch(r"(?!outputs/)\w+/[\w/]+\.\w+|optim\.py|train\.py", file):
            named += 1
            if (REPO / file).exists() or not re.match("(tests/)?(extras|tools)/", file):
                assert re.search(rf"\b{re.escape(name)}\b", (REPO / file).read_text()), quoted
    assert named > 30
