"""The launcher: checks and prepares what one process can, runs the ranks, and turns their outcome
into an exit code.

    python -m launch.launch CONFIG [--section.key=value ...]      run_train.sh execs this

Exit codes: 0 finished, 2 invalid input, 75 stopped after saving, any other a failure. Ranks that
stop exit with 0, as torchrun takes any other code for a failure. So the code comes from the status
that carries this launch's id.

TERM, INT, HUP and USR1 are forwarded through a file that rank 0 polls: torchrun, on a signal, would
kill its ranks after a grace period that may be shorter than a save. In a SLURM job this process is
the batch script: USR1 comes ahead of the time limit and requeues the job; after TERM (scancel)
SLURM decides.
"""

import signal

from launch.interruption import Interrupted, Interruption, listen

if __name__ == "__main__":
    # notes signals from now on, before the slow imports; run_train.sh blocks them until now
    interruption = Interruption()
    listen(interruption)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

import contextlib
import errno
import os
import pathlib
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import config
from config import ConfigError
from data import formats
from data.preparer import TEXT_IS_WRONG, Preparer
from files import die_with_parent, print_error
from launch.checks import check_launch
from launch.command import Ranks, commits, variables_of_a_launcher
from launch.slurm import end_of_stopped
from lifecycle import INPUT_IS_WRONG, SIGNALS, STOPPED, TWICE_SECONDS
from lifecycle.folder import (
    failures,
    last_holder,
    lock,
    read_status,
    remove_traces,
    resume_once,
    stop_file,
    write_status,
)
from schema import repeated, together

WATCH_SECONDS = 0.5  # between looks at the process that prepares text
# of an OSError: the path that it names is not what an option or the configuration takes it for, or
# not this user's. All others are the machine's: a full disk, too many open files.
ERRORS_OF_PATHS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


def launch(argv: list[str], interruption: Interruption) -> int:
    """Launches the run that the command line describes; returns the exit code. Requeues a stopped
    job if SLURM will not."""
    try:
        args = config.parse_arguments(argv)
        ranks, cfg = together(
            Ranks.from_environment, lambda: config.load(args.config, args.overrides)
        )
        start_ranks = ranks.command()
    except ConfigError as error:
        print_error(str(error))
        return INPUT_IS_WRONG
    for line in repeated(args.overrides):
        print_error(line)
    folder = config.run_folder(cfg)
    launch_id = ".".join([*ranks.attempt, uuid.uuid4().hex])
    if not args.eval_only:  # an evaluation does not take the folder
        cfg = replace(cfg, checkpoint=resume_once(cfg, launch_id))
    status_before = read_status(folder)
    preparer = Preparer(ranks.local)

    try:
        # what follows may read from the network, verify checkpoints, and prepare data for hours
        interruption.allow()
        completed, format_options = formats.complete(args, cfg)
        cfg = replace(completed, checkpoint=cfg.checkpoint)
        has_work = check_launch(cfg, ranks, args, preparer)
        interruption.raises = False
    except (Interrupted, Exception) as error:
        # an interrupted check may have raised anything
        if interruption.asked and interruption.raises:
            listen(signal.SIG_IGN)
            if args.eval_only:
                return 128 + signal.SIGINT
            print_error("stopped before the run began")
            return requeue_or_mark(cfg, ranks.job, launch_id, status_before, interruption.asked)
        if isinstance(error, OSError) and error.errno:
            print_error(f"{error.filename or folder}: {error.strerror}")
            return INPUT_IS_WRONG if error.errno in ERRORS_OF_PATHS else 1
        if not isinstance(error, ConfigError):
            raise
        print_error(str(error))
        return INPUT_IS_WRONG
    if not has_work:
        return 0

    command = [*start_ranks, *argv, f"--launch={launch_id}", *format_options, *commits(cfg)]
    for name in variables_of_a_launcher():  # torchrun and the ranks would take them as theirs
        del os.environ[name]
    os.environ.update(ranks.environment())
    if args.eval_only:
        return run_evaluation(command, interruption)
    returned = run_ranks(command, folder, launch_id, interruption, preparer)
    preparer.close()
    code = exit_code(folder, launch_id, ranks.total, returned)
    if code == STOPPED and preparer.exit_code == TEXT_IS_WRONG:
        print_error(
            "stopped and saved: the text is wrong, see above; mended, the same command resumes"
        )
        mark_failed(folder, launch_id, read_status(folder), INPUT_IS_WRONG)
        return INPUT_IS_WRONG
    if code == STOPPED:
        return requeue_or_mark(cfg, ranks.job, launch_id, status_before, interruption.asked)
    return code


def run_evaluation(command: list[str], interruption: Interruption) -> int:
    """Runs the ranks' command of an evaluation, which a signal ends at once: it has nothing to
    save."""
    try:
        interruption.allow()
        return subprocess.run(command, preexec_fn=partial(die_with_parent, os.getpid())).returncode
    except Interrupted:
        listen(signal.SIG_IGN)
        return 128 + signal.SIGINT


class StopForwarder:
    """The launcher's signal handler while the ranks run. Asks them through the stop file to save
    and stop, and kills them at the second of two Ctrl-C in quick succession."""

    def __init__(self, file: pathlib.Path, interruption: Interruption):
        self.file = file
        self.interruption = interruption
        self.child: subprocess.Popen | None = None  # once it runs
        self.last_interrupt = float("-inf")  # when the last Ctrl-C came
        self.has_killed = False

    def __call__(self, number: int, frame: Any = None) -> None:
        self.interruption.asked = number
        if number == signal.SIGINT:
            if self.child and time.monotonic() - self.last_interrupt < TWICE_SECONDS:
                self.has_killed = True
                self.child.kill()  # the ranks of torchrun die with it
                return
            self.last_interrupt = time.monotonic()
        try:
            if not self.file.stat().st_size:
                self.file.write_text(str(int(number)))
        except OSError:  # a full disk: fall back to TERM, after which time is limited
            if self.child:
                self.child.terminate()
        if number == signal.SIGINT:
            print_error(
                f"stopping after this step; Ctrl-C again within {TWICE_SECONDS:.0f} s quits at once"
            )
        else:
            print_error(f"asked to stop by {signal.Signals(number).name}")


def suspend_launcher(number: int, frame: Any) -> None:
    """Ctrl-Z while the ranks run, which are not in the terminal's process group. It stops nothing
    where no shell could resume this process (ssh -t HOST COMMAND, docker exec -it): the kernel
    discards SIGTSTP there, unlike SIGSTOP."""
    if os.getpgrp() != os.getsid(0):  # a shell made a process group for it
        print_error("only the launcher is suspended, training continues: resume it by bg or fg")
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, suspend_launcher)


def run_ranks(
    command: list[str],
    folder: pathlib.Path,
    launch_id: str,
    interruption: Interruption,
    preparer: Preparer,
) -> int:
    """Runs the ranks' command until it exits and forwards stop requests, including one received
    earlier. Returns its exit code."""
    file = stop_file(folder, launch_id)
    file.touch()
    forwarder = StopForwarder(file, interruption)
    listen(forwarder)
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspend_launcher)
    if interruption.asked:  # before there is a child: else a recent Ctrl-C would count as two
        forwarder(interruption.asked)
    launcher = os.getpid()

    def in_child() -> None:
        die_with_parent(launcher)
        if command[1].endswith("train.py"):  # torchrun would keep them blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the rank has its handlers

    # In its own session: Ctrl-C in the terminal reaches only this process, not torchrun.
    forwarder.child = subprocess.Popen(command, start_new_session=True, preexec_fn=in_child)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            returned = forwarder.child.wait(WATCH_SECONDS)
            break
        if preparer.has_failed() and not file.stat().st_size:
            file.write_text(str(int(signal.SIGTERM)))
    listen(signal.SIG_IGN)  # the ranks have exited: nothing is left to stop
    if forwarder.has_killed:
        return 128 + signal.SIGINT
    return returned


def exit_code(folder: pathlib.Path, launch_id: str, ranks: int, returned: int) -> int:
    """The launch's exit code, from its ranks' status and failure files. Marks the run as failed if
    they could not, and prints the root cause last, below the output of all ranks and torchrun.

    returned: the exit code of the ranks' command, negative if a signal ended it."""
    status = read_status(folder)
    took_folder = status.get("launch") == launch_id
    # the logs may be those of another launch
    read_logs_of = range(ranks) if took_folder else ()
    reports = failures(folder, launch_id, read_logs_of)
    remove_traces(folder, launch_id)
    if took_folder and status["state"] == "finished":
        return 0
    if took_folder and status["state"] == "preempted" and not reports:
        return STOPPED
    if not took_folder and not reports and -returned in SIGNALS:  # before the ranks had handlers
        return STOPPED

    if reports:
        code = reports[0]["exit_code"]
    elif returned > 0:
        code = returned
    else:
        code = 1
    if not took_folder and code == INPUT_IS_WRONG:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if it is empty: it was created for this launch
    else:
        try:
            mark_failed(folder, launch_id, status, code)
        except ConfigError as error:
            if not took_folder:  # the folder is another run's
                print_error(str(error))
                return INPUT_IS_WRONG
    print_root_cause(folder, reports, ranks, returned)
    return code


def mark_failed(folder: pathlib.Path, launch_id: str, status: dict, code: int) -> None:
    """Records that a launch failed. status: that of the run. Raises ConfigError if another launch
    holds the folder."""
    # ranks killed with torchrun may take a moment to exit, and hold the lock until then
    timeout = 30 if status.get("launch") == launch_id else 0
    try:
        held = lock(folder, timeout)
        write_status(
            folder,
            "failed",
            status.get("step", 0),
            launch_id,
            exit_code=code,
            # ranks that never took the folder have not resumed from checkpoint.resume = N
            holder=last_holder(status),
        )
        held.release()
    except OSError as error:  # a full disk, perhaps
        print_error(f"{folder}/status.json: {error}")


def print_root_cause(folder: pathlib.Path, reports: list[dict], ranks: int, returned: int) -> None:
    """Prints why the ranks failed: the first of their reports, else the signal that ended their
    command."""
    if (folder / "logs").exists():
        print_error(f"the log of every rank is in {folder}/logs")
    if reports:
        first = reports[0]
        silent = sorted(set(range(ranks)) - {report["rank"] for report in reports})
        if silent and not first["final"]:
            listed = ", ".join(map(str, silent[:8]))
            if len(silent) > 8:
                listed += ", ..."
            print_error(
                f"no report from rank {listed}: killed (is the host out of memory?), or unable to "
                "answer"
            )
        print_error(
            f"failed first on rank {first['rank']}, step {first['step']}, phase {first['phase']}:\n"
            f"{first['text']}"
        )
    elif returned < 0:
        hint = ": the host may be out of memory" if -returned == signal.SIGKILL else ""
        print_error(f"ended by signal {signal.Signals(-returned).name}{hint}")


def requeue_or_mark(
    cfg: config.Config, job: str | None, launch_id: str, status_before: dict, number: int
) -> int:
    """Records that a launch was stopped, and requeues its job if it has to. Returns the exit code.

    status_before: the run's status before the launch; number: of the signal that stopped it, 0
    without one."""
    if job:
        ahead_of_limit = number == signal.SIGUSR1
        return end_of_stopped(cfg, job, launch_id, status_before, ahead_of_limit)
    mark_stopped(config.run_folder(cfg), launch_id)
    return STOPPED


def mark_stopped(folder: pathlib.Path, launch_id: str) -> None:
    """Records that a launch was stopped, unless its ranks did, the run is finished or another
    launch holds it."""
    if read_status(folder).get("launch") == launch_id:
        return  # its ranks recorded it; the next launch may have begun, and may hold the lock
    with contextlib.suppress(ConfigError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        status = read_status(folder)
        if status.get("state") != "finished":
            write_status(folder, "preempted", status.get("step", 0), last_holder(status))
        held.release()


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], interruption))  # pyrefly: ignore[unbound-name]  # as in train.py
