"""Every configuration of configs/, as rank 0 of its number of GPUs: at full size the plan beside torch's allocator and
what a step costs the host; at two layers a save, a restore and an evaluation."""

import pathlib

import pytest

from tests.fake_cuda import configurations
from tests.fake_cuda.configurations import GPUS, Case, Text, all_cases, limits

QUICK = {"tiny-compiled", "llama8b-compiled", "llama8b-qlora-eager"}
QUICK_TO_SAVE = {"llama8b", "llama8b-qlora"}


def quick_or_full(values: list, quick: set[str]) -> list:
    """Parameters of a test; the values that are not `quick` are left out unless asked for."""
    parameters = []
    for value in values:
        marks = () if str(value) in quick else pytest.mark.full
        parameters.append(pytest.param(value, marks=marks, id=str(value)))
    return parameters


def test_every_configuration_is_here() -> None:
    paths = (configurations.build.REPO / "configs").glob("*.toml")
    assert {path.stem for path in paths} == set(GPUS)


@pytest.mark.parametrize("case", quick_or_full(all_cases(), QUICK))
def test_full_size(case: Case, text: Text, tmp_path: pathlib.Path) -> None:
    """The allocator did what the plan says, memory does not grow, and the host waits once a step: for
    the flag of the step before. One communicator serves all ranks, another those of tp."""
    measured = configurations.measure(case, text, tmp_path)
    assert measured.growth == 0
    assert measured.waits == 1
    assert measured.communicators == configurations.communicators(case.name)
    for figure, ratio in (("peak", measured.peak_ratio), ("reserved", measured.reserved_ratio)):
        least, most = limits(case, figure)
        assert least <= ratio <= most, (figure, measured)


@pytest.mark.parametrize("name", quick_or_full([*GPUS], QUICK_TO_SAVE))
def test_save_restore_evaluate(name: str, text: Text, tmp_path: pathlib.Path) -> None:
    """The configuration as shipped, with two layers, a small vocabulary and short sequences: a
    full-size checkpoint takes up to 90 GB."""
    path = configurations.write_config(
        Case(name, "compiled"),
        text,
        tmp_path,
        model={"n_layers": 2, "vocab_size": 1024},
        train={"steps": 4, "seq_len": 2048},
        checkpoint={"save_every_steps": 2, "async_save": True},
        eval={"every_steps": 2, "batches": 1},
    )
    report, printed = configurations.run_alone(path, GPUS[name], "--train.steps=2")
    assert "step-00000002" in printed
    assert report["registrations"] == 1  # one pinned buffer, made before the first step
    report, printed = configurations.run_alone(path, GPUS[name])
    assert "resuming after step 2" in printed
    assert [row["step"] for row in report["steps"]] == [3, 4]
    rows = (tmp_path / f"{name}-compiled/metrics.jsonl").read_text()
    assert rows.count('"kind": "eval"') == 2
