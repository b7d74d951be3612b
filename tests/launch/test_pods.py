"""Ranks that another launcher starts, as the pods of Kubeflow are: torchrun, or plain Python, by their variables."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from system import read_json
from tests.conftest import REPO, launch, rows
from tests.launch.conftest import LONG

TORCHRUN = ["-m", "torch.distributed.run"]


def operator_environment(pod: int, port: str) -> dict[str, str]:
    """What Kubeflow's training operator sets in a PyTorchJob's pod, one process in each of two."""
    plain = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(pod)}
    return plain | trainer_environment(pod, port)


def trainer_environment(pod: int, port: str) -> dict[str, str]:
    """What Kubeflow's Trainer sets in a TrainJob's pod, and docs/cluster.md in a JobSet's."""
    nodes = {"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2", "PET_NODE_RANK": str(pod)}
    return nodes | {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}


def start_pods(
    program: list[str], environment: Callable, path: pathlib.Path
) -> list[subprocess.Popen]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    command = [sys.executable, *program, REPO / "train.py", path]
    variables = [os.environ | environment(pod, port) for pod in range(2)]
    return [subprocess.Popen(command, env=env, cwd=REPO) for env in variables]


@pytest.mark.parametrize(
    "program, environment", [(TORCHRUN, trainer_environment), ([], operator_environment)]
)
def test_two_pods_train_as_one_process_does(write_config, program, environment):
    path = write_config("one")
    assert launch(path).returncode == 0
    expected = rows(path.parent / "outputs/one")
    path = write_config("pods")
    pods = start_pods(program, environment, path)
    assert [pod.wait(120) for pod in pods] == [0, 0]
    found = rows(path.parent / "outputs/pods")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], 1e-5)


@pytest.mark.parametrize("program, code", [(TORCHRUN, 1), ([], 75)])
def test_pods_that_are_stopped_save_and_are_no_success(write_config, program, code):
    """Kubernetes starts again only what failed."""
    path = write_config("pods", **LONG)
    pods = start_pods(program, operator_environment, path)
    folder = path.parent / "outputs/pods"
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not rows(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
    assert [pod.wait(120) for pod in pods] == [code, code]
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert (folder / f"checkpoints/step-{status['step']:08d}").exists()
