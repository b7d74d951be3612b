"""One run among others: its folder, status and lock, and the launch that turns how it ended into an exit code.

    python -m lifecycle RANKS RANKS_HERE COMMAND ... -- CONFIG [--section.key=value ...]

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

import config
from config import ConfigError

TORCH = ((2, 11), (2, 13))  # the versions that the code is written for
INPUT_IS_WRONG, DOES_NOT_FIT, STOPPED = 2, 3, 75  # 75 is EX_TEMPFAIL: start again to go on


def read_status(folder: pathlib.Path) -> dict:
    """status.json of a run's folder; {} where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "status.json").read_text())
    return {}


def write_status(folder: pathlib.Path, state: str, step: int, launch: str | None, **more) -> None:
    """Replaces status.json in one step, so that a reader sees the old one or the new one."""
    status = {"state": state, "step": step, "launch": launch, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more}
    temporary = folder / "status.json.tmp"
    temporary.write_text(json.dumps(status) + "\n")
    temporary.rename(folder / "status.json")


def lock(folder: pathlib.Path) -> int:
    """Locks the folder for this process and returns the open lock file, which the kernel frees when the process ends,
    however it ends. Raises ConfigError where another run holds it."""
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"{folder}: another run works here; wait for it, or choose another run.name") from None
    except OSError as error:
        print(f"{folder}: no locks on this file system, nothing keeps a second run out: {error}", file=sys.stderr)
    return handle


def check_folder(folder: pathlib.Path) -> None:
    """Raises ConfigError where the run's folder cannot be made, or another run works in it. Makes nothing."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"[run] output_dir: {existing} is a file; a run needs a folder there")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"[run] output_dir: {existing} cannot be written to")
    if (folder / ".lock").exists():
        os.close(lock(folder))


def report_failure(folder: pathlib.Path, launch: str | None, rank: int, code: int, text: str) -> None:
    """Leaves the first cause of a failure for the launcher: torchrun ends the other ranks, rank 0 too, before they
    could tell."""
    with contextlib.suppress(OSError):
        handle = os.open(folder / f".failure-{launch}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(handle, json.dumps({"rank": rank, "exit_code": code, "text": text}).encode())
        os.close(handle)


def check_launch(cfg: config.Config, ranks: int, local_ranks: int, args: Namespace) -> bool:
    """Everything one process can check before the ranks start; prepares the data. Returns whether there is anything
    left to do. Raises ConfigError."""
    config.mesh_shape(cfg, ranks)
    folder = config.run_folder(cfg)
    if not args.eval_only:
        check_folder(folder)

    # Upwards, as a tool's main may; here and not above, since a wrong configuration should not wait for torch.
    import checkpoint
    from data.loader import check_enough
    from data.prepare import data_folder, prepare
    from data.tokens import fingerprint, open_stream
    from model.llama import describe
    from parallel.fsdp import unsharded_parameters
    from parallel.mesh import pick_device

    pick_device(cfg, local_ranks - 1)
    unsharded_parameters(describe(cfg.model), cfg.parallel)  # their patterns match what they should
    if args.eval_only:
        checkpoint.choose_for_evaluation(cfg)
        data = data_folder(cfg)
    else:
        start = checkpoint.choose(cfg)
        if start >= cfg.train.steps and read_status(folder).get("state") == "finished":
            print(f"{folder}: finished at step {start}; train.steps = {cfg.train.steps} asks for no more")
            return False
        data = prepare(cfg, lambda text: print(text, flush=True))
        checkpoint.check_same_data(cfg, start, fingerprint(data))
        check_enough(open_stream(data, "train", cfg.model.vocab_size), cfg.train)
    if (cfg.eval or args.eval_only) and open_stream(data, "heldout", cfg.model.vocab_size).length < 2:
        raise ConfigError(f"{data}: none of its documents (one in a hundred) is held out; bring more, or --eval=off")
    try:
        if not args.eval_only:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"[run] output_dir: {folder} cannot be made: {error.strerror}") from None
    return True


def exit_code(folder: pathlib.Path, launch: str, returned: int) -> int:
    """The launch's exit code from what its ranks left; marks the run as failed where they could not."""
    status, code = read_status(folder), returned if returned > 0 else 1
    if status.get("launch") == launch and status["state"] in ("finished", "preempted"):
        return 0 if status["state"] == "finished" else STOPPED
    try:
        held = lock(folder)
    except (ConfigError, OSError) as error:  # refused: the folder is another run's, or was never made
        print(error, file=sys.stderr)
        return INPUT_IS_WRONG
    cause = folder / f".failure-{launch}"
    if cause.exists():
        first = json.loads(cause.read_text())
        code = first["exit_code"]
        cause.unlink()
        print(f"failed on rank {first['rank']} first: {first['text'].splitlines()[-1]}", file=sys.stderr)
    if code != INPUT_IS_WRONG or status.get("launch") == launch:
        write_status(folder, "failed", status.get("step", 0), launch, exit_code=code)
    print(f"every rank's own words are in {folder}/logs", file=sys.stderr)
    os.close(held)
    return code


def usable(argv: list[str]) -> bool:
    """Can this Python do what is asked: the run of these arguments, or without any everything? Imports nothing."""
    import importlib.metadata
    import importlib.util

    from data.prepare import is_prepared

    needed = [] if argv else ["tensorboard", "sentencepiece", "datasets"]
    with contextlib.suppress(ConfigError, SystemExit):  # what is wrong the run itself will tell
        if argv and not (args := config.parse_arguments(argv)).dry_run:
            cfg = config.load(args.config, args.overrides)
            needed += ["tensorboard"] * (cfg.log.tensorboard and not args.eval_only)
            needed += ["sentencepiece", "datasets"] * (not is_prepared(cfg))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        version = tuple(int(n) for n in importlib.metadata.version("torch").split(".")[:2])
        return TORCH[0] <= version <= TORCH[1] and all(importlib.util.find_spec(name) for name in needed)
    return False


def main(argv: list[str]) -> int:
    if argv[0] == "--usable":
        return 0 if usable(argv[1:]) else 1
    cut = argv.index("--")
    ranks, local_ranks, command, rest = int(argv[0]), int(argv[1]), argv[2:cut], argv[cut + 1 :]
    args = config.parse_arguments(rest)
    try:
        cfg = config.load(args.config, args.overrides)
        if not check_launch(cfg, ranks, local_ranks, args):
            return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return INPUT_IS_WRONG
    except KeyboardInterrupt:
        print("interrupted before the run began", file=sys.stderr)
        return 128 + signal.SIGINT
    launch = uuid.uuid4().hex
    child = subprocess.Popen([*command, *rest, f"--launch={launch}"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the ranks as well; we wait for them
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    returned = child.wait()
    return returned if args.eval_only else exit_code(config.run_folder(cfg), launch, returned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
