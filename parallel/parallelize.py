"""How a plain model is parallelized: the order, on one screen, with the reason for each step."""

import torch

import config
from model.float8 import Product, use_float8
from model.llama import Llama
from model.lora import Projection
from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.context import apply_context_parallelism
from parallel.fsdp import apply_fsdp
from parallel.mesh import World
from parallel.tensor import apply_tensor_parallelism


def parallelize(model: Llama, cfg: config.Config, world: World) -> None:
    """Parallelizes a model on the meta device, in place. materialize() gives it storage and values afterwards."""
    # 0. Which matrices multiply in 8 bits: it changes what a block computes, and what FSDP2 gathers.
    use_float8(model.blocks, cfg.parallel.float8, world.device.type)

    # 1. Tensor and context parallelism first, as they change what a block computes: what follows wraps, compiles and
    #    shards the result. FSDP2 takes its shards of what tensor parallelism leaves this rank of a weight.
    apply_tensor_parallelism(model, cfg.parallel.recompute, world)
    apply_context_parallelism(model, cfg.parallel.recompute, cfg.train.seq_len, world)

    # 2. Activation checkpointing next: its wrapper becomes part of what is compiled and sharded. Around a sharded
    #    block, it would run that unit's hooks, and so its all-gather, a second time.
    apply_activation_checkpointing(model, cfg.parallel.recompute, world.tp)

    # 3. Compilation, block by block and in place: all layers share one compiled block, names stay as they are, and
    #    the all-gathers stay between the blocks, where computation can hide them. Of the head, what lies between the
    #    loss's matrix products.
    if cfg.parallel.compile:
        # Blocks that differ in dtype or in what is frozen are variants of one graph, each with and without gradients;
        # torch's limit is 8.
        torch._dynamo.config.recompile_limit = 64
        torch.compiler.allow_in_graph(Product)  # traced through by itself, torch 2.11 loses its gradients
        for block in model.blocks:
            for projection in block.modules():
                if isinstance(projection, Projection):
                    projection.compiled = True  # its weights from 4 bits, by one kernel
            block.compile(fullgraph=True)
        model.head.compile_loss = True

    # 4. Sharding last: parameters become new objects (DTensors). What holds parameters, as the optimizer does, is made
    #    after this.
    apply_fsdp(model, cfg.parallel, world)
