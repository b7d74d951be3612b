"""What a training step holds and sends by theory: closed forms, against which tests hold the plan and real runs."""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import config
from model.llama import Llama, named_parameters
from model.loss import CHUNK
from parallel.activation_checkpoint import KEEP_EVERY, is_checkpointed
from parallel.fsdp import all_gather_dtype, unit_dtypes, unit_parameters, units
from parallel.replicated import replicated_parameters
from parallel.tensor import placement_of


def largest_shards(model: Llama, shards: int, tp: int) -> dict[nn.Parameter, int]:
    """Elements of the largest shard of each parameter: ceil(rows / shards) rows of what tp leaves a rank of it."""
    found = {}
    for name, q in named_parameters(model):
        shape = [*q.shape]
        placement = placement_of(model, name) if tp > 1 else Replicate()
        if isinstance(placement, Shard):
            shape[placement.dim] //= tp
        found[q] = math.ceil(shape[0] / shards) * math.prod(shape[1:])
    return found


def collectives(cfg: config.Config, model: Llama, ranks: int) -> dict[str, tuple[int, int]]:
    """(number, bytes) per training step and rank of each collective; bytes are of the larger of its two buffers.

    With U units, A micro-batches, S = dp_shard x cp shards, R replicas, and A' = A, or 1 where reduction is deferred:

        all-gather       A (U + B)     B = U - 2 resharded after forward are all-gathered again in backward (all but
                                       head and embedding, tied U - 1; nor frozen first ones); B = 0 where
                                       they stay unsharded; A - 1 less for each that stays so for the next micro-batch:
                                       of the first prefetch_forward + 1 those that backward has all-gathered, but for
                                       the embedding, which it gathers for that; U in all with gather_once, where A > 1
        reduce-scatter   A' U          A U where R > 1: then only the all-reduce is deferred; 0 where S = 1
        all-reduce       A' U          where R > 1; and, where S > 1, one of the gradients' sum of squares (float64) and
                                       one of the largest values (float32) of the matrices sent in 8 bits

    Each tensor travels padded to S ceil(rows / S) rows; with float8 = "tensorwise" the matrices that multiply in 8 bits
    are all-gathered in as many. Activation checkpointing adds none: it recomputes inside a unit
    that is all-gathered for its backward. Over tp and cp see over_tp_and_cp(), of Muon's matrices of_muon().
    """
    p = cfg.parallel
    dp_replicate, dp_shard, cp, tp = config.mesh_shape(cfg, ranks)
    shards, dp_size = dp_shard * cp, dp_replicate * dp_shard
    sequences = config.micro_batch_size(cfg.train, dp_size)
    accumulation = config.accumulation_steps(cfg.train, dp_size)
    reductions = accumulation if p.sync_every_micro_batch else 1
    scatters = accumulation if dp_replicate > 1 else reductions
    replicated, numel = replicated_parameters(model, p), largest_shards(model, shards, tp)
    in_8_bits = set()
    if p.float8 == "tensorwise":  # rowwise all-gathers as without
        from extras.float8.matmul import float8_matrices

        device = "cpu" if cfg.run.device == "cpu" else "cuda"  # a plan is made for GPUs
        in_8_bits = {m.weight for m in float8_matrices(model.blocks, p.float8, device)} - replicated
    found = {kind: [0, 0] for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}

    def add(kind: str, times: int, size: int) -> None:
        if times and size:
            found[kind][0] += times
            found[kind][1] += times * size

    # of the sum of squares: tp's parts, and what all tp ranks have, apart
    add("all_reduce", (shards > 1) + (tp > 1) * (1 + (shards > 1)), 8)
    add("all_reduce", shards > 1, 4 * len(in_8_bits))
    for kind, times, size in over_tp_and_cp(cfg, model, sequences, accumulation, scatters):
        add(kind, times, size)
    if cfg.optim.name == "muon":
        sizes = [*of_muon(cfg, model, ranks, numel)]
        found["all_to_all"] = [len(sizes), sum(sizes)]
    frozen_so_far = True
    for i, (name, modules) in enumerate(units(model)):
        parameters = [q for q in unit_parameters(modules) if q not in replicated]
        frozen_so_far &= not any(q.requires_grad for q in parameters)
        param_dtype, reduce_dtype = unit_dtypes(p, name)
        sizes = {q: all_gather_dtype(q, param_dtype).itemsize for q in parameters}
        size = sum(numel[q] * (1 if q in in_8_bits else sizes[q]) for q in parameters)
        trained = sum(numel[q] for q in parameters if q.requires_grad)
        if shards > 1:
            is_tied, is_edge = len(modules) > 1, bool({model.head, model.embedding} & {*modules})
            again = p.reshard_after_forward and not is_edge and not frozen_so_far
            gathers = accumulation * (1 + again)
            in_backward = again or is_tied or not p.reshard_after_forward
            if i <= p.prefetch_forward and in_backward:
                gathers -= accumulation - 1
            if p.gather_once and accumulation > 1:
                gathers = 1
            add("all_gather", gathers, size * shards)
            add("reduce_scatter", scatters, reduce_dtype.itemsize * trained * shards)
        if dp_replicate > 1:
            add("all_reduce", reductions, reduce_dtype.itemsize * trained)
    return {kind: (number, size) for kind, (number, size) in found.items()}


def of_muon(
    cfg: config.Config, model: Llama, ranks: int, shards: dict[nn.Parameter, int]
) -> Iterator[int]:
    """Bytes of each all-to-all of a step on rank 0. For each shape (under tp, for each sharding) of the trained blocks'
    matrices: of M matrices, rank 0 owns m, its replica n, and rank 0 has e elements of each, of E. Then two of
    max(n e, m E) elements, within the replica, and one of max(R n e, M e) between R replicas."""
    from extras.optimizers.muon import flop, owners

    replicas, *within = config.mesh_shape(cfg, ranks)
    trained = [(name, q) for name, q in named_parameters(model) if q.requires_grad]
    matrices = [(name, q) for name, q in trained if name.startswith("blocks") and q.ndim == 2]
    owner = owners([flop(q.shape) for _, q in matrices], ranks, replicas)
    by_shape: dict[tuple, list[int]] = {}
    for (name, q), rank in zip(matrices, owner):
        over_tp = placement_of(model, name) if cfg.parallel.tp > 1 else None
        by_shape.setdefault((q.shape, over_tp, shards[q]), []).append(rank)
    itemsize, in_replica = 4 if cfg.run.device == "cpu" else 2, math.prod(within)
    for (shape, _, piece), ranks_of in by_shape.items():
        ours = sum(rank < in_replica for rank in ranks_of) * piece
        if in_replica > 1:
            yield from [itemsize * max(ours, ranks_of.count(0) * shape.numel())] * 2
        if replicas > 1:
            yield itemsize * max(replicas * ours, len(ranks_of) * piece)


def over_tp_and_cp(
    cfg: config.Config, model: Llama, sequences: int, accumulation: int, scatters: int
) -> Iterator[tuple[str, int, int]]:
    """(collective, number, bytes of each) of tensor and context parallelism per step and rank. With L blocks and A
    micro-batches of so many sequences, G of which reduce gradients, and F blocks with recompute = "full" or n:

        tp  all-gather       A (6 L + 2)     a block's two inputs, once more for backward, and the gradients of its two
                                             outputs; the head's input, the embedding's gradient; and three figures of
                                             the loss, a float32 a token each, once a chunk of tokens
            reduce-scatter   A (4 L + F + 2)     the reverse, and once more where recomputed
            all-reduce       G (2 L + 1)     the gradient of each norm; G (4 L + 1) with qk_norm
        cp  all-gather       2 A L           keys and values, once more for backward
            reduce-scatter   A L             their gradients

    A gradient that nothing trained needs is not sent, nor an input gathered again for no gradient of a weight; what an
    adapter has whole on all ranks is reduced as a norm is. Compiled, what is not recomputed is not gathered again but
    kept.
    """
    p = cfg.parallel
    m = cfg.model
    cp, tp = p.cp, p.tp
    tokens, names = sequences * cfg.train.seq_len // cp, config.unit_names(m)
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
        attention = f"{block}attention"
        values = flows or trains(f"{attention}_norm", f"{attention}.k_", f"{attention}.v_")
        for module in ("attention", "feed_forward"):
            into = flows or trains(f"{block}{module}_norm")
            flows = into or trains(f"{block}{module}.")
            if tp > 1:
                yield "all_gather", accumulation * (1 + flows + checkpointed), activations
                yield "reduce_scatter", accumulation * (1 + into), activations
        if tp > 1 and checkpointed and p.recompute not in KEEP_EVERY:
            yield "reduce_scatter", accumulation, activations
        if cp > 1:
            keys_and_values = activations // m.dim * cp * 2 * m.n_kv_heads // tp * m.width_per_head
            yield "all_gather", accumulation * (1 + checkpointed), keys_and_values
            yield "reduce_scatter", accumulation * values, keys_and_values
    if tp > 1:
        embedding, head = names[0], names[0 if m.tie_embeddings else -1]
        yield "all_gather", accumulation * model.embedding.weight.requires_grad, size(embedding)
        yield "reduce_scatter", accumulation, size(embedding)
        yield "all_gather", accumulation, size(head)
        yield "reduce_scatter", accumulation * flows, size(head)
        chunk = CHUNK["cuda compiled" if p.compile else "cuda"]
        yield "all_gather", accumulation * 3 * (tokens // chunk), tp * 4 * chunk
        yield "all_gather", accumulation * 3 * (tokens % chunk > 0), tp * 4 * (tokens % chunk)
        whole = {q for n, q in trained.items() if isinstance(placement_of(model, n), Replicate)}
        for unit, modules in units(model):
            # deferred, FSDP2 accumulates gradients in the dtype of the reduction; torch 2.15 does so from the first on
            dtype = unit_dtypes(p, unit)[scatters != accumulation or torch.__version__ >= "2.15"]
            for q in {*unit_parameters(modules)} & whole:
                yield "all_reduce", scatters, dtype.itemsize * q.numel()
