"""What the compiled block of Llama 3.2 1B keeps and computes again, against sums by hand."""

import contextlib
import io
import json
import re

import pytest
import torch

import config
from benchmarks import counted_step
from tests.conftest import REPO
from tests.test_repo import documented
from tools.planner.simulate import simulate

BFLOAT16 = "--parallel.param_dtype=bfloat16"  # as the ranks resolve "auto"
TOKENS = 1024
DIM = 2048
HEADS = 32
KEYS = 512
FFN = 8192
Q = O = 2 * TOKENS * DIM * DIM  # FLOPs of the products
K, UP = 2 * TOKENS * DIM * KEYS, 2 * TOKENS * DIM * FFN
ATTENTION = 2 * (DIM + 2 * HEADS)  # its output; logsumexp in float32
# kept bytes a token: the input and what the setting names
ELEMENTWISE = 2 * DIM + 2 * (DIM + 2 * KEYS) + ATTENTION + 2 * DIM + 2 * 2 * FFN
ELEMENTWISE += 2 * 4  # both norms' statistic, in float32
SELECTIVE = 2 * DIM + 2 * (DIM + KEYS) + ATTENTION + 2 * FFN


@pytest.fixture(scope="module")
def printed() -> dict:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = counted_step.main(
            [*documented("benchmarks.counted_step"), f"--tokens={TOKENS}", "--json"]
        )
    assert code == 0, errors.getvalue()
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def counted(printed) -> dict:
    return {(row["recompute"], row["document_mask"]): row for row in printed["blocks"]}


@pytest.mark.parametrize(
    "setting, documents, backward, kept, again",
    [
        ("elementwise", False, 14, ELEMENTWISE, 0),
        ("elementwise", True, 14, ELEMENTWISE, 0),
        ("selective", False, 17, SELECTIVE, K + O + UP),
        ("full", False, 20, 2 * DIM, Q + 2 * K + O + 2 * UP + TOKENS * 2 * TOKENS * DIM),
    ],
)
def test_products_and_bytes_of_the_1b_block(counted, setting, documents, backward, kept, again):
    row = counted[setting, documents]
    assert (row["products_forward"], row["products_backward"]) == (7, backward)
    assert row["kept_bytes_per_token"] == kept
    assert row["recomputed_flops_per_token"] == again / TOKENS


def test_elementwise_keeps_two_thirds_of_everything(counted):
    none, elementwise = counted["none", False], counted["elementwise", False]
    assert (none["products_forward"], none["products_backward"]) == (7, 14)
    assert none["recomputed_flops_per_token"] == 0
    assert elementwise["kept_bytes_per_token"] <= 0.685 * none["kept_bytes_per_token"]


def test_says_what_inductor_lacks_or_counts_its_kernels(printed):
    out = counted_step.show(printed)
    assert len(re.findall("^ *llama1b ", out, re.MULTILINE)) >= 8
    if torch.version.cuda is None:
        assert (
            f"needs torch's CUDA build (as pip installs torch on Linux x86), this is {torch.__version__}"
            in out
        )
    else:
        assert "loss, 2048 tokens" in out


def test_the_loss_is_traced_also_where_its_kernels_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(
        counted_step, "count_kernels", lambda graph: {"operators": len(graph.graph.nodes)}
    )
    found = {row["function"]: row["operators"] for row in counted_step.count_loss(vocabulary=512)}
    assert set(found) == {"loss_and_gradient"} and min(found.values()) > 5


@pytest.mark.parametrize("setting", ["none", "elementwise", "selective", "full"])
def test_the_plan_keeps_what_is_counted(counted, setting):
    """Of compiled blocks; in the plan they run eagerly."""
    assert of_plan("llama1b", setting) == pytest.approx(
        counted[setting, False]["kept_bytes_per_token"], rel=0.001
    )


@pytest.mark.parametrize("model", ["llama3b", "llama8b"])
def test_so_it_does_of_larger_models(model):
    m = config.load(REPO / f"configs/{model}.toml", ["--run.device=auto"]).model
    kept = counted_step.count_block(m, TOKENS, "none", False)["kept_bytes_per_token"]
    assert of_plan(model, "none") == pytest.approx(kept, rel=0.001)


def test_the_plan_keeps_the_keys_and_values_that_cp_has_gathered():
    """Compiled, without activation checkpointing, backward does not gather them again."""

    def kept(cp: int) -> int:
        cfg = config.load(
            REPO / "configs/llama1b.toml",
            [
                "--parallel.recompute=none",
                BFLOAT16,
                f"--train.seq_len={1024 * cp}",
                f"--parallel.cp={cp}",
                "--train.global_batch_size=1",
                "--train.micro_batch_size=1",
            ],
        )
        ends = {phase.name: phase.end["activations"] for phase in simulate(cfg, cp).phases}
        return ends["forward block 2"] - ends["forward block 1"]

    for cp in 2, 4:
        # K and V, tokens, heads, width, bytes
        assert kept(cp) - kept(1) == 2 * 1024 * cp * 8 * 64 * 2


def of_plan(model: str, setting: str, *overrides: str) -> float:
    """Bytes that a block keeps of a token."""
    cfg = config.load(
        REPO / f"configs/{model}.toml", [f"--parallel.recompute={setting}", BFLOAT16, *overrides]
    )
    ends = {phase.name: phase.end["activations"] for phase in simulate(cfg, 8).phases}
    return (
        (ends["forward block 2"] - ends["forward block 1"])
        / cfg.train.seq_len
        / config.micro_batch_size(cfg.train, 8)
    )
