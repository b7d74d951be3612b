"""SLURM: how a job starts its ranks on all of its nodes, and when it requeues itself."""

import contextlib
import os
import re
import subprocess

import config
from config import ConfigError
from files import print_error
from lifecycle import STOPPED
from lifecycle.folder import holder, lock, read_status, write_status

IDLE_ATTEMPTS = 3  # attempts of a job in a row without a step


def on_nodes(torchrun: list[str], nodes: int, job: str, attempt: list[str]) -> list[str]:
    """The command that runs torchrun on each of the job's nodes. attempt: new each time that the job is requeued."""
    # scancel sends TERM to every process of the job. The ranks save and exit on their own, and torchrun after them. If
    # torchrun handled TERM too, it would exit as failed, with a traceback on each node.
    torchrun = ["bash", "-c", 'trap "" TERM; exec "$@"', "bash", *torchrun]
    if nodes == 1:
        return [*torchrun, "--standalone"]
    names = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    # One task per node, with all of the job's cores there: torchrun and its ranks share them. No MPI: ranks connect
    # through torchrun's rendezvous. Its id is new in each attempt, so that no late process of the last one joins.
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--export=ALL",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        *torchrun,
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={names[0]}:{29500 + int(job) % 1000}",
        f"--rdzv-id={'-'.join(attempt)}",
    ]


def end_of_stopped(
    cfg: config.Config, job: str, launch: str, before: dict, ahead_of_limit: bool
) -> int:
    """Records that a job's launch was stopped, unless the run is finished or another launch holds it, and requeues the
    job if it has to. Returns the exit code: a failure after the third attempt of a job in a row without a step, since
    it would requeue itself forever.

    before: the status before the launch, with the step that it resumed after.
    """
    folder, attempts = config.run_folder(cfg), 0
    with contextlib.suppress(ConfigError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        held, status = lock(folder), read_status(folder)
        if status.get("state") != "finished":
            step, start = status.get("step", 0), before.get("step", 0)
            if cfg.checkpoint and isinstance(cfg.checkpoint.resume, int):
                start = cfg.checkpoint.resume  # the run restarted from there
            trained = status.get("launch") == launch and step > start
            attempts = 0 if trained else before.get("attempts_without_step", 0) + 1
            state = "preempted" if attempts < IDLE_ATTEMPTS else "failed"
            write_status(folder, state, step, holder(status), attempts_without_step=attempts)
        held.release()
    if attempts >= IDLE_ATTEMPTS:
        print_error(
            f"{folder}: {attempts} times in a row the job was stopped before it made a step; give it more time "
            "(--time) than its start and the notice ahead of the limit take"
        )
        return 1
    requeue(job, ahead_of_limit)
    return STOPPED


def requeue(job: str, ahead_of_limit: bool) -> None:
    """Requeues a job that has stopped after saving, if that was asked for (ahead_of_limit), or if SLURM preempts it in
    a partition with GraceTime: SLURM requeues a job when its grace time is over, but not one that has ended by then."""

    def report(text: str) -> None:
        print_error(f"run_train.sh: job {job}: {text}")

    def scontrol(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(
                ["scontrol", *words], check=True, capture_output=True, text=True
            ).stdout
        return None

    why = "ahead of its time limit" if ahead_of_limit else None
    if not why and re.search(r"PreemptTime=\d", scontrol("show", "job", job) or ""):
        why = "being preempted"
    if not why:
        report("stopped; it does not requeue itself: unless SLURM does, submit it again to resume")
        return
    report(f"stopped, {why}; requeueing it, to resume where it stopped")
    if scontrol("requeue", job) is None:
        report("it could not be requeued; submit it again to resume")
