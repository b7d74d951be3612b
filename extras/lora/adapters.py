"""LoRA: low-rank adapters (https://arxiv.org/abs/2106.09685) next to frozen weights.

A projection W computes W x + alpha / rank B A x. The base W keeps its name, `q_proj.weight`, and
has no gradient and no optimizer state. A and B are `q_proj.lora_a.weight` (rank, inputs) and
`q_proj.lora_b.weight` (outputs, rank), in float32 like all trainable parameters. Checkpoints store
only the adapters, and identify the base by a hash of its weights (extras/huggingface/weights.py).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import config
from model.llama import Linear, Llama


def add_adapters(model: Llama, lora: config.Lora) -> None:
    """Freezes a model in place and adds an adapter to each projection in `targets`.

    Converts the base to its dtype. With NF4 the blocks' projections are quantized, and all else is
    bfloat16.
    """
    quantized = lora.base_dtype == "nf4"
    base_dtype = torch.bfloat16 if quantized else getattr(torch, lora.base_dtype)
    model.to(base_dtype).requires_grad_(False)
    if quantized:
        from extras.lora.nf4 import quantize_projections

        for block in model.blocks:
            quantize_projections(block.attention)
            quantize_projections(block.feed_forward)
    for block in model.blocks:
        for module in (block.attention, block.feed_forward):
            for name, projection in module.named_children():
                if isinstance(projection, Linear) and name in lora.targets:
                    add_adapter(projection, lora)
    model.saved = "*.lora_?.weight"


def add_adapter(projection: Linear, lora: config.Lora) -> None:
    """Adds A and B to a projection.

    A is random, with the std of the authors' code. B is 0, so that training starts from the base.
    """
    inputs = projection.in_features
    projection.lora_a = Linear(inputs, lora.rank, init_std=1 / math.sqrt(3 * inputs))
    projection.lora_b = Linear(lora.rank, projection.out_features, init_std=0.0)
    projection.lora_scale = lora.scale
    projection.register_forward_hook(add_lora_output)
    # Tensor parallelism: A shares the projection's input features, B its output features.
    projection.sharded_with_weight = {**projection.sharded_with_weight, "lora_a": 1, "lora_b": 0}
    # Activation checkpointing: A x is small. B A x is as large as the base's output, but cheap to
    # recompute.
    projection.lora_a.keep_output = True
    projection.lora_b.keep_output = False


def add_lora_output(projection: Linear, inputs: tuple[Tensor], out: Tensor) -> Tensor:
    """Forward hook of a projection. One function for all, so that compiled blocks share a graph."""
    (x,) = inputs
    return out + projection.lora_b(projection.lora_scale * projection.lora_a(x))


@torch.no_grad()
def merged(module: nn.Module, base: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """W + alpha / rank B A in float32, or W if the module has no adapter.

    base is the float32 weight of W, which is rounded or quantized here as in training. A and B are
    read("lora_a") and read("lora_b").
    """
    if not isinstance(module, Linear):
        return base.to(module.weight.dtype).float()
    weight = module.rounded(base)
    if "lora_a" in dict(module.named_children()):
        weight = torch.addmm(weight, read("lora_b"), read("lora_a"), alpha=module.lora_scale)
    return weight
