"""Parallelizes a plain model: each step in order, with the reason for its place in that order."""

import torch

import config
from model.llama import Llama
from parallel.activation_checkpoint import (
    apply_activation_checkpointing,
    check_matmul_order,
    leave_to_compiler,
)
from parallel.fsdp import apply_fsdp
from parallel.mesh import World


def parallelize(model: Llama, cfg: config.Config, world: World) -> None:
    """Parallelizes a model on the meta device, in place. Call materialize() afterwards.

    Raises ConfigError for a model that an option cannot parallelize.
    """
    p = cfg.parallel
    recompute = p.recompute
    if p.compile:
        has_collectives = world.tp > 1 or world.cp > 1
        recompute = leave_to_compiler(recompute, has_collectives)

    # Selective checkpointing identifies matmuls by their order in forward. The check of that order
    # needs the plain model.
    if recompute in config.SELECTIVE:
        check_matmul_order(model, recompute, cfg.train.seq_len)

    # 0. Float8 changes what a linear layer computes, and what FSDP2 all-gathers for it.
    if p.float8 != "none":
        from extras.float8.all_gather import apply_float8

        apply_float8(model, p, world.device.type)

    # 1. Tensor and context parallelism change what a block computes, so they precede the steps
    #    that wrap, compile and shard the block. FSDP2 shards the local tp shards further.
    if world.tp > 1:
        from parallel.tensor import apply_tensor_parallelism

        apply_tensor_parallelism(model, recompute, world)
    if world.cp > 1:
        from parallel.context import apply_context_parallelism

        apply_context_parallelism(model, recompute, cfg.train.seq_len, world)

    # 2. Activation checkpointing precedes FSDP2. Wrapped around a sharded block instead, the
    #    recomputation would run FSDP2's hooks a second time.
    apply_activation_checkpointing(model, recompute, p.compile)

    # 3. Compile each block in place. Activation checkpointing comes before, so that it is part of
    #    the graph. FSDP2 comes after, so that its hooks are not: all-gathers stay between the
    #    blocks, where computation hides them. All blocks share one graph, and parameter names do
    #    not change. The head compiles its norm and the elementwise part of its chunked cross
    #    entropy.
    if p.compile:
        # Blocks with different dtypes or frozen parameters recompile the shared graph, each with
        # and without gradients. torch allows 8 recompilations by default.
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(fullgraph=True)
        model.head.norm.compile(fullgraph=True)
        model.head.compile_loss = True

    # 4. FSDP2 comes last: it replaces every parameter by a DTensor. materialize() replaces them
    #    once more, so build the optimizer after both.
    apply_fsdp(model, p, world)
