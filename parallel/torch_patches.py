"""What reaches into torch because no argument of torch does it, each for the versions that need it, with its test. What
only optional rooms need stands in optional_patches.py."""

import datetime

import torch.distributed as dist


def set_default_timeout(timeout: datetime.timedelta) -> None:
    """Sets the timeout of groups that DeviceMesh creates: in all versions these take torch's default, 30 minutes, not
    that of init_process_group(). Test: test_parallel.py, test_all_process_groups_have_the_runs_timeout."""
    dist.distributed_c10d.default_pg_timeout = timeout
