"""The limits of each option, and of options together: the last values that are accepted, the first that are refused."""

import copy
import dataclasses
import re
import typing

import pytest

import config
from config import ConfigError
from model.build import meta_model
from tests.conftest import lacks, make_config, needs_extra

pytestmark = pytest.mark.quick

# options: (accepted, refused)
LIMITS = {
    """
    model.dim model.n_layers model.n_heads model.n_kv_heads model.ffn_dim model.vocab_size model.head_dim
    model.rope_scaling.original_max_position_embeddings data.max_tokens train.seq_len train.global_batch_size
    train.micro_batch_size optim.decay_steps optim.schedule_steps parallel.cp parallel.tp lora.rank
    checkpoint.save_every_steps checkpoint.keep_last checkpoint.keep_every_steps eval.every_steps eval.batches
    log.every_steps profile.at_step profile.steps
    """: ([1], [0, -1]),
    "train.steps": ([1, 2**63 - 1], [0, -1, 2**63]),
    "parallel.dp_replicate parallel.dp_shard": ([1, "auto"], [0, -1, "all"]),
    "parallel.recompute": ([1, "none", "elementwise", "selective", "full"], [0, -1, "half"]),
    "checkpoint.resume": ([1, "auto", "never"], [0, -1, "always"]),
    """
    run.seed train.skip_nonfinite optim.warmup_steps parallel.prefetch_forward parallel.prefetch_backward
    """: ([0], [-1]),
    "optim.weight_decay": ([0, 1e-9], [-1e-9]),
    """
    model.rope_theta model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor optim.lr optim.muon_lr
    lora.alpha
    """: ([1e-9, 9e299], [0, -1, 1e300]),
    "train.max_grad_norm": ([1e-9, "off"], [0, -1, "on"]),
    "model.rope_scaling.factor": ([1], [0.999]),
    "model.norm_eps optim.eps": ([1e-38], [9e-39, 0, -1e-5]),
    "optim.muon_momentum": ([0, 0.999], [1, -0.001]),
    "optim.betas": ([[0, 0], [0.999, 0.999]], [[1, 0.9], [0.9, 1], [-0.1, 0.9], [0.9, -0.1]]),
    "optim.min_lr_ratio": ([0, 1], [-0.001, 1.001]),
    """
    run.start_timeout_seconds run.step_timeout_seconds run.save_timeout_seconds
    """: ([1e-9, 1e8], [0, -1, 100_000_001]),
    "run.name": (["a", "7", "_a.b-c", "a" * 200], [".a", "-a", "a b", "a/b", "a" * 201]),
    "lora.targets": (
        [["q_proj"], ["down_proj", "q_proj"], "all-linear"],
        [[], ["q_proj", "lm_head"], "all"],
    ),
}

# options: their words, as the documentation lists them
WORDS = {
    "run.device": "auto cuda cpu",
    "data.format": "text messages alpaca prompt_completion tokens",
    "data.order": "global growing",
    "optim.name": "adamw muon",
    "optim.schedule": "cosine linear constant wsd",
    "optim.state_dtype parallel.reduce_dtype parallel.output_dtype": "float32 bfloat16",
    "parallel.param_dtype": "auto bfloat16 float32",
    "parallel.float8": "none tensorwise rowwise",
    "lora.base_dtype": "bfloat16 float32 nf4",
    "log.tracker": "wandb trackio",
}


def is_refused(name: str, value: object) -> bool:
    try:
        config.SCHEMA.fit(name, value)
    except ValueError:
        return True
    return False


def test_the_limits_of_each_option():
    for names, (accepted, refused) in LIMITS.items():
        for name in names.split():
            for value in accepted:
                config.SCHEMA.fit(name, value)
            for value in refused:
                assert is_refused(name, value), (name, value)


def test_the_words_of_each_option():
    for names, words in WORDS.items():
        for name in names.split():
            for word in words.split():
                assert config.SCHEMA.fit(name, word) == word
            assert is_refused(name, words.split()[0] + "s")
            (kind,) = config.members(config.SCHEMA.options[name].annotation)
            assert {*typing.get_args(kind)} == {*words.split()}


BASE = {"init_from": "x", "dim": 96, "n_heads": 4, "head_dim": 10, "n_kv_heads": 2, "ffn_dim": 64}
CHAT = {"tokenizer": "t.json", "document_mask": True}
MUON = {"optim": {"name": "muon"}}
WSD = {"schedule": "wsd", "warmup_steps": 1}
A = {"source": "a", "weight": 1.0}
B = {"source": "b", "weight": 65_535.0}

# a rule between options: the others, the one that its error shows, (accepted, refused), what the error says
RULES = {
    "key/value heads": ({}, "model.n_kv_heads", ([1, 2, 4], [3, 8]), "must divide n_heads = 4"),
    "heads": ({}, "model.n_heads", ([8, 24], [10]), "must divide dim = 48, or head_dim be given"),
    "heads of a width": ({"model": {"head_dim": 6}}, "model.n_heads", ([10], []), ""),
    "even width": ({"model": {}}, "model.head_dim", ([2, 12], [1, 11]), "their width must be even"),
    "even width of dim": ({}, "model.dim", ([40, 8], [44, 4]), "their width must be even"),
    "rope": (
        {"model": {"rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0}}},
        "model.rope_scaling.low_freq_factor",
        ([3.999], [4.0]),
        "must be below high_freq_factor = 4.0",
    ),
    "validation of a mixture": (
        {"data": {"sources": [A]}},
        "data.validation",
        ([None], ["v.txt"]),
        "is an option of each source",
    ),
    "column of messages": (
        {"data": {**CHAT, "messages_field": "m"}},
        "data.format",
        ([None, "messages"], []),
        "",
    ),
    "column of messages of other rows": (
        {"data": {**CHAT, "format": "alpaca"}},
        "data.messages_field",
        ([None], ["m"]),
        'is a column of format = "messages"',
    ),
    "column of text": (
        {"data": {**CHAT, "format": "alpaca"}},
        "data.text_field",
        ([None, "text"], ["body"]),
        "is a column of texts, and the rows are conversations",
    ),
    "template": (
        {"data": {"tokenizer": "t.json", "format": "text"}},
        "data.chat_template",
        ([None], ["t.jinja"]),
        "renders conversations, and the rows are texts",
    ),
    "template of a format that is found": (
        {"data": {"tokenizer": "t.json"}},
        "data.chat_template",
        (["t.jinja"], []),
        "",
    ),
    "conversations' tokenizer": (
        {"data": {"tokenizer": None}},
        "data.format",
        ([None, "text"], ["alpaca", "messages"]),
        "needs data.tokenizer",
    ),
    "conversations' order": (
        {"data": {"tokenizer": "t.json", "order": "growing"}},
        "data.format",
        ([None, "text"], ["alpaca"]),
        'is incompatible with order = "growing"',
    ),
    "conversations' mask": (
        {"data": {"tokenizer": "t.json", "format": "alpaca"}},
        "data.document_mask",
        ([None, True], [False]),
        "is implied by conversations",
    ),
    "conversations and text": (
        {"data": CHAT},
        "data.sources",
        (
            [
                [A, {**B, "format": "text"}],
                [{**A, "format": "alpaca"}, {**B, "format": "messages"}],
            ],
            [[{**A, "format": "alpaca"}, {**B, "format": "text"}]],
        ),
        "mixes text and conversations",
    ),
    "conversations of a mixture's common format, and text": (
        {"data": {**CHAT, "format": "alpaca"}},
        "data.sources",
        ([[A, B], [A, {**B, "format": "messages"}]], [[A, {**B, "format": "text"}]]),
        "mixes text and conversations (format = alpaca, text)",
    ),
    "conversations of a mixture's common column, and text": (
        {"data": {**CHAT, "messages_field": "m"}},
        "data.sources",
        ([[A, B]], [[A, {**B, "format": "text"}]]),
        "mixes text and conversations (format = messages, text)",
    ),
    "column of messages of a mixture": (
        {"data": {**CHAT, "sources": [{**A, "format": "alpaca"}, {**B, "format": "alpaca"}]}},
        "data.messages_field",
        ([None], ["m"]),
        'is a column of format = "messages"',
    ),
    "tokenizer of a column of messages": (
        {"data": {"tokenizer": None}},
        "data.messages_field",
        ([None], ["m"]),
        "needs data.tokenizer",
    ),
    "tokenizer of a format with its column": (
        {"data": {"tokenizer": None, "messages_field": "m"}},
        "data.format",
        ([], ["messages"]),
        "needs data.tokenizer",
    ),
    "tokenizer of a mixture": (
        {"data": {"tokenizer": None}},
        "data.sources",
        ([[A]], [[{**A, "format": "alpaca"}]]),
        "needs data.tokenizer",
    ),
    "weights": (
        {},
        "data.sources",
        (
            [[A, B]],
            [[A, {**B, "weight": 65_536.0}]],
        ),
        "a weight must be at least 1/65536 of the sum of all",
    ),
    "micro-batch": ({}, "train.micro_batch_size", ([1, 8], [3, 16]), "global_batch_size = 8"),
    "warm-up of a schedule": (
        {"optim": {"schedule_steps": 20}},
        "optim.warmup_steps",
        ([5, 20], [21]),
        "must not exceed schedule_steps = 20",
    ),
    "wsd": ({"optim": WSD}, "optim.decay_steps", ([1, 3], [4]), "with warmup_steps = 1 must fit"),
    "wsd after the warm-up": (
        {"optim": {**WSD, "warmup_steps": 4}},
        "optim.decay_steps",
        ([], [1]),
        "with warmup_steps = 4 must fit",
    ),
    "decay without wsd": ({}, "optim.decay_steps", ([None], [1]), 'requires schedule = "wsd"'),
    "wsd without decay": (
        {"optim": {"warmup_steps": 1}},
        "optim.schedule",
        (["cosine", "linear", "constant"], ["wsd"]),
        "needs optim.decay_steps",
    ),
    "muon and the host": (
        {"parallel": {"cpu_offload": True}},
        "optim.name",
        (["adamw"], ["muon"]),
        "is incompatible with cpu_offload",
    ),
    "muon and adapters": (
        {"model": BASE, "lora": {"rank": 2}},
        "optim.name",
        (["adamw"], ["muon"]),
        "and with [lora]",
    ),
    "muon's rate": (MUON, "optim.muon_lr", ([None, 0.1], []), ""),
    "another's rate": ({}, "optim.muon_lr", ([None], [0.1]), 'requires name = "muon"'),
    "muon's momentum": (MUON, "optim.muon_momentum", ([0.95, 0.9], []), ""),
    "another's momentum": ({}, "optim.muon_momentum", ([0.95], [0.9]), 'requires name = "muon"'),
    "both degrees": (
        {"parallel": {"dp_shard": "auto"}},
        "parallel.dp_replicate",
        ([1, 7], ["auto"]),
        'only one of dp_replicate and dp_shard may be "auto"',
    ),
    "units in float32": (
        {},
        "parallel.keep_fp32",
        (
            [[], ["blocks.1"], ["blocks.[01]", "head", "embedding"]],
            [["blocks.2"], ["head", "embedding+head"]],
        ),
        "a pattern matches no unit; they are embedding, blocks.0, blocks.1, ..., head",
    ),
    "units in float32 of tied embeddings": (
        {"model": {"tie_embeddings": True}},
        "parallel.keep_fp32",
        ([["embedding+head"]], [["head"]]),
        "they are embedding+head, blocks.0, blocks.1, ..., blocks.1",
    ),
    "replicated and offloaded": (
        {"parallel": {"cpu_offload": True}},
        "parallel.replicated",
        ([[]], [["embedding*"]]),
        "is incompatible with cpu_offload",
    ),
    "replicated and tp": (
        {"parallel": {"tp": 2}},
        "parallel.replicated",
        ([[]], [["embedding*"]]),
        "requires tp = 1",
    ),
    "one pool on the host": (
        {"parallel": {"cpu_offload": True}},
        "parallel.one_memory_pool",
        ([False], [True]),
        "is incompatible with cpu_offload",
    ),
    "one pool and replicas": (
        {"parallel": {"one_memory_pool": True}},
        "parallel.dp_replicate",
        ([1], []),
        "",
    ),
    "one pool": (
        {"parallel": {"dp_replicate": 2}},
        "parallel.one_memory_pool",
        ([False], [True]),
        "requires dp_replicate = 1, not 2",
    ),
    "every n-th block": ({}, "parallel.recompute", ([1, 2, "full"], [3]), "every n-th of 2 blocks"),
    "recompute of compiled tp": (
        {"parallel": {"tp": 2, "compile": True}},
        "parallel.recompute",
        (["none", "elementwise", "selective"], ["full", 1, 2]),
        "must be one of none, elementwise, selective with tp = 2 and compile",
    ),
    "recompute of a compiled model": (
        {"parallel": {"compile": True}},
        "parallel.recompute",
        (["full", 1], []),
        "",
    ),
    "any sequence": ({}, "train.seq_len", ([1, 33], []), ""),
    "recompute of tp": ({"parallel": {"tp": 2}}, "parallel.recompute", (["full", 1], []), ""),
    "ffn of tp": (
        {"parallel": {"tp": 2}},
        "model.ffn_dim",
        ([82], [81]),
        "must be a multiple of parallel.tp = 2",
    ),
    "vocabulary of tp": (
        {"parallel": {"tp": 2}},
        "model.vocab_size",
        ([322], [321]),
        "must be a multiple of parallel.tp = 2",
    ),
    "sequence of tp": (
        {"parallel": {"tp": 2}},
        "train.seq_len",
        ([34], [33]),
        "must be a multiple of parallel.cp x parallel.tp = 2",
    ),
    "sequence of cp": (
        {"parallel": {"cp": 2}},
        "train.seq_len",
        ([36], [33, 34]),
        "must be a multiple of 2 x parallel.cp = 4",
    ),
    "sequence of cp and tp": (
        {"model": {"n_kv_heads": 4}, "parallel": {"cp": 2, "tp": 4}},
        "train.seq_len",
        ([40], [36]),
        "must be a multiple of parallel.cp x parallel.tp = 8",
    ),
    "adapters' base": (
        {"model": {**BASE, "init_from": None}},
        "lora.rank",
        ([], [2]),
        "adapters need a base",
    ),
    "float8 and tp": (
        {"train": {"seq_len": 32}, "parallel": {"tp": 2}},
        "parallel.float8",
        (["none"], ["rowwise", "tensorwise"]),
        "requires tp = 1, not 2",
    ),
    "float8 and float32": (
        {"parallel": {"keep_fp32": ["blocks.1", "head"]}},
        "parallel.float8",
        (["none"], ["rowwise"]),
        "is incompatible with blocks.1 in keep_fp32",
    ),
    "float8 and a head in float32": (
        {"parallel": {"keep_fp32": ["head"]}},
        "parallel.float8",
        (["rowwise"], []),
        "",
    ),
    "float8 on the host": (
        {"parallel": {"cpu_offload": True}},
        "parallel.float8",
        (["rowwise"], ["tensorwise"]),
        'a shard copied to the GPU loses its scale; "rowwise" needs none',
    ),
    "sequence of float8": (
        {"parallel": {"float8": "rowwise"}},
        "train.seq_len",
        ([16, 48], [40]),
        "must be a multiple of 16 x parallel.cp = 16 with float8",
    ),
    "sequence of float8 and cp": (
        {"parallel": {"float8": "rowwise", "cp": 2}},
        "train.seq_len",
        ([32, 64], [48]),
        "must be a multiple of 16 x parallel.cp = 32 with float8",
    ),
    "float8 and adapters": (
        {"model": BASE, "lora": {"rank": 2}},
        "parallel.float8",
        (["none"], ["rowwise"]),
        "is incompatible with [lora]",
    ),
    "options that may change": (
        {},
        "checkpoint.allow_changed",
        ([[], ["train.seq_len", "optim.lr"]], [["seq_len"], ["optim.lr", "train"]]),
        "names no option",
    ),
    "profile": (
        {"profile": {"steps": 2}},
        "profile.at_step",
        ([1, 3], [4]),
        "with profile.steps = 2 must end by train.steps = 4",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_limits_of_options_together(rule):
    others, name, (accepted, refused), told = RULES[rule]
    table, _, key = name.rpartition(".")

    def with_value(value: object) -> dict:
        sections = copy.deepcopy(others)
        options = sections
        for part in table.split("."):
            options = options.setdefault(part, {})
        options[key] = value
        return sections

    if any(lacks(**with_value(value)) for value in [*accepted, *refused]):
        pytest.skip("needs an extra")
    for value in accepted:
        make_config(**with_value(value))
    for value in refused:
        shown = f"test.toml: [{table}] {key} = {config.toml(value)}: "
        with pytest.raises(ConfigError) as caught:
            make_config(**with_value(value))
        problems = [problem for problem in caught.value.problems if told in problem]
        assert len(problems) == 1 and problems[0].startswith(shown), caught.value


@needs_extra("huggingface", "lora")
@pytest.mark.parametrize("dim", [96, 16])
def test_an_adapter_has_at_most_the_rank_of_its_smallest_matrix(dim):
    """By the model's own matrices: wider than its projections, and narrower."""
    sizes = {**BASE, "dim": dim}
    plain = make_config(model={**sizes, "init_from": None}).model
    limits = {}
    for name, parameter in meta_model(plain).blocks[0].named_parameters():
        if parameter.dim() == 2:
            limits[name.split(".")[-2]] = min(parameter.shape)
    assert [*limits] == [*config.PROJECTIONS]
    for projection, limit in limits.items():
        lora = {"targets": [projection], "rank": limit}
        make_config(model=sizes, lora=lora)
        told = f"rank = {limit + 1}: must not exceed the smallest side of its matrices, {limit}$"
        with pytest.raises(ConfigError, match=told):
            make_config(model=sizes, lora={**lora, "rank": limit + 1})
    make_config(model=sizes, lora={"rank": min(limits.values())})
    with pytest.raises(ConfigError, match="smallest side"):
        make_config(model=sizes, lora={"rank": min(limits.values()) + 1})


def test_the_limits_of_a_mesh():
    """The degrees' product is the ranks, and the global batch a multiple of the data ranks' micro-batches."""
    for ranks, batch, parallel, expected in (
        (6, 12, {"dp_replicate": 2}, (2, 3, 1, 1)),
        (6, 12, {"dp_replicate": 2, "dp_shard": 3}, (2, 3, 1, 1)),
        (6, 12, {"dp_replicate": "auto", "dp_shard": 3}, (2, 3, 1, 1)),
        (6, 12, {"dp_replicate": "auto", "dp_shard": 6}, (1, 6, 1, 1)),
        (6, 12, {"dp_replicate": 6}, (6, 1, 1, 1)),
        (12, 12, {"dp_replicate": 3, "cp": 2}, (3, 2, 2, 1)),
        (12, 12, {"dp_replicate": "auto", "dp_shard": 1, "tp": 2}, (6, 1, 1, 2)),
        (12, 2, {"cp": 3, "tp": 4}, (1, 1, 3, 4)),
        (6, 12, {"dp_replicate": 2, "dp_shard": 2}, "= 2: times dp_replicate = 2 must equal"),
        (6, 12, {"dp_replicate": "auto", "dp_shard": 4}, "= 4: times dp_replicate = auto must"),
        (6, 12, {"dp_replicate": 7}, "times dp_replicate = 7 must equal the number of ranks, 6"),
        (
            8,
            12,
            {"dp_replicate": 3, "cp": 2, "tp": 2},
            "times dp_replicate = 3, cp = 2 and tp = 2 must equal the number of ranks, 8",
        ),
        (6, 12, {"dp_replicate": 2, "cp": 2}, "dp_replicate = 2, cp = 2 and tp = 1 must equal"),
        (6, 12, {"cp": 4}, "cp = 4, tp = 1: their product must divide the number of ranks, 6"),
        (6, 8, {}, "= 8: must be a multiple of micro_batch_size x data ranks = 2 x 6 = 12"),
        (12, 12, {"cp": 2, "tp": 2}, (1, 3, 2, 2)),
        (6, 12, {"cp": 2, "tp": 2}, "cp = 2, tp = 2: their product must divide"),
        (16, 12, {"cp": 2, "tp": 2}, "micro_batch_size x data ranks = 2 x 4 = 8"),
    ):
        cfg = make_config(
            model={"n_kv_heads": 4},
            train={"global_batch_size": batch, "seq_len": 48},
            parallel=parallel,
        )
        if isinstance(expected, tuple):
            assert config.mesh_shape(cfg, ranks) == expected
            continue
        with pytest.raises(ConfigError, match=re.escape(expected)):
            config.mesh_shape(cfg, ranks)


def test_without_a_micro_batch_size_a_sequence_for_each_data_rank_is_enough():
    cfg = make_config(train={"global_batch_size": 6, "micro_batch_size": None})
    assert config.mesh_shape(cfg, 6) == (1, 6, 1, 1)
    with pytest.raises(ConfigError, match="micro_batch_size x data ranks = 1 x 4 = 4"):
        config.mesh_shape(cfg, 4)


def test_an_evaluation_is_due_every_so_many_steps_and_after_the_last():
    def due(steps: int, **sections: dict | None) -> list[int]:
        cfg = make_config(train={"steps": 7}, **sections)
        return [step for step in range(steps + 1) if config.evaluation_is_due(cfg, step)]

    assert due(9) == []
    assert due(9, eval={}) == [7, 8, 9]  # of a run that resumes past its end
    assert due(9, eval={"every_steps": 3}) == [3, 6, 7, 8, 9]
    assert due(6, eval={"every_steps": 1}) == [1, 2, 3, 4, 5, 6]
    assert not any(config.is_due(step, None) for step in range(10))


def test_numbers_that_follow_from_options():
    cfg = make_config(train={"global_batch_size": 60, "seq_len": 96, "micro_batch_size": 5})
    assert config.tokens_per_step(cfg.train) == 60 * 96
    for data_ranks, micro_batches in ((1, 12), (3, 4), (12, 1)):
        assert config.micro_batch_size(cfg.train, data_ranks) == 5
        assert config.accumulation_steps(cfg.train, data_ranks) == micro_batches
    without = dataclasses.replace(cfg.train, micro_batch_size=None)
    cfg = dataclasses.replace(cfg, train=without)
    for data_ranks, sequences in ((1, 60), (4, 15), (60, 1)):
        assert config.micro_batch_size(cfg.train, data_ranks) == sequences
        assert config.accumulation_steps(cfg.train, data_ranks) == 1
    assert config.schedule_steps(cfg) == 4
    assert config.schedule_steps(make_config(optim={"schedule_steps": 9})) == 9
    assert config.Lora(rank=11).scale == 2 and config.Lora(rank=8, alpha=2.0).scale == 0.25
    assert make_config(model={"head_dim": 10}).model.width_per_head == 10
    assert make_config().model.width_per_head == 48 / 4
    assert str(config.run_folder(make_config(run={"output_dir": "a/b", "name": "c"}))) == "a/b/c"
