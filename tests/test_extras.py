"""Without extras/ and tools/ the repository trains, resumes and evaluates as before, and refuses what
needs them. Every test runs in a copy without these folders."""

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


def test_core_trains_resumes_and_evaluates_as_the_full_repository(core, write_config, tmp_path):
    """On a mixture of growing text: with tp, then cp, then one rank, against one rank alone."""
    sources = []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.jsonl"
        texts = [f"{name} text number {i} of many words" * 20 for i in range(200)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"source": str(path)})
    sections = {
        "data": {"order": "growing", "sources": sources},
        "optim": {"schedule_steps": 4},
        "eval": {"batches": 2},
        "checkpoint": {},
    }
    path = write_config("core", **sections)
    done = [
        launch(write_config("full", **sections), cwd=tmp_path),
        launch(path, "--train.steps=2", "--parallel.tp=2", nproc=2, cwd=tmp_path, repo=core),
        launch(path, "--train.steps=3", "--parallel.cp=2", nproc=2, cwd=tmp_path, repo=core),
        launch(path, cwd=tmp_path, repo=core),
        launch(path, "--eval-only", cwd=tmp_path, repo=core),
    ]
    assert [run.returncode for run in done] == [0] * 5, [run.stderr for run in done]
    expected = rows(tmp_path / "outputs/full")
    assert len(expected) == 4
    for row, other in zip(rows(tmp_path / "outputs/core"), expected, strict=True):
        for key in ("step", "loss", "grad_norm", "batch_digest"):
            assert row[key] == pytest.approx(other[key], rel=1e-5), key
    evaluated = json.loads(done[4].stdout.splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(rows(tmp_path / "outputs/full", "eval")[-1]["loss"])


def test_options_whose_extras_were_removed_are_refused(core, write_config):
    needed = {
        "parallel.float8=rowwise": "float8",
        "optim.name=muon": "optimizers",
        "profile.at_step=1": "profiler",
        "model.init_from=folder": "huggingface",
        "lora.rank=2": "lora",
        "data.chat_template=x.jinja": "chat",
    }
    done = launch(write_config(), *(f"--{option}" for option in needed), repo=core)
    assert done.returncode == 2
    for option, extra in needed.items():
        key = option.partition("=")[0].rpartition(".")[2]
        lines = [line for line in done.stderr.splitlines() if f"needs extras/{extra}," in line]
        assert len(lines) == 1 and key in lines[0], done.stderr


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
