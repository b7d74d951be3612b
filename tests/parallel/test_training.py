"""Training on any mesh with any option equals the plain loop of tests/reference.py: losses, norms, final weights."""

import contextlib
import json
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import config
from data.loader import Batch, inputs_and_targets
from model.llama import Llama, named_parameters
from optim import Progress, UpdateGuard, build_optimizer
from parallel.context import shard_sequences
from parallel.fsdp import reshard, unshard_first_units
from parallel.mesh import World, fsdp_mesh
from parallel.verify import verify_sharding
from tests import forks
from tests.conftest import (
    build,
    compiled_by,
    gradients_of,
    hashes,
    is_near,
    make_config,
    mesh_for,
    token_ids,
)
from tests.distributed import distributed
from tests.reference import Trained, fresh_model, plain_loop, trainer_steps
from train import training_step

# 2 and 4 divide neither 46 nor 38, the rows of a tp rank's feed-forward
MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 4, "head_dim": 6, "ffn_dim": 76, "vocab_size": 324}
# The norm is above the limit. AdamW divides a gradient's size out again, unless it is small against eps.
TRAIN = {"steps": 3, "seq_len": 16, "micro_batch_size": 1, "max_grad_norm": 0.3}
DOCUMENTS = {"data": {"document_mask": True}}
GROUPED = {"model": {"n_kv_heads": 2, "qk_norm": True}}
TIED = {"model": {"tie_embeddings": True}}
HALF = {"param_dtype": "bfloat16"}


def mesh(**parallel: object) -> dict:
    return {"parallel": parallel}


RUNS = {  # by the number of ranks
    1: [mesh(), {**GROUPED, **mesh(recompute="selective")}, {**TIED, **mesh(recompute=2)}],
    2: [
        mesh(recompute="full"),
        mesh(dp_replicate=2, sync_every_micro_batch=False),
        mesh(reshard_after_forward=False, recompute="elementwise"),
        mesh(sync_every_micro_batch=False, cpu_offload=True),
        {**TIED, **mesh(prefetch_forward=2)},
        {**GROUPED, **mesh(tp=2, recompute="selective")},
        {**TIED, **mesh(tp=2, compile=True)},
        {**DOCUMENTS, **mesh(cp=2, recompute="full")},
        mesh(cp=2, compile=True),
        {"model": {"freeze": ["embedding*", "*0*q_proj*"]}, **mesh(replicated=["*0*q_proj*"])},
        mesh(**HALF, keep_fp32=["blocks.0"]),
        mesh(**HALF, reduce_dtype="bfloat16", tp=2),
        mesh(**HALF, cp=2),
    ],
    4: [
        mesh(prefetch_forward=0, prefetch_backward=0),
        mesh(dp_replicate=2, reshard_after_forward=False),
        mesh(dp_replicate="auto", dp_shard=1),
        mesh(tp=4),
        {**DOCUMENTS, **mesh(cp=4)},
        {**DOCUMENTS, **mesh(cp=2)},
        {**TIED, **mesh(tp=2, sync_every_micro_batch=False)},
        {**GROUPED, **mesh(cp=2, tp=2, recompute="selective")},
        {**TIED, **mesh(dp_replicate=2, dp_shard=1, tp=2)},
        mesh(dp_replicate=2, dp_shard=1, cp=2),
        # some ranks have no row of any tensor
        {"model": dict(dim=2, n_heads=1, n_kv_heads=1, head_dim=2, ffn_dim=3, vocab_size=3)},
    ],
    8: [{**DOCUMENTS, **mesh(cp=2, tp=2)}],
}


def config_of(sections: dict) -> config.Config:
    model = {**MODEL, **sections.get("model", {})}
    sections = {"optim": {"lr": 3e-3, "warmup_steps": 2, "eps": 1e-2}, **sections}
    return make_config(**{**sections, "model": model, "train": TRAIN})


def without_kernels() -> contextlib.AbstractContextManager:
    """torch.compile traces and partitions, but generates no code: that would take half a minute."""
    torch._dynamo.reset()  # another model is not another shape of the one before
    return compiled_by("aot_eager_decomp_partition")


def key_of(sections: dict) -> str:
    return json.dumps({**sections, "parallel": None}, sort_keys=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, Trained]:
    runs = {}
    for cases in RUNS.values():
        for sections in cases:
            if key_of(sections) not in runs:
                alone = {**sections, "parallel": {}}
                runs[key_of(sections)] = plain_loop(config_of(alone))
    return runs


@pytest.mark.parametrize("ranks", RUNS)
@distributed()
def test_training_equals_the_plain_loop(world, ranks, expected):
    for sections in RUNS[ranks]:
        cfg = config_of(sections)
        theirs = expected[key_of(sections)]
        with without_kernels():
            ours = trainer_steps(cfg, mesh_for(cfg, world))
        if cfg.parallel.param_dtype == "bfloat16":
            assert ours.losses == pytest.approx(theirs.losses, rel=2**-8), sections
            assert ours.losses != pytest.approx(theirs.losses, rel=1e-6), sections
            continue
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5), sections
        assert ours.norms == pytest.approx(theirs.norms, rel=2e-5), sections
        assert min(theirs.norms) > TRAIN["max_grad_norm"] or cfg.model.dim == 2
        for name, weight in theirs.weights.items():
            assert name not in ours.weights or is_near(ours.weights[name], weight), (sections, name)


GATHERED_ONCE = {  # by the number of ranks
    2: [mesh(), mesh(**HALF, prefetch_forward=2, cpu_offload=True)],
    4: [mesh(dp_replicate=2), mesh(tp=2), mesh(cp=2, prefetch_forward=0)],
}


@pytest.mark.parametrize("ranks", GATHERED_ONCE)
@pytest.mark.parametrize(
    "model", [{"tie_embeddings": True}, {"freeze": ["embedding*", "blocks.0.*"]}], ids=str
)
@distributed()
def test_gathering_once_a_step_changes_no_bit(world, ranks, model):
    """Four micro-batches a step, an evaluation between steps, which begin and end with sharded weights."""
    for sections in GATHERED_ONCE[ranks]:
        found = []
        for once in (False, True):
            parallel = {**sections["parallel"], "gather_once": once}
            data_ranks = ranks // (parallel.get("tp", 1) * parallel.get("cp", 1))
            cfg = make_config(
                model={"n_layers": 3, "n_heads": 8, "head_dim": 6, **model},
                train={**TRAIN, "global_batch_size": 4 * data_ranks},
                parallel=parallel,
            )
            found.append(bits_of_training(cfg, mesh_for(cfg, world)))
        assert found[0] == found[1], sections


def bits_of_training(cfg: config.Config, world: World) -> tuple[list[float], dict, dict]:
    """(losses and norms, hashes of the weights, hashes of the optimizer's states)."""
    model = build(cfg, world)
    optimizer = build_optimizer(model, cfg.optim)
    guard = UpdateGuard(optimizer, world.device, 0, Progress())
    figures = []
    for step in range(1, cfg.train.steps + 1):
        ids = token_ids(cfg.train.global_batch_size, cfg.train.seq_len + 1, seed=step)
        micro_batches = []
        for own in ids[world.dp_rank :: world.dp_size].split(1):
            tensors = inputs_and_targets(own)
            micro_batches.append(shard_sequences(tensors, world) if world.cp > 1 else tensors)
        assert len(micro_batches) == 4
        unshard_first_units(model, cfg.parallel)
        batch = Batch(micro_batches, cfg.train.global_batch_size * cfg.train.seq_len, 0)
        sums, scalars = training_step(model, optimizer, guard, batch, step, cfg, world)
        figures += [sums["loss"].item(), scalars["grad_norm"].item()]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        with torch.no_grad():
            model(*micro_batches[0])
        reshard(model)
    states = {}
    for name, parameter in named_parameters(model):
        for key, state in optimizer.state.get(parameter, {}).items():
            states[f"{name} {key}"] = state
    return figures, hashes(dict(named_parameters(model))), hashes(states)


@pytest.mark.nightly  # kernels take minutes to compile
@pytest.mark.parametrize("ranks", [1, 2])
@distributed()
def test_weights_of_two_compiled_halves_are_those_of_the_whole_block(world, ranks):
    """In float32 to the bit, by Inductor's own kernels."""
    cfg = config_of(mesh(compile=True))
    torch._dynamo.reset()
    halves = trainer_steps(cfg, mesh_for(cfg, world))
    torch._dynamo.reset()
    with forks.whole_block():
        whole = trainer_steps(cfg, mesh_for(cfg, world))
    assert hashes(halves.weights) == hashes(whole.weights)


@pytest.mark.parametrize(
    "fork, ranks, meshes",
    [
        (forks.with_parameters, 2, [mesh(), mesh(recompute="selective"), mesh(tp=2)]),
        (forks.with_parameters, 4, [mesh(), mesh(tp=2), mesh(dp_replicate=2)]),
        (forks.routed, 1, [mesh(compile=True, recompute="elementwise")]),
        (forks.routed, 2, [mesh(tp=2, recompute="full"), mesh(cp=2)]),
        (forks.routed, 4, [mesh(dp_replicate=2, sync_every_micro_batch=False)]),
        (forks.routed, 4, [mesh(tp=2, recompute="selective"), mesh(cp=2, tp=2, recompute=2)]),
    ],
)
@distributed()
def test_fork_trains_as_in_the_plain_loop(world, fork, ranks, meshes):
    """A gate, a layer scale, a bias, a sink per head and a buffer; terms of the loss."""
    with fork(), without_kernels():
        theirs = plain_loop(config_of({}))
        for sections in meshes:
            cfg = config_of(sections)
            ours = trainer_steps(cfg, mesh_for(cfg, world))
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-5), sections
            assert ours.norms == pytest.approx(theirs.norms, rel=2e-5), sections
            for our_terms, their_terms in zip(ours.terms, theirs.terms, strict=True):
                assert our_terms == pytest.approx(their_terms, rel=1e-5), sections
            for name, weight in theirs.weights.items():
                assert is_near(ours.weights[name], weight), (sections, name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@distributed()
def test_fresh_weights_do_not_depend_on_the_mesh(world, ranks, tied):
    """Rows of 331 and 48 split unevenly over 3 and 4 ranks, columns over tp."""
    model = {"vocab_size": 332, "n_kv_heads": 4, "tie_embeddings": tied}
    meshes = [{}, {"dp_replicate": ranks}]
    if ranks == 4:
        meshes += [{"tp": 4}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}]
    train = {"global_batch_size": 12, "micro_batch_size": 1}
    wanted = hashes(dict(named_parameters(fresh_model(make_config(model=model)))))
    assert len(set(wanted.values())) == len(wanted) - 4  # norms are all ones
    for parallel in meshes:
        cfg = make_config(model=model, train=train, parallel=parallel)
        assert hashes(dict(named_parameters(build(cfg, mesh_for(cfg, world))))) == wanted, parallel


MESHES = {  # (dp_replicate, dp_shard, cp, tp): the dimensions that FSDP2 sees
    (1, 4, 1, 1): {"dp_shard": 4},
    (2, 2, 1, 1): {"dp_replicate": 2, "dp_shard": 2},
    (1, 2, 2, 1): {"dp_shard_cp": 4},
    (2, 1, 2, 1): {"dp_replicate": 2, "dp_shard_cp": 2},
    (1, 2, 1, 2): {"dp_shard": 2},
    (1, 1, 2, 2): {"dp_shard_cp": 2},
}


@distributed(ranks=4)
def test_ranks_of_cp_and_tp_share_a_data_rank(world):
    for degrees, dims in MESHES.items():
        replicate, shard, cp, tp = degrees
        parallel = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
        ours = mesh_for(make_config(parallel=parallel), world)
        assert (ours.dp_replicate, ours.dp_shard, ours.cp, ours.tp) == degrees
        assert (ours.dp_rank, ours.dp_size) == (world.rank // (cp * tp), replicate * shard)
        assert ours.fsdp_size == replicate * shard * cp
        sharding = fsdp_mesh(ours)
        assert dict(zip(sharding.mesh_dim_names or (), sharding.shape)) == dims


@distributed(ranks=8, fake=True)
def test_meshes_of_three_dimensions_shard_every_parameter(world):
    """tp and cp together are trained above."""
    for degrees in ({"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2}):
        cfg = make_config(parallel=degrees)
        ours = mesh_for(cfg, world)
        assert verify_sharding(build(cfg, ours), cfg.parallel, ours), degrees


@distributed(ranks=2)
def test_replicated_parameters_compute_what_sharded_ones_do(world):
    """Bit for bit: a whole unit, single matrices, a tied one."""
    patterns = ["embedding*", "blocks.0.*", "blocks.1.*q_proj*"]
    for tied in (False, True):
        model = {"freeze": ["embedding*", "blocks.0.*", "*q_proj*"], "tie_embeddings": tied}
        for options in ({}, HALF, {**HALF, "keep_fp32": ["blocks.0"], "recompute": "selective"}):
            found = []
            for replicated in ([], patterns):
                cfg = make_config(model=model, parallel={**options, "replicated": replicated})
                llama = build(cfg, world)
                ids = token_ids(2, 17, seed=world.rank)
                loss = llama(ids[:, :-1], ids[:, 1:])[0]["loss"]
                loss.backward()
                found.append((loss.item(), hashes(gradients_of(llama))))
            assert found[0] == found[1], options


@pytest.mark.quick
@distributed(ranks=2)
def test_step_with_a_nan_on_one_rank_changes_no_weight(world):
    cfg = make_config()
    model = build(cfg, world)
    optimizer = build_optimizer(model, cfg.optim)
    before = hashes(dict(named_parameters(model)))
    ids = token_ids(2, 17)
    batch = Batch([(ids[:, :-1], ids[:, 1:])], 64, 0)
    progress = Progress()
    guard = UpdateGuard(optimizer, world.device, 1, progress)
    if world.rank == 1:
        forward = Llama.forward

        def not_a_number(*arguments: Any) -> tuple:
            sums, count = forward(*arguments)
            assert isinstance(sums, dict)
            return {"loss": sums["loss"] * torch.nan}, count

        mock.patch.object(Llama, "forward", not_a_number).start()
    training_step(model, optimizer, guard, batch, 1, cfg, world)
    guard.check()
    assert (progress.skipped_steps, progress.skipped_in_a_row) == (1, 1)
    assert hashes(dict(named_parameters(model))) == before
