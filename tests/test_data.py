"""Tokenizer, preparation, order of samples: lossless, whole or not at all, independent of ranks."""

import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch

from config import IGNORE, ConfigError
from data.encode import CHUNK, chunks, is_held_out
from data.loader import Loader, heldout_batches
from data.prepare import data_folders, is_prepared
from data.prepare import prepare as prepare_all
from data.sources import Source
from data.tokenizer import Tokenizer
from data.tokens import open_stream, read_manifest, window_count
from tests.conftest import REPO, launch, make_config, silent, words

HOSTILE = ["", " ", "  lead and trail  ", "a\0b", "\r\n\r\n\t\ttabs", "\n\n\n",
           "emoji 😀👩‍👩‍👧 and é, ﬁ, Å, 日本語",
           "▁marks ▁▁ here▁",
           "\u200b\ufeff\u2028", "x" * 100_000,
           "<s></s><unk><0x0A>", "".join(map(chr, range(1, 0x300)))]


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return Tokenizer(prepared / "tokenizer.model")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_tokenizer_is_lossless(tokenizer, text):
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == text and all(0 <= i < tokenizer.vocab_size for i in ids)


def test_default_source_round_trips():
    cfg = make_config(model={"vocab_size": 1024})
    texts = list(Source(cfg.data))
    assert 10e6 < sum(map(len, texts)) < 40e6
    from data.tokenizer import train_tokenizer
    path = REPO / ".pytest_cache/stdlib.model"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(train_tokenizer(texts[::20], 1024, 2))
    found = Tokenizer(path)
    sample = texts[::10]
    assert [found.decode(ids) for ids in found.encode(sample, 2)] == sample


def test_every_sample_once_an_epoch_for_any_split(prepared):
    cfg = make_config(train={"seq_len": 241, "global_batch_size": 8, "micro_batch_size": 1}, run={"seed": 5})
    stream = open_stream(prepared, "train", 320)
    windows = window_count(stream.length, 241)
    assert windows % 8  # the tail of an epoch goes into the next one's first batch
    loaders = [Loader(cfg, [stream], [1.0], rank, 4, 1, False) for rank in range(4)]
    alone = Loader(cfg, [stream], [1.0], 0, 1, 1, False)
    seen = [alone.order(k).window for k in range(3 * windows)]
    epochs = [seen[i * windows : (i + 1) * windows] for i in range(3)]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    for step in (1, windows // 8, windows // 8 + 1):
        whole = alone.batch(step)
        parts = [loader.batch(step) for loader in loaders]
        assert sum(p.digest for p in parts) % 2**53 == whole.digest
        assert whole.tokens == parts[0].tokens == 8 * 241
        together = {tuple(row.tolist()) for p in parts for inputs, _ in p.micro_batches for row in inputs}
        assert together == {tuple(row.tolist()) for inputs, _ in whole.micro_batches for row in inputs}
    for loader in [*loaders, alone]:
        loader.close()


def test_loader_resumes_at_any_step(prepared):
    cfg, stream = make_config(), open_stream(prepared, "train", 320)
    first = Loader(cfg, [stream], [1.0], 0, 1, 1, False)
    digests = [next(first).digest for _ in range(10)]
    later = Loader(cfg, [stream], [1.0], 0, 1, 6, False)
    assert [next(later).digest for _ in range(5)] == digests[5:] and len(set(digests)) == 10
    first.close(), later.close()


def test_targets_are_the_next_tokens(prepared):
    stream = open_stream(prepared, "train", 320)
    loader = Loader(make_config(), [stream], [1.0], 0, 1, 1, False)
    inputs, targets = next(loader).micro_batches[0]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    _, ids = stream.read(loader.order(0).window * 32, loader.order(0).window * 32 + 33)
    assert torch.equal(inputs[0], ids[:-1]) and torch.equal(targets[0], ids[1:])
    loader.close()


def test_a_failure_in_the_loaders_thread_reaches_the_training_thread(prepared, tmp_path):
    stream = open_stream(prepared, "train", 320)
    import dataclasses
    loader = Loader(make_config(), [dataclasses.replace(stream, vocab_size=5)], [1.0], 0, 1, 1, False)
    with pytest.raises(ConfigError, match=r"token \d+ has id \d+, but \[model\] vocab_size = 5"):
        next(loader)
    loader.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batches", [None, 1])
def test_evaluation_reads_every_held_out_target_once(prepared, ranks, batches):
    cfg = make_config(eval={"batches": batches} if batches else {})
    stream = open_stream(prepared, "heldout", 320)
    found = [list(heldout_batches(stream, cfg, rank, ranks)) for rank in range(ranks)]
    assert len({len(part) for part in found}) == 1
    valid = [t for part in found for _, targets in part for t in targets[targets != IGNORE].tolist()]
    _, ids = stream.read(0, stream.length)
    expected = ids[1:].tolist() if batches is None else ids[1 : 8 * 32 + 1].tolist()
    assert sorted(valid) == sorted(expected)


def test_held_out_documents_are_chosen_by_their_text(corpus, prepared):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    held = [text for text in texts if is_held_out(text)]
    manifest = read_manifest(prepared)
    assert manifest["documents"] == {"train": len(texts) - len(held), "heldout": len(held)} and held
    assert sum(is_held_out(str(i)) for i in range(20_000)) == pytest.approx(200, abs=60)
    tokenizer, stream = Tokenizer(prepared / "tokenizer.model"), open_stream(prepared, "heldout", 320)
    _, ids = stream.read(0, stream.length)
    expected = [i for text in held for i in [*tokenizer.bos, *tokenizer.encode([text])[0], *tokenizer.eos]]
    assert ids.tolist() == expected


# Preparation


def prepare(cfg, say=silent):
    """Of one source."""
    return prepare_all(cfg, say)[0]


def config_for(source, tmp_path, **data):
    return make_config(data={"source": str(source), "path": str(tmp_path / "out"), **data})


def test_prepared_once(corpus, tmp_path):
    cfg, said = config_for(corpus, tmp_path), []
    folder = prepare(cfg, lambda text, passing=False: said.append(text))
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert said and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    said.clear()
    prepare(cfg, lambda text, passing=False: said.append(text))
    assert not said and {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_identity_decides_the_folder(corpus):
    def name(**data):
        return data_folders(make_config(data={"source": str(corpus), **data}))[0].name
    names = [name(), name(max_tokens=5), name(text_field="body"), name(subset="x")]
    assert len(set(names)) == 4 and name() == names[0]
    assert data_folders(make_config())[0].name.startswith("python-stdlib-")


def test_another_identity_in_the_same_folder_is_refused(corpus, tmp_path):
    prepare(config_for(corpus, tmp_path))
    with pytest.raises(ConfigError, match="max_tokens = None, the configuration says 7"):
        prepare(config_for(corpus, tmp_path, max_tokens=7))


def test_changed_source_is_noticed(corpus, tmp_path):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)
    prepare(config_for(copy, tmp_path))
    copy.write_text(copy.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match="changed since"):
        prepare(config_for(copy, tmp_path))
    copy.unlink()  # no longer needed
    prepare(config_for(copy, tmp_path))


def test_max_tokens_and_wide_ids(corpus, tmp_path):
    folder = prepare(config_for(corpus, tmp_path, max_tokens=1000))
    assert 1000 <= open_stream(folder, "train", 320).length < 1100


@pytest.mark.parametrize("kind", ["parquet", "txt", "jsonl", "glob", "folder"])
def test_local_sources(kind, corpus, tmp_path):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()][:50]
    source = tmp_path / f"texts.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source)
    elif kind == "txt":
        source.write_text("\n".join(texts))
        texts = ["\n".join(texts)]
    else:
        for part in range(2):
            (tmp_path / f"part{part}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[part::2]))
        source = {"glob": tmp_path / "part*.jsonl", "folder": tmp_path, "jsonl": tmp_path / "part0.jsonl"}[kind]
        texts = texts[::2] + ([] if kind == "jsonl" else texts[1::2])
    found = list(Source(config_for(source, tmp_path).data))
    assert "".join(found) == "".join(texts)


def test_long_text_file_becomes_several_documents(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\r\n".join(words(i, 40) for i in range(2000)), newline="")
    found = list(Source(config_for(path, tmp_path).data))
    assert len(found) > 3 and "".join(found) == path.read_bytes().decode()


GOOD = json.dumps({"text": "some text that is good"}) + "\n"
BAD_INPUT = {
    "bad line after many": (GOOD * 60 + '{"body": "x"}\n', "line 61: has no field 'text'"),
    "nested without end": ("[" * 100_000 + "\n", "line 1: is not valid JSON"),
    "corrupt line": (GOOD * 6 + '{"text": "cut\n' + GOOD, "line 7: is not valid JSON"),
    "no such field": (GOOD + '{"body": "x"}\n', "line 2: has no field 'text'"),
    "number for text": (GOOD + '{"text": 5}\n', "line 2: field 'text' must be text, not int"),
    "null": (GOOD + '{"text": null}\n', "line 2: field 'text' must be text, not NoneType"),
    "list for a row": (GOOD + "[1]\n", "line 2: has no field"),
    "lone surrogate": (GOOD * 2 + '{"text": "a\\ud800"}\n', "line 3: is not valid Unicode"),
    "empty file": ("", "holds no text"),
    "documents all empty": ('{"text": ""}\n' * 5, "holds no text"),
    "too little text": (GOOD, r"\[model\] vocab_size = 320: the text is too little.*the largest that works is \d+"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_and_nothing_published(case, tmp_path):
    content, message = BAD_INPUT[case]
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepare(config_for(tmp_path / "in.jsonl", tmp_path))
    assert not (tmp_path / "out").exists() and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_the_largest_vocabulary_named_works(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": words(0, 500)}) + "\n")
    data = {"source": str(tmp_path / "in.jsonl"), "path": str(tmp_path / "out")}
    with pytest.raises(ConfigError) as caught:
        prepare(make_config(model={"vocab_size": 5000}, data=data))
    largest = int(str(caught.value).split()[-1])
    assert 260 < largest < 5000
    prepare(make_config(model={"vocab_size": largest}, data=data))


@pytest.mark.parametrize("content, what", [
    (b"", "empty"), (b"\x00" * 100, "something that begins"),
    (b"<!DOCTYPE html><html>Not found</html>", "an HTML page"),
    (b"IQ== 0\nIg== 1\n", "a tiktoken vocabulary"),
    (b"version https://git-lfs.github.com/spec/v1\noid", "a git-lfs pointer")])
def test_garbled_tokenizer(content, what, corpus, tmp_path):
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(ConfigError, match=f"bad.model: is no tokenizer, but {what}"):
        prepare(config_for(corpus, tmp_path, tokenizer=str(tmp_path / "bad.model")))


def test_tokenizer_of_ones_own(corpus, prepared, tmp_path):
    own = config_for(corpus, tmp_path, tokenizer=str(prepared / "tokenizer.model"))
    folder = prepare(own)
    assert (folder / "train.bin").read_bytes() == (prepared / "train.bin").read_bytes()
    with pytest.raises(ConfigError, match="missing.model: tokenizer cannot be read"):
        prepare(config_for(corpus, tmp_path, tokenizer="missing.model"))
    with pytest.raises(ConfigError, match="vocab_size = 100: smaller than the tokenizer"):
        prepare(make_config(model={"vocab_size": 100}, data={
            "source": str(corpus), "path": str(tmp_path / "x"), "tokenizer": str(prepared / "tokenizer.model")}))


def test_cut_token_file_is_noticed(prepared, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    (copy / "train.bin").write_bytes((copy / "train.bin").read_bytes()[:-2])
    with pytest.raises(ConfigError, match="cut or changed"):
        open_stream(copy, "train", 320)
    (copy / "train.bin").unlink()
    with pytest.raises(ConfigError, match=r"train\.bin: cannot be read"):
        open_stream(copy, "train", 320)
    with pytest.raises(ConfigError, match="holds no prepared data"):
        open_stream(tmp_path / "nowhere", "train", 320)


def test_dataset_smaller_than_a_batch(write_config, tmp_path):
    path = write_config(train={"seq_len": 8000, "micro_batch_size": 1})
    done = launch(path)
    assert done.returncode == 2 and "fewer than one batch" in done.stderr, done.stderr
    assert not (tmp_path / "outputs").exists()


def test_hugging_face_source_without_network_says_so(tmp_path):
    code = ("import sys; from data.sources import Source; import config; "
            "from tests.conftest import make_config\n"
            "try: list(Source(make_config(data={'source': 'nobody/nothing-here'}).data))\n"
            "except config.ConfigError as e: print(e)")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True,
                          env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert "[data] source = nobody/nothing-here: cannot be read" in done.stdout, done.stderr


def test_two_that_prepare_at_once(corpus, tmp_path):
    """Both end well, and one of them did the work."""
    path = tmp_path / "c.toml"
    import config
    path.write_text(config.to_toml(config_for(corpus, tmp_path)))
    both = [subprocess.Popen([sys.executable, "-m", "data.prepare", path], cwd=REPO, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    said = [p.communicate()[1] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert sum("prepared" in text and "to train on" in text for text in said) == 1


def test_random_windows_equal_the_file(prepared):
    stream = open_stream(prepared, "train", 320)
    import array
    ids = array.array("H", (prepared / "train.bin").read_bytes())
    chosen = random.Random(0)
    for _ in range(50):
        start = chosen.randrange(stream.length - 40)
        assert stream.read(start, start + 40)[1].tolist() == list(ids[start : start + 40])


@pytest.mark.parametrize("source", ["my.csv", "no/such/path/at.all", "./thing", "texts-*.jsonl", "missing.txt"])
def test_what_looks_like_a_file_is_never_looked_for_on_a_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        list(Source(make_config(data={"source": source}).data))


def test_very_long_lines_train_a_tokenizer_too(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": words(i, 30_000)}) + "\n" for i in range(3)))
    prepare(config_for(tmp_path / "in.jsonl", tmp_path))


def test_documents_of_any_span(prepared):
    """Against a search through the tokens themselves: each document ends with its end mark, which text never gives."""
    stream = open_stream(prepared, "train", 320)
    _, ids = stream.read(0, stream.length)
    ends = [i + 1 for i, token in enumerate(ids.tolist()) if [token] == Tokenizer(prepared / "tokenizer.model").eos]
    assert len(ends) == read_manifest(prepared)["documents"]["train"] and ends[-1] == stream.length
    whole = list(zip(range(len(ends)), [0, *ends], ends))
    assert stream.documents(0, stream.length) == whole
    draw = random.Random(0)
    for _ in range(200):
        start = draw.randrange(stream.length)
        stop = min(stream.length, start + draw.randrange(1, 400))
        assert stream.documents(start, stop) == [d for d in whole if d[1] < stop and d[2] > start]
    assert stream.documents(5, 5) == []


def test_a_step_can_be_read(corpus, prepared, write_config):
    path = write_config("shown")
    done = launch("-m", "data.show", path, "--step", "2")
    assert done.returncode == 0, done.stderr
    samples = done.stdout.split("=== ")[1:]
    assert [sample.partition(":")[0] for sample in samples] == [f"step 2, sample {n}" for n in range(8, 16)]
    texts = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    for sample in samples:  # every piece of a document is a piece of one of the source's
        for piece in sample.split("--- document ")[1:]:
            assert any(piece.partition("\n")[2].rstrip("\n") in text for text in texts), piece
    assert launch("-m", "data.show", path, "--step", "0").returncode == 2


@pytest.mark.parametrize("text, shown", [
    ("a\tb\n", "a\tb\n"), ("\x1b[31m\0", "\\x1b[31m\\x00"), ("\u202e\u00e9", "\\u202e\u00e9")])
def test_control_characters_are_spelt_out(text, shown):
    from data.show import printable

    assert printable(text) == shown


def test_a_file_cut_while_in_use_is_named(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "data")
    stream = open_stream(copy, "train", 320)
    with (copy / "train.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match="train.bin: ends before token 640: it was cut while it was in use"):
        stream.read(600, 640)
    (copy / "train.ends.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"train\.ends\.bin: cannot be read"):
        stream.documents(0, 10)


class Texts(list):
    """What chunks() needs of a source."""

    def place(self):
        return None

    share = place


def test_chunks_hold_all_texts_in_order():
    texts = Texts(words(i, 1 + i % 700) for i in range(900))
    cut = [chunk.texts for chunk in chunks(texts)]
    assert [text for chunk in cut for text in chunk] == texts and len(cut) > 3
    assert all(sum(map(len, chunk[:-1])) < CHUNK for chunk in cut) and list(chunks(Texts())) == []


PREPARE = "import sys, data.prepare as p; p.SYNC_SECONDS = 0.05; sys.exit(p.main(sys.argv[1:]))"


def test_a_killed_preparation_goes_on_and_ends_as_one_that_was_not(prepared, write_config, tmp_path):
    """kill -9 at random moments; the processes that it started end with it."""
    corpus = tmp_path / "large.jsonl"
    corpus.write_text("".join(json.dumps({"text": words(i, 300)}) + "\n" for i in range(20000)))

    def command(name: str) -> list:
        data = {"source": str(corpus), "path": str(tmp_path / name), "tokenizer": str(prepared / "tokenizer.model")}
        return [sys.executable, "-c", PREPARE, write_config("prep", data=data)]

    began = time.monotonic()
    done = subprocess.run(command("straight"), cwd=REPO, capture_output=True, text=True)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    draw, kills, went_on = random.Random(1), 0, 0
    while True:
        process = subprocess.Popen(command("killed"), cwd=REPO, stderr=subprocess.PIPE, text=True)
        try:
            output = process.communicate(timeout=draw.uniform(0.2, 0.6) * seconds if kills < 5 else 100)[1]
        except subprocess.TimeoutExpired:
            kills += 1
            process.kill()
            output = process.communicate()[1]  # returns when all that hold the pipe have ended: the pool's too
        went_on += "going on after" in output
        if process.returncode == 0:
            break
    assert kills >= 2 and went_on >= 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "killed").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "straight").iterdir()}
    assert not list(tmp_path.glob(".killed*"))


# Mixtures


def mixture(tmp_path, corpus, **data):
    if not (tmp_path / "other.jsonl").exists():
        (tmp_path / "other.jsonl").write_text("".join(json.dumps({"body": words(-i, 30)}) + "\n" for i in range(200)))
    sources = [{"source": str(corpus), "weight": 0.75, "max_tokens": 3000},
               {"source": str(tmp_path / "other.jsonl"), "weight": 0.25, "text_field": "body"}]
    return make_config(data={"sources": sources, "path": str(tmp_path / "mixed"), **data})


def test_a_mixture_trains_one_tokenizer_and_keeps_its_sources_apart(corpus, tmp_path):
    cfg = mixture(tmp_path, corpus)
    assert not is_prepared(cfg)
    with pytest.raises(ConfigError, match="no prepared data"):
        data_folders(cfg)
    first, second = prepare_all(cfg, silent)
    assert is_prepared(cfg) and data_folders(cfg) == [first, second]
    assert (first / "tokenizer.model").read_bytes() == (second / "tokenizer.model").read_bytes()
    assert 3000 <= read_manifest(first)["tokens"]["train"] < 3200
    assert read_manifest(second)["identity"]["text_field"] == "body"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mixed").rglob("*")}
    prepare_all(cfg, silent)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mixed").rglob("*")} == before


def test_a_source_prepared_once_serves_every_mixture(corpus, prepared, tmp_path):
    given = {"tokenizer": str(prepared / "tokenizer.model")}
    first = prepare_all(mixture(tmp_path, corpus, **given), silent)
    made = [folder.stat().st_mtime_ns for folder in first]
    cfg = mixture(tmp_path, corpus, **given)
    import dataclasses
    heavier = [dataclasses.replace(source, weight=source.weight + 1) for source in cfg.data.sources[::-1]]
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sources=tuple(heavier)))
    assert prepare_all(other, silent) == first[::-1] and [folder.stat().st_mtime_ns for folder in first] == made


def test_training_on_a_mixture_and_looking_at_it(corpus, tmp_path, write_config):
    cfg = mixture(tmp_path, corpus)
    import config
    path = write_config("mixed", data={k: v for k, v in config.to_dict(cfg)["data"].items() if k != "source"}, eval={},
                        checkpoint={})
    done = launch(path)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "outputs/mixed/metrics.jsonl").read_text().splitlines()[-1])
    assert row["kind"] == "eval" and set(row["loss_by_source"]) == {str(corpus), str(tmp_path / "other.jsonl")}
    assert min(row["loss_by_source"].values()) <= row["loss"] <= max(row["loss_by_source"].values())
    shown = launch("-m", "data.show", path, "--step", "1").stdout
    assert shown.count(f"of {corpus}") == 6 and shown.count("other.jsonl") == 2  # three of four, of eight samples
    plan = json.loads(launch(path, "--dry-run", "--json").stdout)
    assert plan["steps_per_epoch"] > 1
    refused = launch(path, '--data.sources=[{source = "python-stdlib"}]')
    assert refused.returncode == 2 and "data.sources" in refused.stderr


def test_other_data_is_refused_by_name(corpus, tmp_path, write_config):
    """The same configuration, and another corpus in the same place."""
    source = str(shutil.copy(corpus, tmp_path / "texts.jsonl"))
    path = write_config("guarded", data={"source": source, "path": str(tmp_path / "tokens")}, checkpoint={})
    assert launch(path).returncode == 0
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "texts.jsonl").write_text("".join(corpus.read_text().splitlines(True)[::-1]))
    done = launch(path, "--train.steps=6", "--optim.schedule_steps=4")
    assert done.returncode == 2 and "was trained on other data" in done.stderr, done.stderr
    assert "sha256.train.bin was" in done.stderr and "sha256.heldout.bin" in done.stderr, done.stderr


# Going on, and looking on


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "two files", "stdlib"])
def test_a_source_goes_on_from_any_place(kind, corpus, tmp_path):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()][:60]
    path = tmp_path / f"texts.{kind.split()[-1]}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif kind == "txt":
        path.write_text("\n".join(words(i, 9000) for i in range(12)))
    elif kind == "two files":
        path = tmp_path / "part*.jsonl"
        for part in range(2):
            lines = [json.dumps({"text": text}) + "\n\n" for text in texts[part::2]]
            (tmp_path / f"part{part}.jsonl").write_text("".join(lines))
    else:
        shutil.copy(corpus, path)
    d = config_for("python-stdlib" if kind == "stdlib" else path, tmp_path).data
    whole = list(Source(d))
    assert len(whole) > 5
    for read in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        source = Source(d)
        assert list(itertools.islice(source, read)) == whole[:read]
        place, share = json.loads(json.dumps(source.place())), source.share()
        assert 0 <= share <= 1 and (share == 0) == (read == 0)
        assert list(Source(d, place)) == whole[read:]


def test_a_hub_source_goes_on_and_knows_its_size(tmp_path, monkeypatch):
    """Through the same calls as a download, on rows that are here."""
    import datasets
    rows = datasets.Dataset.from_dict({"text": [words(i, 5) for i in range(3000)]})

    def load(*args, **options):
        stream = rows.to_iterable_dataset(3)
        stream.info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=3000)})
        return stream

    monkeypatch.setattr(datasets, "load_dataset", load)
    d = make_config(data={"source": "owner/name"}).data
    whole, source = list(Source(d)), Source(d)
    assert list(itertools.islice(source, 1500)) == whole[:1500] and source.share() == 0.5
    assert list(Source(d, json.loads(json.dumps(source.place())))) == whole[1500:]


def test_progress_overwrites_itself_on_a_terminal_alone(capsys):
    from data.progress import Bar, Console

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, pipe = Terminal(), io.StringIO()
    at = {"characters": 5_000_000, "tokens": {"train": 500, "heldout": 0}, "documents": {"train": 9, "heldout": 1}}
    for stream in (terminal, pipe):
        with Console(stream) as say:
            bar = Bar(make_config(data={"max_tokens": 1000}).data, at, say)
            bar.show(None)
            at["tokens"]["train"] = 750
            bar.said -= 1
            bar.show(None)
            say("done")
    assert terminal.getvalue().startswith("python-stdlib: [############....] 75.0%, 0:00:0")
    assert " left, 0.0 MB/s, 750 tokens" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[Kdone\n")
    assert pipe.getvalue() == "done\n"


def test_a_full_disk_ends_in_a_line(corpus, prepared, write_config, tmp_path):
    path = write_config("full", data={"source": str(corpus), "path": str(tmp_path / "out"),
                                      "tokenizer": str(prepared / "tokenizer.model")})
    limit = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); " \
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); import data.prepare as p; " \
            "sys.exit(p.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", limit, path], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-1].endswith("data could not be prepared: File too large"), done.stderr
    assert subprocess.run([sys.executable, "-m", "data.prepare", path], cwd=REPO, check=False).returncode == 0


def test_a_changed_file_is_noticed_at_the_next_start(prepared, corpus, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(prepared, copy)
    cfg = make_config(data={"source": str(corpus), "path": str(copy)})
    tokens = bytearray((copy / "train.bin").read_bytes())
    tokens[1000] ^= 1
    said = []
    os.utime(copy / "train.bin")  # copied: hashed once, and found good
    prepare(cfg, lambda text, passing=False: said.append(text))
    assert len(said) == 1 and "train.bin: was copied or changed" in said[0]
    (copy / "train.bin").write_bytes(tokens)
    with pytest.raises(ConfigError, match=r"train\.bin: was changed since it was prepared"):
        prepare(cfg)
    (copy / "heldout.ends.bin").unlink()
    with pytest.raises(ConfigError, match=r"heldout\.ends\.bin: is missing"):
        prepare(cfg)


@pytest.mark.parametrize("dtype, width", [("uint16", 2), ("int32", 4)])
def test_files_beyond_two_to_the_31_tokens(dtype, width, tmp_path):
    """Sparse: the disk holds a few pages of them."""
    length, tail = 2**31 + 5000, list(range(1, 4001))
    with (tmp_path / "train.bin").open("wb") as file:
        file.seek(width * (length - len(tail)))
        file.write(b"".join(i.to_bytes(width, "little") for i in tail))
    (tmp_path / "train.ends.bin").write_bytes(b"".join(e.to_bytes(8, "little") for e in (2**31 + 1500, length)))
    (tmp_path / "manifest.json").write_text(json.dumps(
        {"identity": {}, "vocab_size": 5000, "tokens": {"train": length}, "dtype": dtype}))
    stream = open_stream(tmp_path, "train", 5000)
    assert stream.read(length - 100, length)[1].tolist() == tail[-100:]
    assert stream.documents(2**31 + 1000, 2**31 + 2000) == [(0, 0, 2**31 + 1500), (1, 2**31 + 1500, length)]
    loader = Loader(make_config(model={"vocab_size": 5000}), [stream], [1.0], 0, 1, 1, False)
    last = window_count(length, 32) - 1
    number = next(k for k in range(last + 1) if loader.order(k).window > 2**31 // 32)
    stream_of, first, stop = loader.span(number)
    assert stream_of is stream and 2**31 < first < stop <= length
    loader.close()


# tokenizer.json


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> str:
    """A byte-level tokenizer as Llama 3's: begin mark by its post-processor, end mark by name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator([words(i, 50) for i in range(50)], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    folder = tmp_path_factory.mktemp("byte-level")
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("text", [*HOSTILE, "<|begin_of_text|>in<|end_of_text|>"], ids=range(len(HOSTILE) + 1))
def test_tokenizer_json_is_lossless(byte_level, text):
    found = Tokenizer(byte_level)
    ids = found.encode([text])[0]
    assert found.decode(ids) == text and not {0, 1} & set(ids)
    assert (found.bos, found.eos, found.vocab_size) == ([0], [1], 290)


@pytest.mark.parametrize("settings, eos", [
    ({"eos_token": "<|begin_of_text|>"}, [0]), ({"eos_token": {"content": "<|end_of_text|>"}}, [1]), ({}, [1])])
def test_the_end_mark_is_the_familys(byte_level, settings, eos, tmp_path):
    shutil.copy(f"{byte_level}/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path / "tokenizer.json").eos == eos


def test_preparing_with_a_tokenizer_json(byte_level, corpus, tmp_path):
    shutil.copytree(byte_level, tmp_path / "hf")
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    folder = prepare(config_for(corpus, tmp_path, tokenizer=str(tmp_path / "hf")))
    assert {p.name for p in folder.glob("tokenizer*")} == {"tokenizer.json", "tokenizer_config.json"}
    stream, found = open_stream(folder, "train", 320), Tokenizer(folder)
    first = next(text for text in Source(config_for(corpus, tmp_path).data) if not is_held_out(text))
    _, start, stop = stream.documents(0, 1)[0]
    assert stream.read(start, stop)[1].tolist() == [0, *found.encode([first])[0], 1]


@pytest.mark.parametrize("content, what", [("{}", "is no tokenizer.json that"), ('{"model": 3', "can read")])
def test_garbled_tokenizer_json(content, what, corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=what):
        Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="holds neither tokenizer.json nor tokenizer.model"):
        Tokenizer(tmp_path / "..")


def test_without_the_package_it_is_named(byte_level, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the package `tokenizers`: .* -m pip install tokenizers"):
        Tokenizer(byte_level)
