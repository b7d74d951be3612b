"""Counts what a compiled training step does, without a GPU: all tensors are fakes, shapes without values.

    python -m benchmarks.counted_step
    python -m benchmarks.counted_step configs/llama8b.toml --json

A block, for each setting of parallel.recompute: the matrix products of the graphs that torch.compile makes of it, what
they keep for backward, and what backward computes a second time. With and without a document mask (here one document);
a graph break is an error.

With torch's CUDA build, also what Inductor makes of these graphs for an H100: Triton kernels, and the bytes that these
read and write, each argument once; the same for the part of the loss between its products.
"""

import argparse
import json
import logging
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from model.loss import logits_gradient, softmax_parts
from parallel.activation_checkpoint import (
    ATTENTION,
    LINEAR_MATMULS,
    apply_activation_checkpointing,
)

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


def graphs_of(function: Callable, *inputs: object) -> list[GraphModule]:
    """What torch.compile hands to Inductor: the graph of forward and, where there is a gradient, that of backward."""
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    found = []

    def compiler(graph: GraphModule, example_inputs: list) -> Callable:
        found.append(graph)
        return make_boxed_func(graph.forward)

    def partition(
        joint: GraphModule, joint_inputs: list, **options
    ) -> tuple[GraphModule, GraphModule]:
        compile_fx._recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(
            joint, joint_inputs, compiler="inductor", **options
        )

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
    torch._dynamo.reset()
    # Attention could draw random numbers, but there is no dropout, and so no random state to keep for recomputing it.
    with mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", return_value=False):
        out = torch.compile(function, fullgraph=True, backend=backend)(*inputs)
        if isinstance(out, Tensor) and out.requires_grad:
            out.sum().backward()
    return found


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The kernel that torch takes on an H100 for causal attention. Its outputs' shapes are known on any device."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


def block_graphs(
    m: config.Model, tokens: int, setting: str, documents: bool
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a bfloat16 block on one sequence."""
    # FlexAttention refuses gradients on a CPU, which has no kernel for them; a trace needs none.
    with (
        FakeTensorMode(),
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", cudnn_attention),
    ):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(replace(m, n_layers=1))
        torch.set_default_dtype(torch.float32)
        apply_activation_checkpointing(model, setting)
        x = torch.empty(1, tokens, m.dim, dtype=torch.bfloat16, requires_grad=True)
        rule = mask_mod(torch.zeros(1, tokens, dtype=torch.long))
        mask = create_block_mask(rule, 1, None, tokens, tokens, device="cpu") if documents else None
        forward, backward = graphs_of(
            model.blocks[0], x, *rope_tables(m, torch.arange(tokens)), mask
        )
    return forward, backward


def nodes(graph: GraphModule, operators: set) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.target in operators]


def product_flops(graph: GraphModule) -> int:
    shapes = [
        [argument.meta["val"].shape for argument in node.args[-2:]]
        for node in nodes(graph, LINEAR_MATMULS)
    ]
    return sum(2 * rows * inner * columns for (rows, inner), (_, columns) in shapes)


def kept_bytes(forward: GraphModule, x_shape: tuple[int, ...]) -> int:
    """Bytes of a block's saved tensors, each storage once. Of its inputs x alone: parameters, rotary tables and mask
    exist anyway, once for all layers."""
    inputs = {
        node.meta["val"].untyped_storage()
        for node in forward.graph.find_nodes(op="placeholder")
        if node.meta["val"].shape != x_shape
    }
    _, *saved = forward.graph.output_node().args[0]
    return sum(s.nbytes() for s in {node.meta["val"].untyped_storage() for node in saved} - inputs)


def count_block(m: config.Model, tokens: int, setting: str, documents: bool) -> dict:
    forward, backward = block_graphs(m, tokens, setting, documents)
    # half of all pairs: causal
    again = len(nodes(backward, ATTENTION)) * 2 * tokens * m.n_heads * m.width_per_head
    return {
        "recompute": setting,
        "document_mask": documents,
        "products_forward": len(nodes(forward, LINEAR_MATMULS)),
        "products_backward": len(nodes(backward, LINEAR_MATMULS)),
        "kept_bytes_per_token": kept_bytes(forward, (1, tokens, m.dim)) // tokens,
        # backward itself takes two products for one of forward
        "recomputed_flops_per_token": (product_flops(backward) - 2 * product_flops(forward))
        // tokens
        + again,
    }


def lacking() -> str | None:
    """What Inductor needs and does not find here."""
    if torch.version.cuda is None:
        return f"needs torch's CUDA build (as pip installs torch on Linux x86), this is {torch.__version__}"
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


def count_kernels(graph: GraphModule) -> dict:
    """Kernels that Inductor makes of a graph, and the bytes that its own ones, between products and attention, move."""
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
            # products, attention; none
            others = (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode)
            moved = sum(
                node.get_read_write_buffers_sizes()
                for node in lowering.scheduler.nodes
                if not isinstance(node, others)
            )
    return {
        "products": len(nodes(graph, LINEAR_MATMULS)),
        "triton": len(re.findall(r"^\s*triton_\w+\.run\(", code, re.M)),
        "bytes": moved,
    }


def count_inductor(m: config.Model, tokens: int, setting: str) -> dict:
    forward, backward = map(count_kernels, block_graphs(m, tokens, setting, False))
    return {"recompute": setting, "forward": forward, "backward": backward}


def count_loss(vocabulary: int) -> list[dict]:
    """What lies between the products of model/loss.py's chunk of LOSS_TOKENS, in bfloat16."""
    found = []
    with FakeTensorMode():
        logits = torch.empty(LOSS_TOKENS, vocabulary, dtype=torch.bfloat16)
        index, column = torch.empty(LOSS_TOKENS, 1, dtype=torch.long), torch.empty(LOSS_TOKENS, 1)
        traced = [
            (softmax_parts, graphs_of(softmax_parts, logits, index)),
            (logits_gradient, graphs_of(logits_gradient, logits, index, None, *[column] * 5)),
        ]
    for function, (graph,) in traced:
        found.append({"function": function.__name__, **count_kernels(graph)})
    return found


def table(head: str, rows: list[tuple]) -> str:
    columns = [
        *zip(*[head.split(" | "), *([str(cell) for cell in row] for row in rows)], strict=True)
    ]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    )


def show(counts: dict) -> str:
    none = {
        (r["model"], r["document_mask"]): r["kept_bytes_per_token"]
        for r in counts["blocks"]
        if r["recompute"] == "none"
    }
    parts = [
        table(
            "model | recompute | document mask | products forward | backward | kept bytes/token | of none, % | "
            "recomputed MFLOP/token",
            [
                (
                    r["model"],
                    r["recompute"],
                    "yes" if r["document_mask"] else "no",
                    r["products_forward"],
                    r["products_backward"],
                    f"{r['kept_bytes_per_token']:,}",
                    f"{100 * r['kept_bytes_per_token'] / none[r['model'], r['document_mask']]:.1f}",
                    f"{r['recomputed_flops_per_token'] / 1e6:,.1f}",
                )
                for r in counts["blocks"]
            ],
        )
    ]
    if counts["lacking"]:
        return "\n\n".join([*parts, f"Inductor's kernels are not counted: {counts['lacking']}"])
    parts.append(
        table(
            "model | recompute | forward: products | triton | GB | backward: products | triton | GB",
            [
                (
                    r["model"],
                    r["recompute"],
                    *(
                        cell
                        for way in (r["forward"], r["backward"])
                        for cell in (way["products"], way["triton"], f"{way['bytes'] / 1e9:.2f}")
                    ),
                )
                for r in counts["inductor"]
            ],
        )
    )
    total = sum(r["bytes"] for r in counts["loss"])
    parts.append(
        f"loss, {LOSS_TOKENS} tokens, bfloat16, between the products: {total / 1e9:.2f} GB in "
        + ", ".join(
            f"{r['function']} {r['bytes'] / 1e9:.2f} GB ({r['triton']})" for r in counts["loss"]
        )
    )
    return "\n\n".join(parts)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "configs", nargs="*", default=[str(CONFIGS / f"{name}.toml") for name in MODELS]
    )
    parser.add_argument("--tokens", type=count, default=8192, help="of one sequence")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch._logging.set_logs(all=logging.ERROR)
    try:
        models = {
            pathlib.Path(path).stem: config.load(path, ["--run.device=auto"]).model
            for path in args.configs
        }
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    cases = [(name, m, setting) for name, m in models.items() for setting in SETTINGS]
    counts = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "tokens": args.tokens,
        "lacking": lacking(),
        "blocks": [
            {"model": name, **count_block(m, args.tokens, setting, documents)}
            for name, m, setting in cases
            for documents in (False, True)
        ],
    }
    if not counts["lacking"]:
        counts["inductor"] = [
            {"model": name, **count_inductor(m, args.tokens, s)} for name, m, s in cases
        ]
        counts["loss"] = count_loss(max(m.vocab_size for m in models.values()))
    print(json.dumps(counts) if args.json else show(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
