"""Inductor's and Triton's kernels of every family compile for each GPU: ptxas accepts them, and they fit its shared
memory."""

import json

import pytest

from tests.fake_cuda.build import run_alone
from tests.fake_cuda.configurations import LARGE_ENOUGH_FOR_FLOAT8, marked, write_small

HEADS_OF_128 = "--model.dim=512 --model.n_heads=4 --model.n_kv_heads=2 --model.head_dim=128"
FAMILIES = {  # (ranks, options); each compiles blocks and loss, too
    "plain": (1, ""),
    "document-mask": (1, f"--data.document_mask=true --model.qk_norm=true {HEADS_OF_128}"),
    "cp": (2, f"--parallel.cp=2 {HEADS_OF_128}"),
    "muon": (1, "--optim.name=muon"),
    "nf4": (1, "--lora.rank=4 --lora.base_dtype=nf4"),
    "adamw_bfloat16": (1, "--optim.state_dtype=bfloat16"),
    "float8-tensorwise": (2, f"--parallel.float8=tensorwise {LARGE_ENOUGH_FOR_FLOAT8}"),
    "float8-rowwise": (2, f"--parallel.float8=rowwise {LARGE_ENOUGH_FOR_FLOAT8}"),
}
GPUS = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
CASES = [f"{family} {gpu}" for family in FAMILIES for gpu in GPUS]
# float8 needs units that the older ones lack
CASES = [case for case in CASES if "float8" not in case or not case.endswith((" 8.0", " 8.6"))]


@pytest.mark.parametrize("case", marked(CASES, {"document-mask 9.0"}))
def test_kernels_are_built(case, tmp_path):
    family, capability = case.split()
    ranks, options = FAMILIES[family]
    path = write_small(tmp_path, f"--parallel.compile=true {options}")
    cache = tmp_path / "cache"  # empty, so that everything is compiled
    run_alone(path, ranks, cache=cache, capability=capability, name=f"GPU of {capability}")
    files = [path for path in cache.rglob("*.json") if path.with_suffix(".cubin").exists()]
    kernels = [json.loads(path.read_text()) for path in files]
    assert len(kernels) > 5
    assert {kernel["target"]["arch"] for kernel in kernels} == {int(capability.replace(".", ""))}
