"""Every configuration in configs/ loads; every malformed one is refused, with all its problems, and creates nothing."""

import argparse
import dataclasses
import errno
import json
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING

import pytest
import tomli

import config
from config import ConfigError
from tests.conftest import REPO, TINY, launch, make_config, needs_extra, shipped_configs, tables

pytestmark = pytest.mark.quick

CONFIGS = shipped_configs()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load_and_open_with_their_command(path):
    cfg = config.load(str(path))
    assert cfg.run.name == path.stem
    first_lines = path.read_text().split("[")[0]
    assert f"configs/{path.name}" in first_lines or (
        path.stem == "tiny" and "./run_train.sh" in first_lines
    )


def test_options_of_removed_extras_are_refused_together(monkeypatch):
    words = [
        "--optim.name=adamw",
        "--parallel.float8=rowwise",
        "--lora.base_dtype=nf4",
        "--train.seq_len=-1",
    ]
    monkeypatch.setattr(config, "has_extra", lambda name: False)
    with pytest.raises(ConfigError) as error:
        config.from_dict(tables(), "t.toml", words)
    lacking = "which this copy of the repository does not have"
    assert sorted(error.value.problems) == [
        f'command line: [lora] base_dtype = "nf4": needs extras/lora, {lacking}',
        f'command line: [parallel] float8 = "rowwise": needs extras/float8, {lacking}',
        "command line: [train] seq_len = -1: must be greater than 0",
    ]
    with pytest.raises(ConfigError) as error:
        config.from_dict({**tables(), "model": {"init_from": "x"}}, "t.toml")
    assert [*error.value.problems] == [
        f't.toml: [model] init_from = "x": needs extras/huggingface, {lacking}'
    ]
    with pytest.raises(ConfigError, match="lora = {}: needs extras/lora, "):
        config.from_dict({**tables(), "lora": {}}, "t.toml")
    chat = {"format": "alpaca", "tokenizer": "t.json", "document_mask": True}
    with pytest.raises(
        ConfigError, match=rf'^t.toml: .*format = "alpaca": needs extras/chat, {lacking}$'
    ):
        config.from_dict({**tables(), "data": chat}, "t.toml")
    # a table that is on anyway, and empty
    config.from_dict({**tables(), "optim": {}, "log": {}}, "t.toml")
    # for a tool that reads a checkpoint
    saved = tables(model={"init_from": "x"}, parallel={"float8": "rowwise"})
    config.from_dict(saved, "t.toml", saved=True)


def test_what_options_need_are_folders_of_extras():
    needed = {field.metadata["extra"] for _, field in config.SCHEMA.options.values()}
    assert needed - {None} == {"chat", "float8", "huggingface", "lora", "optimizers", "reports"}
    for extra in needed - {None}:
        assert config.has_extra(extra) or not (REPO / "extras" / extra).exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_resolved_config_reads_back_equal(path, tmp_path):
    cfg = config.load(str(path))
    copy = tmp_path / "resolved.toml"
    copy.write_text(config.to_toml(cfg))
    assert config.load(str(copy)) == cfg


def toml(text: str = "", **sections) -> str:
    base = config.to_toml(make_config(**sections))
    return base + text


def without(section: str, key: str | None = None) -> str:
    """TINY without a section, or one key of it."""
    raw = tables()
    if key is None:
        del raw[section]
    else:
        del raw[section][key]
    return "\n".join(
        f"[{n}]\n" + "\n".join(f"{k} = {config.toml(v)}" for k, v in t.items())
        for n, t in raw.items()
    )


def replaced(line: str) -> str:
    """TINY with another line for a key, given as "section.key = value"."""
    section, _, line = line.partition(".")
    before, table, inside = toml().partition(f"[{section}]\n")
    key = line.split("=")[0].strip()
    assert re.search(f"^{key} = .*$", inside, re.M), key
    return before + table + re.sub(f"^{key} = .*$", lambda _: line, inside, count=1, flags=re.M)


# name: (content, what the error must name)
MALFORMED = {
    "unknown key": (
        toml("\n[eval]\nevery_step = 3\n"),
        ["[eval] every_step = 3", "did you mean eval.every_steps?"],
    ),
    "unknown section": (
        toml("\n[trian]\nsteps = 3\n"),
        ["[trian] steps = 3", "did you mean train.steps?"],
    ),
    "key in another section": (
        toml("\n[eval]\nsave_every_steps = 3\n"),
        ["did you mean checkpoint.save_every_steps?"],
    ),
    "text for an integer": (
        replaced('train.steps = "many"'),
        ['[train] steps = "many"', "must be an integer"],
    ),
    "float for an integer": (
        replaced("train.steps = 4.0"),
        ["[train] steps = 4.0", "must be an integer"],
    ),
    "bool for an integer": (
        replaced("train.steps = true"),
        ["[train] steps = true", "must be an integer"],
    ),
    "nan": (replaced("optim.lr = nan"), ["[optim] lr", "must be a number"]),
    "inf": (replaced("optim.lr = inf"), ["[optim] lr", "must be a number"]),
    "overflow to inf": (
        replaced("optim.lr = 1e999"),
        ["[optim] lr", "must be a number, neither empty nor infinite"],
    ),
    "huge integer": (
        replaced("train.steps = 100000000000000000000000"),
        ["[train] steps", "must be an integer, neither empty nor infinite nor out of range"],
    ),
    "integer of 5,000 digits": (
        replaced("train.steps = " + "9" * 5000),
        ["TOML: Exceeds the limit (4300"],
    ),
    "date": (replaced("train.steps = 2026-01-01"), ["[train] steps", "must be an integer"]),
    "mixed list": (replaced('optim.betas = [0.9, "x"]'), ["[optim] betas"]),
    "short list": (replaced("optim.betas = [0.9]"), ["[optim] betas", "a list of 2"]),
    "duplicate key": (
        toml().replace("steps = 4", "steps = 4\nsteps = 5"),
        ["not valid TOML", "line"],
    ),
    "duplicate section": (toml("\n[train]\nsteps = 4\n"), ["not valid TOML"]),
    "byte order mark": ("\ufeff" + toml(), ["byte order mark"]),
    "empty file": ("", ["is empty"]),
    "only a comment": ("# nothing\n", ["is empty"]),
    "not UTF-8": (toml().encode() + b"\n# \xff\xfe\n", ["not UTF-8"]),
    "NUL in text": (replaced('data.source = "a\\u0000b"'), ["[data] source"]),
    "empty text": (replaced('data.source = ""'), ["[data] source"]),
    "section is no table": ("train = 3\n" + without("train"), ["train = 3", "written [train]"]),
    "section is a list": (
        without("train") + "\n[[train]]\nsteps = 3\n",
        ["train = [", "must be a table"],
    ),
    "missing steps": (without("train", "steps"), ["[train] steps", "missing"]),
    "missing model": (without("model", "dim"), ["[model] dim", "missing"]),
    "unknown word": (
        replaced('optim.schedule = "cosin"'),
        ['[optim] schedule = "cosin"', '"cosine"'],
    ),
    "float16": (replaced('parallel.param_dtype = "float16"'), ["float16", "loss scaler"]),
    "reshard to one": (
        replaced("parallel.reshard_after_forward = 1"),
        ["reshard_after_forward = 1", "true or false"],
    ),
    "name with a path": (replaced('run.name = "../x"'), ["[run] name", "may hold only"]),
    "absolute name": (replaced('run.name = "/tmp/x"'), ["[run] name"]),
    "name like a flag": (replaced('run.name = "-rf"'), ["[run] name"]),
    "name with a space": (replaced('run.name = "a b"'), ["[run] name"]),
    "name with a command": (replaced('run.name = "$(touch x)"'), ["[run] name"]),
    "off is no value": (
        replaced('log.tensorboard = "off"'),
        ["[log] tensorboard", "true or false"],
    ),
    "mixture without weight's number": (
        replaced('data.sources = [{source = "a", weight = "b"}]'),
        ["[data] sources", 'weight = "b": must be a number'],
    ),
    "mixture with an unknown key": (
        replaced('data.sources = [{source = "a", wieght = 1}]'),
        ["wieght", "weight?"],
    ),
    "mixture without a source": (
        replaced("data.sources = [{weight = 1}]"),
        ["[data] sources", "source: is missing"],
    ),
    "mixture of no weight": (
        replaced('data.sources = [{source = "a", weight = 0}]'),
        ["weight = 0: must be greater"],
    ),
    "mixture of one twice": (
        replaced('data.sources = [{source = "a"}, {source = "a", weight = 2}]'),
        ["one source twice"],
    ),
    "mixture of one twice, by another name": (
        replaced('data.text_field = "body"').replace(
            "sources = []", 'sources = [{source = "a"}, {source = "a", text_field = "body"}]'
        ),
        ["one source twice"],
    ),
    "mixture as one table": (
        toml("\n[data.sources]\nsource = 'a'\n").replace("sources = []\n", ""),
        ["write [[data.sources]]"],
    ),
    "mixture with two wrong tables": (
        replaced('data.sources = [{source = "a", weight = 0}, {weight = 1, x = 3}]'),
        ["weight = 0: must be greater than 0", "x = 3: unknown option", "source: is missing"],
    ),
    "mixture that is no table": (
        replaced("data.sources = [1]"),
        ["[data] sources", "a table of source, weight"],
    ),
    "mixture beside a source": (
        replaced('data.source = "x.txt"').replace("sources = []", 'sources = [{source = "a"}]'),
        ["[data] source", "is incompatible with [[data.sources]]"],
    ),
    "rope without factor": (
        toml("\n[model.rope_scaling]\nlow_freq_factor = 1.0\n"),
        ["factor", "missing"],
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_and_says_where(case, tmp_path):
    content, named = MALFORMED[case]
    path = tmp_path / "bad.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        config.load(str(path))
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert str(path) in message and "sys." not in message
    assert len(message.splitlines()) <= 5 and "Traceback" not in message


DEFAULTS = """
run name=- output_dir="outputs" seed=0 device="auto" deterministic=false start_timeout_seconds=1800.0
run step_timeout_seconds=600.0 save_timeout_seconds=1800.0
model dim=? n_layers=? n_heads=? n_kv_heads=? ffn_dim=? vocab_size=? head_dim=- norm_eps=1e-05 rope_theta=500000.0
model tie_embeddings=false qk_norm=false init_from=- freeze=[]
model.rope_scaling factor=? low_freq_factor=1.0 high_freq_factor=4.0 original_max_position_embeddings=8192
data source="python-stdlib" subset=- split="train" text_field="text" path=- tokenizer=- max_tokens=-
data document_mask=false format=- messages_field=- chat_template=- order="global" validation=-
data sources=[]
train steps=? seq_len=2048 global_batch_size=8 micro_batch_size=- max_grad_norm=1.0 skip_nonfinite=0
optim name="adamw" lr=0.0003 muon_lr=- muon_momentum=0.95 betas=[0.9,0.95] eps=1e-08 weight_decay=0.1 warmup_steps=0
optim schedule="cosine" decay_steps=- schedule_steps=- min_lr_ratio=0.1 state_dtype="float32"
parallel dp_replicate=1 dp_shard="auto" cp=1 tp=1 reshard_after_forward=true prefetch_forward=1 prefetch_backward=1
parallel param_dtype="bfloat16" reduce_dtype="float32" output_dtype=- keep_fp32=[] replicated=[] cpu_offload=false
parallel one_memory_pool=false sync_every_micro_batch=true gather_once=false recompute="none" compile=false
parallel float8="none"
lora rank=16 alpha=- targets=["q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]
lora base_dtype="bfloat16" init_from=-
checkpoint save_every_steps=- keep_last=- keep_every_steps=- async_save=false resume="auto" allow_changed=[]
eval every_steps=- batches=-
log every_steps=10 tensorboard=true tracker=- project=-
profile at_step=? steps=3
"""


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"optim": {"betas": [0.9, 1.0]}}, "betas.*both must lie in"),
        ({"optim": {"betas": [-0.1, 0.9]}}, "betas.*both must lie in"),
        ({"optim": {"muon_lr": 0.0}}, "muon_lr = 0.0: must be greater than 0"),
        ({"optim": {"muon_momentum": 1.0}}, "muon_momentum = 1.0: must lie in"),
        (
            {"model": {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 0}}},
            "original_max_position_embeddings = 0: must be greater than 0",
        ),
        (
            {"model": {"rope_scaling": {"factor": 8.0, "low_freq_factor": 0.0}}},
            "low_freq_factor = 0.0: must be greater than 0",
        ),
    ],
    ids=str,
)
def test_numbers_at_the_edge_of_what_makes_sense_are_refused(sections, told):
    with pytest.raises(ConfigError, match=told):
        make_config(**sections)


def test_what_is_not_said_means_what_it_always_meant():
    """Another default would change every run whose file does not name the option, and its checkpoints'."""
    for line in DEFAULTS.strip().splitlines():
        table, *words = line.split()
        for word in words:
            key, said = word.split("=", 1)
            default = config.SCHEMA.options[f"{table}.{key}"].field.default
            if said == "?":
                assert default is MISSING, key
            elif said == "-":
                assert default is None, key
            else:
                assert config.toml(default).replace(", ", ",") == said, key


def test_a_source_by_two_names_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    for other in ("./a.jsonl", str(tmp_path / "a.jsonl"), "link.jsonl"):
        with pytest.raises(ConfigError, match="names one source twice"):
            make_config(data={"sources": [{"source": "a.jsonl"}, {"source": other}]})


def test_text_that_no_file_can_hold_is_refused(tmp_path):
    path = tmp_path / "good.toml"
    path.write_text(toml())
    for wrong in ("\udcff", "a\0b"):  # as Python reads an argument that is not UTF-8
        refusal = r"\[run\] output_dir = .*: (must be text|holds bytes that are not characters)"
        with pytest.raises(ConfigError, match=refusal):
            config.load(str(path), [f"--run.output_dir={wrong}"])


def test_every_degree_that_cannot_be_had_is_named():
    """At once, and before a process starts: heads, widths and lengths that tp and cp do not divide."""
    model = {"dim": 56, "n_heads": 7, "n_kv_heads": 7, "ffn_dim": 81, "vocab_size": 321}
    parallel = {"tp": 2, "cp": 2, "replicated": ["embedding*"]}
    with pytest.raises(ConfigError) as caught:
        make_config(model=model, train={"seq_len": 34}, parallel=parallel)
    for part in (
        "[model] n_heads = 7",
        "[model] n_kv_heads = 7",
        "[model] ffn_dim = 81",
        "[model] vocab_size = 321",
        "multiple of parallel.tp = 2",
        "[train] seq_len = 34: must be a multiple of 2 x parallel.cp = 4",
        "multiple of parallel.cp x parallel.tp = 4",
        "[parallel] replicated",
        "requires tp = 1",
    ):
        assert part in str(caught.value), part
    assert len(caught.value.problems) == 7
    make_config(model={"n_kv_heads": 4}, train={"seq_len": 32}, parallel={"tp": 4, "cp": 4})


@pytest.mark.parametrize(
    "argument, named",
    [
        ("--train.stepz=3", "did you mean train.steps?"),
        ("--help=optim", "write --help and the name as two words"),
        ("--trian.steps=3", "did you mean train.steps?"),
        ("--train.steps=", "must be an integer"),
        ("--train.steps=3.5", "must be an integer"),
        ("--train.steps=3\nfoo=4", '"3\\nfoo=4": must be an integer'),
        ("--train=3", "must be a table, written [train]\n"),
        ("--eval=3", "must be a table, written [eval]; off removes it from the command line\n"),
        ("--train=off", "must be a table"),
        ("--foo=1", "unknown option"),
        ("--parallel.recompute=fool", '"full"'),
        ("--parallel.dp_shard=many", '"auto"'),
        ("--run.seed=-1", "at least 0"),
    ],
)
def test_malformed_override_is_refused(argument, named):
    with pytest.raises(ConfigError, match="command line") as caught:
        config.from_dict(tables(), "t.toml", [argument])
    assert named in f"{caught.value}\n"


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        (["--train.steps=9"], "train.steps", 9),
        (["--train.steps=9", "--train.steps=8"], "train.steps", 8),
        (["--parallel.reshard_after_forward=false"], "parallel.reshard_after_forward", False),
        (["--parallel.recompute=full"], "parallel.recompute", "full"),
        (["--parallel.recompute=2"], "parallel.recompute", 2),
        (["--parallel.dp_shard=4"], "parallel.dp_shard", 4),
        (["--parallel.dp_shard=auto"], "parallel.dp_shard", "auto"),
        (["--train.max_grad_norm=off"], "train.max_grad_norm", "off"),
        (["--optim.lr=1"], "optim.lr", 1.0),
        (["--optim.betas=[0.8, 0.9]"], "optim.betas", (0.8, 0.9)),
        (["--data.source=true"], "data.source", "true"),
        (["--data.source=a b#c"], "data.source", "a b#c"),
        (["--run.name=7"], "run.name", "7"),
        (["--eval.every_steps=5"], "eval.every_steps", 5),
        (["--eval.every_steps=5", "--eval=off"], "eval", None),
        (["--model.rope_scaling.factor=8"], "model.rope_scaling.factor", 8.0),
        (
            ["--model.rope_scaling={factor = 8}", "--model.rope_scaling.factor=4"],
            "model.rope_scaling.factor",
            4.0,
        ),
        (['--parallel.keep_fp32=["blocks.*"]'], "parallel.keep_fp32", ("blocks.*",)),
    ],
)
def test_overrides(arguments, key, value):
    found = config.from_dict(tables(), "t.toml", arguments)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_a_mixture_may_take_two_parts_of_one_source():
    """Another split, subset or limit is another source."""
    for key, value in {
        "split": "test",
        "subset": "de",
        "text_field": "body",
        "max_tokens": 9,
    }.items():
        sources = [{"source": "a"}, {"source": "a", key: value}]
        cfg = make_config(data={"sources": sources})
        assert getattr(cfg.data.sources[1], key) == value
        with pytest.raises(ConfigError, match="names one source twice"):  # said for both
            make_config(data={"sources": sources, key: value})


def test_a_width_of_heads_that_is_odd_is_named_where_it_is_given():
    for sizes, named in (
        ({"head_dim": 7}, "head_dim = 7: makes heads 7"),
        ({"dim": 12}, "dim = 12: makes heads 3"),
    ):
        with pytest.raises(ConfigError, match=rf"^t\.toml: \[model\] {named}"):
            config.from_dict(tables(model=sizes), "t.toml")


def test_all_problems_at_once(tmp_path):
    raw = tables(train={"steps": -1, "sequence": 5}, optim={"lr": "fast"})
    raw["modell"] = {}
    with pytest.raises(ConfigError) as caught:
        config.from_dict(raw, "t.toml", ["--run.seed=x"])
    assert len(caught.value.problems) == 5
    # what is wrong together, too, but for the rules that look at what is wrong by itself
    raw = tables(
        model={"n_kv_heads": 3, "n_heads": 0, "dim": 47, "head_dim": 8}, optim={"schedule": "wsd"}
    )
    with pytest.raises(ConfigError) as caught:
        config.from_dict(raw, "t.toml", ["--train.stepz=5", "--parallel.dp_replicate=auto"])
    assert [re.search(r"\[[\w.]+\] (\w+)", problem)[1] for problem in caught.value.problems] == [
        "n_heads",
        "stepz",
        "schedule",
        "dp_replicate",
    ]


@needs_extra("huggingface", "lora")
def test_what_is_wrong_beside_a_folder_that_cannot_be_read_is_told_too():
    for table in "model", "lora":
        raw = tables(
            train={"steps": -1},
            model={"dim": None, "init_from": "none"},
            lora={"init_from": "none"},
        )
        if table == "lora":
            raw["model"] = tables(model={"init_from": "none"})["model"]
        with pytest.raises(ConfigError) as caught:
            config.from_dict(raw, "t.toml")
        assert len(caught.value.problems) == 2, str(caught.value)
        steps, folder = caught.value.problems
        assert "steps = -1" in steps and "none" in folder


@pytest.mark.parametrize(
    "program, arguments, told",
    [
        ("train.py", [], "CONFIG"),
        ("data/prepare.py", [], "CONFIG"),
        ("data/show.py", ["--step", "1"], "CONFIG"),
        ("train.py", ["tiny.toml", "--json"], "--dry-run"),
        ("train.py", ["tiny.toml", "--world-size=2"], "--dry-run"),
        ("train.py", ["tiny.toml", "--config"], "--dry-run"),
        (
            "train.py",
            ["tiny.toml", "--dry-run", "--eval-only"],
            "not allowed with argument --dry-run",
        ),
        ("train.py", ["tiny.toml", "--=5", "--two"], "--=5, --two: unknown"),
        ("train.py", ["tiny.toml", "other.toml"], "other.toml: unknown; CONFIG comes first"),
        pytest.param(
            "data/prepare.py",
            ["tiny.toml", "--dry-run"],
            "--dry-run and --eval-only require ./run_train.sh CONFIG",
            marks=needs_extra("planner"),
        ),
        (
            "data/show.py",
            ["tiny.toml", "--eval-only"],
            "--dry-run and --eval-only require ./run_train.sh CONFIG",
        ),
        pytest.param(
            "train.py",
            ["tiny.toml", "--dry-run", "--gpu-memory-gib=inf"],
            "inf must be finite, above 0",
            marks=needs_extra("planner"),
        ),
        pytest.param(
            "train.py",
            ["tiny.toml", "--dry-run", "--world-size=2,x"],
            "x must be an integer, above 0",
            marks=needs_extra("planner"),
        ),
        ("train.py", ["tiny.toml", f"--train.steps={'9' * 5000}"], "must be an integer"),
        ("train.py", ["tiny.toml", f"--train.steps={'[' * 3000}"], "must be an integer"),
    ],
    ids=range(15),
)
def test_wrong_command_lines_are_told(program, arguments, told):
    if told == "--dry-run" and not config.has_extra("planner"):
        pytest.skip("needs planner")
    command = [sys.executable, "-m", program[:-3].replace("/", "."), *arguments]
    done = subprocess.run(
        command,
        cwd=REPO / "configs",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize("path", ["missing.toml", "", "."])
def test_unreadable_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        config.load(path)


@needs_extra("huggingface", "lora")
@pytest.mark.parametrize(
    "sizes, tp",
    [
        ({"dim": 96}, 1),
        ({"dim": 128, "ffn_dim": 192}, 2),
        ({"dim": 192, "head_dim": 48, "ffn_dim": 256}, 2),
    ],
)
def test_blocks_of_nf4_come_out_even_on_every_rank(sizes, tp):
    """Each of the three widths, whole or as tp cuts it."""
    sizes = {
        "dim": 128,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 32,
        "ffn_dim": 256,
        "init_from": "x",
        **sizes,
    }
    wide = {"dim": 256, "head_dim": 64, "ffn_dim": 512}
    lora = {"base_dtype": "nf4"}
    make_config(model={**sizes, **wide}, lora=lora, parallel={"tp": tp})
    with pytest.raises(ConfigError, match="its blocks of 64 weights must come out even"):
        make_config(model=sizes, lora=lora, parallel={"tp": tp})


def test_launcher_refuses_before_anything_is_made(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(toml(train={**TINY["train"]}).replace("steps = 4", "steps = 0\nspeed = 3"))
    before = set(tmp_path.iterdir())
    done = launch("bad.toml", "--run.seed=x", cwd=tmp_path, nproc=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("\n") == 3, done.stderr  # three problems, a line each
    assert set(tmp_path.iterdir()) == before


def test_wrong_configuration_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, REPO / "train.py", REPO / "configs/tiny.toml", "--train.steps=x"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{REPO}"},
    )
    assert done.returncode == 2 and "torch was imported" not in done.stderr


def test_help_lists_every_option():
    shown = subprocess.run(
        [sys.executable, REPO / "train.py", "--help"], capture_output=True, text=True
    ).stdout
    for section, values in config.to_dict(config.load(str(REPO / "configs/tiny.toml"))).items():
        assert f"[{section}]" in shown
        assert all(f"  {key} = " in shown for key in values)
    assert all(
        f"\n{table}" in shown
        for table in ("[lora]", "[profile]", "[model.rope_scaling]", "[[data.sources]]")
    )
    tables = [
        kind
        for kind in vars(config).values()
        if dataclasses.is_dataclass(kind) and kind is not config.Config
    ]
    named = Counter()
    for kind in tables:
        named.update(f.name for f in dataclasses.fields(kind) if f.name != "rope_scaling")
    assert Counter(re.findall(r"^  (\w+) = ", shown, re.MULTILINE)) == named


def test_help_on_a_section_or_an_option_is_toml_that_is_wrapped_at_words():
    everything = config.SCHEMA.help()
    assert max(map(len, everything.splitlines())) <= 100
    section = config.SCHEMA.help("optim")
    assert section in everything and section.count("\n[") == 0
    assert config.SCHEMA.help("lr") == config.SCHEMA.help("optim.lr")
    assert tomli.loads(config.SCHEMA.help("lr")) == {"optim": {"lr": 3e-4}}
    assert "[[data.sources]]" in config.SCHEMA.help("data")
    with pytest.raises(ConfigError, match=r"^--help optm: .*; did you mean optim\?$"):
        config.SCHEMA.help("optm")


@needs_extra("planner")
def test_it_may_be_called_through_a_link_and_with_any_cdpath(tmp_path):
    link = tmp_path / "rt"
    link.symlink_to(REPO / "run_train.sh")
    for script, cwd in ((link, tmp_path), (f"{REPO.name}/run_train.sh", REPO.parent)):
        done = subprocess.run(
            ["bash", script, REPO / "configs/tiny.toml", "--dry-run", "--json"],
            cwd=cwd,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHON": sys.executable, "CDPATH": f"{REPO.parent}:."},
        )
        assert done.returncode == 0 and json.loads(done.stdout), done.stderr


def test_relative_paths_are_the_callers(tmp_path):
    (tmp_path / "mine.toml").write_text(toml())
    done = launch("mine.toml", "--data.source=nothing.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "nothing.jsonl: no such file" in done.stderr, done.stderr
    assert not pathlib.Path(tmp_path / "outputs").exists()


def test_an_override_may_hold_an_equals_sign():
    raw = config.read_toml(str(CONFIGS[0]))
    assert (
        config.from_dict(raw, "x.toml", ["--data.source=/date=2024/x.jsonl"]).data.source
        == "/date=2024/x.jsonl"
    )


def test_a_table_without_options_is_written_and_read_back():
    cfg = make_config(eval={}, checkpoint={})
    again = config.from_dict(tomli.loads(config.to_toml(cfg)), "test.toml")
    assert again == cfg and again.eval is not None and make_config().eval is None


def test_checks_together_tell_all_that_is_wrong():
    def fail(*problems: str) -> None:
        raise ConfigError(*problems)

    with pytest.raises(ConfigError, match="^a\nb\nc$"):
        config.together(lambda: fail("a", "b"), lambda: 1, lambda: fail("c"), lambda: 2)
    assert config.together(lambda: 1, lambda: 2) == [1, 2]


def test_a_mistyped_number_of_layers_costs_nothing():
    """Neither seconds nor gigabytes: there are no units to name."""
    cfg = make_config(model={"n_layers": 10**12})
    assert cfg.model.n_layers == 10**12


def test_paths_begin_at_home_and_hold_nothing_that_a_shell_would_replace(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    written = tables(data={"source": "~/a.jsonl", "validation": "a~b/~"}, run={"name": "x"})
    cfg = config.from_dict(written, "t.toml", ["--run.output_dir=~/runs", "--data.path=~"])
    assert cfg.data.source == "/home/me/a.jsonl"
    assert cfg.data.validation == "a~b/~"
    assert (cfg.run.output_dir, cfg.data.path) == ("/home/me/runs", "/home/me")
    source = {"source": "~/b.jsonl", "validation": "~/c.jsonl"}
    mixture = config.from_dict(tables(data={"sources": [source]}), "t.toml")
    assert mixture.data.sources[0].source == "/home/me/b.jsonl"
    assert mixture.data.sources[0].validation == "/home/me/c.jsonl"
    for path in ("$HOME/a", "a/${USER}/b", "s3://a/b", "file:///a/b", "hf://datasets/a/b"):
        for name in ("run.output_dir", "data.source", "data.tokenizer", "data.path"):
            with pytest.raises(ConfigError, match="only a shell|is a URL"):
                config.from_dict(tables(), "t.toml", [f"--{name}={path}"])
    for path in ("a$", "costs-$", "C:/a", "data//a", "owner/name@abc"):
        assert (
            config.from_dict(tables(), "t.toml", [f"--data.tokenizer={path}"]).data.tokenizer
            == path
        )


def test_an_option_with_several_values_is_named():
    words = ["--a.b=1", "--a.c=1", "--a.b=2", "--a.c=1", "--a.b=1"]
    assert config.repeated(words) == ["--a.b is given 3 times; the last counts: 1"]


def test_whatever_a_value_holds_is_written_as_toml_that_is_read_back():
    texts = [
        'say "a\\b"',
        "two\nlines\tand a tab",
        "\x01\x1f\x7f",
        "caf\u00e9 \u2028 \U0001f600",
        "#",
    ]
    values = [*texts, 0, -7, 2**63 - 1, 1e-05, 1e22, 0.1 + 0.2, -0.0, True, False, [], texts]
    for value in [*values, {}, {"a b": 1, "c.d": {"\u00e9": [2]}, "plain_key-1": "x"}]:
        assert tomli.loads(f"value = {config.toml(value)}") == {"value": value}


def test_an_option_belongs_to_its_table_and_not_to_one_whose_name_begins_so():
    assert all(config.is_in(name, "eval") for name in ("eval", "eval.batches", "eval.a.b"))
    assert not any(config.is_in(name, "eval") for name in ("evals", "evaluate.batches", "a.eval"))


def test_a_number_of_the_command_line_is_finite_and_above_0():
    assert config.positive("1e-9") == 1e-9 and config.positive("2", int) == 2
    for text in ("0", "-1", "inf", "nan", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="must be finite, above 0"):
            config.positive(text)
    for text in ("0", "-1", "2.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be an integer, above 0"):
            config.positive(text, int)


def test_trouble_that_may_pass_is_no_invalid_input(capsys):
    """A tool names the file, and exits as one that failed. Any other error is shown in full."""

    def fails_with(number: int) -> Callable[[list[str]], int]:
        def main(argv: list[str]) -> int:
            raise OSError(number, "Stale file handle", "prepared/a/manifest.json")

        return main

    with pytest.raises(SystemExit) as ended:
        config.run_tool(fails_with(errno.ESTALE))
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("prepared/a/manifest.json: Stale file handle; ")
    with pytest.raises(IsADirectoryError):
        config.run_tool(fails_with(errno.EISDIR))
