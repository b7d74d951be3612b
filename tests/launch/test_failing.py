"""A failure of a rank: the exit code, the root cause as the last lines, and what is started again."""

import pytest

from tests.conftest import launch, rows
from tests.launch.conftest import LONG

TIMEOUTS = {"step_timeout_seconds": 6.0, "start_timeout_seconds": 60.0}
HANGS = "this rank hangs, or waits"
SILENT = "no error from rank 1, step 3, phase step: killed, stopped, or unable to answer"
# a fault of rank 1 in step 3, the last lines
FAULTS = [
    ("killed", ["failed first on rank 1, step 3, phase step:", "killed by SIGKILL"]),
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
    run = launched(write_config("r", **LONG), fault="memory 0 1", MAX_RESTARTS="2")
    code, output = run.end()
    assert code == 1 and output.count("failed first") == 1, output
    assert "what would fit: " in output.splitlines()[-1]


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
