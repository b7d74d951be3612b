"""What a step sends, counted on torch's fake process group, equals what a hand can count."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from optim import clip_gradients
from parallel.fsdp import reshard, set_communication, unshard_first_units
from parallel.mesh import World
from tests.conftest import build, make_config, mesh_for, token_ids
from tests.distributed import distributed

KINDS = {"gather": "all_?gather", "scatter": "reduce_scatter", "reduce": "all_?reduce"}
TRAIN = {"global_batch_size": 8, "micro_batch_size": 1, "seq_len": 32}


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the larger of each one's buffers."""

    def __init__(self):
        super().__init__()
        self.counts = dict.fromkeys(KINDS, 0)
        self.bytes = dict.fromkeys(KINDS, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it sends comes back to us
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            for kind, pattern in KINDS.items():
                if re.search(pattern, function._schema.name):
                    tensors = torch.utils._pytree.tree_leaves([args, result])
                    self.counts[kind] += 1
                    self.bytes[kind] += max(
                        t.nbytes for t in tensors if isinstance(t, torch.Tensor)
                    )
        return result


def step_of(world: World, sections: dict) -> Collectives:
    """A step of 8 sequences, the second: FSDP2 learns its order in the first. An evaluation between changes nothing."""
    cfg = make_config(train=TRAIN, **sections)
    world = mesh_for(cfg, world)
    model = build(cfg, world)
    micro_batches = 8 // world.dp_size
    ids = token_ids(1, 32 // world.cp)
    for _ in range(2):
        with torch.no_grad():
            model(ids, ids)
        reshard(model)
        with Collectives() as counted:
            unshard_first_units(model, cfg.parallel)
            for number in range(1, micro_batches + 1):
                set_communication(model, cfg.parallel, world, number == micro_batches)
                model(ids, ids)[0]["loss"].backward()
            clip_gradients(model, torch.optim.SGD(model.parameters()), 1.0)
    return counted


# Elements of the units, of two blocks: 4 divides all rows
EMBEDDING = 320 * 48
HEAD = EMBEDDING + 48
BLOCK = 48 * (48 + 24 + 24 + 48 + 3 * 80) + 2 * 48
ALL = EMBEDDING + 2 * BLOCK + HEAD
X = 32 * 48  # a sequence's activations, over all tp ranks
FROZEN_FIRST = {"freeze": ["embedding*", "blocks.0.*"]}
FROZEN = {"freeze": ["embedding*", "blocks.1.*"]}
DEFERRED = {"sync_every_micro_batch": False}
HALF = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


@pytest.mark.quick
@pytest.mark.parametrize(
    "model, parallel, counts, gathered, scattered",
    [
        # two micro-batches of four units, of which backward gathers the blocks again, and keeps the
        # first for the second micro-batch; one norm
        ({}, {}, (11, 8, 1), 2 * ALL + 3 * BLOCK, 2 * ALL),
        # so is the embedding
        ({}, {"reshard_after_forward": False}, (6, 8, 1), 2 * ALL - EMBEDDING - BLOCK, 2 * ALL),
        ({}, {"gather_once": True}, (4, 8, 1), ALL, 2 * ALL),
        ({}, {"gather_once": True, **DEFERRED}, (4, 4, 1), ALL, ALL),
        ({}, DEFERRED, (11, 4, 1), 2 * ALL + 3 * BLOCK, ALL),
        ({}, {"prefetch_forward": 0}, (12, 8, 1), 2 * (ALL + 2 * BLOCK), 2 * ALL),
        ({}, {"recompute": "full"}, (11, 8, 1), 2 * ALL + 3 * BLOCK, 2 * ALL),
        ({}, {"dp_replicate": 2}, (11, 8, 9), 2 * ALL + 3 * BLOCK, 2 * ALL),
        ({}, {"dp_replicate": 2, **DEFERRED}, (11, 8, 5), 2 * ALL + 3 * BLOCK, 2 * ALL),
        ({}, {"dp_replicate": 4}, (0, 0, 8), 0, 0),
        # the mesh decides, not how it was named
        ({}, {"dp_replicate": "auto", **DEFERRED}, (11, 4, 1), 2 * ALL + 3 * BLOCK, ALL),
        ({"tie_embeddings": True}, {}, (8, 6, 1), HEAD + 7 * BLOCK, 2 * (HEAD + 2 * BLOCK)),
        (FROZEN_FIRST, {}, (10, 4, 1), 2 * (ALL + BLOCK), 2 * (BLOCK + HEAD)),
        (FROZEN, {"replicated": ["*.1.*"]}, (7, 4, 1), 2 * ALL - BLOCK, 2 * (BLOCK + HEAD)),
        # in bfloat16, of which a float32 unit counts twice; gradients are reduced in float32, or not
        ({}, {"param_dtype": "bfloat16"}, (11, 8, 1), ALL + 3 * BLOCK // 2, 2 * ALL),
        ({}, {**HALF, "keep_fp32": ["blocks.0"]}, (11, 8, 1), ALL + 3 * BLOCK, ALL + BLOCK),
    ],
    ids=str,
)
@distributed(ranks=4, fake=True)
def test_step_sends_what_a_hand_counts(world, model, parallel, counts, gathered, scattered):
    if parallel.get("dp_replicate") == "auto":
        parallel = {"dp_shard": 4, **parallel}
    counted = step_of(world, {"model": model, "parallel": parallel})
    assert counted.counts == dict(zip(("gather", "scatter", "reduce"), counts))
    assert (counted.bytes["gather"], counted.bytes["scatter"]) == (4 * gathered, 4 * scattered)


@pytest.mark.quick
@pytest.mark.parametrize(
    "recompute, gathers, scatters", [("none", 4, 4), ("selective", 6, 4), ("full", 6, 5)]
)
@distributed(ranks=4, fake=True)
def test_tensor_parallel_blocks_send_what_a_hand_counts(world, recompute, gathers, scatters):
    """Of each block in each of 8 micro-batches: 2 inputs, recomputed ones again, 2 gradients of outputs."""
    parallel = {"tp": 4, "dp_shard": 1, "recompute": recompute}
    counted = step_of(world, {"parallel": parallel, "model": {"n_kv_heads": 4}})
    # embedding's gradient, head's input, and the loss's three figures of one chunk
    assert counted.counts["gather"] == 8 * (2 * gathers + 5)
    assert counted.counts["scatter"] == 8 * (2 * scatters + 2)
    assert counted.bytes["gather"] == 8 * 4 * ((2 * gathers + 2) * X + 4 * 3 * 32)
    # of 2 norms a block and the head's, and of the norm of all
    assert counted.counts["reduce"] == 8 * 5 + 1


@pytest.mark.parametrize("recompute, gathers", [("none", 1), ("full", 2)])
@distributed(ranks=4, fake=True)
def test_context_parallel_blocks_send_keys_and_values(world, recompute, gathers):
    """Forward, recomputed again, and their gradients."""
    options = {"recompute": recompute, "prefetch_forward": 0}  # each micro-batch gathers alike
    counted = step_of(world, {"parallel": {"cp": 4, "dp_shard": 1, **options}})
    units = step_of(world, {"parallel": options})
    assert counted.counts["gather"] - 4 * units.counts["gather"] == 8 * 2 * gathers
    assert counted.counts["scatter"] - 4 * units.counts["scatter"] == 8 * 2
    keys_and_values = 4 * 8 * 2 * gathers * 32 * 2 * 24
    assert counted.bytes["gather"] - 4 * units.bytes["gather"] == keys_and_values
