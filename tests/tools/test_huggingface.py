"""Hugging Face folders: exports against transformers, imports, tokenizers, and what is refused."""

import json
import os
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.__main__ import main as checkpoint_tool
from checkpoint.load import restore
from model import llama
from tests.conftest import (
    REPO,
    content,
    make_config,
    run_tool,
    sentencepiece_model,
    token_ids,
    train_run,
    words,
)
from tests.distributed import run_on_ranks
from tests.extras.huggingface.conftest import in_transformers, write_folder
from tests.model.test_llama import SCALING
from tests.tools.prepare.test_tokenizer import word_level
from tools import huggingface, transformers_tokenizer
from tools.prepare.tokenizer import Tokenizer
from tools.transformers_tokenizer import read_sentencepiece

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.early
MODELS: dict[str, dict] = {
    "llama": {},
    "llama3.1": {"rope_scaling": SCALING, "rope_theta": 1e4, "n_kv_heads": 1},
    "qwen3": {"qk_norm": True, "head_dim": 20, "tie_embeddings": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepared) -> pathlib.Path:
    """Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("hf") / "llama", prepared)


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory) -> pathlib.Path:
    """The folder's. Not to be changed."""
    path = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert run("import", folder, path) == 0
    return path


def run(*words: object) -> int:
    return run_tool(huggingface.main, *words)


# Weights and config.json


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_give_transformers_the_same_model(tmp_path, prepared, name, dtype):
    source = write_folder(tmp_path / "hf", prepared, **MODELS[name])
    assert run("import", source, tmp_path / "checkpoint") == 0
    assert checkpoint_tool(["verify", str(tmp_path / "checkpoint")]) == 0
    assert run("export", tmp_path / "checkpoint", tmp_path / "out", "--dtype", dtype) == 0
    ours = in_transformers(tmp_path / "out")
    theirs = in_transformers(source)
    assert type(ours) is type(theirs)
    weights = ours.state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(weights.pop(key), value.to(getattr(torch, dtype))), key
    assert not weights
    for key in ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "head_dim"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    ids = ours.generation_config
    assert ids and (ids.bos_token_id, ids.eos_token_id) == (1, 2)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"dp_shard": 1, "dp_replicate": 2}], ids=str)
def test_export_of_a_run_computes_what_the_run_does(tmp_path, corpus, prepared, parallel):
    sections = {"run": {"name": "r", "output_dir": str(tmp_path)}, "checkpoint": {}}
    data = {"source": str(corpus), "path": str(prepared)}
    cfg = make_config(**sections, data=data, parallel=parallel)
    run_on_ranks(2, lambda world: train_run(cfg, world))
    assert run("export", tmp_path / "r", tmp_path / "out") == 0
    tokens = token_ids(2, 32)
    model = llama.Llama(cfg.model)
    restore(tmp_path / "r/checkpoints/step-00000004", model, None)
    with torch.no_grad():
        expected = model(tokens)
        logits = in_transformers(tmp_path / "out")(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_weights_in_several_files_are_those_of_one(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "one") == 0
    assert run("export", checkpoint, tmp_path / "many", "--shard-gib", 0.00003) == 0
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 3
    ours, theirs = (in_transformers(tmp_path / name).state_dict() for name in ("many", "one"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# The output folder


def test_a_name_that_a_run_would_take_for_its_checkpoint_is_refused(folder, checkpoint, tmp_path):
    out = tmp_path / "step-00000007"
    for command in (["export", checkpoint], ["import", folder]):
        assert run(*command, out) == 2 and not out.exists()


def test_nothing_is_overwritten_and_a_kill_leaves_nothing_that_looks_complete(
    folder, checkpoint, tmp_path, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / ".out.tmp/out").mkdir(parents=True)
    (tmp_path / ".out.tmp/out/killed.safetensors").touch()
    assert run("export", checkpoint, out) == 0  # an empty folder is as good as none
    before = content(out)
    assert out / "killed.safetensors" not in before
    for command in (["export", checkpoint], ["import", folder]):
        assert run(*command, out) == 2 and "nothing is overwritten" in capsys.readouterr().err
    with huggingface.published(tmp_path / "twice"):
        assert run("export", checkpoint, tmp_path / "twice") == 2
        assert "is being written by another process" in capsys.readouterr().err
    assert content(out) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "twice"]


def corrupt(copy: pathlib.Path) -> None:
    path = next(copy.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def not_finite(copy: pathlib.Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, copy / "model.safetensors")


@pytest.mark.parametrize(
    "command, spoil, problem",
    [
        ("export", corrupt, "SHA-256"),
        ("import", not_finite, "model.norm.weight holds values that are not finite"),
        ("export", None, "not transformers' LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_converted_is_named_and_nothing_is_written(
    folder, checkpoint, tmp_path, monkeypatch, capsys, command, spoil, problem
):
    """A folder is spoilt, or the model is a fork's, without RoPE."""
    copy = shutil.copytree(checkpoint if command == "export" else folder, tmp_path / "copy")
    if spoil:
        spoil(copy)
    else:
        monkeypatch.setattr(llama, "apply_rope", lambda x, cos, sin: x)
    assert run(command, copy, tmp_path / "out") == 2
    assert problem in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["copy"]


# The tokenizer


def test_tokenizer_json_alone_and_several_eos_tokens_are_kept(folder, tmp_path):
    """As Llama 3 Instruct has them, whose tokenizer names one EOS token."""
    copy = shutil.copytree(folder, tmp_path / "hf")
    (copy / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 7]}')
    (copy / "tokenizer.model").unlink()
    word_level(copy, {"?": 0, "the cat": 1})
    assert run("import", copy, tmp_path / "checkpoint") == 0
    assert run("export", tmp_path / "checkpoint", tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["eos_token_id"] == [2, 7]
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the cat")["input_ids"]
    ours = Tokenizer(copy / "tokenizer.json")
    assert ids == ours.bos + ours.encode(["the cat"])[0]


def converted(path: pathlib.Path) -> Any:
    """transformers' tokenizer of an export with this tokenizer.model."""
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    huggingface.write_tokenizer(out, path.parent)
    return transformers.AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("options", [{}, {"bos_id": -1, "eos_id": -1}], ids=str)
def test_transformers_gives_the_ids_of_sentencepiece(tmp_path, options):
    """Also without BOS and EOS."""
    path = tmp_path / "tokenizer.model"
    ours = sentencepiece_model(path, add_dummy_prefix=False, **options)
    theirs = converted(path)
    texts = [words(1, 500), "  two", "", "\n", " " * 37, "I 'm . ", "häßlich \u2603 \U0001d518"]
    for text in (*texts, (REPO / "train.py").read_text()):
        assert theirs(text)["input_ids"] == ours.bos + ours.encode([text])[0]
        assert theirs.decode(ours.encode([text])[0]) == text
    special = [theirs.bos_token_id, theirs.eos_token_id]
    assert [i for i in special if i is not None] == ours.bos + ours.eos


def edited(path: pathlib.Path, options: dict, change: Callable | None = None) -> pathlib.Path:
    """A sentencepiece model that another program has changed."""
    sentencepiece_model(path, **{"add_dummy_prefix": False, **options})
    if change:
        model = read_sentencepiece(path)
        change(model)
        path.write_bytes(model.SerializeToString())
    return path


def is_different(path: pathlib.Path) -> bool:
    """Whether sentencepiece and transformers give other ids, or other text, for one of these texts."""
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs = sentencepiece.SentencePieceProcessor(str(path))
    ours = converted(path)
    texts = [words(1, 99), "The  CAT", "cat[X]sat", "  mat ", "\u24b6", "cacatatat", "a  b"]
    texts += ["".join(random.Random(i).choices("catherond ", k=20)) for i in range(200)]
    for text in texts:
        ids = theirs.encode(text)
        encoded = ours(text, add_special_tokens=False)["input_ids"]
        if encoded != ids or ours.decode(ids).replace("<unk>", " \u2047 ") != theirs.decode(ids):
            return True
    return False


def unused_entries(model: Any) -> None:
    for entry in model.pieces:
        if entry.piece in ("ca", "at"):
            entry.type = model.SentencePiece.UNUSED


def equal_scores(model: Any) -> None:
    for entry in model.pieces:
        entry.score = -1


def lacks_a_character(model: Any) -> None:
    next(entry for entry in model.pieces if entry.piece == "c").piece = "\u4e00"


def spaces_as_they_are(model: Any) -> None:
    model.normalizer_spec.escape_whitespaces = False


@pytest.mark.parametrize(
    "reason, options, change",
    [
        ("normalized text", {"normalization_rule_name": "nmt_nfkc_cf"}, None),
        ("remove_extra_whitespaces", {"remove_extra_whitespaces": True}, None),
        ("model_type UNIGRAM", {"model_type": "unigram", "vocab_size": 280}, None),
        ("user-defined symbols with spaces", {"user_defined_symbols": ["  "]}, None),
        ("add_dummy_prefix", {"add_dummy_prefix": True}, None),
        ("escape_whitespaces = false", {}, spaces_as_they_are),
        ("entries of type UNUSED", {}, unused_entries),
        ("entries with equal scores", {}, equal_scores),
        ("entries with characters that are no entries", {}, lacks_a_character),
    ],
)
def test_tokenizer_that_transformers_cannot_read_is_copied_alone(
    tmp_path, capsys, monkeypatch, reason, options, change
):
    path = edited(tmp_path / "tokenizer.model", options, change)
    (tmp_path / "out").mkdir()
    huggingface.write_tokenizer(tmp_path / "out", tmp_path)
    assert f"cannot express {reason}" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["tokenizer.model"]
    monkeypatch.setattr(transformers_tokenizer, "inexpressible", lambda model: [])
    assert is_different(path)


@pytest.mark.parametrize(
    "options",
    [
        {"split_digits": True, "split_by_whitespace": False, "split_by_unicode_script": False},
        {"user_defined_symbols": ["ca", "cat", "[X]", "\n"]},
        {"treat_whitespace_as_suffix": True},
        {"control_symbols": ["<c>"], "pad_id": 3},
        {"bos_id": 5, "eos_id": 6},
    ],
    ids=str,
)
def test_what_shapes_the_vocabulary_alone_is_expressed(tmp_path, options):
    assert not is_different(edited(tmp_path / "tokenizer.model", options))
