"""The process group that a run starts: limits, the types of all ranks' devices, timeouts."""

import pytest

from tests import cases


def test_a_rank_may_open_as_many_files_as_its_hard_limit(on_ranks):
    """Four ranks with a soft limit below what their connections need."""
    for soft, hard in on_ranks(4, cases.file_limits, (24, 4096)):
        assert soft == hard == 4096


@pytest.mark.parametrize(
    "types, told",
    [
        (["cpu", "cpu"], ""),
        (
            ["cuda", "cpu"],
            "rank 1 on node1 would train on cpu, rank 0 on node0 on cuda: all need the same type of device",
        ),
        (
            ["cpu", "cuda"],
            "rank 1 on node1 would train on cuda, rank 0 on node0 on cpu: all need the same type of device",
        ),
        (["cuda", "none"], "node1: rank 1 has no GPU"),
    ],
    ids=str,
)
def test_ranks_with_other_devices_are_refused_on_all(on_ranks, types, told):
    """Over NCCL here and gloo there they would wait for each other."""
    assert [
        error[: len(told) or None] for error in on_ranks(2, cases.device_error, types, timeout=60)
    ] == [told] * 2


def test_all_process_groups_have_the_runs_timeout(on_ranks):
    """Also those of the mesh, which would have torch's 30 minutes."""
    assert on_ranks(4, cases.timeouts) == [{7260.0}] * 4
