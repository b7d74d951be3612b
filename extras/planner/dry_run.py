"""Plans a run before it starts: memory, communication, step time. Needs no GPU; takes seconds on a laptop.

    ./run_train.sh configs/llama70b.toml --dry-run --world-size 64,256 --gpu H200 [--gpus-per-node 8] [--plot step.svg]

plan.py makes a plan, show.py prints it, advice.py suggests changes where it does not fit.
"""

import json
import math
import os
import sys
from argparse import Namespace

import config
from config import ConfigError
from data.dataset import open_data
from data.folder import is_prepared
from data.order import make_order
from extras.planner.advice import advise
from extras.planner.devices import device
from extras.planner.plan import Asked, planned
from extras.planner.show import compared, draw, table, verdict
from files import print_line


def dry_run(cfg: config.Config, args: Namespace) -> bool:
    """Prints the plans; returns False if one does not fit into the memory given. Raises ConfigError for an invalid
    world size, GPU or plot path."""
    gpu = None if args.gpu is None else device(args.gpu)
    asked = Asked(gpu, args.gpu_memory_gib, args.gpus_per_node or 8, on_gpu=True)
    p, epoch, found, problems = cfg.parallel, samples_per_epoch(cfg), [], []
    fewest = math.prod(
        degree for degree in (p.dp_replicate, p.dp_shard, p.cp, p.tp) if degree != "auto"
    )
    for ranks in args.world_size or [fewest]:
        try:
            found.append(planned(cfg, ranks, asked, epoch))
        except ConfigError as error:
            problems += [f"--world-size {ranks}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    rows = [row for row, _ in found]
    if args.plot is not None:
        try:
            title = f"{cfg.run.name} on {rows[0]['world_size']} x {args.gpu or 'GPU'}"
            draw(rows[0], found[0][1], args.plot, title, asked.memory_gib)
        except OSError as error:
            raise ConfigError(f"--plot {args.plot}: {error.strerror}") from None
    if args.json:
        print_line(json.dumps(rows if len(rows) > 1 else rows[0]))
    else:
        print_line("\n".join(verdict(row, cfg, asked) for row in rows) + "\n")
        if args.show_config:
            print_line(config.to_toml(cfg))
        print_line("\n".join(table(row, cfg, asked) for row in rows))
        if len(rows) > 1:
            print_line(compared(rows))
    for row in rows if asked.memory_gib else ():  # on stderr, so that --json stays JSON
        if args.json:
            print(verdict(row, cfg, asked), file=sys.stderr)
        if not row["fits"]:
            print(advise(row["world_size"], args, asked), file=sys.stderr)
    return all(row["fits"] is not False for row in rows)


def samples_per_epoch(cfg: config.Config) -> float | None:
    """Samples until every source has been read once; None if the data is not prepared, or its tokenizer is missing."""
    if cfg.data.tokenizer and not os.path.exists(cfg.data.tokenizer):
        return None
    if not is_prepared(cfg):
        return None
    order = make_order(cfg, open_data(cfg, "train"))
    return max(
        (source.windows or 0) * order.mixture.period / weight
        for source, weight in zip(order.sources, order.mixture.weights)
    )
