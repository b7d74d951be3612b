"""Options in pairs: real runs against tests/plain.py, which knows nothing of ranks.

Each line of pairs.jsonl is a configuration: its number of ranks, and what it sets beside conftest's TINY. They were
drawn once, so that nearly any two values of options that the same code reads are together in one, and those of the core
in the first 24, which need no extra. Paths that begin with @ are below folder().
"""

import contextlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

import config
from parallel import materialize
from parallel.mesh import World
from tests import plain
from tests.conftest import REPO, compiled_by, lacks, make_config, refuses, rows, train_run, words
from tests.conftest import saved_tensors as weights
from tests.distributed import run_on_ranks
from tools.prepare.prepare import prepare

pytestmark = [pytest.mark.first, pytest.mark.slow]

EXACT = 1e-5  # in float32
STEPS = 4
FIRST_LEG = 2  # steps before a run with [checkpoint] is started again
# What a run that is allowed to goes on with.
CHANGED = {"train.seq_len": 16, "train.global_batch_size": 4}
# Documents by file, of numbers that nothing divides.
TEXTS = {"a.jsonl": 211, "c.jsonl": 211, "b.json": 97}
TEXTS |= {"more-0.jsonl": 53, "more-1.jsonl": 71, "more-2.jsonl": 43}
ROWS = (REPO / "tests/pairs.jsonl").read_text().splitlines()
BASE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
BASE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
BASE |= {"vocab_size": 320, "max_position_embeddings": 64, "rope_theta": 1000.0}
BASE |= {"rms_norm_eps": 1e-5, "initializer_range": 0.1}


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
    get_peft_model(model, settings).save_pretrained(str(folder))


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


def sections_of(number: int, folder: pathlib.Path) -> dict:
    found = json.loads(ROWS[number].replace('"@', f'"{folder}/'))
    return {
        **found,
        "train": {**found.get("train", {}), "steps": STEPS},
        "run": {**found.get("run", {}), "name": f"row-{number}", "output_dir": f"{folder}/runs"},
    }


@pytest.fixture(scope="module")
def prepared_once(folder) -> Callable[[dict], str]:
    """The folder of a row's data; rows may share it."""
    made: dict[str, str] = {}

    def prepared(sections: dict) -> str:
        text = {key: value for key, value in sections["data"].items() if key != "document_mask"}
        path = made.setdefault(repr(text), str(folder / f"data-{len(made)}"))
        cfg = make_config(**{**sections, "data": {**sections["data"], "path": path}})
        prepare(cfg.data, cfg.model.vocab_size)
        return path

    return prepared


@contextlib.contextmanager
def larger_weights() -> Iterator[None]:
    """Fresh projections are eight times as large: as they are, attention is nearly uniform, and hardly any option of
    the model shows in a loss."""
    draw = materialize.draw

    def larger(out: torch.Tensor, *arguments: Any) -> None:
        draw(out, *arguments)
        if arguments[-1].endswith("_proj.weight"):
            out.mul_(8)

    with mock.patch.object(materialize, "draw", larger):
        yield


def train_leg(world: World, leg: Leg) -> None:
    cfg = make_config(**leg.sections)
    expected = refuses(leg.refused) if leg.refused else contextlib.nullcontext()
    # traced and partitioned, but without kernels, which take half a minute
    with expected, larger_weights(), compiled_by("aot_eager_decomp_partition"):
        train_run(cfg, world)


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


ON_ONE_RANK = [json.loads(row)["ranks"] == 1 for row in ROWS]
NUMBERS = [
    pytest.param(number, id=f"line {number + 1}", marks=[pytest.mark.quick] if is_alone else [])
    for number, is_alone in enumerate(ON_ONE_RANK)
]


@pytest.mark.parametrize("number", NUMBERS)
def test_run_is_the_plain_one(number, folder, prepared_once):
    sections = sections_of(number, folder)
    ranks = sections.pop("ranks")
    if lacks(**sections):
        pytest.skip("it needs an extra that was removed")
    sections["data"]["path"] = prepared_once(sections)
    legs = legs_of(sections)
    for leg in legs:
        run_on_ranks(ranks, train_leg, leg)
    legs = [leg for leg in legs if not leg.refused]
    configs = [make_config(**leg.sections) for leg in legs]
    with larger_weights():
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
    run = config.run_folder(configs[0].run)
    check_rows(rows(run), plain_run, loss_means, tolerance)
    check_evaluations(rows(run, "eval"), plain_run, tolerance)
    check_checkpoints(run, saved, plain_run, configs[0], tolerance)


def check_checkpoints(
    folder: pathlib.Path, saved: set[int], plain_run: plain.Run, cfg: config.Config, tolerance: Near
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
    assert cfg.checkpoint
    every = cfg.checkpoint.save_every_steps
    return {step for step in steps if step == cfg.train.steps or (every and step % every == 0)}


def kept_of(saved: set[int], cfg: config.Config) -> set[int]:
    """The newest keep_last, and milestones."""
    c = cfg.checkpoint
    assert c
    newest = sorted(saved)[-(c.keep_last or len(saved)) :]
    return {
        step
        for step in saved
        if step in newest or (c.keep_every_steps and step % c.keep_every_steps == 0)
    }
