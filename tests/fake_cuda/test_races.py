"""No stream uses memory that another may still use: FSDP2's buffers in pools of their own and, with
gather_once, in one pool (parallel/memory_pool.py)."""

import pathlib

import pytest

from tests.fake_cuda import configurations
from tests.fake_cuda.configurations import Text
from tests.fake_cuda.races import FAULTS

ONE_POOL = {"gather_once": True}
# Of the steps' two micro-batches, the second adds to gradients. Activations are larger than a unit's
# parameters, so that an all-gather takes what they leave; and larger than 1 MiB: the allocator keeps
# smaller blocks elsewhere.
SIZES = {
    "model": {"dim": 64, "ffn_dim": 256, "n_layers": 4},
    "train": {"steps": 3, "seq_len": 1024, "global_batch_size": 16},
}
CASES = {
    "pools-of-their-own": {},
    "one-pool": ONE_POOL,
    "one-pool-kept": ONE_POOL | {"reshard_after_forward": False},
    "one-pool-two-ahead": ONE_POOL | {"prefetch_forward": 2, "prefetch_backward": 2},
    "one-pool-deferred": ONE_POOL | {"sync_every_micro_batch": False},
    "one-pool-recomputed": ONE_POOL | {"recompute": "full"},
    "one-pool-tp": ONE_POOL | {"tp": 2},
    "one-pool-bfloat16": ONE_POOL | {"reduce_dtype": "bfloat16"},
}
QUICK = {"pools-of-their-own", "one-pool"}


def races(text: Text, folder: pathlib.Path, options: dict, *arguments: str) -> list[str]:
    path = configurations.write_small("races", text, folder, parallel=options, **SIZES)
    report, _ = configurations.run_alone(path, 8, "--races", *arguments)
    assert len(report["steps"]) == 3
    return report["races"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in CASES]
)
def test_no_memory_is_used_by_two_streams_at_once(
    name: str, text: Text, tmp_path: pathlib.Path
) -> None:
    assert races(text, tmp_path, CASES[name]) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_rule_is_seen(fault: str, text: Text, tmp_path: pathlib.Path) -> None:
    assert races(text, tmp_path, ONE_POOL, f"--plant-race={fault}")
