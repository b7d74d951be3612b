"""What follows a run: rows at a tracker, the report at the end, whatever happens to the launch."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPO, launch
from tools import follow, tracker

# A package that keeps what it gets, hangs, or fails.
FAKE = """
import json, os, pathlib, time

class Run:
    def __init__(self, name):
        self.path = pathlib.Path(os.environ["FAKE_STORE"], name)

    def log(self, data, step):
        if os.environ.get("FAKE_TRACKER") == "hangs":
            time.sleep(100)
        with self.path.open("a") as file:
            file.write(json.dumps({"at": step, **data}) + "\\n")

    def finish(self):
        self.path.with_suffix(".finished").touch()

def init(project, config, resume, name=None, id=None, dir=None):
    assert (project, resume, config["run"]["name"]) == ("fsdp2", "allow", "r")
    if os.environ.get("FAKE_TRACKER") == "fails":
        raise ConnectionError("no route\\nto host")
    return Run(id or name)
"""


@pytest.fixture
def store(tmp_path, monkeypatch) -> pathlib.Path:
    """Where the packages keep what they get."""
    for folder in ("packages", "store"):
        (tmp_path / folder).mkdir()
    for name in ("wandb", "trackio"):
        (tmp_path / "packages" / f"{name}.py").write_text(FAKE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("FAKE_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def sent(store: pathlib.Path) -> list[dict]:
    """The rows of the one run at the tracker."""
    (path,) = (path for path in store.iterdir() if path.suffix != ".finished")
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(step: int, kind: str = "train") -> dict:
    numbers = {"step": step, "steps": 1, "loss": step / 8, "batch_digest": 5, "mfu": None}
    return {"kind": kind, **numbers}


def run_folder(tmp_path: pathlib.Path, name: str) -> pathlib.Path:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").write_text(f'[run]\nname = "r"\n[log]\ntracker = "{name}"\n')
    return tmp_path / "r"


@pytest.mark.quick
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_each_row_is_sent_once_over_launches(tmp_path, store, name):
    """The second launch resumes from an earlier step, and evaluates the step it was stopped after."""
    folder = run_folder(tmp_path, name)
    tracker.send(folder, [row(1), row(2, "eval"), {**row(3), "loss_by_source": {"a": 2}}])
    tracker.send(folder, [row(1), row(2), row(2, "eval"), row(3), row(3, "eval"), row(4)])
    steps = [(r["at"], r.get("train/loss"), r.get("eval/loss")) for r in sent(store)]
    expected = [(1, 0.125, None), (2, None, 0.25), (3, 0.375, None), (3, None, 0.375)]
    assert steps == [*expected, (4, 0.5, None)]
    assert sent(store)[2] == {"at": 3, "train/loss": 0.375, "train/loss_by_source.a": 2}


@pytest.mark.quick
@pytest.mark.parametrize(
    "behavior, words", [("hangs", "not taken within"), ("fails", "no route to host")]
)
def test_tracker_that_does_not_work_costs_a_line(
    tmp_path, store, monkeypatch, capfd, behavior, words
):
    monkeypatch.setattr(follow, "CLOSE_SECONDS", 0.1)
    folder = run_folder(tmp_path, "wandb")
    (folder / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    monkeypatch.setenv("FAKE_TRACKER", behavior)
    follow.main([str(folder)])
    [line] = capfd.readouterr().err.splitlines()
    assert words in line and line.endswith(f"./run_train.sh -m follow {folder}")
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_stop_and_resume_are_one_run_at_the_tracker(write_config, store, tmp_path):
    sections = {"train": {"steps": 100_000}, "optim": {"schedule": "constant"}, "checkpoint": {}}
    path = write_config("r", **sections, log={"tracker": "wandb"})
    environment = {**os.environ, "PYTHON": sys.executable, "NPROC": "2"}
    run = subprocess.Popen([REPO / "run_train.sh", path], env=environment)
    rows = tmp_path / "outputs/r/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not rows.exists() or rows.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(200) == 75
    stopped = sent(store)[-1]["at"]
    page = tmp_path / "outputs/r/report.html"
    assert "preempted at step" in page.read_text()
    done = launch(path, f"--train.steps={stopped + 3}")
    assert done.returncode == 0, done.stderr
    assert [each["at"] for each in sent(store)] == [*range(1, stopped + 4)]
    assert f"finished: {page}; " in done.stdout
    assert len([*store.glob("*.finished")]) == 1
