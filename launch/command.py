"""The command that starts the ranks, plain Python or torchrun, and their environment. Of a SLURM job: slurm.py.

python -m launch.command --usable [CONFIG ...]     exits with 0 if this Python can run it (without: any run)
"""

import contextlib
import os
import pathlib
import re
import sys
from dataclasses import dataclass

import config
from config import ConfigError
from launch.slurm import on_nodes
from lifecycle.gpus import visible_gpus

TORCH = ((2, 11), (2, 15))  # oldest and newest supported versions
TRAIN = str(pathlib.Path(__file__).parent.parent / "train.py")


@dataclass(frozen=True)
class Ranks:
    """How many processes there are, and where."""

    nodes: int
    local: int  # on each node
    restarts: int  # by torchrun, after a crash
    job: str | None  # SLURM's job id

    @property
    def total(self) -> int:
        return self.nodes * self.local

    @property
    def attempt(self) -> list[str]:
        """The job id and its requeue count; empty outside SLURM."""
        return [self.job, os.environ.get("SLURM_RESTART_COUNT", "0")] if self.job else []

    @classmethod
    def from_environment(cls) -> "Ranks":
        """From NPROC, MAX_RESTARTS and SLURM's variables. Raises ConfigError."""
        env = os.environ

        def number(name: str, text: str, least: int) -> int:
            if not (re.fullmatch("[0-9]+", text) and int(text) >= least):
                raise ConfigError(
                    f"run_train.sh: {name}={text}: must be a number" + " of processes" * (least > 0)
                )
            return int(text)

        job = env.get("SLURM_JOB_ID")
        local = env.get("NPROC") or env.get("SLURM_GPUS_ON_NODE") or str(visible_gpus())
        local = "1" if local == "0" and not env.get("NPROC") else local  # no GPU
        nodes = env.get("SLURM_NNODES", "1") if job else "1"
        return cls(
            number("SLURM_NNODES", nodes, 1),
            number("NPROC", local, 1),
            number("MAX_RESTARTS", env.get("MAX_RESTARTS") or ("3" if job else "0"), 0),
            job,
        )

    def command(self) -> list[str]:
        """The command that starts all ranks, without the arguments of train.py."""
        if self.total == 1 and not self.restarts:
            return [sys.executable, TRAIN]
        # unhandled, USR1 would end torchrun and its ranks at once
        heard = "SIGINT,SIGHUP,SIGQUIT,SIGUSR1" + ",SIGTERM" * (not self.job)
        # else each launch leaves a folder in the temporary directory
        torchrun = [
            sys.executable,
            "-m",
            "launch.torchrun",
            f"--nproc-per-node={self.local}",
            f"--max-restarts={self.restarts}",
            f"--signals-to-handle={heard}",
            "--log-dir=/dev/null",
        ]
        if not self.job:
            return [*torchrun, "--standalone", TRAIN]
        return [*on_nodes(torchrun, self.nodes, self.job, self.attempt), TRAIN]

    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks; those that the user has set are kept."""
        # the job's cores, not the machine's; without a job those that this process may use
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
        found = {
            "OMP_NUM_THREADS": str(max(1, cores // self.local)),
            # from torch 2.12 on, torchrun kills its ranks this many seconds after a signal that only it received;
            # they may be saving, and the default of 30 is short for that
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
            # several streams allocate: avoids fragmentation into blocks too small for larger requests
            "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
            or "expandable_segments:True",
            # else ranks that torchrun restarts find their predecessors' addresses in its store and cannot connect
            # (github.com/pytorch/pytorch/issues/135712)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if "SLURM_CPUS_PER_TASK" in os.environ:  # from SLURM 22.05 on, srun reads only this name
            found["SRUN_CPUS_PER_TASK"] = os.environ["SLURM_CPUS_PER_TASK"]
        return {name: os.environ.get(name) or value for name, value in found.items()}


def commits(cfg: config.Config) -> list[str]:
    """Overrides with the commits of Hugging Face repositories: the ranks take those that this process has found."""
    found = {"model.init_from": cfg.model.init_from, "data.tokenizer": cfg.data.tokenizer}
    return [
        f"--{option}={name}"
        for option, name in found.items()
        if name and re.search("@[0-9a-f]{40}$", name)
    ]


def usable(argv: list[str]) -> bool:
    """Whether this Python can run these arguments, or without any, everything. Imports none of the packages."""
    import importlib.metadata
    import importlib.util

    from data.folder import is_prepared

    preparing = ["sentencepiece", "tokenizers", "datasets"]
    needed = [] if argv else ["numpy", "tensorboard", "safetensors", *preparing]
    try:
        if argv and not (args := config.parse_arguments(argv)).dry_run:
            cfg = config.load(args.config, args.overrides)
            needed.append("numpy")  # torch.distributed's object collectives need it
            needed += ["tensorboard"] * (cfg.log.tensorboard and not args.eval_only)
            needed += ["safetensors"] * (cfg.model.init_from is not None)
            if not is_prepared(cfg):
                needed += preparing
    except (ConfigError, SystemExit) as error:  # the run itself will report what is wrong
        needed += ["huggingface_hub"] * ("needs huggingface_hub" in str(error))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        version = tuple(int(n) for n in importlib.metadata.version("torch").split(".")[:2])
        return TORCH[0] <= version <= TORCH[1] and all(
            importlib.util.find_spec(name) for name in needed
        )
    return False


if __name__ == "__main__":
    sys.exit(not usable(sys.argv[2:]))
