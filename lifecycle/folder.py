"""A run's folder: status.json, the lock, and the files by which launcher and ranks tell each other things.

status.json          how the run goes, for everybody
.lock                held by rank 0 while it lives
.stop-LAUNCH         made empty by the launcher; anything in it asks this launch's ranks to save and stop
.failure-LAUNCH-N    why rank N failed, as JSON
"""

import contextlib
import fcntl
import json
import os
import pathlib
import sys
import time

from config import ConfigError


def read_status(folder: pathlib.Path) -> dict:
    """status.json of a run's folder; {} where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((folder / "status.json").read_text())
        return status if isinstance(status, dict) else {}
    return {}


def write_status(folder: pathlib.Path, state: str, step: int, launch: str | None, **more) -> None:
    """Replaces status.json in one step, so that a reader sees the old one or the new one. Raises OSError."""
    status = {"state": state, "step": step, "launch": launch, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more}
    temporary = folder / "status.json.tmp"
    temporary.write_text(json.dumps(status) + "\n")
    temporary.rename(folder / "status.json")


def lock(folder: pathlib.Path, wait_seconds: float = 0) -> int:
    """Locks the folder for this process and returns the open lock file, which the kernel frees when the process ends,
    however it ends. Raises ConfigError where another run holds it, and goes on holding it for so long."""
    try:
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    except PermissionError:
        raise ConfigError(f"{folder / '.lock'}: cannot be opened; is this another user's run?") from None
    end = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(handle)
                raise ConfigError(f"{folder}: another run works here; wait for it, or choose another "
                                  "run.name") from None
            time.sleep(0.1)
        except OSError as error:
            print(f"{folder}: no locks on this file system, nothing keeps a second run out: {error}", file=sys.stderr)
            return handle


def check_folder(folder: pathlib.Path) -> None:
    """Raises ConfigError where the run's folder cannot be made, or another run works in it. Makes nothing."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    inside = [folder / name for name in ("checkpoints", "logs", "tensorboard")]
    for path in (existing, *(path for path in inside if path.exists())):
        if not path.is_dir():
            raise ConfigError(f"[run] output_dir: {path} is a file; a run needs a folder there")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"[run] output_dir: {path} cannot be written to")
    for name in ("metrics.jsonl", "status.json", "config.toml", "environment.json"):
        if (folder / name).is_dir():
            raise ConfigError(f"{folder / name}: is a folder; a run needs a file there")
    if (folder / ".lock").exists():
        os.close(lock(folder))


def stop_file(folder: pathlib.Path, launch: str) -> pathlib.Path:
    return folder / f".stop-{launch}"


def report_failure(folder: pathlib.Path, launch: str | None, rank: int, step: int, phase: str, progress: int,
                   code: int, text: str, final: bool) -> None:
    """Leaves a rank's failure for the launcher: torchrun turns every exit code into 1 and ends the other ranks.

    progress: how many phases this rank had begun, the same count on all ranks; final: starting again cannot help.
    """
    report = {"rank": rank, "step": step, "phase": phase, "progress": progress, "time": time.time(), "exit_code": code,
              "text": text, "final": final}
    with contextlib.suppress(OSError):
        (folder / f".failure-{launch}-{rank}").write_text(json.dumps(report))


def failures(folder: pathlib.Path, launch: str | None) -> list[dict]:
    """What the ranks of a launch reported, that first from which the others followed: of the rank that got least far
    (one that hangs lets the others begin another phase and wait there), else the earliest."""
    found = []
    for path in folder.glob(f".failure-{launch}-*"):
        with contextlib.suppress(OSError, ValueError):  # a full disk may have cut it
            found.append(json.loads(path.read_text()))
    return sorted(found, key=lambda f: (f["progress"], f["time"]))


def remove_traces(folder: pathlib.Path, launch: str) -> None:
    """Removes what launcher and ranks of one launch told each other."""
    for path in (stop_file(folder, launch), *folder.glob(f".failure-{launch}-*")):
        path.unlink(missing_ok=True)


def sweep(folder: pathlib.Path, launch: str | None) -> None:
    """Removes what killed launches have left, and what the ranks said that torchrun starts again. By the holder of
    the lock."""
    for path in (*folder.glob(".stop-*"), *folder.glob(".failure-*")):
        if path.name != f".stop-{launch}":
            path.unlink(missing_ok=True)
