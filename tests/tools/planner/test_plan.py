"""What a plan counts: numbers that a hand can count from sizes written beside them, and all blocks against few."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import config
from model.build import meta_model
from model.llama import named_parameters
from tests import theory
from tests.conftest import (
    REPO,
    has_extra,
    lacks,
    make_config,
    needs_extra,
    nightly_if,
    shipped_configs,
)
from tests.tools.planner.steps import assert_equal, of_a_gpu, step_and_models
from tools.planner import simulate as simulate_module
from tools.planner.counted import Counted, Phase
from tools.planner.devices import DEVICES
from tools.planner.plan import GIB, Asked, plan, planned
from tools.planner.simulate import simulate

pytestmark = pytest.mark.first

CONFIGS = REPO / "configs"
H100 = DEVICES["H100"]

MESHES: list[dict] = [
    {},
    {"reshard_after_forward": False},
    {"reduce_dtype": "bfloat16", "keep_fp32": ["head"]},
    {"sync_every_micro_batch": False},
    {"gather_once": True},
    {"dp_replicate": 2},
    {"dp_replicate": 8, "dp_shard": 1},
    {"tp": 2, "recompute": "full", "sync_every_micro_batch": False},
    {"cp": 2, "tp": 2},
    {"cp": 2, "recompute": "selective", "prefetch_forward": 2, "prefetch_backward": 2},
    {"dp_replicate": 2, "cp": 2, "recompute": 2, "reshard_after_forward": False},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_collectives_are_those_of_the_closed_form(mesh):
    cfg = of_a_gpu({"n_layers": 7}, mesh)
    assert plan(cfg, 8)["collectives_per_step"] == theory.collectives(cfg, meta_model(cfg.model), 8)


@needs_extra("optimizers")
@pytest.mark.parametrize("mesh", [{}, {"dp_replicate": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_muons_matrices_are_sent_and_multiplied(mesh):
    """By the closed form; rank 0 multiplies those that it owns."""
    from extras.optimizers import muon

    cfg = of_a_gpu({"n_layers": 2}, mesh, optim={"name": "muon"})
    model = meta_model(cfg.model)
    assert plan(cfg, 8)["collectives_per_step"] == theory.collectives(cfg, model, 8)
    matrices = [p for name, p in named_parameters(model) if "blocks" in name and p.ndim == 2]
    work = [muon.flop(p.shape) for p in matrices]
    owners = muon.owners(work, 8, mesh.get("dp_replicate", 1))
    step = simulate(cfg, 8)
    owned = sum(flop for flop, owner in zip(work, owners) if owner == 0)
    assert step.phases[-1].work["matmuls"] == owned and step.state_is_made


def test_what_fsdp2_sends_is_its_own_where_cp_is_all_that_shards():
    traffic = plan(make_config(parallel={"cp": 2, "dp_shard": 1}), 2)["traffic_per_step"]
    assert "all_gather" in traffic["dp_shard"] and traffic["dp_shard"]["ranks"] == 2
    # keys and values of two blocks, four micro-batches
    assert traffic["cp"]["all_gather"][0] == 2 * 4


ODD = ["blocks.*[13579].attention.?_proj.weight"]
WIDE = {"dim": 2048, "ffn_dim": 2048, "n_layers": 7}
# micro-batches, of replicas
THREE = {"seq_len": 256, "global_batch_size": 12, "micro_batch_size": 1}
GATHERED_ONCE = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "gather_once": True}
LORA = {"lora": {"rank": 4}, "model": {"freeze": ["blocks.*.?_proj.weight"]}}
FEW: list[dict] = [  # blocks run, in a common pattern
    {"parallel": {"recompute": "full", "sync_every_micro_batch": False}},
    {"parallel": {"compile": True, "tp": 2}},
    {"parallel": {"cp": 2, "recompute": 2, "compile": True}},
    {"parallel": {"dp_replicate": 8, "dp_shard": 1}},
    {"parallel": GATHERED_ONCE, "train": THREE},
    {"parallel": {"compile": True}, "optim": {"state_dtype": "bfloat16"}},
    {"parallel": {"float8": "tensorwise", "compile": True}, "model": WIDE},
    {"parallel": {"prefetch_forward": 3, "prefetch_backward": 1}},
    {"parallel": {"recompute": "full", "replicated": ODD}, **LORA},
]
ALL_RUN: list[dict] = [
    {"model": {"freeze": ["embedding.*", "blocks.[0-4].*"]}},  # their first blocks differ
    {"optim": {"name": "muon"}},  # its update needs all matrices
]


@pytest.mark.parametrize("sections", [*FEW, *ALL_RUN], ids=str)
def test_few_blocks_give_the_plan_of_all(sections):
    given = dict(sections)
    lora = given.pop("lora", None)
    if lacks(**given) or (lora and not has_extra("lora")):
        pytest.skip("needs an extra that was removed")
    cfg = replace(of_a_gpu(**given), lora=config.Lora(**lora) if lora else None)
    step, blocks = step_and_models(cfg)
    if sections in ALL_RUN:
        assert blocks[-1] == 10
        return
    assert len(blocks) == 1 and blocks[0] < cfg.model.n_layers
    assert_equal(step, simulate(cfg, 8, all_blocks=True))


@pytest.mark.parametrize("options", [{}, {"param_dtype": "float32"}], ids=str)
def test_gradients_stay_on_the_device_until_they_are_reduced_also_with_offload(options):
    """FSDP2 offloads a gradient when it has reduced it. Until then it is the unsharded parameter's own, if it has the
    dtype of the reduction."""

    def peak_with(**offload: bool) -> Phase:
        parallel = {**options, **offload, "sync_every_micro_batch": False}
        return simulate(of_a_gpu(parallel=parallel), 8).peak()

    usual = peak_with()
    offloaded = peak_with(cpu_offload=True)
    on_host = usual.peak["parameters"] + usual.peak["optimizer state"]
    assert usual.name == offloaded.name and usual.peak["gradients"] > 0
    assert offloaded.peak.total() == usual.peak.total() - on_host > 0
    assert offloaded.peak["reductions"] == usual.peak["gradients"]


def test_offloaded_states_are_in_host_memory_and_the_plan_says_what_it_does_not_know():
    cfg = make_config(parallel={"cpu_offload": True}, run={"device": "cuda"})
    update = simulate(cfg, 2).phases[-1]
    assert update.name == "update" and update.peak["working memory"] == 0
    row = plan(cfg, 2)
    held = sum(row[f"{kind}_bytes_per_rank"] for kind in ("parameter", "gradient", "optimizer"))
    assert row["host_gib"] == pytest.approx(held / GIB) and held > 16 * row["parameters"] / 2
    assert "the time of copies to the host" in row["not_counted"][0]


def test_work_is_that_of_the_closed_form():
    """With cp; without it see below. 6 FLOP a parameter and token, and attention's, half under the mask: twice forward,
    five times backward, in which scores are computed again."""
    options = ["--parallel.param_dtype=bfloat16", "--parallel.recompute=none", "--parallel.cp=2"]
    cfg = config.load(str(CONFIGS / "llama3b.toml"), [*options, "--train.global_batch_size=8"])
    work = sum((phase.work for phase in simulate(cfg, 16).phases), Counter())
    # FlexAttention computes the diagonal's blocks in full
    assert work["attention"] == 7 * 28 * 24 * 128 * 8192 * 8192 // 2 // 64 * 65
    m = cfg.model
    block = 2 * m.dim * (m.n_heads + m.n_kv_heads) * m.width_per_head + 3 * m.dim * m.ffn_dim
    assert work["matmuls"] == 6 * 8192 // 2 * (m.n_layers * block + m.vocab_size * m.dim)


def test_a_step_takes_the_sum_of_its_matmuls_and_scores():
    """Where all else takes no time."""
    options = ["--model.n_layers=4", "--parallel.recompute=none", "--train.steps=1000"]
    batch = ["--train.micro_batch_size=1", "--train.global_batch_size=8"]
    cfg = config.load(str(CONFIGS / "llama1b.toml"), [*options, *batch])
    row = plan(cfg, 1, Asked(replace(H100, bandwidth=1e9)))
    m = cfg.model
    block = 2 * m.dim * (m.n_heads + m.n_kv_heads) * 64 + 3 * m.dim * m.ffn_dim
    matrices = 4 * block + m.vocab_size * m.dim  # a token's, and half of its scores under the mask
    attention = 4 * m.n_heads * 64 * cfg.train.seq_len
    tokens = 8 * cfg.train.seq_len
    seconds = tokens * (6 * matrices / 720e12 + 7 * attention / (720e12 * 376 / 720))
    assert row["step_seconds"] == pytest.approx(seconds, rel=1e-3)
    assert row["tokens_per_second_per_device"] == pytest.approx(tokens / seconds, rel=1e-3)
    assert row["flops_per_token"] == row["counted_flops_per_token"] == 6 * (matrices + attention)
    expected_mfu = 6 * (matrices + attention) * tokens / seconds / 989e12
    assert row["mfu"] == pytest.approx(expected_mfu, rel=1e-3)
    assert row["gpu_hours"] == pytest.approx(1000 * seconds / 3600, rel=1e-3)


def test_a_gpu_needs_pools_holes_workspaces_and_cudas_own():
    cfg = make_config(run={"device": "cuda"})
    tensors = plan(cfg, 1, Asked(without_cuda=True))
    row = plan(cfg, 1)
    assert tensors["device_gib"] == tensors["peak_gib"]
    assert row["parts_gib"]["cuBLAS workspaces"] == 2 * 32 / 1024
    assert row["peak_gib"] == pytest.approx(tensors["peak_gib"] + 2 * 32 / 1024)
    assert row["reserved_gib"] == pytest.approx(1.03 * sum(row["pools_gib"].values()))
    assert row["device_gib"] == row["reserved_gib"] + 1.5
    a100 = plan(cfg, 1, Asked(DEVICES["A100-80"]))
    assert a100["parts_gib"]["cuBLAS workspaces"] == 2 * 8.125 / 1024
    for more, fits in ((1e-6, True), (-1e-6, False)):
        asked = Asked(H100, row["device_gib"] + more)  # goes before the GPU's own
        assert plan(cfg, 1, asked)["fits"] is fits


def test_one_pool_needs_less_than_one_a_stream():
    """With gather_once, the all-gathers and the first micro-batch's reductions are in the computation's pool."""
    pools = []
    for replicas in ({}, {"dp_replicate": 2}):  # replicas keep a pool for each stream
        cfg = of_a_gpu(parallel={"gather_once": True, **replicas})
        pools.append(plan(cfg, 8)["pools_gib"])
    one, several = pools
    assert "all-gather" not in one and {"all-gather", "reduce-scatter"} < several.keys()
    assert one["reduce-scatter"] > 0  # of the second, whose gradients are added
    step = simulate(cfg, 8)
    last = [phase for phase in step.phases if phase.name == "forward head"][-1]
    assert last.peak["gradients"] >= step.held["gradients"] > 0 == last.peak["reductions"]


@pytest.mark.quick
@needs_extra("huggingface", "lora")
def test_weights_in_4_bits_cost_what_is_moved_to_make_them():
    """Uncompiled what dequantize()'s operators move, compiled what one kernel must read and write."""
    from extras.lora import nf4

    counted = Counted(FakeTensorMode(), {}, set(), 1)
    with counted.fake, counted:
        x = torch.empty(8, 4096, dtype=torch.bfloat16)
        codes = torch.empty(512, 4096 // 2, dtype=torch.uint8)
        scales = torch.empty(512, nf4.scale_bytes(4096), dtype=torch.uint8)
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


def test_an_optimizer_is_planned_as_it_is(monkeypatch):
    """Half of AdamW's bytes where it keeps one sum."""
    adagrad = lambda model, o, compile: torch.optim.Adagrad(model.parameters())  # noqa: E731
    monkeypatch.setattr(simulate_module, "build_optimizer", adagrad)
    row = plan(of_a_gpu({"n_layers": 2}), 1)
    tensors = 1 + 2 * 9 + 2  # each counts its steps
    assert row["optimizer_bytes_per_rank"] == 4 * row["parameters"] + 4 * tensors


MACHINES = """8 H100 llama8b llama3.1-8b llama3.1-8b-128k llama8b-float8
1 H200 llama8b-h200
1 RTX4090 llama8b-lora llama8b-qlora qwen3-0.6b-chat qwen3-8b-chat-qlora
1 RTX3090 tiny tiny-chat
256 H100 llama70b
64 H100 llama3.1-70b
8 H100 llama70b-qlora"""
LIKE_ANOTHER = {"qwen3-8b-chat-qlora", "llama70b", "llama8b-qlora", "llama8b-lora", "llama3b"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=nightly_if(path.stem in LIKE_ANOTHER), id=path.stem)
        for path in shipped_configs()
    ],
)
def test_every_shipped_configuration_fits_its_machine(path):
    """That its comments name, or else one H100."""
    ranks, gpu = "1", "H100"
    for line in MACHINES.split("\n"):
        if path.stem in line.split()[2:]:
            ranks, gpu, *_ = line.split()
    row, _ = planned(config.load(str(path)), int(ranks), Asked(DEVICES[gpu], on_gpu=True))
    assert row["fits"] and 0.03 < row["mfu"] < 0.8, row
