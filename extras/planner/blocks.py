"""Which blocks of a model are alike: these need not all run in a plan."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import config
from extras.planner.masks import flex_attention_patches
from model.build import meta_model
from model.llama import named_parameters
from parallel.activation_checkpoint import cast_parameters, is_checkpointed
from parallel.fsdp import replicated_parameters, unit_dtypes
from parallel.mesh import World

Kind = tuple  # equal for blocks that are alike


class Shorter(NamedTuple):
    blocks: int
    middle: range  # its blocks that stand for those left out; as many that are alike follow


class Operators(TorchDispatchMode):
    """Lists the operators that run, with shapes instead of tensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.share, self.by_data = None, False  # of the attention that runs, see Counted

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_map(
            lambda x: (x.dtype, *x.shape) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        self.found.append(f"{operator} {self.share} {given}")
        return operator(*args, **kwargs)


def kinds_of_blocks(
    cfg: config.Config, world: World, on_gpu: bool, blocks: int
) -> list[Kind] | None:
    """What tells each of so many blocks from others: the operators of its forward, on the meta device, and its
    parameters and their treatment. None if it does not run there."""
    p, operators, kinds = cfg.parallel, Operators(), []
    sizes = replace(cfg.model, n_layers=blocks)
    if world.cp > 1:
        from parallel.context import apply_context_parallelism
    with contextlib.ExitStack() as stack:
        for patch in flex_attention_patches(operators) if on_gpu else ():
            stack.enter_context(patch)
        try:
            model = meta_model(sizes, cfg.lora)
            replicated = replicated_parameters(model, p)
            if world.cp > 1:
                # pyrefly: ignore[unbound-name]  # imported above, under the same condition
                apply_context_parallelism(model, p.recompute, cfg.train.seq_len, world)
            model.head.forward = lambda x, *unused, **options: x
            for block in model.blocks:
                block.register_forward_pre_hook(lambda *unused: operators.found.clear())
                block.register_forward_hook(lambda *unused: kinds.append((*operators.found,)))
            tokens = torch.zeros(1, cfg.train.seq_len // world.cp, dtype=torch.int64, device="meta")
            with torch.no_grad(), operators:
                functional_call(
                    model, cast_parameters(model, getattr(torch, p.param_dtype)), tokens
                )
        except (
            Exception
        ):  # a fork's block may need more than meta tensors; then every block runs, and shows why
            return None
    return [
        (
            kind,
            unit_dtypes(p, f"blocks.{i}"),
            is_checkpointed(p.recompute, i),
            *(
                (name, param.dtype, param.shape, param.requires_grad, param in replicated)
                for name, param in named_parameters(block)
            ),
        )
        for i, (kind, block) in enumerate(zip(kinds, model.blocks))
    ]


def shortened(kinds: Callable[[int], list[Kind] | None], blocks: int, edge: int) -> Shorter | None:
    """A model of fewer blocks whose middle, repeated, gives all blocks; None if there is none. kinds: of a model of so
    many blocks. edge: blocks at either end, besides one, that none stands for."""
    if blocks <= 2 * edge + 3 or not (every := kinds(blocks)):
        return None
    for period in range(1, blocks // 2):
        if every[1:-period] == every[1 + period :]:
            # the first block may differ: no unit is prefetched past it
            break
    else:
        return None
    few = 2 * edge + 1 + 2 * period
    few += (blocks - few) % period
    middle = range(edge + 1, edge + 1 + period)
    if few >= blocks or kinds(few) != every[: middle.stop] + every[middle.stop + blocks - few :]:
        return None
    return Shorter(few, middle)
