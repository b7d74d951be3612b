"""Plans a run before it starts: memory, communication, step time. Needs no GPU; takes seconds on a
laptop.

    ./run_train.sh configs/llama70b.toml --dry-run --world-size 64,256 --gpu H200 [--gpus-per-node
    8] [--plot step.svg]

The entry point: plan.py makes the plan of each world size, show.py
renders it, advice.py suggests changes where it does not fit.
"""

import json
import math
import os
import sys
import textwrap
from argparse import Namespace

import config
from config import ConfigError
from data import formats
from data.dataset import open_dataset
from data.folder import is_prepared
from extras.planner.advice import advise, faster
from extras.planner.devices import Moment, device
from extras.planner.plan import Asked, planned
from extras.planner.show import compared, draw, table, verdict
from run.command import Ranks
from system.machine import visible_gpus
from system.processes import DOES_NOT_FIT, FINISHED, print_error, print_line


def main(argv: list[str]) -> int:
    """The exit code of a dry run."""
    args, cfg = config.from_command_line(argv, __doc__ or "")
    cfg = formats.complete(cfg, is_plan=True)
    # what follows from the format, for the variants that advice.py loads
    args.overrides.append(f"--data.document_mask={config.toml(cfg.data.document_mask)}")
    return FINISHED if dry_run(cfg, args) else DOES_NOT_FIT


def dry_run(cfg: config.Config, args: Namespace) -> bool:
    """Prints the plans. Returns False if one does not fit into the memory given.

    Raises ConfigError for a GPU or plot path that is invalid, or if no world size is possible.
    """
    gpu = None if args.gpu is None else device(args.gpu)
    asked = Asked(
        gpu,
        args.gpu_memory_gib,
        args.gpus_per_node or 8,
        on_gpu=True,
        without_cuda=is_for_this_cpu(cfg, args),
    )
    plans = plan_each(cfg, args.world_size or [fewest_ranks(cfg.parallel)], asked)
    rows = [row for row, _ in plans]
    possible = [row for row in rows if "problems" not in row]
    if args.plot is not None:
        row, moments = plans[rows.index(possible[0])]
        title = f"{cfg.run.name} on {row['world_size']} x {args.gpu or 'GPU'}"
        try:
            draw(row, moments, args.plot, title, asked.memory_gib)
        except OSError as error:
            raise ConfigError(f"--plot {args.plot}: {error.strerror}") from None
    if args.json:
        print_line(json.dumps(rows if len(rows) > 1 else rows[0]))
    else:
        print_tables(rows, cfg, asked, args.show_config)
    if asked.memory_gib:
        print_advice(possible, cfg, args, asked)
    if is_for_this_machine(cfg, args):
        print_lacks(cfg)
    return all(row["fits"] is not False for row in possible)


def is_for_this_cpu(cfg: config.Config, args: Namespace) -> bool:
    """Whether the plan is of a run on this machine, which has no GPU for it."""
    if args.world_size or not is_for_this_machine(cfg, args):
        return False
    return cfg.run.device == "cpu" or not visible_gpus()


def is_for_this_machine(cfg: config.Config, args: Namespace) -> bool:
    """Whether the run could be on this machine: no other GPU is named, and it has those that are
    asked for."""
    if args.gpu or args.gpu_memory_gib:
        return False
    return cfg.run.device != "cuda" or visible_gpus() > 0


def print_lacks(cfg: config.Config) -> None:
    """Prints what this machine lacks for the run, which a launch would refuse: on stderr, so that
    --json stays JSON."""
    from run.launch import check_machine

    try:
        check_machine(cfg, Ranks.from_environment())
    except ConfigError as error:
        for problem in error.problems:
            print_error(f"a run here would be refused: {problem}")
    except OSError as error:  # of a disk that does not answer, or may not be looked at
        print_error(f"a run here would fail: {error}")


def fewest_ranks(p: config.Parallel) -> int:
    """The smallest world size of the mesh."""
    degrees = (p.dp_replicate, p.dp_shard, p.cp, p.tp)
    return math.prod(degree for degree in degrees if degree != "auto")


def plan_each(
    cfg: config.Config, world_sizes: list[int], asked: Asked
) -> list[tuple[dict, list[Moment]]]:
    """The plan of each world size; of one that is refused {"world_size", "problems"}.

    Raises one ConfigError with the problems of all if all are refused.
    """
    epoch = samples_per_epoch(cfg)
    plans = []
    problems = []
    for ranks in world_sizes:
        try:
            plans.append(planned(cfg, ranks, asked, epoch))
        except ConfigError as error:
            plans.append(({"world_size": ranks, "problems": [*error.problems]}, []))
            problems += [f"--world-size {ranks}: {problem}" for problem in error.problems]
    if all("problems" in row for row, _ in plans):
        raise ConfigError(*problems)
    return plans


def print_tables(rows: list[dict], cfg: config.Config, asked: Asked, show_config: bool) -> None:
    """Prints the verdicts, the configuration if it is wanted, and the tables. All around a
    configuration is a comment: the output is TOML."""
    details = [table(row, cfg, asked) for row in rows if "problems" not in row]
    if len(rows) > 1:
        details.append(compared(rows))
    verdicts = "\n".join(verdict(row, cfg, asked) for row in rows) + "\n"
    if not show_config:
        print_line(verdicts)
        print_line("\n".join(details))
        return
    print_line(textwrap.indent(verdicts, "# "))
    print_line(config.to_toml(cfg))
    print_line(textwrap.indent("\n".join(details), "# "))


def print_advice(rows: list[dict], cfg: config.Config, args: Namespace, asked: Asked) -> None:
    """Prints what to change where a plan does not fit, and where gather_once would make it faster:
    on stderr, so that --json stays JSON."""
    for row in rows:
        if args.json:
            print(verdict(row, cfg, asked), file=sys.stderr)
        if not row["fits"]:
            print(advise(row["world_size"], args, asked), file=sys.stderr)
        elif asked.gpu and not args.json:
            print(faster(row, row["world_size"], args, asked), end="", file=sys.stderr)


def samples_per_epoch(cfg: config.Config) -> float | None:
    """Samples until every source has been read once; None if data or tokenizer is missing, or not
    this configuration's."""
    if cfg.data.tokenizer and not os.path.exists(cfg.data.tokenizer):
        return None
    if not is_prepared(cfg.data, cfg.model.vocab_size):
        return None
    try:
        dataset = open_dataset(cfg, train=False)
    except ConfigError:  # token files that are on another machine
        return None
    # a source gives `weight` of every `period` samples
    samples = []
    for source, weight in zip(dataset.sources, dataset.mixture.weights):
        samples.append((source.order.epoch_length or 0) * dataset.mixture.period / weight)
    return max(samples)
