"""A stop: any signal to any process of a launch, in any moment."""

import os
import pathlib
import re
import signal

import pytest

from checkpoint import catalog
from tests.conftest import launch, rows
from tests.launch.conftest import LONG

# when, to which process, which signal, how many ranks
STOPS = [
    ("step", "torchrun", signal.SIGTERM, 2),
    ("step", "rank 1", signal.SIGXCPU, 2),
    ("save", "launcher", signal.SIGTERM, 2),
    ("step", "rank 0", signal.SIGINT, 1),
]


@pytest.mark.parametrize(("moment", "whom", "number", "nproc"), STOPS)
def test_signal_saves_and_stops_all(launched, write_config, moment, whom, number, nproc):
    path = write_config("r", **{**LONG, "checkpoint": {"save_every_steps": 4}})
    run = launched(path, nproc=nproc, pause=moment)
    run.wait_for(run.paused.exists)
    run.signal(number, whom)
    code, output = run.end()
    assert code == 75, output
    status = run.status()
    assert (status["state"], status["signal"]) == ("preempted", signal.Signals(number).name)
    newest = max(os.listdir(run.folder / "checkpoints"))
    assert newest == f"step-{status['step']:08d}"
    assert catalog.problems_of(run.folder / "checkpoints" / newest) == []
    assert rows(run.folder)[-1]["step"] == status["step"]
    assert f"stopped after step {status['step']}" in output


@pytest.mark.parametrize("whom", ["launcher", "rank 1"])
def test_signal_before_the_run_begins_leaves_nothing(launched, write_config, whom):
    run = launched(write_config("r", **LONG), nproc=2, pause="import")
    run.wait_for(lambda: run.paused.exists() and whom in run.processes())
    run.signal(signal.SIGTERM, whom)
    code, output = run.end()
    assert (code, run.folder.exists()) == (75, False), output
    assert output.endswith("stopped before the run began\n")


def test_ctrl_c_to_a_launcher_that_has_only_begun(launched, write_config):
    """While bash looks for a Python. The terminal sends it to both."""
    run = launched(write_config("r", **LONG))
    run.wait_for(lambda: catches(run.process.pid, signal.SIGTERM))
    os.killpg(run.process.pid, signal.SIGINT)
    code, output = run.end()
    assert (code, run.folder.exists()) == (75, False), output
    assert output.endswith("stopped before the run began\n") and "Traceback" not in output


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_stopped_run_resumes_as_if_it_had_not(launched, write_config):
    """Also the evaluation that it was stopped before is made."""
    sections = {"eval": {"every_steps": 3}, "checkpoint": {}, "optim": {"schedule_steps": 9}}
    whole = write_config("whole", train={"steps": 9}, **sections)
    assert launch(whole).returncode == 0
    path = write_config("r", train={"steps": 9}, **sections)
    run = launched(path, nproc=2)
    run.wait_for(run.has_trained)
    run.signal(signal.SIGINT)
    assert run.end()[0] in (0, 75)
    assert launch(path).returncode == 0
    for kind in ("train", "eval"):
        expected = {row["step"]: row["loss"] for row in rows(whole.parent / "outputs/whole", kind)}
        found = [(row["step"], row["loss"]) for row in rows(run.folder, kind)]
        assert found == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected.items()]


def test_ctrl_c_twice_quits_at_once(launched, write_config):
    path = write_config("r", **{**LONG, "checkpoint": {"save_every_steps": 2}})
    run = launched(path, nproc=2, pause="save")
    run.wait_for(run.paused.exists)
    run.signal(signal.SIGINT)
    run.wait_for(lambda: "Ctrl-C quits at once" in run.log.read_text())
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 137, output


def test_nothing_outlives_a_killed_launcher(launched, write_config):
    run = launched(write_config("r", **LONG), nproc=2)
    run.wait_for(run.has_trained)
    run.signal(signal.SIGKILL)
    assert run.process.wait(60) == -signal.SIGKILL
    run.wait_for_processes()


def test_stop_without_checkpoints_is_a_failure(launched, write_config):
    run = launched(write_config("r", **{**LONG, "checkpoint": None}))
    run.wait_for(run.has_trained)
    run.signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 1 and "without [checkpoint] nothing is saved" in output
    assert run.status()["state"] == "failed"
