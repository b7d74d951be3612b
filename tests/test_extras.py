"""Without extras/ and tools/ the repository trains, resumes and evaluates as before, and refuses what
needs them. Every test runs in a copy without the folders."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import copy_tracked, launch, rows

pytestmark = [pytest.mark.early, pytest.mark.slow]


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("extras") / "core"
    return copy_tracked(folder, without=("extras", "tools", "tests/extras", "tests/tools"))


def check_rows(core_run: pathlib.Path, whole_run: pathlib.Path, kind: str = "train") -> None:
    expected = rows(whole_run, kind)
    assert expected
    for row, other in zip(rows(core_run, kind), expected, strict=True):
        for key in {"step", "loss", "grad_norm", "batch_digest", "bits_per_byte"} & other.keys():
            assert row[key] == pytest.approx(other[key], rel=1e-5), key


def test_core_trains_resumes_and_evaluates_as_the_whole_does(core, write_config, tmp_path):
    """Two ranks up to step 2 and one from there, against one rank without a stop."""
    sections = {"optim": {"schedule_steps": 4}, "eval": {"batches": 2}, "checkpoint": {}}
    path = write_config("core", **sections)
    done = [
        launch(write_config("whole", **sections)),
        launch(path, "--train.steps=2", nproc=2, repo=core),
        launch(path, repo=core),
        launch(path, "--eval-only", repo=core),
    ]
    assert [run.returncode for run in done] == [0] * 4, [run.stderr for run in done]
    assert "resuming after step 2" in done[2].stdout
    check_rows(tmp_path / "outputs/core", tmp_path / "outputs/whole")
    evaluated = json.loads(done[3].stdout.splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(rows(tmp_path / "outputs/whole", "eval")[-1]["loss"])


@pytest.mark.parametrize("options", [["--parallel.tp=2"], ["--parallel.cp=2"]], ids=str)
def test_core_shards_matrices_and_sequences(core, write_config, tmp_path, options):
    done = [
        launch(write_config("whole")),
        launch(write_config("core"), *options, nproc=2, repo=core),
    ]
    assert [run.returncode for run in done] == [0, 0], [run.stderr for run in done]
    check_rows(tmp_path / "outputs/core", tmp_path / "outputs/whole")


def test_core_reads_a_mixture_of_growing_text(core, write_config, tmp_path):
    sources = []
    for name in ("first", "second"):
        texts = [f"{name} text number {i} of many words" * 20 for i in range(200)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"source": str(path)})
    data = {"source": None, "path": None, "order": "growing", "sources": sources}
    done = launch(write_config("core", data=data), cwd=tmp_path, repo=core)
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "outputs/core")) == 4


@pytest.mark.parametrize(
    "extra, options",
    [
        ("float8", ["--parallel.float8=rowwise"]),
        ("optimizers", ["--optim.name=muon"]),
        ("optimizers", ["--optim.state_dtype=bfloat16"]),
        ("profiler", ["--profile.at_step=1", "--profile.steps=1"]),
        ("huggingface", ["--model.init_from=folder"]),
        ("lora", ["--lora.rank=2", "--model.init_from=folder"]),
        ("chat", ["--data.messages_field=messages"]),
        ("chat", ["--data.format=alpaca"]),
    ],
    ids=str,
)
def test_option_whose_extra_was_removed_is_refused(core, write_config, extra, options):
    done = launch(write_config(), *options, repo=core)
    lines = [line for line in done.stderr.splitlines() if f"needs extras/{extra}," in line]
    option = options[0].removeprefix("--").partition("=")[0].rpartition(".")[2]
    assert done.returncode == 2 and len(lines) == 1 and option in lines[0], done.stderr


def test_plan_without_the_planner_is_refused(core, write_config):
    done = launch(write_config(), "--dry-run", repo=core)
    assert done.returncode == 2 and "needs tools/planner" in done.stderr


def test_tests_of_the_core_are_collected(core):
    """And most configurations load."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run([sys.executable, *command], cwd=core, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "tests/test_training.py" in done.stdout and "tests/extras" not in done.stdout
    code = "from tests.conftest import shipped_configs; print(len(shipped_configs()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=core, capture_output=True, text=True)
    assert int(done.stdout) >= 10, done.stderr
