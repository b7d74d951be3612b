"""Every option of the trainer: frozen dataclasses, read from TOML and `--section.key=value`, checked once.

    python train.py --help          # every option with its type, default and meaning, from this file

Needs no torch: a wrong configuration fails in milliseconds, with all its problems listed, before any process starts.
Adding an option is two edits: one line in a dataclass here, and the place that uses it.
"""

import dataclasses
import difflib
import fnmatch
import json
import math
import pathlib
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

import tomli


class ConfigError(Exception):
    """What the user gave is wrong (a file, an option, the data). Carries every problem found, one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


IGNORE = -100  # a target token that does not count; data writes it, model/loss.py reads it, as in torch's cross_entropy

REQUIRED = dataclasses.MISSING
POSITIVE = (lambda v: v > 0, "must be greater than 0")
NOT_NEGATIVE = (lambda v: v >= 0, "must be at least 0")
FRACTION = (lambda v: 0 <= v <= 1, "must lie between 0 and 1")
BETAS = (lambda v: all(0 <= b < 1 for b in v), "both must lie in [0, 1)")
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

    factor: float = option(REQUIRED, "how many times longer than the original context", (lambda v: v >= 1, ">= 1"))
    low_freq_factor: float = option(1.0, "wavelengths above original / this are divided by factor", POSITIVE)
    high_freq_factor: float = option(4.0, "wavelengths below original / this are kept", POSITIVE)
    original_max_position_embeddings: int = option(8192, "context length before scaling", POSITIVE)


@dataclass(frozen=True)
class Model:
    dim: int = option(REQUIRED, "width of the residual stream", POSITIVE)
    n_layers: int = option(REQUIRED, "transformer blocks", POSITIVE)
    n_heads: int = option(REQUIRED, "query heads", POSITIVE)
    n_kv_heads: int = option(REQUIRED, "key/value heads (grouped-query attention)", POSITIVE)
    ffn_dim: int = option(REQUIRED, "width inside the feed-forward", POSITIVE)
    vocab_size: int = option(REQUIRED, "rows of the embedding", POSITIVE)
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
    source: str = option(REQUIRED, "as data.source")
    weight: float = option(REQUIRED, "share of the samples", POSITIVE)


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
    steps: int = option(REQUIRED, "optimizer steps", POSITIVE)
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
        True, "true: free after forward; false: keep until backward; n: keep shards of n", (lambda v: v is True or v is False or v >= 2, "an integer must be at least 2")
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
    at_step: int = option(REQUIRED, "first step of the trace", POSITIVE)
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
            rule(_known(name), "checkpoint.allow_changed", name, "names no option; write section.key")
    return found


# Reading: TOML and command line -> one raw table -> dataclasses, collecting every problem on the way.


@dataclass(frozen=True)
class Arguments:
    """The command line of train.py and of the tools that take a CONFIG."""

    config: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    eval_only: bool = False
    world_sizes: tuple[int, ...] = ()
    gpu_memory_gib: float | None = None
    launch: str | None = None


def parse_arguments(argv: list[str]) -> Arguments:
    """CONFIG [--section.key=value ...] and the few flags that are no options. Raises ConfigError."""
    values: dict[str, Any] = {"overrides": []}
    problems, words = [], list(argv)
    numbers = {"--world-size": ("world_sizes", lambda s: tuple(int(n) for n in s.split(","))),
               "--gpu-memory-gib": ("gpu_memory_gib", float),
               "--launch": ("launch", str)}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word in ("--dry-run", "--json", "--eval-only"):
            values[word[2:].replace("-", "_")] = True
        elif flag in numbers:
            name, read = numbers[flag]
            value = value if equals else (words.pop(0) if words else "")
            try:
                values[name] = read(value)
                if name != "launch" and not all(n > 0 for n in (values[name] if name == "world_sizes" else [values[name]])):
                    raise ValueError
            except ValueError:
                problems.append(f"command line: {flag} {value}: needs a number greater than 0")
        elif word.startswith("--") and equals:
            values["overrides"].append(word)
        elif word.startswith("-"):
            problems.append(f"command line: {word}: unknown; options are written --section.key=value")
        elif "config" in values:
            problems.append(f"command line: {word}: only one configuration file may be given, and "
                            f"{values['config']} is one already; options are written --section.key=value")
        else:
            values["config"] = word
    if "config" not in values:
        problems.append("command line: name a configuration file, as configs/tiny.toml")
    if problems:
        raise ConfigError(*problems)
    return Arguments(**{**values, "overrides": tuple(values["overrides"])})


def from_command_line(argv: list[str], usage: str) -> tuple[Arguments, Config]:
    """What a program was called with. Prints every problem and exits with 2 where it is wrong; with 0 after --help."""
    if not argv or {"--help", "-h"} & set(argv):
        print(f"{usage.strip()}\n\nOptions, in the file or as --section.key=value:\n\n{option_table()}")
        sys.exit(0)
    try:
        args = parse_arguments(argv)
        return args, load(args.config, args.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def load(path: str, overrides: typing.Iterable[str] = ()) -> Config:
    """Reads a configuration file and the overrides on top of it. Raises ConfigError with every problem found."""
    return from_dict(_read_toml(path), path, overrides)


def from_dict(raw: dict, path: str, overrides: typing.Iterable[str] = ()) -> Config:
    """The same from tables that are read already; `path` says in errors where they come from."""
    problems: list[str] = []
    origin: dict[str, str] = {}  # dotted key -> where its value was given
    for override in overrides:
        _apply_override(raw, override, origin, problems)
    sections = {}
    hints = typing.get_type_hints(Config)
    for name in raw:
        if name not in hints:
            problems.append(f"{origin.get(name, path)}: [{name}]: unknown section{_nearest(name, hints)}")
    for name, kind in hints.items():
        optional = _is_optional(kind)
        if name in raw or not optional:
            value = raw.get(name, {})
            sections[name] = _build(_without_none(kind), value, name, origin, path, problems)
        else:
            sections[name] = None
    if not problems and sections["run"].name is None:
        stem = pathlib.Path(path).stem
        if not NAME[0](stem):
            problems.append(f"{path}: the file's name is the run's name, but {NAME[1]}; set run.name")
        sections["run"] = dataclasses.replace(sections["run"], name=stem)
    if problems:
        raise ConfigError(*problems)
    cfg = Config(**sections)
    if found := _contradictions(cfg):
        raise ConfigError(*(f"{path}: {problem}" for problem in found))
    return cfg


def _read_toml(path: str) -> dict:
    try:
        data = pathlib.Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        raw = tomli.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except (tomli.TOMLDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    if not raw:
        raise ConfigError(f"{path}: is empty; configs/tiny.toml shows what a run needs")
    return raw


def _apply_override(raw: dict, override: str, origin: dict, problems: list) -> None:
    dotted, _, text = override[2:].partition("=")
    *tables, key = dotted.split(".")
    where = f"command line: {override}"
    hints = typing.get_type_hints(Config)
    if not tables:
        if text == "off" and key in hints and _is_optional(hints[key]):
            raw.pop(key, None)
        elif key in hints:
            problems.append(f"{where}: write --{key}.option=value"
                            + (f", or --{key}=off to remove the section" if _is_optional(hints[key]) else ""))
        else:
            problems.append(f"{where}: unknown section{_nearest(key, hints)}")
        return
    kind: Any = Config
    table = raw
    for name in tables:
        fields = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in fields:
            problems.append(f"{where}: unknown section [{name}]{_nearest(name, fields)}")
            return
        kind = _without_none(fields[name])
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            problems.append(f"{where}: {name} is no table")
            return
    kind = typing.get_type_hints(kind).get(key) if dataclasses.is_dataclass(kind) else None
    members = [m for m in _members(kind) if m is not types.NoneType]
    literal = all(m is str or typing.get_origin(m) is Literal for m in members)
    try:
        value = text if literal else tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text  # a word where TOML does not parse: "auto", "full"; the type check below has the last say
    table[key] = value
    origin[dotted] = "command line"


def _build(kind: type, raw: Any, where: str, origin: dict, path: str, problems: list) -> Any:
    """One dataclass from one table; every fault goes to `problems`, and the result counts only if there is none."""
    if not isinstance(raw, dict):
        problems.append(f"{path}: {where} = {_toml(raw)}: must be a table, written [{where}]")
        return None
    hints, values = typing.get_type_hints(kind), {}
    for key, value in raw.items():
        at = f"{origin.get(f'{where}.{key}', path)}: [{where}] {key} = {_toml(value)}"
        if key not in hints:
            problems.append(f"{at}: unknown key{_nearest(key, hints, where)}")
            continue
        inner = [m for m in _members(hints[key]) if dataclasses.is_dataclass(m)]
        if inner:
            values[key] = _build(inner[0], value, f"{where}.{key}", origin, path, problems)
            continue
        found, typed = _typed(value, hints[key])
        rule = kind.__dataclass_fields__[key].metadata["rule"]
        if not found:
            reason = "; float16 would need a loss scaler, which this trainer does without" if value == "float16" else ""
            problems.append(f"{at}: must be {_describe(hints[key])}{reason}")
        elif rule and not isinstance(typed, str | None) and not rule[0](typed):
            problems.append(f"{at}: {rule[1]}")
        elif rule is NAME and not NAME[0](typed):
            problems.append(f"{at}: {NAME[1]}")
        else:
            values[key] = typed
    for f in dataclasses.fields(kind):
        if f.default is REQUIRED and f.name not in raw:
            problems.append(f"{path}: [{where}] {f.name}: missing; it has no default ({f.metadata['doc']})")
            values[f.name] = None
    return kind(**values)


def _typed(value: Any, kind: Any) -> tuple[bool, Any]:
    """(does the TOML value fit the annotation, the value as the dataclass holds it)."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in args:
            found, typed = _typed(value, member)
            if found:
                return True, typed
        return False, None
    if origin is Literal:
        return isinstance(value, str) and value in args, value
    if origin is tuple:
        if not isinstance(value, list):
            return False, None
        if dataclasses.is_dataclass(args[0]):
            return all(isinstance(v, dict) for v in value), tuple(value)
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        items = [_typed(v, k) for v, k in zip(value, kinds)]
        return len(value) == len(kinds) and all(ok for ok, _ in items), tuple(v for _, v in items)
    if kind is bool:
        return isinstance(value, bool), value
    if kind is int:  # bool is an int in Python, and 10**23 is one in TOML
        return type(value) is int and abs(value) < 2**63, value
    if kind is float:
        number = type(value) in (int, float) and abs(value) < 1e300
        return number and math.isfinite(value), float(value) if number else None
    if kind is str:
        return isinstance(value, str) and value != "" and "\0" not in value, value
    return False, None


def _members(kind: Any) -> tuple:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_optional(kind: Any) -> bool:
    return types.NoneType in _members(kind)


def _without_none(kind: Any) -> Any:
    return next(m for m in _members(kind) if m is not types.NoneType)


def _describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(m) for m in args if m is not types.NoneType)
    if origin is Literal:
        return " or ".join(f'"{a}"' for a in args)
    if origin is tuple:
        return f"a list of {_describe(args[0])}" if args[-1] is Ellipsis else f"a list of {len(args)} numbers"
    names = {int: "an integer (below 2^63)", float: "a finite number", bool: "true or false",
             str: "text (not empty, without NUL)"}
    return names.get(kind) or "a table"


def _known(dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    hints = typing.get_type_hints(Config)
    return section in hints and key in typing.get_type_hints(_without_none(hints[section]))


def _nearest(word: str, known: typing.Iterable[str], where: str = "") -> str:
    if near := difflib.get_close_matches(word, list(known), n=1, cutoff=0.5):
        return f'; did you mean "{near[0]}"?'
    for section, kind in typing.get_type_hints(Config).items():  # right key, wrong section
        if word in typing.get_type_hints(_without_none(kind)):
            return f'; did you mean "{word}" in [{section}]?'
    return f"; known: {', '.join(known)}"


# Writing: the resolved configuration, and the list of options.


def to_dict(cfg: Config) -> dict:
    """Plain tables, without what is absent."""
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, tuple | list) else value
    return clean(dataclasses.asdict(cfg))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def to_toml(cfg: Config) -> str:
    """The resolved configuration as TOML that load() reads back to an equal Config."""
    lines: list[str] = []

    def table(name: str, values: dict) -> None:
        lines.append(f"[{name}]")
        lines.extend(f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict))
        lines.append("")
        for key, inner in values.items():
            if isinstance(inner, dict):
                table(f"{name}.{key}", inner)

    for name, values in to_dict(cfg).items():
        table(name, values)
    return "\n".join(lines)


def option_table() -> str:
    """Every option with its default, type and meaning, from the dataclasses themselves."""
    lines = []

    def table(name: str, kind: Any, note: str) -> None:
        lines.append(f"\n[{name}]{note}")
        inner = []
        hints = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):
            nested = [m for m in _members(hints[f.name]) if dataclasses.is_dataclass(m)]
            if nested:
                inner.append((f"{name}.{f.name}", nested[0], "   (off unless given)"))
                continue
            default = {REQUIRED: "required", None: "absent"}.get(f.default if f.default.__hash__ else None)
            default = default or _toml(f.default)
            lines.append(f"  {f.name} = {default}".ljust(38) + f"# {_describe(hints[f.name])}: {f.metadata['doc']}")
        for item in inner:
            table(*item)

    for name, kind in typing.get_type_hints(Config).items():
        table(name, _without_none(kind), "   (off unless given)" if _is_optional(kind) else "")
    return "\n".join(lines).strip()
