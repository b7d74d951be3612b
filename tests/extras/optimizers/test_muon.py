"""Muon: its updates on any mesh against tests/plain.py's on full matrices in float64, and torch's; resuming. What it
sends is tested in tests/tools/planner."""

import math
import shutil
import zlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import config
from checkpoint.load import Reader, check_tensors
from extras.optimizers import muon
from model.build import meta_model
from model.init import constant
from model.llama import Block, Embedding, Llama, named_parameters
from optim import build_optimizer, learning_rate, local_tensor, set_learning_rate
from parallel.materialize import shard_shape_and_offset
from parallel.verify import check_optimizer
from tests import forks, plain
from tests.conftest import (
    build,
    full,
    is_near,
    make_config,
    mesh_for,
    refuses,
    saved_tensors,
    train_run,
)
from tests.distributed import distributed, run_on_ranks
from tests.reference import fresh_model

# 3 and 4 do not divide the rows; of the keys' four, the last of three ranks has none
MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2, "ffn_dim": 76}
OPTIM = {"name": "muon", "lr": 3e-3, "muon_lr": 6e-3, "warmup_steps": 2}
REPLICAS: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 1}
MESHES = {  # by the number of ranks
    1: [{}],
    2: [{}, REPLICAS, {"tp": 2}, {"cp": 2}],
    3: [{}],
    4: [{"tp": 2}, {"dp_replicate": 2}, {"cp": 2, "tp": 2}, {**REPLICAS, "tp": 2}, {"cp": 2}],
}


def config_of(parallel: dict, **sections: Any) -> config.Config:
    train = {"global_batch_size": 12, "micro_batch_size": 1, **sections.pop("train", {})}
    optim = {**OPTIM, **sections.pop("optim", {})}
    return make_config(model=MODEL, train=train, optim=optim, parallel=parallel, **sections)


def gradient(name: str, shape: tuple[int, ...], step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


def updated(model: Llama, o: config.Optim) -> dict[int, dict[str, Tensor]]:
    """Full weights, and momenta, after 1 and 20 updates by gradient()."""
    optimizer = build_optimizer(model, o)
    found: dict[int, dict[str, Tensor]] = {1: {}, 20: {}}
    for step in range(1, 21):
        set_learning_rate(optimizer, learning_rate(o, 20, step))
        for name, p in named_parameters(model):
            shape, offsets = shard_shape_and_offset(p)
            own = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape))
            p.grad = torch.zeros_like(p)
            local_tensor(p.grad).copy_(gradient(name, p.shape, step)[own])
        optimizer.step()
        for name, p in named_parameters(model) if step in found else ():
            found[step][name] = full(p.detach()).clone()
            if "momentum" in optimizer.state[p]:
                found[step][f"{name} momentum"] = full(optimizer.state[p]["momentum"]).clone()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[int, dict[str, Tensor]]:
    cfg = config_of({})
    with forks.routed():
        model = fresh_model(cfg)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    optimizer = plain.Optimizer(cfg.optim, weights)
    found = {}
    for step in range(1, 21):
        gradients = {name: gradient(name, w.shape, step).double() for name, w in weights.items()}
        optimizer.step(gradients, plain.learning_rate(cfg.optim, 20, step))
        found[step] = {name: w.clone() for name, w in weights.items()}
    return found


@pytest.fixture(scope="module")
def rounded_alone() -> dict[str, Tensor]:
    """With a momentum in bfloat16, in one process."""
    cfg = config_of({}, optim={"state_dtype": "bfloat16"})
    with forks.routed():
        return updated(fresh_model(cfg), cfg.optim)[20]


@pytest.mark.parametrize("ranks", MESHES)
@distributed()
def test_updates_equal_the_plain_algorithm(world, ranks, expected, rounded_alone):
    """To 1e-5, in a model with a matrix that tp replicates; with a momentum in bfloat16 to 2 %, and the same bits of it
    on any mesh."""
    for parallel in MESHES[ranks]:
        exact, rounded = config_of(parallel), config_of(parallel, optim={"state_dtype": "bfloat16"})
        ours = mesh_for(exact, world)
        with forks.routed():
            found = updated(build(exact, ours), exact.optim)
            found_rounded = updated(build(rounded, ours), rounded.optim)[20]
        for step, weights in found.items():
            for name, weight in expected[step].items():
                assert is_near(weights[name], weight), (parallel, step, name)
        for name, value in rounded_alone.items():
            if "momentum" in name:
                assert found_rounded[name].equal(value), (parallel, name)
            else:
                assert is_near(found_rounded[name], value), (parallel, name)
                assert is_near(found_rounded[name], expected[20][name], 0.02), (parallel, name)


@pytest.mark.parametrize("shape", [(24, 76), (76, 24), (46, 46)])
def test_newton_schulz_is_its_polynomial_of_the_singular_values(shape):
    """To 2 % in bfloat16, as on a GPU. A zero matrix stays one."""
    x = gradient("", shape)
    of_one_step = plain.Optimizer(make_config().optim, {"x": x.double()}).orthogonal(
        "x", x.double()
    )
    wanted = of_one_step / (0.2 * math.sqrt(max(shape)))
    batch = torch.stack([x, torch.zeros(shape)])
    exact, zero = muon.newton_schulz(batch)
    assert is_near(exact, wanted) and not zero.any()
    assert is_near(muon.newton_schulz(batch.bfloat16())[0], wanted, 0.02)


def blocks_of(weights: list[nn.Parameter]) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in weights)
    for layer, weight in zip(layers, weights):
        layer.weight = weight
    return nn.ModuleDict({"blocks": layers})


def test_fifty_updates_are_those_of_torch_s_muon():
    """To 0.001 of a weight: torch's orthogonalizes in bfloat16, where a change differs by 2 %."""
    o = make_config(optim={"name": "muon", "lr": 0.02}).optim
    ours = [nn.Parameter(gradient("", shape)) for shape in ((24, 76), (76, 24), (46, 46))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"weight_decay": o.weight_decay, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = build_optimizer(blocks_of(ours), o), torch.optim.Muon(theirs, 0.02, **options)
    for step in range(1, 51):
        for p in (*ours, *theirs):
            p.grad = gradient("", p.shape, step)
        for optimizer in optimizers:
            optimizer.step()
        for p, its in zip(ours, theirs):
            assert is_near(p.detach(), its.detach(), 0.001), step


@pytest.mark.quick
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_matrix_without_a_gradient_stays_as_it_is(state_dtype):
    """Next to one of its shape that has one: neither decayed nor counted."""
    o = make_config(optim={"name": "muon", "state_dtype": state_dtype}).optim
    matrices = [nn.Parameter(torch.ones(6, 4)) for _ in range(3)]
    optimizer = build_optimizer(blocks_of(matrices), o)
    matrices[1].grad = gradient("", (6, 4))
    optimizer.step()
    states = [optimizer.state[p] for p in matrices]
    assert [bool((p == 1).all()) for p in matrices] == [True, False, True]
    assert [state["step"].item() for state in states] == [0, 1, 0]
    assert [bool(state["momentum"].any()) for state in states] == [False, True, False]


def test_every_selection_of_parameters_has_an_optimizer():
    """Only matrices, only others, both; the schedule sets the rate of all."""
    for freeze, groups in ((["embedding*", "head*", "*norm*"], 1), (["blocks*proj*"], 2), ([], 3)):
        cfg = make_config(model={"freeze": freeze}, optim={"name": "muon"})
        model = meta_model(cfg.model)
        optimizer = build_optimizer(model, cfg.optim)
        check_optimizer(model, optimizer)
        assert len(optimizer.param_groups) == groups
        set_learning_rate(optimizer, 0.5)
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}


@distributed(ranks=1)
def test_tables_and_gains_of_a_fork_are_not_orthogonalized(world):
    """Of two dimensions, in a recomputed block; a router is a linear layer."""
    init = Block.__init__

    def with_matrices(block: Block, *args) -> None:
        init(block, *args)
        block.table = Embedding(320, 48)
        block.gain = nn.Parameter(torch.empty(4, 12))
        block.init = {"gain": constant(1.0)}

    optim = {"name": "muon", "lr": 1e-3, "muon_lr": 4e-3}
    cfg = make_config(optim=optim, parallel={"recompute": "full"})
    with forks.routed(), mock.patch.object(Block, "__init__", with_matrices):
        model = build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
    set_learning_rate(optimizer, 0.5)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in named_parameters(model):
        is_linear = name.startswith("blocks") and ("proj" in name or "router" in name)
        assert ("momentum" in optimizer.state[p]) == is_linear, name
        assert rates[p] == (2.0 if is_linear else 0.5), name


def test_run_resumes_on_any_mesh_and_from_no_other_optimizer(corpus, prepared, tmp_path):
    """Losses are those without a break; on the same mesh all tensors, with a momentum in bfloat16, bit for bit."""

    def train(name: str, ranks: int, steps: int, dtype: str = "float32", **parallel: Any) -> list:
        cfg = config_of(
            parallel,
            train={"steps": steps},
            optim={"schedule_steps": 6, "state_dtype": dtype},
            data={"source": str(corpus), "path": str(prepared)},
            checkpoint={},
            run={"name": "r", "output_dir": str(tmp_path / name)},
        )
        trained = run_on_ranks(ranks, lambda world: train_run(cfg, world))[0]
        return [row["loss"] for row in trained]

    wanted = train("whole", 1, 6)
    train("first", 4, 3, tp=2)
    for name, ranks, parallel in ("alone", 1, {}), ("replicas", 2, REPLICAS):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        assert train(name, ranks, 6, **parallel) == pytest.approx(wanted, rel=1e-5), name
    train("cut", 2, 3, "bfloat16")
    assert train("cut", 2, 6, "bfloat16") == train("straight", 2, 6, "bfloat16")
    cut, straight = (saved_tensors(tmp_path / name / "r", 6) for name in ("cut", "straight"))
    assert cut.keys() == straight.keys()
    assert all(cut[name].equal(tensor) for name, tensor in straight.items())
    kinds = {name.rpartition(".")[2] for name in cut}
    assert kinds == {"weight", "step", "momentum", "exp_avg", "exp_avg_sq"}
    model = meta_model(config_of({}).model)
    saved = Reader(tmp_path / "alone/r/checkpoints/step-00000006")
    with refuses("has no optim", "exp_avg"):
        check_tensors(saved, model, build_optimizer(model, make_config().optim))
