"""Counts what a compiled training step does, without a GPU: on fake tensors, which have no values.

    python -m benchmarks.counted_step
    python -m benchmarks.counted_step configs/llama8b.toml --json

Of a block, for each setting of parallel.recompute: the matmuls in the graphs that torch.compile
makes of it, what the graphs save for backward, and what backward recomputes. With and without a
document mask (here one document). A graph break is an error.

With torch's CUDA build, also what Inductor generates from these graphs for an H100: Triton kernels,
and the bytes that these read and write, each argument once. The same for the part of the loss
between its matmuls.
"""

import argparse
import json
import logging
import pathlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask

import config
from benchmarks import count
from config import ConfigError
from model.attention import mask_mod
from model.llama import Llama, rope_tables
from model.loss import Shard, loss_and_gradient
from parallel.activation_checkpoint import (
    LINEAR_MATMULS,
    apply_activation_checkpointing,
    is_attention,
)
from parallel.parallelize import compile_block, leave_to_compiler

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
MODELS = ("llama1b", "llama3b", "llama8b", "llama70b")
SETTINGS = ("none", "elementwise", "selective", "full")
LOSS_TOKENS = 2048
# What Inductor asks of an H100 SXM: https://docs.nvidia.com/cuda/hopper-tuning-guide
H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
)


@contextmanager
def collected_graphs() -> Iterator[tuple[list[GraphModule], list[GraphModule]]]:
    """(graphs of forward, graphs of backward) that torch.compile hands to Inductor within."""
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    forwards: list[GraphModule] = []
    backwards: list[GraphModule] = []

    def compiler(graphs: list[GraphModule]) -> Callable:
        def collect(graph: GraphModule, example_inputs: list) -> Callable:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return collect

    def partition(
        joint: GraphModule, joint_inputs: list, **options
    ) -> tuple[GraphModule, GraphModule]:
        compile_fx._recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(
            joint, joint_inputs, compiler="inductor", **options
        )

    backend = aot_autograd(
        fw_compiler=compiler(forwards),
        bw_compiler=compiler(backwards),
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
    torch._dynamo.reset()
    # Attention could draw random numbers. But there is no dropout, and so no random state to save.
    with (
        mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", return_value=False),
        mock.patch("torch.compile", partial(torch.compile, backend=backend)),
    ):
        yield forwards, backwards


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The kernel that torch takes on an H100 for causal attention. Its outputs' shapes are known on
    any device."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


def block_graphs(
    m: config.Model, tokens: int, setting: str, documents: bool
) -> tuple[list[GraphModule], list[GraphModule]]:
    """Forward and backward of a bfloat16 block on one sequence, compiled as in training."""
    # FlexAttention refuses gradients on a CPU, which has no kernel for them; a trace needs none.
    with (
        FakeTensorMode(),
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", cudnn_attention),
    ):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(replace(m, n_layers=1))
        torch.set_default_dtype(torch.float32)
        apply_activation_checkpointing(model, leave_to_compiler(setting), compiled=True)
        x = torch.empty(1, tokens, m.dim, dtype=torch.bfloat16, requires_grad=True)
        mask = None
        if documents:
            rule = mask_mod(torch.zeros(1, tokens, dtype=torch.long))
            mask = create_block_mask(rule, 1, None, tokens, tokens, device="cpu")
        block = model.blocks[0]
        with collected_graphs() as graphs:
            compile_block(block)
            block(x, *rope_tables(m, torch.arange(tokens)), mask).sum().backward()
    return graphs


def products(graphs: list[GraphModule]) -> list[torch.fx.Node]:
    return [node for graph in graphs for node in graph.graph.nodes if node.target in LINEAR_MATMULS]


def product_flops(graphs: list[GraphModule]) -> int:
    flops = 0
    for node in products(graphs):
        a, b = node.args[-2:]
        rows, inner = a.meta["val"].shape
        _, columns = b.meta["val"].shape
        flops += 2 * rows * inner * columns
    return flops


def kept_bytes(forwards: list[GraphModule], x_shape: tuple[int, ...]) -> int:
    """Bytes of a block's saved tensors, each storage once. Of a graph's inputs only x counts:
    parameters, rotary tables and mask exist anyway, once for all layers."""
    total = 0
    for forward in forwards:
        inputs = set()
        for node in forward.graph.find_nodes(op="placeholder"):
            if node.meta["val"].shape != x_shape:
                inputs.add(node.meta["val"].untyped_storage())
        _, *saved = forward.graph.output_node().args[0]
        storages = {node.meta["val"].untyped_storage() for node in saved}
        total += sum(storage.nbytes() for storage in storages - inputs)
    return total


def count_block(m: config.Model, tokens: int, setting: str, documents: bool) -> dict:
    forwards, backwards = block_graphs(m, tokens, setting, documents)
    # backward itself takes two matmuls for each of forward
    recomputed = (product_flops(backwards) - 2 * product_flops(forwards)) // tokens
    # half of all pairs, as attention is causal
    attentions = sum(is_attention(node.target) for graph in backwards for node in graph.graph.nodes)
    recomputed += attentions * 2 * tokens * m.n_heads * m.width_per_head
    return {
        "recompute": setting,
        "document_mask": documents,
        "products_forward": len(products(forwards)),
        "products_backward": len(products(backwards)),
        "kept_bytes_per_token": kept_bytes(forwards, (1, tokens, m.dim)) // tokens,
        "recomputed_flops_per_token": recomputed,
    }


def lacking() -> str | None:
    """What Inductor needs and does not find here."""
    if torch.version.cuda is None:
        return (
            "needs torch's CUDA build (as pip installs torch on Linux x86), "
            f"this is {torch.__version__}"
        )
    if not torch.utils._triton.has_triton_package():
        return "needs Triton"
    return None


@contextmanager
def pretended_h100() -> Iterator[None]:
    """Within, Inductor generates code for an H100, whatever is there."""
    from torch._dynamo.device_interface import CudaInterface

    answers = {
        "get_device_properties": H100,
        "get_compute_capability": 90,
        "is_available": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "current_device": 0,
    }
    with (
        mock.patch.multiple(
            CudaInterface, **{name: lambda *_, a=a: a for name, a in answers.items()}
        ),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", lambda *_: H100),
        mock.patch.object(CudaInterface.Worker, "current_device", lambda: 0),
        mock.patch.multiple(
            torch.cuda,
            get_device_properties=lambda *_: H100,
            current_device=lambda: 0,
            get_device_capability=lambda *_: (9, 0),
        ),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: "none"),
    ):
        torch.utils._triton.has_triton.cache_clear()  # it may have said no before
        yield


def count_kernels(graph: GraphModule) -> Counter:
    """Kernels that Inductor generates from a graph, and the bytes that these move, between matmuls
    and attention."""
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cuda:0"))
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with (
        FakeTensorMode() as fake,
        pretended_h100(),
        V.set_fake_mode(fake),
        V.set_debug_handler(DebugContext()),
    ):
        inputs = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cuda:0") for v in values
        ]
        compile_fx.view_to_reshape(graph)
        FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code = lowering.codegen()[0].value
            # matmuls and attention; no kernel at all
            not_generated = (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode)
            moved = 0
            for node in lowering.scheduler.nodes:
                if not isinstance(node, not_generated):
                    moved += node.get_read_write_buffers_sizes()
    return Counter(
        products=len(products([graph])),
        triton=len(re.findall(r"^\s*triton_\w+\.run\(", code, re.M)),
        bytes=moved,
    )


def count_inductor(m: config.Model, tokens: int, setting: str) -> dict:
    forwards, backwards = block_graphs(m, tokens, setting, False)
    forward = sum(map(count_kernels, forwards), Counter())
    backward = sum(map(count_kernels, backwards), Counter())
    return {"recompute": setting, "forward": forward, "backward": backward}


def count_loss(vocabulary: int) -> list[dict]:
    """What lies between the matmuls of model/loss.py's chunk of LOSS_TOKENS, in bfloat16."""
    with FakeTensorMode():
        logits = torch.empty(LOSS_TOKENS, vocabulary, dtype=torch.bfloat16)
        targets = {"targets": torch.empty(LOSS_TOKENS, dtype=torch.long)}
        shard = Shard(vocabulary, 0)
        with collected_graphs() as (graphs, _):
            torch.compile(loss_and_gradient, fullgraph=True)(logits, targets, shard)
    (graph,) = graphs
    return [{"function": loss_and_gradient.__name__, **count_kernels(graph)}]


def table(head: str, rows: list[tuple]) -> str:
    """Columns as wide as their longest cell. head: the columns' names, separated by " | "."""
    lines = [head.split(" | ")]
    for row in rows:
        lines.append([str(cell) for cell in row])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        padded.append("  ".join(cells))
    return "\n".join(padded)


def show(counts: dict) -> str:
    paragraphs = [show_blocks(counts["blocks"])]
    if counts["lacking"]:
        paragraphs.append(f"Inductor's kernels are not counted: {counts['lacking']}")
    else:
        paragraphs.append(show_inductor(counts["inductor"]))
        paragraphs.append(show_loss(counts["loss"]))
    return "\n\n".join(paragraphs)


def show_blocks(blocks: list[dict]) -> str:
    kept_by_none = {}  # bytes without activation checkpointing, by (model, document mask)
    for row in blocks:
        if row["recompute"] == "none":
            kept_by_none[row["model"], row["document_mask"]] = row["kept_bytes_per_token"]
    lines = []
    for row in blocks:
        kept = row["kept_bytes_per_token"]
        lines.append(
            (
                row["model"],
                row["recompute"],
                "yes" if row["document_mask"] else "no",
                row["products_forward"],
                row["products_backward"],
                f"{kept:,}",
                f"{100 * kept / kept_by_none[row['model'], row['document_mask']]:.1f}",
                f"{row['recomputed_flops_per_token'] / 1e6:,.1f}",
            )
        )
    return table(
        "model | recompute | document mask | products forward | backward | kept bytes/token "
        "| of none, % | recomputed MFLOP/token",
        lines,
    )


def show_inductor(inductor: list[dict]) -> str:
    lines = []
    for row in inductor:
        cells = [row["model"], row["recompute"]]
        for graph in (row["forward"], row["backward"]):
            cells += [graph["products"], graph["triton"], f"{graph['bytes'] / 1e9:.2f}"]
        lines.append(tuple(cells))
    return table(
        "model | recompute | forward: products | triton | GB | backward: products | triton | GB",
        lines,
    )


def show_loss(loss: list[dict]) -> str:
    total = sum(row["bytes"] for row in loss)
    functions = [f"{row['function']} {row['bytes'] / 1e9:.2f} GB ({row['triton']})" for row in loss]
    return (
        f"loss, {LOSS_TOKENS} tokens, bfloat16, between the products: {total / 1e9:.2f} GB in "
        + ", ".join(functions)
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "configs", nargs="*", default=[str(CONFIGS / f"{name}.toml") for name in MODELS]
    )
    parser.add_argument("--tokens", type=count, default=8192, help="of one sequence")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch._logging.set_logs(all=logging.ERROR)
    models = {}
    try:
        for path in args.configs:
            models[pathlib.Path(path).stem] = config.load(path, ["--run.device=auto"]).model
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    counts = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "tokens": args.tokens,
        "lacking": lacking(),
        "blocks": [],
    }
    cases = [(name, setting) for name in models for setting in SETTINGS]
    for name, setting in cases:
        for documents in (False, True):
            block = count_block(models[name], args.tokens, setting, documents)
            counts["blocks"].append({"model": name, **block})
    if not counts["lacking"]:
        counts["inductor"] = []
        for name, setting in cases:
            kernels = count_inductor(models[name], args.tokens, setting)
            counts["inductor"].append({"model": name, **kernels})
        counts["loss"] = count_loss(max(m.vocab_size for m in models.values()))
    print(json.dumps(counts) if args.json else show(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
