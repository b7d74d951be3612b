"""data.order = "growing": whatever happens while the text is being prepared, the samples are those of the
documentation's model (tests/order_model.py), and whatever ends a run says why in a line."""

import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from data.background import PreparingFailed
from data.growing import GrowingSource
from data.record import is_complete, read_manifest, write_manifest
from data.sources import Source

import config
import data.show
import files
from config import ConfigError
from data import background, growing, local_files, record
from data.dataset import open_data, open_dataset
from data.folder import begin_all
from data.loader import Loader
from data.mixture import Mixture
from data.prepare import Preparation, main, prepare, prepare_text
from data.tokenizer_training import train_tokenizer
from data.tokens import Windows
from data.writer import TokenWriter
from schema import read_toml
from tests import order_model
from tests.conftest import REPO, data_rank, launch, make_config, rows, run_tool, words
from tests.small_borders import VALUES

pytestmark = pytest.mark.early

TEXTS = [words(i, 5 + i % 80) + ("" if i % 7 else "\n\u00e9\u732b") for i in range(2400)]
CUTS = [0, 1, 40, 1100, 1101, 1900, 2400]  # of them in six files
# of a process that prepares beside a test
BESIDE = "from tests.small_borders import shrink; shrink(); "


@pytest.fixture(autouse=True)
def small_borders(monkeypatch):
    """The text here is little: a few segments of it. In this process, and in those that prepare beside it."""
    for name, value in VALUES.items():
        monkeypatch.setattr(f"data.record.{name}", value)
        monkeypatch.setattr(
            order_model, {"HOLD_OUT_BEFORE": "VALIDATION_BORDER"}.get(name, name), value
        )
    monkeypatch.setattr(order_model, "LAST_DOUBLED", 2 * VALUES["BORDER_STEP"])
    monkeypatch.setattr(background, "CHILD", BESIDE + background.CHILD)
    monkeypatch.setattr(background, "LONGEST_PAUSE", 0.5)
    monkeypatch.setattr("data.prepare.SMALL", 0)


def write_rows(path: pathlib.Path, texts: list[str]) -> None:
    """A file of the kind that its name says."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100)
    else:
        path.write_bytes(lines)


def written(folder: pathlib.Path, kind: str) -> pathlib.Path:
    """Six files of TEXTS, and the pattern that names them."""
    folder.mkdir()
    for number, (begin, end) in enumerate(itertools.pairwise(CUTS)):
        write_rows(folder / f"part{number}.{kind}", TEXTS[begin:end])
    return folder / f"*.{kind}"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("growing")
    return {
        kind: written(root / kind.replace(".", ""), kind)
        for kind in ("jsonl", "json.gz", "parquet")
    }


@pytest.fixture
def configured(prepared):
    """A configuration of growing text, with the tokenizer of `prepared`."""

    def make(source: object, path: pathlib.Path, **sections) -> config.Config:
        data = {
            "source": str(source),
            "path": str(path),
            "order": "growing",
            "tokenizer": str(prepared / "tokenizer.model"),
            **sections.pop("data", {}),
        }
        return make_config(data=data, **sections)

    return make


@pytest.fixture(scope="module")
def whole(corpora, prepared, tmp_path_factory) -> tuple[pathlib.Path, list[int]]:
    """The jsonl corpus, prepared before, and the digests of a run's steps on it: beyond the first epoch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VALUES.items():
            patch.setattr(f"data.record.{name}", value)
        folder = tmp_path_factory.mktemp("whole") / "all"
        tokenizer = str(prepared / "tokenizer.model")
        data = {"source": str(corpora["jsonl"]), "order": "growing", "tokenizer": tokenizer}
        cfg = make_config(data={**data, "path": str(folder)})
        prepare(cfg, whole=True)
        epoch = GrowingSource(folder, cfg, 0, Mixture([1.0])).order.windows
        return folder, digests(cfg, epoch // 8 + 30)


def digests(cfg: config.Config, last: int, first: int = 1, limit: float = 60.0) -> list[int]:
    """Of the steps' batches, each waited for as a run waits. Raises what a run would."""
    loader = Loader(cfg, open_dataset(cfg), data_rank(), first)
    try:
        return [next_digest(loader, step, limit) for step in range(first, last + 1)]
    finally:
        loader.close()


def next_digest(loader: Loader, step: int, limit: float = 60.0) -> int:
    deadline = time.monotonic() + limit
    while not loader.is_ready(step - 1):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return next(loader).digest


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_stamps(folder: pathlib.Path) -> dict:
    manifest = read_manifest(folder)
    return {**manifest, "files": [[*entry[:1], entry[3]] for entry in manifest["files"]]}


def text_of(folder: pathlib.Path) -> tuple[dict[str, bytes], dict]:
    """All but when and by whom it was recorded."""
    files_of = content(folder)
    del files_of["manifest.json"]
    return files_of, {**without_stamps(folder), "writer": None}


# The order


def fake_folder(folder: pathlib.Path, tokens: int, validation: list | None = None) -> pathlib.Path:
    """A complete folder of so many zeros."""
    folder.mkdir()
    for name in ("train.bin", "heldout.bin"):
        with (folder / name).open("wb") as file:
            file.truncate(2 * tokens if name == "train.bin" else 20)
    borders = 0
    while order_model.border(borders) < tokens:
        borders += 1
    manifest = {
        "identity": {},
        "vocab_size": 5,
        "dtype": "uint16",
        "tokens": {"train": tokens, "heldout": 10},
        "documents": {"train": 1, "heldout": 1},
        "segments": [str(i) for i in range(borders + 1)],
        "validation": validation or ["heldout", 0, 10],
        "sha256": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [260, 4096, 4097, 20_000, 50_001])
@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("seq_len", [32, 100])
def test_the_order_is_that_of_the_documentation_s_model(tokens, held_out, seq_len, tmp_path):
    """Sample by sample over three epochs. Each exactly once an epoch, and none with a token of the validation text."""
    excluded = order_model.held_out_range(tokens) if held_out else None
    folder = fake_folder(tmp_path / "f", tokens, ["train", *excluded] if excluded else None)
    cfg = make_config(
        run={"seed": 3},
        train={"seq_len": seq_len, "global_batch_size": 1, "micro_batch_size": None},
    )
    mixture = SimpleNamespace(weights=(1, 1, 1), period=3)
    source = GrowingSource(folder, cfg, 2, mixture)
    windows_an_epoch = source.order.windows
    count = 3 * windows_an_epoch
    found = [source.order.locate(index) for index in range(count)]
    assert found == order_model.growing_samples(tokens, seq_len, 3, 2, excluded, count)
    windows = order_model.training_windows(tokens, seq_len, excluded)
    for epoch in range(3):
        of_epoch = found[epoch * windows_an_epoch : (epoch + 1) * windows_an_epoch]
        assert sorted(of_epoch) == [(epoch, window) for window in windows]
    if excluded:
        first, end = excluded
        assert all(k * seq_len + seq_len < first or k * seq_len >= end for k in windows)
    numbering = Windows(seq_len, excluded)
    assert numbering.count(tokens) == len(windows)
    assert [numbering(k) for k in range(len(windows))] == windows


@pytest.mark.quick
def test_the_real_borders(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert [record.border_of(i) for i in (0, 1, 9, 10, 11)] == [
        2**20,
        2**21,
        2**29,
        2**29 + 2**28,
        2**30,
    ]
    assert [record.border_of(i) for i in range(30)] == [order_model.border(i) for i in range(30)]
    tokens = 2**21 + 2**20 + 12_345
    cfg = make_config(train={"seq_len": 2048, "global_batch_size": 1, "micro_batch_size": None})
    source = GrowingSource(fake_folder(tmp_path / "f", tokens), cfg, 0, Mixture([1.0]))
    count = source.order.windows + 50
    assert [source.order.locate(i) for i in range(count)] == order_model.growing_samples(
        tokens, 2048, 0, 0, None, count
    )


# The same samples, whatever happens meanwhile


@pytest.mark.quick
def test_samples_are_the_same_while_preparing_as_after_it(corpora, configured, whole, tmp_path):
    folder, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "new")
    prepare(cfg)
    assert read_manifest(tmp_path / "new")["tokens"]["train"] == 0
    assert digests(cfg, len(expected)) == expected
    prepare(cfg, whole=True)  # a run may end before the last hashes are there
    assert content(tmp_path / "new") == content(folder)
    middle = expected[len(expected) // 3 :]
    assert digests(cfg, len(expected), len(expected) // 3 + 1) == middle


def test_a_source_that_waits_reads_what_is_recorded_alone(corpora, configured, whole, tmp_path):
    """Each state of the record in which a process that prepares could be killed. The validation text is read once it
    is complete: where no more documents are held out, long before the text's end."""
    folder, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "new")
    prepare(cfg)
    train_tokens = read_manifest(folder)["tokens"]["train"]
    of_segments = map(len, order_model.segments(train_tokens, cfg.train.seq_len, None))
    segment_ends = [*itertools.accumulate(of_segments)]
    seen = []
    validation = []
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("data.encode.CHUNK", 20_000)
        record = TokenWriter.record

        def recorded(writer):
            record(writer)
            source = GrowingSource(tmp_path / "new", cfg, 0, Mixture([1.0]))
            ends = source.order.segment_ends
            assert ends == segment_ends[: len(ends)]
            if not source.is_recorded:
                told = r"new: segment (\d+), ([\d,]+) of ([\d,]+) tokens prepared$"
                found = re.search(told, source.waits_for()).groups()
                segment, tokens, end = [int(number.replace(",", "")) for number in found]
                assert tokens == read_manifest(tmp_path / "new")["tokens"]["train"]
                assert end == order_model.border(segment) > tokens
                assert segment == 0 or order_model.border(segment - 1) <= tokens
            readable = ends[-1] // 8 if ends else 0
            seen.append(readable)
            text = growing.GrowingText(cfg, [tmp_path / "new"])
            assert text.covers(readable) or not readable
            assert not text.covers(readable + 1) or source.is_recorded
            is_decided = source.manifest["tokens"]["train"] >= VALUES["HOLD_OUT_BEFORE"]
            assert text.has_validation() == is_decided
            if is_decided:
                (stream,) = open_data(cfg, "validation")
                validation.append(stream.read(0, stream.length)[0])

        patch.setattr(TokenWriter, "record", recorded)
        prepare(cfg, whole=True)
    assert len({*seen}) > 5 and seen == sorted(seen)
    assert 5 < len(validation) < len(seen) - 2
    assert {*validation} == {(folder / "heldout.bin").read_bytes()}
    assert digests(cfg, 20) == expected[:20]


def test_an_evaluation_that_is_due_waits_for_its_text(
    corpora, configured, whole, tmp_path, monkeypatch
):
    """Where the next steps' text is there already. Ranks of which one sees more of the record agree on the rest."""
    cfg = configured(corpora["jsonl"], tmp_path / "p", eval={"every_steps": 2})
    prepare(cfg)
    record = TokenWriter.record

    def stopped(writer: TokenWriter) -> None:
        record(writer)
        if writer.tokens["train"] >= VALUES["FIRST_BORDER"]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data.encode.CHUNK", 20_000)
        patch.setattr(TokenWriter, "record", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(cfg, whole=True)
    monkeypatch.setattr(background.Preparer, "poll", lambda *_: None)
    loader = Loader(cfg, open_dataset(cfg), data_rank(), 1)
    hashes = []
    for step in range(2):
        assert loader.is_ready(step)
        hashes.append(loader.text_hash(step))
        next(loader)
    assert not loader.is_ready(2)
    for name, bytes_ in content(whole[0]).items():
        files.write_atomic(tmp_path / "p" / name, bytes_)  # the loader's thread reads
    assert loader.is_ready(2)
    other = Loader(cfg, open_dataset(cfg), data_rank(), 1)
    assert [other.text_hash(step) for step in range(2)] == hashes
    assert other.text_hash(2) == loader.text_hash(2)
    loader.close()
    other.close()


@pytest.mark.parametrize("decision", ["a document", "tokens", "the end"])
def test_no_sample_is_read_before_it_is_decided_what_is_held_out(
    decision, corpora, configured, tmp_path
):
    """By a document that is, or by so many tokens without one, or at the text's end. What is written but not recorded
    is not read."""
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    [(folder, _)] = begin_all(cfg)
    writer = TokenWriter(folder, growing=True)

    def append_up_to(tokens: int) -> None:
        while writer.tokens["train"] < tokens:
            writer.append("train", bytes(2 * 101))

    append_up_to(order_model.border(0) + 1)
    writer.record()
    source = GrowingSource(folder, cfg, 0, Mixture([1.0]))
    assert not source.order.covers(0) and source.stream is None
    assert source.waits_for() == (
        f"{folder}: segment 0, {writer.tokens['train']:,} tokens prepared, none of them validation "
        f"text; {VALUES['HOLD_OUT_BEFORE']:,} at most are waited for"
    )
    if decision == "a document":
        writer.append("heldout", bytes(2 * 5))
        writer.record()
    elif decision == "tokens":
        append_up_to(VALUES["HOLD_OUT_BEFORE"])
        writer.record()
    else:
        writer.end()
    recorded = writer.tokens["train"]
    documents = writer.documents["train"]
    append_up_to(recorded + 1000)
    for file in writer.files:
        file.sync()
    writer.close()
    source.refresh()
    assert source.order.covers(0)
    assert (source.stream.length, source.stream.document_count) == (recorded, documents)
    assert source.stream.documents(0, 202) == [(0, 0, 101), (1, 101, 202)]


def test_a_mixture_of_a_finished_and_a_growing_source(corpora, configured, tmp_path, prepared):
    """Its validation, too."""

    def of(folder: str) -> config.Config:
        weighted = [
            {"source": str(corpora["jsonl"]), "weight": 0.3},
            {"source": str(corpora["parquet"]), "weight": 0.7},
        ]
        data = {"sources": weighted, "source": None}
        return configured("x", tmp_path / folder, data=data, eval={})

    before = of("before")
    prepare(before, whole=True)
    mixed = of("mixed")
    prepare(mixed)
    folders = [path for path in (tmp_path / "mixed").iterdir() if path.is_dir()]
    other, done = sorted(folders, key=lambda folder: "jsonl" in folder.name)
    shutil.rmtree(done)
    shutil.copytree(tmp_path / "before" / done.name, done)
    assert not is_complete(read_manifest(other))
    assert digests(mixed, 120) == digests(before, 120)
    held = [
        [stream.read(0, stream.length)[0] for stream in open_data(cfg, "validation")]
        for cfg in (before, mixed)
    ]
    assert held[0] == held[1] and len(held[0]) == 2


class Numbered(Source):
    """Texts with a state that changes while the source reads ahead of what is recorded."""

    def __init__(self, d, state=None, record=None):
        super().__init__(d, state, record)
        self.state = state or {"row": 0}

    def rows(self):
        for row in range(self.state["row"], len(TEXTS)):
            self.state["row"] = row + 1
            yield f"row {row}", {self.d.text_field: TEXTS[row]}

    def resume_state(self):
        return self.state

    def fraction_read(self):
        return None


# What is wrong


def spoil(path: pathlib.Path, texts: list[str], rows: list[int]) -> None:
    """Writes the texts with rows, from 0, that cannot be read."""
    if path.suffix == ".parquet":
        write_rows(path, [None if i in rows else text for i, text in enumerate(texts)])
        return
    lines = [json.dumps({"text": text}) for text in texts]
    for i in rows:
        lines[i] = "{"
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_a_wait_without_progress_ends_and_is_not_the_text_s_fault(
    corpora, configured, tmp_path, monkeypatch
):
    """The process that prepares stands still. A gap in which this process is suspended does not count."""
    cfg = configured(corpora["jsonl"], tmp_path / "p", run={"start_timeout_seconds": 2.0})
    prepare(cfg)
    monkeypatch.setattr(background, "CHILD", "import time; time.sleep(1000)")
    loader = Loader(cfg, open_dataset(cfg), data_rank(), 1)
    text = loader.dataset.growing
    assert not loader.is_ready(0)
    text.last_poll -= 1000  # suspended
    assert not loader.is_ready(0) and text.waited <= 1.0
    began = time.monotonic()
    with pytest.raises(PreparingFailed, match="nothing was recorded for 2 s"):
        next_digest(loader, 1)
    assert time.monotonic() - began < 4
    child = text.preparer.child
    os.kill(child.pid, signal.SIGSTOP)
    loader.close()
    assert child.returncode == -signal.SIGKILL


def test_a_wait_in_which_something_is_recorded_may_last_longer_than_the_limit(
    corpora, configured, tmp_path, monkeypatch
):
    """An hour in all, of which never more than nine seconds are without progress. The process is replaced after half of
    the limit without any."""
    cfg = configured(corpora["jsonl"], tmp_path / "p", run={"start_timeout_seconds": 20.0})
    prepare(cfg)
    text = open_dataset(cfg).growing
    clock = SimpleNamespace(now=text.last_poll)
    monkeypatch.setattr("data.growing.time", SimpleNamespace(monotonic=lambda: clock.now))
    replaced: list[float] = []
    monkeypatch.setattr(text.preparer, "poll", lambda is_needed: None)
    monkeypatch.setattr(text.preparer, "replace", lambda: replaced.append(text.waited))
    [source] = text.sources
    monkeypatch.setattr(source, "refresh", lambda: None)
    for second in range(3600):
        clock.now += 1
        if second % 10 == 0:
            source.manifest_stamp = (second,)  # of the record, which may hold the same text
        text.poll(is_waiting=True)
    assert not replaced
    for waited in range(10, 21):  # the last record was nine seconds ago
        clock.now += 1
        text.poll(is_waiting=True)
        assert replaced == [*range(11, waited + 1)]
    clock.now += 1
    with pytest.raises(PreparingFailed, match="nothing was recorded for 21 s"):
        text.poll(is_waiting=True)
    text.poll(is_waiting=False)  # of a step that is trained
    assert text.waited == 0.0


def test_a_mixture_waits_for_the_source_of_which_a_step_needs_one_sample_more(
    corpora, configured, tmp_path
):
    """Counted sample by sample, of three sources; a step that has all of its samples waits for none."""
    names = {"jsonl": 0.45, "json.gz": 0.45, "parquet": 0.1}
    weighted = [{"source": str(corpora[k]), "weight": weight} for k, weight in names.items()]
    cfg = configured("x", tmp_path / "p", data={"sources": weighted, "source": None})
    prepare(cfg)
    text = open_dataset(cfg).growing
    taken = [0, 0, 0]
    for step in range(1, 13):
        for number in range(8 * step - 8, 8 * step):
            source, index = text.mixture(number)
            assert index == taken[source]
            taken[source] += 1
        for source, samples in zip(text.sources, taken):
            source.order.segment_ends = [samples // 2, samples]
        assert text.covers(step)
        for source, samples in zip(text.sources, taken):
            if samples:
                source.order.segment_ends = [samples // 2, samples - 1]
                assert not text.covers(step)
                assert text.waits_for(step) == source.waits_for()
                source.order.segment_ends = [samples // 2, samples]
    assert min(taken) > 0
    # of ranks one sees more: of sources that give no sample yet, and whose first segment holds no window
    agreed = []
    for seen in range(1, 4):
        for source in text.sources:
            source.manifest["segments"] = ["a", "b", "c"][:seen]
            source.order.segment_ends = [0, 10, 20][:seen]
        assert text.covers(0)
        agreed.append(text.segments(0))
    assert agreed == [[["a"], ["a"], ["a"]]] * 3


def test_trouble_of_the_process_that_prepares(corpora, configured, tmp_path, monkeypatch, capfd):
    """Killed, it is started again; failing, it is no fault of the text, whatever it prints; a full disk neither."""
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    real = background.CHILD
    once = tmp_path / "once"
    killed = f"import os, pathlib; p = pathlib.Path({str(once)!r}); "
    killed += "p.exists() or (p.touch(), os.kill(os.getpid(), 9)); "
    monkeypatch.setattr(background, "CHILD", killed + real)
    assert len(digests(cfg, 3)) == 3
    assert (
        "was killed by signal 9 (is the host out of memory?); starting another"
        in capfd.readouterr().err
    )
    for code, told in (
        ("print('read'); raise SystemExit(7)", "process that prepares text ended with code 7"),
        ("import no_such_package", "ended with code 1"),
        (
            "import data.prepare\ndef full(*_): raise OSError(28, 'No space left on device')\n"
            "data.prepare.prepare_text = full\nprint('read')\n" + real,
            "No space left on device",
        ),
    ):
        fresh = configured(corpora["jsonl"], tmp_path / "q")
        prepare(fresh)
        monkeypatch.setattr(background, "CHILD", code)
        with pytest.raises(PreparingFailed, match=told):
            digests(fresh, 3)
        shutil.rmtree(tmp_path / "q")


def test_a_process_that_is_killed_again_and_again_is_started_ever_more_slowly(
    corpora, configured, tmp_path, monkeypatch, capfd
):
    """After one second, two, four, up to a minute; polled ten times a second."""
    monkeypatch.setattr(background, "LONGEST_PAUSE", 60.0)
    started: list[float] = []
    clock = SimpleNamespace(tenths=0)
    killed = SimpleNamespace(poll=lambda: -9, stdin=SimpleNamespace(write=len, flush=list))

    def start(*unused: object, **options: object) -> SimpleNamespace:
        started.append(clock.tenths / 10)
        return killed

    monkeypatch.setattr("data.background.subprocess", SimpleNamespace(Popen=start, PIPE=None))
    monotonic = SimpleNamespace(monotonic=lambda: clock.tenths / 10)
    monkeypatch.setattr("data.background.time", monotonic)
    preparer = background.Preparer(configured(corpora["jsonl"], tmp_path / "p"))
    for clock.tenths in range(2000):
        preparer.poll(is_needed=True)
    assert started == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert capfd.readouterr().err.count("was killed by signal 9 (is the host out") == 8


def test_a_failure_over_what_no_step_waits_for_is_told_once(
    corpora, configured, tmp_path, monkeypatch, capfd
):
    """All text is there, and only its hashes are missing: the run goes on."""
    monkeypatch.setattr(background, "CHILD", "raise SystemExit(7)")
    monkeypatch.setattr(background, "FIRST_PAUSE", 0.0)
    preparer = background.Preparer(configured(corpora["jsonl"], tmp_path / "p"))
    preparer.poll(is_needed=False)
    assert preparer.child.wait(30) == 7
    for _ in range(3):
        preparer.poll(is_needed=False)
    preparer.close()
    assert capfd.readouterr().err == "the process that prepares text ended with code 7\n"


def test_token_files_that_are_cut_in_use_fail_on_all_ranks_together(
    corpora, configured, whole, tmp_path
):
    """Not in the rank that reads them alone: all save first."""
    folder = shutil.copytree(whole[0], tmp_path / "p")
    cfg = configured(corpora["jsonl"], folder)
    dataset = open_dataset(cfg)
    os.truncate(folder / "train.bin", 100)
    loader = Loader(cfg, dataset, data_rank(), 1)
    with pytest.raises(ConfigError, match="it was cut while it was in use"):
        loader.pending[1].result()
    with pytest.raises(ConfigError, match="it was cut while it was in use"):
        loader.is_ready(0)
    loader.close()


def test_only_an_evaluation_waits_for_validation_text(corpora, configured, whole):
    cfg = configured(corpora["jsonl"], whole[0], eval={"every_steps": 2})
    loader = Loader(cfg, open_dataset(cfg), data_rank(), 1)
    loader.dataset.has_validation = lambda: False
    for step, expected in ((0, True), (1, True), (2, False)):
        assert loader.is_ready(step) == expected
        next(loader)
    loader.close()


def test_a_record_is_trusted_once_its_bytes_are_there(corpora, configured, whole, tmp_path):
    """A network's file system may show the manifest before the files' new ends."""
    folder, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    source = GrowingSource(tmp_path / "p", cfg, 0, Mixture([1.0]))
    files_of = content(folder)
    whole_record = read_manifest(folder)
    for late in [name for name in files_of if name.endswith(".bin")]:
        for name, whole_file in files_of.items():
            (tmp_path / "p" / name).write_bytes(whole_file[:-1] if name == late else whole_file)
        source.refresh()
        assert not source.is_recorded and not source.order.segment_ends, late
        if late.startswith("train"):
            ended = {key: value for key, value in whole_record.items() if key != "sha256"}
            write_manifest(tmp_path / "p", {**ended, "ended": True})
            begun = GrowingSource(tmp_path / "p", cfg, 0, Mixture([1.0]))
            assert not begun.is_recorded and not begun.order.segment_ends, late
            write_manifest(tmp_path / "p", whole_record)
        (tmp_path / "p" / late).unlink()
        source.refresh()
        assert not source.is_recorded, late
        (tmp_path / "p" / late).write_bytes(files_of[late])
    source.refresh()
    assert source.is_recorded and digests(cfg, 9) == expected[:9]


def test_a_file_server_s_clock_does_not_matter(corpora, configured, whole, tmp_path):
    """Each record's time is decades from this machine's, and goes back and forth."""
    _, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "new")
    prepare(cfg)
    source = GrowingSource(tmp_path / "new", cfg, 0, Mixture([1.0]))
    record = TokenWriter.record
    path = tmp_path / "new/manifest.json"
    records: list[bytes] = []
    seen = []

    def recorded(writer):
        record(writer)
        year = random.Random(len(seen)).choice([1, 60])
        os.utime(path, (year * 31_557_600,) * 2)
        source.refresh()
        seen.append(source.manifest["tokens"] == writer.manifest["tokens"])
        # as a network's file system may, it shows the record before this one again
        records.append(path.read_bytes())
        path.write_bytes(records[max(0, len(records) - 2)])
        source.refresh()
        seen.append(source.manifest["tokens"] == writer.manifest["tokens"])
        path.write_bytes(records[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.encode.CHUNK", 20_000)
        patch.setattr(TokenWriter, "record", recorded)
        prepare(cfg, whole=True)
    assert len(seen) > 5 and all(seen)
    assert digests(cfg, 9) == expected[:9]


def test_configurations_of_billions_of_tokens_train_while_they_are_prepared():
    """Otherwise the GPUs of a first command would wait for hours."""
    for path in sorted((REPO / "configs").glob("*.toml")):
        d = read_toml(str(path))["data"]
        assert d.get("order") == "growing" or d.get("max_tokens", 0) < 1e9, path


@pytest.mark.parametrize("batch, told", [(4, None), (100_000, "takes 1e\\+05 of them")])
def test_too_little_text_is_refused_before_a_run(batch, told, tmp_path, configured, monkeypatch):
    """Little text is prepared before the ranks start; of much text it is known at its end."""
    write_rows(tmp_path / "few.jsonl", TEXTS[:300])
    train = {"global_batch_size": batch, "micro_batch_size": None}
    cfg = configured(tmp_path / "few.jsonl", tmp_path / "p", train=train)
    monkeypatch.setattr("data.prepare.SMALL", 1 << 22)
    prepare(cfg)
    assert is_complete(read_manifest(tmp_path / "p"))
    with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
        open_dataset(cfg)


def test_documents_of_one_token_are_refused_under_a_mask(tmp_path, configured, monkeypatch):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    made = tokenizers.Tokenizer(models.WordLevel({"cat": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    write_rows(tmp_path / "a.jsonl", ["cat"] * 3000)
    data = {"tokenizer": str(tmp_path / "tokenizer.json"), "document_mask": True}
    cfg = configured(tmp_path / "a.jsonl", tmp_path / "p", data=data)
    prepare(cfg, whole=True)
    with pytest.raises(ConfigError, match="has documents of one token each"):
        open_dataset(cfg)


def test_a_folder_in_any_state_is_read_or_named(corpora, configured, tmp_path, capsys):
    """By data.show, by an evaluation, by global order, by data.prepare itself."""
    cfg = configured(corpora["jsonl"], tmp_path / "p", eval={})
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml(cfg))
    assert run_tool(data.show.main, str(path)) == 2
    assert "holds no prepared data" in capsys.readouterr().err
    prepare(cfg)
    for tool in (lambda: run_tool(data.show.main, str(path), "--step", "9"),):
        assert tool() == 2
        error = capsys.readouterr().err
        assert "its text is not prepared yet (" in error and error.count("\n") == 1
    with pytest.raises(ConfigError, match="its validation text is not prepared yet, at 0 tokens"):
        open_dataset(cfg, train=False)
    assert run_tool(main, str(path)) == 0
    assert run_tool(data.show.main, str(path), "--step", "9") == 0
    shown = capsys.readouterr().out
    assert shown.count("=== step 9, sample ") == 8
    other = configured(corpora["jsonl"], tmp_path / "p", data={"order": "global"})
    with pytest.raises(ConfigError, match="was prepared with format = 4, the configuration says 3"):
        open_data(other, "train")
    half = configured(corpora["jsonl"], tmp_path / "half", data={"order": "global"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.prepare_text", lambda *unused: None)
        prepare(half)
    with pytest.raises(ConfigError, match="half: is prepared up to 0 tokens; `python -m data.prep"):
        open_dataset(half)


def test_a_resume_on_other_text_is_refused(corpora, configured, whole, tmp_path):
    """Also where the part that was trained on is prepared only later."""
    folder, _ = whole
    cfg = configured(corpora["jsonl"], folder)
    dataset = open_dataset(cfg)
    used = dataset.fingerprint(step=40)
    assert 2 < len(used[0]["segments"]) < len(read_manifest(folder)["segments"])
    dataset.require_same_text(used)
    changed = json.loads(json.dumps(used))
    changed[0]["segments"][1] = "another"
    with pytest.raises(ConfigError, match="segment 1 has other text than when it was trained on"):
        dataset.require_same_text(changed)
    new = configured(corpora["jsonl"], tmp_path / "new")
    prepare(new)
    loader = Loader(new, open_dataset(new), data_rank(), 41)
    loader.dataset.require_same_text(changed)
    with pytest.raises(ConfigError, match="segment 1 has other text than when it was trained on"):
        next_digest(loader, 41)
    loader.close()


# Writers that outlive their folder or their text


def stopped_in_the_middle(cfg: config.Config, folder: pathlib.Path) -> Preparation:
    """A preparation that has written and recorded the first chunks, and has read the next ones: as if it had been
    stopped there."""
    preparation = Preparation(folder, cfg)
    reader = preparation.chunks()
    for _ in range(3):
        chunk = next(reader)
        preparation.write(chunk, chunk.encode(chunk.documents))
    preparation.writer.record()
    preparation.left = [next(reader) for _ in range(3)]
    return preparation


def continued(preparation: Preparation) -> None:
    for chunk in preparation.left:
        preparation.write(chunk, chunk.encode(chunk.documents))
    preparation.writer.record()


def train_on(texts: Iterator[str], size: int, most: int) -> bytes:
    return train_tokenizer(itertools.islice(texts, most), size)


def test_other_validation_text_than_a_run_began_with_is_refused(configured, corpora, tmp_path):
    own = tmp_path / "own.jsonl"
    write_rows(own, [words(i, 20) for i in range(40)])
    data = {"validation": str(own)}
    cfg = configured(corpora["jsonl"], tmp_path / "p", data=data, eval={"every_steps": 2})
    prepare(cfg, whole=True)
    dataset = open_dataset(cfg)
    before = dataset.fingerprint(step=4)
    hashed = hashlib.sha256((tmp_path / "p/heldout.bin").read_bytes()).hexdigest()
    assert before[0]["validation_hash"] == hashed
    loaders = [Loader(cfg, dataset, data_rank(), 1)]
    write_rows(own, [words(100 + i, 20) for i in range(40)])
    shutil.rmtree(tmp_path / "p")
    prepare(cfg, whole=True)
    changed = open_dataset(cfg)
    with pytest.raises(ConfigError, match="its validation text has changed since the run began"):
        changed.require_same_text(before)
    loaders.append(Loader(cfg, changed, data_rank(), 1))
    first, second = ([loader.text_hash(step) for step in (1, 2)] for loader in loaders)
    assert first[0] == second[0] and first[1] != second[1]  # an evaluation is due after step 2
    for loader in loaders:
        loader.close()


def test_a_process_that_stands_still_is_replaced(corpora, configured, whole, tmp_path, monkeypatch):
    """Stopped, it is killed after half the time, and another one goes on."""
    _, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "p", run={"start_timeout_seconds": 8.0})
    prepare(cfg)
    once = tmp_path / "once"
    stopped = f"import os, pathlib; p = pathlib.Path({str(once)!r}); "
    stopped += "p.exists() or (p.touch(), os.kill(os.getpid(), 19)); "
    monkeypatch.setattr(background, "CHILD", stopped + background.CHILD)
    assert digests(cfg, 9) == expected[:9]


def test_passing_trouble_of_a_disk_is_not_the_text_s_fault(
    corpora, configured, tmp_path, monkeypatch
):
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    source = GrowingSource(tmp_path / "p", cfg, 0, Mixture([1.0]))
    stat = pathlib.Path.stat

    def stale(path, **options):
        if path.name == "manifest.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "stat", stale)
        source.refresh()
    read = pathlib.Path.read_bytes
    open_ = pathlib.Path.open

    def replaced(path):  # on another machine, since it was opened
        if path.name == "manifest.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    def too_many(path, *mode, **options):
        if path.name == "train.bin":
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return open_(path, *mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", replaced)
        source.refresh()
        with pytest.raises(OSError, match="Stale file handle") as failed:
            prepare_text([(tmp_path / "p", cfg)], 0)
        assert failed.value.filename == str(tmp_path / "p/manifest.json")
    prepare(cfg, whole=True)
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", too_many)
        with pytest.raises(OSError, match="Too many open files"):
            source.refresh()
    with pytest.raises(OSError, match="Input/output error"), local_files.readable("x.parquet:"):
        raise OSError(errno.EIO, "Input/output error")
    with (
        pytest.raises(ConfigError, match="cannot be read: PermissionError"),
        local_files.readable("x.parquet:"),
    ):
        raise PermissionError(13, "Permission denied")


# Whole runs


@pytest.fixture
def run_config(write_config, tmp_path, prepared):
    """Of a run on six files of text in tmp_path/texts, into tmp_path/p."""
    pattern = written(tmp_path / "texts", "jsonl")

    def write(name: str = "r", **sections) -> pathlib.Path:
        data = {
            "source": str(pattern),
            "path": str(tmp_path / "p"),
            "tokenizer": str(prepared / "tokenizer.model"),
            "order": "growing",
            **sections.pop("data", {}),
        }
        defaults = {
            "train": {"steps": 200, "seq_len": 32, "global_batch_size": 8},
            "checkpoint": {"save_every_steps": 1000},
            "log": {"every_steps": 1, "tensorboard": False},
            "eval": None,
        }
        return write_config(name, data=data, **{**defaults, **sections})

    return write


def environment(ranks: int, seconds_a_record: float = 0.0) -> dict[str, str]:
    path = os.pathsep.join([str(REPO / "tests/small_borders"), str(REPO)])
    return os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": path,
        "NPROC": str(ranks),
        "OMP_NUM_THREADS": "1",
        "SECONDS_A_RECORD": str(seconds_a_record),
    }


def start(
    path: pathlib.Path,
    log: pathlib.Path,
    ranks: int,
    *options: str,
    seconds_a_record: float = 0.0,
) -> subprocess.Popen:
    return subprocess.Popen(
        [REPO / "run_train.sh", path, *options],
        env=environment(ranks, seconds_a_record),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )


def expected_of(path: pathlib.Path, steps: int, folder: pathlib.Path) -> list[int]:
    """The digests of a run on text that was prepared before."""
    cfg = config.load(str(path), [f"--data.path={folder}"])
    prepare(cfg, whole=True)
    return digests(cfg, steps)


def preparers_of(path: pathlib.Path) -> list[int]:
    """The processes that prepare beside the ranks of a configuration."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        if b"data.background import main" in content_of(process / "cmdline"):
            parent = re.search(rb"PPid:\s*(\d+)", content_of(process / "status"))
            if parent and str(path).encode() in content_of(
                pathlib.Path("/proc", parent[1].decode(), "cmdline")
            ):
                found.append(int(process.name))
    return found


def content_of(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_run_ends_with_a_wrong_row_and_resumes_once_it_is_mended(run_config, tmp_path):
    """On two ranks, found while it trains; resumed on one."""
    path = run_config()
    names = order_model.reading_order([f"part{number}.jsonl" for number in range(6)])
    number = int(names[4][4])
    texts = TEXTS[CUTS[number] : CUTS[number + 1]]
    wrong = len(texts) // 2
    spoil(tmp_path / "texts" / names[4], texts, [wrong])
    failed = start(path, tmp_path / "first", 2, seconds_a_record=0.2)
    assert failed.wait(120) == 2, (tmp_path / "first").read_text()
    last = (tmp_path / "first").read_text().splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'texts' / names[4]}: line {wrong + 1}: is not valid JSON")
    folder = tmp_path / "outputs/r"
    trained = len(rows(folder))
    assert 5 < trained < 200 and (folder / f"checkpoints/step-{trained:08d}").exists()
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    write_rows(tmp_path / "texts" / names[4], texts)
    again = start(path, tmp_path / "second", 1)
    assert again.wait(180) == 0, (tmp_path / "second").read_text()
    expected = expected_of(path, 200, tmp_path / "expected")
    assert [row["batch_digest"] for row in rows(folder)] == expected
    assert not preparers_of(path)


def test_a_stop_ends_a_wait_for_text_that_stands_still(run_config, tmp_path):
    """On two ranks: the process that prepares is stopped, TERM to one rank ends all. Resumed on one rank, in the middle
    of a segment, it trains on the same samples."""
    path = run_config()
    log, folder = tmp_path / "first", tmp_path / "outputs/r"
    run = start(path, log, 2, "--train.steps=1500", seconds_a_record=0.3)
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < 6:
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    stopped = preparers_of(path)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, stopped[0]) == min(19, usual + 19)  # behind the ranks
    os.kill(stopped[0], signal.SIGSTOP)
    while "waiting for text: " not in (tmp_path / "first").read_text():
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    ranks = [
        int(process.name)
        for process in pathlib.Path("/proc").glob("[0-9]*")
        if b"\0RANK=1\0" in content_of(process / "environ")
        and str(path).encode() in content_of(process / "cmdline")
    ]
    began = time.monotonic()
    os.kill(ranks[0], signal.SIGTERM)
    assert run.wait(30) == 75, (tmp_path / "first").read_text()
    assert time.monotonic() - began < 10 and not preparers_of(path)
    trained = len(rows(folder))
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "preempted" and status["step"] == trained > 5
    again = start(path, tmp_path / "second", 1, f"--train.steps={trained + 40}")
    assert again.wait(180) == 0, (tmp_path / "second").read_text()
    expected = expected_of(path, trained + 40, tmp_path / "expected")
    assert [row["batch_digest"] for row in rows(folder)] == expected


def test_nodes_whose_disks_hold_other_text_are_told_apart(run_config, tmp_path, prepared):
    """Two ranks with a folder each: of the same identity, but of files that differ from the second segment on."""
    path = run_config(run={"output_dir": str(tmp_path / "outputs")})
    cfg = config.load(str(path), [])
    prepare(cfg, whole=True)
    shutil.copytree(tmp_path / "p", tmp_path / "copy")
    manifest = read_manifest(tmp_path / "copy")
    manifest["segments"][1] = "of other text"
    (tmp_path / "copy/manifest.json").write_text(json.dumps(manifest))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(REPO / "tests/faulty.py", path),
        ],
        env=environment(2) | {"FAULT": "another copy:1", "COPY": str(tmp_path / "copy")},
        capture_output=True,
        text=True,
    )
    assert "has other text in segment 1 of " in done.stdout + done.stderr, done.stdout + done.stderr
    assert 5 < len(rows(tmp_path / "outputs/r")) < 100  # it was saved when the segment opened
    assert list((tmp_path / "outputs/r/checkpoints").glob("step-*"))


@pytest.mark.nightly
def test_an_evaluation_of_text_that_grows_is_that_of_the_whole_text(run_config, tmp_path):
    """Its text is complete at the validation border. --eval-only evaluates the same."""
    path = run_config(eval={"every_steps": 3}, train={"steps": 6, "seq_len": 32})
    run = start(path, tmp_path / "log", 2)
    assert run.wait(120) == 0, (tmp_path / "log").read_text()
    found = rows(tmp_path / "outputs/r", "eval")
    assert [row["step"] for row in found] == [3, 6]
    done = launch(path, "--eval-only", **{k: environment(1)[k] for k in ("PYTHON", "PYTHONPATH")})
    assert json.loads(done.stdout.splitlines()[-1])["loss"] == pytest.approx(
        found[-1]["loss"], abs=1e-6
    )


def test_a_machine_with_a_disk_of_its_own_begins_a_folder_of_its_own(run_config, tmp_path):
    """Where the launcher has not: here torchrun alone, on nothing that is prepared."""
    path = run_config(train={"steps": 12, "seq_len": 32}, checkpoint=None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, REPO / "train.py", path], env=environment(2), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [row["batch_digest"] for row in rows(tmp_path / "outputs/r")]
    assert found == expected_of(path, 12, tmp_path / "expected")
