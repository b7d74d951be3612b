"""How processes end with each other."""

import signal
import subprocess
import sys

from tests.conftest import REPO

LAUNCHER = """
import functools, os, subprocess, sys, time
from system.processes import die_with_parent

def late(parent):
    print("forked", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent(parent)

begin = functools.partial(late, os.getpid())
subprocess.run(["touch", sys.argv[1]], start_new_session=True, preexec_fn=begin)
"""


def test_launcher_that_is_killed_while_it_starts_its_ranks_starts_none(tmp_path):
    """Between the fork and the request to die with it: the rank has another parent by then."""
    command = [sys.executable, "-c", LAUNCHER, tmp_path / "began"]
    launcher = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "forked\n"
    launcher.kill()
    assert launcher.stdout.read() == ""  # its end: the rank has ended, too
    assert launcher.wait() == -signal.SIGKILL
    assert not (tmp_path / "began").exists()
