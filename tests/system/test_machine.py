"""The cores that a process may use, in a container too."""

import pytest

from system.machine import control_groups, usable_cores

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "name, content, cores",
    [
        ("cpu.max", "150000 100000", 2),
        ("cpu.max", "max 100000", 64),
        ("cpu.cfs_quota_us", "300000", 3),  # version 1, of each cpu.cfs_period_us
        ("cpu.cfs_quota_us", "-1", 64),
        ("other", "", 64),
    ],
)
def test_cores_are_those_that_a_container_may_use(name, content, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / name).write_text(content)
    monkeypatch.setattr("system.machine.control_groups", lambda *_: [tmp_path / "inner", tmp_path])
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(64)})
    assert usable_cores() == cores


def test_control_groups_are_those_of_the_process_and_around_it(tmp_path, monkeypatch):
    """A name may hold colons. In version 1 each controller has groups of its own."""
    monkeypatch.setattr("system.machine.GROUPS", tmp_path)
    monkeypatch.setattr("system.machine.MEMBERSHIP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("7:memory:/m\n4:cpu:/a/b\n0::/pods/cri:containerd:1\n")
    groups = [str(group.relative_to(tmp_path)) for group in control_groups("cpu")]
    assert groups == ["cpu/a/b", "cpu/a", "cpu", "pods/cri:containerd:1", "pods", "."]
