"""Every option of the trainer: frozen dataclasses, read from TOML and `--section.key=value`, checked once.

    python train.py --help          # every option with its type, default and meaning, from this file

Needs no torch: a wrong configuration fails in milliseconds, with all its problems listed, before any process starts.
Adding an option is two edits: one line in a dataclass here, and the place that uses it.
"""

import argparse
import dataclasses
import difflib
import fnmatch
import json
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal

import tomli


class ConfigError(Exception):
    """What the user gave is wrong (a file, an option, the data). Carries every problem found, one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


IGNORE = -100  # a target token that does not count; data writes it, model/loss.py reads it, as in torch's cross_entropy

POSITIVE = (lambda v: isinstance(v, str) or v > 0, "must be greater than 0")  # or a word, as "auto"
NOT_NEGATIVE = (lambda v: v >= 0, "must be at least 0")
FRACTION = (lambda v: 0 <= v <= 1, "must lie between 0 and 1")
BETAS = (lambda v: all(0 <= b < 1 for b in v), "both must lie in [0, 1)")
SHARDS = (lambda v: isinstance(v, bool) or v >= 2, "an integer must be at least 2")
# A run's name is one folder's name, and is quoted nowhere.
NAME = (
    lambda v: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", v),
    "may hold only letters, digits, '.', '_' and '-', and must not begin with '.' or '-'",
)


def option(default: Any, doc: str, rule: tuple | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "rule": rule})


@dataclass(frozen=True)
class Run:
    name: str | None = option(None, "the run's folder below output_dir; absent: the configuration file's stem", NAME)
    output_dir: str = option("outputs", "where runs are kept")
    seed: int = option(0, "of weights and data order", NOT_NEGATIVE)
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda where there is a GPU, else cpu")
    deterministic: bool = option(False, "torch's deterministic algorithms only")


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
    init_from: str | None = option(None, "a Hugging Face folder to start from")
    freeze: tuple[str, ...] = option((), "patterns of parameter names that are not trained, as 'embedding*'")

    @property
    def width_per_head(self) -> int:
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True)
class Source:
    source: str = option(MISSING, "as data.source")
    weight: float = option(MISSING, "share of the samples", POSITIVE)


@dataclass(frozen=True)
class Data:
    source: str = option("python-stdlib", '"python-stdlib", a Hugging Face id, or local .jsonl, .parquet or .txt files')
    subset: str | None = option(None, "configuration of a Hugging Face dataset")
    split: str = option("train", "split of a Hugging Face dataset")
    text_field: str = option("text", "column that holds the text")
    path: str | None = option(None, "folder of token files; absent: prepared/{source}-{hash}")
    tokenizer: str | None = option(None, "a sentencepiece .model; absent: trained on the source with model.vocab_size")
    max_tokens: int | None = option(None, "stop preparing after so many tokens; absent: everything", POSITIVE)
    document_mask: bool = option(False, "keep attention inside a document")
    sources: tuple[Source, ...] = option((), "a mixture: [[data.sources]] tables with source and weight")


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
    state_dtype: Literal["float32", "bfloat16"] = option("float32", "of AdamW's moments")


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
    async_save: bool = option(False, "write while training goes on")
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
    """Micro-batches per step and rank."""
    return cfg.train.global_batch_size // (cfg.train.micro_batch_size * dp_size)


def schedule_steps(cfg: Config) -> int:
    return cfg.optim.schedule_steps or cfg.train.steps


def run_folder(cfg: Config) -> pathlib.Path:
    return pathlib.Path(cfg.run.output_dir) / cfg.run.name


def unit_names(model: Model) -> list[str]:
    """The FSDP units in forward order, as parallel/fsdp.py makes them."""
    blocks = [f"blocks.{i}" for i in range(model.n_layers)]
    return ["embedding+head", *blocks] if model.tie_embeddings else ["embedding", *blocks, "head"]


def mesh_shape(cfg: Config, world_size: int) -> tuple[int, int]:
    """(replicas, shards) for so many ranks. Raises ConfigError where the two options cannot make them, or where the
    global batch cannot be split over them."""
    p, t = cfg.parallel, cfg.train
    replicate, shard = p.dp_replicate, p.dp_shard
    if replicate == "auto":
        replicate = max(1, world_size // shard)
    if shard == "auto":
        shard = max(1, world_size // replicate)
    problems = []
    if replicate * shard != world_size:
        problems.append(
            f"[parallel] dp_replicate = {p.dp_replicate}, dp_shard = {p.dp_shard}: replicas x shards must equal the "
            f"number of ranks, {world_size}; set one of the two to \"auto\""
        )
    if t.global_batch_size % (t.micro_batch_size * world_size):
        problems.append(
            f"[train] global_batch_size = {t.global_batch_size}: must be a multiple of micro_batch_size x ranks = "
            f"{t.micro_batch_size} x {world_size} = {t.micro_batch_size * world_size}"
        )
    n = p.reshard_after_forward
    if type(n) is int and shard % n:
        problems.append(f"[parallel] reshard_after_forward = {n}: must divide the number of shards, {shard}")
    if problems:
        raise ConfigError(*problems)
    return replicate, shard


def _contradictions(cfg: Config) -> list[str]:
    """Rules between options. Each names the option to change."""
    m, t, o, p, found = cfg.model, cfg.train, cfg.optim, cfg.parallel, []

    def rule(holds: Any, where: str, value: Any, text: str) -> None:
        if not holds:
            section, key = where.rsplit(".", 1)
            found.append(f"[{section}] {key} = {_toml(value)}: {text}")

    rule(m.n_heads % m.n_kv_heads == 0, "model.n_kv_heads", m.n_kv_heads, f"must divide n_heads = {m.n_heads}")
    rule(m.head_dim or m.dim % m.n_heads == 0, "model.n_heads", m.n_heads,
         f"must divide dim = {m.dim}, unless head_dim is given")
    rule(m.width_per_head % 2 == 0, "model.head_dim", m.width_per_head, "must be even: rotary embedding turns pairs")
    if s := m.rope_scaling:
        rule(s.low_freq_factor < s.high_freq_factor, "model.rope_scaling.low_freq_factor", s.low_freq_factor,
             f"must be below high_freq_factor = {s.high_freq_factor}")
    rule(t.global_batch_size % t.micro_batch_size == 0, "train.micro_batch_size", t.micro_batch_size,
         f"must divide global_batch_size = {t.global_batch_size}")
    end = schedule_steps(cfg)
    rule(o.warmup_steps <= end, "optim.warmup_steps", o.warmup_steps,
         f"must not exceed the schedule's length, {end} (optim.schedule_steps, else train.steps)")
    if o.schedule == "wsd":
        rule(o.decay_steps, "optim.schedule", o.schedule, "needs optim.decay_steps")
        rule(o.warmup_steps + (o.decay_steps or 0) <= end, "optim.decay_steps", o.decay_steps,
             f"with warmup_steps = {o.warmup_steps} must fit into the schedule's length, {end}")
    else:
        rule(o.decay_steps is None, "optim.decay_steps", o.decay_steps, 'goes with schedule = "wsd" only')
    rule(not (p.dp_replicate == "auto" == p.dp_shard), "parallel.dp_shard", "auto",
         "only one of dp_replicate and dp_shard may be \"auto\"")
    for pattern in p.keep_fp32:
        rule(fnmatch.filter(unit_names(m), pattern), "parallel.keep_fp32", pattern,
             f"matches no unit; units are {unit_names(m)[0]}, blocks.0 ... blocks.{m.n_layers - 1}"
             + ("" if m.tie_embeddings else ", head"))
    for key in ("init_from", "freeze"):
        rule(not getattr(m, key), f"model.{key}", getattr(m, key), "is not supported by this version")
    rule(not cfg.data.document_mask, "data.document_mask", True, "is not supported by this version")
    rule(not cfg.data.sources, "data.sources", "...", "is not supported by this version: name one data.source")
    rule(o.state_dtype == "float32", "optim.state_dtype", o.state_dtype, 'only "float32" is supported by this version')
    if c := cfg.checkpoint:
        rule(not c.async_save, "checkpoint.async_save", True, "is not supported by this version")
        for name in c.allow_changed:
            section, _, key = name.partition(".")
            rule(hasattr(getattr(cfg, section, None), key), "checkpoint.allow_changed", name,
                 "names no option of this configuration; write section.key")
    return found


# Reading: TOML and command line -> one raw table -> dataclasses, collecting every problem on the way.


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line of train.py and of the tools that take a CONFIG. Exits with 2 where it is wrong."""

    def positive(number: Callable) -> Callable:
        def read(text: str) -> Any:
            if not number(text) > 0:
                raise ValueError
            return number(text)
        read.__name__ = f"number (greater than 0): {number.__name__}"
        return read

    parser = argparse.ArgumentParser(prog="run_train.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--world-size", type=lambda s: [positive(int)(n) for n in s.split(",")], default=[1])
    parser.add_argument("--gpu-memory-gib", type=positive(float))
    parser.add_argument("--launch")  # lifecycle.py's name for this start
    args, args.overrides = parser.parse_known_args(argv)
    for word in args.overrides:
        if not (word.startswith("--") and "=" in word):
            parser.error(f"{word}: options are written --section.key=value, after one configuration file")
    return args


def from_command_line(argv: list[str], usage: str) -> tuple[argparse.Namespace, Config]:
    """What a program was called with. Prints every problem and exits with 2 where it is wrong; with 0 after --help."""
    if not argv or {"--help", "-h"} & set(argv):
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
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:  # tomli's own error is a ValueError
        hint = "; it begins with a byte order mark, save it without" if text.startswith("\ufeff") else ""
        raise ConfigError(f"{path}: is not valid TOML: {error}{hint}") from None
    if not raw:
        raise ConfigError(f"{path}: is empty; configs/tiny.toml shows what a run needs")
    return from_dict(raw, path, overrides)


def from_dict(raw: dict, path: str, overrides: Iterable[str] = ()) -> Config:
    """The same from tables that are read already; `path` says in errors where they come from."""
    problems: list[str] = []
    given = {}  # dotted key -> "command line", for the errors
    for override in overrides:
        _apply_override(raw, override, given, problems)
    sections = _build(Config, raw, "", lambda key: given.get(key, path), problems)
    if not problems and sections.run.name is None:
        name = pathlib.Path(path).stem
        if not NAME[0](name):
            problems.append(f"{path}: the file's name is the run's name, but {NAME[1]}; set run.name")
        sections = replace(sections, run=replace(sections.run, name=name))
    problems = problems or [f"{path}: {problem}" for problem in _contradictions(sections)]
    if problems:
        raise ConfigError(*problems)
    return sections


def _apply_override(raw: dict, override: str, given: dict, problems: list) -> None:
    dotted, _, text = override[2:].partition("=")
    *tables, key = dotted.split(".")
    kind, table = Config, raw
    for name in tables:
        hints = typing.get_type_hints(kind)
        kind = next((m for m in _members(hints.get(name)) if is_dataclass(m)), None)
        table = table.setdefault(name, {})
        if kind is None or not isinstance(table, dict):
            problems.append(f"command line: {override}: unknown section{_nearest(name, hints)}")
            return
    hint = typing.get_type_hints(kind).get(key)
    if not tables:
        if text == "off" and NoneType in typing.get_args(hint):
            table.pop(key, None)
        else:
            problems.append(f"command line: {override}: unknown; options are written --section.key=value, and "
                            "--eval=off, --checkpoint=off, --profile=off remove a section")
        return
    try:
        words = all(m is str or typing.get_origin(m) is Literal for m in _members(hint))
        table[key] = text if words else tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        table[key] = text  # a word, as auto or full; whether it may stand here is checked with the types
    given[dotted] = "command line"


def _build(kind: type, raw: Any, name: str, source: Callable[[str], str], problems: list) -> Any:
    """A dataclass from a table. Faults go to `problems`, and then the result does not count."""
    values, hints = {}, typing.get_type_hints(kind)
    if not isinstance(raw, dict):
        problems.append(f"{source(name)}: {name} = {_toml(raw)}: must be a table, written [{name}]")
        return None
    for key in raw.keys() - hints.keys():
        what = f"[{name}] {key} = {_toml(raw[key])}: unknown key" if name else f"[{key}]: unknown section"
        problems.append(f"{source(f'{name}.{key}')}: {what}{_nearest(key, hints)}")
    for f in fields(kind):
        dotted = f"{name}.{f.name}" if name else f.name
        inner = next((m for m in _members(hints[f.name]) if is_dataclass(m)), None)
        if inner and (f.name in raw or NoneType not in typing.get_args(hints[f.name])):
            values[f.name] = _build(inner, raw.get(f.name, {}), dotted, source, problems)
        elif inner or f.name not in raw:
            values[f.name] = None if f.default is MISSING else f.default
            if f.default is MISSING and not inner:
                problems.append(f"{source(dotted)}: [{name}] {f.name}: is missing, and has no default")
        else:
            at = f"{source(dotted)}: [{name}] {f.name} = {_toml(raw[f.name])}"
            try:
                value = values[f.name] = _fit(raw[f.name], hints[f.name])
                holds, rule = f.metadata["rule"] or (lambda _: True, "")
                if not holds(value):
                    problems.append(f"{at}: {rule}")
            except TypeError:
                half = "; float16 would need a loss scaler, which this trainer does without"
                problems.append(f"{at}: must be {_describe(hints[f.name])}{half if raw[f.name] == 'float16' else ''}")
    return None if problems else kind(**values)


def _fit(value: Any, kind: Any) -> Any:
    """The value as the dataclass holds it. Raises TypeError where the annotation does not take it."""
    for member in _members(kind):
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


def _members(kind: Any) -> tuple:
    """The types that an annotation allows, None left out."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return tuple(m for m in typing.get_args(kind) if m is not NoneType) if union else (kind,)


def _describe(kind: Any) -> str:
    def one(member: Any) -> str:
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            return " or ".join(f'"{word}"' for word in args)
        if origin is tuple:
            return f"a list of {'any number of' if args[-1] is ... else len(args)} {_describe(args[0])}s"
        return {int: "integer", float: "number", bool: "true or false", str: "text"}.get(member, "table")
    return " or ".join(map(one, _members(kind)))


def _nearest(word: str, known: Iterable[str]) -> str:
    for section, kind in typing.get_type_hints(Config).items():  # the right key in the wrong section
        if word in typing.get_type_hints(_members(kind)[0]):
            return f"; did you mean [{section}] {word}?"
    if near := difflib.get_close_matches(word, list(known), n=1, cutoff=0.5):
        return f'; did you mean "{near[0]}"?'
    return f"; known are {', '.join(known)}"


# Writing: the resolved configuration, and the list of options.


def to_dict(cfg: Config) -> dict:
    """Plain tables, without what is absent."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return list(value) if isinstance(value, tuple) else value
    return plain(dataclasses.asdict(cfg))


def to_toml(cfg: Config) -> str:
    """The resolved configuration, which load() reads back as an equal one."""
    lines: list[str] = []

    def table(name: str, values: dict) -> None:
        lines.extend(["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict))])
        for key, value in values.items():
            if isinstance(value, dict):
                table(f"{name}.{key}", value)

    for name, values in to_dict(cfg).items():
        table(name, values)
    return "\n".join(lines[1:]) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def option_table() -> str:
    """Every option with its default, type and meaning, from the dataclasses themselves."""
    lines: list[str] = []

    def table(name: str, hint: Any) -> None:
        kind, inner = _members(hint)[0], []
        lines.append(f"\n[{name}]{'   (off unless given)' if hint is not kind else ''}")
        hints = typing.get_type_hints(kind)
        for f in fields(kind):
            if is_dataclass(_members(hints[f.name])[0]):
                inner.append((f"{name}.{f.name}", hints[f.name]))
                continue
            default = "required" if f.default is MISSING else "absent" if f.default is None else _toml(f.default)
            lines.append(f"  {f.name} = {default}".ljust(43) + f"# {_describe(hints[f.name])}: {f.metadata['doc']}")
        for item in inner:
            table(*item)

    for name, hint in typing.get_type_hints(Config).items():
        table(name, hint)
    return "\n".join(lines).strip()
