"""The planner's model of torch's CUDA allocator against cases by hand, and which pool holds what."""

from types import SimpleNamespace

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

import config
from model.build import meta_model
from tests.conftest import REPO
from tools.planner.pools import GRANULE, ROUNDED_TO, Pool, Segment, pool_of, stream_now
from tools.planner.simulate import Step, simulate

MIB = 2**20


def step_of(*options: str, ranks: int = 8) -> Step:
    words = ["--model.n_layers=8", "--train.global_batch_size=16", *options]
    return simulate(config.load(str(REPO / "configs/llama8b.toml"), words), ranks)


def test_a_block_takes_the_smallest_hole_that_is_large_enough():
    segment = Segment(GRANULE)
    a, b, c, d, e = (segment.allocate(size * MIB) for size in (8, 4, 6, 4, 4))
    assert (a, b, c, d, e) == (0, 8 * MIB, 12 * MIB, 18 * MIB, 22 * MIB)
    segment.free(a, 8 * MIB)
    segment.free(c, 6 * MIB)
    # 6 of the 8 and of the 6 MiB: the latter; then 3, of the 8; then 6, behind the last
    assert segment.allocate(6 * MIB) == c
    assert segment.allocate(3 * MIB) == a
    assert segment.allocate(6 * MIB) == 26 * MIB
    assert segment.reserved == 2 * GRANULE  # 32 MiB


def test_holes_join_and_the_last_one_is_no_hole():
    segment = Segment(GRANULE)
    blocks = [(segment.allocate(size * MIB), size * MIB) for size in (5, 5, 5, 5)]
    for address, size in (blocks[0], blocks[2], blocks[1]):
        segment.free(address, size)
    assert segment.holes == {0: 15 * MIB}
    segment.free(*blocks[3])
    assert segment.holes == {} and segment.end == 0
    # what is mapped stays, and is used before more is
    assert segment.reserved == GRANULE
    assert segment.allocate(20 * MIB) == 0 and segment.reserved == GRANULE
    segment.allocate(1)
    assert segment.reserved == 2 * GRANULE


def test_small_blocks_have_a_segment_of_their_own():
    """Sizes as in c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer."""
    assert ROUNDED_TO == 512
    pool = Pool()
    pool.allocate(MIB)
    assert pool.reserved == 2 * MIB
    pool.allocate(MIB + 512)
    assert pool.reserved == (2 + 20) * MIB


def test_in_one_pool_is_what_is_last_used_by_the_computation():
    """As parallel/memory_pool.py says: all-gathers, and reduced gradients that become a parameter's as they are."""
    separate = config.Parallel()
    for stream in ("computation", "all-gather", "reduce-scatter", "all-reduce"):
        for adds in (False, True):
            assert pool_of(stream, separate, adds) == stream
    for dtype in ("float32", "bfloat16"):
        one = config.Parallel(one_memory_pool=True, reduce_dtype=dtype)
        for adds in (False, True):
            becomes_gradient = dtype == "float32" and not adds
            pools = {
                "computation": "computation",
                "all-gather": "computation",
                "reduce-scatter": "computation" if becomes_gradient else "reduce-scatter",
                "all-reduce": "all-reduce",
            }
            assert {stream: pool_of(stream, one, adds) for stream in pools} == pools


def test_each_stream_that_fsdp2_has_is_a_pool():
    """By its own attributes: one that a version of torch adds would be found here."""
    context = FSDPCommContext()
    model = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_comm_ctx=context))
    assert stream_now(model) == "computation"  # before the first forward
    context.lazy_init(torch.device("cpu"))
    found = {}
    for attribute, stream in vars(context).items():
        if isinstance(stream, torch.cpu.Stream):
            with torch.cpu.stream(stream):
                found[attribute] = stream_now(model)
    assert found == {
        "all_gather_copy_in_stream": "all-gather",
        "all_gather_stream": "all-gather",
        "reduce_scatter_stream": "reduce-scatter",
        "all_reduce_stream": "all-reduce",
    }
    assert stream_now(model) == "computation"


def test_gradients_are_in_the_pool_of_their_reduction_and_gathers_in_another():
    """Llama 3 8B on 8 ranks, in sum by hand: the gradients, and the largest unit's, reduced once
    more; of the all-gathers the head's, whose shard is cast first, beside a block's."""
    step = step_of()
    reserved = step.reserved()
    cfg = config.load(str(REPO / "configs/llama8b.toml"), ["--model.n_layers=8"])
    model = meta_model(cfg.model)
    trained = 4 * sum(p.numel() for p in model.parameters()) // 8
    head = model.head.weight.numel() + model.head.norm.weight.numel()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    peaks = {}
    for phase in step.phases:
        for name, size in phase.peak_of_pools.items():
            peaks[name] = max(peaks.get(name, 0), size)
    assert abs(peaks["reduce-scatter"] - trained - 4 * head // 8) < 2 * MIB
    assert abs(peaks["all-gather"] - 2 * head - 2 * head // 8 - 2 * block) < 2 * MIB
    assert set(reserved) == {"computation", "reduce-scatter", "all-gather"}
    for name, size in reserved.items():
        assert peaks[name] <= size < 1.3 * peaks[name]
    # what is allocated at once is less than what the pools reserve one by one
    assert step.peak().peak.total() < sum(peaks.values())


def test_on_one_rank_nothing_is_gathered():
    assert set(step_of(ranks=1).reserved()) == {"computation", "reduce-scatter"}


def test_pools_of_blocks_that_are_not_run_count_as_if_they_were():
    cfg = config.load(
        str(REPO / "configs/llama8b.toml"),
        ["--model.n_layers=9", "--train.global_batch_size=24"],
    )
    short, whole = simulate(cfg, 8), simulate(cfg, 8, all_blocks=True)
    for name, size in whole.reserved().items():
        assert abs(short.reserved()[name] - size) < 0.02 * size, name


def test_offloaded_state_is_in_no_pool():
    usual, offloaded = step_of(), step_of("--parallel.cpu_offload=true")
    held = usual.held["parameters"] + usual.held["optimizer state"]
    saved = usual.reserved().total() - offloaded.reserved().total()
    assert saved > 0.95 * held
