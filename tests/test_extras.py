"""Without extras/ the repository trains, resumes and evaluates as before, and refuses an option that needs an extra in
one line. Every test runs in a copy without the folder."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import copy_tracked, launch, needs_extra, rows

pytestmark = [pytest.mark.early, pytest.mark.slow]


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> pathlib.Path:
    """A copy without extras."""
    folder = tmp_path_factory.mktemp("extras") / "core"
    return copy_tracked(folder, without=("extras", "tests/extras"))


def test_the_core_trains_resumes_and_evaluates_as_the_whole_does(core, write_config, tmp_path):
    """Two ranks up to step 2, one from there; against one rank, straight, with all extras."""
    sections = {"optim": {"schedule_steps": 4}, "eval": {"batches": 2}, "checkpoint": {}}
    whole = write_config("whole", **sections)
    ours = write_config("ours", **sections)
    done = [
        launch(whole),
        launch(ours, "--train.steps=2", nproc=2, repo=core),
        launch(ours, repo=core),
        launch(ours, "--eval-only", repo=core),
    ]
    assert [run.returncode for run in done] == [0] * 4, [run.stderr for run in done]
    assert "resuming after step 2" in done[2].stdout
    check_rows(tmp_path / "outputs/ours", tmp_path / "outputs/whole")
    (last,) = rows(tmp_path / "outputs/whole", "eval")
    evaluated = json.loads(done[3].stdout.splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert evaluated["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-5)


def check_rows(ours: pathlib.Path, whole: pathlib.Path) -> None:
    """Every step's data, loss and gradient norm are the same."""
    expected = rows(whole)
    found = rows(ours)
    assert len(expected) == 4
    assert [row["batch_digest"] for row in found] == [row["batch_digest"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx(
            [row[key] for row in expected], rel=1e-5
        )


@pytest.mark.parametrize("dimension", ["tp", "cp"])
def test_the_core_shards_matrices_and_sequences(core, write_config, tmp_path, dimension):
    whole = launch(write_config("whole"))
    ours = launch(write_config("ours", parallel={dimension: 2}), nproc=2, repo=core)
    assert whole.returncode == ours.returncode == 0, ours.stderr
    check_rows(tmp_path / "outputs/ours", tmp_path / "outputs/whole")


def test_the_core_reads_a_mixture_and_growing_text(core, write_config, tmp_path):
    """The latter is prepared while it trains."""
    sources = []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.jsonl"
        texts = [f"{name} text number {i} of many words" * 20 for i in range(200)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(path)
    mixture = f"[{{source = '{sources[0]}', weight = 2.0}}, {{source = '{sources[1]}'}}]"
    for name, options in {
        "mixture": [f"--data.sources={mixture}"],
        "growing": [f"--data.source={sources[0]}", "--data.order=growing"],
    }.items():
        for repo in (None, core):
            path = write_config(
                f"{name}-{'whole' if repo is None else 'core'}",
                data={"source": None, "path": None},
            )
            where = {} if repo is None else {"repo": repo}
            done = launch(path, *options, cwd=tmp_path, **where)
            assert done.returncode == 0, done.stderr
        check_rows(tmp_path / f"outputs/{name}-core", tmp_path / f"outputs/{name}-whole")


@pytest.mark.parametrize(
    "options, extra",
    [
        (["--parallel.float8=rowwise"], "float8"),
        (["--dry-run"], "planner"),
        (["--optim.name=muon"], "optimizers"),
        (["--optim.state_dtype=bfloat16"], "optimizers"),
        (["--profile.at_step=1", "--profile.steps=1"], "reports"),
        (["--log.tracker=wandb"], "reports"),
        (["--model.init_from=folder"], "huggingface"),
        (["--lora.rank=2", "--model.init_from=folder"], "lora"),
        (["--data.messages_field=messages"], "chat"),
        (["--data.format=alpaca"], "chat"),
    ],
    ids=str,
)
def test_an_option_whose_extra_was_removed_is_refused(core, write_config, options, extra):
    done = launch(write_config(), *options, repo=core)
    lacking = f"needs extras/{extra}, which this copy of the repository does not have"
    (line,) = [line for line in done.stderr.splitlines() if lacking in line]
    option = options[0].removeprefix("--").split("=")[0].split(".")[-1]
    assert done.returncode == 2 and option in line, done.stderr
    assert "Traceback" not in done.stderr


def test_configurations_that_ask_for_no_extra_load(core):
    """At least ten of those that are shipped."""
    code = """
import config, pathlib
from tests.conftest import shipped_configs
print(*[path.stem for path in shipped_configs()])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=core, capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    assert len(names) >= 10 and {"tiny", "llama8b", "llama70b"} <= {*names}, names


@needs_extra("planner")
def test_the_others_tests_are_collected_without_the_extras(core):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--co", "-q"],
        cwd=core,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "tests/test_training.py" in done.stdout and "tests/extras" not in done.stdout
