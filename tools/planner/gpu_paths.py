"""Patches that select a GPU's code paths on fake tensors, and count compiled code as compiled.

simulate.py enters these patches around a GPU's step. Attention, masks and loss differ on a CPU. A
compiled block runs eagerly here, but is counted as Inductor would run it: matmuls, attention and
collectives write their outputs, and float32 intermediates stay in registers. Without activation
checkpointing, a compiled block also saves the inputs of its matmuls.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

import config
from model.llama import Llama
from model.loss import CHUNK
from parallel.activation_checkpoint import (
    checkpoint_selectively,
    is_attention,
    is_checkpointed,
)
from parallel.fsdp import apply_fsdp
from parallel.mesh import World
from tools.planner.counted import FORMULAS, Counted
from tools.planner.masks import flex_attention_patches, patches_everywhere


def gpu_code_paths(cfg: config.Config, counted: Counted) -> list:
    """Patches that select the GPU's code paths, and count as compiled whatever cfg compiles."""
    patches = [
        mock.patch.object(FakeTensor, "is_cuda", True),
        mock.patch("torch.addmm", partial(wide_addmm, counted)),
        mock.patch.dict(CHUNK, cpu=CHUNK["cuda"]),
        *flex_attention_patches(counted),
    ]
    if cfg.parallel.float8 != "none":
        patches += float8_patches(counted)
    if cfg.parallel.compile:
        patches += compiled_patches(counted)
    else:
        policy = partial(is_saved_attention, counted)
        patches.append(mock.patch("parallel.activation_checkpoint.is_attention", policy))
    return patches


def float8_patches(counted: Counted) -> list:
    # import it before patching it
    from extras.float8.all_gather import use_float8

    def use_float8_on_gpu(blocks: Any, recipe: str, device_type: str) -> Any:
        return use_float8(blocks, recipe, "cuda")

    return [
        *patches_everywhere({use_float8: use_float8_on_gpu}),
        # on a GPU these functions are compiled even if parallel.compile is off
        mock.patch("extras.float8.all_gather.compiled", partial(partial, one_kernel, counted)),
    ]


def is_saved_attention(counted: Counted, operator: Any) -> bool:
    """is_attention() for eager blocks. FlexAttention, which has a mask, is compiled separately.
    Checkpointing policies do not see it, so backward recomputes it."""
    return counted.mask_share is None and is_attention(operator)


def compiled_patches(counted: Counted) -> list:
    return [
        mock.patch("parallel.parallelize.apply_fsdp", partial(save_matmuls, counted)),
        mock.patch("model.loss.compiled", partial(partial, one_kernel, counted)),
    ]


def one_kernel(counted: Counted, function: Callable, *args: Any) -> Any:
    """Counts function(*args) as one compiled kernel, which does not materialize intermediates."""
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        result = counted.run_uncounted(function, *args)
    tensors = [t for t in tree_iter((args, result)) if isinstance(t, Tensor)]
    counted.phases[-1].work["moved"] += sum(t.nbytes for t in tensors)
    counted.mark(tree_iter(result), "working memory")
    return result


def wide_addmm(counted: Counted, total: Tensor, a: Tensor, b: Tensor, **unused: Any) -> Tensor:
    """The loss's torch.addmm() with out_dtype and out=total. torch 2.11 has no fake implementation
    of it."""
    counted.count_matmul(torch.ops.aten.mm.default, (a, b), total)
    return total


def save_matmuls(counted: Counted, model: Llama, p: config.Parallel, world: World) -> None:
    """apply_fsdp() for blocks that are counted as compiled.

    Without activation checkpointing, a compiled block saves what "elementwise" saves, and also the
    inputs of its matmuls (PhaseHooks in simulate.py). So this checkpoints the eager block with
    "elementwise". Backward then recomputes the rest, but counts no collective twice.
    """
    for i, block in enumerate(model.blocks):
        if is_checkpointed(p.recompute, i):
            continue
        block.register_forward_pre_hook(partial(begin_recomputation, counted))
        block.register_forward_hook(partial(end_recomputation, counted), always_call=True)
        model.blocks[i] = checkpoint_selectively(block, "elementwise", False, FORMULAS)
        counted.saving_blocks.add(model.blocks[i])
    apply_fsdp(model, p, world)


def begin_recomputation(counted: Counted, block: nn.Module, args: tuple) -> None:
    counted.recomputing = counted.phases[-1].name.startswith("backward")


def end_recomputation(counted: Counted, block: nn.Module, args: tuple, output: Any) -> None:
    counted.recomputing = False
