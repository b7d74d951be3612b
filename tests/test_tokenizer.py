"""Tokenizers: lossless on any text, their BOS and EOS tokens, wrong files named."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
import threading

import pytest
from data.encode import _start_pool, is_validation
from data.identity import open_source

import config
from config import ConfigError
from data.dataset import open_dataset
from data.tokenizer import Tokenizer
from data.tokenizer_training import train_tokenizer
from data.tokens import open_stream
from tests.conftest import (
    REPO,
    config_for,
    make_config,
    needs_extra,
    prepare_one,
    sentencepiece_model,
    tables,
    words,
)

pytestmark = pytest.mark.quick

HOSTILE = [
    "",
    " ",
    "  lead and trail  ",
    "a\0b",
    "\r\n\r\n\t\ttabs",
    "\n\n\n",
    "emoji 😀👩‍👩‍👧 and é, ﬁ, Å, 日本語",
    "▁marks ▁▁ here▁",
    "\u200b\ufeff\u2028",
    "x" * 100_000,
    "<s></s><unk><0x0A>",
    "".join(map(chr, range(1, 0x300))),
]


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return Tokenizer(prepared / "tokenizer.model")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_tokenizer_is_lossless(tokenizer, text):
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == text and all(0 <= i < tokenizer.vocab_size for i in ids)


def test_a_tokenizer_of_another_script_is_lossless_too(tmp_path):
    text = " ".join(map(chr, range(0x430, 0x450))) + "\n"  # Cyrillic
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer([text * 20] * 20, 300))
    made = Tokenizer(tmp_path)
    for text in HOSTILE:
        assert made.decode(made.encode([text])[0]) == text


def test_ctrl_c_ends_the_training_of_a_tokenizer():
    def texts():
        yield "the cat sat on the mat"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(texts(), 320)


def test_default_source_round_trips():
    cfg = make_config(model={"vocab_size": 1024})
    texts = list(open_source(cfg.data))
    assert 10e6 < sum(map(len, texts)) < 40e6
    path = REPO / ".pytest_cache/stdlib.model"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(train_tokenizer(texts[::20], 1024))
    found = Tokenizer(path)
    sample = texts[::10]
    assert [found.decode(ids) for ids in found.encode(sample)] == sample


@pytest.mark.parametrize("wrong, limit", [(5000, "largest"), (100, "smallest")])
def test_the_vocabulary_that_is_named_works(wrong, limit, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": words(0, 500)}) + "\n")
    data = {"source": str(tmp_path / "in.jsonl"), "path": str(tmp_path / "out")}
    with pytest.raises(
        ConfigError,
        match=rf"vocab_size = {wrong}: .*; the {limit} that works: --model.vocab_size=\d+$",
    ) as caught:
        prepare_one(make_config(model={"vocab_size": wrong}, data=data))
    named = int(str(caught.value).split("=")[-1])
    assert 260 < named < 5000
    prepare_one(make_config(model={"vocab_size": named}, data=data))
    beyond = named + (1 if limit == "largest" else -1)
    with pytest.raises(ConfigError, match=f"the {limit} that works: --model.vocab_size={named}$"):
        prepare_one(
            make_config(
                model={"vocab_size": beyond}, data={**data, "path": str(tmp_path / "beyond")}
            )
        )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        b"<!DOCTYPE html><html>Not found</html>",
        b"IQ== 0\nIg== 1\n",
    ],
)
def test_garbled_tokenizer(content, corpus, tmp_path):
    (tmp_path / "bad.model").write_bytes(content)
    begin = re.escape(repr(content[:24]))
    with pytest.raises(
        ConfigError, match=rf"bad.model: is no tokenizer \(an HTML page, .*: it begins with {begin}"
    ):
        prepare_one(config_for(corpus, tmp_path, tokenizer=str(tmp_path / "bad.model")))


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_git_lfs_pointer_is_no_tokenizer(corpus, tmp_path, name):
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\n")
    with pytest.raises(ConfigError, match=f"a b/{name}: is a git-lfs pointer.*a b' lfs pull"):
        prepare_one(config_for(corpus, tmp_path, tokenizer=str(folder)))


def test_tokenizer_of_ones_own(corpus, prepared, tmp_path):
    own = config_for(corpus, tmp_path, tokenizer=str(prepared / "tokenizer.model"))
    folder = prepare_one(own)
    assert (folder / "train.bin").read_bytes() == (prepared / "train.bin").read_bytes()
    with pytest.raises(ConfigError, match="missing.model: tokenizer cannot be read"):
        prepare_one(config_for(corpus, tmp_path, tokenizer="missing.model"))
    assert open_dataset(own).notes == []
    told = open_dataset(
        dataclasses.replace(own, model=dataclasses.replace(own.model, vocab_size=400))
    ).notes
    assert told == [f"the tokenizer of {folder} has 320 entries, the model 400 rows"]
    with pytest.raises(ConfigError, match="vocab_size = 100: smaller than the tokenizer"):
        prepare_one(
            make_config(
                model={"vocab_size": 100},
                data={
                    "source": str(corpus),
                    "path": str(tmp_path / "x"),
                    "tokenizer": str(prepared / "tokenizer.model"),
                },
            )
        )


def test_very_long_lines_train_a_tokenizer_too(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": words(i, 30_000)}) + "\n" for i in range(3))
    )
    prepare_one(config_for(tmp_path / "in.jsonl", tmp_path))


def test_indentation_is_one_token():
    """Of code, most of which would be spaces else."""
    import sentencepiece

    made = sentencepiece.SentencePieceProcessor()
    made.LoadFromSerializedProto(
        train_tokenizer((f"def f{i}():\n        return {i}\n" for i in range(200)), 300)
    )
    assert made.encode("        x", out_type=str)[0] == "\u2581" * 8


@pytest.mark.parametrize(
    "settings, bos, eos", [({}, [1], [2]), ({"bos_id": -1}, [], [2]), ({"eos_id": -1}, [1], [])]
)
def test_a_sentencepiece_model_may_lack_bos_or_eos(settings, bos, eos, tmp_path):
    found = sentencepiece_model(tmp_path / "tokenizer.model", **settings)
    assert (found.bos, found.eos) == (bos, eos)


@pytest.mark.parametrize("text", ["the cat", " the  cat\n", "▁the▁", "a☃"])
def test_ids_of_a_model_that_adds_a_space_in_front_are_sentencepieces(text, tmp_path):
    """As Llama 2's does: in front of a text, and of no part of it."""
    found = sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    assert found.encode([text]) == [found.model.encode(text)]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> str:
    """A byte-level tokenizer as Llama 3's: BOS by its post-processor, EOS by name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([words(i, 50) for i in range(50)], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    folder = tmp_path_factory.mktemp("byte-level")
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(
    "text", [*HOSTILE, "<|begin_of_text|>in<|end_of_text|>"], ids=range(len(HOSTILE) + 1)
)
def test_tokenizer_json_is_lossless(byte_level, text):
    found = Tokenizer(byte_level)
    ids = found.encode([text])[0]
    assert found.decode(ids) == text and not {0, 1} & set(ids)
    assert (found.bos, found.eos, found.vocab_size) == ([0], [1], 290)


def test_ids_with_holes_count_by_the_highest(byte_level, tmp_path):
    content = json.loads(pathlib.Path(byte_level, "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 399
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = Tokenizer(tmp_path)
    assert (
        found.vocab_size == 400 and found.decode([399]) == Tokenizer(byte_level).decode([289]) != ""
    )


def test_an_id_beyond_31_bits_is_refused(byte_level, tmp_path):
    content = json.loads(pathlib.Path(byte_level, "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    for highest, refused in ((2**31 - 2, False), (2**31 - 1, True)):
        vocabulary[last] = highest
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with (
            pytest.raises(ConfigError, match="has 2147483648 ids")
            if refused
            else contextlib.nullcontext()
        ):
            Tokenizer(tmp_path)


def test_one_that_makes_nothing_of_any_text_is_refused(tmp_path):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    for normalizer, refused in (
        (tokenizers.normalizers.Lowercase(), False),
        (tokenizers.normalizers.Replace(tokenizers.Regex(r"[\s\S]"), ""), True),
    ):
        made.normalizer = normalizer
        made.save(str(tmp_path / "tokenizer.json"))
        with (
            pytest.raises(ConfigError, match="makes nothing of any text that was tried")
            if refused
            else contextlib.nullcontext()
        ):
            Tokenizer(tmp_path)


def test_one_without_an_eos_token_is_told_of(byte_level, corpus, tmp_path, capsys):
    text = (
        pathlib.Path(byte_level, "tokenizer.json")
        .read_text()
        .replace("<|end_of_text|>", "<|other|>")
    )
    (tmp_path / "tokenizer.json").write_text(text)
    for folder, told in ((str(tmp_path), 1), (byte_level, 0)):
        prepare_one(
            make_config(
                data={"source": str(corpus), "path": f"{tmp_path}/{told}", "tokenizer": folder}
            )
        )
        assert capsys.readouterr().err.count(f"{folder}: has no EOS token that is known") == told


def test_a_vocabulary_smaller_or_larger_than_the_models(prepared, corpus, tmp_path):
    data = {"source": str(corpus), "path": str(tmp_path / "own"), "tokenizer": str(prepared)}
    prepare_one(make_config(data=data))
    [told] = open_dataset(make_config(data=data, model={"vocab_size": 321})).notes
    assert told == f"the tokenizer of {tmp_path / 'own'} has 320 entries, the model 321 rows"
    assert not open_dataset(make_config(data=data)).notes
    with pytest.raises(
        ConfigError, match="vocab_size = 319: smaller than .*own's tokenizer, of 320 entries"
    ):
        open_dataset(make_config(data=data, model={"vocab_size": 319}))


@pytest.mark.parametrize("largest, dtype", [(65_535, "uint16"), (65_536, "int32")])
def test_ids_that_two_bytes_do_not_hold_take_four(largest, dtype, byte_level, corpus, tmp_path):
    content = json.loads(pathlib.Path(byte_level, "tokenizer.json").read_text())
    content["model"]["vocab"]["t"] = largest
    content["model"]["merges"] = []  # each byte a token
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    cfg = config_for(corpus, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=65_537))
    stream = open_stream(prepare_one(cfg), "train", 65_537)
    assert (
        stream.dtype == dtype
        and (tmp_path / "out/train.bin").stat().st_size
        == stream.length * {"uint16": 2, "int32": 4}[dtype]
    )
    first = next(text for text in open_source(cfg.data) if not is_validation(text))
    _, ids = stream.read(*stream.documents(0, 1)[0][1:])
    assert Tokenizer(tmp_path).decode(ids.tolist()) == first and ids.max() == largest


def test_ids_beyond_a_tokenizers_are_no_text(tokenizer, byte_level):
    """As a model makes that has more rows."""
    for each in tokenizer, Tokenizer(byte_level):
        ids = each.encode(["the cat sat"])[0]
        assert each.decode([each.vocab_size, *ids, 10**6, -1]) == "the cat sat"


@pytest.mark.parametrize(
    "names",
    [["<|end_of_text|>", "</s>"], ["</s>", "<|endoftext|>"], ["<|endoftext|>", "<eos>"], ["<eos>"]],
    ids=str,
)
def test_eos_is_known_by_name_where_nothing_says_it(names, tmp_path):
    """The first of these that there is."""
    import tokenizers
    from tokenizers import models

    vocabulary = {"?": 0, **{name: 9 - i for i, name in enumerate(names)}}
    tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?")).save(
        str(tmp_path / "tokenizer.json")
    )
    assert Tokenizer(tmp_path).eos == [9]


@pytest.mark.parametrize(
    "settings, eos",
    [
        ({"eos_token": "<|begin_of_text|>"}, [0]),
        ({"eos_token": {"content": "<|end_of_text|>"}}, [1]),
        ({}, [1]),
    ],
)
def test_eos_is_the_familys(byte_level, settings, eos, tmp_path):
    shutil.copy(f"{byte_level}/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path / "tokenizer.json").eos == eos


def threads_while_encoding(path: str, text: str) -> int:
    """Threads of this process that a tokenizer starts."""
    before = len(os.listdir("/proc/self/task"))
    tokenizer = Tokenizer(path)
    has_ended = threading.Event()
    counts = []

    def watch() -> None:
        while not has_ended.wait(0.002):
            counts.append(len(os.listdir("/proc/self/task")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    tokenizer.encode([text] * 100)
    has_ended.set()
    watcher.join()
    return max(counts) - before - 1  # which watches


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_process_that_tokenizes_takes_one_core(byte_level, prepared):
    """Both libraries use all of them unless they are told: those of the ranks, too."""
    text = words(1, 4000)
    pool = _start_pool(1)
    for path in (byte_level, str(prepared / "tokenizer.model")):
        # sentencepiece's one thread is not the one that calls it
        assert pool.submit(threads_while_encoding, path, text).result() <= 1
    pool.shutdown()


def test_preparing_with_a_tokenizer_json(byte_level, corpus, tmp_path):
    shutil.copytree(byte_level, tmp_path / "hf")
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    folder = prepare_one(config_for(corpus, tmp_path, tokenizer=str(tmp_path / "hf")))
    assert {p.name for p in folder.glob("tokenizer*")} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    stream, found = open_stream(folder, "train", 320), Tokenizer(folder)
    first = next(
        text for text in open_source(config_for(corpus, tmp_path).data) if not is_validation(text)
    )
    _, start, stop = stream.documents(0, 1)[0]
    assert stream.read(start, stop)[1].tolist() == [0, *found.encode([first])[0], 1]


@pytest.mark.parametrize(
    "content, what", [("{}", "is no tokenizer.json that"), ('{"model": 3', "can read")]
)
def test_garbled_tokenizer_json(content, what, corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=what):
        Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="holds neither tokenizer.model nor tokenizer.json"):
        Tokenizer(tmp_path / "..")


def test_without_the_package_it_is_named(byte_level, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ConfigError, match="needs the package `tokenizers`: .* -m pip install tokenizers"
    ):
        Tokenizer(byte_level)


@pytest.mark.parametrize(
    "settings", [{"eos_token": 5}, {"eos_token": ["x"]}, {"eos_token": {"content": 7}}]
)
def test_eos_names_that_are_no_text_are_skipped(byte_level, settings, tmp_path):
    shutil.copy(f"{byte_level}/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path).eos == [1]
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="tokenizer_config.json beside it is no JSON object"):
        Tokenizer(tmp_path)


def test_dropout_is_off(byte_level, tmp_path):
    made = json.loads((pathlib.Path(byte_level) / "tokenizer.json").read_text())
    made["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert Tokenizer(tmp_path).encode([words(0, 90)]) == Tokenizer(byte_level).encode(
        [words(0, 90)]
    )


def test_a_text_is_neither_padded_nor_cut(byte_level, tmp_path):
    """As some tokenizer.json ask for."""
    import tokenizers

    made = tokenizers.Tokenizer.from_file(f"{byte_level}/tokenizer.json")
    made.enable_padding(length=64, pad_id=1)
    made.enable_truncation(128)
    made.save(str(tmp_path / "tokenizer.json"))
    texts = [words(0, 5), words(0, 900)]
    found = Tokenizer(tmp_path).encode(texts)
    assert (
        found == Tokenizer(byte_level).encode(texts) and len(found[0]) < 64 and len(found[1]) > 128
    )
    assert Tokenizer(tmp_path).bos == [0] and Tokenizer(tmp_path).eos == [1]


def test_bos_and_eos_of_a_tokenizer_that_does_not_know_the_letter_a(tmp_path, corpus):
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    made = tokenizers.Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1, "cat": 2, "?": 3}, unk_token="?")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert (Tokenizer(tmp_path).bos, Tokenizer(tmp_path).eos) == ([0], [1])
    # what stands around a text goes before
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "cat"}')
    assert Tokenizer(tmp_path).eos == [1]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["unk_token"] = "missing"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="its tokenizer fails on a text"):
        prepare_one(config_for(corpus, tmp_path, tokenizer=str(tmp_path / "tokenizer.json")))


def test_a_folder_with_llama_3s_two_files(byte_level, prepared, tmp_path):
    shutil.copy(f"{byte_level}/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's
    assert Tokenizer(tmp_path).bos == [0]
    shutil.copy(prepared / "tokenizer.model", tmp_path)  # sentencepiece's
    assert Tokenizer(tmp_path).bos == [1]


@needs_extra("huggingface")
def test_a_user_is_told_of_weights_trained_with_another_tokenizer(
    corpus, prepared, write_config, tmp_path
):
    folders = {}
    for name, content in (
        ("same", (prepared / "tokenizer.model").read_bytes()),
        ("other", b"another"),
        ("none", None),
    ):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        if content:
            (folders[name] / "tokenizer.model").write_bytes(content)

    def notes(**model) -> list[str]:
        data = {"source": str(corpus), "path": str(prepared)}
        if model:
            data["tokenizer"] = str(prepared)
        return open_dataset(config.load(str(write_config(model=model, data=data)))).notes

    assert notes() == [] == notes(init_from=str(folders["same"]))
    [told] = notes(init_from=str(folders["none"]))
    assert told.startswith(f"{folders['none']} has no tokenizer")
    [told] = notes(init_from=str(folders["other"]))
    assert told.startswith(f"{folders['other']} has another tokenizer than {prepared}")


@needs_extra("huggingface")
def test_the_tokenizer_of_the_weights_is_the_default(prepared, corpus, tmp_path):
    """As if it had been named, but for a run that was begun when it was not the default."""
    base = tmp_path / "base"
    base.mkdir()
    sections = tables(
        model={"init_from": str(base)},
        run={"output_dir": str(tmp_path / "outputs"), "name": "r"},
        data={"source": str(corpus), "path": str(prepared)},
    )

    def load() -> config.Config:
        return config.from_dict(sections, "test.toml")

    assert load().data.tokenizer is None  # the folder has none
    (base / "tokenizer.model").write_bytes((prepared / "tokenizer.model").read_bytes())
    named = {**sections, "data": {**sections["data"], "tokenizer": str(base)}}
    assert load() == config.from_dict(named, "test.toml")
    # the folder that was prepared with the same tokenizer, trained there, serves it as well
    assert open_dataset(load()).notes == []
    (base / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(ConfigError, match="was prepared with tokenizer = 'trained here'"):
        open_dataset(load())

    before = tmp_path / "outputs/r/config.toml"
    before.parent.mkdir(parents=True)
    before.write_text(f"[model]\ninit_from = '{base}'\n")
    assert load().data.tokenizer is None
    before.write_text(f"[model]\ninit_from = '{base}'\n[data]\ntokenizer = '{base}'\n")
    assert load().data.tokenizer == str(base)


@needs_extra("planner")
def test_an_epoch_is_unknown_until_the_tokenizer_is_there(corpus, write_config, tmp_path):
    from extras.planner.dry_run import samples_per_epoch

    data = {"source": str(corpus), "tokenizer": str(tmp_path / "yet to come.model")}
    assert samples_per_epoch(config.load(str(write_config(data=data)))) is None
