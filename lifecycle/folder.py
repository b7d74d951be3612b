"""A run's folder: status.json, the lock, and the files through which launcher and ranks
communicate. Needs no torch.

status.json          the run's state, for users and other programs
config.toml          the newest launch's options; as comments, what some were until a step
.lock                held by rank 0 until its process ends
.stop-LAUNCH         created empty by the launcher; any content asks this launch's ranks to stop
.failure-LAUNCH-N    why rank N failed, as JSON

A launch is one start of the launcher (run_train.sh). LAUNCH is its id, new each time. In a SLURM
job the id begins with the job's number and requeue count: "7.0.3f2a...". Ranks that torchrun
restarts belong to the same launch. The holder is whose ranks last took the folder: a launch, or a
torchrun process that was started without the launcher.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Iterable
from typing import IO, Any

import filelock

import config
import files
from config import ConfigError
from lifecycle.watchdog import NOW

EARLIER = re.compile(r"^# until step (\d+): .*\n", re.M)


def read_status(folder: pathlib.Path) -> dict:
    """status.json of a run's folder; {} if it is missing or cannot be read."""
    return files.read_json(folder / "status.json")


def write_status(
    folder: pathlib.Path, state: str, step: int, launch: str | None, **details: Any
) -> None:
    """Replaces status.json atomically. launch: the holder that writes it. Raises OSError."""
    status = {
        "state": state,
        "step": step,
        "launch": launch,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **details,
    }
    files.write_atomic(folder / "status.json", json.dumps(status) + "\n")


def write_config(cfg: config.Config, step: int, changes: dict[str, tuple[str, str]]) -> None:
    """Replaces config.toml by the options of a launch that resumes after `step`. Those that it
    changes keep their earlier values as a comment at the top: `# until step 100: optim.lr = 0.003`.
    changes: {option: (value before, value now)}. Raises OSError."""
    path = config.run_folder(cfg) / "config.toml"
    record = ""
    for until, line in earlier_options(path):
        if until < step:  # later ones are of steps that are now trained anew
            record += line
    if changes:
        before = ", ".join(f"{name} = {value}" for name, (value, _) in changes.items())
        record += f"# until step {step}: {' '.join(before.split())}\n"
    files.write_atomic(path, record + config.to_toml(cfg))


def earlier_options(path: pathlib.Path) -> list[tuple[int, str]]:
    """(step, line) of each comment that write_config() left in a config.toml."""
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return []
    return [(int(match[1]), match[0]) for match in EARLIER.finditer(text)]


def lock(folder: pathlib.Path, timeout: float = 0) -> filelock.BaseFileLock:
    """Locks the folder until release() or the end of this process. Raises ConfigError if another
    run still holds the lock after `timeout` seconds."""
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


def is_in_place(file: IO, path: pathlib.Path) -> bool:
    """Whether an open file is still the one at its path. Not if its folder was removed, and perhaps
    made anew by another run."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
    except OSError:  # a disk that does not answer: unknown
        return True


def check_folder(folder: pathlib.Path, timeout: float = 0) -> None:
    """Raises ConfigError if the run's folder cannot be created, or if another run still holds its
    lock after `timeout` seconds. Creates nothing."""
    existing = folder
    while not os.path.lexists(existing):
        existing = existing.absolute().parent
    for path in (existing, folder / "checkpoints", folder / "logs", folder / "tensorboard"):
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"[run] output_dir: {path} is a link to {os.readlink(path)}, which is not there"
            )
        if not path.exists():
            continue
        if not path.is_dir():
            raise ConfigError(f"[run] output_dir: {path} is a file; a run needs a folder there")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"[run] output_dir: {path} cannot be written to")
    for name in ("metrics.jsonl", "status.json", "config.toml", "environment.json"):
        if (folder / name).is_dir():
            raise ConfigError(f"{folder / name}: is a folder; a run needs a file there")
    if (folder / ".lock").exists():
        lock(folder, timeout).release()


def last_holder(status: dict) -> str | None:
    """Whose ranks last took the folder: a launch, or a torchrun process without a launcher; None if
    neither. That is whoever wrote the status ("launch"), unless a launcher wrote it whose ranks
    never took the folder: then it stands in "holder"."""
    return status.get("holder", status.get("launch"))


def resume_once(cfg: config.Config, holder: str | None) -> config.Checkpoint | None:
    """[checkpoint], but with resume = N replaced by "auto" (the newest checkpoint) if this launch
    has already resumed from N, before torchrun restarted its ranks or SLURM requeued its job.
    holder: this launch, or the torchrun process of these ranks."""
    if not (holder and cfg.checkpoint and isinstance(cfg.checkpoint.resume, int)):
        return cfg.checkpoint
    last = last_holder(read_status(config.run_folder(cfg))) or ""
    if holder == last or is_later_attempt(holder, last):
        return dataclasses.replace(cfg.checkpoint, resume="auto")
    return cfg.checkpoint


def is_later_attempt(launch_id: str, earlier: str) -> bool:
    """Whether two launches are different attempts of one SLURM job: JOB.REQUEUES.ID."""
    job, *attempt = launch_id.split(".")[:2]
    earlier_job, *earlier_attempt = earlier.split(".")[:2]
    return bool(attempt) and job == earlier_job and attempt != earlier_attempt


def stop_file(folder: pathlib.Path, launch_id: str) -> pathlib.Path:
    return folder / f".stop-{launch_id}"


def report_failure(folder: pathlib.Path, launch_id: str | None, rank: int, **report: Any) -> bool:
    """Writes a rank's failure to a file for the launcher: torchrun ends the other ranks, and has
    one exit code. Returns whether it could be written.

    report: step, phase, progress (how many phases this rank has begun, comparable between ranks),
    exit_code, text, final (a restart would not help).
    """
    path = folder / f".failure-{launch_id}-{rank}"
    try:
        path.write_text(json.dumps({"rank": rank, "time": time.time(), **report}))
        return True
    except OSError:
        return False


def failures(
    folder: pathlib.Path, launch_id: str | None, read_logs_of: Iterable[int] = ()
) -> list[dict]:
    """The failures that a launch's ranks reported, the root cause first: that of the rank with the
    least progress (if one hangs, the others begin another phase and wait there), else the earliest.

    read_logs_of: ranks whose logs are read if they reported nothing.
    """
    failed = []
    for path in folder.glob(f".failure-{launch_id}-*"):
        with contextlib.suppress(OSError, ValueError):  # a full disk may have truncated it
            failed.append(json.loads(path.read_text()))
    reported = {failure["rank"] for failure in failed}
    for rank in read_logs_of:
        if rank not in reported:
            frozen = failure_in_log(folder / "logs" / f"rank-{rank}.log", rank)
            if frozen:
                failed.append(frozen)
    return sorted(failed, key=lambda failure: (failure["progress"], failure["time"]))


def failure_in_log(path: pathlib.Path, rank: int) -> dict | None:
    """The failure of a rank that could not run Python any more: the watchdog's C thread left its
    stacks in the log, below the line on where the rank was. None if it left none."""
    try:
        log = path.read_text(errors="replace")
        time_of_failure = path.stat().st_mtime
    except OSError:
        return None
    pattern = re.escape(NOW).replace(r"\{\}", "(.*)")
    lines = list(re.finditer(pattern, log))
    if not lines:
        return None
    last = lines[-1]
    _, timeout, stacks = log[last.end() :].partition("\nTimeout (")
    if not timeout:
        return None
    _, step, phase, progress = last.groups()
    return {
        "rank": rank,
        "step": int(step),
        "phase": phase,
        "progress": int(progress),
        "exit_code": 1,
        "time": time_of_failure,
        "final": False,
        "text": stacks.partition("\n")[2]
        + "no progress, and no thread could run to report it: the main thread holds "
        "Python's lock (the GIL), as in a kernel launch that waits for a hanging GPU",
    }


def remove_traces(folder: pathlib.Path, launch_id: str) -> None:
    """Removes the files through which launcher and ranks of one launch communicated."""
    for path in (stop_file(folder, launch_id), *folder.glob(f".failure-{launch_id}-*")):
        path.unlink(missing_ok=True)


def sweep(folder: pathlib.Path, launch_id: str | None) -> None:
    """Removes what killed launches left behind, and the failure reports of ranks that torchrun
    restarts. The caller holds the lock."""
    for path in (*folder.glob(".stop-*"), *folder.glob(".failure-*")):
        if path.name != f".stop-{launch_id}":
            path.unlink(missing_ok=True)
