"""One run inside its ranks: its phases and steps, its folder, what it writes and when."""

import dataclasses
import json
import logging
import os
import pathlib
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import config
import system
from checkpoint import catalog
from checkpoint.checkpointer import Checkpointer
from data.loader import Loader
from model.llama import Llama
from run import environment
from run.folder import RunLock, lock, read_status
from run.run import Run
from run.watchdog import LINE_BYTES, Watchdog, read_rank_outcomes, write_killed
from tests.conftest import make_config, refuses, rows, train_run
from tests.distributed import distributed


def run_of(world: Any, tmp_path: pathlib.Path, **sections: dict) -> Any:
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, **sections)
    return Run(cfg, world, Watchdog(world.rank, None), None)


def load(path: pathlib.Path, **run: Any) -> config.Config:
    cfg = config.load(str(path))
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, name="r", **run))


# Phases


@distributed(ranks=1)
def test_each_part_of_a_run_has_its_phase(world, write_config, monkeypatch):
    """By its timeout, and by what its time counts as."""
    cfg = load(write_config(eval={"batches": 1}, checkpoint={}, train={"steps": 2}))
    found = set()
    phases = [""]
    enter = Watchdog.enter

    def entered(watchdog: Watchdog, phase: str, *arguments: Any, **more: Any) -> None:
        phases.append(phase)
        enter(watchdog, phase, *arguments, **more)

    def note(name: str, kind: type, method: str) -> None:
        original = getattr(kind, method)

        def noting(self, *arguments, **options):
            evaluates = kind is Llama and not self.training
            found.add(("evaluate" if evaluates else name, phases[-1]))
            return original(self, *arguments, **options)

        monkeypatch.setattr(kind, method, noting)

    monkeypatch.setattr(Watchdog, "enter", entered)
    note("train", Llama, "forward")
    note("load", Loader, "__next__")
    note("restore", Checkpointer, "restore")
    note("save", Checkpointer, "save")
    train_run(cfg, world)
    train_run(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=3)), world)
    steps = {("train", "first step"), ("train", "step"), ("load", "data")}
    batches = {("evaluate", "first evaluation batch"), ("evaluate", "evaluation batch")}
    assert found == steps | batches | {("save", "save"), ("restore", "restore")}


@pytest.mark.quick
@distributed(ranks=1)
def test_phases_have_the_timeout_of_what_they_wait_for(world, tmp_path):
    run = run_of(world, tmp_path)
    seconds = {}
    enter = lambda phase, limit, step: seconds.update({phase: limit})  # noqa: E731
    run.watchdog = SimpleNamespace(enter=enter)
    slow, step = run.cfg.run.start_timeout_seconds, run.cfg.run.step_timeout_seconds
    expected = dict.fromkeys(("start", "first step", "first evaluation batch", "end"), slow)
    expected |= {"step": step, "data": step}
    expected |= {"save": 2 * slow, "restore": 2 * slow}  # the save before, and the phase itself
    for phase in expected:
        run._enter(phase)
    assert seconds == expected


@distributed(ranks=1)
def test_time_of_a_phase_is_counted_and_of_a_failed_one_it_stays(world, tmp_path):
    run = run_of(world, tmp_path)
    for _ in range(2):
        with run.phase("data"):
            time.sleep(0.05)
    assert run.seconds["data"] >= 0.1 and run.watchdog.phase == "start"
    with pytest.raises(ValueError), run.phase("save"):
        raise ValueError
    assert run.watchdog.phase == "save" and run.seconds["save"] == 0


# Steps


@pytest.mark.parametrize("rank", [0, 1])
@distributed(ranks=2)
def test_signal_to_one_rank_stops_all_after_the_same_step(world, tmp_path, rank):
    run = run_of(world, tmp_path)
    steps = []
    for step in run.steps(1, 9):
        steps.append(step)
        run.agree(0)
        if step == 3 and world.rank == rank:
            run.stop_flag.receive(signal.SIGUSR1, None)
            run.stop_flag.receive(signal.SIGTERM, None)  # the first counts
    assert steps == [1, 2, 3, 4] and run.stop_flag.signal == signal.SIGUSR1


# What a run writes


@distributed(ranks=1)
def test_rows_are_on_disk_before_their_checkpoint_is_published(world, write_config, monkeypatch):
    found = []
    synced = []
    fsync = os.fsync
    publish = system.publish

    def noting(handle: int) -> None:
        fsync(handle)
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "metrics.jsonl":
            synced[:] = [row["step"] for row in rows(path.parent)]

    def published(temporary: pathlib.Path, final: pathlib.Path) -> None:
        found.append((final.name, synced[:]))  # first the trial of the disk
        publish(temporary, final)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(system, "publish", published)
    train_run(load(write_config(checkpoint={"save_every_steps": 2})), world)
    assert found[1:] == [("step-00000002", [1, 2]), ("step-00000004", [1, 2, 3, 4])]


@distributed(ranks=1)
def test_small_files_that_cannot_be_written_cost_a_line(world, write_config, monkeypatch, capsys):
    write = system.write_atomic
    small = ("status.json", "config.toml", "environment.json", "tokenizer.model", "rank-0.log")

    def full(path: pathlib.Path, *arguments: Any) -> Any:
        if path.name in small:
            raise OSError(28, "No space left on device", str(path))
        return write(path, *arguments) if arguments else logging.NullHandler()

    monkeypatch.setattr(system, "write_atomic", full)
    monkeypatch.setattr(logging, "FileHandler", lambda path: full(pathlib.Path(path)))
    cfg = load(write_config(checkpoint={"save_every_steps": 2}))
    assert len(train_run(cfg, world)) == 4
    assert catalog.steps(catalog.root_of(cfg)) == [2, 4]
    err = capsys.readouterr().err
    assert all(re.search(f"{name}: .*No space left on device", err) for name in small)


@distributed(ranks=1)
def test_each_launch_is_recorded_and_another_commit_is_named(
    world, write_config, monkeypatch, capsys
):
    warned = []
    for steps, commit in enumerate(["a", "a", "b"], 2):
        monkeypatch.setattr(environment, "git", lambda *words, commit=commit: commit)
        cfg = load(write_config(checkpoint={}, train={"steps": steps}))
        train_run(cfg, world)
        warned.append("another commit than the launch before: b" in capsys.readouterr().out)
    assert warned == [False, False, True]
    recorded = json.loads((config.run_folder(cfg.run) / "environment.json").read_text())
    assert [each["commit"] for each in [*recorded["earlier"], recorded]] == ["a", "a", "b"]


# The folder


@pytest.mark.quick
def test_status_is_replaced_and_readable(tmp_path):
    run_lock = RunLock(tmp_path / "r", "id")
    run_lock.acquire(0)
    with refuses("another run works here"):
        lock(tmp_path / "r", 0)
    run_lock.write_status("running", 5, not_saved="why")
    status = read_status(tmp_path / "r")
    assert (status["state"], status["step"], status["launch"]) == ("running", 5, "id")
    run_lock.release()
    lock(tmp_path / "r", 0).release()
    (tmp_path / "r/status.json").write_text("{")
    assert read_status(tmp_path / "r") == {}


@distributed(ranks=2)
def test_run_whose_folder_another_has_writes_nothing(world, write_config, monkeypatch):
    monkeypatch.setattr("run.run.ENDING_SECONDS", 0.0)
    cfg = load(write_config(checkpoint={}))
    folder = config.run_folder(cfg.run)
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder, 0) if world.rank == 0 else None
    dist.barrier()
    with refuses("another run works here"):
        train_run(cfg, world)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert held or world.rank


# Reports to the launcher


@pytest.mark.quick
def test_report_says_where_a_rank_is_and_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *arguments, **options: None)
    for rank, phases in enumerate((["start", "step", "data"], ["start"], ["start", "step"], [])):
        watchdog = Watchdog(rank, tmp_path)
        for step, phase in enumerate(phases):
            watchdog.enter(phase, 60, step)
        if rank == 0:
            assert watchdog.fail("an error", 2, retryable=False)
    write_killed(tmp_path, 2, signal.SIGKILL)
    (tmp_path / "error-9").write_text("cut off")
    first, second, third = read_rank_outcomes(tmp_path)  # by progress; rank 3 has just begun
    assert (first.rank, first.phase, first.text) == (1, "start", "")
    assert (second.rank, second.step, second.phase) == (2, 1, "step")
    assert second.text == "killed by SIGKILL (is the host out of memory?)"
    assert (third.rank, third.exit_code, third.retryable, third.text) == (0, 2, False, "an error")
    for path in tmp_path.glob("error-[0-3]"):
        assert len(path.read_bytes().partition(b"\n")[0]) == LINE_BYTES


@pytest.mark.quick
def test_stack_of_a_timeout_names_what_the_main_thread_did(tmp_path):
    line = json.dumps({"rank": 0, "step": 3, "phase": "step", "progress": 4, "time": 1.0})
    stacks = """Timeout (0:00:06)!
Thread 0x2 (most recent call first):
  File "b.py", line 1 in b

Thread 0x1 (most recent call first):
  File "a.py", line 2 in a
  File "a.py", line 3 in c
"""
    (tmp_path / "error-0").write_text(f"{line}\n{stacks}")
    (file,) = read_rank_outcomes(tmp_path)
    assert file.is_timeout and file.innermost_frame == 'File "a.py", line 2 in a'
    assert file.text.endswith("this rank hangs, or waits for another that does")


@pytest.mark.quick
def test_report_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *arguments, **options: None)
    watchdog = Watchdog(0, tmp_path / "gone")
    watchdog.enter("step", 60, 1)
    assert not watchdog.fail("an error", 1, retryable=True)
