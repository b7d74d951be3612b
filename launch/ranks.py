"""How many ranks there are, and the command and environment that start them. The command is train.py
for one rank, torchrun for several, and srun with torchrun on each node of a SLURM job."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

from config import ConfigError
from run.begin import ATTEMPT, PARENT, check_not_one_of_several
from run.watchdog import RankOutcome
from system import SIGNALS, print_error, python_command, usable_cores, visible_gpus

TRAIN = str(pathlib.Path(__file__).parent.parent / "train.py")
# Without --local-addr torchrun looks up this machine's name. It may not resolve, or resolve to an
# address that does not reach the machine (a VPN, /etc/hosts).
ONE_NODE = ["--standalone", "--nnodes=1", "--local-addr=localhost"]
EXPANDABLE = "expandable_segments:True"
# srun starts this on each node. torchrun announces the node by SLURM's name, which the other nodes can
# resolve. By default it would announce the address that the node's own name has locally.
ON_NODE = 'PET_LOCAL_ADDR="${SLURMD_NODENAME-}" exec "$@"'
# Variables that another launcher may have left, and that torchrun or a rank would read.
LAUNCHER_VARIABLES = re.compile(
    "(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|"
    f"(TORCHELASTIC|PET)_.*|{ATTEMPT}|{PARENT}"
)


@dataclass(frozen=True)
class Ranks:
    """How many processes there are, and where."""

    nodes: int
    local: int  # ranks on each node
    restarts: int  # how often the launcher may restart them after a failure
    job: str  # the SLURM job's id, or ""

    @property
    def total(self) -> int:
        return self.nodes * self.local

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Reads NPROC, MAX_RESTARTS and SLURM's variables. Raises ConfigError."""
        check_not_one_of_several()
        env = os.environ
        job = env.get("SLURM_JOB_ID", "")
        # SLURM_GPUS_ON_NODE is a number. Some sites set it themselves, as gpu:h100:4.
        gpus_on_node = env.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]
        return cls(
            number("SLURM_NNODES", env.get("SLURM_NNODES", "1") if job else "1", least=1),
            number("NPROC", env.get("NPROC") or gpus_on_node or str(max(1, visible_gpus())), 1),
            number("MAX_RESTARTS", env.get("MAX_RESTARTS") or ("3" if job else "0"), least=0),
            job,
        )

    def command(self, attempt: str) -> list[str]:
        """The command that starts all ranks, without the arguments of train.py. attempt: its id names
        the rendezvous, so that no late process of an earlier attempt joins. Raises ConfigError."""
        if self.total == 1:
            return [sys.executable, TRAIN]
        torchrun = [
            *python_command("from launch.agent import main; main()"),
            f"--nproc-per-node={self.local}",
            f"--signals-to-handle={','.join(number.name for number in SIGNALS)}",
            "--log-dir=/dev/null",  # by default each launch leaves a folder in /tmp
        ]
        if self.nodes == 1:
            return [*torchrun, *ONE_NODE, TRAIN]
        return [*on_nodes(torchrun, self.nodes, self.job, attempt), TRAIN]

    def environment(self, run_folder: pathlib.Path, timeout: float) -> dict[str, str]:
        """The ranks' environment. Variables that the user has set are kept. timeout: how many seconds
        ranks may take to end after a stop."""
        inherited = {}
        for name, value in os.environ.items():
            if not LAUNCHER_VARIABLES.fullmatch(name):
                inherited[name] = value
        # The cores of the job or, without one, those that this process may use.
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or usable_cores())
        records = (run_folder / "logs" / "nccl-rank-").absolute()
        defaults = {
            "OMP_NUM_THREADS": str(max(1, cores // self.local)),
            # libgomp's threads spin 300,000 times (10 ms) for work by default. Where processes
            # share cores that makes training ten times slower; 1,000 cost 2 % on idle cores.
            "GOMP_SPINCOUNT": "1000",
            # From torch 2.12 on, torchrun kills its ranks this many seconds after a stop. They
            # finish their step and save; the watchdog ends those that hang.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(timeout)),
            # Avoids fragmentation into blocks too small for larger requests. The user may have set
            # the variable by its older name.
            "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE),
            # NCCL's flight recorder: after a timeout each rank dumps its last collectives to a file.
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": str(records),
            PARENT: str(os.getpid()),
        }
        if "SLURM_CPUS_PER_TASK" in os.environ:  # from SLURM 22.05 on, srun reads only this name
            defaults["SRUN_CPUS_PER_TASK"] = os.environ["SLURM_CPUS_PER_TASK"]
        return defaults | inherited


def number(variable: str, text: str, least: int) -> int:
    """The value of an environment variable, from its text. Raises ConfigError."""
    if not (re.fullmatch("[0-9]+", text) and int(text) >= least):
        raise ConfigError(f"run_train.sh: {variable}={text}: must be a number, at least {least}")
    return int(text)


def on_nodes(torchrun: list[str], nodes: int, job: str, attempt: str) -> list[str]:
    """The command that runs torchrun on each of a job's nodes. Raises ConfigError."""
    if not shutil.which("srun"):
        raise ConfigError(
            f"SLURM_NNODES={nodes}: needs srun, which is not installed here (in a container?), to "
            "start processes on the job's other nodes; start torchrun on each (docs/cluster.md)"
        )
    head = first_host(os.environ.get("SLURM_JOB_NODELIST", ""))
    # One task per node: torchrun and its ranks share all of the job's cores there. No MPI: ranks
    # connect through torchrun's rendezvous.
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    srun += ["--export=ALL", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1"]
    rendezvous = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-id={attempt}"]
    rendezvous.append(f"--rdzv-endpoint={head}:{rendezvous_port(job)}")
    return [*srun, "bash", "-c", ON_NODE, "bash", *torchrun, *rendezvous]


def rendezvous_port(job: str) -> int:
    """The port on the first node to which the job's other nodes connect."""
    return 29500 + int(job) % 1000


def first_host(nodes: str) -> str:
    """The first host of SLURM's abbreviated list: "gpu007" of "gpu[007-009,012],cpu1". Raises
    ConfigError. scontrol would expand the list, but a job's container may not have it."""
    # A comma inside brackets separates numbers, not hosts.
    first = re.match(r"((?:[^,\[]|\[\w[^]]*\])+)(?:,|$)", nodes)
    if not first:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes}: must name the job's nodes")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[1])


def requeue(job: str, end: RankOutcome) -> None:
    """Requeues a stopped job if SLURM signalled its time limit (USR1), or if SLURM preempts it: in a
    partition with GraceTime, SLURM requeues only jobs that are still running when that is over. end:
    the outcome of a rank that exited without an error."""
    _, shown = subprocess.getstatusoutput(f"scontrol show job {job}")
    is_preempted = re.search(r"PreemptTime=\d", shown)
    outcome = "unless SLURM requeues it, submit it again to resume"
    if end.step == end.start:
        outcome = "no step was trained: give it more time (--time) than start and notice take"
    elif end.signal == signal.SIGUSR1 or is_preempted:
        failed, _ = subprocess.getstatusoutput(f"scontrol requeue {job}")
        outcome = "could not be requeued: submit it again to resume" if failed else "requeued"
    print_error(f"run_train.sh: job {job} stopped; {outcome}")
