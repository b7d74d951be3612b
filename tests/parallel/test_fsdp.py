"""What FSDP2 is told: the order of all-gathers, dtypes, memory; what tensor parallelism refuses."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import config
from model.build import meta_model
from model.llama import Embedding, Llama
from parallel import materialize as materialize_module
from parallel import memory_pool
from parallel.fsdp import reshard, set_communication, units, unshard_first_units
from parallel.materialize import materialize
from parallel.parallelize import parallelize
from parallel.replicated import replicated_parameters
from parallel.torch_patches import IS_TORCH_2_11
from tests.conftest import (
    build,
    compiled_by,
    is_near,
    make_config,
    mesh_for,
    needs_extra,
    refuses,
    token_ids,
)
from tests.distributed import distributed
from tests.reference import fresh_model


@contextlib.contextmanager
def recorded(model: Llama, events: list[str]) -> Iterator[None]:
    """Notes "+0" as block 0's all-gather is issued, "0" at the end of its forward, "~0" of its backward."""
    short = {"embedding": "E", "head": "H", "embedding, head": "EH"}
    unshard, post_backward = FSDPParamGroup.unshard, FSDPParamGroup.post_backward

    def name_of(group: FSDPParamGroup) -> str:
        name = str(group._module_fqn).split(".")[-1]
        return short.get(name, name)

    def unsharding(group, async_op=False):
        begins = group._all_gather_result is None and not group.is_unsharded
        unshard(group, async_op)
        if begins and group._all_gather_result is not None:
            events.append(f"+{name_of(group)}")

    def ending(group, *unused):
        if f"~{name_of(group)}" not in events:  # torch ends some twice
            events.append(f"~{name_of(group)}")
        return post_backward(group, *unused)

    for name, module in ("E", model.embedding), *enumerate(model.blocks), ("H", model.head):
        module.register_forward_hook(lambda *unused, name=name: events.append(str(name)))
    patches = {"unshard": unsharding, "post_backward": ending}
    with mock.patch.multiple(FSDPParamGroup, **patches):
        yield


@pytest.mark.quick
@pytest.mark.parametrize(
    "forward, backward, tied, order",
    [
        # as they are needed; in backward FSDP2 gathers one unit ahead
        (0, 0, False, "+E E +0 0 +1 1 +2 2 +H H +2 ~H +1 ~2 +0 ~1 ~0 ~E"),
        (1, 1, False, "+E +0 E +1 0 +2 1 +H 2 H +2 ~H +1 ~2 +0 ~1 ~0 ~E"),
        (2, 2, False, "+E +0 +1 E +2 0 +H 1 2 H +2 +1 ~H +0 ~2 ~1 ~0 ~E"),
        (1, 1, True, "+EH +0 E +1 0 +2 1 2 H +2 +1 ~2 +0 ~1 ~0 ~EH"),
    ],
)
@distributed(ranks=2)
def test_all_gathers_are_issued_ahead(world, forward, backward, tied, order):
    model = {"n_layers": 3, "tie_embeddings": tied}
    parallel = {"prefetch_forward": forward, "prefetch_backward": backward}
    cfg = make_config(model=model, parallel=parallel)
    llama = build(cfg, world)
    ids = token_ids(2, 17)
    llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()  # FSDP2 learns its order
    events = []
    with recorded(llama, events):
        unshard_first_units(llama, cfg.parallel)
        llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    assert " ".join(events) == order


@pytest.mark.quick
@distributed(ranks=2)
def test_next_micro_batch_finds_the_first_units_gathered(world):
    """The embedding too, before its gradient is reduced, which nothing waits for before the head. The step's last
    micro-batch leaves no unit unsharded."""
    cfg = make_config()
    llama = build(cfg, world)
    ids = token_ids(2, 17)
    orders = {}
    kept = []

    def keeps_input() -> bool:
        """Whether FSDP2 keeps the input of a reduce-scatter."""
        context = llama._get_fsdp_state()._comm_ctx
        states = "reduce_scatter_state" if IS_TORCH_2_11 else "reduce_scatter_states"
        return bool(getattr(context, states))

    llama.head.register_forward_pre_hook(lambda *unused: kept.append(keeps_input()))
    for last in (False, True, False, True):  # FSDP2 learns its order in the first step
        events: list[str] = []
        with recorded(llama, events):
            set_communication(llama, cfg.parallel, world, last)
            if not last:
                unshard_first_units(llama, cfg.parallel)
            llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
        orders[last] = " ".join(events)
        first = {name: next(modules[0].parameters()) for name, modules in units(llama)}
        unsharded = {name for name, p in first.items() if not isinstance(p, DTensor)}
        assert unsharded == (set() if last else {"embedding", "blocks.0"})
        assert keeps_input() is not last
    assert kept == [False] * 4
    assert orders[False] == "+E +0 E +1 0 +H 1 H +1 ~H +0 ~1 +E ~0 ~E"
    assert orders[True] == "E +1 0 +H 1 H +1 ~H +0 ~1 ~0 ~E"


def of_unit_length(self: Embedding, tokens: Tensor) -> Tensor:
    return nn.functional.embedding(tokens, nn.functional.normalize(self.weight, dim=1))


@pytest.mark.quick
@distributed(ranks=2)
def test_embedding_whose_backward_reads_weights_trains(world):
    """Its gradients on two ranks are those of the plain model; also where micro-batches keep units unsharded."""
    cfg = make_config(parallel={"prefetch_forward": 2})
    ids = token_ids(2, 17)
    with mock.patch.object(Embedding, "forward", of_unit_length):
        ours = build(cfg, world)
        plain = fresh_model(cfg)
        for last in (False, True):
            set_communication(ours, cfg.parallel, world, last)
            for model in (ours, plain):
                model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert is_near(p.grad.full_tensor(), q.grad), name


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
@distributed(ranks=1)
def test_residual_stream_has_one_dtype(world, tied):
    """From the embedding on, also where one of the units computes in float32."""
    model = {"tie_embeddings": tied, "n_layers": 3}
    names = config.unit_names(make_config(model=model).model)
    for output, dtype in (None, torch.bfloat16), ("float32", torch.float32):
        for kept in ([], *([name] for name in names)):
            options = {"param_dtype": "bfloat16", "keep_fp32": kept, "output_dtype": output}
            llama = build(make_config(model=model, parallel=options), world)
            seen = []
            for module in (*llama.blocks, llama.head):
                note = lambda m, inputs, seen=seen: seen.append(inputs[0].dtype)  # noqa: E731
                module.register_forward_pre_hook(note)
            llama(torch.zeros((1, 8), dtype=torch.int64))
            reshard(llama)
            assert seen == [dtype] * 4, options


WIDE = {"dim": 128, "ffn_dim": 256}
IN_BFLOAT16 = {"replicated": ["*q_proj*"], "param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "model, parallel",
    [
        ({}, {"tp": 2, "recompute": "selective"}),
        ({"freeze": ["*q_proj*"]}, IN_BFLOAT16),
        pytest.param(WIDE, {"float8": "tensorwise"}, marks=needs_extra("float8")),
    ],
)
@distributed(ranks=2, fake=True)
def test_all_blocks_share_one_compiled_graph(world, model, parallel):
    graphs = []
    numbers = []
    for layers in (2, 5):
        torch._dynamo.reset()
        graphs.clear()
        sizes = {**model, "n_layers": layers}
        cfg = make_config(model=sizes, parallel={**parallel, "compile": True})
        count = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
        with compiled_by(count), mock.patch("model.loss.compiled", lambda function: function):
            ours = mesh_for(cfg, world)
            llama = build(cfg, ours)
            ids = token_ids(1, 32 // ours.cp)
            llama(ids, ids)[0]["loss"].backward()
            with torch.no_grad():
                llama(ids, ids)
            reshard(llama)
        numbers.append(len(graphs))
    # of a block's halves, and of the head's norm: with gradients, without, over frozen parameters
    assert 2 * 2 < numbers[0] == numbers[1] <= 2 * 4


# Memory


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if type(result) is Tensor and not result.is_meta:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 2])
@distributed()
def test_materialize_holds_its_shard_and_one_block_of_rows(world, ranks):
    cfg = make_config(model={"vocab_size": 4001})
    model = meta_model(cfg.model)
    parallelize(model, cfg, world)
    with mock.patch.object(materialize_module, "RNG_BLOCK", 480), Largest() as made:
        materialize(model, 0, world.device)
    shard = -(-4001 // ranks) * 48
    assert shard <= made.numel <= shard + 480


class Streams:
    """torch.cuda's streams on a CPU: notes on which one is allocated, and its waits."""

    def __init__(self):
        self.events: list[str] = []
        self.running = ["compute"]

    def current_stream(self) -> Any:
        name = self.running[-1]
        wait = lambda other: self.events.append(f"{name} waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=wait)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.running.append(stream.name)
        yield
        self.running.pop()


@pytest.mark.quick
@distributed(ranks=2)
def test_one_memory_pool_allocates_on_the_computing_stream(world):
    """But not what later micro-batches add to gradients: FSDP2 drops it while its own stream may still read it."""
    streams = Streams()
    cfg = make_config(parallel={"gather_once": True})
    model = build(cfg, world)
    ids = token_ids(2, 17)
    allocate = collectives.DefaultAllocMixin.allocate

    def noted(self, *arguments, **options):
        streams.events.append(f"{type(self).__name__} on {streams.running[-1]}")
        return allocate(self, *arguments, **options)

    with (
        mock.patch.object(torch, "cuda", streams),
        mock.patch.object(collectives.DefaultAllocMixin, "allocate", noted),
    ):
        memory_pool.share_pool([modules for _, modules in units(model)])
        streams.running = ["communication"]  # as where FSDP2 allocates
        gather = ["communication waits for compute", "AllGather on compute"] * 4
        for stream, is_last in (
            ("compute", False),
            ("communication", False),
            ("communication", True),
        ):
            streams.events.clear()
            set_communication(model, cfg.parallel, world, is_last)
            model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
            # of each of four units, what is reduced and the gradient
            reduce = [f"ReduceScatter on {stream}"] * 2 * 4
            assert streams.events == gather + reduce
            gather = []


# What cannot be parallelized


@pytest.mark.parametrize(
    "pattern, words",
    [
        ("*norm.weight", "blocks.1.attention_norm.weight, .* which is trained: freeze it"),
        ("nothing*", r"'nothing\*' matches none of embedding.weight, blocks.0"),
    ],
)
def test_replicated_parameters_must_be_frozen(pattern, words):
    cfg = make_config(model={"freeze": ["blocks.0.*"]}, parallel={"replicated": [pattern]})
    with refuses(words):
        replicated_parameters(meta_model(cfg.model), cfg.parallel)


@pytest.mark.quick
@pytest.mark.parametrize("tp, warnings", [(2, 0), (4, 1)])
@distributed(ranks=24, fake=True)
def test_tensor_parallel_groups_that_span_machines_are_reported(
    world, monkeypatch, capsys, tp, warnings
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    train = {"global_batch_size": 24, "micro_batch_size": 1}
    model = {"n_kv_heads": 4}
    cfg = make_config(model=model, train=train, parallel={"tp": tp})
    parallelize(meta_model(cfg.model), cfg, mesh_for(cfg, world))
    assert capsys.readouterr().err.count("tp = 4 does not divide the 6 ranks") == warnings
