"""The gradient's norm, and updates that must not be made. tests/test_pairs.py has groups and schedules."""

import math
from typing import Any

import pytest
import torch

import minimal
from optim import (
    Progress,
    UpdateGuard,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
)
from tests.conftest import build, full, has_extra, make_config, over_meshes, refuses, token_ids
from tests.distributed import distributed
from tests.reference import fresh_model


@pytest.mark.quick
def test_run_that_ends_within_its_warm_up_stays_on_the_line():
    o: Any = make_config(train={"steps": 10}, optim={"lr": 3e-4, "warmup_steps": 2000}).optim
    for rule in (learning_rate, minimal.learning_rate):
        for step in (1, 9, 10):
            assert rule(o, 10, step) == pytest.approx(3e-4 * step / 2000)


@pytest.mark.quick
def test_group_with_a_rate_that_the_schedule_would_overwrite_is_refused(monkeypatch):
    model = torch.nn.Linear(2, 2)
    forked = torch.optim.SGD([{"params": [*model.parameters()], "lr": 2.0}], lr=1.0)
    monkeypatch.setattr("optim.build_adamw", lambda *arguments: forked)
    with refuses("lr = 2.0", "lr_ratio"):
        build_optimizer(model, make_config().optim)


@pytest.mark.quick
def test_what_a_model_derives_from_its_weights_follows_each_update():
    model = fresh_model(make_config())
    weight = model.head.norm.weight  # ones
    seen = []
    model.after_weight_update = lambda model: seen.append(weight.detach().clone())
    optimizer = build_optimizer(model, make_config().optim)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert seen[0].equal(weight) and weight.lt(1).all()


OPTIMIZERS = [{}]  # the first two skip a step by themselves, the third is not called
if has_extra("optimizers"):
    OPTIMIZERS += [{"state_dtype": "bfloat16"}, {"name": "muon"}]


@pytest.mark.quick
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=str)
def test_non_finite_gradient_changes_nothing(optim, bad):
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    model = torch.nn.ModuleDict({"blocks": torch.nn.ParameterList([parameter])})
    optimizer = build_optimizer(model, make_config(optim=optim).optim)
    progress = Progress()
    guard = UpdateGuard(optimizer, torch.device("cpu"), 1, progress)

    def step(number: int, gradient: float) -> None:
        parameter.grad = torch.full_like(parameter, gradient)
        if guard.may_update(number, parameter.grad.norm()):
            optimizer.step()

    step(1, 1.0)
    state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    before = parameter.detach().clone()
    step(2, bad)
    assert torch.equal(parameter, before)
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[parameter].items())
    step(3, 1.0)  # one may be skipped, and this one counts again
    assert not torch.equal(parameter, before)
    guard.check()
    assert progress.skipped_steps == 1
    step(4, bad)
    step(5, bad)
    with pytest.raises(FloatingPointError, match="step 5: the gradient is not finite"):
        guard.check()


@distributed(ranks=2)
def test_parameter_that_forward_does_not_use_is_named(world):
    model = build(make_config(), world)
    model.blocks[1].feed_forward.forward = lambda x: 0 * x
    losses, _ = model(token_ids(2, 16), token_ids(2, 16))
    losses["loss"].backward()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"no gradient of blocks\.1\.feed_forward\.gate_proj\.w"):
        clip_gradients(model, optimizer, 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@distributed()
def test_gradient_norm_is_exact_on_any_mesh(world, ranks):
    """To 1e-6 of float64, where torch's float32 norm of as many elements is off by more. Then it is clipped to 1."""
    shapes = ((2049, 2050), (1111,), (333, 10), (7, 3))
    tensors = [torch.randn(shape) for shape in shapes]
    expected = math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
    assert torch.nn.utils.get_total_norm(tensors).item() != pytest.approx(expected, rel=1e-6)
    for mesh, model in over_meshes(tensors, world):
        for p in model:
            p.grad = p.detach().clone()
        norm = clip_gradients(model, torch.optim.SGD(model.parameters()), 1.0)
        assert norm.item() == pytest.approx(expected, rel=1e-6), mesh
        for p, tensor in zip(model, tensors):
            assert torch.allclose(full(p.grad), tensor / expected, rtol=1e-5), mesh


@pytest.mark.quick
def test_gradient_whose_square_float32_cannot_hold_has_a_finite_norm():
    """So its step is clipped, not skipped."""
    p = torch.nn.Parameter(torch.zeros(41, 4099))
    p.grad = torch.full_like(p, 1e17)
    expected = 1e17 * math.sqrt(41 * 4099)
    assert gradient_norm([p]).item() == pytest.approx(expected, rel=1e-5)
