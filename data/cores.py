"""How many cores this process may use."""

import contextlib
import math
import os
import pathlib
from collections.abc import Iterator


def usable_cores() -> int:
    """The cores of its affinity or, in a container, of its control group's quota if that is
    less."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    for group in _control_groups():
        quota = _quota(group)
        if quota:
            cores = min(cores, quota)
    return max(1, cores)


def _control_groups() -> Iterator[pathlib.Path]:
    """The folders of this process's control group and of the groups that contain it."""
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        root = pathlib.Path("/sys/fs/cgroup", controllers)
        group = root / name.lstrip("/")
        while root in group.parents:
            yield group
            group = group.parent
        # in a container, the folder of its own group
        yield root


def _quota(group: pathlib.Path) -> int | None:
    """A control group's limit in cores, rounded up; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        # version 2: "max" in place of the quota means no limit
        quota, period = (group / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):
        # version 1: -1 means no limit
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        if quota > 0:
            return math.ceil(quota / period)
    return None
