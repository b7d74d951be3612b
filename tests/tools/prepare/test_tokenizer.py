"""Tokenizers: lossless on any text, their BOS and EOS tokens, wrong files named; bytes of a text."""

import contextlib
import json
import pathlib
import random
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import config
from data.dataset import PreparedDataset
from data.folder import manifest_of
from tests.conftest import (
    config_for,
    needs_extra,
    prepare_one,
    refuses,
    sentencepiece_model,
    tables,
    words,
)
from tools.prepare.folders import create_folders
from tools.prepare.row_format import is_held_out
from tools.prepare.tokenizer import Tokenizer
from tools.prepare.tokenizer_training import train_tokenizer

TEXTS = [
    *("", " ", "  leading and trailing  ", "a\0b", "\r\n\r\n\t\ttabs", "\n\n\n", "x" * 100_000),
    "emoji 😀👩‍👩‍👧 and é, ﬁ, Å, 日本語",
    "▁a character that sentencepiece writes for a space ▁▁ here▁",
    *("\u200b\ufeff\u2028", "<s></s><unk><0x0A>", "<|begin_of_text|>in<|end_of_text|>"),
    "".join(map(chr, range(1, 0x300))),
]


def byte_level(folder: pathlib.Path, *special: str) -> Any:
    """Writes a tokenizer.json of the bytes, "th" and these special tokens."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def llama3(tmp_path_factory) -> pathlib.Path:
    """A folder with a tokenizer.json like Llama 3's: its post-processor adds BOS, EOS is known by its name."""
    from tokenizers import processors

    folder = tmp_path_factory.mktemp("llama3")
    tokenizer = byte_level(folder, "<|begin_of_text|>", "<|end_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 257)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def change(llama3, tmp_path) -> Callable[[Callable[[dict], Any]], pathlib.Path]:
    """A copy of `llama3` whose tokenizer.json a function has changed."""

    def changed(edit: Callable[[dict], Any]) -> pathlib.Path:
        content = json.loads((llama3 / "tokenizer.json").read_text())
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
def test_a_text_is_that_of_its_ids(kind, prepared, llama3, tmp_path):
    folder = {"trained here": prepared, "byte-level": llama3}.get(kind, tmp_path)
    if kind == "of another script":
        cyrillic = " ".join(map(chr, range(0x430, 0x450))) + "\n"
        (folder / "tokenizer.model").write_bytes(train_tokenizer([cyrillic * 20] * 20, 300))
    tokenizer = Tokenizer(folder)
    encoded = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    ids = {each for ids in encoded for each in ids}
    assert ids <= {*range(tokenizer.vocab_size)} - {*tokenizer.bos, *tokenizer.eos}
    # a model may have more rows than its tokenizer has entries
    assert tokenizer.decode([tokenizer.vocab_size, *encoded[2], 10**6, -1]) == TEXTS[2]


@pytest.mark.parametrize("text", ["the cat", " the  cat\n", "▁the▁", "a☃"])
def test_ids_of_a_model_that_adds_a_space_are_sentencepieces(text, tmp_path):
    """Llama 2's does: in front of a text, and of no part of it."""
    tokenizer = sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    assert tokenizer.encode([text]) == [tokenizer.model.encode(text)]


def test_settings_of_a_tokenizer_json_that_vary_ids_are_off(llama3, tmp_path):
    tokenizer = byte_level(tmp_path)
    tokenizer.enable_padding(length=64, pad_id=1)
    tokenizer.enable_truncation(128)
    tokenizer.model.dropout = 0.9
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [words(0, 5), words(0, 900)]
    assert Tokenizer(tmp_path).encode(texts) == Tokenizer(llama3).encode(texts)


# BOS, EOS and the vocabulary's size


@pytest.mark.parametrize(
    "options, bos, eos", [({}, [1], [2]), ({"bos_id": -1}, [], [2]), ({"eos_id": -1}, [1], [])]
)
def test_a_sentencepiece_model_may_lack_bos_or_eos(options, bos, eos, tmp_path):
    tokenizer = sentencepiece_model(tmp_path / "tokenizer.model", **options)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


NAMED = {"content": "<|begin_of_text|>"}
NO_NAME = 5


@pytest.mark.quick
@pytest.mark.parametrize("name, eos", [("<|begin_of_text|>", 257), (NAMED, 257), (NO_NAME, 258)])
def test_eos_is_the_one_that_the_settings_name(name, eos, llama3, tmp_path):
    shutil.copy(llama3 / "tokenizer.json", tmp_path)
    assert Tokenizer(tmp_path).eos == [258]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    assert Tokenizer(tmp_path).eos == [eos]
    assert Tokenizer(tmp_path / "tokenizer.json").bos == [257]


@pytest.mark.parametrize("first", range(4))
def test_eos_is_known_by_the_names_of_families(first, tmp_path):
    names = ["<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>"][first:]
    vocabulary = {"?": 0} | {name: 9 - i for i, name in enumerate(names)}
    assert Tokenizer(word_level(tmp_path, vocabulary)).eos == [9]


def test_bos_and_eos_of_a_tokenizer_that_does_not_know_the_letter_a(tmp_path):
    """What the post-processor adds precedes what the settings name."""
    from tokenizers import pre_tokenizers, processors

    vocabulary = {"<s>": 0, "</s>": 1, "cat": 2, "?": 3}
    special = [("<s>", 0), ("</s>", 1)]
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    parts = {"pre_tokenizer": pre_tokenizers.Whitespace(), "post_processor": template}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "cat"}')
    tokenizer = Tokenizer(word_level(tmp_path, vocabulary, **parts))
    assert (tokenizer.bos, tokenizer.eos) == ([0], [1])


@pytest.mark.parametrize("highest, dtype", [(65_535, "uint16"), (65_536, "int32")])
def test_a_vocabulary_with_holes_counts_by_its_highest_id(highest, dtype, change, corpus, tmp_path):
    """Those that two bytes do not hold take four."""
    folder = change(lambda content: content["model"]["vocab"].update(t=highest))
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == highest + 1 and tokenizer.decode([highest]) == "t"
    create_folders(config_for(corpus, tmp_path, tokenizer=str(folder)).data, 65_537)
    assert manifest_of(tmp_path / "out")["dtype"] == dtype


@pytest.mark.quick
@pytest.mark.parametrize("size, is_refused", [(319, True), (320, False), (400, False)])
def test_a_tokenizer_larger_than_the_model_is_refused(size, is_refused, corpus, prepared, tmp_path):
    expected = refuses("vocab_size = 319", "smaller than the tokenizer", "320 entries")
    with expected if is_refused else contextlib.nullcontext():
        create_folders(config_for(corpus, tmp_path, tokenizer=str(prepared)).data, size)


def test_a_tokenizer_that_drops_characters_is_reported(corpus, tmp_path, capsys):
    import tokenizers

    letters = {letter: i for i, letter in enumerate("acghtno")}
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(path))
    create_folders(config_for(corpus, tmp_path, tokenizer=str(path)).data, 320)
    assert "silently drops characters that are not in its vocab" in capsys.readouterr().err


# Which files


def test_of_two_tokenizers_the_one_that_the_model_was_trained_with_is_read(change, prepared):
    folder = change(lambda content: None)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's: Llama 3
    assert Tokenizer(folder).bos == [257]
    shutil.copy(prepared / "tokenizer.model", folder)  # sentencepiece's: Llama 2
    for rows, vocab_size in ((259, 259), (258, 320)):  # tokenizer.json's added ones have rows
        (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
        assert Tokenizer(folder).vocab_size == vocab_size
    change(lambda content: content.update(added_tokens=[]))
    assert Tokenizer(folder).vocab_size == 320


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\n"
NO_TOKENIZERS = [
    ("tokenizer.model", b"", "is no tokenizer .*begins with b''"),
    ("tokenizer.model", b"\0" * 100, r"is no tokenizer .*begins with b'\\x00"),
    ("tokenizer.model", b"<!DOCTYPE html><html>", "an HTML page.* b'<!DOCTYPE html"),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n", "a tiktoken vocabulary.* b'IQ== 0"),
    ("tokenizer.model", POINTER, "is no tokenizer .*begins with b'version https://git-lfs"),
    ("tokenizer.json", b"{}", "is no tokenizer.json .*can read"),
    ("tokenizer.json", b'{"model": 3', "is no tokenizer.json .*can read"),
    ("notes.txt", b"", "holds neither tokenizer.model nor tokenizer.json"),
]


@pytest.mark.quick
@pytest.mark.parametrize("name, content, problem", NO_TOKENIZERS)
def test_a_file_that_is_no_tokenizer_is_refused(name, content, problem, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refuses(str(tmp_path), problem):
        Tokenizer(tmp_path)


@needs_extra("huggingface")
def test_the_tokenizer_of_the_weights_is_the_default(prepared, tmp_path):
    """But for a run that was begun when they had none."""
    run = {"output_dir": str(tmp_path), "name": "r"}
    sections = tables(model={"init_from": str(tmp_path)}, run=run)
    assert config.from_dict(sections, "test.toml").data.tokenizer is None
    shutil.copy(prepared / "tokenizer.model", tmp_path)
    assert config.from_dict(sections, "test.toml").data.tokenizer == str(tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").write_text(f"[model]\ninit_from = '{tmp_path}'\n")
    assert config.from_dict(sections, "test.toml").data.tokenizer is None


# Training one


@pytest.mark.parametrize("asked, name, beyond", [(5000, "largest", 1), (200, "smallest", -1)])
def test_the_vocabulary_size_that_an_error_names_works(asked, name, beyond):
    texts = [words(0, 500)]
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


# What evaluations divide by


def write_texts(folder: pathlib.Path, texts: Sequence[str]) -> pathlib.Path:
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(rows))
    return folder / "a.jsonl"


JOINS_BLANKS = {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"}


@pytest.mark.quick
@pytest.mark.parametrize("options", [{}, JOINS_BLANKS, {"byte_fallback": False}], ids=str)
def test_bytes_of_the_validation_text_do_not_depend_on_the_tokenizer(options, tmp_path):
    draw = random.Random(0)
    alphabet = "ab  \n\u00e9\u4e2d\U0001f600\u2581\ufffd"  # characters of one to four bytes
    texts = ["".join(draw.choices(alphabet, k=draw.randint(1, 60))) for _ in range(600)]
    sentencepiece_model(tmp_path / "t.model", **options)
    path = write_texts(tmp_path, texts)
    cfg = config_for(path, tmp_path, tokenizer=str(tmp_path / "t.model"))
    prepare_one(cfg)
    dataset = PreparedDataset(cfg)
    (samples,) = dataset.validation()
    held_out = "".join(filter(is_held_out, texts))
    assert dataset.text_bytes(0, len(samples)) == len(held_out.encode())


@pytest.mark.quick
@pytest.mark.parametrize("text, is_warned", [("the cat sat ", False), ("the cat 中 ", True)])
def test_share_of_unknown_tokens_is_logged_and_from_one_percent_on_warned_of(
    text, is_warned, tmp_path, capsys
):
    texts = [f"{text * 20}{'中' * (number % 2)}" for number in range(100)]
    model = sentencepiece_model(tmp_path / "t.model", byte_fallback=False).model
    ids = [token for text in texts for token in (1, *model.encode(text), 2)]
    unknown = ids.count(model.unk_id())
    cfg = config_for(write_texts(tmp_path, texts), tmp_path, tokenizer=str(tmp_path / "t.model"))
    assert manifest_of(prepare_one(cfg))["unknown"] == unknown
    error = capsys.readouterr().err
    assert f"{unknown / len(ids):.2%} of them are <unk>" in error
    assert ("warning: " in error) == (unknown / len(ids) >= 0.01) == is_warned
