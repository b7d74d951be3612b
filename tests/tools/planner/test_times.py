"""What a step's work and traffic take, by the rates of docs/plan.md: sums by hand."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import config
from model.build import meta_model
from tests.conftest import REPO, make_config
from tools.planner.counted import Phase
from tools.planner.devices import DEVICES, OF_LINK, Cluster, Moment, known_as, reached, timeline
from tools.planner.plan import Asked, planned
from tools.planner.simulate import simulate

H100 = DEVICES["H100"]
NODE = Cluster(H100, 8, (1, 8, 1, 1))
ALONE = Cluster(H100, 8, (1, 1, 1, 1))
ONE_SECOND = Counter({"matmuls": 720e12})
# of a node's ring, which sends 7/8 of a buffer over a link of 450 GB/s, of which 0.8 are reached
BYTES_OF_A_SECOND = 0.8 * 450e9 * 8 / 7


def sends(kind: str, seconds: float = 1.0, **options: Any) -> Phase:
    """A phase with one buffer, over all ranks of NODE."""
    phase = Phase("backward block 1", **options)
    phase.sent["dp_shard", kind, "bytes"] = round(seconds * BYTES_OF_A_SECOND)
    return phase


def timed(*phases: Phase, cluster: Cluster = NODE) -> list[Moment]:
    return timeline([*phases], make_config(), cluster)


KNOWN = """
NVIDIA A100-SXM4-80GB, 79.3, A100-80
NVIDIA A100-SXM4-40GB, 39.4, A100-40
NVIDIA H100 80GB HBM3, 79.1, H100
NVIDIA GeForce RTX 4090 Laptop GPU, 15.7, None
NVIDIA H100 PCIe, 79.1, None
NVIDIA H100 80GB HBM3 MIG 3g.40gb, 39.6, None
"""


@pytest.mark.parametrize("row", KNOWN.strip().split("\n"))
def test_gpus_are_known_by_cudas_name(row):
    name, memory, known = row.split(", ")
    assert str(known_as(name, float(memory))) == known


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["matmuls", "float8", "moved"])
def test_work_takes_its_time_at_the_rates_of_the_documents(kind):
    work = {"matmuls": 720e12, "float8": 2 * 720e12, "moved": 0.9 * 3.35e12}
    phase = Phase("x", work=Counter({kind: work[kind]}))
    assert ALONE.computing(phase, wide_heads=True) == pytest.approx(1)
    slow = replace(H100, products=360, float8=1, bandwidth=1.675)
    expected = 4 if kind == "float8" else 2
    assert replace(ALONE, device=slow).computing(phase, True) == pytest.approx(expected)


@pytest.mark.parametrize("width, rate", [(64, 376), (126, 376), (128, 554)])
def test_heads_from_128_on_attend_at_the_faster_rate(width, rate):
    """TFLOP/s of an H100, as measured for its kernels."""
    cfg = make_config(model={"head_dim": width, "dim": 256, "n_heads": 2, "n_kv_heads": 2})
    phase = Phase("forward", work=Counter({"attention": 1e12}))
    [moment] = timeline([phase], cfg, ALONE)
    assert moment.end - moment.begin == pytest.approx(1 / rate)


@pytest.mark.quick
def test_ranks_of_a_group_that_share_a_node():
    cluster = Cluster(H100, 8, (2, 4, 2, 2))
    expected = {"tp": (2, 2), "cp": (2, 2), "dp_shard": (8, 4), "dp_replicate": (2, 1)}
    assert {name: cluster.within(name) for name in expected} == expected
    assert Cluster(H100, 6, (1, 3, 1, 4)).within("tp") == (4, 2)  # every other group is cut
    assert Cluster(H100, 8, (1, 3, 1, 1)).within("dp_shard") == (3, 3)
    assert Cluster(H100, 8, (1, 1, 2, 8)).within("cp") == (2, 1)  # tp fills the nodes


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind, ranks, size, microseconds",
    [
        # NCCL's latencies for LL without bytes, and for Simple with many, a step at a time
        ("all_gather", 8, 0, 6.6 + 7 * 0.6),
        ("reduce_scatter", 128, 0, 6.6 + (128 - 16) * 0.6 + 15 * 2.7),
        ("all_reduce", 128, 0, 6.6 + 2 * 7 * 0.6 + 2 * 4 * 2.7),
        # eight GPUs of a node send 8 x 50 GB/s to others, of which 0.8 are reached
        ("all_gather", 128, 3.2e11, 8.4 + (128 - 16) * 3.4 + 15 * 14 + 1e6 * 127 / 128),
        # each rank of an all-to-all has a network link of its own
        ("all_to_all", 128, 4e10, 8.4 + 1e6 * 127 / 128),
    ],
)
def test_a_ring_costs_a_step_a_rank_and_a_tree_the_logarithm(kind, ranks, size, microseconds):
    sent = {("dp_shard", kind, "number"): 1, ("dp_shard", kind, "bytes"): size}
    phase = Phase("x", sent=Counter(sent))
    cluster = Cluster(H100, 8, (1, ranks, 1, 1))
    assert cluster.sending(phase, ("dp_shard",)) == pytest.approx(microseconds / 1e6, rel=1e-9)
    assert cluster.sending(phase, ("tp", "cp")) == 0


@pytest.mark.quick
def test_computation_waits_for_the_slowest_gpu_and_gives_way_to_nccl():
    """A second of work on eight GPUs, during half of which a reduction runs."""
    last = timed(sends("reduce_scatter", 0.5), Phase("x", work=ONE_SECOND))[-1]
    # 1.4236: the expected largest of eight normal deviates, in tables of order statistics
    slowest = 1 + 0.08 / 5.4 * 1.4236
    assert last.end - last.begin == pytest.approx(slowest + 0.5 * 16 / 132, rel=1e-3)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_gather_is_waited_for_as_far_behind_as_prefetch_reaches(ahead):
    """At depth 0 FSDP2 gathers a unit in its own forward, and one unit ahead in backward."""
    prefetch = {"prefetch_forward": ahead, "prefetch_backward": ahead}
    cfg = make_config(model={"n_layers": 7}, parallel=prefetch)
    phases = {phase.name: phase for phase in simulate(cfg, 2).phases}
    assert phases["forward block 3"].gathered_before == {ahead}
    assert phases["backward block 3"].gathered_before == {max(1, ahead)}


@pytest.mark.quick
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_phase_begins_when_what_it_waits_for_is_gathered(before):
    phases = [sends("all_gather"), *(Phase("block") for _ in range(4))]
    phases[before].gathered_before = {before}
    begins = [moment.begin for moment in timed(*phases)]
    assert begins == pytest.approx([0.0] * before + [1.0] * (5 - before))


@pytest.mark.quick
def test_a_phases_own_gather_is_issued_a_phase_ahead_by_the_host():
    own = sends("all_gather", 0.5, gathered_before={0})
    last = timed(Phase("block 0", work=ONE_SECOND), own)[-1]
    assert last.sends["gathers"] == pytest.approx((0, 0.5))
    assert last.begin == pytest.approx(1, rel=0.1)


@pytest.mark.quick
def test_a_reduction_waits_until_the_one_before_has_left_its_buffer():
    phases = [sends("reduce_scatter") for _ in range(3)]
    assert [moment.begin for moment in timed(*phases)] == pytest.approx([0, 0, 1])


@pytest.mark.quick
def test_the_update_waits_for_all_gradients_and_for_their_norm():
    norm = sends("all_reduce")
    norm.name = "update"
    last = timed(sends("reduce_scatter", ends_reduced=True), norm)[-1]
    assert last.begin == pytest.approx(1) and last.end == pytest.approx(3)


def test_reductions_of_replicas_take_their_time():
    """Two nodes, a replica on each: a block's gradients are reduce-scattered within a node (7/8 of the bytes leave each
    GPU), then all-reduced with the other node (its bytes leave twice, half of them each time)."""
    options = ["--parallel.dp_replicate=2", "--model.n_layers=4"]
    cfg = config.load(str(REPO / "configs/llama8b.toml"), options)
    _, moments = planned(cfg, 16, Asked(H100))
    moment = next(m for m in moments if m.phase.name == "backward block 2")
    gradients = 4 * sum(p.numel() for p in meta_model(cfg.model).blocks[1].parameters())
    within = gradients * 7 / 8 / H100.link
    between = gradients / 8 * 2 / 2 / H100.network
    begin, end = moment.sends["reduces"]
    assert end - begin == pytest.approx((within + between) / OF_LINK / 1e9, rel=0.02)


def test_measured_runs_reached_this_share_of_the_planned_speed():
    """Those of docs/performance.md, of 16 sequences a step."""
    page = (REPO / "docs/performance.md").read_text().partition("## One H200")[2]
    shares: dict[tuple[float, float], list[float]] = {}
    name = ""
    for cell, speed in re.findall(r"^\| ([^|]*`[^|]*`) \| \d \| ([\d,]+) \|", page, re.M):
        option = cell.partition("... ")[2].strip("`")
        name = name if option else cell.strip("`")
        # what was measured gathered weights in each micro-batch
        options = ["--train.global_batch_size=16", "--parallel.gather_once=false"]
        options += [f"--{option}"] if option else []
        cfg = config.load(str(REPO / f"configs/{name}.toml"), options)
        row, _ = planned(cfg, 1, Asked(DEVICES["H200"]))
        share = float(speed.replace(",", "")) / row["tokens_per_second_per_device"]
        shares.setdefault(reached(cfg, 1), []).append(round(share, 2))
    assert len(shares) == 2
    for bounds, measured in shares.items():
        assert bounds == (min(measured), max(measured))
