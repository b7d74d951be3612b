"""Bytes of a model's states on all ranks together, and of its checkpoint."""

import math
import sys
from typing import NamedTuple

import config

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}


class Sizes(NamedTuple):
    """In bytes, of what every run has: at least so many."""

    states: int  # parameters, gradients and optimizer state
    checkpoint: int  # trained parameters and optimizer state


def sizes(cfg: config.Config, room: float) -> Sizes:
    """Counted on the model itself. room: the bytes that it is compared with; infinitely small where
    the model is far from them, so that a small run need not wait for torch, seconds."""
    if "torch" not in sys.modules and at_most(cfg.model) < room:
        return Sizes(0, 0)
    from model.build import meta_model

    everything = 0
    trained = 0
    state = 0
    moments = 1 if cfg.optim.name == "muon" else 2
    for p in meta_model(cfg.model, cfg.lora).parameters():
        everything += p.numel() * p.element_size()
        if p.requires_grad:
            trained += p.numel() * p.element_size()
            state += p.numel() * moments * BYTES[cfg.optim.state_dtype]
    return Sizes(everything + trained + state, trained + state)


def at_most(m: config.Model) -> int:
    """Bytes of the states of a model that is twice as large as one of these sizes."""
    attention = m.dim * m.width_per_head * 2 * (m.n_heads + m.n_kv_heads)
    block = attention + 3 * m.dim * m.ffn_dim
    return 2 * 16 * (2 * m.vocab_size * m.dim + m.n_layers * block)


def gib(size: float) -> str:
    """A size in words, rounded to two digits or more."""
    value = size / GIB
    digits = max(0, 1 - math.floor(math.log10(value))) if value else 0
    return f"{value:,.{digits}f} GiB"
