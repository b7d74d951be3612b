"""[profile]: which steps are traced, and what is written of them."""

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import config
from extras.profiler import profiler
from extras.profiler.profiler import Profiler


@pytest.fixture
def train_steps(monkeypatch):
    """A function: a folder, device and first step -> the logged messages. Of up to four steps the
    second and the third are traced; step n multiplies n matrices."""

    def train(folder: pathlib.Path, device: str = "cpu", first: int = 1) -> str:
        logged = []
        for level in ("info", "warning"):
            monkeypatch.setattr(profiler.log, level, lambda text, *_: logged.append(text))
        world: Any = SimpleNamespace(rank=1, device=torch.device(device))
        traced = Profiler(config.Profile(at_step=2, steps=2), folder, world)
        for step in range(first, 5):
            with traced.traced(step):
                for _ in range(step):
                    torch.ones(64, 64) @ torch.ones(64, 64)
        return " ".join(logged)

    return train


def test_timeline_and_table_are_of_the_selected_steps(train_steps, tmp_path):
    train_steps(tmp_path)
    events = json.loads((tmp_path / "profile/rank-1.json").read_text())["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 2 + 3
    (row,) = [
        line.split()
        for line in (tmp_path / "profile/rank-1.txt").read_text().splitlines()
        if line.split()[:1] == ["aten::mm"]
    ]
    assert row[-1] == "5"  # the number of calls


def test_on_a_gpu_the_memory_of_the_same_steps_is_recorded(train_steps, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    record = lambda enabled="all", **_: calls.append(enabled)  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    train_steps(tmp_path, "cuda")
    snapshot = str(tmp_path / "profile/memory-rank-1.pickle")
    # written before recording ends, which may drop what was recorded
    assert calls == ["all", "synchronize", "synchronize", snapshot, None]


def test_a_profile_that_cannot_be_written_stops_nothing(train_steps, tmp_path):
    (tmp_path / "file").touch()
    assert "the profile is incomplete" in train_steps(tmp_path / "file")


@pytest.mark.parametrize("first", [1, 4])
def test_a_launch_after_the_steps_to_trace_says_so(train_steps, tmp_path, first):
    assert ("was before this launch" in train_steps(tmp_path, first=first)) == (first == 4)
