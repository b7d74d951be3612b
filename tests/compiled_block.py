"""What a compiled block keeps for backward, by the graphs that torch.compile hands to Inductor, on fake tensors."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import config
from model.llama import Llama, rope_tables
from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.parallelize import compile_block, leave_to_compiler


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The kernel that torch takes on an H100 for causal attention. Its outputs' shapes are known on any device."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    compile_fx._recursive_joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def kept_bytes_per_token(
    m: config.Model, tokens: int, setting: str, make_model: Callable = Llama
) -> int:
    """Of a bfloat16 block on one sequence: saved tensors, each storage once. Of a graph's inputs only x counts, since
    parameters and rotary tables exist anyway. setting: parallel.recompute."""
    forwards: list[GraphModule] = []

    def collect(graph: GraphModule, inputs: Any) -> Callable:
        forwards.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=collect,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
    torch._dynamo.reset()
    with (
        FakeTensorMode(),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", cudnn_attention),
        # attention could draw random numbers, but there is no dropout, and so no random state to save
        mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", return_value=False),
        mock.patch("torch.compile", partial(torch.compile, backend=backend)),
    ):
        torch.set_default_dtype(torch.bfloat16)
        model = make_model(replace(m, n_layers=1))
        torch.set_default_dtype(torch.float32)
        apply_activation_checkpointing(model, leave_to_compiler(setting), compiled=True)
        x = torch.empty(1, tokens, m.dim, dtype=torch.bfloat16, requires_grad=True)
        block = model.blocks[0]
        compile_block(block)
        block(x, *rope_tables(m, torch.arange(tokens)), None).sum().backward()
    total = 0
    for graph in forwards:
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        given = {t.untyped_storage() for t in inputs if t.shape != x.shape}
        outputs: Any = graph.graph.output_node().args[0]
        _, *saved = outputs
        storages = {node.meta["val"].untyped_storage() for node in saved} - given
        total += sum(storage.nbytes() for storage in storages)
    return total // tokens
