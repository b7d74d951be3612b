"""What a rank does before it imports torch, and how the launcher passes it its configuration."""

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
# Environment variables for torchrun and the ranks.
ATTEMPT = "TRAINER_ATTEMPT"  # the attempt's folder
PARENT = "TRAINER_PARENT"  # the process id of the launcher or torchrun, which starts the ranks
# How many processes another launcher has started: torchrun, Open MPI, MPICH or Intel MPI, srun.
PROCESS_COUNTS = (
    "WORLD_SIZE",
    "PET_NNODES",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


def check_not_one_of_several() -> None:
    """Raises ConfigError if another launcher started this process as one of several: each would train
    a separate model."""
    for name in PROCESS_COUNTS:
        value = os.environ.get(name) or "1"
        if value not in ("1", "1:1"):
            raise ConfigError(
                f"{name}={value}: another launcher started this process as one of several; to be one "
                f"of them: torchrun train.py CONFIG (docs/cluster.md); to train alone: env -u {name}"
            )


def resume_newest(cfg: config.Config) -> config.Config:
    """The configuration of a restart. Only the first attempt resumes from step N of
    `checkpoint.resume = N`. A restart resumes from the newest checkpoint."""
    if not (cfg.checkpoint and isinstance(cfg.checkpoint.resume, int)):
        return cfg
    return replace(cfg, checkpoint=replace(cfg.checkpoint, resume="auto"))


def begin_rank(usage: str) -> tuple[Namespace, config.Config]:
    """Returns a rank's arguments and configuration, before the slow import of torch. Under the
    launcher the configuration is resolved already. Exits with 2 if it is invalid. usage: the text
    that --help prints first."""
    gc.disable()  # until the imports are done: it takes a fifth of their time and frees nothing
    # Until the run begins, Ctrl-C ends the process without a traceback.
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
