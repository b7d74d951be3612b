"""What an evaluation measures: losses over all targets, in nats and in bits per byte of the text."""

import json
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import evaluate
from data.dataset import open_dataset
from evaluate import Evaluation
from tests import forks
from tests.conftest import build, make_config, mesh_for
from tests.distributed import distributed
from tests.reference import fresh_model


@pytest.mark.quick
@distributed(ranks=1)
def test_source_without_a_target_has_no_loss_and_leaves_the_mean_alone(world, monkeypatch):
    """Sums and counts beyond 2^24 are exact, and each batch has a timeout of its own."""
    batches = {"a": [(2.0**24, 2**24), (1.0, 0), (1.0, 0), (0.0, 1)], "b": [(0.0, 0)]}
    phases = []

    class Model(torch.nn.Module):
        """Its loss and valid targets are its inputs."""

        def forward(self, loss: torch.Tensor, valid: torch.Tensor) -> tuple:
            return {"loss": loss}, valid

    def validation_batches(stream: str, *unused: Any) -> list[tuple]:
        return [(torch.tensor(loss), torch.tensor(valid)) for loss, valid in batches[stream]]

    monkeypatch.setattr(evaluate, "validation_batches", validation_batches)
    monkeypatch.setattr(evaluate, "reshard", lambda model: None)
    run: Any = mock.MagicMock(stops=False)
    run.phase.side_effect = lambda name: phases.append(name) or mock.MagicMock()
    for streams, loss in ((["a", "b"], (2**24 + 2) / (2**24 + 1)), (["b"], None)):
        phases.clear()
        dataset: Any = SimpleNamespace(
            validation=lambda streams=streams: streams,
            source_names=streams,
            text_bytes=lambda source, count: 7,
        )
        model: Any = Model()
        result = Evaluation(make_config(), model, world, dataset, run).result()
        assert result and result["loss"] == loss and result["loss_by_source"]["b"] is None
        size = 7 * len(streams)
        bits = loss * (2**24 + 1) / math.log(2) / size if loss else 0
        assert result["bits_per_byte"] == pytest.approx(bits)
        count = sum(len(batches[stream]) for stream in streams)
        assert phases == ["first evaluation batch"] + ["evaluation batch"] * (count - 1)


@pytest.mark.parametrize("ranks, parallel", [(1, {}), (2, {}), (2, {"cp": 2}), (2, {"tp": 2})])
@distributed()
def test_loss_is_the_mean_over_all_targets(world, ranks, parallel, corpus, prepared):
    """In nats, without a fork's terms, and in bits per byte. The model is in evaluation mode meanwhile."""
    data = {"source": str(corpus), "path": str(prepared)}
    cfg = make_config(data=data, parallel=parallel, eval={})
    world = mesh_for(cfg, world)
    modes = set()
    dataset: Any = open_dataset(cfg)
    stream = dataset.sources[0].validation
    ids = torch.from_numpy(stream.read(0, stream.length))
    nats = 0.0
    with forks.routed(), torch.no_grad():
        model = build(cfg, world)
        model.head.register_forward_hook(lambda head, *unused: modes.add(head.training))
        result = Evaluation(cfg, model, world, dataset, mock.MagicMock(stops=False)).result()
        plain = fresh_model(cfg)
        for begin in range(0, stream.length - 1, cfg.train.seq_len):
            window = ids[begin : begin + cfg.train.seq_len + 1]
            logits = plain(window[None, :-1])[0]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    assert result and result["loss"] == pytest.approx(nats / (stream.length - 1), rel=1e-5)
    size = sum(len(json.loads(line)["text"]) for line in corpus.open().readlines()[:20])
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert modes == {False} and model.training
