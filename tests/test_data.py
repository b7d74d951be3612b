"""Tokenizer, preparation, order of samples: lossless, whole or not at all, independent of ranks."""

import itertools
import json
import math
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch

from config import IGNORE, ConfigError
from data.encode import CHUNK, chunks, is_held_out
from data.loader import Loader, Permutation, heldout_batches, rank_samples
from data.prepare import data_folder, documents, prepare
from data.tokenizer import Tokenizer
from data.tokens import open_stream, read_manifest, window_count
from tests.conftest import REPO, launch, make_config, words

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
    texts = list(documents(cfg.data))
    assert 10e6 < sum(map(len, texts)) < 40e6
    from data.tokenizer import train_tokenizer
    path = REPO / ".pytest_cache/stdlib.model"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(train_tokenizer(texts[::20], 1024, 2))
    found = Tokenizer(path)
    sample = texts[::10]
    assert [found.decode(ids) for ids in found.encode(sample, 2)] == sample


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 64, 65, 100, 101, 1000, 4096, 99_991])
def test_permutation_is_a_bijection(n):
    for seed, epoch in [(0, 0), (0, 1), (7, 0)]:
        p = Permutation(n, seed, epoch)
        assert sorted(map(p, range(n))) == list(range(n))


def test_permutation_differs_by_seed_and_epoch():
    n = 1000
    orders = [tuple(map(Permutation(n, seed, epoch), range(n))) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    # of two independent orders one place in n agrees on average: 1 of 1000, 25 * 24 / 2 pairs
    agree = sum(a == b for i, x in enumerate(orders) for y in orders[:i] for a, b in zip(x, y))
    assert abs(agree - 300) < 6 * math.sqrt(300)


def test_permutation_works_far_out():
    p = Permutation(10**15 + 37, 0, 0)
    found = {p(k) for k in range(1000)} | {p(p.n - 1 - k) for k in range(1000)}
    assert len(found) == 2000 and max(found) < p.n


@pytest.mark.parametrize("n", [10_007, 16_384])
def test_permutation_has_no_displacement_or_neighbour_correlation(n):
    order = list(map(Permutation(n, 1, 2), range(n)))
    # displacement p(k) - k of a random order has mean |.| n/3; its standard error is about 0.24 n / sqrt(n)
    mean = sum(abs(a - k) for k, a in enumerate(order)) / n
    assert abs(mean - n / 3) < 5 * 0.24 * math.sqrt(n)
    # the same for neighbours: |p(k+1) - p(k)|
    steps = [abs(a - b) for a, b in itertools.pairwise(order)]
    assert abs(sum(steps) / n - n / 3) < 5 * 0.24 * math.sqrt(n)
    assert sum(step == 1 for step in steps) < 12  # 2 expected
    x = torch.tensor(order, dtype=torch.float64)
    for lag in (1, 2, 3, 16, 128):
        correlation = torch.corrcoef(torch.stack([x[lag:], x[:-lag]]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(n)
    place = torch.corrcoef(torch.stack([x, torch.arange(n, dtype=torch.float64)]))[0, 1]
    assert abs(place) < 5 / math.sqrt(n)
    # eight by eight cells of (place, value): chi-squared with 49 degrees of freedom
    cells = torch.zeros(8, 8)
    for k, a in enumerate(order):
        cells[8 * k // n, 8 * a // n] += 1
    assert ((cells - n / 64) ** 2 / (n / 64)).sum() < 100


@pytest.mark.parametrize("ranks, micro", [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1)])
def test_ranks_share_a_step_among_them(ranks, micro):
    for step in (1, 2, 9):
        parts = [rank_samples(step, 12, micro, rank, ranks) for rank in range(ranks)]
        assert all(len(part) == 12 // (ranks * micro) and all(len(r) == micro for r in part) for part in parts)
        assert sorted(k for part in parts for r in part for k in r) == list(range((step - 1) * 12, step * 12))


def test_every_sample_once_an_epoch_for_any_split(prepared):
    cfg = make_config(train={"seq_len": 241, "global_batch_size": 8, "micro_batch_size": 1})
    stream = open_stream(prepared, "train", 320)
    windows = window_count(stream.length, 241)
    assert windows % 8  # the tail of an epoch goes into the next one's first batch
    loaders = [Loader(stream, cfg.train, 5, rank, 4, 1, False) for rank in range(4)]
    alone = Loader(stream, cfg.train, 5, 0, 1, 1, False)
    seen = [alone.window(k) for k in range(3 * windows)]
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
    first = Loader(stream, cfg.train, 0, 0, 1, 1, False)
    digests = [next(first).digest for _ in range(10)]
    later = Loader(stream, cfg.train, 0, 0, 1, 6, False)
    assert [next(later).digest for _ in range(5)] == digests[5:] and len(set(digests)) == 10
    first.close(), later.close()


def test_targets_are_the_next_tokens(prepared):
    stream = open_stream(prepared, "train", 320)
    loader = Loader(stream, make_config().train, 0, 0, 1, 1, False)
    inputs, targets = next(loader).micro_batches[0]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    _, ids = stream.read(loader.window(0) * 32, loader.window(0) * 32 + 33)
    assert torch.equal(inputs[0], ids[:-1]) and torch.equal(targets[0], ids[1:])
    loader.close()


def test_a_failure_in_the_loaders_thread_reaches_the_training_thread(prepared, tmp_path):
    stream = open_stream(prepared, "train", 320)
    import dataclasses
    loader = Loader(dataclasses.replace(stream, vocab_size=5), make_config().train, 0, 0, 1, 1, False)
    with pytest.raises(ConfigError, match=r"token \d+ has id \d+, but \[model\] vocab_size = 5"):
        next(loader)
    loader.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batches", [None, 1])
def test_evaluation_reads_every_held_out_target_once(prepared, ranks, batches):
    cfg, stream = make_config(), open_stream(prepared, "heldout", 320)
    found = [list(heldout_batches(stream, cfg.train, batches, rank, ranks)) for rank in range(ranks)]
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


def config_for(source, tmp_path, **data):
    return make_config(data={"source": str(source), "path": str(tmp_path / "out"), **data})


def test_prepared_once(corpus, tmp_path):
    cfg, said = config_for(corpus, tmp_path), []
    folder = prepare(cfg, said.append)
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert said and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    said.clear()
    prepare(cfg, said.append)
    assert not said and {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_identity_decides_the_folder(corpus):
    def name(**data):
        return data_folder(make_config(data={"source": str(corpus), **data})).name
    names = [name(), name(max_tokens=5), name(text_field="body"), name(subset="x")]
    assert len(set(names)) == 4 and name() == names[0]
    assert data_folder(make_config()).name.startswith("python-stdlib-")


def test_another_identity_in_the_same_folder_is_refused(corpus, tmp_path):
    prepare(config_for(corpus, tmp_path), print)
    with pytest.raises(ConfigError, match="max_tokens = None, the configuration says 7"):
        prepare(config_for(corpus, tmp_path, max_tokens=7), print)


def test_changed_source_is_noticed(corpus, tmp_path):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)
    prepare(config_for(copy, tmp_path), print)
    copy.write_text(copy.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match="changed since"):
        prepare(config_for(copy, tmp_path), print)
    copy.unlink()  # no longer needed
    prepare(config_for(copy, tmp_path), print)


def test_max_tokens_and_wide_ids(corpus, tmp_path):
    folder = prepare(config_for(corpus, tmp_path, max_tokens=1000), print)
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
    found = list(documents(config_for(source, tmp_path).data))
    assert "".join(found) == "".join(texts)


def test_long_text_file_becomes_several_documents(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\r\n".join(words(i, 40) for i in range(2000)), newline="")
    found = list(documents(config_for(path, tmp_path).data))
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
        prepare(config_for(tmp_path / "in.jsonl", tmp_path), print)
    assert not (tmp_path / "out").exists() and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_the_largest_vocabulary_named_works(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": words(0, 500)}) + "\n")
    data = {"source": str(tmp_path / "in.jsonl"), "path": str(tmp_path / "out")}
    with pytest.raises(ConfigError) as caught:
        prepare(make_config(model={"vocab_size": 5000}, data=data), print)
    largest = int(str(caught.value).split()[-1])
    assert 260 < largest < 5000
    prepare(make_config(model={"vocab_size": largest}, data=data), print)


@pytest.mark.parametrize("content, what", [
    (b"", "empty"), (b"\x00" * 100, "something that begins"),
    (b"<!DOCTYPE html><html>Not found</html>", "an HTML page"),
    (b"IQ== 0\nIg== 1\n", "a tiktoken vocabulary"), (b'{"version": "1.0"}', "JSON, as Hugging Face's tokenizer.json"),
    (b"version https://git-lfs.github.com/spec/v1\noid", "a git-lfs pointer")])
def test_garbled_tokenizer(content, what, corpus, tmp_path):
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(ConfigError, match=f"bad.model: is no sentencepiece model, but {what}"):
        prepare(config_for(corpus, tmp_path, tokenizer=str(tmp_path / "bad.model")), print)


def test_tokenizer_of_ones_own(corpus, prepared, tmp_path):
    own = config_for(corpus, tmp_path, tokenizer=str(prepared / "tokenizer.model"))
    folder = prepare(own, print)
    assert (folder / "train.bin").read_bytes() == (prepared / "train.bin").read_bytes()
    with pytest.raises(ConfigError, match="missing.model: tokenizer cannot be read"):
        prepare(config_for(corpus, tmp_path, tokenizer="missing.model"), print)
    with pytest.raises(ConfigError, match="vocab_size = 100: smaller than the tokenizer"):
        prepare(make_config(model={"vocab_size": 100}, data={
            "source": str(corpus), "path": str(tmp_path / "x"), "tokenizer": str(prepared / "tokenizer.model")}), print)


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
    code = ("import sys; from data.prepare import documents; import config; "
            "from tests.conftest import make_config\n"
            "try: list(documents(make_config(data={'source': 'nobody/nothing-here'}).data))\n"
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
        list(documents(make_config(data={"source": source}).data))


def test_very_long_lines_train_a_tokenizer_too(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": words(i, 30_000)}) + "\n" for i in range(3)))
    prepare(config_for(tmp_path / "in.jsonl", tmp_path), print)


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


def test_chunks_hold_all_texts_in_order():
    texts = [words(i, 1 + i % 700) for i in range(900)]
    cut = list(chunks(texts))
    assert [text for chunk in cut for text in chunk] == texts and len(cut) > 3
    assert all(sum(map(len, chunk[:-1])) < CHUNK for chunk in cut) and list(chunks([])) == []


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
