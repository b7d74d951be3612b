"""The benchmarks that set our step beside another: that they run, and fail where the two do not compute the same."""

import contextlib
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks import figures, overhead, torchtitan_step, transformers_step
from parallel.materialize import materialize
from tests.conftest import REPO
from tests.test_repo import documented

pytestmark = pytest.mark.early

PINNED = (REPO / "requirements.txt").read_text().split("\n")[0].removeprefix("torch==")
NUMBER = r"-?\d+\.\d+"
SMALL = [
    "--model.dim=48",
    "--model.n_layers=2",
    "--model.ffn_dim=80",
    "--model.vocab_size=320",
    "--run.device=cpu",
]


def output(main: Callable[[list[str]], int], arguments: list[str]) -> list[str]:
    """The lines that a benchmark prints on a rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) == 0
    return out.getvalue().splitlines()


@pytest.mark.slow
def test_overhead(on_ranks, corpus, prepared):
    sizes = [
        *SMALL,
        "--train.seq_len=32",
        "--train.global_batch_size=2",
        "--train.micro_batch_size=1",
        f"--data.source={corpus}",
        f"--data.path={prepared}",
        "--log.tensorboard=false",
    ]
    arguments = [*documented("benchmarks.overhead"), "--sizes=tiny,short", "--steps=20", *sizes]
    lines = on_ranks(1, output, overhead.main, arguments)[0]
    pattern = rf"overhead ({NUMBER}) % \(({NUMBER}) % \.\.\. ({NUMBER}) %\), ({NUMBER}) ms a step"
    line = re.fullmatch(pattern, lines[-1])
    share, low, high, _ = map(float, line.groups())
    assert low <= share <= high
    for kind, count in {"with a row": 2, "without": 18}.items():
        assert any(line.startswith(f"short: {count} steps {kind}:") for line in lines)


@pytest.mark.parametrize(
    "name, options",
    [
        ("checkpoint", ["--mib", "--repeat"]),
        ("counted_step", ["--tokens"]),
        ("kill_storm", ["--kills"]),
        ("overhead", ["--steps"]),
        ("step", ["--steps"]),
        ("transformers_step", ["--steps"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(name, options, monkeypatch, capsys):
    main = importlib.import_module(f"benchmarks.{name}").main
    for option in options:
        for text in ("0", "-1", "x"):
            monkeypatch.setattr(sys, "argv", [name, f"{option}={text}"])
            with pytest.raises(SystemExit, match="2"):
                main(*([sys.argv[1:]] if inspect.signature(main).parameters else []))
            assert f"argument {option}: {text} must be" in capsys.readouterr().err


def test_a_row_counts_by_its_share():
    steps = {"with a row": [5.0, 5.0], "without": [1.0] * 17 + [900.0]}
    assert overhead.typical(steps) == pytest.approx(1.4)
    low, high = overhead.interval({"with a row": [], "without": [float(n) for n in range(200)]})
    assert low < 99.5 < high and high - low < 60  # by order statistics: 86 ... 113


def different_weights(arguments: list[str]) -> int:
    def drawn(model, seed, device, read):
        materialize(model, 1, device)

    with mock.patch.object(transformers_step, "materialize", drawn):
        return transformers_step.main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, options",
    [
        (1, []),
        (2, ["--parallel.dp_replicate=2", "--parallel.dp_shard=1"]),
        (2, ["--parallel.reshard_after_forward=false"]),
    ],
    ids=str,
)
def test_transformers_step(on_ranks, ranks, options):
    lines = on_ranks(
        ranks,
        output,
        transformers_step.main,
        ["--steps", "3", *SMALL, "--train.seq_len=32", *options],
    )[0]
    line = re.fullmatch(rf"ratio ({NUMBER}) \(({NUMBER}) \.\.\. ({NUMBER})\)", lines[-1])
    value, low, high = map(float, line.groups())
    assert low <= value <= high


@pytest.mark.slow
def test_a_model_that_computes_something_else_is_noticed(on_ranks):
    assert on_ranks(1, different_weights, ["--steps", "1", *SMALL, "--train.seq_len=32"]) == [1]


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED, reason="the figures are those of the pinned torch"
)
def test_figures_are_those_of_the_plan(monkeypatch, capsys):
    """Three drawings and two rows of the table; python -m benchmarks.figures --check compares all in a minute."""
    monkeypatch.setattr(
        figures, "DRAWN", {name: figures.DRAWN[name] for name in ("step", "mesh", "losses")}
    )
    written = {page: figures.TABLE.search((REPO / page).read_text())[0] for page in figures.FIT}
    for page, table in written.items():
        names = [row.split("|")[1].strip(" `") for row in table.splitlines()[2:]]
        assert names == [name for name, *_ in figures.FIT[page]]
    shown = written["README.md"].splitlines()
    assert {*figures.fit_table(figures.FIT["README.md"][:2]).splitlines()} < {*shown}
    for old, code, printed in ("9 x", 0, ""), ("8 x", 1, "README.md: differs\n"):
        tables = {
            len(figures.FIT[page]): table.replace(old, "9 x") for page, table in written.items()
        }
        monkeypatch.setattr(figures, "fit_table", lambda rows, tables=tables: tables[len(rows)])
        assert (figures.main(["--check"]), capsys.readouterr().out) == (code, printed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on a GPU")
def test_torchtitan_is_timed_on_a_gpu_alone(capsys):
    assert torchtitan_step.main(["1B"]) == 2
    assert capsys.readouterr().err == "benchmarks.torchtitan_step needs a GPU\n"
