"""What a fork's model draws at random in training: equal in every mode of recomputation, after a
resume, and for all ranks that hold parts of the same samples."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import config
import train
from optim import local_tensor
from parallel.random_numbers import seed_micro_batch, seed_update
from parallel.ranks import all_gather_objects
from tests import forks
from tests.conftest import gradients_of, make_config, mesh_for, token_ids, train_run
from tests.distributed import distributed
from tests.parallel.test_activation_checkpoint import built

FORKS = [forks.with_dropout, forks.with_noisy_gate]
# builds a compiled graph's forward and backward as always, without kernels
TRACED = "aot_eager_decomp_partition"


def gradients(mode: str | int, backend: str | None = None) -> dict[str, Tensor]:
    model = built(mode, backend)
    ids = token_ids(2, 33)
    torch.manual_seed(1)
    model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    return gradients_of(model)


@pytest.mark.parametrize("backend", [None, TRACED])
@pytest.mark.parametrize("fork", FORKS)
def test_recomputation_repeats_random_numbers(fork, backend):
    plain = gradients("none", backend)
    with fork():
        expected = gradients("none", backend)
        for mode in ("elementwise", "selective", "full", 2):
            found = gradients(mode, backend)
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient), (mode, name)
    assert not any(torch.equal(plain[name], expected[name]) for name in expected)


@torch.library.custom_op("tests::attention_with_dropout", mutates_args=())
def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return v * (torch.rand_like(v) > dropout_p)


SEEDED = (torch.Tag.nondeterministic_seeded,)


@torch.library.custom_op("tests::noisy_attention", mutates_args=(), tags=SEEDED)
def noisy_attention(q: Tensor, k: Tensor, v: Tensor, noise: float) -> Tensor:
    return v + noise * torch.rand_like(v)


@pytest.mark.quick
@pytest.mark.parametrize("operator", [attention_with_dropout, noisy_attention])
@pytest.mark.parametrize("mode", ["elementwise", "selective"])
def test_attention_that_draws_is_recomputed(monkeypatch, mode, operator):
    """Saved, it would draw nothing in recomputation, and the feed-forward's mask would be another."""
    operator.register_autograd(lambda ctx, grad: (0 * grad, 0 * grad, grad, None))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return operator(q, *(x.repeat_interleave(groups, dim=1) for x in (k, v)), 0.2)

    monkeypatch.setattr("model.llama.attention", attend)
    with forks.with_dropout():
        expected = gradients("none")
        found = gradients(mode)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(
    "parallel, same",  # ranks of the same number hold parts of the same samples
    [
        ({}, [0, 1, 2, 3]),
        ({"tp": 2}, [0, 0, 1, 1]),
        ({"cp": 2}, [0, 0, 1, 1]),
        ({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1]),
    ],
    ids=str,
)
@distributed(ranks=4)
def test_ranks_of_the_same_samples_draw_the_same_numbers(world, parallel, same):
    world = mesh_for(make_config(parallel=parallel), world)
    numbers = []
    for key in ((0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)):  # seed, step, micro-batch
        seed_micro_batch(*key, world)
        numbers.append(tuple(torch.rand(4).tolist()))
    assert len(set(numbers)) == 4
    by_rank = all_gather_objects(numbers)
    for ours, our_part in zip(by_rank, same):
        for theirs, their_part in zip(by_rank, same):
            assert (ours == theirs) == (our_part == their_part)


@pytest.mark.parametrize("fork", FORKS)
@distributed(ranks=2)
def test_resuming_on_another_mesh_repeats_random_numbers(world, write_config, fork):
    """With equally many data-parallel ranks. Evaluation in between changes nothing."""

    def train(name: str, steps: int, **sections: dict) -> list[dict]:
        path = write_config(f"{name}{world.rank}", run={"name": name}, checkpoint={}, **sections)
        cfg = config.load(str(path))
        train_section = dataclasses.replace(cfg.train, steps=steps)
        with fork():
            return train_run(dataclasses.replace(cfg, train=train_section), world)

    schedule = {"schedule_steps": 4}
    whole = train("whole", 4, optim=schedule)
    replicas = {"parallel": {"dp_replicate": 2}, "eval": {"every_steps": 1}}
    train("resumed", 2, optim=schedule, **replicas)
    resumed = train("resumed", 4, optim=schedule)
    assert len(whole) == 4
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in resumed] == pytest.approx([row[key] for row in whole], rel=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("is_drawn_by_rank", [False, True])
@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"tp": 2}], ids=str)
@distributed(ranks=2)
def test_noise_that_replicas_draw_apart_ends_the_run_at_a_save(
    world, prepared, corpus, tmp_path, is_drawn_by_rank, mesh
):
    cfg = make_config(
        data={"source": str(corpus), "path": str(prepared)},
        train={"steps": 2},
        parallel=mesh,
        checkpoint={"save_every_steps": 1},
        run={"output_dir": str(tmp_path)},
    )
    clip = train.clip_gradients

    def add_noise(model: torch.nn.Module, *args: Any) -> Tensor:
        if is_drawn_by_rank:
            torch.manual_seed(world.rank)
        for p in model.parameters():
            local_tensor(p.grad).add_(torch.randn_like(local_tensor(p.grad)), alpha=1e-2)
        return clip(model, *args)

    with mock.patch("train.clip_gradients", add_noise):
        if not is_drawn_by_rank:
            assert len(train_run(cfg, world)) == 2
            return
        # of tp, what it replicates: the norms
        name = "attention_norm.weight" if "tp" in mesh else "embedding.weight"
        with pytest.raises(RuntimeError, match=f"{name}: differs between replicas.*seed_update"):
            train_run(cfg, world)
    assert not [*tmp_path.glob("*/checkpoints/step-*")]


@distributed(ranks=2)
def test_each_update_draws_anew_and_equally_on_all_ranks(world):
    drawn = []
    for step in (1, 2, 1):
        seed_update(7, step, world)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    assert all_gather_objects(drawn) == [drawn] * 2
