"""Every option of the trainer: frozen dataclasses, read from TOML and `--section.key=value`, checked once.

    python train.py --help          # every option with its type, default and meaning, from this file

Needs no torch: a wrong configuration fails in milliseconds, with all its problems listed, before any process starts.
Adding an option is two edits: one line in a dataclass here, and the place that uses it.
"""

import argparse
import dataclasses
import difflib
import fnmatch
import functools
import json
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal

import tomli


class ConfigError(Exception):
    """What the user gave is wrong (a file, an option, the data). Carries every problem found, one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


LONGEST_PERIOD = 1 << 16  # samples after which a mixture's order of sources repeats, at most
IGNORE = -100  # a target token that does not count; data writes it, model/loss.py reads it, as in torch's cross_entropy

POSITIVE = (lambda v: isinstance(v, str) or v > 0, "must be greater than 0")  # or a word, as "auto"
NOT_NEGATIVE = (lambda v: v >= 0, "must be at least 0")
FRACTION = (lambda v: 0 <= v <= 1, "must lie between 0 and 1")
BETAS = (lambda v: all(0 <= b < 1 for b in v), "both must lie in [0, 1)")
SHARDS = (lambda v: isinstance(v, bool) or v >= 2, "an integer must be at least 2")
# A run's name is one folder's name, and is quoted nowhere.
NAME = (
    lambda v: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{,199}", v),
    "may hold only letters, digits, '.', '_' and '-', at most 200, and must not begin with '.' or '-'",
)


def option(default: Any, doc: str, rule: tuple = (lambda v: True, "")) -> Any:
    return field(default=default, metadata={"doc": doc, "rule": rule})


@dataclass(frozen=True)
class Run:
    name: str | None = option(None, "the run's folder below output_dir; absent: the configuration file's stem", NAME)
    output_dir: str = option("outputs", "where runs are kept")
    seed: int = option(0, "of weights and data order", NOT_NEGATIVE)
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda where there is a GPU, else cpu")
    deterministic: bool = option(False, "torch's deterministic algorithms only")
    start_timeout_seconds: float = option(1800.0, "set-up and the first step may take so long", POSITIVE)
    step_timeout_seconds: float = option(600.0, "a step, or a batch of an evaluation", POSITIVE)
    save_timeout_seconds: float = option(1800.0, "a checkpoint, written or read", POSITIVE)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency table (https://arxiv.org/abs/2407.21783, section 3.4.1 and its reference code)."""

    factor: float = option(MISSING, "how many times longer than the original context", (lambda v: v >= 1, ">= 1"))
    low_freq_factor: float = option(1.0, "wavelengths above original / this are divided by factor", POSITIVE)
    high_freq_factor: float = option(4.0, "wavelengths below original / this are kept", POSITIVE)
    original_max_position_embeddings: int = option(8192, "context length before scaling", POSITIVE)


@dataclass(frozen=True)
class Model:
    dim: int = option(MISSING, "width of the residual stream", POSITIVE)
    n_layers: int = option(MISSING, "transformer blocks", POSITIVE)
    n_heads: int = option(MISSING, "query heads", POSITIVE)
    n_kv_heads: int = option(MISSING, "key/value heads (grouped-query attention)", POSITIVE)
    ffn_dim: int = option(MISSING, "width inside the feed-forward", POSITIVE)
    vocab_size: int = option(MISSING, "rows of the embedding", POSITIVE)
    head_dim: int | None = option(None, "width of a head; absent: dim / n_heads", POSITIVE)
    norm_eps: float = option(1e-5, "of RMSNorm", POSITIVE)
    rope_theta: float = option(500000.0, "base of the rotary frequencies", POSITIVE)
    rope_scaling: RopeScaling | None = option(None, "Llama 3.1's long-context table: [model.rope_scaling]")
    tie_embeddings: bool = option(False, "one matrix for embedding and head")
    init_from: str | None = option(None, "a Hugging Face folder: its weights and the sizes above come from there")
    freeze: tuple[str, ...] = option((), "patterns of parameter names that are not trained, as 'embedding*'")

    @property
    def width_per_head(self) -> int:
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True)
class Source:
    """One of a mixture, [[data.sources]]."""

    source: str = option(MISSING, "as data.source")
    weight: float = option(1.0, "its share of the samples, against the other weights", POSITIVE)
    subset: str | None = option(None, "absent: that of [data], as with what follows")
    split: str | None = option(None, "as data.split")
    text_field: str | None = option(None, "as data.text_field")
    max_tokens: int | None = option(None, "as data.max_tokens", POSITIVE)


@dataclass(frozen=True)
class Data:
    source: str = option("python-stdlib", '"python-stdlib", a Hugging Face id, or local .jsonl, .parquet or .txt files')
    subset: str | None = option(None, "configuration of a Hugging Face dataset")
    split: str = option("train", "split of a Hugging Face dataset")
    text_field: str = option("text", "column that holds the text")
    path: str | None = option(None, "folder of token files; absent: prepared/{source}-{hash}")
    tokenizer: str | None = option(
        None, "a sentencepiece .model, a tokenizer.json, or their folder; absent: trained here with model.vocab_size"
    )
    max_tokens: int | None = option(None, "stop preparing after so many tokens; absent: everything", POSITIVE)
    document_mask: bool = option(False, "keep attention inside a document; positions restart in each")
    sources: tuple[Source, ...] = option((), "a mixture: [[data.sources]] with source, weight, and what else differs")


@dataclass(frozen=True)
class Train:
    steps: int = option(MISSING, "optimizer steps", POSITIVE)
    seq_len: int = option(2048, "tokens per sequence", POSITIVE)
    global_batch_size: int = option(8, "sequences per step, over all ranks", POSITIVE)
    micro_batch_size: int = option(1, "sequences per forward pass and rank", POSITIVE)
    max_grad_norm: float | Literal["off"] = option(1.0, "clip the global gradient norm to this", POSITIVE)
    skip_nonfinite: int = option(0, "steps in a row that a non-finite gradient may skip; 0: stop at once", NOT_NEGATIVE)


@dataclass(frozen=True)
class Optim:
    lr: float = option(3e-4, "peak learning rate", POSITIVE)
    betas: tuple[float, float] = option((0.9, 0.95), "of AdamW", BETAS)
    eps: float = option(1e-8, "of AdamW", POSITIVE)
    weight_decay: float = option(0.1, "on every parameter with two or more dimensions", NOT_NEGATIVE)
    warmup_steps: int = option(0, "linear rise to lr", NOT_NEGATIVE)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "shape of the fall; wsd: stable, then linear over decay_steps"
    )
    decay_steps: int | None = option(None, "length of wsd's fall", POSITIVE)
    schedule_steps: int | None = option(None, "where the schedule ends; absent: train.steps", POSITIVE)
    min_lr_ratio: float = option(0.1, "the end's share of lr", FRACTION)
    state_dtype: Literal["float32", "bfloat16"] = option("float32", "of AdamW's moments (bfloat16: not yet)")


@dataclass(frozen=True)
class Parallel:
    dp_replicate: int | Literal["auto"] = option(1, "replicas of the sharded model", POSITIVE)
    dp_shard: int | Literal["auto"] = option("auto", "ranks that share one copy; auto: what is left", POSITIVE)
    reshard_after_forward: bool | int = option(
        True, "true: free after forward; false: keep until backward; n: keep shards of n", SHARDS
    )
    prefetch_forward: int = option(1, "units gathered ahead in forward; 0: FSDP2's implicit order", NOT_NEGATIVE)
    prefetch_backward: int = option(1, "units gathered ahead in backward; 0: FSDP2's implicit order", NOT_NEGATIVE)
    param_dtype: Literal["float32", "bfloat16"] = option("bfloat16", "of the gathered parameters and the computation")
    reduce_dtype: Literal["float32", "bfloat16"] = option("float32", "of the gradients' reduction")
    output_dtype: Literal["float32", "bfloat16"] | None = option(
        None, "of the residual stream between units; absent: param_dtype"
    )
    keep_fp32: tuple[str, ...] = option((), "patterns of units computed in float32, as 'blocks.[01]'")
    unsharded: tuple[str, ...] = option((), "patterns of frozen parameters (model.freeze) kept unsharded on each rank")
    cpu_offload: bool = option(False, "keep parameters, gradients and optimizer state in host memory")
    sync_every_micro_batch: bool = option(True, "reduce each micro-batch's gradients; false: the sum, once a step")
    recompute: int | Literal["none", "full", "selective"] = option(
        "none", "activation checkpointing: every block, by operator, or n: every n-th block", POSITIVE
    )
    compile: bool = option(False, "torch.compile each block")


@dataclass(frozen=True)
class Checkpoint:
    save_every_steps: int | None = option(None, "absent: the last step only", POSITIVE)
    keep_last: int | None = option(None, "absent: keep all", POSITIVE)
    keep_every_steps: int | None = option(None, "milestones that keep_last does not remove", POSITIVE)
    async_save: bool = option(False, "write while training goes on; takes host memory for a copy of the shards")
    resume: Literal["auto", "never"] | int = option("auto", "auto: from the newest; or from this step", POSITIVE)
    allow_changed: tuple[str, ...] = option((), "options that may differ from the checkpoint's, as 'train.seq_len'")


@dataclass(frozen=True)
class Eval:
    every_steps: int | None = option(None, "also at the last step; absent: there only", POSITIVE)
    batches: int | None = option(None, "global batches of held-out text; absent: all of it", POSITIVE)


@dataclass(frozen=True)
class Log:
    every_steps: int = option(10, "steps between two training rows", POSITIVE)
    tensorboard: bool = option(True, "write tensorboard/ too")


@dataclass(frozen=True)
class Profile:
    at_step: int = option(MISSING, "first step of the trace", POSITIVE)
    steps: int = option(3, "steps traced", POSITIVE)


@dataclass(frozen=True)
class Config:
    run: Run
    model: Model
    data: Data
    train: Train
    optim: Optim
    parallel: Parallel
    checkpoint: Checkpoint | None
    eval: Eval | None
    log: Log
    profile: Profile | None


# Derived numbers. Each has one home.


def tokens_per_step(cfg: Config) -> int:
    return cfg.train.global_batch_size * cfg.train.seq_len


def accumulation_steps(cfg: Config, dp_size: int) -> int:
    """Micro-batches per step and data rank; dp_size: the number of data ranks."""
    return cfg.train.global_batch_size // (cfg.train.micro_batch_size * dp_size)


def schedule_steps(cfg: Config) -> int:
    return cfg.optim.schedule_steps or cfg.train.steps


def longest_timeout(cfg: Config) -> float:
    """Seconds. For the process groups, as a last resort: each rank watches its own phases."""
    return 60 + max(cfg.run.start_timeout_seconds, cfg.run.step_timeout_seconds, cfg.run.save_timeout_seconds)


def run_folder(cfg: Config) -> pathlib.Path:
    return pathlib.Path(cfg.run.output_dir) / cfg.run.name


def unit_names(model: Model) -> list[str]:
    """The FSDP units in forward order, as parallel/fsdp.py makes them."""
    blocks = [f"blocks.{i}" for i in range(model.n_layers)]
    return ["embedding+head", *blocks] if model.tie_embeddings else ["embedding", *blocks, "head"]


def mesh_shape(cfg: Config, ranks: int) -> tuple[int, int, int, int]:
    """(dp_replicate, dp_shard, cp, tp) for so many ranks. Raises ConfigError where the options cannot make them, or the
    global batch cannot be split over the data ranks."""
    p, t = cfg.parallel, cfg.train
    cp, tp = 1, 1  # no options yet
    dp_size = max(1, ranks // (cp * tp))
    dp_replicate = max(1, dp_size // p.dp_shard) if p.dp_replicate == "auto" else p.dp_replicate
    dp_shard = max(1, dp_size // dp_replicate) if p.dp_shard == "auto" else p.dp_shard
    n, shards, per_pass = p.reshard_after_forward, dp_shard * cp, t.micro_batch_size * dp_size
    problems = _broken(cfg, lambda _: "", [
        ("parallel.dp_shard", dp_replicate * dp_shard * cp * tp == ranks,
         f"times dp_replicate = {p.dp_replicate} must equal the number of ranks, {ranks}; set one of them to auto"),
        ("train.global_batch_size", t.global_batch_size % per_pass == 0,
         f"must be a multiple of micro_batch_size x data ranks = {t.micro_batch_size} x {dp_size} = {per_pass}"),
        ("parallel.reshard_after_forward", type(n) is bool or shards % n == 0,
         f"must divide the number of shards, {shards}"),
    ])
    if problems:
        raise ConfigError(*problems)
    return dp_replicate, dp_shard, cp, tp


def _broken(cfg: Config, origin: Callable[[str], str], rules: list[tuple[str, Any, str]]) -> list[str]:
    """What is wrong by rules: (option, does it hold, what is demanded of the option). `origin` says where an option was
    given."""
    problems = []
    for option_name, holds, demand in rules:
        section, key = option_name.rsplit(".", 1)
        if not holds:
            value = functools.reduce(getattr, option_name.split("."), cfg)
            problems.append(f"{origin(option_name)}[{section}] {key} = {_toml(value)}: {demand}")
    return problems


def _whole_sources(d: Data) -> list[tuple]:
    """What each source of a mixture reads, with what it takes from [data]."""
    def local(text: str) -> str:
        return os.path.normpath(text) if os.path.exists(text) else text

    return [(local(s.source), s.subset or d.subset, s.split or d.split, s.text_field or d.text_field,
             s.max_tokens or d.max_tokens) for s in d.sources]


def _check_together(cfg: Config, origin: Callable[[str], str], wrong: Collection[str]) -> list[str]:
    """What is wrong by the rules between options. Each names the option to change, and those that it looks at; where
    one of these is wrong by itself (`wrong`) it says nothing."""
    m, t, o, p, c = cfg.model, cfg.train, cfg.optim, cfg.parallel, cfg.checkpoint
    end, rope, units, later = schedule_steps(cfg), m.rope_scaling, unit_names(m), "is not supported yet; leave it out"
    schedule = "optim.schedule optim.schedule_steps train.steps optim.warmup_steps optim.decay_steps"
    rules = [
        ("model.n_kv_heads", "model.n_heads", m.n_heads % m.n_kv_heads == 0, f"must divide n_heads = {m.n_heads}"),
        ("model.n_heads", "model.dim model.head_dim", m.head_dim or m.dim % m.n_heads == 0,
         f"must divide dim = {m.dim}, or head_dim be given"),
        ("model.dim", "model.n_heads model.head_dim", m.width_per_head % 2 == 0,
         f"makes heads {m.width_per_head} wide; their width must be even"),
        ("train.micro_batch_size", "train.global_batch_size", t.global_batch_size % t.micro_batch_size == 0,
         f"must divide global_batch_size = {t.global_batch_size}"),
        ("optim.warmup_steps", schedule, o.warmup_steps <= end,
         f"must not exceed the schedule's length, {end} (optim.schedule_steps, else train.steps)"),
        ("optim.schedule", schedule, o.schedule != "wsd" or o.decay_steps, "needs optim.decay_steps"),
        ("optim.decay_steps", schedule, not o.decay_steps or o.schedule == "wsd", 'goes with schedule = "wsd" only'),
        ("optim.decay_steps", schedule, o.warmup_steps + (o.decay_steps or 0) <= end or o.schedule != "wsd",
         f"with warmup_steps = {o.warmup_steps} must fit into the schedule's length, {end}"),
        ("parallel.dp_replicate", "parallel.dp_shard", not p.dp_replicate == p.dp_shard == "auto",
         'only one of dp_replicate and dp_shard may be "auto", and dp_shard is unless it is given'),
        ("parallel.keep_fp32", "model.n_layers", all(fnmatch.filter(units, pattern) for pattern in p.keep_fp32),
         f"a pattern matches no unit; they are {', '.join([*units[:3], '...', units[-1]])}"),
        ("parallel.recompute", "model.n_layers", isinstance(p.recompute, str) or p.recompute <= m.n_layers,
         f"every n-th of {m.n_layers} blocks: n must not exceed them"),
        ("data.source", "data.sources", not cfg.data.sources or cfg.data.source == Data.source,
         "goes without [[data.sources]]"),
        ("data.sources", "", len(set(_whole_sources(cfg.data))) == len(cfg.data.sources),
         "names one source twice; add their weights"),
        ("data.sources", "", all(s.weight * LONGEST_PERIOD >= sum(other.weight for other in cfg.data.sources)
                                 for s in cfg.data.sources),
         f"a weight must be at least 1/{LONGEST_PERIOD} of the sum of all"),
        ("optim.state_dtype", "", o.state_dtype == "float32", later),
    ]
    if f := cfg.profile:
        rules.append(("profile.at_step", "profile.steps train.steps", f.at_step + f.steps - 1 <= t.steps,
                      f"with profile.steps = {f.steps} must end by train.steps = {t.steps}"))
    if rope:
        rules.append(("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor",
                      rope.low_freq_factor < rope.high_freq_factor,
                      f"must be below high_freq_factor = {rope.high_freq_factor}"))
    if c:
        rules.append(("checkpoint.allow_changed", "", all(name in SCHEMA for name in c.allow_changed),
                      "names no option; write section.key"))
    return _broken(cfg, origin, [(name, holds, demand) for name, others, holds, demand in rules
                                 if not {name, *others.split()} & {*wrong}])


# Reading: TOML and command line -> one flat table of dotted names -> dataclasses, collecting every problem on the way.


def _members(hint: Any) -> tuple:
    """The types that an annotation allows, None left out."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(m for m in typing.get_args(hint) if m is not NoneType) if union else (hint,)


def _walk(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Field]]:
    """(dotted name, annotation, field) of every table and, after it, of every option in it."""
    for f in fields(kind):
        hint = typing.get_type_hints(kind)[f.name]
        yield prefix + f.name, hint, f
        if is_dataclass(_members(hint)[0]):
            yield from _walk(_members(hint)[0], f"{prefix}{f.name}.")


SCHEMA = {name: (hint, f) for name, hint, f in _walk(Config) if not is_dataclass(_members(hint)[0])}
TABLES = {name: NoneType in typing.get_args(hint) for name, hint, _ in _walk(Config) if name not in SCHEMA}  # optional?


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line of train.py and of the tools that take a CONFIG. Exits with 2 where it is wrong."""

    def above_zero(kind: type, text: str) -> Any:
        if not kind(text) > 0:
            raise argparse.ArgumentTypeError(f"{text} must be greater than 0")
        return kind(text)

    count = functools.partial(above_zero, int)
    parser = argparse.ArgumentParser(prog="run_train.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    for flag in ("--dry-run", "--json", "--eval-only"):
        parser.add_argument(flag, action="store_true")
    def counts(text: str) -> list[int]:
        return [count(n) for n in text.split(",")]

    parser.add_argument("--world-size", type=counts, metavar="N[,N...]")
    parser.add_argument("--gpu-memory-gib", type=functools.partial(above_zero, float), metavar="G")
    parser.add_argument("--launch", help=argparse.SUPPRESS)  # lifecycle.py's name for this start
    args, args.overrides = parser.parse_known_args(argv)
    for word in args.overrides:
        if not (word.startswith("--") and "=" in word):
            parser.error(f"{word}: unknown; options are written --section.key=value, in one word")
    if not args.dry_run and (args.json or args.world_size or args.gpu_memory_gib):
        parser.error("--json, --world-size and --gpu-memory-gib go with --dry-run only")
    args.world_size = args.world_size or [1]
    return args


def from_command_line(argv: list[str], usage: str) -> tuple[argparse.Namespace, Config]:
    """What a program was called with. Prints every problem and exits with 2 where it is wrong; with 0 after --help."""
    if {"--help", "-h"} & set(argv):
        print(f"{usage.strip()}\n\nOptions, in the file or as --section.key=value:\n\n{option_table()}")
        sys.exit(0)
    args = parse_arguments(argv)
    try:
        return args, load(args.config, args.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def load(path: str, overrides: Iterable[str] = ()) -> Config:
    """Reads a configuration file and the overrides on top of it. Raises ConfigError with every problem found."""
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
        raw = tomli.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None
    except (ValueError, RecursionError) as error:  # tomli's own error is a ValueError
        hint = "; it begins with a byte order mark, save it without" if text.startswith("\ufeff") else ""
        raise ConfigError(f"{path}: is not valid TOML: {error}{hint}") from None
    if not raw:
        raise ConfigError(f"{path}: is empty; configs/tiny.toml shows what a run needs")
    return from_dict(raw, path, overrides)


def from_dict(raw: dict, path: str, overrides: Iterable[str] = ()) -> Config:
    """The same from tables that are read already; `path` says in errors where they come from."""
    given, problems, wrong = dict.fromkeys(flatten(raw), path), [], set()
    flat = flatten(raw)
    for override in overrides:
        name, _, text = override[2:].partition("=")
        if text == "off" and TABLES.get(name):
            flat = {key: value for key, value in flat.items() if not f"{key}.".startswith(f"{name}.")}
            given[name] = "command line"
        else:
            flat[name], given[name] = _parse(text, SCHEMA.get(name, (None, None))[0]), "command line"
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        at = f"{given[name]}: {f'[{section}] ' if section else ''}{key} = {_toml(value)}"
        if name == "data.sources" and value == {}:
            problems.append(f"{given[name]}: [data.sources]: is a list of tables; write [[data.sources]]")
        elif name in TABLES and value != {}:
            problems.append(f"{at}: must be a table, written [{name}]"
                            + ("; off removes it from the command line" if TABLES[name] else ""))
        elif name.startswith("data.sources."):
            pass  # told already
        elif name not in SCHEMA and name not in TABLES:
            if value != {} or not any(other.startswith(f"{name}.") for other in flat):  # its options are named already
                problems.append(f"{at}: unknown {'option' if value != {} else 'section'}{_nearest(name)}")
        elif name in SCHEMA:
            hint, (holds, rule) = SCHEMA[name][0], SCHEMA[name][1].metadata["rule"]
            try:
                flat[name] = _fit(value, hint)
                if not holds(flat[name]):
                    problems.append(f"{at}: {rule}")
                    wrong.add(name)
            except TypeError as error:
                wrong.add(name)
                half = "; float16 would need a loss scaler, which this trainer does without" * (value == "float16")
                problems.append(f"{at}: {error}" if str(error) else f"{at}: must be {_describe(hint)}{half}")

    if isinstance(flat.get("model.init_from"), str):
        problems += _take_from_hugging_face(flat, given)
        if problems:
            raise ConfigError(*problems)

    def build(kind: type, prefix: str) -> Any:
        values = {}
        for name, hint, f in ((prefix + f.name, typing.get_type_hints(kind)[f.name], f) for f in fields(kind)):
            present = any(f"{key}.".startswith(f"{name}.") for key in flat)
            if name in TABLES:
                values[f.name] = build(_members(hint)[0], f"{name}.") if present or not TABLES[name] else None
            else:
                values[f.name] = f.default if name in wrong else flat.get(name, f.default)
                if values[f.name] is MISSING:
                    if name not in wrong:
                        problems.append(f"{path}: [{prefix[:-1]}] {f.name}: is missing, and has no default")
                        wrong.add(name)
                    values[f.name] = 1  # all of these are numbers; no rule will look at it
        return kind(**values)

    cfg = build(Config, "")
    if "run.name" not in flat:
        cfg = replace(cfg, run=replace(cfg.run, name=pathlib.Path(path).stem))
        if not NAME[0](cfg.run.name):
            problems.append(f"{path}: the file's name is the run's name, but {NAME[1]}; set run.name")
    problems += _check_together(cfg, lambda name: f"{given.get(name, path)}: ", wrong)
    if problems:
        raise ConfigError(*problems)
    return cfg


# Hugging Face's config.json: what model.init_from brings.

HF_KEYS = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
           "n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size",
           "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings"}
# What the model computes; whoever says something else is refused. Absent is as good, but for the first.
HF_ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
           "partial_rotary_factor": 1.0, "quantization_config": None}


def read_hf_json(path: pathlib.Path) -> dict:
    """A JSON object of a Hugging Face folder. Raises ConfigError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def read_hf_config(path: pathlib.Path) -> dict[str, Any]:
    """The options ("model.dim", ...) that a Hugging Face config.json stands for, with transformers' defaults.

    Rotary settings are read in both spellings: rope_theta and rope_scaling, or, since transformers 5, both of them in
    rope_parameters. Raises ConfigError with all that is wrong, or that this model does not compute.
    """
    theirs, found, problems = read_hf_json(path), {}, []

    def take(name: str, key: str, value: Any) -> None:
        hint, (holds, rule) = SCHEMA[name][0], SCHEMA[name][1].metadata["rule"]
        try:
            found[name] = _fit(value, hint)
            if not holds(found[name]):
                problems.append(f"{path}: {key} = {_toml(value)}: {rule}")
        except TypeError:
            problems.append(f"{path}: {key} " + ("is missing" if value is None else
                                                 f"= {_toml(value)}: must be {_describe(hint)}"))

    named = theirs.get("architectures") or ["LlamaForCausalLM"]
    if named != ["LlamaForCausalLM"]:
        problems.append(f'{path}: architectures = {_toml(named)}: only ["LlamaForCausalLM"] can be read')
    problems += [f"{path}: {key} = {_toml(value)}: only {_toml(only)} can be read" for key, only in HF_ONLY.items()
                 if (value := theirs.get(key)) != only and not (value is None and key != "model_type")]
    defaults = {"num_key_value_heads": theirs.get("num_attention_heads"), "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False}
    for name, key in HF_KEYS.items():
        value = theirs[key] if theirs.get(key) is not None else defaults.get(key)
        if value is not None or key != "head_dim":
            take(f"model.{name}", key, value)
    spelling = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(spelling) or {}
    if not isinstance(rope, dict):
        raise ConfigError(*problems, f"{path}: {spelling} = {_toml(rope)}: must be an object")
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"{path}: {spelling}.partial_rotary_factor = {_toml(part)}: only 1.0 can be read")
    theta = rope.get("rope_theta", theirs.get("rope_theta"))
    take("model.rope_theta", "rope_theta", 10000.0 if theta is None else theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        for f in fields(RopeScaling):
            take(f"model.rope_scaling.{f.name}", f"{spelling}.{f.name}", rope.get(f.name))
    elif kind != "default":
        problems.append(f'{path}: {spelling}.rope_type = {_toml(kind)}: only "default" and "llama3" can be read')
    if problems:
        raise ConfigError(*problems)
    return found


def _take_from_hugging_face(flat: dict[str, Any], given: dict[str, str]) -> list[str]:
    """Completes the options of [model] from the folder that init_from names. Returns what does not agree with it."""
    folder, origin = flat["model.init_from"], given["model.init_from"]
    path = pathlib.Path(folder) / "config.json"
    required = [f"model.{f.name}" for f in fields(Model) if f.default is MISSING]
    if not os.path.exists(path):  # unlike pathlib's, no error where it cannot be looked at
        # a complete table, as in a run's own config.toml, needs no folder: it may go on from a checkpoint
        return [] if all(name in flat for name in required) else [
            f"{origin}: [model] init_from = {_toml(folder)}: has no config.json; it must be a Hugging Face folder on "
            "this machine (hf download ID --local-dir FOLDER)"]
    try:
        theirs = read_hf_config(path)
    except ConfigError as error:
        return list(error.problems)
    problems = []
    if "model.rope_scaling" in given and "model.rope_scaling" not in flat and "model.rope_scaling.factor" in theirs:
        problems.append(f"{given['model.rope_scaling']}: [model] rope_scaling is off: {path} has it, and its weights "
                        "need it; leave it out, and it comes from there")
    for name in [*theirs, *(n for n in flat if n.startswith("model.rope_scaling.") and n not in theirs)]:
        key, value = name.partition(".")[2], theirs.get(name, "absent")
        if name not in flat:
            flat[name], given[name] = value, str(path)
        elif flat[name] != value:
            more = "; its weights have no more rows" if key == "vocab_size" else ""
            problems.append(f"{given[name]}: [model] {key} = {_toml(flat[name])}: {path} has {HF_KEYS.get(key, key)} = "
                            f"{_toml(value)}{more}; leave it out, and it comes from there, or, where a run is to go "
                            "on from its checkpoint, move that file away")
    return problems


def flatten(table: dict, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a": {}, "a.b": 1}"""
    flat = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= {prefix + key: {}, **flatten(value, f"{prefix}{key}.")}
        else:
            flat[prefix + key] = value
    return flat


def _parse(text: str, hint: Any) -> Any:
    """The value of --name=text: text as it stands where the option is one, else TOML, else a word, as auto or full."""
    if hint and all(m is str or typing.get_origin(m) is Literal for m in _members(hint)):
        return text
    try:
        return tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or more digits or brackets than anybody means
        return text


def _fit(value: Any, hint: Any) -> Any:
    """The value as the dataclass holds it. Raises TypeError where the annotation does not take it."""
    for member in _members(hint):
        if is_dataclass(member) and isinstance(value, dict):
            return _fit_table(value, member)
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal and isinstance(value, str) and value in args:
            return value
        if origin is tuple and isinstance(value, list) and (args[-1] is ... or len(args) == len(value)):
            return tuple(_fit(v, args[0]) for v in value)
        if member is bool and isinstance(value, bool):
            return value
        if member is int and type(value) is int and abs(value) < 2**63:  # bool is an int in Python
            return value
        if member is float and type(value) in (int, float) and abs(value) < 1e300:  # no nan, no inf
            return float(value)
        if member is str and isinstance(value, str) and value and "\0" not in value:
            return value
    raise TypeError


def _fit_table(table: dict, kind: type) -> Any:
    """A table in a list, as the dataclass `kind`. Raises TypeError saying what is wrong."""
    known, values = {f.name: (f, typing.get_type_hints(kind)[f.name]) for f in fields(kind)}, {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)
            raise TypeError(f"{key} is an unknown key of its tables; did you mean {near[0]}?")
        (holds, rule), hint = known[key][0].metadata["rule"], known[key][1]
        try:
            values[key] = _fit(value, hint)
        except TypeError:
            raise TypeError(f"{key} = {_toml(value)} must be {_describe(hint)}") from None
        if not holds(values[key]):
            raise TypeError(f"{key} = {_toml(value)} {rule}")
    if missing := [name for name, (f, _) in known.items() if f.default is MISSING and name not in values]:
        raise TypeError(f"{_toml(table)} lacks {', '.join(missing)}")
    return kind(**values)


def _describe(hint: Any) -> str:
    def one(member: Any) -> str:
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            return " or ".join(f'"{word}"' for word in args)
        if origin is tuple:
            return f"a list{'' if args[-1] is ... else f' of {len(args)}'}, of {_describe(args[0])} each"
        if is_dataclass(member):
            return f"a table of {', '.join(f.name for f in fields(member))}"
        return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[member]
    return " or ".join(map(one, _members(hint)))


def _nearest(name: str) -> str:
    key = name.rpartition(".")[2]  # the right key in the wrong section, else the closest spelling
    near = [known for known in SCHEMA if known.endswith(f".{key}")] or difflib.get_close_matches(
        name, SCHEMA if "." in name else TABLES, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; sections are {', '.join(TABLES)}"


# Writing: the resolved configuration, and the list of options.


def to_dict(cfg: Config) -> dict:
    """Plain tables, without what is absent."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return [plain(v) for v in value] if isinstance(value, tuple) else value
    return plain(dataclasses.asdict(cfg))


def to_flat(cfg: dict) -> dict[str, Any]:
    """to_dict()'s tables as one, of dotted names."""
    return {name: value for name, value in flatten(cfg).items() if name in SCHEMA}


def to_toml(cfg: Config) -> str:
    """The resolved configuration, which load() reads back as an equal one."""
    lines = []
    for name, value in sorted(flatten(to_dict(cfg)).items(), key=lambda item: [*TABLES].index(
            item[0] if item[0] in TABLES else item[0].rpartition(".")[0])):
        lines.append(f"\n[{name}]" if name in TABLES else f"{name.rpartition('.')[2]} = {_toml(value)}")
    return "\n".join(lines).strip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        keys = {key: key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value}
        return "{" + ", ".join(f"{keys[key]} = {_toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if is_dataclass(value):
        return _toml({key: v for key, v in dataclasses.asdict(value).items() if v is not None})
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def option_table() -> str:
    """Every option with its default, type and meaning, from the dataclasses themselves."""
    lines = []
    for table, optional in TABLES.items():
        lines.append(f"\n[{table}]{'   (off unless given)' * optional}")
        for name, (hint, f) in SCHEMA.items():
            if name.rpartition(".")[0] == table:
                default = "required" if f.default is MISSING else "absent" if f.default is None else _toml(f.default)
                lines.append(f"  {f.name} = {default}".ljust(43) + f"# {_describe(hint)}: {f.metadata['doc']}")
        if table == "data":
            lines += ["", "[[data.sources]]   (one table for each source of a mixture)", *(
                f"  {f.name} = {'required' if f.default is MISSING else 'absent' if f.default is None else f.default}"
                .ljust(43) + f"# {f.metadata['doc']}" for f in fields(Source))]
    return "\n".join(lines).strip()
