"""Activation checkpointing: which blocks discard their activations after forward and recompute them in backward."""

from collections import Counter
from functools import partial

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from model.llama import Llama

aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,  # of the document mask
}


def apply_activation_checkpointing(model: Llama, setting: str | int) -> None:
    """Wraps blocks in place.

    "none": nothing. "full": every block keeps its input only. n: every n-th block does, the others keep everything.
    "selective": every block keeps attention and every second matrix product, and recomputes the rest.
    """
    if setting == "none":
        return
    every = setting if isinstance(setting, int) else 1
    # No dropout, so there is no random state to restore.
    wrap = partial(checkpoint_wrapper, preserve_rng_state=False)
    if setting == "selective":
        wrap = partial(wrap, context_fn=_save_expensive_ops)
    for i in range(every - 1, len(model.blocks), every):
        model.blocks[i] = wrap(model.blocks[i])


def _save_expensive_ops():
    """Contexts for one block's forward and its recomputation, both of which run the products in the same order."""
    products: Counter[bool] = Counter()

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator in MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
