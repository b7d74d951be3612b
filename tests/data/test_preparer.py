"""Runs that train while their text is prepared: whole launches, with the process that prepares."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

import config
from run.preparer import Preparer
from tests.conftest import REPO, loader_of, prepare_one, rows, words

FILES = 6
STEPS = 200
TEXTS = [words(i, 60 + 37 * i % 50) for i in range(600)]


@pytest.fixture
def path(write_config, prepared, tmp_path) -> pathlib.Path:
    """A configuration of six files, in tmp_path/texts, that are prepared into tmp_path/p."""
    (tmp_path / "texts").mkdir()
    for number in range(FILES):
        write_rows(tmp_path, number)
    data = {
        "source": str(tmp_path / "texts/*.jsonl"),
        "path": str(tmp_path / "p"),
        "tokenizer": str(prepared / "tokenizer.model"),
        "order": "growing",
    }
    return write_config(
        "r",
        data=data,
        train={"steps": STEPS, "seq_len": 32, "global_batch_size": 8, "micro_batch_size": 1},
        checkpoint={"save_every_steps": 1000},
        log={"every_steps": 1, "tensorboard": False},
        eval=None,
    )


def write_rows(folder: pathlib.Path, number: int, wrong_row: int | None = None) -> str:
    """Writes a file of 100 rows; returns its path. wrong_row: from 1."""
    lines = [json.dumps({"text": text}) for text in TEXTS[100 * number : 100 * number + 100]]
    if wrong_row:
        lines[wrong_row - 1] = '{"text": '
    file = folder / f"texts/part{number}.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


class Launch:
    """`run_train.sh` on small borders; its output in a file."""

    def __init__(
        self,
        path: pathlib.Path,
        *options: str,
        ranks: int = 1,
        slowly: bool = False,
    ):
        """slowly: a few records are made before the first step, and five a second after it."""
        self.path = path
        self.log = path.with_suffix(f".{time.monotonic()}.log")
        self.folder = path.parent / "outputs/r"
        folders = [str(REPO / "tests/data/small_borders"), str(REPO)]
        environment = {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(folders),
            "NPROC": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        if slowly:
            environment["SLOWLY_AFTER"] = str(self.folder / "metrics.jsonl")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [REPO / "run_train.sh", path, *options],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> int:
        """Waits; the exit code."""
        return self.process.wait(180)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def output(self) -> str:
        return self.log.read_text()

    def trained(self) -> int:
        """Steps with a row."""
        return len(rows(self.folder)) if (self.folder / "metrics.jsonl").exists() else 0

    def preparer(self) -> int:
        """The process that prepares."""
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().decode()
                parent = re.search(r"PPid:\s*(\d+)", (process / "status").read_text())
                if "data.prepare" in command and parent and int(parent[1]) == self.process.pid:
                    return int(process.name)
        raise AssertionError(f"nothing prepares: {self.output()}")

    def has_samples_of_prepared_text(self, folder: pathlib.Path) -> bool:
        """Whether each step's digest is that of the same text, prepared before into a folder."""
        cfg = config.load(str(self.path), [f"--data.path={folder}"])
        prepare_one(cfg)
        loader = loader_of(cfg)
        return all(next(loader).digest == row["batch_digest"] for row in rows(self.folder))


@pytest.fixture(autouse=True)
def small_borders(monkeypatch):
    """In this process, too: those of tests/data/small_borders."""
    monkeypatch.setattr("data.order.FIRST_BORDER", 4096)
    monkeypatch.setattr("data.order.BORDER_STEP", 8192)
    for module in ("order", "writer", "prepare"):
        monkeypatch.setattr(f"data.{module}.HELD_OUT_OF", 16384)


pytestmark = pytest.mark.slow


def test_samples_are_those_of_text_that_was_prepared_before(path, tmp_path):
    """On two ranks; the process that prepares is killed twice."""
    launch = Launch(path, ranks=2, slowly=True)
    for steps in (5, 30):
        launch.wait_for(lambda steps=steps: launch.trained() > steps)
        os.kill(launch.preparer(), signal.SIGKILL)
    assert launch.end() == 0, launch.output()
    assert launch.output().count("ended with -9; starting another") == 2
    assert launch.trained() == STEPS
    assert launch.has_samples_of_prepared_text(tmp_path / "before")


def test_wrong_row_ends_the_run_after_a_save_and_once_mended_it_resumes(path, tmp_path):
    """On two ranks, then on one; the row is in the fifth file that is read."""
    prepare_one(config.load(str(path), [f"--data.path={tmp_path / 'before'}"]))
    files = json.loads((tmp_path / "before/manifest.json").read_text())["files"]
    number = int(pathlib.Path(files[4][0]).stem[-1])
    file = write_rows(tmp_path, number, wrong_row=51)

    launch = Launch(path, ranks=2, slowly=True)
    assert launch.end() == 2, launch.output()
    assert f"{file}: row 51: is not valid JSON" in launch.output()
    assert "the text is wrong" in launch.output().splitlines()[-1]
    trained = launch.trained()
    assert 5 < trained < STEPS
    assert (launch.folder / f"checkpoints/step-{trained:08d}").exists()
    assert json.loads((launch.folder / "status.json").read_text())["state"] == "failed"

    write_rows(tmp_path, number)
    again = Launch(path)
    assert again.end() == 0, again.output()
    assert again.trained() == STEPS
    assert again.has_samples_of_prepared_text(tmp_path / "mended")


def test_stop_while_text_is_awaited(path, tmp_path):
    """TERM to the launcher, while the process that prepares is suspended."""
    launch = Launch(path, ranks=2, slowly=True)
    launch.wait_for(lambda: launch.trained() > 5)
    preparer = launch.preparer()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, preparer) == min(19, usual + 19)  # behind the ranks
    os.kill(preparer, signal.SIGSTOP)
    launch.wait_for(lambda: "waiting for text: " in launch.output())
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 75, launch.output()
    assert not pathlib.Path(f"/proc/{preparer}").exists()
    trained = launch.trained()
    status = json.loads((launch.folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("preempted", trained)

    again = Launch(path)
    assert again.end() == 0, again.output()
    assert again.trained() == STEPS
    assert again.has_samples_of_prepared_text(tmp_path / "before")


def test_process_that_fails_again_and_again_ends_a_launch_that_waits_for_it(
    path, monkeypatch, capfd
):
    """As on a full disk: while nothing trains, nobody else would notice."""
    monkeypatch.setattr("run.preparer.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("run.preparer.LONGEST_PAUSE", 0.1)
    monkeypatch.setattr("run.preparer.MAIN", "sys.exit(1)")
    with pytest.raises(OSError, match="fails again and again"):
        Preparer(ranks=1).begin(config.load(str(path), ["--data.order=global"]))
    assert capfd.readouterr().err.count("ended with 1; starting another") > 2
