"""The chunked loss against torch's own cross entropy, and what it keeps in memory."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from config import IGNORE
from model.llama import Llama
from model.loss import chunked_cross_entropy, logits_gradient, softmax_parts
from parallel.tensor import VocabularyShard
from tests.conftest import make_config


def problem(dtype: torch.dtype, tokens: int = 50, dim: int = 16, vocab: int = 97):
    torch.manual_seed(0)
    x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::7] = IGNORE
    return x, weight, targets


def plain(x, weight, targets):
    return F.cross_entropy(
        F.linear(x, weight).float(), targets, ignore_index=IGNORE, reduction="sum"
    )


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
def test_equals_unchunked(chunk):
    x, weight, targets = problem(torch.float64 if chunk == 7 else torch.float32)
    sums, count = chunked_cross_entropy(x, weight, targets, chunk)
    total = sums["loss"]
    (total * 0.3).backward()
    ours = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    expected = plain(x, weight, targets)
    (expected * 0.3).backward()
    assert count.item() == (targets != IGNORE).sum().item()
    assert torch.allclose(total, expected, rtol=1e-6)
    assert torch.allclose(ours[0], x.grad, atol=1e-6) and torch.allclose(
        ours[1], weight.grad, atol=1e-6
    )


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("chunk", [128, 512])
def test_bfloat16_gradients_are_those_of_the_plain_loss(chunk, compile):
    """To 1e-4 of their norm: of several chunks, and of one, whose slope waits for the scale. Compiled, there is another
    order of summation only."""
    x, weight, targets = problem(torch.bfloat16, tokens=512, dim=64, vocab=997)
    grads = []
    for total in (
        chunked_cross_entropy(x, weight, targets, chunk, compile)[0]["loss"],
        plain(x, weight, targets),
    ):
        x.grad = weight.grad = None
        (total * 0.25).backward()
        grads.append((total.detach(), x.grad.double(), weight.grad.double()))
    for ours, expected in zip(*grads):
        assert (ours - expected).norm() <= 1e-4 * expected.norm()


def test_compiled_the_gradient_overwrites_the_logits_without_a_second_buffer():
    """Bit for bit what eager mode computes. The generated code allocates no buffer of the logits' shape."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(48, 97)).bfloat16()
    index = torch.randint(0, 97, (48, 1))
    own = (torch.arange(48)[:, None] % 5 > 0).float()  # 0.0: the target is in another rank's part
    scale = torch.rand(48, 1)
    exponentials, *columns = softmax_parts(logits.clone(), index)
    expected = logits_gradient(logits.clone(), index, exponentials, *columns, own, scale)
    torch._dynamo.reset()
    in_place = torch.compile(logits_gradient, fullgraph=True)
    found, (code,) = run_and_get_code(in_place, logits, index, None, *columns, own, scale)
    assert torch.equal(found, expected)
    assert found.data_ptr() == logits.data_ptr()
    assert "empty_strided_cpu((48, 97" not in code
    _, (control,) = run_and_get_code(torch.compile(torch.sin), logits)
    assert "empty_strided_cpu((48, 97" in control


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_loss_that_is_called_nan_has_nan_gradients(chunk):
    """How a rank tells the others: its loss times NaN."""
    x, weight, targets = problem(torch.float32)
    (chunked_cross_entropy(x, weight, targets, chunk)[0]["loss"] * torch.nan).backward()
    assert x.grad.isnan().all() and weight.grad.isnan().all()


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(
    "scale, scaled",
    [  # by 60: one part's logits hundreds above and below the others', in float32
        (1.0, 0),
        (60.0, 0),
        (60.0, 24),
        (60.0, 72),
    ],
)
@pytest.mark.parametrize("shards", [2, 4])
def test_parts_of_a_vocabulary_give_the_whole_s_loss_and_gradients(shards, scale, scaled, chunk):
    """Each shard in a thread of its own, which meets the others where ranks would."""
    x, weight, targets = problem(torch.float32, vocab=96)
    weight.data[scaled : scaled + 24] *= scale
    targets[:5] = torch.tensor([0, 24, 48, 72, 95])  # where parts begin
    exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.cross_entropy(F.linear(*exact), targets, ignore_index=IGNORE, reduction="sum")
    (expected * 0.3).backward()
    meeting, brought = threading.Barrier(shards), [None] * shards

    def gather(rank: int, tensor: torch.Tensor) -> torch.Tensor:
        brought[rank] = tensor
        meeting.wait(60)
        every = torch.stack(brought)
        meeting.wait(60)
        return every

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        rows = 96 // shards
        ours = (
            x.detach().clone().requires_grad_(),
            weight[rank * rows :][:rows].detach().clone().requires_grad_(),
        )
        shard = VocabularyShard(rank * rows, partial(gather, rank))
        total = chunked_cross_entropy(*ours, targets, chunk, shard=shard)[0]["loss"]
        (total * 0.3).backward()
        return total.detach(), ours[0].grad, ours[1].grad

    with ThreadPoolExecutor(shards) as pool:
        totals, x_grads, weight_grads = zip(*pool.map(run, range(shards)))
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert totals[0].item() == pytest.approx(expected.item(), rel=1e-6)
    for found, wanted in (sum(x_grads), exact[0].grad), (torch.cat(weight_grads), exact[1].grad):
        assert (found - wanted).norm() < (
            1e-6 if scale == 1.0 else 2e-5
        ) * wanted.norm()  # of logits in the hundreds


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("trained", ["x", "weight"])
def test_one_of_both_may_be_frozen(trained, chunk):
    x, weight, targets = problem(torch.float32)
    (x if trained == "weight" else weight).requires_grad_(False)
    for loss in (
        chunked_cross_entropy(x, weight, targets, chunk)[0]["loss"],
        -plain(x, weight, targets),
    ):
        loss.backward()  # the second takes away what the first has added
    learns = weight if trained == "weight" else x
    assert learns.grad.abs().max() < 1e-5 and (x if trained == "weight" else weight).grad is None
    chunked_cross_entropy(x, weight, targets, chunk)[0]["loss"].backward()
    assert learns.grad.abs().max() > 0.1


def test_all_targets_ignored():
    x, weight, targets = problem(torch.float32)
    sums, count = chunked_cross_entropy(x, weight, torch.full_like(targets, IGNORE), 8)
    total = sums["loss"]
    total.backward()
    assert total.item() == 0 and count.item() == 0 and not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("chunk", [8, 64])
def test_large_logits_stay_finite(chunk):
    x, weight, targets = problem(torch.float32)
    total = chunked_cross_entropy(x * 1e4, weight, targets, chunk)[0]["loss"]
    total.backward()
    assert total.isfinite() and x.grad.isfinite().all()


def test_weight_gradient_is_summed_in_float32_and_rounded_once():
    x, weight, targets = problem(torch.bfloat16, tokens=512)
    chunked_cross_entropy(x, weight, targets, 8)[0]["loss"].backward()
    # The same slopes (rounded to bfloat16 as they must be for a bfloat16 product), multiplied exactly, rounded once
    logits = F.linear(x, weight).detach().float()
    slope = logits.softmax(-1) - F.one_hot(targets.clamp(min=0), len(weight))
    slope[targets == IGNORE] = 0
    exact = slope.bfloat16().double().T @ x.detach().double()
    error = (weight.grad.double() - exact).abs()
    half_a_step = exact.abs() * 2.0**-8  # bfloat16 has 8 bits
    assert (error <= half_a_step + 1e-4).all()


class Shapes(TorchDispatchMode):
    """Records the largest number of elements of any result of at least two dimensions, by dtype."""

    def __init__(self):
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
        return result


class Live(TorchDispatchMode):
    """Records how many storages of results of one shape exist at the same time, at most."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape = shape
        self.results: list[weakref.ref] = []
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape:
            self.results.append(weakref.ref(result))
        alive = [tensor for tensor in (ref() for ref in self.results) if tensor is not None]
        storages = {tensor.untyped_storage().data_ptr() for tensor in alive}
        self.most = max(self.most, len(storages))
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_a_chunk_s_logits_are_freed_before_the_next_chunk_s(trains):
    """In float32, whose logits every later result overwrites."""
    x, weight, targets = problem(torch.float32, tokens=96)
    with torch.set_grad_enabled(trains), Live((32, 97)) as seen:
        total = chunked_cross_entropy(x, weight, targets, 32)[0]["loss"]
        if trains:
            total.backward()
    assert seen.most == 1


def test_logits_of_the_whole_batch_never_exist(monkeypatch):
    """A full training step: no tensor of tokens x vocabulary is made, in float32 or otherwise."""
    import model.llama

    chunk = 16
    tokens = 128
    vocab = 997
    monkeypatch.setattr(
        model.llama,
        "chunked_cross_entropy",
        lambda *a, **options: chunked_cross_entropy(*a, chunk, **options),
    )
    llama = Llama(make_config(model={"vocab_size": vocab}).model)
    ids = torch.randint(0, vocab, (4, tokens // 4 + 1))
    with Shapes() as seen:
        llama(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    # the largest are the head's matrix and its gradient; a chunk of logits is smaller
    assert max(seen.largest.values()) == vocab * 48 < tokens * vocab
    with Shapes() as seen:  # and the measure does see them where they are made
        llama(ids[:, :-1])
    assert seen.largest[torch.float32] == tokens * vocab


def test_no_gradients_are_computed_under_no_grad():
    x, weight, targets = problem(torch.float32, tokens=64)
    with torch.no_grad(), Shapes() as seen:
        chunked_cross_entropy(x, weight, targets, 32)
    # the chunk's logits, and no gradient of x or weight beside them
    assert max(seen.largest.values()) == 32 * 97
