"""NF4 against torchao's, and against arithmetic written down here."""

import pytest
import torch
from torch._inductor import metrics

from extras.lora import nf4
from model.llama import Linear
from parallel.mesh import World, build_mesh
from parallel.tensor import shard_weights
from tests import cases
from tests.conftest import make_config


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao.quantization", reason="tests/requirements.txt has torchao")


def quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nf4.codes_of(weights), nf4.scales_of(weights)


def matrices():
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((256, 64), (256, 1024), (16, 28672)):
        normal = 0.02 * torch.randn(rows, columns, generator=generator)
        yield normal
        yield normal / torch.rand(rows, columns, generator=generator).sqrt()  # with heavy tails


def test_codes_are_those_of_torchao_and_the_error_is_no_larger(torchao):
    for weights in matrices():
        theirs = torchao.NF4Tensor.from_tensor(
            weights, 64, 256 if weights.numel() % (64 * 256) == 0 else 1
        )
        codes, scales = quantize(weights)
        assert torch.equal(theirs.nf4, torch.tensor(nf4.CODE_BOOK))
        assert torch.equal(codes.flatten(), theirs.quantized_data.flatten())
        error = (nf4.dequantize(codes, scales, torch.float32) - weights).norm()
        assert error < 1.01 * (theirs.get_original_weight() - weights).norm()


def test_a_weight_is_its_code_times_its_magnitude():
    """Magnitudes come back within half a step of their range; rows of nothing but zeros, and equal ones, exactly."""
    weights = next(matrices())[:, :64].repeat(1, 300)  # two ranges a row
    weights[:, 64:] *= torch.linspace(1, 3, weights.shape[1] - 64)
    weights[3], weights[4] = 0.0, torch.tensor([1.0, -1.0]).repeat(300 * 32)
    codes, scales = quantize(weights)
    assert codes.shape == (256, 300 * 32) and scales.shape == (256, nf4.scale_bytes(300 * 64)) == (
        256,
        300 + 16,
    )
    found = nf4.dequantize(codes, scales, torch.float32)
    assert not found[3].any() and found[4].equal(weights[4])
    magnitude = weights.view(256, 300, 64).abs().amax(-1)
    recovered = found.view(256, 300, 64).abs().amax(-1)
    for part, theirs in zip(magnitude.split(256, 1), recovered.split(256, 1)):
        assert (
            (part - theirs).abs() <= (part.amax(1) - part.amin(1))[:, None] / 510 * 1.01 + 1e-7
        ).all()
    exact = torch.tensor(nf4.CODE_BOOK) * 0.5  # each value of the code book is its own nearest
    row = torch.cat([exact, exact.flip(0), exact, exact])[None]
    assert nf4.dequantize(*quantize(row), torch.float32).equal(row)


def test_some_columns_of_the_codes_are_those_columns():
    weights = torch.randn(8, 64 * 300, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weights)
    whole = nf4.dequantize(codes, scales, torch.float32)
    for first, last in (0, 100), (250, 300), (256, 258):
        part = nf4.dequantize(codes[:, 32 * first : 32 * last], scales, torch.float32, first)
        assert part.equal(whole[:, 64 * first : 64 * last])
    # as torch 2.11 sends them
    assert nf4.dequantize(codes.bfloat16(), scales.bfloat16(), torch.float32).equal(whole)
    assert nf4.dequantize(codes, scales, torch.bfloat16).equal(whole.bfloat16())  # rounded once


@pytest.mark.parametrize("blocks", [1, 248, 255, 256, 257, 512])
def test_a_range_has_up_to_256_blocks(blocks):
    weights = torch.randn(2, 64 * blocks, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weights)
    assert scales.shape[1] == nf4.scale_bytes(64 * blocks) == blocks + 8 * (1 + (blocks > 256))
    assert (nf4.dequantize(codes, scales, torch.float32) - weights).norm() < 0.1 * weights.norm()


def test_the_product_and_its_gradient_are_those_of_the_weights():
    x = torch.randn(2, 5, 128, requires_grad=True, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(torch.randn(24, 128, generator=torch.Generator().manual_seed(1)))
    weights, kept = nf4.dequantize(codes, scales, torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = nf4.nf4_matmul(x, codes, scales, 0, False)
    assert {t.dtype for t in kept} == {torch.uint8}  # 4 bits a weight between forward and backward
    out.square().sum().backward()
    again = x.detach().requires_grad_()
    torch.nn.functional.linear(again, weights).square().sum().backward()
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weights))
    torch.testing.assert_close(x.grad, again.grad)


@pytest.mark.parametrize(
    "columns", [192, 1024, 64 * 300]
)  # of the first no row's scales are aligned for float32
def test_compiled_it_is_one_kernel(columns):
    """Of every matrix, of a column shard, and of bytes that torch 2.11 has sent as bfloat16."""
    codes, scales = quantize(torch.randn(24, columns, generator=torch.Generator().manual_seed(0)))
    torch._dynamo.reset()  # its limit of recompilations is eight
    first = columns // 3 // 64
    for c, s, at in (
        (codes, scales, 0),
        (codes.bfloat16(), scales.bfloat16(), 0),
        (codes[:, 32 * first :], scales, first),
    ):
        metrics.reset()
        found = nf4.dequantize(
            c, s, torch.float32, at, nf4.cached_byte_values(c.device), compiled=True
        )
        torch.testing.assert_close(found, nf4.dequantize(c, s, torch.float32, at))
        assert metrics.generated_kernel_count == 1


@pytest.mark.parametrize("tp", [2, 4])
def test_each_tp_rank_dequantizes_its_own_columns(tp):
    """Of o_proj two blocks for each rank, of down_proj three, by the scales of the full rows."""
    sizes = {
        "dim": 64 * tp,
        "n_heads": 2 * tp,
        "n_kv_heads": tp,
        "head_dim": 64,
        "ffn_dim": 192 * tp,
    }
    cfg = make_config(
        model={**sizes, "init_from": "a folder"}, lora={"base_dtype": "nf4", "rank": 2}
    )
    for rank in range(tp):
        model = cases.meta_model(cfg.model, cfg.lora)
        with cases.fake_process_group(tp, rank):
            shard_weights(
                model, World(rank, tp, torch.device("cpu"), build_mesh("cpu", (1, 1, 1, tp)))
            )
        block = model.blocks[1]
        for module in (block.attention.o_proj, block.feed_forward.down_proj):
            full = torch.randn(
                module.out_features, module.in_features, generator=torch.Generator().manual_seed(0)
            )
            full *= torch.linspace(1, 9, module.in_features)  # each block has another scale
            (codes, scales), columns = quantize(full), module.in_features // tp
            part = codes[:, rank * columns // 2 :][:, : columns // 2]
            assert module.weight.shape == part.shape and module.scales.shape == scales.shape
            found = nf4.dequantize(part, scales, torch.float32, module.first_input // 64)
            assert found.equal(
                nf4.dequantize(codes, scales, torch.float32)[:, rank * columns :][:, :columns]
            )
        assert {
            module.first_input for module in (block.attention.q_proj, block.feed_forward.up_proj)
        } == {0}


MODEL = {
    "dim": 192,
    "n_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 64,
    "ffn_dim": 384,
    "vocab_size": 320,
}


@pytest.mark.parametrize("name, quantized", [("weight", nf4.codes_of), ("scales", nf4.scales_of)])
def test_large_matrices_are_quantized_some_rows_at_a_time(monkeypatch, name, quantized):
    monkeypatch.setattr(nf4, "CHUNK", 7 * 128)
    weights, filled = torch.randn(100, 128, generator=torch.Generator().manual_seed(0)), []

    def fill(name: str, offsets: tuple[int, int], out: torch.Tensor, shape: torch.Size) -> None:
        assert name == "q_proj.weight" and shape == weights.shape
        out.copy_(weights[offsets[0] : offsets[0] + len(out)])
        filled.append(len(out))

    part = quantized(weights)[30:90]  # a rank's
    out = torch.zeros_like(part)
    nf4.NF4Linear(Linear(128, 100)).quantize(f"q_proj.{name}", (30, 0), out, fill)
    assert out.equal(part) and filled == [*[7] * 8, 4]


def test_bits_do_not_depend_on_the_ranks(on_ranks, tmp_path, monkeypatch):
    """Of a fresh base on 1, 2, 3 and 4 ranks, and over tp: each block of rows is quantized by itself."""
    torch.manual_seed(0)

    def sections(**parallel) -> dict:
        return {
            "model": {**MODEL, "init_from": str(tmp_path)},
            "lora": {"base_dtype": "nf4", "rank": 2},
            "parallel": parallel,
            "train": {"global_batch_size": 12, "micro_batch_size": 1},
        }

    found = []
    for ranks in (1, 2, 3, 4):
        every = {"": sections(), **({"tp": sections(tp=2)} if ranks % 2 == 0 and ranks < 4 else {})}
        found += on_ranks(ranks, cases.weight_hashes, every, False)[0].values()
    assert len(found) == 5 and all(hashes == found[0] for hashes in found)
    model = cases.meta_model(make_config(**sections()).model, make_config(**sections()).lora)
    packed = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(packed) == 2 * 7 * 2 and packed < {*found[0]}
