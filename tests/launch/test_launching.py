"""The launcher: what it refuses, how many ranks it starts and with which environment, what it makes of their end."""

import json
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from launch import launch
from launch.ranks import Ranks, requeue
from run.watchdog import EXITED, RankOutcome
from system import lock, read_json
from tests.conftest import REPO, make_config, refuses
from tests.conftest import launch as launch_run

SLURM = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> Callable:
    """Sets variables, of a process that no launcher has started."""
    for name in os.environ:
        if name.startswith(("SLURM_", "PMI_", "OMPI_", "PET_")) or name in ("NPROC", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("system.DRIVERS", ())
    return lambda **variables: [monkeypatch.setenv(*item) for item in variables.items()]


# How many ranks, and where


@pytest.mark.quick
@pytest.mark.parametrize(
    "variables, ranks",
    [
        ({}, Ranks(1, 1, 0, "")),
        ({"NPROC": "4", "MAX_RESTARTS": "2"}, Ranks(1, 4, 2, "")),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "gpu:h100:4", "NPROC": "2"}, Ranks(2, 2, 3, "7")),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "gpu:h100:4"}, Ranks(2, 4, 3, "7")),
        ({"SLURM_NNODES": "2"}, Ranks(1, 1, 0, "")),  # left over: there is no job
        ({"WORLD_SIZE": "1", "PET_NNODES": "1:1", "PMI_SIZE": ""}, Ranks(1, 1, 0, "")),
    ],
)
def test_ranks_are_what_the_environment_says(environment, variables, ranks):
    environment(**variables)
    assert Ranks.from_environment() == ranks


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, value, words",
    [
        ("NPROC", "two", "must be a number, at least 1"),
        ("WORLD_SIZE", "2", "another launcher"),
        ("SLURM_STEP_NUM_TASKS", "2", "one of several"),  # srun --ntasks=2
    ],
)
def test_environment_that_makes_no_sense_is_refused(environment, name, value, words):
    environment(**{name: value})
    with refuses(f"{name}={value}", words):
        Ranks.from_environment()


@pytest.mark.quick
def test_command_of_one_rank_is_train_py_and_of_several_torchrun(environment, monkeypatch):
    assert Ranks(1, 1, 0, "").command("id")[1:] == [str(REPO / "train.py")]
    several = Ranks(1, 2, 0, "").command("id")
    assert "--nproc-per-node=2" in several and "--standalone" in several
    assert any("SIGTERM" in word and "SIGUSR2" in word for word in several)
    monkeypatch.setattr("shutil.which", lambda name: name)
    environment(SLURM_JOB_NODELIST="gpu[007-009,012],cpu1")
    nodes = Ranks(2, 1, 0, "7").command("id")
    assert nodes[0] == "srun" and "--nodes=2" in nodes
    assert "--rdzv-endpoint=gpu007:29507" in nodes and "--rdzv-id=id" in nodes
    # each node's torchrun announces its name in SLURM, not what its own name resolves to there
    environment(SLURMD_NODENAME="gpu008")
    task = nodes[nodes.index("bash") :]
    printing = [*task[: task.index("bash", 1) + 1], "bash", "-c", 'echo "$PET_LOCAL_ADDR"']
    assert subprocess.check_output(printing, text=True) == "gpu008\n"


@pytest.mark.quick
def test_ranks_share_the_cores_and_keep_what_the_user_has_set(environment, monkeypatch):
    monkeypatch.setattr("launch.ranks.usable_cores", lambda: 8)
    environment(MASTER_PORT="1", PET_MAX_RESTARTS="3", TRAINER_PARENT="1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    variables = Ranks(2, 3, 0, "").environment(pathlib.Path("outputs/test"), 5000.0)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5000"
    assert not {"MASTER_PORT", "PET_MAX_RESTARTS"} & variables.keys()  # torchrun would read them
    assert variables["TRAINER_PARENT"] == str(os.getpid())
    environment(OMP_NUM_THREADS="5", PYTORCH_CUDA_ALLOC_CONF="backend:native")
    environment(SLURM_CPUS_PER_TASK="64")
    variables = Ranks(1, 3, 0, "").environment(pathlib.Path("outputs/test"), 5000.0)
    assert variables["OMP_NUM_THREADS"] == "5"
    assert variables["PYTORCH_ALLOC_CONF"] == "backend:native"
    assert variables["SRUN_CPUS_PER_TASK"] == "64"


# What is refused before the ranks


def test_run_on_a_folder_of_another_run_is_refused(write_config, tmp_path):
    folder = tmp_path / "outputs/r"
    folder.mkdir(parents=True)
    held = lock(folder / ".lock")
    done = launch_run(write_config("r"))
    held.release()
    assert done.returncode == 2 and "another run works here" in done.stderr
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_finished_run_is_left_alone_and_says_so(write_config, tmp_path):
    path = write_config("r", checkpoint={}, train={"steps": 2})
    assert launch_run(path).returncode == 0
    folder = tmp_path / "outputs/r"
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    done = launch_run(path)
    assert done.returncode == 0 and "finished; train.steps = 2 asks for no more" in done.stdout
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    done = launch_run(path, "--checkpoint.resume=never")
    assert done.returncode == 2 and 'resume = "never"' in done.stderr


@pytest.mark.quick
def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses("output_dir", "must be a folder"):
        launch.check_folder(tmp_path / "file/r")


@pytest.mark.quick
def test_job_does_not_prepare_text_for_which_its_ranks_would_wait():
    pytest.importorskip("tools.prepare")
    with refuses("none is inside a job: ./run_train.sh -m prepare c.toml --run.seed=3 prepares it"):
        launch.prepare(make_config(), "7", ["c.toml", "--run.seed=3"])


# What the launcher makes of the ranks' end


def outcome_of(rank: int, text: str = "", **values: object) -> tuple[dict, str]:
    """A rank's error file: its first line, and the text below."""
    line = {"rank": rank, "step": 7, "phase": "step", "progress": 9, "time": 1.0, **values}
    return line, text


def ended(exit_code: int, text: str = "") -> list[tuple[dict, str]]:
    return [outcome_of(0, text, phase=EXITED, progress=99, exit_code=exit_code)]


def launch_of(
    folder: pathlib.Path, *attempts: tuple[list[tuple[dict, str]], int], restarts: int = 0
) -> tuple[int, dict]:
    """(exit code, status) of a launch whose ranks leave these error files and end so, in each attempt."""
    remaining = iter(attempts)

    def command(attempt: str) -> list[str]:
        files, code = next(remaining)
        for line, text in files:
            path = folder / f"r/.attempt-{attempt}/error-{line['rank']}"
            path.write_text(f"{json.dumps(line)}\n{text}")
        return ["bash", "-c", f"exit {code}" if code >= 0 else f"kill {code} $$"]

    ranks: Any = mock.Mock(nodes=1, restarts=restarts, command=command)
    ranks.environment.return_value = dict(os.environ)
    cfg = make_config(run={"name": "r", "output_dir": str(folder)}, checkpoint={"resume": 7})
    code = launch.Supervisor(cfg, ranks, []).train()
    return code, read_json(folder / "r/status.json")


KILLED = [outcome_of(0), outcome_of(1, "killed by SIGKILL")], 137
FIRST = "failed first on rank 1, step 7, phase step:\n"
TIMEOUT = "Timeout (0:00:06)!\nThread 0x1\n"
CLOSED = outcome_of(0, "closed")
# error files, exit code of the ranks, exit code of the launch, what it prints last
ENDS = [
    (ended(0), 0, 0, ""),
    (ended(75), 0, 75, ""),
    (ended(0, TIMEOUT), 1, 0, ""),  # it ended well, whatever torch did afterwards
    ([outcome_of(1, "wrong", exit_code=2), outcome_of(0)], 1, 2, f"{FIRST}wrong"),
    # the least progress, then the earliest
    ([CLOSED, outcome_of(1, "cause", progress=8), outcome_of(2, "x")], 1, 1, f"{FIRST}cause"),
    ([outcome_of(0, "closed", time=2.0), outcome_of(1, "cause")], 1, 1, f"{FIRST}cause"),
    # who exceeds a timeout waits for who is silent
    ([outcome_of(0, TIMEOUT), outcome_of(1)], 1, 1, "killed, stopped, or unable to answer"),
    ([], -9, 137, "the ranks ended with exit code 137: is the host out of memory?"),
    # before they took the folder
    ([outcome_of(0, "no GPU", phase="start", exit_code=2)], 1, 2, "phase start:\nno GPU"),
    ([outcome_of(0, phase="start")], -15, 75, "stopped before the run began"),
]


@pytest.mark.parametrize(("files", "returned", "code", "last"), ENDS)
def test_exit_code_is_that_of_the_root_cause_and_it_comes_last(
    tmp_path, capsys, files, returned, code, last
):
    found, status = launch_of(tmp_path, (files, returned))
    assert found == code
    assert capsys.readouterr().err.rstrip().endswith(last)
    if code in (0, 75) or "no GPU" in last:
        assert status == {} and not (tmp_path / "r").exists()  # the ranks write it, or nothing
    else:
        assert (status["state"], status["exit_code"]) == ("failed", code)


@pytest.mark.parametrize("retryable", [True, False])
def test_what_a_restart_may_help_is_started_again(tmp_path, retryable):
    """From the newest checkpoint: `resume = 7` counted in the first attempt."""
    failed = [outcome_of(0, "out of memory", exit_code=1, retryable=retryable)], 1
    code, _ = launch_of(tmp_path, failed, KILLED, (ended(0), 0), restarts=2)
    assert code == (0 if retryable else 1)


# SIGUSR1 (10) is SLURM's warning of the time limit, SIGTERM (15) scancel's
REQUEUES = [  # signal, steps trained, what scontrol shows, line, is the job requeued
    (10, 3, "", "requeued", True),
    (10, 0, "", "no step was trained", False),
    (15, 3, "PreemptTime=None", "submit it again", False),
    (15, 3, "PreemptTime=2026-01-01T00:00:00", "requeued", True),
]


@pytest.mark.quick
@pytest.mark.parametrize(("signal", "trained", "shown", "line", "requeues"), REQUEUES)
def test_job_is_requeued_ahead_of_its_limit_and_when_preempted(
    monkeypatch, capsys, signal, trained, shown, line, requeues
):
    scontrol = mock.Mock(return_value=(0, shown))
    monkeypatch.setattr(subprocess, "getstatusoutput", scontrol)
    values, _ = outcome_of(0, step=4 + trained, start=4, signal=signal)
    requeue("7", RankOutcome(**values))
    printed = capsys.readouterr().err.replace("unless SLURM requeues it, ", "")
    assert f"job 7 stopped; {line}" in printed
    assert (mock.call("scontrol requeue 7") in scontrol.mock_calls) == requeues
