"""Tokenizers: lossless on any text, their BOS and EOS tokens; bytes of a text."""

import json
import pathlib
import shutil
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
    """A tokenizer.json like Llama 3's: its post-processor adds BOS, EOS is known by its name."""
    from tokenizers import processors

    folder = tmp_path_factory.mktemp("llama3")
    tokenizer = byte_level(folder, "<|begin_of_text|>", "<|end_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 257)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def word_level(path: pathlib.Path, vocabulary: dict[str, int]) -> pathlib.Path:
    """Writes a tokenizer.json whose words are tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
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
    "options, bos, eos", [({"bos_id": -1}, [], [2]), ({"eos_id": -1}, [1], [])]
)
def test_a_sentencepiece_model_may_lack_bos_or_eos(options, bos, eos, tmp_path):
    tokenizer = sentencepiece_model(tmp_path / "tokenizer.model", **options)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["<|begin_of_text|>", {"content": "<|begin_of_text|>"}], ids=str)
def test_eos_is_the_one_that_the_settings_name(name, llama3, tmp_path):
    shutil.copy(llama3 / "tokenizer.json", tmp_path)
    assert Tokenizer(tmp_path).eos == [258]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    assert Tokenizer(tmp_path).eos == Tokenizer(tmp_path / "tokenizer.json").bos == [257]


@pytest.mark.parametrize("first", range(4))
def test_eos_is_known_by_the_names_of_families(first, tmp_path):
    names = ["<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>"][first:]
    vocabulary = {"?": 0} | {name: 9 - i for i, name in enumerate(names)}
    assert Tokenizer(word_level(tmp_path, vocabulary)).eos == [9]


def test_a_tokenizer_that_drops_characters_is_reported(corpus, tmp_path, capsys):
    import tokenizers

    letters = {letter: i for i, letter in enumerate("acghtno")}
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(path))
    create_folders(config_for(corpus, tmp_path, tokenizer=str(path)).data, 320)
    assert "silently drops characters" in capsys.readouterr().err


def test_eos_of_the_post_processor_precedes_that_of_the_settings(llama3, tmp_path):
    content = json.loads((llama3 / "tokenizer.json").read_text())
    template = content["post_processor"]["single"]
    template.append(template[0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    assert Tokenizer(tmp_path).eos == [257]


def test_of_two_tokenizers_the_one_that_the_model_was_trained_with_is_read(
    llama3, prepared, tmp_path
):
    shutil.copy(llama3 / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's: Llama 3
    assert Tokenizer(tmp_path).bos == [257]
    shutil.copy(prepared / "tokenizer.model", tmp_path)  # sentencepiece's: Llama 2
    for rows, vocab_size in ((259, 259), (258, 320)):  # tokenizer.json's added ones have rows
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows}))
        assert Tokenizer(tmp_path).vocab_size == vocab_size


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


def test_the_vocabulary_size_that_an_error_names_works():
    texts = [words(0, 500)]
    with refuses("the largest that works: --model.vocab_size=") as refused:
        train_tokenizer(texts, 5000)
    size = int(str(refused.value).rpartition("=")[2])
    train_tokenizer(texts, size)
    with refuses(f"vocab_size = {size + 1}: .*--model.vocab_size={size}"):
        train_tokenizer(texts, size + 1)


def test_a_line_of_any_length_is_trained_on(tmp_path):
    """sentencepiece drops long ones silently, and cannot read a null character."""
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer([words(0, 30_000), "a\0b"], 300))
    (ids,) = Tokenizer(tmp_path).encode(["under the mat"])
    assert len(ids) < 8


# What evaluations divide by


def configured(folder: pathlib.Path, texts: list[str], **tokenizer: Any) -> config.Config:
    """Of a run on these texts with a tokenizer that others trained."""
    sentencepiece_model(folder / "t.model", **tokenizer)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return config_for(folder / "a.jsonl", folder, tokenizer=str(folder / "t.model"))


@pytest.mark.quick
def test_bytes_of_the_validation_text_are_those_before_normalization(tmp_path):
    texts = [f" a  {i}\n\n \u00e9\u4e2d\U0001f600\u2581\ufb01 " for i in range(600)]
    options = {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"}
    cfg = configured(tmp_path, texts, **options)
    prepare_one(cfg)
    dataset = PreparedDataset(cfg)
    (samples,) = dataset.validation()
    held_out = "".join(filter(is_held_out, texts))
    assert dataset.text_bytes(0, len(samples)) == len(held_out.encode()) > 100


@pytest.mark.quick
@pytest.mark.parametrize("text, is_warned", [("the cat sat ", False), ("the cat 中 ", True)])
def test_share_of_unknown_tokens_is_logged_and_from_one_percent_on_warned_of(
    text, is_warned, tmp_path, capsys
):
    texts = [f"{text * 20}{'中' * (number % 2)}" for number in range(100)]
    cfg = configured(tmp_path, texts, byte_fallback=False)
    unknown = "".join(texts).count("中")
    assert manifest_of(prepare_one(cfg))["unknown"] == unknown
    error = capsys.readouterr().err
    assert "% of them are <unk>" in error and ("warning: " in error) == is_warned
