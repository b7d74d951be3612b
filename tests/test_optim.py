"""The schedule in closed form, the parameter groups, and updates that a non-finite gradient must not make."""

import math
import zlib

import numpy as np
import pytest
import torch

from model.build import meta_model
from model.llama import Llama
from optim import FiniteGuard, build_optimizer, learning_rate
from parallel.parallelize import parallelize
from tests import cases
from tests.conftest import make_config


def optim(**changes):
    settings = {"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1, **changes}
    return make_config(train={"steps": 100}, optim=settings).optim


def test_warm_up_is_a_straight_line():
    for schedule in ("cosine", "linear", "constant"):
        assert [learning_rate(optim(schedule=schedule), 100, s) for s in (1, 5, 10)] == [
            0.1,
            0.5,
            1.0,
        ]


@pytest.mark.parametrize(
    "schedule, step, expected",
    [
        ("cosine", 55, 0.1 + 0.9 * 0.5),
        ("cosine", 100, 0.1),
        ("cosine", 40, 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2),
        ("linear", 55, 0.1 + 0.9 * 0.5),
        ("linear", 100, 0.1),
        ("constant", 55, 1.0),
        ("constant", 100, 1.0),
        ("wsd", 50, 1.0),
        ("wsd", 80, 1.0),
        ("wsd", 90, 0.1 + 0.9 * 0.5),
        ("wsd", 100, 0.1),
    ],
)
def test_fall(schedule, step, expected):
    o = optim(schedule=schedule, **({"decay_steps": 20} if schedule == "wsd" else {}))
    assert learning_rate(o, 100, step) == pytest.approx(expected)
    assert (
        learning_rate(o, 100, 101)
        == learning_rate(o, 100, 5000)
        == pytest.approx(learning_rate(o, 100, 100))
    )


def test_without_warm_up():
    assert learning_rate(optim(warmup_steps=0), 100, 1) == pytest.approx(1.0, abs=1e-3)
    assert learning_rate(optim(warmup_steps=100), 100, 100) == 1.0


def test_decay_is_for_matrices_and_embeddings_only():
    model = Llama(make_config().model)
    optimizer = build_optimizer(model, make_config().optim)
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    assert (
        optimizer.param_groups[0]["weight_decay"] == 0.1
        and optimizer.param_groups[1]["weight_decay"] == 0
    )
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in kept} == {name for name in names.values() if "norm" in name}
    assert len(decayed) + len(kept) == len(names) and "embedding.weight" in {
        names[id(p)] for p in decayed
    }


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_what_a_model_derives_from_its_weights_follows_each_update(state_dtype):
    """Also a skipped one, which leaves the weights."""
    cfg = make_config(optim={"state_dtype": state_dtype})
    model = Llama(cfg.model)
    torch.manual_seed(0)
    weight = model.blocks[1].attention.q_proj.weight
    seen = []

    def update(model: Llama) -> None:
        seen.append(model.blocks[1].attention.q_proj.weight.detach().clone())

    for p in model.parameters():
        torch.nn.init.normal_(p)
        p.grad = torch.ones_like(p)
    model.after_weight_update = update
    optimizer = build_optimizer(model, cfg.optim)
    before = weight.detach().clone()
    optimizer.step()
    assert len(seen) == 1 and seen[0].equal(weight) and not seen[0].equal(before)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert len(seen) == 2 and seen[1].equal(seen[0])


def test_made_state_equals_the_state_torch_would_make():
    weights = torch.randn(5, 3)
    ours, theirs = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.clone())
    holder = torch.nn.ParameterList([ours])
    made = build_optimizer(holder, make_config().optim)
    o = make_config().optim
    fresh = torch.optim.AdamW(
        [theirs], lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    for _ in range(3):
        for p, optimizer in ((ours, made), (theirs, fresh)):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(ours, theirs)
    for key, value in fresh.state[theirs].items():
        assert torch.equal(made.state[ours][key], value)


def test_an_update_is_given_plain_tensors(monkeypatch):
    given = []
    monkeypatch.setattr(
        torch,
        "_fused_adamw_",
        lambda *lists, **_: given.extend(
            type(tensor) for tensors in lists[:4] for tensor in tensors
        ),
    )
    with cases.fake_process_group(2) as world:
        cfg = make_config()
        model = meta_model(cfg.model)
        parallelize(model, cfg, world)
        optimizer = build_optimizer(model.to_empty(device="cpu"), cfg.optim)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert given == [torch.Tensor] * 4 * len(list(model.parameters()))


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


def test_a_parameter_without_a_gradient_stays_as_it_is():
    for dtype in ("float32", "bfloat16"):
        parameters = torch.nn.ParameterList(torch.ones(3, 2) for _ in range(2))
        optimizer = build_optimizer(parameters, make_config(optim={"state_dtype": dtype}).optim)
        parameters[1].grad = torch.ones(3, 2)
        optimizer.step()
        assert [bool((p == 1).all()) for p in parameters] == [True, False]
        assert [optimizer.state[p]["step"].item() for p in parameters] == [0, 1]


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


OPTIMIZERS = {  # the first two skip a step by themselves, for the others it is not called
    "fused": lambda parameter: build_optimizer(
        torch.nn.ParameterList([parameter]), make_config().optim
    ),
    "bfloat16": lambda parameter: build_optimizer(
        torch.nn.ParameterList([parameter]), bfloat16_states()
    ),
    "plain": lambda parameter: torch.optim.AdamW([parameter], lr=0.1, fused=False),
    "torch's muon": lambda parameter: torch.optim.Muon([parameter], lr=0.1),
    "muon": lambda parameter: build_optimizer(
        torch.nn.ModuleDict({"blocks": torch.nn.ParameterList([parameter])}),
        make_config(optim={"name": "muon"}).optim,
    ),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_non_finite_gradient_changes_nothing(kind, bad):
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = OPTIMIZERS[kind](parameter)
    guard = FiniteGuard(optimizer, torch.device("cpu"), limit=1)

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
    guard.counts()
    assert guard.skipped == 1
    step(4, bad), step(5, bad)
    with pytest.raises(FloatingPointError, match="step 5: the gradient is not finite"):
        guard.counts()


def test_on_ranks_all_see_it_and_none_updates(on_ranks):
    """NaN in one rank's gradient alone."""
    for changed, message in on_ranks(2, cases.nan_on_one_rank):
        assert not changed and "step 1: the gradient is not finite" in message


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_gradient_norm_is_exact_on_any_mesh(on_ranks, ranks):
    """To 1e-6 of float64, where torch's float32 norm of as many elements is off by more."""
    for found in on_ranks(ranks, cases.gradient_norms):
        for mesh, (norm, after, expected, torchs) in found.items():
            assert norm == pytest.approx(expected, rel=1e-6), mesh
            assert after == pytest.approx(1.0, rel=1e-5), mesh  # clipped to 1
            assert torchs != pytest.approx(expected, rel=1e-6), mesh
