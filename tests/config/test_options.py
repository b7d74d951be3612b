"""Values that an option takes, rules between options, and the mesh of a number of ranks.

A table has a row for each kind of value and for each rule, not for each option: an option that a
fork adds needs none.
"""

import pytest

import config
from config import ConfigError
from tests.conftest import has_extra, make_config, refuses, tables

pytestmark = pytest.mark.quick

# option, values that hold, values that do not, key words of the error
VALUES = [
    ("train.steps", [1, 2**63 - 1], [0, -1], "greater than 0"),
    ("train.steps", [], ["many", 4.0, True, [1], "1\r"], "an integer"),
    ("train.steps", [], [2**63, -(2**63)], "64 bits"),
    ("run.seed", [0], [-1], "at least 0"),
    ("optim.lr", [1, 1e-9, 9e299], [0, -1.0], "greater than 0"),
    ("optim.lr", [], [float("inf"), float("nan"), 1e300], "finite"),
    ("optim.eps", [1e-38], [9e-39, 0], "float32"),
    ("optim.min_lr_ratio", [0, 1], [-0.001, 1.001], "between 0 and 1"),
    ("optim.betas", [[0, 0.999]], [[1, 0.9], [0.9, 1], [-0.1, 0.9]], "both"),
    ("optim.schedule", ["cosine", "wsd"], ["cosin", 1], '"cosine" or "linear"'),
    ("run.name", ["a", "_a.b-c", "a" * 200], [".a", "-a", "a b", "a/b", "a" * 201], "only letters"),
    ("run.name", [], ["a\r", "\x1b[31m", "a\0b", "\udcff"], "control characters"),
    ("log.tensorboard", [True, False], [0, "true", "off"], "true or false"),
    ("parallel.dp_shard", [1, "auto"], [0], "greater than 0"),
    ("parallel.dp_shard", [], ["all"], 'an integer or "auto"'),
    ("parallel.keep_fp32", [[], ["blocks.*"]], ["blocks.*", [1]], "a list, of text"),
    ("lora.targets", [["q_proj"], "all-linear"], [[], ["q_proj", "lm_head"]], "q_proj, k_proj"),
    ("data.source", ["a b#c", "C:/a", "costs-$"], ["s3://a/b", "file:///a"], "URL"),
    ("data.tokenizer", ["owner/name@abc"], ["$HOME/a", "a/${USER}/b"], "shell"),
    ("data.sources", [[{"source": "a"}]], [[1], {"source": "a"}], "a table of source"),
    ("eval", [{}], [3, "on"], r"a table, .*\[eval\]; .*--eval.every_steps=VALUE .*--eval=off"),
]


@pytest.mark.parametrize(("option", "values", "wrong", "words"), VALUES)
def test_values_up_to_the_edge_of_an_option(option, values, wrong, words):
    for value in values:
        config.convert(option, value)
    for value in wrong:
        with pytest.raises(ValueError, match=words):
            config.convert(option, value)


CHAT = "data.tokenizer=t.json data.document_mask=true"
WIDE = "model.init_from=x model.dim=96 model.head_dim=10"
LORA = f"{WIDE} lora.rank=2"
KEEP = "checkpoint.save_every_steps=2 checkpoint.keep_last=1"
NF4 = f"{LORA} model.dim=128 model.head_dim=32 model.ffn_dim=128 model.n_kv_heads=4"
A = '{source="a"}'
SPLIT = '{source="a",split="test"}'
LIGHT = '{source="b",weight=65535}'
TEXT = '{source="b",format="text"}'
MESSAGES = '{source="b",format="messages"}'
ALPACA = '{source="c",format="alpaca"}'
# other options, the option that the error names, values that hold, values that do not, key words
RULES = [
    ("", "model.n_kv_heads", "1 2 4", "3 8", "divide n_heads = 4"),
    ("", "model.n_heads", "8 24", "10", "divide dim = 48"),
    ("", "model.head_dim", "2 12", "1 11", "even"),
    (f"data.sources=[{A}]", "data.validation", "", "v.txt", "each source"),
    (f"data.sources=[{A}]", "data.source", "python-stdlib", "x.txt", "incompatible"),
    ("", "data.sources", f"[{A},{TEXT}] [{A},{SPLIT}] [{A},{LIGHT}]", f"[{A},{A}]", "twice"),
    ("", "data.sources", "", f'[{A},{{source="b",weight=65536}}]', "1/65536 of the sum"),
    (CHAT, "data.sources", f"[{MESSAGES},{ALPACA}]", f"[{A},{ALPACA}]", "mixes text"),
    ("data.document_mask=true", "data.format", "text", "alpaca messages", "data.tokenizer"),
    (f"{CHAT} data.format=alpaca", "data.document_mask", "true", "false", "implied"),
    (f"{CHAT} data.format=alpaca", "data.text_field", "text", "body", "column of texts"),
    (f"{CHAT} data.format=alpaca", "data.messages_field", "", "m", 'format = "messages"'),
    (f"{CHAT} data.format=text", "data.chat_template", "", "t.jinja", "rows are texts"),
    ("", "train.micro_batch_size", "1 8", "3 16", "divide global_batch_size = 8"),
    ("parallel.cp=2", "train.seq_len", "36", "33 34", "2 x parallel.cp = 4"),
    ("model.n_kv_heads=4 parallel.cp=2 parallel.tp=4", "train.seq_len", "40", "36", "= 8"),
    ("parallel.float8=rowwise parallel.cp=2", "train.seq_len", "64", "48", "= 32 with float8"),
    ("optim.schedule_steps=20", "optim.warmup_steps", "20", "21", "exceed schedule_steps = 20"),
    ("optim.warmup_steps=1", "optim.schedule", "linear constant", "wsd", "decay_steps"),
    ("optim.schedule=wsd optim.warmup_steps=1", "optim.decay_steps", "1 3", "4", "fit"),
    ("", "optim.decay_steps", "", "1", "wsd"),
    ("parallel.cpu_offload=true", "optim.name", "adamw", "muon", "cpu_offload"),
    (LORA, "optim.name", "adamw", "muon", "lora"),
    ("", "optim.muon_lr", "", "0.1", "muon"),
    ("parallel.dp_shard=auto", "parallel.dp_replicate", "1 7", "auto", "only one"),
    ("parallel.tp=2", "model.ffn_dim", "82", "81", "parallel.tp = 2"),
    ("", "parallel.keep_fp32", '["blocks.[01]","head"]', '["blocks.2"]', "blocks.0, blocks.1"),
    ("parallel.cpu_offload=true", "parallel.replicated", "[]", '["head*"]', "cpu_offload"),
    ("parallel.tp=2", "parallel.replicated", "[]", '["head*"]', "tp = 1"),
    ("", "parallel.recompute", "1 2 full", "3", "2 blocks"),
    ("parallel.tp=2 parallel.compile=true", "parallel.recompute", "selective", "full 1", "tp"),
    ("parallel.tp=2", "parallel.float8", "none", "rowwise", "tp = 1"),
    ('parallel.keep_fp32=["blocks.1"]', "parallel.float8", "none", "rowwise", "blocks.1"),
    ("parallel.cpu_offload=true", "parallel.float8", "rowwise", "tensorwise", "cpu_offload"),
    (LORA, "parallel.float8", "none", "rowwise", "lora"),
    ("", "lora.rank", "", "2", "model.init_from"),
    (WIDE, "lora.rank", "20", "21", "smallest side of its matrices, 20"),
    (f"{NF4} model.dim=96", "lora.base_dtype", "float32", "nf4", "dim = 96"),
    (f"{NF4} model.ffn_dim=192 parallel.tp=2", "lora.base_dtype", "float32", "nf4", "tp = 96"),
    ("", "checkpoint.allow_changed", '["train.seq_len"]', '["seq_len"]', "section.key"),
    ("checkpoint.keep_last=1", "checkpoint.keep_every_steps", "", "2", "save_every_steps"),
    (KEEP, "checkpoint.keep_every_steps", "2 4", "3", "multiple of save_every_steps, 2"),
]


@pytest.mark.parametrize(("others", "option", "values", "wrong", "words"), RULES)
def test_rules_up_to_their_edge(others, option, values, wrong, words):
    def read(value: str) -> config.Config:
        assignments = [*others.split(), f"{option}={value}"]
        return config.from_dict(tables(), "t.toml", [f"--{each}" for each in assignments])

    section, _, key = option.rpartition(".")
    if "init_from" in others and not has_extra("huggingface"):
        pytest.skip("needs extras/huggingface")
    for value in values.split():
        read(value)
    for value in wrong.split():
        with pytest.raises(ConfigError) as error:
            read(value)
        (problem,) = [text for text in error.value.problems if words in text]
        assert problem.startswith(f"command line: [{section}] {key} = ")


# ranks, global batch, micro-batch, [parallel], (dp_replicate, dp_shard, cp, tp) or key words
MESHES = [
    (6, 12, 2, {"dp_replicate": "auto", "dp_shard": 3}, (2, 3, 1, 1)),
    (12, 12, 2, {"dp_replicate": 3, "cp": 2}, (3, 2, 2, 1)),
    (12, 2, 2, {"cp": 3, "tp": 4}, (1, 1, 3, 4)),
    (6, 6, None, {}, (1, 6, 1, 1)),
    (6, 12, 2, {"dp_replicate": 2, "dp_shard": 2}, "dp_shard = 2: .*equal the number of ranks, 6"),
    (6, 12, 2, {"cp": 4}, "cp = 4, tp = 1: .*divide the number of ranks, 6"),
    (6, 8, 2, {}, "global_batch_size = 8: .*2 x 6 = 12"),
]


@pytest.mark.parametrize(("ranks", "batch", "micro_batch", "parallel", "expected"), MESHES)
def test_mesh_of_a_number_of_ranks(ranks, batch, micro_batch, parallel, expected):
    train = {"global_batch_size": batch, "micro_batch_size": micro_batch, "seq_len": 48}
    cfg = make_config(model={"n_kv_heads": 4}, train=train, parallel=parallel)
    if isinstance(expected, tuple):
        assert config.mesh_shape(cfg, ranks) == expected
        return
    with refuses(expected):
        config.mesh_shape(cfg, ranks)
