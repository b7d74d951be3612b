"""What a fork's model draws at random in training: equal in every mode of recomputation, after a
resume, and for all ranks that hold parts of the same samples."""

import pytest
import torch
from torch import Tensor

from model.llama import Llama, named_parameters
from parallel.activation_checkpoint import apply_activation_checkpointing, leave_to_compiler
from parallel.materialize import materialize
from parallel.random_numbers import seed_micro_batch, seed_update
from tests import cases, forks
from tests.conftest import make_config
from tests.test_training import with_data

FORKS = ["with_dropout", "with_noisy_gate"]
# Builds a compiled graph's forward and backward as always, without kernels.
TRACED = "aot_eager_decomp_partition"


def gradients(recompute: str | int, backend: str | None) -> dict[str, Tensor]:
    """Every parameter's gradient after one step, of blocks compiled with `backend`."""
    torch.compiler.reset()
    model = Llama(make_config(model={"n_layers": 4}).model)
    materialize(model, 0, torch.device("cpu"))
    if backend:
        recompute = leave_to_compiler(recompute)
    apply_activation_checkpointing(model, recompute, compiled=backend is not None)
    if backend:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)
    ids = torch.randint(0, 320, (2, 33), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    return {name: parameter.grad for name, parameter in named_parameters(model)}


@pytest.mark.parametrize("backend", [None, TRACED])
@pytest.mark.parametrize("change", FORKS)
def test_recomputation_repeats_random_numbers(change, backend):
    plain = gradients("none", backend)
    with getattr(forks, change)():
        expected = gradients("none", backend)
        for recompute in ("elementwise", "selective", "full", 2):
            found = gradients(recompute, backend)
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient), (recompute, name)
    assert not any(torch.equal(plain[name], expected[name]) for name in expected)


@torch.library.custom_op("tests::attention_with_dropout", mutates_args=())
def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return v * (torch.rand_like(v) > dropout_p)


@torch.library.custom_op(
    "tests::noisy_attention", mutates_args=(), tags=torch.Tag.nondeterministic_seeded
)
def noisy_attention(q: Tensor, k: Tensor, v: Tensor, noise: float) -> Tensor:
    return v + noise * torch.rand_like(v)


for operator in (attention_with_dropout, noisy_attention):
    operator.register_autograd(
        lambda ctx, grad: (torch.zeros_like(grad), torch.zeros_like(grad), grad, None)
    )


@pytest.mark.parametrize("operator", [attention_with_dropout, noisy_attention])
@pytest.mark.parametrize("recompute", ["elementwise", "selective"])
def test_attention_that_draws_is_recomputed(recompute, operator, monkeypatch):
    """Saved, it would draw nothing in recomputation, and the feed-forward's mask would be another."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        return operator(q, k, v, 0.2)

    monkeypatch.setattr("model.llama.attention", attend)
    with forks.with_dropout():
        expected = gradients("none", None)
        found = gradients(recompute, None)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def numbers_of_meshes() -> list[dict[str, list[float]]]:
    """What this rank draws after seed_micro_batch(): by mesh, and by what else the seed depends on."""
    drawn = {}
    with cases.process_group() as world:
        for mesh in ({}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2, "tp": 2}):
            cfg = make_config(parallel=mesh)
            seed_micro_batch(0, 1, 1, cases.world_for(cfg, world))
            drawn[str(mesh)] = torch.rand(4).tolist()
        for key in ((1, 1, 1), (0, 2, 1), (0, 1, 2)):
            seed_micro_batch(*key, world)
            drawn[str(key)] = torch.rand(4).tolist()
        seed_update(0, 1, world)
        drawn["update"] = torch.rand(4).tolist()
    return drawn


def test_data_parallel_ranks_draw_different_numbers_and_tp_and_cp_ranks_equal_ones(on_ranks):
    by_rank = on_ranks(4, numbers_of_meshes)
    drawn = [[tuple(numbers) for numbers in rank.values()] for rank in by_rank]
    data, tp, cp, replicas, *others, update = zip(*drawn)
    assert len(set(data)) == 4
    assert tp == cp == replicas == (data[0], data[0], data[1], data[1])
    assert len({data[0], *(numbers[0] for numbers in others)}) == 4  # seed, step, micro-batch
    assert len(set(update)) == 1  # an optimizer that draws updates replicas alike


def train_to(steps: int, change: str, sections: dict, folder: str) -> list[dict]:
    """A fork's rows up to this step, of a run in the folder that resumes if it has begun."""
    with getattr(forks, change)():
        return cases.train_to(steps, sections, folder)


@pytest.mark.parametrize("change", FORKS)
def test_a_resume_on_another_mesh_repeats_random_numbers(
    on_ranks, corpus, prepared, tmp_path, change
):
    """With equally many data-parallel ranks. Evaluation in between changes nothing."""
    sections = with_data(
        {"checkpoint": {}, "train": {"micro_batch_size": 2}, "optim": {"schedule_steps": 4}},
        corpus,
        {320: prepared},
    )
    whole = on_ranks(2, train_to, 4, change, sections, str(tmp_path / "whole"))[0]
    folder = str(tmp_path / "resumed")
    replicas = {**sections, "parallel": {"dp_replicate": 2}, "eval": {"every_steps": 1}}
    on_ranks(2, train_to, 2, change, replicas, folder)
    rows = on_ranks(2, train_to, 4, change, sections, folder)[0]
    assert losses(rows) == pytest.approx(losses(whole), rel=1e-6)


def losses(rows: list[dict]) -> list[float]:
    return [row[key] for row in rows if row["kind"] == "train" for key in ("loss", "grad_norm")]
