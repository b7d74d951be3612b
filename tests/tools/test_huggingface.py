"""Hugging Face folders: exports against transformers, imports, tokenizers, and what is refused."""

import json
import os
import pathlib
import random
import shutil
import sys
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
    make_config,
    refuses,
    run_tool,
    sentencepiece_model,
    token_ids,
    train_run,
    words,
)
from tests.distributed import distributed, run_on_ranks
from tests.tools.prepare.test_tokenizer import word_level
from tools import huggingface, transformers_tokenizer
from tools.prepare.tokenizer import Tokenizer
from tools.transformers_tokenizer import read_sentencepiece

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.early

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
MODELS: dict[str, dict] = {
    "llama": {},
    "llama3.1": {"rope_parameters": LLAMA3},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True},
}


def write_folder(folder: pathlib.Path, tokenizer: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A model with random weights, as transformers saves it."""
    settings = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rope_parameters": PLAIN,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    torch.manual_seed(0)
    cfg = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(cfg, dtype=torch.float32)
    for p in model.parameters():
        if p.ndim == 1:  # tells one norm from another
            torch.nn.init.normal_(p, 1.0, 0.2)
    model.save_pretrained(folder)
    shutil.copy(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepared) -> pathlib.Path:
    """Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("hf") / "llama", prepared / "tokenizer.model")


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory) -> pathlib.Path:
    """The folder's. Not to be changed."""
    path = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert run("import", folder, path) == 0
    return path


def run(*words: object) -> int:
    return run_tool(huggingface.main, *words)


def in_transformers(folder: pathlib.Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Weights and config.json


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_give_transformers_the_same_model(tmp_path, prepared, name, dtype):
    source = write_folder(tmp_path / "hf", prepared / "tokenizer.model", **MODELS[name])
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
    generation = ours.generation_config
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)


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


def test_files_are_no_larger_than_asked(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "one") == 0
    assert run("export", checkpoint, tmp_path / "many", "--shard-gib", 0.00003) == 0
    whole = load_file(tmp_path / "one/model.safetensors")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert len({*index["weight_map"].values()}) > 3
    for name in {*index["weight_map"].values()}:
        tensors = load_file(tmp_path / "many" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == {*tensors}
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 0.00003 * 2**30
        assert all(torch.equal(whole[key], value) for key, value in tensors.items())


@pytest.mark.quick
def test_model_of_a_fork_is_not_exported(checkpoint, tmp_path, monkeypatch, capsys):
    def relu2(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x).relu().square() * self.up_proj(x))

    monkeypatch.setattr(llama.FeedForward, "forward", relu2)
    assert run("export", checkpoint, tmp_path / "out") == 2
    assert "not transformers' LlamaForCausalLM" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


# The output folder


def test_wrong_calls_write_nothing(folder, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for out, *options in (["out", "--shard-gib", "nan"], ["."], ["/"], ["step-00000007"]):
        assert run("export", checkpoint, out, *options) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert run("import", folder, "step-00000007") == 2
    assert run("export", tmp_path, "out") == 2  # no checkpoint
    assert not [*tmp_path.iterdir()]


def test_nothing_is_overwritten_and_a_kill_leaves_nothing_that_looks_complete(
    folder, checkpoint, tmp_path, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / ".out.tmp/out").mkdir(parents=True)
    (tmp_path / ".out.tmp/out/killed.safetensors").touch()
    assert run("export", checkpoint, out) == 0  # an empty folder is as good as none
    before = contents(out)
    assert "killed.safetensors" not in before
    for command in (["export", checkpoint], ["import", folder]):
        assert run(*command, out) == 2 and "nothing is overwritten" in capsys.readouterr().err
    with huggingface.published(tmp_path / "twice"):
        assert run("export", checkpoint, tmp_path / "twice") == 2
        assert "is being written by another process" in capsys.readouterr().err
    assert contents(out) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "twice"]


def test_corrupt_checkpoint_is_not_exported(checkpoint, tmp_path, capsys):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    path = next(copy.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert run("export", copy, tmp_path / "out") == 2
    assert "SHA-256" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["safetensors.torch", "google.protobuf.message"])
def test_missing_package_is_one_line(checkpoint, tmp_path, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert run("export", checkpoint, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "-m pip install" in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_weights_that_are_not_finite_are_not_imported(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "hf")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    assert run("import", copy, tmp_path / "out") == 2
    assert "model.norm.weight holds values that are not finite" in capsys.readouterr().err


def resident_mib(field: str) -> float:
    """VmRSS: now; VmHWM: the most since it was last reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


@distributed(ranks=1)
def test_memory_is_that_of_a_file_and_a_tensor(world, folder, tmp_path):
    run("import", folder, tmp_path / "small")  # loads code
    tokenizer = folder / "tokenizer.model"
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048}
    write_folder(tmp_path / "hf", tokenizer, **sizes, head_dim=192, vocab_size=4096)
    total = (tmp_path / "hf/model.safetensors").stat().st_size / 2**20
    peaks = []
    for command in (["import", "hf", "in"], ["export", "in", "out", "--shard-gib", "0.04"]):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = resident_mib("VmRSS")
        assert run(command[0], tmp_path / command[1], tmp_path / command[2], *command[3:]) == 0
        peaks.append(resident_mib("VmHWM") - before)
    assert total > 300 and max(peaks) < 0.6 * total, (peaks, total)


# The tokenizer


def test_several_eos_tokens_are_kept(folder, tmp_path):
    """As Llama 3 Instruct has them, whose tokenizer names one."""
    copy = shutil.copytree(folder, tmp_path / "hf")
    (copy / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 7]}')
    assert run("import", copy, tmp_path / "checkpoint") == 0
    assert run("export", tmp_path / "checkpoint", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [2, 7]


def test_tokenizer_json_alone_is_copied(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "hf")
    (copy / "tokenizer.model").unlink()
    word_level(copy, {"?": 0, "the cat": 1})
    assert run("import", copy, tmp_path / "checkpoint") == 0
    assert run("export", tmp_path / "checkpoint", tmp_path / "out") == 0
    out = contents(tmp_path / "out")
    assert out["tokenizer.json"] == contents(copy)["tokenizer.json"]
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the cat")["input_ids"]
    ours = Tokenizer(copy / "tokenizer.json")
    assert ids == ours.bos + ours.encode(["the cat"])[0]


@pytest.mark.parametrize("options", [{}, {"bos_id": -1}, {"eos_id": -1}], ids=str)
def test_transformers_gives_the_ids_of_sentencepiece(tmp_path, options):
    """Also without BOS or EOS."""
    ours = sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=False, **options)
    out = tmp_path / "out"
    out.mkdir()
    huggingface.write_tokenizer(out, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
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
    """Whether sentencepiece and transformers give other ids, or other text, for one of these
    texts."""
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs = sentencepiece.SentencePieceProcessor(str(path))
    out = path.parent / "different"
    out.mkdir()
    huggingface.write_tokenizer(out, path.parent)
    ours = transformers.AutoTokenizer.from_pretrained(out)
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


SUFFIX = {"treat_whitespace_as_suffix": True}


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
        SUFFIX,
        {"control_symbols": ["<c>"], "pad_id": 3},
        {"bos_id": 5, "eos_id": 6},
    ],
    ids=str,
)
def test_what_shapes_the_vocabulary_alone_is_expressed(tmp_path, options):
    assert not is_different(edited(tmp_path / "tokenizer.model", options))


def test_file_that_is_not_a_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"{}")
    with refuses("tokenizer.model: is no sentencepiece model"):
        read_sentencepiece(tmp_path / "tokenizer.model")
