"""verify_sharding passes what is right, names what is not, and its unit map has the real sizes."""

import pytest

from parallel.verify import unit_table
from tests import cases

REPLICAS = {"parallel": {"dp_replicate": 2}, "train": {"micro_batch_size": 1}}


@pytest.mark.parametrize("ranks, sections", [
    (1, {}), (3, {"train": {"global_batch_size": 12, "micro_batch_size": 1}}), (4, REPLICAS),
    (2, {"model": {"tie_embeddings": True}, "parallel": {"recompute": "full", "cpu_offload": True}})])
def test_right_models_pass(on_ranks, ranks, sections):
    assert on_ranks(ranks, cases.verify_damaged, sections, "") == [""] * ranks


@pytest.mark.parametrize("damage, ranks, sections, message", [
    ("one replica differs", 4, REPLICAS, "blocks.1.attention_norm.weight: differs between replicas"),
    ("two values swapped", 2, {"parallel": {"dp_replicate": 2}}, "up_proj.weight: differs between replicas"),
    ("a plain parameter", 2, {}, "blocks.1.extra: is a Tensor, not a DTensor"),
    ("outside every unit", 2, {}, "extra: belongs to no unit"),
    ("on meta", 2, {}, "embedding.weight: is on meta"),
    ("another mesh", 2, {}, "embedding.weight: is on mesh"),
])
def test_damage_is_named(on_ranks, damage, ranks, sections, message):
    found = on_ranks(ranks, cases.verify_damaged, sections, damage)
    assert any(message in text for text in found), found  # the ranks that see it raise, and end the others


def test_unit_table_folds_equal_blocks():
    row = {"parameters": 10, "trainable": 10, "local_bytes": 2**20, "gathered_bytes": 2**21, "policy": "x"}
    blocks = [{"unit": f"blocks.{i}", **row} for i in range(9)]
    ends = [{**row, "unit": "embedding", "parameters": 5}, {**row, "unit": "head", "parameters": 7}]
    table = unit_table([ends[0], *blocks, ends[1]])
    assert len(table.splitlines()) == 4 and "blocks.0 ... blocks.8" in table and "2.0" in table
