"""What an evaluation measures: losses over all targets, and bytes of the text that they encode."""

import json
import math
import pathlib
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import config
import evaluate
from data.dataset import open_dataset
from evaluate import Evaluation
from tests.conftest import (
    build,
    launch,
    make_config,
    mesh_for,
    needs_extra,
    rows,
    sentencepiece_model,
)
from tests.distributed import distributed
from tests.reference import fresh_model
from tools.prepare.row_format import is_held_out

ALPHABET = "ab \n\u00e9\u4e2d\U0001f600\u2581\ufffd"  # characters of one to four bytes


@pytest.mark.quick
@distributed(ranks=1)
def test_source_without_a_target_has_no_loss_and_leaves_the_mean_alone(world, monkeypatch):
    """Sums and counts beyond 2^24 are exact, and each batch has a timeout of its own."""
    batches = {"a": [(2.0**24, 2**24), (1.0, 0), (1.0, 0), (0.0, 1)], "b": [(0.0, 0)]}
    phases = []

    class Model(torch.nn.Module):
        """Its loss and valid targets are its inputs."""

        def forward(self, loss: torch.Tensor, valid: torch.Tensor) -> tuple:
            return {"loss": loss}, valid

    def validation_batches(stream: str, *unused: Any) -> list[tuple]:
        return [(torch.tensor(loss), torch.tensor(valid)) for loss, valid in batches[stream]]

    monkeypatch.setattr(evaluate, "validation_batches", validation_batches)
    monkeypatch.setattr(evaluate, "reshard", lambda model: None)
    run: Any = mock.MagicMock(stops=False)
    run.phase.side_effect = lambda name: phases.append(name) or mock.MagicMock()
    for streams, loss in ((["a", "b"], (2**24 + 2) / (2**24 + 1)), (["b"], None)):
        phases.clear()
        dataset: Any = SimpleNamespace(validation=streams, names=streams, tokenizer_files=[])
        model: Any = Model()
        result = Evaluation(make_config(), model, world, dataset, run).result()
        assert result and result["loss"] == loss and result["loss_by_source"]["b"] is None
        assert math.isnan(result["bits_per_byte"])
        count = sum(len(batches[stream]) for stream in streams)
        assert phases == ["first evaluation batch"] + ["evaluation batch"] * (count - 1)


def write_texts(path: pathlib.Path, seed: int) -> list[str]:
    """Writes texts as jsonl. Returns those for validation."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 60))) for _ in range(600)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [text for text in texts if is_held_out(text)]


def byte_level(path: pathlib.Path) -> None:
    """A tokenizer.json of bytes, some merged, without BOS."""
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=264, special_tokens=["</s>"], initial_alphabet=alphabet
    )
    model.train_from_iterator([ALPHABET] * 9, trainer)
    model.save(str(path))


def with_prefix(path: pathlib.Path) -> None:
    """A sentencepiece model as Llama 2's, which puts a space in front of a text."""
    sentencepiece_model(path, add_dummy_prefix=True, vocab_size=300)


TOKENIZERS = {"trained": None, "tokenizer.json": byte_level, "tokenizer.model": with_prefix}


@pytest.mark.parametrize("ranks, parallel", [(1, {}), (2, {}), (2, {"cp": 2}), (2, {"tp": 2})])
@distributed()
def test_loss_is_the_mean_over_all_targets(world, ranks, parallel, corpus, prepared):
    """Of the model in evaluation mode; afterwards it is in training mode again."""
    data = {"source": str(corpus), "path": str(prepared)}
    cfg = make_config(data=data, parallel=parallel, eval={})
    world = mesh_for(cfg, world)
    model = build(cfg, world)
    modes = set()
    model.head.register_forward_hook(lambda head, *unused: modes.add(head.training))
    dataset = open_dataset(cfg)
    result = Evaluation(cfg, model, world, dataset, mock.MagicMock(stops=False)).result()
    (stream,) = dataset.validation
    ids = torch.from_numpy(stream.read(0, stream.length))
    plain = fresh_model(cfg)
    nats = 0.0
    for begin in range(0, stream.length - 1, cfg.train.seq_len):
        window = ids[begin : begin + cfg.train.seq_len + 1]
        with torch.no_grad():
            logits = plain(window[None, :-1])[0]
        nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    assert result and result["loss"] == pytest.approx(nats / (stream.length - 1), rel=1e-5)
    assert modes == {False} and model.training


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
    for name, stream in zip(texts, open_dataset(cfg).validation):
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
