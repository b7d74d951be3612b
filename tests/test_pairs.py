"""Options in pairs: real runs against tests/plain.py, which knows nothing of ranks.

Each line of pairs.jsonl is a configuration: its number of ranks, and what it sets beside conftest's TINY. They were
drawn once, so that nearly any two values of options that the same code reads are together in one, and those of the core
in the first 24, which need no extra. Paths that begin with @ are below folder().
"""

import functools
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

import config
from tests import cases, plain
from tests.conftest import REPO, lacks, make_config, rows, words
from tests.conftest import saved_tensors as weights
from tools.prepare.prepare import prepare

pytestmark = [pytest.mark.first, pytest.mark.slow]

EXACT = 1e-5  # in float32
STEPS = 4
FIRST_LEG = 2  # steps before a run with [checkpoint] is started again
# What a run that is allowed to goes on with.
CHANGED = {"train.seq_len": 16, "train.global_batch_size": 4}
# Documents by file, of numbers that nothing divides.
TEXTS = {
    "a.jsonl": 211,
    "c.jsonl": 211,
    "b.json": 97,
    "more-0.jsonl": 53,
    "more-1.jsonl": 71,
    "more-2.jsonl": 43,
}
ROWS = (REPO / "tests/pairs.jsonl").read_text().splitlines()
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


# What the rows read


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus) -> pathlib.Path:
    """Of texts, bases, adapters, prepared data and runs."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, count in TEXTS.items():
        write_texts(folder / name, count)
    (folder / "tokenizer").mkdir()
    words = make_config(data={"source": str(corpus), "path": str(folder / "words")})
    prepared = prepare(words.data, words.model.vocab_size)[0]
    for copy in ("tokenizer.model", "tokenizer/tokenizer.model"):
        shutil.copy(prepared / "tokenizer.model", folder / copy)
    write_base(folder / "llama", LlamaConfig(**BASE))
    write_base(folder / "qwen3", Qwen3Config(**BASE, tie_word_embeddings=True))
    write_adapter(folder / "adapter", folder / "llama", 4, 6, [*config.PROJECTIONS])
    write_adapter(folder / "few", folder / "llama", 5, 5, ["o_proj", "up_proj"])
    return folder


def write_texts(path: pathlib.Path, count: int) -> None:
    """Texts, one twice, of which a quarter is held out, so that an evaluation has several batches."""
    seeds = itertools.count()

    def text(size: int, is_held_out: bool, end: str = "") -> str:
        texts = (words(seed, size) + end for seed in seeds)
        return next(text for text in texts if plain.is_held_out(text) == is_held_out)

    rows = []
    for i in range(count):
        held_out = i % 4 == 1
        row = {"text": text((2, 5, 11, 7, 29)[i % 5], held_out)}
        rows.append({**row, "body": text(7, held_out, " é"), "title": text(5, held_out)})
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in [*rows, rows[0]]]
    path.write_text("".join(lines))


def write_base(folder: pathlib.Path, settings: PretrainedConfig) -> None:
    """A Hugging Face folder of random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.1)
    model.save_pretrained(folder)


def write_adapter(
    folder: pathlib.Path, base: pathlib.Path, rank: int, alpha: int, targets: list[str]
) -> None:
    """PEFT's folder of random adapters, B too."""
    torch.manual_seed(1)
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, settings).save_pretrained(folder)


# The runs


class Leg(NamedTuple):
    """A launch, which begins after a step, 0 or that of a checkpoint."""

    sections: dict
    begins_after: int
    refused: str = ""  # part of why it is


def legs_of(sections: dict) -> list[Leg]:
    """With [checkpoint] a run is started again in its middle, with what allow_changed allows changed."""
    checkpoint = sections.get("checkpoint")
    if checkpoint is None:
        return [Leg(sections, 0)]
    resume = checkpoint.get("resume", "auto")
    if resume == "never":
        return [Leg(sections, 0), Leg(sections, STEPS, 'resume = "never"')]
    optim = {"schedule_steps": STEPS, **sections.get("optim", {})}
    begun = {
        **sections,
        "train": {**sections["train"], "steps": FIRST_LEG},
        "optim": optim,
        "checkpoint": {**checkpoint, "resume": "auto"},
    }
    train = dict(sections["train"])
    for option in checkpoint.get("allow_changed", []):
        train[option.removeprefix("train.")] = CHANGED[option]
    before = FIRST_LEG if resume == "auto" else resume
    return [Leg(begun, 0), Leg({**sections, "train": train}, before)]


class Trained(NamedTuple):
    folder: pathlib.Path
    legs: list[Leg]
    refused: list[str]  # why each leg was


@pytest.fixture(scope="module")
def train_all(folder, on_ranks) -> Callable[[int], dict[int, Trained]]:
    """Trains the rows of a number of ranks, in one process group; they are known by their numbers."""
    data: dict[str, str] = {}

    @functools.cache
    def train(ranks: int) -> dict[int, Trained]:
        runs = {}
        launches = []
        for number, row in enumerate(ROWS):
            sections = sections_of(row, folder)
            if sections.pop("ranks") != ranks or lacks(**sections):
                continue
            sections["data"]["path"] = prepared_once(sections, folder, data)
            run = Trained(folder / f"runs/row-{number}", legs_of(sections), [])
            at = {"name": run.folder.name, "output_dir": str(run.folder.parent)}
            for leg in run.legs:
                leg.sections["run"] = {**sections.get("run", {}), **at}
                launches.append((run, leg.sections))
            runs[number] = run
        refused = on_ranks(ranks, cases.train_in_turn, [each for _, each in launches], timeout=900)
        for (run, _), why in zip(launches, refused[0]):
            run.refused.append(why)
        return runs

    return train


def sections_of(row: str, folder: pathlib.Path) -> dict:
    found = json.loads(row.replace('"@', f'"{folder}/'))
    return {**found, "train": {**found.get("train", {}), "steps": STEPS}}


def prepared_once(sections: dict, folder: pathlib.Path, made: dict[str, str]) -> str:
    """The folder of its data; rows may share it."""
    text = {key: value for key, value in sections["data"].items() if key != "document_mask"}
    path = made.setdefault(repr(text), str(folder / f"data-{len(made)}"))
    cfg = make_config(**{**sections, "data": {**sections["data"], "path": path}})
    prepare(cfg.data, cfg.model.vocab_size)
    return path


# Their truth


class Near(NamedTuple):
    """How far from the plain run a run may be, relatively."""

    first_loss: float
    loss: float
    grad_norm: float


def near(cfg: config.Config) -> Near:
    p = cfg.parallel
    if p.float8 != "none":
        return Near(2e-2, 5e-2, 0.3)
    if p.param_dtype != "float32" or p.output_dtype == "bfloat16":
        return Near(2**-8, 2**-6, 2**-3)
    if p.reduce_dtype != "float32" or cfg.optim.state_dtype != "float32":
        return Near(EXACT, 2**-7, 2**-5)
    return Near(EXACT, EXACT, 1e-4)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=f"line {number + 1}",
            marks=[pytest.mark.quick] if json.loads(row)["ranks"] == 1 else [],
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_run_is_the_plain_one(number, train_all):
    runs = train_all(json.loads(ROWS[number])["ranks"])
    if number not in runs:
        pytest.skip("it needs an extra that was removed")
    run = runs[number]
    for leg, why in zip(run.legs, run.refused, strict=True):
        assert leg.refused in why and bool(leg.refused) == bool(why), why
    legs = [leg for leg in run.legs if not leg.refused]
    configs = [make_config(**leg.sections) for leg in legs]
    with cases.larger_weights():
        plain_run = plain.Run(configs[0])
    loss_means: dict[int, float] = {}  # by the step of the row
    saved: set[int] = set()
    for leg_number, (leg, cfg) in enumerate(zip(legs, configs), start=1):
        last = cfg.train.steps
        if leg_number < len(legs):  # what the next launch goes back behind is dropped
            last = legs[leg_number].begins_after
        plain_run.train(cfg, leg.begins_after + 1, last)
        loss_means |= means(plain_run, cfg, leg.begins_after + 1, last)
        if cfg.checkpoint:
            saved = {step for step in saved if step <= leg.begins_after}
            saved = kept_of(saved | saved_by(cfg, leg.begins_after), cfg)
    tolerance = near(configs[0])
    check_rows(rows(run.folder), plain_run, loss_means, tolerance)
    check_evaluations(rows(run.folder, "eval"), plain_run, tolerance)
    check_checkpoints(run.folder, saved, plain_run, configs[0], tolerance)


def check_checkpoints(
    folder: pathlib.Path,
    saved: set[int],
    plain_run: plain.Run,
    cfg: config.Config,
    tolerance: Near,
) -> None:
    folders = sorted((folder / "checkpoints").glob("step-????????"))
    assert [int(path.name[5:]) for path in folders] == sorted(saved)
    assert (folder / "tensorboard").exists() == cfg.log.tensorboard
    if saved and tolerance.loss == EXACT:
        stored = weights(folder, STEPS)
        for name, theirs in plain_run.weights.items():
            if cfg.lora and "lora_" not in name:
                continue
            ours = stored[f"model.{name}"].double()
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm(), name


def means(run: plain.Run, cfg: config.Config, first: int, last: int) -> dict[int, float]:
    """The mean loss over the targets since the row before, by the step of each row of a launch."""
    found = {}
    since = []
    for step in range(first, last + 1):
        since.append(run.rows[step])
        if step in (1, cfg.train.steps) or step % cfg.log.every_steps == 0:
            targets = sum(row["targets"] for row in since)
            found[step] = sum(row["loss"] * row["targets"] for row in since) / targets
            since = []
    return found


def check_rows(
    found: list[dict], plain_run: plain.Run, loss_means: dict[int, float], tolerance: Near
) -> None:
    assert [row["step"] for row in found] == [*loss_means]
    for ours in found:
        step = ours["step"]
        theirs = plain_run.rows[step]
        assert ours["batch_digest"] == theirs["batch_digest"], step
        assert ours["tokens"] == sum(plain_run.rows[s]["tokens"] for s in range(1, step + 1))
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-9)
        loss = tolerance.first_loss if step == 1 else tolerance.loss
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=loss), step
        assert ours["loss_mean"] == pytest.approx(loss_means[step], rel=loss), step
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance.grad_norm)


def check_evaluations(found: list[dict], plain_run: plain.Run, tolerance: Near) -> None:
    assert [row["step"] for row in found] == [*plain_run.evaluations]
    for ours, theirs in zip(found, plain_run.evaluations.values()):
        for key, value in theirs.items():
            its = [*ours[key].values()] if key.endswith("_by_source") else ours[key]
            assert its == pytest.approx(value, rel=tolerance.loss), key


def saved_by(cfg: config.Config, begins_after: int) -> set[int]:
    """The steps after which a launch saves."""
    steps = range(begins_after + 1, cfg.train.steps + 1)
    every = cfg.checkpoint.save_every_steps
    return {step for step in steps if step == cfg.train.steps or (every and step % every == 0)}


def kept_of(saved: set[int], cfg: config.Config) -> set[int]:
    """The newest keep_last, and milestones."""
    c = cfg.checkpoint
    newest = sorted(saved)[-(c.keep_last or len(saved)) :]
    return {
        step
        for step in saved
        if step in newest or (c.keep_every_steps and step % c.keep_every_steps == 0)
    }
