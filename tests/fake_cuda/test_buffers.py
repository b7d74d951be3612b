"""The large buffers that Inductor's code allocates, for every compiled region: none that a reader of the model would
not expect, such as a second buffer of logits, or an activation in float32.

A size is named by the shape that it is the product of: N tokens, D model dimension, Q and K the widths of queries and
of keys, F feed-forward dimension. "N.D" is an activation, "D.F" a weight.
"""

import math
import re

import pytest

from tests.fake_cuda.build import run_alone
from tests.fake_cuda.configurations import marked, write_small

WIDTHS = {"N": 896, "D": 384, "Q": 512, "K": 256, "F": 1280}
OPTIONS = """--model.dim=384 --model.n_heads=4 --model.n_kv_heads=2 --model.head_dim=128 --model.ffn_dim=1280
    --model.vocab_size=3072 --parallel.compile=true --train.steps=2 --train.seq_len=448 --train.global_batch_size=4
    --train.micro_batch_size=2"""
# a plain block's: outputs of matmuls, of norms, of RoPE and of the gate, and their gradients
NAMES = ("N.D", "N.Q", "N.K", "N.F", "D.Q", "D.K", "D.F")
SIZES = {WIDTHS[name[0]] * WIDTHS[name[2]]: name for name in NAMES}
HALVES = {size // 2: f"{name} / 2" for size, name in SIZES.items()}  # with tp or cp = 2
HALF = {f"{name} bfloat16" for name in HALVES.values()}
LARGE = 32 * 896  # smaller are statistics of norms, sums of the loss, products with an adapter
# inputs and weights of matmuls, and gradients of their outputs, for tensorwise scales; what is all-gathered
FLOAT8 = {f"{name} float8_{kind}" for name in ("N.D", "N.F") for kind in ("e4m3fn", "e5m2")}
FLOAT8 |= {"D.F float8_e4m3fn", "D.F uint8"}
REGIONS: dict[str, tuple[int, set[str], str]] = {  # (ranks, what is allowed too, options)
    "plain": (1, set(), ""),
    "qk_norm": (1, set(), "--model.qk_norm=true"),
    "document mask": (1, set(), "--data.document_mask=true"),
    "lora": (1, set(), "--lora.rank=8"),
    "nf4": (1, set(), "--lora.rank=8 --lora.base_dtype=nf4"),
    "tp": (2, HALF, "--parallel.tp=2"),
    "cp": (2, HALF, "--parallel.cp=2"),
    "muon": (2, set(), "--optim.name=muon"),
    "float8": (1, FLOAT8, "--parallel.float8=tensorwise"),
}
ALLOCATION = re.compile(r"= empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


@pytest.mark.parametrize("region", marked(REGIONS, {"plain"}))
def test_large_buffers(region, tmp_path):
    ranks, allowed, options = REGIONS[region]
    cache = tmp_path / "cache"  # empty, so that all code is written there
    run_alone(write_small(tmp_path, f"{OPTIONS} {options}"), ranks, cache=cache)
    buffers = set()
    for file in cache.rglob("*.py"):
        for shape, dtype in ALLOCATION.findall(file.read_text()):
            count = math.prod(int(number) for number in shape.split(",") if number.strip())
            if count >= LARGE:
                buffers.add(f"{SIZES.get(count) or HALVES.get(count) or shape} {dtype}")
    assert "N.F bfloat16" in buffers
    assert buffers - {f"{name} bfloat16" for name in NAMES} - allowed == set()
