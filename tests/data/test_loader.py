"""Batches: each sample once, on any ranks and with any batch size; damaged folders."""

import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import config
from config import DIGEST_MODULUS, IGNORE
from data.folder import manifest_of
from data.loader import Loader
from tests.conftest import loader_of, make_config, refuses, train_run, write_prepared
from tests.distributed import distributed

LONG_TEXT = np.random.default_rng(0).integers(0, 320, 2_000_000).astype(np.uint16)


@pytest.fixture
def configure(tmp_path) -> Callable[..., config.Config]:
    """Makes the configuration of a folder with the text. changes: of its manifest. train: of [train]."""

    def configure_folder(changes: dict | None = None, **train: int) -> Any:
        data = {"source": "text.jsonl", "path": str(tmp_path / "text")}
        default = {"seq_len": 999, "global_batch_size": 64, "micro_batch_size": 1}
        cfg = make_config(data=data, train=default | train)
        heldout = [LONG_TEXT[:300], LONG_TEXT[300:1000]]
        write_prepared(cfg, [*LONG_TEXT.reshape(4, -1)], heldout, **changes or {})
        return cfg

    return configure_folder


def digests(loaders: list[Loader], steps: int) -> list[int]:
    """Of each of the next steps, over all ranks."""
    sums = []
    for _ in range(steps):
        sums.append(sum(next(loader).digest for loader in loaders) % DIGEST_MODULUS)
    return sums


def test_resume_on_any_ranks_and_micro_batches_reads_the_same_samples(configure):
    """An epoch has 2001 windows, and 31.3 steps."""
    uncut = digests([loader_of(configure(steps=40))], 40)
    assert len({*uncut}) == 40
    for ranks, micro_batch_size, step in [(1, 64, 3), (2, 8, 19), (4, 2, 29), (4, 16, 31)]:
        resumed = configure(steps=40, micro_batch_size=micro_batch_size)
        loaders = [loader_of(resumed, rank, ranks, step) for rank in range(ranks)]
        assert digests(loaders, 40 - step) == uncut[step:]


@pytest.mark.quick
def test_under_a_document_mask_positions_and_documents_come_along(prepared, corpus):
    """Against a loop over the tokens of the file, whose documents end with 2."""
    data = {"source": str(corpus), "path": str(prepared), "document_mask": True}
    cfg = make_config(data=data, train={"seq_len": 1000, "micro_batch_size": 4})
    file = np.fromfile(prepared / "train-0.bin", np.uint16).tolist()
    loader = loader_of(cfg)
    for first in (0, 8, 16):
        batch = loader.batch(first)
        valid = 0
        for number, row in itertools.product(range(2), range(4)):
            start = 1000 * loader.dataset.position(first + 4 * number + row).window
            position = document = 0
            expected = []
            for i in range(start, start + 1000):
                if i > start and file[i - 1] == 2:
                    position = 0
                    document += 1
                target = IGNORE if file[i] == 2 else file[i + 1]
                expected.append([file[i], target, position, document])
                valid += target != IGNORE
                position += 1
            of_row = [tensor[row] for tensor in batch.micro_batches[number]]
            assert torch.stack(of_row, dim=1).tolist() == expected
        assert batch.valid_tokens == valid < 8000


REFUSED = [
    ({"complete": False}, {}, None, "not complete; .*-m prepare"),
    ({"identity": {"version": 7}}, {}, None, "in format 7, and this one reads"),
    ({"vocab_size": 321}, {}, None, "vocab_size = 320: smaller than .*321 entries"),
    ({}, {"seq_len": 500_000}, None, "source = .* has 3 samples .*batch_size = 64"),
    ({}, {}, lambda path: os.truncate(path, 3_900_000), "train-0.bin: .*was cut; delete"),
    ({}, {}, lambda path: path.write_bytes(b"\xff" * 4_000_000), "id 65535, .*vocab_size"),
]


@pytest.mark.quick
@pytest.mark.parametrize("changes, train, damage, words", REFUSED)
def test_folder_that_cannot_be_trained_on_is_refused(configure, changes, train, damage, words):
    """As it is opened or, if a token file is damaged, as that is read."""
    cfg = configure(changes, **{"global_batch_size": 2000 if damage else 64, **train})
    if damage:
        damage(pathlib.Path(cfg.data.path or "") / "train-0.bin")
    with refuses(words):
        next(loader_of(cfg))


@distributed(ranks=2)
def test_ranks_with_other_text_than_rank_zero_are_refused(world, corpus, prepared, tmp_path):
    folder = prepared
    if world.rank == 1:
        folder = shutil.copytree(prepared, tmp_path / "copy")
        manifest = manifest_of(folder) | {"sha256": "another hash"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    data = {"source": str(corpus), "path": str(folder)}
    with refuses('sha256 = "another hash"', "the same prepared data"):
        train_run(make_config(data=data, run={"output_dir": str(tmp_path)}), world)
