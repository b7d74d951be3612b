"""Llama 2 / 3 / 3.1 / 3.2 and Qwen3 as plain modules.

What parallel/ replaces in them: whole Linear layers (float8.py), Attention.attend and Llama.build_mask (context.py),
Head.shard and the forward() of embedding, attention, feed-forward and head (tensor.py), Head.compile_loss
(parallelize.py). extras/lora/adapters.py sets Llama.saved, and adds parameters to Linear layers.

Shapes: B batch, T tokens, D model dimension (dim), H query heads, K key/value heads, E head dimension (head_dim),
F feed-forward dimension, V vocabulary.

A module that owns a weight has `init_std`, the standard deviation of the weight's initial normal distribution, or None
for ones. Values are torchtitan's (https://github.com/pytorch/torchtitan); only the head's is cut off, at 3.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import config
from config import ConfigError
from model.attention import BlockMask, Cache, KVCache, attention, document_mask
from model.loss import LossSums, Shard, chunked_cross_entropy


class RMSNorm(nn.Module):
    """x / rms(x) * weight (https://arxiv.org/abs/1910.07467), statistics in float32.

    The result has the weight's dtype, not the input's. This allows a float32 residual stream with bfloat16 matrices,
    and a bfloat16 residual stream into a unit in `keep_fp32`.
    """

    init_std = None

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(self.weight.dtype) * self.weight


def rope_tables(m: config.Model, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (..., T, E) in float32 for positions (..., T), in half-split layout (both halves are equal).

    Computed in each forward pass, not stored: a buffer would be uninitialized after meta construction, and mixed
    precision could round it. rope_scaling is Llama 3.1's (https://arxiv.org/abs/2407.21783): it divides the low
    frequencies by `factor`, keeps the high ones and interpolates in between.
    """
    # (E/2)
    half = torch.arange(0, m.width_per_head, 2, dtype=torch.float32, device=positions.device)
    frequency = 1.0 / (m.rope_theta ** (half / m.width_per_head))
    if s := m.rope_scaling:
        # per original context
        turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / s.factor
    angle = positions.float()[..., None] * frequency  # (..., T, E/2)
    angle = torch.cat([angle, angle], dim=-1)  # (..., T, E)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x (B, heads, T, E), computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Linear(nn.Linear):
    """x @ weight.T without bias, in the weight's dtype: x is cast to it."""

    # Of a quantized layer, its method that computes the stored tensors: see NF4Linear.quantize().
    quantize: Callable[..., None] | None = None
    # Activation checkpointing: operators other than mm and addmm that compute the output.
    matmuls: ClassVar[frozenset] = frozenset()
    # Selective activation checkpointing: True saves the output, False recomputes it, None lets the
    # layer's number decide.
    keep_output: bool | None = None
    # Tensor parallelism: parameters and submodules (by name) that are sharded with the weight, and
    # along which of its dimensions: 0, output features, or 1, input features.
    sharded_with_weight: Mapping[str, int] = MappingProxyType({})
    # Tensor parallelism: index of the first input feature that the local weight multiplies.
    first_input = 0

    def __init__(self, inputs: int, outputs: int, init_std: float = 0.02):
        super().__init__(inputs, outputs, bias=False)
        self.init_std = init_std

    def reset_parameters(self) -> None:
        """Does nothing: materialize() sets the values. Random init on meta would import torch's compiler (a second)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # once: replicated parameters are cast at each access
        return F.linear(x.to(weight.dtype), weight)


class Embedding(nn.Embedding):
    init_std = 1.0
    reset_parameters = Linear.reset_parameters  # does nothing


class Attention(nn.Module):
    """Causal grouped-query attention (https://arxiv.org/abs/2305.13245). With qk_norm, each head of a query or key is
    normalized before RoPE, with one weight for all heads (https://arxiv.org/abs/2505.09388)."""

    def __init__(self, m: config.Model, out_std: float):
        super().__init__()
        self.head_dim = m.width_per_head
        self.q_proj = Linear(m.dim, m.n_heads * self.head_dim)
        self.k_proj = Linear(m.dim, m.n_kv_heads * self.head_dim)
        self.v_proj = Linear(m.dim, m.n_kv_heads * self.head_dim)
        self.o_proj = Linear(m.n_heads * self.head_dim, m.dim, out_std)
        self.q_norm = RMSNorm(self.head_dim, m.norm_eps) if m.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, m.norm_eps) if m.qk_norm else nn.Identity()
        self.attend = attention  # parallel/context.py: local queries, all-gathered keys and values

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        # -1: tensor parallelism leaves only the local heads
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)  # (B, T, D) -> (B, H, T, E)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)  # (B, T, D) -> (B, K, T, E)
        v = self.v_proj(x).view(heads).transpose(1, 2)  # (B, T, D) -> (B, K, T, E)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = (
            self.attend(q, k, v, mask) if cache is None else attention(q, *cache.append(k, v), mask)
        )
        # (B, H, T, E) -> (B, T, H*E) -> (B, T, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, m: config.Model, out_std: float):
        super().__init__()
        self.gate_proj = Linear(m.dim, m.ffn_dim)
        self.up_proj = Linear(m.dim, m.ffn_dim, out_std)
        self.down_proj = Linear(m.ffn_dim, m.dim, out_std)

    def forward(self, x: Tensor) -> Tensor:
        # (B, T, D) -> (B, T, F) -> (B, T, D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each with its norm and its residual add.

    A block may have terms of the loss of its own, such as the balance of a mixture of experts. It then returns
    (x, terms) instead of x: terms[name] is a float32 scalar, the term's sum over the tokens of x (B, T, D), with its
    weight. Terms of one name are added over blocks, and over ranks, which hold different tokens. training_step()
    minimizes the sum of loss and terms, divided by the step's valid targets, and logs each term by its name.

    Every parameter must take part in every backward, on each rank: FSDP2 reduces what has a gradient, and ranks that
    differ in this would not agree on how much. An expert without tokens still needs a gradient, of zeros.

    __init__ assigns Linear layers in the order in which forward calls them: selective activation checkpointing saves
    every n-th output, and numbers the layers in the order of named_modules() (check_matmul_order refuses another).
    """

    # Selective activation checkpointing: operators whose first result in the block is saved.
    keep_first: frozenset = frozenset()

    def __init__(self, m: config.Model, layer: int):
        super().__init__()
        # As in torchtitan, the std of what is added to the residual stream falls with depth, so that the stream does
        # not grow. up_proj has it, too: the feed-forward's output is proportional to it.
        out_std = 0.02 / math.sqrt(2 * (layer + 1))
        self.attention_norm = RMSNorm(m.dim, m.norm_eps)
        self.attention = Attention(m, out_std)
        self.feed_forward_norm = RMSNorm(m.dim, m.norm_eps)
        self.feed_forward = FeedForward(m, out_std)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    """Final norm, output matrix and loss as one module, called once per forward pass: one FSDP unit.

    It computes the loss in chunks: full-batch logits never exist, and the output matrix is all-gathered only once.
    """

    def __init__(self, m: config.Model):
        super().__init__()
        self.norm = RMSNorm(m.dim, m.norm_eps)
        self.weight = nn.Parameter(torch.empty(m.vocab_size, m.dim))
        self.init_std, self.init_cutoff = m.dim**-0.5, 3.0  # cutoff in standard deviations
        self.compile_loss = False
        self.shard: Shard | None = None  # the local vocabulary rows; set by parallel/tensor.py

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        terms: LossSums | None = None,
        **loss_options,
    ) -> Tensor | tuple[LossSums, Tensor]:
        """terms: the blocks' own, which the loss includes."""
        # FSDP2 hands a unit views of its inputs, and warns if it returns one
        terms = {name: value.clone() for name, value in (terms or {}).items()}
        x = self.norm(x).to(self.weight.dtype)  # (B, T, D)
        if targets is None:
            return F.linear(x, self.weight)  # (B, T, V)
        sums, valid = chunked_cross_entropy(
            x.flatten(0, 1),
            self.weight,
            targets.flatten(),
            compile=self.compile_loss,
            shard=self.shard,
            **loss_options,
        )
        return {**sums, **terms, "loss": sum(terms.values(), sums["loss"])}, valid


class Llama(nn.Module):
    """Token ids (B, T) -> logits (B, T, V); with targets (B, T) -> ({"loss": sum over the tokens}, number of valid
    targets) from chunked_cross_entropy() in model/loss.py, which takes loss_options.

    positions (B, T): for RoPE, default 0 ... T-1. documents (B, T): each token's document number, increasing along T; a
    token attends only to its own document. With context parallelism (parallel/context.py), tokens, targets and
    positions are local, documents are full-sequence. With a cache, pass only tokens that it does not hold yet; the
    logits (B, 1, V) are those of each row's newest token. In training mode, the loss includes the blocks' own terms,
    which are also returned by name.
    """

    saved = "*"  # the parameters that a checkpoint holds, by name

    def __init__(self, m: config.Model):
        super().__init__()
        self.config = m
        self.embedding = Embedding(m.vocab_size, m.dim)
        self.blocks = nn.ModuleList(Block(m, layer) for layer in range(m.n_layers))
        self.build_mask = lambda documents: None if documents is None else document_mask(documents)
        self.head = Head(m)
        if m.tie_embeddings:  # one matrix, initialized as the output matrix
            self.embedding.weight = self.head.weight
            self.embedding.init_std, self.embedding.init_cutoff = (
                self.head.init_std,
                self.head.init_cutoff,
            )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        **loss_options,
    ) -> Tensor | tuple[LossSums, Tensor]:
        mask, newest = self.build_mask(documents), None
        if cache is not None:
            mask, positions, newest = cache.advance(tokens.shape[1])
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, T)
        # (B or 1, 1, T, E)
        cos, sin = (table[:, None] for table in rope_tables(self.config, positions))
        x, terms = self.embedding(tokens), {}  # (B, T, D)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, mask, cache and cache.blocks[i])
            if isinstance(x, tuple):
                x, terms = x[0], added(terms, x[1], f"blocks.{i}")
        if newest is not None:
            x = x.take_along_dim(newest[:, :, None], dim=1)  # (B, T, D) -> (B, 1, D)
        return self.head(x, targets, terms if self.training else None, **loss_options)

    def init_distribution(self, name: str) -> tuple[float, float] | None:
        """(standard deviation, cutoff in standard deviations) of a parameter's initial normal distribution; None for
        ones. Raises ConfigError for a parameter that has no distribution."""
        path, _, own = name.rpartition(".")
        module = self.get_submodule(path)
        if own != "weight" or not hasattr(module, "init_std"):
            raise ConfigError(
                f"{name}: has no initial distribution; a module's weight gets one by init_std, as in "
                "model/llama.py"
            )
        return (
            None
            if module.init_std is None
            else (module.init_std, getattr(module, "init_cutoff", math.inf))
        )


def added(terms: LossSums, more: LossSums, block: str) -> LossSums:
    """The terms of the loss so far, plus one block's. Raises ConfigError for what cannot be one: a vector, or a sum
    over tokens in bfloat16, which would lose most of them unseen."""
    for name, value in more.items():
        if value.dtype != torch.float32 or value.ndim or name == "loss":
            raise ConfigError(
                f"{block} returns {name} of {value.dtype} with shape {tuple(value.shape)}: a block's "
                'term of the loss is a float32 scalar, not named "loss"'
            )
    return {**terms, **{name: value + terms.get(name, 0) for name, value in more.items()}}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """named_parameters() of a model, parallelized or not, under the plain model's names: strips what activation
    checkpointing's wrappers and parametrizations add."""
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        yield name.replace("parametrizations.", "").removesuffix(".original"), parameter


def after_weight_update(model: nn.Module) -> None:
    """Call after weights have changed in place: calls what modules name as `after_weight_update`, a function of the
    model that updates what they derive from their weights, each function once."""
    for update in dict.fromkeys(
        m.after_weight_update for m in model.modules() if hasattr(m, "after_weight_update")
    ):
        update(model)


def parameter_count(model: nn.Module) -> int:
    return sum(weight_count(model, name, p) for name, p in named_parameters(model))


def weight_count(model: nn.Module, name: str, p: Tensor) -> int:
    """The number of weights that a parameter represents: its elements, times what its module's `weights_per_element`
    says, for packed weights and their scales."""
    path, _, own = name.rpartition(".")
    return p.numel() * getattr(model.get_submodule(path), "weights_per_element", {}).get(own, 1)


def flops_per_token(model: Llama, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, excluding recomputation:

        6 * (parameters in matrix products) + 6 * layers * heads * head_dim * seq_len

    First term: a multiply and an add, once in forward and twice in backward (once for a frozen matrix); the embedding
    is a lookup and does not count. Second: attention scores and weighted sum, 12 * ... unmasked, half of it if causal.
    """
    m = model.config
    matrices = sum(
        (6 if p.requires_grad else 4) * weight_count(model, name, p)
        for name, p in named_parameters(model)
        if p.ndim == 2 and (m.tie_embeddings or not name.startswith("embedding"))
    )
    return matrices + 6 * m.n_layers * m.n_heads * m.width_per_head * seq_len
