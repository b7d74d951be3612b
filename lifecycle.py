"""One run among others: its folder, status and lock, and the launch that turns how it ended into an exit code.

    python -m lifecycle RANKS COMMAND ... -- CONFIG [--section.key=value ...]

is what run_train.sh calls: checks all that one process can check, prepares the data, runs COMMAND CONFIG ... with a
launch id, and exits with 0 finished, 2 the input is wrong, 75 stopped after saving, or another code for a failure.
torchrun turns every exit code of a rank into 1, so the code comes from the status that carries this launch's id.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator

import config
from config import ConfigError

TORCH = ((2, 11), (2, 13))  # the versions that the code is written for
INPUT_IS_WRONG = 2
STOPPED = 75  # EX_TEMPFAIL: start again to go on
EXIT_CODES = {"finished": 0, "preempted": STOPPED}


def read_status(folder: pathlib.Path) -> dict:
    """status.json of a run's folder; {} where there is none, or none that can be read."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def write_status(folder: pathlib.Path, state: str, step: int, launch: str | None, **more) -> None:
    """Replaces status.json in one step, so that a reader sees the old one or the new one."""
    status = {"state": state, "step": step, "launch": launch, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more}
    temporary = folder / "status.json.tmp"
    temporary.write_text(json.dumps(status) + "\n")
    temporary.rename(folder / "status.json")


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds the folder's lock, which the kernel frees when the process dies, however it dies. Raises ConfigError where
    another run holds it."""
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another run works in this folder; wait for it, or choose another --run.name"
                              ) from None
        except OSError as error:
            print(f"{folder}: this file system has no locks ({error.strerror}); nothing keeps a second run out",
                  file=sys.stderr)
        yield


def check_folder(folder: pathlib.Path) -> None:
    """Raises ConfigError where the run's folder cannot be made, or another run works in it. Makes nothing."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"[run] output_dir: {existing} is a file; a run needs a folder there")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"[run] output_dir: {existing} cannot be written to")
    if (folder / ".lock").exists():
        with locked(folder):
            pass


def check_launch(cfg: config.Config, ranks: int, args: Namespace) -> bool:
    """Everything one process can check before the ranks start; prepares the data. Returns whether there is anything
    left to do. Raises ConfigError."""
    config.mesh_shape(cfg, ranks)
    folder = config.run_folder(cfg)
    check_folder(folder)

    # Upwards, as a tool's main may; here and not above, since a wrong configuration should not wait for torch.
    import checkpoint
    from data.loader import check_enough
    from data.prepare import prepare
    from data.tokens import open_stream
    from parallel.mesh import pick_device

    pick_device(cfg, 0)
    if args.eval_only:
        checkpoint.choose_for_evaluation(cfg)
    elif (start := checkpoint.choose(cfg)) >= cfg.train.steps and read_status(folder).get("state") == "finished":
        print(f"{folder}: finished at step {start} of {cfg.train.steps}; a larger --train.steps goes on from there")
        return False
    data = prepare(cfg, lambda text: print(text, flush=True))
    check_enough(open_stream(data, "train", cfg.model.vocab_size), cfg.train)
    if cfg.eval or args.eval_only:
        held_out = open_stream(data, "heldout", cfg.model.vocab_size)
        if held_out.length < 2:
            raise ConfigError(f"{held_out.path}: no document fell into the held-out part; leave out [eval], or bring "
                              "more documents")
    return True


def exit_code(folder: pathlib.Path, launch: str, returned: int) -> int:
    """The launch's exit code from what its ranks left; marks the run as failed where they could not."""
    status = read_status(folder)
    if status.get("launch") == launch and status["state"] != "running":
        return EXIT_CODES.get(status["state"], status.get("exit_code", 1))
    if returned == INPUT_IS_WRONG:
        return returned
    if folder.is_dir():
        write_status(folder, "failed", status.get("step", 0), launch)
    return returned if returned > 0 else 1


def usable(argv: list[str]) -> bool:
    """Can this Python do what is asked: the run of these arguments, or without any everything? Imports nothing."""
    import importlib.metadata
    import importlib.util

    from data.prepare import is_prepared

    needed = ["tensorboard", "sentencepiece", "datasets"]
    if argv:
        with contextlib.suppress(ConfigError):  # which the run itself will tell
            args = config.parse_arguments(argv)
            cfg = config.load(args.config, args.overrides)
            needed = ["tensorboard"] if cfg.log.tensorboard and not args.eval_only else []
            if args.dry_run:
                needed = []
            elif not is_prepared(cfg):
                needed += ["sentencepiece", "datasets"]
    try:
        version = tuple(int(n) for n in importlib.metadata.version("torch").split("+")[0].split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return TORCH[0] <= version <= TORCH[1] and all(importlib.util.find_spec(name) for name in needed)


def main(argv: list[str]) -> int:
    if argv[0] == "--usable":
        return 0 if usable(argv[1:]) else 1
    cut = argv.index("--")
    ranks, command, rest = int(argv[0]), argv[1:cut], argv[cut + 1 :]
    try:
        args = config.parse_arguments(rest)
        cfg = config.load(args.config, args.overrides)
        if not check_launch(cfg, ranks, args):
            return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return INPUT_IS_WRONG
    launch = uuid.uuid4().hex
    child = subprocess.Popen([*command, *rest, f"--launch={launch}"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the ranks as well; we wait for them
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    returned = child.wait()
    return returned if args.eval_only else exit_code(config.run_folder(cfg), launch, returned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
