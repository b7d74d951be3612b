"""What an evaluation means where it has nothing to mean, and the sample that a run ends with."""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import evaluate
from config import ConfigError
from tests import cases
from tests.conftest import make_config

WORLD = SimpleNamespace(rank=0, size=1, dp_rank=0, dp_size=1, cp=1, tp=1, device=torch.device("cpu"))


class Untrained(torch.nn.Module):
    """Reports the loss and the valid targets that its inputs are."""

    def forward(self, sums: torch.Tensor, valid: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"loss": sums}, valid


def test_a_source_without_a_target_has_no_loss_and_leaves_the_mean_alone(monkeypatch):
    batches = {"a": [(6.0, 2), (3.0, 1)], "b": [(0.0, 0)]}
    monkeypatch.setattr(evaluate, "validation_batches", lambda stream, *_: (
        (torch.tensor(sums), torch.tensor(valid)) for sums, valid in batches[stream]))
    monkeypatch.setattr(evaluate, "reshard", lambda model: None)
    run = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), agree_on_stop=lambda: None, stopping=False,
                          stop=SimpleNamespace(start_sync=lambda: None))
    for streams, loss in ((["a", "b"], 3.0), (["b"], math.nan)):
        found = evaluate.evaluate(Untrained(), make_config(), WORLD, SimpleNamespace(validation=streams, names=streams),
                                  run)
        assert found["loss"] == pytest.approx(loss, nan_ok=True) and math.isnan(found["loss_by_source"]["b"])


@pytest.mark.parametrize("source, names, prompt", [
    ("python-stdlib", [], "def "), ("texts.jsonl", [], "The "), ("python-stdlib", ["a", "b"], "The "),
    ("texts.jsonl", ["a", "python-stdlib"], "def ")])
def test_a_sample_begins_as_what_was_read_does(tmp_path, monkeypatch, source, names, prompt):
    found = []
    monkeypatch.setattr("data.tokenizer.Tokenizer", lambda folder: SimpleNamespace(encode=lambda texts: [[1]]))
    monkeypatch.setattr("generate.continue_text", lambda model, tokenizer, begin, *_: found.append(begin) or "")
    monkeypatch.setattr("generate.reshard", lambda model: None)
    cfg = make_config(data={"source": source}, train={"steps": 100})
    dataset = SimpleNamespace(names=names, tokenizer_files=[tmp_path / "t"])
    evaluate.log_sample(Untrained(), cfg, WORLD, dataset)
    assert found == [prompt]
    evaluate.log_sample(Untrained(), replace(cfg, train=replace(cfg.train, steps=99)), WORLD, dataset)
    evaluate.log_sample(Untrained(), cfg, WORLD, SimpleNamespace(names=names, tokenizer_files=[]))
    monkeypatch.setattr("generate.parameter_count", lambda model: 70_553_706_496)
    evaluate.log_sample(Untrained(), cfg, WORLD, dataset)
    assert found == [prompt]  # none after few steps, without a tokenizer, or of a model whose all-gathers take seconds


def test_a_tokenizer_that_cannot_encode_the_prompt_fails_no_run(tmp_path, monkeypatch):
    def encode(texts: list[str]) -> list[list[int]]:
        raise ConfigError("its tokenizer fails on a text")

    monkeypatch.setattr("data.tokenizer.Tokenizer", lambda folder: SimpleNamespace(encode=encode))
    monkeypatch.setattr("generate.continue_text", lambda *_: pytest.fail("must not be called"))
    dataset = SimpleNamespace(names=[], tokenizer_files=[tmp_path / "t"])
    evaluate.log_sample(Untrained(), make_config(train={"steps": 100}), WORLD, dataset)


def test_all_ranks_generate_the_sample_or_none_does(on_ranks):
    """Generating communicates: a rank alone would wait for the others."""
    assert on_ranks(2, cases.samples_by_who_has_the_tokenizer, [[0], [1], [], [0, 1]]) == [[False] * 3 + [True]] * 2
