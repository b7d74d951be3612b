"""Attention inside documents, against the documents one by one; its masks, also of a part of a sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from config import IGNORE
from data.loader import positions
from model import attention
from model.attention import document_mask, make_mask, mask_mod
from parallel.context import local_mask_mod, local_positions
from parallel.mesh import World
from tests.conftest import gradients_of, is_near, make_config, token_ids
from tests.reference import fresh_model

LENGTHS = [[5, 1, 26], [32], [1, 1, 15, 15]]  # of the documents of each row


@pytest.mark.quick
@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True, "qk_norm": True}])
def test_documents_are_computed_as_if_alone(model):
    """Loss and every gradient; a target in the next document counts nowhere."""
    llama = fresh_model(make_config(model=model))
    rows = token_ids(3, 33)
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    documents = 7 + 3 * torch.stack(numbers)  # with gaps, as in the middle of a corpus
    targets = rows[:, 1:].clone()
    targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE
    targets[:, -1] = IGNORE
    sums, count = llama(rows[:, :-1], targets, positions(documents), documents)
    sums["loss"].backward()
    together = gradients_of(llama)
    llama.zero_grad()
    alone = torch.zeros(())
    for row, lengths in zip(rows, LENGTHS):
        for document in row[:-1].split(lengths):
            if len(document) > 1:
                logits = llama(document[None, :-1])[0]
                alone = alone + F.cross_entropy(logits, document[1:], reduction="sum")
    alone.backward()
    assert count == sum(length - 1 for row in LENGTHS for length in row)
    assert sums["loss"].item() == pytest.approx(alone.item(), rel=1e-6)
    for name, gradient in gradients_of(llama).items():
        assert is_near(together[name], gradient, 1e-4), name


def positions_of(rank: int, cp: int, length: int) -> torch.Tensor:
    mesh: Any = SimpleNamespace(get_local_rank=lambda name: rank, size=(1, 1, cp, 1).__getitem__)
    return local_positions(World(rank, cp, torch.device("cpu"), mesh), length)


@pytest.mark.quick
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_block_mask_of_a_gpu_is_the_plain_mask(cp, masked):
    length = 400
    documents = token_ids(2, length, vocab_size=6).sort(dim=1).values if masked else None
    own = positions_of(cp - 1, cp, length)
    rule = local_mask_mod(documents, own) if cp > 1 else mask_mod(documents)
    q, k, v = (torch.randn(2, heads, length, 16) for heads in (4, 2, 2))
    q = q[:, :, own] if cp > 1 else q
    batch = 2 if masked else 1
    block = create_block_mask(rule, batch, None, q.shape[2], length, "cpu")
    plain = make_mask(rule, batch, q.shape[2], length, torch.device("cpu"))
    ours = attention.attention(q, k, v, block)
    assert torch.allclose(ours, attention.attention(q, k, v, plain), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_compiled_once_and_equal():
    torch._dynamo.reset()
    for seed in range(4):
        documents = token_ids(2, 512, vocab_size=6, seed=seed).sort(dim=1).values
        q, k, v = (
            torch.randn(2, heads, 512, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2)
        )
        gradients = []
        plain: Any = document_mask(documents)
        for mask in (document_mask(documents.cuda()), plain.cuda()):
            loss = attention.attention(q, k, v, mask).square().sum()
            gradients.append(torch.autograd.grad(loss, (q, k, v)))
        for ours, theirs in zip(*gradients):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
