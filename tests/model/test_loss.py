"""The chunked loss against torch's cross entropy, and what it keeps in memory."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import model.llama
from config import IGNORE
from model.llama import Llama
from model.loss import Shard, chunked_cross_entropy, loss_and_gradient
from parallel.tensor import VocabularyShard
from tests.conftest import compiled_by, is_near, make_config, token_ids


def problem(dtype=torch.float32, tokens=50, dim=16, vocab=96) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::7] = IGNORE
    return x, weight, targets


def plain(x, weight, targets, chunk=None, compile=False) -> torch.Tensor:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def chunked(*arguments, **options) -> torch.Tensor:
    return chunked_cross_entropy(*arguments, **options)[0]["loss"]


def gradients(loss, x, weight, targets, *options, scale: float = 0.3) -> tuple[Any, ...]:
    """The loss, and the gradients of x and weight: None of what is frozen."""
    x.grad = weight.grad = None
    total = loss(x, weight, targets, *options)
    (total * scale).backward()
    return total.detach(), x.grad, weight.grad


@pytest.mark.parametrize(
    "dtype, chunk, compile, bound",
    [
        (torch.float32, 1, False, 1e-6),
        (torch.float64, 7, False, 1e-6),
        (torch.float32, 64, False, 1e-6),
        (torch.bfloat16, 128, False, 1e-4),
        (torch.bfloat16, 512, False, 1e-4),
        (torch.bfloat16, 128, True, 1e-4),
    ],
)
def test_equals_cross_entropy(dtype, chunk, compile, bound):
    of_half = {"tokens": 512, "dim": 64, "vocab": 997} if dtype == torch.bfloat16 else {}
    x, weight, targets = problem(dtype, **of_half)
    ours = gradients(chunked, x, weight, targets, chunk, compile, scale=0.25)
    for found, wanted in zip(ours, gradients(plain, x, weight, targets, scale=0.25)):
        assert is_near(found, wanted, bound)
    _, count = chunked_cross_entropy(x, weight, targets, chunk, compile)
    assert count == (targets != IGNORE).sum()


@pytest.mark.parametrize("chunk", [16, 64])
def test_edges(chunk):
    x, weight, targets = problem()
    total, *grads = gradients(chunked, x, weight, torch.full_like(targets, IGNORE), chunk)
    assert total == 0
    assert not any(grad.any() for grad in grads)
    _, *grads = gradients(chunked, x, weight, targets, chunk, scale=torch.nan)
    assert all(grad.isnan().all() for grad in grads)  # how a rank tells the others
    x.data *= 1e4
    assert all(value.isfinite().all() for value in gradients(chunked, x, weight, targets, chunk))


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("trained", ["x", "weight"])
def test_one_of_both_may_be_frozen(trained, chunk):
    x, weight, targets = problem()
    _, *wanted = gradients(plain, x, weight, targets)
    frozen, learns = (weight, x) if trained == "x" else (x, weight)
    frozen.requires_grad_(False)
    gradients(chunked, x, weight, targets, chunk)
    assert frozen.grad is None
    assert learns.grad is not None
    assert is_near(learns.grad, wanted[trained == "weight"], 1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("scale, scaled", [(1.0, 0), (60.0, 0), (60.0, 72)])
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_of_the_vocabulary_give_the_loss_of_the_whole(shards, scale, scaled, chunk):
    """Each in a thread. By 60: the logits of one shard lie hundreds above the others'."""
    x, weight, targets = problem()
    weight.data[scaled : scaled + 24] *= scale
    targets[:5] = torch.tensor([0, 24, 48, 72, 95])  # where shards begin
    exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.cross_entropy(F.linear(*exact), targets, ignore_index=IGNORE, reduction="sum")
    (expected * 0.3).backward()
    meeting = threading.Barrier(shards)
    brought = [None] * shards

    def gather(rank: int, tensor: torch.Tensor) -> torch.Tensor:
        brought[rank] = tensor
        meeting.wait(60)
        full = torch.stack(brought)
        meeting.wait(60)
        return full

    def run(rank: int) -> tuple[Any, ...]:
        rows = 96 // shards
        own = weight[rank * rows :][:rows].detach().clone().requires_grad_()
        shard = VocabularyShard(96, rank * rows, partial(gather, rank))
        loss = partial(chunked, chunk=chunk, shard=shard)
        return gradients(loss, x.detach().clone().requires_grad_(), own, targets)

    with ThreadPoolExecutor(shards) as pool:
        totals, x_grads, weight_grads = zip(*pool.map(run, range(shards)))
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert totals[0].item() == pytest.approx(expected.item(), rel=1e-6)
    bound = 1e-6 if scale == 1.0 else 2e-5
    for ours, x in zip((torch.stack(x_grads).sum(0), torch.cat(weight_grads)), exact):
        assert x.grad is not None
        assert is_near(ours, x.grad, bound)


@pytest.mark.quick
def test_weight_gradient_is_summed_in_float32_and_rounded_once():
    x, weight, targets = problem(torch.bfloat16, tokens=512)
    _, _, found = gradients(chunked, x, weight, targets, 8, scale=1.0)
    slope = F.linear(x, weight).detach().float().softmax(-1)
    slope -= F.one_hot(targets.clamp(min=0), len(weight))
    slope[targets == IGNORE] = 0
    exact = slope.bfloat16().double().T @ x.detach().double()
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


class Made(TorchDispatchMode):
    """What operators make: the largest tensor, and how many of one shape live at the same time."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.shape = shape
        self.largest = 0
        self.results: list[weakref.ref] = []
        self.live = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                is_expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
                if tensor.shape == self.shape and not is_expanded:
                    self.results.append(weakref.ref(tensor))
        alive = [tensor for tensor in (ref() for ref in self.results) if tensor is not None]
        self.live = max(self.live, len({t.untyped_storage().data_ptr() for t in alive}))
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_only_one_chunk_of_logits_lives_at_a_time(trains):
    x, weight, targets = problem(tokens=96)
    with torch.set_grad_enabled(trains), Made((32, 96)) as made:
        total = chunked(x, weight, targets, 32)
        if trains:
            total.backward()
    assert made.live == (4 if trains else 2)  # logits, exponentials, gradients of both terms
    assert made.largest == 32 * 96


@pytest.mark.quick
def test_logits_of_the_full_batch_never_exist(monkeypatch):
    def loss(x, weight, targets, **options):
        return chunked_cross_entropy(x, weight, targets, 16, **options)

    monkeypatch.setattr(model.llama, "chunked_cross_entropy", loss)
    llama = Llama(make_config(model={"vocab_size": 997}).model)
    ids = token_ids(4, 33)
    with Made() as made:
        llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    assert made.largest == 997 * 48  # the head's matrix
    with Made() as made:
        llama(ids[:, :-1])
    assert made.largest == 128 * 997


def test_compiled_the_gradient_overwrites_the_logits():
    """As in eager mode, without a second buffer of their size. (A CPU keeps the exponentials.)"""
    torch.manual_seed(0)
    logits = (5 * torch.randn(48, 97)).bfloat16()
    targets = torch.randint(0, 97, (48,))
    targets[::7] = IGNORE
    _, expected = loss_and_gradient(logits.clone(), targets, Shard(97, 0))
    torch._dynamo.reset()
    in_place = torch.compile(loss_and_gradient, fullgraph=True)
    (_, found), (code,) = run_and_get_code(in_place, logits, targets, Shard(97, 0))
    assert is_near(found, expected, 1e-3)  # a rounding of exp() may differ
    assert found.data_ptr() == logits.data_ptr()
    assert "empty_strided_cpu((48, 97), (97, 1), torch.bfloat16" not in code


def capped(logits, targets, shard):
    logits = 5 * torch.tanh(logits.float() / 5)
    return shard.logsumexp(logits) - shard.pick(logits, targets)


def with_z_loss(logits, targets, shard):
    logsumexp = shard.logsumexp(logits.float())
    return logsumexp - shard.pick(logits.float(), targets) + 0.01 * logsumexp.square()


def smoothed(logits, targets, shard):
    logits = logits.float()
    mean = shard.sum(logits.sum(-1)) / shard.vocab_size
    return shard.logsumexp(logits) - 0.9 * shard.pick(logits, targets) - 0.1 * mean


# A change of token_loss(), and the same of one token's float64 logits (V).
LOSSES: list[tuple[Any, Any]] = [
    (capped, lambda z, t: F.cross_entropy(5 * torch.tanh(z / 5), t)),
    (with_z_loss, lambda z, t: F.cross_entropy(z, t) + 0.01 * z.logsumexp(0) ** 2),
    (smoothed, lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1)),
]


@pytest.mark.parametrize("change, plain_change", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("compile", [False, True])
def test_a_changed_loss_has_the_right_gradients(
    change, plain_change, dtype, chunk, compile, monkeypatch
):
    monkeypatch.setattr(model.loss, "token_loss", change)
    x, weight, targets = problem(dtype)
    torch._dynamo.reset()
    with compiled_by("aot_eager"):
        total, x_grad, weight_grad = gradients(chunked, x, weight, targets, chunk, compile)
    logits = F.linear(x, weight).detach().double().requires_grad_()
    of_tokens = [plain_change(z, t) for z, t in zip(logits, targets) if t != IGNORE]
    exact = torch.stack(of_tokens).sum()
    (slope,) = torch.autograd.grad(exact * 0.3, logits)
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)
    bound = 1e-6 if dtype == torch.float32 else 4e-3  # roundings of the gradients
    assert is_near(x_grad, slope @ weight.detach().double(), bound)
    assert is_near(weight_grad, slope.T @ x.detach().double(), bound)


@pytest.mark.quick
@pytest.mark.parametrize("target", [-1, 96])
@pytest.mark.parametrize("trains", [True, False])
def test_a_target_outside_the_vocabulary_is_refused(target, trains):
    x, weight, targets = problem()
    targets[-1] = target
    with torch.set_grad_enabled(trains), pytest.raises(RuntimeError, match="not in the vocabulary"):
        chunked(x, weight, targets, 16)
