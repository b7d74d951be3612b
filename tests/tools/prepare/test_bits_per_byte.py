"""Bits per byte are those of the text's own bytes, whatever the tokenizer makes of it."""

import json
import math
import pathlib
import random

import pytest
import torch

import config
from data.dataset import PreparedDataset
from data.folder import manifest_of
from tests.conftest import (
    launch,
    make_config,
    needs_extra,
    prepare_one,
    rows,
    sentencepiece_model,
)
from tools.prepare.row_format import is_held_out

ALPHABET = "ab  \n\u00e9\u4e2d\U0001f600\u2581\ufffd"  # characters of one to four bytes


def write_texts(path: pathlib.Path, seed: int) -> list[str]:
    """Writes texts as jsonl. Returns those for validation."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 60))) for _ in range(600)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [text for text in texts if is_held_out(text)]


TOKENIZERS = {
    "lossless": {},
    "joins blanks": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
    "with <unk>": {"byte_fallback": False},
}


@pytest.mark.quick
@pytest.mark.parametrize("options", TOKENIZERS.values(), ids=TOKENIZERS)
def test_bytes_of_the_validation_text_do_not_depend_on_the_tokenizer(options, tmp_path):
    texts = write_texts(tmp_path / "a.jsonl", 0)
    sentencepiece_model(tmp_path / "t.model", **options)
    data = {"source": str(tmp_path / "a.jsonl"), "path": str(tmp_path / "out")}
    cfg = make_config(data=data | {"tokenizer": str(tmp_path / "t.model")})
    prepare_one(cfg)
    dataset = PreparedDataset(cfg)
    (samples,) = dataset.validation()
    assert dataset.text_bytes(0, len(samples)) == len("".join(texts).encode())


@pytest.mark.quick
def test_share_of_unknown_tokens_is_reported_and_from_one_percent_on_warned_of(tmp_path, capsys):
    texts = [f"{'the cat sat ' * 20}{'中' * (number % 2)}" for number in range(100)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(rows)
    path = tmp_path / "t.model"
    model = sentencepiece_model(path, byte_fallback=False).model
    ids = [[model.bos_id(), *model.encode(text), model.eos_id()] for text in texts]
    unknown = sum(text.count(model.unk_id()) for text in ids)
    share = unknown / sum(map(len, ids))
    data = {"source": str(tmp_path / "a.jsonl"), "path": str(tmp_path / "out")}
    folder = prepare_one(make_config(data=data | {"tokenizer": str(path)}))
    assert manifest_of(folder)["unknown"] == unknown == 50
    error = capsys.readouterr().err
    assert f"{share:.2%} of them are <unk>" in error and share < 0.01
    assert "warning" not in error
    (tmp_path / "a.jsonl").write_text(rows.replace("sat", "\u4e2d\u4e2d"))
    prepare_one(make_config(data=data | {"tokenizer": str(path), "path": str(tmp_path / "other")}))
    assert "warning: " in capsys.readouterr().err


@needs_extra("huggingface")
@pytest.mark.slow
def test_bits_per_byte_are_those_of_transformers_over_the_bytes_of_the_text(write_config, tmp_path):
    """Of a mixture and each of its sources, from two ranks and, of the saved checkpoint, from one."""
    import transformers

    texts = {str(tmp_path / f"{i}.jsonl"): write_texts(tmp_path / f"{i}.jsonl", i) for i in (1, 2)}
    sources = [{"source": name, "weight": 1.0} for name in texts]
    data = {"source": None, "path": str(tmp_path / "p"), "sources": sources}
    path = write_config("r", eval={}, checkpoint={}, data=data)
    for command in [path], ["-m", "huggingface", "export", tmp_path / "outputs/r", tmp_path / "hf"]:
        done = launch(*command, nproc=2)
        assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "outputs/r", "eval")
    again = config.flatten(json.loads(launch(path, "--eval-only").stdout))
    for key, value in config.flatten(row).items():
        is_text = isinstance(value, str)
        assert again[key] == (value if is_text else pytest.approx(value, rel=1e-6))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    cfg = config.load(str(path))
    bits = {}
    size = {name: len("".join(held).encode()) for name, held in texts.items()}
    for name, source in zip(texts, PreparedDataset(cfg).sources):
        stream = source.validation
        ids = torch.from_numpy(stream.read(0, stream.length))
        bits[name] = 0.0
        for begin in range(0, stream.length - 1, cfg.train.seq_len):
            window = ids[begin : begin + cfg.train.seq_len + 1]
            with torch.no_grad():
                scores = model(window[None, :-1]).logits[0].double().log_softmax(-1)
            bits[name] -= scores.gather(1, window[1:, None]).sum().item() / math.log(2)
        expected = pytest.approx(bits[name] / size[name], rel=1e-5)
        assert row["bits_per_byte_by_source"][name] == expected
    total = pytest.approx(sum(bits.values()) / sum(size.values()), rel=1e-5)
    assert row["bits_per_byte"] == total
