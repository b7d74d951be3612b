"""Parallelizes a plain model, in steps whose order matters."""

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

    refuse_hooks(model)  # the steps below replace the parameters, and their hooks would be lost

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

    # 3. Activation checkpointing precedes FSDP2. If it wrapped a sharded block, recomputation would
    #    run FSDP2's hooks a second time.
    if recompute != "none":
        from parallel.activation_checkpoint import apply_activation_checkpointing

        apply_activation_checkpointing(model, recompute, p.compile)

    # 4. Compile each block in place. Activation checkpointing comes before, so that it is part of
    #    the graph. FSDP2 comes after, so that its hooks are not part of it: all-gathers stay between
    #    the blocks, where computation hides them. All blocks share their graphs, and parameter names
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
    """Leaves "elementwise" to the compiler. Returns the mode that remains for checkpoint wrappers.

    torch.compile can recompute elementwise operations without a checkpoint, in kernels that backward
    runs anyway. Under a checkpoint it runs two more kernels for each block. By default it does not
    recompute them: it saves the outputs of norms and of the activation function.

    has_collectives: whether blocks communicate. The compiler never repeats collectives but saves what
    they gather, so then "elementwise" uses checkpoints, too.
    """
    by_compiler = recompute == "elementwise" and not has_collectives
    # torch.compile has no option for this. All versions have this private one.
    torch._functorch.config.ban_recompute_materialized_backward = not by_compiler
    return "none" if by_compiler else recompute


def compile_block(block: nn.Module) -> None:
    """Compiles a block in place: as two halves if its forward only calls these, else as one graph.

    In one graph, Inductor sums the gradients of both norms' weights in one kernel, because both
    norms read the block's input. The kernels of each norm's backward then read the same tensors
    again. Two graphs save no more for backward: they save the input of the second half instead of
    what attention adds to it. Under a checkpoint they would save that input in addition, so a wrapped
    block is one graph. A fork's forward may do more between the halves, or not call them. The names
    that its code uses show this.
    """
    if type(block).forward.__code__.co_names != HALVES:
        block.compile(fullgraph=True)
        return
    for half in HALVES:
        setattr(block, half, torch.compile(getattr(block, half), fullgraph=True))
