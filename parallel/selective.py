"""Selective activation checkpointing: a block saves its expensive operations, and recomputes the rest in backward."""

import itertools
import logging
from collections import defaultdict
from collections.abc import Collection
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
GROUPED = aten._grouped_mm.default  # of a mixture of experts: F.grouped_mm()
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._efficient_attention_forward.default,
    torch.ops.higher_order.flex_attention,  # with a document mask
}
KEEP_EVERY = {"elementwise": 1, "selective": 2}  # mode -> n: every n-th matrix product is saved


def matmuls_of(module: nn.Module) -> set:
    """The operators of its linear layers: MATRIX_PRODUCTS, and what layers of other kinds name as `matmuls`."""
    return MATRIX_PRODUCTS.union(*(getattr(layer, "matmuls", ()) for layer in module.modules()))


def checkpoint_selectively(block: nn.Module, setting: str, also: Collection = ()) -> nn.Module:
    """The block, wrapped.

    "elementwise": it saves attention and matrix products; it recomputes norms, RoPE and activation function.
    "selective": it saves attention and every second matrix product; it recomputes the rest.
    Matrix products are those of linear layers and, numbered apart, grouped ones; batched ones (bmm) are recomputed.
    also: operators that both settings save in any case.

    A linear layer's attribute `keep_output` decides for its output in both modes: True, it is saved; False, it is
    recomputed; absent, the layers without it are numbered. A block's `keep_first` names operators whose first result
    in the block is saved.
    """
    layers = {
        name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)
    }
    linears, keeps = (
        [*layers],
        {name: getattr(layer, "keep_output", None) for name, layer in layers.items()},
    )
    kept = {*[name for name in linears if keeps[name] is None][: -1 : KEEP_EVERY[setting]]}
    kept |= {name for name in linears if keeps[name]}
    contexts = partial(
        _save_expensive_ops,
        matmuls_of(block),
        {linears.index(name) for name in kept},
        KEEP_EVERY[setting],
        getattr(block, "keep_first", ()),
        also,
    )
    drop_advice_on_policies()
    return checkpoint_wrapper(block, preserve_rng_state=False, context_fn=contexts)


def _save_expensive_ops(
    matmuls: set, kept: set[int], every: int, keep_first: Collection, also: Collection
):
    """Contexts for one block's forward and recomputation. kept: indices of matrix products in call order, which is the
    order of named_modules(): see check_matmul_order. The last is never saved: it feeds only the residual add, so
    backward does not read it (the partitioner drops it when compiled; eager mode would save it for nothing). Of grouped
    products each n-th is saved from the first on (every = n), also the last: a router's gradient reads it.
    keep_first: operators whose first result is saved; also: operators whose every result is saved.
    """
    numbers = defaultdict(itertools.count)  # calls so far per kind, counted apart in recomputation

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in ATTENTION or operator in also:
            return CheckpointPolicy.MUST_SAVE
        if operator in matmuls and next(numbers["product", context.is_recompute]) in kept:
            return CheckpointPolicy.MUST_SAVE
        if operator == GROUPED and next(numbers["grouped", context.is_recompute]) % every == 0:
            return CheckpointPolicy.MUST_SAVE
        if operator in keep_first and next(numbers[operator, context.is_recompute]) == 0:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def drop_advice_on_policies() -> None:
    """Drops what torch logs, in all versions, for every selective checkpointing policy that it compiles: not to change
    a tensor in place. No block does. Test: test_torch_patches.py, test_the_advice_on_policies_is_dropped."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_advice_on_policies)


def _is_no_advice_on_policies(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
