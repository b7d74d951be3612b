"""What a step sends, counted while it runs, against the closed formula in tests/theory.py: equal to the byte."""

import itertools
import subprocess
import sys

import pytest

import config
from model.build import meta_model
from tests import cases
from tests.conftest import REPO, make_config
from tests.test_equality import STRATEGIES
from tests.theory import collectives

pytestmark = [pytest.mark.early, pytest.mark.slow]

UNEVEN = {"dim": 50, "n_heads": 5, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 323}
VARIANTS = {
    "": {},
    "deferred": {"parallel": {"sync_every_micro_batch": False}},
    "gathered once": {"parallel": {"gather_once": True}},
    "both once": {"parallel": {"gather_once": True, "sync_every_micro_batch": False}},
    "prefetch 2": {"parallel": {"prefetch_forward": 2, "prefetch_backward": 2}},
    "implicit": {"parallel": {"prefetch_forward": 0, "prefetch_backward": 0}},
    "recompute": {"parallel": {"recompute": "full"}},
    "bfloat16": {"parallel": {"param_dtype": "bfloat16", "keep_fp32": ["blocks.0"]}},
    "bfloat16 reduced": {"parallel": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
    "tied": {"model": {"tie_embeddings": True}},
    "uneven": {"model": UNEVEN},
    "frozen": {"model": {"freeze": ["embedding.weight", "blocks.1.*", "*k_proj*"]}},
    "frozen first": {"model": {"freeze": ["embedding.weight", "blocks.0.*"]}},
    "replicated": {
        "model": {"freeze": ["embedding.weight", "blocks.1.*", "*k_proj*"]},
        "parallel": {
            "replicated": ["embedding.weight", "blocks.1.*", "blocks.0.*.k_proj.weight"],
            "param_dtype": "bfloat16",
        },
    },
}


def test_deferring_does_not_hang_on_how_the_mesh_was_named(on_ranks):
    """dp_replicate = "auto" that comes to one replica defers the reduce-scatters too."""
    sections = case("FULL_SHARD", "deferred")
    sections["parallel"] |= {"dp_replicate": "auto", "dp_shard": 2}
    cfg = make_config(**sections)
    counted = on_ranks(1, cases.count_collectives, [sections], 2)[0][0]
    assert (
        counted == collectives(cfg, meta_model(cfg.model), 2) and counted["reduce_scatter"][0] == 4
    )


def case(strategy: str, variant: str, ranks: int = 4) -> dict:
    changes = VARIANTS[variant]
    return {
        "model": {"n_layers": 2, **changes.get("model", {})},
        "train": {"global_batch_size": 2 * ranks, "micro_batch_size": 1},
        "parallel": {**STRATEGIES[strategy], **changes.get("parallel", {})},
    }


NAMES = list(itertools.product(STRATEGIES, VARIANTS))
ON_FEWER = [
    *itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), ("", "deferred", "uneven"))
]
RUNS = {  # by (ranks, real processes, else torch's fake group): every variant, and each strategy on real ranks
    (1, True): ON_FEWER,
    (2, True): ON_FEWER,
    (4, True): [n for n in NAMES if n[1] in ("", "replicated")],
    (4, False): NAMES,
}


@pytest.fixture(scope="module")
def counted(on_ranks):
    found = {}
    for (ranks, real), names in RUNS.items():
        cases_ = [case(*name, ranks) for name in names]
        rows = (
            on_ranks(ranks, cases.count_collectives, cases_)[0]
            if real
            else on_ranks(1, cases.count_collectives, cases_, ranks)[0]
        )
        found |= {(ranks, real, *name): row for name, row in zip(names, rows)}
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_equal_the_formula(counted, strategy):
    wrong = {}
    for (ranks, real, name, variant), row in counted.items():
        if name == strategy:
            cfg = make_config(**case(name, variant, ranks))
            planned = collectives(cfg, meta_model(cfg.model), ranks)
            if planned != row:
                wrong[ranks, real, variant] = (planned, row)
    assert not wrong


MESHES = {
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "tp, kept": {"tp": 2, "reshard_after_forward": False},
    "tp alone": {"tp": "all", "dp_shard": 1},
    "replicas x tp": {"dp_replicate": 2, "tp": 2},
    "replicas x cp": {"dp_replicate": 2, "cp": 2},
    "replicas x tp, no shards": {"dp_replicate": "auto", "dp_shard": 1, "tp": 2},
}
OVER_MESHES = {
    "": {},
    "full": {"recompute": "full"},
    "every second": {"recompute": 2},
    "selective": {"recompute": "selective"},
    "bfloat16": {"param_dtype": "bfloat16", "keep_fp32": ["blocks.0"]},
    "tied": {},
    "qk_norm": {},
    "deferred": {"sync_every_micro_batch": False, "param_dtype": "bfloat16"},
    "two sequences": {},
}
EVERYWHERE = ("", "full", "bfloat16", "tied", "deferred")
ON_MESHES = [
    (mesh, variant)
    for mesh, variant in itertools.product(MESHES, OVER_MESHES)
    if variant in EVERYWHERE or mesh in ("tp", "cp", "cp x tp")
]


def on_mesh(ranks: int, mesh: str, variant: str) -> dict:
    parallel = {**MESHES[mesh], **OVER_MESHES[variant]}
    parallel["tp"] = ranks if parallel.get("tp") == "all" else parallel.get("tp", 1)
    heads = {
        "n_heads": 8,
        "n_kv_heads": 8 if mesh == "tp alone" else 2,
        "head_dim": 6,
        "vocab_size": 328,
    }
    sequences = 2 if variant == "two sequences" else 1
    # 2 or more a step
    return {
        "model": {
            **heads,
            "dim": 46,
            "ffn_dim": 88,
            "tie_embeddings": variant == "tied",
            "qk_norm": variant == "qk_norm",
        },
        "parallel": parallel,
        "train": {"global_batch_size": ranks * sequences, "micro_batch_size": sequences},
    }


@pytest.fixture(scope="module")
def counted_on_meshes(on_ranks):
    """On real ranks, and on torch's fake process group."""
    real = [(mesh, "") for mesh in MESHES]
    runs = [(4, real, None), (4, ON_MESHES, 4), (8, real, 8)]
    found = {}
    for ranks, names, fake in runs:
        sections = [on_mesh(ranks, *name) for name in names]
        rows = on_ranks(1 if fake else ranks, cases.count_collectives, sections, fake)[0]
        for name, row in zip(names, rows):
            found[(ranks, fake, *name)] = row
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_of_tensor_and_context_parallelism_equal_the_formula(counted_on_meshes, mesh):
    wrong = {}
    for (ranks, fake, name, variant), row in counted_on_meshes.items():
        if name == mesh:
            cfg = make_config(**on_mesh(ranks, mesh, variant))
            planned = collectives(cfg, meta_model(cfg.model), ranks)
            if planned != row:
                wrong[ranks, fake, variant] = (planned, row)
    assert not wrong


def test_the_known_numbers():
    """Six units, two micro-batches, four ranks, embedding and head gathered once: 2 (6 + 4) all-gathers."""

    def numbers(**parallel) -> dict[str, int]:
        cfg: config.Config = make_config(
            model={"n_layers": 4},
            parallel=parallel,
            train={"global_batch_size": 8, "micro_batch_size": 1},
        )
        return {
            kind: number
            for kind, (number, _) in collectives(cfg, meta_model(cfg.model), 4).items()
            if number
        }

    assert numbers() == {"all_gather": 20, "reduce_scatter": 12, "all_reduce": 1}
    # the embedding is kept for the second micro-batch
    kept = numbers(reshard_after_forward=False)
    assert kept == {"all_gather": 11, "reduce_scatter": 12, "all_reduce": 1}
    assert numbers(gather_once=True)["all_gather"] == 6
    assert numbers(sync_every_micro_batch=False)["reduce_scatter"] == 6


@pytest.mark.parametrize("sequences, copies", [(1, 0), (2, 4)])
def test_shards_of_one_sequence_are_sent_without_a_copy(on_ranks, sequences, copies):
    """Of several, each collective copies once, forward and backward: a rank's shards are not contiguous."""
    for right, counted in on_ranks(2, cases.collectives_of_sequences, sequences):
        assert all(right) and counted == copies


ALONE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from parallel.collectives import Group, all_gather, reduce_scatter
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
x, group = torch.ones(2, 4, requires_grad=True), Group(0, 2, dist.group.WORLD.group_name)
(all_gather(x, 1, group).sum() + reduce_scatter(x, 1, group).sum()).backward()
assert x.grad.shape == x.shape
"""


def test_they_have_gradients_whatever_else_is_imported():
    """torch registers those when a module of its own is imported."""
    subprocess.run([sys.executable, "-c", ALONE], cwd=REPO, check=True)
