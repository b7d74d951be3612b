"""The block of docs/fsdp2.md that gathers the full model on rank 0 and sends it back, run as it stands there."""

import re

import pytest

from tests import cases
from tests.conftest import REPO
from tests.test_parallel import MODELS

SNIPPET = re.search(
    r"```python full-state\n(.*?)```", (REPO / "docs/fsdp2.md").read_text(), re.DOTALL
)[1]
CASES = {
    "uneven": MODELS["uneven"],
    "tied": MODELS["tied"],
    "wrapped": {**MODELS["uneven"], "parallel": {"recompute": "full"}},
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_full_model_comes_back(on_ranks, ranks):
    first, *others = on_ranks(ranks, cases.full_state_round_trip, CASES, SNIPPET)
    for name, (full, before, after, names) in first.items():
        assert after == before, name
        # those of a plain model's state_dict(), without the wrapper's
        assert set(full) == names, name
        assert {key: full[key] for key in before} == before, name
    assert first["tied"][0]["embedding.weight"] == first["tied"][0]["head.weight"]
    for other in others:
        for name, (full, before, after, _) in other.items():
            assert not full and after == before == first[name][1], name
