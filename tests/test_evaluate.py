"""What an evaluation measures: losses over all targets, in nats and in bits per byte of the text."""

import json
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from data.dataset import open_dataset
from evaluate import Evaluation, row_values
from tests import forks
from tests.conftest import build, make_config, mesh_for
from tests.distributed import distributed
from tests.reference import fresh_model


@pytest.mark.quick
def test_source_without_a_target_has_no_loss_and_leaves_the_mean_alone():
    sums = torch.tensor([[2.0**24 + 2, 2**24 + 1, 7], [0, 0, 7]], dtype=torch.float64)
    row = row_values(["a", "b"], sums)
    loss = (2**24 + 2) / (2**24 + 1)
    assert row["loss"] == loss and row["loss_by_source"] == {"a": loss, "b": None}
    assert row["bits_per_byte"] == pytest.approx((2**24 + 2) / math.log(2) / 14)
    assert row_values([], sums[1:])["loss"] is None


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
