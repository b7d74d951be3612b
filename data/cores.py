"""How many cores this process may use."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


def usable_cores() -> int:
    """Those of its affinity or, in a container, of its control group's quota."""
    quotas = [quota for quota in map(_quota, _control_groups()) if quota]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _control_groups() -> Iterator[pathlib.Path]:
    """The folders of this process's control group, and of those that it is in."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "cpu", "cpu,cpuacct"):
                continue
            root = pathlib.Path("/sys/fs/cgroup", controllers)
            group = root / name.lstrip("/")
            yield group
            yield from (parent for parent in group.parents if root in parent.parents)
            yield root  # in a container, its own


def _quota(group: pathlib.Path) -> int | None:
    """A control group's limit in cores, rounded up; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    with contextlib.suppress(OSError, ValueError):
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        return -(-quota // period) if quota > 0 else None
    return None
