"""No stream uses memory that another may still use: FSDP2's buffers in pools of their own and, with gather_once, in one
pool (parallel/memory_pool.py)."""

import pytest

from tests.fake_cuda.build import run_alone
from tests.fake_cuda.configurations import marked, write_small

# Of the steps' two micro-batches, the second adds to gradients. Activations are larger than a unit's parameters, so
# that an all-gather takes what they leave; and larger than 1 MiB: the allocator keeps smaller blocks elsewhere.
SIZES = """--model.dim=64 --model.ffn_dim=256 --model.n_layers=4 --train.steps=3 --train.seq_len=1024
    --train.global_batch_size=16"""
ONE_POOL = "--parallel.gather_once=true"
CASES = {
    "pools-of-their-own": "",
    "one-pool": ONE_POOL,
    "one-pool-kept": f"{ONE_POOL} --parallel.reshard_after_forward=false",
    "one-pool-two-ahead": f"{ONE_POOL} --parallel.prefetch_forward=2 --parallel.prefetch_backward=2",
    "one-pool-deferred": f"{ONE_POOL} --parallel.sync_every_micro_batch=false",
    "one-pool-recomputed": f"{ONE_POOL} --parallel.recompute=full",
    "one-pool-tp": f"{ONE_POOL} --parallel.tp=2",
    "one-pool-bfloat16": f"{ONE_POOL} --parallel.reduce_dtype=bfloat16",
}


@pytest.mark.parametrize("name", marked(CASES, {"pools-of-their-own", "one-pool"}, "one-pool"))
def test_no_memory_is_used_by_two_streams_at_once(name, tmp_path):
    path = write_small(tmp_path, f"{SIZES} {CASES[name]}")
    report, _ = run_alone(path, 8, "--races")
    assert len(report["steps"]) == 3
    assert report["races"] == []
