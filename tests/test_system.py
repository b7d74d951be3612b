"""What the operating system is asked for: processes, files, cores and GPUs."""

import contextlib
import errno
import pathlib
import signal
import subprocess
import sys
from unittest import mock

import pytest

import system
from system import control_groups, printable, python_command, usable_cores

pytestmark = pytest.mark.quick

# Processes


def test_control_characters_do_not_reach_the_terminal():
    assert printable("é\tx\n\x1b[2J\r\x00") == "é\tx\n\\x1b[2J\\r\\x00"


def test_closed_terminal_is_no_error():
    """At the exit neither."""
    statement = "import os; os.close(2); from system import print_error; print_error('x')"
    assert subprocess.run(python_command(statement)).returncode == 0


CHILD = "from system import die_with_parent; die_with_parent(); print(1, flush=True)"
PARENT = f"""import subprocess, time; from system import python_command
child = subprocess.Popen(python_command({CHILD + "; import time; time.sleep(9); print(2)"!r}))
time.sleep(60)"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_process_ends_with_its_parent():
    process = subprocess.Popen(python_command(PARENT), stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "1\n"
    process.kill()
    assert process.stdout.read() == ""  # it ends once both have ended
    assert process.wait() == -signal.SIGKILL


# Files and folders


@pytest.mark.parametrize(
    "folder, is_renamed, number, name",
    [
        ("..", False, errno.EACCES, "c"),  # /home may not be open to us
        ("..", False, errno.EIO, ".c.tmp"),
        (".c.tmp", False, errno.EACCES, ".c.tmp"),
        (".", True, errno.EIO, ".c.tmp"),  # the new name may be lost in a power cut
    ],
)
def test_folder_has_its_final_name_only_if_that_is_on_disk(
    tmp_path, monkeypatch, folder, is_renamed, number, name
):
    """The sync of a folder fails before or after the rename."""
    sync = system.sync
    root = tmp_path / "root"
    (root / ".c.tmp").mkdir(parents=True)

    def refuse(path: pathlib.Path) -> None:
        if path == (root / folder).resolve() and (root / "c").exists() == is_renamed:
            raise OSError(number, "no")
        sync(path)

    monkeypatch.setattr(system, "sync", refuse)
    with pytest.raises(OSError) if name == ".c.tmp" else contextlib.nullcontext():
        system.publish(root / ".c.tmp", root / "c")
    assert [path.name for path in root.iterdir()] == [name]


def test_lock_is_held_by_one_until_it_is_released(tmp_path):
    path = tmp_path / ".lock"
    held = system.lock(path)
    with pytest.raises(TimeoutError):
        system.lock(path)
    held.release()
    system.lock(path).release()


def test_disk_without_locks_locks_nothing_and_warns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no")))
    for _ in range(2):
        system.lock(tmp_path / ".lock").release()
    assert capsys.readouterr().err.count(f"{tmp_path}: no locks on this file system") == 1


# Cores


@pytest.mark.parametrize(
    "name, content, cores",
    [
        ("cpu.max", "150000 100000", 2),
        ("cpu.cfs_quota_us", "300000", 3),  # version 1, of each cpu.cfs_period_us
        ("cpu.cfs_quota_us", "-1", 64),
    ],
)
def test_cores_are_those_that_a_container_may_use(name, content, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / name).write_text(content)
    monkeypatch.setattr("system.control_groups", lambda *_: [tmp_path / "inner", tmp_path])
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(64)})
    assert usable_cores() == cores


def test_control_groups_are_those_of_the_process_and_around_it(tmp_path, monkeypatch):
    """A name may hold colons. In version 1 each controller has groups of its own."""
    monkeypatch.setattr("system.GROUPS", tmp_path)
    monkeypatch.setattr("system.MEMBERSHIP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("7:memory:/m\n4:cpu:/a/b\n0::/pods/cri:containerd:1\n")
    groups = [str(group.relative_to(tmp_path)) for group in control_groups("cpu")]
    assert groups == ["cpu/a/b", "cpu/a", "cpu", "pods/cri:containerd:1", "pods", "."]
