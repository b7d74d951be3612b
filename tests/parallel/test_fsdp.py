"""What FSDP2 is told: the order of all-gathers, dtypes, memory; what tensor parallelism refuses."""

import contextlib
from collections.abc import Iterator
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
from model.init import normal
from model.llama import Embedding, Linear, Llama, RMSNorm
from parallel import materialize as materialize_module
from parallel import memory_pool
from parallel.fsdp import (
    mixed_precision,
    reshard,
    set_communication,
    units,
    unshard_first_units,
)
from parallel.materialize import draw, materialize
from parallel.parallelize import compile_block, parallelize
from parallel.replicated import replicated_parameters
from parallel.torch_patches import IS_TORCH_2_11
from tests import forks
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
        if f"~{name_of(group)}" not in events:
            events.append(f"~{name_of(group)}")
        return post_backward(group, *unused)

    for name, module in {
        "E": model.embedding,
        **dict(enumerate(model.blocks)),
        "H": model.head,
    }.items():
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
    events = []
    orders = {}

    def keeps_input() -> bool:
        """Whether FSDP2 keeps the input of a reduce-scatter."""
        context = llama._get_fsdp_state()._comm_ctx
        return bool(
            context.reduce_scatter_state if IS_TORCH_2_11 else context.reduce_scatter_states
        )

    llama.head.register_forward_pre_hook(lambda *unused: events.append(f"kept {keeps_input()}"))
    with recorded(llama, events):
        for last in (False, True, False, True):  # FSDP2 learns its order in the first step
            events.clear()
            set_communication(llama, cfg.parallel, world, last)
            if not last:
                unshard_first_units(llama, cfg.parallel)
            llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
            orders[last] = " ".join(events)
            unsharded = {
                name
                for name, modules in units(llama)
                if not isinstance(next(modules[0].parameters()), DTensor)
            }
            assert unsharded == (set() if last else {"embedding", "blocks.0"})
            assert keeps_input() is not last
    assert orders[False] == "+E +0 E +1 0 +H 1 kept False H +1 ~H +0 ~1 +E ~0 ~E"
    assert orders[True] == "E +1 0 +H 1 kept False H +1 ~H +0 ~1 ~0 ~E"


class NormedEmbedding(Embedding):
    """As BLOOM's."""

    def __init__(self, rows: int, dim: int):
        super().__init__(rows, dim)
        self.norm = RMSNorm(dim, 1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(super().forward(tokens))


class ProjectedEmbedding(Embedding):
    """As ALBERT's: narrow rows, projected."""

    def __init__(self, rows: int, dim: int):
        super().__init__(rows, 8)
        self.project = Linear(8, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.project(super().forward(tokens))


class UnitEmbedding(Embedding):
    """Rows of length 1."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, nn.functional.normalize(self.weight, dim=1))


@pytest.mark.quick
@pytest.mark.parametrize("embedding", [NormedEmbedding, ProjectedEmbedding, UnitEmbedding])
@distributed(ranks=2)
def test_embedding_whose_backward_reads_weights_trains(world, embedding):
    """Its gradients on two ranks are those of the plain model; also where micro-batches keep units unsharded."""
    cfg = make_config(parallel={"prefetch_forward": 2})
    ids = token_ids(2, 17)
    with mock.patch("model.llama.Embedding", embedding):
        ours = build(cfg, world)
        plain = fresh_model(cfg)
        for last in (False, True):
            set_communication(ours, cfg.parallel, world, last)
            ours(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
            plain(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
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
            parallel = {key: value for key, value in options.items() if value is not None}
            llama = build(make_config(model=model, parallel=parallel), world)
            seen = []
            for module in (*llama.blocks, llama.head):
                note = lambda m, inputs, seen=seen: seen.append(inputs[0].dtype)  # noqa: E731
                module.register_forward_pre_hook(note)
            llama(torch.zeros((1, 8), dtype=torch.int64))
            reshard(llama)
            assert seen == [dtype] * 4, options


def test_units_kept_in_float32_are_reduced_in_it():
    halves = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    p = make_config(parallel={**halves, "keep_fp32": ["blocks.0"]}).parallel
    for unit, dtype in ("blocks.0", torch.float32), ("blocks.1", torch.bfloat16):
        policy = mixed_precision(p, unit)
        assert (policy.param_dtype, policy.reduce_dtype) == (dtype, dtype)
        assert not policy.cast_forward_inputs


@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel": {"tp": 2, "recompute": "selective"}},
        {"parallel": {"cp": 2}},
        {
            "model": {"freeze": ["*q_proj*"]},
            "parallel": {"replicated": ["*q_proj*"], "param_dtype": "bfloat16"},
        },
        pytest.param(
            {"model": {"dim": 128, "ffn_dim": 256}, "parallel": {"float8": "tensorwise"}},
            marks=needs_extra("float8"),
        ),
        pytest.param(
            {
                "model": {"init_from": "absent", "dim": 128, "ffn_dim": 256},
                "lora": {"rank": 4, "base_dtype": "nf4"},
                "parallel": {"tp": 2},
            },
            marks=[needs_extra("huggingface", "lora"), pytest.mark.nightly],
        ),
    ],
)
@distributed(ranks=2, fake=True)
def test_all_blocks_share_one_compiled_graph(world, strategy):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    numbers = []
    for layers in (2, 5):
        torch._dynamo.reset()
        graphs.clear()
        model = {**strategy.get("model", {}), "n_layers": layers}
        parallel = {**strategy["parallel"], "compile": True}
        cfg = make_config(**{**strategy, "model": model, "parallel": parallel})
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
    most = 2 * 4
    if "lora" in strategy:
        most += 2 * 4  # NF4's weights, by shape
    assert numbers[0] == numbers[1] <= most


@distributed(ranks=1)
def test_blocks_of_many_kinds_are_compiled(world):
    """Each has something else frozen: more graphs than torch allows by default."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    model = {"n_layers": 6, "freeze": [f"blocks.{i}.*{name}*" for i, name in enumerate(names)]}
    losses = []
    ids = token_ids(2, 9)
    for compiled in (True, False):
        cfg = make_config(model=model, parallel={"compile": compiled})
        torch._dynamo.reset()
        with compiled_by("eager"):  # without kernels, which take long
            llama = build(cfg, world)
            llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
            with torch.no_grad():
                losses.append(llama.eval()(ids[:, :-1], ids[:, 1:])[0]["loss"].item())
        reshard(llama)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_block_is_compiled_as_two_halves_and_a_fork_s_whole():
    """Also a fork's that forgets the halves. A block that is not compiled would train, but slowly."""

    def products_of_graphs() -> list[int]:
        products = []

        def count(graph, inputs):
            calls = graph.graph.find_nodes(op="call_function", target=nn.functional.linear)
            products.append(len(calls))
            return graph.forward

        torch.compiler.reset()
        model = fresh_model(make_config(model={"n_layers": 3}))
        with compiled_by(count):
            for block in model.blocks:
                compile_block(block)
            model(token_ids(1, 8))
        return products

    assert products_of_graphs() == [4, 3]
    with forks.whole_block():
        assert products_of_graphs() == [7]


# Memory


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and not isinstance(result, DTensor)
            and not result.is_meta
        ):
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
    assert made.numel <= shard + 480


@pytest.mark.quick
@pytest.mark.parametrize("width", [7, 70000])
@pytest.mark.parametrize("cutoff", [float("inf"), 3.0])
def test_any_rectangle_of_a_parameter_is_that_part_of_the_whole(width, cutoff):
    shape = torch.Size([300 if width == 7 else 5, width])
    whole = torch.empty(shape)
    draw(whole, (0, 0), shape, normal(1.0, cutoff), 3, "w")
    assert len(whole.unique(dim=0)) == len(whole)
    assert whole.abs().max() <= cutoff
    other = torch.empty(shape)
    draw(other, (0, 0), shape, normal(1.0, cutoff), 4, "w")
    assert not torch.equal(whole, other)
    assert width == 7 or abs(whole.std() - 1) < 0.02
    for down, across in (2, 1), (3, 2), (shape[0] + 4, 1):
        for rows in torch.arange(shape[0]).tensor_split(down):
            for columns in torch.arange(width).tensor_split(across):
                part = torch.empty(len(rows), len(columns))
                offset = (int(rows[0]) if len(rows) else shape[0], int(columns[0]))
                draw(part, offset, shape, normal(1.0, cutoff), 3, "w")
                assert torch.equal(part, whole[rows][:, columns])


@pytest.mark.quick
@distributed(ranks=1)
def test_values_that_are_read_and_not_finite_are_named(world):
    def read(name, offset, out) -> None:
        out.fill_(1.0)
        if "1.feed_forward.up_proj" in name:
            out.view(-1)[-1] = float("inf")

    small_chunks = mock.patch.object(materialize_module, "CHECK_CHUNK", 64)
    with small_chunks, refuses("up_proj.weight: holds values that are not finite"):
        build(make_config(), world, read)


class Streams:
    """torch.cuda's streams on a CPU: notes on which one is allocated, and its waits."""

    class Stream(str):
        events: list

        def wait_stream(self, other: str) -> None:
            self.events.append(f"{self} waits for {other}")

    def __init__(self):
        self.events: list[str] = []
        self.running = ["compute"]

    def current_stream(self) -> "Streams.Stream":
        stream = self.Stream(self.running[-1])
        stream.events = self.events
        return stream

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.running.append(str(stream))
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

    def on_communication_stream(kind: type) -> mock._patch:
        original = kind.allocate

        def allocate_there(self, *arguments, **options):
            with streams.stream("communication"):
                streams.events.append(kind.__name__)
                return original(self, *arguments, **options)

        return mock.patch.object(kind, "allocate", allocate_there)

    def noted(*arguments, **options):
        streams.events.append(f"allocates on {streams.running[-1]}")
        return allocate(*arguments, **options)

    with (
        mock.patch.object(torch, "cuda", streams),
        mock.patch.object(collectives.DefaultAllocMixin, "allocate", noted),
        on_communication_stream(memory_pool.AllGather),
        on_communication_stream(memory_pool.ReduceScatter),
    ):
        memory_pool.share_pool([modules for _, modules in units(model)])
        for stream, is_last in (
            ("compute", False),
            ("communication", False),
            ("communication", True),
        ):
            streams.events.clear()
            set_communication(model, cfg.parallel, world, is_last)
            model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
            text = ", ".join(streams.events)
            gather = "AllGather, communication waits for compute, allocates on compute"
            assert text.count(gather) == text.count("AllGather")
            # of each of four units, what is reduced and the gradient
            assert text.count(f"ReduceScatter, allocates on {stream}") == 2 * 4


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
@distributed(ranks=2, fake=True)
def test_tensor_parallelism_refuses_modules_that_it_does_not_know(world):
    cfg = make_config(parallel={"tp": 2})
    world = mesh_for(cfg, world)
    model = meta_model(cfg.model)
    model.blocks[1].attention.v_norm = RMSNorm(12, 1e-5)
    with refuses("blocks.1.attention.v_norm.weight: .*tp_dims"):
        parallelize(model, cfg, world)


@pytest.mark.quick
@pytest.mark.parametrize("tp, warnings", [(2, 0), (4, 1)])
@distributed(ranks=24, fake=True)
def test_tensor_parallel_groups_that_span_machines_are_reported(
    world, monkeypatch, capfd, tp, warnings
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    train = {"global_batch_size": 24, "micro_batch_size": 1}
    model = {"n_kv_heads": 4}
    cfg = make_config(model=model, train=train, parallel={"tp": tp})
    parallelize(meta_model(cfg.model), cfg, mesh_for(cfg, world))
    assert capfd.readouterr().err.count("tp = 4 does not divide the 6 ranks") == warnings
