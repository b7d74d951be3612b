"""What a run does when it is told to stop, and when something inside or around it fails."""

import errno
import io
import json
import logging
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch

import config
import files
from checkpoint import catalog
from checkpoint.compare import changes_since, describe_changes
from config import ConfigError
from launch.checks import check_compiler
from launch.command import Ranks, usable
from launch.interruption import Interruption
from launch.launch import exit_code, listen, mark_stopped, run_ranks
from launch.launch import launch as launch_here
from lifecycle import SIGNALS
from lifecycle.failure import Failure, failure_of
from lifecycle.folder import (
    check_folder,
    failures,
    lock,
    remove_traces,
    report_failure,
    resume_once,
    stop_file,
    sweep,
    write_config,
    write_status,
)
from lifecycle.gpus import visible_gpus
from lifecycle.run import Run
from lifecycle.stop import StopRequest, read_stop
from lifecycle.watchdog import Watchdog
from metrics import Rows
from tests.conftest import REPO, launch, make_config, needs_extra, rows
from tests.warm import warm_python

pytestmark = [pytest.mark.early, pytest.mark.slow]

FOREVER = {"train": {"steps": 100000}, "optim": {"schedule_steps": 100000}, "checkpoint": {}}
TIMEOUTS = {
    "start_timeout_seconds": 60.0,
    "step_timeout_seconds": 5.0,
    "save_timeout_seconds": 20.0,
}


def launch_faulty(
    fault: str,
    path: pathlib.Path,
    *arguments: str,
    nproc: int = 1,
    restarts: int = 0,
    in_job: bool = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """The launcher, as run_train.sh calls it, with tests/faulty.py for train.py."""
    program = (
        "import sys; from launch import command, launch; "
        "command.TRAIN = sys.argv.pop(1); asked = launch.Interruption(); launch.listen(asked); "
        "sys.exit(launch.launch(sys.argv[1:], asked))"
    )
    job = {"SLURM_JOB_ID": "1"} if in_job else {}
    return subprocess.run(
        [warm_python(), "-c", program, str(REPO / "tests/faulty.py"), str(path), *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        env={
            **os.environ,
            "FAULT": fault,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPO),
            "NPROC": str(nproc),
            "MAX_RESTARTS": str(restarts),
            **job,
            **env,
        },
    )


def status(folder: pathlib.Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def saved(folder: pathlib.Path) -> list[int]:
    return [step for step, _ in catalog.step_folders(folder / "checkpoints")]


def leftovers(folder: pathlib.Path) -> list[str]:
    return [
        p.name
        for p in folder.rglob("*")
        if re.match(r"\.stop-|\.failure-|\.step-|.*\.tmp$", p.name)
    ]


@pytest.fixture
def own_handlers():
    """What a test does to the signal handlers of this process is undone."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)}
    yield
    for number, old in before.items():
        signal.signal(number, old)


class Launched:
    """A run that goes on until it is told to stop, or the test ends."""

    all: ClassVar[list["Launched"]] = []

    def __init__(
        self, path: pathlib.Path, nproc: int = 1, python: str = sys.executable, **env: str
    ):
        self.folder = path.parent / "outputs" / path.stem
        # the tests may be under nohup
        self.process = subprocess.Popen(
            [REPO / "run_train.sh", path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPO,
            env={**os.environ, "PYTHON": python, "NPROC": str(nproc), **env},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self.path = path
        self.all.append(self)

    def processes(self, pattern: str) -> list[int]:
        """Of this run, by a part of the command line."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            # of the program that stands for a forked process (warm.py) the command begins at the third word; what comes
            # before "--launch" and the configuration is the process's own
            own = words[2:] if "-IS" in words[:2] else words
            if str(self.path) in words and any(re.search(pattern, word) for word in own[:3]):
                found.append(int(entry.parent.name))
        return found

    def wait_for(self, condition) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, (
                self.process.communicate()[0]
            )
            time.sleep(0.05)

    def trained_a_step(self) -> bool:
        metrics = self.folder / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def end(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=60)[0]
        assert not self.processes(r"train\.py"), "a rank outlived its launcher"
        return self.process.returncode, output


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    while Launched.all:
        Launched.all.pop().process.kill()  # what it started dies with it


@pytest.mark.parametrize(
    "whom, number, nproc",
    [
        ("launcher", signal.SIGTERM, 1),
        ("launcher", signal.SIGUSR1, 2),
        ("rank", signal.SIGINT, 2),
        ("torchrun", signal.SIGTERM, 2),
    ],
)
def test_a_signal_to_anyone_saves_and_stops_all(write_config, whom, number, nproc):
    run = Launched(
        write_config("stopped", **FOREVER), nproc, sys.executable if nproc == 1 else warm_python()
    )
    run.wait_for(run.trained_a_step)
    os.kill(
        {
            "launcher": lambda: run.process.pid,
            "rank": lambda: run.processes(r"/train\.py$")[-1],
            "torchrun": lambda: run.processes(r"from launch\.torchrun import main")[-1],
        }[whom](),
        number,
    )
    code, output = run.end()
    assert code == 75, output
    step = status(run.folder)["step"]
    assert status(run.folder)["state"] == "preempted" and saved(run.folder) == [step] and step >= 1
    assert f"stopped after step {step} by {number.name}; the same command resumes" in output
    assert not leftovers(run.folder) and "nothing will be saved" not in output
    assert [row["step"] for row in rows(run.folder)] == list(range(1, step + 1))
    if whom == "rank":
        words = [
            "--train.global_batch_size=4",
            '--checkpoint.allow_changed=["train.global_batch_size"]',
        ]
        done = launch(run.path, f"--train.steps={step + 2}", *words)
        assert done.returncode == 0 and f"resuming after step {step}" in done.stdout, (
            done.stdout + done.stderr
        )
        assert [row["step"] for row in rows(run.folder)] == list(range(1, step + 3))
        sequences = [8] * step + [4] * 2
        tokens = [32 * sum(sequences[:count]) for count in range(1, step + 3)]
        assert [row["tokens"] for row in rows(run.folder)] == tokens
        told = f"changed since step {step}: train.global_batch_size 8 -> 4; another run: --run.name"
        assert told in done.stdout
        options = (run.folder / "config.toml").read_text()
        assert options.startswith(f"# until step {step}: train.global_batch_size = 8\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_run_train_looks_for_a_python(write_config, tmp_path, number):
    """Not before bash has set its traps, nor while it becomes the launcher: what comes then ends it as SIGTERM does."""
    slow = tmp_path / "bin/python3"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ntouch {tmp_path}/asked\nsleep 1\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    run = Launched(
        write_config("earliest", **FOREVER), PYTHON="", PATH=f"{slow.parent}:{os.environ['PATH']}"
    )
    run.wait_for((tmp_path / "asked").exists)
    run.process.send_signal(number)
    code, output = run.end()
    assert (code, output) == (75, "stopped before the run began\n")


@pytest.mark.parametrize(
    "number, seconds", [(signal.SIGTERM, 0), (signal.SIGHUP, 0.1), (signal.SIGINT, 0.4)]
)
def test_a_signal_to_the_launcher_that_has_only_begun(write_config, number, seconds):
    """While its Python starts, then imports."""
    run = Launched(write_config("earliest", **FOREVER))
    command = pathlib.Path(f"/proc/{run.process.pid}/cmdline")

    def has_begun() -> bool:
        words = command.read_text().split("\0")
        return words[0] == sys.executable and "launch.launch" in words

    run.wait_for(has_begun)
    time.sleep(seconds)
    run.process.send_signal(number)
    code, output = run.end()
    assert code == 75 and "Traceback" not in output, output


def test_a_signal_to_a_rank_that_has_only_begun(write_config):
    run = Launched(write_config("begun", **FOREVER), 1)
    run.wait_for(lambda: run.processes(r"/train\.py$"))
    os.kill(run.processes(r"/train\.py$")[-1], signal.SIGTERM)
    code, output = run.end()
    assert (
        code == 75 and status(run.folder)["state"] == "preempted" and "Traceback" not in output
    ), output


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_before_the_first_step(write_config, nproc):
    """To a launcher that loads what it needs, and to one whose ranks start."""
    run = Launched(
        write_config("early", **FOREVER), nproc, sys.executable if nproc == 1 else warm_python()
    )
    if nproc == 1:
        time.sleep(0.3)
    else:
        run.wait_for(lambda: run.processes(r"/train\.py$"))
    run.process.terminate()
    code, output = run.end()
    step = status(run.folder)["step"]
    assert (
        code == 75 and status(run.folder)["state"] == "preempted" and "Traceback" not in output
    ), output
    assert saved(run.folder) == ([step] if step else [])  # a slow test may come too late


@pytest.mark.parametrize("nproc, is_taken", [(1, False), (2, True)])
def test_a_folder_that_is_removed_is_made_anew_unless_another_run_has_it(
    write_config, nproc, is_taken
):
    checkpoint = {"save_every_steps": 100, "keep_last": 1}
    run = Launched(write_config(**{**FOREVER, "checkpoint": checkpoint}), nproc)
    run.wait_for(run.trained_a_step)
    shutil.rmtree(run.folder)
    if is_taken:
        run.folder.mkdir()
        held = lock(run.folder)
        write_status(run.folder, "running", 0, "another")
        code, output = run.end()
        held.release()
        assert code == 2
        assert "another run works here" in output
        assert status(run.folder)["launch"] == "another"
        assert not (run.folder / "checkpoints").exists()
        return
    run.wait_for(lambda: (run.folder / "checkpoints").exists() and saved(run.folder))
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 75
    assert "was removed while this run works in it" in output


def test_ctrl_c_twice_quits_at_once(write_config):
    run = Launched(write_config("twice", **FOREVER), 2)
    run.wait_for(run.trained_a_step)
    os.kill(run.process.pid, signal.SIGSTOP)  # so that both wait for it
    os.kill(run.process.pid, signal.SIGCONT)
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.kill(run.process.pid, signal.SIGINT)
    code, output = run.end()
    assert code in (130, 75), output  # 75: the first was quicker
    assert status(run.folder)["state"] == ("failed" if code == 130 else "preempted")


def test_nothing_outlives_a_killed_launcher(write_config):
    run = Launched(write_config("orphans", **FOREVER), 2)
    run.wait_for(run.trained_a_step)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    end = time.monotonic() + 5
    while run.processes(r"train\.py") and time.monotonic() < end:
        time.sleep(0.05)
    assert not run.processes(r"train\.py")
    done = launch(run.path, "--train.steps=1", "--optim.schedule_steps=1", "--optim.warmup_steps=0")
    assert done.returncode == 0 and not leftovers(run.folder), done.stderr


@pytest.mark.parametrize(
    "fault, last",
    [("term after check:1:3", 3), ("term in data:1:3", 3), ("term in forward:0:1", 1)],
)
def test_all_ranks_stop_at_the_same_step(write_config, tmp_path, fault, last):
    """The signal comes to one rank just after it was asked (so that the next step asks again), while it waits for data,
    and in the first step."""
    path = write_config("agree", **FOREVER)
    done = launch_faulty(fault, path, nproc=2)
    assert done.returncode == 75, done.stdout + done.stderr
    folder = tmp_path / "outputs/agree"
    assert saved(folder) == [status(folder)["step"]] and last <= status(folder)["step"] <= last + 1


def test_a_signal_during_a_save_and_during_evaluation(write_config, tmp_path):
    path = write_config(
        "busy",
        train={"steps": 9},
        checkpoint={"save_every_steps": 2, "async_save": True},
        eval={"every_steps": 8},
    )
    folder = tmp_path / "outputs/busy"
    done = launch_faulty("term in save:0:1", path)
    stopped = status(folder)["step"]
    # the steps go on while step 2 is written; how many, the machine says
    due = {*range(2, stopped, 2), stopped}
    assert done.returncode == 75 and saved(folder) == sorted(due), done.stdout + done.stderr
    assert stopped < 7
    # a stop during an evaluation is followed by a save, which nothing else asks for: four micro-batches a step until 7
    done = launch_faulty(f"term in forward:0:{(7 - stopped) * 4 + 1}", path, "--eval.every_steps=7")
    assert done.returncode == 75 and saved(folder)[-1] == 7 and not rows(folder, "eval"), (
        done.stdout + done.stderr
    )
    # and so is one during the last, after that of step 7 and two more steps; it is made when the run goes on
    done = launch_faulty("term in forward:0:13", path, "--eval.every_steps=7", "--eval.batches=1")
    assert done.returncode == 75 and saved(folder)[-1] == 9, done.stdout + done.stderr
    assert [row["step"] for row in rows(folder, "eval")] == [7]
    assert launch(path, "--eval.every_steps=7").returncode == 0
    assert [row["step"] for row in rows(folder, "eval")] == [7, 9] and status(folder)[
        "state"
    ] == "finished"


def test_stopping_without_checkpoints_is_no_success(write_config, tmp_path):
    done = launch_faulty("term in data:0:2", write_config("lost", train={"steps": 9}))
    folder = tmp_path / "outputs/lost"
    assert done.returncode == status(folder)["exit_code"] == 128 + signal.SIGTERM
    last = rows(folder)[-1]["step"]
    told = (
        f"stopped after step {last} by signal {signal.SIGTERM:d}; without [checkpoint] nothing was"
    )
    assert told in done.stderr and status(folder)["state"] == "failed"
    assert "has no [checkpoint]; --checkpoint.save_every_steps=100 adds one" in done.stdout


def test_a_job_that_makes_no_step_does_not_requeue_for_ever(write_config, tmp_path):
    path, folder = write_config("idle", **FOREVER), tmp_path / "outputs/idle"

    def life(fault: str) -> subprocess.CompletedProcess:
        return launch_faulty(fault, path, in_job=True)

    assert (
        life("term before step 1:0:1").returncode == 75
        and status(folder)["attempts_without_step"] == 1
    )
    write_status(folder, "preempted", status(folder)["step"], None, attempts_without_step=2)
    assert (
        life("term in data:0:1").returncode == 75 and status(folder)["attempts_without_step"] == 0
    )
    write_status(folder, "preempted", status(folder)["step"], None, attempts_without_step=2)
    done = life("term before step 1:0:1")
    assert (
        done.returncode == 1
        and "3 times in a row the job was stopped before it made a step" in done.stderr
    )
    assert status(folder)["state"] == "failed"


@pytest.mark.quick
@pytest.mark.parametrize(
    "before, code, after",
    [
        ({}, 75, "preempted"),
        ({"attempts_without_step": 1}, 75, "preempted"),
        ({"attempts_without_step": 2}, 1, "failed"),
        ({"state": "finished"}, 75, "finished"),
    ],
)
def test_nor_does_one_that_is_stopped_before_its_ranks(
    write_config, monkeypatch, own_handlers, capsys, before, code, after
):
    path, interruption = write_config("idle", **FOREVER), Interruption()
    folder = path.parent / "outputs/idle"
    folder.mkdir(parents=True)
    write_status(folder, **{"state": "preempted", "step": 4, "launch": None, **before})
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    interruption(signal.SIGUSR1)
    assert launch_here([str(path)], interruption) == code and status(folder)["state"] == after
    requeued = "run_train.sh: job 1: stopped, ahead of its time limit; requeueing it, to resume"
    assert (requeued in capsys.readouterr().err) == (code == 75)
    counted = before.get("attempts_without_step", 0) + 1
    assert after == "finished" or (
        status(folder)["attempts_without_step"],
        status(folder)["step"],
    ) == (counted, 4)


# Failures inside


@pytest.mark.parametrize(
    "fault, told",
    [
        (
            "hang in data:1:3",
            r"failed first on rank 1, step 3, phase data:(?s:.*)time\.sleep(?s:.*)no progress for \d+ s",
        ),
        (
            "frozen in data:1:3",
            r"failed first on rank 1, step 3, phase data:\n(?s:.*)Thread 0x(?s:.*) in freeze\n"
            r"(?s:.*)holds Python's lock",
        ),
        (
            "error in data:1:2",
            r"failed first on rank 1, step 2, phase data:(?s:.*)RuntimeError: the disk is gone\n\Z",
        ),
        (
            "infinite loss:1:3",
            r"failed first on rank \d, step 3, phase step:\nstep 2: the gradient is not finite",
        ),
    ],
)
def test_a_failure_on_one_rank_ends_all_with_the_first_cause_last(
    write_config, tmp_path, fault, told
):
    path = write_config("fails", **FOREVER, run=TIMEOUTS)
    done = launch_faulty(fault, path, nproc=2)
    assert done.returncode == 1 and re.search(told, done.stderr), done.stderr
    folder = tmp_path / "outputs/fails"
    assert status(folder)["state"] == "failed" and not leftovers(folder) and not saved(folder)
    logged = (
        r"now: rank 1, step 3, phase data(?s:.*) in freeze\n"
        if "frozen" in fault
        else r"\d rank 1, step \d, ph"
    )
    assert re.search(logged, (folder / "logs/rank-1.log").read_text())


def test_a_save_under_way_outlives_a_failure(write_config, tmp_path):
    """Rank 1 hangs while step 2 is being written behind the training: the step's limit ends both ranks, after it."""
    path = write_config(
        "outlive",
        **{**FOREVER, "checkpoint": {"save_every_steps": 2, "async_save": True}},
        run={**TIMEOUTS, "step_timeout_seconds": 3.0},
    )
    done = launch_faulty("slow save and hang:1:3", path, nproc=2)
    assert done.returncode == 1 and "failed first on rank 1, step 3, phase data" in done.stderr, (
        done.stderr
    )
    assert saved(tmp_path / "outputs/outlive") == [2] and not leftovers(
        tmp_path / "outputs/outlive"
    )


@pytest.mark.parametrize("fault", ["hang in teardown:1", "hang at exit:1"])
def test_a_finished_rank_that_does_not_end_is_ended(write_config, tmp_path, fault):
    """As by a barrier, or by compile workers, that wait for ever; the run is finished all the same."""
    path = write_config("ends", train={"steps": 2})
    began = time.monotonic()
    done = launch_faulty(fault, path, nproc=2)
    assert done.returncode == 0 and time.monotonic() - began < 60, done.stderr
    assert status(tmp_path / "outputs/ends")["state"] == "finished"
    log = (tmp_path / "outputs/ends/logs/rank-1.log").read_text()
    assert "rank 1: is done, but did not end: " in log


@pytest.mark.quick
def test_a_killed_rank_is_named(write_config):
    done = launch_faulty("killed:1:3", write_config("killed", **FOREVER), nproc=2)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"no report from rank 1: killed.*\nfailed first on rank 0, step 3, phase step", done.stderr
    )


def test_a_restart_by_torchrun_goes_on(write_config, tmp_path):
    path = write_config("again", train={"steps": 8}, checkpoint={"save_every_steps": 2})
    done = launch_faulty("killed once:1:6", path, nproc=2, restarts=1, ONCE=str(tmp_path / "once"))
    assert done.returncode == 0 and "resuming after step 4" in done.stdout, (
        done.stdout + done.stderr
    )
    assert [row["step"] for row in rows(tmp_path / "outputs/again")] == list(range(1, 9))
    assert not leftovers(tmp_path / "outputs/again")


def test_going_back_to_a_checkpoint_is_done_once(write_config, tmp_path):
    """Neither the ranks that torchrun restarts nor a job that SLURM requeues go back again."""
    path = write_config("back", train={"steps": 8}, checkpoint={"save_every_steps": 2})
    folder, back = tmp_path / "outputs/back", "--checkpoint.resume=2"
    assert launch_faulty("none", path).returncode == 0
    done = launch_faulty(
        "killed once:1:4", path, back, nproc=2, restarts=1, ONCE=str(tmp_path / "once")
    )
    assert done.returncode == 0 and "resuming after step 4" in done.stdout, (
        done.stdout + done.stderr
    )
    assert saved(folder) == [2, 4, 6, 8] and [row["step"] for row in rows(folder)] == list(
        range(1, 9)
    )
    done = launch_faulty("term in data:0:2", path, back, in_job=True)
    assert done.returncode == 75 and saved(folder)[-1] == 5
    assert "to resume, type the same command with --checkpoint.resume=auto" in done.stdout
    # it made steps, though the run had been at step 8 before
    assert status(folder)["attempts_without_step"] == 0
    done = launch_faulty("none", path, back, in_job=True, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0 and "resuming after step 5" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_late_out_of_memory_is_tried_again(write_config, tmp_path):
    """Two micro-batches a step: in step 4, after a save. The first step's is final: below."""
    path = write_config("later", train={"steps": 6}, checkpoint={"save_every_steps": 2})
    done = launch_faulty(
        "out of memory once:1:7", path, nproc=2, restarts=1, ONCE=str(tmp_path / "once")
    )
    assert done.returncode == 0 and "resuming after step 2" in done.stdout, (
        done.stdout + done.stderr
    )


def test_what_starting_again_cannot_help_is_not_tried_again(write_config):
    path = write_config("hopeless", **{**FOREVER, "checkpoint": {"save_every_steps": 1}})
    done = launch_faulty("infinite loss:0:2", path, nproc=2, restarts=2)
    assert done.returncode == 1 and done.stdout.count("from fresh weights") == 1, (
        done.stdout + done.stderr
    )
    assert saved(path.parent / "outputs/hopeless") == []  # though one was due after that step


def test_out_of_memory_says_what_to_change(write_config):
    done = launch_faulty("out of memory:0:2", write_config("large", **FOREVER), restarts=1)
    assert done.stdout.count("from fresh weights") == 1, done.stdout  # a restart would not help
    told = r"phase first step:\nout of memory: Tried to allocate 9 GiB\.\n"
    if config.has_extra("planner"):
        told += (
            r"to need less, try one of: --train\.micro_batch_size=1 --parallel\.recompute=\w+ .*, or more ranks\n"
            r"what each would need, and how fast it would be: \./run_train\.sh .*/large\.toml --dry-run "
        )
    assert done.returncode == 1 and re.search(told, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("behind, nproc", [(False, 2), (True, 1)])
def test_weights_that_overflow_are_not_saved(write_config, tmp_path, behind, nproc):
    path = write_config(
        "overflow", **{**FOREVER, "checkpoint": {"save_every_steps": 1, "async_save": behind}}
    )
    overflowing = ["--optim.lr=3e38", "--optim.warmup_steps=0", "--optim.weight_decay=1.2"]
    done = launch_faulty("none", path, *overflowing, nproc=nproc)
    assert done.returncode == 1 and "Traceback" not in done.stderr.split("failed first")[1], (
        done.stderr
    )
    # behind the training, the next step's gradient may tell first
    told = "not finite" if behind else "weights that are not finite"
    assert told in done.stderr.splitlines()[-1] and not saved(tmp_path / "outputs/overflow")


def test_skipped_steps_are_counted_in_the_checkpoint(write_config, tmp_path):
    path = write_config(
        "skips", train={"steps": 6, "skip_nonfinite": 1}, checkpoint={"save_every_steps": 3}
    )
    done = launch_faulty("infinite loss:1:6", path, nproc=2)  # two micro-batches a step: the third
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs/skips"
    states = [catalog.read_state(folder / f"checkpoints/step-{step:08d}") for step in (3, 6)]
    assert [(s["skipped_steps"], s["skipped_in_a_row"]) for s in states] == [(1, 1), (1, 0)]
    assert rows(folder)[2]["loss"] is None and rows(folder)[3]["loss"] < 10


def test_steps_skipped_in_a_row_are_counted_across_launches(write_config, tmp_path):
    """One may be skipped: the last of the first launch and the first of the second are two."""
    path = write_config(
        "row",
        train={"steps": 9, "skip_nonfinite": 1},
        optim={"schedule_steps": 9},
        checkpoint={"save_every_steps": 2},
    )
    # four micro-batches a step
    assert launch_faulty("infinite loss:0:8", path, "--train.steps=2").returncode == 0
    # which is no step: it stands where it stood
    stopped = launch_faulty("term before step 1:0:1", path)
    assert stopped.returncode == 75 and status(tmp_path / "outputs/row")["step"] == 2, (
        stopped.stderr
    )
    done = launch_faulty("infinite loss:0:1", path)
    assert (
        done.returncode == 1
        and "step 3: the gradient is not finite" in done.stderr.splitlines()[-1]
    ), done.stderr
    assert saved(tmp_path / "outputs/row") == [2]


def test_an_error_that_a_person_can_mend_is_printed_once(write_config, tmp_path):
    """A parameter without initial values, on two ranks."""
    done = launch_faulty("forgotten parameter", write_config("forgot", **FOREVER), nproc=2)
    printed = done.stdout + done.stderr
    assert done.returncode == 2 and printed.count("nothing declares its initial") == 1, printed
    assert (
        "blocks.0.gate: nothing" in done.stderr.splitlines()[-1]
        and "Traceback (most" not in printed
    ), printed
    assert not (tmp_path / "outputs/forgot").exists()


@pytest.mark.parametrize(
    "fault, told",
    [
        (
            "another rate:1",
            "rank 1 has optim.lr = 1.0, rank 0 0.003: all nodes need the same configuration",
        ),
        (
            "another mesh:1",
            "rank 1 has parallel.tp = 2, rank 0 1: all nodes need the same configuration",
        ),
    ],
)
def test_a_node_with_other_options_is_refused(write_config, tmp_path, fault, told):
    """Each would train its shards in its own way, and the losses would look as good as ever."""
    done = launch_faulty(fault, write_config("other", **FOREVER), nproc=2)
    printed = done.stdout + done.stderr
    assert done.returncode == 2 and printed.count(told) == 1 and "Traceback (most" not in printed, (
        printed
    )
    assert not (tmp_path / "outputs/other").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_reader_that_is_gone_stops_nothing(write_config, number):
    """As `2>&1 | tee log` after the same Ctrl-C, or a closed terminal."""
    run = Launched(write_config("unread", **FOREVER), python=warm_python())
    run.wait_for(run.trained_a_step)
    run.process.stdout.close()
    run.process.send_signal(number)
    assert run.process.wait(timeout=60) == 75
    assert status(run.folder)["state"] == "preempted" and saved(run.folder) == [
        status(run.folder)["step"]
    ]


def test_an_evaluation_without_the_launcher_needs_a_checkpoint_too(write_config, tmp_path):
    done = subprocess.run(
        [warm_python(), str(REPO / "train.py"), str(write_config("none")), "--eval-only"],
        cwd=REPO,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=100,
    )
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path}/outputs/none/checkpoints: holds no checkpoint to evaluate\n"


def test_ranks_need_no_output(write_config, tmp_path):
    """Of a daemon's, which has neither; torchrun could not redirect its ranks' to anything. They get some."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nfor n in 1 2; do [[ -e /proc/$$/fd/$n ]] || exit 9; done\nexec {warm_python()} "$@"\n'
    )
    python.chmod(0o755)
    command = [
        "bash",
        "-c",
        'exec "$@" >&- 2>&-',
        "bash",
        REPO / "run_train.sh",
        write_config("silent"),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": str(python), "NPROC": "2"}, timeout=300
    )
    assert done.returncode == 0 and status(tmp_path / "outputs/silent")["state"] == "finished"


@pytest.mark.parametrize(
    "option", [pytest.param("--dry-run", marks=needs_extra("planner")), "--eval-only"]
)
def test_ctrl_c_ends_what_has_nothing_to_save_in_silence(option):
    """While it loads torch, by when it has long been listening."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "train.py", "configs/tiny.toml", option],
        cwd=REPO,
        stderr=subprocess.PIPE,
        text=True,  # a shell's background job ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if line.rstrip().endswith("torch.version"):
            break
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGINT and "Traceback" not in told


def test_neither_ctrl_c_nor_invalid_input_ends_a_tool_with_a_traceback(capsys):
    for raised, code in ((KeyboardInterrupt, 130), (ConfigError("one", "two"), 2), (None, 7)):
        with pytest.raises(SystemExit) as ended:
            config.run_tool(mock.Mock(side_effect=raised, return_value=7))
        assert ended.value.code == code
    assert capsys.readouterr().err == "one\ntwo\n"


def test_a_reader_may_leave(monkeypatch):
    end, begin = os.pipe()
    os.close(end)
    with os.fdopen(
        begin, "w"
    ) as stdout:  # closed without an error: what could not be printed is gone
        monkeypatch.setattr(sys, "stdout", stdout)
        files.print_line("a line")
        files.print_line("and another")


# Disks


def test_a_write_error_on_one_rank_costs_that_checkpoint_alone(write_config, tmp_path):
    path = write_config("hurt", train={"steps": 6}, checkpoint={"save_every_steps": 2})
    done = launch_faulty("save error:1:2", path, nproc=2)
    folder = tmp_path / "outputs/hurt"
    assert done.returncode == 0 and saved(folder) == [2, 6] and not leftovers(folder), done.stderr
    assert re.search(
        r"not saved, training continues: .*step-00000004: rank 1: OSError: .*injected", done.stdout
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_checkpoint_must_be_saved(write_config, tmp_path, asynchronous):
    path = write_config(
        "end", train={"steps": 4}, checkpoint={"save_every_steps": 2, "async_save": asynchronous}
    )
    done = launch_faulty("save error:0:2", path)
    folder = tmp_path / "outputs/end"
    assert done.returncode == 1 and saved(folder) == [2] and not leftovers(folder), done.stderr
    assert re.search(r"the last checkpoint was not saved: .*injected", done.stderr.splitlines()[-1])
    assert status(folder) == {**status(folder), "state": "failed", "step": 2}


@pytest.mark.quick
def test_a_full_disk(write_config, tmp_path):
    """A file system with room for one checkpoint (0.6 MB), and nothing for logs beside a second."""
    mount = tmp_path / "outputs"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1900k", "tmpfs", mount], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        path = write_config(
            "full",
            train={"steps": 40},
            optim={"schedule_steps": 40},
            checkpoint={"save_every_steps": 10},
            log={"every_steps": 1, "tensorboard": True},
        )
        done = launch(path)
        folder = mount / "full"
        assert done.returncode == 1 and saved(folder) == [10] and not leftovers(folder), (
            done.stdout + done.stderr
        )
        assert re.search(
            r"step-00000020: rank 0: OSError: needs [\d.]+ MiB, [\d.]+ MiB are free", done.stdout
        )
        assert not catalog.problems_of(folder / "checkpoints/step-00000010")
        assert (
            "step 40/40" in done.stdout
            and "the last checkpoint was not saved" in done.stderr.splitlines()[-1]
        )
        subprocess.run(["mount", "-o", "remount,size=9m", mount], check=True)
        done = launch(path)
        assert done.returncode == 0 and "resuming after step 10" in done.stdout, (
            done.stdout + done.stderr
        )
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_files_beyond_a_size_fail_the_save_alone(write_config, tmp_path):
    """The error of a disk that fills up in the middle of a write, without the right to mount."""
    path = write_config("limit", train={"steps": 3}, checkpoint={})
    limits = (300_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = subprocess.run(
        [REPO / "run_train.sh", path],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHON": sys.executable, "NPROC": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )
    folder = tmp_path / "outputs/limit"
    assert done.returncode == 1 and saved(folder) == [] and not leftovers(folder), (
        done.stdout + done.stderr
    )
    last = done.stderr.splitlines()[-1]
    assert "the last checkpoint was not saved" in last and last.endswith(
        "rank 0: OSError: [Errno 27] File too large"
    )
    assert "Traceback" not in done.stderr


# Pieces


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys, number):
    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", without)
    files.warn_once.cache_clear()
    for times in (1, 0):  # the file is there at the second time, and the warning was printed
        lock(tmp_path).release()
        assert capsys.readouterr().err.count("no locks on this file system") == times


def test_a_disk_that_takes_no_lock_is_no_file_system_without_them(tmp_path, monkeypatch):
    for number in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr("os.open", mock.Mock(side_effect=OSError(number, "no")))
        with pytest.raises(OSError, match="no"):
            lock(tmp_path)


def test_a_lock_that_cannot_be_made_is_not_waited_for(tmp_path, capsys):
    for path, told in (
        (pathlib.Path("/proc/lock"), "No such file"),
        (tmp_path / ("x" * 300), "name too long"),
    ):
        with pytest.raises(OSError, match=told):
            files.lock(path, timeout=5)
    assert capsys.readouterr().err == ""


def test_a_lock_that_belongs_to_another_user_keeps_this_one_out(tmp_path, monkeypatch):
    def refused(path: object, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.open", refused)
    with pytest.raises(ConfigError, match=r"\.lock: cannot be opened; is this another user's run"):
        lock(tmp_path)


@pytest.mark.parametrize(
    "name, make",
    [
        ("checkpoints", pathlib.Path.touch),
        ("logs", pathlib.Path.touch),
        ("tensorboard", pathlib.Path.touch),
        ("metrics.jsonl", pathlib.Path.mkdir),
        ("status.json", pathlib.Path.mkdir),
        ("config.toml", pathlib.Path.mkdir),
        ("environment.json", pathlib.Path.mkdir),
    ],
)
def test_a_folder_with_something_else_in_a_place_is_refused(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}:? is a (file|folder); a run needs"):
        check_folder(tmp_path)


def test_a_folder_may_be_a_link_to_one_that_is_there(tmp_path):
    """As to a disk that is not mounted now: made anew, the run would begin again."""
    (tmp_path / "disk").mkdir()
    for link in (tmp_path / "runs", tmp_path / "r/checkpoints"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "disk")
        folder = tmp_path / "runs/r" if link.name == "runs" else tmp_path / "r"
        check_folder(folder)
        (tmp_path / "disk").rename(tmp_path / "away")
        told = rf"output_dir: {link} is a link to {tmp_path}/disk, which is not there$"
        with pytest.raises(ConfigError, match=told):
            check_folder(folder)
        (tmp_path / "away").rename(tmp_path / "disk")


def test_a_folder_that_another_run_has_is_refused_and_one_that_it_had_is_not_kept_locked(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(ConfigError, match="another run works here"):
        check_folder(tmp_path)
    held.release()
    check_folder(tmp_path)
    lock(tmp_path).release()
    check_folder(tmp_path / "nothing/yet")
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_cannot_be_had_is_refused(tmp_path, write_config, monkeypatch, capsys):
    path, interruption = write_config("r"), Interruption()
    for output_dir, told in (
        ("x" * 300, "File name too long"),
        ("/proc/outputs", "/r cannot be made: "),
    ):
        assert launch_here([str(path), f"--run.output_dir={output_dir}"], interruption) == 2
        printed = capsys.readouterr().err
        assert told in printed and printed.count("\n") == 1, printed
    monkeypatch.setattr("os.access", lambda path, mode: pathlib.Path(path) != tmp_path)
    (tmp_path / "other").mkdir()
    check_folder(tmp_path / "other/r")
    with pytest.raises(ConfigError, match=rf"\[run\] output_dir: {tmp_path} cannot be written to"):
        check_folder(tmp_path / "r")


@pytest.mark.quick
def test_a_finished_run_needs_no_writable_folder(write_config, monkeypatch, capsys):
    """As one that was made read-only to keep it."""
    path = write_config("kept", train={"steps": 2}, checkpoint={})
    assert launch(path).returncode == 0
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK | os.X_OK)
    # its batch divides over none of what is there now, which is no matter either
    monkeypatch.setenv("NPROC", "3")
    for words in [], ["--run.device=cuda"]:
        assert launch_here([str(path), *words], Interruption()) == 0
        assert (
            "kept: finished at step 2; train.steps = 2 asks for no more" in capsys.readouterr().out
        )
    # of fewer steps; an option that would not count any more is named
    words = ["--train.steps=1", "--optim.warmup_steps=0", "--optim.warmup_steps=1"]
    assert launch_here([str(path), *words], Interruption()) == 0
    printed = capsys.readouterr()
    assert printed.err == "--optim.warmup_steps is given 2 times; the last counts: 1\n"
    finished, changed = printed.out.splitlines()
    assert finished.endswith("kept: finished at step 2; train.steps = 1 asks for no more")
    assert (
        changed == "changed since step 2: optim.warmup_steps 2 -> 1; another run: --run.name=NAME"
    )
    monkeypatch.setenv("NPROC", "1")
    assert launch_here([str(path), "--train.steps=3"], Interruption()) == 2
    assert capsys.readouterr().err.endswith("outputs/kept cannot be written to\n")


def test_a_signal_while_a_format_is_looked_up_stops_the_launch(
    write_config, monkeypatch, capsys, own_handlers
):
    """As of a hub that does not answer."""

    def wait_for_the_hub(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("launch.launch.formats.complete", wait_for_the_hub)
    interruption = Interruption()
    listen(interruption)
    began = time.monotonic()
    assert launch_here([str(write_config("r"))], interruption) == 75
    assert time.monotonic() - began < 30
    assert capsys.readouterr().err == "stopped before the run began\n"


def test_an_evaluation_without_a_checkpoint_is_refused_and_ends_by_ctrl_c(
    write_config, monkeypatch, capsys, own_handlers
):
    path = str(write_config("r", checkpoint={}))
    assert launch_here([path, "--eval-only"], Interruption()) == 2
    assert "outputs/r/checkpoints: holds no checkpoint to evaluate" in capsys.readouterr().err
    for words, code in ((["--eval-only"], 130), ([], 75)):
        interruption = Interruption()
        interruption(signal.SIGINT)
        assert launch_here([path, *words], interruption) == code
    interruption = Interruption()
    interruption(signal.SIGINT)
    # wrong before the signal could end anything
    assert launch_here([path, "--train.steps=0"], interruption) == 2
    monkeypatch.setattr("launch.launch.check_launch", mock.Mock(side_effect=RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        launch_here([path], Interruption())


def test_the_lock_waits_as_long_as_it_is_told(tmp_path):
    held = lock(tmp_path)
    threading.Timer(0.5, held.release).start()
    held = lock(tmp_path, timeout=60)
    with pytest.raises(ConfigError, match="another run works here"):
        lock(tmp_path, timeout=0.3)
    held.release()


def test_the_first_failure_is_that_of_the_rank_that_got_least_far(tmp_path):
    for rank, progress in ((0, 8), (1, 7), (2, 8)):
        report_failure(tmp_path, "x", rank, progress=progress)
    (tmp_path / ".failure-x-3").write_text('{"rank": 3, "cut by a full di')
    assert [f["rank"] for f in failures(tmp_path, "x")] == [1, 0, 2] and failures(
        tmp_path, "y"
    ) == []


def test_reports_of_ranks_that_were_restarted_are_swept_away(tmp_path):
    for name in (".stop-x", ".stop-y", ".failure-x-0", ".failure-y-1"):
        (tmp_path / name).touch()
    sweep(tmp_path, "x")
    assert [path.name for path in tmp_path.iterdir()] == [".stop-x"]


def test_what_another_process_removes_first_is_no_error(tmp_path, monkeypatch):
    """The launcher and its ranks both remove what killed ones left."""
    gone = [tmp_path / ".failure-x-0", tmp_path / ".stop-y"]
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: gone)
    sweep(tmp_path, "x")
    remove_traces(tmp_path, "x")


@pytest.mark.parametrize("step, final", [(5, True), (6, False)])
def test_no_memory_for_a_launchs_first_step_is_final(tmp_path, monkeypatch, step, final):
    """A launch that resumed after step 5. A save under way is waited for, with the time of one, before it ends."""
    run = Run(
        make_config(run={"name": "r", "output_dir": str(tmp_path)}),
        SimpleNamespace(rank=0, size=1),
        "x",
        StopRequest(),
    )
    run.folder.mkdir()
    run.step, run.checkpointer = step, mock.MagicMock(start=5)
    run.watchdog = mock.MagicMock(step=step + 1, progress=1)
    run.watchdog.name = "first step"
    monkeypatch.setattr("lifecycle.run.log.handlers", [])
    with pytest.raises(SystemExit, match="1"):
        run.__exit__(
            torch.OutOfMemoryError, torch.OutOfMemoryError("Tried to allocate 9 GiB"), None
        )
    (report,) = failures(run.folder, "x")
    assert report["final"] is final and report["text"].startswith(
        "out of memory: Tried to allocate 9 GiB"
    )
    run.checkpointer.wait.assert_called_once_with()
    assert run.watchdog.phase.call_args == mock.call("save", run.timeouts["save"], None)


@pytest.mark.parametrize("content, number", [("", 0), ("10\n", 10), ("now", signal.SIGTERM)])
def test_what_a_stop_file_says(tmp_path, content, number):
    (tmp_path / "stop").write_text(content)
    assert read_stop(tmp_path / "stop") == number and read_stop(tmp_path / "none") == 0


def test_a_save_has_time_to_wait_for_another_and_to_verify_what_is_kept():
    cfg = make_config(run=TIMEOUTS, checkpoint={"keep_last": 3})
    for longest in TIMEOUTS:
        assert config.longest_timeout(make_config(run={**TIMEOUTS, longest: 9000.0})) > 9000
    timeouts = Run(cfg, None, None, StopRequest()).timeouts
    assert (
        timeouts["save"] == (1 + 1 + 3) * 20 and timeouts["restore"] == 20 and timeouts["step"] == 5
    )
    assert (
        Run(make_config(run=TIMEOUTS, checkpoint={}), None, None, StopRequest()).timeouts["save"]
        == (1 + 1) * 20
    )


def test_a_disk_that_is_full_as_a_run_begins_is_told_in_a_line_and_not_final(tmp_path, monkeypatch):
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("files.sync_handle", refuse)
    begin = {
        "status.json": lambda: write_status(tmp_path, "running", 0, None),
        "metrics.jsonl": lambda: Rows(tmp_path, config.Log(), 0),
    }
    for name, write in begin.items():
        with pytest.raises(OSError) as raised:
            write()
        failure = failure_of(raised.value, make_config(), 1, 0, True)
        assert failure == (1, f"{tmp_path / name}: No space left on device", False)


def test_a_failed_save_leaves_the_step_of_the_last_good_one(tmp_path):
    run = Run(
        make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={}),
        None,
        None,
        StopRequest(),
    )
    run.folder.mkdir()
    run.log_save(2, None)
    run.log_save(4, "no space")
    assert status(run.folder)["step"] == 2 and status(run.folder)["not_saved"] == "no space"
    run.log_save(6, None)
    assert status(run.folder)["step"] == 6 and "not_saved" not in status(run.folder)


@pytest.mark.parametrize(
    ("launch_id", "number", "code"),
    [(None, signal.SIGTERM, 75), ("x", signal.SIGTERM, 0), (None, 0, 0)],
)
def test_a_stop_that_no_launcher_of_ours_reads_is_no_success(
    tmp_path, monkeypatch, launch_id, number, code
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "others")  # torchrun's
    stop = StopRequest()
    stop.signal = number
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)})
    assert Run(cfg, SimpleNamespace(rank=1, size=2), launch_id, stop).exit_code == code


def test_a_failure_that_cannot_be_reported_is_printed(tmp_path, monkeypatch, caplog):
    """As on a full disk: here there is no folder. Reported, it is the launcher's to print."""
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)})
    run, other = (Run(cfg, SimpleNamespace(rank=rank), "x", StopRequest()) for rank in (0, 1))
    run.watchdog = other.watchdog = SimpleNamespace(step=3, name="data", progress=1)
    # where it may not write, its log could not be made either
    monkeypatch.setattr("lifecycle.run.log.handlers", [])
    monkeypatch.setattr("lifecycle.run.log.propagate", True)
    other._fail(Failure(1, "a disk that this node may not write to", False))
    assert caplog.messages == ["rank 1, step 3, phase data: a disk that this node may not write to"]
    monkeypatch.setattr("lifecycle.run.log.propagate", False)
    console = io.StringIO()
    monkeypatch.setattr("lifecycle.run.log.handlers", [logging.StreamHandler(console)])
    run._fail(Failure(1, "the disk is gone", False))
    assert console.getvalue() == "rank 0, step 3, phase data: the disk is gone\n"
    run.folder.mkdir()
    run._fail(Failure(1, "it is there again", False))
    assert (
        "again" not in console.getvalue()
        and failures(run.folder, "x")[0]["text"] == "it is there again"
    )


def test_watch_tells_where_the_main_thread_stands():
    told = []
    watch = Watchdog(told.append)
    watch.phase("quick", 60, 3)
    watch.phase("slow", 0.1)
    time.sleep(1.0)
    watch.stop()
    assert (
        watch.progress == 2
        and watch.step == 3
        and "time.sleep(1.0)" in told[0]
        and "no progress" in told[0]
    )


def test_a_suspension_counts_for_the_phase_that_it_was_in_alone():
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: time.sleep(600))
    with (
        mock.patch("lifecycle.watchdog.time", clock),
        mock.patch("faulthandler.dump_traceback_later"),
    ):
        watch = Watchdog(None)
        watch.phase("step", 30)
        now[0] += 300  # SIGSTOP, SIGCONT
        watch._extend_if_suspended(1000.0, now[0])
        assert watch.deadline == 1330
        now[0] += 300
        watch.phase("data", 30)  # before the watchdog's thread looks
        watch._extend_if_suspended(1300.0, now[0])
        assert watch.deadline == 1630
        watch.stop()


def test_the_timer_for_a_frozen_process_is_rarely_set_and_never_fires_first(tmp_path):
    """Later than the watchdog's own timeout, by less than 30 s; not again in each phase of each step."""
    log = tmp_path / "log"
    log.write_text("an earlier launch\n")
    now, timers = [1000.0], []
    with (
        mock.patch(
            "lifecycle.watchdog.time",
            # its thread never wakes: it would take the leaps of this clock for suspensions
            SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: time.sleep(600)),
        ),
        mock.patch(
            "faulthandler.dump_traceback_later",
            lambda *timer, **more: timers.append((*timer, more)),
        ),
        mock.patch("faulthandler.cancel_dump_traceback_later", lambda: timers.clear()),
    ):
        watch = Watchdog(None)
        watch.use_log(log, 7)
        for step in range(1, 201):
            for name in ("step", "data", "step") + ("save",) * (step % 50 == 0):
                watch.phase(name, 50.0 if name == "save" else 20.0, step)
                now[0] += 0.1
                assert 5 < watch.fires - watch.deadline < 30
        assert 8 <= len(timers) < 25 and timers[0] == (40.0, {"exit": True, "file": watch.stacks})
        watch.stop()
        assert not timers
    first, line = log.read_text().splitlines()
    assert (
        first == "an earlier launch"
        and line.rstrip() == "now: rank 7, step 200, phase save (604 phases begun)"
    )


def test_a_compiler_is_looked_for_before_the_launch(monkeypatch):
    """Triton's is for C, Inductor's for C++: each looks for names of its own."""
    there = {"gcc"}
    monkeypatch.setattr("launch.checks.shutil.which", lambda name: name if name in there else None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    check_compiler(make_config())
    compiled = {"parallel": {"compile": True}}
    with pytest.raises(ConfigError, match=r"compiler for C\+\+, and this machine has none"):
        check_compiler(make_config(**compiled, run={"device": "cpu"}))
    check_compiler(make_config(**compiled, run={"device": "cuda"}))
    # what is offloaded is updated on the host
    offloaded = {"parallel": {"compile": True, "cpu_offload": True}}
    with pytest.raises(ConfigError, match=r"compiler for C\+\+, .* \(g\+\+, or what CXX names\)"):
        check_compiler(make_config(**offloaded, run={"device": "cuda"}))
    there.clear()
    with pytest.raises(ConfigError) as refused:
        check_compiler(make_config(**offloaded, run={"device": "cuda"}))
    assert len(refused.value.problems) == 2
    flex = [{"data": {"document_mask": True}}, {"parallel": {"cp": 2}}]
    for sections in flex:  # on a CPU masks are booleans
        check_compiler(make_config(**sections, run={"device": "cpu"}))
        with pytest.raises(ConfigError, match=r"(mask = true|cp = 2): needs a compiler for C,"):
            check_compiler(make_config(**sections, run={"device": "cuda"}))
    there |= {"mycc", "gcc"}
    monkeypatch.setenv("CXX", "mycc")
    check_compiler(make_config(**compiled, run={"device": "cpu"}))
    monkeypatch.setenv("CC", "gone")
    with pytest.raises(ConfigError, match="CC=gone is not there"):
        check_compiler(make_config(**compiled, run={"device": "cuda"}))


def test_the_headers_of_python_are_looked_for_before_the_launch(monkeypatch, tmp_path):
    """Debian's python3-venv does not bring them."""
    monkeypatch.setattr("launch.checks.shutil.which", lambda name: name)
    monkeypatch.setattr("launch.checks.sysconfig.get_path", lambda *_: str(tmp_path / "usual"))
    monkeypatch.delenv("CPATH", raising=False)
    check_compiler(make_config())
    cfg = make_config(parallel={"compile": True})
    with pytest.raises(
        ConfigError, match=r"usual/Python.h is missing: apt install python3\.\d+-dev"
    ):
        check_compiler(cfg)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}")
    check_compiler(cfg)


def test_the_allocator_is_set_unless_the_user_has(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks(1, 2, 0, None)
    assert ranks.environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert ranks.environment()["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_threads_that_wait_soon_sleep_unless_the_user_says_how_they_wait(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks(1, 1, 0, None)
    assert ranks.environment()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert ranks.environment()["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in ranks.environment()


def test_config_toml_keeps_what_options_were(tmp_path):
    cfg = make_config(run={"output_dir": str(tmp_path), "name": "r"})
    path = tmp_path / "r/config.toml"
    path.parent.mkdir()

    def comments() -> list[str]:
        assert config.load(str(path)) == cfg
        return [line for line in path.read_text().splitlines() if line.startswith("#")]

    write_config(cfg, 0, {})
    assert comments() == []
    write_config(cfg, 10, {"optim.lr": ("0.003", "0.001"), "data.source": ("a\nb", "c")})
    first = "# until step 10: optim.lr = 0.003, data.source = a b"
    write_config(cfg, 20, {"optim.lr": ("0.001", "0.1")})
    write_config(cfg, 25, {})
    assert comments() == [first, "# until step 20: optim.lr = 0.001"]
    # back to step 15, of which the second line is not true any more
    write_config(cfg, 15, {"optim.lr": ("0.001", "0.2")})
    assert comments() == [first, "# until step 15: optim.lr = 0.001"]


@pytest.mark.quick
def test_changes_that_make_another_run_are_named(tmp_path):
    """Not the mesh, paths, reports; not of a run that begins."""
    at = {"output_dir": str(tmp_path), "name": "r"}
    before = make_config(run=at, train={"micro_batch_size": 2})
    state = {"step": 3, "config": config.to_dict(before)}
    folder = tmp_path / "r/checkpoints/step-00000003"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    same = make_config(
        run=at,
        train={"micro_batch_size": 1},
        parallel={"tp": 2, "recompute": "full"},
        data={"path": "elsewhere"},
        log={"every_steps": 5},
        eval={},
    )
    assert changes_since(same, 3) == {}
    other = make_config(
        run=at, optim={"lr": 1e-3, "schedule": "linear"}, parallel={"param_dtype": "bfloat16"}
    )
    changes = changes_since(other, 3)
    assert describe_changes(3, changes) == (
        "changed since step 3: optim.lr 0.003 -> 0.001, optim.schedule cosine -> linear, "
        "parallel.param_dtype float32 -> bfloat16; another run: --run.name=NAME"
    )
    assert changes_since(other, 0) == {}
    assert changes_since(make_config(run=at, parallel={"param_dtype": "auto"}), 3) == {}
    more = make_config(run=at, train={"steps": 9})
    assert changes_since(more, 3) == {"train.steps": ("4", "9")}
    same_schedule = make_config(run=at, train={"steps": 9}, optim={"schedule_steps": 4})
    assert changes_since(same_schedule, 3) == {"optim.schedule_steps": ("absent", "4")}


@pytest.mark.parametrize(
    "ahead, preempted, works, told",
    [
        (True, "None", True, "ahead of its time limit; requeueing it"),
        (False, "2026-11-23T01:02:03", True, "being preempted; requeueing it"),
        (False, "None", True, "it does not requeue itself"),  # as after scancel
        (True, "None", False, "could not be requeued"),
    ],
)
def test_a_job_requeues_itself_where_its_time_ends_or_slurm_wants_its_place(
    tmp_path, monkeypatch, capsys, ahead, preempted, works, told
):
    scontrol, asked = tmp_path / "scontrol", tmp_path / "asked"
    scontrol.write_text(f"""#!/bin/bash
echo "$*" >>{asked}
case $1 in
show) echo "JobId=7 StartTime=2026-11-23T00:00:00 PreemptEligibleTime=2026-11-23T00:00:00 PreemptTime={preempted}";;
requeue) {str(works).lower()};;
esac
""")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    from launch.slurm import requeue

    requeue("7", ahead)
    assert told in capsys.readouterr().err
    assert ("requeue 7" in asked.read_text()) is not told.startswith("it does not")


@pytest.mark.parametrize(
    "variables, nodes, local, restarts, job",
    [
        ({}, 1, 1, 0, None),
        ({"NPROC": "2", "MAX_RESTARTS": "5"}, 1, 2, 5, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_GPUS_ON_NODE": "4"}, 3, 4, 3, "7"),
        ({"SLURM_JOB_ID": "7", "MAX_RESTARTS": "0"}, 1, 1, 0, "7"),
        ({"SLURM_NNODES": "3"}, 1, 1, 0, None),
    ],
)
def test_ranks_are_what_the_environment_says(monkeypatch, variables, nodes, local, restarts, job):
    for name in [
        name
        for name in os.environ
        if name.startswith("SLURM_") or name in ("NPROC", "MAX_RESTARTS")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("launch.command.visible_gpus", lambda: 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(nodes, local, restarts, job)


@pytest.mark.parametrize(
    "variable, text",
    [("NPROC", "\N{SUPERSCRIPT TWO}"), ("NPROC", "-1"), ("NPROC", "0"), ("MAX_RESTARTS", "two")],
)
def test_ranks_that_are_no_number_are_refused(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"run_train.sh: {variable}={text}: must be a number"):
        Ranks.from_environment()


def test_what_is_wrong_with_the_ranks_and_with_the_options_is_told_at_once(
    write_config, monkeypatch, capsys
):
    monkeypatch.setenv("NPROC", "0")
    assert launch_here([str(write_config("r")), "--train.steps=-1"], Interruption()) == 2
    ranks, options = capsys.readouterr().err.splitlines()
    assert "NPROC=0: must be a number" in ranks and "steps = -1: must be greater than 0" in options


@pytest.mark.parametrize(
    "chosen, count",
    [
        (None, 3),
        ("", 0),
        ("1", 1),
        ("0,2", 2),
        ("-1", 0),
        ("0,-1,2", 1),
        ("GPU-3,MIG-4", 2),
        ("NoDevFiles", 0),
    ],
)
def test_gpus_are_those_that_a_run_would_see(tmp_path, monkeypatch, chosen, count):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf 'GPU %s: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\\n  MIG 1g.10gb\\n' 0 1 2\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == count


@pytest.mark.parametrize(
    "missing",
    ["", "numpy", "tensorboard", "sentencepiece", "tokenizers", "datasets", "safetensors"],
)
def test_a_python_that_lacks_a_package_is_not_taken(monkeypatch, missing):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: name != missing)
    assert usable([]) is not bool(missing)


@pytest.mark.parametrize(
    "version, known",
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.0+cu130", True),
        ("2.15.0", True),
        ("2.16.0", False),
        ("3.11.0", False),
        ("1.13.1", False),
        ("git", False),
    ],
)
def test_a_python_with_another_torch_is_not_taken(monkeypatch, version, known):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert usable([]) is known


@pytest.mark.parametrize(
    "option, needs",
    [
        ("--log.tensorboard=false", False),
        ("--log.tensorboard=true", True),
        ("--eval-only", False),
        ("--dry-run", False),
    ],
)
def test_tensorboard_is_needed_where_it_is_written(write_config, monkeypatch, option, needs):
    path = write_config("r", log={"tensorboard": True})
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, package=None: name != "tensorboard"
    )
    assert usable([str(path), option]) is not needs


def test_a_python_is_asked_for_what_the_run_needs_alone(prepared, write_config):
    """As run_train.sh asks: `datasets` is for preparing."""
    ask = (
        "import importlib.util as u, runpy, sys; found = u.find_spec; sys.argv = ['', '--usable', *sys.argv[1:]]\n"
        "u.find_spec = lambda name, package=None: found(name, package) if name != 'datasets' else None\n"
        "runpy.run_module('launch.command', run_name='__main__')"
    )
    for arguments, code in ([write_config("r")], 0), ([], 1):
        assert subprocess.run([sys.executable, "-c", ask, *arguments], cwd=REPO).returncode == code


def test_one_process_has_torchrun_where_it_may_be_restarted():
    assert Ranks(1, 1, 0, None).command()[1:] == [str(REPO / "train.py")]
    command = Ranks(1, 1, 3, "7").command()
    assert "--max-restarts=3" in command
    assert any("launch.torchrun" in word for word in command)


@pytest.mark.parametrize("before", ["finished", "preempted"])
def test_how_another_launch_ended_says_nothing_of_this_one(tmp_path, before, capsys):
    """Its ranks were killed before they took the folder."""
    write_status(tmp_path, before, 4, "earlier")
    assert exit_code(tmp_path, "this", ranks=1, returned=-signal.SIGKILL) == 1
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("failed", 4)
    assert "ended by signal SIGKILL: the host may be out of memory" in capsys.readouterr().err


def test_ranks_that_end_by_a_signal_before_they_have_handlers_were_stopped(tmp_path):
    write_status(tmp_path, "failed", 4, "earlier")
    assert exit_code(tmp_path, "this", ranks=1, returned=-signal.SIGTERM) == 75
    mark_stopped(tmp_path, "this")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("preempted", 4)


@pytest.mark.quick
def test_a_status_that_cannot_be_written_is_told(tmp_path, monkeypatch, capsys):
    """By the launcher, whose exit code stays, and by a run that would be finished: nobody would know."""
    monkeypatch.setattr(
        "files.write_atomic", mock.Mock(side_effect=OSError(28, "No space left on device"))
    )
    assert exit_code(tmp_path, "this", ranks=1, returned=7) == 7
    assert f"{tmp_path}/status.json: [Errno 28] No space left on device" in capsys.readouterr().err
    run = Run(
        make_config(run={"name": "r", "output_dir": str(tmp_path)}),
        SimpleNamespace(rank=0),
        "x",
        StopRequest(),
    )
    run.watchdog = mock.Mock()
    run.lock = mock.Mock()
    console = io.StringIO()
    monkeypatch.setattr("lifecycle.run.log.handlers", [logging.StreamHandler(console)])
    with pytest.raises(SystemExit, match="1"):
        run._end()
    assert (
        console.getvalue()
        == f"{run.folder}/status.json cannot be written: [Errno 28] No space left on device\n"
    )


def test_where_the_ranks_cannot_be_asked_in_a_file_they_are_terminated(tmp_path, own_handlers):
    """As on a full disk: here the folder is gone."""
    folder = tmp_path / "r"
    folder.mkdir()
    program = (
        f"import os, shutil, signal, time\nshutil.rmtree({str(folder)!r})\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\ntime.sleep(60)"
    )
    assert (
        run_ranks([sys.executable, "-c", program], folder, "x", Interruption()) == -signal.SIGTERM
    )


def test_one_ctrl_c_while_the_ranks_start_is_one(tmp_path, monkeypatch, own_handlers, capsys):
    """It comes in the middle of starting them. A second one would kill the ranks, which here wait for the stop file."""
    start = subprocess.Popen

    def interrupted(*arguments, **keywords) -> subprocess.Popen:
        os.kill(os.getpid(), signal.SIGINT)
        return start(*arguments, **keywords)

    monkeypatch.setattr("launch.launch.subprocess.Popen", interrupted)
    file = stop_file(tmp_path, "x")
    program = (
        f"import pathlib, time\nwhile not pathlib.Path({str(file)!r}).read_text(): time.sleep(0.05)"
    )
    assert run_ranks([sys.executable, "-c", program], tmp_path, "x", Interruption()) == 0
    assert file.read_text() == str(int(signal.SIGINT))
    told = "stopping after this step; Ctrl-C again within 5 s quits at once\n"
    assert capsys.readouterr().err == told


def test_a_job_that_is_cancelled_while_it_stops_is_not_requeued(tmp_path, own_handlers, capsys):
    """What asked for it last decides, and its child here asks twice; the ranks are told once."""
    program = (
        "import os, signal, time\nfor number in (signal.SIGUSR1, signal.SIGTERM):\n"
        "    os.kill(os.getppid(), number)\n    time.sleep(0.5)"
    )
    interruption = Interruption()
    assert run_ranks([sys.executable, "-c", program], tmp_path, "x", interruption) == 0
    assert interruption.asked == signal.SIGTERM
    assert stop_file(tmp_path, "x").read_text() == str(int(signal.SIGUSR1))
    assert capsys.readouterr().err == "asked to stop by SIGUSR1\nasked to stop by SIGTERM\n"


def test_a_hangup_that_is_ignored_stays_ignored(own_handlers):
    """As nohup leaves it."""
    handler = Interruption()
    for hangup in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGHUP, hangup)
        listen(handler)
        assert all(signal.getsignal(number) == handler for number in SIGNALS)
        assert signal.getsignal(signal.SIGHUP) == (
            signal.SIG_IGN if hangup == signal.SIG_IGN else handler
        )


def test_only_the_first_signal_counts(own_handlers):
    stop = StopRequest()
    stop.listen()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert stop.received == signal.SIGUSR1


@pytest.mark.parametrize(
    "first, second, ends",
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 0),
        (signal.SIGINT, signal.SIGTERM, 0),
    ],
)
def test_without_a_launcher_a_second_ctrl_c_quits_and_nothing_else_does(first, second, ends):
    program = (
        "import os; from lifecycle.stop import StopRequest; stop = StopRequest(); stop.standalone = True; "
        f"stop.listen(); [os.kill(os.getpid(), number) for number in ({first:d}, {second:d})]"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=REPO).returncode == ends


def test_the_first_step_of_any_launch_has_the_time_to_compile():
    run = mock.MagicMock(step=4)
    run.stop.agreed, run.cfg.profile = False, None
    with mock.patch("lifecycle.run.gc"):
        assert list(Run.steps(run, 5, 7)) == [5, 6, 7]
    assert run._begin.call_args_list == [
        mock.call("first step", 5),
        mock.call("step", 6),
        mock.call("step", 7),
        mock.call("end"),
    ]


def test_a_wait_for_text_outlasts_the_time_limit_of_a_step(tmp_path, monkeypatch):
    """It has a limit of its own, which text that is recorded renews."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < watchdog.deadline  # else the watchdog would end the run

    def phase(name: str, seconds: float, step: int | None = None) -> None:
        watchdog.name = name
        watchdog.deadline = now[0] + seconds

    def look() -> None:
        looks.append(watchdog.name)
        stop.waits_for_text = now[0] < 1060

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("lifecycle.run.time", clock)
    cfg = make_config(run={"output_dir": str(tmp_path), "step_timeout_seconds": 5.0})
    stop = StopRequest()
    run = Run(cfg, SimpleNamespace(rank=0, size=1), None, stop)
    run.text = SimpleNamespace(start_sync=lambda: None, finish_sync=look, description=str)
    run.watchdog = watchdog = SimpleNamespace(phase=phase)
    watchdog.phase("step", 5.0)
    looks = []
    run.agree_to_continue()
    assert looks[0] == "step" and {*looks[1:]} == {"data"} and watchdog.name == "step"
    assert run.seconds["data"] == pytest.approx(60, abs=0.5)


@pytest.mark.parametrize("seconds, code", [(4.9, 130), (5.1, 0)])
def test_a_second_ctrl_c_after_five_seconds_is_as_any_other_signal(
    tmp_path, monkeypatch, own_handlers, seconds, code
):
    """With the launcher, then without one. The clock is the test's."""
    monkeypatch.setattr(
        "launch.launch.time",
        SimpleNamespace(monotonic=iter([0.0, 0.0, seconds, seconds]).__next__),
    )
    program = (
        "import os, signal, time\nfor _ in range(2):\n    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(0.3)"
    )
    assert run_ranks([sys.executable, "-c", program], tmp_path, "x", Interruption()) == code
    program = (
        "import os, types; from lifecycle import stop as module; module.time = types.SimpleNamespace(monotonic=iter("
        f"[0.0, 0.0, {seconds}, {seconds}]).__next__); stop = module.StopRequest(); stop.standalone = True; "
        "stop.listen(); [os.kill(os.getpid(), 2) for _ in range(2)]"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=REPO).returncode == code


@pytest.mark.parametrize(
    "before, launch_id, resume",
    [
        (None, "a", 2),
        ("a", "a", "auto"),
        ("a", "b", 2),
        ("7.0.a", "7.1.b", "auto"),
        ("7.0.a", "7.0.b", 2),
        ("7.0.a", "8.1.b", 2),
        (None, None, 2),
    ],
)  # by hand in one allocation; in another job
def test_who_asks_again_goes_back_again(tmp_path, before, launch_id, resume):
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={"resume": 2})
    folder = config.run_folder(cfg)
    folder.mkdir()
    assert resume_once(cfg, launch_id).resume == 2  # there is no run yet
    write_status(folder, "preempted", 5, before)
    assert resume_once(cfg, launch_id).resume == resume


def test_without_a_launcher_torchrun_is_who_has_the_folder(tmp_path, monkeypatch):
    """So that the ranks that it restarts do not go back again; and it has the exit code."""
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={"resume": 2})
    config.run_folder(cfg).mkdir()
    for name, alone in (("RANK", True), ("TORCHELASTIC_RUN_ID", False)):
        # RANK alone: another launcher of one rank
        monkeypatch.setenv(name, "0")
        run = Run(cfg, SimpleNamespace(rank=0, size=1), None, StopRequest())
        run.attach(SimpleNamespace(start=2, cfg=cfg))
        assert run.stop.standalone is alone and (run.holder is None) is alone
        write_status(run.folder, "failed", 5, None)  # of an earlier torchrun
        assert resume_once(cfg, run.holder).resume == 2
        run.log_save(6, None)
        assert resume_once(cfg, run.holder).resume == (2 if alone else "auto")
        assert status(run.folder)["launch"] == run.holder
        again = Run(cfg, SimpleNamespace(rank=0, size=1), None, StopRequest()).holder
        assert again == run.holder and (alone or "." not in again)


@pytest.mark.parametrize("end, code", [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 1)])
def test_torchrun_exits_with_a_failed_ranks_code_and_says_nothing_itself(tmp_path, end, code):
    """An evaluation has no status to take its exit code from."""
    (tmp_path / "rank.py").write_text(f"import os, sys; {end}")
    done = subprocess.run(
        [
            warm_python(),
            "-m",
            "launch.torchrun",
            "--nproc-per-node=1",
            "--standalone",
            "--log-dir=/dev/null",
            str(tmp_path / "rank.py"),
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=100,
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_torchruns_name_is_the_same_for_all_ranks_that_it_starts_and_for_no_other(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    rank = [sys.executable, "-c", "from parallel.ranks import torchrun_id; print(torchrun_id())"]
    shell = ["bash", "-c", '"$@"; exit $?', "bash", *rank]  # another parent
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    ours, restarted, other = (
        subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        for command in (rank, rank, shell)
    )
    assert (
        ours == restarted != other and ours.startswith("torchrun-") and f"-{os.getpid()}-" in ours
    )
    # in a container, where every torchrun may have the same number, the time since boot at which it began differs
    began = [int(name.rpartition("-")[2]) / os.sysconf("SC_CLK_TCK") for name in (ours, other)]
    assert 0 < began[0] < before < began[1] + 0.02 and began[1] < time.clock_gettime(
        time.CLOCK_BOOTTIME
    )


@pytest.mark.parametrize("before, resume", [("6.0.a", 2), ("7.0.a", "auto"), (None, 2)])
def test_an_attempt_that_never_took_the_folder_has_not_gone_back(tmp_path, capsys, before, resume):
    """Whatever else it was stopped or failed by before the next."""
    from launch.slurm import end_of_stopped

    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={"resume": 2})
    folder = config.run_folder(cfg)
    folder.mkdir()
    if before:
        write_status(folder, "preempted", 5, before)
    assert (
        exit_code(folder, "7.1.b", ranks=1, returned=1) == 1 and status(folder)["launch"] == "7.1.b"
    )
    assert resume_once(cfg, "7.2.c").resume == resume
    # nor has it trained from there to step 5
    assert end_of_stopped(cfg, "7", "7.2.c", {"step": 5}, ahead_of_limit=False) == 75
    assert (status(folder)["state"], status(folder)["attempts_without_step"]) == ("preempted", 1)
    assert resume_once(cfg, "7.2.c").resume == resume


def test_a_stop_that_the_ranks_recorded_is_not_recorded_again(tmp_path):
    """The next launch may begin as soon as they have: nothing locks the folder, nor writes into it."""
    write_status(tmp_path, "preempted", 4, "this")
    before = status(tmp_path)
    mark_stopped(tmp_path, "this")
    assert status(tmp_path) == before and not (tmp_path / ".lock").exists()


def test_the_status_of_another_run_is_left_alone(tmp_path, capsys):
    """A launch that finds out only when its ranks begin, and one that is stopped before."""
    write_status(tmp_path, "running", 4, "earlier")
    held, before = lock(tmp_path), status(tmp_path)
    assert exit_code(tmp_path, "this", ranks=1, returned=1) == 2
    mark_stopped(tmp_path, "this")
    assert "another run works here" in capsys.readouterr().err and status(tmp_path) == before
    held.release()


def test_a_stopped_job_also_leaves_it_alone(tmp_path):
    from launch.slurm import end_of_stopped

    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)})
    folder = config.run_folder(cfg)
    folder.mkdir()
    write_status(folder, "running", 4, "earlier")
    held, before = lock(folder), status(folder)
    assert (
        end_of_stopped(cfg, "1", "this", {"attempts_without_step": 2}, ahead_of_limit=False) == 75
    )
    assert status(folder) == before
    held.release()


def test_restarted_ranks_wait_for_those_before_to_let_go(tmp_path):
    run = Run(
        make_config(run={"name": "r", "output_dir": str(tmp_path)}),
        SimpleNamespace(rank=0, size=1, device=torch.device("cpu")),
        "x",
        StopRequest(),
    )
    run.folder.mkdir()
    write_status(run.folder, "running", 4, "x")
    threading.Timer(0.5, lock(run.folder).release).start()
    run._take_folder(mock.MagicMock(), [], ["host"])
    assert run.lock.is_locked


def test_what_the_user_has_set_for_the_ranks_stays(monkeypatch):
    names = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks(1, 2, 0, None)
    assert ranks.environment()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
    for name in names:
        monkeypatch.setenv(name, "mine")
        assert ranks.environment()[name] == "mine"


def test_each_attempt_of_a_job_meets_under_a_name_and_each_job_at_a_port_of_its_own(
    tmp_path, monkeypatch
):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    scontrol.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }.items():
        monkeypatch.setenv(name, value)
    ids = []
    ports = {}
    for job in ("7", "8", "1234008"):
        for count in ("0", "1"):
            monkeypatch.setenv("SLURM_RESTART_COUNT", count)
            options = dict(
                word.split("=", 1) for word in Ranks(2, 1, 3, job).command() if "=" in word
            )
            host, port = options["--rdzv-endpoint"].split(":")
            assert host == "n1" and 1024 < int(port) < 2**15  # below those that Linux deals out
            ids.append(options["--rdzv-id"])
            ports.setdefault(job, set()).add(port)
    assert len(ids) == len({*ids}) == 6
    # jobs may share a node: those in a row meet at ports of their own
    assert len(ports["7"]) == len(ports["8"]) == 1 and ports["7"] != ports["8"]
