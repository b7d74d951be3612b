"""A failure of a rank: the exit code, the root cause as the last lines, and what is started again."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from tests.conftest import REPO, launch, rows
from tests.launch.conftest import LONG

TIMEOUTS = {"step_timeout_seconds": 6.0, "start_timeout_seconds": 60.0}
HANGS = "this rank hangs, or waits"
SILENT = "no error from rank 1, step 3, phase step: killed, stopped, or unable to answer"
KILLED = "killed by SIGKILL (is the host out of memory?)"
# a fault of rank 1 in step 3, the last lines
FAULTS = [
    ("killed", ["failed first on rank 1, step 3, phase step:", KILLED]),
    ("raising", ["failed first on rank 1, step 3", "RuntimeError: an error of a fork"]),
    # both ranks are in one phase: either may be first
    ("receiving", ["failed first on rank", HANGS]),
    ("suspended", ["failed first on rank 0", HANGS, SILENT]),
]


@pytest.mark.parametrize(("fault", "last_lines"), FAULTS)
def test_root_cause_comes_last(launched, write_config, fault, last_lines):
    run = launched(write_config("r", **LONG, run=TIMEOUTS), nproc=2, fault=f"{fault} 1 3")
    code, output = run.end()
    assert code == 1, output
    position = output.index("the log of every rank is in")
    for line in last_lines:
        position = output.index(line, position)
    assert last_lines[-1] in output.splitlines()[-1] or "as far as that" in output.splitlines()[-1]
    assert fault != "receiving" or "in recv" in output  # what each rank was doing
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", code)


def test_out_of_memory_in_the_first_step_is_not_retried(launched, write_config):
    """It ends with the command that says what would fit."""
    path = write_config("r", **LONG)
    run = launched(path, "--optim.lr=0.001", fault="memory 0 1", MAX_RESTARTS="2")
    code, output = run.end()
    assert code == 1 and output.count("failed first") == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("what would fit: ")
    assert last.endswith("r.toml --optim.lr=0.001 --dry-run --world-size=1")


def test_ranks_of_a_restart_read_the_configuration_of_the_launch(launched, write_config):
    """The file is edited meanwhile. `checkpoint.resume = N` counts in the first attempt alone."""
    path = write_config("r", train={"steps": 4}, checkpoint={"save_every_steps": 2})
    assert launch(path).returncode == 0
    path = write_config("r", train={"steps": 8}, checkpoint={"save_every_steps": 2, "resume": 2})
    run = launched(path, nproc=2, pause="step", fault="killed 1 7", MAX_RESTARTS="1")
    run.wait_for(run.paused.exists)
    path.write_text("[model]\n")
    code, output = run.end()
    assert code == 0, output
    assert "resuming after step 2" in output and "resuming after step 6" in output
    assert [row["step"] for row in rows(run.folder)] == [*range(1, 9)]


def test_full_disk_costs_checkpoints_and_the_last_one_the_exit_code(launched, write_config):
    """Files of more than 256 KiB cannot be written."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))

    path = write_config("r", checkpoint={"save_every_steps": 2})
    # preflight would refuse the launch, but does not know how much is saved where some is frozen
    options = ["--model.ffn_dim=800", '--model.freeze=["head.norm*"]']
    done = subprocess.run(
        [REPO / "run_train.sh", path, *options],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    folder = path.parent / "outputs/r"
    assert done.returncode == 1, done.stderr
    assert "not saved" in done.stdout and "File too large" in done.stderr.splitlines()[-1]
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 0)
