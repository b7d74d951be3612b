"""Activation checkpointing: which blocks discard their activations after forward and recompute them in backward."""

from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from model.llama import Llama

aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}  # of the linear layers
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,  # of the document mask
}
KEEP_EVERY = {"elementwise": 1, "selective": 2}  # setting -> every n-th matrix product is kept


def apply_activation_checkpointing(model: Llama, setting: str | int) -> None:
    """Wraps blocks in place.

    "none": nothing. "full": every block keeps its input only. n: every n-th block does, the others keep everything.
    "elementwise": every block keeps attention and the matrix products, and recomputes norms, RoPE and activation.
    "selective": every block keeps attention and every second matrix product, and recomputes the rest.
    """
    if setting == "none":
        return
    every = setting if isinstance(setting, int) else 1
    # No dropout, so there is no random state to restore.
    wrap = partial(checkpoint_wrapper, preserve_rng_state=False)
    for i in range(every - 1, len(model.blocks), every):
        contexts = {}
        if setting in KEEP_EVERY:
            linears = sum(isinstance(module, nn.Linear) for module in model.blocks[i].modules())
            contexts["context_fn"] = partial(_save_expensive_ops, KEEP_EVERY[setting], linears - 1)
        model.blocks[i] = wrap(model.blocks[i], **contexts)


def _save_expensive_ops(every: int, last: int):
    """Contexts for one block's forward and its recomputation, both of which run the products in the same order.

    They keep products 0, every, 2 * every, ..., but never the last: it only enters the residual sum, so backward does
    not read it. Compiled, the partitioner would drop it anyway; eagerly it would be kept for nothing.
    """
    products: Counter[bool] = Counter()

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator in MATRIX_PRODUCTS:
            number = products[context.is_recompute]
            products[context.is_recompute] += 1
            if number % every == 0 and number != last:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
