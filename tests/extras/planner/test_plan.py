"""The plan against theory, real tensors and whole simulated steps, and what --dry-run prints."""

import contextlib
import errno
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import astuple, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import tomli
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

import config
from benchmarks import published
from benchmarks import simulate as benchmark
from extras.planner import advice, show
from extras.planner import check as plan_check
from extras.planner import dry_run as dry_run_module
from extras.planner import plan as plan_module
from extras.planner import simulate as simulate_module
from extras.planner.counted import Counted, Phase
from extras.planner.devices import (
    DEVICES,
    OF_LINK,
    Cluster,
    Moment,
    device,
    known_as,
    timeline,
)
from extras.planner.plan import Asked, plan
from extras.planner.simulate import Step, simulate
from model.build import meta_model
from optim import build_optimizer
from parallel import materialize
from parallel.mesh import World, build_mesh
from parallel.parallelize import parallelize
from parallel.verify import verify_sharding
from tests import cases, theory
from tests.conftest import (
    REPO,
    TINY,
    lacks,
    launch,
    make_config,
    needs_extra,
    nightly_if,
    shipped_configs,
)
from tests.test_training import UNEVEN

pytestmark = pytest.mark.first

CONFIGS = REPO / "configs"


@needs_extra("optimizers")
@pytest.mark.parametrize(
    "ranks, options",
    [
        (1, [{}]),
        (2, [{}, {"dp_replicate": "auto", "dp_shard": 1}]),
        (3, [{}]),
        (4, [{}, {"dp_replicate": 2}, {"cp": 2}, {"cp": 4}]),
    ],
)
def test_bytes_equal_those_of_real_tensors(on_ranks, ranks, options):
    frozen = {"tie_embeddings": True, "freeze": ["blocks.0.*"]}
    every = [
        {
            "model": model,
            "parallel": parallel,
            "train": {"global_batch_size": 12, "micro_batch_size": 1},
        }
        for model, parallel in (*((UNEVEN, parallel) for parallel in options), (frozen, options[0]))
    ]
    every.append(
        {**every[-1], "parallel": {"replicated": ["blocks.0.*"], "param_dtype": "bfloat16"}}
    )
    # one matrix, not two
    every.append(
        {
            **every[-1],
            "model": {"tie_embeddings": True, "freeze": ["embedding.weight"]},
            "parallel": {"replicated": ["embedding.weight"]},
        }
    )
    every.append(
        {
            "optim": {"state_dtype": "bfloat16"},
            "train": {"global_batch_size": 12, "micro_batch_size": 1},
        }
    )
    every.append(
        {"optim": {"name": "muon"}, "train": {"global_batch_size": 12, "micro_batch_size": 1}}
    )
    # what tp leaves of its rows is uneven
    even = {"dim": 46, "head_dim": 6, "ffn_dim": 76, "tie_embeddings": True, "qk_norm": True}
    meshes = {
        2: [{"tp": 2}],
        4: [{"tp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}],
    }
    every += [
        {"model": even, "parallel": mesh, "train": {"global_batch_size": 12, "micro_batch_size": 1}}
        for mesh in meshes.get(ranks, ())
    ]
    real = on_ranks(ranks, cases.live_bytes, every)
    for i, sections in enumerate(every):
        cfg = make_config(**sections)
        planned = plan(cfg, ranks)
        by_theory = theory.held(cfg, meta_model(cfg.model), ranks)
        for what in ("parameter", "gradient", "optimizer"):
            assert (
                max(rank[i][what] for rank in real)
                == by_theory[what]
                == planned[f"{what}_bytes_per_rank"]
            ), sections


WIDE = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 176, "vocab_size": 1000, "n_layers": 3}
STEPS = [
    {},
    {"recompute": "full", "sync_every_micro_batch": False},
    {"recompute": "selective"},
    {"recompute": 2, "reshard_after_forward": False},
    {"param_dtype": "bfloat16", "prefetch_forward": 2, "prefetch_backward": 2},
]


@needs_extra("optimizers")
@pytest.mark.parametrize(
    "ranks, ways",
    [
        (1, [{}, {"recompute": "elementwise"}]),
        (2, [*STEPS, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2, "dp_shard": 1}]),
    ],
)
def test_the_peak_is_that_of_a_real_step(on_ranks, ranks, ways):
    """Within 0.1 %: in real runs scalars of the loss and of FSDP2 live, too."""
    every = [
        {
            "model": WIDE,
            "parallel": p,
            "train": {"seq_len": 256, "global_batch_size": 4, "micro_batch_size": 1},
        }
        for p in ways
    ]
    every += [
        {**every[0], "optim": changes}
        for changes in ({"state_dtype": "bfloat16"}, {"name": "muon"})
    ]
    every.append({**every[0], "model": {**WIDE, "qk_norm": True}})
    for sections, real in zip(every, zip(*on_ranks(ranks, cases.live_peak, every))):
        peak = simulate(make_config(**sections), ranks, on_gpu=False).peak().peak.total()
        assert 0.999 * max(real) <= peak <= 1.001 * max(real), (sections, real, peak)


GPU = {
    "run": {"device": "cuda"},
    "model": {**WIDE, "n_layers": 7, "vocab_size": 328, "n_kv_heads": 2},
}
# each way on the first and the fifth
MESHES = [
    {},
    {"dp_replicate": 2},
    {"dp_replicate": "auto", "dp_shard": 1},
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "cp": 2},
]
WAYS = [
    {},
    {"recompute": "full", "sync_every_micro_batch": False},
    {"recompute": 2, "reshard_after_forward": False},
    {"recompute": "selective", "prefetch_forward": 2, "prefetch_backward": 2},
    {"compile": True},
    {"compile": True, "recompute": "elementwise", "keep_fp32": ["blocks.3"]},
    {"param_dtype": "float32"},
]


def of_a_gpu(mesh: dict, way: dict, **sections: dict) -> config.Config:
    return make_config(
        **{
            **GPU,
            "parallel": {"param_dtype": "bfloat16", **mesh, **way},
            "train": {"seq_len": 64, "global_batch_size": 16, "micro_batch_size": 1},
            **sections,
        }
    )


SIMULATED: dict[str, tuple[Step, list[int]]] = {}


def simulated(cfg: config.Config) -> tuple[Step, list[int]]:
    """(simulate(cfg, 8), the numbers of blocks of the models that ran for it), once for all tests."""
    if (key := repr(cfg)) not in SIMULATED:
        with mock.patch.object(simulate_module, "run", wraps=simulate_module.run) as run:
            SIMULATED[key] = (
                simulate(cfg, 8),
                [call.args[0].model.n_layers for call in run.call_args_list],
            )
    return SIMULATED[key]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_collectives_are_those_of_the_theory(way, monkeypatch):
    wrong = {}
    monkeypatch.setattr(plan_module, "simulate", lambda cfg, ranks, on_gpu: simulated(cfg)[0])
    for mesh in MESHES[:: 1 if not way else 3 if way == {"compile": True} else 4]:
        cfg = of_a_gpu(mesh, way)
        found, formula = (
            plan(cfg, 8)["collectives_per_step"],
            theory.collectives(cfg, meta_model(cfg.model), 8),
        )
        if found != formula:
            wrong[str(mesh)] = found, formula
    assert not wrong


@pytest.mark.parametrize(
    "mesh, way, sections",
    [
        *(({}, WAYS[i], {}) for i in (0, 1, 4, 6)),
        ({"tp": 2}, {"compile": True}, {}),
        ({"cp": 2}, {}, {}),
        ({}, {"cpu_offload": True}, {}),
        ({}, {"compile": True}, {"optim": {"state_dtype": "bfloat16"}}),
        ({}, {"compile": True}, {"optim": {"name": "muon", "state_dtype": "bfloat16"}}),
        ({"dp_replicate": "auto", "dp_shard": 1}, {}, {}),
        (
            {},
            {"float8": "tensorwise"},
            {"model": {**GPU["model"], "dim": 2048, "ffn_dim": 2048}},
        ),
        (
            {},
            {"float8": "rowwise"},
            {"model": {**GPU["model"], "dim": 4096, "ffn_dim": 4096}},
        ),
    ],
    ids=str,
)
def test_blocks_that_are_not_run_count_as_if_they_were(mesh, way, sections):
    """Equal in what is sent and held; each phase's peak within 1 %, but for more gradients' norms in the update. Other
    options, with blocks of several kinds: test_plan_forks.py."""
    if lacks(parallel=way, **sections):
        pytest.skip("needs an extra that was removed")
    cfg = of_a_gpu(mesh, way, **sections)
    (short, blocks), whole = simulated(cfg), simulate(cfg, 8, all_blocks=True)
    # Muon's update needs them all
    assert blocks == ([5, 7] if "name" in sections.get("optim", {}) else [5]), blocks
    assert short.held == whole.held and [p.name for p in short.phases] == [
        p.name for p in whole.phases
    ]
    for a, b in zip(short.phases, whole.phases):
        assert +a.sent == +b.sent and a.times == b.times, a.name
        assert (a.gathered_before, a.ends_reduced) == (b.gathered_before, b.ends_reduced), a.name
        assert a.peak.total() == pytest.approx(b.peak.total(), rel=0.01, abs=2**16), a.name
        assert a.work["matmuls"] == b.work["matmuls"] and a.work["attention"] == b.work["attention"]
        assert a.work["moved"] == pytest.approx(b.work["moved"], rel=0.05, abs=2**16), a.name
    assert short.peak().name == whole.peak().name


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"param_dtype": "float32"},
        {"reduce_dtype": "bfloat16"},
        {"param_dtype": "float32", "reshard_after_forward": False},
    ],
    ids=str,
)
def test_gradients_that_wait_for_their_reduction_are_on_the_device_also_where_all_else_is_offloaded(
    way,
):
    """FSDP2 offloads a gradient when it has reduced it. Until then it is the unsharded parameter's own, if it has the
    dtype of the reduction."""
    usual, offloaded = (
        simulate(of_a_gpu({}, {"sync_every_micro_batch": False, "cpu_offload": o, **way}), 8).peak()
        for o in (False, True)
    )
    on_host = usual.peak["parameters"] + usual.peak["optimizer state"]
    assert usual.name == offloaded.name and usual.peak["gradients"] > 0
    assert offloaded.peak.total() == usual.peak.total() - on_host > 0
    assert offloaded.peak["reductions"] == usual.peak["gradients"]


@needs_extra("optimizers")
def test_what_is_offloaded_is_updated_in_host_memory():
    step = simulate(of_a_gpu({}, {"cpu_offload": True}, optim={"state_dtype": "bfloat16"}), 8)
    assert step.phases[-1].name == "update" and step.phases[-1].peak["working memory"] == 0


@pytest.mark.parametrize("cp", [1, 2])
def test_work_is_that_of_the_closed_form(cp):
    """All of 6 FLOP a parameter and token, and attention's: twice forward, five times backward, half under the mask."""
    cfg = config.load(
        str(CONFIGS / "llama3b.toml"),
        ["--parallel.recompute=none", "--train.global_batch_size=8", f"--parallel.cp={cp}"],
    )
    work = sum((phase.work for phase in simulate(cfg, 8 * cp).phases), simulate_module.Counter())
    attention = 7 * 28 * 24 * 128 * 8192 * 8192 // cp
    if cp > 1:  # FlexAttention computes the diagonal's blocks in full
        attention = attention // 64 * 65
    # one FLOP more in seven than the model's own: scores are computed again
    assert work["attention"] == attention
    m = cfg.model
    block = 2 * m.dim * (m.n_heads + m.n_kv_heads) * m.width_per_head + 3 * m.dim * m.ffn_dim
    assert work["matmuls"] == 6 * 8192 // cp * (m.n_layers * block + m.vocab_size * m.dim)


def test_kinds_of_one_size_stand_in_one_order_in_every_run():
    """An order by hashes would differ from process to process, and so would the output of one plan."""
    names = [f"kind {i}" for i in range(50)]
    assert [
        *simulate_module.plus(Counter(dict.fromkeys(names, 1)), dict.fromkeys(names[::-1], 1))
    ] == names


def test_a_ring_of_several_nodes_goes_out_by_all_their_networks():
    cluster = Cluster(device("H100,link=100,network=10"), 8, (2, 4, 2, 2))
    assert [cluster.within(name) for name in ("tp", "cp", "dp_shard", "dp_replicate")] == [
        (2, 2),
        (2, 2),
        (8, 4),
        (2, 1),
    ]
    # every other group is cut
    assert Cluster(device("H100"), 6, (1, 3, 1, 4)).within("tp") == (4, 2)
    assert Cluster(device("H100"), 8, (1, 3, 1, 1)).within("dp_shard") == (3, 3)
    assert Cluster(device("H100"), 8, (1, 1, 2, 8)).within("cp") == (2, 1)  # tp fills the nodes
    phase = simulate_module.Phase(
        "x", sent=simulate_module.Counter({("dp_shard", "all_gather", "bytes"): 8e9})
    )
    # four ranks of a node: 40 GB/s
    assert cluster.sending(phase, ("dp_shard",)) == pytest.approx(7e9 / (0.8 * 40e9))
    assert cluster.sending(phase, ("tp", "cp")) == 0
    assert Cluster(cluster.device, 8, (2, 2, 2, 2)).within("dp_replicate") == (2, 1)
    reduced = Phase("x", sent=Counter({("dp_shard", "all_reduce", "bytes"): 8e9}))
    assert cluster.sending(reduced, ("dp_shard",)) == 2 * cluster.sending(phase, ("dp_shard",))


@pytest.mark.parametrize(
    "kind, ranks, size, microseconds",
    [
        # NCCL's latencies for LL without bytes, and for Simple with many, a step at a time
        ("all_gather", 8, 0, 6.6 + 7 * 0.6),
        ("reduce_scatter", 128, 0, 6.6 + (128 - 16) * 0.6 + 15 * 2.7),
        ("all_reduce", 128, 0, 6.6 + 2 * 7 * 0.6 + 2 * 4 * 2.7),
        ("all_gather", 128, 3.2e11, 8.4 + (128 - 16) * 3.4 + 15 * 14 + 1e6 * 127 / 128),
    ],
)
def test_a_ring_costs_a_step_a_rank_and_a_tree_the_logarithm(kind, ranks, size, microseconds):
    """Eight H100s of a node send 8 x 50 GB/s to others, of which 0.8 are reached: 320."""
    sent = {("dp_shard", kind, "number"): 1, ("dp_shard", kind, "bytes"): size}
    cluster = Cluster(device("H100"), 8, (1, ranks, 1, 1))
    seconds = cluster.sending(Phase("x", sent=Counter(sent)), ("dp_shard",))
    assert seconds == pytest.approx(microseconds / 1e6, rel=1e-9)


def test_computation_waits_for_the_slowest_gpu_and_gives_way_to_nccl():
    """A second of work on eight GPUs, during half of which a reduction runs."""
    cluster = Cluster(device("H100"), 8, (1, 8, 1, 1))
    half_a_second = {("dp_shard", "reduce_scatter", "bytes"): 0.5 * 0.8 * 450e9 * 8 / 7}
    work = Counter({"matmuls": 720e12})
    phases = [Phase("backward block 1", sent=Counter(half_a_second)), Phase("x", work=work)]
    last = timeline(phases, make_config(), cluster)[-1]
    # 1.4236: the expected largest of eight normal deviates, in tables of order statistics
    slowest = 1 + 0.08 / 5.4 * 1.4236
    assert last.end - last.begin == pytest.approx(slowest + 0.5 * 16 / 132, rel=1e-3)


@pytest.mark.parametrize(
    "kind, work, at_best",
    [
        ("matmuls", 720e12, 720 / (0.8 * 989)),
        ("float8", 2 * 720e12, 720 / (0.8 * 989)),
        ("moved", 0.9 * 3.35e12, 0.9),
    ],
)
def test_work_takes_its_time_at_the_rates_of_the_documents(kind, work, at_best):
    """An H100's, in docs/plan.md: each of these is a second's work, and at best less."""
    cluster, phase = (
        Cluster(device("H100"), 8, (1, 1, 1, 1)),
        Phase("x", work=Counter({kind: work})),
    )
    assert cluster.computing(phase, True) == pytest.approx(1)
    assert cluster.computing(phase, True, best=True) == pytest.approx(at_best)
    slow = Cluster(device("H100,products=360,float8=1,bandwidth=1.675"), 8, (1, 1, 1, 1))
    assert slow.computing(phase, True) == pytest.approx(4 if kind == "float8" else 2)


def test_gpus_are_those_of_the_documents():
    """Each number of the table in docs/plan.md."""
    table = re.search(
        r"^\| \| memory, GiB.*?\n\n", (REPO / "docs/plan.md").read_text(), re.M | re.S
    )[0]
    documented = {}
    for names, *cells in (row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]):
        names = re.sub(r" \(.*\)", "", names).split(", ")
        for i, name in enumerate(names):
            of_name = [cell.split(", ")[i if ", " in cell else 0] for cell in cells]
            documented[name] = tuple(float(number.replace(",", "")) for number in of_name)
    assert documented == {name: astuple(found) for name, found in DEVICES.items()}


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_gather_is_waited_for_as_far_behind_as_prefetch_reaches(ahead):
    """At depth 0 FSDP2 gathers a unit in its own forward, and one unit ahead in backward."""
    prefetch = {"prefetch_forward": ahead, "prefetch_backward": ahead}
    cfg = make_config(model={"n_layers": 7}, parallel=prefetch)
    phases = {phase.name: phase for phase in simulate(cfg, 2).phases}
    assert phases["forward block 3"].gathered_before == {ahead}
    assert phases["backward block 3"].gathered_before == {max(1, ahead)}


def test_a_phase_begins_when_what_it_waits_for_is_gathered():
    cluster = Cluster(device("H100"), 8, (1, 8, 1, 1))
    gathers = Counter({("dp_shard", "all_gather", "bytes"): 9e10})
    for before in 1, 2, 3:
        phases = [Phase("first", sent=gathers)] + [Phase("block") for _ in range(4)]
        phases[before].gathered_before = {before}
        begins = [moment.begin for moment in timeline(phases, make_config(), cluster)]
        sent = cluster.sending(phases[0], ("dp_shard",))
        assert begins == [0.0] * before + [sent] * (5 - before)
    # its own is issued by the host, which is a phase ahead
    work = Counter({"matmuls": 720e12})
    phases = [Phase("block 0", work=work), Phase("block 1", sent=gathers, gathered_before={0})]
    last = timeline(phases, make_config(), cluster)[-1]
    assert last.sends["gathers"][0] == 0 and last.begin == pytest.approx(1, rel=0.1)


def test_a_reduction_waits_until_the_one_before_has_left_its_buffer():
    cluster = Cluster(device("H100"), 8, (1, 8, 1, 1))
    gradients = Counter({("dp_shard", "reduce_scatter", "bytes"): 9e10})
    phases = [Phase(f"backward block {i}", sent=gradients) for i in (2, 1, 0)]
    begins = [moment.begin for moment in timeline(phases, make_config(), cluster)]
    sent = cluster.sending(phases[0], ("dp_shard",))
    assert begins == pytest.approx([0, 0, sent])


def test_the_update_waits_for_all_gradients_and_for_their_norm():
    cluster = Cluster(device("H100"), 8, (1, 8, 1, 1))
    gradients, norm = (
        Counter({("dp_shard", kind, "bytes"): 9e10}) for kind in ("reduce_scatter", "all_reduce")
    )
    phases = [
        Phase("backward embedding", sent=gradients, ends_reduced=True),
        Phase("update", sent=norm),
    ]
    last = timeline(phases, make_config(), cluster)[-1]
    assert last.begin == pytest.approx(
        cluster.sending(phases[0], ("dp_shard",))
    ) and last.end == pytest.approx(3 * last.begin)


def test_what_fsdp_sends_is_its_own_where_cp_is_all_that_shards():
    traffic = plan(make_config(parallel={"cp": 2, "dp_shard": 1}), 2)["traffic_per_step"]
    assert "all_gather" in traffic["dp_shard"] and traffic["dp_shard"]["ranks"] == 2
    # keys and values of two blocks, four micro-batches
    assert traffic["cp"]["all_gather"][0] == 2 * 4


GATHER_ONCE = "--parallel.gather_once=true"


def dry_run(capsys, *words: object) -> tuple[bool, str, str]:
    """(does it fit, stdout, stderr) of `--dry-run` in this process."""
    args = config.parse_arguments([*map(str, words), "--dry-run"])
    fits = dry_run_module.dry_run(config.load(args.config, args.overrides), args)
    return fits, *capsys.readouterr()


def test_gathering_once_is_advised_for_several_micro_batches_where_it_fits(capsys):
    """Not where it is on, nor for one micro-batch. What holds less turns it off first."""
    many = "--train.micro_batch_size=1"
    for options, advised in (([many], True), ([], False), ([many, GATHER_ONCE], False)):
        words = [CONFIGS / "tiny.toml", "--world-size=2", "--gpu", "RTX4090", *options]
        assert (f"faster, and fits: {GATHER_ONCE} (" in dry_run(capsys, *words)[2]) is advised
    cfg = config.load(str(CONFIGS / "tiny.toml"), [GATHER_ONCE])
    off = GATHER_ONCE.replace("true", "false")
    assert advice.Change((off,)) in advice.changes(cfg, 2, 8)


def test_json_has_what_the_contract_names(capsys):
    row = json.loads(dry_run(capsys, CONFIGS / "llama8b.toml", "--world-size", 8, "--json")[1])
    assert row["parameters"] == 8_030_261_248 and row["world_size"] == 8
    assert (
        row["parameter_bytes_per_rank"] == row["gradient_bytes_per_rank"] == 4 * 8_030_261_248 // 8
    )
    assert row["optimizer_bytes_per_rank"] == 8 * 8_030_261_248 // 8 + 4 * 291
    assert (
        row["accumulation_steps"] == 16
        and row["tokens_per_step"] == 128 * 8192
        and row["steps_per_epoch"] is None
    )
    # samples
    prepared = plan_module.planned(config.load(str(CONFIGS / "llama8b.toml")), 8, Asked(), 32_000)[
        0
    ]
    assert prepared["steps_per_epoch"] == 32_000 / 128
    assert (
        row["peak_gib"] == pytest.approx(sum(row["parts_gib"].values()))
        and row["peak_at"] == "backward head"
    )
    nothing = ("step_seconds", "tokens_per_second_per_device", "mfu", "fits")
    assert [row[name] for name in nothing] == [None] * 4 and row["operators_not_counted"] == []
    assert row["counted_flops_per_token"] == row["flops_per_token"]
    several = json.loads(
        dry_run(capsys, CONFIGS / "llama8b.toml", "--world-size=8,32", "--json", "--gpu", "H100")[1]
    )
    assert [row["world_size"] for row in several] == [8, 32]
    for row in several:
        assert (
            row["fits"]
            and row["step_seconds"] * row["tokens_per_second_per_device"] * row["world_size"]
            == (pytest.approx(row["tokens_per_step"]))
            and 0.3 < row["mfu"] < 0.8
        )
        assert row["mfu"] == pytest.approx(
            row["tokens_per_second_per_device"] * row["flops_per_token"] / 989e12
        )
        assert row["best_tokens_per_second_per_device"] > row["tokens_per_second_per_device"]


def test_printed_figures_are_those_of_the_json_in_their_units(capsys):
    """Against sums by hand, for rates at which only matmuls and attention take time."""
    words = (
        CONFIGS / "llama1b.toml",
        "--model.n_layers=4",
        "--parallel.recompute=none",
        "--train.steps=100000000",
        "--train.micro_batch_size=1",
        "--train.global_batch_size=8",
        "--gpu=H100,bandwidth=1e9,link=1e9,network=1e9",
    )
    row, printed = json.loads(dry_run(capsys, *words, "--json")[1]), dry_run(capsys, *words)[1]
    lines = dict(
        re.split(" {2,}", line.strip(), maxsplit=1) for line in printed.splitlines() if "  " in line
    )
    m = config.load(str(CONFIGS / "llama1b.toml"), words[1:2]).model
    length, heads = (
        config.load(str(CONFIGS / "llama1b.toml")).train.seq_len,
        m.n_heads * m.width_per_head,
    )
    block = 2 * m.dim * (m.n_heads + m.n_kv_heads) * m.width_per_head + 3 * m.dim * m.ffn_dim
    # a token's, half under the mask
    matrices, attention = (4 * block + m.vocab_size * m.dim, 4 * heads * length)
    # the output matrix is the embedding's, too
    parameters, tokens = (matrices + 9 * m.dim, 8 * length)
    # scores are computed again
    seconds = tokens * (6 * matrices / 720e12 + 7 * attention / (720e12 * 376 / 720))
    assert row["step_seconds"] == pytest.approx(seconds, rel=1e-3) and lines["a step"].startswith(
        f"{seconds:.3g} s, "
    )
    assert float(re.search(r"([\d.e-]+) of them waiting", lines["a step"])[1]) == pytest.approx(
        0, abs=1e-3
    )
    rate, mfu, best = re.match(
        r"([\d,]+) planned, MFU ([\d.]+)%; at best ([\d,]+)", lines["tokens/s per GPU"]
    ).groups()
    rate, best = (float(number.replace(",", "")) for number in (rate, best))
    assert (
        rate
        == round(row["tokens_per_second_per_device"])
        == pytest.approx(tokens / seconds, rel=2e-3)
    )
    assert best == round(row["best_tokens_per_second_per_device"]) > rate
    assert float(mfu) == pytest.approx(100 * rate * 6 * (matrices + attention) / 989e12, abs=0.1)
    assert row["mfu"] == pytest.approx(float(mfu) / 100, abs=6e-4)
    days, hours, energy = re.match(
        r"([\d.,]+) days, ([\d,]+) GPU-hours, ([\d,]+) kWh", lines["the whole run"]
    ).groups()
    assert float(days.replace(",", "")) == pytest.approx(1e8 * seconds / 86400, rel=2e-3)
    for shown, value, expected in (
        (hours, row["gpu_hours"], 1e8 * seconds / 3600),
        (energy, row["kilowatt_hours"], 1e8 * seconds / 3600 * 0.7),
    ):
        assert float(shown.replace(",", "")) == round(value) == pytest.approx(expected, rel=2e-3)
    for what, size in ("parameter", 4), ("gradient", 4), ("optimizer", 8):
        assert lines[what] == f"{row[f'{what}_bytes_per_rank'] / 2**30:.3f} GiB"
        assert row[f"{what}_bytes_per_rank"] == pytest.approx(size * parameters, rel=1e-6)
    assert (
        lines["optimizer state"].split("  ")[0] == f"{row['parts_gib']['optimizer state']:.3f} GiB"
    )
    assert row["parts_gib"]["optimizer state"] * 2**30 == pytest.approx(8 * parameters, rel=1e-4)
    assert lines["allocated peak"].startswith(f"{row['peak_gib']:.3f} GiB in the {row['peak_at']}")
    assert (
        lines["FLOP per token"] == f"{6 * (matrices + attention):,}"
        and row["parameters"] == parameters
    )


def test_the_resolved_configuration_is_shown_where_it_is_asked_for(prepared, write_config):
    words = write_config(), "--dry-run", "--train.steps=77"
    assert "steps = 77" not in launch(*words).stdout
    done = launch(*words, "--config")
    assert done.returncode == 0 and done.stdout.startswith("# 1 rank: "), done.stderr
    # all but the configuration is a comment
    assert tomli.loads(done.stdout) == config.to_dict(config.load(str(words[0]), words[2:]))
    comments = [line.removeprefix("# ") for line in done.stdout.splitlines() if line[:2] == "# "]
    lines = dict(line.split("  ", 1) for line in comments if "  " in line)
    # 23,870 tokens are 745 windows of 32, 8 a step
    assert lines["steps per epoch"].strip() == "93.1"
    assert lines["sent per step"].strip() == "nothing"


def test_a_plan_for_this_cpu_is_without_what_cuda_needs(capsys, monkeypatch):
    monkeypatch.setattr(dry_run_module, "visible_gpus", lambda: 0)
    tiny = config.load(str(CONFIGS / "tiny.toml"))
    peak = plan(tiny, 1, Asked(without_cuda=True))["peak_gib"]
    workspaces = plan(tiny, 1)["parts_gib"]["cuBLAS workspaces"]
    assert workspaces == 2 * 32 / 1024
    assert plan(tiny, 1)["peak_gib"] == pytest.approx(peak + workspaces)
    assert plan(tiny, 1, Asked(device("A100-80")))["parts_gib"]["cuBLAS workspaces"] < workspaces
    _, out, _ = dry_run(capsys, CONFIGS / "tiny.toml")
    assert out.startswith(f"1 rank: needs {peak:.4g} GiB of tensors on this CPU (peak in the ")
    assert "CUDA" not in out
    _, out, _ = dry_run(capsys, CONFIGS / "tiny.toml", "--world-size", 1)
    reserved = plan(config.load(str(CONFIGS / "tiny.toml"), ["--run.device=cuda"]), 1)[
        "reserved_gib"
    ]
    assert out.startswith(f"1 rank: needs {reserved + 1.5:.4g} GiB (peak in the ")
    assert "with CUDA's own" in out and f"{reserved:.3f} GiB by torch's allocator: " in out


def test_what_does_not_fit_is_exit_3(capsys):
    # 16 bytes for each parameter: 70e9 * 16 / 8 is 131 GiB a rank, and no batch size helps
    cfg = config.load(str(CONFIGS / "llama70b.toml"))
    assert plan(cfg, 8, Asked(gpu_memory_gib=131))["fits"] is False
    fits, out, err = dry_run(
        capsys, CONFIGS / "llama70b.toml", "--world-size", 64, "--gpu-memory-gib", 80
    )
    assert fits and "70,553,706,496" in out and out.startswith("64 ranks: fits, ") and not err
    done = launch(
        "configs/tiny.toml", "--dry-run", "--gpu-memory-gib", "1.66", "--model.n_layers=1", "--json"
    )
    assert done.returncode == 3 and json.loads(done.stdout)["fits"] is False
    assert "does not fit" in done.stderr and "the fastest that fits: --" in done.stderr, done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    "options, ranks",
    [
        ((), 1),
        (("--parallel.tp=2",), 2),
        (("--parallel.tp=2", "--parallel.cp=2", "--parallel.dp_replicate=2"), 8),
    ],
)
def test_without_a_number_of_ranks_it_is_the_fewest(capsys, options, ranks):
    assert (
        json.loads(dry_run(capsys, CONFIGS / "tiny.toml", *options, "--json")[1])["world_size"]
        == ranks
    )


def test_what_fits_counts_the_peak_and_cudas_own(capsys):
    words = (CONFIGS / "tiny.toml", "--world-size", 1, "--json")
    needed = json.loads(dry_run(capsys, *words)[1])
    assert needed["device_gib"] == pytest.approx(needed["reserved_gib"] + 1.5)
    assert needed["reserved_gib"] == pytest.approx(sum(needed["pools_gib"].values()))
    assert needed["reserved_gib"] > needed["peak_gib"]
    for memory, fits in (
        (needed["device_gib"] * 1.0001, True),
        (needed["device_gib"] * 0.9999, False),
    ):
        assert (
            plan(config.load(str(CONFIGS / "tiny.toml")), 1, Asked(gpu_memory_gib=memory))["fits"]
            is fits
        )


def test_memory_that_is_given_goes_before_the_gpus():
    assert (
        Asked(device("H100")).memory_gib == DEVICES["H100"].memory
        and Asked(device("H100"), 40.0).memory_gib == 40
    )


def test_none_of_several_may_be_too_large(monkeypatch, capsys):
    def planned(cfg, ranks, *unused):
        return {
            "world_size": ranks,
            "device_gib": 2.0,
            "peak_at": "update",
            "fits": ranks > 1,
            "step_seconds": None,
        }, []

    monkeypatch.setattr(dry_run_module, "planned", planned)
    monkeypatch.setattr(dry_run_module, "advise", lambda *unused: "")
    for ranks, fit in ("1,2", False), ("2,1", False), ("2,3", True):
        assert (
            dry_run(capsys, CONFIGS / "tiny.toml", f"--world-size={ranks}", "--gpu=H100", "--json")[
                0
            ]
            is fit
        )


def test_hours_and_energy_are_of_all_gpus_and_nodes_as_large_as_asked(capsys):
    words = (
        CONFIGS / "tiny.toml",
        "--json",
        "--world-size=8",
        "--gpu=H200,watts=500",
        "--gpus-per-node=4",
    )
    row = json.loads(dry_run(capsys, *words)[1])
    assert row["gpu_hours"] == pytest.approx(row["step_seconds"] * 300 * 8 / 3600)
    assert row["kilowatt_hours"] == pytest.approx(0.5 * row["gpu_hours"])
    assert row["traffic_per_step"]["dp_shard"]["ranks_in_a_node"] == 4
    words = CONFIGS / "tiny.toml", "--json", "--world-size=16", "--train.global_batch_size=16"
    assert (
        json.loads(dry_run(capsys, *words)[1])["traffic_per_step"]["dp_shard"]["ranks_in_a_node"]
        == 8
    )


def test_an_offloaded_plan_says_what_lies_in_host_memory_and_what_it_does_not_know():
    cfg = make_config(parallel={"cpu_offload": True})
    row, _ = plan_module.planned(cfg, 2, Asked())
    kept = sum(row[f"{what}_bytes_per_rank"] for what in ("parameter", "gradient", "optimizer"))
    assert row["host_gib"] == pytest.approx(kept / 2**30) and kept > 16 * row["parameters"] / 2
    told = show.table(row, cfg, Asked())
    assert (
        "not counted" in told and "the time of copies to the host, and of the update there" in told
    )
    assert (
        "per rank, the largest, in host memory" in told and plan(make_config(), 2)["host_gib"] == 0
    )


@pytest.mark.quick
def test_tables_say_where_the_plan_sends():
    cfg = make_config(
        model={"dim": 512, "ffn_dim": 4096, "vocab_size": 32000},
        parallel={"dp_replicate": 2, "cp": 2},
    )
    asked = Asked(device("H200"), 9.0, 4)
    row, moments = plan_module.planned(cfg, 8, asked)
    assert any(moment.phase.peak["reductions"] for moment in moments)
    lines = dict(
        line.split("  ", 1) if line[0] != " " else line[2:].split("  ", 1)
        for line in show.table(row, cfg, asked).splitlines()
    )
    assert lines["ranks"].split()[:7] == ["8", "=", "2", "replicas", "x", "4", "shards"]
    for kind, dim, where in (
        ("all_gather", "dp_shard", "within a node"),
        ("all_reduce", "dp_replicate", "between nodes"),
    ):
        number, size = row["traffic_per_step"][dim][kind]
        found = lines[f"{kind}, {dim}"]
        assert found.split()[:2] == [str(number), f"{size / 2**30:.3f}"] and found.endswith(where)


ROW = {  # a plan's, whose numbers differ
    "world_size": 96,
    "replicas": 3,
    "shards": 8,
    "cp": 2,
    "tp": 4,
    "units": 34,
    "parameters": 8_030_261_248,
    "tokens_per_step": 1_048_576,
    "steps_per_epoch": 1234.56,
    "micro_batch_size": 7,
    "accumulation_steps": 5,
    "flops_per_token": 1000,
    "counted_flops_per_token": 1049.0,
    "parameter_bytes_per_rank": 3 * 2**30,
    "gradient_bytes_per_rank": 3 * 2**29,
    "optimizer_bytes_per_rank": 25 * 2**28,
    "peak_gib": 13.0,
    "peak_at": "backward head",
    "host_gib": 0.0,
    "parts_gib": {"activations": 6.5, "parameters": 3.25, "working memory": 0.1},
    "pools_gib": {"computation": 12.345, "all-gather": 1.9},
    "reserved_gib": 14.25,
    "device_gib": 15.75,
    "fits": True,
    "traffic_per_step": {
        "dp_shard": {"ranks": 8, "ranks_in_a_node": 4, "all_gather": (1234, 5 * 2**30)},
        "tp": {"ranks": 4, "ranks_in_a_node": 4, "all_reduce": (9, 2**29)},
    },
    "collectives_per_step": {"all_gather": (1234, 5 * 2**30), "all_reduce": (9, 2**29)},
    "step_seconds": 1.5,
    "waiting_seconds": 0.25,
    "mfu": 0.4321,
    "tokens_per_second_per_device": 12345.6,
    "best_tokens_per_second_per_device": 23456.7,
    "gpu_hours": 5432.1,
    "kilowatt_hours": 3802.4,
    "not_counted": ["a note", "another"],
}
LINES = [
    ("ranks", "96 = 3 replicas x 8 shards (of them cp 2) x tp 4"),
    ("parameters", "8,030,261,248 in 34 units"),
    ("tokens per step", "1,048,576 = 8 sequences of 32"),
    ("micro-batches", "5 of 7 sequences per rank and step"),
    ("steps per epoch", "1,234.6"),
    ("FLOP per token", "1,000"),
    ("between steps", "per rank, the largest"),
    ("  parameter", "     3.000 GiB"),
    ("  gradient", "     1.500 GiB"),
    ("  optimizer", "     6.250 GiB"),
    ("allocated peak", "13.000 GiB in the backward head, of these"),
    ("  activations", f"     6.500 GiB  {'#' * 20}"),  # of 40
    ("  parameters", f"     3.250 GiB  {'#' * 10}"),
    ("  working memory", "     0.100 GiB  "),
    ("reserved peak", "14.250 GiB by torch's allocator: computation 12.35, all-gather 1.90"),
    ("needed", "15.750 of 80 GiB, with CUDA's own"),
    ("sent per step", "per rank: number of collectives, and their larger buffers together"),
    ("  all_gather, dp_shard", "  1,234        5.000 GiB  between nodes"),
    ("  all_reduce, tp", "      9        0.500 GiB  within a node"),
    ("a step", "1.5 s, 0.25 of them waiting for FSDP2"),
    ("tokens/s per GPU", "12,346 planned, MFU 43.2%; at best 23,457"),
    ("the whole run", "1.50 days, 5,432 GPU-hours, 3,802 kWh at the GPUs' power"),
    ("measured runs", "reached 0.83 to 0.95 of the planned speed, on one H200"),
    ("not counted", "a note"),
    ("not counted", "another"),
]


def test_each_line_of_the_tables_has_the_numbers_of_its_row():
    cfg = make_config(train={"steps": 86_400})
    asked = Asked(gpu_memory_gib=80.0)
    lines = [f"{name:<22}  {value}" for name, value in LINES]
    assert show.table(ROW, cfg, asked).splitlines() == lines
    for counted, is_shown in ((951.0, False), (1051.0, True), (949.0, True)):  # 5 % is the border
        told = show.table(ROW | {"counted_flops_per_token": counted}, cfg, asked)
        words = f"1,000 in MFU, by flops_per_token; the plan's time has {counted:,.0f}\n"
        assert (words in told) is is_shown
    columns = ["96", "13.00", "10.75", "6.50", "5.5", "1.5", "0.25", "12,346", "43%"]
    header, first, second = show.compared([ROW, ROW | {"world_size": 1536}]).splitlines()
    assert first.split() == columns and second.split() == ["1,536", *columns[1:]]
    assert header.endswith("s/step  waiting  tok/s/GPU  MFU")
    header, line = show.compared([ROW | {"step_seconds": None}]).splitlines()
    assert line.split() == columns[:5] and header.endswith("sent GiB")


def test_measured_runs_reached_this_share_of_the_planned_speed():
    """Those of docs/performance.md, of 16 sequences a step."""
    page = (CONFIGS.parent / "docs/performance.md").read_text().partition("## GPU")[2]
    shares = {}
    name = ""
    for cell, speed in re.findall(r"^\| ([^|]*`[^|]*`) \| \d \| ([\d,]+) \|", page, re.M):
        option = cell.partition("... ")[2].strip("`")
        name = name if option else cell.strip("`")
        # what was measured gathered weights in each micro-batch
        options = ["--train.global_batch_size=16", "--parallel.gather_once=false"]
        options += [f"--{option}"] if option else []
        cfg = config.load(str(CONFIGS / f"{name}.toml"), options)
        planned_speed = plan(cfg, 1, Asked(device("H200")))["tokens_per_second_per_device"]
        share = float(speed.replace(",", "")) / planned_speed
        shares.setdefault(show.reached(cfg), []).append(round(share, 2))
    assert len(shares) == 2
    for reached, of_runs in shares.items():
        assert reached == (min(of_runs), max(of_runs))


def test_a_verdict_is_in_hours_up_to_a_day():
    asked = Asked(gpu_memory_gib=80.0)
    told = (
        "96 ranks: fits, 64.2 GiB left; needs 15.75 of 80 GiB (peak in the backward head); "
        "10,200 to 11,700 tokens/s per GPU; "
    )
    for steps, duration in (
        (47_807, "21 to 24 hours"),
        (47_809, "0.9 to 1.0 days"),
        (288, "0.13 to 0.14 hours"),
    ):
        cfg = make_config(train={"steps": steps})
        assert show.verdict(ROW, cfg, asked) == f"{told}{duration} in all"
    needed = "needs 15.75 GiB (peak in the backward head)"
    unknown = ROW | {"world_size": 1, "fits": None, "step_seconds": None}
    assert show.verdict(unknown, make_config(), Asked()) == f"1 rank: {needed}"
    too_large = show.verdict(ROW | {"fits": False}, make_config(), Asked(gpu_memory_gib=15.0))
    of_it = needed.replace("15.75", "15.75 of 15")
    assert too_large == f"96 ranks: does not fit; {of_it}"
    # the time of copies to the host is not known
    offloaded = show.verdict(ROW | {"host_gib": 1.0}, make_config(), asked)
    assert offloaded == told.partition("; 10,200")[0]


def test_shapes_of_the_drawing_stand_where_their_numbers_are(tmp_path):
    """Of four phases by hand, against a scale of 8 seconds and 10 GiB: memory lasts until the next phase, kinds lie on
    each other, and what takes no time is not drawn."""
    gib = {"parameters": 2.0, "activations": 1.5}
    peaks = [gib, {"parameters": 2.0, "gathered units": 0.5}, gib, {"parameters": 2.0}]
    names = ["forward embedding", "forward block 0", "backward block 0", "update"]
    times = [(0.0, 1.0), (1.5, 2.5), (2.5, 5.0), (6.0, 8.0)]
    sent = [("gathers", (0.5, 1.25)), ("gathers", (2.0, 2.0)), ("reduces", (4.0, 6.0)), None]
    moments = []
    for name, peak, (begin, end), sends in zip(names, peaks, times, sent):
        in_bytes = Counter({kind: int(size * 2**30) for kind, size in peak.items()})
        moments.append(
            Moment(Phase(name, peak=in_bytes), begin, end, dict([sends] if sends else []))
        )
    show.draw(ROW, moments, str(tmp_path / "step.svg"), "r on 96 x GPU", 10.0)

    def x(seconds: float) -> float:
        return show.Chart.LEFT + seconds / 8 * show.Chart.WIDTH

    def y(size: float) -> float:
        return show.Chart.FLOOR - size / 10 * show.Chart.HEIGHT

    root = ET.parse(tmp_path / "step.svg").getroot()
    boxes = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if len(rect):
            boxes[rect[0].text] = [float(rect.get(key)) for key in ("x", "y", "width", "height")]
    expected = {}
    for name, peak, (begin, end), until in zip(names, peaks, times, (1.5, 2.5, 6.0, 8.0)):
        low = 0.0
        for kind in ("parameters", "gathered units", "activations"):
            if kind in peak:
                title = f"{name}: {kind} {peak[kind]:.2f} of {sum(peak.values()):.2f} GiB"
                high = low + peak[kind]
                expected[title] = [x(begin), y(high), x(until) - x(begin), y(low) - y(high)]
                low = high
        title = f"{name}: {1000 * (end - begin):.2f} ms"
        expected[title] = [x(begin), show.Chart.COMPUTE, x(end) - x(begin), show.Chart.TALL]
    for title, begin, end in (
        ("forward embedding gathers: 750.00 ms", 0.5, 1.25),
        ("backward block 0 reduces: 2000.00 ms", 4.0, 6.0),
    ):
        expected[title] = [x(begin), show.Chart.COLLECTIVES, x(end) - x(begin), show.Chart.TALL]
    assert boxes.keys() - {*show.COLORS} == expected.keys()
    for title, shape in expected.items():
        assert boxes[title] == pytest.approx(shape, abs=0.01), title
    labels = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        labels.setdefault(text.text, []).append((float(text.get("x")), float(text.get("y"))))
    for name, middle in (("forward", 1.25), ("backward", 4.25), ("update", 7.0)):
        assert [place for place, _ in labels[name]] == [pytest.approx(x(middle), abs=0.5)]
    for size in (0, 2, 4, 6, 8, 10):
        assert (show.Chart.LEFT - 8, pytest.approx(y(size) + 4, abs=0.5)) in labels[f"{size}"]
    for seconds in (0, 2, 4, 6, 8):
        assert [place for place, _ in labels[f"{seconds} s"]] == [
            pytest.approx(x(seconds), abs=0.5)
        ]
    assert "r on 96 x GPU: allocated peak 13.00 GiB in the backward head" in labels
    lines = [path.get("d") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert f"M{show.Chart.LEFT} {y(10):.1f}h{show.Chart.WIDTH}" in lines


def test_suggestions_go_on_past_offload(monkeypatch):
    """Its speed is not known: another change that fits, of several together, goes before it."""

    def planned(cfg, ranks, asked):
        assert asked.gpus_per_node == 4
        fits = cfg.parallel.cpu_offload or (
            cfg.train.micro_batch_size == 1 and cfg.parallel.recompute == "full"
        )
        return {
            "fits": fits,
            "host_gib": float(cfg.parallel.cpu_offload),
            "tokens_per_second_per_device": 1.0,
        }

    monkeypatch.setattr(advice, "plan", planned)
    args = config.parse_arguments(
        [str(CONFIGS / "tiny.toml"), "--dry-run", "--train.micro_batch_size=8"]
    )
    tried = advice.tried(1, args, Asked(gpus_per_node=4))
    (overrides, _), _ = advice.fastest(tried)
    assert overrides == ("--train.micro_batch_size=1", "--parallel.recompute=full")


def test_where_one_change_is_enough_all_that_are_one_are_told_and_no_more(monkeypatch):
    monkeypatch.setattr(
        advice,
        "plan",
        lambda cfg, ranks, asked: {
            "fits": cfg.train.micro_batch_size == 1,
            "host_gib": 0.0,
            "tokens_per_second_per_device": 1.0,
        },
    )
    args = config.parse_arguments([str(CONFIGS / "tiny.toml")])
    cfg = config.load(args.config)
    one = [
        (names, times)
        for names, times in advice.changes(cfg, 1, 8)
        if len(names) + (times > 1) == 1
    ]
    found = [change for change, _ in advice.tried(1, args, Asked())]
    assert len(found) > 5 and found == [change for change in one if change in found]
    assert {("--train.micro_batch_size=1",), ("--parallel.cpu_offload=true",), ()} <= {
        names for names, _ in found
    }


def told_by(fitting: str, monkeypatch) -> tuple[str, list[tuple[str, ...]]]:
    """(the advice, the changes that were planned) where one of them fits, the fastest that is tried."""
    asked_for = []

    def planned(cfg, ranks, asked):
        found = cfg.run.name.split()[1:]
        if ranks > 4:
            found.append(f"--world-size {ranks}")
        asked_for.append(tuple(found))
        return {
            "fits": found == [fitting],
            "host_gib": 0.0,
            "device_gib": 9.0,
            "world_size": ranks,
            "accumulation_steps": 1,
            "tokens_per_second_per_device": 100.0,
        }

    def load(path, overrides):  # a configuration that remembers them
        cfg = config.from_dict({"model": TINY["model"], "train": TINY["train"]}, path)
        return replace(cfg, run=replace(cfg.run, name=" ".join(["r", *overrides])))

    monkeypatch.setattr(advice, "plan", planned)
    monkeypatch.setattr(config, "load", load)
    args = SimpleNamespace(config="x.toml", overrides=[])
    return advice.advise(4, args, Asked(gpu_memory_gib=10)), asked_for


@pytest.mark.parametrize("change", ["--parallel.recompute=full", "--world-size 8"])
def test_advice_names_the_change_that_fits_and_tries_no_more_than_one(change, monkeypatch):
    told, tried = told_by(change, monkeypatch)
    assert told.startswith("4 ranks: what would change it, by the plan (speeds: an H100's)\n")
    assert f"\n        9.0 GiB       100 tok/s a GPU   fits  {change}\n" in told
    assert told.endswith(f"\nthe fastest that fits: {change}") and all(
        len(names) == 1 for names in tried
    )
    assert told.count(" fits  ") == 1 and len(told.splitlines()) == 2 + len(tried)


def test_what_is_offloaded_has_no_known_speed(monkeypatch):
    monkeypatch.setattr(
        advice,
        "plan",
        lambda cfg, ranks, asked: {
            "fits": True,
            "host_gib": float(cfg.parallel.cpu_offload),
            "device_gib": 9.0,
            "world_size": ranks,
            "accumulation_steps": 1,
            "tokens_per_second_per_device": 1234.5,
        },
    )
    args = config.parse_arguments([str(CONFIGS / "tiny.toml")])
    told = advice.advise(1, args, Asked(gpu_memory_gib=10)).splitlines()[1:-1]
    assert sum(" 1,234 tok/s" in line for line in told) == len(told) - 1
    assert [line for line in told if " unknown tok/s" in line] == [
        line for line in told if "cpu_offload" in line
    ]


def test_advice_says_where_nothing_fits(monkeypatch):
    told, tried = told_by("nothing", monkeypatch)
    assert told.endswith(
        "nothing on this list fits: take GPUs with more memory, or a smaller model"
    )
    assert max(map(len, tried)) > 3  # it went on to several together, and on more ranks


@needs_extra("huggingface", "lora", "optimizers", "float8")
def test_changes_are_of_every_kind_and_tp_stays_within_a_node():
    cfg = config.load(
        str(CONFIGS / "tiny.toml"),
        [
            "--parallel.recompute=2",
            "--parallel.prefetch_backward=2",
            "--parallel.sync_every_micro_batch=false",
            "--train.global_batch_size=128",
        ],
    )
    found = [names for names, _ in advice.changes(cfg, 16, gpus_per_node=4)]
    for change in (
        "train.micro_batch_size=1",
        "parallel.recompute=full",
        "parallel.tp=4",
        "parallel.cp=8",
        "parallel.prefetch_backward=1",
        "parallel.sync_every_micro_batch=true",
        "optim.state_dtype=bfloat16",
        "parallel.cpu_offload=true",
    ):
        assert (f"--{change}",) in found
    assert not any("--parallel.tp=8" in names for names in found)
    ranks = [times for names, times in advice.changes(cfg, 16, 4) if not names]
    assert ranks == [2, 4, 8]
    for name, kept in ("lora", ["nf4"]), ("qlora", []):  # a base has a dtype of its own
        cfg = config.load(str(CONFIGS / f"llama8b-{name}.toml"))
        found = [names for names, _ in advice.changes(cfg, 1, gpus_per_node=1)]
        bases = [names[0] for names in found if len(names) == 1 and "base_dtype" in names[0]]
        assert bases == [f"--lora.base_dtype={dtype}" for dtype in kept]


@pytest.mark.quick
@needs_extra("huggingface", "lora")
def test_weights_in_4_bits_cost_what_is_moved_to_make_them():
    """Uncompiled what dequantize()'s operators move, compiled what one kernel must read and write."""
    from extras.lora import nf4

    counted = Counted(FakeTensorMode(), {}, set(), 1)
    rows = 512
    columns = 4096
    with counted.fake, counted:
        x, codes = (
            torch.empty(8, columns, dtype=torch.bfloat16),
            torch.empty(rows, columns // 2, dtype=torch.uint8),
        )
        scales = torch.empty(rows, nf4.scale_bytes(columns), dtype=torch.uint8)
        counted.begin("operators")
        weights = nf4.dequantize(codes, scales, x.dtype)
        counted.begin("product")
        nf4.nf4_matmul(x, codes, scales, 0, False)
        counted.begin("compiled")
        counted.fused = True
        nf4.nf4_matmul(x, codes, scales, 0, True)
    operators, product, compiled = (phase.work["moved"] for phase in counted.phases[1:])
    assert product == pytest.approx(operators, rel=0.01)
    assert compiled == codes.nbytes + scales.nbytes + weights.nbytes


def test_an_optimizer_is_planned_as_it_is(monkeypatch, capsys):
    """Half of AdamW's bytes where it keeps one sum; what it sends is counted, what it keeps later is named."""

    def adagrad(model, o, compile):
        return torch.optim.Adagrad(model.parameters())

    def muon(model, o, compile):
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])

    def planned(ranks: int = 1) -> dict:
        return json.loads(
            dry_run(capsys, CONFIGS / "tiny.toml", f"--world-size={ranks}", "--json")[1]
        )

    usual = planned(2)
    assert usual["not_counted"] == []
    monkeypatch.setattr(simulate_module, "build_optimizer", adagrad)
    assert planned()["optimizer_bytes_per_rank"] == 4 * 5_048_576 + 4 * 39
    monkeypatch.setattr(simulate_module, "build_optimizer", muon)
    assert planned()["not_counted"] == ["state of Muon that optim.build_optimizer does not make"]

    def partly(model, o, compile):
        optimizer = build_optimizer(model, o)
        del optimizer.state[model.head.weight]
        return optimizer

    monkeypatch.setattr(simulate_module, "build_optimizer", partly)
    assert planned()["not_counted"] == [
        "state of ShardedAdamW that optim.build_optimizer does not make"
    ]
    monkeypatch.setattr(simulate_module, "build_optimizer", muon)
    assert (
        planned(2)["collectives_per_step"]["all_gather"][0]
        > usual["collectives_per_step"]["all_gather"][0]
    )
    assert "not counted" in dry_run(capsys, CONFIGS / "tiny.toml")[1]


def test_wrong_number_of_ranks_is_exit_2(capsys):
    done = launch("configs/llama8b.toml", "--dry-run", "--world-size", "3,5")
    assert done.returncode == 2 and "--world-size 3" in done.stderr and "multiple of" in done.stderr
    for wrong in ("0", "x", "-1"):
        with pytest.raises(SystemExit, match="2"):
            dry_run(capsys, CONFIGS / "llama8b.toml", f"--world-size={wrong}")


@pytest.mark.parametrize(
    "words, error",
    [
        (["--gpu", "H1000"], "--gpu H1000: unknown; known are A100-40"),
        (["--gpu", "H100,products=fast"], "--gpu H100,products=fast: write rate=value"),
        (["--gpu", "H100,speed=3"], "rates are memory, peak, products"),
        (
            ["--gpu", "H100,products=1e-310"],
            "--gpu H100,products=1e-310: write rate=value, a number of 1e-6 to 1e9",
        ),
        (["--gpu="], "--gpu : unknown; known are A100-40"),
        (["--plot="], "--plot : "),
        (["--plot", "/nowhere/step.svg"], "--plot /nowhere/step.svg: No such file"),
    ],
)
def test_wrong_gpus_and_plots_are_errors(words, error, capsys):
    with pytest.raises(config.ConfigError) as raised:
        dry_run(capsys, CONFIGS / "tiny.toml", *words)
    assert error in str(raised.value)


def test_rates_can_be_given(capsys):
    assert (
        device("h100,products=500,memory=40").products == 500
        and device("H100").memory == DEVICES["H100"].memory
    )
    words = (CONFIGS / "llama8b.toml", "--world-size=8", "--json", "--gpu")
    usual, slow = (
        json.loads(dry_run(capsys, *words, gpu)[1]) for gpu in ("H100", "H100,products=360")
    )
    assert slow["step_seconds"] > 1.5 * usual["step_seconds"]


def test_several_numbers_of_ranks_are_compared(capsys):
    out = dry_run(capsys, CONFIGS / "tiny.toml", "--world-size=1,2,4", "--gpu", "RTX4090")[1]
    rows = [line.split() for line in out.split("allocated GiB")[1].splitlines()[1:4]]
    assert [row[0] for row in rows] == ["1", "2", "4"] and float(rows[0][2]) > float(rows[2][2])


def test_a_number_of_ranks_that_is_refused_is_a_row_of_its_own(capsys):
    """3 ranks do not divide the batch of 8; the plans of the others are those without it."""
    words = (CONFIGS / "tiny.toml", "--gpu=RTX4090")
    out = dry_run(capsys, *words, "--world-size=3,2")[1]
    assert "3 ranks: refused: [train] global_batch_size" in out and "2 ranks: fits" in out
    assert re.search(r"^ +3 +refused$", out, re.M)
    rows = json.loads(dry_run(capsys, *words, "--world-size=3,2", "--json")[1])
    assert rows[0].keys() == {"world_size", "problems"} and "multiple of" in rows[0]["problems"][0]
    assert rows[1] == json.loads(dry_run(capsys, *words, "--world-size=2", "--json")[1])


def test_the_drawing_is_the_plan(tmp_path, capsys):
    # what is named stays what it is: it may be a device, too
    link = tmp_path / "link.svg"
    link.symlink_to("step.svg")
    one_micro_batch = "--train.global_batch_size=8"
    arguments = ["--world-size=8", "--gpu", "H100", one_micro_batch, "--plot", link]
    dry_run(capsys, CONFIGS / "llama8b.toml", *arguments)
    assert link.is_symlink()
    drawing = ET.parse(tmp_path / "step.svg")
    words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {
        "llama8b on 8 x H100: allocated peak 49.83 GiB in the backward head",
        "the GPU's memory: 79.1 GiB",
        "0.7 s",
        "70",
        "forward",
        "backward",
        "update",
        "compute",
        "collectives",
        "activations",
    } < {*words}
    assert (
        max(float(word.removesuffix(" s")) for word in words if re.fullmatch(r"[\d.]+( s)?", word))
        == 70
    )
    rects = drawing.iter("{http://www.w3.org/2000/svg}rect")
    rects = {rect[0].text: rect for rect in rects if len(rect)}
    boxes = {title: float(rect.get("height")) for title, rect in rects.items()}
    titles = [*boxes]
    highest = [
        tall
        for title, tall in boxes.items()
        if title.startswith("backward head: ") and " of " in title
    ]
    assert sum(highest) == pytest.approx(320 * 49.83 / 79.1, abs=0.1)
    computed, sent = (
        next(
            (float(rect.get("width")), float(title.split()[-2]))
            for title, rect in rects.items()
            if title.startswith(f"forward block 3{what}: ") and title.endswith(" ms")
        )
        for what in ("", " gathers")
    )
    # pixels a millisecond
    assert sent[0] / sent[1] == pytest.approx(computed[0] / computed[1], rel=0.01)
    assert any(
        t.startswith("backward head: activations") and t.endswith("of 49.83 GiB") for t in titles
    )
    # the unit after each
    assert sum(t.startswith("forward block") and " gathers: " in t for t in titles) == 32
    assert sum(t.startswith("backward block") and " reduces: " in t for t in titles) == 32


@pytest.mark.quick
def test_the_reductions_of_replicas_take_their_time():
    """Two nodes, a replica on each: a block's gradients are reduce-scattered within a node (7/8 of the bytes leave each
    GPU), then all-reduced with the other node (its bytes leave twice, half of them each time)."""
    h100 = device("H100")
    cfg = config.load(
        str(CONFIGS / "llama8b.toml"), ["--parallel.dp_replicate=2", "--model.n_layers=4"]
    )
    _, moments = plan_module.planned(cfg, 16, Asked(h100, None, 8), None)
    moment = next(m for m in moments if m.phase.name == "backward block 2")
    gradients = 4 * sum(p.numel() for p in meta_model(cfg.model).blocks[1].parameters())
    within, between = gradients * 7 / 8 / h100.link, gradients / 8 * 2 / 2 / h100.network
    begin, end = moment.sends["reduces"]
    assert end - begin == pytest.approx((within + between) / OF_LINK / 1e9, rel=0.02)


def test_slow_networks_are_waited_for():
    cfg = config.load(str(CONFIGS / "llama8b.toml"), ["--train.global_batch_size=64"])
    fast, slow = (plan(cfg, 64, Asked(device(gpu))) for gpu in ("H100", "H100,network=2"))
    assert fast["waiting_seconds"] < 0.1 * fast["step_seconds"]
    assert slow["waiting_seconds"] > 0.3 * slow["step_seconds"]
    best = "best_tokens_per_second_per_device"  # which nothing waits for
    assert slow[best] == pytest.approx(fast[best])


def test_gathers_and_reductions_are_sent_apart():
    phase = Phase("backward block 0")
    phase.sent |= {
        ("dp_shard", "all_gather", "bytes"): 8e9,
        ("dp_shard", "reduce_scatter", "bytes"): 1.6e9,
    }
    [moment] = timeline([phase], make_config(), Cluster(DEVICES["H100"], 8, (1, 8, 1, 1)))
    seconds = {kind: end - begin for kind, (begin, end) in moment.sends.items()}
    of_link = 450e9 * 0.8 * 8 / 7  # a rank sends seven eighths of a buffer
    assert seconds == {
        "gathers": pytest.approx(8e9 / of_link),
        "reduces": pytest.approx(1.6e9 / of_link),
    }


@pytest.mark.quick
def test_what_sends_nothing_waits_for_nothing():
    assert plan(make_config(), 1, Asked(device("H100")))["waiting_seconds"] == 0


def test_a_plan_is_of_gpus_whatever_the_device(capsys):
    gpus, device_cpu = (
        json.loads(dry_run(capsys, CONFIGS / "tiny.toml", "--json", *words)[1])
        for words in ((), ("--run.device=cpu",))
    )
    assert gpus == device_cpu
    # as plan() alone follows it
    on_cpu = plan(config.load(str(CONFIGS / "tiny.toml"), ["--run.device=cpu"]), 1)
    assert on_cpu["peak_gib"] != gpus["peak_gib"]


def test_dry_run_makes_nothing(tmp_path):
    """With torch's most detailed debugging, too, which wraps process groups."""
    for debug in ("OFF", "DETAIL"):
        path = CONFIGS / "tiny.toml"
        done = launch(path, "--dry-run", cwd=tmp_path, TORCH_DISTRIBUTED_DEBUG=debug)
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_options_of_a_plan_need_dry_run(capsys):
    with pytest.raises(SystemExit, match="2"):
        config.parse_arguments(["--config", "base.toml"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--config needs --dry-run" in said and "file comes first, without --config" in said


MACHINES = {  # that the comments of the configurations name
    "llama1b": (1, "H100"),
    "llama3b": (1, "H100"),
    "llama8b": (8, "H100"),
    "llama8b-h200": (1, "H200"),
    "llama3.1-8b": (8, "H100"),
    "llama3.1-8b-128k": (8, "H100"),
    "llama8b-float8": (8, "H100"),
    "llama8b-lora": (1, "RTX4090"),
    "llama8b-qlora": (1, "RTX4090"),
    "llama70b": (256, "H100"),
    "llama3.1-70b": (64, "H100"),
    "llama70b-qlora": (8, "H100"),
    "smollm2-135m": (1, "H100"),
    "tinyllama-1.1b": (1, "H100"),
    "tiny": (1, "RTX3090"),
    "llama3.1-8b-chat-lora": (1, "H100"),
    "qwen3-0.6b-chat": (1, "RTX4090"),
    "qwen3-8b-chat-qlora": (1, "RTX4090"),
    "tiny-chat": (1, "RTX3090"),
}


class StartUp(Counted):
    """Answers where the host reads a value: yes, all are finite; 0, where rank 0's shard begins."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default and isinstance(
            args[0], FakeTensor
        ):
            return args[0].dtype == torch.bool
        return super().__torch_dispatch__(operator, types, args, kwargs)


def beyond_what_is_held(cfg: config.Config, ranks: int) -> float:
    """GiB that start-up needs at most beyond what it leaves: of two blocks, since the largest tensors decide. Of each
    parameter the first rows alone are drawn or quantized, and nothing is read: values from a file, a folder's or a
    checkpoint's, are copied to their places by way of host memory."""

    def first_rows(function, rows: int, part: int):
        return lambda *of: function(
            *of[:part], of[part][: min(rows, len(of[part]))], *of[part + 1 :]
        )

    def real(meshes, concatenate=DeviceMesh._concatenate):
        with unset_fake_temporarily():
            return concatenate(meshes)

    cfg, quantized = replace(cfg, model=replace(cfg.model, n_layers=2)), []
    if cfg.lora and cfg.lora.base_dtype == "nf4":
        from extras.lora.nf4 import NF4Linear

        quantized = [
            mock.patch.object(NF4Linear, "quantize", first_rows(NF4Linear.quantize, 300, 3))
        ]
    with cases.fake_process_group(ranks), contextlib.ExitStack() as stack:
        world = World(
            0, ranks, torch.device("cpu"), build_mesh("cpu", config.mesh_shape(cfg, ranks))
        )
        counted = StartUp(FakeTensorMode(allow_non_fake_inputs=True), {}, set(), 512)
        for patch in [
            *simulate_module.without_storage(counted),
            mock.patch("parallel.materialize.on_each_rank", lambda work: work()),
            mock.patch(
                "torch.nn.init.trunc_normal_", lambda values, *bounds, **of: values.normal_()
            ),
            mock.patch("parallel.materialize.draw", first_rows(materialize.draw, 64, 0)),
            *quantized,
            mock.patch.object(DeviceMesh, "_concatenate", real),
            mock.patch.object(FakeTensor, "tolist", lambda t: [True] * len(t), create=True),
        ]:
            stack.enter_context(patch)
        model = meta_model(cfg.model, cfg.lora)
        parallelize(model, replace(cfg, parallel=replace(cfg.parallel, compile=False)), world)
        with counted.fake, counted:
            materialize.materialize(model, cfg.run.seed, world.device)
            optimizer = build_optimizer(model, cfg.optim)
            verify_sharding(model, cfg.parallel, world)
            left = counted.live.total()
        assert optimizer.state and left >= sum(
            t.nbytes for _, t in materialize.local_tensors(model)
        )
    return (counted.phases[-1].peak.total() - left) / 2**30


def start_up_gib(cfg: config.Config, row: dict) -> float:
    held = (row["parameter_bytes_per_rank"] + row["optimizer_bytes_per_rank"]) / 2**30
    return held + beyond_what_is_held(cfg, row["world_size"])


def test_a_change_goes_on_from_the_value_that_is_set():
    """A number that is not in the list is one's own: what costs more than the first is tried."""
    values = ("none", "elementwise", "selective", "full")
    assert [advice.after(values, value) for value in (*values, 3)] == [
        ["elementwise", "selective", "full"],
        ["selective", "full"],
        ["full"],
        [],
        ["elementwise", "selective", "full"],
    ]


# like another but for a number
NIGHTLY = {
    "qwen3-8b-chat-qlora",
    "llama70b",
    "llama3.1-70b",
    "llama8b-qlora",
    "llama8b-h200",
    "llama8b-lora",
    "llama3b",
}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=nightly_if(path.stem in NIGHTLY), id=path.stem)
        for path in shipped_configs()
    ],
)
def test_every_shipped_configuration_fits_its_machine(path, capsys):
    """Start-up needs less than a step: allocation, initialization or quantization, AdamW's state, scales, the checks of
    values and replicas."""
    ranks, gpu = MACHINES[path.stem]
    fits, out, err = dry_run(capsys, path, "--json", "--world-size", ranks, "--gpu", gpu)
    assert fits, err
    row = json.loads(out)
    assert row["accumulation_steps"] >= 1, err
    assert (
        start_up_gib(config.load(str(path), ["--parallel.param_dtype=bfloat16"]), row)
        < row["peak_gib"]
    )


@needs_extra("huggingface", "lora")
def test_start_up_needs_less_than_a_step_also_where_the_base_is_whole_on_each_rank():
    """Of two GPUs of 24 GB. The checksums of the embedding, computed at once, would take 11.7 GiB."""
    whole = '["embedding*", "*_proj.weight", "*norm*", "head*"]'
    cfg = config.load(
        str(CONFIGS / "llama8b-lora.toml"),
        ["--parallel.param_dtype=bfloat16", f"--parallel.replicated={whole}"],
    )
    row = plan(cfg, 2)
    assert row["parameter_bytes_per_rank"] > 14.9 * 2**30 and row["device_gib"] < 23.5
    assert start_up_gib(cfg, row) < row["peak_gib"]


def test_the_benchmark_of_whole_steps(capsys, monkeypatch):
    """Its options, once: --world-size, --suggestions (of two changes), overrides."""
    monkeypatch.setattr(
        advice,
        "changes",
        lambda *unused: [
            advice.Change(("--parallel.reshard_after_forward=true",)),
            advice.Change((), times=4),
        ],
    )
    few = "--model.n_layers=5", "--train.global_batch_size=256"
    assert (
        benchmark.main(
            [str(CONFIGS / "llama1b.toml"), *few, "--world-size=1,64", "--suggestions=1"]
        )
        == 0
    )
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:3]] == ["1", "64"] and all(
        "equal" in line for line in out[1:3]
    )
    assert "fits" in out[3] and "FASTER" not in out[3]
    assert (
        benchmark.main(
            [str(CONFIGS / "llama1b.toml"), "--world-size=64", "--train.global_batch_size=8"]
        )
        == 2
    )
    assert capsys.readouterr().err.startswith(
        "[train] global_batch_size = 8: must be a multiple of"
    )


@pytest.mark.parametrize("off", [1.0, 1.2])
def test_run_on_gpus_is_compared_with_its_plan(tmp_path, capsys, off):
    """Of a row's peak and step time; a warning where they differ by more than a plan may be off."""
    cfg = make_config(run={"device": "cuda", "name": "r"}, model={"head_dim": 16})
    (tmp_path / "config.toml").write_text(config.to_toml(cfg))
    launch = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.1, "ranks": 2, "hosts": ["a"]}
    (tmp_path / "environment.json").write_text(json.dumps(launch))
    planned = plan(cfg, 2, Asked(DEVICES["H100"], gpus_per_node=2))
    row = {"peak_memory_gib": planned["peak_gib"] * off, "step_seconds": planned["step_seconds"]}
    assert plan_check.main([str(tmp_path), json.dumps(row)]) == 0
    out, err = capsys.readouterr()
    comparison = json.loads((tmp_path / "plan.json").read_text())
    assert [*comparison] == ["peak memory, GiB", "time of a step, s"]
    assert all(f"{name}: {text}\n" in out for name, text in comparison.items())
    assert f"({off - 1:+.1%})" in comparison["peak memory, GiB"]
    assert ("memory, GiB is more than 5% off the plan" in err) == (off > 1.05)


def test_heads_that_no_kernel_takes_are_refused_by_a_gpus_plan():
    sections = {
        "run": {"device": "cuda"},
        "model": {"head_dim": 8},
        "train": {"global_batch_size": 8},
    }
    with pytest.raises(config.ConfigError, match="heads are 8 wide"):
        plan(make_config(**sections, parallel={"cp": 2}), 2)
    assert plan(make_config(**sections), 2)["peak_gib"] > 0


@needs_extra("float8")
def test_float8_that_no_gpu_or_not_this_one_takes_is_refused_by_its_plan():
    words = ["--run.device=cuda", "--parallel.float8=rowwise"]
    cfg = config.load(str(CONFIGS / "llama8b-float8.toml"), words)
    with pytest.raises(
        config.ConfigError, match='float8 = "rowwise": the GPU given has no float8 products'
    ):
        plan(cfg, 8, Asked(device("A100-80")))
    assert plan(cfg, 8, Asked(device("H100")))["fits"]
    with pytest.raises(
        config.ConfigError, match='float8 = "rowwise": requires compile = true on a GPU'
    ):
        plan(
            config.load(str(CONFIGS / "llama8b-float8.toml"), [*words, "--parallel.compile=false"]),
            8,
        )


@pytest.mark.parametrize("width, rate", [(64, 376), (126, 376), (128, 554), (256, 554)])
def test_heads_from_128_on_attend_at_the_faster_rate(width, rate):
    """On an H100 TFLOP a second, as measured for its kernels."""
    cfg = make_config(model={"head_dim": width, "dim": 256, "n_heads": 2, "n_kv_heads": 2})
    phase = Phase("forward")
    phase.work["attention"] = 1e12
    [moment] = timeline([phase], cfg, Cluster(DEVICES["H100"], 8, (1, 1, 1, 1)))
    assert moment.end - moment.begin == pytest.approx(1 / rate)


@pytest.mark.parametrize(
    "name, memory, known",
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA H200", 140, "H200"),
        ("NVIDIA GH200 480GB", 95, None),
        ("NVIDIA RTX A1000", 8, None),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("Tesla T4", 15, None),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H100 NVL", 93.0, None),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.6, None),
    ],
)
def test_gpus_are_known_by_cudas_name(name, memory, known):
    assert known_as(name, memory) == known


@needs_extra("float8", "huggingface", "lora", "optimizers")
def test_the_table_of_published_runs(monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(published, "RUNS", [published.RUNS[0], published.RUNS[-2]])
    published.main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 2 and all(float(row[3]) > 0 and 0.5 < float(row[5]) < 2 for row in rows)


def test_a_disk_that_may_not_be_looked_at_ends_no_plan(monkeypatch, capsys):
    def check_machine(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret")

    monkeypatch.setattr("run.launch.check_machine", check_machine)
    dry_run_module.print_lacks(make_config())
    assert (
        "a run here would fail: [Errno 13] Permission denied: '/secret'" in capsys.readouterr().err
    )
