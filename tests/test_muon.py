"""Muon against the papers' algorithm on full matrices in float64, on any mesh: updates, whole runs, resuming; what it
sends and holds; who owns what."""

import math
import shutil
import zlib

import numpy as np
import pytest
import torch

import muon
from benchmarks import theory
from config import ConfigError
from model.build import meta_model
from model.llama import named_parameters
from optim import build_optimizer, learning_rate, set_learning_rate
from parallel.materialize import local_rectangle
from planner.plan import plan
from tests import cases
from tests.conftest import lacks, make_config
from tests.test_training import plain_loop, weights, with_data

MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 4, "head_dim": 6, "ffn_dim": 76}  # 4 and 3 do not divide the rows
OPTIM = {"name": "muon", "lr": 3e-3, "muon_lr": 6e-3, "muon_momentum": 0.9, "warmup_steps": 2}
MESHES = {  # by the number of ranks
    1: {"alone": {}},
    2: {"dp 2": {}, "replicate 2": {"dp_replicate": 2, "dp_shard": 1}, "tp 2": {"tp": 2}, "cp 2": {"cp": 2}},
    3: {"dp 3": {}},
    4: {"dp 2 x tp 2": {"tp": 2}, "replicate 2 x dp 2": {"dp_replicate": 2}, "cp 2 x tp 2": {"cp": 2, "tp": 2},
        "replicate 2 x tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, "dp 2 x cp 2": {"cp": 2}},
}
MESHES = {ranks: {name: mesh for name, mesh in meshes.items() if not lacks(parallel=mesh)}
          for ranks, meshes in MESHES.items()}


def sections(mesh: dict, **changes: dict) -> dict:
    return {"model": MODEL, "train": {"steps": 5, "global_batch_size": 12, "micro_batch_size": 1}, "optim": OPTIM,
            "parallel": mesh, **changes}


class PlainMuon:
    """https://kellerjordan.github.io/posts/muon/ with the scale and the decay of https://arxiv.org/abs/2502.16982, and
    AdamW, on full float64 tensors. Newton-Schulz is a polynomial of each singular value."""

    def __init__(self, model: torch.nn.Module, o):
        self.o, self.names = o, {p: name for name, p in model.named_parameters()}
        self.param_groups = [{"lr": o.lr}]
        self.state = {name: [torch.zeros_like(p, dtype=torch.float64)] * 2 for p, name in self.names.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        o, self.steps, lr = self.o, self.steps + 1, self.param_groups[0]["lr"]
        for p, name in self.names.items():
            g, w, (m, v) = p.grad.double(), p.double(), self.state[name]
            if name.startswith("blocks") and p.ndim == 2:
                m = o.muon_momentum * m + (1 - o.muon_momentum) * g
                u, s, vh = torch.linalg.svd((1 - o.muon_momentum) * g + o.muon_momentum * m, full_matrices=False)
                s /= s.square().sum().sqrt()
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                change, of_this = (u * s) @ vh * 0.2 * math.sqrt(max(p.shape)), lr * (o.muon_lr or o.lr) / o.lr
            else:
                m, v = o.betas[0] * m + (1 - o.betas[0]) * g, o.betas[1] * v + (1 - o.betas[1]) * g * g
                change = m / (1 - o.betas[0] ** self.steps) / (
                    (v / (1 - o.betas[1] ** self.steps)).sqrt() + o.eps)
                of_this = lr
            self.state[name] = [m, v]
            p.copy_(w - of_this * (change + o.weight_decay * (p.ndim > 1) * w))

    def zero_grad(self) -> None:
        for p in self.names:
            p.grad = None


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode())))


def off(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative, in the norm."""
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def updates(every: dict[str, dict], steps: tuple[int, ...]) -> dict[tuple[str, int], dict]:
    """Full weights and state after so many updates by gradient(), by configuration; and what the last step sent."""
    found = {}
    with cases.process_group() as world:
        for case, given in every.items():
            cfg = make_config(**given)
            model = cases.build(cfg, cases.world_for(cfg, world))
            optimizer = build_optimizer(model, cfg.optim)
            for step in range(1, max(steps) + 1):
                set_learning_rate(optimizer, learning_rate(cfg.optim, 50, step))
                for name, p in named_parameters(model):
                    shape, offsets = local_rectangle(p)
                    p.grad = torch.zeros_like(p)
                    p.grad.to_local().copy_(gradient(name, p.shape, step)[
                        tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape))])
                with cases.Collectives() as counted:
                    optimizer.step()
                if step in steps:
                    found[case, step] = {f"{name}{key}": cases.whole(t.detach()).float().clone().numpy()
                                         for name, p in named_parameters(model)
                                         for key, t in {"": p, **optimizer.state[p]}.items()}
                    found[case, step]["sent"] = tuple(counted.found["all_to_all"])
    return found if world.rank == 0 else {}


@pytest.fixture(scope="module")
def alone(on_ranks) -> dict:
    """Of one process with a momentum in bfloat16, after 50 updates."""
    given = sections({}, optim={**OPTIM, "state_dtype": "bfloat16"})
    return on_ranks(1, updates, {"": given}, (50,))[0]["", 50]


@pytest.fixture(scope="module")
def expected() -> dict:
    """PlainMuon's weights after 1 and 50 updates."""
    cfg, found = make_config(**sections({})), {}
    from model.llama import Llama
    from parallel.materialize import materialize

    model = Llama(cfg.model)
    materialize(model, 0, torch.device("cpu"))
    optimizer = PlainMuon(model, cfg.optim)
    for step in range(1, 51):
        optimizer.param_groups[0]["lr"] = learning_rate(cfg.optim, 50, step)
        for name, p in model.named_parameters():
            p.grad = gradient(name, p.shape, step)
        optimizer.step()
        found[step] = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_updates_equal_the_plain_algorithm(on_ranks, expected, alone, ranks):
    """One and fifty, to 1e-5; with a momentum in bfloat16 to 2 %, and the same bits on any mesh. What a step sends is
    what the theory says."""
    every = {name: sections(mesh) for name, mesh in MESHES[ranks].items()}
    rounded = {f"{name}, bfloat16": sections(mesh, optim={**OPTIM, "state_dtype": "bfloat16"})
               for name, mesh in MESHES[ranks].items()}
    found = on_ranks(ranks, updates, {**every, **rounded}, (1, 50))[0]
    worst: dict[str, float] = {}
    for (case, step), ours in found.items():
        for name, theirs in expected[step].items():
            if case in every:
                assert off(ours[name], theirs) < 1e-5, (case, step, name)
                worst["float32"] = max(worst.get("float32", 0), off(ours[name], theirs))
            elif step == 50:
                worst["bfloat16"] = max(worst.get("bfloat16", 0), off(ours[name], theirs))
                assert off(ours[name], alone[name]) < 1e-5 and off(ours[name], theirs) < 0.02, (case, name)
                assert (ours.get(f"{name}momentum", 0) == alone.get(f"{name}momentum", 0)).all(), (case, name)
        cfg = make_config(**every[case.removesuffix(", bfloat16")], run={"device": "cpu"})
        assert ours["sent"] == theory.collectives(cfg, meta_model(cfg.model), ranks)["all_to_all"], case
    print(ranks, worst)


@pytest.mark.parametrize("ranks", MESHES)
def test_a_run_equals_the_plain_loop(on_ranks, corpus, prepared, tmp_path, ranks):
    every = {name: with_data(sections(mesh), corpus, {320: prepared}) for name, mesh in MESHES[ranks].items()}
    cfg = make_config(**next(iter(every.values())))
    wanted = plain_loop(cfg, optimizer_of=lambda model: PlainMuon(model, cfg.optim))
    for name, rows in on_ranks(ranks, cases.train_all, every, str(tmp_path))[0].items():
        assert [row["batch_digest"] for row in rows] == [row["batch_digest"] for row in wanted], name
        for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in wanted], rel=tolerance), name
