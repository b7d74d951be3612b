"""A GPU's code paths on fake tensors: patches that select them, and that count what is compiled as if it were compiled.

Attention, masks and loss differ on a CPU. A compiled block runs eagerly but is counted as Inductor would run it: matrix
products, attention and collectives write their outputs, and float32 intermediates stay in registers. Without activation
checkpointing it also saves the products' inputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

import config
from extras.planner.counted import FORMULAS, Counted
from extras.planner.masks import everywhere, flex_attention_patches
from model.llama import Llama
from model.loss import CHUNK
from parallel.activation_checkpoint import (
    apply_activation_checkpointing,
    checkpoint_selectively,
    is_checkpointed,
)


def gpu_code_paths(cfg: config.Config, counted: Counted) -> list:
    """Patches that select the GPU's code paths, and count what cfg compiles as if it were compiled."""
    p = cfg.parallel
    patches = [
        mock.patch.object(FakeTensor, "is_cuda", True),
        mock.patch("torch.addmm", partial(wide_addmm, counted)),
        mock.patch.dict(CHUNK, cpu=CHUNK["cuda"]),
        *flex_attention_patches(counted),
    ]
    if p.float8 != "none":
        from extras.float8.all_gather import use_float8  # loaded before it is patched

        patches += [
            *everywhere({use_float8: lambda blocks, recipe, _: use_float8(blocks, recipe, "cuda")}),
            mock.patch(
                "extras.float8.all_gather.compiled", partial(partial, one_kernel, counted)
            ),  # a GPU's float8 always is
        ]
    if p.compile:
        patches += [
            mock.patch(
                "parallel.parallelize.apply_activation_checkpointing",
                partial(keep_products, counted),
            ),
            # a block that is not checkpointed does not repeat its all-gathers in backward either
            *(
                mock.patch(f"parallel.{room}.is_checkpointed", lambda *unused: True)
                for room, degree in (("tensor", p.tp), ("context", p.cp))
                if degree > 1
            ),
            mock.patch("model.loss.compiled", partial(partial, one_kernel, counted)),
        ]
    return patches


def one_kernel(counted: Counted, function: Callable, *args: Any) -> Any:
    """function(*args) as one compiled kernel, which does not materialize intermediates."""
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        result = counted.unseen(function, *args)
    counted.phases[-1].work["moved"] += sum(
        t.nbytes for t in tree_iter((args, result)) if isinstance(t, Tensor)
    )
    counted.mark(tree_iter(result), "working memory")
    return result


def wide_addmm(counted: Counted, total: Tensor, a: Tensor, b: Tensor, **unused: Any) -> Tensor:
    """The loss's torch.addmm() with out_dtype and out=total, for which torch 2.11 cannot infer shapes."""
    counted.multiply(torch.ops.aten.mm.default, (a, b), total)
    return total


def keep_products(counted: Counted, model: Llama, setting: str | int) -> None:
    """apply_activation_checkpointing() for compiled blocks. A block that it leaves alone saves what "elementwise"
    saves, and the products' inputs (watch). Its backward recomputes the rest, but repeats no collective."""

    def recomputing(flag: bool) -> Callable:
        return lambda *unused: setattr(
            counted, "recomputing", flag and counted.phases[-1].name.startswith("backward")
        )

    apply_activation_checkpointing(model, setting)
    for i in [i for i in range(len(model.blocks)) if not is_checkpointed(setting, i)]:
        model.blocks[i].register_forward_pre_hook(recomputing(True))
        model.blocks[i].register_forward_hook(recomputing(False), always_call=True)
        model.blocks[i] = checkpoint_selectively(model.blocks[i], "elementwise", FORMULAS)
        model.blocks[i].keeps_inputs = True
