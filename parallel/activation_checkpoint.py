"""Activation checkpointing: which blocks discard their activations after forward and recompute them in backward."""

from functools import partial

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import config
from model.llama import Llama


def is_checkpointed(setting: str | int, layer: int) -> bool:
    """Whether the block of this index (from 0) is checkpointed. setting: the option `recompute`, either a mode, which
    is for every block, or n for the last of every n blocks."""
    return setting != "none" and (isinstance(setting, str) or layer % setting == setting - 1)


def apply_activation_checkpointing(model: Llama, setting: str | int) -> None:
    """Wraps blocks in place. "none": no block. "full": every block saves only its input. n: every n-th block does; the
    others save everything. "elementwise" and "selective": every block saves a part (selective.py)."""
    wrap = partial(checkpoint_wrapper, preserve_rng_state=False)  # no dropout: no RNG state
    if setting in config.SELECTIVE:
        from parallel.selective import checkpoint_selectively

        wrap = partial(checkpoint_selectively, setting=setting)
    for layer, block in enumerate(model.blocks):
        if is_checkpointed(setting, layer):
            model.blocks[layer] = wrap(block)
