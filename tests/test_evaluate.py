"""What an evaluation means where it has nothing to mean, and the sample that a run ends with."""

import contextlib
import json
import math
import pathlib
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import config
import evaluate
import generate
from config import ConfigError
from data.dataset import open_dataset
from data.prepare import prepare
from data.row_format import is_held_out
from tests.conftest import launch, make_config, needs_extra, rows
from tests.distributed import distributed

pytestmark = pytest.mark.quick

WORLD = SimpleNamespace(
    rank=0, size=1, dp_rank=0, dp_size=1, cp=1, tp=1, device=torch.device("cpu")
)


class Untrained(torch.nn.Module):
    """Reports the loss and the valid targets that its inputs are."""

    def forward(
        self, sums: torch.Tensor, valid: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"loss": sums}, valid


def test_a_source_without_a_target_has_no_loss_and_leaves_the_mean_alone(monkeypatch):
    """Sums and counts beyond 2^24 are exact, and each batch has a time limit of its own."""
    batches = {"a": [(2.0**24, 2**24), (1.0, 0), (1.0, 0), (0.0, 1)], "b": [(0.0, 0)]}
    exact = (2**24 + 2) / (2**24 + 1)
    phases = []
    monkeypatch.setattr(
        evaluate,
        "validation_batches",
        lambda stream, *_: (
            (torch.tensor(sums), torch.tensor(valid)) for sums, valid in batches[stream]
        ),
    )
    monkeypatch.setattr(evaluate, "reshard", lambda model: None)
    run = SimpleNamespace(
        phase=lambda name: phases.append(name) or contextlib.nullcontext(),
        agreement=SimpleNamespace(begin=lambda: None, finish=lambda: None),
        stops=False,
    )
    for streams, loss in ((["a", "b"], exact), (["b"], None)):
        phases.clear()
        dataset = SimpleNamespace(validation=streams, names=streams, tokenizer_files=[])
        found = evaluate.evaluate(Untrained(), make_config(), WORLD, dataset, run)
        assert math.isnan(found["bits_per_byte"])  # there is nothing to decode with
        assert found["loss"] == loss
        assert found["loss_by_source"]["b"] is None
        count = sum(len(batches[stream]) for stream in streams)
        assert phases == ["first evaluation batch"] + ["evaluation batch"] * (count - 1)


@pytest.mark.parametrize(
    "source, names, prompt",
    [
        ("python-stdlib", [], "def "),
        ("texts.jsonl", [], "The "),
        ("python-stdlib", ["a", "b"], "The "),
        ("texts.jsonl", ["a", "python-stdlib"], "def "),
    ],
)
def test_a_sample_begins_as_what_was_read_does(tmp_path, monkeypatch, source, names, prompt):
    """There is none after few steps, without a tokenizer, or of a model whose all-gathers take seconds."""
    begun = []
    encoder = SimpleNamespace(encode=lambda texts: begun.extend(texts) or [[1]], bos=[], eos=[2])
    encoder.decode = lambda ids: f"text of {ids}"
    monkeypatch.setattr("generate.Tokenizer", lambda folder: encoder)
    monkeypatch.setattr("generate.generate", lambda model, ids, *_: iter([*ids, 7, 2, 9]))
    monkeypatch.setattr("generate.reshard", lambda model: None)
    logged = mock.Mock()
    monkeypatch.setattr("generate.log", logged)
    cfg = make_config(data={"source": source}, train={"steps": 100})
    dataset = SimpleNamespace(names=names, tokenizer_files=[tmp_path / "t"])
    generate.log_sample(Untrained(), cfg, WORLD, dataset)
    assert {*begun} == {prompt}
    logged.info.assert_called_once_with("a sample:\n%s", "text of [1, 1, 7]")  # up to EOS
    begun.clear()
    short = replace(cfg, train=replace(cfg.train, steps=99))
    generate.log_sample(Untrained(), short, WORLD, dataset)
    generate.log_sample(Untrained(), cfg, WORLD, SimpleNamespace(names=names, tokenizer_files=[]))
    monkeypatch.setattr("generate.parameter_count", lambda model: 70_553_706_496)
    generate.log_sample(Untrained(), cfg, WORLD, dataset)
    assert not begun


@pytest.mark.parametrize("able", [[0], [1], [], [0, 1]])
@distributed(ranks=2)
def test_all_ranks_generate_the_sample_or_none_does(world, able):
    """Where these have a tokenizer that encodes the prompt. Generating communicates: a rank alone would wait."""
    dataset = SimpleNamespace(names=[], tokenizer_files=[pathlib.Path("tokenizer.model")])
    with (
        mock.patch("generate.Tokenizer") as tokenizer,
        mock.patch("generate.generate", return_value=iter([])) as generated,
        mock.patch("generate.reshard"),
    ):
        tokenizer.return_value = mock.Mock(bos=[], eos=[], decode=str)
        tokenizer.return_value.encode.return_value = [[1]]
        if world.rank not in able:  # the first has no package for it, the second's fails on a text
            failing = tokenizer.return_value.encode if world.rank else tokenizer
            failing.side_effect = ConfigError("none")
        cfg = make_config(train={"steps": 100})
        generate.log_sample(Untrained(), cfg, world, dataset)
    assert generated.called == (len(able) == 2)


def write_texts(path, seed: int) -> list[str]:
    """Texts with characters of one to four bytes, as jsonl. Returns those for validation."""
    draw = random.Random(seed)
    texts = [
        "".join(draw.choices("ab \n\u00e9\u4e2d\U0001f600\u2581\ufffd", k=draw.randint(1, 60)))
        for _ in range(600)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [text for text in texts if is_held_out(text)]


def byte_level(path) -> str:
    """A tokenizer.json of bytes, some merged, also parts of characters; it adds no BOS."""
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.train_from_iterator(
        ["ab \n\u00e9\u4e2d\U0001f600\u2581 ab"] * 9,
        tokenizers.trainers.BpeTrainer(
            vocab_size=264,
            special_tokens=["</s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    model.save(str(path))
    return str(path)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_bytes_of_targets_are_those_of_the_text(tmp_path, trained, masked):
    """Of any number of tokens, the sum over the ranks equals what the bytes of the single tokens give; with
    eval.batches, of those that are read."""
    from evaluate import bytes_of_targets, target_bytes

    texts = write_texts(tmp_path / "t.jsonl", 0)
    cfg = make_config(
        data={
            "source": str(tmp_path / "t.jsonl"),
            "path": str(tmp_path / "p"),
            "tokenizer": None if trained else byte_level(tmp_path / "tokenizer.json"),
            "document_mask": masked,
        },
        train={"seq_len": 16, "global_batch_size": 3, "micro_batch_size": 1},
    )
    prepare(cfg.data, cfg.model.vocab_size)
    (stream,) = open_dataset(cfg).validation

    def found(stop: int, size: int = 3) -> int:
        return sum(
            target_bytes(stream, stop, masked, tmp_path / "p", rank, size) for rank in range(size)
        )

    if trained:  # with BOS: all of the text is a target
        assert found(stream.length) == found(stream.length, 1) == len("".join(texts).encode())
        return
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(tmp_path / "p/tokenizer.json"))
    of_byte = {char: byte for byte, char in bytes_of_characters().items()}
    ids = stream.read(0, stream.length).tolist()
    begins = {begin for begin, _ in stream.documents(0, stream.length)}
    expected = {}
    for stop in range(2, min(200, stream.length)):
        whole, dropped = b"", 0
        for position, token in enumerate(ids[:stop]):
            text = "" if token == model.token_to_id("</s>") else model.id_to_token(token)
            piece = bytes(of_byte[char] for char in text)
            if position in begins and (masked or position == 0):
                dropped += len(piece.decode(errors="replace").encode())
            whole += piece
        expected[stop] = len(whole.decode(errors="ignore").encode()) - dropped
        assert found(stop) == expected[stop], stop
    dataset = SimpleNamespace(validation=[stream], tokenizer_files=[tmp_path / "p/tokenizer.json"])
    for batches in (1, 3):
        part = replace(cfg, eval=config.Eval(batches=batches))
        of_ranks = [bytes_of_targets(part, dataset, rank, 2) for rank in range(2)]
        assert sum(size for (size,) in of_ranks) == expected[batches * 3 * 16 + 1]


def bytes_of_characters() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


@needs_extra("huggingface")
@pytest.mark.slow
def test_bits_per_byte_are_those_of_transformers_logits_over_the_bytes_of_the_text(
    write_config, tmp_path
):
    """Of a mixture and each of its sources, from two ranks and, of the saved checkpoint, from one."""
    import transformers

    texts = {str(tmp_path / f"{i}.jsonl"): write_texts(tmp_path / f"{i}.jsonl", i) for i in (1, 2)}
    path = write_config(
        "r",
        eval={},
        checkpoint={},
        data={
            "source": None,
            "path": str(tmp_path / "p"),
            "sources": [{"source": name, "weight": 1.0} for name in texts],
        },
    )
    for command in [path], ["-m", "huggingface", "export", tmp_path / "outputs/r", tmp_path / "hf"]:
        done = launch(*command, nproc=2)
        assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "outputs/r", "eval")
    done = launch(path, "--eval-only")
    again = config.flatten(json.loads(done.stdout))
    assert again == {
        key: value if isinstance(value, str) else pytest.approx(value, rel=1e-6)
        for key, value in config.flatten(row).items()
    }
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    cfg, nats = config.load(str(path)), {}
    for name, stream in zip(texts, open_dataset(cfg).validation):
        ids, length = torch.from_numpy(stream.read(0, stream.length)), cfg.train.seq_len
        nats[name] = 0.0
        for begin in range(0, stream.length - 1, length):
            window = ids[begin : begin + length + 1]
            with torch.no_grad():
                scores = model(window[None, :-1]).logits[0].double()
            nats[name] -= scores.log_softmax(-1).gather(1, window[1:, None]).sum().item()
    size = {name: len("".join(held).encode()) for name, held in texts.items()}
    for name in texts:
        assert row["bits_per_byte_by_source"][name] == pytest.approx(
            nats[name] / math.log(2) / size[name], rel=1e-5
        )
    assert row["bits_per_byte"] == pytest.approx(
        sum(nats.values()) / math.log(2) / sum(size.values()), rel=1e-5
    )
