"""The large buffers that Inductor's code allocates, for every compiled region: none that a reader of
the model would not expect, such as a second buffer of logits, or an activation in float32.

A size is named by the shape that it is the product of: N tokens, D model dimension, Q and K the
widths of queries and of keys, F feed-forward dimension. "N.D" is an activation, "D.F" a weight.
"""

import math
import pathlib
import re

import pytest

from tests.fake_cuda import configurations
from tests.fake_cuda.configurations import Text

N = 896
D = 384
Q = 512
K = 256
F = 1280
V = 3072
MODEL = {
    "dim": D,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 128,
    "ffn_dim": F,
    "vocab_size": V,
}
SIZES = {
    N * D: "N.D",
    N * Q: "N.Q",
    N * K: "N.K",
    N * F: "N.F",
    D * Q: "D.Q",
    D * K: "D.K",
    D * F: "D.F",
}
HALVES = {size // 2: f"{name} / 2" for size, name in SIZES.items()}  # with tp or cp = 2
# a plain block's: outputs of matmuls, of norms, of RoPE and of the gate, and their gradients
ALLOWED = {(size, "bfloat16") for size in SIZES.values()}
HALF = {(size, "bfloat16") for size in HALVES.values()}
# smaller are statistics of norms, sums of the loss, products with an adapter
LARGE = 32 * N
# inputs and weights of matmuls, and gradients of their outputs, for tensorwise scales
FLOAT8 = {
    ("N.D", "float8_e4m3fn"),
    ("N.F", "float8_e4m3fn"),
    ("N.F", "float8_e5m2"),
    ("N.D", "float8_e5m2"),
    ("D.F", "float8_e4m3fn"),
    ("D.F", "uint8"),  # what is all-gathered
}
# name: (ranks, what is allowed too, options by section)
REGIONS: dict[str, tuple[int, set[tuple[str, str]], dict]] = {
    "plain": (1, set(), {}),
    "qk_norm": (1, set(), {"model": {"qk_norm": True}}),
    "document mask": (1, set(), {"data": {"document_mask": True}}),
    "lora": (1, set(), {"lora": {"rank": 8}}),
    "nf4": (1, set(), {"lora": {"rank": 8, "base_dtype": "nf4"}}),
    "tp": (2, HALF, {"parallel": {"tp": 2}}),
    "cp": (2, HALF, {"parallel": {"cp": 2}}),
    "muon": (2, set(), {"optim": {"name": "muon"}}),
    "float8": (1, FLOAT8, {"parallel": {"float8": "tensorwise"}}),
}
QUICK = {"plain"}
ALLOCATION = re.compile(r"= empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


def large_buffers(cache: pathlib.Path) -> set[tuple[str, str]]:
    """(size, dtype) of each that Inductor's code in this cache allocates."""
    buffers = set()
    for file in cache.rglob("*.py"):
        for shape, dtype in ALLOCATION.findall(file.read_text()):
            count = math.prod(int(number) for number in shape.split(",") if number.strip())
            if count >= LARGE:
                name = SIZES.get(count) or HALVES.get(count) or f"({shape})"
                buffers.add((name, dtype))
    return buffers


@pytest.mark.parametrize(
    "region", [pytest.param(r, marks=() if r in QUICK else pytest.mark.full) for r in REGIONS]
)
def test_large_buffers(region: str, text: Text, tmp_path: pathlib.Path) -> None:
    ranks, allowed, sections = REGIONS[region]
    sections = {
        **sections,
        "model": {**MODEL, **sections.get("model", {})},
        "parallel": {
            "param_dtype": "bfloat16",
            "compile": True,
            **sections.get("parallel", {}),
        },
        "train": {"steps": 2, "seq_len": N // 2, "global_batch_size": 4, "micro_batch_size": 2},
    }
    path = configurations.write_small("buffers", text, tmp_path, **sections)
    cache = tmp_path / "cache"  # empty, so that all code is written there
    configurations.run_alone(path, ranks, cache=cache)
    buffers = large_buffers(cache)
    assert ("N.F", "bfloat16") in buffers
    assert buffers - ALLOWED - allowed == set()
