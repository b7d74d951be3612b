"""Finds identical blocks of a model, so that a plan needs to run only some of them.

simulate.py runs a shorter model, which shortened() returns. shortened() compares the blocks by
their forward on the meta device, their parameters and how the options treat them. It selects middle
blocks that represent the blocks left out.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import config
from model.build import meta_model
from model.llama import Llama, named_parameters
from parallel.activation_checkpoint import is_checkpointed
from parallel.fsdp import unit_dtypes
from parallel.mesh import World
from parallel.replicated import replicated_parameters
from tools.planner.masks import flex_attention_patches

# equal for identical blocks
Kind = tuple


class Shorter(NamedTuple):
    blocks: int
    # the blocks that represent those left out; the same number of identical blocks follows
    middle: range


class Operators(TorchDispatchMode):
    """Records the operators that run, with shapes instead of tensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        # for the attention that is running, see Counted
        self.mask_share: float | None = None
        self.mask_depends_on_data = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = tree_map(shape_of_tensor, (args, kwargs))
        self.calls.append(f"{operator} {self.mask_share} {arguments}")
        return operator(*args, **kwargs)


def shape_of_tensor(x: Any) -> Any:
    """The dtype and shape of a tensor. Returns anything else unchanged."""
    return (x.dtype, *x.shape) if isinstance(x, Tensor) else x


def kinds_of_blocks(
    cfg: config.Config, world: World, on_gpu: bool, blocks: int
) -> list[Kind] | None:
    """The kind of each block of a model with `blocks` blocks.

    A kind consists of the operators of the block's forward on the meta device, its parameters, and
    how the options treat it. None if the model does not run on meta tensors.
    """
    p = cfg.parallel
    operators = Operators()
    with contextlib.ExitStack() as stack:
        for patch in flex_attention_patches(operators) if on_gpu else ():
            stack.enter_context(patch)
        try:
            model = meta_model(replace(cfg.model, n_layers=blocks), cfg.lora)
            replicated = replicated_parameters(model, p)
            if world.cp > 1:
                # simulate() has loaded it before the patches
                from parallel.context import apply_context_parallelism

                apply_context_parallelism(model, cfg.train.seq_len, world)
            operators_of_block = forward_operators(model, cfg, world, operators)
        except Exception:
            # A fork's block may need more than meta tensors. Then every block runs, and a real
            # problem raises its error there.
            return None
    kinds = []
    for i, (calls, block) in enumerate(zip(operators_of_block, model.blocks)):
        parameters = [
            (name, param.dtype, param.shape, param.requires_grad, param in replicated)
            for name, param in named_parameters(block)
        ]
        dtypes = unit_dtypes(p, f"blocks.{i}")
        checkpointed = is_checkpointed(p.recompute, i)
        kinds.append((calls, dtypes, checkpointed, *parameters))
    return kinds


def forward_operators(
    model: Llama, cfg: config.Config, world: World, operators: Operators
) -> list[tuple[str, ...]]:
    """The operators of each block's forward of one sequence, on the meta device."""
    calls_of_block = []

    def begin_block(block: nn.Module, args: tuple) -> None:
        operators.calls.clear()

    def end_block(block: nn.Module, args: tuple, output: Any) -> None:
        calls_of_block.append(tuple(operators.calls))

    for block in model.blocks:
        block.register_forward_pre_hook(begin_block)
        block.register_forward_hook(end_block)
    # skip the head: only the blocks matter
    model.head.forward = lambda x, *unused, **options: x
    tokens = torch.zeros(1, cfg.train.seq_len // world.cp, dtype=torch.int64, device="meta")
    parameters = cast_parameters(model, getattr(torch, cfg.parallel.param_dtype))
    with torch.no_grad(), operators:
        functional_call(model, parameters, tokens)
    return calls_of_block


def shortened(
    kinds_of: Callable[[int], list[Kind] | None], blocks: int, edge: int
) -> Shorter | None:
    """A model of fewer blocks whose repeated middle gives all blocks; None if there is none.

    kinds_of(n) returns the kinds in a model of n blocks. `edge` blocks at either end, and the first
    block, cannot represent others.
    """
    if blocks <= 2 * edge + 3:
        return None
    kinds = kinds_of(blocks)
    if kinds is None:
        return None
    period = period_of(kinds)
    if period is None:
        return None
    # both edges, the first block, the middle, and the same number of blocks after it
    fewer = 2 * edge + 1 + 2 * period
    # only full periods may be left out
    fewer += (blocks - fewer) % period
    if fewer >= blocks:
        return None
    middle = range(edge + 1, edge + 1 + period)
    after_middle = middle.stop + blocks - fewer
    if kinds_of(fewer) != kinds[: middle.stop] + kinds[after_middle:]:
        return None
    return Shorter(fewer, middle)


def period_of(kinds: list[Kind]) -> int | None:
    """The number of blocks after which the kinds repeat; None if they don't.

    The first block may differ, because no unit is prefetched past it.
    """
    for period in range(1, len(kinds) // 2):
        if kinds[1:-period] == kinds[1 + period :]:
            return period
    return None


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters by name, in the dtype of computation, since grouped_mm() needs bfloat16."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameters[name] = parameter.detach().to(dtype)
    return parameters
