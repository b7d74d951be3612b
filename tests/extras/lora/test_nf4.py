"""NF4 against torchao's, and against arithmetic written down here."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import metrics
from torchao.quantization import NF4Tensor

import config
from extras.lora import nf4
from model.llama import Linear, named_parameters
from tests.conftest import build, hashes, make_config, mesh_for
from tests.distributed import run_on_ranks


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    return nf4.codes_of(weights), nf4.scales_of(weights)


def rounded(weights: Tensor) -> Tensor:
    return nf4.dequantize(*quantize(weights), torch.float32)


@pytest.mark.quick
@pytest.mark.parametrize("rows, columns", [(256, 64), (256, 1024), (16, 28672)])
def test_codes_are_those_of_torchao_and_the_error_is_no_larger(rows, columns):
    weights = 0.02 * random(rows, columns) / random(rows, columns, seed=1).abs().sqrt()
    theirs = NF4Tensor.from_tensor(weights, 64, 256 if weights.numel() % (64 * 256) == 0 else 1)
    assert torch.equal(theirs.nf4, torch.tensor(nf4.CODE_BOOK))
    assert torch.equal(nf4.codes_of(weights).flatten(), theirs.quantized_data.flatten())
    error = (rounded(weights) - weights).norm()
    assert error < 1.01 * (theirs.get_original_weight() - weights).norm()


@pytest.mark.quick
@pytest.mark.parametrize("blocks", [1, 255, 256, 257, 512])
def test_magnitudes_come_back_within_half_a_step_of_their_range(blocks):
    """A range has up to 256 blocks; rows of zeros, and equal magnitudes, come back exactly."""
    weights = random(8, 64 * blocks) * torch.linspace(1, 3, 64 * blocks)
    weights[3] = 0.0
    weights[4] = torch.tensor([1.0, -1.0]).repeat(blocks * 32)
    _, scales = quantize(weights)
    assert scales.shape[1] == nf4.scale_bytes(64 * blocks) == blocks + 8 * (1 + (blocks > 256))
    found = rounded(weights)
    assert not found[3].any()
    assert found[4].equal(weights[4])
    magnitudes = weights.view(8, blocks, 64).abs().amax(-1).split(256, 1)
    recovered = found.view(8, blocks, 64).abs().amax(-1).split(256, 1)
    for exact, ours in zip(magnitudes, recovered):
        half_a_step = (exact.amax(1) - exact.amin(1))[:, None] / 510
        assert ((exact - ours).abs() <= half_a_step * 1.01 + 1e-6).all()


def test_some_columns_of_the_codes_are_those_columns():
    codes, scales = quantize(random(8, 64 * 300))
    full = nf4.dequantize(codes, scales, torch.float32)
    for first, last in (0, 100), (250, 300), (256, 258):
        part = nf4.dequantize(codes[:, 32 * first : 32 * last], scales, torch.float32, first)
        assert part.equal(full[:, 64 * first : 64 * last])
    # as torch 2.11 sends them; and rounded once
    assert nf4.dequantize(codes.bfloat16(), scales.bfloat16(), torch.float32).equal(full)
    assert nf4.dequantize(codes, scales, torch.bfloat16).equal(full.bfloat16())


@pytest.mark.parametrize("compiled", [False, True])
def test_product_and_gradient_are_those_of_the_weights(compiled):
    """4 bits a weight are kept until backward, not the weights made of them."""
    multiply = partial(nf4.nf4_matmul, first_block=0, compiled=False)
    if compiled:
        torch._dynamo.reset()
        multiply = torch.compile(multiply, backend="aot_eager_decomp_partition")
    x = random(10, 128).view(2, 5, 128).requires_grad_()
    codes, scales = quantize(random(24, 128, seed=1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = multiply(x, codes, scales)
    assert {t.dtype for t in kept} == {torch.uint8}
    out.square().sum().backward()
    again = x.detach().requires_grad_()
    wanted = F.linear(again, nf4.dequantize(codes, scales, torch.float32))
    wanted.square().sum().backward()
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(x.grad, again.grad)


@pytest.mark.quick
@pytest.mark.parametrize("columns", [192, 64 * 300])  # of the first no row's scales are aligned
def test_compiled_it_is_one_kernel(columns):
    codes, scales = quantize(random(24, columns))
    torch._dynamo.reset()
    for first in (0, columns // 3 // 64):
        metrics.reset()
        arguments = (codes[:, 32 * first :], scales, torch.float32, first)
        values = nf4.cached_byte_values(codes.device)
        found = nf4.dequantize(*arguments, values, compiled=True)
        torch.testing.assert_close(found, nf4.dequantize(*arguments))
        assert metrics.generated_kernel_count == 1


def test_large_matrices_are_quantized_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(nf4, "CHUNK", 7 * 128)
    weights = random(100, 128)
    for name, quantized in ("weight", nf4.codes_of), ("scales", nf4.scales_of):
        read = []

        def fill(name: str, offset: tuple, out: Tensor, shape: torch.Size, read=read) -> None:
            out.copy_(weights[offset[0] : offset[0] + len(out)])
            read.append(len(out))

        part = quantized(weights)[30:90]  # a rank's
        out = torch.zeros_like(part)
        nf4.NF4Linear(Linear(128, 100)).quantize(f"q_proj.{name}", (30, 0), out, fill)
        assert out.equal(part)
        assert read == [*[7] * 8, 4]


def nf4_config(tp: int = 1) -> config.Config:
    sizes = {"dim": 192, "n_heads": 2, "n_kv_heads": 2, "head_dim": 64, "ffn_dim": 384}
    return make_config(
        model={**sizes, "init_from": "a folder"},
        lora={"base_dtype": "nf4", "rank": 2},
        train={"global_batch_size": 12, "micro_batch_size": 1},
        parallel={"tp": tp},
    )


def test_bits_do_not_depend_on_the_mesh():
    def bits(world, tp: int) -> dict[str, str]:
        cfg = nf4_config(tp)
        return hashes(dict(named_parameters(build(cfg, mesh_for(cfg, world)))))

    wanted = run_on_ranks(1, bits, 1)[0]
    for ranks, tp in (2, 1), (3, 1), (2, 2):
        assert run_on_ranks(ranks, bits, tp)[0] == wanted, (ranks, tp)
