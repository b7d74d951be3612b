"""Recomputation changes no gradient, not by a bit, and keeps fewer bytes, as its rule says. Names stay as they are."""

import gc

import pytest
import torch

from model.llama import Llama, named_parameters
from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.materialize import materialize
from tests.conftest import make_config

SETTINGS = ["none", 2, "selective", "full"]
BATCH, LENGTH, LAYERS, WIDTH = 2, 64, 4, 48


def built(setting: str | int, compiled: bool = False) -> Llama:
    model = Llama(make_config(model={"n_layers": LAYERS}).model)
    materialize(model, 0, torch.device("cpu"))
    apply_activation_checkpointing(model, setting)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    return model


def storages() -> dict[int, int]:
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]  # no compiler's fakes
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def step(setting: str | int) -> tuple[dict[str, torch.Tensor], int]:
    """Every gradient, and the bytes that autograd keeps for the blocks between forward and backward.

    Counted as they are kept: saved tensors through autograd's own hooks, and what selective recomputation caches as
    results of its operators; parameters and each storage once.
    """
    model = built(setting)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ids = torch.randint(0, 320, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    before = storages()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids[:, :-1], ids[:, 1:])[0]["loss"]
    after = storages()  # saved tensors are no Python objects, cached ones are
    kept |= {address: size for address, size in after.items() if address not in before and address not in parameters}
    loss.backward()
    return {name: p.grad for name, p in named_parameters(model)}, sum(kept.values())


@pytest.fixture(scope="module")
def measured():
    return {setting: step(setting) for setting in SETTINGS}


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_gradients_are_bitwise_those_without(measured, setting):
    expected, found = measured["none"][0], measured[setting][0]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_kept_fall_in_the_order_of_the_settings(measured):
    kept = [measured[setting][1] for setting in SETTINGS]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(SETTINGS)
    # Full keeps a block's input, and so half of what "every second" saves is what full does
    none, second, selective, full = kept
    per_block = (none - full) / LAYERS
    assert none - second == pytest.approx(2 * per_block, rel=0.02)
    inputs = BATCH * LENGTH * WIDTH * 4
    assert per_block > 10 * inputs > 0  # norms' inputs, q k v, attention's result, gate, up: many times the input
    assert full < none / 3 and selective < none * 0.8


def test_names_stay():
    plain = [name for name, _ in Llama(make_config(model={"n_layers": LAYERS}).model).named_parameters()]
    for setting in SETTINGS:
        for compiled in (False, True):
            assert [name for name, _ in named_parameters(built(setting, compiled))] == plain
