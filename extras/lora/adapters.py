"""LoRA: low-rank adapters (https://arxiv.org/abs/2106.09685) next to frozen weights.

A projection W computes W x + alpha / rank B A x. The base W keeps its name, `q_proj.weight`, and has no gradient and
no optimizer state. A and B are `q_proj.lora_a.weight` and `q_proj.lora_b.weight`, in float32 like all trainable
parameters. Checkpoints hold only the adapters, and identify the base by a hash of its weights
(extras/huggingface/weights.py).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import config
from model.llama import Linear, Llama


def add_adapters(model: Llama, lora: config.Lora) -> None:
    """Freezes a model in place, converts it to the base's dtype (with NF4: bfloat16 for all but the blocks'
    projections), and adds an adapter to each projection in `targets`."""
    in_nf4 = lora.base_dtype == "nf4"
    model.to(torch.bfloat16 if in_nf4 else getattr(torch, lora.base_dtype)).requires_grad_(False)
    for block in model.blocks:
        for module in (block.attention, block.feed_forward):
            for name, projection in [
                child for child in module.named_children() if isinstance(child[1], Linear)
            ]:
                if in_nf4:
                    from extras.lora.nf4 import NF4Linear

                    projection = NF4Linear(projection)
                    setattr(module, name, projection)
                if name in lora.targets:
                    add_adapter(projection, lora)
    model.saved = "*.lora_?.weight"


def add_adapter(projection: Linear, lora: config.Lora) -> None:
    """A is random, with the std of the authors' code; B is 0, so that training starts from the base."""
    inputs, outputs = projection.in_features, projection.out_features
    projection.lora_a = Linear(inputs, lora.rank, init_std=1 / math.sqrt(3 * inputs))
    projection.lora_b = Linear(lora.rank, outputs, init_std=0.0)
    projection.lora_scale = lora.scale
    projection.register_forward_hook(add_product)
    # For tensor parallelism: A shares the projection's input features, B its output features.
    projection.sharded_with_weight = {**projection.sharded_with_weight, "lora_a": 1, "lora_b": 0}
    # For activation checkpointing: A x is small. B A x is as large as the base's output but cheap to recompute.
    projection.lora_a.keep_output, projection.lora_b.keep_output = True, False


def add_product(projection: Linear, inputs: tuple[Tensor], out: Tensor) -> Tensor:
    """Forward hook of a projection. One function for all, so that compiled blocks share a graph."""
    return out + projection.lora_b(projection.lora_scale * projection.lora_a(*inputs))


@torch.no_grad()
def merged(module: nn.Module, base: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """W + alpha / rank B A in float32: W is the base's float32 weight, rounded or quantized as in training; A and B
    are read("lora_a") and read("lora_b")."""
    kept = (
        module.rounded(base) if hasattr(module, "rounded") else base.to(module.weight.dtype).float()
    )
    if not hasattr(module, "lora_a"):
        return kept
    return torch.addmm(kept, read("lora_b"), read("lora_a"), alpha=module.lora_scale)
