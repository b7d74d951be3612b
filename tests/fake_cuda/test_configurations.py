"""Every configuration at full size: the plan beside torch's allocator, and what a step costs the host."""

import pathlib

import pytest

from tests.fake_cuda import configurations
from tests.fake_cuda.configurations import Case, Text, all_cases

QUICK = {"tiny-compiled", "llama8b-compiled", "llama8b-qlora-eager"}


def parameters() -> list:
    marks = {True: (), False: (pytest.mark.full,)}
    return [
        pytest.param(case, marks=marks[str(case) in QUICK], id=str(case)) for case in all_cases()
    ]


@pytest.mark.parametrize("case", parameters())
def test_the_plan_and_the_allocator_agree(case: Case, text: Text, tmp_path: pathlib.Path) -> None:
    measured = configurations.measure(case, text, tmp_path)
    print(measured)
    assert measured.growth == 0
    assert measured.waits == configurations.WAITS_PER_STEP
    for figure, ratio in (("peak", measured.peak_ratio), ("reserved", measured.reserved_ratio)):
        least, most = configurations.limits(case, figure)
        assert least <= ratio <= most, (figure, measured)
