"""The launch: checks all that one process can check, prepares the data, runs the ranks, turns how it ended into a code.

    python -m lifecycle [--in-job] RANKS RANKS_HERE COMMAND ... -- CONFIG [--section.key=value ...]

is what run_train.sh calls. It runs COMMAND CONFIG ... with a launch id, and exits with 0 finished, 2 the input is
wrong, 75 stopped after saving, or another code for a failure. torchrun turns every exit code of a rank into 1, so the
code comes from the status that carries this launch's id. --in-job: a batch job, in which nothing is prepared.

TERM, INT, HUP and USR1 are passed on through a file that rank 0 polls: torchrun, given a signal, would kill its ranks
after a grace that may be shorter than a save.
"""

import signal

from lifecycle.signals import SIGNALS, TWICE_SECONDS, Interrupted, Interruption, die_with_parent

if __name__ == "__main__":
    early = Interruption()
    for number in SIGNALS:  # before the rest is imported
        signal.signal(number, early)

import contextlib
import os
import pathlib
import shlex
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import config
from config import ConfigError
from lifecycle import INPUT_IS_WRONG, STOPPED
from lifecycle.folder import check_folder, failures, lock, read_status, remove_traces, stop_file, write_status

TORCH = ((2, 11), (2, 13))  # the versions that the code is written for
IDLE_LIVES = 3  # of a job, without a step


def check_launch(cfg: config.Config, ranks: int, local_ranks: int, args: Namespace, in_job: bool,
                 interruption: Interruption) -> bool:
    """Everything one process can check before the ranks start; prepares the data, except in a job. Returns whether
    there is anything left to do. Raises ConfigError."""
    folder = config.run_folder(cfg)
    together(lambda: config.mesh_shape(cfg, ranks), lambda: args.eval_only or check_folder(folder))

    # Upwards, as a tool's main may; here and not above, since a wrong configuration should not wait for torch.
    from checkpoint import catalog
    from data.dataset import is_prepared, open_data, weights
    from data.loader import make_order
    from data.prepare import prepare
    from data.tokens import fingerprint
    from model.hf_weights import open_weights
    from model.llama import meta_model
    from parallel.fsdp import unsharded_parameters
    from parallel.mesh import pick_device

    interruption.allow()  # preparing may take hours
    if in_job and not is_prepared(cfg):  # all its GPUs would wait for one core
        command = shlex.join(["./run_train.sh", "-m", "data.prepare", args.config, *args.overrides])
        raise ConfigError(f"{args.config}: its data is not prepared, and none is inside a job; run {command} on the "
                          "login node")
    status = read_status(folder)
    finished = status.get("state") == "finished"
    # every byte is read by the ranks, and here where there may be nothing left for them
    look = catalog.problems_of if finished else catalog.at_first_sight
    *_, chosen = together(
        lambda: pick_device(cfg, local_ranks - 1),
        lambda: unsharded_parameters(meta_model(cfg.model), cfg.parallel),  # their patterns match what they should
        lambda: args.eval_only or catalog.choose(cfg, catalog.steps(cfg), look))
    if args.eval_only:
        if not catalog.steps(cfg):
            raise ConfigError(f"{catalog.root(cfg)}: holds no checkpoint to evaluate")
    else:
        start, _ = chosen
        catalog.check_same_run(cfg, start)
        if start >= cfg.train.steps and finished:
            print(f"{folder}: finished at step {status.get('step', start)}; train.steps = {cfg.train.steps} asks for "
                  "no more")
            return False
        if not start:
            open_weights(cfg.model)
        data = prepare(cfg)
        catalog.check_same_data(cfg, start, fingerprint(data))
        make_order(cfg, open_data(cfg, "train"), weights(cfg))
    heldout = open_data(cfg, "heldout") if cfg.eval or args.eval_only else []
    if heldout and all(stream.length < 2 for stream in heldout):
        where = ", ".join(str(stream.path.parent) for stream in heldout)
        raise ConfigError(f"{where}: none of its documents (one in a hundred) is held out; bring more, or --eval=off")
    try:
        if not args.eval_only:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"[run] output_dir: {folder} cannot be made: {error.strerror}") from None
    return True


def together(*checks: Callable[[], Any]) -> list[Any]:
    """What the checks return. Raises ConfigError with the problems of all of them."""
    problems, found = [], []
    for check in checks:
        try:
            found.append(check())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return found


def exit_code(folder: pathlib.Path, launch: str, ranks: int, returned: int) -> int:
    """The launch's exit code from what its ranks left; marks the run as failed where they could not, and tells the
    first cause last, below what all ranks and torchrun printed."""
    status, failed = read_status(folder), failures(folder, launch)
    remove_traces(folder, launch)
    ours = status.get("launch") == launch
    if ours and status["state"] in ("finished", "preempted"):
        return 0 if status["state"] == "finished" else STOPPED
    if not ours and not failed and -returned in SIGNALS:  # before anybody could listen, and so before a step
        mark_stopped(folder)
        return STOPPED
    code = failed[0]["exit_code"] if failed else returned if returned > 0 else 1
    if ours or code != INPUT_IS_WRONG:
        try:
            # ranks that were killed with torchrun may take a moment to die, and hold the lock until then
            held = lock(folder, wait_seconds=30 if ours else 0)
            write_status(folder, "failed", status.get("step", 0), launch, exit_code=code)
            os.close(held)
        except ConfigError as error:
            if not ours:  # the folder is another run's
                print(error, file=sys.stderr)
                return INPUT_IS_WRONG
        except OSError as error:  # a full disk, perhaps
            print(f"{folder}/status.json: {error}", file=sys.stderr)
    print(f"every rank's own words are in {folder}/logs", file=sys.stderr)
    silent = sorted(set(range(ranks)) - {f["rank"] for f in failed})
    if failed:
        first = failed[0]
        if silent and not first["final"]:
            print(f"no word from rank {', '.join(map(str, silent[:8]))}{', ...' * (len(silent) > 8)}: killed (is the "
                  "host out of memory?), or unable to answer", file=sys.stderr)
        print(f"failed first on rank {first['rank']}, step {first['step']}, phase {first['phase']}:\n{first['text']}",
              file=sys.stderr)
    elif returned < 0:
        hint = ": the host may be out of memory" if -returned == signal.SIGKILL else ""
        print(f"ended by signal {signal.Signals(-returned).name}{hint}", file=sys.stderr)
    return code


def usable(argv: list[str]) -> bool:
    """Can this Python do what is asked: the run of these arguments, or without any everything? Imports nothing."""
    import importlib.metadata
    import importlib.util

    from data.dataset import is_prepared

    needed = [] if argv else ["numpy", "tensorboard", "sentencepiece", "datasets"]
    with contextlib.suppress(ConfigError, SystemExit):  # what is wrong the run itself will tell
        if argv and not (args := config.parse_arguments(argv)).dry_run:
            cfg = config.load(args.config, args.overrides)
            needed.append("numpy")  # torch.distributed sends objects through it
            needed += ["tensorboard"] * (cfg.log.tensorboard and not args.eval_only)
            needed += ["sentencepiece", "datasets"] * (not is_prepared(cfg))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        version = tuple(int(n) for n in importlib.metadata.version("torch").split(".")[:2])
        return TORCH[0] <= version <= TORCH[1] and all(importlib.util.find_spec(name) for name in needed)
    return False


def run_ranks(command: list[str], folder: pathlib.Path, launch: str, interruption: Interruption) -> int:
    """Runs the ranks' command to its end, passing requests to stop on, that which came before it too; returns its exit
    code."""
    file, last_interrupt, killed = stop_file(folder, launch), float("-inf"), False

    def ask(number: int, frame: Any) -> None:
        nonlocal last_interrupt, killed
        if number == signal.SIGINT:
            if child and time.monotonic() - last_interrupt < TWICE_SECONDS:
                killed = True
                child.kill()  # and the ranks of torchrun die with it
                return
            last_interrupt = time.monotonic()
            print(f"stopping after this step; Ctrl-C again within {TWICE_SECONDS:.0f} s quits at once", file=sys.stderr)
        try:
            if not file.stat().st_size:
                file.write_text(str(int(number)))
        except OSError:  # a full disk: then by the way that has a time limit
            child.terminate()

    file.touch()
    child = None
    listen(ask)

    def begin() -> None:
        die_with_parent(launcher)
        if command[1].endswith("train.py"):  # else torchrun, which would keep them blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the rank listens

    launcher = os.getpid()
    # A session of its own: Ctrl-C in the terminal reaches this process alone, and not torchrun.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=begin)
    if interruption.asked:
        ask(interruption.asked, None)
    returned = child.wait()
    listen(signal.SIG_IGN)  # it is over: nothing is left to stop
    return 128 + signal.SIGINT if killed else returned


def listen(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, handler)


def main(argv: list[str], interruption: Interruption) -> int:
    if argv[0] == "--usable":
        return 0 if usable(argv[1:]) else 1

    listen(interruption)
    in_job = argv[0] == "--in-job"
    argv = argv[in_job:]
    cut = argv.index("--")
    ranks, local_ranks, command, rest = int(argv[0]), int(argv[1]), argv[2:cut], argv[cut + 1 :]
    args = cfg = None
    try:
        args = config.parse_arguments(rest)
        cfg = config.load(args.config, args.overrides)
        try:
            if not check_launch(cfg, ranks, local_ranks, args, in_job, interruption):
                return 0
        except OSError as error:  # a folder that cannot be looked into
            raise ConfigError(f"{error.filename or config.run_folder(cfg)}: {error.strerror or error}") from None
        interruption.raises = args.eval_only
        launch, folder = uuid.uuid4().hex, config.run_folder(cfg)
        command = [*command, *rest, f"--launch={launch}"]
        if args.eval_only:
            return subprocess.run(command, preexec_fn=partial(die_with_parent, os.getpid())).returncode
        before = read_status(folder)
        returned = run_ranks(command, folder, launch, interruption)
        code = exit_code(folder, launch, ranks, returned)
        return count_idle_lives(folder, launch, before) if in_job and code == STOPPED else code
    except (Interrupted, Exception) as error:
        if not (interruption.asked and interruption.raises):  # else whatever it broke off may have raised
            if not isinstance(error, ConfigError):
                raise
            print(error, file=sys.stderr)
            return INPUT_IS_WRONG
        listen(signal.SIG_IGN)
        if args and args.eval_only:
            return 128 + signal.SIGINT
        print("stopped before the run began", file=sys.stderr)
        if cfg:
            mark_stopped(config.run_folder(cfg))
        return STOPPED


def count_idle_lives(folder: pathlib.Path, launch: str, before: dict) -> int:
    """The exit code of a job that was stopped: a failure after the third life in a row without a step, since it would
    requeue itself for ever."""
    step = read_status(folder).get("step", 0)
    if step > before.get("step", 0):
        return STOPPED
    lives = before.get("lives_without_step", 0) + 1
    with contextlib.suppress(OSError):
        write_status(folder, "preempted" if lives < IDLE_LIVES else "failed", step, launch, lives_without_step=lives)
    if lives < IDLE_LIVES:
        return STOPPED
    print(f"{folder}: {lives} times in a row the job was stopped before it made a step; give it more time (--time) "
          "than its start and the notice ahead of the limit take", file=sys.stderr)
    return 1


def mark_stopped(folder: pathlib.Path) -> None:
    """The status of a run that was stopped before its ranks were started; another launch's run is left alone."""
    with contextlib.suppress(ConfigError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        held, status = lock(folder), read_status(folder)
        if status.get("state") != "finished":
            write_status(folder, "preempted", status.get("step", 0), None)
        os.close(held)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], early))
