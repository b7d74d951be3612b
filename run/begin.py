"""What a rank does first, before it imports torch; and what the launcher hands to it."""

import gc
import os
import pathlib
import signal
import sys
from argparse import Namespace
from dataclasses import replace

import config
from config import ConfigError
from system import die_with_parent

CONFIG = "config.toml"  # the configuration in an attempt's folder
ATTEMPT = "TRAINER_ATTEMPT"  # the variable that names the attempt's folder to torchrun and ranks
PARENT = "TRAINER_PARENT"  # the process id of what starts the ranks: launcher or torchrun
# of processes that another launcher has started: torchrun, Open MPI, MPICH or Intel MPI, srun
COUNTS = (
    "WORLD_SIZE",
    "PET_NNODES",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


def check_not_one_of_several() -> None:
    """Raises ConfigError if another launcher has started several processes, of which this is one:
    each would train a model of its own."""
    for name in COUNTS:
        value = os.environ.get(name) or "1"
        if value not in ("1", "1:1"):
            raise ConfigError(
                f"{name}={value}: another launcher started this process as one of several; to be one "
                f"of them: torchrun train.py CONFIG (docs/cluster.md); to train alone: env -u {name}"
            )


def resume_newest(cfg: config.Config) -> config.Config:
    """The configuration of a restart: `checkpoint.resume = N` counts in the first attempt, later
    ones resume from the newest checkpoint."""
    if not (cfg.checkpoint and isinstance(cfg.checkpoint.resume, int)):
        return cfg
    return replace(cfg, checkpoint=replace(cfg.checkpoint, resume="auto"))


def begin_rank(usage: str) -> tuple[Namespace, config.Config]:
    """What a rank does first, before it imports torch, which takes seconds: its arguments and
    configuration, which the launcher has resolved, or which it reads itself without one. Exits with
    2 if they are invalid. usage: of --help."""
    gc.disable()  # until the imports are done: it takes a fifth of their time, and frees nothing
    # until the run begins, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    argv = sys.argv[1:]
    is_resolved = ATTEMPT in os.environ
    if is_resolved:
        argv = [str(pathlib.Path(os.environ[ATTEMPT], CONFIG))]
    args, cfg = config.from_command_line(argv, usage, resolved=is_resolved)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not args.eval_only:
        cfg = resume_newest(cfg)
    return args, cfg
