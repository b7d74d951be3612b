"""Every option at its values, and any two that touch the same code together: the runs of tests/test_pairs.py.

    python -m tests.pairs          the options, their values, the pairs and the cases as a table

A new option of config.py needs a line in OPTIONS, with a room in ROOMS for each part of the code that it touches, or,
if no run of a few steps can show it, one in ELSEWHERE.
"""

import contextlib
import dataclasses
import fnmatch
import itertools
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

import config
from tests import order_model
from tests.conftest import make_config, words

STEPS = 4
FIRST_LEG = 2  # steps before a run with [checkpoint] is started again
# What a run that is allowed to goes on with.
CHANGED = {"train.seq_len": 16, "train.global_batch_size": 4}

# The ranks, and what [parallel] says of them.
MESHES = {
    "1": (1, {}),
    "2": (2, {}),
    "replicate 2": (2, {"dp_replicate": "auto", "dp_shard": 1}),
    "cp 2": (2, {"cp": 2}),
    "tp 2": (2, {"tp": 2}),
    "replicate 2 x 2": (4, {"dp_replicate": 2}),
    "2 x tp 2": (4, {"dp_shard": 2, "tp": 2}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
}
MESH_OPTIONS = ("parallel.dp_replicate", "parallel.dp_shard", "parallel.cp", "parallel.tp")

# By option: its value in most runs, then the others. None: absent. A path that begins with @ is in the folder of
# materials(). Of "mesh" see MESHES.
OPTIONS: dict[str, list] = {
    "mesh": ["2", "1", "replicate 2", "cp 2", "tp 2", "replicate 2 x 2", "cp 2 x tp 2", "2 x tp 2"],
    "run.seed": [0, 7, 2**40 + 1],
    "model.dim": [32, 48],
    "model.n_layers": [2, 3],
    "model.n_heads": [4, 8],
    "model.n_kv_heads": [4, 2, 1],
    "model.ffn_dim": [40, 53],
    "model.vocab_size": [320, 347],
    "model.head_dim": [None, 6, 20],
    "model.norm_eps": [1e-5, 1e-2, 0.5],
    "model.rope_theta": [500000.0, 100.0, 7.0],
    "model.rope_scaling": [False, True],
    "model.rope_scaling.factor": [2.0, 8.0, 1.5],
    "model.rope_scaling.low_freq_factor": [1.0, 0.5, 2.0],
    "model.rope_scaling.high_freq_factor": [4.0, 2.5, 8.0],
    "model.rope_scaling.original_max_position_embeddings": [8192, 16, 64],
    "model.tie_embeddings": [False, True],
    "model.qk_norm": [False, True],
    "model.init_from": [None, "@llama", "@qwen3"],
    "model.freeze": [[], ["embedding*", "*q_proj.weight", "blocks.0.*"], ["*norm.weight"]],
    "data.source": ["@a.jsonl", "@more-*.jsonl", "@b.json"],
    "data.text_field": ["text", "body", "title"],
    "data.tokenizer": ["@tokenizer.model", "@tokenizer"],
    "data.max_tokens": [None, 401, 787],
    "data.document_mask": [False, True],
    "data.format": [None, "text"],
    "data.order": ["global", "growing"],
    "data.validation": [None, "@b.json", "@more-*.jsonl"],
    "data.sources": [
        [],
        [{"source": "@a.jsonl", "weight": 0.7}, {"source": "@more-*.jsonl", "weight": 0.3}],
        [
            {"source": "@a.jsonl", "weight": 2.0, "text_field": "body", "validation": "@b.json"},
            {"source": "@more-*.jsonl", "max_tokens": 401, "format": "text"},
            {"source": "@a.jsonl", "weight": 1.5, "text_field": "title", "max_tokens": 521},
        ],
    ],
    "train.seq_len": [32, 24, 19],
    "train.global_batch_size": [8, 12, 5],
    "train.micro_batch_size": [None, 1, 2],
    "train.max_grad_norm": [1.0, "off", 0.1],
    "train.skip_nonfinite": [0, 1, 3],
    "optim.name": ["adamw", "muon"],
    "optim.lr": [3e-3, 1e-2, 5e-4],
    "optim.muon_lr": [None, 6e-3, 1e-3],
    "optim.muon_momentum": [0.95, 0.8, 0.0],
    "optim.betas": [[0.9, 0.95], [0.0, 0.99], [0.7, 0.8]],
    "optim.eps": [1e-8, 1e-2, 1e-4],
    "optim.weight_decay": [0.1, 0.0, 3.0],
    "optim.warmup_steps": [0, 1, 2],
    "optim.schedule": ["cosine", "linear", "constant", "wsd"],
    "optim.decay_steps": [None, 1, 2],
    "optim.schedule_steps": [None, 7, 3],
    "optim.min_lr_ratio": [0.1, 0.0, 0.6],
    "optim.state_dtype": ["float32", "bfloat16"],
    "parallel.reshard_after_forward": [True, False],
    "parallel.prefetch_forward": [1, 0, 2],
    "parallel.prefetch_backward": [1, 0, 2],
    "parallel.param_dtype": ["float32", "bfloat16", "auto"],
    "parallel.reduce_dtype": ["float32", "bfloat16"],
    "parallel.output_dtype": [None, "bfloat16", "float32"],
    "parallel.keep_fp32": [[], ["blocks.[01]"], ["embedding*", "head"]],
    "parallel.replicated": [[], ["embedding.weight"], ["blocks.0.*_proj.weight"]],
    "parallel.cpu_offload": [False, True],
    "parallel.one_memory_pool": [False, True],
    "parallel.sync_every_micro_batch": [True, False],
    "parallel.recompute": ["none", "elementwise", "selective", "full", 2],
    "parallel.compile": [False, True],
    "parallel.float8": ["none", "tensorwise", "rowwise"],
    "lora": [False, True],
    "lora.rank": [3, 8, 16],
    "lora.alpha": [None, 5.0, 24.0],
    "lora.targets": [None, ["q_proj", "down_proj"], ["v_proj", "o_proj", "up_proj"]],
    "lora.base_dtype": ["float32", "bfloat16", "nf4"],
    "lora.init_from": [None, "@adapter", "@few"],
    "checkpoint": [False, True],
    "checkpoint.save_every_steps": [None, 1, 3],
    "checkpoint.keep_last": [None, 1, 2],
    "checkpoint.keep_every_steps": [None, 2, 3],
    "checkpoint.async_save": [False, True],
    "checkpoint.resume": ["auto", "never", 1],
    "checkpoint.allow_changed": [[], ["train.seq_len"], ["train.global_batch_size"]],
    "eval": [False, True],
    "eval.every_steps": [None, 1, 3],
    "eval.batches": [None, 1, 2],
    "log.every_steps": [1, 2, 3],
    "log.tensorboard": [False, True],
}
# What else a value needs; ...: any value but the first. An option of a table that is off needs it on.
NEEDS: dict[tuple[str, Any], dict[str, Any]] = {
    ("optim.schedule", "wsd"): {"optim.decay_steps": 1},
    ("optim.decay_steps", ...): {"optim.schedule": "wsd"},
    ("optim.muon_lr", ...): {"optim.name": "muon"},
    ("optim.muon_momentum", ...): {"optim.name": "muon"},
    ("parallel.replicated", ...): {"model.freeze": ["embedding*", "*q_proj.weight", "blocks.0.*"]},
    ("lora", True): {"model.init_from": "@llama"},
    ("checkpoint.keep_every_steps", ...): {"checkpoint.keep_last": 1},
    ("checkpoint.resume", 1): {"checkpoint.save_every_steps": 1},
}
# Values of the nightly array alone.
NIGHTLY = {("parallel.compile", True), ("mesh", "2 x tp 2")}
# The options that turn a table on.
SWITCHES = ("model.rope_scaling", "lora", "checkpoint", "eval")
# Of the model, not from the folder that init_from names.
OF_THE_RUN = ("model.init_from", "model.freeze", "model.vocab_size")
# Of the folder that lora.init_from names.
FROM_ADAPTER = ("lora.rank", "lora.alpha", "lora.targets")
# In as few runs as can be: these take longest.
COSTLY = {("parallel.compile", True), *(("mesh", mesh) for mesh in MESHES if MESHES[mesh][0] > 2)}
QUICK = 32
# Options that are in every run, and where they show.
IN_EVERY_RUN = {
    "run.name": "of the folder that the rows are read from",
    "run.output_dir": "above it",
    "run.device": "cpu",
    "data.path": "where the data of each case is prepared",
    "train.steps": "how many rows there are, in both launches of a run that resumes",
}
# Options that no run of a few steps shows, or not at all their values: the tests that observe them.
ELSEWHERE = {
    "run.device": "tests/test_mesh.py: test_ranks_with_other_devices_are_refused_on_all",
    "run.deterministic": "tests/test_training.py: test_deterministic_algorithms_are_asked_for",
    "run.start_timeout_seconds": (
        "tests/test_lifecycle.py: test_the_first_step_of_any_launch_has_the_time_to_compile"
    ),
    "run.step_timeout_seconds": (
        "tests/test_lifecycle.py: test_a_failure_on_one_rank_ends_all_with_the_first_cause_last"
    ),
    "run.save_timeout_seconds": (
        "tests/test_lifecycle.py: "
        "test_a_save_has_time_to_wait_for_another_and_to_verify_what_is_kept"
    ),
    "data.subset": (
        "tests/test_fetch.py: test_a_growing_run_without_a_network_trains_on_what_was_fetched"
    ),
    "data.split": "tests/test_sources.py: test_of_what_save_to_disk_wrote_a_split_is_read",
    "data.format": (
        "tests/extras/chat/test_formats.py: "
        "test_a_mixture_finds_each_source_s_format_and_its_own_validation"
    ),
    "data.messages_field": (
        "tests/extras/chat/test_chat.py: test_each_token_s_loss_is_that_of_transformers"
    ),
    "data.chat_template": "tests/extras/chat/test_templates.py: test_masks_found_by_hand",
    "data.sources.subset": (
        "tests/test_config.py: test_a_mixture_may_take_two_parts_of_one_source"
    ),
    "data.sources.split": ("tests/test_config.py: test_a_mixture_may_take_two_parts_of_one_source"),
    "parallel.cp": "tests/parallel/test_training.py: test_training_equals_the_plain_loop",
    "parallel.tp": "tests/parallel/test_training.py: test_training_equals_the_plain_loop",
    "log.tracker": (
        "tests/extras/reports/test_tracker.py: test_three_launches_are_one_run_without_a_step_twice"
    ),
    "log.project": (
        "tests/extras/reports/test_tracker.py: test_three_launches_are_one_run_without_a_step_twice"
    ),
    "profile.at_step": (
        "tests/extras/reports/test_profiler.py: test_a_launch_after_the_steps_to_trace_says_so"
    ),
    "profile.steps": (
        "tests/extras/reports/test_profiler.py: "
        "test_on_a_gpu_the_memory_of_the_same_steps_is_recorded"
    ),
}
# The parts of the code, by the options that they read. Any two options of a room are together in a run.
ROOMS = {
    "model": ["mesh", "model.*", "train.seq_len", "data.document_mask"],
    "parallel": [
        "mesh",
        "parallel.*",
        "train.micro_batch_size",
        "data.document_mask",
        "model.n_kv_heads",
        "model.tie_embeddings",
        "model.qk_norm",
        "model.freeze",
        "lora",
        "lora.base_dtype",
    ],
    "optimizer": [
        "mesh",
        "optim.*",
        "train.max_grad_norm",
        "train.skip_nonfinite",
        "train.micro_batch_size",
        "model.tie_embeddings",
        "model.freeze",
        "parallel.cpu_offload",
        "parallel.compile",
        "lora",
    ],
    "data": [
        "mesh",
        "run.seed",
        "data.*",
        "eval*",
        "train.seq_len",
        "train.global_batch_size",
        "train.micro_batch_size",
        "model.vocab_size",
    ],
    "adapters": [
        "mesh",
        "lora*",
        "model.init_from",
        "model.freeze",
        "optim.state_dtype",
        "parallel.param_dtype",
        "parallel.recompute",
        "parallel.replicated",
        "parallel.cpu_offload",
        "checkpoint.resume",
    ],
    "checkpoint": [
        "mesh",
        "checkpoint*",
        "eval*",
        "log.*",
        "optim.name",
        "optim.state_dtype",
        "optim.schedule_steps",
        "model.tie_embeddings",
        "model.freeze",
        "model.init_from",
        "data.order",
        "data.sources",
        "parallel.cpu_offload",
        "parallel.compile",
        "parallel.float8",
        "lora",
    ],
}

Case = dict[
    str, int
]  # which value of each option, as its index; those that are absent have their first
Pair = tuple[tuple[str, int], tuple[str, int]]


def materials(folder: pathlib.Path) -> None:
    """What paths in OPTIONS name: texts, one twice, of sizes that nothing divides, and a quarter of them held out,
    so that an evaluation has several batches; bases and adapters."""
    texts = random.Random(0)

    def text(size: int, end: str, held_out: bool) -> str:
        """Random words of which the hash decides so."""
        while True:
            found = words(texts.randrange(10**9), size) + end
            if order_model.held_out_by_hash(found) == held_out:
                return found

    def rows(count: int) -> list[dict]:
        found = []
        for i in range(count):
            held_out = i % 4 == 1
            found.append(
                {
                    "text": text(texts.choice([2, 5, 11, 29]), "", held_out),
                    "body": text(7, " é", held_out),
                    "title": text(5, "", held_out),
                }
            )
        return [*found, found[0]]

    def write(name: str, its_rows: list[dict]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in its_rows]
        (folder / name).write_text("".join(lines))

    write("a.jsonl", rows(211))
    write("b.json", rows(97))
    for number, size in enumerate((53, 71, 43)):
        write(f"more-{number}.jsonl", rows(size))
    if config.has_extra("huggingface"):
        write_base(folder / "llama", "llama", {})
        write_base(folder / "qwen3", "qwen3", {"tie_word_embeddings": True})
    if config.has_extra("huggingface") and config.has_extra("lora"):
        write_adapter(folder / "adapter", 4, 6, config.PROJECTIONS)
        write_adapter(folder / "few", 5, 5, ("o_proj", "up_proj"))


BASE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 128, "head_dim": 16}


def write_base(folder: pathlib.Path, kind: str, more: dict) -> None:
    """A Hugging Face folder of random weights."""
    from model.build import meta_model
    from tests.plain import name_in_folder

    m = make_config(
        model={
            **BASE,
            "qk_norm": kind == "qwen3",
            "tie_embeddings": bool(more),
        }
    ).model
    folder.mkdir()
    settings = {
        "model_type": kind,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]],
        "hidden_size": m.dim,
        "num_hidden_layers": m.n_layers,
        "num_attention_heads": m.n_heads,
        "num_key_value_heads": m.n_kv_heads,
        "intermediate_size": m.ffn_dim,
        "head_dim": m.head_dim,
        "vocab_size": m.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    weights = {}
    for number, (name, p) in enumerate(meta_model(m).named_parameters()):
        generator = torch.Generator().manual_seed(number)
        weight = 0.1 * torch.randn(p.shape, generator=generator)
        theirs = name_in_folder(name)
        weights[theirs] = weight + 1 if p.ndim == 1 else weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_adapter(folder: pathlib.Path, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    """PEFT's folder of random adapters, B too."""
    from model.build import meta_model
    from tests.plain import name_in_adapter

    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*targets],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    lora = config.Lora(rank=rank, targets=targets, base_dtype="float32")
    tensors = {}
    for number, (name, p) in enumerate(
        meta_model(make_config(model=BASE).model, lora).named_parameters()
    ):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(number)
            tensors[name_in_adapter(name)] = 0.1 * torch.randn(p.shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def larger_weights() -> Iterator[None]:
    """Fresh projections are eight times as large: as they are, attention is nearly uniform, and hardly any option of
    the model shows in a loss."""
    from parallel import materialize

    draw = materialize.draw

    def larger(out: torch.Tensor, *arguments: Any) -> None:
        draw(out, *arguments)
        if arguments[-1].endswith("_proj.weight"):
            out.mul_(8)

    with mock.patch.object(materialize, "draw", larger):
        yield


# Cases


def switch_of(option: str) -> str | None:
    """What turns the option's table on."""
    table = option.rpartition(".")[0]
    return table if table in SWITCHES else None


def value_of(case: Case, option: str) -> Any:
    return OPTIONS[option][case.get(option, 0)]


def ranks_of(case: Case) -> int:
    return MESHES[value_of(case, "mesh")][0]


def counts(case: Case, option: str) -> bool:
    """Whether the option is in the case's configuration, be it at its first value."""
    switch = switch_of(option)
    if switch and not value_of(case, switch):
        return False
    if option in case:
        return True
    if option.startswith("model.") and option not in OF_THE_RUN:
        return not value_of(case, "model.init_from")
    if option in FROM_ADAPTER:
        return not value_of(case, "lora.init_from")
    if option in ("data.source", "data.validation"):
        return not value_of(case, "data.sources")
    return True


def sections_of(case: Case, folder: pathlib.Path) -> dict:
    """The tables of a case's configuration, without the folders of its data and of its run."""
    sections: dict[str, dict | None] = {
        "train": {"steps": STEPS},
        "parallel": {**MESHES[value_of(case, "mesh")][1]},
        "model": {},
    }
    for option in OPTIONS:
        table, _, key = option.rpartition(".")
        if option in SWITCHES:
            if value_of(case, option) and not table:
                sections.setdefault(option, {})
        elif table == "model.rope_scaling":
            if counts(case, option):
                scaling = sections["model"].setdefault("rope_scaling", {})
                scaling[key] = value_of(case, option)
        elif table:
            if counts(case, option):
                value = resolved(value_of(case, option), folder)
                sections.setdefault(table, {})[key] = value
            elif table == "model":
                sections["model"][key] = None
    sections["optim"].setdefault("warmup_steps", None)
    return sections


def resolved(value: Any, folder: pathlib.Path) -> Any:
    """The value with the paths of materials() in it."""
    if isinstance(value, str) and value.startswith("@"):
        return str(folder / value[1:])
    if isinstance(value, list):
        return [resolved(item, folder) for item in value]
    if isinstance(value, dict):
        return {key: resolved(item, folder) for key, item in value.items()}
    return value


def needs_of(option: str, index: int) -> dict[str, int]:
    """What else the value needs."""
    found = {}
    switch = switch_of(option)
    if switch:
        found[switch] = 1
    for (its_option, its_value), others in NEEDS.items():
        is_not_the_first = its_value is ... and index > 0
        if its_option == option and (is_not_the_first or its_value == OPTIONS[option][index]):
            for other, value in others.items():
                found[other] = OPTIONS[other].index(value)
    return found


def joined(case: Case, option: str, index: int) -> Case | None:
    """The case with this value and what it needs; None if it has others."""
    if case.get(option, index) != index:
        return None
    found: Case | None = {**case, option: index}
    for other, other_index in needs_of(option, index).items():
        if found is not None and not found.get(other):
            found = None if other in found else joined(found, other, other_index)
    return found


def changed(sections: dict) -> dict:
    """What a run goes on with when it is started again."""
    train = dict(sections["train"])
    for option in sections["checkpoint"]["allow_changed"]:
        train[option.removeprefix("train.")] = CHANGED[option]
    return {**sections, "train": train}


def is_accepted(case: Case, folder: pathlib.Path) -> bool:
    """Whether config.py takes it, and the model what names its parameters."""
    from model.build import meta_model
    from parallel.fsdp import replicated_parameters

    if value_of(case, "lora.init_from") and {*FROM_ADAPTER} & {*case}:
        return False
    try:
        sections = sections_of(case, folder)
        cfg = make_config(**sections)
        config.mesh_shape(cfg, ranks_of(case))
        if cfg.checkpoint and cfg.checkpoint.allow_changed:
            config.mesh_shape(make_config(**changed(sections)), ranks_of(case))
        p = cfg.parallel
        c = cfg.checkpoint
        if c and isinstance(c.resume, int) and (c.save_every_steps != 1 or c.keep_last == 1):
            return False  # it isn't there
        if p.replicated:
            replicated_parameters(meta_model(cfg.model, cfg.lora), p)
        if p.float8 != "none":
            from extras.float8.matmul import use_float8

            use_float8(meta_model(cfg.model).blocks, p.float8, "cpu")
    except config.ConfigError:
        return False
    return True


class Array:
    """Cases in which any two values of two options that share a room are together, but for those that are refused.
    Greedy: each case begins with a pair that is in none yet, and takes of each other option the value that adds
    most."""

    def __init__(self, folder: pathlib.Path, whole: bool = False):
        """whole: of any two options, whether they share a room or not, and the NIGHTLY values."""
        self.folder = folder
        self.values = {}
        for option, values in OPTIONS.items():
            self.values[option] = [
                index
                for index, value in enumerate(values)
                if whole or not any(option == o and value == v for o, v in NIGHTLY)
            ]
        self.partners = {option: partners_of(option, whole) for option in OPTIONS}
        self.missing = dict.fromkeys(self._all_pairs())
        self.pairs = len(self.missing)
        self.refused: list[Pair] = []
        self.cases: list[Case] = []
        while self.missing:
            self._add_case()
        self._sort()

    def _all_pairs(self) -> Iterator[Pair]:
        for option, others in self.partners.items():
            for other in others:
                if option < other:
                    for i, j in itertools.product(self.values[option], self.values[other]):
                        yield (option, i), (other, j)

    def _add_case(self) -> None:
        first = next(iter(self.missing))
        (option, i), (other, j) = first
        case = joined({}, option, i)
        case = case and joined(case, other, j)
        if case is None or not is_accepted(case, self.folder):
            del self.missing[first]
            self.refused.append(first)
            return
        options = [*OPTIONS]
        random.Random(len(self.cases)).shuffle(options)
        for option in options:
            if option not in case:
                case = self._with_best(case, option)
        self.cases.append(case)
        for pair in self.covered(case):
            self.missing.pop(pair, None)
        if first in self.missing:  # it needs another value of its own options
            del self.missing[first]
            self.refused.append(first)

    def _with_best(self, case: Case, option: str) -> Case:
        gains = []
        for index in self.values[option]:
            value = OPTIONS[option][index]
            is_costly = any(option == o and value == v for o, v in COSTLY)
            gain = sum(
                pair_of((option, index), (other, case[other])) in self.missing
                for other in self.partners[option]
                if other in case
            )
            if gain and not is_costly:
                gains.append((-gain, index))
        for _, index in sorted(gains):
            found = joined(case, option, index)
            if found and is_accepted(found, self.folder):
                return found
        return case

    def _sort(self) -> None:
        """First the case that has most pairs, then the one that adds most to it, and so on; a value that is in none
        yet counts as many pairs."""
        wanted = {*self._all_pairs()}
        left = []
        for case in self.cases:
            pairs = {*self.covered(case)}
            values = {value for pair in pairs for value in pair}
            left.append((case, pairs & wanted, values))
        seen_pairs: set[Pair] = set()
        seen_values: set[tuple[str, int]] = set()
        self.cases = []
        self.pairs_after = []
        while left:
            gains = [len(p - seen_pairs) + 50 * len(v - seen_values) for _, p, v in left]
            case, pairs, values = left.pop(gains.index(max(gains)))
            seen_pairs |= pairs
            seen_values |= values
            self.cases.append(case)
            self.pairs_after.append(len(seen_pairs))

    def covered(self, case: Case) -> Iterator[Pair]:
        values = [(option, case.get(option, 0)) for option in OPTIONS if counts(case, option)]
        for one, two in itertools.combinations(values, 2):
            yield pair_of(one, two)


def pair_of(one: tuple[str, int], two: tuple[str, int]) -> Pair:
    return (one, two) if one[0] < two[0] else (two, one)


def rooms_of(option: str) -> set[str]:
    return {
        room
        for room, patterns in ROOMS.items()
        if any(fnmatch.fnmatch(option, pattern) for pattern in patterns)
    }


def partners_of(option: str, whole: bool) -> list[str]:
    rooms = rooms_of(option)
    return [other for other in OPTIONS if other != option and (whole or rooms & rooms_of(other))]


def options() -> dict[str, dataclasses.Field]:
    """Every option of config.py, those of a source in a mixture too."""
    found = {name: option.field for name, option in config.SCHEMA.options.items()}
    for field in dataclasses.fields(config.Source):
        found[f"data.sources.{field.name}"] = field
    return found


def in_a_mixture() -> set[str]:
    """The options of sources that a value of data.sources has."""
    found = set()
    for sources in OPTIONS["data.sources"]:
        for source in sources:
            found |= {f"data.sources.{key}" for key in source}
    return found


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        materials(pathlib.Path(folder))
        arrays = {"rooms": Array(pathlib.Path(folder))}
        if "--whole" in sys.argv:
            arrays["whole"] = Array(pathlib.Path(folder), whole=True)
    print(f"{'option':52} {'rooms':40} values")
    for option, values in OPTIONS.items():
        print(f"{option:52} {' '.join(sorted(rooms_of(option))):40} {values}")
    print(f"\n{'in every run:':20}", *IN_EVERY_RUN)
    print(f"{'in other tests:':20}", *ELSEWHERE)
    for name, array in arrays.items():
        ranks = [ranks_of(case) for case in array.cases]
        pairs = array.pairs - len(array.refused)
        print(
            f"\n{name}: {len(OPTIONS)} options, {array.pairs:,} pairs of values, of which "
            f"{len(array.refused):,} are refused; {len(ranks)} cases, "
            + ", ".join(f"{ranks.count(n)} on {n}" for n in (1, 2, 4))
        )
        share = array.pairs_after[min(QUICK, len(ranks)) - 1] / pairs
        print(f"the first {QUICK} cases hold {share:.1%}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
