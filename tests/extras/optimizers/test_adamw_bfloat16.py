"""AdamW with moments in bfloat16, rounded stochastically, against torch's in float32 and against its definitions."""

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import config
from optim import build_optimizer
from tests.conftest import full, make_config, over_meshes
from tests.distributed import distributed


def options(state_dtype: str = "bfloat16", **changes: Any) -> config.Optim:
    return make_config(optim={"state_dtype": state_dtype, "betas": [0.9, 0.999], **changes}).optim


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def updated(
    o: config.Optim, gradients: list[Tensor], compile: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """(parameter, its optimizer state) after an update with each gradient, from random weights."""
    parameter = torch.nn.Parameter(random(*gradients[0].shape, seed=1))
    optimizer = build_optimizer(torch.nn.ParameterList([parameter]), o, 0, compile)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("count, tolerance", [(1, 1e-6), (20, 2e-4)])
@pytest.mark.parametrize("compile", [False, True])
def test_updates_follow_torch_s_adamw(compile, count, tolerance):
    """The first equals torch's, since moments are rounded after they are used; later ones stay near, their moments
    right on average and rounded up or down by less than a unit of bfloat16."""
    gradients = list(random(20, 300, 200))[:count]
    ours, state = updated(options(lr=1e-3), gradients, compile)
    theirs, expected = updated(options("float32", lr=1e-3), gradients)
    assert (ours - theirs).abs().max() <= tolerance
    assert state["step"] == expected["step"] == count
    for key in ("exp_avg", "exp_avg_sq"):
        assert state[key].dtype == torch.bfloat16
        moment = expected[key].double()
        error = (state[key].double() - moment) / moment.abs().mean()
        assert error.abs().mean() > 1e-4 and abs(error.mean()) < 1e-4  # rounded, without a bias
        if count == 1:
            assert ((state[key].float() / expected[key] - 1).abs() < 2**-7).all()


def lowbias32(x: np.ndarray) -> np.ndarray:
    """Of hash-prospector, of integers that are wider: a stored run draws the same bits in every version."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("compile", [False, True])
def test_moments_are_rounded_by_random_bits_of_their_own(compile):
    """The first by the lower, the second by the upper half of hash(element ^ hash(hash(seed and name) ^ hash(step))).
    So each is right on average, and the two errors have nothing to do with each other."""
    gradient = random(300, 400)
    _, state = updated(options(), [gradient], compile)
    g = gradient.numpy()
    key = zlib.crc32(b"0 0") ^ lowbias32(np.array(1, np.uint64))
    bits = lowbias32(np.arange(g.size, dtype=np.uint64) ^ lowbias32(np.array(key, np.uint64)))
    bits = bits.reshape(g.shape)
    errors = []
    for name, exact, noise in (
        ("exp_avg", np.float32(1 - 0.9) * g, bits & 0xFFFF),
        ("exp_avg_sq", np.float32(1 - 0.999) * g * g, bits >> 16),
    ):
        stored = state[name].float().numpy().view(np.uint32)
        unrounded = exact.view(np.uint32)
        expected = (unrounded + noise.astype(np.uint32)) & np.uint32(0xFFFF0000)
        assert (stored == expected).mean() > 0.9999  # compiled, a moment's last bit may differ
        errors.append((stored.astype(np.int64) - unrounded) / 65536)
    for error in errors:
        assert abs(error.mean()) < 5 * np.sqrt(1 / 6 / g.size)
        assert error.std() == pytest.approx(np.sqrt(1 / 6), rel=0.02)
    assert abs(np.corrcoef(errors[0].flat, errors[1].flat)[0, 1]) < 5 / np.sqrt(g.size)


def test_parameter_without_a_gradient_stays_as_it_is():
    parameters = torch.nn.ParameterList(torch.ones(3, 2) for _ in range(2))
    optimizer = build_optimizer(parameters, options())
    parameters[1].grad = torch.ones(3, 2)
    optimizer.step()
    assert [bool((p == 1).all()) for p in parameters] == [True, False]
    assert [optimizer.state[p]["step"].item() for p in parameters] == [0, 1]


@pytest.mark.parametrize("betas", [[0.0, 0.75], [0.9, 0.0], [0.0, 0.0]], ids=str)
def test_every_option_of_each_group_is_used_and_vectors_do_not_decay(betas):
    """The first update by https://arxiv.org/abs/1711.05101 in float64; moments are rounded after it. An eps that is
    small beside a gradient would not be seen."""
    o = options(lr=0.01, eps=0.3, weight_decay=0.7, betas=betas)
    starts = [random(3, 5), random(7, seed=1), random(2, 3, 4, seed=2)]
    parameters = torch.nn.ParameterList(start.clone() for start in starts)
    optimizer = build_optimizer(parameters, o)
    for p in parameters:
        p.grad = p.detach().flip(0)
    optimizer.step()
    for p, start in zip(parameters, starts):
        g = p.grad.double()
        decay = 0.7 if p.ndim > 1 else 0.0
        # corrected for their bias, the moments of one gradient are it and its square
        expected = start.double() - 0.01 * (g / (g.abs() + 0.3) + decay * start.double())
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-6, atol=1e-7)
        moments = {"exp_avg": (1 - betas[0]) * g, "exp_avg_sq": (1 - betas[1]) * g * g}
        for key, moment in moments.items():
            stored = optimizer.state[p][key]
            assert stored.shape == p.shape
            assert ((stored.double() - moment).abs() <= 2**-7 * moment.abs()).all(), key


def test_gradient_is_divided_by_its_scale_and_skipped_where_it_is_not_finite():
    """As clipping scales it. Weights, moments and the count of steps stay."""
    gradient = random(30, 20)
    expected, expected_state = updated(options(eps=0.1), [gradient, -gradient])
    parameter = torch.nn.Parameter(random(30, 20, seed=1))
    optimizer: Any = build_optimizer(torch.nn.ParameterList([parameter]), options(eps=0.1))
    optimizer.grad_scale = torch.tensor(4.0)
    for scale in (4.0, -4.0, torch.inf):
        parameter.grad = scale * gradient
        optimizer.found_inf = torch.tensor(float(scale == torch.inf))
        optimizer.step()
    assert parameter.equal(expected)
    for key, value in expected_state.items():
        assert optimizer.state[parameter][key].equal(value), key


@pytest.mark.parametrize("ranks", [2, 4])
@distributed()
def test_bits_do_not_depend_on_the_mesh(world, ranks):
    """Of weights and moments after three updates: sharded by rows and by columns, in replicas, uneven."""

    def trained(model: torch.nn.ParameterList) -> dict[str, Tensor]:
        optimizer = build_optimizer(model, options())
        for step in range(3):
            for p in model:
                p.grad = p.detach() * (step + 1)
            optimizer.step()
        tensors = {}
        for i, p in enumerate(model):
            for key, tensor in {"weight": p, **optimizer.state[p]}.items():
                tensors[f"{i} {key}"] = full(tensor.detach())
        return tensors

    starts = [random(19, 6), random(5), random(3, 2, 2), random(7, 3)]
    expected = trained(torch.nn.ParameterList(start.clone() for start in starts))
    for mesh, model in over_meshes(starts, world):
        for key, tensor in trained(model).items():
            assert tensor.equal(expected[key]), (mesh, key)
