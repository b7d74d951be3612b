"""A fork's own data set: three methods, as docs/fork.md has it."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

import config
from data.dataset import Dataset, Sample
from tests.conftest import REPO, make_config, rows, train_run
from tests.distributed import run_on_ranks
from tests.test_repo import BLOCK


def test_data_set_of_a_fork_trains_the_same_on_two_ranks(tmp_path):
    """Four steps on one rank; two on two ranks, resumed on one."""
    page = (REPO / "docs/fork.md").read_text()
    (code,) = [text for label, text in BLOCK.findall(page) if label == "python fork-data"]
    names: dict[str, Any] = {"Dataset": Dataset, "Sample": Sample, "config": config, "np": np}
    exec(code, names)
    for ranks, name, steps in ((1, "one", 4), (2, "two", 2), (1, "two", 4)):
        cfg = make_config(
            train={"steps": steps},
            optim={"schedule_steps": 4},
            run={"name": name, "output_dir": str(tmp_path)},
            checkpoint={},
            eval={},
        )
        with mock.patch("train.open_dataset", names["Sums"]):
            run_on_ranks(ranks, lambda world, cfg=cfg: train_run(cfg, world))
    for row, other in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert row["batch_digest"] == other["batch_digest"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["epochs"] is None
    (evaluation,) = rows(tmp_path / "one", "eval")
    assert evaluation["loss"] < 7 and evaluation["bits_per_byte"] is None
