"""What the parts of a step reach alone on this device, for benchmarks.gpu.

Each function takes a configuration, the process's World and the seconds that one timing may take.
It returns figures. Data is random, as matmuls of zeros draw less power, and so run faster.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from config import Config
from model.build import meta_model
from model.llama import parameter_count
from model.loss import chunked_cross_entropy
from optim import build_optimizer, clip_gradients, gradient_norm
from parallel.materialize import materialize
from parallel.mesh import World


def milliseconds(work: Callable, each: float) -> float:
    """Median of a call, after a first one that may compile."""
    work()
    return 1e3 * Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=each).median


def normal(world: World, *shape: int) -> Tensor:
    return torch.randn(shape, device=world.device, dtype=torch.bfloat16, requires_grad=True)


def heads(cfg: Config, world: World) -> list[Tensor]:
    """Queries (1, H, S, E), keys and values (1, K, S, E) of a sequence."""
    m = cfg.model
    tensors = []
    for n_heads in (m.n_heads, m.n_kv_heads, m.n_kv_heads):
        tensors.append(normal(world, 1, n_heads, cfg.train.seq_len, m.width_per_head))
    return tensors


def copy(cfg: Config, world: World, each: float) -> dict:
    """Bandwidth of a copy as large as an embedding in float32."""
    source = torch.empty(cfg.model.vocab_size * cfg.model.dim, device=world.device)
    ms = milliseconds(partial(torch.empty_like(source).copy_, source), each)
    return {"tb_per_second_read_and_written": 2 * source.nbytes / ms / 1e9}


def products(cfg: Config, world: World, each: float) -> dict:
    """TFLOP/s of each matmul of a model on one sequence, and the time of all layers' matmuls."""
    n = cfg.train.seq_len
    shapes = Counter()
    for name, p in meta_model(cfg.model).named_parameters():
        # a lookup is no matmul, but as the output head the embedding takes part in one
        is_lookup = name.startswith("embedding") and not cfg.model.tie_embeddings
        if p.ndim == 2 and not is_lookup:
            shapes[p.shape] += 1
    tflops = {}
    together = 0.0
    with torch.no_grad():
        for (rows, columns), count in shapes.items():
            weight = normal(world, rows, columns)
            x = normal(world, n, columns)
            gradient = normal(world, n, rows)  # of the output
            factors = {
                "forward": (x, weight.T),
                "dgrad": (gradient, weight),
                "wgrad": (gradient.T, x),
            }
            for kind, (a, b) in factors.items():
                ms = milliseconds(partial(torch.mm, a, b), each)
                tflops[f"{kind} {rows} x {columns}"] = 2 * n * rows * columns / ms / 1e9
                together += count * ms
    return {"tflops": tflops, "tokens": n, "milliseconds_together": together}


def attention(cfg: Config, world: World, each: float) -> dict:
    """TFLOP/s of each of torch's kernels, of which causal attention needs half of all pairs."""
    q, k, v = heads(cfg, world)
    flops = 2 * q.numel() * cfg.train.seq_len
    tflops = {}
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        try:
            with sdpa_kernel(backend):
                out = forward()
                backward = partial(
                    torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True
                )
                tflops[backend.name] = {
                    "forward": flops / milliseconds(forward, each) / 1e9,
                    "backward": 2.5 * flops / milliseconds(backward, each) / 1e9,
                }
        except RuntimeError as error:  # it takes no such inputs
            tflops[backend.name] = str(error).splitlines()[0]
    return {"tflops": tflops, "head_dim": cfg.model.width_per_head}


def loss(cfg: Config, world: World, each: float) -> dict:
    """The loss with its three matmuls, forward and backward, of one sequence and of two."""
    m = cfg.model
    times = {}
    weight = normal(world, m.vocab_size, m.dim)

    def step(x: Tensor, targets: Tensor, compile: bool) -> None:
        sums, _ = chunked_cross_entropy(x, weight, targets, compile=compile)
        torch.autograd.grad(sums["loss"], (x, weight))

    for n in (cfg.train.seq_len, 2 * cfg.train.seq_len):
        x = normal(world, n, m.dim)
        targets = torch.randint(m.vocab_size, (n,), device=world.device)
        times[f"{n} tokens"] = milliseconds(partial(step, x, targets, False), each)
        if world.device.type == "cuda":
            times[f"{n} tokens, compiled"] = milliseconds(partial(step, x, targets, True), each)
    return {"milliseconds": times, "dim": m.dim, "vocab_size": m.vocab_size}


def update(cfg: Config, world: World, each: float) -> dict:
    """The gradient's norm, and clipping with AdamW, of a model that is not sharded."""
    model = meta_model(cfg.model)
    materialize(model, cfg.run.seed, world.device)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    times = {"norm": milliseconds(partial(gradient_norm, [*model.parameters()]), each)}

    def step(optimizer: torch.optim.Optimizer) -> None:
        clip_gradients(model, optimizer, cfg.train.max_grad_norm)
        optimizer.step()

    for dtype in ("float32", "bfloat16"):
        options = replace(cfg.optim, state_dtype=dtype)
        optimizer = build_optimizer(model, options, compile=world.device.type == "cuda")
        times[f"clipping and AdamW, {dtype} state"] = milliseconds(partial(step, optimizer), each)
    return {"milliseconds": times, "parameters": parameter_count(model)}


def shapes_of_block(cfg: Config, fused: bool) -> list[tuple[int, int]]:
    """(rows, columns) of a block's weights: q, k, v, o, gate, up, down; fused: q with k and v, and
    gate with up, as one matrix each."""
    m = cfg.model
    queries = m.n_heads * m.width_per_head
    keys = m.n_kv_heads * m.width_per_head
    output = (m.dim, queries)
    down = (m.dim, m.ffn_dim)
    if fused:
        return [(queries + 2 * keys, m.dim), output, (2 * m.ffn_dim, m.dim), down]
    qkv = [(queries, m.dim), (keys, m.dim), (keys, m.dim)]
    return [*qkv, output, (m.ffn_dim, m.dim), (m.ffn_dim, m.dim), down]


def block(cfg: Config, world: World, each: float) -> dict:
    """TFLOP/s of a block's matmuls one after the other, as in a step: a shape alone finds the GPU
    cooler. Apart (21), and with fused matrices (12)."""
    n = cfg.train.seq_len
    figures = {}
    for name, fused in {"apart": False, "fused": True}.items():
        flops = 0
        pairs = []
        for rows, columns in shapes_of_block(cfg, fused):
            weight = normal(world, rows, columns)
            x = normal(world, n, columns)
            gradient = normal(world, n, rows)  # of the output
            pairs += [(x, weight.T), (gradient, weight), (gradient.T, x)]
            flops += 6 * n * rows * columns

        def multiply(pairs: list = pairs) -> None:
            for a, b in pairs:
                torch.mm(a, b)

        with torch.no_grad():
            ms = milliseconds(multiply, 3 * each)
        figures[name] = {"milliseconds": ms, "tflops": flops / ms / 1e9}
    return figures


def of_largest_shapes(cfg: Config) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the weights that most of a block's work is of."""
    q, *_, up, down = shapes_of_block(cfg, fused=False)
    return {"q": q, "up": up, "down": down}


def rate_or_reason(multiply: Callable, flops: float, each: float) -> float | str:
    """TFLOP/s, or why this device does not multiply so."""
    try:
        return flops / milliseconds(multiply, each) / 1e9
    except RuntimeError as error:
        return str(error).splitlines()[0]


def float8_products(cfg: Config, world: World, each: float) -> dict:
    """TFLOP/s of float8 matmuls, by scales and accumulation."""
    n = cfg.train.seq_len
    tflops = {}
    for name, (rows, columns) in of_largest_shapes(cfg).items():
        x = normal(world, n, columns).detach().to(torch.float8_e4m3fn)
        weight = normal(world, rows, columns).detach().to(torch.float8_e4m3fn)
        for scales, lengths in {"one scale": (1, 1), "a scale a row": (n, rows)}.items():
            x_scale = torch.ones(lengths[0], 1, device=world.device)
            weight_scale = torch.ones(1, lengths[1], device=world.device)
            for accumulation, fast in {"fast": True, "slow": False}.items():
                multiply = partial(
                    torch._scaled_mm,
                    x,
                    weight.T,
                    x_scale,
                    weight_scale,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=fast,
                )
                flops = 2 * n * rows * columns
                label = f"{name}, {scales}, {accumulation} accumulation"
                tflops[label] = rate_or_reason(multiply, flops, each)
    return {"tflops": tflops}


def weight_gradients(cfg: Config, world: World, each: float) -> dict:
    """TFLOP/s of matmuls that return a weight's gradient, or add it in float32 to earlier ones."""
    n = cfg.train.seq_len
    tflops = {}
    for name, (rows, columns) in of_largest_shapes(cfg).items():
        x = normal(world, n, columns).detach()
        gradient = normal(world, n, rows).detach()  # of the output
        total = torch.zeros(rows, columns, device=world.device)
        ways = {
            "bfloat16": partial(torch.mm, gradient.T, x),
            "added in float32": partial(
                torch.addmm, total, gradient.T, x, out_dtype=torch.float32, out=total
            ),
        }
        for way, multiply in ways.items():
            flops = 2 * n * rows * columns
            tflops[f"{name}, {way}"] = rate_or_reason(multiply, flops, each)
    return {"tflops": tflops}


# name: (function, configuration)
CEILINGS = {
    "copy": (copy, "llama1b"),
    **{f"products of {size}": (products, f"llama{size.lower()}") for size in ("1B", "3B", "8B")},
    "attention, heads of 64": (attention, "llama1b"),
    "attention, heads of 128": (attention, "llama8b"),
    "loss": (loss, "llama1b"),
    "update": (update, "llama1b"),
}
TIMINGS = 65  # that these make together
