"""Jobs on a real SLURM of two nodes on this machine: equal losses, time limits, crashes, scancel."""

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
from tests.conftest import REPO, launch, make_config, rows

pytestmark = [pytest.mark.first, pytest.mark.slow]

# a node's own name does not lead gloo to it: slurm_cluster.sh
OURS = {"PYTHON": sys.executable, "NPROC": "1", "GLOO_SOCKET_IFNAME": "eth0"}
NO_CLUSTER = 77  # what slurm_cluster.sh exits with where there can be none


class Cluster:
    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def run(self, *words: object, **env: str) -> str:
        """A command on the login node; its output."""
        command = [REPO / "tests/slurm_cluster.sh", "in", self.folder, *map(str, words)]
        inherited = {name: value for name, value in os.environ.items() if name != "MAX_RESTARTS"}
        env = inherited | OURS | env
        done = subprocess.run(
            command, cwd=REPO, capture_output=True, text=True, timeout=60, env=env
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, path: pathlib.Path, nodes: int = 2) -> "Job":
        """Both nodes are this machine, and their ranks share its cores."""
        log = self.folder / f"{path.stem}.log"
        options = ["--parsable", f"--nodes={nodes}", "--time=1:0:0", f"--output={log}"]
        number = self.run("sbatch", *options, "run_train.sh", path, OMP_NUM_THREADS="1")
        return Job(self, number.strip(), log, config.run_folder(config.load(str(path)).run))


class Job:
    def __init__(self, cluster: Cluster, number: str, log: pathlib.Path, folder: pathlib.Path):
        self.cluster = cluster
        self.number = number
        self.log_file = log
        self.folder = folder

    def shows(self, field: str) -> str:
        """A field of `scontrol show job`: JobState, Restarts, ExitCode, ..."""
        text = self.cluster.run("scontrol", "show", "job", self.number, "--oneliner")
        shown = re.search(rf"\b{field}=(\S*)", text)
        assert shown, text
        return shown[1]

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    def step(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            problem = f"job {self.number} {self.shows('JobState')}:\n{self.log()}"
            assert time.monotonic() < deadline, problem
            time.sleep(0.25)

    def until_over(self) -> str:
        """Waits for the job's end, returns its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.shows("JobState") in over)
        return self.shows("JobState")

    def ranks(self) -> dict[str, int]:
        """The process of train.py on each node. A process of another namespace is seen from here by its environment."""
        found = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_text().split("\0")
                words = (folder / "cmdline").read_text().split("\0")
            except (OSError, ValueError):  # gone, or none of ours
                continue
            environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
            running = any(word.endswith("/train.py") for word in words[1:3])  # python [-u]
            # not another suite's cluster
            ours = environment.get("SLURM_CONF") == f"{self.cluster.folder}/slurm.conf"
            if running and ours and environment.get("SLURM_JOB_ID") == self.number:
                found[environment["SLURMD_NODENAME"]] = int(folder.name)
        return found

    def hold(self, number: int = signal.SIGSTOP) -> None:
        for process in self.ranks().values():
            os.kill(process, number)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder, script = tmp_path_factory.mktemp("slurm"), REPO / "tests/slurm_cluster.sh"
    started = subprocess.run([script, "up", folder], capture_output=True, text=True, timeout=300)
    if started.returncode == NO_CLUSTER:
        pytest.skip(started.stderr.splitlines()[-1])
    assert started.returncode == 0, started.stderr
    yield Cluster(folder)
    subprocess.run([script, "down", folder], check=True, timeout=60)


@pytest.fixture(scope="module")
def configured(tmp_path_factory, corpus, prepared):
    """Writes a configuration on the prepared corpus; its runs go below its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def write(name: str, steps: int = 60) -> pathlib.Path:
        cfg = make_config(
            data={"source": str(corpus), "path": str(prepared)},
            run={"name": name, "output_dir": str(folder / "outputs")},
            train={"steps": steps},
            checkpoint={"save_every_steps": 20},
        )
        path = folder / f"{name}.toml"
        path.write_text(config.to_toml(cfg))
        return path

    return write


@pytest.fixture(scope="module")
def plain(configured) -> list[dict]:
    """The rows of an uninterrupted run of one process, without SLURM."""
    path = configured("plain")
    done = launch(path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return rows(config.run_folder(config.load(str(path)).run))


@pytest.fixture(scope="module")
def limited(cluster, configured) -> Job:
    """A job whose time limit comes so near, once it trains, that SLURM warns it when it looks next, which it does every
    30 seconds. Its ranks are held meanwhile, so that they are not done by then; the other tests run in that time."""
    began = time.monotonic()
    job = cluster.submit(configured("limited"))
    job.until(lambda: job.step() >= 5)
    job.hold()
    # 300 seconds ahead of it the warning is due: now, however long the machine took until here
    minutes = 5 + int(time.monotonic() - began) // 60
    cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")
    return job


def assert_equal(job: Job, plain: list[dict]) -> None:
    """The job finished its run, with each step once, and the losses of the plain one."""
    assert job.until_over() == "COMPLETED", job.log()
    assert job.status()["state"] == "finished"
    found = rows(job.folder)
    assert [row["step"] for row in found] == list(range(1, 61))
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in plain], rel=1e-5)
    assert [row["batch_digest"] for row in found] == [row["batch_digest"] for row in plain]


def test_a_killed_process_is_started_again(limited, cluster, configured, plain):
    job = cluster.submit(configured("killed"))
    job.until(lambda: (job.folder / "checkpoints/step-00000020").exists())
    os.kill(job.ranks()["n2"], signal.SIGKILL)
    assert_equal(job, plain)
    assert "resuming after step" in job.log() and job.shows("Restarts") == "0"


def test_two_nodes_train_as_one_process_does(limited, cluster, configured, plain):
    """In a job that is requeued once."""
    job = cluster.submit(configured("two"))
    job.until(lambda: job.step() >= 5)
    job.hold()  # not done before SLURM's signal is there
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until(lambda: "SIGUSR1: stopping" in job.log())
    job.hold(signal.SIGCONT)
    assert_equal(job, plain)
    assert job.shows("Restarts") == "1" and job.log().count("resuming after step") == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_scancel_saves_and_requeues_nothing(limited, cluster, configured, nodes):
    job = cluster.submit(configured(f"endless-{nodes}", steps=100000), nodes)
    job.until(lambda: job.step() >= 3)
    cluster.run("scancel", job.number)
    assert job.until_over() == "CANCELLED" and job.shows("Restarts") == "0", job.log()
    job.until(lambda: "submit it again to resume" in job.log())
    status = job.status()
    assert status["state"] == "preempted" and status["step"] == job.step(), job.log()
    assert (job.folder / f"checkpoints/step-{status['step']:08d}").exists()


def test_the_time_limit_saves_and_requeues(limited, cluster, plain):
    limited.until(lambda: "SIGUSR1: stopping" in limited.log())
    cluster.run("scontrol", "update", f"JobId={limited.number}", "TimeLimit=60")
    limited.hold(signal.SIGCONT)
    assert_equal(limited, plain)
    assert limited.shows("Restarts") == "1" and limited.log().count("resuming after step") == 1
