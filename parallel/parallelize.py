"""Parallelizes a plain model: each step in order, with the reason for its place in that order."""

import torch
import torch._functorch.config
from torch import nn

import config
from model.llama import Llama
from parallel.fsdp import apply_fsdp
from parallel.mesh import World
from parallel.verify import refuse_hooks

HALVES = ("add_attention", "add_feed_forward")  # of Block.forward()


def parallelize(model: Llama, cfg: config.Config, world: World) -> None:
    """Parallelizes a model on the meta device, in place. Call materialize() afterwards.

    Raises ConfigError for a model that an option cannot parallelize.
    """
    p = cfg.parallel
    recompute = p.recompute
    if p.compile:
        has_collectives = world.tp > 1 or world.cp > 1
        recompute = leave_to_compiler(recompute, has_collectives)

    refuse_hooks(model)  # of the parameters that the steps below replace

    # 1. Float8 changes what a linear layer computes, and what FSDP2 all-gathers for it.
    if p.float8 != "none":
        from extras.float8.all_gather import apply_float8

        apply_float8(model, p, world.device.type)

    # 2. Tensor and context parallelism change what a block computes, so they precede the steps
    #    that wrap, compile and shard the block. FSDP2 shards the local tp shards further.
    if world.tp > 1:
        from parallel.tensor import apply_tensor_parallelism

        apply_tensor_parallelism(model, world)
    if world.cp > 1:
        from parallel.context import apply_context_parallelism

        apply_context_parallelism(model, cfg.train.seq_len, world)

    # 3. Activation checkpointing precedes FSDP2. Wrapped around a sharded block instead, the
    #    recomputation would run FSDP2's hooks a second time.
    if recompute != "none":
        from parallel.activation_checkpoint import apply_activation_checkpointing

        apply_activation_checkpointing(model, recompute, p.compile)

    # 4. Compile each block in place. Activation checkpointing comes before, so that it is part of
    #    the graph. FSDP2 comes after, so that its hooks are not: all-gathers stay between the
    #    blocks, where computation hides them. All blocks share their graphs, and parameter names
    #    do not change. The head compiles its norm and the elementwise part of its chunked cross
    #    entropy.
    if p.compile:
        # Blocks with different dtypes or frozen parameters recompile the shared graphs, each with
        # and without gradients. torch allows 8 recompilations by default.
        torch.compiler.config.recompile_limit = 64
        for block in model.blocks:
            compile_block(block)
        model.head.norm.compile(fullgraph=True)
        model.head.compile_loss = True

    # 5. FSDP2 comes last: it replaces every parameter by a DTensor. materialize() replaces them
    #    once more, so build the optimizer after both.
    apply_fsdp(model, p, world)


def leave_to_compiler(recompute: str | int, has_collectives: bool = False) -> str | int:
    """The mode that is left for checkpoints in a compiled model; "elementwise" is not.

    has_collectives: whether blocks have some. The compiler never repeats collectives, but saves
    what they gather: then "elementwise" is left for checkpoints, too.

    torch.compile can recompute elementwise operations without a checkpoint, in kernels that
    backward runs anyway. Under a checkpoint it runs two kernels more for each block. By default it
    does neither: it saves the outputs of norms and of the activation function, which backward
    then only reads.
    """
    by_compiler = recompute == "elementwise" and not has_collectives
    # no option of torch.compile, and private; all versions have it
    torch._functorch.config.ban_recompute_materialized_backward = not by_compiler
    return "none" if by_compiler else recompute


def compile_block(block: nn.Module) -> None:
    """Compiles a block in place: as two halves if its forward only calls these, else whole.

    In one graph, Inductor sums the gradients of both norms' weights in one kernel, because both
    read the block's input; the kernels of each norm's backward then read the same tensors again.
    Two graphs save no more for backward: the input of the second half instead of what attention
    adds to it. A checkpoint's graph would save that input in addition. A fork's forward may do more
    between the halves, or not call them: the names that its code uses show which.
    """
    if type(block).forward.__code__.co_names != HALVES:
        block.compile(fullgraph=True)
        return
    for half in HALVES:
        setattr(block, half, torch.compile(getattr(block, half), fullgraph=True))
