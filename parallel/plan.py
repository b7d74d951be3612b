"""What a run will need, from its configuration alone: no GPU, no process group.

    ./run_train.sh configs/llama70b.toml --dry-run --world-size 64,256 --gpu-memory-gib 139

Built on the model itself (on meta) and on the rule by which FSDP2 deals rows, not on a second description of them.
"""

import json
import math
import sys
from argparse import Namespace

import torch

import config
from config import ConfigError
from model.llama import Llama, flops_per_token, parameter_count
from parallel.fsdp import units

GIB = 2**30


def plan(cfg: config.Config, model: Llama, ranks: int, windows: int | None) -> dict:
    """The plan for one number of ranks. Bytes are those of the largest rank: ceil(rows / shards) rows of each tensor.

    Parameters, gradients and both of AdamW's moments are float32, as they are kept between steps: 16 bytes for each
    parameter of the shard, and 4 for each tensor's step count.
    """
    replicas, shards = config.mesh_shape(cfg, ranks)
    local = [math.ceil(p.shape[0] / shards) * math.prod(p.shape[1:]) for p in model.parameters()]
    return {
        "parameters": parameter_count(model),
        "world_size": ranks,
        "replicas": replicas,
        "shards": shards,
        "units": len(units(model)),
        "parameter_bytes_per_rank": 4 * sum(local),
        "gradient_bytes_per_rank": 4 * sum(local),
        "optimizer_bytes_per_rank": 8 * sum(local) + 4 * len(local),
        "accumulation_steps": config.accumulation_steps(cfg, ranks),
        "tokens_per_step": config.tokens_per_step(cfg),
        "steps_per_epoch": windows / cfg.train.global_batch_size if windows else None,
        "flops_per_token": flops_per_token(model, cfg.train.seq_len),
    }


def state_gib(row: dict) -> float:
    """What a rank holds between two steps, the gradients of the last one included."""
    return sum(row[f"{what}_bytes_per_rank"] for what in ("parameter", "gradient", "optimizer")) / GIB


def dry_run(cfg: config.Config, args: Namespace, windows: int | None) -> bool:
    """Prints the plans; returns whether each fits into the memory given. Raises ConfigError for numbers of ranks that
    cannot be made."""
    with torch.device("meta"):
        model = Llama(cfg.model)
    rows, problems = [], []
    for ranks in args.world_size:
        try:
            rows.append(plan(cfg, model, ranks, windows))
        except ConfigError as error:
            problems += [f"--world-size {ranks}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    print(json.dumps(rows if len(rows) > 1 else rows[0]) if args.json else
          "\n".join([config.to_toml(cfg), *(table(row, cfg.train) for row in rows)]))
    too_big = [row for row in rows if args.gpu_memory_gib and state_gib(row) > args.gpu_memory_gib]
    for row in too_big:
        print(f"does not fit: {state_gib(row):.1f} GiB of states per rank at {row['world_size']} ranks, before any "
              f"activation, in {args.gpu_memory_gib:g} GiB; more shards would, no batch size does", file=sys.stderr)
    return not too_big


def table(row: dict, t: config.Train) -> str:
    """A plan for a person."""
    epoch = row["steps_per_epoch"]
    lines = {
        "ranks": f"{row['world_size']} = {row['replicas']} replicas x {row['shards']} shards",
        "parameters": f"{row['parameters']:,} in {row['units']} units",
        "tokens per step": f"{row['tokens_per_step']:,} = {t.global_batch_size} sequences of {t.seq_len}",
        "micro-batches": f"{row['accumulation_steps']} of {t.micro_batch_size} sequences per rank and step",
        "steps per epoch": f"{epoch:,.1f}" if epoch else "known when the data is prepared",
        "FLOP per token": f"{row['flops_per_token']:,}",
        "memory per rank": "largest rank, between steps; activations come on top",
        **{f"  {what}": f"{row[f'{what}_bytes_per_rank'] / GIB:10.3f} GiB"
           for what in ("parameter", "gradient", "optimizer")},
        "  together": f"{state_gib(row):10.3f} GiB",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in lines.items()) + "\n"
