"""verify_sharding passes what is right, names what is not, and its unit map has the real sizes."""

import pytest
import torch

from parallel import verify
from parallel.verify import checksums, unit_table
from tests import cases

REPLICAS = {"parallel": {"dp_replicate": 2}, "train": {"micro_batch_size": 1}}
TWO_REPLICAS = {"parallel": {"dp_replicate": 2}}
OFFLOADED = {
    "model": {"tie_embeddings": True},
    "parallel": {"recompute": "full", "cpu_offload": True},
}
UNSHARDED = {
    "model": {"freeze": ["embedding*", "blocks.1.*"]},
    "parallel": {"replicated": ["embedding*", "*1*proj*"], "param_dtype": "bfloat16"},
}
TP = {"parallel": {"tp": 2}}
TWELVE = {"train": {"global_batch_size": 12, "micro_batch_size": 1}}
# ranks: (configuration, damage, what its error must say; none, of a right model)
CASES = {
    1: [({}, "", None)],
    2: [
        (OFFLOADED, "", None),
        (UNSHARDED, "", None),
        (TWO_REPLICAS, "two values swapped", "up_proj.weight: differs between replicas"),
        (
            UNSHARDED,
            "a replicated one differs",
            "blocks.1.attention.o_proj.weight: differs between replicas",
        ),
        ({}, "a plain parameter", "blocks.1.extra: is a Tensor, not a DTensor"),
        ({}, "outside every unit", "extra: belongs to no unit"),
        ({}, "on meta", "embedding.weight: is on meta"),
        ({}, "a short shard", "blocks.1.attention.q_proj.weight: has shard (23, 48), not (24, 48)"),
        ({}, "another mesh", "embedding.weight: is on mesh"),
        (TP, "", None),
        (TP, "one replica differs", "blocks.1.attention_norm.weight: differs between replicas"),
    ],
    3: [(TWELVE, "", None)],
    4: [
        (REPLICAS, "", None),
        ({"parallel": {"tp": 2}}, "", None),
        ({"parallel": {"cp": 2, "tp": 2}}, "", None),
        ({"parallel": {"dp_replicate": 2, "cp": 2}}, "", None),
        (
            REPLICAS,
            "one replica differs",
            "blocks.1.attention_norm.weight: differs between replicas",
        ),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_right_models_pass_and_damage_is_named(on_ranks, ranks):
    found = on_ranks(
        ranks, cases.verify_damaged, [(sections, damage) for sections, damage, _ in CASES[ranks]]
    )
    for i, (_, damage, message) in enumerate(CASES[ranks]):
        said = [rank[i] for rank in found]
        if message is None:
            assert said == [""] * ranks
        else:
            # a rank that raises ends the others
            assert any(message in text for text in said), (damage, said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_checksums_see_each_bit_and_each_place_in_little_memory(monkeypatch, dtype):
    """Of 5 chunks and a half: values that differ, and values swapped, within a chunk and between chunks."""
    chunk = 1000
    monkeypatch.setattr(verify, "CHECK_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (5500 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    bits.view(dtype)[[0, 999]] = torch.tensor([1, 3]).to(dtype)
    with cases.Live() as live:
        right = checksums(bits.view(dtype).view(11, 500))
    assert len(bits) < live.most < len(bits) + 8 * chunk + 200  # itself, and a chunk's positions
    for byte in (0, 999 * dtype.itemsize, 1000 * dtype.itemsize, len(bits) // 2, len(bits) - 1):
        for bit in range(8):
            damaged = bits.clone()
            damaged[byte] ^= 1 << bit
            assert not checksums(damaged.view(dtype)).equal(right)
    for a, b in (
        (0, 999),
        (999, 1000),
        (0, 1000),
        (499, 4499),
        (4999, 5000),
        (5000, 5499),
        (0, 5499),
    ):
        damaged = bits.view(dtype).clone()
        at_a, at_b = damaged[[a, b]].view(torch.uint8).view(2, -1)
        assert not at_a.equal(at_b)
        damaged[[a, b]] = damaged[[b, a]]
        assert not checksums(damaged).equal(right), (a, b)
    assert (
        checksums(bits.clone().view(dtype)).equal(right)
        and not checksums(bits[:0].view(dtype)).any()
    )


def test_unit_map_counts_what_is_gathered(on_ranks):
    """In param_dtype, or float32 where that is kept; not in the reduction's dtype."""
    parallel = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "keep_fp32": ["blocks.0"]}
    for rows in on_ranks(2, cases.unit_map, {"parallel": parallel}):
        size = {row["unit"]: row["gathered_bytes"] / row["parameters"] for row in rows}
        assert size == {"embedding": 2, "blocks.0": 4, "blocks.1": 2, "head": 2}
        # backward begins with the head's
        kept = [row["unit"] for row in rows if row["policy"] == "kept through backward"]
        assert kept == ["head"]
        assert all(row["local_bytes"] * 2 == row["parameters"] * 4 for row in rows)
    for rows in on_ranks(2, cases.unit_map, {"parallel": {"param_dtype": "bfloat16", "tp": 2}}):
        for row in rows:  # norms are whole on both
            norms = {"embedding": 0, "head": 48}.get(row["unit"], 2 * 48)
            assert row["gathered_bytes"] == 2 * ((row["parameters"] - norms) // 2 + norms)
            assert row["local_bytes"] == 2 * row["gathered_bytes"]


def test_unit_table_folds_equal_blocks():
    row = {"parameters": 10, "local_bytes": 2**20, "gathered_bytes": 2**21, "policy": "x"}
    blocks = [{"unit": f"blocks.{i}", **row} for i in range(9)]
    ends = [{**row, "unit": "embedding", "parameters": 5}, {**row, "unit": "head", "parameters": 7}]
    table = unit_table([ends[0], *blocks, ends[1]])
    assert len(table.splitlines()) == 4 and "blocks.0 ... blocks.8" in table and "2.0" in table


@pytest.mark.parametrize(
    "kind, options, made",
    [
        (torch.optim.AdamW, {}, "exp_avg, exp_avg_sq, step"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.SGD, {}, None),  # has no state
    ],
)
def test_state_that_the_first_step_makes_ends_that_step(kind, options, made):
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    verify.refuse_late_state(optimizer)
    model(torch.ones(4)).sum().backward()
    if made is None:
        optimizer.step()
    else:
        with pytest.raises(
            RuntimeError, match=rf"first step of {kind.__name__} made its state \({made}\)"
        ):
            optimizer.step()
    verify.refuse_late_state(optimizer)  # as after a resume: the state is there
    optimizer.step()
