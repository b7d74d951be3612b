"""Inductor's and Triton's kernels of every family compile for each GPU: ptxas accepts them, and they fit its shared
memory."""

import json
import pathlib

import pytest

from tests.fake_cuda import configurations
from tests.fake_cuda.configurations import LARGE_ENOUGH_FOR_FLOAT8, Text

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
HEADS_OF_128 = {"dim": 512, "n_heads": 4, "n_kv_heads": 2, "head_dim": 128}
# name: (ranks, parts of kernels' names, options by section); each compiles blocks and loss, too
FAMILIES = {
    "plain": (1, [], {}),
    "document mask, qk_norm": (
        1,
        ["flex_attention", "flex_attention_backward"],
        {"data": {"document_mask": True}, "model": {**HEADS_OF_128, "qk_norm": True}},
    ),
    "cp": (
        2,
        ["flex_attention", "flex_attention_backward"],
        {"parallel": {"cp": 2}, "model": HEADS_OF_128},
    ),
    "muon": (1, [], {"optim": {"name": "muon"}}),
    "nf4": (1, [], {"lora": {"rank": 4, "base_dtype": "nf4"}}),
    "adamw_bfloat16": (1, [], {"optim": {"state_dtype": "bfloat16"}}),
    "float8 tensorwise": (
        2,
        ["amax"],
        {"parallel": {"float8": "tensorwise"}, "model": LARGE_ENOUGH_FOR_FLOAT8},
    ),
    "float8 rowwise": (
        2,
        ["amax"],
        {"parallel": {"float8": "rowwise"}, "model": LARGE_ENOUGH_FOR_FLOAT8},
    ),
}
QUICK = ("document mask, qk_norm", "9.0")


def cases() -> list:
    parameters = []
    for family in FAMILIES:
        for capability in CAPABILITIES:
            if "float8" in family and capability in ("8.0", "8.6"):
                continue  # no float8 units: refused
            marks = () if (family, capability) == QUICK else pytest.mark.full
            name = f"{family.replace(', ', '-').replace(' ', '-')}-{capability}"
            parameters.append(pytest.param(family, capability, marks=marks, id=name))
    return parameters


@pytest.mark.parametrize(("family", "capability"), cases())
def test_kernels_are_built(
    family: str,
    capability: str,
    text: Text,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, names, sections = FAMILIES[family]
    sections = {**sections, "parallel": {"compile": True, **sections.get("parallel", {})}}
    path = configurations.write_small("kernels", text, tmp_path, **sections)
    cache = tmp_path / "cache"  # empty, so that everything is compiled
    configurations.run_alone(
        path, ranks, cache=cache, capability=capability, name=f"GPU of {capability}"
    )
    kernels = [json.loads(file.read_text()) for file in cache.rglob("*.json") if is_kernel(file)]
    assert len(kernels) > 5
    assert {kernel["target"]["arch"] for kernel in kernels} == {int(capability.replace(".", ""))}
    for part in names:
        assert any(part in kernel["name"] for kernel in kernels), part


def is_kernel(path: pathlib.Path) -> bool:
    """Whether it describes a kernel whose machine code lies next to it."""
    return path.with_suffix(".cubin").exists()
