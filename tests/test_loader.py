"""Token files, windows, batches: each sample once, for any split; damaged files named."""

import dataclasses
import functools
import itertools
import json
import math
import operator
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch

import config
from config import IGNORE, ConfigError
from data.loader import sample_digest, validation_batches
from data.order import Permutation, make_order
from data.record import read_manifest
from data.tokenizer import Tokenizer
from data.tokens import TokenStream, open_stream, window_count
from files import printable
from tests import order_model
from tests.conftest import (
    REPO,
    config_for,
    data_rank,
    loader_of,
    make_config,
    prepare_one,
    run_tool,
)

pytestmark = pytest.mark.quick


def rows(batch) -> set[tuple[int, ...]]:
    return {tuple(row.tolist()) for inputs, _ in batch.micro_batches for row in inputs}


def test_every_sample_once_an_epoch_for_any_split(prepared):
    cfg = make_config(
        train={"seq_len": 241, "global_batch_size": 8, "micro_batch_size": 1}, run={"seed": 5}
    )
    stream = open_stream(prepared, "train", 320)
    windows = window_count(stream.length, 241)
    assert windows % 8  # the tail of an epoch goes into the next one's first batch
    loaders = [loader_of(cfg, stream, rank=rank, ranks=4) for rank in range(4)]
    alone = loader_of(cfg, stream)
    seen = [alone.dataset.order(k).window for k in range(3 * windows)]
    # of the run's seed
    assert seen == [Permutation(windows, 5, k // windows)(k % windows) for k in range(3 * windows)]
    epochs = [seen[i * windows : (i + 1) * windows] for i in range(3)]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    for step in (1, windows // 8, windows // 8 + 1):
        whole = alone.batch(step)
        parts = [loader.batch(step) for loader in loaders]
        assert sum(p.digest for p in parts) % 2**53 == whole.digest
        assert whole.valid_tokens == parts[0].valid_tokens == 8 * 241
        assert whole.epochs == parts[3].epochs == step * 8 / windows
        assert set.union(*map(rows, parts)) == rows(whole)
    for loader in [*loaders, alone]:
        loader.close()


def test_epochs_of_a_mixture_are_those_of_each_source(prepared):
    """3:1, of one text: counted sample by sample."""
    sources = [{"source": "a", "weight": 3.0}, {"source": "b", "weight": 1.0}]
    cfg = make_config(data={"sources": sources, "tokenizer": "x"})
    stream = open_stream(prepared, "train", 320)
    loader = loader_of(cfg, stream, stream)
    loader.dataset.names = ["a", "b"]
    windows = loader.dataset.order.sources[0].windows
    taken = Counter(loader.dataset.order(k).source for k in range(5 * 8))
    assert taken == {0: 30, 1: 10}
    assert loader.dataset.epochs(5) == {"a": 30 / windows, "b": 10 / windows}
    loader.dataset.order.sources[1].windows = None  # growing text that is not complete
    assert loader.dataset.epochs(5) == {"a": 30 / windows, "b": None}
    loader.close()


def test_loader_resumes_at_any_step(prepared):
    cfg, stream = make_config(), open_stream(prepared, "train", 320)
    first = loader_of(cfg, stream)
    digests = [next(first).digest for _ in range(10)]
    later = loader_of(cfg, stream, first_step=6)
    assert [next(later).digest for _ in range(5)] == digests[5:] and len(set(digests)) == 10
    first.close(), later.close()


def test_targets_are_the_next_tokens(prepared):
    stream = open_stream(prepared, "train", 320)
    loader = loader_of(make_config(), stream)
    inputs, targets = next(loader).micro_batches[0]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    _, ids = stream.read(*loader.dataset.span(0)[1:])
    assert torch.equal(inputs[0], ids[:-1]) and torch.equal(targets[0], ids[1:])
    loader.close()


def test_a_failure_in_the_loaders_thread_reaches_the_training_thread(prepared, tmp_path):
    stream = open_stream(prepared, "train", 320)
    loader = loader_of(make_config(), dataclasses.replace(stream, vocab_size=5))
    with pytest.raises(ConfigError, match=r"token \d+ has id \d+, but \[model\] vocab_size = 5"):
        next(loader)
    loader.close()


def test_a_digest_is_of_the_tokens_and_of_their_place_in_the_order():
    """In 40 bits, each of which some sample sets."""
    assert (
        len({sample_digest(number, raw) for number in (1, 2, 256) for raw in (b"ab", b"ba", b"a")})
        == 9
    )
    assert functools.reduce(operator.or_, (sample_digest(n, b"a") for n in range(64))) == 2**40 - 1


def test_an_id_as_large_as_the_vocabulary_is_named(prepared):
    stream = open_stream(prepared, "train", 320)
    _, ids = stream.read(0, 1000)
    largest = int(ids.max())
    assert torch.equal(dataclasses.replace(stream, vocab_size=largest + 1).read(0, 1000)[1], ids)
    with pytest.raises(
        ConfigError, match=rf"token {int(ids.argmax())} has id {largest}, .* = {largest};"
    ):
        dataclasses.replace(stream, vocab_size=largest).read(0, 1000)


def stream_of(ids: list[int], folder: pathlib.Path) -> TokenStream:
    """Of four bytes each, as of a tokenizer of five entries."""
    (folder / "train.bin").write_bytes(b"".join(i.to_bytes(4, "little", signed=True) for i in ids))
    (folder / "manifest.json").write_text(
        json.dumps(
            {
                "identity": {},
                "vocab_size": 5,
                "tokens": {"train": len(ids)},
                "dtype": "int32",
                "sha256": {},
            }
        )
    )
    return open_stream(folder, "train", 5)


def test_a_negative_id_is_named(tmp_path):
    """It would be taken for IGNORE."""
    stream = stream_of([0, 4, IGNORE, 4], tmp_path)
    assert stream.read(0, 2)[1].tolist() == [0, 4]
    with pytest.raises(
        ConfigError, match=rf"train\.bin: token 2 has id {IGNORE}, but \[model\] vocab_size = 5"
    ):
        stream.read(1, 4)


def test_tokens_of_a_larger_tokenizer_than_the_model_are_refused(prepared):
    assert open_stream(prepared, "train", 320).length
    with pytest.raises(
        ConfigError, match=rf"vocab_size = 319: smaller than {prepared}'s tokenizer, of 320 entries"
    ):
        open_stream(prepared, "train", 319)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batches", [None, 1, 2, 1000])
def test_evaluation_reads_every_held_out_target_once(prepared, ranks, batches):
    cfg = make_config(eval={"batches": batches} if batches else {})
    stream = open_stream(prepared, "validation", 320)
    found = [list(validation_batches(stream, cfg, data_rank(rank, ranks))) for rank in range(ranks)]
    in_all = math.ceil((stream.length - 1) / (8 * 32))  # a step's worth each
    assert {len(part) for part in found} == {
        min(in_all, batches or in_all) * config.accumulation_steps(cfg, ranks)
    }
    _, ids = stream.read(0, stream.length)
    targets_read = min(8 * 32 * (batches or in_all), stream.length - 1)
    read: list[list[int]] = [[], []]
    for number in range(len(found[0])):
        for part in found:  # the ranks take turns
            inputs, targets = part[number]
            read[0] += inputs[targets != IGNORE].tolist()
            read[1] += targets[targets != IGNORE].tolist()
    assert read == [ids[:targets_read].tolist(), ids[1 : targets_read + 1].tolist()]


@pytest.mark.parametrize("tokens, steps", [(1, 0), (2, 1), (256, 1), (257, 1), (258, 2)])
def test_evaluation_makes_no_step_without_a_target(tmp_path, tokens, steps):
    """Of 8 samples of 32 targets each: 257 tokens have 256 targets."""
    found = [
        *validation_batches(stream_of([1] * tokens, tmp_path), make_config(eval={}), data_rank())
    ]
    assert len(found) == steps * config.accumulation_steps(make_config(), 1)
    assert sum(int((targets != IGNORE).sum()) for _, targets in found) == tokens - 1


def test_evaluation_keeps_to_documents_as_training_does(prepared):
    stream = open_stream(prepared, "validation", 320)
    found = list(
        validation_batches(stream, make_config(data={"document_mask": True}, eval={}), data_rank())
    )
    begins = {begin for _, begin, _ in stream.documents(0, stream.length)}
    valid = [t for _, targets, _, _ in found for t in targets[targets != IGNORE].tolist()]
    expected = [
        t for i, t in enumerate(stream.read(0, stream.length)[1].tolist()) if i and i not in begins
    ]
    assert sorted(valid) == sorted(expected) and len(begins) > 1
    assert any(documents.amax() > documents.amin() for *_, documents in found)


def test_cut_token_file_is_noticed(prepared, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    whole = (copy / "train.bin").read_bytes()
    for changed in (whole[:-2], whole + bytes(2)):
        (copy / "train.bin").write_bytes(changed)
        told = f"has {len(changed)} bytes, its manifest says {len(whole)}: it was cut or changed"
        with pytest.raises(ConfigError, match=told):
            open_stream(copy, "train", 320)
    (copy / "train.bin").unlink()
    with pytest.raises(ConfigError, match=r"train\.bin: cannot be read"):
        open_stream(copy, "train", 320)
    with pytest.raises(ConfigError, match="holds no prepared data"):
        open_stream(tmp_path / "nowhere", "train", 320)


def test_dataset_smaller_than_a_batch(prepared):
    tokens = (prepared / "train.bin").stat().st_size // 2
    told = (
        f"train.bin: {tokens} tokens give {(tokens - 1) // 8000} samples of train.seq_len = 8000, but "
        "one batch of train.global_batch_size = 8 takes 8 of them"
    )
    with pytest.raises(ConfigError, match=told):
        make_order(make_config(train={"seq_len": 8000}), [open_stream(prepared, "train", 320)])


def test_random_windows_equal_the_file(prepared):
    stream = open_stream(prepared, "train", 320)
    import array

    ids = array.array("H", (prepared / "train.bin").read_bytes())
    chosen = random.Random(0)
    for _ in range(50):
        start = chosen.randrange(stream.length - 40)
        assert stream.read(start, start + 40)[1].tolist() == list(ids[start : start + 40])


@pytest.mark.parametrize("block", [1, 7, 394, 512])
def test_documents_of_any_span(block, prepared, monkeypatch):
    """Of the file and of a range of it, against a search through the tokens themselves: each document ends with EOS,
    which text never gives. With an index of one entry, of several, with one that is full, and with none."""
    monkeypatch.setattr("data.tokens.ENDS_PER_BLOCK", block)
    whole = open_stream(prepared, "train", 320)
    ids = whole.read(0, whole.length)[1].tolist()
    [eos] = Tokenizer(prepared / "tokenizer.model").eos
    borders = [0, *(i + 1 for i, token in enumerate(ids) if token == eos)]
    assert len(borders) - 1 == read_manifest(prepared)["documents"]["train"] == 394
    assert borders[-1] == whole.length
    draw = random.Random(0)
    for first, end in ((0, whole.length), (1001, whole.length - 1003)):
        stream = dataclasses.replace(whole, first=first, length=end - first)
        documents = []
        for number, (begins, stops) in enumerate(itertools.pairwise(borders)):
            if stops > first and begins < end:
                documents.append((number, max(begins, first) - first, min(stops, end) - first))
        assert stream.documents(0, stream.length) == documents
        assert stream.documents(5, 5) == []
        for _ in range(100):
            start = draw.randrange(stream.length)
            stop = min(stream.length, start + draw.randrange(1, 400))
            assert stream.read(start, stop)[1].tolist() == ids[first + start : first + stop]
            overlapping = [d for d in documents if d[1] < stop and d[2] > start]
            assert stream.documents(start, stop) == overlapping
            first_tokens = [begins for _, begins, _ in documents if start < begins < stop]
            assert stream.targets_without_loss(start, stop) == len(first_tokens)


def test_a_step_can_be_read_on_a_terminal_without_its_characters(tmp_path):
    (tmp_path / "source.jsonl").write_text(
        "".join(json.dumps({"text": f"\u732b {i} " * 20}) + "\n" for i in range(50))
    )
    cfg = config_for(tmp_path / "source.jsonl", tmp_path)
    prepare_one(cfg)
    (tmp_path / "test.toml").write_text(config.to_toml(cfg))
    done = subprocess.run(
        [sys.executable, "-m", "data.show", str(tmp_path / "test.toml")],
        cwd=REPO,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and "\\u732b 20 \\u732b 20 " in done.stdout, done.stderr


def test_a_step_can_be_read(corpus, write_config, capsys):
    import data.show

    path = str(write_config("shown"))
    assert data.show.main([path, "--step", "2"]) == 0
    samples = capsys.readouterr().out.split("=== ")[1:]
    assert [sample.partition(":")[0] for sample in samples] == [
        f"step 2, sample {n}" for n in range(8, 16)
    ]
    texts = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    for sample in samples:  # every piece of a document is a piece of one of the source's
        for piece in sample.split("--- document ")[1:]:
            assert any(piece.partition("\n")[2].rstrip("\n") in text for text in texts), piece
    assert (
        run_tool(data.show.main, path, "--step", 0) == 2
        and "steps count from 1" in capsys.readouterr().err
    )


def test_documents_are_shown_with_what_is_cut_off(prepared, write_config):
    import data.show

    stream, ending = open_stream(prepared, "train", 320), 0
    stops = [stop for *_, stop in stream.documents(0, stream.length - 99)]
    # of samples, so that the last token of one ends a document
    length = next(n for n in range(32, 99) if any((stop - 1) % n == 0 for stop in stops))
    cfg = config.load(str(write_config("shown")), [f"--train.seq_len={length}", "--run.seed=3"])
    steps = stream.length // length // 8 + 2
    places = order_model.global_samples(stream.length, length, 3, 0, None, 8 * steps)
    assert places[-1][0] == 1  # in a second epoch
    for step in range(1, steps + 1):
        for sample, number in zip(
            data.show.samples(cfg, step), range(8 * step - 8, 8 * step), strict=True
        ):
            heading = (
                r"=== step (\d+), sample (\d+): epoch (\d+), window (\d+), tokens (\d+) to (\d+)\n"
            )
            found = [int(word) for word in re.match(heading, sample).groups()]
            *place, first, last = found
            window = places[number][1]
            assert place == [step, number, *places[number]]
            assert (first, last) == (window * length, window * length + length)
            expected = [
                (
                    number,
                    sum(first <= place <= last for place in range(start, stop)),
                    stop - start,
                    first in range(start + 1, stop),
                    last in range(start, stop - 1),
                )
                for number, start, stop in stream.documents(first, last + 1)
            ]
            ending += not expected[-1][-1]
            shown = re.findall(
                r"^--- document (\d+), (\d+) of its (\d+) tokens( \(begins before\))?( \(continues\))?$",
                sample,
                re.M,
            )
            assert [
                (int(n), int(here), int(of), bool(before), bool(after))
                for n, here, of, before, after in shown
            ] == expected
    assert ending


@pytest.mark.parametrize(
    "text, shown",
    [("a\tb\n", "a\tb\n"), ("\x1b[31m\0", "\\x1b[31m\\x00"), ("\u202e\u00e9", "\\u202e\u00e9")],
)
def test_control_characters_are_spelt_out(text, shown):
    assert printable(text) == shown


def test_a_file_cut_while_in_use_is_named(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "data")
    stream = open_stream(copy, "train", 320)
    with (copy / "train.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        ConfigError, match="train.bin: ends before token 640: it was cut while it was in use"
    ):
        stream.read(600, 640)
    assert stream.documents(0, 10)
    (copy / "train.ends.bin").write_bytes(b"")  # no SIGBUS, as a mapped file would give
    with pytest.raises(
        ConfigError, match=r"train\.ends\.bin: ends before document \d+: it was cut while"
    ):
        stream.documents(0, 10)
    others = (prepared / "heldout.ends.bin").read_bytes()
    for content, told in (
        (b"123", "has 3 bytes"),
        (others, rf"has {len(others)} bytes and ends at token \d+, "),
        (None, "cannot be read: No such file"),
    ):
        (copy / "train.ends.bin").write_bytes(content) if content else (
            copy / "train.ends.bin"
        ).unlink()
        with pytest.raises(ConfigError, match=rf"train\.ends\.bin: {told}"):
            open_stream(
                shutil.copytree(
                    prepared, copy, dirs_exist_ok=True, ignore=lambda *_: ["train.ends.bin"]
                ),
                "train",
                320,
            ).documents(0, 10)


def test_documents_of_one_token_are_refused_under_a_mask(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(2 * 500))
    (tmp_path / "train.ends.bin").write_bytes(
        b"".join(i.to_bytes(8, "little") for i in range(1, 501))
    )
    (tmp_path / "manifest.json").write_text(
        json.dumps(
            {
                "identity": {},
                "vocab_size": 5,
                "tokens": {"train": 500},
                "dtype": "uint16",
                "sha256": {},
            }
        )
    )
    with pytest.raises(ConfigError, match="of one token each"):
        make_order(make_config(data={"document_mask": True}), [open_stream(tmp_path, "train", 320)])


@pytest.mark.parametrize("dtype, width", [("uint16", 2), ("int32", 4)])
def test_files_beyond_two_to_the_31_tokens(dtype, width, tmp_path):
    """Sparse: the disk holds a few pages of them."""
    length, tail = 2**31 + 5000, list(range(1, 4001))
    with (tmp_path / "train.bin").open("wb") as file:
        file.seek(width * (length - len(tail)))
        file.write(b"".join(i.to_bytes(width, "little") for i in tail))
    (tmp_path / "train.ends.bin").write_bytes(
        b"".join(e.to_bytes(8, "little") for e in (2**31 + 1500, length))
    )
    (tmp_path / "manifest.json").write_text(
        json.dumps(
            {
                "identity": {},
                "vocab_size": 5000,
                "tokens": {"train": length},
                "dtype": dtype,
                "sha256": {},
            }
        )
    )
    stream = open_stream(tmp_path, "train", 5000)
    assert stream.read(length - 100, length)[1].tolist() == tail[-100:]
    assert stream.documents(2**31 + 1000, 2**31 + 2000) == [
        (0, 0, 2**31 + 1500),
        (1, 2**31 + 1500, length),
    ]
    loader = loader_of(make_config(model={"vocab_size": 5000}), stream)
    last = window_count(length, 32) - 1
    loader.close()
    loader.dataset.order.sources[0].locate = lambda index: (0, last)
    assert loader.dataset.span(0) == (stream, 32 * last, 32 * last + 33)
    assert 2**31 < 32 * last + 33 <= length
    targets = loader.batch(1).micro_batches[0][1]
    assert targets[0].tolist() == stream.read(32 * last + 1, 32 * last + 33)[1].tolist()


def test_a_window_has_its_last_target():
    assert [window_count(tokens, 32) for tokens in (0, 1, 32, 33, 64, 65)] == [0, 0, 0, 1, 1, 2]


def test_under_a_document_mask_positions_and_documents_come_along(prepared):
    """Against a loop over the tokens of the file."""
    cfg = make_config(data={"document_mask": True}, train={"seq_len": 100, "micro_batch_size": 4})
    stream = open_stream(prepared, "train", 320)
    ends = {end for _, _, end in stream.documents(0, stream.length)}
    loader = loader_of(cfg, stream)
    second = loader_of(cfg, stream, rank=1, ranks=2)  # which counts the first one's, too
    number = 0
    seen = set()
    for step in (1, 2, 3):
        batch, valid = loader.batch(step), 0
        for inputs, targets, positions, documents in batch.micro_batches:
            assert {x.dtype for x in (inputs, targets, positions, documents)} == {torch.int64}
            assert {tuple(x.shape) for x in (inputs, targets, positions, documents)} == {(4, 100)}
            for row in range(4):
                _, first, stop = loader.dataset.span(number)
                ids = stream.read(first, stop)[1].tolist()
                place = 0
                document = sum(end <= first for end in ends)
                for i in range(100):
                    if i and first + i in ends:
                        place, document = 0, document + 1
                    assert (inputs[row, i], positions[row, i], documents[row, i]) == (
                        ids[i],
                        place,
                        document,
                    )
                    assert targets[row, i] == (IGNORE if first + i + 1 in ends else ids[i + 1])
                    valid += first + i + 1 not in ends
                    place += 1
                seen.add(int(positions[row, 0]))
                number += 1
        assert valid == batch.valid_tokens == second.batch(step).valid_tokens
    second.close()
    assert seen == {0}  # a document that began before the window counts from the window's start
    begins_last = 0  # windows whose last target is the first token of a document
    for step in range(1, window_count(stream.length, 100) // 8):
        batch = loader.batch(step)
        assert batch.valid_tokens == sum(
            (found[1] != IGNORE).sum() for found in batch.micro_batches
        )
        begins_last += sum((found[1][:, -1] == IGNORE).sum() for found in batch.micro_batches)
    assert begins_last
    loader.close()


@pytest.mark.parametrize("mask", [False, True])
def test_evaluation_pads_with_a_document_that_holds_no_target(prepared, mask):
    cfg = make_config(data={"document_mask": mask}, eval={})
    stream = open_stream(prepared, "validation", 320)
    for tensors in validation_batches(stream, cfg, data_rank()):
        assert len(tensors) == (4 if mask else 2)
        for documents in tensors[3:]:
            assert (documents.diff(dim=1) >= 0).all()
        for positions in tensors[2:3]:
            assert ((positions.diff(dim=1) == 1) | (positions[:, 1:] == 0)).all()


@pytest.mark.parametrize("mask", [False, True])
def test_a_part_of_the_sequence_is_that_part(prepared, mask):
    """Inputs, targets and positions; documents stay whole. Each with storage of its own, or it could not be pinned."""
    cfg = make_config(
        data={"document_mask": mask}, train={"global_batch_size": 4, "micro_batch_size": 4}
    )
    stream, cp_positions = (
        open_stream(prepared, "train", 320),
        torch.tensor([0, 1, 2, 3, 28, 29, 30, 31]),
    )
    whole, part = (loader_of(cfg, stream, cp=of) for of in (1, 4))
    (full,), (ours,) = next(whole).micro_batches, next(part).micro_batches
    whole.close()
    part.close()
    assert torch.equal(ours[0], full[0][:, cp_positions]) and torch.equal(
        ours[1], full[1][:, cp_positions]
    )
    assert torch.equal(ours[2], full[2][:, cp_positions] if mask else cp_positions.expand(4, -1))
    assert len(ours) == 3 + mask and (not mask or torch.equal(ours[3], full[3]))
    assert all(tensor.is_contiguous() for tensor in ours)
