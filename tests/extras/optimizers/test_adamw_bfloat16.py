"""AdamW with moments in bfloat16, rounded stochastically, against torch's in float32 and against its definitions."""

import zlib

import numpy as np
import pytest
import torch

from optim import build_optimizer
from tests import cases
from tests.conftest import make_config


def bfloat16_states(**changes):
    return make_config(optim={"state_dtype": "bfloat16", "betas": [0.9, 0.999], **changes}).optim


def updated(o, gradients: list[torch.Tensor], compile: bool = False):
    """(parameter, its optimizer state) after an update with each gradient, from random weights."""
    parameter = torch.nn.Parameter(
        torch.randn(gradients[0].shape, generator=torch.Generator().manual_seed(1))
    )
    optimizer = build_optimizer(torch.nn.ParameterList([parameter]), o, 0, compile)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("compile", [False, True])
def test_bfloat16_states_follow_torchs_adamw(compile):
    """The first update equals torch's, since moments are rounded after they are used; later ones stay near, their
    moments right on average and rounded up or down by less than a unit of bfloat16."""
    gradients = list(torch.randn(20, 300, 200, generator=torch.Generator().manual_seed(0)))
    for count, tolerance in ((1, 1e-6), (20, 2e-4)):
        ours, state = updated(bfloat16_states(lr=1e-3), gradients[:count], compile)
        theirs, expected = updated(
            make_config(optim={"lr": 1e-3, "betas": [0.9, 0.999]}).optim, gradients[:count]
        )
        assert (ours - theirs).abs().max() <= tolerance and state["step"] == expected[
            "step"
        ] == count
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].dtype == torch.bfloat16
            error = (state[key].double() - expected[key].double()) / expected[
                key
            ].double().abs().mean()
            assert error.abs().mean() > 1e-4 and abs(error.mean()) < 1e-4  # rounded, without a bias
            if count == 1:
                assert ((state[key].float() / expected[key] - 1).abs() < 2**-7).all()


@pytest.mark.parametrize("betas", [[0.0, 0.95], [0.9, 0.0], [0.0, 0.0]], ids=str)
def test_a_beta_of_zero_and_any_number_of_dimensions_are_those_of_torchs_adamw(betas):
    """In the first update, which uses the moments before they are rounded."""
    for shape in ((), (7,), (5, 3), (3, 2, 5)):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        ours, _ = updated(bfloat16_states(lr=1e-2, betas=betas), [gradient])
        theirs, _ = updated(make_config(optim={"lr": 1e-2, "betas": betas}).optim, [gradient])
        assert (ours - theirs).abs().max() <= 1e-6, shape


@pytest.mark.parametrize("compile", [False, True])
def test_the_moments_are_rounded_by_random_bits_of_their_own(compile):
    """The first by the lower, the second by the upper half of hash(element ^ hash(hash(seed and name) ^ hash(step))).
    So each is right on average, and the two errors have nothing to do with each other."""

    def lowbias32(x: np.ndarray) -> np.ndarray:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    gradient = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    state, g = updated(bfloat16_states(), [gradient], compile)[1], gradient.numpy()
    key = zlib.crc32(b"0 0") ^ lowbias32(np.array(1, np.uint64))
    bits = lowbias32(np.arange(g.size, dtype=np.uint64) ^ lowbias32(np.uint64(key))).reshape(
        g.shape
    )
    errors = []
    for name, exact, noise in (
        ("exp_avg", np.float32(1 - 0.9) * g, bits & 0xFFFF),
        ("exp_avg_sq", np.float32(1 - 0.999) * g * g, bits >> 16),
    ):
        stored, whole = state[name].float().numpy().view(np.uint32), exact.view(np.uint32)
        expected = (whole + noise.astype(np.uint32)) & np.uint32(0xFFFF0000)
        assert (stored == expected).mean() > 0.9999  # compiled, a moment's last bit may differ
        errors.append((stored.astype(np.int64) - whole) / 65536)
    for error in errors:
        assert abs(error.mean()) < 5 * np.sqrt(1 / 6 / g.size)
        assert error.std() == pytest.approx(np.sqrt(1 / 6), rel=0.02)
    assert abs(np.corrcoef(errors[0].flat, errors[1].flat)[0, 1]) < 5 / np.sqrt(g.size)


def test_a_compiled_update_computes_no_index():
    """Of a torch.arange inside it Inductor makes an index of 64 bits where shapes are dynamic, which Triton then
    refuses to view as a float32: the kernel fails on a GPU alone."""
    from extras.optimizers import adamw_bfloat16, muon

    def captured(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph

    operators = set()
    p = torch.nn.Parameter(torch.randn(6, 4))
    grad = torch.randn(6, 4)
    moment = torch.zeros(6, 4, dtype=torch.bfloat16)
    number = torch.ones(())
    numbers = adamw_bfloat16.number_elements(p, "key")
    adamw = torch.compile(adamw_bfloat16.update_bfloat16, backend=captured, dynamic=True)
    scalars = (number, number, torch.zeros(()), number)
    adamw(p.detach(), grad, moment, moment.clone(), *scalars, numbers, 0.9, 0.95, 1e-8, 0.1)
    momentum = torch.compile(muon.update_bfloat16, backend=captured, dynamic=True)
    momentum(moment, grad, number, numbers, 0.9)
    assert any("view" in name for name in operators)  # what is captured is the update
    assert not [name for name in operators if "arange" in name or "iota" in name]


def test_a_parameter_without_a_gradient_stays_as_it_is():
    for dtype in ("float32", "bfloat16"):
        parameters = torch.nn.ParameterList(torch.ones(3, 2) for _ in range(2))
        optimizer = build_optimizer(parameters, make_config(optim={"state_dtype": dtype}).optim)
        parameters[1].grad = torch.ones(3, 2)
        optimizer.step()
        assert [bool((p == 1).all()) for p in parameters] == [True, False]
        assert [optimizer.state[p]["step"].item() for p in parameters] == [0, 1]


def test_every_option_of_each_group_is_used_and_vectors_do_not_decay():
    """The first update of a matrix, a vector and a number, by https://arxiv.org/abs/1711.05101 in float64; moments are
    rounded after it. An eps that is small beside a gradient would not be seen."""
    o = bfloat16_states(lr=0.01, eps=0.3, weight_decay=0.7, betas=[0.0, 0.75])
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 5), (7,), (), (2, 3, 4))
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters = torch.nn.ParameterList(start.clone() for start in starts)
    optimizer = build_optimizer(parameters, o)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    for p, start in zip(parameters, starts):
        g = p.grad.double()
        decay = 0.7 if p.ndim > 1 else 0.0
        # corrected for their bias, the moments of one gradient are it and its square
        expected = start.double() - 0.01 * (g / (g.abs() + 0.3) + decay * start.double())
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-6, atol=1e-7)
        for key, moment in (("exp_avg", g), ("exp_avg_sq", 0.25 * g * g)):
            stored = optimizer.state[p][key]
            assert stored.shape == p.shape and stored.dtype == torch.bfloat16
            assert ((stored.double() - moment).abs() <= 2**-7 * moment.abs()).all(), key


def test_a_gradient_that_is_scaled_or_not_finite():
    """Clipping divides by grad_scale; where found_inf is set, weights, moments and the count of steps stay."""
    gradient = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    found = []
    for scale, infinite in ((1.0, False), (4.0, False), (4.0, True)):
        parameter = torch.nn.Parameter(torch.ones(30, 20))
        optimizer = build_optimizer(torch.nn.ParameterList([parameter]), bfloat16_states(eps=0.1))
        for values in (gradient, -gradient):
            parameter.grad = scale * values
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.step()
        if infinite:
            parameter.grad = torch.full((30, 20), torch.inf)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
        found.append((parameter.detach(), *optimizer.state[parameter].values()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert found[0][1] == 2


def test_a_second_moment_decays_in_bfloat16():
    """At beta2 = 0.999 a change is 2^-10 of the moment and less: to the nearest, it would be rounded away each time."""
    gradients = [torch.full((64, 64), 1.0)] * 100 + [torch.zeros(64, 64)] * 400
    ours, theirs = (
        updated(o, gradients)[1]["exp_avg_sq"].double().mean().item()
        for o in (bfloat16_states(), make_config(optim={"betas": [0.9, 0.999]}).optim)
    )
    assert ours == pytest.approx(theirs, rel=0.01) and theirs < 0.7 * (1 - 0.999**100)


def test_the_hash_is_the_one_that_is_named():
    """lowbias32 of hash-prospector, in Python's integers: a stored run draws the same bits in every version."""
    from extras.optimizers.adamw_bfloat16 import hash32

    def lowbias32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    numbers = [0, 1, 2, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
    found = hash32(torch.tensor(numbers).to(torch.int32)).tolist()
    assert [n % 2**32 for n in found] == [*map(lowbias32, numbers)]


def test_the_hash_is_even_and_repeats():
    """Each of 16 bits is set half the time, alone and against its neighbour element and step; compiled it is equal."""
    from extras.optimizers.adamw_bfloat16 import hash32

    index = torch.arange(1 << 16, dtype=torch.int32)
    bits = hash32(index)
    assert len(bits.unique()) == len(bits) and torch.equal(torch.compile(hash32)(index), bits)
    for noise in (bits, bits >> 16, bits ^ bits.roll(1), hash32(index ^ 1234) ^ bits):
        share = torch.stack([noise >> n & 1 for n in range(16)]).double().mean(dim=1)
        # five standard deviations of 65,536 draws
        assert ((share - 0.5).abs() < 5 * 0.5 / 256).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_bfloat16_states_do_not_depend_on_the_mesh(on_ranks, ranks):
    """Weights and moments after three updates, bit for bit those of one process: sharded by rows and by columns, in
    replicas, uneven."""
    for found in on_ranks(ranks, cases.bfloat16_updates):
        assert len(found) >= 2
        for mesh, differing in found.items():
            assert not differing, mesh
