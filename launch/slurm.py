"""SLURM: how a job starts its ranks on all of its nodes, and when it requeues itself."""

import contextlib
import os
import re
import shutil
import subprocess

import config
from config import ConfigError
from files import print_error
from lifecycle import STOPPED
from lifecycle.folder import last_holder, lock, read_status, write_status

# torchrun's options for one node. It would look up this machine's name, which may not resolve, or
# to an address that does not reach it (a VPN, /etc/hosts).
ONE_NODE = ["--standalone", "--nnodes=1", "--local-addr=localhost"]
IDLE_ATTEMPTS = 3  # attempts of a job in a row without a step


def on_nodes(torchrun: list[str], nodes: int, job: str, attempt: list[str]) -> list[str]:
    """The command that runs torchrun on each of the job's nodes. attempt: new each time that the
    job is requeued."""
    # scancel sends TERM to every process of the job. The ranks save and exit on their own, and
    # torchrun after them. If torchrun handled TERM too, it would exit as failed, with a traceback
    # on each node.
    script = 'trap "" TERM; exec "$@"'
    if nodes == 1:
        return ["bash", "-c", script, "bash", *torchrun, *ONE_NODE]
    if not shutil.which("srun"):
        raise ConfigError(
            f"SLURM_NNODES={nodes}: needs srun, which is not installed here (in a container?), to "
            "start processes on the job's other nodes; start torchrun on each (docs/cluster.md)"
        )
    head = first_host(os.environ.get("SLURM_JOB_NODELIST", ""))
    # The id of the rendezvous is new in each attempt, so that no late process of the last attempt
    # joins.
    rendezvous = [
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{rendezvous_port(job)}",
        f"--rdzv-id={'-'.join(attempt)}",
    ]
    # One task per node, with all of the job's cores there, which torchrun and its ranks share. No
    # MPI: ranks connect through torchrun's rendezvous.
    srun = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--export=ALL",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
    ]
    # The name by which the other nodes know this one, as they know the head. Without it torchrun
    # would announce what this machine's own name resolves to on itself: perhaps localhost.
    script = f'export PET_LOCAL_ADDR="${{SLURMD_NODENAME-}}"; {script}'
    return [*srun, "bash", "-c", script, "bash", *torchrun, *rendezvous]


def rendezvous_port(job: str) -> int:
    """The port of the first node to which the job's other nodes connect."""
    return 29500 + int(job) % 1000


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM abbreviates it: "gpu007" of "gpu[007-009,012],cpu1". (To
    ask scontrol would need it inside the job's container.) Raises ConfigError."""
    # a comma inside of brackets separates numbers, not hosts
    first = re.match(r"((?:[^,\[]|\[\w[^]]*\])+)(?:,|$)", nodes)
    if not first:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes}: must name the job's nodes")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[1])


def end_of_stopped(
    cfg: config.Config, job: str, launch_id: str, status_before: dict, ahead_of_limit: bool
) -> int:
    """Records that a job's launch was stopped, unless the run is finished or another launch holds
    it, and requeues the job if it has to. Returns the exit code: a failure after the third attempt
    of a job in a row without a step, since it would requeue itself forever.

    status_before: the run's status before the launch, with the step that it resumed after.
    """
    folder = config.run_folder(cfg)
    attempts = 0
    with contextlib.suppress(ConfigError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        status = read_status(folder)
        if status.get("state") != "finished":
            attempts = attempts_without_step(cfg, launch_id, status_before, status)
            write_status(
                folder,
                "preempted" if attempts < IDLE_ATTEMPTS else "failed",
                status.get("step", 0),
                last_holder(status),
                attempts_without_step=attempts,
            )
        held.release()
    if attempts >= IDLE_ATTEMPTS:
        print_error(
            f"{folder}: {attempts} times in a row the job was stopped before it made a step; give it "
            "more time (--time) than its start and the notice ahead of the limit take"
        )
        return 1
    requeue(job, ahead_of_limit)
    return STOPPED


def attempts_without_step(
    cfg: config.Config, launch_id: str, status_before: dict, status: dict
) -> int:
    """How many attempts of a job in a row, up to this launch, trained no step. status: the run's
    after the launch."""
    start = status_before.get("step", 0)
    if cfg.checkpoint and isinstance(cfg.checkpoint.resume, int):
        start = cfg.checkpoint.resume  # the run restarted from there
    has_trained = status.get("launch") == launch_id and status.get("step", 0) > start
    if has_trained:
        return 0
    return status_before.get("attempts_without_step", 0) + 1


def requeue(job: str, ahead_of_limit: bool) -> None:
    """Requeues a job that has stopped after saving, if that was asked for (ahead_of_limit), or if
    SLURM preempts it in a partition with GraceTime: SLURM requeues a job when its grace time is
    over, but not one that has ended by then."""
    about = f"run_train.sh: job {job}"
    if ahead_of_limit:
        reason = "ahead of its time limit"
    elif re.search(r"PreemptTime=\d", scontrol("show", "job", job) or ""):
        reason = "being preempted"
    else:
        print_error(
            f"{about}: stopped; it does not requeue itself: unless SLURM does, submit it again to "
            "resume"
        )
        return
    print_error(f"{about}: stopped, {reason}; requeueing it, to resume where it stopped")
    if scontrol("requeue", job) is None:
        print_error(f"{about}: it could not be requeued; submit it again to resume")


def scontrol(*words: str) -> str | None:
    """The output of scontrol; None if it fails."""
    try:
        return subprocess.run(
            ["scontrol", *words], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
