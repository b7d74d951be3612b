"""Without its optional rooms (tests/rooms.py) the repository trains, resumes and evaluates as before, says in one line
which file an option needs, and its tests pass. benchmarks/rooms.py runs all tests without each room, and without all.
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import tomli

from tests.conftest import REPO, launch, rows
from tests.rooms import OPTIONAL, copy_tracked, needed, signs_of


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> pathlib.Path:
    """A copy without all optional rooms."""
    return copy_tracked(tmp_path_factory.mktemp("rooms") / "core", without=OPTIONAL)


def test_the_core_trains_resumes_and_evaluates_as_the_whole_does(core, write_config, tmp_path):
    """Two ranks up to step 2, one from there; against one rank, straight, with all rooms."""
    sections = {"optim": {"schedule_steps": 4}, "eval": {"batches": 2}, "checkpoint": {}}
    whole, ours = (write_config(name, **sections) for name in ("whole", "ours"))
    done = [
        launch(whole),
        launch(ours, "--train.steps=2", nproc=2, repo=core),
        launch(ours, repo=core),
        launch(ours, "--eval-only", repo=core),
    ]
    assert [run.returncode for run in done] == [0] * 4, [run.stderr for run in done]
    assert "resuming after step 2" in done[2].stdout
    wanted, found = rows(tmp_path / "outputs/whole"), rows(tmp_path / "outputs/ours")
    assert [row["batch_digest"] for row in found] == [row["batch_digest"] for row in wanted]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in wanted], rel=1e-5)
    (last,) = rows(tmp_path / "outputs/whole", "eval")
    assert json.loads(done[3].stdout.splitlines()[-1])["loss"] == pytest.approx(
        last["loss"], rel=1e-5
    )


@pytest.mark.parametrize(
    "options, room",
    [
        (["--parallel.tp=2"], "parallel/tensor.py"),
        (["--parallel.cp=2"], "parallel/context.py"),
        (["--parallel.float8=rowwise"], "extras/float8/matmul.py"),
        (["--dry-run"], "planner"),
        (["--parallel.replicated=['embedding*']"], "parallel/replicated.py"),
        (["--parallel.recompute=selective"], "parallel/selective.py"),
        (["--parallel.recompute=elementwise"], "parallel/matmul_order.py"),
        (["--checkpoint.async_save=true"], "checkpoint/staging.py"),
        (["--optim.name=muon"], "extras/optimizers/muon.py"),
        (["--data.sources=[{source = 'a.txt'}]"], "data/mixture.py"),
        (["--profile.at_step=1", "--profile.steps=1"], "extras/reports/profiler.py"),
        (["--model.init_from=folder"], "huggingface"),
        (["--lora.rank=2", "--model.init_from=folder"], "extras/lora/adapters.py"),
        (["--lora.base_dtype=nf4", "--model.init_from=folder"], "extras/lora/nf4.py"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_an_option_whose_room_was_removed_is_refused(core, write_config, options, room):
    done = launch(write_config(), *options, repo=core)
    (line,) = [line for line in done.stderr.splitlines() if signs_of(room).search(line)]
    assert done.returncode == 2 and options[0][2:].split("=")[0].split(".")[-1] in line, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option, name, room",
    [
        ("source", "a.parquet", "data/arrow.py"),
        ("tokenizer", "tokenizer.json", "data/tokenizer_json.py"),
    ],
)
def test_a_file_whose_room_was_removed_is_refused(core, write_config, tmp_path, option, name, room):
    (tmp_path / name).write_text("{}")
    done = launch(
        write_config(data={"path": str(tmp_path / "p"), option: str(tmp_path / name)}), repo=core
    )
    assert done.returncode == 2 and signs_of(room).search(done.stderr), done.stderr
    assert name in done.stderr and "Traceback" not in done.stderr


def test_a_slurm_job_without_its_room_is_refused(core, write_config):
    done = launch(write_config(), repo=core, SLURM_JOB_ID="7")
    assert done.returncode == 2 and signs_of("launch/slurm.py").search(done.stderr), done.stderr
    assert "SLURM_JOB_ID=7" in done.stderr and "Traceback" not in done.stderr


def test_what_is_left_tests_itself(core):
    """Every test file can be collected, and some that take little time pass; the rest is benchmarks/rooms.py's."""
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "."], cwd=core, capture_output=True, text=True
    )
    assert ruff.returncode == 0, ruff.stdout
    words = ["-p", "no:cacheprovider", "-m", "not slow", "-k", "test_loader or test_optim"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=core,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"not in this copy: {', '.join(OPTIONAL)}. " in done.stdout
    passed, skipped, others = (
        int(re.search(rf"(\d+) {what}", done.stdout)[1])
        for what in ("passed", "skipped", "deselected")
    )
    # a file that needs a removed room counts as one skipped
    assert passed > 50 and 0 < skipped < 60 and others > 500


def test_the_linter_takes_no_removed_room_for_a_package():
    settings = tomli.loads((REPO / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["isort"]
    assert settings["known-first-party"] == sorted(
        {room.split("/")[0].removesuffix(".py") for room in OPTIONAL}
    )


def test_a_failure_for_another_reason_stays_one(monkeypatch):
    monkeypatch.setattr(
        "tests.rooms.missing",
        lambda: ("extras/lora/nf4.py", "planner", "generate.py", "minimal.py"),
    )
    assert (
        needed(
            "test.toml: [lora] base_dtype = nf4: needs extras/lora/nf4.py, which this copy of the repository does not "
            "have"
        )
        == "extras/lora/nf4.py"
    )
    assert (
        needed(
            "[parallel] tp = 2: needs parallel/tensor.py and extras/lora/nf4.py and c.py, which this copy of the "
            "repository does not have"
        )
        == "extras/lora/nf4.py"
    )
    for error in (
        "No module named 'planner'",
        "ModuleNotFoundError: No module named 'extras.planner.show'",
    ):
        assert needed(error) == "planner"
    assert needed("python: No module named generate") == "generate.py"
    assert (
        needed("cannot import name 'nf4' from 'model' (/repo/model/__init__.py)")
        == "extras/lora/nf4.py"
    )
    assert (
        needed("python: can't open file '/repo/minimal.py': [Errno 2] No such file or directory")
        == "minimal.py"
    )
    for error in (
        "No module named 'torchao'",
        "No module named 'planners'",
        "planner: 3 != 4",
        "extras/lora/nf4.py is wrong",
        "needs extras/lora/adapters.py, which this copy of the repository does not have",
        "no such file: /minimal.py",
    ):
        assert needed(error) is None, error
