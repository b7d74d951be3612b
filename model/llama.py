"""Llama 2 / 3 / 3.1 / 3.2 and Qwen3 as plain modules.

Shapes: B batch, T tokens, D model dimension (dim), H query heads, K key/value heads, E head
dimension (head_dim), F feed-forward dimension, V vocabulary.

A module that owns parameters declares, by name,

    init       its initial values: see model/init.py. Standard deviations are torchtitan's
               (https://github.com/pytorch/torchtitan).
    tp_dims    the dimension that tensor parallelism shards, such as 0 for one value per head. Only
               for parameters that parallel/tensor.py does not place. None: every rank holds the full
               parameter, and computes with its local tokens, heads or features.

parallel/ and extras/ change this model in place. They replace

    Linear layers of the blocks                       extras/lora/nf4.py, extras/float8/matmul.py
    Attention.attend                                  parallel/context.py, generate.py
    Llama.build_mask                                  parallel/context.py
    Block.add_attention, Block.add_feed_forward       parallel/parallelize.py (compiled)
    forward() of Embedding, Attention, FeedForward    parallel/tensor.py
        and Head

and set the attributes that Linear, Head and Llama declare for them.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import config
from config import ConfigError
from model.attention import BlockMask, attention, document_mask
from model.init import constant, normal
from model.loss import LossSums, Shard, chunked_cross_entropy


class RMSNorm(nn.Module):
    """x / rms(x) * weight (https://arxiv.org/abs/1910.07467), statistics in float32.

    The result has the weight's dtype, not the input's. This allows a float32 residual stream with
    bfloat16 matrices, and a bfloat16 residual stream into a unit in `keep_fp32`.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.init = {"weight": constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(self.weight.dtype) * self.weight


def rope_tables(m: config.Model, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine (..., T, 1, E) in float32 for positions (..., T). All heads share them.

    Half-split layout: both halves of E are equal, except that the first half of the sines is negated
    for apply_rope(). They are computed in each forward pass, because a buffer would be uninitialized
    after meta construction, and mixed precision could round it.
    """
    even = torch.arange(0, m.width_per_head, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / (m.rope_theta ** (even / m.width_per_head))  # (E/2)
    if m.rope_scaling is not None:
        frequencies = scale_frequencies(frequencies, m.rope_scaling)
    angles = positions.float()[..., None, None] * frequencies  # (..., T, 1, E/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # (..., T, 1, E)


def scale_frequencies(frequencies: Tensor, s: config.RopeScaling) -> Tensor:
    """Llama 3.1's scaling to longer contexts (https://arxiv.org/abs/2407.21783).

    It keeps high frequencies, divides low ones by `factor`, and interpolates in between.
    """
    turns = s.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / s.factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (B, T, heads, E), computed in float32.

    https://arxiv.org/abs/2104.09864; cos and sin are rope_tables().
    """
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)  # the halves of E
    return (wide * cos + swapped * sin).to(x.dtype)


class Linear(nn.Linear):
    """x @ weight.T without bias, in the weight's dtype: x is cast to it.

    The class attributes below are a plain layer's. NF4Linear and Float8Linear override them;
    adapters and tensor parallelism set them on a layer.
    """

    # Quantized layers: the method that computes the stored tensors, as NF4Linear.quantize() does.
    quantize: Callable[..., None] | None = None
    # Activation checkpointing: operators that compute the output, besides mm and addmm.
    matmuls: ClassVar[Collection] = ()
    # Selective activation checkpointing: True saves the output, and False recomputes it. With None,
    # the layer's position in the block decides.
    keep_output: bool | None = None
    # Tensor parallelism: the first input feature of the local shard.
    first_input: int = 0

    def __init__(self, inputs: int, outputs: int, init_std: float = 0.02):
        super().__init__(inputs, outputs, bias=False)
        self.init = {"weight": normal(init_std)}

    def reset_parameters(self) -> None:
        """Does nothing: materialize() initializes.

        nn.Linear's random init on the meta device would import torch's compiler (a second).
        """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # once: replicated parameters are cast at each access
        return F.linear(x.to(weight.dtype), weight)

    def rounded(self, weight: Tensor) -> Tensor:
        """A float32 weight as this layer stores it, in float32 again."""
        return weight.to(self.weight.dtype).float()


class Embedding(nn.Embedding):
    def __init__(self, rows: int, dim: int):
        super().__init__(rows, dim)
        self.init = {"weight": normal(1.0)}

    def reset_parameters(self) -> None:
        """Does nothing, as Linear's."""


class Attention(nn.Module):
    """Causal grouped-query attention (https://arxiv.org/abs/2305.13245).

    With qk_norm, each head of a query or key is normalized before RoPE, with one weight for all
    heads (https://arxiv.org/abs/2505.09388).
    """

    def __init__(self, m: config.Model, out_std: float):
        super().__init__()
        self.head_dim = m.width_per_head
        self.q_proj = Linear(m.dim, m.n_heads * self.head_dim)
        self.k_proj = Linear(m.dim, m.n_kv_heads * self.head_dim)
        self.v_proj = Linear(m.dim, m.n_kv_heads * self.head_dim)
        self.o_proj = Linear(m.n_heads * self.head_dim, m.dim, out_std)
        self.q_norm = RMSNorm(self.head_dim, m.norm_eps) if m.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, m.norm_eps) if m.qk_norm else nn.Identity()
        # context parallelism: local queries, all-gathered keys and values; generation: a KV cache
        self.attend = attention

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None = None
    ) -> Tensor:
        batch, length, _ = x.shape
        # -1 heads: with tensor parallelism, only the local ones
        q = self.q_proj(x).view(batch, length, -1, self.head_dim)  # (B, T, D) -> (B, T, H, E)
        k = self.k_proj(x).view(batch, length, -1, self.head_dim)  # (B, T, D) -> (B, T, K, E)
        v = self.v_proj(x).view(batch, length, -1, self.head_dim)  # (B, T, D) -> (B, T, K, E)
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        # Transposed after RoPE: rolling a transposed tensor costs Inductor a copy in backward.
        q = q.transpose(1, 2)  # (B, H, T, E)
        k = k.transpose(1, 2)  # (B, K, T, E)
        v = v.transpose(1, 2)  # (B, K, T, E)
        out = self.attend(q, k, v, mask)  # (B, H, T, E)
        out = out.transpose(1, 2).flatten(2)  # (B, H, T, E) -> (B, T, H*E)
        return self.o_proj(out)  # (B, T, D)


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

    A fork's block may add terms to the loss, such as the load balance of a mixture of experts. It
    then returns (x, terms) instead of x. terms[name] is a float32 scalar: the term's sum over the
    tokens of x (B, T, D), times its weight. Terms of one name are added over blocks, and over
    ranks, which hold different tokens. training_step() minimizes (loss + terms) / valid targets of
    the step, and logs each term by its name.

    Every parameter must take part in every backward, on each rank. FSDP2 reduces the gradients that
    exist, and ranks that differ in this would reduce different amounts. An expert without tokens
    still needs a gradient, of zeros.

    __init__ assigns Linear layers in the order in which forward calls them: selective activation
    checkpointing saves every n-th output, and numbers the layers in the order of named_modules().

    A forward that only calls the two halves below is compiled as two graphs, any other as one
    (compile_block in parallel/parallelize.py).
    """

    def __init__(self, m: config.Model, layer: int):
        super().__init__()
        # As in torchtitan, the std of the layers that write to the residual stream falls with depth,
        # so that the stream does not grow. So does up_proj's: the output is proportional to it.
        out_std = 0.02 / math.sqrt(2 * (layer + 1))
        self.attention_norm = RMSNorm(m.dim, m.norm_eps)
        self.attention = Attention(m, out_std)
        self.feed_forward_norm = RMSNorm(m.dim, m.norm_eps)
        self.feed_forward = FeedForward(m, out_std)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None = None
    ) -> Tensor:
        x = self.add_attention(x, cos, sin, mask)
        return self.add_feed_forward(x)

    def add_attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        return x + self.attention(self.attention_norm(x), cos, sin, mask)

    def add_feed_forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    """Final norm, output matrix and loss as one FSDP unit, called once per forward pass.

    The loss is computed in chunks, inside: full-batch logits never exist, and the output matrix is
    all-gathered only once.
    """

    # Whether to compile the elementwise part of the loss; set by parallel/parallelize.py.
    compile_loss = False
    # Which rows of the vocabulary are local, None for all; set by parallel/tensor.py.
    shard: Shard | None = None

    def __init__(self, m: config.Model):
        super().__init__()
        self.norm = RMSNorm(m.dim, m.norm_eps)
        self.weight = nn.Parameter(torch.empty(m.vocab_size, m.dim))
        self.init = {"weight": normal(m.dim**-0.5, cutoff=3.0)}

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        terms: LossSums | None = None,
        **by_token: Tensor,
    ) -> Tensor | tuple[LossSums, Tensor]:
        """Logits (B, T, V) of x (B, T, D); with targets (B, T), (sums, number of valid targets).

        sums["loss"] includes the blocks' `terms`, which sums also holds by name.
        """
        x = self.norm(x).to(self.weight.dtype)  # (B, T, D)
        if targets is None:
            return F.linear(x, self.weight)  # (B, T, V)
        sums, valid = chunked_cross_entropy(
            x.flatten(0, 1),  # (B, T, D) -> (B*T, D)
            self.weight,
            targets.flatten(),  # (B, T) -> (B*T)
            compile=self.compile_loss,
            shard=self.shard,
            others={name: tensor.flatten(0, 1) for name, tensor in by_token.items()},
        )
        for name, term in (terms or {}).items():
            sums["loss"] = sums["loss"] + term
            # FSDP2 passes a unit views of its inputs, and warns if the unit returns one.
            sums[name] = term.clone()
        return sums, valid


class Llama(nn.Module):
    """The decoder: token ids (B, T) -> logits (B, T, V).

    With targets (B, T), it returns (sums, number of valid targets) instead, from
    chunked_cross_entropy() in model/loss.py. sums["loss"] is the sum of the loss over the tokens.
    In training mode it includes the blocks' terms, which sums also holds by name. by_token are
    further arguments (B, T, ...) of token_loss() there.
    """

    # Checkpoints store the parameters whose names match this pattern; set by adapters.
    saved = "*"
    # Called after each in-place update of the weights, to recompute what the model derives from them;
    # set by extras/float8/all_gather.py.
    after_weight_update: Callable[["Llama"], None] | None = None

    def __init__(self, m: config.Model):
        super().__init__()
        self.config = m
        self.embedding = Embedding(m.vocab_size, m.dim)
        self.blocks = nn.ModuleList(Block(m, layer) for layer in range(m.n_layers))
        self.head = Head(m)
        if m.tie_embeddings:
            # One matrix, initialized as the output matrix. A smaller standard deviation would begin
            # nearer to a guess, but trained worse: docs/troubleshooting.md, "The first loss is high".
            self.embedding.weight = self.head.weight
            self.embedding.init["weight"] = self.head.init["weight"]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        **by_token: Tensor,
    ) -> Tensor | tuple[LossSums, Tensor]:
        """positions (B, T) are RoPE's, by default 0 ... T-1. documents (B, T) are document numbers,
        increasing along T: a token attends only to its own document.

        With context parallelism, tokens, targets and positions are local, documents those of the
        full sequence.
        """
        mask = self.build_mask(documents)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, T)
        cos, sin = rope_tables(self.config, positions)  # (B or 1, T, 1, E)

        x = self.embedding(tokens)  # (B, T) -> (B, T, D)
        terms: LossSums = {}
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, mask)
            if not isinstance(x, Tensor):
                x, terms = add_terms(terms, x, f"blocks.{i}")
        return self.head(x, targets, terms if self.training else None, **by_token)

    def build_mask(self, documents: Tensor | None) -> Tensor | BlockMask | None:
        """The attention mask of full sequences. Context parallelism replaces it by a local one."""
        return None if documents is None else document_mask(documents)


def add_terms(terms: LossSums, output: Any, block: str) -> tuple[Tensor, LossSums]:
    """Splits a block's output (x, terms). Returns x, and `terms` with the block's terms added.

    Raises ConfigError for a term that is not a float32 scalar: a sum over tokens in bfloat16 would
    silently lose most of them.
    """
    x, block_terms = output
    total = dict(terms)
    for name, value in block_terms.items():
        if value.dtype != torch.float32 or value.ndim > 0 or name == "loss":
            raise ConfigError(
                f"{block} returns {name} of {value.dtype} with shape {tuple(value.shape)}: "
                'a block\'s term of the loss is a float32 scalar, not named "loss"'
            )
        total[name] = value + terms.get(name, 0)
    return x, total


def named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """model.named_parameters() under the plain model's names, parallelized or not.

    Strips the prefixes and suffixes of activation checkpointing and parametrizations.
    remove_duplicate: whether a tied matrix comes once, under its first name, or under each name.
    """
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


def plain_name(name: str) -> str:
    """A parameter's or buffer's name in the plain model."""
    name = name.replace("_checkpoint_wrapped_module.", "")
    return name.replace("parametrizations.", "").removesuffix(".original")


def check_has_weight_alone(layer: Linear, name: str, option: str) -> None:
    """Raises ConfigError if a layer has other parameters than its weight. The option replaces the
    layer, and would drop them."""
    for parameter, _ in layer.named_parameters(recurse=False):
        if parameter != "weight":
            raise ConfigError(f"{option}: would drop {name}.{parameter}; add it after the layer")


def after_weight_update(model: nn.Module) -> None:
    """Call after weights have changed in place: recomputes what the model derives from them."""
    if isinstance(model, Llama) and model.after_weight_update is not None:
        model.after_weight_update(model)


def parameter_count(model: nn.Module) -> int:
    return sum(weight_count(model, name, p) for name, p in named_parameters(model))


def weight_count(model: nn.Module, name: str, p: Tensor) -> int:
    """The number of weights that a parameter represents: its elements, unless it is quantized."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, Linear) and module.quantize is not None:
        return module.in_features * module.out_features if attribute == "weight" else 0
    return p.numel()


def flops_per_token(model: Llama, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, excluding recomputation. If all
    parameters are trained,

        6 * (parameters in matmuls) + 6 * layers * heads * head_dim * seq_len

    First term: a multiply and an add, once in forward, once for the gradient of the matrix, and once
    for the gradient of its input. Only trained matrices have the former. Only matrices after a
    trained parameter have the latter. The embedding is a lookup and does not count. Second term:
    attention scores and weighted sum, 12 * ... without a mask, and half of it if causal.

    Assumes that parameters are registered in the order of execution. Layers that read the same input
    as the first trained one count with an input gradient, although they have none.
    """
    m = model.config
    attention = 2 * m.n_heads * m.width_per_head * seq_len  # of a block's forward
    total = 0
    in_backward = False  # whether a parameter so far is trained
    # A tied matrix counts as the embedding and as the head. The head's matrix comes after its norm.
    parameters = sorted(
        named_parameters(model, remove_duplicate=False), key=lambda item: item[0] == "head.weight"
    )
    for name, p in parameters:
        if p.ndim == 2 and not name.startswith("embedding"):
            passes = 1 + p.requires_grad + in_backward
            total += 2 * passes * weight_count(model, name, p)
        if name.endswith("o_proj.weight"):
            total += attention * (3 if in_backward else 1)
        in_backward |= p.requires_grad
    return total
