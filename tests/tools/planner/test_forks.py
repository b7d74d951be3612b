"""The plan of a fork: operators without formulas, masks, blocks that differ, shapes that depend on values."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

import config
from model import attention as llama_attention
from model import llama
from tests.conftest import refuses
from tests.tools.planner.steps import LONG, assert_equal, of_a_gpu, step_and_models
from tools.planner import masks, show
from tools.planner.counted import Counted
from tools.planner.devices import DEVICES
from tools.planner.plan import Asked, plan
from tools.planner.simulate import simulate

pytestmark = pytest.mark.early

ON_H100 = Asked(DEVICES["H100"])


def number_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves of a block know its number, as layer."""
    build = llama.Block.__init__

    def init(self, m, layer):
        build(self, m, layer)
        self.attention.layer = self.feed_forward.layer = layer

    monkeypatch.setattr(llama.Block, "__init__", init)


class Experts(nn.Module):
    """The best of E experts for each token, by grouped products of tokens that are sorted by expert."""

    def __init__(self, m: config.Model, out_std: float):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(4, m.dim, m.ffn_dim))
        self.up = nn.Parameter(torch.empty(4, m.dim, m.ffn_dim))
        self.down = nn.Parameter(torch.empty(4, m.ffn_dim, m.dim))
        self.router = llama.Linear(m.dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort()
        ends = F.one_hot(expert, 4).sum(0).cumsum(0, dtype=torch.int32)
        tokens = tokens[order]
        gate = F.silu(F.grouped_mm(tokens, self.gate, offs=ends))
        hidden = gate * F.grouped_mm(tokens, self.up, offs=ends)
        out = F.grouped_mm(hidden, self.down, offs=ends) * weight[order, None]
        return torch.empty_like(out).index_put((order,), out).view_as(x)


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"recompute": "full"}], ids=str)
def test_grouped_matmuls_are_counted(options, monkeypatch):
    """Whatever the tokens of each expert: together as one expert's of all tokens."""
    monkeypatch.setattr(llama, "FeedForward", Experts)
    cfg = of_a_gpu(parallel=options)
    m = cfg.model
    row = plan(cfg, 8)
    step = simulate(cfg, 8)
    router = 4 * m.dim
    projections = 2 * m.dim * (m.n_heads + m.n_kv_heads) * m.width_per_head
    block = projections + 3 * m.dim * m.ffn_dim + router
    matmuls = 6 * (m.n_layers * block + m.vocab_size * m.dim)
    attention = 6 * m.n_layers * m.dim * 256
    assert row["counted_flops_per_token"] == matmuls + attention and row["not_counted"] == []
    tokens = 256 * 16 / 8
    excess = sum(phase.work["matmuls"] * phase.times for phase in step.phases) / tokens - matmuls
    expected = 2 * m.n_layers * block if "recompute" in options else 0
    assert excess == pytest.approx(expected, abs=2 * m.n_layers * router)
    if not options:
        assert_equal(step, simulate(cfg, 8, all_blocks=True))


def test_flop_are_those_of_torchs_own_counter():
    """Of products in batches, of convolutions and their gradients, on real tensors; einsum is one of them."""

    def work() -> None:
        x = torch.randn(3, 8, 16, requires_grad=True)
        w = torch.randn(3, 16, 4, requires_grad=True)
        kernel = torch.randn(6, 4, 3, requires_grad=True)
        image = torch.randn(2, 8, 20, requires_grad=True)
        products = torch.bmm(x, w) + torch.baddbmm(torch.zeros(3, 8, 4), x, w)
        products = products + torch.einsum("bij,bjk->bik", x, w)
        (products.sum() + F.conv1d(image, kernel, groups=2).sum()).backward()

    with FlopCounterMode(display=False) as torchs:
        work()
    counted = Counted(FakeTensorMode(), {}, set(), 1)
    with counted.fake, counted:
        work()
    assert counted.phases[-1].work["matmuls"] == torchs.get_total_flops() > 0
    assert not counted.phases[-1].uncounted


def test_an_operator_without_a_formula_is_named(monkeypatch):
    """A fork's own, with a gradient. What it reads and writes is counted."""
    plain = plan(of_a_gpu(), 1, ON_H100)
    usual = llama.FeedForward.forward
    with torch.library._scoped_library("fork", "FRAGMENT"):
        gate = torch.library.custom_op(
            "fork::gate", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        gate.register_fake(torch.empty_like)
        gate.register_autograd(lambda context, gradient: gradient * 2)
        monkeypatch.setattr(llama.FeedForward, "forward", lambda self, x: gate(usual(self, x)))
        cfg = of_a_gpu()
        row = plan(cfg, 1, ON_H100)
    note = (
        "the FLOP of fork.gate: 160 calls a step; the time is too short, and speed and MFU too high"
    )
    assert row["not_counted"] == [note] and plain["not_counted"] == []
    assert re.search(f"^not counted +{note}$", show.table(row, cfg, ON_H100), re.M)
    assert row["step_seconds"] > plain["step_seconds"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "operator, named",
    [
        (lambda x: torch.linalg.qr(x), "aten.linalg_qr"),
        (lambda x: torch.fft.rfft(x), "aten._fft_r2c"),
        (lambda x: torch.mv(x, x[0]), "aten.mv"),
        (lambda x: x.exp().sum(), None),
        (lambda x: x.norm(), None),
        (lambda x: x.sort(), None),
    ],
)
def test_only_an_operator_that_computes_is_named(operator, named):
    counted = Counted(FakeTensorMode(), {}, set(), 1)
    with counted.fake, counted:
        operator(torch.empty(8, 8))
    assert [*counted.phases[-1].uncounted] == ([named] if named else [])


# Masks


def causal(b, h, q, k):
    return q >= k


def window(size: int) -> Callable:
    return lambda b, h, q, k: (q >= k) & (q - k < size)


def share(rule: Callable, length: int) -> float:
    """Of the scores, by the blocks of 128 x 128 that torch's own mask has."""
    mask = create_block_mask(rule, None, None, length, length, "cpu")
    assert mask.full_kv_num_blocks is not None
    blocks = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    return blocks / (-(-length // 128)) ** 2


@pytest.mark.quick
@pytest.mark.parametrize(
    "rule, size",
    [
        (causal, 1025),  # a row more than blocks of 128
        (window(300), 1152),
        (lambda b, h, q, k: (q % 512) >= (k % 512), 1024),
    ],
)
def test_a_masks_share_is_that_of_torchs_own(rule, size, monkeypatch):
    expected = share(rule, size)
    assert masks.planned_mask(rule, None, None, size, size).share == expected
    monkeypatch.setattr(masks, "MOST_PAIRS", size * size // 3)  # then every third row of blocks
    sampled = masks.planned_mask(rule, None, None, size, size).share
    assert sampled == pytest.approx(expected, rel=0.15)


@pytest.mark.quick
def test_share_of_heads_with_masks_of_their_own_is_the_mean():
    def rule(b, h, q, k):
        return (q >= k) & (q - k < torch.where(h == 0, 4096, 128))

    shares = [share(window(n), 1024) for n in (4096, 128, 128)]
    assert masks.planned_mask(rule, 1, 3, 1024, 1024).share == pytest.approx(sum(shares) / 3)


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "compile": True}], ids=str)
def test_each_block_attends_as_its_mask_allows(options, monkeypatch):
    """Every second block attends within 128 positions; blocks of one pattern stand for others of theirs only."""
    usual = llama.Attention.forward

    def windowed(self, x, cos, sin, mask=None, *rest):
        length = x.shape[1]
        if self.layer % 2:
            mask = llama_attention.make_mask(window(128), 1, length, length, x.device)
        return usual(self, x, cos, sin, mask, *rest)

    number_layers(monkeypatch)
    monkeypatch.setattr(llama.Attention, "forward", windowed)
    cfg = of_a_gpu({"n_layers": 16}, options, train=LONG)
    # without a mask SDPA skips half of the scores
    shares = [0.5, share(window(128), 1024)]
    step, blocks = step_and_models(cfg)
    for phase in step.phases:
        direction, _, number = phase.name.partition(" block ")
        if number:
            backward = 7 if options else 5
            matmuls = 2 if direction == "forward" else backward
            scores = shares[int(number) % 2] * 1024 * 1024
            assert phase.work["attention"] == 2 * matmuls * scores * 64, phase.name
    assert len(blocks) == 1 and blocks[0] < 16
    assert_equal(step, simulate(cfg, 8, all_blocks=True))


def test_a_tensor_for_a_mask_saves_no_work(monkeypatch):
    """SDPA's kernels compute every score that such a mask hides."""

    def masked(q, k, v, mask):
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, enable_gqa=True)

    half = plan(of_a_gpu(), 8)
    monkeypatch.setattr(llama, "attention", masked)
    full = plan(of_a_gpu(), 8)
    assert full["counted_flops_per_token"] - half["counted_flops_per_token"] == 6 * 10 * 64 * 256
    assert full["not_counted"] == []


def test_a_sequence_is_planned_as_one_document_and_the_plan_says_so():
    cfg = of_a_gpu(data={"document_mask": True}, train=LONG)
    step = simulate(cfg, 8)
    [block] = [phase for phase in step.phases if phase.name == "forward block 0"]
    assert block.work["attention"] == 4 * share(causal, 1024) * 1024 * 1024 * 64
    [note] = plan(cfg, 8)["not_counted"]
    assert "each sequence is planned as one document" in note
    assert plan(of_a_gpu(parallel={"cp": 2}, train=LONG), 8)["not_counted"] == []


# Shapes that depend on values, and blocks that differ


def by_values(self, x):
    """Each expert's tokens, of which there are as many as the router sends it."""
    tokens = x.flatten(0, 1)
    [chosen] = torch.where(tokens.sum(-1) > 0)
    rows = self.gate_proj(tokens[chosen]).sum(-1, keepdim=True).expand(-1, x.shape[-1])
    return tokens.index_add(0, chosen, rows).view_as(x)


def by_item(self, x):
    return x * int(x.sum().item() > 0)


@pytest.mark.parametrize(
    "forward, operator, options",
    [
        (by_values, "aten.nonzero", {}),
        (by_item, "aten._local_scalar_dense", {"recompute": "full", "compile": True}),
    ],
)
def test_shapes_that_depend_on_values_are_refused_in_a_line(
    forward, operator, options, monkeypatch, capfd
):
    with monkeypatch.context() as patch:
        patch.setattr(llama.FeedForward, "forward", forward)
        with refuses(f"^--dry-run: {operator}", "in the forward block 0: ") as refused:
            plan(of_a_gpu(parallel=options), 8)
    assert "\n" not in str(refused.value) and capfd.readouterr().err == ""
    assert plan(of_a_gpu(), 8)["peak_gib"] > 0  # no process group is left behind


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "compile": True}], ids=str)
def test_blocks_with_terms_of_the_loss_are_planned(options, monkeypatch):
    usual = llama.Block.forward

    def forward(self, *args):
        x = usual(self, *args)
        return x, {"balance": x.float().square().sum() * 1e-4}

    monkeypatch.setattr(llama.Block, "forward", forward)
    cfg = of_a_gpu(parallel=options)
    step, blocks = step_and_models(cfg)
    assert blocks[-1] < 10
    names = [phase.name for phase in step.phases if phase.name.startswith("backward block")]
    assert names == 2 * [f"backward block {i}" for i in reversed(range(10))]
    assert_equal(step, simulate(cfg, 8, all_blocks=True))


def test_blocks_that_differ_in_backward_alone_all_run(monkeypatch):
    """Their forward's operators are equal: what tells them apart is the work of those after the middle ones."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context, x, is_odd):
            context.is_odd = is_odd
            return x * 2

        @staticmethod
        def backward(context, *gradients):
            [gradient] = gradients
            if context.is_odd:
                flat = gradient.flatten(0, 1)
                gradient = ((flat @ flat.T) @ flat).view_as(gradient)
            return gradient, None

    usual = llama.FeedForward.forward

    def forward(self, x):
        return Product.apply(usual(self, x), self.layer % 2)

    number_layers(monkeypatch)
    monkeypatch.setattr(llama.FeedForward, "forward", forward)
    step, blocks = step_and_models(of_a_gpu())
    assert len(blocks) == 2 and blocks[-1] == 10
    backward = [phase for phase in step.phases if phase.name.startswith("backward block")]
    work = [phase.work["matmuls"] for phase in backward[:10]]
    assert [work[i] > work[i + 1] for i in range(9)] == [True, False] * 4 + [True]
