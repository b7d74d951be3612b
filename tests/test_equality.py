"""Every strategy x {2, 4} ranks x {reduced each micro-batch, deferred} x {recompute}: three steps against a plain loop
that knows nothing of ranks, micro-batches, sharding or the project's loss. Losses, gradient norms and final weights."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from model.llama import Llama
from optim import learning_rate
from parallel.materialize import materialize
from tests import cases
from tests.conftest import make_config

pytestmark = [pytest.mark.early, pytest.mark.slow]

STRATEGIES = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "HYBRID_SHARD": {"dp_replicate": 2},
    "HYBRID_SHARD_ZERO2": {"dp_replicate": 2, "reshard_after_forward": False},
    "NO_SHARD": {"dp_replicate": "auto", "dp_shard": 1},
}
NEEDS_FOUR = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# 4 divides none of them
MODEL = {"dim": 46, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 323}
STEPS = 3
# The gradient's norm is above the limit; AdamW divides a gradient's size out again, but for one small against its eps.
LIMIT, EPS = 0.3, 1e-2


def sections(strategy: str, synchronized: bool, recompute: str, dtype: str = "float32") -> dict:
    train = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 1, "max_grad_norm": LIMIT}
    return {
        "model": MODEL,
        "train": train,
        "optim": {"lr": 3e-3, "warmup_steps": 2, "eps": EPS},
        "parallel": {
            **STRATEGIES[strategy],
            "sync_every_micro_batch": synchronized,
            "recompute": recompute,
            "param_dtype": dtype,
        },
    }


MATRIX = [
    (*key, "float32") for key in itertools.product(STRATEGIES, (True, False), ("none", "full"))
]
MATRIX += [(strategy, True, "none", "bfloat16") for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def expected():
    """The plain loop: whole batches, torch's cross entropy and AdamW."""
    cfg = make_config(**sections("FULL_SHARD", True, "none"))
    m, o = cfg.model, cfg.optim
    model = Llama(m)
    materialize(model, cfg.run.seed, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=o.betas,
        eps=o.eps,
        foreach=False,
    )
    losses, norms = [], []
    for step, ids in enumerate(cases.batches(m.vocab_size, STEPS), 1):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, STEPS, step)
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > LIMIT
    return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(on_ranks):
    found = {}
    for ranks in (2, 4):
        keys = [
            key
            for key in MATRIX
            if ranks == 4 or (key[0] not in NEEDS_FOUR and key[1] == (key[2] == "none"))
        ]
        rows = on_ranks(ranks, cases.train_steps, [sections(*key) for key in keys])[0]
        found |= {(ranks, *key): row for key, row in zip(keys, rows)}
    return found


def worst_weight(found: dict, wanted: dict) -> float:
    """Largest relative difference of any tensor, |ours - theirs| / |theirs| in the Euclidean norm. (Of single elements
    it would be Adam's: where a gradient is all but zero, its last bits decide the direction of a full step.)"""
    assert found.keys() == wanted.keys()
    return max(
        float(((found[name] - wanted[name]) ** 2).sum() ** 0.5 / (wanted[name] ** 2).sum() ** 0.5)
        for name in wanted
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_equals_the_plain_loop(trained, expected, ranks, strategy):
    losses, norms, weights = expected
    chosen = {
        key: row
        for key, row in trained.items()
        if key[:2] == (ranks, strategy) and key[-1] == "float32"
    }
    assert len(chosen) == (4 if ranks == 4 else 0 if strategy in NEEDS_FOUR else 2)
    for key, (our_losses, our_norms, our_weights) in chosen.items():
        assert our_losses == pytest.approx(losses, rel=1e-5), key
        assert our_norms == pytest.approx(norms, rel=1e-5), key
        assert worst_weight(our_weights, weights) < 1e-5, key


def test_bfloat16_stays_near(trained, expected):
    """bfloat16 has 8 significant bits: each loss within 2**-8 of float32's, weights (float32 between steps, moved by at
    most the learning rate a step) within three steps' worth."""
    losses, _, weights = expected
    chosen = {key: row for key, row in trained.items() if key[-1] == "bfloat16"}
    assert len(chosen) == 8
    for key, (our_losses, _, our_weights) in chosen.items():
        assert our_losses == pytest.approx(losses, rel=2**-8), key
        assert our_losses != losses
        difference = max(abs(our_weights[name] - weights[name]).max() for name in weights)
        assert difference < STEPS * 2 * 3e-3, key


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (2, [{}, {"param_dtype": "bfloat16", "prefetch_forward": 2, "cpu_offload": True}]),
        (4, [{"dp_replicate": 2}, {"tp": 2}, {"cp": 2, "prefetch_forward": 0}]),
    ],
)
def test_gathering_once_a_step_changes_no_bit_of_weights_and_optimizer_states(
    on_ranks, ranks, chosen
):
    """Four micro-batches a step; the first blocks are frozen or the embeddings tied; with and without an evaluation
    between. Weights are sharded between steps."""
    models = [{"tie_embeddings": True}, {"freeze": ["embedding.weight", "blocks.0.*"]}]
    cases_ = []
    for model, parallel in itertools.product(models, chosen):
        data_ranks = ranks // (parallel.get("tp", 1) * parallel.get("cp", 1))
        case = {
            "model": {"n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 6, **model},
            "train": {"steps": 4, "seq_len": 16, "micro_batch_size": 1},
            "parallel": parallel,
        }
        case["train"]["global_batch_size"] = 4 * data_ranks
        cases_ += [case, case | {"parallel": parallel | {"gather_once": True}}]
    found = on_ranks(ranks, cases.trained_digests, cases_)[0]
    for case, without, once in zip(cases_[1::2], found[::2], found[1::2]):
        assert once == without, case


def test_fewer_rows_than_ranks(on_ranks):
    """Three rows of vocabulary, two of width, on four ranks: some hold no row of any tensor."""
    case = sections("FULL_SHARD", True, "none")
    case["model"] = {
        "dim": 2,
        "n_heads": 1,
        "n_kv_heads": 1,
        "head_dim": 2,
        "ffn_dim": 3,
        "vocab_size": 3,
    }
    alone, four = (on_ranks(ranks, cases.train_steps, [case])[0][0] for ranks in (1, 4))
    assert four[0] == pytest.approx(alone[0], rel=1e-5) and four[1] == pytest.approx(
        alone[1], rel=1e-4
    )
    assert worst_weight(four[2], alone[2]) < 1e-5
