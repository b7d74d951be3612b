"""One run inside its ranks: its phases and steps, its folder, what it writes and when."""

import dataclasses
import os
import pathlib
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import config
import system
from checkpoint.checkpointer import Checkpointer
from data.loader import Loader
from model.llama import Llama
from run.folder import RunLock, lock, read_status
from run.run import Run
from run.watchdog import LINE_BYTES, Watchdog, read_rank_outcomes, write_killed
from tests.conftest import make_config, refuses, rows, train_run
from tests.distributed import distributed


def run_of(world: Any, tmp_path: pathlib.Path, **sections: dict) -> Any:
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, **sections)
    return Run(cfg, world, Watchdog(world.rank, None), None)


# Phases


@distributed(ranks=1)
def test_each_part_of_a_run_has_its_phase(world, write_config, monkeypatch):
    """By its timeout, and by what its time counts as."""
    cfg = config.load(
        str(write_config("r", eval={"batches": 1}, checkpoint={}, train={"steps": 2}))
    )
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
    train_run(config.load(str(write_config("r", checkpoint={"save_every_steps": 2}))), world)
    assert found[1:] == [("step-00000002", [1, 2]), ("step-00000004", [1, 2, 3, 4])]


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
    cfg = config.load(str(write_config("r", checkpoint={})))
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
