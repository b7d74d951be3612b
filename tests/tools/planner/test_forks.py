"""The plan of a fork: operators without formulas, masks, shapes that depend on values."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from model import attention as llama_attention
from model import llama
from tests.conftest import refuses
from tests.tools.planner.steps import LONG, assert_equal, of_a_gpu, step_and_models
from tools.planner import masks
from tools.planner.counted import Counted
from tools.planner.devices import DEVICES
from tools.planner.plan import Asked, plan
from tools.planner.simulate import simulate

pytestmark = pytest.mark.early

ON_H100 = Asked(DEVICES["H100"])


def test_grouped_matmuls_are_counted():
    """Whatever the tokens of each expert: together as one expert's of all tokens, and as much twice in backward."""
    counted = Counted(FakeTensorMode(), {}, set(), 1)
    with counted.fake, counted:
        tokens = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
        experts = torch.empty(4, 32, 48, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.empty(4, dtype=torch.int32)
        F.grouped_mm(tokens, experts, offs=ends).square().sum().backward()
    assert counted.phases[-1].work["matmuls"] == 3 * 2 * 64 * 32 * 48
    assert not counted.phases[-1].uncounted


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
        row = plan(of_a_gpu(), 1, ON_H100)
    [note] = row["not_counted"]
    assert note.startswith("the FLOP of fork.gate: 160 calls a step") and not plain["not_counted"]
    assert row["step_seconds"] > plain["step_seconds"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "operator, named",
    [
        (lambda x: torch.linalg.qr(x), "aten.linalg_qr"),
        (lambda x: torch.mv(x, x[0]), "aten.mv"),
        (lambda x: x.exp().sum(), None),
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
    build, usual = llama.Block.__init__, llama.Attention.forward

    def init(self, m, layer):
        build(self, m, layer)
        self.attention.layer = layer

    def windowed(self, x, cos, sin, mask=None, *rest):
        length = x.shape[1]
        if self.layer % 2:
            mask = llama_attention.make_mask(window(128), 1, length, length, x.device)
        return usual(self, x, cos, sin, mask, *rest)

    monkeypatch.setattr(llama.Block, "__init__", init)
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


def by_item(self, x):
    return x * int(x.sum().item() > 0)


def test_shapes_that_depend_on_values_are_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llama.FeedForward, "forward", by_item)
        with refuses("^--dry-run: aten._local_scalar_dense", "in the forward block 0: "):
            plan(of_a_gpu(parallel={"recompute": "full", "compile": True}), 8)
    assert plan(of_a_gpu(), 8)["peak_gib"] > 0  # no process group is left behind
