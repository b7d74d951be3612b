"""Values that an option takes, rules between options, and what follows from options.

A table has a row for each kind of value and for each rule, not for each option: an option that a
fork adds needs none.
"""

import pytest

import config
from config import ConfigError
from tests.conftest import has_extra, make_config, refuses, tables

pytestmark = pytest.mark.quick

TWO_WRONG = [{"source": "a", "weight": 0}, {"wieght": 1}]
# option, values that hold, values that do not, key words of the error
VALUES = [
    ("train.steps", [1, 2**63 - 1], [0, -1], "greater than 0"),
    ("train.steps", [], ["many", 4.0, True, [1], "1\r"], "an integer"),
    ("train.steps", [], [2**63, -(2**63)], "64 bits"),
    ("run.seed", [0], [-1], "at least 0"),
    ("optim.lr", [1, 1e-9, 9e299], [0, -1.0], "greater than 0"),
    ("optim.lr", [], [float("inf"), float("nan"), 1e300], "finite"),
    ("optim.weight_decay", [0, 1e-9], [-1e-9], "at least 0"),
    ("optim.eps", [1e-38], [9e-39, 0], "float32"),
    ("optim.min_lr_ratio", [0, 1], [-0.001, 1.001], "between 0 and 1"),
    ("optim.betas", [[0, 0.999]], [[1, 0.9], [0.9, 1], [-0.1, 0.9]], "both"),
    ("optim.betas", [], [[0.9], 0.9, [0.9, "x"]], "list of 2"),
    ("optim.schedule", ["cosine", "wsd"], ["cosin", 1], '"cosine" or "linear"'),
    ("model.rope_scaling.factor", [1], [0.999], "at least 1"),
    ("run.start_timeout_seconds", [1e-9, 1e8], [0, 100_000_001], "at most 1e8"),
    ("run.name", ["a", "_a.b-c", "a" * 200], [".a", "-a", "a b", "a/b", "a" * 201], "only letters"),
    ("run.name", [], ["a\r", "\x1b[31m", "a\0b", "\udcff"], "control characters"),
    ("log.tensorboard", [True, False], [0, "true", "off"], "true or false"),
    ("parallel.dp_shard", [1, "auto"], [0], "greater than 0"),
    ("parallel.dp_shard", [], ["all"], 'an integer or "auto"'),
    ("parallel.param_dtype", ["auto", "bfloat16"], ["float16", "fp16"], 'or "bfloat16"'),
    ("train.steps", [], [""], "leave the option out"),
    ("parallel.keep_fp32", [[], ["blocks.*"]], ["blocks.*", [1]], "a list, of text"),
    ("lora.targets", [["q_proj"], "all-linear"], [[], ["q_proj", "lm_head"]], "q_proj, k_proj"),
    ("data.source", ["a b#c", "C:/a", "costs-$"], ["s3://a/b", "file:///a"], "URL"),
    ("data.tokenizer", ["owner/name@abc"], ["$HOME/a", "a/${USER}/b"], "shell"),
    ("data.format", ["alpaca"], ["tokens", "chat"], '"text" or "messages" or "alpaca" or'),
    ("data.sources", [[{"source": "a"}]], [[1], {"source": "a"}], "a table of source"),
    ("data.sources", [], [TWO_WRONG], "weight = 0: .*wieght = 1: .*source: is missing"),
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
    ("model.head_dim=6", "model.n_heads", "10", "", ""),
    ("", "model.n_layers", "1000000000000", "", ""),  # mistyped, it costs no memory
    ("", "model.head_dim", "2 12", "1 11", "even"),
    ("", "model.dim", "40 8", "44 4", "even"),
    ("model.rope_scaling.factor=8", "model.rope_scaling.low_freq_factor", "3.9", "4.0", "below"),
    (f"data.sources=[{A}]", "data.validation", "", "v.txt", "each source"),
    (f"data.sources=[{A}]", "data.source", "python-stdlib", "x.txt", "incompatible"),
    ("", "data.sources", f"[{A},{TEXT}] [{A},{SPLIT}] [{A},{LIGHT}]", f"[{A},{A}]", "twice"),
    ("", "data.sources", "", '[{source="/dev/null"},{source="/dev/./null"}]', "twice"),
    ("data.split=test", "data.sources", f"[{A},{TEXT}]", f"[{A},{SPLIT}]", "twice"),
    ("", "data.sources", "", f'[{A},{{source="b",weight=65536}}]', "1/65536 of the sum"),
    (CHAT, "data.sources", f"[{MESSAGES},{ALPACA}]", f"[{A},{ALPACA}]", "mixes text"),
    (f"{CHAT} data.format=alpaca", "data.sources", f"[{A}]", f"[{A},{TEXT}]", "mixes text"),
    ("data.document_mask=true", "data.sources", f"[{A}]", f"[{ALPACA}]", "data.tokenizer"),
    ("data.document_mask=true", "data.format", "text", "alpaca messages", "data.tokenizer"),
    ("data.document_mask=true", "data.messages_field", "", "m", "data.tokenizer"),
    (f"{CHAT} data.format=alpaca", "data.document_mask", "true", "false", "implied"),
    (f"{CHAT} data.format=alpaca", "data.text_field", "text", "body", "column of texts"),
    (f"{CHAT} data.format=alpaca", "data.messages_field", "", "m", 'format = "messages"'),
    (f"{CHAT} data.format=messages", "data.messages_field", "m", "", ""),
    (f"{CHAT} data.format=text", "data.chat_template", "", "t.jinja", "rows are texts"),
    (f"{CHAT} data.messages_field=m", "data.chat_template", "t.jinja", "", ""),
    ("", "train.micro_batch_size", "1 8", "3 16", "divide global_batch_size = 8"),
    ("parallel.cp=2", "train.seq_len", "36", "33 34", "2 x parallel.cp = 4"),
    ("parallel.tp=2", "train.seq_len", "34", "33", "parallel.tp = 2"),
    ("model.n_kv_heads=4 parallel.cp=2 parallel.tp=4", "train.seq_len", "40", "36", "= 8"),
    ("parallel.float8=rowwise", "train.seq_len", "16 48", "40", "= 16 with float8"),
    ("parallel.float8=rowwise parallel.cp=2", "train.seq_len", "64", "48", "= 32 with float8"),
    ("optim.schedule_steps=20", "optim.warmup_steps", "20", "21", "exceed schedule_steps = 20"),
    ("", "optim.warmup_steps", "9", "", ""),
    ("optim.warmup_steps=1", "optim.schedule", "linear constant", "wsd", "decay_steps"),
    ("optim.schedule=wsd optim.warmup_steps=1", "optim.decay_steps", "1 3", "4", "fit"),
    ("optim.schedule=wsd optim.warmup_steps=4", "optim.decay_steps", "", "1", "fit"),
    ("", "optim.decay_steps", "", "1", "wsd"),
    ("parallel.cpu_offload=true", "optim.name", "adamw", "muon", "cpu_offload"),
    (LORA, "optim.name", "adamw", "muon", "lora"),
    ("", "optim.muon_lr", "", "0.1", "muon"),
    ("parallel.dp_shard=auto", "parallel.dp_replicate", "1 7", "auto", "only one"),
    ("parallel.tp=2", "model.ffn_dim", "82", "81", "parallel.tp = 2"),
    ("", "parallel.keep_fp32", '["blocks.[01]","head"]', '["blocks.2"]', "blocks.0, blocks.1"),
    ("model.tie_embeddings=true", "parallel.keep_fp32", '["embedding+head"]', '["head"]', "unit"),
    ("parallel.cpu_offload=true", "parallel.replicated", "[]", '["head*"]', "cpu_offload"),
    ("parallel.tp=2", "parallel.replicated", "[]", '["head*"]', "tp = 1"),
    ("", "parallel.recompute", "1 2 full", "3", "2 blocks"),
    ("parallel.tp=2 parallel.compile=true", "parallel.recompute", "selective", "full 1", "tp"),
    ("parallel.tp=2", "parallel.float8", "none", "rowwise", "tp = 1"),
    ('parallel.keep_fp32=["blocks.1"]', "parallel.float8", "none", "rowwise", "blocks.1"),
    ('parallel.keep_fp32=["head"]', "parallel.float8", "rowwise", "", ""),
    ("parallel.cpu_offload=true", "parallel.float8", "rowwise", "tensorwise", "cpu_offload"),
    (LORA, "parallel.float8", "none", "rowwise", "lora"),
    ("", "lora.rank", "", "2", "model.init_from"),
    # the smallest side of the matrices, whose width is dim, 40, 20 or 80
    (WIDE, "lora.rank", "20", "21", "smallest side of its matrices, 20"),
    (f'{WIDE} lora.targets=["q_proj","o_proj"]', "lora.rank", "40", "41", "matrices, 40"),
    (f'{WIDE} lora.targets=["v_proj"]', "lora.rank", "20", "21", "matrices, 20"),
    (f'{WIDE} lora.targets=["up_proj","down_proj"]', "lora.rank", "80", "81", "matrices, 80"),
    (f'{WIDE} lora.targets=["gate_proj","q_proj"]', "lora.rank", "40", "41", "matrices, 40"),
    (f"{WIDE} model.dim=16", "lora.rank", "16", "17", "matrices, 16"),
    (NF4, "lora.base_dtype", "nf4", "", ""),
    (f"{NF4} model.dim=96", "lora.base_dtype", "float32", "nf4", "dim = 96"),
    (f"{NF4} model.ffn_dim=192 parallel.tp=2", "lora.base_dtype", "float32", "nf4", "tp = 96"),
    (f"{NF4} model.head_dim=40 parallel.tp=2", "lora.base_dtype", "float32", "nf4", "tp = 80"),
    ("", "checkpoint.allow_changed", '["train.seq_len"]', '["seq_len"]', "section.key"),
    ("checkpoint.keep_last=1", "checkpoint.keep_every_steps", "", "2", "save_every_steps"),
    ("checkpoint.save_every_steps=2", "checkpoint.keep_every_steps", "", "2", "keep_last"),
    (KEEP, "checkpoint.keep_every_steps", "2 4", "3", "multiple of save_every_steps, 2"),
    ("profile.steps=2", "profile.at_step", "1 3", "4", "end by train.steps = 4"),
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
    (6, 12, 2, {"dp_replicate": 2}, (2, 3, 1, 1)),
    (6, 12, 2, {"dp_replicate": "auto", "dp_shard": 3}, (2, 3, 1, 1)),
    (12, 12, 2, {"dp_replicate": 3, "cp": 2}, (3, 2, 2, 1)),
    (12, 12, 2, {"dp_replicate": "auto", "dp_shard": 1, "tp": 2}, (6, 1, 1, 2)),
    (12, 2, 2, {"cp": 3, "tp": 4}, (1, 1, 3, 4)),
    (6, 6, None, {}, (1, 6, 1, 1)),
    (6, 12, 2, {"dp_replicate": 2, "dp_shard": 2}, "dp_shard = 2: .*equal the number of ranks, 6"),
    (8, 12, 2, {"dp_replicate": 3, "cp": 2, "tp": 2}, "= 3, cp = 2 and tp = 2 .*ranks, 8"),
    (6, 12, 2, {"cp": 4}, "cp = 4, tp = 1: .*divide the number of ranks, 6"),
    (6, 8, 2, {}, "global_batch_size = 8: .*2 x 6 = 12"),
    (4, 6, None, {}, "global_batch_size = 6: .*1 x 4 = 4"),
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


def test_evaluation_is_due_every_so_many_steps_and_after_the_last():
    def due(steps: int, **sections: dict | None) -> list[int]:
        cfg = make_config(train={"steps": 7}, **sections)
        return [step for step in range(steps + 1) if config.evaluation_is_due(cfg, step)]

    assert due(9) == []
    assert due(9, eval={}) == [7, 8, 9]  # of a run that resumes past its end
    assert due(9, eval={"every_steps": 3}) == [3, 6, 7, 8, 9]


def test_numbers_that_follow_from_options():
    cfg = make_config(train={"global_batch_size": 60, "seq_len": 96, "micro_batch_size": 5})
    assert config.tokens_per_step(cfg.train) == 5760
    assert [config.accumulation_steps(cfg.train, ranks) for ranks in (1, 3, 12)] == [12, 4, 1]
    cfg = make_config(train={"global_batch_size": 60, "micro_batch_size": None})
    assert [config.micro_batch_size(cfg.train, ranks) for ranks in (1, 4, 60)] == [60, 15, 1]
    assert [config.accumulation_steps(cfg.train, ranks) for ranks in (1, 4, 60)] == [1, 1, 1]
    cfg = make_config(model={"head_dim": 10}, optim={"schedule_steps": 9})
    assert (cfg.model.width_per_head, config.schedule_steps(cfg)) == (10, 9)
    cfg = make_config(run={"output_dir": "a/b", "name": "c"})
    assert (cfg.model.width_per_head, config.schedule_steps(cfg)) == (12, 4)
    assert str(config.run_folder(cfg.run)) == "a/b/c"
    assert config.Lora(rank=11).scale == 2 and config.Lora(rank=8, alpha=2.0).scale == 0.25
