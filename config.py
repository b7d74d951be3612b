"""Every option of the trainer and every rule between options, as frozen dataclasses.

    python train.py --help          # every option with its type, default and meaning

Needs no torch: a wrong configuration fails in milliseconds, with all its problems, before any
process starts.
"""

import argparse
import contextlib
import fnmatch
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass
from typing import Literal, NoReturn

import schema
from data import hub
from schema import ConfigError, Constraint, Rule, option, to_dict

EXTRAS = pathlib.Path(__file__).parent / "extras"
# Of batch_digest: exact in JSON.
DIGEST_MODULUS = 2**53
# Samples: the longest period of a mixture's order of sources.
LONGEST_PERIOD = 1 << 16
# Target id without a loss, cross_entropy's ignore_index: data/ writes it, model/loss.py reads it.
IGNORE = -100
# Values of recompute that save a part of each block.
SELECTIVE = ("elementwise", "selective")
# The matrices of a block, in order.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# What a row of data is: a text, or a conversation in one of three forms. "tokens": files of token
# ids instead of rows.
RowFormat = Literal["text", "messages", "alpaca", "prompt_completion", "tokens"]

# What the values of options must satisfy. A string is a keyword such as "auto".
POSITIVE = Constraint(lambda v: isinstance(v, str) or v > 0, "must be greater than 0")
NOT_NEGATIVE = Constraint(lambda v: v >= 0, "must be at least 0")
AT_LEAST_ONE = Constraint(lambda v: v >= 1, ">= 1")
FRACTION = Constraint(lambda v: 0 <= v <= 1, "must lie between 0 and 1")
MOMENTUM = Constraint(lambda v: 0 <= v < 1, "must lie in [0, 1)")
BETAS = Constraint(lambda v: all(0 <= beta < 1 for beta in v), "both must lie in [0, 1)")
EPSILON = Constraint(
    lambda v: v >= 1e-38, "must be at least 1e-38: float32 would make less of it 0"
)
# torch adds a timeout to a clock's nanoseconds.
TIMEOUT = Constraint(lambda v: 0 < v <= 1e8, "must be greater than 0, and at most 1e8")
TARGETS = Constraint(
    lambda v: v == "all-linear" or (v and {*v} <= {*PROJECTIONS}),
    f'must name projections: {", ".join(PROJECTIONS)}; or be "all-linear"',
)
# A run's name is the name of one folder, and is used without quoting.
NAME = Constraint(
    lambda v: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{,199}", v),
    "may hold only letters, digits, '.', '_' and '-', at most 200, and must not begin with '.' or "
    "'-'",
)
# Added to the error for a wrong dtype.
NO_FLOAT16 = "; float16 would need a loss scaler, which this trainer does without"


@dataclass(frozen=True)
class Run:
    name: str | None = option(
        None, "the run's folder in output_dir; absent: the configuration file's stem", NAME
    )
    output_dir: str = option("outputs", "folder that holds all runs", is_path=True)
    seed: int = option(0, "seed of initial weights and data order", NOT_NEGATIVE)
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "auto: cuda where there is a GPU, else cpu"
    )
    deterministic: bool = option(False, "use only torch's deterministic algorithms")
    start_timeout_seconds: float = option(1800.0, "timeout of set-up and the first step", TIMEOUT)
    step_timeout_seconds: float = option(
        600.0, "timeout of a step, or of a batch of an evaluation", TIMEOUT
    )
    save_timeout_seconds: float = option(
        1800.0, "timeout of writing or reading a checkpoint", TIMEOUT
    )


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency table: https://arxiv.org/abs/2407.21783, section 3.4.1, and Meta's
    reference code."""

    factor: float = option(MISSING, "new context length / original context length", AT_LEAST_ONE)
    low_freq_factor: float = option(
        1.0, "frequencies of longer waves than original / this are divided", POSITIVE
    )
    high_freq_factor: float = option(
        4.0, "frequencies of shorter waves than original / this are kept", POSITIVE
    )
    original_max_position_embeddings: int = option(8192, "context length before scaling", POSITIVE)


@dataclass(frozen=True)
class Model:
    dim: int = option(MISSING, "width of the residual stream", POSITIVE)
    n_layers: int = option(MISSING, "transformer blocks", POSITIVE)
    n_heads: int = option(MISSING, "query heads", POSITIVE)
    n_kv_heads: int = option(MISSING, "key/value heads (grouped-query attention)", POSITIVE)
    ffn_dim: int = option(MISSING, "hidden width of the feed-forward", POSITIVE)
    vocab_size: int = option(MISSING, "rows of the embedding", POSITIVE)
    head_dim: int | None = option(None, "width of a head; absent: dim / n_heads", POSITIVE)
    norm_eps: float = option(1e-5, "epsilon of RMSNorm", EPSILON)
    rope_theta: float = option(500000.0, "base of RoPE's frequencies", POSITIVE)
    rope_scaling: RopeScaling | None = option(
        None, "Llama 3.1's long-context RoPE: [model.rope_scaling]"
    )
    tie_embeddings: bool = option(False, "share one matrix between embedding and head")
    qk_norm: bool = option(
        False, "RMSNorm of each query's and key's head, before RoPE, as Qwen3 has it"
    )
    init_from: str | None = option(
        None,
        "a Hugging Face folder, or id, to take weights and sizes from",
        extra="huggingface",
        is_path=True,
    )
    freeze: tuple[str, ...] = option(
        (), "patterns of parameter names to freeze, such as 'embedding*'"
    )

    @property
    def width_per_head(self) -> int:
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True)
class Source:
    source: str = option(MISSING, "as data.source", is_path=True)
    weight: float = option(1.0, "share of the samples, relative to the other weights", POSITIVE)
    subset: str | None = option(None, "absent: the value of [data], also for the options below")
    split: str | None = option(None, "as data.split")
    text_field: str | None = option(None, "as data.text_field")
    max_tokens: int | None = option(None, "as data.max_tokens", POSITIVE)
    validation: str | None = option(None, "as data.validation", is_path=True)
    format: RowFormat | None = option(None, "as data.format")


@dataclass(frozen=True)
class Data:
    source: str = option(
        "python-stdlib",
        '"python-stdlib", a Hugging Face id, or local .jsonl, .json, .parquet, .arrow or .txt files',
        is_path=True,
    )
    subset: str | None = option(None, "configuration of a Hugging Face dataset")
    split: str = option("train", "split of a Hugging Face dataset")
    text_field: str = option("text", "column with the text")
    path: str | None = option(
        None, "folder of token files; absent: prepared/{source}-{hash}", is_path=True
    )
    tokenizer: str | None = option(
        None,
        "a .model, tokenizer.json, folder or id; absent: init_from's, else train one",
        is_path=True,
    )
    max_tokens: int | None = option(None, "tokens to prepare; absent: all", POSITIVE)
    document_mask: bool = option(False, "attend only within a document; positions restart in each")
    format: RowFormat | None = option(
        None,
        "what a row is: a text, or a conversation; absent: found from the first row; tokens: files "
        "of token ids (.bin, .npy)",
    )
    token_dtype: Literal["uint16", "int32", "uint32"] | None = option(
        None, "dtype in files of token ids alone; others say it themselves"
    )
    eos_id: int | None = option(None, "token with which documents end in token files", NOT_NEGATIVE)
    messages_field: str | None = option(
        None,
        "column with a conversation's messages; absent: messages, else conversations",
        extra="chat",
    )
    chat_template: str | None = option(
        None,
        "a Jinja file that renders conversations; absent: the tokenizer's own",
        extra="chat",
        is_path=True,
    )
    order: Literal["global", "growing"] = option(
        "global", "growing: train while the text is prepared; its first epoch reads it in segments"
    )
    validation: str | None = option(
        None,
        "validation text of your own: files, or a split of the Hugging Face dataset",
        is_path=True,
    )
    sources: tuple[Source, ...] = option((), "a mixture, weighted", note="; write [[data.sources]]")

    @property
    def row_format(self) -> RowFormat:
        """The format of one source's rows. data/formats.py finds it where no option says it."""
        return self.format or ("messages" if self.messages_field else "text")

    @property
    def has_conversations(self) -> bool:
        """Whether rows are conversations: those of all sources are, or of none."""
        formats = {self.row_format, *(source.format for source in self.sources)}
        return bool(formats - {None, "text", "tokens"})


@dataclass(frozen=True)
class Train:
    steps: int = option(MISSING, "optimizer steps", POSITIVE)
    seq_len: int = option(2048, "tokens per sequence", POSITIVE)
    global_batch_size: int = option(8, "sequences per step, over all ranks", POSITIVE)
    micro_batch_size: int | None = option(
        None, "sequences per forward and rank; absent: no accumulation", POSITIVE
    )
    max_grad_norm: float | Literal["off"] = option(
        1.0, "clip the global gradient norm to this", POSITIVE
    )
    skip_nonfinite: int = option(
        0, "consecutive steps with non-finite gradients to skip; 0: none", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "muon"] = option(
        "adamw", "muon: Muon for the blocks' matrices, AdamW for the rest", extra="optimizers"
    )
    lr: float = option(3e-4, "peak learning rate", POSITIVE)
    muon_lr: float | None = option(
        None, "of Muon's matrices; absent: lr, since updates are as large", POSITIVE
    )
    muon_momentum: float = option(0.95, "Nesterov momentum of Muon", MOMENTUM)
    betas: tuple[float, float] = option((0.9, 0.95), "beta1 and beta2 of AdamW", BETAS)
    eps: float = option(1e-8, "epsilon of AdamW", EPSILON)
    weight_decay: float = option(
        0.1, "on every parameter with two or more dimensions", NOT_NEGATIVE
    )
    warmup_steps: int = option(
        0, "steps of linear warm-up; at most schedule_steps, if that is given", NOT_NEGATIVE
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "decay; wsd: over decay_steps"
    )
    decay_steps: int | None = option(None, "length of wsd's decay", POSITIVE)
    schedule_steps: int | None = option(
        None, "step at which the schedule ends; absent: train.steps", POSITIVE
    )
    min_lr_ratio: float = option(0.1, "final learning rate / lr", FRACTION)
    state_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of moments and momentum", extra="optimizers"
    )


@dataclass(frozen=True)
class Parallel:
    dp_replicate: int | Literal["auto"] = option(
        1, "replicas of the sharded model (HSDP)", POSITIVE
    )
    dp_shard: int | Literal["auto"] = option(
        "auto", "ranks that each copy is sharded over; auto: all left", POSITIVE
    )
    cp: int = option(1, "ranks that a sequence is sharded over (context parallelism)", POSITIVE)
    tp: int = option(1, "ranks that each matrix is sharded over (tensor parallelism)", POSITIVE)
    reshard_after_forward: bool = option(
        True, "free a unit after its forward; false: keep it until its backward"
    )
    prefetch_forward: int = option(
        1, "units all-gathered ahead in forward; 0: implicit prefetch", NOT_NEGATIVE
    )
    prefetch_backward: int = option(
        1, "units all-gathered ahead in backward; 0: implicit prefetch", NOT_NEGATIVE
    )
    param_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "bfloat16", "of all-gather and compute; auto: bfloat16 where native on all", note=NO_FLOAT16
    )
    reduce_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of gradient reduction", note=NO_FLOAT16
    )
    output_dtype: Literal["float32", "bfloat16"] | None = option(
        None, "between units; absent: param_dtype", note=NO_FLOAT16
    )
    keep_fp32: tuple[str, ...] = option(
        (), "patterns of units to compute in float32, such as 'blocks.[01]'"
    )
    replicated: tuple[str, ...] = option(
        (), "patterns of frozen parameters to keep whole on every rank"
    )
    cpu_offload: bool = option(
        False, "keep parameters, gradients and optimizer state in host memory"
    )
    one_memory_pool: bool = option(
        False, "on GPUs, allocate FSDP2's buffers where the computation frees memory"
    )
    sync_every_micro_batch: bool = option(
        True, "reduce gradients in every micro-batch; false: once per step"
    )
    gather_once: bool = option(
        False, "all-gather each unit once per step, and keep it until its last backward"
    )
    recompute: int | Literal["none", "elementwise", "selective", "full"] = option(
        "none",
        "recompute elementwise operations, half the matmuls too, or all; n: every n-th block",
        POSITIVE,
    )
    compile: bool = option(
        False, "torch.compile each block, the loss and the update with bfloat16 states"
    )
    float8: Literal["none", "tensorwise", "rowwise"] = option(
        "none",
        "matmuls of blocks in float8, scaled per tensor (all-gathered in float8) or row",
        extra="float8",
    )


@dataclass(frozen=True)
class Lora:
    rank: int = option(16, "rank of the adapters", POSITIVE, extra="lora")
    alpha: float | None = option(
        None, "adapters are scaled by alpha / rank; absent: 2 x rank", POSITIVE, extra="lora"
    )
    # from_dict() replaces "all-linear" by the names
    targets: tuple[str, ...] | Literal["all-linear"] = option(
        PROJECTIONS, "projections that get an adapter", TARGETS, extra="lora"
    )
    base_dtype: Literal["bfloat16", "float32", "nf4"] = option(
        "bfloat16", "dtype of the frozen weights", extra="lora"
    )
    init_from: str | None = option(
        None,
        "a PEFT adapter folder to start from; sets rank, alpha and targets",
        extra="lora",
        is_path=True,
    )

    @property
    def scale(self) -> float:
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return alpha / self.rank


@dataclass(frozen=True)
class Checkpoint:
    save_every_steps: int | None = option(
        None, "steps between checkpoints; absent: only at the last step", POSITIVE
    )
    keep_last: int | None = option(None, "newest checkpoints to keep; absent: all", POSITIVE)
    keep_every_steps: int | None = option(
        None, "steps between milestones, which keep_last does not remove", POSITIVE
    )
    async_save: bool = option(
        False, "write in the background; needs host memory for a copy of the shards"
    )
    resume: Literal["auto", "never"] | int = option(
        "auto", "auto: from the newest; N: from step N", POSITIVE
    )
    allow_changed: tuple[str, ...] = option(
        (), "options that may differ from the checkpoint's, as 'train.seq_len'"
    )


@dataclass(frozen=True)
class Eval:
    every_steps: int | None = option(
        None, "steps between evaluations; absent: only at the last step", POSITIVE
    )
    batches: int | None = option(
        None, "global batches per evaluation; absent: all validation data", POSITIVE
    )


@dataclass(frozen=True)
class Log:
    every_steps: int = option(10, "steps between training rows", POSITIVE)
    tensorboard: bool = option(True, "also write tensorboard/")
    tracker: Literal["wandb", "trackio"] | None = option(
        None, "also send the rows there; a package of your own", extra="reports"
    )
    project: str | None = option(None, "the tracker's; without it: fsdp2")


@dataclass(frozen=True)
class Profile:
    at_step: int = option(MISSING, "first step to trace", POSITIVE, extra="reports")
    steps: int = option(3, "number of steps to trace", POSITIVE, extra="reports")


@dataclass(frozen=True)
class Config:
    run: Run
    model: Model
    data: Data
    train: Train
    optim: Optim
    parallel: Parallel
    lora: Lora | None
    checkpoint: Checkpoint | None
    eval: Eval | None
    log: Log
    profile: Profile | None


# Derived numbers


def tokens_per_step(cfg: Config) -> int:
    return cfg.train.global_batch_size * cfg.train.seq_len


def micro_batch_size(cfg: Config, dp_size: int) -> int:
    """Sequences per forward pass on each of dp_size data ranks."""
    return cfg.train.micro_batch_size or cfg.train.global_batch_size // dp_size


def accumulation_steps(cfg: Config, dp_size: int) -> int:
    """Micro-batches per step on each of dp_size data ranks."""
    return cfg.train.global_batch_size // (micro_batch_size(cfg, dp_size) * dp_size)


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def evaluation_is_due(cfg: Config, step: int) -> bool:
    """Whether an evaluation follows a step. None comes before the first step."""
    if cfg.eval is None or step == 0:
        return False
    is_last_step = step >= cfg.train.steps
    return is_last_step or is_due(step, cfg.eval.every_steps)


def schedule_steps(cfg: Config) -> int:
    return cfg.optim.schedule_steps or cfg.train.steps


def longest_timeout(cfg: Config) -> float:
    """The process groups' timeout in seconds. It is a last resort: each rank's watchdog times its
    own phases."""
    r = cfg.run
    return 60 + max(r.start_timeout_seconds, r.step_timeout_seconds, r.save_timeout_seconds)


def run_folder(cfg: Config) -> pathlib.Path:
    assert cfg.run.name  # absent in a file, it is the file's stem
    return pathlib.Path(cfg.run.output_dir) / cfg.run.name


def masks_attention(cfg: Config) -> bool:
    """Whether attention needs more than a causal mask: on a GPU it is FlexAttention then."""
    return cfg.parallel.cp > 1 or cfg.data.document_mask


def unit_names(model: Model) -> list[str]:
    """The FSDP units in forward order, as parallel/fsdp.py makes them."""
    blocks = [f"blocks.{i}" for i in range(model.n_layers)]
    return ["embedding+head", *blocks] if model.tie_embeddings else ["embedding", *blocks, "head"]


def mesh_shape(cfg: Config, ranks: int) -> tuple[int, int, int, int]:
    """(dp_replicate, dp_shard, cp, tp). Raises ConfigError if the ranks or the global batch do not
    divide evenly."""
    p = cfg.parallel
    t = cfg.train
    cp = p.cp
    tp = p.tp
    if ranks % (cp * tp):
        raise ConfigError(
            f"[parallel] cp = {cp}, tp = {tp}: their product must divide the number of ranks, "
            f"{ranks}"
        )
    dp_size = ranks // (cp * tp)
    dp_replicate = p.dp_replicate
    dp_shard = p.dp_shard
    # at most one of the two is "auto": a rule
    if dp_replicate == "auto":
        dp_replicate = max(1, dp_size // int(dp_shard))
    if dp_shard == "auto":
        dp_shard = max(1, dp_size // dp_replicate)
    cp_and_tp = ""
    if cp * tp > 1:
        cp_and_tp = f", cp = {cp} and tp = {tp}"
    micro_batch = t.micro_batch_size or 1
    sequences_per_pass = micro_batch * dp_size
    rules = [
        Rule(
            "parallel.dp_shard",
            dp_replicate * dp_shard * cp * tp == ranks,
            f"times dp_replicate = {p.dp_replicate}{cp_and_tp} must equal the number of ranks, "
            f"{ranks}; set one of the first two to auto",
        ),
        Rule(
            "train.global_batch_size",
            t.global_batch_size % sequences_per_pass == 0,
            "must be a multiple of micro_batch_size x data ranks = "
            f"{micro_batch} x {dp_size} = {sequences_per_pass}",
        ),
    ]
    schema.require(cfg, rules)
    return dp_replicate, dp_shard, cp, tp


def check_for_gpus(cfg: Config) -> None:
    """Raises ConfigError for what a CPU supports and a GPU does not: narrow heads, and float8 that
    is not compiled."""
    p = cfg.parallel
    if p.float8 != "none" and not p.compile:
        raise ConfigError(
            f'[parallel] float8 = "{p.float8}": requires compile = true on a GPU: '
            "rounding to 8 bits, uncompiled, takes longer than the matmuls save"
        )
    head_dim = cfg.model.width_per_head
    if masks_attention(cfg) and head_dim < 16:
        raise ConfigError(
            f"[model] head_dim: heads are {head_dim} wide; on a GPU, context parallelism and "
            "document masks need 16 or more (FlexAttention)"
        )


# Rules between options
#
#     yield Rule("option.to_change other.option", holds, "what the value must satisfy")
#
# The first name is the option that the error shows. The others are all further options that the
# rule reads: a rule is skipped while one of its options is invalid by itself.


def _rules(cfg: Config) -> Iterator[Rule]:
    """Every rule between options, in the order in which problems are listed."""
    yield from _model_rules(cfg)
    yield from _data_rules(cfg)
    yield from _mixture_rules(cfg)
    yield from _train_rules(cfg)
    yield from _schedule_rules(cfg)
    yield from _muon_rules(cfg)
    yield from _fsdp_rules(cfg)
    yield from _recompute_rules(cfg)
    yield from _tp_and_cp_rules(cfg)
    yield from _lora_rules(cfg)
    yield from _nf4_rules(cfg)
    yield from _float8_rules(cfg)
    yield from _checkpoint_rules(cfg)
    yield from _profile_rules(cfg)


def _model_rules(cfg: Config) -> Iterator[Rule]:
    m = cfg.model
    yield Rule(
        "model.n_kv_heads model.n_heads",
        m.n_heads % m.n_kv_heads == 0,
        f"must divide n_heads = {m.n_heads}",
    )
    yield Rule(
        "model.n_heads model.dim model.head_dim",
        m.head_dim or m.dim % m.n_heads == 0,
        f"must divide dim = {m.dim}, or head_dim be given",
    )
    yield Rule(
        "model.head_dim" if m.head_dim else "model.dim model.n_heads",
        m.width_per_head % 2 == 0,
        f"makes heads {m.width_per_head} wide; their width must be even",
    )
    if m.rope_scaling:
        yield Rule(
            "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor",
            m.rope_scaling.low_freq_factor < m.rope_scaling.high_freq_factor,
            f"must be below high_freq_factor = {m.rope_scaling.high_freq_factor}",
        )


def _data_rules(cfg: Config) -> Iterator[Rule]:
    d = cfg.data
    if d.sources:
        yield Rule(
            "data.validation data.sources",
            d.validation is None,
            "is an option of each source in [[data.sources]]",
        )
        yield Rule(
            "data.source data.sources",
            d.source == Data.source,
            "is incompatible with [[data.sources]]",
        )
    if d.has_conversations:
        yield from _conversation_rules(d)
    formats = {source.format or d.row_format for source in d.sources} or {d.row_format}
    if "tokens" in formats:
        yield from _token_rules(cfg, formats)
    else:
        for name in ("token_dtype", "eos_id"):
            yield Rule(
                f"data.{name} data.format",
                getattr(d, name) is None,
                'is an option of format = "tokens"',
            )
    if d.messages_field:
        yield Rule(
            "data.messages_field data.format",
            "messages" in formats,
            'is a column of format = "messages"',
        )
    if d.text_field != Data.text_field:
        yield Rule(
            "data.text_field data.format",
            not d.has_conversations,
            "is a column of texts, and the rows are conversations",
        )
    if d.chat_template:
        yield Rule(
            "data.chat_template data.format",
            d.has_conversations or d.format is None,
            'renders conversations, and the rows are texts: data.format = "text"',
        )


def _token_rules(cfg: Config, formats: set[RowFormat]) -> Iterator[Rule]:
    d = cfg.data
    if d.eos_id is not None:
        yield Rule(
            "data.eos_id model.vocab_size",
            d.eos_id < cfg.model.vocab_size,
            f"must be below vocab_size = {cfg.model.vocab_size}",
        )
    if "text" in formats:
        yield Rule(
            "data.tokenizer data.sources",
            d.tokenizer,
            "is needed to mix texts with token files: that of the token files",
        )


def _conversation_rules(d: Data) -> Iterator[Rule]:
    option = "data.messages_field"
    if d.format or not d.messages_field:
        option = "data.format"
    if d.sources:
        option = "data.sources"
        # of a source that no option says it of, the format is found from its first row
        common = d.format or ("messages" if d.messages_field else None)
        formats = [source.format or common for source in d.sources]
        said = ", ".join(name for name in formats if name)
        yield Rule(
            option,
            not {"text", "tokens"} & set(formats),
            f"mixes text and conversations (format = {said}): train on one of them",
        )
    yield Rule(f"{option} data.format", has_extra("chat"), lack_of("chat"))
    yield Rule(
        f"{option} data.tokenizer",
        d.tokenizer,
        "needs data.tokenizer: that of the model, with the special tokens of its chat template",
    )
    yield Rule(
        f"{option} data.order",
        d.order == "global",
        'is incompatible with order = "growing": windows are planned over all conversations',
    )
    yield Rule(
        f"data.document_mask {option}",
        d.document_mask,
        "is implied by conversations: attention stays inside each",
    )


def _mixture_rules(cfg: Config) -> Iterator[Rule]:
    d = cfg.data
    texts_read = set()
    for s in d.sources:
        path = os.path.realpath(s.source) if os.path.exists(s.source) else s.source
        subset = s.subset or d.subset
        split = s.split or d.split
        text_field = s.text_field or d.text_field
        max_tokens = s.max_tokens or d.max_tokens
        texts_read.add((path, subset, split, text_field, max_tokens))
    yield Rule(
        "data.sources",
        len(texts_read) == len(d.sources),
        "names one source twice; add their weights",
    )
    total_weight = sum(s.weight for s in d.sources)
    yield Rule(
        "data.sources",
        all(s.weight * LONGEST_PERIOD >= total_weight for s in d.sources),
        f"a weight must be at least 1/{LONGEST_PERIOD} of the sum of all",
    )


def _train_rules(cfg: Config) -> Iterator[Rule]:
    t = cfg.train
    if t.micro_batch_size:
        yield Rule(
            "train.micro_batch_size train.global_batch_size",
            t.global_batch_size % t.micro_batch_size == 0,
            f"must divide global_batch_size = {t.global_batch_size}",
        )


def _schedule_rules(cfg: Config) -> Iterator[Rule]:
    o = cfg.optim
    end = schedule_steps(cfg)
    schedule = (
        "optim.schedule optim.schedule_steps train.steps optim.warmup_steps optim.decay_steps"
    )
    if o.schedule_steps:  # else a smoke run may end within the warm-up
        yield Rule(
            "optim.warmup_steps optim.schedule_steps",
            o.warmup_steps <= o.schedule_steps,
            f"must not exceed schedule_steps = {o.schedule_steps}",
        )
    if o.schedule == "wsd":
        yield Rule(schedule, o.decay_steps, "needs optim.decay_steps")
    if o.decay_steps:
        yield Rule(
            f"optim.decay_steps {schedule}", o.schedule == "wsd", 'requires schedule = "wsd"'
        )
        yield Rule(
            f"optim.decay_steps {schedule}",
            o.warmup_steps > end or o.warmup_steps + o.decay_steps <= end,
            f"with warmup_steps = {o.warmup_steps} must fit into the schedule's length, {end}",
        )


def _muon_rules(cfg: Config) -> Iterator[Rule]:
    o = cfg.optim
    if o.name == "muon":
        yield Rule(
            "optim.name parallel.cpu_offload lora.rank",
            not cfg.parallel.cpu_offload and cfg.lora is None,
            "is incompatible with cpu_offload (the host would orthogonalize the matrices) and with "
            "[lora]",
        )
    else:
        yield Rule("optim.muon_lr optim.name", o.muon_lr is None, 'requires name = "muon"')
        yield Rule(
            "optim.muon_momentum optim.name",
            o.muon_momentum == Optim.muon_momentum,
            'requires name = "muon"',
        )


def _fsdp_rules(cfg: Config) -> Iterator[Rule]:
    p = cfg.parallel
    yield Rule(
        "parallel.dp_replicate parallel.dp_shard",
        p.dp_replicate != "auto" or p.dp_shard != "auto",
        'only one of dp_replicate and dp_shard may be "auto", and dp_shard is unless it is given',
    )
    if p.keep_fp32:  # else no unit is named: of a mistyped n_layers there may be too many
        units = unit_names(cfg.model)
        examples = [*units[:3], "...", units[-1]]
        yield Rule(
            "parallel.keep_fp32 model.n_layers",
            all(fnmatch.filter(units, pattern) for pattern in p.keep_fp32),
            f"a pattern matches no unit; they are {', '.join(examples)}",
        )
    if p.replicated:
        yield Rule(
            "parallel.replicated parallel.cpu_offload",
            not p.cpu_offload,
            "is incompatible with cpu_offload, which would leave replicated parameters on the host "
            "for good",
        )
    if p.one_memory_pool:
        yield Rule(
            "parallel.one_memory_pool parallel.cpu_offload",
            not p.cpu_offload,
            "is incompatible with cpu_offload, whose copies to the host read gradients after FSDP2 "
            "has freed them",
        )
        yield Rule(
            "parallel.one_memory_pool parallel.dp_replicate",
            p.dp_replicate == 1,
            f"requires dp_replicate = 1, not {p.dp_replicate}: FSDP2 reduces the gradients of "
            "replicas on one more stream",
        )


def _recompute_rules(cfg: Config) -> Iterator[Rule]:
    p = cfg.parallel
    if isinstance(p.recompute, int):
        yield Rule(
            "parallel.recompute model.n_layers",
            p.recompute <= cfg.model.n_layers,
            f"every n-th of {cfg.model.n_layers} blocks: n must not exceed them",
        )
    if p.tp > 1 and p.compile:
        yield Rule(
            "parallel.recompute parallel.tp parallel.compile",
            p.recompute in ("none", *SELECTIVE),
            f"must be one of none, {', '.join(SELECTIVE)} with tp = {p.tp} and compile: "
            "torch 2.13 fails on the others",
        )


def _tp_and_cp_rules(cfg: Config) -> Iterator[Rule]:
    p = cfg.parallel
    seq_len = cfg.train.seq_len
    for key in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        yield Rule(
            f"model.{key} parallel.tp",
            getattr(cfg.model, key) % p.tp == 0,
            f"must be a multiple of parallel.tp = {p.tp}",
        )
    if p.cp > 1:
        yield Rule(
            "train.seq_len parallel.cp",
            seq_len % (2 * p.cp) == 0,
            f"must be a multiple of 2 x parallel.cp = {2 * p.cp}: each rank has two chunks",
        )
    yield Rule(
        "train.seq_len parallel.cp parallel.tp",
        seq_len % (p.cp * p.tp) == 0,
        f"must be a multiple of parallel.cp x parallel.tp = {p.cp * p.tp}",
    )
    if p.replicated:
        yield Rule(
            "parallel.replicated parallel.tp",
            p.tp == 1,
            "requires tp = 1: tp shards every matrix",
        )


def _lora_rules(cfg: Config) -> Iterator[Rule]:
    lora = cfg.lora
    m = cfg.model
    if lora is None:
        return
    yield Rule(
        "lora.rank model.init_from",
        m.init_from,
        "adapters need a base: name its Hugging Face folder, model.init_from",
    )
    attention_dim = m.n_heads * m.width_per_head
    kv_dim = m.n_kv_heads * m.width_per_head
    smaller_side = {
        "q_proj": min(m.dim, attention_dim),
        "k_proj": min(m.dim, kv_dim),
        "v_proj": min(m.dim, kv_dim),
        "o_proj": min(m.dim, attention_dim),
        "gate_proj": min(m.dim, m.ffn_dim),
        "up_proj": min(m.dim, m.ffn_dim),
        "down_proj": min(m.dim, m.ffn_dim),
    }
    largest_rank = min(smaller_side[name] for name in lora.targets)
    yield Rule(
        "lora.rank lora.targets model.dim model.n_heads model.n_kv_heads model.ffn_dim "
        "model.head_dim",
        lora.rank <= largest_rank,
        f"must not exceed the smallest side of its matrices, {largest_rank}",
    )


def _nf4_rules(cfg: Config) -> Iterator[Rule]:
    m = cfg.model
    tp = cfg.parallel.tp
    if cfg.lora is None or cfg.lora.base_dtype != "nf4":
        return
    # the row lengths of a rank's matrices
    row_lengths = {
        "dim": m.dim,
        "n_heads x head_dim over tp": m.n_heads * m.width_per_head / tp,
        "ffn_dim over tp": m.ffn_dim / tp,
    }
    shown = ", ".join(f"{name} = {length:g}" for name, length in row_lengths.items())
    yield Rule(
        "lora.base_dtype model.dim model.n_heads model.ffn_dim model.head_dim parallel.tp",
        all(length % 64 == 0 for length in row_lengths.values()),
        f"its blocks of 64 weights must come out even: {shown}",
    )


def _float8_rules(cfg: Config) -> Iterator[Rule]:
    p = cfg.parallel
    if p.float8 == "none":
        return
    yield Rule(
        "parallel.float8 parallel.tp",
        p.tp == 1,
        f"requires tp = 1, not {p.tp}: each rank would scale its part of a matrix by itself",
    )
    float32_blocks = []
    for pattern in p.keep_fp32:
        matching_units = fnmatch.filter(unit_names(cfg.model), pattern)
        float32_blocks += [name for name in matching_units if name.startswith("blocks.")]
    yield Rule(
        "parallel.float8 parallel.keep_fp32 model.n_layers",
        not float32_blocks,
        f"is incompatible with {', '.join(float32_blocks[:3])} in keep_fp32: "
        "its matmuls would be in 8 bits",
    )
    if p.float8 == "tensorwise":
        yield Rule(
            "parallel.float8 parallel.cpu_offload",
            not p.cpu_offload,
            "is incompatible with cpu_offload: a shard copied to the GPU loses its scale; "
            '"rowwise" needs none',
        )
    yield Rule(
        "train.seq_len parallel.cp parallel.float8",
        cfg.train.seq_len % (16 * p.cp) == 0,
        f"must be a multiple of 16 x parallel.cp = {16 * p.cp} with float8: "
        "its kernels sum over tokens by sixteens",
    )
    yield Rule(
        "parallel.float8 lora.rank",
        cfg.lora is None,
        "is incompatible with [lora]: a frozen base is kept in bfloat16 or in 4 bits "
        "(lora.base_dtype)",
    )


def _checkpoint_rules(cfg: Config) -> Iterator[Rule]:
    if cfg.checkpoint:
        yield Rule(
            "checkpoint.allow_changed",
            all(name in SCHEMA.options for name in cfg.checkpoint.allow_changed),
            "names no option; write section.key",
        )


def _profile_rules(cfg: Config) -> Iterator[Rule]:
    profile = cfg.profile
    steps = cfg.train.steps
    if profile:
        yield Rule(
            "profile.at_step profile.steps train.steps",
            profile.at_step + profile.steps - 1 <= steps,
            f"with profile.steps = {profile.steps} must end by train.steps = {steps}",
        )


def has_extra(name: str) -> bool:
    """Whether extras/NAME is in this copy of the repository: `rm -r` removes what is not wanted."""
    return (EXTRAS / name / "__init__.py").exists()


def names_elsewhere() -> dict[str, str]:
    """What other trainers call an option, and its name here."""
    if not has_extra("migrate"):
        return {}
    from extras.migrate.names import NAMES

    return NAMES


SCHEMA = schema.Schema(Config, names_elsewhere())


def require_extra(name: str, wanted_by: str) -> None:
    """Raises ConfigError if extras/NAME, which an option or a flag needs, is not in this copy."""
    if not has_extra(name):
        raise ConfigError(f"{wanted_by}: {lack_of(name)}")


def lack_of(extra: str) -> str:
    return f"needs extras/{extra}, which this copy of the repository does not have"


def _missing_extras(given: schema.Given, saved: bool) -> list[str]:
    """A problem for each extra that an option needs and this copy lacks. It shows the first such
    option.

    Of a checkpoint's options (saved) only [lora] counts: a tool that reads it does not depend on
    how its run was parallelized, nor on where its first weights came from.
    """
    problems: dict[str, str] = {}  # by extra
    for name, value in given.values.items():
        extra = SCHEMA.extra_of(name, value)
        if extra is None or has_extra(extra):
            continue
        if saved and extra != "lora":
            continue
        assignment = f"{schema.toml_name(name)} = {schema.toml(value)}"
        problems.setdefault(extra, f"{given.origins[name]}: {assignment}: {lack_of(extra)}")
    return [*problems.values()]


def load(path: str, overrides: Iterable[str] = ()) -> Config:
    """Reads a configuration file, with overrides on top. Raises ConfigError with every problem."""
    return from_dict(schema.read_toml(path), path, overrides)


def from_dict(raw: dict, path: str, overrides: Iterable[str] = (), saved: bool = False) -> Config:
    """Like load(), from tables that have been read; `path` names their origin in errors.

    saved: the tables are a checkpoint's.
    """
    given = SCHEMA.read(raw, path, overrides)
    missing_extras = _missing_extras(given, saved)
    if missing_extras:
        raise ConfigError(*given.problems.values(), *missing_extras)
    with contextlib.suppress(ConfigError):
        # whoever reads the tokenizer reports why it cannot be had; a plan does not need it
        hub.pin(given, "data.tokenizer")
    if given.values.get("lora.targets") == "all-linear":
        given.values["lora.targets"] = PROJECTIONS
    if has_extra("huggingface"):
        from extras.huggingface.config import complete

        complete(given)
        if "model.init_from" in given.values and not saved:
            from extras.huggingface.tokenizer import take_over

            take_over(given)
    if given.build("data").has_conversations:
        given.values.setdefault("data.document_mask", True)
    given.values.setdefault("run.name", pathlib.Path(path).stem)
    cfg = given.build()
    if not NAME.holds(cfg.run.name):
        given.problems.setdefault(
            "run.name",
            f"{path}: the file's name is the run's name: {NAME.requirement}; set run.name",
        )
    schema.require(cfg, _rules(cfg), given)
    return cfg


def to_toml(cfg: Config) -> str:
    """The resolved configuration as TOML; load() reads it back as an equal one."""
    return SCHEMA.to_toml(to_dict(cfg))


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line of train.py and of the tools that take a CONFIG. Exits with 2 if it
    is invalid."""
    parser = argparse.ArgumentParser(prog="run_train.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    mode = parser.add_mutually_exclusive_group()
    for flag in ("--dry-run", "--eval-only"):
        mode.add_argument(flag, action="store_true")
    if has_extra("planner"):
        from extras.planner.arguments import add_arguments

        add_arguments(parser, "--dry-run" in argv)
    args, args.overrides = parser.parse_known_args(argv)
    if args.dry_run and not has_extra("planner"):
        parser.error(f"--dry-run: {lack_of('planner')}")
    unknown = [word for word in args.overrides if not re.match("--[^=]+=", word)]
    if unknown:
        parser.error(
            f"{', '.join(unknown)}: unknown; CONFIG comes first, then options as "
            "--section.key=value, in one word"
        )
    return args


def run_tool(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a tool's main() with the command line, and exits with its result.

    Invalid input exits with 2 and prints a line for each problem; trouble of a disk or a machine
    that may pass exits with 1, and Ctrl-C with 130, as in a shell. None prints a traceback.
    """
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        from files import print_error  # a full or closed stderr changes no exit code

        print_error(str(error))
        sys.exit(2)
    except OSError as error:
        from files import TRANSIENT_ERRORS, print_error

        if error.errno not in TRANSIENT_ERRORS:
            raise
        print_error(f"{error.filename}: {error.strerror}; the same command may work later")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def from_command_line(
    argv: list[str], usage: str, tool: bool = False
) -> tuple[argparse.Namespace, Config]:
    """A program's arguments and configuration. tool: it has no dry run and no evaluation.

    Prints every problem and exits with 2 if the command line or the configuration is invalid. Exits
    with 0 after --help.
    """
    try:
        if "--help" in argv or "-h" in argv:
            print_help(argv, usage)
            sys.exit()
        args = parse_arguments(argv)
        if tool and (args.dry_run or args.eval_only):
            raise ConfigError(
                "--dry-run and --eval-only require ./run_train.sh CONFIG: no tool (-m) supports "
                "them"
            )
        return args, load(args.config, args.overrides)
    except ConfigError as error:
        from files import print_error

        print_error(str(error))
        sys.exit(2)


def print_help(argv: list[str], usage: str) -> None:
    """--help: the usage and all options; --help optim, or --help lr: a section, or an option. Raises
    ConfigError if there is none of that name."""
    from files import print_line  # here: its imports take as long as all of this

    asked = [number for number, word in enumerate(argv) if word in ("--help", "-h")]
    subject = next(iter(argv[asked[0] + 1 :]), None)
    if subject is None or subject.startswith("-") or subject.endswith(".toml"):
        print_line(f"{usage.strip()}\n\nOptions, in the file or as --section.key=value:\n")
        print_line(SCHEMA.help())
        return
    print_line(SCHEMA.help(subject))


def words_without(*options: str) -> list[str]:
    """The command line of this launch, without the options that begin with one of these."""
    words = [word for word in sys.argv[1:] if not word.startswith(options)]
    return [word.removeprefix(f"{os.getcwd()}/") for word in words]
