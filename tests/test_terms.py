"""Terms of the loss that a block makes: exact in the loss, the row and the weights on any mesh, in float32."""

import pytest
import torch
import torch.nn.functional as F

from config import ConfigError
from data.tokens import open_stream
from generate import Cache
from model.build import build_model
from model.llama import Llama, add_terms
from tests import cases, forks
from tests.conftest import make_config, rows
from tests.test_training import plain_loop, weights, with_data

MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "ffn_dim": 76}
ALONE = {"micro_batch_size": 1}
FULL = {"recompute": "full"}
EVERY = {"sync_every_micro_batch": False}
RUNS = {
    1: {
        "alone": {},
        "selective": {"parallel": {"recompute": "selective"}},
        "compiled": {"parallel": {"compile": True, "recompute": "elementwise"}},
        "bfloat16": {"parallel": {"param_dtype": "bfloat16"}},
    },
    2: {
        "dp 2": {"train": ALONE},
        "tp 2": {"parallel": {"tp": 2, **FULL}},
        "cp 2": {"parallel": {"cp": 2}},
        "bfloat16 tp 2": {
            "parallel": {"param_dtype": "bfloat16", "tp": 2, "keep_fp32": ["blocks.0"]}
        },
    },
    4: {
        "dp 4": {"parallel": {"reshard_after_forward": False}},
        "replicas": {"train": ALONE, "parallel": {"dp_replicate": 2, **EVERY}},
        "dp 2 x tp 2": {"parallel": {"tp": 2, "recompute": "selective"}},
        "cp 2 x tp 2": {"parallel": {"cp": 2, "tp": 2, "recompute": 2}},
    },
}


@pytest.fixture(scope="module")
def expected(corpus, prepared):
    """(the plain loop's rows, the loss on the first eight validation windows after it, its last weights)."""
    cfg, last = make_config(**with_data({"model": MODEL}, corpus, {320: prepared})), {}
    with forks.routed(), torch.no_grad():
        with torch.enable_grad():
            found = plain_loop(cfg, last)
        model = Llama(cfg.model)
        model.load_state_dict({name.removeprefix("model."): p for name, p in last.items()})
        ids = open_stream(prepared, "validation", 320).read(0, 8 * 32 + 1)[1]
        validation = F.cross_entropy(model(ids[:-1].view(8, 32)).flatten(0, 1), ids[1:]).item()
    assert {"loss", "balance", "router_z"} <= found[0].keys()
    return found, validation, last


@pytest.mark.parametrize("ranks", RUNS)
def test_terms_are_exact_on_any_mesh(on_ranks, corpus, prepared, expected, tmp_path, ranks):
    """Loss, each term, gradient norm, and the weights after four steps."""
    wanted, validation, last = expected
    shared = {"model": MODEL, "eval": {"batches": 1}, "checkpoint": {}}
    runs = {
        name: with_data({**run, **shared}, corpus, {320: prepared})
        for name, run in RUNS[ranks].items()
    }
    found = on_ranks(ranks, cases.train_forked, "routed", runs, str(tmp_path), timeout=400)[0]
    for name, ours in found.items():
        near = 2**-7 if "bfloat16" in name else 1e-5
        for key in ("loss", "balance", "router_z", "grad_norm")[: 3 if "bfloat16" in name else 4]:
            assert [row[key] for row in ours] == pytest.approx(
                [row[key] for row in wanted], rel=near
            ), (name, key)
        assert [row["batch_digest"] for row in ours] == [row["batch_digest"] for row in wanted]
        folder = tmp_path / str(ranks) / name.replace(" ", "-")
        # the validation loss is the cross entropy alone
        assert [row["loss"] for row in rows(folder, "eval")] == pytest.approx(
            [validation], rel=near
        )
        if "bfloat16" not in name:
            saved = weights(folder, 4)
            for key, tensor in last.items():
                assert (saved[key] - tensor).norm() < 1e-5 * tensor.norm(), (name, key)


def test_the_terms_are_in_the_gradients(corpus, prepared, expected):
    """Else the test above would say nothing of them."""
    plain = with_data({"model": MODEL}, corpus, {320: prepared})
    with forks.routed():
        model = build_model(make_config(**plain).model)
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        ids = torch.randint(0, 320, (2, 32))
        norms = {}
        for name in ("loss", "balance", "router_z"):
            losses, _ = model(ids, ids)
            losses[name].backward()
            norms[name] = model.blocks[0].feed_forward.router.weight.grad.norm().item()
            model.zero_grad()
    assert min(norms.values()) > 0 and len({*norms.values()}) == 3


def test_a_fork_with_terms_generates(corpus):
    with forks.routed():
        model = build_model(make_config(model=MODEL).model).eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        ids = torch.randint(0, 320, (1, 9))
        with torch.no_grad():
            whole, cache = model(ids), Cache([8], 9, 2, ids.device)
            model(ids[:, :8], cache=cache)
            assert torch.allclose(model(ids[:, 8:], cache=cache)[:, 0], whole[:, 8], atol=1e-5)


@pytest.mark.parametrize(
    "value, name",
    [
        (torch.zeros((), dtype=torch.bfloat16), "balance"),
        (torch.zeros(2), "balance"),
        (torch.zeros(()), "loss"),
    ],
)
def test_a_term_that_would_lose_precision_is_refused(value, name):
    with pytest.raises(ConfigError, match=rf"blocks.3 returns {name} of torch.*float32 scalar"):
        add_terms({}, {name: value}, "blocks.3")
