"""Rows at a tracker: a package that counts what it gets, keeps it as the real one does, and fails in every way."""

import itertools
import json
import logging
import pathlib
import signal
import threading
import time
from collections import Counter

import pytest

from extras.reports import tracker
from extras.reports.tracker import Tracker

pytestmark = pytest.mark.early

# wandb keeps a run's history by its id, ignores a step before the last one, and cuts the history for resume_from.
# trackio keeps every row, and removes a run as a whole.
FAKE = """
import json, os, pathlib, time
BEHAVIOR, STORE = os.environ["FAKE_TRACKER"], pathlib.Path(os.environ["FAKE_STORE"])

class Run:
    url = "https://tracker.example/run"

    def __init__(self, name):
        self.name, self.path = name, STORE / name

    def delete(self):
        self.path.unlink()

    def log(self, data, step):
        if BEHAVIOR == "sleeps":
            time.sleep(30)
        if BEHAVIOR == "raises":
            raise OSError("no space\\nat the tracker")
        history = [json.loads(line) for line in self.path.read_text().splitlines()]
        if __name__ == "trackio" or not history or step >= history[-1]["step"]:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **data}) + "\\n")

    def finish(self):
        with (STORE / "finished").open("a") as file:
            file.write(self.name + "\\n")

def init(project, name=None, id=None, config=None, dir=None, resume=None, resume_from=None):
    if BEHAVIOR == "offline":
        raise ConnectionError("no route to host")
    with (STORE / "launches").open("a") as file:
        file.write(json.dumps([project, name, id, config["run"]["name"], dir]) + "\\n")
    run = Run(id or name)
    if resume_from:
        if BEHAVIOR == "cannot rewind":
            raise ValueError("rewinding is not enabled")
        before, step = resume_from.split("?_step=")
        assert before == id and resume is None
        kept = [line for line in run.path.read_text().splitlines() if json.loads(line)["step"] <= int(step)]
        run.path.write_text("".join(line + "\\n" for line in kept))
    else:
        assert resume == "allow"
        run.path.touch()
    return run

class Api:
    def runs(self, project):
        if BEHAVIOR == "cannot rewind":
            raise ValueError("no such project here")
        return [Run(path.name) for path in STORE.iterdir()]
"""


@pytest.fixture
def store(tmp_path, monkeypatch) -> pathlib.Path:
    """Where the packages keep what they get; their behavior is in the environment."""
    (tmp_path / "packages").mkdir()
    for name in ("wandb", "trackio"):
        (tmp_path / "packages" / f"{name}.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("FAKE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("FAKE_TRACKER", "works")
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def history(store: pathlib.Path) -> list[dict]:
    (path,) = (path for path in store.iterdir() if path.name not in ("launches", "finished"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(step: int, loss: float, kind: str = "train", **more) -> dict:
    return {
        "kind": kind,
        "step": step,
        "loss": loss,
        "batch_digest": 5,
        "mfu": None,
        "slowest_rank": {"a": 1.0},
    } | more


class Launch:
    """A launch of a run as its tracker sees it: rows after `start` are dropped, others are appended, and it ends."""

    def __init__(
        self, tmp_path: pathlib.Path, name: str, start: int, project: str = 'project = "p"'
    ):
        self.folder = tmp_path / "r"
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(
            f'[run]\nname = "r"\n[log]\ntracker = "{name}"\n{project}\n'
        )
        self.path = self.folder / "metrics.jsonl"
        before = map(json.loads, self.path.read_text().splitlines() if start else [])
        kept = [found for found in before if found["step"] <= start]
        self.path.write_text("".join(json.dumps(found) + "\n" for found in kept))
        self.tracker = Tracker(self.folder, name, start, len(kept))

    def write(self, *found: dict) -> None:
        with self.path.open("a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in found))

    def sent(self, count: int) -> None:
        """Waits until as many rows were sent."""
        until = time.monotonic() + 30
        path = self.folder / "tracker.json"
        while not path.exists() or json.loads(path.read_bytes())[self.tracker.name]["rows"] < count:
            assert time.monotonic() < until, (self.folder / "logs/tracker.log").read_text()
            time.sleep(0.02)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_three_launches_are_one_run_without_a_step_twice(tmp_path, store, name):
    """The second is killed ahead of its last checkpoint, so the third repeats its steps, here with other losses."""
    first = Launch(tmp_path, name, 0)
    first.write(row(1, 9.0), row(2, 8.0), row(2, 8.5, "eval", bits_per_byte=3.0))
    first.tracker.close()
    second = Launch(tmp_path, name, 2)
    second.write(row(3, 7.0), row(4, 6.0), row(5, 5.0))
    second.sent(5)  # two of its own; the last is held, as more of its step may follow
    second.tracker.process.kill()
    third = Launch(tmp_path, name, 2)
    third.write(row(3, 3.0), row(4, 4.0))
    third.tracker.close()
    found = history(store)
    assert [(one["step"], one["train/loss"]) for one in found] == [
        (1, 9.0),
        (2, 8.0),
        (3, 3.0),
        (4, 4.0),
    ]
    assert found[1] == {
        "step": 2,
        "train/loss": 8.0,
        "train/slowest_rank.a": 1.0,
        "eval/loss": 8.5,
        "eval/bits_per_byte": 3.0,
        "eval/slowest_rank.a": 1.0,
    }
    launches = [json.loads(line) for line in (store / "launches").read_text().splitlines()]
    assert len(launches) == 3 and len({json.dumps(one) for one in launches}) == 1
    project, run_name, run_id, of_config, place = launches[0]
    assert (project, of_config) == ("p", "r") and (store / (run_id or run_name)).exists()
    # wandb keeps files of its own, beside the run's
    assert place == (str(first.folder) if name == "wandb" else None)
    assert (store / "finished").read_text().count("\n") == 2


def test_each_tracker_of_a_run_keeps_its_own_run(tmp_path, store):
    """Another tracker gets all rows, and who goes back to the first continues there."""
    written = [row(step, 10.0 - step) for step in range(1, 7)]
    for name, start in (("wandb", 0), ("trackio", 2), ("wandb", 4)):
        launched = Launch(tmp_path, name, start)
        launched.write(*written[start : start + 2])
        launched.tracker.close()
    launches = [json.loads(line) for line in (store / "launches").read_text().splitlines()]
    first, other, third = (id or name for _, name, id, *_ in launches)
    assert first == third != other
    for run, last in ((first, 6), (other, 4)):
        sent = [json.loads(line) for line in (store / run).read_text().splitlines()]
        assert [one["step"] for one in sent] == [*range(1, last + 1)]


@pytest.mark.quick
def test_signals_are_for_the_ranks_whose_last_rows_are_sent_too(tmp_path, store):
    """The launcher's process group gets them. Without log.project the project is fsdp2."""
    stopped = Launch(tmp_path, "wandb", 0, project="")
    stopped.write(row(1, 9.0), row(2, 8.0))
    stopped.sent(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        stopped.tracker.process.send_signal(number)
    stopped.write(row(3, 7.0))
    stopped.tracker.close()
    assert [one["step"] for one in history(store)] == [1, 2, 3]
    assert json.loads((store / "launches").read_text())[0] == "fsdp2"


def test_rows_are_read_whole_wherever_a_block_or_a_write_ends(tmp_path, monkeypatch):
    """Of 2.3 MiB, whose lines lie across the borders of what is read at once, then of one line in two writes."""
    monkeypatch.setattr(tracker, "closed", threading.Event())
    path = tmp_path / "metrics.jsonl"
    long = [row(step, 1 / step, text="x" * (step * 7919 % 1013)) for step in range(1, 4001)]
    path.write_text("".join(json.dumps(one) + "\n" for one in long))
    assert path.stat().st_size > 2 * 2**20
    rows = tracker.follow(path)
    assert list(itertools.takewhile(bool, rows)) == long
    last = json.dumps(row(4001, 2.0)) + "\n"
    with path.open("a") as file:
        file.write(last[:20])
        file.flush()
        assert next(rows) is None
        file.write(last[20:])
        file.flush()
        assert next(rows) == json.loads(last)
        # what was written just before the close is read after it
        tracker.closed.set()
        assert next(rows) is None
        file.write(last)
    assert list(rows) == [json.loads(last)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_cannot_go_back_keeps_its_rows(tmp_path, store, monkeypatch, name):
    first = Launch(tmp_path, name, 0)
    first.write(row(1, 9.0), row(2, 8.0), row(3, 7.0), row(4, 6.0))
    first.tracker.close()
    monkeypatch.setenv("FAKE_TRACKER", "cannot rewind")
    again = Launch(tmp_path, name, 2)
    again.write(row(3, 3.0), row(4, 4.0), row(5, 5.0))
    again.tracker.close()
    assert [(one["step"], one["train/loss"]) for one in history(store)] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
        (4, 6.0),
        (5, 5.0),
    ]
    assert (
        f"{name} keeps the rows of steps 3 to 4 of the launch before: "
        in again.tracker.log.read_text()
    )


@pytest.mark.parametrize(
    "behavior, why",
    [
        ("raises", "OSError: no space at the tracker"),
        ("offline", "ConnectionError: no route to host"),
    ],
)
def test_what_failed_is_one_warning_and_sent_by_the_next_launch(
    tmp_path, store, monkeypatch, caplog, behavior, why
):
    monkeypatch.setattr(logging.getLogger("train"), "propagate", True)
    monkeypatch.setenv("FAKE_TRACKER", behavior)
    failing = Launch(tmp_path, "wandb", 0)
    failing.write(row(1, 9.0), row(2, 8.0), row(3, 7.0))
    failing.tracker.thread.join(30)
    failing.write(row(4, 6.0))
    failing.tracker.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"wandb lacks rows of this launch, which the next one sends: {why} ({failing.tracker.log})"
    ]
    monkeypatch.setenv("FAKE_TRACKER", "works")
    works = Launch(tmp_path, "wandb", 4)
    works.write(row(5, 5.0))
    works.tracker.close()
    first = 2 if behavior == "raises" else 1  # the row that it failed on may have arrived
    assert [one["step"] for one in history(store)] == [*range(first, 6)]


def test_rows_of_a_step_are_sent_together_but_not_held_for_long(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tracker.time, "monotonic", lambda: now[0])

    def follow(path):
        for step in (1, 1, 2):
            yield {"step": step}
        for _ in range(4):
            now[0] += 2
            yield None
        yield {"step": 2}

    monkeypatch.setattr(tracker, "follow", follow)
    assert [Counter(one["step"] for one in found) for found in tracker.steps(tmp_path)] == [
        {1: 2},
        {2: 1},
        {2: 1},
    ]
