"""Muon against the papers' algorithm on full matrices in float64, on any mesh: updates, whole runs, resuming; what it
sends and holds; who owns what."""

import contextlib
import math
import shutil
import zlib
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint.load import Reader, check_tensors
from config import ConfigError
from extras.optimizers import muon
from model.build import meta_model
from model.init import constant
from model.llama import Block, Embedding, named_parameters
from optim import build_optimizer, learning_rate, set_learning_rate
from parallel.materialize import shard_shape_and_offset
from parallel.verify import check_optimizer
from tests import cases, forks, theory
from tests.conftest import make_config, needs_extra
from tests.conftest import saved_tensors as weights
from tests.distributed import distributed
from tests.test_training import plain_loop, with_data

# 3 and 4 do not divide the rows; of the keys' four, the last of three ranks has none
MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2, "ffn_dim": 76}
OPTIM = {"name": "muon", "lr": 3e-3, "muon_lr": 6e-3, "warmup_steps": 2}
MESHES = {  # by the number of ranks
    1: {"alone": {}},
    2: {
        "dp 2": {},
        "replicate 2": {"dp_replicate": 2, "dp_shard": 1},
        "tp 2": {"tp": 2},
        "cp 2": {"cp": 2},
    },
    3: {"dp 3": {}},
    4: {
        "dp 2 x tp 2": {"tp": 2},
        "replicate 2 x dp 2": {"dp_replicate": 2},
        "cp 2 x tp 2": {"cp": 2, "tp": 2},
        "replicate 2 x tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        "dp 2 x cp 2": {"cp": 2},
    },
}

# also with a momentum in bfloat16
ROUNDED = ("alone", "replicate 2", "tp 2", "dp 3", "replicate 2 x tp 2")


def sections(mesh: dict, **changes: dict) -> dict:
    return {
        "model": MODEL,
        "train": {"steps": 4, "global_batch_size": 12, "micro_batch_size": None},
        "optim": OPTIM,
        "parallel": mesh,
        **changes,
    }


def polynomial(s: torch.Tensor) -> torch.Tensor:
    """Of the singular values (..., n) of matrices: what Newton-Schulz makes of them."""
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


class PlainMuon:
    """https://kellerjordan.github.io/posts/muon/ with the scale and the decay of https://arxiv.org/abs/2502.16982, and
    AdamW, on full float64 tensors. Newton-Schulz is a polynomial of each singular value."""

    def __init__(self, model: torch.nn.Module, o):
        self.o, self.names = o, {p: name for name, p in model.named_parameters()}
        self.param_groups = [{"lr": o.lr}]
        self.state = {
            name: [torch.zeros_like(p, dtype=torch.float64)] * 2 for p, name in self.names.items()
        }
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        o = self.o
        self.steps += 1
        lr = self.param_groups[0]["lr"]
        for p, name in self.names.items():
            g = p.grad.double()
            w = p.double()
            m, v = self.state[name]
            if name.startswith("blocks") and p.ndim == 2:
                m = 0.95 * m + 0.05 * g
                u, s, vh = torch.linalg.svd(0.05 * g + 0.95 * m, full_matrices=False)
                change = (u * polynomial(s)) @ vh * 0.2 * math.sqrt(max(p.shape))
                of_this = lr * (o.muon_lr or o.lr) / o.lr
            else:
                m, v = (
                    o.betas[0] * m + (1 - o.betas[0]) * g,
                    o.betas[1] * v + (1 - o.betas[1]) * g * g,
                )
                change = (
                    m
                    / (1 - o.betas[0] ** self.steps)
                    / ((v / (1 - o.betas[1] ** self.steps)).sqrt() + o.eps)
                )
                of_this = lr
            self.state[name] = [m, v]
            p.copy_(w - of_this * (change + o.weight_decay * (p.ndim > 1) * w))

    def zero_grad(self) -> None:
        for p in self.names:
            p.grad = None


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    )


def off(ours, theirs) -> float:
    """Relative, in the norm."""
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def updates(every: dict[str, dict], steps: tuple[int, ...]) -> dict[tuple[str, int], dict]:
    """Full weights and state after so many updates by gradient(), by configuration; and what the last step sent."""
    found = {}
    with cases.process_group() as world:
        for case, given in every.items():
            cfg = make_config(**given)
            with forks.routed() if "routed" in case else contextlib.nullcontext():
                model = cases.build(cfg, cases.world_for(cfg, world))
            optimizer = build_optimizer(model, cfg.optim)
            for step in range(1, max(steps) + 1):
                set_learning_rate(optimizer, learning_rate(cfg.optim, 20, step))
                for name, p in named_parameters(model):
                    shape, offsets = shard_shape_and_offset(p)
                    p.grad = torch.zeros_like(p)
                    p.grad.to_local().copy_(
                        gradient(name, p.shape, step)[
                            tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape))
                        ]
                    )
                with cases.Collectives() as counted:
                    optimizer.step()
                if step in steps:
                    after = {}
                    for name, p in named_parameters(model):
                        for key, t in {"": p, **optimizer.state[p]}.items():
                            full = cases.whole(t.detach())
                            after[f"{name}{key}"] = full.float().clone().numpy()
                    after["sent"] = tuple(counted.found["all_to_all"])
                    found[case, step] = after
    return found if world.rank == 0 else {}


@pytest.fixture(scope="module")
def alone(on_ranks) -> dict:
    """Of one process with a momentum in bfloat16, after 20 updates."""
    given = sections({}, optim={**OPTIM, "state_dtype": "bfloat16"})
    return on_ranks(1, updates, {"": given}, (20,))[0]["", 20]


@pytest.fixture(scope="module")
def expected() -> dict:
    """PlainMuon's weights after 1 and 20 updates, of each block's router too."""
    cfg, found = make_config(**sections({})), {}
    from model.llama import Llama
    from parallel.materialize import materialize

    with forks.routed():
        model = Llama(cfg.model)
    materialize(model, 0, torch.device("cpu"))
    optimizer = PlainMuon(model, cfg.optim)
    for step in range(1, 21):
        optimizer.param_groups[0]["lr"] = learning_rate(cfg.optim, 20, step)
        for name, p in model.named_parameters():
            p.grad = gradient(name, p.shape, step)
        optimizer.step()
        found[step] = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_updates_equal_the_plain_algorithm(on_ranks, expected, alone, ranks):
    """One and twenty, to 1e-5; with a momentum in bfloat16 to 2 %, and the same bits on any mesh. What a step sends is
    what the theory says."""
    every = {name: sections(mesh) for name, mesh in MESHES[ranks].items()}
    rounded = {
        f"{name}, bfloat16": sections(mesh, optim={**OPTIM, "state_dtype": "bfloat16"})
        for name, mesh in MESHES[ranks].items()
        if name in ROUNDED
    }
    for name in {"tp 2", "dp 2 x tp 2"} & {*every}:  # a matrix that tp replicates
        every[f"{name}, routed"] = every[name]
    found = on_ranks(ranks, updates, {**every, **rounded}, (1, 20))[0]
    for (case, step), ours in found.items():
        for name, theirs in expected[step].items():
            if "router" in name and "routed" not in case:
                continue
            if case in every:
                assert off(ours[name], theirs) < 1e-5, (case, step, name)
            elif step == 20:
                assert off(ours[name], alone[name]) < 1e-5 and off(ours[name], theirs) < 0.02, (
                    case,
                    name,
                )
                assert np.array_equal(ours.get(f"{name}momentum"), alone.get(f"{name}momentum")), (
                    case,
                    name,
                )
        if "routed" not in case:
            cfg = make_config(**every[case.removesuffix(", bfloat16")], run={"device": "cpu"})
            assert (
                ours["sent"] == theory.collectives(cfg, meta_model(cfg.model), ranks)["all_to_all"]
            ), case


def test_newton_schulz_is_its_polynomial_of_the_singular_values():
    """Wide, tall and square, and a zero matrix; in bfloat16 to 2 %."""
    for shape in (24, 76), (76, 24), (46, 46):
        x = gradient("", torch.Size((3, *shape)), 0)
        u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
        wanted = u * polynomial(s)[:, None] @ vh
        exact, rounded = muon.newton_schulz(x), muon.newton_schulz(x.bfloat16()).double()
        assert off(exact, wanted) < 1e-5 and off(rounded, wanted) < 0.02
    assert not muon.newton_schulz(torch.zeros(1, 3, 4)).any()


def blocks_of(weights: list[nn.Parameter]) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in weights)
    for layer, weight in zip(layers, weights):
        layer.weight = weight
    return nn.ModuleDict({"blocks": layers})


def test_fifty_updates_are_those_of_torchs_muon():
    """To 0.001 of a weight: torch's orthogonalizes in bfloat16, as here on a GPU, where a change differs by 2 %."""
    o = make_config(optim={"name": "muon", "lr": 0.02}).optim
    parameters = [
        torch.nn.Parameter(gradient("", torch.Size(shape), 0))
        for shape in ((24, 76), (76, 24), (46, 46))
    ]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    ours = build_optimizer(blocks_of(parameters), o)
    torchs = torch.optim.Muon(
        theirs, 0.02, weight_decay=o.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(1, 51):
        for p, its in zip(parameters, theirs):
            p.grad = gradient("", p.shape, step)
            its.grad = p.grad.clone()
        ours.step()
        torchs.step()
        for p, its in zip(parameters, theirs):
            assert off(p.detach(), its.detach()) < 0.001, step


@pytest.mark.quick
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_matrix_without_a_gradient_stays_as_it_is(state_dtype):
    """Next to one of its shape that has one: neither decayed nor counted."""
    o = make_config(optim={"name": "muon", "state_dtype": state_dtype}).optim
    matrices = [nn.Parameter(torch.ones(6, 4)) for _ in range(3)]
    optimizer = build_optimizer(blocks_of(matrices), o)
    matrices[1].grad = gradient("", torch.Size((6, 4)), 0)
    optimizer.step()
    assert [bool((p == 1).all()) for p in matrices] == [True, False, True]
    assert [optimizer.state[p]["step"].item() for p in matrices] == [0, 1, 0]
    assert [bool(optimizer.state[p]["momentum"].any()) for p in matrices] == [False, True, False]


@pytest.mark.parametrize("ranks, replicas", [(8, 1), (8, 2), (64, 1), (64, 8), (512, 1), (512, 64)])
def test_owners_of_llama8b_have_equal_work(ranks, replicas):
    """To 10 % of the mean; on 512 ranks, more than matrices, the most is one matrix's, as in any such assignment."""
    dim = 4096
    kv = 1024
    ffn = 14336
    block = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn)]
    work = [muon.flop(shape) for shape in block * 32]
    assert (
        muon.flop((kv, dim))
        == muon.flop((dim, kv))
        == 5 * (2 * kv * dim * kv + 2 * kv**3 + 2 * kv * kv * dim)
    )
    loads = [0] * ranks
    for owner, its in zip(muon.owners(work, ranks, replicas), work):
        loads[owner] += its
    assert max(loads) == loads[0] and sum(loads) == sum(work)
    assert max(loads) <= max(1.1 * sum(work) / ranks, max(work))
    assert max(loads) <= 1.1 * sum(work) / ranks or ranks == 512
    of_replicas = [
        sum(loads[i : i + ranks // replicas]) for i in range(0, ranks, ranks // replicas)
    ]
    assert max(of_replicas) <= (1.1 if ranks < 512 else 1.3) * sum(work) / replicas


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
def test_a_fork_s_tables_and_gains_are_not_orthogonalized(world):
    """Of two dimensions, in a recomputed block; a router is a linear layer."""
    init = Block.__init__

    def with_matrices(block: Block, *args) -> None:
        init(block, *args)
        block.table = Embedding(320, 48)
        block.gain = nn.Parameter(torch.empty(4, 12))
        block.init = {"gain": constant(1.0)}

    cfg = make_config(
        optim={"name": "muon", "lr": 1e-3, "muon_lr": 4e-3}, parallel={"recompute": "full"}
    )
    with forks.routed(), mock.patch.object(Block, "__init__", with_matrices):
        model = cases.build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
    set_learning_rate(optimizer, 0.5)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in named_parameters(model):
        is_linear = name.startswith("blocks") and ("proj" in name or "router" in name)
        assert ("momentum" in optimizer.state[p]) == is_linear, name
        assert rates[p] == (2.0 if is_linear else 0.5), name


@needs_extra("huggingface", "lora")
@pytest.mark.parametrize(
    "changes, named",
    [
        (
            {"parallel": {"cpu_offload": True}},
            r'\[optim\] name = "muon": is incompatible with cpu_offload',
        ),
        (
            {"lora": {}, "model": {"init_from": "x"}},
            r'\[optim\] name = "muon": is incompatible with .*\[lora\]',
        ),
        (
            {"optim": {"name": "adamw", "muon_lr": 1e-3}},
            r'\[optim\] muon_lr = 0.001: requires name = "muon"',
        ),
    ],
)
def test_what_it_does_not_work_with_is_refused_by_name(changes, named, monkeypatch):
    monkeypatch.setattr("extras.huggingface.config.fill_in", lambda *arguments: None)
    with pytest.raises(ConfigError, match=named):
        make_config(**{"optim": {"name": "muon"}, **changes})


def test_a_run_resumes_on_any_mesh_and_from_no_other_optimizer(
    on_ranks, corpus, prepared, tmp_path
):
    """From dp 2 x tp 2, or dp 2 with a momentum in bfloat16: losses of a run without a break; on the same mesh
    bitwise."""
    data = with_data(
        sections({}, optim={**OPTIM, "schedule_steps": 6}, checkpoint={}), corpus, {320: prepared}
    )
    cfg = make_config(**{**data, "train": {**data["train"], "steps": 6}})
    wanted = [
        row["loss"]
        for row in plain_loop(cfg, optimizer_of=lambda model: PlainMuon(model, cfg.optim))
    ]
    rounded = {**data, "optim": {**data["optim"], "state_dtype": "bfloat16"}}

    def train(ranks: int, folder: str, steps: int, mesh: dict, data: dict = data) -> list[float]:
        rows = on_ranks(
            ranks, cases.train_to, steps, {**data, "parallel": mesh}, str(tmp_path / folder)
        )[0]
        return [row["loss"] for row in rows]

    train(4, "first", 3, {"tp": 2})
    for folder, ranks, mesh in (
        ("alone", 1, {}),
        ("replicas", 2, {"dp_replicate": 2, "dp_shard": 1}),
    ):
        shutil.copytree(tmp_path / "first", tmp_path / folder)
        assert train(ranks, folder, 6, mesh) == pytest.approx(wanted, rel=1e-5), folder
    train(2, "cut", 3, {}, rounded)
    assert train(2, "cut", 6, {}, rounded) == train(2, "straight", 6, {}, rounded)
    cut, straight = (weights(tmp_path / folder / "r", 6) for folder in ("cut", "straight"))
    assert cut.keys() == straight.keys() and all(
        torch.equal(cut[name], straight[name]) for name in cut
    )
    assert {name.rpartition(".")[2] for name in cut} == {
        "weight",
        "step",
        "momentum",
        "exp_avg",
        "exp_avg_sq",
    }
    model, saved = meta_model(cfg.model), tmp_path / "alone/r/checkpoints/step-00000006"
    with pytest.raises(ConfigError, match="has no optim.*exp_avg"):
        check_tensors(Reader(saved), model, build_optimizer(model, make_config().optim))
