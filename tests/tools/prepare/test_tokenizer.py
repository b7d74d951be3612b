"""Tokenizers: lossless on any text, their BOS and EOS tokens, wrong files named."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import config
from data.folder import manifest_of
from tests.conftest import make_config, needs_extra, refuses, sentencepiece_model, tables, words
from tools.prepare.folders import create_folders
from tools.prepare.tokenizer import Tokenizer
from tools.prepare.tokenizer_training import train_tokenizer

TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "a\0b",
    "\r\n\r\n\t\ttabs",
    "\n\n\n",
    "emoji 😀👩‍👩‍👧 and é, ﬁ, Å, 日本語",
    "▁a character that sentencepiece writes for a space ▁▁ here▁",
    "\u200b\ufeff\u2028",
    "x" * 100_000,
    "<s></s><unk><0x0A>",
    "<|begin_of_text|>in<|end_of_text|>",
    "".join(map(chr, range(1, 0x300))),
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> pathlib.Path:
    """A folder with a byte-level tokenizer.json like Llama 3's: its post-processor adds BOS (id 0),
    EOS (id 1) is known by its name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(i, 50) for i in range(50)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    folder = tmp_path_factory.mktemp("byte-level")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def change(byte_level, tmp_path) -> Callable[[Callable[[dict], Any]], pathlib.Path]:
    """A copy of `byte_level` whose tokenizer.json a function has changed."""

    def changed(edit: Callable[[dict], Any]) -> pathlib.Path:
        content = json.loads((byte_level / "tokenizer.json").read_text())
        edit(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tmp_path

    return changed


def word_level(path: pathlib.Path, vocabulary: dict[str, int], **parts: object) -> pathlib.Path:
    """Writes a tokenizer.json whose words are tokens. parts: its pre_tokenizer, normalizer, ..."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


# Ids and text


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["trained here", "of another script", "byte-level"])
def test_a_text_is_that_of_its_ids(kind, prepared, byte_level, tmp_path):
    folder = {"trained here": prepared, "byte-level": byte_level}.get(kind, tmp_path)
    if kind == "of another script":
        cyrillic = " ".join(map(chr, range(0x430, 0x450))) + "\n"
        (folder / "tokenizer.model").write_bytes(train_tokenizer([cyrillic * 20] * 20, 300))
    tokenizer = Tokenizer(folder)
    encoded = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    ids = {each for ids in encoded for each in ids}
    assert ids <= {*range(tokenizer.vocab_size)} - {*tokenizer.bos, *tokenizer.eos}


@pytest.mark.quick
def test_ids_outside_the_vocabulary_are_no_text(prepared, byte_level):
    """A model may have more rows than its tokenizer has entries."""
    for folder in (prepared, byte_level):
        tokenizer = Tokenizer(folder)
        (ids,) = tokenizer.encode(["the cat sat"])
        assert tokenizer.decode([tokenizer.vocab_size, *ids, 10**6, -1]) == "the cat sat"


@pytest.mark.parametrize("text", ["the cat", " the  cat\n", "▁the▁", "a☃"])
def test_ids_of_a_model_that_adds_a_space_are_sentencepieces(text, tmp_path):
    """Llama 2's does: in front of a text, and of no part of it."""
    tokenizer = sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    assert tokenizer.encode([text]) == [tokenizer.model.encode(text)]


def test_settings_of_a_tokenizer_json_that_vary_ids_are_off(byte_level, tmp_path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    tokenizer.enable_padding(length=64, pad_id=1)
    tokenizer.enable_truncation(128)
    tokenizer.model.dropout = 0.9
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [words(0, 5), words(0, 900)]
    assert Tokenizer(tmp_path).encode(texts) == Tokenizer(byte_level).encode(texts)


# BOS, EOS and the vocabulary's size


@pytest.mark.parametrize(
    "options, bos, eos", [({}, [1], [2]), ({"bos_id": -1}, [], [2]), ({"eos_id": -1}, [1], [])]
)
def test_a_sentencepiece_model_may_lack_bos_or_eos(options, bos, eos, tmp_path):
    tokenizer = sentencepiece_model(tmp_path / "tokenizer.model", **options)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings, eos",
    [
        (None, [1]),
        ({"eos_token": "<|begin_of_text|>"}, [0]),
        ({"eos_token": {"content": "<|end_of_text|>"}}, [1]),
        ({"eos_token": 5}, [1]),  # no name
    ],
)
def test_eos_is_the_one_that_the_settings_name(settings, eos, byte_level, tmp_path):
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path).eos == eos
    assert Tokenizer(tmp_path / "tokenizer.json").bos == [0]


@pytest.mark.parametrize(
    "names",
    [["<|end_of_text|>", "</s>"], ["</s>", "<|endoftext|>"], ["<|endoftext|>", "<eos>"], ["<eos>"]],
)
def test_eos_is_known_by_the_names_of_families(names, tmp_path):
    vocabulary = {"?": 0} | {name: 9 - i for i, name in enumerate(names)}
    assert Tokenizer(word_level(tmp_path, vocabulary)).eos == [9]


def test_bos_and_eos_of_a_tokenizer_that_does_not_know_the_letter_a(tmp_path):
    from tokenizers import pre_tokenizers, processors

    template = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    word_level(
        tmp_path,
        {"<s>": 0, "</s>": 1, "cat": 2, "?": 3},
        pre_tokenizer=pre_tokenizers.Whitespace(),
        post_processor=template,
    )
    # what the post-processor adds precedes what the settings name
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "cat"}')
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eos) == ([0], [1])


def test_a_vocabulary_with_holes_counts_by_its_highest_id(change, byte_level):
    folder = change(lambda content: content["model"]["vocab"].update(t=399))
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == 400 and tokenizer.decode([399]) == "t"


@pytest.mark.parametrize("highest, dtype", [(65_535, "uint16"), (65_536, "int32")])
def test_ids_that_two_bytes_do_not_hold_take_four(highest, dtype, change, corpus, tmp_path):
    folder = change(lambda content: content["model"]["vocab"].update(t=highest))
    data = {"source": str(corpus), "path": str(tmp_path / "out"), "tokenizer": str(folder)}
    create_folders(make_config(data=data).data, 65_537)
    assert manifest_of(tmp_path / "out")["dtype"] == dtype


@pytest.mark.quick
@pytest.mark.parametrize("rows, is_refused", [(319, True), (320, False), (400, False)])
def test_a_tokenizer_larger_than_the_model_is_refused(rows, is_refused, corpus, prepared, tmp_path):
    data = {"source": str(corpus), "path": str(tmp_path / "out"), "tokenizer": str(prepared)}
    cfg = make_config(model={"vocab_size": rows}, data=data)
    expected = refuses("vocab_size = 319", "smaller than the tokenizer", "320 entries")
    with expected if is_refused else contextlib.nullcontext():
        create_folders(cfg.data, cfg.model.vocab_size)


def test_a_tokenizer_that_drops_characters_is_reported(corpus, tmp_path, capsys):
    from tokenizers import Tokenizer as Fast
    from tokenizers import models

    letters = {letter: i for i, letter in enumerate("acghtno")}
    tmp_path.joinpath("few").mkdir()
    Fast(models.BPE(letters, [])).save(str(tmp_path / "few/tokenizer.json"))
    data = {
        "source": str(corpus),
        "path": str(tmp_path / "out"),
        "tokenizer": str(tmp_path / "few"),
    }
    create_folders(make_config(data=data).data, 320)
    assert "few: silently drops characters that are not in its vocab" in capsys.readouterr().err


# Which files


def test_of_a_folder_with_two_tokenizers_the_one_that_the_model_was_trained_with_is_read(
    byte_level, prepared, tmp_path
):
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's: Llama 3
    assert Tokenizer(tmp_path).bos == [0]
    shutil.copy(prepared / "tokenizer.model", tmp_path)  # sentencepiece's: Llama 2
    assert Tokenizer(tmp_path).bos == [1]
    # a fine-tune has added tokens to tokenizer.json, which its config.json counts
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 290, "content": "<new>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"vocab_size": 291}')
    assert Tokenizer(tmp_path).vocab_size == 291
    (tmp_path / "config.json").write_text('{"vocab_size": 290}')  # a padding token alone
    assert Tokenizer(tmp_path).bos == [1]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\n"


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("tokenizer.model", b"", ["is no tokenizer", "begins with b''"]),
        ("tokenizer.model", b"\0" * 100, ["is no tokenizer", r"begins with b'\\x00"]),
        ("tokenizer.model", b"<!DOCTYPE html><html>", ["an HTML page", "b'<!DOCTYPE html"]),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", ["a tiktoken vocabulary", "b'IQ== 0"]),
        ("tokenizer.model", POINTER, ["is no tokenizer", "begins with b'version https://git-lfs"]),
        ("tokenizer.json", b"{}", ["is no tokenizer.json", "can read"]),
        ("tokenizer.json", b'{"model": 3', ["is no tokenizer.json", "can read"]),
        ("notes.txt", b"", ["holds neither tokenizer.model nor tokenizer.json"]),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(name, content, expected, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with refuses("a folder", *expected):
        Tokenizer(folder)


@needs_extra("huggingface")
def test_the_tokenizer_of_the_weights_is_the_default(prepared, tmp_path):
    """But for a run that was begun when they had none."""
    base = tmp_path / "base"
    base.mkdir()
    run = {"output_dir": str(tmp_path / "outputs"), "name": "r"}
    sections = tables(model={"init_from": str(base)}, run=run)
    assert config.from_dict(sections, "test.toml").data.tokenizer is None
    shutil.copy(prepared / "tokenizer.model", base)
    assert config.from_dict(sections, "test.toml").data.tokenizer == str(base)
    begun = tmp_path / "outputs/r/config.toml"
    begun.parent.mkdir(parents=True)
    begun.write_text(f"[model]\ninit_from = '{base}'\n")
    assert config.from_dict(sections, "test.toml").data.tokenizer is None


# Training one


def test_the_vocabulary_size_that_an_error_names_works():
    texts = [words(0, 500)]
    for asked, name, beyond in ((5000, "largest", 1), (200, "smallest", -1)):
        with refuses(f"{name} that works") as refused:
            train_tokenizer(texts, asked)
        size = int(str(refused.value).rpartition("=")[2])
        train_tokenizer(texts, size)
        with refuses(f"vocab_size = {size + beyond}: .*--model.vocab_size={size}"):
            train_tokenizer(texts, size + beyond)


def test_indentation_and_a_line_end_are_a_token_each(tmp_path):
    """Of code, most tokens would be spaces else."""
    texts = [f"def f{i}():\n        return {i}\n" for i in range(200)]
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer(texts, 300))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.model.encode("        ", out_type=str) == ["\u2581" * 8]
    assert len(tokenizer.encode(["\n"])[0]) == 1


def test_a_line_of_any_length_is_trained_on(tmp_path):
    """sentencepiece drops long ones silently, and cannot read a null character."""
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer([words(0, 30_000), "a\0b"], 300))
    (ids,) = Tokenizer(tmp_path).encode(["under the mat"])
    assert len(ids) < 8
