"""SLURM: how a job starts its ranks on all of its nodes, and when it requeues itself."""

import contextlib
import os
import re
import subprocess

from files import print_error


def on_nodes(torchrun: list[str], nodes: int, job: str, attempt: list[str]) -> list[str]:
    """The command that runs torchrun on each of the job's nodes. attempt: new each time that the job is requeued."""
    # scancel sends TERM to every process of the job. The ranks save and exit on their own, and torchrun after them. If
    # torchrun handled TERM too, it would exit as failed, with a traceback on each node.
    torchrun = ["bash", "-c", 'trap "" TERM; exec "$@"', "bash", *torchrun]
    if nodes == 1:
        return [*torchrun, "--standalone"]
    names = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], check=True,
                           capture_output=True, text=True).stdout.split()
    # One task per node, with all of the job's cores there: torchrun and its ranks share them. No MPI: ranks connect
    # through torchrun's rendezvous. Its id is new in each attempt, so that no late process of the last one joins.
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL", "--cpu-bind=none",
            "--mpi=none", "--kill-on-bad-exit=1", *torchrun, f"--nnodes={nodes}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={names[0]}:{29500 + int(job) % 1000}", f"--rdzv-id={'-'.join(attempt)}"]


def requeue(job: str, ahead_of_limit: bool) -> None:
    """Requeues a job that has stopped after saving, if that was asked for (ahead_of_limit), or if SLURM preempts it in
    a partition with GraceTime: SLURM requeues a job when its grace time is over, but not one that has ended by then."""

    def report(text: str) -> None:
        print_error(f"run_train.sh: job {job}: {text}")

    def scontrol(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True).stdout
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
