"""Activation checkpointing: blocks discard activations in forward and recompute them in backward.

The option `recompute` names a mode:

    "none"          no block is checkpointed
    "full"          every block saves only its input
    n               of every n blocks, the last saves only its input; the others save everything
    "elementwise"   every block saves the outputs of attention and of its matmuls, and recomputes
                    norms, RoPE and the activation function
    "selective"     every block saves the outputs of attention and of every second matmul

The last two use torch's selective checkpointing: a policy decides for each operator whether to save
its output. It tells the matmuls of linear layers apart by counting calls, and assumes that forward
calls the layers in the order of named_modules(). If a block calls them in another order, the policy
saves other outputs, but the result is the same. A compiled model needs no policy for "elementwise"
(parallelize.py). In a block that is not compiled, FlexAttention is compiled on its own. The policy
does not see it as an operator, so it is recomputed.
"""

import functools
import re
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import config
from model.llama import Block, Linear, Llama
from parallel.collectives import ops
from parallel.fsdp import first_in_backward
from parallel.torch_patches import silence_advice_on_policies

aten = torch.ops.aten
LINEAR_MATMULS = {aten.mm.default, aten.addmm.default}
GROUPED_MM = aten._grouped_mm.default  # F.grouped_mm(), of a mixture of experts
REDUCE_SCATTER = ops.reduce_scatter_tensor.default  # of tensor parallelism
# Every library's attention: torch's (aten._scaled_dot_product_flash_attention and others, the
# higher-order flex_attention), FlashAttention's own (flash_attn_3.fwd), xformers' (flash_fwd), a
# fork's.
ATTENTION = re.compile(r"attention|attn|scaled_dot_product|flash_fwd", re.IGNORECASE)
BACKWARD = re.compile(r"backward|bwd", re.IGNORECASE)
KEEP_EVERY = {"elementwise": 1, "selective": 2}  # mode -> n: every n-th matmul's output is saved


def apply_activation_checkpointing(model: Llama, recompute: str | int, compiled: bool) -> None:
    """Wraps the blocks that the option `recompute` checkpoints, in place.

    Skips blocks that backward does not reach: they save nothing, and torch.compile fails on a
    checkpoint in a graph without a backward. compiled: whether the blocks will be compiled.
    """
    first = first_in_backward(model)
    for i, block in enumerate(model.blocks):
        if i < first or not is_checkpointed(recompute, i):
            continue
        if recompute in config.SELECTIVE:
            model.blocks[i] = checkpoint_selectively(block, recompute, compiled)
        else:
            model.blocks[i] = checkpoint_wrapper(block)


def is_checkpointed(recompute: str | int, layer: int) -> bool:
    """Whether the option `recompute` checkpoints the block of this index."""
    if isinstance(recompute, str):
        return recompute != "none"
    return layer % recompute == recompute - 1


# Selective checkpointing: what a block saves


def checkpoint_selectively(
    block: Block, recompute: str, compiled: bool, always_save: Collection = ()
) -> nn.Module:
    """Wraps a block. compiled: whether it will be compiled. always_save: further operators whose output
    is saved (tools/planner)."""
    silence_advice_on_policies()
    every = KEEP_EVERY[recompute]
    linears = [layer for layer in block.modules() if isinstance(layer, Linear)]
    matmuls = LINEAR_MATMULS.union(*(linear.matmuls for linear in linears))
    contexts = partial(
        save_expensive_ops, matmuls, saved_matmuls(block, every), every, compiled, always_save
    )
    return checkpoint_wrapper(block, context_fn=contexts)


def saved_matmuls(block: Block, every: int) -> set[int]:
    """The numbers of the linear layers whose output is saved: those with keep_output = True
    (model/llama.py), and every n-th of those without a choice.

    The last one is not saved: it feeds only the residual add, so backward does not read its output.
    """
    saved = set()
    undecided = []
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    for number, linear in enumerate(linears):
        keep_output = linear.keep_output if isinstance(linear, Linear) else None
        if keep_output is None:
            undecided.append(number)
        elif keep_output:
            saved.add(number)
    return saved.union(undecided[:-1:every])


@functools.cache
def is_attention(operator: Any) -> bool:
    """Whether the operator is the forward of attention, by its namespace and name.

    A list of operators would be incomplete, and silently recompute other kernels.
    """
    # "aten._scaled_dot_product_flash_attention.default", "flex_attention"
    name = str(operator)
    return bool(ATTENTION.search(name)) and not BACKWARD.search(name)


def draws(operator: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call draws random numbers.

    torch tags attention's operators as random even without dropout, so their argument decides.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        return False
    names = [argument.name for argument in schema.arguments]
    if is_attention(operator) and "dropout_p" in names:
        return bool({**dict(zip(names, args)), **kwargs}.get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in operator.tags and not schema.is_mutable


def save_expensive_ops(
    matmuls: set, saved: set[int], every: int, compiled: bool, always_save: Collection
) -> tuple:
    """The contexts of one block's forward and of its recomputation, for checkpoint()'s context_fn.

    The policy saves attention, the matmuls with the numbers in `saved`, and every n-th grouped matmul
    from the first on, even the last one, because a router's gradient reads its output. It recomputes
    batched matmuls (bmm). Under tensor parallelism it saves the first reduce-scatter, which sums
    o_proj's output, because recomputing it would communicate again. Backward does not read the result
    of the second one.
    """
    calls: Counter = Counter()

    def number_of(call: Any, context) -> int:
        """The number of earlier calls of this kind, counted in forward and in recomputation apart."""
        calls[call, context.is_recompute] += 1
        return calls[call, context.is_recompute] - 1

    def is_saved(context, operator, args: tuple, kwargs: dict) -> bool:
        # In eager mode, recomputation restores the generator's state and must repeat all draws in the
        # same order, so it repeats attention with dropout, too. In a compiled block random numbers
        # are saved: torch 2.13 fails to restore the state next to tensor parallelism's DTensors.
        if draws(operator, args, kwargs):
            return compiled
        if operator in always_save or is_attention(operator):
            return True
        if operator in matmuls:
            return number_of("matmul", context) in saved
        if operator == GROUPED_MM:
            return number_of(operator, context) % every == 0
        return operator == REDUCE_SCATTER and number_of(operator, context) == 0

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if is_saved(context, operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
