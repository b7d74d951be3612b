"""Changes that a fork makes to the model, for tests of what then happens elsewhere."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from model.llama import Block, FeedForward, Linear
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


def routed_block(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, mask=None, cache=None
) -> tuple[Tensor, dict]:
    x = x + block.attention(block.attention_norm(x), cos, sin, mask, cache)
    out, terms = block.feed_forward(block.feed_forward_norm(x))
    return x + out, terms


def routed_context_parallelism(as_before: Callable, model, recompute, seq_len, world) -> None:
    from parallel.collectives import all_reduce, group_of

    as_before(model, recompute, seq_len, world)
    for block in model.blocks:
        block.feed_forward.over_sequence = partial(all_reduce, group=group_of(world.mesh["cp"]))


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """The model with RoutedFeedForward in every block, on every mesh."""
    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch("model.llama.FeedForward", RoutedFeedForward))
        changes.enter_context(mock.patch.object(Block, "forward", routed_block))
        changes.enter_context(
            mock.patch.dict(
                "parallel.tensor.TP_PLAN", {"blocks.*.feed_forward.router": Replicate()}
            )
        )
        changes.enter_context(
            mock.patch.object(
                context,
                "apply_context_parallelism",
                partial(routed_context_parallelism, context.apply_context_parallelism),
            )
        )
        yield
