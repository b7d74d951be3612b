"""Attention inside documents, against the documents one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from config import IGNORE
from data.loader import positions
from model import attention
from model.llama import Llama
from tests.conftest import make_config

LENGTHS = [[5, 1, 26], [32], [1, 1, 15, 15]]  # of the documents of each row


def filled_model(**model: object) -> Llama:
    torch.manual_seed(0)
    llama = Llama(make_config(model=model).model)
    for parameter in llama.parameters():
        torch.nn.init.normal_(
            parameter, 1.0, 0.3
        ) if parameter.ndim == 1 else torch.nn.init.normal_(parameter, 0, 0.2)
    return llama


def numbered(lengths: list[list[int]]) -> torch.Tensor:
    """Document numbers (B, T), with gaps, as a window in the middle of a corpus has them."""
    return torch.stack(
        [
            torch.repeat_interleave(torch.arange(7, 7 + 3 * len(row), 3), torch.tensor(row))
            for row in lengths
        ]
    )


def test_no_groups_in_float32_on_a_gpu(monkeypatch):
    """Where they would take the path that keeps all scores; the result is the same."""
    q = torch.randn(2, 4, 8, 16)
    k = torch.randn(2, 2, 8, 16)
    v = torch.randn(2, 2, 8, 16)
    expected = attention.attention(q, k, v, None)
    asked = []
    kernel = F.scaled_dot_product_attention

    def noting(q, k, v, enable_gqa, **keywords):
        asked.append((q.shape[1], k.shape[1], enable_gqa))
        return kernel(q, k, v, enable_gqa=enable_gqa, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16):
            attention.attention(
                *(torch.empty(t.shape, device="cuda", dtype=dtype) for t in (q, k, v)), None
            )
    assert asked == [(4, 4, False), (4, 2, True)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert torch.allclose(attention.attention(q, k, v, None), expected, atol=1e-6) and asked[
        -1
    ] == (4, 4, False)


def test_positions_restart():
    assert positions(numbered([[3, 1, 2], [6]])).tolist() == [
        [0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    "model", [{}, {"n_kv_heads": 4, "tie_embeddings": True}, {"rope_scaling": {"factor": 2.0}}]
)
def test_equal_to_the_documents_one_by_one(model):
    """Loss and every gradient; the target across a boundary belongs to no document."""
    llama = filled_model(**model)
    ids = torch.randint(0, 320, (3, 32), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    documents = numbered(LENGTHS)
    targets[
        torch.cat([documents[:, 1:] != documents[:, :-1], torch.ones(3, 1, dtype=torch.bool)], 1)
    ] = IGNORE
    sums, count = llama(ids, targets, positions(documents), documents)
    loss = sums["loss"]
    loss.backward()
    together = [p.grad.clone() for p in llama.parameters()]
    llama.zero_grad()
    alone = []
    for row, lengths in zip(ids, LENGTHS):
        for piece in row.split(lengths):
            if len(piece) > 1:
                alone.append(llama(piece[None, :-1], piece[None, 1:]))
    assert count == sum(n for _, n in alone) == sum(n - 1 for row in LENGTHS for n in row)
    total = sum(part["loss"] for part, _ in alone)
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    for a, p in zip(together, llama.parameters()):
        assert torch.allclose(a, p.grad, rtol=1e-4, atol=1e-5 * p.grad.abs().max().item())


def test_one_document_is_plain_causal_attention():
    llama, ids = filled_model(), torch.randint(0, 320, (2, 32))
    assert torch.allclose(llama(ids), llama(ids, documents=torch.zeros_like(ids)), atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("length", [32, 200])
def test_block_mask_is_the_plain_mask(length):
    """The form that a GPU takes, computed here without being compiled: FlexAttention trains on a GPU only."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(0, 6, (2, length), generator=generator).sort(dim=1).values
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    block = create_block_mask(attention.mask_mod(documents), 2, None, length, length, "cpu")
    plain = attention.attention(q, k, v, attention.document_mask(documents))
    assert torch.allclose(attention.attention(q, k, v, block), plain, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_compiled_once_and_equal():
    documents = [torch.randint(0, 6, (2, 512)).sort(dim=1).values.cuda() for _ in range(4)]
    torch._dynamo.reset()
    for each in documents:
        inputs = [
            torch.randn(2, heads, 512, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2)
        ]
        found = attention.attention(*inputs, attention.document_mask(each))
        found.square().sum().backward()
        gradients = [x.grad.clone() for x in inputs]
        for x in inputs:
            x.grad = None
        attention.attention(
            *inputs, attention.document_mask(each.cpu()).cuda()
        ).square().sum().backward()
        for ours, x in zip(gradients, inputs):
            assert torch.allclose(ours, x.grad, rtol=2e-2, atol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
