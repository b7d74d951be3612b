"""LoRA: low-rank adapters (https://arxiv.org/abs/2106.09685) next to frozen weights.

A projection W computes W x + alpha / rank B A x. The base W keeps its name, `q_proj.weight`, and has no gradient and
no optimizer state. A and B are `q_proj.lora_a.weight` and `q_proj.lora_b.weight`, in float32 like all trainable
parameters. Checkpoints hold only the adapters, and identify the base by a hash of its weights (huggingface/weights.py).
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

import config
from model import nf4
from model.llama import Linear, Llama


class Projection(Linear):
    """A frozen projection, with an adapter or without."""

    # the dimension of `weight` that each shares, for tensor parallelism
    parts: ClassVar = {"lora_a": 1, "lora_b": 0, "scales": 0}

    def __init__(self, inputs: int, outputs: int, lora: config.Lora, init_std: float, adapted: bool):
        super().__init__(inputs, outputs, init_std)
        self.scales: nn.Parameter | None = None
        self.first_input = 0  # of the local input features, set by parallel/tensor.py
        if lora.base_dtype == "nf4":
            self.weight = nn.Parameter(torch.empty(outputs, inputs // 2, dtype=torch.uint8), requires_grad=False)
            self.scales = nn.Parameter(torch.empty(outputs, nf4.scale_bytes(inputs), dtype=torch.uint8), False)
        else:
            self.weight = nn.Parameter(self.weight.to(getattr(torch, lora.base_dtype)), requires_grad=False)
        self.lora_a = self.lora_b = None
        if adapted:  # A is random, with the std of the authors' code; B is 0, so that training starts from the base
            self.lora_a = Linear(inputs, lora.rank, init_std=1 / math.sqrt(3 * inputs))
            self.lora_b = Linear(lora.rank, outputs, init_std=0.0)
            self.lora_scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            base = super().forward(x)
        else:
            first = self.first_input // nf4.BLOCK
            base = nf4.product(x, self.weight, self.scales, first, torch.compiler.is_compiling())
        return base if self.lora_a is None else base + self.lora_b(self.lora_scale * self.lora_a(x))

    @torch.no_grad()
    def merged(self, base: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """W + alpha / rank B A in float32: W is the base's float32 weight, rounded or quantized as in training; A and B
        are read("lora_a") and read("lora_b")."""
        if self.scales is None:
            kept = base.to(self.weight.dtype).float()
        else:
            kept = nf4.dequantize(nf4.codes_of(base), nf4.scales_of(base), torch.float32)
        return kept if self.lora_a is None else torch.addmm(kept, read("lora_b"), read("lora_a"), alpha=self.lora_scale)


def add_adapters(model: Llama, lora: config.Lora) -> None:
    """Freezes a model in place, converts it to the base's dtype (with NF4: bfloat16 for all but the blocks'
    projections), and adds an adapter to each projection in `targets`."""
    dtype = torch.bfloat16 if lora.base_dtype == "nf4" else getattr(torch, lora.base_dtype)
    model.to(dtype).requires_grad_(False)
    for block in model.blocks:
        for module in (block.attention, block.feed_forward):
            for name, child in list(module.named_children()):
                setattr(module, name, Projection(child.in_features, child.out_features, lora, child.init_std,
                                                 name in lora.targets))


def is_adapter(name: str) -> bool:
    return ".lora_" in name
