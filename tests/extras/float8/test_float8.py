"""Products in 8 bits: against plain casts, over ranks, in what is sent, compiled, recomputed, in a short training."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor_config

import config
from config import ConfigError
from extras.float8 import matmul as float8
from extras.float8.all_gather import Float8AllGather, Float8Shard
from extras.float8.matmul import (
    Float8Linear,
    Float8Matmul,
    float8_linear,
    float8_matrices,
    use_float8,
)
from model.build import meta_model
from model.llama import Linear, Llama
from tests import cases
from tests.conftest import launch, make_config
from tests.parallel import test_activation_checkpoint

pytestmark = [pytest.mark.early, pytest.mark.slow]

RECIPES = ["tensorwise", "rowwise"]
# 3 divides no side of a matrix
MODEL = {"dim": 64, "n_heads": 4, "n_kv_heads": 1, "ffn_dim": 112, "vocab_size": 323}


def case(recipe: str, model: dict | None = None, **parallel) -> dict:
    return {
        "model": {**MODEL, **(model or {})},
        "parallel": {"float8": recipe, **parallel},
        "train": {"steps": 3, "global_batch_size": 12, "micro_batch_size": 1},
    }


# The product


def rounded(x: Tensor, dtype: torch.dtype, recipe: str, dim: int) -> Tensor:
    """What 8 bits leave of x, in float64: each row, or the whole, scaled to the dtype's largest value."""
    lines = x.double().unbind(1 - dim) if recipe == "rowwise" else [x.double()]
    found = []
    for line in lines:
        factor = torch.finfo(dtype).max / line.abs().max().item()
        factor = 2.0 ** math.floor(math.log2(factor)) if recipe == "rowwise" else factor
        found.append((line * factor).float().to(dtype).double() / factor)
    return torch.stack(found, 1 - dim) if recipe == "rowwise" else found[0]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_product_and_its_gradients_are_those_of_plain_casts(recipe, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator) * torch.randn(shape[-1], generator=generator).exp()
        for shape in ((2, 24, 32), (48, 32), (2, 24, 48))
    )
    x = x.to(dtype).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    grad = (grad * 1e-6).to(dtype)
    out = float8_linear(x, weight, None, recipe)
    out.backward(grad)
    e4m3, of_grad = (
        torch.float8_e4m3fn,
        torch.float8_e4m3fn if recipe == "rowwise" else torch.float8_e5m2,
    )
    rows = x.detach().flatten(0, 1)
    grads = grad.flatten(0, 1)
    w = weight.detach()
    expected = {
        "out": (out, rounded(rows, e4m3, recipe, 1) @ rounded(w, e4m3, recipe, 1).T),
        "x": (x.grad, rounded(grads, of_grad, recipe, 1) @ rounded(w, e4m3, recipe, 0)),
        "weight": (
            weight.grad,
            rounded(grads, of_grad, recipe, 0).T @ rounded(rows, e4m3, recipe, 0),
        ),
    }
    for name, (found, wanted) in expected.items():
        assert found.dtype == dtype
        difference = (found.flatten(0, -2).double() - wanted).norm() / wanted.norm()
        assert difference < (1e-6 if dtype == torch.float32 else 2**-8), name
    unrounded = rows.double() @ w.double().T
    assert (out.flatten(0, 1).double() - unrounded).norm() / unrounded.norm() > 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_product_is_torchao_s(recipe):
    """Where torchao is installed, which this project does not need."""
    training = pytest.importorskip("torchao.float8")
    ours, theirs = Linear(64, 48), torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
    torch.nn.init.normal_(ours.weight, generator=torch.Generator().manual_seed(0))
    theirs[0].weight = torch.nn.Parameter(ours.weight.detach().clone())
    settings = training.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(settings, "emulate", True)
    training.convert_to_float8_training(theirs, config=settings)
    ours, results = Float8Linear(ours, recipe), []
    for module in (ours, theirs):
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = module(x)
        (out * torch.linspace(-1, 3, 48)).sum().backward()
        results.append((out, x.grad, next(iter(module.parameters())).grad))
    for a, b in zip(*results):
        assert (a - b).norm() / b.norm() < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_infinities_and_nan(recipe):
    x, weight = torch.zeros(16, 32), torch.ones(16, 32)
    assert not float8_linear(x, weight, None, recipe).any()
    for bad in (math.nan, math.inf):
        x[3, 5] = bad
        assert not float8_linear(x, weight, None, recipe)[3].isfinite().any()


class OnGpu(Tensor):
    """Passes for a GPU's."""

    is_cuda = True


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_s_kernel_gets_the_layouts_that_it_takes(recipe, by_row):
    """a by rows, b by columns, 16 dividing b's sides, two e5m2 never: torch.ops.aten._scaled_mm's conditions."""
    calls = []

    def scaled_mm(a, b, a_scale, b_scale, out_dtype, use_fast_accum):
        assert (
            a.is_contiguous() and b.t().is_contiguous() and not any(side % 16 for side in b.shape)
        )
        assert {a.dtype, b.dtype} <= {
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        } and b.dtype == torch.float8_e4m3fn
        assert {scale.dtype for scale in (a_scale, b_scale)} == {torch.float32}
        assert (a_scale.shape, b_scale.shape) in [((1, 1), (1, 1)), ((len(a), 1), (1, b.shape[1]))]
        calls.append((use_fast_accum, a_scale.numel() > 1))
        return ((a.float() @ b.float()) * a_scale * b_scale).to(out_dtype)

    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((32, 64), (48, 64), (32, 48))
    )

    def gradients(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        context = SimpleNamespace(
            saved_tensors=(x, weight, None),
            needs_input_grad=(True, True),
            save_for_backward=lambda *tensors: None,
        )
        out = Float8Matmul.forward(context, x, weight, None, recipe == "rowwise")
        return [out, *Float8Matmul.backward(context, grad)[:2]]

    expected = gradients(x, weight, grad)
    with (
        mock.patch.object(torch, "_scaled_mm", scaled_mm),
        mock.patch.object(float8, "takes_row_scales", lambda device: by_row),
    ):
        found = gradients(*(t.as_subclass(OnGpu) for t in (x, weight, grad)))
    rowwise = recipe == "rowwise"
    assert calls == [(True, rowwise), *[(False, rowwise and by_row)] * 2]
    for a, b in zip(found, expected):
        assert (a.float() - b.float()).norm() / b.float().norm() < 2**-7


@pytest.mark.parametrize(
    "capability, cuda, takes",
    [
        ((9, 0), "12.9", True),
        ((9, 0), "13.0", True),
        ((9, 0), "12.8", False),
        ((9, 0), None, False),  # an AMD GPU
        ((8, 9), "13.0", False),
        ((10, 0), "13.0", False),
    ],
)
def test_row_scales_are_left_to_cublas_where_it_takes_them(monkeypatch, capability, cuda, takes):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert float8.takes_row_scales(torch.device("cuda")) == takes
    assert not float8.takes_row_scales(torch.device("cpu"))  # also of a plan


def test_matrices_too_small_to_win_are_left_out_on_a_gpu():
    def chosen(recipe: str, device: str, **model) -> set[str]:
        blocks = meta_model(make_config(model={"n_layers": 1, **model}).model).blocks
        found = float8_matrices(blocks, recipe, device)
        return {name.split(".")[-1] for name, module in blocks.named_modules() if module in found}

    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    of_8b = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}
    of_1b = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192}
    assert (
        chosen("tensorwise", "cuda", **of_8b)
        == chosen("rowwise", "cuda", **of_8b)
        == every - {"k_proj", "v_proj"}
    )
    assert chosen("tensorwise", "cuda", **of_1b) == every - {"k_proj", "v_proj"}
    assert chosen("rowwise", "cuda", **of_1b) == {"gate_proj", "up_proj"}
    assert chosen("rowwise", "cpu", **of_1b) == every and chosen("none", "cpu", **of_1b) == set()
    assert chosen("tensorwise", "cpu") == every - {"k_proj", "v_proj"}  # 24 rows
    # 40 columns, or 40 rows
    assert (
        chosen("tensorwise", "cpu", dim=40, n_heads=2, n_kv_heads=2, head_dim=16, ffn_dim=64)
        == set()
    )


# Over ranks


@pytest.fixture(scope="module")
def trained(on_ranks):
    frozen = {"freeze": ["*k_proj*", "*.0.*"], "qk_norm": True}
    both = []
    for recipe in RECIPES:
        both += [case(recipe), case(recipe, param_dtype="bfloat16"), case(recipe, frozen)]
    return {ranks: on_ranks(ranks, cases.train_steps, both)[0] for ranks in (1, 2, 4)}, [
        on_ranks(1, cases.train_steps, [case("none")])[0][0]
    ]


def test_every_number_of_ranks_computes_the_same(trained):
    by_ranks, (without,) = trained
    for ranks in (2, 4):
        for (losses, norms, _), (expected, expected_norms, _) in zip(by_ranks[ranks], by_ranks[1]):
            assert losses[0] == pytest.approx(expected[0], rel=1e-5) and losses == pytest.approx(
                expected, rel=5e-3
            )
            assert norms == pytest.approx(expected_norms, rel=5e-3)
    for losses, _, _ in by_ranks[1]:
        assert losses != without[0] and losses == pytest.approx(without[0], rel=5e-3)


@pytest.fixture(scope="module")
def uneven(on_ranks):
    sections = []
    for recipe in RECIPES:
        sections += [case(recipe, {}, param_dtype=dtype) for dtype in ("float32", "bfloat16")]
    sections += [
        case("tensorwise", **options)
        for options in (
            {"reshard_after_forward": False},
            {"prefetch_forward": 2, "prefetch_backward": 2},
            {"recompute": "full"},
        )
    ]
    sections += [case("tensorwise", {"freeze": ["*q_proj*"]}, replicated=["*q_proj*"]), sections[1]]
    return {
        ranks: on_ranks(ranks, cases.same_batch, sections, len(sections) - 1)[0] for ranks in (1, 3)
    }


def test_shards_that_are_not_even(uneven):
    """Padded where they are sent: three ranks, whose share no row count is a multiple of."""
    for (loss, norms), (expected, expected_norms) in zip(uneven[3], uneven[1]):
        assert loss == pytest.approx(expected, rel=1e-5) and norms == pytest.approx(
            expected_norms, rel=1e-4
        )


def test_the_kernel_that_casts_a_gpu_s_shards_changes_no_bit(uneven):
    """Where FSDP2 calls it, within hooks that torch.compile skips."""
    for found in uneven.values():
        assert found[-1] == found[1]


@inductor_config.patch(
    force_disable_caches=True
)  # monkeypatch would leave torch without this option
def test_a_gpu_s_cast_moves_five_bytes_a_weight(monkeypatch):
    monkeypatch.setattr(Float8AllGather, "is_cuda", True, raising=False)
    # it counts bytes only then
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda _: True)
    metrics.reset()
    torch._dynamo.reset()
    for rows, columns, of in (38, 112, 114), (36, 112, 110), (4, 64, 16), (1, 32, 16), (0, 32, 32):
        shard = torch.randn(
            rows, columns, generator=torch.Generator().manual_seed(rows)
        ).as_subclass(Float8Shard)
        if rows > 1:
            shard[0, :3], shard[1] = torch.tensor([math.nan, math.inf, -math.inf]), 0.0
        shard.factor = torch.tensor([[200.0]])  # larger values are clamped
        (sent,), _ = shard.fsdp_pre_all_gather(
            SimpleNamespace(size=lambda: 3), (of, columns), None, None, None
        )
        expected, found = (
            (shard.detach() * 200).clamp(-448, 448).to(float8.E4M3),
            sent[:rows].view(float8.E4M3),
        )
        assert sent.shape == (-(-of // 3), columns) and sent.dtype == torch.uint8
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    # for the first shape, then for all; each reads the factor, too
    assert metrics.generated_kernel_count == 2 and metrics.num_bytes_accessed == (
        5 * 38 * 112 + 4
    ) + (5 * 36 * 112 + 4)


def test_meshes(on_ranks):
    """Replicas, and a shared sequence, of which tensorwise scales each part by itself."""
    options = [
        {"dp_replicate": 2},
        {"dp_replicate": "auto", "dp_shard": 1},
        {"cp": 2},
        {"reshard_after_forward": False},
    ]
    chosen = [case(recipe, **o) for o in options for recipe in RECIPES]
    expected = dict(
        zip(RECIPES, on_ranks(1, cases.same_batch, [case(recipe) for recipe in RECIPES])[0])
    )
    for sections, (loss, norms) in zip(chosen, on_ranks(4, cases.same_batch, chosen)[0]):
        wanted, wanted_norms = expected[sections["parallel"]["float8"]]
        exact = "cp" not in sections["parallel"]
        assert loss == pytest.approx(wanted, rel=1e-5 if exact else 1e-3), sections
        assert norms == pytest.approx(wanted_norms, rel=1e-4 if exact else 5e-2), sections


STRATEGIES = [
    {},
    {"param_dtype": "bfloat16"},
    {"reshard_after_forward": False},
    {"dp_replicate": 2},
    {"dp_replicate": "auto", "dp_shard": 1},
    {"cp": 2},
    {"sync_every_micro_batch": False},
    {"gather_once": True},
]


@pytest.mark.parametrize("ranks, real", [(2, True), (4, False)])
def test_what_is_sent_equals_the_formula(on_ranks, ranks, real):
    from tests.theory import collectives

    sections = [case(recipe, **options) for recipe in RECIPES for options in STRATEGIES]
    sections += [case("tensorwise", {"freeze": ["*k_proj*"]}, replicated=["*k_proj*"])]
    for s in sections:
        s["train"] |= {"global_batch_size": 4 if real else 8}
    counted = on_ranks(
        ranks if real else 1, cases.count_collectives, sections, None if real else ranks
    )[0]
    for s, found in zip(sections, counted):
        cfg = make_config(**s)
        assert found == collectives(cfg, meta_model(cfg.model), ranks), s["parallel"]


@pytest.mark.quick
def test_tensorwise_gathers_a_byte_a_weight_and_reduces_its_scales_once():
    """Two blocks of seven matrices, two ranks, one micro-batch: a block's forward and backward. Norms stay."""
    from tests.theory import collectives

    def sent(recipe: str, **train) -> dict[str, tuple[int, int]]:
        cfg = make_config(
            **{**case(recipe, param_dtype="bfloat16"), "train": {"micro_batch_size": 1, **train}}
        )
        return collectives(cfg, meta_model(cfg.model), 2)

    weights = 2 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 112)
    without, eight = (sent(recipe, global_batch_size=2) for recipe in ("none", "tensorwise"))
    assert without["all_gather"][1] - eight["all_gather"][1] == 2 * weights  # of two bytes, twice
    assert eight["all_reduce"] == (without["all_reduce"][0] + 1, without["all_reduce"][1] + 14 * 4)
    # three micro-batches
    assert sent("tensorwise", global_batch_size=6)["all_reduce"] == eight["all_reduce"]
    assert sent("rowwise", global_batch_size=2) == without


def test_the_unit_table_counts_what_is_gathered(on_ranks):
    def gathered(recipe: str) -> list[int]:
        rows = on_ranks(1, cases.unit_map, case(recipe, param_dtype="bfloat16"))[0]
        return [row["gathered_bytes"] for row in rows]

    plain, eight = gathered("none"), gathered("tensorwise")
    block = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 112
    assert [a - b for a, b in zip(plain, eight)] == [0, block, block, 0]


# Compiled, recomputed


@pytest.fixture(scope="module")
def modes(on_ranks):
    options = [
        {},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "elementwise"},
        {"recompute": 2},
    ]
    sections = [case(recipe, **o) for recipe in RECIPES for o in options]
    traced = [case(recipe, compile=True, **o) for recipe in RECIPES for o in ({}, options[2])]
    return on_ranks(2, cases.same_batch, sections)[0], on_ranks(1, cases.same_batch_traced, traced)[
        0
    ]


def test_recomputation_changes_no_bit(modes):
    for begin in (0, 5):
        assert all(found == modes[0][begin] for found in modes[0][begin : begin + 5])


def test_compiled_blocks_compute_the_same(modes):
    """Traced, differentiated and partitioned, but for Inductor's kernels, which take long to make."""
    for i, (loss, norms) in enumerate(modes[1]):
        expected, expected_norms = modes[0][i // 2 * 5]
        assert loss == pytest.approx(expected, rel=1e-5) and norms == pytest.approx(
            expected_norms, rel=1e-3
        )


@pytest.mark.slow
def test_kernels_compute_the_same(on_ranks):
    """On one rank, whose blocks are those of the two above."""
    sections = [
        case("tensorwise", recompute="selective", compile=compiled) for compiled in (False, True)
    ]
    (expected, expected_norms), (loss, norms) = on_ranks(1, cases.same_batch, sections)[0]
    assert loss == pytest.approx(expected, rel=1e-5) and norms == pytest.approx(
        expected_norms, rel=1e-3
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_keeps_products_in_8_bits_by_the_same_rule(recipe):
    """Keys and values, of 24 rows here, multiply without: one count goes through both kinds."""
    t, original = test_activation_checkpoint, test_activation_checkpoint.built

    def built(*arguments, **sizes) -> Llama:
        model = original(*arguments, **sizes)
        use_float8(model.blocks, recipe, "cpu")
        return model

    with mock.patch.object(t, "built", built):
        kept = {
            setting: t.step.__wrapped__(setting)[1]
            for setting in ("elementwise", "selective", "full")
        }
    per_token = {
        "elementwise": t.DIM + 2 * t.KEYS + 2 * t.DIM + 2 * t.FFN,
        "selective": t.DIM + t.KEYS + t.DIM + t.FFN,
    }
    for setting, numbers in per_token.items():
        assert kept[setting] - kept["full"] == t.LAYERS * t.BATCH * t.LENGTH * 4 * (
            numbers + t.HEADS
        )


# Training


def run_of(corpus, prepared, recipe: str, **sections) -> dict:
    return {
        "data": {"source": str(corpus), "path": str(prepared)},
        "checkpoint": {"save_every_steps": 2},
        "parallel": {"float8": recipe, "param_dtype": "float32"},
        "eval": {"batches": 1},
        **sections,
    }


def test_a_checkpoint_is_the_same_kind_with_and_without(on_ranks, corpus, prepared, tmp_path):
    """Saved by two ranks, resumed by one as if never stopped; and between runs in 8 bits and without."""
    kinds = [
        run_of(corpus, prepared, recipe, train={"steps": 4})
        for recipe in ("tensorwise", "none", "tensorwise")
    ]
    straight = on_ranks(2, cases.train_to, 4, kinds[0], str(tmp_path / "straight"))[0]
    for steps, ranks in ((2, 2), (4, 1)):
        resumed = on_ranks(ranks, cases.train_to, steps, kinds[0], str(tmp_path / "resumed"))[0]
    assert [row["loss"] for row in resumed] == pytest.approx(
        [row["loss"] for row in straight], rel=1e-5
    )
    for steps, kind in zip((2, 4, 6), kinds):
        mixed = on_ranks(1, cases.train_to, steps, kind, str(tmp_path / "mixed"))[0]
    assert [row["step"] for row in mixed] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in mixed][:4] == pytest.approx(
        [row["loss"] for row in straight], rel=5e-3
    )
    tensors = {
        kind: cases.stored(tmp_path / f"{kind}/r/checkpoints") for kind in ("straight", "mixed")
    }
    assert tensors["straight"] == tensors["mixed"]
    assert {dtype for _, dtype in tensors["mixed"].values()} == {torch.float32}


def test_scales_follow_the_weights(on_ranks, corpus, prepared, tmp_path):
    """Of fresh weights, after each update, and of restored ones, before anything is computed with them."""
    for steps, count in ((2, 4), (3, 2)):
        sections = run_of(corpus, prepared, "tensorwise", train={"steps": steps}, optim={"lr": 0.1})
        assert on_ranks(2, cases.scales_of_a_run, sections, str(tmp_path)) == [[True] * count] * 2


def test_a_short_training_ends_near_bfloat16_s(on_ranks, corpus, prepared, tmp_path):
    """docs/precision.md has the long one."""
    sections = {
        "model": {"dim": 128, "n_layers": 1, "ffn_dim": 256, "n_kv_heads": 4},
        "train": {"steps": 40},
        "checkpoint": None,
        "eval": None,
    }
    runs = {recipe: run_of(corpus, prepared, recipe, **sections) for recipe in ("none", *RECIPES)}
    for run in runs.values():
        run["parallel"] = {**run["parallel"], "param_dtype": "bfloat16"}
    losses = {
        recipe: [row["loss"] for row in rows]
        for recipe, rows in on_ranks(1, cases.train_all, runs, str(tmp_path))[0].items()
    }
    last = {recipe: sum(found[-10:]) / 10 for recipe, found in losses.items()}
    assert last["none"] < 0.6 * losses["none"][0]
    for recipe in RECIPES:
        assert losses[recipe] != losses["none"] and last[recipe] == pytest.approx(
            last["none"], rel=0.02
        )


# Refused


@pytest.mark.parametrize(
    "sections, named",
    [
        ({"parallel": {"tp": 2}}, r"\[parallel\] float8 = \"tensorwise\": requires tp = 1, not 2"),
        (
            {"parallel": {"keep_fp32": ["embedding", "blocks.1"]}},
            r"float8 = .* incompatible with blocks.1 in keep_fp32:",
        ),
        ({"parallel": {"cpu_offload": True}}, r"float8 = .* is incompatible with cpu_offload"),
        (
            {"train": {"seq_len": 40}},
            r"seq_len = 40: must be a multiple of 16 x parallel.cp = 16 with float8",
        ),
        (
            {"train": {"seq_len": 48}, "parallel": {"cp": 2}},
            r"seq_len = 48: must be a multiple of 16 x parallel.cp = 32 with float8",
        ),
    ],
    ids=["tp", "keep_fp32", "offload", "seq_len", "cp"],
)
def test_what_contradicts_is_refused(sections, named):
    sections = {**sections, "parallel": {"float8": "tensorwise", **sections.get("parallel", {})}}
    with pytest.raises(ConfigError, match=named) as caught:
        make_config(**sections)
    assert len(caught.value.problems) == 1
    sections["parallel"]["float8"] = "none"
    assert make_config(**sections)
    if "cpu_offload" in sections["parallel"]:
        assert make_config(
            **{**sections, "parallel": {**sections["parallel"], "float8": "rowwise"}}
        )
    if "keep_fp32" in sections["parallel"]:
        sections["parallel"] = {"float8": "rowwise", "keep_fp32": ["embedding", "head"]}
        assert make_config(**sections)


def test_matrices_that_16_does_not_divide_are_refused():
    blocks = meta_model(
        make_config(model={"dim": 46, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": 75}).model
    ).blocks
    with pytest.raises(ConfigError, match='float8 = "rowwise": no matrix of the blocks'):
        use_float8(blocks, "rowwise", "cpu")


@pytest.mark.parametrize("compiled", [True, False])
def test_float8_that_is_not_compiled_is_refused_on_a_gpu(compiled):
    cfg = make_config(parallel={"float8": "rowwise", "compile": compiled})
    if compiled:
        config.check_for_gpus(cfg)
        return
    with pytest.raises(ConfigError, match='float8 = "rowwise": requires compile = true on a GPU'):
        config.check_for_gpus(cfg)


def test_the_launcher_exits_with_2(write_config):
    done = launch(write_config(), "--parallel.float8=tensorwise", "--parallel.tp=2")
    assert done.returncode == 2 and "float8" in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )


@pytest.mark.quick
def test_scales_need_shards(on_ranks):
    """Not while a matrix is all-gathered: a scale must be that of the values that came."""
    made_of_a_shard, error = on_ranks(1, cases.scales_between, case("tensorwise"))[0]
    assert "call reshard() before" in error and made_of_a_shard is Tensor
    assert float8.factor_of(torch.tensor(0.0), torch.float8_e4m3fn).isfinite()
