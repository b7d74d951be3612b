"""The schedule in closed form, parameter groups, the gradient's norm, and updates that must not be made."""

import math
from functools import partial
from typing import Any

import pytest
import torch

import config
import minimal
from model.llama import Llama
from optim import (
    Progress,
    UpdateGuard,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
    set_learning_rate,
)
from tests.conftest import (
    build,
    full,
    has_extra,
    make_config,
    needs_extra,
    over_meshes,
    refuses,
    token_ids,
)
from tests.distributed import distributed
from tests.reference import fresh_model


def schedule(**changes):
    settings = {"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1, **changes}
    return make_config(train={"steps": 100}, optim=settings).optim


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes, rates",
    [
        ({"schedule": "cosine"}, {1: 0.1, 5: 0.5, 10: 1.0, 55: 0.55, 100: 0.1}),
        ({"schedule": "cosine"}, {40: 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2}),
        ({"schedule": "linear"}, {1: 0.1, 10: 1.0, 55: 0.55, 100: 0.1}),
        ({"schedule": "constant"}, {1: 0.1, 10: 1.0, 55: 1.0, 100: 1.0}),
        ({"schedule": "wsd", "decay_steps": 20}, {5: 0.5, 50: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}),
        ({"warmup_steps": 0, "schedule": "linear"}, {1: 1 - 0.9 / 100}),
    ],
)
def test_learning_rate_of_each_step(changes, rates):
    o = schedule(**changes)
    shown = {step: learning_rate(o, 100, step) for step in rates}
    assert shown == pytest.approx(rates)
    end = learning_rate(o, 100, 100)
    assert [learning_rate(o, 100, step) for step in (101, 5000)] == pytest.approx([end, end])


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_run_within_its_warm_up_stays_on_the_same_line(kind):
    """Without schedule_steps."""
    decay = {"decay_steps": 20} if kind == "wsd" else {}
    for steps in (10, 500):
        changes = {"schedule": kind, "lr": 3e-4, "warmup_steps": 2000, **decay}
        cfg: Any = make_config(train={"steps": steps}, optim=changes)
        for step in (1, 9, steps):
            for rule in (learning_rate, minimal.learning_rate):
                lr = rule(cfg.optim, config.schedule_steps(cfg), step)
                assert lr == pytest.approx(3e-4 * step / 2000)


@pytest.mark.quick
def test_group_keeps_its_ratio_to_the_schedule():
    one, quarter = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    groups = [{"params": [one]}, {"params": [quarter], "lr_ratio": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for lr in (0.5, 0.25):
        set_learning_rate(optimizer, lr)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, lr / 4]


@pytest.mark.quick
def test_group_with_a_rate_that_the_schedule_would_overwrite_is_refused(monkeypatch):
    model = torch.nn.Linear(2, 2)
    forked = torch.optim.SGD([{"params": [*model.parameters()], "lr": 2.0}], lr=1.0)
    monkeypatch.setattr("optim.build_adamw", lambda *arguments: forked)
    with refuses("lr = 2.0", "lr_ratio"):
        build_optimizer(model, make_config().optim)


@pytest.mark.quick
def test_decay_is_for_matrices_and_embeddings_only():
    model = Llama(make_config().model)
    optimizer = build_optimizer(model, make_config().optim)
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p] for p in kept} == {name for name in names.values() if "norm" in name}
    assert {*decayed} == {*names} - {*kept}


@pytest.mark.parametrize(
    "state_dtype", ["float32", pytest.param("bfloat16", marks=needs_extra("optimizers"))]
)
def test_what_a_model_derives_from_its_weights_follows_each_update(state_dtype):
    """Also a skipped one, which leaves the weights."""
    cfg = make_config(optim={"state_dtype": state_dtype})
    model = fresh_model(cfg)
    weight = model.head.norm.weight  # ones
    seen = []
    model.after_weight_update = lambda model: seen.append(weight.detach().clone())
    optimizer: Any = build_optimizer(model, cfg.optim)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert len(seen) == 2 and seen[0].equal(weight) and seen[1].equal(weight)
    assert weight.lt(1).all()


@pytest.mark.quick
def test_made_state_equals_the_state_torch_would_make():
    weights = torch.randn(5, 3)
    ours, theirs = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.clone())
    o = make_config().optim
    made = build_optimizer(torch.nn.ParameterList([ours]), o)
    options = {"betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}
    fresh = torch.optim.AdamW([theirs], o.lr, **options, fused=True)
    for _ in range(3):
        ours.grad = torch.ones(5, 3)
        theirs.grad = torch.ones(5, 3)
        made.step()
        fresh.step()
    assert torch.equal(ours, theirs)
    for key, value in fresh.state[theirs].items():
        assert torch.equal(made.state[ours][key], value)


@distributed(ranks=2, fake=True)
def test_update_is_given_plain_tensors(world, monkeypatch):
    given = []

    def update(*lists, **_) -> None:
        for tensors in lists[:4]:
            given.extend(type(tensor) for tensor in tensors)

    monkeypatch.setattr(torch, "_fused_adamw_", update)
    model = build(make_config(), world)
    optimizer = build_optimizer(model, make_config().optim)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert given == [torch.Tensor] * 4 * len(list(model.parameters()))


def ours(parameter: torch.nn.Parameter, **optim: object) -> torch.optim.Optimizer:
    model = torch.nn.ModuleDict({"blocks": torch.nn.ParameterList([parameter])})
    return build_optimizer(model, make_config(optim=optim).optim)


OPTIMIZERS = {  # the first two skip a step by themselves, for the others it is not called
    "fused": ours,
    "bfloat16": partial(ours, state_dtype="bfloat16"),
    "plain": lambda p: torch.optim.AdamW([p], lr=0.1, fused=False),
    "torch's muon": lambda p: torch.optim.Muon([p], lr=0.1),
    "muon": partial(ours, name="muon"),
}
if not has_extra("optimizers"):
    del OPTIMIZERS["bfloat16"], OPTIMIZERS["muon"]


@pytest.mark.quick
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_non_finite_gradient_changes_nothing(kind, bad):
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = OPTIMIZERS[kind](parameter)
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


@pytest.mark.quick
@pytest.mark.parametrize("limit, factor", [(2.0, 0.25), (7.9, 7.9 / 8), (8.1, 1.0), ("off", 1.0)])
@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_gradient_is_made_shorter_and_never_longer(kind, limit, factor):
    """As the first moment has it, a tenth of it: one optimizer scales in its update."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = OPTIMIZERS[kind](parameter)
    parameter.grad = torch.full_like(parameter, -2.0)
    norm = clip_gradients(torch.nn.ParameterList([parameter]), optimizer, limit)
    optimizer.step()
    assert norm.item() == 8.0
    moment = optimizer.state[parameter]["exp_avg"]
    assert torch.allclose(moment, torch.full((4, 4), -0.2 * factor), rtol=1e-6)


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
