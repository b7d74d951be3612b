"""The launcher: checks and prepares what one process can, runs the ranks, and turns their outcome into an exit code.

    python -m launch.launch CONFIG [--section.key=value ...]      run_train.sh execs this

Exit codes: 0 finished, 2 invalid input, 75 stopped after saving, any other a failure. Ranks that stop exit with 0, as
torchrun takes any other code for a failure, so the code comes from the status that carries this launch's id.

TERM, INT, HUP and USR1 are forwarded through a file that rank 0 polls: torchrun, on a signal, would kill its ranks
after a grace period that may be shorter than a save. In a SLURM job this process is the batch script: USR1 comes ahead
of the time limit and requeues the job; after TERM (scancel) SLURM decides.
"""

import signal
from collections.abc import Callable

from launch.interruption import Interrupted, Interruption


def listen(handler: Callable | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            # as nohup leaves it
            signal.signal(number, handler)


if __name__ == "__main__":
    interruption = Interruption()  # notes signals from now on: before the slow imports
    listen(interruption)
    # run_train.sh blocks them until now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

import contextlib
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
from files import die_with_parent, print_error
from launch.checks import check_launch
from launch.command import Ranks, commits
from launch.slurm import end_of_stopped
from lifecycle import INPUT_IS_WRONG, SIGNALS, STOPPED, TWICE_SECONDS
from lifecycle.folder import (
    failures,
    holder,
    lock,
    read_status,
    remove_traces,
    resume_once,
    stop_file,
    write_status,
)
from schema import together


def run_ranks(
    command: list[str], folder: pathlib.Path, launch: str, interruption: Interruption
) -> int:
    """Runs the ranks' command until it exits and forwards stop requests, including one received earlier. Returns its
    exit code."""
    file, last_interrupt, killed = stop_file(folder, launch), float("-inf"), False
    child: subprocess.Popen | None = None  # once it runs

    def ask(number: int, frame: Any) -> None:
        nonlocal last_interrupt, killed
        interruption.asked = number
        if number == signal.SIGINT:
            if child and time.monotonic() - last_interrupt < TWICE_SECONDS:
                killed = True
                child.kill()  # and the ranks of torchrun die with it
                return
            last_interrupt = time.monotonic()
        try:
            if not file.stat().st_size:
                file.write_text(str(int(number)))
        except OSError:  # a full disk: fall back to TERM, after which time is limited
            if child:
                child.terminate()
        print_error(
            f"stopping after this step; Ctrl-C again within {TWICE_SECONDS:.0f} s quits at once"
            if number == signal.SIGINT
            else f"asked to stop by {signal.Signals(number).name}"
        )

    file.touch()
    listen(ask)
    if interruption.asked:  # before there is a child: else a recent Ctrl-C would count as two
        ask(interruption.asked, None)

    def in_child() -> None:
        die_with_parent(launcher)
        if command[1].endswith("train.py"):  # torchrun would keep them blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the rank has its handlers

    launcher = os.getpid()
    # In its own session: Ctrl-C in the terminal reaches only this process, not torchrun.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=in_child)
    returned = child.wait()
    listen(signal.SIG_IGN)  # the ranks have exited: nothing is left to stop
    return 128 + signal.SIGINT if killed else returned


def exit_code(folder: pathlib.Path, launch: str, ranks: int, returned: int) -> int:
    """The launch's exit code, from its ranks' status and failure files. Marks the run as failed if they could not, and
    prints the root cause last, below the output of all ranks and torchrun."""
    status = read_status(folder)
    ours = status.get("launch") == launch
    failed = failures(folder, launch, ranks * ours)  # the logs may be those of another launch
    remove_traces(folder, launch)
    if ours and status["state"] in ("finished", "preempted"):
        return 0 if status["state"] == "finished" else STOPPED
    if not ours and not failed and -returned in SIGNALS:  # before the ranks had handlers
        return STOPPED
    code = failed[0]["exit_code"] if failed else returned if returned > 0 else 1
    if not ours and code == INPUT_IS_WRONG:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if it is empty: it was created for this launch
    else:
        try:
            # ranks killed with torchrun may take a moment to exit, and hold the lock until then
            held = lock(folder, timeout=30 if ours else 0)
            # ranks that never took the folder have not resumed from checkpoint.resume = N
            write_status(
                folder,
                "failed",
                status.get("step", 0),
                launch,
                exit_code=code,
                holder=holder(status),
            )
            held.release()
        except ConfigError as error:
            if not ours:  # the folder is another run's
                print_error(str(error))
                return INPUT_IS_WRONG
        except OSError as error:  # a full disk, perhaps
            print_error(f"{folder}/status.json: {error}")
    if (folder / "logs").exists():
        print_error(f"the log of every rank is in {folder}/logs")
    silent = sorted(set(range(ranks)) - {f["rank"] for f in failed})
    if failed:
        first = failed[0]
        if silent and not first["final"]:
            print_error(
                f"no report from rank {', '.join(map(str, silent[:8]))}{', ...' * (len(silent) > 8)}: killed "
                "(is the host out of memory?), or unable to answer"
            )
        print_error(
            f"failed first on rank {first['rank']}, step {first['step']}, phase {first['phase']}:\n"
            f"{first['text']}"
        )
    elif returned < 0:
        hint = ": the host may be out of memory" if -returned == signal.SIGKILL else ""
        print_error(f"ended by signal {signal.Signals(-returned).name}{hint}")
    return code


def mark_stopped(folder: pathlib.Path, launch: str) -> None:
    """Records that a launch was stopped, unless its ranks did, the run is finished or another launch holds it."""
    if read_status(folder).get("launch") == launch:
        return  # its ranks recorded it; the next launch may have begun, and may hold the lock
    with contextlib.suppress(ConfigError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        held, status = lock(folder), read_status(folder)
        if status.get("state") != "finished":
            write_status(folder, "preempted", status.get("step", 0), holder(status))
        held.release()


def launch(argv: list[str], interruption: Interruption) -> int:
    """Launches the run that the command line describes; returns the exit code. Requeues a stopped job if it has to."""
    try:
        args = config.parse_arguments(argv)
        ranks, cfg = together(
            Ranks.from_environment, lambda: config.load(args.config, args.overrides)
        )
        folder, launch_id = config.run_folder(cfg), ".".join([*ranks.attempt, uuid.uuid4().hex])
        if not args.eval_only:  # an evaluation takes no folder
            cfg = replace(cfg, checkpoint=resume_once(cfg, launch_id))
        before = read_status(folder)
        try:
            if not check_launch(cfg, ranks, args, interruption):
                return 0
        except OSError as error:  # an unreadable folder
            raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from None
        interruption.raises = args.eval_only
        command = [*ranks.command(), *argv, *commits(cfg), f"--launch={launch_id}"]
        os.environ.update(ranks.environment())
        if args.eval_only:
            return subprocess.run(
                command, preexec_fn=partial(die_with_parent, os.getpid())
            ).returncode
        code = exit_code(
            folder, launch_id, ranks.total, run_ranks(command, folder, launch_id, interruption)
        )
    except (Interrupted, Exception) as error:
        # else check_launch() or the evaluation was interrupted, and may have raised anything
        if not (interruption.asked and interruption.raises):
            if not isinstance(error, ConfigError):
                raise
            print_error(str(error))
            return INPUT_IS_WRONG
        listen(signal.SIG_IGN)
        if args.eval_only:  # pyrefly: ignore[unbound-name]  # nothing raises Interrupted before args is bound
            return 128 + signal.SIGINT
        print_error("stopped before the run began")
        code = STOPPED
    if code == STOPPED and ranks.job:  # pyrefly: ignore[unbound-name]  # as above
        return end_of_stopped(
            cfg,  # pyrefly: ignore[unbound-name]  # as above
            ranks.job,
            launch_id,  # pyrefly: ignore[unbound-name]  # as above
            before,  # pyrefly: ignore[unbound-name]  # as above
            ahead_of_limit=interruption.asked == signal.SIGUSR1,
        )
    if code == STOPPED:
        mark_stopped(folder, launch_id)  # pyrefly: ignore[unbound-name]  # as above
    return code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], interruption))  # pyrefly: ignore[unbound-name]  # as in train.py
