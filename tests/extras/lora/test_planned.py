"""What a run with adapters sends, against the closed form of tests/theory.py."""

from typing import Any

import pytest

from model.build import meta_model
from tests.conftest import make_config, tables
from tests.distributed import distributed
from tests.parallel.test_collectives import TRAIN, step_of
from tests.theory import collectives

NF4 = {"base_dtype": "nf4"}
STRATEGIES: list[dict[str, Any]] = [
    {},
    {"cp": 2, "tp": 2},
    {"reshard_after_forward": False},
    {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
]
VARIANTS: list[tuple[dict, dict]] = [  # [lora], [parallel]; of the first two strategies all
    ({}, {}),
    (NF4, {}),
    ({"base_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}),
    ({"targets": ["o_proj", "up_proj"], **NF4}, {}),
    ({}, {"sync_every_micro_batch": False}),
    (NF4, {"gather_once": True}),
    (NF4, {"recompute": "full"}),
    ({"targets": ["q_proj", "v_proj"]}, {"recompute": "selective"}),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@distributed(ranks=4, fake=True)
def test_collectives_equal_the_formula(world, base, strategy):
    """What is frozen never travels as a gradient."""
    sizes = {**dict.fromkeys(tables()["model"]), "vocab_size": 320, "init_from": str(base)}
    for lora, options in VARIANTS if strategy in STRATEGIES[:2] else VARIANTS[:2]:
        parallel = {**strategy, **options}
        sections = {"model": sizes, "lora": {"rank": 3, **lora}, "parallel": parallel}
        cfg = make_config(**sections, train=TRAIN)
        planned = collectives(cfg, meta_model(cfg.model, cfg.lora), 4)
        counted = step_of(world, sections)
        found = {kind: (counted.counts[kind], counted.bytes[kind]) for kind in counted.counts}
        assert [*found.values(), (0, 0)] == [*planned.values()], (lora, options)
