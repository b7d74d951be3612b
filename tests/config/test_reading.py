"""TOML and --section.key=value: values, every problem at once, suggestions, what is written and read
back."""

import re
from dataclasses import dataclass
from typing import Literal

import pytest
import tomli

import config
from config import ConfigError
from config.help import help_text
from config.option import Schema, option, section
from config.read import GivenOptions
from tests.conftest import make_config, refuses, shipped_configs, tables

pytestmark = pytest.mark.quick

CONFIGS = shipped_configs()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_opens_with_its_command_and_reads_back_equal(path, tmp_path):
    first_lines = path.read_text().split("[")[0]
    assert f"configs/{path.name}" in first_lines or "./run_train.sh" in first_lines
    cfg = config.load(str(path))
    assert cfg.run.name == path.stem
    copy = tmp_path / "resolved.toml"
    copy.write_text(config.to_toml(cfg))
    assert config.load(str(copy)) == config.load_resolved(str(copy)) == cfg


def test_resolved_file_asks_neither_a_folder_nor_a_rule(tmp_path):
    """What the launcher completed and checked: the folder may be gone by now."""
    cfg = make_config(data={"sources": [{"source": "a.jsonl", "weight": 2.5}]}, eval={})
    path = tmp_path / "config.toml"
    text = config.to_toml(cfg).replace("n_heads = 4", 'n_heads = 5\ninit_from = "owner/name"')
    path.write_text(text)
    read = config.load_resolved(str(path))
    assert (read.model.n_heads, read.model.init_from) == (5, "owner/name")
    assert (read.data, read.eval, read.run) == (cfg.data, cfg.eval, cfg.run)
    path.write_text(f"{text}\n[model.x]\n")
    with refuses(r"\[model\] x", "unknown"):
        config.load_resolved(str(path))


BASE = config.to_toml(make_config())
# what replaces a line of the file, and key words of the error
FILES = {
    "key": ("steps = 4", "step = 4", r"\[train\] step = 4: unknown .*mean train.steps"),
    "section": (r"\[train\]", "[trian]", r"\[trian\] steps = 4: unknown .*mean train.steps"),
    "key in a wrong section": ("seed = 0", "save_every_steps = 3", "checkpoint.save_every_steps"),
    "missing option": ("steps = 4\n", "", r"\[train\] steps: is missing"),
    "number for a section": (r"\A", "eval = 3\n", r"eval = 3: .*written \[eval\]"),
    "list of sections": (r"\[train\]", "[[train]]", r"train = \[.*must be a table"),
    "date": ("steps = 4", "steps = 2026-01-01", r"\[train\] steps = .2026.*an integer"),
    "key twice": ("steps = 4", "steps = 4\nsteps = 5", "TOML"),
    "5,000 digits": ("steps = 4", f"steps = {'9' * 5000}", r"TOML: Exceeds the limit"),
    "byte order mark": (r"\A", "\ufeff", "byte order mark"),
    "not UTF-8": (r"\Z", "# \udcff", "UTF-8"),
    "nothing": ("(?s).*", "# a comment\n", "is empty"),
    "one table for a list": (r"sources = \[\]", "[data.sources]", "= {}: must be a list"),
}


@pytest.mark.parametrize(("line", "replacement", "words"), FILES.values(), ids=FILES)
def test_wrong_file_is_refused_by_name(line, replacement, words, tmp_path):
    path = tmp_path / "wrong.toml"
    text = re.sub(line, lambda _: replacement, BASE, count=1)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with refuses(re.escape(f"{path}: "), words):
        config.load(str(path))


# words of the command line, an option, its value
OVERRIDES = [
    ("train.steps=9 train.steps=8", "train.steps", 8),
    ("optim.lr=1", "optim.lr", 1.0),
    ("optim.betas=[0.8,0.9]", "optim.betas", (0.8, 0.9)),
    ("parallel.recompute=2", "parallel.recompute", 2),
    ("parallel.dp_shard=auto", "parallel.dp_shard", "auto"),
    ("train.max_grad_norm=off", "train.max_grad_norm", "off"),
    ('parallel.keep_fp32=["blocks.*"]', "parallel.keep_fp32", ("blocks.*",)),
    ("data.source=true", "data.source", "true"),
    ("data.source=2024", "data.source", "2024"),
    ("run.name=1e3", "run.name", "1e3"),
    ("data.source=/date=2024/x#1.jsonl", "data.source", "/date=2024/x#1.jsonl"),
    ("model.rope_scaling={factor=8} model.rope_scaling.factor=4", "model.rope_scaling.factor", 4.0),
    ("model.rope_scaling.factor=8 model.rope_scaling=off", "model.rope_scaling", None),
    ("eval=off eval.every_steps=5", "eval.every_steps", 5),
    ("eval.batches=3 eval=off eval.every_steps=5", "eval.batches", None),
]


@pytest.mark.parametrize(("words", "name", "value"), OVERRIDES)
def test_command_line_overrides_the_file(words, name, value):
    cfg = config.from_dict(tables(), "t.toml", [f"--{word}" for word in words.split()])
    for part in name.split("."):
        cfg = getattr(cfg, part)
    assert cfg == value and type(cfg) is type(value)


def test_off_removes_optional_sections_alone():
    for name in ("train", "train.steps", "log.tensorboard"):
        with refuses("command line: ", '= "off"'):
            config.from_dict(tables(), "t.toml", [f"--{name}=off"])
    wrong = tables(checkpoint={"keep_last": 0})
    assert config.from_dict(wrong, "t.toml", ["--checkpoint=off"]).checkpoint is None


def test_every_problem_is_named_at_once():
    """Single options and rules, in the file and on the command line; but n_heads and steps are wrong
    by themselves, so nothing is said of n_kv_heads, which must divide it, nor of the schedule."""
    raw = tables(
        train={"steps": -1, "sequence": 5},
        model={"n_heads": 0, "n_kv_heads": 3},
        optim={"lr": "fast", "schedule": "wsd", "muon_lr": 1},
    )
    words = ["--modell={}", "--run.seed=x", "--parallel.dp_replicate=auto"]
    with pytest.raises(ConfigError) as error:
        config.from_dict(raw, "t.toml", words)
    named = {problem.split(" = ")[0] for problem in error.value.problems}
    of_file = [
        "[model] n_heads",
        "[optim] lr",
        "[optim] muon_lr",
        "[train] sequence",
        "[train] steps",
    ]
    of_words = ["[parallel] dp_replicate", "[run] seed", "modell"]
    assert named == {*(f"t.toml: {n}" for n in of_file), *(f"command line: {n}" for n in of_words)}
    assert len(error.value.problems) == len(named)


# a wrong key of the command line, what its one line suggests
KEYS = [
    ("train.step=3", "mean train.steps"),
    ("trian.steps=3", "mean train.steps"),
    ("train.seed=3", "mean run.seed"),
    ("modell.dim=3", "mean model.dim"),
    ("optim.learning_rate=1", "mean optim.lr "),
    ("train.learning_rate=1", "mean optim.lr "),
    ("parallel.activation_checkpointing=true", "mean parallel.recompute"),
    ("train.gradient_accumulation_steps=2", "mean train.micro_batch_size"),
    ("model.hidden_size=64", "mean model.dim"),
    ("foo.bar=1", "there are run, model, "),
    ("data.eos_id=0", "--help data lists"),
]


@pytest.mark.parametrize(("word", "suggestion"), KEYS)
def test_wrong_key_suggests_the_nearest_spelling_else_an_option_with_its_words(word, suggestion):
    section, key = word.partition("=")[0].split(".")
    with pytest.raises(ConfigError) as error:
        config.from_dict(tables(), "t.toml", [f"--{word}"])
    (line,) = error.value.problems
    assert line.startswith(f"command line: [{section}] {key} = ")
    assert "unknown option" in line and suggestion in line


@dataclass(frozen=True)
class Forked:
    bits: Literal[8, 4] | None = option(None, "of a weight")
    activation: Literal["silu", "relu2"] = option("silu", "of the feed-forward")


@dataclass(frozen=True)
class Fork:
    model: Forked = section("fixed")


def test_an_option_is_one_declaration():
    """Read from a file and the command line, shown, compared on resume, refused."""
    schema = Schema(Fork)
    given = GivenOptions(schema, "t.toml")
    given.read({"model": {"activation": "relu2"}}, ["--model.bits=4"])
    assert given.build() == Fork(Forked(bits=4, activation="relu2"))
    assert {option.resume for option in schema.options.values()} == {"fixed"}
    shown = help_text(schema=schema)
    assert tomli.loads(shown.replace("absent", "0")) == {"model": {"bits": 0, "activation": "silu"}}
    given = GivenOptions(schema, "t.toml")
    given.read({"model": {"activatoin": "relu2", "activation": "gelu"}}, ["--model.bits=5"])
    with refuses("mean model.activation", '"gelu"', '"silu" or "relu2"', "bits = 5"):
        given.build()


def test_paths_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    source = {"source": "~/b.jsonl", "validation": "a~b/~"}
    raw = tables(data={"sources": [source]})
    cfg = config.from_dict(raw, "t.toml", ["--run.output_dir=~/runs", "--data.path=~"])
    assert (cfg.run.output_dir, cfg.data.path) == ("/home/me/runs", "/home/me")
    assert cfg.data.sources[0].source == "/home/me/b.jsonl"
    assert cfg.data.sources[0].validation == "a~b/~"


def test_any_value_is_written_as_toml_that_reads_back():
    texts = ['say "a\\b"', "two\nlines\tand a tab", "\x01\x1f\x7f", "café \u2028 \U0001f600", "#"]
    numbers = [0, -7, 2**63 - 1, 1e-05, 1e22, 0.1 + 0.2, -0.0, True, False]
    for value in (texts, numbers, [], {}, {"a b": 1, "c.d": {"é": [2]}, "plain_key-1": "x"}):
        assert tomli.loads(f"value = {config.toml(value)}") == {"value": value}


def test_values_of_older_tables_are_completed_by_defaults():
    """Also an option that is gone by now."""
    values = config.values_of(tables(train={"gone": 1}, eval={}))
    assert (values["train.seq_len"], values["train.gone"]) == (32, 1)
    assert values["optim.betas"] == [0.9, 0.95]
    assert values["lora.rank"] is values["checkpoint.resume"] is values["eval.batches"] is None
