"""Batches: each sample once, on any ranks and with any batch size; damaged folders."""

import functools
import json
import operator
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

import config
from config import DIGEST_MODULUS, IGNORE
from data.dataset import PreparedDataset, Sample
from data.folder import manifest_of
from data.loader import Loader, sample_digest, validation_batches
from tests.conftest import (
    REPO,
    data_rank,
    loader_of,
    make_config,
    refuses,
    train_run,
    write_prepared,
)
from tests.distributed import distributed


@pytest.fixture(scope="module")
def long_text() -> np.ndarray:
    """Random ids."""
    return np.random.default_rng(0).integers(0, 320, 2_000_000).astype(np.uint16)


@pytest.fixture
def configure(long_text, tmp_path) -> Callable[..., config.Config]:
    """Makes the configuration of a folder with the text."""

    def configure_folder(changes: dict | None = None, **sections: dict) -> config.Config:
        data = {"source": "text.jsonl", "path": str(tmp_path / "text")}
        train = {"seq_len": 999, "global_batch_size": 64, "micro_batch_size": 1}
        cfg = make_config(
            data=data | sections.pop("data", {}),
            train=train | sections.pop("train", {}),
            **sections,
        )
        heldout = [long_text[:300], long_text[300:1000]]
        write_prepared(cfg, [*long_text.reshape(4, -1)], heldout, **changes or {})
        return cfg

    return configure_folder


def digests(loaders: list[Loader], steps: int) -> list[int]:
    """Of each of the next steps, over all ranks. Closes the loaders."""
    sums = []
    for _ in range(steps):
        sums.append(sum(next(loader).digest for loader in loaders) % DIGEST_MODULUS)
    for loader in loaders:
        loader.close()
    return sums


# The same samples on any ranks, and after a resume


def test_resume_on_any_ranks_and_micro_batches_reads_the_same_samples(configure):
    """An epoch has 2001 windows, and 31.3 steps."""
    cfg = configure(train={"steps": 40})
    uncut = digests([loader_of(cfg)], 40)
    assert len({*uncut}) == 40
    for ranks, micro_batch_size, step in [(1, 64, 3), (2, 8, 19), (4, 2, 29), (4, 16, 31)]:
        resumed = configure(train={"steps": 40, "micro_batch_size": micro_batch_size})
        loaders = [loader_of(resumed, rank, ranks, step) for rank in range(ranks)]
        assert digests(loaders, 40 - step) == uncut[step:]


@pytest.mark.quick
def test_run_that_resumes_with_other_batch_sizes_reads_each_sample_once(configure):
    """Batches of 8, then 4, then 16, on 1 and 2 ranks: the digests of samples 0, 1, 2, ..."""
    samples = 0
    step = 0
    for batch_size, ranks in (8, 1), (4, 2), (16, 2):
        cfg = configure(train={"global_batch_size": batch_size, "steps": step + 5})
        dataset = PreparedDataset(cfg)
        loaders = []
        for rank in range(ranks):
            loaders.append(Loader(dataset, cfg.train, data_rank(rank, ranks), step, samples))
        expected = []
        for _ in range(5):
            numbers = range(samples, samples + batch_size)
            digest = sum(sample_digest(number, dataset.sample(number)) for number in numbers)
            expected.append(digest % DIGEST_MODULUS)
            samples += batch_size
        assert digests(loaders, 5) == expected
        step += 5
    assert samples == 5 * (8 + 4 + 16)


@pytest.mark.quick
def test_batches_hold_the_tokens_of_the_order(configure, long_text):
    cfg = configure(train={"micro_batch_size": 4})
    loaders = [loader_of(cfg, rank, 2, step=2) for rank in range(2)]
    for rank, batch in enumerate(map(next, loaders)):
        assert batch.valid_tokens == 32 * 999
        for number, (inputs, targets) in enumerate(batch.micro_batches):
            for row in range(4):
                sample = 128 + number * 8 + rank * 4 + row
                start = 999 * loaders[rank].dataset.position(sample).window
                expected = long_text[start : start + 1000].tolist()
                assert inputs[row].tolist() == expected[:-1]
                assert targets[row].tolist() == expected[1:]
        loaders[rank].close()


@pytest.mark.quick
def test_a_digest_depends_on_the_sample_s_number_and_on_its_tokens():
    samples = [Sample(np.array(tokens)) for tokens in ([1, 2], [2, 1], [1])]
    every = {sample_digest(number, sample) for number in (1, 2, 256) for sample in samples}
    assert len(every) == 9
    bits = functools.reduce(operator.or_, (sample_digest(n, samples[0]) for n in range(64)))
    assert bits == 2**40 - 1


# Document mask


@pytest.mark.quick
def test_under_a_document_mask_positions_and_documents_come_along(prepared, corpus):
    """Against a loop over the tokens of the file, whose documents end with 2."""
    train = {"seq_len": 1000, "micro_batch_size": 4}
    data = {"source": str(corpus), "path": str(prepared), "document_mask": True}
    cfg = make_config(data=data, train=train)
    file = np.fromfile(prepared / "train-0.bin", np.uint16).tolist()
    loader = loader_of(cfg)
    for first in (0, 8, 16):
        batch = loader.batch(first)
        valid = 0
        for number, (inputs, targets, positions, documents) in enumerate(batch.micro_batches):
            for row in range(4):
                start = 1000 * loader.dataset.position(first + 4 * number + row).window
                position = document = 0
                for i in range(1000):
                    if i and file[start + i - 1] == 2:
                        position = 0
                        document += 1
                    ends_document = file[start + i] == 2
                    target = IGNORE if ends_document else file[start + i + 1]
                    assert inputs[row, i] == file[start + i] and targets[row, i] == target
                    assert positions[row, i] == position and documents[row, i] == document
                    valid += not ends_document
                    position += 1
        assert batch.valid_tokens == valid < 8000
    loader.close()


# Validation


def evaluation(cfg: config.Config, count: int, rank: int = 0, ranks: int = 1) -> list[tuple]:
    """The micro-batches of a data rank."""
    (samples,) = PreparedDataset(cfg).validation()
    return [*validation_batches(samples, count, cfg.train, data_rank(rank, ranks))]


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 8, 17, 32])
def test_an_evaluation_reads_every_target_once(configure, long_text, ranks, count):
    """1000 tokens are 32 windows of 32, of which the last has 7 targets."""
    train = {"seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2}
    cfg = configure(train=train)
    by_rank = [evaluation(cfg, count, rank, ranks) for rank in range(ranks)]
    inputs = []
    targets = []
    for micro_batches in zip(*by_rank, strict=True):  # as many on each rank
        for row_inputs, row_targets in micro_batches:
            inputs += row_inputs[row_targets != IGNORE].tolist()
            targets += row_targets[row_targets != IGNORE].tolist()
    tokens = long_text[: min(32 * count + 1, 1000)].tolist()
    assert inputs == tokens[:-1] and targets == tokens[1:]


@pytest.mark.quick
def test_an_evaluation_keeps_to_documents(configure, long_text):
    train = {"seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2}
    cfg = configure(data={"document_mask": True}, train=train)
    targets = torch.cat([tensors[1] for tensors in evaluation(cfg, 32)])
    # the second document begins at 300
    expected = [*long_text[1:300].tolist(), *long_text[301:1000].tolist()]
    assert targets[targets != IGNORE].tolist() == expected


@pytest.mark.quick
def test_bytes_of_a_part_of_the_validation_text_are_whole_documents_and_a_share(configure):
    """Documents of 300 and 700 ids, and as many bytes less one."""
    cfg = configure(train={"seq_len": 100})
    dataset = PreparedDataset(cfg)
    assert dataset.text_bytes(0, 1) == pytest.approx(299 * 101 / 300)
    assert dataset.text_bytes(0, 5) == pytest.approx(299 + 699 * 201 / 700)
    assert dataset.text_bytes(0, 10) == 299 + 699


# The text of an earlier launch


@distributed(ranks=2)
def test_ranks_with_other_text_than_rank_zero_are_refused(world, corpus, prepared, tmp_path):
    folder = prepared
    if world.rank == 1:
        folder = shutil.copytree(prepared, tmp_path / "copy")
        manifest = manifest_of(folder) | {"sha256": "another hash"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    data = {"source": str(corpus), "path": str(folder)}
    cfg = make_config(data=data, run={"output_dir": str(tmp_path)})
    with refuses('sha256 = "another hash"', "the same prepared data"):
        train_run(cfg, world)


# What is refused


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes, options, words",
    [
        ({"complete": False}, {}, ("not complete", "-m prepare")),
        ({"vocab_size": 321}, {}, ("vocab_size = 320", "smaller than", "321 entries")),
        ({}, {"train": {"seq_len": 500_000}}, ("source", "3 samples", "batch_size = 64")),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused(configure, changes, options, words):
    cfg = configure(changes, **options)
    with refuses(*words):
        PreparedDataset(cfg)


@pytest.mark.quick
@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: path.unlink(), ("train-0.bin", "is missing", "delete")),
        (lambda path: path.write_bytes(path.read_bytes()[:-100_000]), ("train-0.bin", "was cut")),
        (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), ("id 65535", "vocab_size")),
    ],
)
def test_damaged_token_file_is_refused_as_it_is_read(configure, damage, words):
    cfg = configure(train={"global_batch_size": 2000})
    damage(pathlib.Path(cfg.data.path or "") / "train-0.bin")
    loader = loader_of(cfg)
    with refuses(*words):
        next(loader)
    loader.close()


# Imports


def test_a_rank_loads_nothing_that_prepares_text():
    """Opening data needs no torch either: the launcher opens it, too."""
    statement = "import json, sys, data.dataset; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", statement], cwd=REPO, capture_output=True, text=True, check=True
    )
    modules = {*json.loads(done.stdout)}
    assert "data.tokens" in modules
    prepares = {name for name in modules if name.startswith("tools")}
    assert not modules & {*prepares, "torch", "pyarrow", "datasets", "tokenizers"}
