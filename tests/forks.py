"""Changes that a fork makes to the model, for tests of what then happens elsewhere."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from model.init import constant, normal
from model.llama import Attention, Block, FeedForward, Linear
from parallel import context

EXPERTS = 4


class RoutedFeedForward(FeedForward):
    """The router of a mixture of experts, whose choice scales the hidden features. Returns two terms of the loss: the
    balance of the experts within each sequence (https://arxiv.org/abs/2101.03961, section 2.2), and the router's z-loss
    (https://arxiv.org/abs/2202.08906)."""

    def __init__(self, m, out_std: float):
        nn.Module.__init__(self)
        # first: selective checkpointing takes matmuls in this order
        self.router = Linear(m.dim, EXPERTS)
        self.gate_proj, self.up_proj = Linear(m.dim, m.ffn_dim), Linear(m.dim, m.ffn_dim, out_std)
        self.down_proj = Linear(m.ffn_dim, m.dim, out_std)
        # with cp: summed over the ranks that share the sequence
        self.over_sequence = lambda counts: counts

    # pyrefly: ignore[bad-override]  # routed_block() takes both
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.router(x).float()  # (B, T, experts)
        share = logits.softmax(-1)
        best, chosen = share.max(-1, keepdim=True)
        # (B, 1, experts)
        counts = self.over_sequence(F.one_hot(chosen[..., 0], EXPERTS).float().sum(1, keepdim=True))
        balance = EXPERTS * (counts / counts.sum(-1, keepdim=True) * share).sum()
        z_loss = logits.logsumexp(-1).square().sum()
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * best.to(x.dtype))
        return out, {"balance": 0.1 * balance, "router_z": 0.01 * z_loss}


def routed_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor, mask=None) -> tuple:
    x = x + block.attention(block.attention_norm(x), cos, sin, mask)
    out, terms = block.feed_forward(block.feed_forward_norm(x))
    return x + out, terms


def routed_context_parallelism(as_before: Callable, model, seq_len, world) -> None:
    from parallel.collectives import all_reduce, group_of

    as_before(model, seq_len, world)
    for block in model.blocks:
        block.feed_forward.over_sequence = partial(all_reduce, group=group_of(world.mesh["cp"]))


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """The model with RoutedFeedForward in every block, on every mesh."""
    in_context = partial(routed_context_parallelism, context.apply_context_parallelism)
    plan = {"blocks.*.feed_forward.router": Replicate()}
    with (
        mock.patch("model.llama.FeedForward", RoutedFeedForward),
        mock.patch.object(Block, "forward", routed_block),
        mock.patch.dict("parallel.tensor.TP_PLAN", plan),
        mock.patch.object(context, "apply_context_parallelism", in_context),
    ):
        yield


@contextlib.contextmanager
def with_dropout() -> Iterator[None]:
    """The model with dropout of the feed-forward's hidden features and of attention's output."""
    attention = Attention.forward

    def attention_with_dropout(self, *args) -> Tensor:
        return F.dropout(attention(self, *args), 0.2, self.training)

    def feed_forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(hidden, 0.2, self.training))

    with (
        mock.patch.object(Attention, "forward", attention_with_dropout),
        mock.patch.object(FeedForward, "forward", feed_forward),
    ):
        yield


@contextlib.contextmanager
def with_noisy_gate() -> Iterator[None]:
    """The model with a feed-forward whose gate has noise in training."""

    def feed_forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self.training:
            gate = gate + 0.5 * torch.randn_like(gate)
        return self.down_proj(F.silu(gate) * self.up_proj(x))

    with mock.patch.object(FeedForward, "forward", feed_forward):
        yield


@contextlib.contextmanager
def with_parameters() -> Iterator[None]:
    """The model with parameters of each kind that a fork may add, and a buffer.

    A gate and a layer scale in the block, a bias of the query projection, an attention sink per
    head (https://arxiv.org/abs/2309.17453).
    """
    init_attention = Attention.__init__
    init_block = Block.__init__

    class BiasedLinear(Linear):
        def __init__(self, inputs: int, outputs: int):
            super().__init__(inputs, outputs)
            self.bias = nn.Parameter(torch.empty(outputs))
            self.init["bias"] = normal(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.bias

    def attention_with_sink(self, m, out_std: float) -> None:
        init_attention(self, m, out_std)
        self.q_proj = BiasedLinear(m.dim, m.n_heads * self.head_dim)
        self.sink = nn.Parameter(torch.empty(m.n_heads))
        self.init = {"sink": one_per_head}
        self.tp_dims = {"sink": 0}
        self.attend = partial(attend_with_sink, self)

    def block_with_gate(self, m, layer: int) -> None:
        init_block(self, m, layer)
        self.gate = nn.Parameter(torch.empty(1))
        self.scale = nn.Parameter(torch.empty(m.dim))
        self.register_buffer("factor", torch.empty(()), persistent=False)
        self.init = {"gate": constant(0.5), "scale": normal(1.0), "factor": normal(1.0)}
        self.tp_dims = {"gate": None, "scale": None}

    def block(self, x: Tensor, cos: Tensor, sin: Tensor, mask=None) -> Tensor:
        x = x + self.gate * self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.factor * self.scale * self.feed_forward(self.feed_forward_norm(x))

    with (
        mock.patch.object(Attention, "__init__", attention_with_sink),
        mock.patch.object(Block, "__init__", block_with_gate),
        mock.patch.object(Block, "forward", block),
    ):
        yield


def one_per_head(rows: Tensor, first_row: int) -> None:
    rows.copy_(torch.arange(first_row, first_row + len(rows)))


def attend_with_sink(attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask=None) -> Tensor:
    """Causal attention (B, H, T, E) whose weights sum to less than 1: the sink takes the rest."""
    length = q.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5  # (B, H, T, T)
    later = torch.ones(length, length, device=q.device).triu(1).bool()
    scores = scores.masked_fill(later, -math.inf)
    sink = attention.sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], dim=3).softmax(3)[..., :-1] @ v
