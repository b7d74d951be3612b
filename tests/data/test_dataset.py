"""A fork's own data set: three methods (docs/fork.md, "Your own data")."""

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

import config
from data.dataset import Dataset, Sample
from data.loader import Loader
from tests.conftest import data_rank, make_config, refuses, rows, train_run
from tests.distributed import run_on_ranks


class Sums(Dataset):
    """Sums of two numbers, as bytes, without an end."""

    def __init__(self, cfg: config.Config):
        self.seq_len = cfg.train.seq_len
        self.seed = cfg.run.seed

    def sample(self, number: int) -> Sample:
        draw = np.random.default_rng([self.seed, number])
        a, b = draw.integers(0, 1000, (2, self.seq_len))
        text = "".join(f"{x}+{y}={x + y}\n" for x, y in zip(a, b))
        return Sample(np.frombuffer(text.encode(), np.uint8)[: self.seq_len + 1].astype(np.int64))

    def validation(self) -> list[Sequence[Sample]]:
        return [[self.sample(2**40 + number) for number in range(64)]]

    def identities(self) -> list[dict]:
        return [{"data": "sums", "seed": self.seed, "tokenizer": "bytes"}]


def test_data_set_of_a_fork_trains_the_same_on_two_ranks(tmp_path):
    """Four steps on one rank; two on two ranks, resumed on one."""
    for ranks, name, steps in ((1, "one", 4), (2, "two", 2), (1, "two", 4)):
        cfg = make_config(
            train={"steps": steps},
            optim={"schedule_steps": 4},
            run={"name": name, "output_dir": str(tmp_path)},
            checkpoint={},
            eval={},
        )
        with mock.patch("train.open_dataset", Sums):
            run_on_ranks(ranks, lambda world, cfg=cfg: train_run(cfg, world))
    for row, other in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert row["batch_digest"] == other["batch_digest"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["epochs"] is None
    (evaluation,) = rows(tmp_path / "one", "eval")
    assert evaluation["loss"] < 7 and evaluation["bits_per_byte"] is None


def test_sample_without_the_last_target_is_refused():
    cfg = make_config()
    short = Sums(make_config(train={"seq_len": cfg.train.seq_len - 1}))
    with refuses("sample 0 has 32 ids, not train.seq_len . 1 = 33"):
        next(Loader(short, cfg.train, data_rank(0, 1)))
