"""Every option of the trainer and every rule between options, as frozen dataclasses.

    python train.py --help          # every option with its type, default and meaning

Needs no torch: a wrong configuration fails in milliseconds, with all its problems, before any process starts.
"""

import argparse
import contextlib
import fnmatch
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal, NoReturn

import schema
from data import hub
from schema import ConfigError, option, to_dict

EXTRAS = pathlib.Path(__file__).parent / "extras"
DIGEST_MODULUS = 2**53  # of batch_digest: exact in JSON
LONGEST_PERIOD = 1 << 16  # samples; the longest period of a mixture's order of sources
IGNORE = -100  # target id without a loss, as cross_entropy's ignore_index; data writes it, model/loss.py reads it

SELECTIVE = ("elementwise", "selective")  # values of recompute that save a part of each block
HALF = "; float16 would need a loss scaler, which this trainer does without"
# a string is a keyword such as "auto"
POSITIVE = (lambda v: isinstance(v, str) or v > 0, "must be greater than 0")
EPSILON = (lambda v: v >= 1e-38, "must be at least 1e-38: float32 would make less of it 0")
# torch adds it to a clock's nanoseconds
TIMEOUT = (lambda v: 0 < v <= 1e8, "must be greater than 0, and at most 1e8")
NOT_NEGATIVE = (lambda v: v >= 0, "must be at least 0")
FRACTION = (lambda v: 0 <= v <= 1, "must lie between 0 and 1")
BETAS = (lambda v: all(0 <= b < 1 for b in v), "both must lie in [0, 1)")
# of a block
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = (
    lambda v: v and {*v} <= {*PROJECTIONS},
    f"must name projections: {', '.join(PROJECTIONS)}",
)
# A run's name is the name of one folder, and is used without quoting.
NAME = (
    lambda v: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{,199}", v),
    "may hold only letters, digits, '.', '_' and '-', at most 200, and must not begin with '.' or '-'",
)


@dataclass(frozen=True)
class Run:
    name: str | None = option(
        None, "the run's folder in output_dir; absent: the configuration file's stem", NAME
    )
    output_dir: str = option("outputs", "folder that holds all runs")
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
    """Llama 3.1's frequency table: https://arxiv.org/abs/2407.21783, section 3.4.1 and its reference code."""

    factor: float = option(
        MISSING, "new context length / original context length", (lambda v: v >= 1, ">= 1")
    )
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
        None, "a Hugging Face folder, or id, to take weights and sizes from", extra="huggingface"
    )
    freeze: tuple[str, ...] = option(
        (), "patterns of parameter names to freeze, such as 'embedding*'"
    )

    @property
    def width_per_head(self) -> int:
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True)
class Source:
    source: str = option(MISSING, "as data.source")
    weight: float = option(1.0, "share of the samples, relative to the other weights", POSITIVE)
    subset: str | None = option(None, "absent: the value of [data], also for the options below")
    split: str | None = option(None, "as data.split")
    text_field: str | None = option(None, "as data.text_field")
    max_tokens: int | None = option(None, "as data.max_tokens", POSITIVE)
    validation: str | None = option(None, "as data.validation")


@dataclass(frozen=True)
class Data:
    source: str = option(
        "python-stdlib",
        '"python-stdlib", a Hugging Face id, or local .jsonl, .parquet or .txt files',
    )
    subset: str | None = option(None, "configuration of a Hugging Face dataset")
    split: str = option("train", "split of a Hugging Face dataset")
    text_field: str = option("text", "column with the text")
    path: str | None = option(None, "folder of token files; absent: prepared/{source}-{hash}")
    tokenizer: str | None = option(
        None, "a sentencepiece .model, tokenizer.json, folder or id; absent: train one"
    )
    max_tokens: int | None = option(None, "tokens to prepare; absent: all", POSITIVE)
    document_mask: bool = option(False, "attend only within a document; positions restart in each")
    messages_field: str | None = option(
        None,
        "column with a conversation's messages: train on what the assistant says",
        extra="chat",
    )
    chat_template: str | None = option(
        None, "a Jinja file that renders conversations; absent: the tokenizer's own", extra="chat"
    )
    order: Literal["global", "growing"] = option(
        "global", "growing: train while the text is being prepared"
    )
    validation: str | None = option(
        None, "validation text of your own: files, or a split of the Hugging Face dataset"
    )
    sources: tuple[Source, ...] = option((), "a mixture, weighted", note="; write [[data.sources]]")


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
    muon_momentum: float = option(
        0.95, "Nesterov momentum of Muon", (lambda v: 0 <= v < 1, "must lie in [0, 1)")
    )
    betas: tuple[float, float] = option((0.9, 0.95), "beta1 and beta2 of AdamW", BETAS)
    eps: float = option(1e-8, "epsilon of AdamW", EPSILON)
    weight_decay: float = option(
        0.1, "on every parameter with two or more dimensions", NOT_NEGATIVE
    )
    warmup_steps: int = option(0, "steps of linear warm-up", NOT_NEGATIVE)
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
        "bfloat16", "of all-gather and compute; auto: bfloat16 where native on all", note=HALF
    )
    reduce_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of gradient reduction", note=HALF
    )
    output_dtype: Literal["float32", "bfloat16"] | None = option(
        None, "between units; absent: param_dtype", note=HALF
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
    sync_every_micro_batch: bool = option(
        True, "reduce gradients in every micro-batch; false: once per step"
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
    targets: tuple[str, ...] = option(
        PROJECTIONS, "projections that get an adapter", TARGETS, extra="lora"
    )
    base_dtype: Literal["bfloat16", "float32", "nf4"] = option(
        "bfloat16", "dtype of the frozen weights", extra="lora"
    )
    init_from: str | None = option(
        None, "a PEFT adapter folder to start from; sets rank, alpha and targets", extra="lora"
    )

    @property
    def scale(self) -> float:
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


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
    return cfg.eval is not None and (step >= cfg.train.steps or is_due(step, cfg.eval.every_steps))


def schedule_steps(cfg: Config) -> int:
    return cfg.optim.schedule_steps or cfg.train.steps


def longest_timeout(cfg: Config) -> float:
    """The process groups' timeout in seconds, a last resort: each rank's watchdog times its own phases."""
    return 60 + max(
        cfg.run.start_timeout_seconds, cfg.run.step_timeout_seconds, cfg.run.save_timeout_seconds
    )


def run_folder(cfg: Config) -> pathlib.Path:
    assert cfg.run.name  # absent in a file, it is the file's stem
    return pathlib.Path(cfg.run.output_dir) / cfg.run.name


def unit_names(model: Model) -> list[str]:
    """The FSDP units in forward order, as parallel/fsdp.py makes them."""
    blocks = [f"blocks.{i}" for i in range(model.n_layers)]
    return ["embedding+head", *blocks] if model.tie_embeddings else ["embedding", *blocks, "head"]


def mesh_shape(cfg: Config, ranks: int) -> tuple[int, int, int, int]:
    """(dp_replicate, dp_shard, cp, tp). Raises ConfigError if the ranks or the global batch do not divide evenly."""
    p, t, cp, tp = cfg.parallel, cfg.train, cfg.parallel.cp, cfg.parallel.tp
    dp_size = max(1, ranks // (cp * tp))
    dp_replicate = (
        max(1, dp_size // int(p.dp_shard)) if p.dp_replicate == "auto" else p.dp_replicate
    )
    dp_shard = max(1, dp_size // dp_replicate) if p.dp_shard == "auto" else p.dp_shard
    per_pass = (t.micro_batch_size or 1) * dp_size
    if ranks % (cp * tp):
        raise ConfigError(
            f"[parallel] cp = {cp}, tp = {tp}: their product must divide the number of ranks, {ranks}"
        )
    schema.require(
        cfg,
        [
            (
                "parallel.dp_shard",
                dp_replicate * dp_shard * cp * tp == ranks,
                f"times dp_replicate = {p.dp_replicate}"
                + f", cp = {cp} and tp = {tp}" * (cp * tp > 1)
                + f" must equal the number of ranks, {ranks}; set one of the first two to auto",
            ),
            (
                "train.global_batch_size",
                t.global_batch_size % per_pass == 0,
                f"must be a multiple of micro_batch_size x data ranks = "
                f"{t.micro_batch_size or 1} x {dp_size} = {per_pass}",
            ),
        ],
    )
    return dp_replicate, dp_shard, cp, tp


def check_for_gpus(cfg: Config) -> None:
    """Raises ConfigError for what a CPU supports and a GPU does not: narrow heads, uncompiled float8."""
    if cfg.parallel.float8 != "none" and not cfg.parallel.compile:
        raise ConfigError(
            f'[parallel] float8 = "{cfg.parallel.float8}": requires compile = true on a GPU: '
            "rounding to 8 bits, uncompiled, takes longer than the matmuls save"
        )
    if (cfg.parallel.cp > 1 or cfg.data.document_mask) and cfg.model.width_per_head < 16:
        raise ConfigError(
            f"[model] head_dim: heads are {cfg.model.width_per_head} wide; on a GPU, context parallelism "
            "and document masks need 16 or more (FlexAttention)"
        )


def _rules(cfg: Config) -> list[tuple[str, Any, str]]:
    """The rules between options, as schema.require() takes them."""
    m, d, t, o, p, c, f = (
        cfg.model,
        cfg.data,
        cfg.train,
        cfg.optim,
        cfg.parallel,
        cfg.checkpoint,
        cfg.profile,
    )
    lora, attention_dim = cfg.lora, m.n_heads * m.width_per_head
    sides = {
        "q_proj": (m.dim, attention_dim),
        "o_proj": (m.dim, attention_dim),
        "k_proj": (m.dim, kv := m.n_kv_heads * m.width_per_head),
        "v_proj": (m.dim, kv),
    }
    largest_rank = min(
        min(sides.get(name, (m.dim, m.ffn_dim))) for name in (lora.targets if lora else PROJECTIONS)
    )
    rows = {
        "dim": m.dim,
        "n_heads x head_dim over tp": attention_dim / p.tp,
        "ffn_dim over tp": m.ffn_dim / p.tp,
    }
    nf4, rope, end = lora and lora.base_dtype == "nf4", m.rope_scaling, schedule_steps(cfg)
    units = unit_names(m) if p.keep_fp32 else [""]  # of a mistyped n_layers they may be too many
    schedule = (
        "optim.schedule optim.schedule_steps train.steps optim.warmup_steps optim.decay_steps"
    )
    total_weight = sum(s.weight for s in d.sources)
    wide_blocks = [
        name
        for pattern in p.keep_fp32
        for name in fnmatch.filter(units, pattern)
        if "blocks" in name
    ]
    # what each source of a mixture reads, with its defaults from [data]
    read = {
        (
            os.path.realpath(s.source) if os.path.exists(s.source) else s.source,
            s.subset or d.subset,
            s.split or d.split,
            s.text_field or d.text_field,
            s.max_tokens or d.max_tokens,
        )
        for s in d.sources
    }
    return [
        (
            "model.n_kv_heads model.n_heads",
            m.n_heads % m.n_kv_heads == 0,
            f"must divide n_heads = {m.n_heads}",
        ),
        (
            "model.n_heads model.dim model.head_dim",
            m.head_dim or m.dim % m.n_heads == 0,
            f"must divide dim = {m.dim}, or head_dim be given",
        ),
        (
            "model.head_dim" if m.head_dim else "model.dim model.n_heads",
            m.width_per_head % 2 == 0,
            f"makes heads {m.width_per_head} wide; their width must be even",
        ),
        (
            "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor",
            not rope or rope.low_freq_factor < rope.high_freq_factor,
            f"must be below high_freq_factor = {rope and rope.high_freq_factor}",
        ),
        (
            "data.validation data.sources",
            not d.sources or not d.validation,
            "is an option of each source in [[data.sources]]",
        ),
        (
            "data.source data.sources",
            not d.sources or d.source == Data.source,
            "is incompatible with [[data.sources]]",
        ),
        (
            "data.messages_field data.tokenizer data.sources",
            not d.messages_field or d.tokenizer,
            "needs data.tokenizer: that of the model, with the special tokens of its chat template",
        ),
        (
            "data.messages_field data.order",
            not d.messages_field or d.order == "global",
            'is incompatible with order = "growing": windows are planned over all conversations',
        ),
        (
            "data.document_mask data.messages_field",
            not d.messages_field or d.document_mask,
            "is implied by messages_field: attention stays inside a conversation",
        ),
        (
            "data.chat_template data.messages_field",
            not d.chat_template or d.messages_field,
            "requires messages_field",
        ),
        ("data.sources", len(read) == len(d.sources), "names one source twice; add their weights"),
        (
            "data.sources",
            all(s.weight * LONGEST_PERIOD >= total_weight for s in d.sources),
            f"a weight must be at least 1/{LONGEST_PERIOD} of the sum of all",
        ),
        (
            "train.micro_batch_size train.global_batch_size",
            t.global_batch_size % (t.micro_batch_size or 1) == 0,
            f"must divide global_batch_size = {t.global_batch_size}",
        ),
        (
            f"optim.warmup_steps {schedule}",
            o.warmup_steps <= end,
            f"must not exceed the schedule's length, {end} (optim.schedule_steps, else train.steps)",
        ),
        (schedule, o.schedule != "wsd" or o.decay_steps, "needs optim.decay_steps"),
        (
            f"optim.decay_steps {schedule}",
            not o.decay_steps or o.schedule == "wsd",
            'requires schedule = "wsd"',
        ),
        (
            f"optim.decay_steps {schedule}",
            not o.decay_steps or o.warmup_steps + o.decay_steps <= end,
            f"with warmup_steps = {o.warmup_steps} must fit into the schedule's length, {end}",
        ),
        (
            "optim.name parallel.cpu_offload lora.rank",
            o.name != "muon" or not (p.cpu_offload or lora),
            "is incompatible with cpu_offload (the host would orthogonalize the matrices) and with [lora]",
        ),
        *(
            (
                f"optim.{key} optim.name",
                o.name == "muon" or getattr(o, key) == getattr(Optim, key),
                'requires name = "muon"',
            )
            for key in ("muon_lr", "muon_momentum")
        ),
        (
            "parallel.dp_replicate parallel.dp_shard",
            not p.dp_replicate == p.dp_shard == "auto",
            'only one of dp_replicate and dp_shard may be "auto", and dp_shard is unless it is given',
        ),
        (
            "parallel.keep_fp32 model.n_layers",
            all(fnmatch.filter(units, pattern) for pattern in p.keep_fp32),
            f"a pattern matches no unit; they are {', '.join([*units[:3], '...', units[-1]])}",
        ),
        (
            "parallel.replicated parallel.cpu_offload",
            not (p.replicated and p.cpu_offload),
            "is incompatible with cpu_offload, which would leave replicated parameters on the host for good",
        ),
        (
            "parallel.recompute model.n_layers",
            isinstance(p.recompute, str) or p.recompute <= m.n_layers,
            f"every n-th of {m.n_layers} blocks: n must not exceed them",
        ),
        (
            "parallel.recompute parallel.tp parallel.compile",
            p.tp == 1 or not p.compile or p.recompute in ("none", *SELECTIVE),
            f"must be one of none, {', '.join(SELECTIVE)} with tp = {p.tp} and compile: torch 2.13 fails on the others",
        ),
        *(
            (
                f"model.{name} parallel.tp",
                getattr(m, name) % p.tp == 0,
                f"must be a multiple of parallel.tp = {p.tp}",
            )
            for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
        ),
        (
            "train.seq_len parallel.cp",
            p.cp == 1 or t.seq_len % (2 * p.cp) == 0,
            f"must be a multiple of 2 x parallel.cp = {2 * p.cp}: each rank has two chunks",
        ),
        (
            "train.seq_len parallel.cp parallel.tp",
            t.seq_len % (p.cp * p.tp) == 0,
            f"must be a multiple of parallel.cp x parallel.tp = {p.cp * p.tp}",
        ),
        (
            "parallel.replicated parallel.tp",
            p.tp == 1 or not p.replicated,
            "requires tp = 1: tp shards every matrix",
        ),
        (
            "lora.rank model.init_from",
            not lora or m.init_from,
            "adapters need a base: name its Hugging Face folder, model.init_from",
        ),
        (
            "lora.rank lora.targets model.dim model.n_heads model.n_kv_heads model.ffn_dim model.head_dim",
            not lora or lora.rank <= largest_rank,
            f"must not exceed the smallest side of its matrices, {largest_rank}",
        ),
        (
            "lora.base_dtype model.dim model.n_heads model.ffn_dim model.head_dim parallel.tp",
            not nf4 or all(width % 64 == 0 for width in rows.values()),
            "its blocks of 64 weights must come out even: "
            + ", ".join(f"{k} = {v:g}" for k, v in rows.items()),
        ),
        (
            "parallel.float8 parallel.tp",
            p.float8 == "none" or p.tp == 1,
            f"requires tp = 1, not {p.tp}: each rank would scale its part of a matrix by itself",
        ),
        (
            "parallel.float8 parallel.keep_fp32 model.n_layers",
            p.float8 == "none" or not wide_blocks,
            f"is incompatible with {', '.join(wide_blocks[:3])} in keep_fp32: its matmuls would be in 8 bits",
        ),
        (
            "parallel.float8 parallel.cpu_offload",
            p.float8 != "tensorwise" or not p.cpu_offload,
            'is incompatible with cpu_offload: a shard copied to the GPU loses its scale; "rowwise" needs none',
        ),
        (
            "train.seq_len parallel.cp parallel.float8",
            p.float8 == "none" or t.seq_len % (16 * p.cp) == 0,
            f"must be a multiple of 16 x parallel.cp = {16 * p.cp} with float8: "
            "its kernels sum over tokens by sixteens",
        ),
        (
            "parallel.float8 lora.rank",
            p.float8 == "none" or not lora,
            "is incompatible with [lora]: a frozen base is kept in bfloat16 or in 4 bits (lora.base_dtype)",
        ),
        (
            "checkpoint.allow_changed",
            not c or all(name in SCHEMA.options for name in c.allow_changed),
            "names no option; write section.key",
        ),
        (
            "profile.at_step profile.steps train.steps",
            not f or f.at_step + f.steps - 1 <= t.steps,
            f"with profile.steps = {f and f.steps} must end by train.steps = {t.steps}",
        ),
    ]


SCHEMA = schema.Schema(Config)


def has_extra(name: str) -> bool:
    """Whether extras/NAME is in this copy of the repository: `rm -r` removes what is not wanted."""
    return (EXTRAS / name / "__init__.py").exists()


def require_extra(name: str, wanted_by: str) -> None:
    """Raises ConfigError if extras/NAME, which an option or a flag asks for, is not in this copy."""
    if not has_extra(name):
        raise ConfigError(f"{wanted_by}: {lack_of(name)}")


def lack_of(extra: str) -> str:
    return f"needs extras/{extra}, which this copy of the repository does not have"


def _missing_extras(given: schema.Given, saved: bool) -> list[str]:
    """A problem for each extra that an option needs and this copy lacks. Of a checkpoint's options only [lora] counts:
    how its run was parallelized, and where its first weights came from, does not matter to a tool that reads it."""
    problems: dict[str, str] = {}
    for name, value in given.values.items():
        extra = SCHEMA.extra_of(name, value)
        if extra is None or has_extra(extra) or (saved and extra != "lora"):
            continue
        option = f"{schema.place(name)} = {schema.toml(value)}"
        problems.setdefault(extra, f"{given.origins[name]}: {option}: {lack_of(extra)}")
    return [*problems.values()]


def load(path: str, overrides: Iterable[str] = ()) -> Config:
    """Reads a configuration file and the overrides on top of it. Raises ConfigError with every problem found."""
    return from_dict(schema.read_toml(path), path, overrides)


def from_dict(raw: dict, path: str, overrides: Iterable[str] = (), saved: bool = False) -> Config:
    """Like load(), from tables that have been read; `path` names their origin in errors. saved: they are a
    checkpoint's."""
    given = SCHEMA.read(raw, path, overrides)
    missing = _missing_extras(given, saved)
    if missing:
        raise ConfigError(*given.problems.values(), *missing)
    with contextlib.suppress(ConfigError):
        # whoever reads the tokenizer reports why it cannot be had; a plan does not need it
        hub.pin(given, "data.tokenizer")
    if has_extra("huggingface"):
        from extras.huggingface.config import complete

        complete(given)
    cfg = given.build()
    if cfg.data.messages_field and "data.document_mask" not in given.values:
        cfg = replace(cfg, data=replace(cfg.data, document_mask=True))
    if "run.name" not in given.values:
        cfg = replace(cfg, run=replace(cfg.run, name=pathlib.Path(path).stem))
        if not NAME[0](cfg.run.name):
            given.problems.setdefault(
                "run.name", f"{path}: the file's name is the run's name: {NAME[1]}; set run.name"
            )
    schema.require(cfg, _rules(cfg), given)
    return cfg


def to_toml(cfg: Config) -> str:
    """The resolved configuration as TOML; load() reads it back as an equal one."""
    return SCHEMA.to_toml(to_dict(cfg))


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line of train.py and of the tools that take a CONFIG. Exits with 2 if it is invalid."""
    parser = argparse.ArgumentParser(prog="run_train.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--launch")  # the launcher's id for this launch
    mode = parser.add_mutually_exclusive_group()
    for flag in ("--dry-run", "--eval-only"):
        mode.add_argument(flag, action="store_true")
    if has_extra("planner"):
        from extras.planner.arguments import add_arguments

        add_arguments(parser, "--dry-run" in argv)
    args, args.overrides = parser.parse_known_args(argv)
    if args.dry_run and not has_extra("planner"):
        parser.error(f"--dry-run: {lack_of('planner')}")
    if unknown := [word for word in args.overrides if not re.match("--[^=]+=", word)]:
        parser.error(
            f"{', '.join(unknown)}: unknown; CONFIG comes first, then options as --section.key=value, in one "
            "word"
        )
    return args


def run_tool(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a tool's main() with the command line. Invalid input ends it with 2 and a line for each problem, Ctrl-C with
    130, as in a shell, and neither with a traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        from files import print_error  # a full or closed stderr changes no exit code

        print_error(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def from_command_line(
    argv: list[str], usage: str, tool: bool = False
) -> tuple[argparse.Namespace, Config]:
    """A program's arguments and configuration; a tool has no dry run and no evaluation. Prints every problem and exits
    with 2 if the command line is invalid; exits with 0 after --help."""
    if {"--help", "-h"} & set(argv):
        from files import print_line  # here: its imports take as long as all of this

        sys.exit(
            print_line(
                f"{usage.strip()}\n\nOptions, in the file or as --section.key=value:\n\n{SCHEMA.help()}"
            )
        )
    args = parse_arguments(argv)
    try:
        if tool and (args.dry_run or args.eval_only):
            raise ConfigError(
                "--dry-run and --eval-only require ./run_train.sh CONFIG: no tool (-m) supports them"
            )
        return args, load(args.config, args.overrides)
    except ConfigError as error:
        from files import print_error

        print_error(str(error))
        sys.exit(2)


def words_without(*options: str) -> list[str]:
    """The command line of this launch, without options that begin so."""
    return [
        word.removeprefix(f"{os.getcwd()}/")
        for word in sys.argv[1:]
        if not word.startswith(options)
    ]
