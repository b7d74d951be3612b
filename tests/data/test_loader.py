"""Batches: each sample once, on any ranks; text that is prepared meanwhile; damaged folders."""

import functools
import itertools
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
from data.dataset import open_dataset
from data.folder import identity, manifest_of
from data.loader import Loader, sample_digest, validation_batches
from tests.conftest import REPO, data_rank, loader_of, make_config, refuses, train_run
from tests.distributed import distributed
from tools.prepare.begin import write_manifest

BORDER = 2**20  # the first


@pytest.fixture(scope="module")
def long_text(tmp_path_factory) -> np.ndarray:
    """Six segments of random ids."""
    return np.random.default_rng(0).integers(0, 320, 20_000_000).astype(np.uint16)


@pytest.fixture
def configure(long_text, tmp_path) -> Callable[..., config.Config]:
    """Makes the configuration of a folder whose files are all there, and its record the first."""

    def configure_folder(
        tokens: int = len(long_text), path: str = "text", **sections: dict
    ) -> config.Config:
        folder = tmp_path / path
        data = {"source": f"{path}.jsonl", "path": str(folder)}
        train = {"seq_len": 9999, "global_batch_size": 64, "micro_batch_size": 1}
        cfg = make_config(
            data=data | sections.pop("data", {}),
            train=train | sections.pop("train", {}),
            **sections,
        )
        folder.mkdir()
        long_text[:tokens].tofile(folder / "train.bin")
        long_text[:1000].tofile(folder / "heldout.bin")
        np.array([5, BORDER, tokens]).tofile(folder / "train.ends.bin")
        np.array([300, 1000]).tofile(folder / "heldout.ends.bin")
        record(cfg)
        return cfg

    return configure_folder


def record(cfg: config.Config, complete: bool = True, **changes: object) -> None:
    """Replaces the record of a folder."""
    folder = pathlib.Path(cfg.data.path or "")
    tokens = (folder / "train.bin").stat().st_size // 2
    manifest = {
        "identity": identity(cfg.data, cfg.model.vocab_size),
        "revision": None,
        "tokenizer": "a hash",
        "vocab_size": 320,
        "dtype": "uint16",
        "complete": complete,
        "tokens": {"train": tokens, "heldout": 1000},
        "documents": {"train": 3, "heldout": 2},
        "bytes": {"train": 2 * tokens, "heldout": 4000},
        "validation": ["heldout", 0, 1000],
        "sha256": {"train": "of train", "heldout": "of heldout"},
    }
    write_manifest(folder, manifest | changes)


def digests(cfg: config.Config, steps: range, ranks: int = 1) -> list[int]:
    """Of each step, over all ranks, as a run that begins with the first of them reads them."""
    sums = [0] * len(steps)
    for rank in range(ranks):
        loader = loader_of(cfg, rank, ranks, first_step=steps.start)
        for index in range(len(steps)):
            sums[index] += next(loader).digest
        loader.close()
    return [digest % DIGEST_MODULUS for digest in sums]


# The same samples on any ranks, and after a resume


def test_resume_on_any_ranks_and_micro_batches_reads_the_same_samples(configure):
    """An epoch has 2000 windows, and 31.25 steps."""
    cfg = configure(train={"steps": 40})
    whole = digests(cfg, range(1, 41))
    assert len({*whole}) == 40
    for ranks, micro_batch_size, first in [(1, 64, 4), (2, 8, 20), (4, 2, 30), (4, 16, 32)]:
        data = {"source": cfg.data.source, "path": cfg.data.path}
        train = {"seq_len": 9999, "global_batch_size": 64, "steps": 40}
        train["micro_batch_size"] = micro_batch_size
        resumed = make_config(data=data, train=train)
        assert digests(resumed, range(first, 41), ranks) == whole[first - 1 :]


@pytest.mark.quick
def test_batches_hold_the_tokens_of_the_order(configure, long_text):
    cfg = configure(train={"micro_batch_size": 4})
    dataset = open_dataset(cfg)
    loaders = [Loader(dataset, data_rank(rank, 2), 3) for rank in range(2)]
    batches = [next(loader) for loader in loaders]
    for rank, batch in enumerate(batches):
        assert batch.valid_tokens == 64 * 9999
        for number, (inputs, targets) in enumerate(batch.micro_batches):
            for row in range(4):
                sample = 128 + number * 8 + rank * 4 + row
                start = 9999 * dataset.position(sample).window
                expected = long_text[start : start + 10_000].tolist()
                assert inputs[row].tolist() == expected[:-1]
                assert targets[row].tolist() == expected[1:]
        loaders[rank].close()


@pytest.mark.quick
def test_a_digest_depends_on_the_sample_s_number_and_on_its_tokens():
    ids = [torch.tensor(tokens) for tokens in ([1, 2], [2, 1], [1])]
    every = {sample_digest(number, tokens) for number in (1, 2, 256) for tokens in ids}
    assert len(every) == 9
    bits = functools.reduce(operator.or_, (sample_digest(n, ids[0]) for n in range(64)))
    assert bits == 2**40 - 1


# Document mask


@pytest.mark.quick
def test_under_a_document_mask_positions_and_documents_come_along(prepared, corpus):
    """Against a loop over the tokens of the file, whose documents end with EOS, 2."""
    train = {"seq_len": 100, "micro_batch_size": 4}
    data = {"source": str(corpus), "path": str(prepared), "document_mask": True}
    cfg = make_config(data=data, train=train)
    file = np.fromfile(prepared / "train.bin", np.uint16).tolist()
    loader = loader_of(cfg)
    for step in (1, 2, 3):
        batch = loader.batch(step)
        valid = 0
        numbers = itertools.count(8 * step - 8)
        for inputs, targets, positions, documents in batch.micro_batches:
            for row in range(4):
                start = loader.dataset.span(next(numbers)).start
                position = document = 0
                for i in range(100):
                    if i and file[start + i - 1] == 2:
                        position = 0
                        document += 1
                    ends_document = file[start + i] == 2
                    target = IGNORE if ends_document else file[start + i + 1]
                    assert inputs[row, i] == file[start + i] and targets[row, i] == target
                    assert positions[row, i] == position and documents[row, i] == document
                    valid += not ends_document
                    position += 1
        assert batch.valid_tokens == valid < 800
    loader.close()


# Validation


def evaluation(cfg: config.Config, rank: int = 0, ranks: int = 1) -> list[tuple]:
    """The micro-batches of a data rank."""
    (stream,) = open_dataset(cfg).validation
    batches = validation_batches(
        stream, cfg.train, cfg.eval, cfg.data.document_mask, data_rank(rank, ranks)
    )
    return [*batches]


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batches", [None, 1, 2, 1000])
def test_an_evaluation_reads_every_target_once(prepared, corpus, ranks, batches):
    data = {"source": str(corpus), "path": str(prepared)}
    cfg = make_config(data=data, eval={"batches": batches} if batches else {})
    (stream,) = open_dataset(cfg).validation
    ids = stream.read(0, stream.length).tolist()
    by_rank = [evaluation(cfg, rank, ranks) for rank in range(ranks)]
    inputs = []
    targets = []
    for micro_batches in zip(*by_rank, strict=True):  # as many on each rank
        for row_inputs, row_targets in micro_batches:
            inputs += row_inputs[row_targets != IGNORE].tolist()
            targets += row_targets[row_targets != IGNORE].tolist()
    count = min(256 * batches, len(ids) - 1) if batches else len(ids) - 1
    assert inputs == ids[:count] and targets == ids[1 : count + 1]


@pytest.mark.quick
def test_an_evaluation_keeps_to_documents(configure):
    train = {"seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2}
    cfg = configure(data={"document_mask": True}, train=train, eval={})
    (stream,) = open_dataset(cfg).validation
    ids = stream.read(0, 1000)
    targets = torch.cat([tensors[1] for tensors in evaluation(cfg)])
    expected = [*ids[1:300].tolist(), *ids[301:].tolist()]  # the second document begins at 300
    assert targets[targets != IGNORE].tolist() == expected


# Text that is prepared meanwhile


# The text of an earlier launch


@distributed(ranks=2)
def test_ranks_with_other_text_than_rank_zero_are_refused(world, corpus, prepared, tmp_path):
    folder = prepared
    if world.rank == 1:
        folder = shutil.copytree(prepared, tmp_path / "copy")
        manifest = manifest_of(folder)
        manifest["sha256"]["train"] = "another hash"
        write_manifest(folder, manifest)
    data = {"source": str(corpus), "path": str(folder)}
    cfg = make_config(data=data, run={"output_dir": str(tmp_path)})
    with refuses('sha256.train = "another hash"', "the same prepared data"):
        train_run(cfg, world)


# What is refused


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes, options, words",
    [
        ({"complete": False}, {}, ("not complete", "-m prepare")),
        ({"vocab_size": 321}, {}, ("vocab_size = 320", "smaller than", "321 entries")),
        ({}, {"train": {"seq_len": 500_000}}, ("source", "39 samples", "batch_size = 64")),
        (
            {"tokens": {"train": 20_000_001, "heldout": 1000}},
            {},
            (r"train\.bin", "sizes", "delete"),
        ),
        ({"documents": {"train": 2, "heldout": 2}}, {}, (r"train\.bin", "sizes", "delete")),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused(configure, changes, options, words):
    cfg = configure(**options)
    record(cfg, **changes)
    with refuses(*words):
        open_dataset(cfg)


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
