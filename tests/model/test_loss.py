"""The chunked loss against torch's cross entropy, and what it keeps in memory."""

import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import model.loss
from config import IGNORE
from model.loss import Shard, chunked_cross_entropy
from parallel.collectives import all_gather, all_reduce, group_of
from parallel.mesh import build_mesh
from parallel.tensor import VocabularyShard
from tests.conftest import REPO, compiled_by, is_near
from tests.distributed import distributed
from tests.test_repo import BLOCK


def problem(dtype=torch.float32, tokens=50, dim=16, vocab=96) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::7] = IGNORE
    return x, weight, targets


def chunked(*arguments, **options) -> torch.Tensor:
    return chunked_cross_entropy(*arguments, **options)[0]["loss"]


def gradients(loss, x, weight, targets, *options, scale: float = 0.3) -> tuple[Any, ...]:
    """The loss, and the gradients of x and weight: None of what is frozen."""
    x.grad = weight.grad = None
    total = loss(x, weight, targets, *options)
    (total * scale).backward()
    return total.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunk", [16, 64])
def test_edges(chunk):
    x, weight, targets = problem()
    total, *grads = gradients(chunked, x, weight, torch.full_like(targets, IGNORE), chunk)
    assert total == 0 and not any(grad.any() for grad in grads)
    _, *grads = gradients(chunked, x, weight, targets, chunk, scale=torch.nan)
    assert all(grad.isnan().all() for grad in grads)  # how a rank tells the others
    x.data *= 1e4
    assert all(value.isfinite().all() for value in gradients(chunked, x, weight, targets, chunk))


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("trained", [1, 2])
def test_one_of_both_may_be_frozen(trained, chunk):
    expected = gradients(chunked, *problem(), chunk)[trained]
    x, weight, targets = problem()
    (weight if trained == 1 else x).requires_grad_(False)
    grads = gradients(chunked, x, weight, targets, chunk)
    assert grads[3 - trained] is None and torch.equal(grads[trained], expected)


PAGE = (REPO / "docs/fork.md").read_text()
(CODE,) = [text for label, text in BLOCK.findall(PAGE) if label == "python fork-loss"]
CHANGES: dict[str, Any] = {"torch": torch}
exec(CODE, CHANGES)


def soft_cap(logits, targets, shard):
    logits = 30 * torch.tanh(logits.float() / 30)
    return shard.logsumexp(logits) - shard.pick(logits, targets)


def weighted(logits, targets, shard, weights=1.0):
    logits = logits.float()
    return weights * (shard.logsumexp(logits) - shard.pick(logits, targets))


CHANGES |= {"soft_cap": soft_cap, "weighted": weighted}

# Further tensors by token, and the loss of one token, from its logits (V), target, and those.
LOSSES: dict[str, tuple[tuple[str, ...], Any]] = {
    "token_loss": ((), F.cross_entropy),
    "soft_cap": ((), lambda z, t: F.cross_entropy(30 * torch.tanh(z / 30), t)),
    "z_loss": ((), lambda z, t: F.cross_entropy(z, t) + 1e-4 * z.logsumexp(0) ** 2),
    "label_smoothing": ((), lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1)),
    "weighted": (("weights",), lambda z, t, weight: weight * F.cross_entropy(z, t)),
    "distillation": (("teacher",), lambda z, t, y: F.cross_entropy(z, y.double().softmax(0))),
}


def check_loss(name: str, problem, chunk: int, compile=False, group=None, bound=2e-6) -> None:
    """The loss and its gradients are those of a plain loop in float64. With a group, each of its
    ranks has some rows of the vocabulary."""
    x, weight, targets = problem
    by_token = {"weights": torch.rand(len(x)), "teacher": torch.randn(len(x), len(weight))}
    names, plain_loss = LOSSES[name]
    others = {name: by_token[name] for name in names}
    logits = F.linear(x, weight).detach().double().requires_grad_()
    rows = [row for row in zip(logits, targets, *others.values()) if row[1] != IGNORE]
    exact = torch.stack([plain_loss(*row) for row in rows]).sum()
    (slope,) = torch.autograd.grad(exact * 0.3, logits)
    expected = exact, slope @ weight.detach().double(), slope.T @ x.detach().double()

    shard = Shard(len(weight), 0)
    if group is not None:
        rows_of_rank = len(weight) // group.size
        first = rows_of_rank * group.rank
        shard = VocabularyShard(len(weight), first, lambda x: all_gather(x[None], 0, group))
        weight = weight[first:][:rows_of_rank].detach().clone().requires_grad_()
    loss = partial(chunked, chunk=chunk, compile=compile, shard=shard, others=others)
    with mock.patch("model.loss.token_loss", CHANGES.get(name, model.loss.token_loss)):
        total, x_grad, weight_grad = gradients(loss, x, weight, targets)
        with torch.no_grad():
            assert is_near(loss(x, weight, targets), exact, 1e-6)
    if group is not None:
        assert (all_gather(total[None], 0, group) == total).all()
        x_grad = all_reduce(x_grad.double(), group)
        weight_grad = all_gather(weight_grad, 0, group)
    bound = bound if x.dtype == torch.float32 else 4e-3  # gradients are rounded
    for ours, theirs, at_most in zip((total, x_grad, weight_grad), expected, (1e-6, bound, bound)):
        assert is_near(ours, theirs, at_most)
    assert len(rows) == chunked_cross_entropy(x, weight, targets, shard=shard)[1]


@pytest.mark.quick
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_gradients_of_any_loss(name, dtype, chunk):
    check_loss(name, problem(dtype), chunk)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_any_compiled_loss(name):
    for backend, chunk in [("aot_eager", 25), ("aot_eager", 64), ("inductor", 25)]:
        if backend == "aot_eager" or name in ("soft_cap", "distillation"):
            torch._dynamo.reset()
            with compiled_by(backend):
                check_loss(name, problem(torch.bfloat16), chunk, compile=True)


@pytest.mark.parametrize("ranks", [2, 4])
@distributed()
def test_values_and_gradients_of_any_loss_on_shards_of_the_vocabulary(world, ranks):
    group = group_of(build_mesh("cpu", (1, 1, 1, ranks))["tp"])
    for name in LOSSES:
        for chunk in (16, 64):
            check_loss(name, problem(), chunk, group=group)
        if ranks == 2:
            torch._dynamo.reset()
            with compiled_by("aot_eager"):
                check_loss(name, problem(torch.bfloat16), 25, True, group)
    for scaled in (0, 72):  # the logits of one shard lie hundreds above the others'
        x, weight, targets = problem()
        weight.data[scaled : scaled + 24] *= 60
        targets[:5] = torch.tensor([0, 24, 48, 72, 95])  # where shards begin
        check_loss("token_loss", (x, weight, targets), 16, group=group, bound=2e-5)


class Made(TorchDispatchMode):
    """What operators make: the largest tensor, and how many of one shape live at the same time."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape = shape
        self.largest = self.live = 0
        self.results: list[weakref.ref] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                is_expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
                if tensor.shape == self.shape and not is_expanded:
                    self.results.append(weakref.ref(tensor))
        alive = [t for t in (ref() for ref in self.results) if t is not None]
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
@pytest.mark.parametrize("target", [-1, 96])
@pytest.mark.parametrize("trains", [True, False])
def test_a_target_outside_the_vocabulary_is_refused(target, trains):
    x, weight, targets = problem()
    targets[-1] = target
    with torch.set_grad_enabled(trains), pytest.raises(RuntimeError, match="not in the vocabulary"):
        chunked(x, weight, targets, 16)
