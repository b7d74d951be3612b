"""What a run with adapters sends and keeps, against the formulas of the plan."""

import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch

import config
from model.build import build_model, meta_model
from tests import cases
from tests.compiled_block import kept_bytes_per_token
from tests.conftest import make_config, tables

STRATEGIES = {
    "": {},
    "kept": {"reshard_after_forward": False},
    "replicas": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "replicas x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}
VARIANTS = {
    "": {},
    "nf4": {"lora": {"base_dtype": "nf4"}},
    "bfloat16": {"lora": {"base_dtype": "bfloat16"}, "parallel": {"param_dtype": "bfloat16"}},
    "some targets": {"lora": {"targets": ["o_proj", "up_proj"], "base_dtype": "nf4"}},
    "deferred": {"parallel": {"sync_every_micro_batch": False}},
    "gathered once": {"parallel": {"gather_once": True}, "lora": {"base_dtype": "nf4"}},
    "full": {"parallel": {"recompute": "full"}, "lora": {"base_dtype": "nf4"}},
    "selective": {
        "parallel": {"recompute": "selective"},
        "lora": {"targets": ["q_proj", "v_proj"]},
    },
}


def case(base, strategy: str, variant: str) -> dict:
    changes = {**VARIANTS[variant]}
    parallel = {"param_dtype": "float32", **STRATEGIES[strategy], **changes.pop("parallel", {})}
    sizes = {**dict.fromkeys(tables()["model"]), "vocab_size": 320, "init_from": str(base)}
    # 2 or more a step
    return {
        "model": sizes,
        "lora": {"rank": 3, **changes.pop("lora", {})},
        "parallel": parallel,
        "train": {"global_batch_size": 4 if "tp" in strategy else 8, "micro_batch_size": 1},
    }


CASES = [
    (strategy, variant)
    for strategy, variant in itertools.product(STRATEGIES, VARIANTS)
    if variant in ("", "nf4") or strategy in ("", "cp x tp")
]
REAL = [("kept", ""), ("cp x tp", ""), ("replicas", "nf4"), ("tp", "nf4")]


@pytest.mark.parametrize("ranks", [4, None])
def test_collectives_equal_the_formula(on_ranks, base, ranks):
    """On torch's fake process group, and some on real ranks. What is frozen never travels as a gradient."""
    from tests.theory import collectives

    chosen = CASES if ranks else REAL
    every = [case(base, *name) for name in chosen]
    counted = on_ranks(1 if ranks else 4, cases.count_collectives, every, ranks)[0]
    wrong = {}
    for name, sections, row in zip(chosen, every, counted):
        cfg = make_config(**sections)
        planned = collectives(cfg, meta_model(cfg.model, cfg.lora), 4)
        if planned != row:
            wrong[name] = (planned, row)
    assert not wrong


def test_what_a_compiled_block_keeps_does_not_hang_on_how_its_base_is_kept(base):
    """Of a base in 4 bits the codes, not the weights made of them; with adapters no more than without, but A x."""
    m, kept = make_config(**case(base, "", "")).model, {}
    m = dataclasses.replace(m, dim=256, ffn_dim=704)
    for dtype, setting in itertools.product((None, "nf4"), ("none", "elementwise")):
        lora = config.Lora(rank=2, base_dtype="nf4") if dtype else None
        make = functools.partial(build_fake, lora=lora)
        kept[dtype, setting] = kept_bytes_per_token(m, 128, setting, make)
    for setting in ("none", "elementwise"):
        assert kept["nf4", setting] <= kept[None, setting] + 7 * 2 * 2, kept


def build_fake(m: config.Model, lora: config.Lora | None):
    with mock.patch.object(torch.nn.Module, "to", lambda module, dtype: module):
        # fakes are in bfloat16 already
        return build_model(m, lora)
