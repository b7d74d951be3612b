"""The plan against a fully simulated step: every block, on fake tensors, as rank 0 of many ranks.

    python -m benchmarks.simulate configs/llama70b.toml --world-size 256,16384

Prints for each number of ranks the allocated peak by the plan, which runs few blocks, and by the
full step. Also collectives and bytes by the plan, the step and the closed forms (tests/theory.py), which must
be equal, the smallest shard, and the size of a checkpoint's files. Further options override the
configuration's.
"""

import argparse
import sys
import time
from collections import Counter

import config
from config import ConfigError
from model.build import meta_model
from tests import theory
from tools.planner.plan import GIB, Asked, plan
from tools.planner.simulate import Step, simulate

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def sent(step: Step) -> dict[str, tuple[int, int]]:
    """{kind of collective: (number, bytes)} of a step."""
    totals = Counter()
    for phase in step.phases:
        for (_, kind, unit), size in phase.sent.items():
            totals[kind, unit] += size * phase.times
    return {kind: (totals[kind, "number"], totals[kind, "bytes"]) for kind in KINDS}


def compare(cfg: config.Config, ranks: int) -> tuple[str, bool]:
    """(a line of the table, whether the plan is right)."""
    model = meta_model(cfg.model, cfg.lora)
    began = time.perf_counter()
    planned = plan(cfg, ranks, Asked(without_cuda=True))
    plan_seconds = time.perf_counter() - began
    began = time.perf_counter()
    step = simulate(cfg, ranks, all_blocks=True)
    step_seconds = time.perf_counter() - began
    peak = step.peak().peak.total() / GIB
    formula = theory.collectives(cfg, model, ranks)
    equal = planned["collectives_per_step"] == sent(step) == formula
    shards = theory.largest_shards(model, planned["shards"], planned["tp"]).values()
    saved = (planned["parameter_bytes_per_rank"] + planned["optimizer_bytes_per_rank"]) / 2**20
    gathers, gathered = formula["all_gather"]
    off = planned["peak_gib"] / peak - 1
    return (
        f"{ranks:7,} {planned['peak_gib']:9.3f} {peak:9.3f} {off:+8.3%} "
        f"{'equal' if equal else 'DIFFER':>11} {gathered / max(1, gathers) / ranks / 2**20:16.3f} "
        f"{min(shards):14,} {saved:13.1f} {plan_seconds:6.1f} {step_seconds:6.1f}",
        equal and -0.01 <= off <= 0.03,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.simulate", allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument(
        "--world-size", type=lambda text: [int(n) for n in text.split(",")], default=[]
    )
    args, overrides = parser.parse_known_args(argv)
    right = True
    try:
        if args.world_size:
            print(
                "  ranks  plan GiB  step GiB      off  collectives  MiB a rank sends"
                "  smallest shard  MiB it saves  plan s  step s"
            )
        for ranks in args.world_size:
            line, fine = compare(config.load(args.config, overrides), ranks)
            right &= fine
            print(line, flush=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
