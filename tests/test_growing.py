"""data.order = "growing": whatever happens while the text is being prepared, the samples are those of the
documentation's model (tests/order_model.py), and whatever ends a run says why in a line."""

import contextlib
import errno
import gzip
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

import config
import data.show
import files
from config import ConfigError
from data import background, growing, local_files, record, sources
from data import prepare as prepare_module
from data.background import PreparingFailed
from data.dataset import open_data, open_dataset
from data.encode import Chunk
from data.folder import begin_all
from data.growing import GrowingSource
from data.identity import open_source
from data.loader import Loader
from data.mixture import Mixture
from data.prepare import Preparation, main, prepare, prepare_text
from data.record import is_complete, read_manifest, stamp_of, write_manifest
from data.sources import Source
from data.tokenizer import Tokenizer
from data.tokenizer_training import train_tokenizer
from data.tokens import Windows
from data.writer import Overtaken, TokenFile, TokenWriter, segment_hashes
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


# The same samples, whatever happens meanwhile


@pytest.mark.parametrize("locks", [True, False])
def test_two_processes_that_prepare_at_once_write_the_same(
    corpora, configured, whole, tmp_path, locks
):
    """With and without locks, as on some file systems; one begins when the other is under way."""
    folder, _ = whole
    cfg = configured(corpora["jsonl"], tmp_path / "new")
    (tmp_path / "c.toml").write_text(config.to_toml(cfg))
    patch = (
        ""
        if locks
        else "import files, types; files.lock = lambda *a, **k: types.SimpleNamespace(release=int); "
    )
    code = (
        BESIDE
        + patch
        + (
            "import sys, data.encode, data.prepare; data.encode.CHUNK = 20_000; data.prepare.SYNC_SECONDS = 0.0; "
            "sys.exit(data.prepare.main(sys.argv[1:]))"
        )
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c.toml")]
    first = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)
    time.sleep(random.Random(locks).uniform(0.8, 1.5))
    second = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)
    printed = [process.communicate()[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], printed
    assert content(tmp_path / "new") == content(folder)
    assert sum(text.count("has prepared more of it") for text in printed) <= 1  # then one waits


def test_killed_at_random_moments_it_goes_on(corpora, configured, whole, tmp_path):
    """Under a run that waits: the process that prepares is killed, and another is started."""
    folder, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "new")
    prepare(cfg)
    draw, found = random.Random(0), []
    with pytest.MonkeyPatch.context() as patch:
        slow = "from tests.small_borders import slow_down; slow_down(0.1); "
        patch.setattr(background, "CHILD", slow + background.CHILD)
        loader = Loader(cfg, open_dataset(cfg), data_rank(), 1)
        kills, next_kill = 0, 0.0
        while len(found) < len(expected):
            if loader.is_ready(len(found)):
                found.append(next(loader).digest)
            child = loader.dataset.growing.preparer.child
            if child and child.poll() is None and kills < 6 and time.monotonic() > next_kill:
                if next_kill:
                    child.kill()
                    kills += 1
                next_kill = time.monotonic() + draw.uniform(0.3, 1.2)
            time.sleep(0.005)
        loader.close()
    assert found == expected and kills > 1
    prepare(cfg, whole=True)  # a run may end before the last hashes are there
    assert content(tmp_path / "new") == content(folder)


def test_max_tokens_end_the_text(corpora, configured, whole, tmp_path):
    """At the document that reaches them; until then it is the same text."""
    folder, expected = whole
    cfg = configured(corpora["jsonl"], tmp_path / "new", data={"max_tokens": 20_000})
    prepare(cfg)
    found = digests(cfg, 90)
    tokens = read_manifest(tmp_path / "new")["tokens"]["train"]
    assert 20_000 <= tokens < 20_200
    assert (tmp_path / "new/train.bin").read_bytes() == (folder / "train.bin").read_bytes()[
        : 2 * tokens
    ]
    assert found[:60] == expected[:60] and found != expected[:90]


@pytest.mark.quick
def test_a_source_of_a_fork_s_own_grows_too(configured, tmp_path, monkeypatch):
    """The example of docs/fork.md, stopped and resumed; its samples are read while it is prepared."""
    page = (REPO / "docs/fork.md").read_text()
    (code,) = re.findall(r"^```python fork-source\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "articles.py").write_text(
        "import sqlite3\nfrom collections.abc import Iterator\nimport config\n"
        f"from data.sources import Source\n\n\n{code}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    articles = importlib.import_module("articles")
    with sqlite3.connect("articles.db") as database:
        # in another order than their numbers', which have gaps
        database.execute("CREATE TABLE articles (id INTEGER, body TEXT)")
        numbered = [(3 * i + 5, words(i, 20)) for i in range(3000)]
        shuffled = random.Random(0).sample(numbered, len(numbered))
        database.executemany("INSERT INTO articles VALUES (?, ?)", shuffled)
    monkeypatch.setattr("data.identity.kind_of", lambda d: articles.Articles)
    cfg = configured("articles", tmp_path / "p")
    source = open_source(cfg.data)
    assert source.fraction_read() == 0.0
    assert list(itertools.islice(source, 600)) == [body for _, body in numbered[:600]]
    assert source.fraction_read() == numbered[599][0] / numbered[-1][0]
    folder = prepare(cfg)[0]
    monkeypatch.setattr("data.prepare.SYNC_SECONDS", 0.0)
    monkeypatch.setattr("data.encode.CHUNK", 20_000)
    record, states = TokenWriter.record, []

    def stopped(writer):
        record(writer)
        states.append(read_manifest(folder)["place"])
        if len(states) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "record", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(cfg, whole=True)
    assert states == sorted(states) and 0 < states[-1] < numbered[-1][0]
    with monkeypatch.context() as patch:  # the source exists in this process alone
        patch.setattr(background, "CHILD", "import time; time.sleep(1000)")
        early = digests(cfg, 9)  # of what is recorded
    prepare(cfg, whole=True)
    assert digests(cfg, 9) == early
    manifest = read_manifest(folder)
    assert sum(manifest["documents"].values()) == 3000 and manifest["identity"]["code"]


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


def test_a_source_s_state_is_that_of_what_was_written(configured, tmp_path, monkeypatch):
    """Killed, each document is there once; a state that would not resume is refused before anything is recorded."""
    monkeypatch.setattr("data.identity.kind_of", lambda d: Numbered)
    monkeypatch.setattr("data.prepare.SYNC_SECONDS", 0.0)
    monkeypatch.setattr("data.encode.CHUNK", 10_000)
    record = TokenWriter.record

    def stopped(writer):
        record(writer)
        raise KeyboardInterrupt

    cfg = configured("numbered", tmp_path / "p")
    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "record", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(cfg, whole=True)
    monkeypatch.setattr("data.prepare.worker_count", lambda: 0)
    prepare(cfg, whole=True)
    assert sum(read_manifest(tmp_path / "p")["documents"].values()) == len(TEXTS)
    for number, (state, told) in enumerate(((None, "None after a document"), ({1}, "set is not"))):
        monkeypatch.setattr(Numbered, "resume_state", lambda source, state=state: state)
        with pytest.raises(ConfigError, match=rf"^Numbered.resume_state\(\): .*{told}"):
            prepare(configured("numbered", tmp_path / f"q{number}"), whole=True)
        assert not any(read_manifest(tmp_path / f"q{number}")["documents"].values())


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


@pytest.mark.parametrize("kind", ["jsonl", "json.gz", "parquet"])
def test_wrong_rows_end_it_with_their_lines_and_mended_it_goes_on(
    kind, configured, tmp_path, corpora
):
    """While a run reads: those of the fifth file that is read, all of them."""
    pattern = written(tmp_path / "texts", kind)
    names = order_model.reading_order([f"part{number}.{kind}" for number in range(6)])
    bad = tmp_path / "texts" / names[4]
    number = int(names[4][4])
    texts = TEXTS[CUTS[number] : CUTS[number + 1]]
    wrong = [len(texts) // 2, len(texts) - 1] if len(texts) > 1 else [0]
    spoil(bad, texts, wrong)
    cfg = configured(pattern, tmp_path / "p")
    good = configured(corpora[kind], tmp_path / "good")
    prepare(good, whole=True)
    steps = GrowingSource(tmp_path / "good", good, 0, Mixture([1.0])).order.windows // 8
    expected = digests(good, steps)
    prepare(cfg)
    loader, found = Loader(cfg, open_dataset(cfg), data_rank(), 1), []
    with pytest.raises(ConfigError) as refused:
        while True:
            found.append(next_digest(loader, len(found) + 1))
    loader.close()
    unit = "row" if kind == "parquet" else "line"
    problems = [f"{bad}: {unit} {i + 1}: " for i in wrong]
    assert len(refused.value.problems) == len(problems)
    for problem, begin in zip(refused.value.problems, problems):
        assert problem.startswith(begin), refused.value.problems
    assert 5 < len(found) < steps and found == expected[: len(found)]
    write_rows(bad, texts)
    assert digests(cfg, steps, len(found) + 1) == expected[len(found) :]
    ours, theirs = content(tmp_path / "p"), content(tmp_path / "good")
    assert [ours[name] for name in sorted(ours) if name.endswith(".bin")] == [
        theirs[name] for name in sorted(theirs) if name.endswith(".bin")
    ]


def test_all_wrong_rows_of_a_file_are_listed_with_a_limit(tmp_path, configured, monkeypatch):
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "good"}', "{", "", '{"body": 1}', '{"text": 5}', '{"text": "\\ud800"}']
    path.write_text("\n".join(lines * 3))
    cfg = configured(path, tmp_path / "p", data={"order": "global"})
    with pytest.raises(ConfigError) as refused:
        prepare(cfg)
    numbers = [int(p.split(": line ")[1].split(":")[0]) for p in refused.value.problems]
    assert numbers == [2, 4, 5, 6, 8, 10, 11, 12, 14, 16, 17, 18]
    monkeypatch.setattr(sources, "MOST_PROBLEMS", 5)
    with pytest.raises(ConfigError) as refused:
        prepare(cfg)
    assert len(refused.value.problems) == 6
    assert refused.value.problems[-1] == f"{path}: line 8: the file was not read beyond this row"
    path.write_text('{"body": 1}\n' * 1000)
    with pytest.raises(ConfigError) as refused:  # a misspelt column
        prepare(configured(path, tmp_path / "q", data={"order": "global"}))
    assert len(refused.value.problems) == sources.FIRST_PROBLEMS + 1
    assert not (tmp_path / "q").exists()
    with pytest.raises(ConfigError):
        prepare(configured(path, tmp_path / "r"), whole=True)
    assert (tmp_path / "r").exists()  # a run may be waiting for it


@pytest.mark.parametrize("kind", ["jsonl", "json.gz", "parquet"])
def test_a_row_that_is_too_long_is_refused_by_its_line(kind, tmp_path, configured, monkeypatch):
    """Without holding it in memory; the rows behind it are looked at."""
    monkeypatch.setattr("data.rows.LARGEST_ROW", 10_000)
    monkeypatch.setattr("data.sources.LARGEST_ROW", 10_000)
    path = tmp_path / f"a.{kind}"
    # of JSON the line counts, with its end
    longest = 10_000 if kind == "parquet" else 10_000 - len('{"text": ""}\n')
    texts = ["short", "x" * longest, "y" * (longest + 1), "also short", "z" * 50_000]
    write_rows(path, texts)
    with pytest.raises(ConfigError) as refused:
        list(open_source(configured(path, tmp_path / "p").data))
    unit = "row" if kind == "parquet" else "line"
    assert [p.split(": is longer")[0] for p in refused.value.problems] == [
        f"{path}: {unit} 3",
        f"{path}: {unit} 5",
    ]


@pytest.mark.parametrize("moment", ["under way", "complete"])
def test_text_that_was_read_and_has_changed_is_refused_by_file(
    moment, configured, tmp_path, monkeypatch
):
    """A file that only has another time is compared, and read on."""
    pattern = written(tmp_path / "texts", "jsonl")
    cfg = configured(pattern, tmp_path / "p")
    prepare(cfg)
    if moment == "complete":
        prepare(cfg, whole=True)
    else:
        record = TokenWriter.record
        monkeypatch.setattr("data.encode.CHUNK", 20_000)
        monkeypatch.setattr("data.prepare.SYNC_SECONDS", 0.0)
        calls = []

        def stopped(writer):
            record(writer)
            calls.append(writer.manifest["place"])
            if len(calls) > 3 and calls[-1][0] >= 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TokenWriter, "record", stopped)
            with pytest.raises(KeyboardInterrupt):
                prepare(cfg, whole=True)
    for path, *_ in read_manifest(tmp_path / "p")["files"][:2]:  # all of these was read
        first = pathlib.Path(path)
        text = first.read_text()
        lines = text.splitlines(keepends=True)
        wrong = [lines[1:] + lines[:1]] if len(lines) > 1 else []  # the same rows in another order
        for number in {len(lines) // 2, len(lines) - 1}:
            changed = lines[number].replace('"text": "', '"text": "not ')
            wrong.append(lines[:number] + [changed] + lines[number + 1 :])
        before = text_of(tmp_path / "p")
        for these in wrong:
            first.write_text("".join(these))
            with pytest.raises(ConfigError, match=rf"{first.name}: its text was changed after"):
                prepare(cfg, whole=True)
            assert text_of(tmp_path / "p") == before
        first.write_text(text + "\n")  # a blank line: other bytes, the same documents
    prepare(cfg, whole=True)
    assert is_complete(read_manifest(tmp_path / "p"))
    new = [tmp_path / f"texts/new{i}.jsonl" for i in range(5)]
    for path in new:
        path.write_text(text)
    listed = f"{new[0]}, {new[1]}, {new[2]} and 2 more came after {tmp_path / 'p'} was begun"
    with pytest.raises(ConfigError, match=re.escape(listed)):
        prepare(cfg, whole=True)


def test_comparing_files_that_were_touched_goes_on_where_it_was_killed(
    configured, tmp_path, monkeypatch
):
    """It records all the time, so that whoever waits for the text sees that it goes on."""
    cfg = configured(written(tmp_path / "texts", "jsonl"), tmp_path / "p")
    folder = tmp_path / "p"
    monkeypatch.setattr("data.encode.CHUNK", 20_000)
    monkeypatch.setattr("data.prepare.SYNC_SECONDS", 0.0)
    monkeypatch.setattr("data.prepare.worker_count", lambda: 0)
    record = TokenWriter.record
    stamps = set()

    def prepare_until(is_reached: Callable[[dict], bool]) -> None:
        def stopping(writer):
            record(writer)
            stamps.add(stamp_of(folder))
            if is_reached(writer.manifest):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TokenWriter, "record", stopping)
            with pytest.raises(KeyboardInterrupt):
                prepare(cfg, whole=True)

    prepare_until(lambda manifest: manifest["place"][0] >= 3)
    manifest = read_manifest(folder)
    tokens = manifest["tokens"]
    assert manifest["place"][0] == 3 and tokens["train"]
    paths = [pathlib.Path(path) for path, *_ in manifest["files"]]
    touched = paths[:4]
    for path in touched:
        path.write_text(path.read_text() + "\n")  # the same documents
    stamps.clear()
    sizes = [path.stat().st_size for path in touched]
    prepare_until(lambda manifest: manifest["files"][2][1] == sizes[2])
    documents = sum(path.read_text().count('"text"') for path in touched[:3])
    assert len(stamps) > documents
    assert read_manifest(folder)["tokens"] == tokens
    read_again = []
    read_json = sources.read_json

    def reading(path, *place):
        read_again.append(path)
        return read_json(path, *place)

    monkeypatch.setattr(sources, "read_json", reading)
    prepare(cfg, whole=True)
    assert read_again == [paths[3], *paths[3:]]  # compared, then read on
    assert is_complete(read_manifest(folder))


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


def test_a_folder_that_is_deleted_or_begun_anew_is_noticed(
    corpora, configured, tmp_path, monkeypatch
):
    """By the process that writes it, and by the run that reads it, which can still save what it was trained on."""
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    writer = TokenWriter(tmp_path / "p", growing=True)
    writer.append("train", bytes(20))
    source = GrowingSource(tmp_path / "p", cfg, 0, Mixture([1.0]))
    preparation = Preparation(tmp_path / "p", cfg)
    dataset = open_dataset(cfg)
    fingerprint = dataset.fingerprint(step=0)
    assert fingerprint[0]["identity"]["source"] == str(corpora["jsonl"])
    shutil.rmtree(tmp_path / "p")
    assert dataset.fingerprint(step=0) == fingerprint
    with pytest.raises(Overtaken, match=r"was deleted or replaced while it was written"):
        writer.record()
    with pytest.raises(ConfigError, match="was deleted while a run reads it"):
        source.refresh()
    other = configured(corpora["parquet"], tmp_path / "p")
    prepare(other, whole=True)
    assert dataset.fingerprint(step=0) == fingerprint
    before = content(tmp_path / "p")
    with pytest.raises(Overtaken):
        writer.record()
    # stopped after its last check, when the folder was still there
    monkeypatch.setattr(writer, "check_record", lambda: None)
    with pytest.raises(Overtaken, match="was deleted or replaced while it was written"):
        writer.record()
    writer.close()
    problem = ConfigError("the tokenizer that lies there is another folder's")
    chunk = Chunk([], preparation.encode, preparation, preparation.source, problem=problem)
    with pytest.raises(Overtaken):
        preparation.write(chunk, [])
    preparation.writer.close()
    with pytest.raises(ConfigError, match="was begun anew, with another identity"):
        source.refresh()
    assert content(tmp_path / "p") == before
    with pytest.raises(ConfigError, match="was prepared with source = "):
        digests(cfg, 1)


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


def test_one_that_stands_still_with_the_lock_is_not_waited_for(
    corpora, configured, tmp_path, monkeypatch, capsys
):
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    held = files.lock(tmp_path / ".p.lock")
    monkeypatch.setattr("data.prepare.HOLDER_SECONDS", 0.5)
    prepare(cfg, whole=True)
    held.release()
    told = capsys.readouterr().err
    assert f"waiting for another process that prepares {tmp_path / 'p'}" in told
    assert "has not recorded anything for 0 s" in told
    assert f"preparing {tmp_path / 'p'} too" in told
    assert is_complete(read_manifest(tmp_path / "p"))


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


def test_a_writer_that_was_overtaken_gives_up_before_it_writes(configured, tmp_path, monkeypatch):
    """It was stopped, its text was changed behind what it had recorded, and another process went on."""
    monkeypatch.setattr("data.encode.CHUNK", 5_000)
    monkeypatch.setattr("data.prepare.SYNC_SECONDS", 0.0)
    pattern = written(tmp_path / "texts", "jsonl")
    cfg = configured(pattern, tmp_path / "p")
    prepare(cfg)
    first = stopped_in_the_middle(cfg, tmp_path / "p")
    place = read_manifest(tmp_path / "p")["place"]
    path = pathlib.Path(read_manifest(tmp_path / "p")["files"][place[0]][0])
    lines = path.read_text().splitlines()
    lines[place[2] + 1] = json.dumps({"text": "something else"})  # behind the record
    path.write_text("\n".join(lines))
    prepare(cfg, whole=True)
    before = content(tmp_path / "p")
    for attempt in (first.writer.end, lambda: continued(first)):
        with pytest.raises(Overtaken, match="has prepared more of it"):
            attempt()
    assert content(tmp_path / "p") == before
    assert (
        read_manifest(tmp_path / "p")["segments"]
        == segment_hashes(tmp_path / "p", read_manifest(tmp_path / "p"))[0]
    )


def test_a_writer_whose_disk_is_slow_does_not_lower_the_record(
    configured, corpora, tmp_path, monkeypatch
):
    """Another process completes the folder while this one syncs what it has written."""
    monkeypatch.setattr("data.encode.CHUNK", 5_000)
    monkeypatch.setattr("data.prepare.SYNC_SECONDS", 0.0)
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    slow = stopped_in_the_middle(cfg, tmp_path / "p")
    sync = TokenFile.sync

    def completed_meanwhile(file):
        sync(file)
        with monkeypatch.context() as patch:
            patch.setattr(TokenFile, "sync", sync)
            prepare(cfg, whole=True)

    monkeypatch.setattr(TokenFile, "sync", completed_meanwhile)
    with pytest.raises(Overtaken, match="has prepared more of it"):
        slow.writer.record()
    assert is_complete(read_manifest(tmp_path / "p"))


def test_of_a_mixture_only_the_folder_that_was_overtaken_is_left_to_the_other(
    corpora, configured, tmp_path, monkeypatch
):
    """The other sources go on at once."""
    sources = []
    for number, kind in enumerate(("jsonl", "parquet")):
        cfg = configured(corpora[kind], tmp_path / str(number))
        prepare(cfg)
        sources.append((tmp_path / str(number), cfg))
    tries = []
    complete = prepare_module._prepare_together

    def overtaken_once(ours, workers):
        tries.append([folder.name for folder, _ in ours])
        if len(tries) == 1:
            raise Overtaken(ours[0][0], "another process has prepared more of it")
        complete(ours, workers)

    monkeypatch.setattr(prepare_module, "_prepare_together", overtaken_once)
    monkeypatch.setattr(prepare_module, "HOLDER_SECONDS", 0.1)
    prepare_text(sources, 0)
    assert tries == [["0", "1"], ["1"], ["0"]]


def test_what_was_written_is_compared_before_it_is_complete(configured, corpora, tmp_path):
    """Whoever changed it: the hashes of all segments were taken as it was tokenized."""
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    with pytest.MonkeyPatch.context() as patch:
        end = TokenWriter.end

        def spoiled(writer):
            end(writer)
            with (tmp_path / "p/train.bin").open("r+b") as file:
                file.seek(10_000)
                file.write(b"\0\0\0")

        patch.setattr(TokenWriter, "end", spoiled)
        with pytest.raises(ConfigError, match=r"train\.bin: was changed while it was prepared"):
            prepare(cfg, whole=True)
    assert not is_complete(read_manifest(tmp_path / "p"))


def test_a_preparation_does_not_fill_the_folder_of_another_configuration(
    configured, corpora, tmp_path
):
    """It was begun anew while this one waited for its lock."""
    cfg = configured(corpora["jsonl"], tmp_path / "p")
    prepare(cfg)
    other = configured(corpora["parquet"], tmp_path / "p")
    with pytest.raises(ConfigError, match="was prepared with source = "):
        prepare_text([(tmp_path / "p", other)], 0)
    assert read_manifest(tmp_path / "p")["tokens"]["train"] == 0


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_wrong_row_behind_max_tokens_is_not_asked_for(configured, tmp_path, monkeypatch, workers):
    """However far is read ahead, and whether or not it stands in the chunk in which they are reached."""
    monkeypatch.setattr("data.encode.CHUNK", 5_000)
    path = tmp_path / "a.jsonl"
    spoil(path, TEXTS[:600], [590])
    cfg = configured(path, tmp_path / "p", data={"order": "global", "max_tokens": 20_000})
    prepare_text(begin_all(cfg), workers)
    assert is_complete(read_manifest(tmp_path / "p"))
    spoil(path, TEXTS[:600], [10])
    early = configured(path, tmp_path / "q", data={"order": "global", "max_tokens": 20_000})
    with pytest.raises(ConfigError, match="line 11: is not valid JSON"):
        prepare_text(begin_all(early), workers)


def test_a_mixture_with_a_tokenizer_of_its_own_resumes_once_a_row_is_mended(tmp_path, configured):
    """Its tokenizer was trained on the start of the text; the folders' records tell what has changed since."""
    texts = [words(i, 40) for i in range(1500)]
    write_rows(tmp_path / "a.jsonl", texts)
    spoil(tmp_path / "b.jsonl", texts[::-1], [1400])
    weighted = [{"source": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    data = {"sources": weighted, "source": None, "tokenizer": None}
    cfg = configured("x", tmp_path / "p", data=data)
    with pytest.MonkeyPatch.context() as patch:  # the sample ends before the wrong row
        patch.setattr(
            "data.tokenizer_training.train_tokenizer",
            lambda texts, size: train_on(texts, size, 900),
        )
        prepare(cfg)
    with pytest.raises(ConfigError, match=r"b\.jsonl: line 1401: "):
        prepare(cfg, whole=True)
    write_rows(tmp_path / "b.jsonl", texts[::-1])
    os.utime(tmp_path / "a.jsonl")
    folders = prepare(cfg, whole=True)
    assert all(is_complete(read_manifest(folder)) for folder in folders)


def train_on(texts: Iterator[str], size: int, most: int) -> bytes:
    return train_tokenizer(itertools.islice(texts, most), size)


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
