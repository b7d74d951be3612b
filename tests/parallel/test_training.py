"""Training on any mesh with any option equals the plain loop of tests/reference.py: losses, norms, final weights."""

import contextlib
import json

import pytest
import torch

import config
from model.llama import named_parameters
from parallel import materialize
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
    """Of four micro-batches a step."""
    model = {"n_layers": 3, "n_heads": 8, "head_dim": 6, **model}
    for sections in GATHERED_ONCE[ranks]:
        found = []
        for once in (False, True):
            parallel = {**sections["parallel"], "gather_once": once}
            data_ranks = ranks // (parallel.get("tp", 1) * parallel.get("cp", 1))
            train = {**TRAIN, "global_batch_size": 4 * data_ranks}
            cfg = make_config(model=model, train=train, parallel=parallel)
            steps = trainer_steps(cfg, mesh_for(cfg, world))
            found.append((steps.losses, steps.norms, hashes(steps.weights)))
        assert found[0] == found[1], sections


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


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@distributed()
def test_fresh_weights_do_not_depend_on_the_mesh(world, monkeypatch, ranks, tied):
    """Rows of 332 and 48 split unevenly over 3 and 4 ranks, columns over tp; ten rows are drawn with one seed, of the
    widest matrix one."""
    monkeypatch.setattr(materialize, "RNG_BLOCK", 480)
    model = {"vocab_size": 332, "n_kv_heads": 4, "ffn_dim": 512, "tie_embeddings": tied}
    meshes = [{}, {"dp_replicate": ranks}]
    if ranks == 4:
        meshes += [{"tp": 4}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}]
    train = {"global_batch_size": 12, "micro_batch_size": 1}
    plain = fresh_model(make_config(model=model))
    assert len(plain.embedding.weight.unique(dim=0)) == 332
    wanted = hashes(dict(named_parameters(plain)))
    assert len(set(wanted.values())) == len(wanted) - 4  # norms are all ones
    for parallel in meshes:
        cfg = make_config(model=model, train=train, parallel=parallel)
        assert hashes(dict(named_parameters(build(cfg, mesh_for(cfg, world))))) == wanted, parallel


@distributed(ranks=8, fake=True)
def test_meshes_of_three_dimensions_shard_every_parameter(world):
    """tp and cp together are trained above."""
    for degrees in ({"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2}):
        cfg = make_config(parallel=degrees)
        ours = mesh_for(cfg, world)
        assert verify_sharding(build(cfg, ours), cfg.parallel, ours), degrees


@pytest.mark.quick
@distributed(ranks=2)
def test_logits_of_tensor_parallel_ranks_are_those_of_one(world):
    cfg = make_config(parallel={"tp": 2})
    model = build(cfg, mesh_for(cfg, world))
    with torch.no_grad():
        logits = model(token_ids(2, 16))
        torch.testing.assert_close(logits, fresh_model(cfg)(token_ids(2, 16)))


@distributed(ranks=2)
def test_replicated_parameters_compute_what_sharded_ones_do(world):
    """Bit for bit: a whole unit, single matrices, a tied one."""
    freeze = ["embedding*", "blocks.0.*", "*q_proj*"]
    patterns = ["embedding*", "blocks.0.*", "blocks.1.*q_proj*"]
    ids = token_ids(2, 17, seed=world.rank)
    for tied in (False, True):
        for options in ({}, HALF, {**HALF, "keep_fp32": ["blocks.0"], "recompute": "selective"}):
            found = []
            for replicated in ([], patterns):
                parallel = {**options, "replicated": replicated}
                cfg = make_config(
                    model={"freeze": freeze, "tie_embeddings": tied}, parallel=parallel
                )
                llama = build(cfg, world)
                loss = llama(ids[:, :-1], ids[:, 1:])[0]["loss"]
                loss.backward()
                found.append((loss.item(), hashes(gradients_of(llama))))
            assert found[0] == found[1], options
