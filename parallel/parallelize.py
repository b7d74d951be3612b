"""How a plain model is parallelized: the order, on one screen, with the reason for each step."""

import torch

import config
from model.llama import Llama
from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.fsdp import apply_fsdp
from parallel.mesh import World


def parallelize(model: Llama, cfg: config.Config, world: World) -> None:
    """Parallelizes a model on the meta device, in place. materialize() gives it storage and values afterwards."""
    # 1. Activation checkpointing first: its wrapper becomes part of what is compiled and sharded. Around a sharded
    #    block, it would run that unit's hooks, and so its all-gather, a second time.
    apply_activation_checkpointing(model, cfg.parallel.recompute)

    # 2. Compilation next, block by block and in place: all layers share one compiled block, names stay as they are, and
    #    the all-gathers stay between the blocks, where computation can hide them. Of the head, what lies between the
    #    loss's matrix products.
    if cfg.parallel.compile:
        # Blocks that differ in dtype or in what is frozen are variants of one graph, each with and without gradients;
        # torch's limit is 8.
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(fullgraph=True)
        model.head.compile_loss = True

    # 3. Sharding last: parameters become new objects (DTensors). What holds parameters, as the optimizer does, is made
    #    after this.
    apply_fsdp(model, cfg.parallel, world)
