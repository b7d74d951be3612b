"""Every configuration of configs/, as rank 0 of its number of GPUs: at full size the plan beside torch's allocator and
what a step costs the host; at two layers a save, a restore and an evaluation."""

import pytest

from tests.fake_cuda import build, configurations
from tests.fake_cuda.configurations import CASES, GPUS, LIMITS, marked

SMALL = """--model.n_layers=2 --model.vocab_size=1024 --train.seq_len=2048 --checkpoint.save_every_steps=2
    --checkpoint.async_save=true --eval.every_steps=2 --eval.batches=1"""
SMALL_CASES = {"tiny-compiled", "llama8b-compiled", "llama8b-qlora-eager"}


@pytest.mark.parametrize("case", marked(CASES, SMALL_CASES, "tiny-compiled"))
def test_full_size(case, tmp_path):
    """The allocator did what the plan says, memory does not grow, and the host waits once a step: for the flag of the
    step before. One communicator serves all ranks, another those of tp."""
    measured = configurations.measure(case, tmp_path)
    assert (measured["growth"], measured["waits"]) == (0, 1)
    name, _ = case.rsplit("-", 1)
    expected = 0 if GPUS[name] == 1 else 2 if name == "llama70b" else 1
    assert measured["communicators"] == expected
    for figure in ("peak_gib", "reserved_gib"):
        least, most = LIMITS.get(f"{case} {figure}", (0.97, 1.03))
        assert least <= measured[f"{figure} / plan"] <= most, (figure, measured)


@pytest.mark.parametrize("name", marked(GPUS, {"llama8b", "llama8b-qlora"}, "llama8b"))
def test_save_restore_evaluate(name, tmp_path):
    """The configuration as shipped, with two layers, a small vocabulary and short sequences: a full-size checkpoint
    takes up to 90 GB."""
    path = configurations.write_config(f"{name}-compiled", tmp_path, SMALL)
    report, printed = build.run_alone(path, GPUS[name], "--train.steps=2")
    assert "step-00000002" in printed
    assert report["registrations"] == 1  # one pinned buffer, made before the first step
    report, printed = build.run_alone(path, GPUS[name])
    assert "resuming after step 2" in printed
    assert [row["step"] for row in report["steps"]] == [3, 4]
    rows = (tmp_path / f"{name}-compiled/metrics.jsonl").read_text()
    assert rows.count('"kind": "eval"') == 2
