"""The command that starts the ranks, plain Python or torchrun, and their environment. For SLURM's
part see slurm.py.

    python -m launch.command --usable [CONFIG ...]

Exits with 0 if this Python can run these arguments, or without any, every configuration.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
from dataclasses import dataclass

import config
from config import ConfigError
from data.cores import usable_cores
from files import python_command
from launch.slurm import ONE_NODE, on_nodes
from lifecycle.gpus import visible_gpus

TORCH = ((2, 11), (2, 15))  # oldest and newest supported versions
TRAIN = str(pathlib.Path(__file__).parent.parent / "train.py")
# What torchrun and other launchers tell a process that they start, and what torchrun reads as its
# own options (PET_...).
OF_A_LAUNCHER = re.compile(
    "(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_.*"
)


@dataclass(frozen=True)
class Ranks:
    """How many processes there are, and where."""

    nodes: int
    local: int  # ranks on each node
    restarts: int  # by torchrun, after a crash
    job: str | None  # SLURM's job id

    @property
    def total(self) -> int:
        return self.nodes * self.local

    @property
    def attempt(self) -> list[str]:
        """The job id and its requeue count; empty outside SLURM."""
        if not self.job:
            return []
        return [self.job, os.environ.get("SLURM_RESTART_COUNT", "0")]

    @classmethod
    def from_environment(cls) -> "Ranks":
        """From NPROC, MAX_RESTARTS and SLURM's variables. Raises ConfigError."""
        env = os.environ
        job = env.get("SLURM_JOB_ID")
        if not job:
            check_not_one_of_several()
        nodes = env.get("SLURM_NNODES", "1") if job else "1"
        # SLURM_GPUS_ON_NODE is a number; with its type, as gpu:h100:4, where a site sets it itself
        gpus_on_node = env.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]
        local = env.get("NPROC") or gpus_on_node or str(visible_gpus())
        if local == "0" and not env.get("NPROC"):  # no GPU
            local = "1"
        restarts = env.get("MAX_RESTARTS") or ("3" if job else "0")
        return cls(
            number_of_processes("SLURM_NNODES", nodes),
            number_of_processes("NPROC", local),
            number("MAX_RESTARTS", restarts),
            job,
        )

    def command(self) -> list[str]:
        """The command that starts all ranks, without the arguments of train.py."""
        if self.total == 1 and not self.restarts:
            return [sys.executable, TRAIN]
        # unhandled, USR1 would end torchrun and its ranks at once
        signals = "SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        if not self.job:
            signals += ",SIGTERM"
        torchrun = [
            *python_command("from launch.torchrun import main; main()"),
            f"--nproc-per-node={self.local}",
            f"--max-restarts={self.restarts}",
            f"--signals-to-handle={signals}",
            # else each launch leaves a folder in the temporary directory
            "--log-dir=/dev/null",
        ]
        if not self.job:
            return [*torchrun, *ONE_NODE, TRAIN]
        return [*on_nodes(torchrun, self.nodes, self.job, self.attempt), TRAIN]

    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks; those that the user has set are kept."""
        # the job's cores, not the machine's; without a job those that this process may use
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or usable_cores())
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "expandable_segments:True"
        defaults = {
            "OMP_NUM_THREADS": str(max(1, cores // self.local)),
            # From torch 2.12 on, torchrun kills its ranks this many seconds after a signal that
            # only it received. They may be saving, and the default of 30 is short for that.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
            # several streams allocate: avoids fragmentation into blocks too small for larger
            # requests
            "PYTORCH_ALLOC_CONF": allocator,
            # else ranks that torchrun restarts find their predecessors' addresses in its store and
            # cannot connect (github.com/pytorch/pytorch/issues/135712)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if "OMP_WAIT_POLICY" not in os.environ:
            # How often libgomp's threads ask for work before they sleep. By default 300,000 times,
            # some 10 ms: where other processes want the cores, threads that only wait keep those
            # that work from them, and training is ten times slower. On idle cores 1,000 times cost
            # 2 % of a step of configs/tiny.toml; OMP_WAIT_POLICY=passive, which spins less, 18 %.
            defaults["GOMP_SPINCOUNT"] = "1000"
        if "SLURM_CPUS_PER_TASK" in os.environ:  # from SLURM 22.05 on, srun reads only this name
            defaults["SRUN_CPUS_PER_TASK"] = os.environ["SLURM_CPUS_PER_TASK"]
        return {name: os.environ.get(name) or value for name, value in defaults.items()}


def variables_of_a_launcher() -> list[str]:
    """Environment variables through which another launcher has told this process its part."""
    return [name for name in os.environ if OF_A_LAUNCHER.fullmatch(name)]


def check_not_one_of_several() -> None:
    """Raises ConfigError if another launcher has started several processes, of which this is one:
    each would train a model of its own."""
    for name in ("WORLD_SIZE", "PET_NNODES"):
        value = os.environ.get(name, "1")
        if value in ("", "1", "1:1"):
            continue
        unset = " ".join(f"-u {name}" for name in variables_of_a_launcher())
        raise ConfigError(
            f"{name}={value}: another launcher started this process as one of several, and "
            "run_train.sh starts processes on this machine alone; to be one of them: torchrun "
            f"train.py CONFIG (docs/cluster.md); to train here alone: env {unset} ./run_train.sh ..."
        )


def number(variable: str, text: str) -> int:
    """The value of an environment variable. Raises ConfigError."""
    if not re.fullmatch("[0-9]+", text):
        raise ConfigError(f"run_train.sh: {variable}={text}: must be a number")
    return int(text)


def number_of_processes(variable: str, text: str) -> int:
    """The value of an environment variable, at least 1. Raises ConfigError."""
    if not (re.fullmatch("[0-9]+", text) and int(text) > 0):
        raise ConfigError(f"run_train.sh: {variable}={text}: must be a number of processes")
    return int(text)


def commits(cfg: config.Config) -> list[str]:
    """Overrides that pin Hugging Face repositories to commits: the ranks load those that this
    process resolved."""
    names = {"model.init_from": cfg.model.init_from, "data.tokenizer": cfg.data.tokenizer}
    return [
        f"--{option}={name}"
        for option, name in names.items()
        if name and re.search("@[0-9a-f]{40}$", name)
    ]


def usable(argv: list[str]) -> bool:
    """Whether this Python can run these arguments, or without any, everything. Imports none of the
    packages."""
    return has_supported_torch() and all(map(importlib.util.find_spec, needed_packages(argv)))


def has_supported_torch() -> bool:
    """Whether torch is installed in a version of TORCH."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        return TORCH[0] <= (int(major), int(minor)) <= TORCH[1]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def needed_packages(argv: list[str]) -> list[str]:
    """The packages besides torch that a command line needs, or without one, every run."""
    from data.folder import is_prepared

    preparing = ["sentencepiece", "tokenizers", "datasets"]
    if not argv:
        return ["numpy", "tensorboard", "safetensors", *preparing]
    needed = []
    try:
        args = config.parse_arguments(argv)
        if args.dry_run:
            return []
        cfg = config.load(args.config, args.overrides)
        needed.append("numpy")  # torch.distributed's object collectives need it
        if cfg.log.tensorboard and not args.eval_only:
            needed.append("tensorboard")
        if cfg.model.init_from is not None:
            needed.append("safetensors")
        if not is_prepared(cfg):
            needed += preparing
    except (ConfigError, SystemExit) as error:  # the run itself will report what is wrong
        if "huggingface_hub" in str(error):  # it is missing
            needed.append("huggingface_hub")
    return needed


if __name__ == "__main__":
    sys.exit(not usable(sys.argv[2:]))
