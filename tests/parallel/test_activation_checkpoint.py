"""Activation checkpointing changes no bit of a gradient, and keeps what its mode says."""

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.build import meta_model
from model.llama import Llama
from parallel import parallelize
from parallel.activation_checkpoint import apply_activation_checkpointing, saved_matmuls
from parallel.parallelize import leave_to_compiler
from parallel.tensor import apply_tensor_parallelism
from tests.conftest import compiled_by, gradients_of, make_config, mesh_for, needs_extra, token_ids
from tests.distributed import distributed
from tests.reference import fresh_model

pytestmark = pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")

BATCH, LENGTH, LAYERS = 2, 64, 4
DIM, KEYS, HEADS, FFN = 48, 24, 4, 80  # of TINY; the width of all key heads


def built(mode: str | int, backend: str | None = None, **model: object) -> Llama:
    llama = fresh_model(make_config(model={"n_layers": LAYERS, **model}))
    if backend:
        mode = leave_to_compiler(mode)
    apply_activation_checkpointing(llama, mode, compiled=backend is not None)
    if backend:
        torch.compiler.reset()
        with compiled_by(backend):
            for block in llama.blocks:
                parallelize.compile_block(block)
    return llama


def storages() -> dict[int, torch.UntypedStorage]:
    """Each storage that a tensor in Python holds, by what stays the same where FSDP2 resizes it."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, torch.nn.Parameter)]
    # functorch's, which a compiled loss of another test has left, have none
    tensors = [t for t in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(t)]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}


def bytes_kept(forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What it returns, and the bytes of what lives until backward, without what was there before."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    before = storages()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    kept |= storages()  # saved tensors are no Python objects, but what a policy caches is
    known = {*before, out.untyped_storage()._cdata}
    return out, sum(storage.nbytes() for key, storage in kept.items() if key not in known)


@functools.cache
def step(mode: str | int, backend: str | None = None) -> tuple[dict[str, Tensor], int]:
    """Every gradient, and the bytes kept between forward and backward."""
    model = built(mode, backend)
    ids = token_ids(BATCH, LENGTH + 1)
    loss, size = bytes_kept(lambda: model(ids[:, :-1], ids[:, 1:])[0]["loss"])
    loss.backward()
    return gradients_of(model), size


@pytest.mark.quick
@pytest.mark.parametrize("mode", [2, "elementwise", "selective", "full"])
def test_gradients_are_bitwise_those_without(mode):
    expected, found = step("none")[0], step(mode)[0]
    assert expected.keys() == found.keys()  # the wrapper is not in the names
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_kept_are_those_of_the_mode():
    none, second, elementwise, selective, full = (
        step(mode)[1] for mode in ("none", 2, "elementwise", "selective", "full")
    )
    assert none - second == pytest.approx((none - full) / 2, rel=0.02)
    assert full < none / 3
    token = LAYERS * BATCH * LENGTH * 4
    # q, k, v, attention and its logsumexp, o, gate, up; not down: nothing reads it in backward
    assert elementwise - full == token * (DIM + 2 * KEYS + DIM + HEADS + DIM + 2 * FFN)
    # q, v, attention, gate: every second matmul
    assert selective - full == token * (DIM + KEYS + DIM + HEADS + FFN)


def test_compiler_keeps_the_matmuls_of_the_mode():
    backend = "aot_eager_decomp_partition"
    none, elementwise, selective = (
        step(mode, backend)[1] for mode in ("none", "elementwise", "selective")
    )
    statistics = LAYERS * 2 * BATCH * LENGTH * 4  # of both norms
    assert selective < elementwise <= step("elementwise")[1] + statistics < none
    for mode in ("elementwise", "selective"):
        for name, gradient in step("none", backend)[0].items():
            assert torch.equal(step(mode, backend)[0][name], gradient), (mode, name)


@pytest.mark.quick
@pytest.mark.parametrize(
    "mode, frozen, checkpointed",
    [
        (1, [], [0, 1, 2, 3]),
        (2, [], [1, 3]),
        (3, [], [2]),
        # those that backward reaches
        ("full", ["embedding*"], [0, 1, 2, 3]),
        ("full", ["embedding*", "blocks.0.*"], [1, 2, 3]),
        ("full", ["embedding*", "blocks.0.*", "blocks.2.*"], [1, 2, 3]),
        ("full", ["blocks.0.*"], [0, 1, 2, 3]),
    ],
)
def test_these_blocks_are_checkpointed(mode, frozen, checkpointed):
    model = meta_model(make_config(model={"n_layers": LAYERS, "freeze": frozen}).model, None)
    plain = type(model.blocks[0])
    apply_activation_checkpointing(model, mode, compiled=False)
    assert [i for i in range(LAYERS) if type(model.blocks[i]) is not plain] == checkpointed


LORA = {"model": {"init_from": "a folder"}, "lora": {"targets": ["q_proj"]}}
WITH_LORA = needs_extra("lora", "huggingface")


@pytest.mark.quick
@pytest.mark.parametrize(
    "every, sections, expected",
    [
        (1, {}, "q_proj k_proj v_proj o_proj gate_proj up_proj"),
        (2, {}, "q_proj v_proj gate_proj"),
        # o_proj's output is a partial sum
        (1, {"parallel": {"tp": 2}}, "q_proj k_proj v_proj gate_proj up_proj"),
        (2, {"parallel": {"tp": 2}}, "q_proj v_proj up_proj"),
        # A x is small, B A x is not
        pytest.param(
            1, LORA, "q_proj lora_a k_proj v_proj o_proj gate_proj up_proj", marks=WITH_LORA
        ),
        pytest.param(2, LORA, "q_proj lora_a v_proj gate_proj", marks=WITH_LORA),
    ],
    ids=str,
)
@distributed(ranks=2, fake=True)
def test_selective_modes_save_these_matmuls(world, every, sections, expected):
    cfg = make_config(**sections)
    model = meta_model(cfg.model, cfg.lora)
    if cfg.parallel.tp > 1:
        apply_tensor_parallelism(model, mesh_for(cfg, world))
    for block in model.blocks:
        linears = [name for name, m in block.named_modules() if isinstance(m, torch.nn.Linear)]
        saved = [linears[number].split(".")[-1] for number in saved_matmuls(block, every)]
        assert saved == expected.split()
