"""What a run will need, from its configuration alone: no GPU, no process group.

    ./run_train.sh configs/llama70b.toml --dry-run --world-size 64,256 --gpu-memory-gib 139

Built on the model itself (on meta), on tensor parallelism's table, and on the rule by which FSDP2 shards rows.
"""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

import config
from config import ConfigError
from model.float8 import float8_matrices
from model.llama import Llama, flops_per_token, meta_model, named_parameters, parameter_count
from model.loss import CHUNK
from optim import ELEMENTWISE, build_optimizer
from parallel.activation_checkpoint import KEEP_EVERY, is_checkpointed
from parallel.fsdp import sent_dtype, unit_dtypes, unit_parameters, units, unsharded_parameters
from parallel.tensor import placement_of

GIB = 2**30


def largest_shards(model: Llama, shards: int, tp: int) -> dict[nn.Parameter, int]:
    """Elements of the largest shard of each parameter: ceil(rows / shards) rows of what tp leaves a rank of it."""
    found = {}
    for name, q in named_parameters(model):
        shape, placement = [*q.shape], placement_of(name)
        if placement and placement.is_shard():
            shape[placement.dim] //= tp
        found[q] = math.ceil(shape[0] / shards) * math.prod(shape[1:])
    return found


def plan(cfg: config.Config, model: Llama, ranks: int, epoch: float | None) -> dict:
    """The plan for one number of ranks. Bytes are those of the largest rank: gradients are sharded as their parameter
    and have its dtype, and so is what the optimizer keeps in its shape."""
    dp_replicate, dp_shard, cp, tp = config.mesh_shape(cfg, ranks)
    unsharded = unsharded_parameters(model, cfg.parallel)
    held = {q: q.itemsize * (q.numel() if q in unsharded else numel)
            for q, numel in largest_shards(model, dp_shard * cp, tp).items()}
    trained = {q: size for q, size in held.items() if q.requires_grad}
    optimizer = build_optimizer(model, cfg.optim)
    state = [s.itemsize * (held[q] // q.itemsize if s.shape == q.shape else s.numel())
             for q in trained for s in optimizer.state.get(q, {}).values()]
    name = type(optimizer).__name__
    return {
        "parameters": parameter_count(model),
        "world_size": ranks,
        "replicas": dp_replicate,
        "shards": dp_shard * cp,
        "cp": cp,
        "tp": tp,
        "units": len(units(model)),
        "parameter_bytes_per_rank": sum(held.values()),
        "gradient_bytes_per_rank": sum(trained.values()),
        "optimizer_bytes_per_rank": sum(state),
        "micro_batch_size": config.micro_batch_size(cfg, dp_replicate * dp_shard),
        "accumulation_steps": config.accumulation_steps(cfg, dp_replicate * dp_shard),
        "tokens_per_step": config.tokens_per_step(cfg),
        "steps_per_epoch": epoch / cfg.train.global_batch_size if epoch else None,
        "flops_per_token": flops_per_token(model, cfg.train.seq_len),
        "collectives_per_step": collectives(cfg, model, ranks),
        "not_counted": [f"the state of {name}, which optim.build_optimizer does not make"] * (not state)
                       + [f"what {name} sends in its step"] * (ranks > 1 and not isinstance(optimizer, ELEMENTWISE)),
    }


def collectives(cfg: config.Config, model: Llama, ranks: int) -> dict[str, tuple[int, int]]:
    """(number, bytes) per training step and rank of each collective; bytes are of the larger of its two buffers.

    With U units, A micro-batches, S = dp_shard x cp shards, R replicas, and A' = A, or 1 where reduction is deferred:

        all-gather       A (U + B)     B = U - 2 resharded after forward are all-gathered again in backward (all but
                                       head and embedding, tied U - 1), with an integer n within n ranks; B = 0 where
                                       they are kept
        reduce-scatter   A' U          A U where R > 1: then only the all-reduce is deferred; 0 where S = 1
        all-reduce       A' U          where R > 1; and, where S > 1, one of the gradients' sum of squares (float64) and
                                       one of the largest values (float32) of the matrices sent in 8 bits

    Each tensor travels padded to S ceil(rows / S) rows; with float8 = "tensorwise" the matrices that multiply in 8 bits
    are all-gathered in as many. Activation checkpointing adds none: it recomputes inside a unit
    that is all-gathered for its backward. Over tp and cp see over_tp_and_cp().
    """
    p = cfg.parallel
    dp_replicate, dp_shard, cp, tp = config.mesh_shape(cfg, ranks)
    shards, dp_size = dp_shard * cp, dp_replicate * dp_shard
    sequences, accumulation = config.micro_batch_size(cfg, dp_size), config.accumulation_steps(cfg, dp_size)
    reductions = accumulation if p.sync_every_micro_batch else 1
    scatters = accumulation if dp_replicate > 1 else reductions
    unsharded, numel = unsharded_parameters(model, p), largest_shards(model, shards, tp)
    tensorwise = "tensorwise" if p.float8 == "tensorwise" else "none"  # rowwise all-gathers as without
    device = "cpu" if cfg.run.device == "cpu" else "cuda"  # a plan is made for GPUs
    in_8_bits = {m.weight for m in float8_matrices(model.blocks, tensorwise, device)} - unsharded
    found = {"all_gather": [0, 0], "reduce_scatter": [0, 0], "all_reduce": [0, 0]}

    def add(kind: str, times: int, size: int) -> None:
        if times and size:
            found[kind][0] += times
            found[kind][1] += times * size

    # of the sum of squares: tp's parts, and what all tp ranks have, apart
    add("all_reduce", (shards > 1) + (tp > 1) * (1 + (shards > 1)), 8)
    add("all_reduce", shards > 1, 4 * len(in_8_bits))
    for kind, times, size in over_tp_and_cp(cfg, model, sequences, accumulation, scatters, cp, tp):
        add(kind, times, size)
    for name, modules in units(model):
        parameters = [q for q in unit_parameters(modules) if q not in unsharded]
        param_dtype, reduce_dtype = unit_dtypes(p, name)
        size = sum(numel[q] * (1 if q in in_8_bits else sent_dtype(q, param_dtype).itemsize) for q in parameters)
        trained = sum(numel[q] for q in parameters if q.requires_grad)
        if shards > 1:
            again = p.reshard_after_forward is not False and not {model.head, model.embedding} & {*modules}
            add("all_gather", accumulation * (1 + again), size * shards)
            add("reduce_scatter", scatters, reduce_dtype.itemsize * trained * shards)
        if dp_replicate > 1:
            add("all_reduce", reductions, reduce_dtype.itemsize * trained)
    return {kind: (number, size) for kind, (number, size) in found.items()}


def over_tp_and_cp(cfg: config.Config, model: Llama, sequences: int, accumulation: int, scatters: int, cp: int,
                   tp: int) -> Iterator[tuple[str, int, int]]:
    """(collective, number, bytes of each) of tensor and context parallelism per step and rank. With L blocks and A
    micro-batches of so many sequences, G of which reduce gradients, and F blocks with recompute = "full" or n:

        tp  all-gather       A (6 L + 2)     a block's two inputs, once more for backward, and the gradients of its two
                                             outputs; the head's input, the embedding's gradient; and the loss's figures
                                             (three float32 a token) once a chunk of tokens
            reduce-scatter   A (4 L + F + 2)     the reverse, and once more where recomputed
            all-reduce       G (2 L + 1)     the gradient of each norm
        cp  all-gather       2 A L           keys and values, once more for backward
            reduce-scatter   A L             their gradients

    A gradient that nothing trained needs is not sent, nor an input gathered again for no gradient of a weight; what an
    adapter has whole on all ranks is reduced as a norm is. Compiled, what is not recomputed is not gathered again but
    kept.
    """
    p, m, t = cfg.parallel, cfg.model, cfg.train
    tokens, names = sequences * t.seq_len // cp, config.unit_names(m)
    trained = {name: q for name, q in named_parameters(model) if q.requires_grad}
    flows = model.embedding.weight.requires_grad  # does a gradient flow into what comes next?

    def trains(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in trained)

    def size(unit: str) -> int:
        """Bytes of the unit's activations (tokens, D)."""
        return unit_dtypes(p, unit)[0].itemsize * tokens * m.dim

    for i in range(m.n_layers):
        block, activations = f"blocks.{i}.", size(f"blocks.{i}")
        checkpointed = is_checkpointed(p.recompute, i)
        again = not p.compile or checkpointed
        values = flows or trains(f"{block}attention_norm", f"{block}attention.k_proj", f"{block}attention.v_proj")
        attends = values or trains(f"{block}attention.q_proj")
        for module, columns in (("attention", "qkv"), ("feed_forward", ("gate", "up"))):
            into = flows or trains(f"{block}{module}_norm")
            for_weights = trains(*(f"{block}{module}.{name}_proj" for name in columns))
            flows = into or trains(f"{block}{module}.")
            if tp > 1:
                yield "all_gather", accumulation * (1 + flows + (checkpointed or (again and for_weights))), activations
                yield "reduce_scatter", accumulation * (1 + into), activations
        if tp > 1 and checkpointed and p.recompute not in KEEP_EVERY:
            yield "reduce_scatter", accumulation, activations
        if cp > 1:
            keys_and_values = activations // m.dim * cp * 2 * m.n_kv_heads // tp * m.width_per_head
            yield "all_gather", accumulation * (1 + (checkpointed or (again and attends))), keys_and_values
            yield "reduce_scatter", accumulation * values, keys_and_values
    if tp > 1:
        embedding, head = names[0], names[0 if m.tie_embeddings else -1]
        yield "all_gather", accumulation * model.embedding.weight.requires_grad, size(embedding)
        yield "reduce_scatter", accumulation, size(embedding)
        yield "all_gather", accumulation, size(head)
        yield "reduce_scatter", accumulation * flows, size(head)
        chunk = CHUNK["cuda compiled" if p.compile else "cuda"]
        yield "all_gather", accumulation * (tokens // chunk), tp * 3 * 4 * chunk
        yield "all_gather", accumulation * (tokens % chunk > 0), tp * 3 * 4 * (tokens % chunk)
        whole = {q for name, q in trained.items() if placement_of(name).is_replicate()}
        for unit, modules in units(model):
            dtype = unit_dtypes(p, unit)[scatters != accumulation]
            for q in {*unit_parameters(modules)} & whole:
                yield "all_reduce", scatters, dtype.itemsize * q.numel()


def state_gib(row: dict) -> float:
    """What a rank holds between two steps, the gradients of the last one included."""
    return sum(row[f"{what}_bytes_per_rank"] for what in ("parameter", "gradient", "optimizer")) / GIB


def out_of_memory(cfg: config.Config, ranks: int, asked: str) -> str:
    """The message of a run that is out of memory."""
    row, p = plan(cfg, meta_model(cfg.model, cfg.lora), ranks, None), cfg.parallel
    changes = {
        f"train.micro_batch_size below {row['micro_batch_size']}": row["micro_batch_size"] > 1,
        'parallel.recompute = "elementwise" (recomputes no matrix product)': p.recompute == "none",
        'optim.state_dtype = "bfloat16"': cfg.optim.state_dtype != "bfloat16",
        'parallel.recompute = "full"': p.recompute != "full",
        "parallel.reshard_after_forward = true": p.reshard_after_forward is not True,
        "parallel.sync_every_micro_batch = true": not p.sync_every_micro_batch,
        "less parallel.prefetch_forward and prefetch_backward": max(p.prefetch_forward, p.prefetch_backward) > 1,
        "more ranks that share one copy": True,
        "parallel.cp, or tp within a node, over which activations are shared": True,
        "parallel.cpu_offload = true": not p.cpu_offload,
    }
    where = "host" if p.cpu_offload else "device"
    return (f"out of memory: {asked}\nthe plan expected {state_gib(row):.3f} GiB per rank between steps (parameters, "
            f"gradients, optimizer; on the {where}), and activations and gathered units beyond that\n"
            f"to need less, try: {'; '.join(change for change, helps in changes.items() if helps)}")


def dry_run(cfg: config.Config, args: Namespace, epoch: float | None) -> bool:
    """Prints the plans; returns whether each fits into the memory given. Raises ConfigError for numbers of ranks that
    cannot be had. epoch: samples in the data, where it is prepared."""
    if cfg.parallel.param_dtype == "auto":  # a plan is made for GPUs
        cfg = replace(cfg, parallel=replace(cfg.parallel, param_dtype="bfloat16"))
    model = meta_model(cfg.model, cfg.lora)
    rows, problems = [], []
    p = cfg.parallel
    fewest = math.prod(degree for degree in (p.dp_replicate, p.dp_shard, p.cp, p.tp) if degree != "auto")
    for ranks in args.world_size or [fewest]:
        try:
            rows.append(plan(cfg, model, ranks, epoch))
        except ConfigError as error:
            problems += [f"--world-size {ranks}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    print(json.dumps(rows if len(rows) > 1 else rows[0]) if args.json else
          "\n".join([config.to_toml(cfg), *(table(row, cfg.train) for row in rows)]))
    if args.gpu_memory_gib is None:
        return True
    for row in rows:  # on stderr, so that --json stays JSON
        left = args.gpu_memory_gib - state_gib(row)
        verdict = (f"fits, with {left:.4g} GiB left for activations and gathered units" if left > 0 else
                   "does not fit, whatever the batch size: use more shards")
        print(f"{row['world_size']} ranks: {state_gib(row):.4g} of {args.gpu_memory_gib:g} GiB between steps: "
              f"{verdict}", file=sys.stderr)
    return all(state_gib(row) < args.gpu_memory_gib for row in rows)


def table(row: dict, t: config.Train) -> str:
    """A plan for a person."""
    epoch = row["steps_per_epoch"]
    lines = {
        "ranks": f"{row['world_size']} = {row['replicas']} replicas x {row['shards']} shards"
                 + f" (of them cp {row['cp']}) x tp {row['tp']}" * (row["cp"] * row["tp"] > 1),
        "parameters": f"{row['parameters']:,} in {row['units']} units",
        "tokens per step": f"{row['tokens_per_step']:,} = {t.global_batch_size} sequences of {t.seq_len}",
        "micro-batches": f"{row['accumulation_steps']} of {row['micro_batch_size']} sequences per rank and step",
        "steps per epoch": f"{epoch:,.1f}" if epoch else "known when the data is prepared",
        "FLOP per token": f"{row['flops_per_token']:,}",
        "memory per rank": "largest rank, between steps; activations come on top",
        **{f"  {what}": f"{row[f'{what}_bytes_per_rank'] / GIB:10.3f} GiB"
           for what in ("parameter", "gradient", "optimizer")},
        "  together": f"{state_gib(row):10.3f} GiB",
        "sent per step": "per rank: number of collectives, and their larger buffers together",
        **{f"  {kind}": f"{number:6,} {size / GIB:13,.3f} GiB"
           for kind, (number, size) in row["collectives_per_step"].items()},
        **({"not counted": "; ".join(row["not_counted"])} if row["not_counted"] else {}),
    }
    return "\n".join(f"{name:<16} {value}" for name, value in lines.items()) + "\n"
