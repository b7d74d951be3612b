"""What the compiled block of Llama 3 8B keeps and computes again, against sums by hand."""

import pytest
import torch

import config
from benchmarks import counted_step
from tests.conftest import REPO

TOKENS, DIM, HEADS, KEYS, FFN = 1024, 4096, 32, 1024, 14336
Q = O = 2 * TOKENS * DIM * DIM  # FLOPs of the products
K, UP = 2 * TOKENS * DIM * KEYS, 2 * TOKENS * DIM * FFN
ATTENTION = 2 * (DIM + 2 * HEADS)  # its output; logsumexp in float32
# kept bytes a token: the input and what the setting names
ELEMENTWISE = 2 * DIM + 2 * (DIM + 2 * KEYS) + ATTENTION + 2 * DIM + 2 * 2 * FFN
SELECTIVE = 2 * DIM + 2 * (DIM + KEYS) + ATTENTION + 2 * FFN


@pytest.fixture(scope="module")
def counted():
    m = config.load(REPO / "configs/llama8b.toml", ["--run.device=auto"]).model
    cases = [(setting, False) for setting in counted_step.SETTINGS] + [("elementwise", True)]
    return {case: counted_step.count_block(m, TOKENS, *case) for case in cases}


@pytest.mark.parametrize("setting, documents, backward, kept, again", [
    ("elementwise", False, 14, ELEMENTWISE, 0),
    ("elementwise", True, 14, ELEMENTWISE, 0),
    ("selective", False, 17, SELECTIVE, K + O + UP),
    ("full", False, 20, 2 * DIM, Q + 2 * K + O + 2 * UP + TOKENS * 2 * TOKENS * DIM),
])
def test_products_and_bytes_of_the_8b_block(counted, setting, documents, backward, kept, again):
    row = counted[setting, documents]
    assert (row["products_forward"], row["products_backward"]) == (7, backward)
    assert row["kept_bytes_per_token"] == kept
    assert row["recomputed_flops_per_token"] == again / TOKENS


def test_elementwise_keeps_two_thirds_of_everything(counted):
    none, elementwise = counted["none", False], counted["elementwise", False]
    assert (none["products_forward"], none["products_backward"]) == (7, 14)
    assert none["recomputed_flops_per_token"] == 0
    assert elementwise["kept_bytes_per_token"] <= 0.685 * none["kept_bytes_per_token"]


def test_says_what_inductor_lacks_or_counts_its_kernels(capsys, monkeypatch):
    monkeypatch.setattr(counted_step, "SETTINGS", ("none",))
    assert counted_step.main([str(REPO / "configs/smollm2-135m.toml"), "--tokens=256"]) == 0
    out = capsys.readouterr().out
    if torch.version.cuda is None:
        assert f"needs torch's CUDA build (as pip installs torch on Linux x86), this is {torch.__version__}" in out
    else:
        assert "loss, 2048 tokens" in out
