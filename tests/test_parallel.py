"""Weights, memory, prefetch order and tear-down of the sharded model, on real ranks."""

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

import config
from config import ConfigError
from lifecycle.process_group import shared_options
from model.build import meta_model
from model.init import normal
from model.llama import Linear, Llama, RMSNorm
from parallel import ranks as ranks_module
from parallel.fsdp import mixed_precision, replicated_parameters, unit_dtypes
from parallel.materialize import draw, materialize
from parallel.mesh import World, build_mesh
from parallel.parallelize import compile_block, parallelize
from parallel.verify import verify_sharding
from tests import cases, forks
from tests.conftest import make_config, needs_extra

pytestmark = [pytest.mark.early, pytest.mark.slow]

# 3 ranks divide none of these dimensions; a vocabulary of 320 over 3, a norm of 48 over 5 ranks leave uneven shards
MODELS = {
    "plain": {},
    "tied": {"model": {"tie_embeddings": True}},
    "uneven": {
        "model": {"dim": 52, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 331}
    },
}
# A global batch that these numbers of ranks divide; no data is read here
for sections in MODELS.values():
    sections["train"] = {"global_batch_size": 60, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def hashes(on_ranks):
    return {ranks: on_ranks(ranks, cases.weight_hashes, MODELS, True)[0] for ranks in (1, 2, 3, 4)}


def test_weights_do_not_depend_on_the_number_of_ranks(hashes):
    assert hashes[1] == hashes[2] == hashes[3] == hashes[4]


def test_every_parameter_differs_from_every_other(hashes):
    matrices = [h for name, h in hashes[1]["plain"].items() if "norm" not in name]
    assert len(set(matrices)) == len(matrices)


def test_values_follow_their_distribution():
    out = torch.empty(4000, 100)
    draw(out, (0, 0), out.shape, normal(0.5), 0, "x")
    assert abs(out.mean()) < 0.005 and abs(out.std() - 0.5) < 0.005 and out.abs().max() > 1.5
    draw(out, (0, 0), out.shape, normal(0.5, cutoff=3.0), 0, "x")
    assert out.abs().max() <= 1.5
    again = torch.empty_like(out)
    draw(again, (0, 0), out.shape, normal(0.5, cutoff=3.0), 1, "x")
    assert not torch.equal(out, again)
    assert len(out.unique(dim=0)) == len(out)  # no block repeats another


@pytest.mark.parametrize("width", [1, 7, 65536, 70000])
@pytest.mark.parametrize("cutoff", [float("inf"), 3.0])
def test_any_rectangle_of_a_parameter_equals_that_part_of_the_whole(width, cutoff):
    shape = torch.Size([300 if width < 1000 else 5, width])
    whole = torch.empty(shape)
    draw(whole, (0, 0), shape, normal(1.0, cutoff), 3, "w")
    for down, across in ((2, 1), (3, 2), (shape[0], 3), (shape[0] + 4, 1)):
        for rows in torch.arange(shape[0]).tensor_split(down):
            for columns in torch.arange(width).tensor_split(across):
                part = torch.empty(len(rows), len(columns))
                offsets = (
                    int(rows[0]) if len(rows) else shape[0],
                    int(columns[0]) if len(columns) else width,
                )
                draw(part, offsets, shape, normal(1.0, cutoff), 3, "w")
                assert torch.equal(part, whole[rows][:, columns])


def test_weights_do_not_depend_on_the_mesh(on_ranks):
    """Parts of rows and of columns, uneven ones too, equal what one rank draws."""
    for tied in (False, True):
        sections = {
            "model": {
                "dim": 46,
                "n_kv_heads": 4,
                "head_dim": 6,
                "ffn_dim": 76,
                "tie_embeddings": tied,
            },
            "train": {"global_batch_size": 60, "micro_batch_size": 1},
        }
        (expected,) = on_ranks(1, cases.weight_hashes, {"alone": sections}, True)[0].values()
        replicas = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}
        meshes = {
            str(mesh): {**sections, "parallel": mesh}
            for mesh in (
                {"dp_replicate": 2},
                {"tp": 2},
                {"tp": 4},
                {"cp": 2},
                {"cp": 4},
                {"cp": 2, "tp": 2},
                replicas,
            )
        }
        for found in on_ranks(4, cases.weight_hashes, meshes, True):
            assert found == dict.fromkeys(meshes, expected)


@pytest.mark.parametrize(
    "section, options, refused",
    [
        ("data", {"path": "/disk/of/this/node"}, False),
        ("data", {"source": "x.txt"}, True),
        ("data", {}, False),
        ("log", {"every_steps": 7}, True),
    ],
)
def test_a_node_may_keep_copies_elsewhere_and_nothing_else(monkeypatch, section, options, refused):
    first, ours = make_config(), make_config(**{section: options})
    monkeypatch.setattr(ranks_module, "on_rank_zero", lambda work: shared_options(first))
    monkeypatch.setattr(ranks_module, "all_gather_objects", lambda value: [[], value])
    with (
        pytest.raises(ConfigError, match="^rank 1 has .*: all nodes need")
        if refused
        else contextlib.nullcontext()
    ):
        ranks_module.check_same_on_all_ranks("configuration", shared_options(ours))


FROZEN = {"freeze": ["embedding*", "blocks.0.*", "*q_proj*"]}


def test_replicated_frozen_parameters_compute_what_sharded_ones_do(on_ranks):
    """To the bit, in bfloat16 too: a whole unit, single matrices and norms, a tied matrix."""
    pairs = []
    for tied in (False, True):
        for changes in (
            {"param_dtype": "bfloat16"},
            {},
            {"param_dtype": "bfloat16", "keep_fp32": ["blocks.0"], "recompute": "selective"},
        ):
            model = {"model": {**FROZEN, "tie_embeddings": tied}}
            patterns = ["embedding*", "blocks.0.*", "blocks.1.*q_proj*"]
            pairs += [
                {**model, "parallel": changes},
                {**model, "parallel": {**changes, "replicated": patterns}},
            ]
    for found in on_ranks(2, cases.losses_and_gradients, pairs):
        for sections, sharded, whole in zip(pairs[::2], found[::2], found[1::2]):
            assert sharded == whole, sections
            assert len(whole[1]) == 10 - sections["model"]["tie_embeddings"]


@pytest.mark.parametrize(
    "pattern, message",
    [
        (
            "*norm.weight",
            r"blocks.1.attention_norm.weight, .* which is trained: freeze it \(model.freeze\) or shard it",
        ),
        ("nothing*", "'nothing\\*' matches none of embedding.weight, blocks.0"),
    ],
)
def test_only_frozen_parameters_may_be_replicated(pattern, message):
    cfg = make_config(model=FROZEN, parallel={"replicated": [pattern]})
    with pytest.raises(ConfigError, match=message):
        replicated_parameters(meta_model(cfg.model), cfg.parallel)


def test_degrees_and_the_mesh_of_fsdp(on_ranks):
    """Context parallel ranks share one data rank and a shard mesh with their neighbours. Each parameter's gradient is
    that of the plain model, also of the norms of queries and keys, of which tp ranks have the local heads."""
    shapes = {
        (1, 4, 1, 1): ["dp_shard"],
        (2, 2, 1, 1): ["dp_replicate", "dp_shard"],
        (1, 2, 2, 1): ["dp_shard_cp"],
        (2, 1, 2, 1): ["dp_replicate", "dp_shard_cp"],
        (1, 2, 1, 2): ["dp_shard"],
        (2, 1, 1, 2): ["dp_replicate", "dp_shard"],
        (1, 1, 2, 2): ["dp_shard_cp"],
    }
    sections = {"model": {"qk_norm": True}, "train": {"seq_len": 16}}
    plain = Llama(make_config(**sections).model)
    materialize(plain, 0, torch.device("cpu"))
    ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(0))
    plain(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    wanted = {name: p.grad.norm().item() for name, p in plain.named_parameters()}
    assert len(wanted) == 2 * 11 + 3
    for rank, found in enumerate(on_ranks(4, cases.on_meshes, sections, [*shapes])):
        for (shape, dims), (degrees, mesh_names, mesh_shape, norms) in zip(shapes.items(), found):
            size = shape[0] * shape[1]
            assert degrees == (*shape, rank // (4 // size), size)
            assert [*mesh_names] == dims and mesh_shape == (shape[:1] if len(dims) == 2 else ()) + (
                4 // shape[3] // (shape[0] if len(dims) == 2 else 1),
            )
            assert norms == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_materialize_holds_its_shard_and_one_block(on_ranks, ranks):
    block = 480
    largest, shard = on_ranks(ranks, cases.largest_in_materialize, block)[0]
    # nothing larger than a shard was made; the full embedding would be 4001 x 48
    assert largest == shard == -(-4001 // ranks) * 48 or largest <= shard + block
    assert ranks == 1 or largest < 4001 * 48


def test_a_forgotten_buffer_is_named(on_ranks):
    assert "blocks.1.table" in on_ranks(1, cases.forgotten_buffer)[0]


def expected_order(
    depth_forward: int, depth_backward: int, early: bool, tied: bool
) -> list[tuple[str, str]]:
    """The order by the rule in parallel/fsdp.py, written independently: units in a row, `depth` gathered ahead."""
    holds_head, units = (
        ("embedding, head", ["0", "1", "2"]) if tied else ("head", ["0", "1", "2", "head"])
    )
    units = [holds_head if tied else "embedding", *units]
    events, have = [], set()

    def gather(names: list[str]) -> None:
        for name in names:
            if name not in have:
                have.add(name)
                events.append(("gather", name))

    if early:
        gather(units[:depth_forward])
    for i, unit in enumerate(units):
        gather(units[i : i + 1 + depth_forward])
        events.append(("forward", unit.partition(",")[0]))
        if unit != holds_head:  # freed after its forward; the head is kept
            have.discard(unit)
    events += [("forward", "head")] * tied
    if not tied:
        have.add("embedding")  # whose backward does without
    back = [holds_head, *(unit for unit in units[::-1] if unit != holds_head)]
    for i, unit in enumerate(back):
        # the unit itself, if nobody has gathered it ahead; depth 0 is FSDP2's own: one ahead
        gather(back[i : i + 1 + (depth_backward or 1)])
        if unit == holds_head:
            events.append(("backward", "loss"))
        if unit != holds_head or not tied:  # a tied one has the embedding's gradient to wait for
            events.append(("backward", unit))
            have.discard(unit)
    return events + [("backward", holds_head)] * tied


def test_prefetch_order(on_ranks):
    """Each depth with the first units unsharded early, and forward and backward depths that differ; tied, where
    backward begins with the unit that forward began with."""
    depths = [
        (0, 0, True, False),
        (1, 1, True, False),
        (2, 2, True, False),
        (2, 1, False, False),
        (0, 2, False, False),
        (1, 1, True, True),
        (0, 2, False, True),
    ]
    sections = [
        (
            {
                "model": {"n_layers": 3, "tie_embeddings": tied},
                "parallel": {"prefetch_forward": forward, "prefetch_backward": backward},
            },
            early,
        )
        for forward, backward, early, tied in depths
    ]
    for seen in on_ranks(2, cases.gather_order, sections):
        for depth, events in zip(depths, seen):
            assert events == expected_order(*depth), depth


def test_only_gradients_that_stay_are_allocated_where_the_computation_is(on_ranks):
    """What a second micro-batch adds to them is freed at once, while FSDP2's stream may still read it."""
    first, second = on_ranks(2, cases.allocating_streams, {}, 2)[0]
    gathered = ["AllGather", "wait communication compute", "allocate compute"]
    for events, gradients in ((first, "compute"), (second, "communication")):
        found = [" ".join(event) for event in events]
        starts = [i for i, event in enumerate(found) if event[0].isupper()]
        calls = [found[a:b] for a, b in zip(starts, [*starts[1:], None])]
        assert calls.count(gathered) == sum(call[0] == "AllGather" for call in calls) > 0
        reduced = [call for call in calls if call[0] == "ReduceScatter"]
        # of each unit, what is reduced and the gradient
        assert reduced == [["ReduceScatter", f"allocate {gradients}"]] * 2 * 4


def test_short_lives_end_in_order(on_ranks):
    for _ in range(3):
        on_ranks(2, cases.start_and_end)


def test_all_process_groups_have_the_runs_timeout(on_ranks):
    """Also those of the mesh, which would have torch's 30 minutes."""
    assert on_ranks(4, cases.timeouts) == [{7260.0}] * 4


def test_blocks_of_many_kinds_are_compiled(on_ranks):
    compiled, plain = on_ranks(1, cases.train_and_evaluate_unlike_blocks)[0]
    assert compiled == pytest.approx(plain, rel=1e-2)  # in bfloat16


@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel": {"tp": 2}},
        {"parallel": {"tp": 2, "recompute": "selective"}},
        pytest.param(
            {
                "parallel": {"tp": 2},
                "lora": {"rank": 4, "base_dtype": "nf4"},
                "model": {"init_from": "absent"},
            },
            marks=[needs_extra("huggingface", "lora"), pytest.mark.nightly],
        ),
        {
            "parallel": {"replicated": ["*q_proj*"], "param_dtype": "bfloat16"},
            "model": {"freeze": ["*q_proj*"]},
        },
        {"parallel": {"cp": 2}},
        pytest.param({"parallel": {"float8": "tensorwise"}}, marks=needs_extra("float8")),
    ],
)
def test_all_layers_share_one_compiled_graph(on_ranks, strategy):
    """However many there are: a graph for each would exceed torch's limit, and take an hour on a GPU."""
    sections = [
        {
            **strategy,
            "parallel": {**strategy["parallel"], "compile": True},
            "model": {"dim": 128, "ffn_dim": 256, "n_layers": layers, **strategy.get("model", {})},
        }
        for layers in (2, 5)
    ]
    few, many = on_ranks(1, cases.graphs_of, sections)[0]
    # of a block's halves, and of the head's norm: with gradients, without, over frozen parameters
    assert few == many <= 2 * 4


def test_a_block_is_compiled_as_two_halves_and_a_forks_whole():
    """Also a fork's that forgets the halves. A block that is not compiled would train, but slowly."""

    def linears_of_graphs() -> list[int]:
        found = []

        def counting(graph: torch.fx.GraphModule, inputs: list) -> Callable:
            calls = graph.graph.find_nodes(op="call_function", target=nn.functional.linear)
            found.append(len(calls))
            return graph.forward

        torch.compiler.reset()
        cfg = make_config(model={"n_layers": 3})
        model = Llama(cfg.model)
        materialize(model, 0, torch.device("cpu"))
        with cases.compiled_by(counting):
            for block in model.blocks:
                compile_block(block)
            model(torch.zeros((1, 8), dtype=torch.int64))
        return found

    assert linears_of_graphs() == [4, 3]
    with forks.whole_block():
        assert linears_of_graphs() == [7]


@pytest.mark.nightly  # kernels take minutes to compile
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_two_compiled_halves_are_those_of_the_whole_block(on_ranks, ranks):
    """In float32 to the bit, by Inductor's own kernels."""
    sections = {"train": {"global_batch_size": 8}, "parallel": {"compile": True}}
    ((*_, halves),) = on_ranks(ranks, cases.train_steps, [sections], timeout=600)[0]
    ((*_, whole),) = on_ranks(ranks, cases.train_whole_blocks, [sections], timeout=600)[0]
    assert len(halves) == 21
    for name, weight in halves.items():
        assert (weight == whole[name]).all(), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_residual_stream_has_its_dtype_from_the_embedding_on(on_ranks, tied):
    """Also where one of the units computes in float32."""
    model = {"tie_embeddings": tied, "n_layers": 3}
    units = config.unit_names(make_config(model=model).model)
    every = []
    for output in ({}, {"output_dtype": "float32"}):
        for keep in ([], *([unit] for unit in units)):
            parallel = {"param_dtype": "bfloat16", "keep_fp32": keep, **output}
            every.append({"model": model, "parallel": parallel})
    half, wide = [torch.bfloat16] * 4, [torch.float32] * 4
    assert on_ranks(1, cases.residual_dtypes, every)[0] == [half] * (len(units) + 1) + [wide] * (
        len(units) + 1
    )


def test_what_is_not_finite_in_the_last_part_of_a_tensor_is_named(on_ranks):
    for messages in on_ranks(2, cases.not_finite_at_the_end):
        for message in messages:
            assert message.startswith(
                "blocks.1.feed_forward.up_proj.weight: holds values that are not finite"
            )


def test_units_kept_in_float32_are_reduced_in_it():
    halves = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    p = make_config(parallel={**halves, "keep_fp32": ["blocks.0"]}).parallel
    assert unit_dtypes(p, "blocks.0") == (torch.float32, torch.float32)
    assert unit_dtypes(p, "blocks.1") == (torch.bfloat16, torch.bfloat16)
    assert mixed_precision(p, "blocks.0").reduce_dtype == torch.float32


def test_tp_refuses_a_block_without_the_projection_whose_outputs_it_sums(monkeypatch):
    """A fork's: experts in place of one down_proj."""

    class Experts(nn.Module):
        def __init__(self, m, out_std):
            super().__init__()
            self.up_proj = Linear(m.dim, m.dim)

    monkeypatch.setattr("model.llama.FeedForward", Experts)
    cfg = make_config(parallel={"tp": 2})
    with cases.fake_process_group(2):
        world = World(0, 2, torch.device("cpu"), build_mesh("cpu", (1, 1, 1, 2)))
        with pytest.raises(
            ConfigError,
            match=r"tp = 2: a block's feed_forward has no down_proj.*parallel/tensor.py",
        ):
            parallelize(meta_model(cfg.model), cfg, world)


def test_tp_refuses_a_parameter_that_it_knows_no_place_for():
    """A fork's: where it is neither cut nor whole, its gradient would be wrong. Without tp it needs none."""

    def forked(*of):
        model = meta_model(*of)
        model.blocks[1].attention.v_norm = RMSNorm(12, 1e-5)
        return model

    cfg = make_config(parallel={"tp": 2})
    model = forked(cfg.model)
    with cases.fake_process_group(2):
        world = World(0, 2, torch.device("cpu"), build_mesh("cpu", (1, 1, 1, 2)))
        with pytest.raises(
            ConfigError,
            match=r'tp = 2: blocks.1.attention.v_norm.weight: .* self.tp_dims = {"weight": None}',
        ):
            parallelize(model, cfg, world)
        alone = World(0, 2, torch.device("cpu"), build_mesh("cpu", (1, 2, 1, 1)))
        parallelize(model, make_config(), alone)
        materialize(model, 0, torch.device("cpu"))
        assert verify_sharding(model, make_config().parallel, alone)[2]["unit"] == "blocks.1"
    if not config.has_extra("planner"):
        return
    from extras.planner.plan import plan

    with (
        mock.patch("extras.planner.simulate.meta_model", forked),
        mock.patch("extras.planner.plan.meta_model", forked),
    ):
        row, count = plan(make_config(), 2), sum(q.numel() for q in forked(cfg.model).parameters())
    assert row["parameters"] == count and row["parameter_bytes_per_rank"] == 4 * count / 2
