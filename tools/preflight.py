"""What a machine or a cluster lacks for a run, reported before it would end the run.

    ./run_train.sh -m preflight CONFIG [--section.key=value ...]

The launcher starts this before the ranks. It prints warnings. If a problem would end the run, it
exits with 2 and prints a line per problem: the limit, its value and what to do. Needs no torch.
"""

import math
import resource
import shutil
from collections.abc import Iterator

import config
from checkpoint import catalog
from config import ConfigError
from launch.ranks import Ranks
from system import print_error

GIB = 2**30
# Rank 0 opens FILES, and FILES_OF_RANK more per rank: its store connects to each rank, as do the
# process groups that every run has. Measured, without the connections of NCCL, tp and cp.
FILES_OF_RANK = 4
FILES = 30
BYTES = {"float32": 4, "bfloat16": 2}


def open_files(cfg: config.Config, ranks: Ranks) -> Iterator[str]:
    """Checks that rank 0 may open enough files for gloo. Checks the hard limit, because each rank
    raises its soft limit to that."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_RANK * ranks.total + FILES
    if limit != resource.RLIM_INFINITY and needed > limit:
        yield (
            f"RLIMIT_NOFILE = {limit}: rank 0 of {ranks.total} opens {needed} files and more; raise "
            f"the hard limit: ulimit -Hn {2 * needed}, or LimitNOFILE={2 * needed} of the service "
            "that starts jobs"
        )


def disk(cfg: config.Config, ranks: Ranks) -> Iterator[str]:
    """Checks that the disk has room for the run's checkpoints."""
    if not cfg.checkpoint:
        return
    root = catalog.root_of(cfg)  # may be a link to another disk
    folder = root.absolute()
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    existing = len(catalog.steps(root))
    count = most_checkpoints(cfg)
    size = checkpoint_bytes(cfg)
    if not usage.total or max(1, count - existing) * size <= usage.free:  # total 0: object storage
        return
    remedy = "name a run.output_dir on another disk"
    if cfg.checkpoint.keep_last != 1:
        remedy += ", or lower keep_last"
    text = (
        f"[checkpoint] keep_last = {cfg.checkpoint.keep_last or 'all'}: {count} checkpoints of "
        f"{gib(size)}, {existing} of which exist, and {gib(usage.free)} are free in {folder}; "
        f"{remedy}"
    )
    if size > usage.free and not existing:
        yield text
    else:
        print_error(f"warning: {text}")


def most_checkpoints(cfg: config.Config) -> int:
    """The maximum number of checkpoints at any time. The oldest is removed only after the newest is
    complete."""
    c = cfg.checkpoint
    assert c
    saves = math.ceil(cfg.train.steps / c.save_every_steps) if c.save_every_steps else 1
    if not c.keep_last:
        return saves
    milestones = cfg.train.steps // c.keep_every_steps if c.keep_every_steps else 0
    return min(saves, c.keep_last + milestones + 1)


def matrix_elements(m: config.Model) -> int:
    block = 2 * m.dim * m.width_per_head * (m.n_heads + m.n_kv_heads) + 3 * m.dim * m.ffn_dim
    tables = 1 if m.tie_embeddings else 2
    return m.n_layers * block + tables * m.vocab_size * m.dim


def checkpoint_bytes(cfg: config.Config) -> float:
    """The approximate size of a checkpoint: the weight matrices in float32, and the optimizer's
    state for them. 0 with adapters or frozen modules, which save little."""
    if cfg.lora or cfg.model.freeze:
        return 0
    moments = 1 if cfg.optim.name == "muon" else 2  # muon stores one for most matrices
    return (4 + moments * BYTES[cfg.optim.state_dtype]) * matrix_elements(cfg.model)


def gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def main(argv: list[str]) -> int:
    args = config.parse_arguments(argv)
    cfg = config.load(args.config, args.overrides)
    ranks = Ranks.from_environment()
    checks = [open_files]
    if not args.eval_only:  # an evaluation writes nothing
        checks.append(disk)
    problems = [problem for check in checks for problem in check(cfg, ranks)]
    if problems:
        raise ConfigError(*problems)
    return 0


if __name__ == "__main__":
    config.run_tool(main)
