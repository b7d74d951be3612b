"""Batches: each sample once, on any ranks; text that is prepared meanwhile; damaged folders."""

import functools
import itertools
import json
import math
import operator
import os
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
from data.dataset import Dataset, PreparedSource, Source, open_dataset
from data.folder import identity, manifest_of, write_manifest
from data.loader import Loader, sample_digest, validation_batches
from data.mixture import Mixture
from tools.prepare.prepare import prepare
from tests.conftest import REPO, data_rank, loader_of, make_config, refuses, train_run
from tests.distributed import distributed

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
        data = {"source": f"{path}.jsonl", "path": str(folder), "order": "growing"}
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
        record(cfg, 0)
        return cfg

    return configure_folder


def record(cfg: config.Config, count: int, complete: bool = False, **changes: object) -> None:
    """Replaces the record of a folder: `count` of its segments are recorded. What is held out is
    decided with the third, at 2^22 tokens."""
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
        "validation": ["heldout", 0, 1000, "of validation"] if count >= 3 else None,
        "segments": [f"of {number}" for number in range(count)],
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


@pytest.mark.parametrize("order", ["global", "growing"])
def test_resume_on_any_ranks_and_micro_batches_reads_the_same_samples(configure, order):
    """An epoch has 2000 windows, and 31.25 steps. Its third segment ends in step 7."""
    cfg = configure(data={"order": order}, train={"steps": 40})
    record(cfg, 6, complete=True)
    whole = digests(cfg, range(1, 41))
    assert len({*whole}) == 40
    for ranks, micro_batch_size, first in [(1, 64, 4), (2, 8, 20), (4, 2, 30), (4, 16, 32)]:
        data = {"source": cfg.data.source, "path": cfg.data.path, "order": order}
        train = {"seq_len": 9999, "global_batch_size": 64, "steps": 40}
        train["micro_batch_size"] = micro_batch_size
        resumed = make_config(data=data, train=train)
        assert digests(resumed, range(first, 41), ranks) == whole[first - 1 :]


@pytest.mark.quick
def test_batches_hold_the_tokens_of_the_order(configure, long_text):
    cfg = configure(train={"micro_batch_size": 4})
    record(cfg, 6, complete=True)
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
    record(cfg, 6, complete=True)
    (stream,) = open_dataset(cfg).validation
    ids = stream.read(0, 1000)
    targets = torch.cat([tensors[1] for tensors in evaluation(cfg)])
    expected = [*ids[1:300].tolist(), *ids[301:].tolist()]  # the second document begins at 300
    assert targets[targets != IGNORE].tolist() == expected


# Text that is prepared meanwhile


def test_at_every_record_of_the_writer_samples_are_those_of_the_complete_text(
    corpus, prepared, tmp_path, monkeypatch
):
    for module in ("order", "writer", "prepare"):
        monkeypatch.setattr(f"data.{module}.HELD_OUT_OF", 8192)
    monkeypatch.setattr("data.order.FIRST_BORDER", 2048)
    monkeypatch.setattr("data.order.BORDER_STEP", 4096)
    monkeypatch.setattr("data.prepare.BATCH_CHARACTERS", 2000)
    monkeypatch.setattr("data.prepare.RECORD_SECONDS", 0.0)
    data = {"source": str(corpus), "path": str(tmp_path / "out"), "order": "growing"}
    train = {"global_batch_size": 1, "micro_batch_size": 1}
    cfg = make_config(data={**data, "tokenizer": str(prepared)}, train=train)
    samples: dict[int, list[int]] = {}
    records = []

    def write_and_read(folder: pathlib.Path, manifest: dict) -> None:
        write_manifest(folder, manifest)
        records.append(len(samples))
        dataset = open_dataset(cfg)
        windows = dataset.sources[0].order.epoch_length or math.inf
        while len(samples) < windows and dataset.covers(len(samples) + 1):
            stream, start, stop = dataset.span(len(samples))
            samples[len(samples)] = stream.read(start, stop).tolist()

    monkeypatch.setattr("data.writer.write_manifest", write_and_read)
    prepare(cfg.data, cfg.model.vocab_size)
    assert len({*records}) == 8 < len(records)
    complete = open_dataset(cfg)
    assert complete.epochs(len(samples) * cfg.train.seq_len) == 1
    for number, tokens in samples.items():
        stream, start, stop = complete.span(number)
        assert stream.read(start, stop).tolist() == tokens


@pytest.mark.quick
def test_text_waits_until_it_is_known_whether_training_tokens_are_held_out(configure):
    """Of a text of which no document is held out, the last tokens before 2^22 are."""
    cfg = configure()
    none_held_out = {
        "tokens": {"train": 20_000_000, "heldout": 0},
        "documents": {"train": 3, "heldout": 0},
    }
    record(cfg, 2, **none_held_out)
    dataset = open_dataset(cfg)
    assert not dataset.covers(1)
    held_out = [2**22 - 41_943, 2**22]
    record(cfg, 3, **none_held_out, validation=["train", *held_out, "a hash"])
    assert dataset.covers(6) and not dataset.covers(7)  # 5 of 419 windows are left out
    assert [stream.length for stream in dataset.validation] == [41_943]
    for number in range(414):
        _, start, stop = dataset.span(number)
        assert stop <= held_out[0] or start >= held_out[1]


@pytest.mark.quick
def test_a_loader_reads_ahead_what_is_prepared_alone(configure):
    """Three segments have 419 windows, and 6.5 steps."""
    cfg = configure(train={"steps": 8})
    loader = loader_of(cfg)
    assert loader.missing(1)
    record(cfg, 3)
    for step in range(1, 7):
        assert not loader.missing(step)
        assert len(loader.pending) == min(3, 7 - step)
        next(loader)
    assert loader.missing(7) and not loader.pending
    record(cfg, 4)
    assert not loader.missing(7) and not loader.missing(8)
    next(loader)
    next(loader)
    assert not loader.missing(9)  # past the last step
    loader.close()


@pytest.mark.quick
@pytest.mark.parametrize("first_step", [4, 5])
def test_an_evaluation_waits_until_it_is_decided_what_is_held_out(configure, first_step):
    """Also in a launch that has no step to train."""
    cfg = configure(train={"steps": 4, "global_batch_size": 4})
    loader = loader_of(cfg, first_step=first_step)
    record(cfg, 1)
    assert not loader.missing(first_step) and loader.missing(first_step, evaluates=True)
    record(cfg, 3)
    assert not loader.missing(first_step, evaluates=True)
    assert [stream.length for stream in loader.dataset.validation] == [1000]
    loader.close()


@pytest.mark.quick
def test_a_mixture_waits_for_the_source_that_a_step_needs(configure, tmp_path):
    """One of nine samples comes from text that grows."""
    train = {"global_batch_size": 4}
    growing = configure(path="growing", train=train)
    finished = configure(path="finished", train=train)
    record(finished, 6, complete=True)
    sources: list[Source] = []
    for number, cfg in enumerate([finished, growing]):
        sources.append(
            PreparedSource(pathlib.Path(cfg.data.path or ""), cfg.data, number, 320, 9999, 0)
        )
    dataset = Dataset(
        cfg.data, cfg.train, sources, Mixture([8.0, 1.0]), ["finished", "growing"], []
    )
    assert dataset.covers(2) and not dataset.covers(3)
    source = dataset.missing(3)
    assert source
    assert source.progress() == f"{growing.data.path}: 20,000,000 of 1,048,576 tokens are prepared"
    record(growing, 1)
    needed = [dataset.mixture.count(1, 4 * step) for step in range(2000)]
    last = max(step for step, count in enumerate(needed) if count <= (BORDER - 1) // 9999)
    assert dataset.covers(1) and dataset.covers(last) and not dataset.covers(last + 1)
    assert dataset.epochs(9 * 4 * 9999) == {"finished": 32 / 2000, "growing": None}
    positions = [dataset.position(number) for number in range(9)]
    assert sorted(position.source for position in positions) == [0] * 8 + [1]


@pytest.mark.quick
def test_a_record_counts_once_its_bytes_are_visible(configure):
    cfg = configure()
    record(cfg, 1)
    dataset = open_dataset(cfg)
    path = pathlib.Path(cfg.data.path or "") / "train.bin"
    tokens = path.read_bytes()
    os.truncate(path, 2 * BORDER)
    record(cfg, 2, tokens={"train": len(tokens) // 2, "heldout": 1000})
    assert dataset.covers(1) and not dataset.covers(2)
    path.write_bytes(tokens)
    assert dataset.covers(2)


@pytest.mark.quick
def test_the_record_of_a_slower_writer_is_ignored(configure):
    cfg = configure()
    record(cfg, 2)
    dataset = open_dataset(cfg)
    behind = {"train": BORDER, "heldout": 1000}
    record(cfg, 1, tokens=behind, documents={"train": 2, "heldout": 2})
    assert not dataset.covers(1000) and dataset.covers(3)


# The text of an earlier launch


@pytest.mark.quick
def test_a_resume_refuses_other_text_as_soon_as_it_is_prepared(configure):
    cfg = configure()
    record(cfg, 3)
    before = open_dataset(cfg).fingerprint()
    assert before[0]["hashes"] == ["of validation", "of 0", "of 1", "of 2"]
    record(cfg, 0)  # the folder was deleted and begun again
    resumed = open_dataset(cfg)
    assert resumed.identities == [{k: v for k, v in before[0].items() if k != "hashes"}]
    resumed.require_same_text(before)
    record(cfg, 2)
    assert resumed.covers(1)
    record(cfg, 3, segments=["of 0", "of 1", "other"])
    with refuses("text.jsonl: segment 2"):
        resumed.covers(1000)
    with refuses("text.jsonl: segment 2"):
        open_dataset(cfg).require_same_text(before)
    record(cfg, 3, validation=["heldout", 0, 1000, "other"])
    with refuses("text.jsonl: the validation text"):
        open_dataset(cfg).require_same_text(before)


@distributed(ranks=2)
@pytest.mark.parametrize("key", ["segments", "validation"])
def test_ranks_with_other_text_than_rank_zero_are_refused(world, corpus, prepared, tmp_path, key):
    folder = prepared
    if world.rank == 1:
        folder = shutil.copytree(prepared, tmp_path / "copy")
        manifest = manifest_of(folder)
        manifest[key][-1] = "another hash"
        write_manifest(folder, manifest)
    data = {"source": str(corpus), "path": str(folder)}
    cfg = make_config(data=data, run={"output_dir": str(tmp_path)})
    with refuses("segment 0|validation text", "rank 0 reads"):
        train_run(cfg, world)


# What is refused


@pytest.mark.quick
@pytest.mark.parametrize(
    "segments, changes, options, words",
    [
        (3, {}, {"data": {"order": "global"}}, ("not complete", "data.prepare")),
        (6, {"vocab_size": 321}, {}, ("vocab_size = 320", "smaller than", "321 entries")),
        (6, {}, {"train": {"seq_len": 500_000}}, ("source", "39 samples", "batch_size = 64")),
        (
            6,
            {"tokens": {"train": 20_000_001, "heldout": 1000}},
            {},
            (r"train\.bin", "sizes", "delete"),
        ),
        (6, {"documents": {"train": 2, "heldout": 2}}, {}, (r"train\.bin", "sizes", "delete")),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused(
    configure, segments, changes, options, words
):
    cfg = configure(**options)
    record(cfg, segments, complete=segments == 6, **changes)
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
    prepares = {f"data.{name}" for name in ("source", "rows", "begin", "prepare", "preparer")}
    assert not modules & {*prepares, "torch", "pyarrow", "datasets", "tokenizers"}
