"""A run's folder: status.json, the lock, and the files through which launcher and ranks communicate. Needs no torch.

status.json          the run's state, for users and other programs
.lock                held by rank 0 until its process ends
.stop-LAUNCH         created empty by the launcher; any content asks this launch's ranks to save and stop
.failure-LAUNCH-N    why rank N failed, as JSON
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time

import filelock

import config
import files
from config import ConfigError
from lifecycle.watchdog import NOW


def read_status(folder: pathlib.Path) -> dict:
    """status.json of a run's folder; {} if it is missing or cannot be read."""
    return files.read_json(folder / "status.json")


def write_status(folder: pathlib.Path, state: str, step: int, launch: str | None, **more) -> None:
    """Replaces status.json atomically. launch: the launcher's id, without one torchrun's. Raises OSError."""
    status = {
        "state": state,
        "step": step,
        "launch": launch,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **more,
    }
    files.write_atomic(folder / "status.json", json.dumps(status) + "\n")


def lock(folder: pathlib.Path, timeout: float = 0) -> filelock.BaseFileLock:
    """Locks the folder until release() or the end of this process. Raises ConfigError if another run still holds the
    lock after `timeout` seconds."""
    try:
        return files.lock(folder / ".lock", timeout)
    except PermissionError:
        raise ConfigError(
            f"{folder / '.lock'}: cannot be opened; is this another user's run?"
        ) from None
    except filelock.Timeout:
        raise ConfigError(
            f"{folder}: another run works here; wait for it, or choose another run.name"
        ) from None


def check_folder(folder: pathlib.Path, timeout: float = 0) -> None:
    """Raises ConfigError if the run's folder cannot be created, or if another run still holds its lock after `timeout`
    seconds. Creates nothing."""
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
        lock(folder, timeout).release()


def holder(status: dict) -> str | None:
    """The launch, or torchrun process without a launcher, whose ranks last took the run's folder; None if neither."""
    return status.get("holder", status.get("launch"))


def resume_once(cfg: config.Config, launch: str | None) -> config.Checkpoint | None:
    """[checkpoint], but with resume = N replaced by "auto" (the newest checkpoint) if this launch (or torchrun process)
    has already resumed from N, before torchrun restarted its ranks or SLURM requeued its job."""
    if not (launch and cfg.checkpoint and isinstance(cfg.checkpoint.resume, int)):
        return cfg.checkpoint
    before = holder(read_status(config.run_folder(cfg))) or ""
    (job, *attempt), (its_job, *its_attempt) = launch.split(".")[:2], before.split(".")[:2]
    if launch == before or (attempt and job == its_job and attempt != its_attempt):
        return dataclasses.replace(cfg.checkpoint, resume="auto")
    return cfg.checkpoint


def stop_file(folder: pathlib.Path, launch: str) -> pathlib.Path:
    return folder / f".stop-{launch}"


def report_failure(folder: pathlib.Path, launch: str | None, rank: int, **report) -> bool:
    """Writes a rank's failure to a file for the launcher: torchrun ends the other ranks, and has one exit code. Returns
    whether it could be written.

    report: step, phase, progress (how many phases this rank has begun, comparable between ranks), exit_code, text,
    final (a restart would not help).
    """
    with contextlib.suppress(OSError):
        (folder / f".failure-{launch}-{rank}").write_text(
            json.dumps({"rank": rank, "time": time.time(), **report})
        )
        return True
    return False


def failures(folder: pathlib.Path, launch: str | None, ranks: int = 0) -> list[dict]:
    """The failures that a launch's ranks reported, the root cause first: that of the rank with the least progress (if
    one hangs, the others begin another phase and wait there), else the earliest. Of those of the first `ranks` without
    a report, also the logs are read: the watchdog of one that could not run Python left its stacks there."""
    found = []
    for path in folder.glob(f".failure-{launch}-*"):
        with contextlib.suppress(OSError, ValueError):  # a full disk may have truncated it
            found.append(json.loads(path.read_text()))
    for rank in {*range(ranks)} - {failure["rank"] for failure in found}:
        with contextlib.suppress(OSError):
            log = (path := folder / "logs" / f"rank-{rank}.log").read_text(errors="replace")
            *_, last = [None, *re.finditer(re.escape(NOW).replace(r"\{\}", "(.*)"), log)]
            if last and "\nTimeout (" in log[last.end() :]:
                found.append(
                    {
                        "rank": rank,
                        "step": int(last[2]),
                        "phase": last[3],
                        "progress": int(last[4]),
                        "exit_code": 1,
                        "time": path.stat().st_mtime,
                        "final": False,
                        "text": log[last.end() :].partition("\nTimeout (")[2].partition("\n")[2]
                        + "no progress, and no thread could run to report it: the main thread holds "
                        "Python's lock (the GIL), as in a kernel launch that waits for a hanging GPU",
                    }
                )
    return sorted(found, key=lambda f: (f["progress"], f["time"]))


def remove_traces(folder: pathlib.Path, launch: str) -> None:
    """Removes the files through which launcher and ranks of one launch communicated."""
    for path in (stop_file(folder, launch), *folder.glob(f".failure-{launch}-*")):
        path.unlink(missing_ok=True)


def sweep(folder: pathlib.Path, launch: str | None) -> None:
    """Removes what killed launches left behind, and the failure reports of ranks that torchrun restarts. The caller
    holds the lock."""
    for path in (*folder.glob(".stop-*"), *folder.glob(".failure-*")):
        if path.name != f".stop-{launch}":
            path.unlink(missing_ok=True)
