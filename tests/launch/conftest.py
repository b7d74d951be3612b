"""Launches as a user makes them: ./run_train.sh in a process of its own, signals to its processes, and a copy of the
repository in which ranks pause or fail where a test says."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from system import read_json
from tests.conftest import REPO, copy_tracked

# of a run that a test stops
LONG = {"train": {"steps": 1000}, "optim": {"schedule_steps": 1000}, "checkpoint": {}}


class Launch:
    """A launch in the background. Its output goes to a file."""

    def __init__(self, path: pathlib.Path, *words: str, nproc: int, repo: pathlib.Path, **env: str):
        self.path = path
        self.folder = path.parent / "outputs" / path.stem
        self.log = path.with_suffix(".log")
        self.paused = path.with_suffix(".paused")
        self.process = subprocess.Popen(
            [repo / "run_train.sh", path, *words],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=path.parent,
            env={**os.environ, "PYTHON": sys.executable, "NPROC": str(nproc), **env},
            start_new_session=True,
        )

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def has_trained(self) -> bool:
        metrics = self.folder / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def processes(self) -> dict[str, int]:
        """Process ids by what they are: launcher, torchrun, rank 0, rank 1, ..."""
        found = {"launcher": self.process.pid}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                words = (entry / "cmdline").read_text(errors="replace").split("\0")
                lines = (entry / "environ").read_text(errors="replace").split("\0")
                variables = dict(line.split("=", 1) for line in lines if "=" in line)
                if str(self.path) not in words or int(entry.name) == self.process.pid:
                    continue
                if any("launch.agent" in word for word in words):
                    found["torchrun"] = int(entry.name)
                elif any(word.endswith("train.py") for word in words):
                    found[f"rank {variables.get('RANK', 0)}"] = int(entry.name)
        return found

    def wait_for_processes(self, seconds: float = 60) -> None:
        """Until none lives but, perhaps, the launcher."""
        deadline = time.monotonic() + seconds
        while self.processes().keys() != {"launcher"}:
            assert time.monotonic() < deadline, f"alive too long: {self.processes()}"
            time.sleep(0.02)

    def signal(self, number: int, whom: str = "launcher") -> None:
        os.kill(self.processes()[whom], number)

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """(exit code, output). None of its processes may outlive it."""
        code = self.process.wait(seconds)
        time.sleep(0.2)
        assert self.processes() == {"launcher": self.process.pid}
        return code, self.log.read_text()

    def status(self) -> dict:
        return read_json(self.folder / "status.json")


@pytest.fixture
def launched(request) -> Iterator[Callable[..., Launch]]:
    """Starts launches, which pause or fail if that is asked for; what still runs when the test ends is killed."""
    launches: list[Launch] = []

    def start(
        path: pathlib.Path, *words: str, nproc: int = 1, pause: str = "", fault: str = "", **env
    ) -> Launch:
        repo = request.getfixturevalue("pausing") if pause or fault else REPO
        env |= {"PAUSE": pause, "PAUSED": str(path.with_suffix(".paused"))}
        env |= {"FAULT": fault or "none 0 0", "FAULTED": str(path.with_suffix(".faulted"))}
        launches.append(Launch(path, *words, nproc=nproc, repo=repo, **env))
        return launches[-1]

    yield start
    for launch in launches:
        for process in launch.processes().values():
            if launch.process.poll() is None or process != launch.process.pid:
                os.kill(process, signal.SIGKILL)


# Appended to files of a copy of the repository.
# PAUSE: the moment in which each process waits for two seconds, once it has made the file PAUSED.
# FAULT: "kind rank step", once; FAULTED is the file that says that it has been.
PAUSES = {
    "model/llama.py": """
import faults
faults.pause("import")
""",
    "checkpoint/save.py": """
class Saver(Saver):
    def write(self, *arguments):
        import faults
        faults.pause("save")
        super().write(*arguments)
""",
    "optim.py": """
def learning_rate(o, end, step, learning_rate=learning_rate):
    import faults
    faults.pause("step" if step == 3 else "")
    faults.begin_step(step)
    return learning_rate(o, end, step)
""",
    "faults.py": """
import os, pathlib, signal, time
import torch

def pause(moment):
    if os.environ["PAUSE"] == moment:
        pathlib.Path(os.environ["PAUSED"]).touch()
        time.sleep(2)

def begin_step(step):
    kind, rank, at = os.environ["FAULT"].split()
    faulted = pathlib.Path(os.environ["FAULTED"])
    if (os.environ.get("RANK", "0"), str(step)) != (rank, at) or faulted.exists():
        return
    faulted.touch()
    if kind == "receiving":
        torch.distributed.recv(torch.zeros(1), src=1 - int(rank), tag=7)
    if kind == "raising":
        raise RuntimeError("an error of a fork")
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "suspended": signal.SIGSTOP}[kind])
""",
}


@pytest.fixture(scope="session")
def pausing(tmp_path_factory) -> pathlib.Path:
    """A copy of the repository whose ranks pause or fail."""
    copy = copy_tracked(tmp_path_factory.mktemp("repo"), ("tests", "docs", "benchmarks"))
    for name, code in PAUSES.items():
        with (copy / name).open("a") as file:
            file.write(code)
    return copy
