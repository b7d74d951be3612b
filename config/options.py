"""Every option. A section is a dataclass, and each option is one of its fields. option() declares its
default, its description, and what a resume may do with it. The annotation has its range. A section's
rules follow its options:

    def rules(self, cfg: Config) -> Rules:
        if self.n_heads % self.n_kv_heads:
            yield "n_kv_heads n_heads", f"must divide n_heads = {self.n_heads}"

rules() yields the names of all options that the rule reads, and the requirement. The error shows the
first option with its value. Options of other sections have their full name, such as parallel.tp. A
rule is ignored if one of its options is invalid by itself.
"""

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Literal

from config.option import Path, Range, Schema, option, section

# batch_digest is computed modulo this, so that JSON's numbers hold it exactly.
DIGEST_MODULUS = 2**53
# The longest period, in samples, of the order in which a mixture takes its sources.
LONGEST_PERIOD = 1 << 16
# The target of a token without a loss, as in cross_entropy. data/ writes it, model/loss.py reads it.
IGNORE = -100
# The values of recompute that save part of each block.
SELECTIVE = ("elementwise", "selective")
# The matrices of a block, in order.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

BadRows = Literal["refuse", "skip"]
# A row of data is a text, or a conversation in one of three formats.
RowFormat = Literal["text", "messages", "alpaca", "prompt_completion"]

# What rules() yields: (options, requirement).
Rules = Iterator[tuple[str, str]]

# Types of options, with the range of their values.
Dtype = Literal["float32", "bfloat16"]
PositiveInt = Annotated[int, Range(lambda v: v > 0, "must be greater than 0")]
NonNegativeInt = Annotated[int, Range(lambda v: v >= 0, "must be at least 0")]
PositiveFloat = Annotated[float, Range(lambda v: v > 0, "must be greater than 0")]
NonNegativeFloat = Annotated[float, Range(lambda v: v >= 0, "must be at least 0")]
AtLeastOne = Annotated[float, Range(lambda v: v >= 1, "must be at least 1")]
Fraction = Annotated[float, Range(lambda v: 0 <= v <= 1, "must lie between 0 and 1")]
Betas = Annotated[
    tuple[float, float],
    Range(lambda v: all(0 <= beta < 1 for beta in v), "both must lie in [0, 1)"),
]
Epsilon = Annotated[
    float, Range(lambda v: v >= 1e-38, "must be at least 1e-38: float32 would make less of it 0")
]
# torch adds a timeout to a clock's nanoseconds
Seconds = Annotated[float, Range(lambda v: 0 < v <= 1e8, "must be greater than 0, and at most 1e8")]
Projections = Annotated[
    tuple[str, ...],
    Range(
        lambda v: v and {*v} <= {*PROJECTIONS},
        f'must name projections: {", ".join(PROJECTIONS)}; or be "all-linear"',
    ),
]
# The name of a folder, used without quoting.
RunName = Annotated[
    str,
    Range(
        lambda v: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{,199}", v),
        "may hold only letters, digits, '.', '_' and '-', at most 200, and must not begin with "
        "'.' or '-'",
    ),
]


class Section:
    """A section without rules."""

    def rules(self, cfg: "Config") -> Rules:
        yield from ()


@dataclass(frozen=True)
class Run(Section):
    name: RunName | None = option(None, "folder in output_dir; absent: the file's stem")
    output_dir: Path = option("outputs", "folder that holds all runs")
    seed: NonNegativeInt = option(0, "seed of initial weights and shuffling", resume="fixed")
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda, or cpu without a GPU")
    deterministic: bool = option(False, "use only torch's deterministic algorithms")
    start_timeout_seconds: Seconds = option(1800.0, "timeout of set-up, the first step, and a save")
    step_timeout_seconds: Seconds = option(600.0, "timeout of a step, or a batch of evaluation")


@dataclass(frozen=True)
class RopeScaling(Section):
    """Llama 3.1's frequency table: https://arxiv.org/abs/2407.21783, section 3.4.1, and Meta's
    reference code."""

    factor: AtLeastOne = option(MISSING, "new number of positions / original number")
    low_freq_factor: PositiveFloat = option(1.0, "waves longer than original / this are divided")
    high_freq_factor: PositiveFloat = option(4.0, "waves shorter than original / this are kept")
    original_max_position_embeddings: PositiveInt = option(8192, "before scaling")

    def rules(self, cfg: "Config") -> Rules:
        if self.low_freq_factor >= self.high_freq_factor:
            names = "low_freq_factor model.rope_scaling.high_freq_factor"
            yield names, f"must be below high_freq_factor = {self.high_freq_factor}"


@dataclass(frozen=True)
class Model(Section):
    dim: PositiveInt = option(MISSING, "residual width (hidden size)")
    n_layers: PositiveInt = option(MISSING, "transformer blocks (hidden layers)")
    n_heads: PositiveInt = option(MISSING, "attention heads, of queries")
    n_kv_heads: PositiveInt = option(MISSING, "key/value heads (GQA)")
    ffn_dim: PositiveInt = option(MISSING, "width inside the MLP (intermediate size)")
    vocab_size: PositiveInt = option(MISSING, "rows of the embedding")
    head_dim: PositiveInt | None = option(None, "absent: dim / n_heads")
    norm_eps: Epsilon = option(1e-5, "epsilon of RMSNorm")
    rope_theta: PositiveFloat = option(500000.0, "base of RoPE's frequencies")
    rope_scaling: RopeScaling | None = section("fixed", default=None)
    tie_embeddings: bool = option(False, "share embedding and head")
    qk_norm: bool = option(False, "RMSNorm of each query and key head")
    init_from: Path | None = option(None, "Hugging Face folder or id of weights and sizes")
    freeze: tuple[str, ...] = option((), "parameters, such as 'embedding*'")

    @property
    def width_per_head(self) -> int:
        return self.head_dim or self.dim // self.n_heads

    def rules(self, cfg: "Config") -> Rules:
        if self.n_heads % self.n_kv_heads:
            yield "n_kv_heads n_heads", f"must divide n_heads = {self.n_heads}"
        if not self.head_dim and self.dim % self.n_heads:
            yield "n_heads dim head_dim", f"must divide dim = {self.dim}, or head_dim be given"
        if self.width_per_head % 2:
            names = "head_dim" if self.head_dim else "dim n_heads"
            yield names, f"makes heads {self.width_per_head} wide; their width must be even"


@dataclass(frozen=True)
class Source:
    source: Path = option(MISSING, "as data.source")
    weight: PositiveFloat = option(1.0, "share of the samples, relative to the other weights")
    subset: str | None = option(None, "absent: the value of [data], also for the options below")
    split: str | None = option(None, "as data.split")
    text_field: str | None = option(None, "as data.text_field")
    max_tokens: PositiveInt | None = option(None, "as data.max_tokens")
    validation: Path | None = option(None, "as data.validation")
    bad_rows: BadRows | None = option(None, "as data.bad_rows")
    format: RowFormat | None = option(None, "as data.format")


@dataclass(frozen=True)
class Data(Section):
    source: Path = option(
        "python-stdlib",
        "dataset: id, files (.jsonl, .json, .csv, .parquet, .arrow, .txt, .md) or prepared folder",
    )
    subset: str | None = option(None, "configuration of a Hugging Face dataset")
    split: str = option("train", "split of a Hugging Face dataset")
    text_field: str = option("text", "column with the text")
    path: Path | None = option(None, "folder of token files; absent: in prepared/", resume="free")
    tokenizer: Path | None = option(None, "file, folder or id; absent: init_from's, or trained")
    max_tokens: PositiveInt | None = option(None, "tokens to prepare; absent: all")
    document_mask: bool = option(False, "attend only within a document; positions restart in each")
    format: RowFormat | None = option(None, "what a row is; absent: a text, or messages_field's")
    messages_field: str | None = option(None, "column; absent: messages, else conversations")
    chat_template: Path | None = option(None, "Jinja file; absent: the tokenizer's")
    validation: Path | None = option(None, "files, or a split; absent: held out")
    bad_rows: BadRows = option("refuse", "skip: leave out rows that cannot be read, at most 1 %")
    sources: tuple[Source, ...] = option((), "a mixture, weighted")

    @property
    def row_format(self) -> RowFormat:
        """The format of one source's rows."""
        return self.format or ("messages" if self.messages_field else "text")

    @property
    def formats(self) -> set[RowFormat]:
        """The formats of all sources."""
        return {source.format or self.row_format for source in self.sources or (self,)}

    @property
    def has_conversations(self) -> bool:
        """Whether rows are conversations. A rule refuses a mixture of texts and conversations."""
        return self.formats != {"text"}

    def rules(self, cfg: "Config") -> Rules:
        if self.sources:
            yield from self._mixture_rules()
        if self.has_conversations:
            yield from self._conversation_rules()
        if self.messages_field and "messages" not in self.formats:
            yield "messages_field format", 'is a column of format = "messages"'
        if self.text_field != Data.text_field and self.has_conversations:
            yield "text_field format", "is a column of texts, and the rows are conversations"
        if self.chat_template and not self.has_conversations:
            yield "chat_template format", "renders conversations, and the rows are texts"

    def _mixture_rules(self) -> Rules:
        if self.validation:
            yield "validation sources", "is an option of each source in [[data.sources]]"
        if self.source != Data.source:
            yield "source sources", "is incompatible with [[data.sources]]"
        texts_read = set()
        for s in self.sources:
            path = os.path.realpath(s.source) if os.path.exists(s.source) else s.source
            part = (s.subset or self.subset, s.split or self.split)
            limit = (s.text_field or self.text_field, s.max_tokens or self.max_tokens)
            texts_read.add((path, *part, *limit))
        if len(texts_read) < len(self.sources):
            yield "sources", "names one source twice; add their weights"
        total_weight = sum(s.weight for s in self.sources)
        if any(s.weight * LONGEST_PERIOD < total_weight for s in self.sources):
            yield "sources", f"a weight must be at least 1/{LONGEST_PERIOD} of the sum of all"

    def _conversation_rules(self) -> Rules:
        name = "format" if self.format or not self.messages_field else "messages_field"
        if self.sources:
            name = "sources"
            if "text" in self.formats:
                yield name, "mixes text and conversations: train on one of them"
        if not self.tokenizer:
            problem = "needs data.tokenizer: the model's, with the special tokens of its template"
            yield f"{name} tokenizer", problem
        if not self.document_mask:
            problem = "is implied by conversations: attention stays inside each"
            yield f"document_mask {name}", problem


@dataclass(frozen=True)
class Train(Section):
    steps: PositiveInt = option(MISSING, "optimizer steps")
    seq_len: PositiveInt = option(2048, "tokens per sequence (context length)", resume="fixed")
    global_batch_size: PositiveInt = option(8, "sequences per step", resume="logged")
    micro_batch_size: PositiveInt | None = option(
        None, "sequences per pass; absent: all, no gradient accumulation", resume="free"
    )
    max_grad_norm: PositiveFloat | Literal["off"] = option(1.0, "gradient clipping, at this norm")
    skip_nonfinite: NonNegativeInt = option(0, "steps in a row with NaN or inf to skip; 0: none")

    def rules(self, cfg: "Config") -> Rules:
        if self.micro_batch_size and self.global_batch_size % self.micro_batch_size:
            names = "micro_batch_size global_batch_size"
            yield names, f"must divide global_batch_size = {self.global_batch_size}"
        p = cfg.parallel
        divisors = {f"parallel.cp x parallel.tp = {p.cp * p.tp}": p.cp * p.tp}
        if p.cp > 1:  # zig-zag sharding: each rank has two chunks
            divisors[f"2 x parallel.cp = {2 * p.cp}"] = 2 * p.cp
        if p.float8 != "none":
            divisors[f"16 x parallel.cp = {16 * p.cp} with float8's kernels"] = 16 * p.cp
        for product, divisor in divisors.items():
            if self.seq_len % divisor:
                names = "seq_len parallel.cp parallel.tp parallel.float8"
                yield names, f"must be a multiple of {product}"


@dataclass(frozen=True)
class Optim(Section):
    name: Literal["adamw", "muon"] = option(
        "adamw", "optimizer; muon: for the blocks' matrices", resume="fixed"
    )
    lr: PositiveFloat = option(3e-4, "peak learning rate")
    muon_lr: PositiveFloat | None = option(None, "of Muon's matrices; absent: lr")
    betas: Betas = option((0.9, 0.95), "of AdamW")
    eps: Epsilon = option(1e-8, "epsilon of AdamW")
    weight_decay: NonNegativeFloat = option(0.1, "on every parameter with two or more dimensions")
    warmup_steps: NonNegativeInt = option(0, "steps of linear warm-up")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "wsd: decay over decay_steps"
    )
    decay_steps: PositiveInt | None = option(None, "length of wsd's decay")
    schedule_steps: PositiveInt | None = option(None, "the schedule's end; absent: train.steps")
    min_lr_ratio: Fraction = option(0.1, "final learning rate / lr")
    state_dtype: Dtype = option("float32", "dtype of moments and momentum", resume="fixed")

    def rules(self, cfg: "Config") -> Rules:
        end = schedule_steps(cfg)
        reads = "schedule schedule_steps train.steps warmup_steps decay_steps"
        # Without schedule_steps, a short trial may end within the warm-up.
        if self.schedule_steps and self.warmup_steps > end:
            yield "warmup_steps schedule_steps", f"must not exceed schedule_steps = {end}"
        if self.schedule == "wsd" and not self.decay_steps:
            yield reads, "needs optim.decay_steps"
        if self.schedule != "wsd" and self.decay_steps:
            yield f"decay_steps {reads}", 'requires schedule = "wsd"'
        if self.decay_steps and self.warmup_steps <= end < self.warmup_steps + self.decay_steps:
            yield f"decay_steps {reads}", f"must fit between warmup_steps and step {end}"
        if self.name == "muon" and (cfg.parallel.cpu_offload or cfg.lora):
            names = "name parallel.cpu_offload lora.rank"
            yield names, "is incompatible with cpu_offload and [lora]"
        if self.muon_lr and self.name != "muon":
            yield "muon_lr name", 'requires name = "muon"'


@dataclass(frozen=True)
class Parallel(Section):
    dp_replicate: PositiveInt | Literal["auto"] = option(1, "replicas of the sharded model (HSDP)")
    dp_shard: PositiveInt | Literal["auto"] = option("auto", "ranks per copy; auto: all left")
    cp: PositiveInt = option(1, "ranks a sequence is sharded over (context parallel)")
    tp: PositiveInt = option(1, "ranks a matrix is sharded over (tensor parallel)")
    reshard_after_forward: bool = option(True, "free a unit after forward; false: after backward")
    prefetch_forward: NonNegativeInt = option(1, "units gathered ahead in forward; 0: implicit")
    prefetch_backward: NonNegativeInt = option(1, "units gathered ahead in backward; 0: implicit")
    param_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "mixed precision: of all-gather and compute; auto: bfloat16 where devices have units for it",
        resume="logged",
    )
    reduce_dtype: Dtype = option("float32", "of gradient reduction", resume="logged")
    output_dtype: Dtype | None = option(None, "between units; absent: param_dtype", resume="logged")
    keep_fp32: tuple[str, ...] = option((), "units in float32, as 'blocks.[01]'", resume="logged")
    replicated: tuple[str, ...] = option((), "patterns: frozen parameters kept whole on each rank")
    cpu_offload: bool = option(False, "parameters, gradients and optimizer state in host memory")
    sync_every_micro_batch: bool = option(True, "reduce gradients each time; false: once a step")
    gather_once: bool = option(False, "all-gather each unit once a step, not once a micro-batch")
    recompute: PositiveInt | Literal["none", "elementwise", "selective", "full"] = option(
        "none", "activation (gradient) checkpointing; n: of every n-th block"
    )
    compile: bool = option(False, "torch.compile blocks, loss, bfloat16 update")
    float8: Literal["none", "tensorwise", "rowwise"] = option(
        "none", "blocks' matmuls in float8", resume="logged"
    )

    @property
    def one_memory_pool(self) -> bool:
        """Whether FSDP2 allocates its buffers on a GPU in the pool of the computing stream. With the
        weights of all units held, a separate pool costs memory that nothing else can use. Unsafe with
        cpu_offload or replicas: parallel/memory_pool.py."""
        return self.gather_once and not self.cpu_offload and self.dp_replicate == 1

    def rules(self, cfg: "Config") -> Rules:
        if self.dp_replicate == self.dp_shard == "auto":
            yield "dp_replicate dp_shard", 'only one may be "auto", and dp_shard is by default'
        for key in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
            if getattr(cfg.model, key) % self.tp:
                yield f"model.{key} parallel.tp", f"must be a multiple of parallel.tp = {self.tp}"
        if self.keep_fp32:  # else don't list the units: a mistyped n_layers may make too many
            units = unit_names(cfg.model)
            if not all(fnmatch.filter(units, pattern) for pattern in self.keep_fp32):
                examples = ", ".join([*units[:3], "...", units[-1]])
                yield "keep_fp32 model.n_layers", f"a pattern matches no unit of {examples}"
        if self.replicated and self.cpu_offload:
            yield "replicated cpu_offload", "is incompatible with cpu_offload"
        if self.replicated and self.tp > 1:
            yield "replicated tp", "requires tp = 1: tp shards every matrix"
        if isinstance(self.recompute, int) and self.recompute > cfg.model.n_layers:
            yield "recompute model.n_layers", f"must not exceed the {cfg.model.n_layers} blocks"
        choices = ("none", *SELECTIVE)
        if self.tp > 1 and self.compile and self.recompute not in choices:
            problem = f"must be one of {', '.join(choices)}: torch 2.13 compiles no other with tp"
            yield "recompute tp compile", problem
        if self.float8 != "none":
            yield from self._float8_rules(cfg)

    def _float8_rules(self, cfg: "Config") -> Rules:
        if self.tp > 1:
            yield "float8 tp", f"requires tp = 1, not {self.tp}: its scales are of whole matrices"
        blocks = [unit for unit in unit_names(cfg.model) if unit.startswith("blocks.")]
        for pattern in self.keep_fp32:
            if fnmatch.filter(blocks, pattern):
                problem = f"is incompatible with {pattern} in keep_fp32: would be in 8 bits"
                yield "float8 keep_fp32 model.n_layers", problem
        if self.float8 == "tensorwise" and self.cpu_offload:
            yield "float8 cpu_offload", 'is incompatible with cpu_offload; "rowwise" is not'
        if cfg.lora:
            yield "float8 lora.rank", "is incompatible with [lora]; lora.base_dtype has 4 bits"


@dataclass(frozen=True)
class Lora(Section):
    rank: PositiveInt = option(16, "rank of the adapters")
    alpha: PositiveFloat | None = option(None, "adapters scale by alpha / rank; absent: 2 x rank")
    # load() replaces "all-linear" by the names.
    targets: Projections | Literal["all-linear"] = option(PROJECTIONS, "adapted")
    base_dtype: Literal["bfloat16", "float32", "nf4"] = option("bfloat16", "of the frozen weights")
    init_from: Path | None = option(None, "PEFT folder; sets rank, alpha, targets", resume="free")

    @property
    def scale(self) -> float:
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return alpha / self.rank

    def rules(self, cfg: "Config") -> Rules:
        m = cfg.model
        if not m.init_from:
            yield "rank model.init_from", "adapters need a base: model.init_from, a folder or id"
        attention_dim = m.n_heads * m.width_per_head
        kv_dim = m.n_kv_heads * m.width_per_head
        widths = (attention_dim, kv_dim, kv_dim, attention_dim, m.ffn_dim, m.ffn_dim, m.ffn_dim)
        other_side = dict(zip(PROJECTIONS, widths))
        largest_rank = min(min(m.dim, other_side[name]) for name in self.targets)
        sizes = "model.dim model.n_heads model.n_kv_heads model.ffn_dim model.head_dim"
        if self.rank > largest_rank:
            names = f"rank targets {sizes}"
            yield names, f"must not exceed the smallest side of its matrices, {largest_rank}"
        tp = cfg.parallel.tp
        row_lengths = {
            "dim": m.dim,
            "n_heads x head_dim over tp": attention_dim / tp,
            "ffn_dim over tp": m.ffn_dim / tp,
        }
        for name, length in row_lengths.items():
            if self.base_dtype == "nf4" and length % 64:
                names = f"base_dtype {sizes} parallel.tp"
                yield names, f"needs rows in multiples of 64: {name} = {length:g}"


@dataclass(frozen=True)
class Checkpoint(Section):
    save_every_steps: PositiveInt | None = option(None, "steps between saves; absent: at the end")
    keep_last: PositiveInt | None = option(None, "absent: all")
    keep_every_steps: PositiveInt | None = option(None, "steps between milestones, kept for ever")
    async_save: bool = option(False, "write in the background")
    resume: Literal["auto", "never"] | PositiveInt = option("auto", "auto: the newest; N: step N")
    allow_changed: tuple[str, ...] = option((), "options that may differ, as 'train.seq_len'")

    def rules(self, cfg: "Config") -> Rules:
        if not {*self.allow_changed} <= SCHEMA.options.keys():
            yield "allow_changed", "names no option; write section.key"
        if self.keep_every_steps and not self.keep_last:
            yield "keep_every_steps keep_last", "requires keep_last: without it all are kept"
        every = self.save_every_steps
        if self.keep_every_steps and (not every or self.keep_every_steps % every):
            names = "keep_every_steps save_every_steps"
            yield names, f"must be a multiple of save_every_steps, {every or 'which is absent'}"


@dataclass(frozen=True)
class Eval(Section):
    every_steps: PositiveInt | None = option(None, "steps between evaluations; absent: at the end")
    batches: PositiveInt | None = option(None, "global batches; absent: all")


@dataclass(frozen=True)
class Log(Section):
    every_steps: PositiveInt = option(10, "steps between training rows")
    tensorboard: bool = option(True, "also write tensorboard/")
    tracker: Literal["wandb", "trackio"] | None = option(None, "also send rows there")


@dataclass(frozen=True)
class Profile(Section):
    at_step: PositiveInt = option(MISSING, "first step to trace")
    steps: PositiveInt = option(3, "number of steps to trace")

    def rules(self, cfg: "Config") -> Rules:
        if self.at_step + self.steps - 1 > cfg.train.steps:
            end = f"must end by train.steps = {cfg.train.steps}"
            yield "at_step steps train.steps", f"with profile.steps = {self.steps} {end}"


@dataclass(frozen=True)
class Config:
    """A configuration. section()'s argument is the `resume` of the options that declare none: a resume
    compares an option that a fork adds to [model], but not one that it adds to [parallel]."""

    run: Run = section("free")
    model: Model = section("fixed")
    data: Data = section("fixed")
    train: Train = section("logged")
    optim: Optim = section("logged")
    parallel: Parallel = section("free")
    lora: Lora | None = section("fixed")
    checkpoint: Checkpoint | None = section("free")
    eval: Eval | None = section("free")
    log: Log = section("free")
    profile: Profile | None = section("free")


SCHEMA = Schema(Config)


def schedule_steps(cfg: Config) -> int:
    return cfg.optim.schedule_steps or cfg.train.steps


def unit_names(model: Model) -> list[str]:
    """The names of the FSDP units of parallel/fsdp.py, in forward order."""
    blocks = [f"blocks.{i}" for i in range(model.n_layers)]
    return ["embedding+head", *blocks] if model.tie_embeddings else ["embedding", *blocks, "head"]
