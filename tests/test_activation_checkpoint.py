"""Recomputation changes no gradient, not by a bit, and keeps fewer bytes, as its rule says. Names stay as they are."""

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import config
from config import ConfigError
from model import attention
from model.build import build_model, meta_model
from model.llama import Block, FeedForward, Linear, Llama, named_parameters, rope_tables
from parallel import parallelize
from parallel.activation_checkpoint import (
    apply_activation_checkpointing,
    is_attention,
    leave_to_compiler,
)
from parallel.materialize import materialize
from parallel.parallelize import compile_block
from tests.cases import compiled_by, storages
from tests.conftest import make_config, needs_extra

# counted below once each, whether or not torch shows these hooks what a policy keeps
pytestmark = pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")

SETTINGS = ["none", 2, "elementwise", "selective", "full"]
BATCH = 2
LENGTH = 64
LAYERS = 4
# of tests.conftest.TINY; keys: width of all key heads, or of all value heads
WIDTH = 48
HEADS = 4
KEYS = 24
FFN = 80
# its proportions, an eighth as wide
LLAMA_8B = {"dim": 512, "n_heads": 4, "n_kv_heads": 1, "ffn_dim": 1792}


def built(setting: str | int, backend: str | None = None, **sizes: int) -> Llama:
    """backend: of torch.compile, for compiled blocks."""
    model = Llama(make_config(model={"n_layers": LAYERS, **sizes}).model)
    materialize(model, 0, torch.device("cpu"))
    if backend:
        setting = leave_to_compiler(setting)
    apply_activation_checkpointing(model, setting, compiled=bool(backend))
    if backend:
        torch.compiler.reset()
        with compiled_by(backend):
            for block in model.blocks:
                compile_block(block)
    return model


def step(
    setting: str | int,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    **sizes: int,
) -> tuple[dict[str, torch.Tensor], int]:
    """Every gradient, and the bytes that autograd keeps for the blocks between forward and backward.

    Counted as they are kept: saved tensors through autograd's own hooks, and what selective recomputation caches as
    results of its operators; parameters and each storage once.
    """
    model = built(setting, backend, **sizes).to(dtype)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    ids = torch.randint(0, 320, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in parameters:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    before = storages()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids[:, :-1], ids[:, 1:])[0]["loss"]
    after = storages()  # saved tensors are no Python objects, cached ones are
    kept |= {
        key: storage.nbytes()
        for key, storage in after.items()
        if key not in before and key not in parameters
    }
    loss.backward()
    return {name: p.grad for name, p in named_parameters(model)}, sum(kept.values())


def test_of_every_n_blocks_the_last_is_recomputed():
    for n, recomputed in (1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), (5, []):
        blocks = built(n).blocks
        assert [
            i for i, block in enumerate(blocks) if type(block) is not type(built("none").blocks[0])
        ] == recomputed


measured = functools.cache(step)


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_gradients_are_bitwise_those_without(setting):
    expected, found = measured("none")[0], measured(setting)[0]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_kept_fall_in_the_order_of_the_settings():
    none, second, elementwise, selective, full = (measured(setting)[1] for setting in SETTINGS)
    assert none > elementwise > selective > full
    # Full keeps a block's input, and so half of what "every second" saves is what full does
    per_block = (none - full) / LAYERS
    assert none - second == pytest.approx(2 * per_block, rel=0.02)
    inputs = BATCH * LENGTH * WIDTH * 4
    # norms' inputs, q k v, attention's result, gate, up: many times the input
    assert per_block > 10 * inputs > 0
    assert full < none / 3


@pytest.mark.parametrize(
    "setting, kept",
    [
        (
            "elementwise",
            WIDTH + 2 * KEYS + WIDTH + WIDTH + 2 * FFN,
        ),  # q; k, v; attention; o; gate, up
        ("selective", WIDTH + KEYS + WIDTH + FFN),  # q; v; attention; gate
    ],
)
def test_bytes_kept_are_those_of_the_outputs_that_backward_reads(setting, kept):
    """And of attention's logsumexp, one number a head. None for down_proj, the last product."""
    beyond_the_input = measured(setting)[1] - measured("full")[1]
    assert beyond_the_input == LAYERS * BATCH * LENGTH * 4 * (kept + HEADS)


def test_keeping_every_product_saves_a_third_at_llama_8b_s_proportions():
    kept = {
        setting: step(setting, torch.bfloat16, **LLAMA_8B)[1]
        for setting in ("none", "elementwise", "full")
    }
    inputs = LAYERS * BATCH * LENGTH * LLAMA_8B["dim"] * 2  # "full" keeps these and the head's
    blocks = {setting: size - kept["full"] + inputs for setting, size in kept.items()}
    assert blocks["elementwise"] <= 0.685 * blocks["none"]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16]
)
def test_the_compiler_keeps_every_product_and_changes_no_bit(dtype):
    """It partitions as always; its kernels would take a minute to compile, and count nothing."""
    kept, gradients = {}, {}
    for setting in ("none", "elementwise", "selective"):
        gradients[setting], kept[setting] = step(
            setting, dtype, backend="aot_eager_decomp_partition", **LLAMA_8B
        )
        for name, gradient in gradients["none"].items():
            assert torch.equal(gradients[setting][name], gradient), (setting, name)
    _, eager = step("elementwise", dtype, **LLAMA_8B)
    statistics = LAYERS * 2 * BATCH * LENGTH * 4  # of both norms, which the compiler keeps
    assert kept["selective"] < kept["elementwise"] <= eager + statistics < kept["none"]


def test_blocks_that_backward_does_not_reach_are_compiled_without_a_checkpoint():
    """Frozen from the embedding up. torch.compile fails on a checkpoint in a graph that has no backward."""
    found = {}
    for setting in ("none", "full"):
        m = make_config(model={"n_layers": 3, "freeze": ["embedding*", "blocks.[01].*"]}).model
        model = build_model(m)
        materialize(model, 0, torch.device("cpu"))
        apply_activation_checkpointing(model, setting, compiled=True)
        torch.compiler.reset()
        with compiled_by("aot_eager"):
            for block in model.blocks:
                compile_block(block)
        ids = torch.randint(0, 320, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
        found[setting] = {name: p.grad for name, p in named_parameters(model)}
    for name, gradient in found["none"].items():
        assert (gradient is None) == name.startswith(("embedding", "blocks.0", "blocks.1")), name
        assert gradient is None or torch.equal(found["full"][name], gradient), name


def test_names_stay():
    plain = [
        name for name, _ in Llama(make_config(model={"n_layers": LAYERS}).model).named_parameters()
    ]
    for setting in SETTINGS:
        for backend in (None, "inductor"):
            assert [name for name, _ in named_parameters(built(setting, backend))] == plain


class InPlace(TorchDispatchMode):
    """The operators that change one of their arguments."""

    def __init__(self):
        super().__init__()
        self.found, self.calls = [], 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += 1
        if operator._schema.is_mutable:
            self.found.append(operator)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "base, float8",
    [
        (None, "none"),
        pytest.param(None, "rowwise", marks=needs_extra("float8")),
        pytest.param("nf4", "none", marks=needs_extra("lora", "huggingface")),
    ],
)
def test_no_block_changes_a_tensor_in_place(base, float8):
    """Recomputed, it would be changed twice, compiled or not."""
    lora = {"lora": {"base_dtype": base}} if base else {}
    cfg = make_config(model={"dim": 64, "ffn_dim": 128, "init_from": base and "a folder"}, **lora)
    model = meta_model(cfg.model, cfg.lora)
    if float8 != "none":
        from extras.float8.matmul import use_float8

        use_float8(model.blocks, float8, "cpu")
    model.to_empty(device="cpu")
    x = torch.randn(BATCH, LENGTH, 64, requires_grad=True)
    with InPlace() as seen:
        model.blocks[0].float()(x, *rope_tables(cfg.model, torch.arange(LENGTH)), None)
    assert not seen.found and seen.calls > 20
    with seen:
        x.detach().mul_(2)
    assert len(seen.found) == 1


def test_of_what_torch_logs_of_policies_the_advice_on_those_alone_is_dropped(monkeypatch):
    built("selective")
    log, heard = logging.getLogger("torch._higher_order_ops.wrap"), []
    monkeypatch.setattr(log, "disabled", False)
    # whatever torch's own set-up of logs, in an earlier test, made it
    log.setLevel(logging.WARNING)
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    log.addHandler(handler)
    log.warning(
        "\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\nPlease ..."
    )
    log.warning("a policy that was %s", "dropped")
    log.removeHandler(handler)
    assert heard == ["a policy that was dropped"]


# A fork's blocks, in which the matmuls to save cannot be told by their number


class Router(FeedForward):
    """Its expert sees as many tokens as the router gives it."""

    def __init__(self, m: config.Model, out_std: float):
        super().__init__(m, out_std)
        self.router = Linear(m.dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.where(self.router(x).argmax(-1) == 0)
        return x.index_put(rows, super().forward(x[rows]))


FORWARDS = {  # of FeedForward -> (number of the matmul, what forward computes, what is due)
    "another order": (
        lambda f, x: f.down_proj(f.up_proj(x) * F.silu(f.gate_proj(x))),
        5,
        "up_proj",
        "gate_proj",
    ),
    "one twice": (
        lambda f, x: f.down_proj(F.silu(f.gate_proj(x) + f.gate_proj(2 * x)) * f.up_proj(x)),
        6,
        "gate_proj",
        "up_proj",
    ),
    "one never": (lambda f, x: f.down_proj(F.silu(f.gate_proj(x))), 6, "down_proj", "up_proj"),
    "one without its module": (
        lambda f, x: f.down_proj(F.silu(f.gate_proj(x)) * (x @ f.up_proj.weight.t())),
        6,
        "feed_forward",
        "up_proj",
    ),
    "one more": (
        lambda f, x: (
            f.down_proj(F.silu(f.gate_proj(x)) * f.up_proj(x)) @ f.gate_proj.weight[:WIDTH].t()
        ),
        8,
        "feed_forward",
        "nothing",
    ),
}


def parallelized(setting: str) -> None:
    """parallelize(), which needs no process group up to the check."""
    cfg = make_config(parallel={"recompute": setting})
    parallelize.parallelize(
        meta_model(cfg.model), cfg, SimpleNamespace(device=torch.device("cpu"), tp=1, cp=1)
    )


@pytest.mark.parametrize("setting", ["elementwise", "selective"])
@pytest.mark.parametrize("case", FORWARDS)
def test_matmuls_in_another_order_than_their_modules_are_refused(monkeypatch, case, setting):
    forward, number, called, due = FORWARDS[case]
    monkeypatch.setattr(FeedForward, "forward", forward)
    with pytest.raises(ConfigError) as refused:
        parallelized(setting)
    text = str(refused.value)
    assert (
        text.startswith(f'[parallel] recompute = "{setting}": numbers the matmuls')
        and "__init__" in text
    )
    place = "blocks.0" if called == "feed_forward" else "blocks.0.feed_forward"
    assert f"number {number} of blocks.0 is of {place}.{called} in forward, of " in text
    assert (
        f"blocks.0.feed_forward.{due} in that order"
        if due != "nothing"
        else "of nothing in that order"
    ) in text


@pytest.mark.parametrize("setting", ["none", "full", 2])
def test_the_order_is_looked_at_where_it_matters_alone(monkeypatch, setting):
    monkeypatch.setattr(FeedForward, "forward", FORWARDS["another order"][0])
    monkeypatch.setattr(Llama, "forward", lambda *unused: pytest.fail("must not run"))
    monkeypatch.setattr(parallelize, "apply_fsdp", lambda *unused: None)  # needs a process group
    parallelized(setting)


def test_an_order_that_depends_on_values_is_refused(monkeypatch):
    monkeypatch.setattr("model.llama.FeedForward", Router)
    with pytest.raises(
        ConfigError, match='order is unknown: aten.nonzero.* in blocks.0.feed_forward fails.*"full"'
    ):
        parallelized("selective")


def test_one_block_of_each_kind_is_run(monkeypatch):
    """Kinds differ in a module or in an attribute, wherever in the model they are."""
    from parallel.activation_checkpoint import check_matmul_order

    runs, forward = [], Block.forward

    class Last(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))

    monkeypatch.setattr(
        Block, "forward", lambda block, *args: runs.append(block) or forward(block, *args)
    )
    model = meta_model(make_config(model={"n_layers": 6}).model)
    check_matmul_order(model, "selective", 32)
    assert runs == [model.blocks[0]]
    model.blocks[2].feed_forward.window = 7
    check_matmul_order(model, "selective", 32)
    assert runs[1:] == [model.blocks[0], model.blocks[2]]
    model.blocks[4].feed_forward.__class__ = Last
    with pytest.raises(
        ConfigError, match="number 5 of blocks.4 is of blocks.4.feed_forward.up_proj"
    ):
        check_matmul_order(model, "selective", 32)
    assert not any("forward" in vars(block) for block in model.blocks)  # nothing stays
    assert (
        not nn.modules.module._global_forward_hooks
        and not nn.modules.module._global_forward_pre_hooks
    )


@needs_extra("planner")
def test_the_plan_refuses_it_too(monkeypatch):
    from extras.planner.simulate import simulate

    monkeypatch.setattr(FeedForward, "forward", FORWARDS["another order"][0])
    cfg = make_config(parallel={"recompute": "selective"})
    with pytest.raises(ConfigError, match="number 5 of blocks.0"):
        simulate(cfg, 2)


@pytest.mark.parametrize("setting", ["none", "elementwise", "selective", "full"])
def test_flex_attention_that_is_compiled_alone_runs_once_where_it_is_saved(monkeypatch, setting):
    """In an eager block, torch's policies see no operator of it. Its gradients stay bit for bit, and
    it keeps no more than attention's own output."""
    calls = []

    def counted(*args, **options):
        calls.append(torch.is_grad_enabled())
        return flex_attention(*args, **options)

    monkeypatch.setattr(attention, "flex_attention", counted)
    # FlexAttention has no kernel for gradients on a CPU; eager it needs none
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    documents = torch.arange(LENGTH).expand(BATCH, LENGTH) // 24
    mask = create_block_mask(
        attention.mask_mod(documents), BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32
    )
    sizes = {"dim": 64, "head_dim": 16}

    def gradients(setting: str) -> dict[str, Tensor]:
        model = built(setting, **sizes)
        model.build_mask = lambda documents: mask
        ids = torch.randint(0, 320, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
        model(ids, ids, documents=documents)[0]["loss"].backward()
        return {name: p.grad for name, p in named_parameters(model)}

    expected = gradients("none")
    calls.clear()
    found = gradients(setting)
    assert len(calls) == LAYERS * (2 if setting == "full" else 1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name, forward",
    [
        ("aten._scaled_dot_product_flash_attention.default", True),
        ("aten._scaled_dot_product_cudnn_attention.default", True),
        ("aten._scaled_dot_product_fused_attention_overrideable.default", True),
        ("aten._efficient_attention_forward.default", True),
        ("aten._flash_attention_forward.quantized", True),
        ("flex_attention", True),
        ("flash_attn_3.fwd.default", True),
        ("xformers_flash.flash_fwd.default", True),
        ("xformers_flash.flash_bwd.default", False),
        ("aten._scaled_dot_product_flash_attention_backward.default", False),
        ("flash_attn_3.bwd.default", False),
        ("aten.mm.default", False),
        ("aten._softmax.default", False),
    ],
)
def test_every_librarys_attention_is_known_by_its_name(name, forward):
    assert is_attention(name) is forward


def test_torchs_attention_operators_are_known():
    """Of what this torch has, those of one kernel: also one that came after the list was thought of."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if "attention_forward" in name]
    names += [
        name for name in torch._C._dispatch_get_all_op_names() if "scaled_dot_product" in name
    ]
    assert len(names) > 8
    for name in names:
        assert is_attention(name) is ("backward" not in name), name
    assert is_attention(torch.ops.higher_order.flex_attention)
    assert is_attention(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
