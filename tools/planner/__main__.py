"""Plans a run before it starts: memory, communication, step time. Needs no GPU; takes seconds on a
laptop.

    ./run_train.sh configs/llama70b.toml --dry-run --world-size 64,256 --gpu H200 [--gpus-per-node
    8] [--gpu-memory-gib G] [--plot step.svg] [--json] [--config]

plan.py makes the plan of each world size, show.py renders it. Exit codes: 0, 3 if a plan does not
fit the memory given, 2 if the input is wrong.
"""

import sys

from tools.planner.arguments import parse

if __name__ == "__main__":
    parse(sys.argv[1:], __doc__ or "")  # exits before the imports below, which take seconds

import json
import math
import os
import textwrap
from argparse import Namespace

import config
from config import ConfigError
from data.dataset import PreparedDataset
from data.folder import is_prepared
from system import FINISHED, print_error, print_line, visible_gpus
from tools.planner.devices import Moment, device
from tools.planner.plan import Asked, planned
from tools.planner.show import compared, draw, table, verdict

DOES_NOT_FIT = 3  # the exit code


def dry_run(cfg: config.Config, args: Namespace) -> bool:
    """Prints the plans. Returns False if one does not fit into the memory given.

    Raises ConfigError if the GPU, a world size or the path of the plot is invalid.
    """
    asked = asked_by(args, cfg)
    plans = plan_each(cfg, args.world_size or [fewest_ranks(cfg.parallel)], asked)
    rows = [row for row, _ in plans]
    if args.plot is not None:
        title = f"{cfg.run.name} on {rows[0]['world_size']} x {args.gpu or 'GPU'}"
        try:
            draw(*plans[0], args.plot, title, asked.memory_gib)
        except OSError as error:
            raise ConfigError(f"--plot {args.plot}: {error.strerror}") from None
    if args.json:
        print_line(json.dumps(rows if len(rows) > 1 else rows[0]))
    else:
        print_tables(rows, cfg, asked, args.show_config)
    fits = all(row["fits"] is not False for row in rows)
    if not fits:  # on stderr, so that --json stays JSON
        print_error("what needs less memory: docs/plan.md, If it does not fit")
    return fits


def asked_by(args: Namespace, cfg: config.Config) -> Asked:
    """The hardware that the arguments name, or this machine."""
    gpu = None if args.gpu is None else device(args.gpu)
    is_here = not (args.gpu or args.gpu_memory_gib or args.world_size)
    has_gpu = cfg.run.device == "cuda" or (cfg.run.device == "auto" and visible_gpus() > 0)
    without_cuda = is_here and not has_gpu
    return Asked(gpu, args.gpu_memory_gib, args.gpus_per_node, True, without_cuda)


def fewest_ranks(p: config.Parallel) -> int:
    """The smallest world size that the mesh allows."""
    degrees = (p.dp_replicate, p.dp_shard, p.cp, p.tp)
    return math.prod(degree for degree in degrees if degree != "auto")


def plan_each(
    cfg: config.Config, world_sizes: list[int], asked: Asked
) -> list[tuple[dict, list[Moment]]]:
    """The plan of each world size. Raises one ConfigError with the problems of all sizes."""
    epoch = samples_per_epoch(cfg)
    plans = []
    problems = []
    for ranks in world_sizes:
        try:
            plans.append(planned(cfg, ranks, asked, epoch))
        except ConfigError as error:
            problems += [f"--world-size {ranks}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    return plans


def print_tables(rows: list[dict], cfg: config.Config, asked: Asked, show_config: bool) -> None:
    """Prints the verdicts, the configuration if show_config is True, and the tables.

    With a configuration, prints all else as comments, so that the output is TOML.
    """
    verdicts = "\n".join(verdict(row, cfg, asked) for row in rows) + "\n"
    details = "\n".join(table(row, cfg, asked) for row in rows)
    if len(rows) > 1:
        details += f"\n{compared(rows)}"
    if not show_config:
        print_line(f"{verdicts}\n{details}")
        return
    print_line(textwrap.indent(verdicts, "# "))
    print_line(config.to_toml(cfg))
    print_line(textwrap.indent(details, "# "))


def samples_per_epoch(cfg: config.Config) -> float | None:
    """The number of samples until every source has been read once. None if the data or the
    tokenizer is missing, or belongs to another configuration."""
    if cfg.data.tokenizer and not os.path.exists(cfg.data.tokenizer):
        return None
    if not is_prepared(cfg.data, cfg.model.vocab_size):
        return None
    try:
        dataset = PreparedDataset(cfg, train=False)
    except ConfigError:  # the token files may be on another machine
        return None
    # of every `period` samples, `weight` come from a source
    samples = []
    for source, weight in zip(dataset.sources, dataset.mixture.weights):
        samples.append(source.order.epoch_length * dataset.mixture.period / weight)
    return max(samples)


def main(argv: list[str]) -> int:
    args, cfg = parse(argv, __doc__ or "")
    return FINISHED if dry_run(cfg, args) else DOES_NOT_FIT


if __name__ == "__main__":
    config.run_tool(main)
