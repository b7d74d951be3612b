"""TOML and --section.key=value: values, every problem at once, suggestions, what is written and read
back."""

import re

import pytest
import tomli

import config
from config import ConfigError
from tests.conftest import make_config, refuses, shipped_configs, tables

pytestmark = pytest.mark.quick

CONFIGS = shipped_configs()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_reads_back_equal(path, tmp_path):
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


BASE = config.to_toml(make_config())
# what replaces a line of the file, and key words of the error
FILES = {
    "key": ("steps = 4", "step = 4", r"\[train\] step = 4: unknown .*mean train.steps"),
    "section": (r"\[train\]", "[trian]", r"\[trian\] steps = 4: unknown .*mean train.steps"),
    "missing option": ("steps = 4\n", "", r"\[train\] steps: is missing"),
    "byte order mark": (r"\A", "\ufeff", "byte order mark"),
    "not UTF-8": (r"\Z", "# \udcff", "UTF-8"),
    "nothing": ("(?s).*", "# a comment\n", "is empty"),
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
    ("optim.betas=[0.8,0.9]", "optim.betas", (0.8, 0.9)),
    ("train.max_grad_norm=off", "train.max_grad_norm", "off"),
    ('parallel.keep_fp32=["blocks.*"]', "parallel.keep_fp32", ("blocks.*",)),
    ("data.source=true", "data.source", "true"),
    ("model.rope_scaling={factor=8} model.rope_scaling.factor=4", "model.rope_scaling.factor", 4.0),
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
    """Single options and rules, in the file and on the command line; but n_heads is wrong by itself,
    so nothing is said of n_kv_heads, which must divide it."""
    model = {"n_heads": 0, "n_kv_heads": 3}
    raw = tables(train={"sequence": 5}, model=model, optim={"lr": "fast", "muon_lr": 1})
    with pytest.raises(ConfigError) as error:
        config.from_dict(raw, "t.toml", ["--modell={}", "--parallel.dp_replicate=auto"])
    assert {problem.split(" = ")[0] for problem in error.value.problems} == {
        "t.toml: [model] n_heads",
        "t.toml: [optim] lr",
        "t.toml: [optim] muon_lr",
        "t.toml: [train] sequence",
        "command line: [parallel] dp_replicate",
        "command line: modell",
    }


# a wrong key of the command line, what its one line suggests
KEYS = [
    ("train.step=3", "mean train.steps"),
    ("optim.learning_rate=1", "mean optim.lr "),
    ("train.gradient_accumulation_steps=2", "mean train.micro_batch_size"),
    ("model.hidden_size=64", "mean model.dim"),
    ("foo.bar=1", "there are run, model, "),
]


@pytest.mark.parametrize(("word", "suggestion"), KEYS)
def test_wrong_key_suggests_the_nearest_spelling_else_an_option_with_its_words(word, suggestion):
    section, key = word.partition("=")[0].split(".")
    with pytest.raises(ConfigError) as error:
        config.from_dict(tables(), "t.toml", [f"--{word}"])
    (line,) = error.value.problems
    assert line.startswith(f"command line: [{section}] {key} = ") and suggestion in line


def test_paths_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    raw = tables(data={"sources": [{"source": "~/b.jsonl", "validation": "a~b/~"}]})
    cfg = config.from_dict(raw, "t.toml", ["--run.output_dir=~/runs"])
    assert cfg.run.output_dir == "/home/me/runs"
    (source,) = cfg.data.sources
    assert (source.source, source.validation) == ("/home/me/b.jsonl", "a~b/~")


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
