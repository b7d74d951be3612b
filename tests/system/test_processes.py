"""Limits, printing, and the end of a process with its parent."""

import resource
import subprocess
import sys
from unittest import mock

import pytest

from system.processes import printable, python_command, raise_file_limit

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("is_unlimited", [False, True])
def test_as_many_files_may_be_open_as_the_hard_limit_allows(monkeypatch, is_unlimited):
    hard = resource.RLIM_INFINITY if is_unlimited else 4096  # unlimited on macOS
    limits = mock.Mock()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (24, hard))
    monkeypatch.setattr(resource, "setrlimit", limits)
    raise_file_limit()
    expected = 10_240 if is_unlimited else 4096
    limits.assert_called_once_with(resource.RLIMIT_NOFILE, (expected, expected))


def test_control_characters_do_not_reach_the_terminal():
    assert printable("é\tx\n\x1b[2J\r\x00") == "é\tx\n\\x1b[2J\\r\\x00"


def test_closed_terminal_is_no_error():
    """At the exit neither."""
    statement = "import os; os.close(2); from system.processes import print_error; print_error('x')"
    assert subprocess.run(python_command(statement)).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_process_ends_with_its_parent():
    child = "from system.processes import die_with_parent; die_with_parent(); print(1, flush=True)"
    parent = (
        "import subprocess, time; from system.processes import python_command\n"
        f"child = subprocess.Popen(python_command({child + '; import time; time.sleep(60)'!r}))\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(python_command(parent), stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "1\n"
    process.kill()
    assert process.stdout.read() == ""  # it ends once both have ended
