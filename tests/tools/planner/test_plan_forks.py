"""The plan of a fork: operators without formulas, masks, blocks that differ, shapes that depend on values."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

import config
from model import attention as llama_attention
from model import llama
from tests.conftest import make_config, needs_extra, nightly_if
from tools.planner import masks, show
from tools.planner.counted import Counted
from tools.planner.devices import device
from tools.planner.plan import Asked, plan
from tools.planner.simulate import simulate

pytestmark = pytest.mark.early

GPU = {
    "run": {"device": "cuda"},
    "train": {"seq_len": 256, "global_batch_size": 16, "micro_batch_size": 1},
}
MODEL = {
    "dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 176,
    "vocab_size": 328,
    "n_layers": 14,
}


def of_a_gpu(
    model: dict | None = None, parallel: dict | None = None, **sections: dict
) -> config.Config:
    return make_config(
        **{
            **GPU,
            "model": {**MODEL, **(model or {})},
            "parallel": {"param_dtype": "bfloat16", **(parallel or {})},
            **sections,
        }
    )


def equal(short, whole) -> None:
    """All that a plan says of each phase. A block's memory may be off by what the gradients' norm takes at the end."""
    assert short.held == whole.held and [p.name for p in short.phases] == [
        p.name for p in whole.phases
    ]
    for a, b in zip(short.phases, whole.phases):
        assert +a.sent == +b.sent and a.times == b.times and +a.uncounted == +b.uncounted, a.name
        assert {k: v for k, v in a.work.items() if k != "moved"} == {
            k: v for k, v in b.work.items() if k != "moved"
        }
        assert a.work["moved"] == pytest.approx(b.work["moved"], rel=0.05, abs=2**16), a.name
        assert a.peak.total() == pytest.approx(b.peak.total(), rel=0.01, abs=2**17), a.name
    assert short.peak().name == whole.peak().name


def blocks_run(monkeypatch) -> list[int]:
    """Numbers of blocks of the models that are simulated from now on."""
    from tools.planner import simulate as module

    found, run = [], module.run
    monkeypatch.setattr(
        module, "run", lambda cfg, *rest: found.append(cfg.model.n_layers) or run(cfg, *rest)
    )
    return found


OPTIONS = {
    "replicated even": {
        "model": {"freeze": ["blocks.*[02468].*"]},
        "parallel": {"replicated": ["blocks.*[02468].*"]},
    },
    "replicated even by number": {
        "model": {"freeze": [f"blocks.{i}.*" for i in range(0, 14, 2)]},
        "parallel": {"replicated": [f"blocks.{i}.*" for i in range(0, 14, 2)]},
    },
    "replicated one": {
        "model": {"freeze": ["blocks.3.*"]},
        "parallel": {"replicated": ["blocks.3.*"]},
    },
    "keep_fp32 last": {"parallel": {"keep_fp32": ["blocks.13"]}},
    "keep_fp32 odd": {"parallel": {"keep_fp32": ["blocks.*[13579]"]}},
    "freeze first": {"model": {"freeze": ["embedding.*", "blocks.[0-4].*"]}},
    "forward 2": {"parallel": {"prefetch_forward": 2}},
    "forward 3, backward 1": {"parallel": {"prefetch_forward": 3, "prefetch_backward": 1}},
    "backward 2, recompute 3": {"parallel": {"prefetch_backward": 2, "recompute": 3}},
    "recompute 2": {"parallel": {"recompute": 2}},
    "tied": {"model": {"tie_embeddings": True}},
    "tp, forward 2": {"parallel": {"tp": 2, "prefetch_forward": 2}},
    "cp, recompute 2": {"parallel": {"cp": 2, "recompute": 2, "compile": True}},
    "replicas, tied, fp32": {
        "model": {"tie_embeddings": True},
        "parallel": {"dp_replicate": 2, "keep_fp32": ["blocks.2"]},
    },
    "offload, forward 2": {"parallel": {"cpu_offload": True, "prefetch_forward": 2}},
    "lora, full, odd replicated": {
        "lora": True,
        "model": {"freeze": ["blocks.*.?_proj.weight"]},
        "parallel": {
            "recompute": "full",
            "replicated": ["blocks.*[13579].attention.?_proj.weight"],
        },
    },
}
NIGHTLY = {  # that reach no line which the others do not
    "replicated even",
    "tp, forward 2",
    "keep_fp32 odd",
    "forward 3, backward 1",
    "forward 2",
    "recompute 2",
    "tied",
    "offload, forward 2",
}
IN_FULL = {
    "replicated even by number",
    "replicated one",
    "keep_fp32 last",
    "freeze first",
    "replicas, tied, fp32",
    "backward 2, recompute 3",  # three blocks could be left out: no even number
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_extra("lora"))
        if name.startswith("lora")
        else pytest.param(name, marks=nightly_if(name in NIGHTLY))
        for name in OPTIONS
    ],
)
def test_the_plan_is_that_of_all_blocks(name, monkeypatch):
    """Options one at a time and together. Where blocks have no common pattern, all of them run."""
    sections = {**OPTIONS[name]}
    lora = config.Lora(rank=4) if sections.pop("lora", False) else None
    cfg = replace(of_a_gpu(**sections), lora=lora)
    found = blocks_run(monkeypatch)
    short = simulate(cfg, 8)
    assert (found[-1] == 14) is (name in IN_FULL), found
    if name not in IN_FULL:
        equal(short, simulate(cfg, 8, all_blocks=True))


class Experts(nn.Module):
    """The best of E experts for each token, by grouped products of tokens that are sorted by expert."""

    def __init__(self, m: config.Model, out_std: float):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(4, m.dim, m.ffn_dim)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(4, m.ffn_dim, m.dim))
        self.router = llama.Linear(m.dim, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order, ends = expert.argsort(), F.one_hot(expert, 4).sum(0).cumsum(0, dtype=torch.int32)
        tokens = tokens[order]
        hidden = F.silu(F.grouped_mm(tokens, self.gate, offs=ends)) * F.grouped_mm(
            tokens, self.up, offs=ends
        )
        out = F.grouped_mm(hidden, self.down, offs=ends) * weight[order, None]
        return torch.empty_like(out).index_put((order,), out).view_as(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile": True},
        {"recompute": "elementwise"},
        {"recompute": "selective"},
        {"recompute": "full"},
    ],
    ids=str,
)
def test_grouped_products_are_counted(options, monkeypatch):
    """Whatever the tokens of each expert: together as one expert's of all tokens. "elementwise" saves them."""
    monkeypatch.setattr(llama, "FeedForward", Experts)
    cfg = of_a_gpu(parallel=options)
    m, tokens = cfg.model, 256 * 16 / 8
    row, step = plan(cfg, 8), simulate(cfg, 8)
    block = (
        2 * m.dim * (m.n_heads + m.n_kv_heads) * m.width_per_head
        + 3 * m.dim * m.ffn_dim
        + 4 * m.dim
    )
    attention = 6 * m.n_layers * m.dim * 256
    assert (
        row["counted_flops_per_token"]
        == 6 * (m.n_layers * block + m.vocab_size * m.dim) + attention
    )
    assert row["operators_not_counted"] == row["not_counted"] == []
    again = {
        "selective": m.dim * (2 * m.n_heads * m.width_per_head // 2 + m.ffn_dim),
        "full": block,
    }
    found = sum(phase.work["matmuls"] * phase.times for phase in step.phases) / tokens
    excess = found - (row["counted_flops_per_token"] - attention)
    if options.get("recompute") == "full":
        assert excess == 2 * m.n_layers * again["full"]
    elif options.get("recompute") == "selective":
        # of the experts one of three, of the others less than all
        assert (
            2 * m.n_layers * m.dim * m.ffn_dim
            < excess
            < 2 * m.n_layers * (block - 2 * m.dim * m.ffn_dim)
        )
    else:
        assert excess == pytest.approx(0, abs=2 * m.n_layers * 4 * m.dim)  # at most the router's
    if options in ({}, {"recompute": "selective"}):
        found = blocks_run(monkeypatch)
        equal(step, simulate(cfg, 8, all_blocks=True))
        assert found == [14] and len(step.phases) > 2 * 14


def test_flop_are_those_of_torchs_own_counter():
    """Of products in batches, of convolutions and their gradients, on real tensors; einsum is one of them."""

    def work() -> None:
        x, w, kernel = (
            torch.randn(shape, requires_grad=True) for shape in ((3, 8, 16), (3, 16, 4), (6, 4, 3))
        )
        image = torch.randn(2, 8, 20, requires_grad=True)
        found = torch.bmm(x, w).sum() + torch.baddbmm(torch.zeros(3, 8, 4), x, w).sum()
        (
            found
            + torch.einsum("bij,bjk->bik", x, w).sum()
            + F.conv1d(image, kernel, groups=2).sum()
        ).backward()

    with FlopCounterMode(display=False) as torchs:
        work()
    counted = Counted(FakeTensorMode(), {}, set(), 1)
    with counted.fake, counted:
        work()
    assert counted.phases[-1].work["matmuls"] == torchs.get_total_flops() > 0
    assert not counted.phases[-1].uncounted


@pytest.fixture
def gate():
    """A fork's own operator, with a gradient."""
    with torch.library._scoped_library("fork", "FRAGMENT"):
        operator = torch.library.custom_op(
            "fork::gate", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        operator.register_fake(torch.empty_like)
        operator.register_autograd(lambda context, gradient: gradient * 2)
        yield operator


def test_operators_without_a_formula_are_named(gate, monkeypatch):
    plain = plan(of_a_gpu(), 1, Asked(device("H100")))
    usual = llama.FeedForward.forward
    monkeypatch.setattr(llama.FeedForward, "forward", lambda self, x: gate(usual(self, x)))
    cfg = of_a_gpu()
    row = plan(cfg, 1, Asked(device("H100")))
    first = "blocks.0.feed_forward (forward block 0)"
    assert row["operators_not_counted"] == [
        {"operator": "fork.gate", "calls": 14 * 16, "first_in": first}
    ]
    told = show.table(row, cfg, Asked(device("H100")))
    [line] = [line for line in told.splitlines() if line.startswith("not counted")]
    assert line.split(None, 2)[2] == (
        f"the FLOP of fork.gate: 224 calls a step, the first in {first}; the time is too "
        "short, and speed and MFU too high"
    )
    assert plain["operators_not_counted"] == [] and "not counted" not in show.table(
        plain, cfg, Asked(device("H100"))
    )
    assert row["step_seconds"] > plain["step_seconds"]  # what it reads and writes is counted


@pytest.mark.parametrize(
    "operator, named",
    [
        (lambda x: torch.linalg.qr(x), "aten.linalg_qr"),
        (lambda x: torch.fft.rfft(x), "aten._fft_r2c"),
        (lambda x: torch.mv(x, x[0]), "aten.mv"),
        (lambda x: x.exp().sum(), None),
        (lambda x: x.norm(), None),
        (lambda x: x.sort(), None),
        (lambda x: x.lgamma(), None),
    ],
)
def test_only_what_computes_is_named(operator, named):
    counted = Counted(FakeTensorMode(), {}, set(), 1)
    with counted.fake, counted:
        operator(torch.empty(8, 8))
    assert [*counted.phases[-1].uncounted] == ([named] if named else [])


def window(size: int):
    return lambda b, h, q, k: (q >= k) & (q - k < size)


def share(rule, length: int) -> float:
    """Of the scores, by the blocks that torch's own mask has."""
    mask = create_block_mask(rule, None, None, length, length, "cpu")
    return (mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item() * 128**2 / length**2


def by_attribute(monkeypatch) -> None:
    """Every second block attends within 128 positions: an attribute of the block says so, forward makes the mask."""
    build, forward = llama.Block.__init__, llama.Attention.forward

    def init(self, m, layer):
        build(self, m, layer)
        self.attention.layer = layer

    def windowed(self, x, cos, sin, mask=None):
        length = x.shape[1]
        mask = (
            llama_attention.make_mask(window(128), 1, length, length, x.device)
            if self.layer % 2
            else mask
        )
        return forward(self, x, cos, sin, mask)

    monkeypatch.setattr(llama.Block, "__init__", init)
    monkeypatch.setattr(llama.Attention, "forward", windowed)


def by_the_model(monkeypatch, every: int = 4) -> None:
    """Of so many blocks all but one attend within 128 positions: the model passes the masks, the blocks are alike."""
    build, cpu = llama.Llama.__init__, torch.device("cpu")

    def init(self, m):
        build(self, m)
        self.build_mask = lambda documents: [
            llama_attention.make_mask(window(n), 1, 1024, 1024, cpu) for n in (128, 4096)
        ]
        for i, block in enumerate(self.blocks):
            block.register_forward_pre_hook(
                lambda block, args, i=i: (
                    *args[:3],
                    args[3][int(i % every == every - 1)],
                    *args[4:],
                )
            )

    monkeypatch.setattr(llama.Llama, "__init__", init)


LONG = {"train": {"seq_len": 1024, "global_batch_size": 8, "micro_batch_size": 1}}


@functools.cache
def usual_plan() -> dict:
    return plan(of_a_gpu(**LONG), 1, Asked(device("H100")))  # alone, it waits for nothing


@pytest.mark.parametrize(
    "fork, kinds, options",
    [
        (by_attribute, [None, 128], {}),
        pytest.param(
            by_attribute,
            [None, 128],
            {"recompute": 3, "prefetch_forward": 2},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            by_attribute,
            [None, 128],
            {"recompute": "selective", "compile": True},
            marks=pytest.mark.nightly,
        ),
        (by_the_model, [128, 128, 128, 4096], {"compile": True}),
        (by_the_model, [128, 128, 128, 4096], {"recompute": "full"}),
    ],
)
def test_each_block_attends_as_its_mask_lets_it(fork, kinds, options, monkeypatch):
    """FLOP of each block forward and backward; blocks of one pattern stand for others of theirs only."""
    usual = usual_plan()
    fork(monkeypatch)
    layers = 24 if options.get("recompute") == 3 else 16  # more than a short model has
    cfg = of_a_gpu(parallel=options, model={"n_layers": layers}, **LONG)
    found = blocks_run(monkeypatch)
    step = simulate(cfg, 8)
    shares = [0.5 if n is None else share(window(n), 1024) for n in kinds]
    for phase in step.phases:
        way, _, i = phase.name.partition(" block ")
        if i:
            again = way == "backward" and (
                options.get("recompute") == "full"
                or (options.get("recompute") == 3 and int(i) % 3 == 2)
            )
            matmuls = {"forward": 2, "backward": 7 if again else 5}[way]
            assert (
                phase.work["attention"]
                == 2 * matmuls * shares[int(i) % len(shares)] * 1024 * 1024 * 64
            ), phase.name
    equal(step, simulate(cfg, 8, all_blocks=True))
    assert len(found) == 2 and found[0] < layers  # the second was asked for
    row = plan(of_a_gpu(**LONG), 1, Asked(device("H100")))
    assert (
        row["step_seconds"] < usual["step_seconds"]
        and row["flops_per_token"] == usual["flops_per_token"]
    )
    saved = 6 * 1024 * 64 * sum(1 - 2 * share for share in (shares * 14)[:14])
    assert usual["counted_flops_per_token"] == usual["flops_per_token"]
    assert row["counted_flops_per_token"] == row["flops_per_token"] - saved


def test_a_tensor_for_a_mask_saves_no_work(monkeypatch):
    """SDPA's kernels compute every score that such a mask hides."""

    def masked(q, k, v, mask):
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, enable_gqa=True)

    causal = plan(of_a_gpu(), 8)
    monkeypatch.setattr(llama, "attention", masked)
    full = plan(of_a_gpu(), 8)
    assert full["counted_flops_per_token"] - causal["counted_flops_per_token"] == 6 * 14 * 64 * 256
    assert full["operators_not_counted"] == []


def test_documents_are_one_a_sequence_and_the_plan_says_so():
    cfg = of_a_gpu(data={"document_mask": True}, **LONG)
    row, step = plan(cfg, 8), simulate(cfg, 8)
    causal = share(lambda b, h, q, k: q >= k, 1024)
    [block] = [phase for phase in step.phases if phase.name == "forward block 0"]
    assert block.work["attention"] == 4 * causal * 1024 * 1024 * 64
    assert row["not_counted"] == [
        "what masks by data, such as document numbers, save of attention: each sequence is "
        "planned as one document"
    ]
    assert plan(of_a_gpu(parallel={"cp": 2}, **LONG), 8)["not_counted"] == []


@pytest.mark.parametrize(
    "rule, size",
    [
        (lambda b, h, q, k: q >= k, 1025),  # a row more than blocks of 128
        (window(300), 1152),
        (lambda b, h, q, k: (q % 512) >= (k % 512), 1024),
    ],
)
def test_a_masks_share_is_that_of_torchs_own(rule, size, monkeypatch):
    mask = create_block_mask(rule, None, None, size, size, "cpu")
    blocks = (mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item()
    expected = blocks / (-(-size // 128)) ** 2
    assert masks.planned_mask(rule, None, None, size, size).share == expected
    monkeypatch.setattr(masks, "MOST_PAIRS", size * size // 3)  # then every third row of blocks
    assert masks.planned_mask(rule, None, None, size, size).share == pytest.approx(
        expected, rel=0.15
    )


@pytest.mark.quick
def test_heads_may_have_masks_of_their_own():
    def rule(b, h, q, k):
        return (q >= k) & (q - k < torch.where(h == 0, 4096, 128))

    shares = [share(window(n), 1024) for n in (4096, 128, 128)]
    assert masks.planned_mask(rule, 1, 3, 1024, 1024).share == pytest.approx(sum(shares) / 3)


def by_values(self, x):
    """Each expert's tokens, of which there are as many as the router sends it."""
    tokens = x.flatten(0, 1)
    [chosen] = torch.where(tokens.sum(-1) > 0)
    return tokens.index_add(
        0, chosen, self.gate_proj(tokens[chosen]).sum(-1, keepdim=True).expand(-1, x.shape[-1])
    ).view_as(x)


def by_item(self, x):
    return x * int(x.sum().item() > 0)


@pytest.mark.parametrize(
    "forward, operator", [(by_values, "aten.nonzero"), (by_item, "aten._local_scalar_dense")]
)
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "compile": True}], ids=str)
def test_what_depends_on_values_is_refused_in_a_line(
    forward, operator, options, monkeypatch, capfd
):
    monkeypatch.setattr(llama.FeedForward, "forward", forward)
    with pytest.raises(config.ConfigError) as raised:
        plan(of_a_gpu(parallel=options), 8)
    told = str(raised.value)
    assert (
        told.startswith(f"--dry-run: {operator}")
        and "in blocks.0.feed_forward, forward block 0: " in told
    )
    assert "\n" not in told and capfd.readouterr().err == ""
    monkeypatch.undo()
    assert plan(of_a_gpu(), 8)["peak_gib"] > 0  # no process group is left behind


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "compile": True}], ids=str)
def test_blocks_with_terms_of_the_loss_are_planned(options, monkeypatch):
    usual = llama.Block.forward

    def forward(self, *args):
        x = usual(self, *args)
        return x, {"balance": x.float().square().sum() * 1e-4}

    monkeypatch.setattr(llama.Block, "forward", forward)
    found, step = blocks_run(monkeypatch), simulate(of_a_gpu(parallel=options), 8)
    assert found[-1] < 14
    backward = [phase.name for phase in step.phases if phase.name.startswith("backward block")]
    assert backward == [f"backward block {i}" for i in reversed(range(14))] * (len(backward) // 14)
    equal(step, simulate(of_a_gpu(parallel=options), 8, all_blocks=True))


def test_blocks_that_differ_in_backward_alone_all_run(monkeypatch):
    """Their forward's operators are equal: what tells them apart is the work of those after the middle ones."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context, x, odd):
            context.odd = odd
            return x * 2

        @staticmethod
        def backward(context, gradient):
            flat = gradient.flatten(0, 1)
            return ((flat @ flat.T) @ flat).view_as(gradient) if context.odd else gradient, None

    build, usual = llama.Block.__init__, llama.FeedForward.forward

    def init(self, m, layer):
        build(self, m, layer)
        self.feed_forward.odd = layer % 2

    monkeypatch.setattr(llama.Block, "__init__", init)
    monkeypatch.setattr(
        llama.FeedForward, "forward", lambda self, x: Product.apply(usual(self, x), self.odd)
    )
    found, step = blocks_run(monkeypatch), simulate(of_a_gpu(), 8)
    assert found == [6, 14]
    work = [
        phase.work["matmuls"] for phase in step.phases if phase.name.startswith("backward block")
    ]
    assert [work[i] > work[i + 1] for i in range(13)] == [True, False] * 6 + [True]
