"""What changed options mean for a run that resumes: said once, in figures."""

import math
from typing import Any
from unittest import mock

import pytest

import config
from checkpoint import catalog
from model.llama import Llama
from run import resume
from tests.conftest import make_config, rows, train_run
from tests.distributed import distributed

WSD = {"schedule": "wsd", "decay_steps": 4, "min_lr_ratio": 0.0, "lr": 3e-3, "warmup_steps": 2}


@pytest.mark.quick
@pytest.mark.parametrize(
    "optim, steps, step, saved, words",
    [
        (WSD, (8, 16), 8, [2, 4, 8], ["was 0 at step 8", "0.003 at step 9", "resume=4"]),
        (WSD, (8, 16), 7, [7], ["was 0.00075 at step 7", "no checkpoint before that is left"]),
        (WSD, (8, 16), 4, [4], ["was 0.003 at step 4, and is 0.003 at step 5"]),
        ({"schedule": "cosine", "lr": 1e-3}, (8, 16), 8, [8], ["was 0.0001 at step 8"]),
        ({"schedule": "linear", "lr": 1e-3}, (16, 8), 8, [8], ["0.0001 at step 9"]),
        ({"schedule": "constant"}, (8, 16), 8, [8], []),
        ({**WSD, "schedule_steps": 16}, (8, 16), 8, [8], []),
    ],
    ids=str,
)
def test_rate_that_jumps_is_logged(monkeypatch, optim, steps, step, saved, words):
    """With the newest checkpoint from before the decay, to resume from."""
    monkeypatch.setattr(catalog, "steps", lambda root: saved)
    before, now = (make_config(train={"steps": count}, optim=optim) for count in steps)
    text = "\n".join(resume._rate(before, now, step))
    assert bool(text) == bool(words) and all(word in text for word in words)


def mixture(*weights: float) -> dict:
    sources = [{"source": name, "weight": w} for name, w in zip(("a", "b", "c"), weights)]
    return {"data": {"sources": sources}}


@pytest.mark.quick
@pytest.mark.parametrize(
    "before, now, texts",
    [
        ({"train": {"global_batch_size": 8}}, {"train": {"global_batch_size": 8}}, []),
        (
            {"train": {"global_batch_size": 8}},
            {"train": {"global_batch_size": 16}},
            ["python-stdlib: its samples 33 to 64 are not read in this epoch"],
        ),
        (
            {"train": {"global_batch_size": 8}},
            {"train": {"global_batch_size": 4}},
            ["python-stdlib: its samples 17 to 32 are read again"],
        ),
        (
            mixture(3, 1),
            mixture(1, 1),
            [
                "a: its samples 17 to 24 are read again",
                "b: its samples 9 to 16 are not read in this epoch",
            ],
        ),
        (
            mixture(1, 1),
            mixture(1, 1, 2),
            [
                "a: its samples 9 to 16 are read again",
                "b: its samples 9 to 16 are read again",
                "c: its samples 1 to 16 are not read in this epoch",
            ],
        ),
    ],
    ids=str,
)
def test_samples_that_are_left_out_or_read_again_are_named(before, now, texts):
    """After four steps, by hand."""
    assert [*resume._samples(make_config(**before), make_config(**now), 4)] == texts


@pytest.mark.quick
def test_windows_of_another_length_are_others():
    before, now = (make_config(train={"seq_len": length}) for length in (32, 64))
    (text,) = resume._samples(before, now, 4)
    assert "train.seq_len 32 -> 64" in text and "reads some text again" in text


@distributed(ranks=1)
def test_resume_with_another_batch_counts_what_was_read(world, write_config, capfd):
    """Once: the next resume has the same options as its checkpoint."""

    def train(steps: int, batch: int) -> str:
        path = write_config(
            "r",
            train={"steps": steps, "global_batch_size": batch},
            checkpoint={"allow_changed": ["train.global_batch_size"]},
        )
        train_run(config.load(str(path)), world)
        return capfd.readouterr().out

    assert "samples" not in train(2, 8).replace("sequences", "")
    assert "its samples 9 to 16 are read again" in train(4, 4)
    assert "read again" not in train(5, 4)
    cfg = config.load(str(write_config("r")))
    counts = [(row["tokens"], row["epochs"]) for row in rows(config.run_folder(cfg))]
    tokens = [256, 512, 640, 768, 896]
    epoch = counts[0][0] / counts[0][1]
    assert counts == [(count, pytest.approx(count / epoch)) for count in tokens]


@distributed(ranks=1)
def test_resume_remembers_how_many_gradients_in_a_row_were_not_finite(world, write_config):
    forward = Llama.forward

    def train(steps: int, is_finite: bool) -> None:
        def planted(*arguments: Any) -> Any:
            sums, count = forward(*arguments)
            assert isinstance(sums, dict)
            return {"loss": sums["loss"] * (1 if is_finite else math.nan)}, count

        path = write_config("r", train={"steps": steps, "skip_nonfinite": 2}, checkpoint={})
        with mock.patch.object(Llama, "forward", planted):
            train_run(config.load(str(path)), world)

    train(2, is_finite=False)
    train(3, is_finite=True)
    train(5, is_finite=False)
    with pytest.raises(FloatingPointError, match="step 6: .* 2 such steps in a row"):
        train(6, is_finite=False)
