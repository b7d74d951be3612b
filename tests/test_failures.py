"""What an error of a run means: its exit code, whether a restart may help, whom its report names. And all of a run that
needs no launch."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data.background import PreparingFailed
from lifecycle.text import NextText

import config
from checkpoint.save import SaveFailed
from config import ConfigError
from launch.launch import exit_code, mark_stopped, print_root_cause
from lifecycle import folder
from lifecycle.failure import failure_of, final_exit_code
from lifecycle.process_group import problems_of_devices
from lifecycle.rank import RankProcess
from lifecycle.run import Run, phase_timeouts
from lifecycle.stop import StopRequest
from lifecycle.watchdog import NOW
from optim import NoTargets
from tests.conftest import REPO, make_config

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("error", "code", "text", "final"),
    [
        (ConfigError("one", "two"), 2, "one\ntwo", True),
        (KeyboardInterrupt("lost"), 128 + signal.SIGUSR1, "lost", True),
        (SaveFailed("no space"), 1, "no space", False),
        (PreparingFailed("the hub is down"), 1, "the hub is down", False),
        (OSError(28, "No space left", "/a/b"), 1, "/a/b: No space left", False),
        (FloatingPointError("infinite"), 1, "infinite", True),
        (NoTargets("a hundred"), 1, "a hundred", True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_expected_error_is_told_in_its_own_words_and_final_where_a_restart_cannot_help(
    error, code, text, final
):
    for is_first_step in (False, True):
        failure = failure_of(error, make_config(), 1, signal.SIGUSR1, is_first_step)
        assert failure == (code, text, final)


def test_an_interrupt_without_a_signal_is_ctrl_c():
    assert failure_of(KeyboardInterrupt(), make_config(), 1, 0, False).exit_code == 130


@pytest.mark.parametrize(
    "error", [RuntimeError("the disk is gone"), OSError(5, "Input/output error"), KeyError("a")]
)
def test_an_unexpected_error_has_a_traceback_and_may_be_tried_again(error):
    try:
        raise error
    except Exception as raised:
        code, text, final = failure_of(raised, make_config(), 1, 0, True)
    assert (code, final) == (1, False)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.splitlines()[-1] == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 9 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_no_memory_on_a_gpu_or_a_host_is_final_in_the_first_step_alone(error, monkeypatch):
    monkeypatch.setitem(sys.modules, "extras.planner.advice", None)  # which adds advice
    for is_first_step in (False, True):
        failure = failure_of(error, make_config(), 1, 0, is_first_step)
        assert failure == (1, f"out of memory: {error}", is_first_step)


def report(path: pathlib.Path, rank: int, **changes: object) -> None:
    values = {"step": 3, "phase": "data", "progress": 7, "exit_code": 1, "text": "why"}
    folder.report_failure(path, "x", rank, **{**values, "final": False, **changes})


def test_ranks_that_torchrun_starts_after_a_final_failure_end_with_its_code(tmp_path):
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)})
    (tmp_path / "r").mkdir()
    report(tmp_path / "r", 0)
    assert final_exit_code(cfg, "x") is None
    report(tmp_path / "r", 1, progress=9, exit_code=143, final=True)
    assert final_exit_code(cfg, "x") == 143
    assert final_exit_code(cfg, "y") is None and final_exit_code(cfg, None) is None


@pytest.mark.parametrize(
    ("reported", "returned", "code"),
    [({0: 1, 1: 143}, 1, 1), ({1: 143}, 1, 143), ({}, 7, 7), ({}, -signal.SIGABRT, 1)],
)
def test_a_launch_ends_with_the_code_of_its_first_failure(
    tmp_path, capsys, reported, returned, code
):
    """Else with torchrun's, or 1 if a signal ended that. The status has it, too, and keeps the step that was saved."""
    folder.write_status(tmp_path, "running", 40, "x")
    for rank, code_of_rank in reported.items():
        report(tmp_path, rank, exit_code=code_of_rank)
    assert exit_code(tmp_path, "x", ranks=2, returned=returned) == code
    status = folder.read_status(tmp_path)
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 40, code)
    assert not [*tmp_path.glob(".failure-*")]


def test_a_launch_whose_ranks_never_began_is_at_step_0(tmp_path):
    """The first of its folder: there is no status that had a step."""
    assert exit_code(tmp_path, "x", ranks=1, returned=1) == 1
    status = folder.read_status(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 0)
    mark_stopped(tmp_path / "another", "x")
    status = folder.read_status(tmp_path / "another")
    assert (status["state"], status["step"]) == ("preempted", 0)


@pytest.mark.parametrize(
    ("ranks", "reporting", "final", "silent"),
    [
        (12, (2, 5), False, "0, 1, 3, 4, 6, 7, 8, 9, ..."),
        (10, (2, 5), False, "0, 1, 3, 4, 6, 7, 8, 9"),
        (3, (1,), False, "0, 2"),
        (3, (1,), True, None),  # the others were ended for it
        (2, (0, 1), False, None),
    ],
)
def test_ranks_that_report_nothing_are_named(tmp_path, capsys, ranks, reporting, final, silent):
    for rank in reporting:
        report(tmp_path, rank, progress=10 - rank, final=final, step=30 + rank, text=f"{rank}'s")
    print_root_cause(tmp_path, folder.failures(tmp_path, "x"), ranks, 1)
    *told, first, text = capsys.readouterr().err.splitlines()
    last = max(reporting)  # which got least far
    assert first == f"failed first on rank {last}, step {30 + last}, phase data:"
    assert text == f"{last}'s"
    expected = f"no report from rank {silent}: killed (is the host out of memory?), or unable to"
    assert [line.removesuffix(" answer") for line in told] == ([expected] if silent else [])


def test_where_the_logs_are_is_said_if_there_are_any(tmp_path, capsys):
    for made in (False, True):
        if made:
            (tmp_path / "logs").mkdir()
        print_root_cause(tmp_path, [], 1, -signal.SIGSEGV)
        told = capsys.readouterr().err
        assert (f"the log of every rank is in {tmp_path}/logs\n" in told) == made
        assert told.endswith("ended by signal SIGSEGV\n")


def test_a_rank_that_froze_is_found_in_its_log_unless_another_launch_wrote_it(tmp_path):
    """The C thread's stacks below the last line on where the rank was."""
    path = tmp_path / "logs/rank-3.log"
    path.parent.mkdir()
    earlier = NOW.format(3, 9, "save", 77).ljust(99) + "\nTimeout (0:00:40)!\nan earlier stack\n"
    path.write_text(earlier + NOW.format(3, 21, "data", 5).ljust(99) + "\na line\n")
    assert folder.failures(tmp_path, "x", range(5)) == []
    with path.open("a") as log:
        log.write("Timeout (0:00:40)!\nThread 0x1\n  File a, line 7\n")
    os.utime(path, (1000, 1000))
    (found,) = folder.failures(tmp_path, "x", range(5))
    text = found.pop("text")
    assert text.startswith("Thread 0x1\n  File a, line 7\n") and "Python's lock (the GIL)" in text
    assert found == {
        "rank": 3,
        "step": 21,
        "phase": "data",
        "progress": 5,
        "exit_code": 1,
        "time": 1000,
        "final": False,
    }
    report(tmp_path, 3, text="its own words")
    assert [f["text"] for f in folder.failures(tmp_path, "x", range(5))] == ["its own words"]


def test_of_failures_after_equally_many_phases_the_earliest_is_first(tmp_path):
    for rank, time in ((0, 30.0), (1, 10.0), (2, 20.0)):
        with mock.patch("lifecycle.folder.time.time", return_value=time):
            report(tmp_path, rank)
    assert [failure["rank"] for failure in folder.failures(tmp_path, "x")] == [1, 2, 0]


def test_a_lock_is_in_place_while_its_file_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / ".lock"
    path.touch()
    with path.open() as held:
        assert folder.is_in_place(held, path)
        path.rename(tmp_path / "old")
        assert not folder.is_in_place(held, path)
        path.touch()  # another run's
        assert not folder.is_in_place(held, path)
        # a disk that does not answer is no folder that is gone
        monkeypatch.setattr("lifecycle.folder.os.stat", mock.Mock(side_effect=OSError(5, "I/O")))
        assert folder.is_in_place(held, path)


def test_options_that_change_again_at_one_step_are_recorded_once(tmp_path):
    """As by a run that is stopped before it saves, and started once more."""
    cfg = make_config(run={"output_dir": str(tmp_path), "name": "r"})
    (tmp_path / "r").mkdir()
    for now in ("0.1", "0.2"):
        folder.write_config(cfg, 10, {"optim.lr": ("0.003", now)})
    first_line, second_line, *_ = (tmp_path / "r/config.toml").read_text().splitlines()
    assert first_line == "# until step 10: optim.lr = 0.003"
    assert not second_line.startswith("#")


# Inside a run


def test_each_phase_has_the_timeout_of_what_it_does():
    """By the documentation of the three options."""
    limits = {"start": 11.0, "step": 7.0, "save": 13.0}
    options = {f"{name}_timeout_seconds": value for name, value in limits.items()}
    timeouts = phase_timeouts(make_config(run=options, checkpoint={"keep_last": 2}))
    of_start = ("start", "first step", "first evaluation batch", "end")
    of_step = ("step", "data", "evaluation", "evaluation batch")
    expected = dict.fromkeys(of_start, 11.0) | dict.fromkeys(of_step, 7.0)
    # a save waits for the one before, and may verify the two that are kept
    assert timeouts == expected | {"restore": 13.0, "save": 13.0 * (1 + 1 + 2)}
    assert phase_timeouts(make_config(run=options))["save"] == 26.0


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={})
    world = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"))
    run = Run(cfg, world, "x", StopRequest())
    run.watchdog = mock.MagicMock(step=3)
    run.watchdog.name = "step"
    return run


def test_the_time_of_a_phase_is_counted_from_when_the_device_is_done(run, monkeypatch):
    """What a step queued on the device is the step's: 5 s, before an evaluation and a save. Reading does not wait."""
    now = [0.0]
    monkeypatch.setattr("lifecycle.run.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("lifecycle.run.on_rank_zero", lambda work: work())

    def synchronize() -> None:
        now[0] += 5

    device = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(torch, "get_device_module", lambda of: device)
    for name, seconds in (("data", 1), ("evaluation", 2), ("save", 3), ("data", 4)):
        before = now[0]
        with run.phase(name):
            now[0] += seconds
        assert now[0] - before == seconds + (0 if name == "data" else 5)
        assert run.watchdog.phase.call_args_list[-2:] == [
            mock.call(name, run.timeouts[name], None),
            mock.call("step", run.timeouts["step"], None),
        ]
    spent = {name: seconds for name, seconds in run.seconds.items() if seconds}
    assert spent == {"data": 5, "evaluation": 2, "save": 3}


def test_garbage_is_collected_between_steps_and_never_inside_one(run, monkeypatch):
    """Automatically it would be at another time on each rank, and the others wait."""
    run.text = mock.MagicMock()
    collected = []
    monkeypatch.setattr("lifecycle.run.gc.collect", lambda: collected.append(run.step))
    monkeypatch.setattr("lifecycle.run.gc.freeze", lambda: None)
    monkeypatch.setattr("lifecycle.run.gc.unfreeze", lambda: None)
    for _ in run.steps(98, 205):
        assert not gc.isenabled()
    assert gc.isenabled() and collected == [0, 100, 200]


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        ({}, "the same command resumes"),
        ({"resume": 4}, "to resume, type the same command with --checkpoint.resume=auto"),
        ({"resume": "never"}, "to resume, type the same command with --checkpoint.resume=auto"),
    ],
)
def test_a_run_that_was_stopped_says_what_resumes_it(tmp_path, run, monkeypatch, checkpoint, told):
    run.cfg = make_config(checkpoint=checkpoint)
    run.folder.mkdir()
    run.lock = mock.Mock()
    run.step = 0  # without a report
    run.stop.signal = signal.SIGUSR1
    lines = []
    monkeypatch.setattr("lifecycle.run.log.info", lambda text, *values: lines.append(text % values))
    run._end()
    assert lines == [f"stopped after step 0 by SIGUSR1; {told}"]
    assert folder.read_status(run.folder)["state"] == "preempted"


def test_without_checkpoints_a_stop_after_a_step_is_a_failure_and_one_before_loses_nothing(
    run, monkeypatch
):
    monkeypatch.setattr("lifecycle.run.gc", mock.Mock())  # which takes a second here
    run.text = mock.MagicMock()
    run.cfg = make_config()  # no [checkpoint]
    run.step = 4
    run.stop.signal = signal.SIGTERM
    assert [*run.steps(5, 9)] == []
    for last in (5, 7):
        run.stop.signal = 0
        steps = run.steps(5, 9)
        assert [next(steps) for _ in range(5, last + 1)] == [*range(5, last + 1)]
        run.stop.signal = signal.SIGTERM
        with pytest.raises(KeyboardInterrupt, match=f"^stopped after step {last} by signal 15; "):
            next(steps)
    run.cfg = make_config(checkpoint={})
    assert [*run.steps(5, 9)] == []


def test_a_save_is_logged_with_its_folder_or_with_what_it_failed_by(run, monkeypatch, caplog):
    monkeypatch.setattr("lifecycle.run.log.propagate", True)
    caplog.set_level("INFO")
    run.log_save(120, None)
    run.log_save(130, "no space")
    assert caplog.messages == [
        f"saved {run.folder}/checkpoints/step-00000120",
        "not saved, training continues: no space",
    ]


def test_reports_show_the_options_that_a_person_typed(monkeypatch, tmp_path):
    """Not those that the launcher has added, which count all the same."""
    monkeypatch.setattr("lifecycle.rank.die_with_parent", mock.Mock())
    monkeypatch.setattr("lifecycle.rank.gc", mock.Mock())
    monkeypatch.setattr(StopRequest, "listen", mock.Mock())
    path = tmp_path / "x.toml"
    path.write_text(config.to_toml(make_config()))
    typed = ["train.py", str(path), "--run.seed=3", "--launch=7.0.a"]
    monkeypatch.setattr(sys, "argv", [*typed, "--data.split=other", "--data.subset=de"])
    process = RankProcess("")
    assert sys.argv == typed and process.args.launch == "7.0.a"
    assert (process.cfg.run.seed, process.cfg.data.split) == (3, "other")
    assert config.words_without("--launch=") == [str(path), "--run.seed=3"]


# How ranks agree


class Ranks:
    """The stop requests of several ranks in one process: their all-reduce is this class's."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch):
        self.flags: list[torch.Tensor] = []
        self.stops = [StopRequest() for _ in range(count)]
        group = SimpleNamespace(size=lambda: count)
        for stop in self.stops:
            stop.connect(group, None)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, flags: torch.Tensor, op: object, **_: object) -> SimpleNamespace:
        assert op == dist.ReduceOp.MAX
        self.flags.append(flags)
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        greatest = torch.stack(self.flags).amax(0)
        for flags in self.flags:
            flags.copy_(greatest)

    def finish(self) -> StopRequest:
        """What all ranks have agreed on, which is the same on each."""
        for stop in self.stops:
            stop.finish_sync()
        names = ("signal", "agreed", "waits_for_text", "text_failed", "text_differs")
        agreed = [[getattr(stop, name) for name in names] for stop in self.stops]
        assert agreed == agreed[:1] * len(agreed)
        self.flags.clear()
        return self.stops[0]


@pytest.mark.parametrize(
    ("states", "waits", "failed", "differs"),
    [
        ([(True, 5), (True, 5), (True, 5)], False, False, False),
        ([(True, 5), (True, 7), (True, 5)], False, False, True),
        ([(True, 5), (True, 5), (True, 4)], False, False, True),
        ([(True, 5), (False, 0), (True, 7)], True, False, False),  # all will be compared later
        ([(OSError(), 0), (True, 5), (True, 5)], False, True, False),
        ([(OSError(), 0), (False, 0), (True, 5)], True, True, False),
    ],
)
def test_ranks_agree_on_the_text_that_comes_next(monkeypatch, states, waits, failed, differs):
    ranks = Ranks(3, monkeypatch)
    for (is_ready, text_hash), stop in zip(states, ranks.stops):
        answer = mock.Mock(side_effect=[is_ready])  # an exception is raised
        text_of_loader = mock.Mock(return_value=text_hash)
        loader = SimpleNamespace(is_ready=answer, text_hash=text_of_loader)
        NextText(loader, stop).begin_step(11)
        answer.assert_called_once_with(11)
    agreed = ranks.finish()
    assert (agreed.waits_for_text, agreed.text_failed, agreed.text_differs) == (
        waits,
        failed,
        differs,
    )
    assert agreed.agreed == failed and not agreed.signal


def test_a_signal_to_one_rank_stops_all_and_stays(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    ranks.stops[1].received = signal.SIGTERM
    for stop in ranks.stops:
        stop.start_sync()
    assert ranks.finish().signal == signal.SIGTERM
    ranks.stops[1].received = 0
    for stop in ranks.stops:
        stop.start_sync()
    agreed = ranks.finish()
    assert agreed.signal == signal.SIGTERM and agreed.agreed


def test_what_is_wrong_with_the_text_is_raised_on_all_ranks_what_a_person_can_mend_first(
    monkeypatch,
):
    stop = StopRequest()
    text = NextText(SimpleNamespace(failure=None), stop)
    text.raise_failure()  # nothing has failed
    stop.text_failed = True
    passing = PreparingFailed("the hub is down")
    wrong = ConfigError("a.jsonl:3: no text")
    for failures, raised in (
        ([None, passing, wrong], wrong),
        ([None, passing, OSError()], passing),
    ):
        monkeypatch.setattr("lifecycle.text.all_gather_objects", lambda _, f=failures: f)
        with pytest.raises(type(raised)) as caught:
            text.raise_failure()
        assert caught.value is raised


def test_nodes_with_other_text_are_named_with_the_first_segment_that_differs(monkeypatch):
    """Four ranks on three nodes, two sources."""
    hosts = ["a", "b", "b", "c"]
    ours = [["1", "2", "3"], ["4"]]
    theirs = [["1", "x", "y"], ["4"]]
    sources = [SimpleNamespace(folder=folder) for folder in ("p", "q")]
    growing = SimpleNamespace(sources=sources, segments=lambda step: ours if step == 8 else None)
    text = NextText(SimpleNamespace(dataset=SimpleNamespace(growing=growing)), StopRequest())
    text.step = 7
    for of_last, problems in (
        (
            [["1", "2", "3"], ["z"]],
            [
                "b has other text in segment 1 of p than rank 0's node: the sources on their disks differ",
                "c has other text in segment 0 of q than rank 0's node: the sources on their disks differ",
            ],
        ),
        (None, ["the nodes have prepared other validation text than rank 0's"]),
    ):
        segments = [ours, theirs, theirs, of_last] if of_last else [ours] * 4
        gather = mock.Mock(side_effect=[hosts, segments])
        monkeypatch.setattr("lifecycle.text.all_gather_objects", gather)
        assert [*text._difference().problems] == problems
        gather.assert_called_with(ours)  # those up to the step that comes next


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("os.kill(os.getpid(), 15)\nwith stop.ends_process(): pass", -signal.SIGTERM),
        ("with stop.ends_process(): os.kill(os.getpid(), 2)", -signal.SIGINT),
        ("os.kill(os.getpid(), 10)\nwith stop.ends_process(): pass", 0),  # USR1: it may save later
        ("with stop.ends_process(): pass\nos.kill(os.getpid(), 15)", 0),
    ],
)
def test_a_rank_that_may_be_alone_is_ended_also_by_what_came_before_it_waits(program, code):
    begin = (
        "import os\nfrom lifecycle.stop import StopRequest\nstop = StopRequest()\nstop.listen()\n"
    )
    assert subprocess.run([sys.executable, "-c", begin + program], cwd=REPO).returncode == code


def test_what_is_wrong_with_devices_is_told_once_a_node():
    def of(host: str, *problems: str) -> dict:
        return {"host": host, "type": None if problems else "cuda", "problems": problems}

    assert problems_of_devices([of("a")]) == problems_of_devices([of("a"), of("b")]) == []
    assert problems_of_devices([of("a", "x", "y")]) == ["x", "y"]
    assert problems_of_devices([of("a"), of("b", "x")]) == ["b: x"]
    reports = [of("a", "x"), of("a", "x"), of("b"), of("c", "x")]
    assert problems_of_devices(reports) == ["a: x", "c: x"]
