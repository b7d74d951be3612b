"""Matmuls in float8: against plain casts and torchao, on any mesh, in what is sent, compiled, recomputed, in a run."""

import itertools
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics

import config
from checkpoint.load import Reader
from extras.float8 import matmul as float8
from extras.float8.all_gather import Float8AllGather, tensorwise, update_scales
from extras.float8.matmul import (
    E4M3,
    E5M2,
    Float8Matmul,
    float8_linear,
    float8_matrices,
    use_float8,
)
from model.build import meta_model
from model.llama import Llama
from parallel.fsdp import reshard
from parallel.mesh import World
from tests import reference
from tests.conftest import build, compiled_by, full, make_config, mesh_for, refuses, train_run
from tests.distributed import distributed, run_on_ranks
from tests.parallel import test_activation_checkpoint as t
from tests.parallel.test_collectives import Collectives, step_of
from tests.reference import Trained, trainer_steps

pytestmark = [pytest.mark.early, pytest.mark.slow]

RECIPES = ["tensorwise", "rowwise"]
# 3 divides no side of a matrix, 16 all
MODEL = {"dim": 64, "n_heads": 4, "n_kv_heads": 1, "ffn_dim": 112, "vocab_size": 323}
WEIGHTS = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 112  # of a block


def configured(recipe: str, model: dict | None = None, **parallel: Any) -> config.Config:
    train = {"steps": 2, "global_batch_size": 12, "micro_batch_size": 1}
    return make_config(
        model={**MODEL, **(model or {})}, parallel={"float8": recipe, **parallel}, train=train
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative, of the norms."""
    expected = theirs.detach().double()
    return float((ours.detach().double() - expected).norm() / expected.norm())


# The matmul


def rounded(x: Tensor, dtype: torch.dtype, recipe: str, dim: int) -> Tensor:
    """What 8 bits leave of x, in float64: each row, or all of it, scaled to the dtype's largest value."""
    lines = x.double().unbind(1 - dim) if recipe == "rowwise" else [x.double()]
    values = []
    for line in lines:
        factor = torch.finfo(dtype).max / line.abs().max().item()
        if recipe == "rowwise":
            factor = 2.0 ** math.floor(math.log2(factor))
        values.append((line * factor).float().to(dtype).double() / factor)
    return torch.stack(values, 1 - dim) if recipe == "rowwise" else values[0]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_matmul_and_its_gradients_are_those_of_plain_casts(recipe, dtype):
    x = (random(2, 24, 32) * random(32, seed=1).exp()).to(dtype).requires_grad_()
    weight = (random(48, 32, seed=2) * random(32, seed=3).exp()).to(dtype).requires_grad_()
    grad = (random(2, 24, 48, seed=4) * random(48, seed=5).exp() * 1e-6).to(dtype)
    out = float8_linear(x, weight, None, recipe)
    out.backward(grad)
    assert x.grad is not None and weight.grad is not None
    of_grad = E4M3 if recipe == "rowwise" else E5M2
    rows, grads, w = x.detach().flatten(0, 1), grad.flatten(0, 1), weight.detach()
    for ours, expected in (
        (out, rounded(rows, E4M3, recipe, 1) @ rounded(w, E4M3, recipe, 1).T),
        (x.grad, rounded(grads, of_grad, recipe, 1) @ rounded(w, E4M3, recipe, 0)),
        (weight.grad, rounded(grads, of_grad, recipe, 0).T @ rounded(rows, E4M3, recipe, 0)),
    ):
        assert ours.dtype == dtype
        assert error(ours.flatten(0, -2), expected) < (1e-6 if dtype == torch.float32 else 2**-8)
    assert error(out.flatten(0, 1), rows.double() @ w.double().T) > 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_infinities_and_nan(recipe):
    x, weight = torch.zeros(16, 32), torch.ones(16, 32)
    assert not float8_linear(x, weight, None, recipe).any()
    for bad in (math.nan, math.inf):
        x[3, 5] = bad
        assert not float8_linear(x, weight, None, recipe)[3].isfinite().any()


class OnGpu(Tensor):
    is_cuda = True


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_s_kernel_gets_the_layouts_that_it_takes(recipe, by_row):
    """a by rows, b by columns, 16 dividing b's sides, two e5m2 never: torch.ops.aten._scaled_mm's conditions."""
    calls = []

    def scaled_mm(a, b, a_scale, b_scale, out_dtype, use_fast_accum):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert not any(side % 16 for side in b.shape)
        assert a.dtype in (E4M3, E5M2) and b.dtype == E4M3
        assert a_scale.dtype == b_scale.dtype == torch.float32
        assert (a_scale.shape, b_scale.shape) in [((1, 1), (1, 1)), ((len(a), 1), (1, b.shape[1]))]
        calls.append((use_fast_accum, a_scale.numel() > 1))
        return ((a.float() @ b.float()) * a_scale * b_scale).to(out_dtype)

    def results(x: Tensor, weight: Tensor, grad: Tensor) -> list[Any]:
        kept = {"saved_tensors": (x, weight, None), "save_for_backward": lambda *tensors: None}
        context = SimpleNamespace(**kept, needs_input_grad=(True, True))
        out = Float8Matmul.forward(context, x, weight, None, recipe == "rowwise")
        return [out, *Float8Matmul.backward(context, grad)[:2]]

    tensors = [random(*shape).bfloat16() for shape in ((32, 64), (48, 64), (32, 48))]
    with (
        mock.patch.object(torch, "_scaled_mm", scaled_mm),
        mock.patch.object(float8, "takes_row_scales", lambda device: by_row),
    ):
        ours = results(*(tensor.as_subclass(OnGpu) for tensor in tensors))
    rowwise = recipe == "rowwise"
    assert calls == [(True, rowwise), *[(False, rowwise and by_row)] * 2]
    for a, b in zip(ours, results(*tensors), strict=True):
        assert error(a, b) < 2**-7


LARGE = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
OF_8B = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}
OF_1B = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192}


@pytest.mark.parametrize(
    "recipe, device, sizes, expected",
    [
        ("rowwise", "cuda", OF_8B, LARGE),
        ("tensorwise", "cuda", OF_1B, LARGE),
        ("rowwise", "cuda", OF_1B, {"gate_proj", "up_proj"}),
        ("rowwise", "cpu", OF_1B, {*LARGE, "k_proj", "v_proj"}),
        ("tensorwise", "cpu", {}, LARGE),  # keys and values have 24 rows
        ("tensorwise", "cpu", {"dim": 40, "n_heads": 2, "head_dim": 16, "ffn_dim": 64}, set()),
    ],
)
def test_matrices_too_small_to_win_are_left_out_on_a_gpu(recipe, device, sizes, expected):
    blocks = meta_model(make_config(model={"n_layers": 1, **sizes}).model).blocks
    chosen = float8_matrices(blocks, recipe, device)
    names = {name.split(".")[-1] for name, module in blocks.named_modules() if module in chosen}
    assert names == expected


# On ranks

FROZEN = {"freeze": ["*k_proj*", "*.0.*"], "qk_norm": True}
REPLICATED = {"freeze": ["*q_proj*"]}
HALF = {"param_dtype": "bfloat16"}
RUNS: dict[int, list[tuple[dict, dict]]] = {  # by ranks: [model], [parallel]
    2: [({}, {}), ({}, HALF), (FROZEN, {"sync_every_micro_batch": False}), ({}, {"cp": 2})],
    # shards that are not even, padded where they are sent
    3: [
        ({}, HALF),
        ({}, {"reshard_after_forward": False}),
        ({}, {"prefetch_forward": 2, "prefetch_backward": 2, "recompute": "full"}),
        (REPLICATED, {"replicated": ["*q_proj*"]}),
    ],
    4: [
        (FROZEN, {"dp_replicate": 2, "gather_once": True}),
        ({}, {"dp_replicate": "auto", "dp_shard": 1}),
    ],
}
NEAR = 5e-3  # a last bit changes which of two values in 8 bits a number is rounded to


@pytest.fixture(scope="module")
def on_one() -> dict[tuple, Trained]:
    """By recipe, model and dtype."""

    def train(world: World) -> dict[tuple, Trained]:
        trained = {}
        for model, parallel in itertools.chain(*RUNS.values()):
            dtype = parallel.get("param_dtype", "float32")
            for recipe in ("none", *RECIPES):
                key = recipe, str(model), dtype
                if key not in trained:
                    steps = trainer_steps(configured(recipe, model, param_dtype=dtype), world)
                    trained[key] = steps._replace(weights={})
        return trained

    return run_on_ranks(1, train)[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", RUNS)
@distributed()
def test_training_is_the_same_on_any_ranks(world, ranks, recipe, on_one):
    for model, parallel in RUNS[ranks]:
        cfg = configured(recipe, model, **parallel)
        ours = trainer_steps(cfg, mesh_for(cfg, world))
        one = on_one[recipe, str(model), cfg.parallel.param_dtype]
        # tensorwise scales each part of a sequence by itself
        first = 1e-3 if "cp" in parallel else 1e-5
        assert ours.losses[0] == pytest.approx(one.losses[0], rel=first), parallel
        assert ours.losses == pytest.approx(one.losses, rel=NEAR), parallel
        assert ours.norms == pytest.approx(one.norms, rel=NEAR), parallel


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_near_that_without_and_not_the_same(on_one, recipe):
    for model in ({}, FROZEN):
        eight, without = (on_one[name, str(model), "float32"] for name in (recipe, "none"))
        assert eight.losses[0] != without.losses[0]
        assert eight.losses == pytest.approx(without.losses, rel=NEAR)


@pytest.mark.parametrize("recipe", RECIPES)
@distributed(ranks=2)
def test_recomputation_changes_no_bit(world, recipe):
    without = trainer_steps(configured(recipe), world)
    for mode in ("full", "selective", "elementwise", 2):
        recomputed = trainer_steps(configured(recipe, recompute=mode), world)
        assert (recomputed.losses, recomputed.norms) == (without.losses, without.norms), mode


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("recipe", RECIPES)
@distributed(ranks=2)
def test_compiled_blocks_compute_the_same(world, recipe, recompute):
    """Traced, differentiated and partitioned, but for Inductor's kernels, which take long to make."""
    expected = trainer_steps(configured(recipe, recompute=recompute), world)
    with compiled_by("aot_eager_decomp_partition"):
        compiled = trainer_steps(configured(recipe, recompute=recompute, compile=True), world)
    assert compiled.losses[0] == pytest.approx(expected.losses[0], rel=1e-5)
    assert compiled.norms == pytest.approx(expected.norms, rel=NEAR)


@distributed(ranks=3)
def test_the_kernel_that_casts_a_gpu_s_shards_changes_no_bit(world):
    """Where FSDP2 calls it, within hooks that torch.compile skips."""
    expected = trainer_steps(configured("tensorwise"), world)
    metrics.reset()
    with mock.patch.object(Float8AllGather, "is_cuda", True, create=True):
        cast = trainer_steps(configured("tensorwise"), world)
    assert (cast.losses, cast.norms) == (expected.losses, expected.norms)
    assert metrics.generated_kernel_count == 2  # of the first shape, of all


@pytest.mark.quick
@pytest.mark.parametrize(
    "parallel, bytes_before, gathers",
    [
        # two blocks, two micro-batches, forward and backward, less one: the first stays unsharded
        ({}, 4, 7),
        (HALF, 2, 7),
        ({"reshard_after_forward": False}, 4, 3),
        ({"gather_once": True}, 4, 2),
    ],
    ids=str,
)
@distributed(ranks=4, fake=True)
def test_tensorwise_gathers_a_byte_a_weight(world, parallel, bytes_before, gathers):
    """Of the matrices of two blocks. Gradients, and all of rowwise, are sent as without."""
    without, tensors, rows = (
        step_of(world, {"model": MODEL, "parallel": {"float8": recipe, **parallel}})
        for recipe in ("none", *RECIPES)
    )
    saved = without.bytes["gather"] - tensors.bytes["gather"]
    assert saved == gathers * WEIGHTS * (bytes_before - 1)
    assert tensors.counts == without.counts == rows.counts and rows.bytes == without.bytes
    assert tensors.bytes["scatter"] == without.bytes["scatter"]


@distributed(ranks=2, fake=True)
def test_scales_are_one_all_reduce_of_a_number_a_matrix(world):
    model = build(configured("tensorwise"), world)
    with Collectives() as counted:
        update_scales(model)
    assert counted.counts == {"gather": 0, "scatter": 0, "reduce": 1}
    assert counted.bytes["reduce"] == 2 * 7 * 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_keeps_matmuls_in_float8_by_the_same_rule(recipe):
    """Keys and values, of 24 rows here, multiply without: one count goes through both kinds."""
    original = t.built

    def built(*arguments: Any, **sizes: Any) -> Llama:
        model = original(*arguments, **sizes)
        use_float8(model.blocks, recipe, "cpu")
        return model

    with mock.patch.object(t, "built", built):
        elementwise, selective, full = (
            t.step.__wrapped__(mode)[1] for mode in ("elementwise", "selective", "full")
        )
    token = t.LAYERS * t.BATCH * t.LENGTH * 4
    assert elementwise - full == token * (3 * t.DIM + 2 * t.KEYS + t.HEADS + 2 * t.FFN)
    assert selective - full == token * (2 * t.DIM + t.KEYS + t.HEADS + t.FFN)


@distributed(ranks=2)
def test_scales_follow_the_weights(world):
    """Of fresh ones, and after each update."""
    original = reference.training_step
    checked = []

    def check(model: Llama) -> None:
        reshard(model)  # units that are unsharded early
        for linear in tensorwise(model):
            amax = full(linear.weight).abs().max()
            torch.testing.assert_close(linear.inverse_scale, (amax / 448).view(1, 1))
            checked.append(linear)

    def training_step(model: Llama, *rest: Any) -> Any:
        check(model)
        result = original(model, *rest)
        check(model)
        return result

    with mock.patch.object(reference, "training_step", training_step):
        trainer_steps(configured("tensorwise"), world)
    assert len(checked) == 2 * 2 * 14


def test_a_checkpoint_is_the_same_kind_with_and_without(corpus, prepared, tmp_path):
    """Saved by two ranks, resumed by one as if never stopped, and without float8."""

    def losses(name: str, recipe: str, steps: int, ranks: int) -> list[float]:
        cfg = make_config(
            parallel={"float8": recipe},
            train={"steps": steps},
            data={"source": str(corpus), "path": str(prepared)},
            run={"name": name, "output_dir": str(tmp_path)},
            checkpoint={},
            optim={"schedule_steps": 6},
        )
        rows = run_on_ranks(ranks, lambda world: train_run(cfg, world))[0]
        return [row["loss"] for row in rows]

    straight = losses("straight", "tensorwise", 4, 2)
    losses("r", "tensorwise", 2, 2)
    resumed = losses("r", "tensorwise", 4, 1)
    assert resumed == pytest.approx(straight, rel=1e-5)
    assert losses("r", "none", 6, 1)[:4] == resumed
    kinds = []
    for step in (4, 6):
        reader = Reader(tmp_path / f"r/checkpoints/step-{step:08d}")
        items = reader.metadata.state_dict_metadata.items()
        kinds.append({name: (item.size, item.properties.dtype) for name, item in items})
    assert kinds[0] == kinds[1] and {dtype for _, dtype in kinds[0].values()} == {torch.float32}


# Refused


@pytest.mark.parametrize(
    "sections, problem",
    [
        ({"parallel": {"tp": 2}}, r"\[parallel\] float8 = \"tensorwise\": requires tp = 1, not 2"),
        ({"parallel": {"keep_fp32": ["embedding", "blocks.1"]}}, "with blocks.1 in keep_fp32:"),
        ({"parallel": {"cpu_offload": True}}, "float8 = .* is incompatible with cpu_offload"),
        ({"train": {"seq_len": 48}, "parallel": {"cp": 2}}, "multiple of 16 x parallel.cp = 32"),
    ],
    ids=str,
)
def test_what_contradicts_is_refused(sections, problem):
    parallel = sections.get("parallel", {})
    with refuses(problem) as refused:
        make_config(**{**sections, "parallel": {**parallel, "float8": "tensorwise"}})
    assert len(refused.value.problems) == 1
    assert make_config(**sections)
    # what only blocks or tensorwise exclude
    assert make_config(parallel={"float8": "rowwise", "cpu_offload": True})
    assert make_config(parallel={"float8": "rowwise", "keep_fp32": ["embedding", "head"]})


def test_what_no_gpu_multiplies_is_refused():
    sizes = {"dim": 46, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": 75}
    with refuses('float8 = "rowwise": no matrix of the blocks'):
        use_float8(meta_model(make_config(model=sizes).model).blocks, "rowwise", "cpu")
    config.check_for_gpus(make_config(parallel={"float8": "rowwise", "compile": True}))
    with refuses('float8 = "rowwise": requires compile = true on a GPU'):
        config.check_for_gpus(make_config(parallel={"float8": "rowwise"}))


@pytest.mark.quick
@distributed(ranks=1)
def test_scales_need_shards(world):
    """Not while a matrix is all-gathered: a scale must be that of the values that came."""
    model = build(configured("tensorwise"), world)
    with torch.no_grad():
        assert type(model.blocks[0].attention.q_proj.weight.to_local() * 2) is Tensor
    model.blocks[0].unshard()
    with pytest.raises(AssertionError, match=r"call reshard\(\) before"):
        update_scales(model)
    model.blocks[0].reshard()
