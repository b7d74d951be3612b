"""Parallelizes a plain model: the order of the steps, on one screen, with the reason for each."""

import torch

import config
from model.llama import Llama
from parallel.activation_checkpoint import apply_activation_checkpointing, check_matmul_order
from parallel.fsdp import apply_fsdp
from parallel.mesh import World


def parallelize(model: Llama, cfg: config.Config, world: World) -> None:
    """Parallelizes a model on the meta device, in place. Call materialize() afterwards for storage and values."""
    # While the model is plain: does a block call its matmuls in the order that selective checkpointing counts on?
    if cfg.parallel.recompute in config.SELECTIVE:
        check_matmul_order(model, cfg.parallel.recompute, cfg.train.seq_len)

    # 0. Choose the matrices that multiply in float8: this changes what a block computes and what FSDP2 all-gathers.
    if cfg.parallel.float8 != "none":
        from extras.float8.all_gather import apply_float8

        apply_float8(model, cfg.parallel, world.device.type)

    # 1. Tensor and context parallelism change what a block computes, so they come before the steps that wrap, compile
    #    and shard it. FSDP2 shards each weight's local tp shard further.
    if world.tp > 1:
        from parallel.tensor import apply_tensor_parallelism

        apply_tensor_parallelism(model, cfg.parallel.recompute, world)
    if world.cp > 1:
        from parallel.context import apply_context_parallelism

        apply_context_parallelism(model, cfg.parallel.recompute, cfg.train.seq_len, world)

    # 2. Activation checkpointing next: its wrapper is compiled and sharded with the block. Wrapped around a sharded
    #    block instead, recomputation would run the unit's FSDP hooks again.
    apply_activation_checkpointing(model, cfg.parallel.recompute)

    # 3. Compile each block in place: all layers share one compiled graph, parameter names do not change, and the
    #    all-gathers stay between blocks, where computation can hide them. In the head, only the elementwise part of
    #    the chunked cross entropy is compiled.
    if cfg.parallel.compile:
        # Blocks that differ in dtype or in frozen parameters are recompilations of one graph, each with and without
        # gradients. torch's default limit is 8.
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(fullgraph=True)
        model.head.compile_loss = True

    # 4. FSDP2 last: it replaces parameters by new objects (DTensors), and materialize() those once more. Build whatever
    #    holds parameters, such as the optimizer, after both.
    apply_fsdp(model, cfg.parallel, world)
