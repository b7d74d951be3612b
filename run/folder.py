"""A run's folder: its lock (.lock) and its state (status.json)."""

import json
import pathlib
import time
from typing import Any

import filelock

import system
from config import ConfigError

ENDING_SECONDS = 30.0  # how long ranks that were killed may take to release the lock


class RunLock:
    """The lock and the status of a run's folder. Rank 0 holds the lock until its process ends. After
    a failure the launcher acquires it."""

    def __init__(self, folder: pathlib.Path, attempt: str | None):
        """attempt: the id that the status carries; None without a launcher."""
        self.folder = folder
        self.attempt = attempt
        self.lock: filelock.BaseFileLock | None = None
        self.step = 0  # of the last status

    def acquire(self, seconds: float) -> None:
        """Creates the folder and locks it. Waits `seconds` for processes that are about to end.
        Raises ConfigError if another run holds the lock, and OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder, seconds)

    def write_status(self, state: str, step: int, **details: Any) -> None:
        """Replaces status.json."""
        self.step = step
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        status = {"state": state, "step": step, "launch": self.attempt, "time": now, **details}
        system.write_if_possible(self.folder / "status.json", json.dumps(status) + "\n")

    def release(self) -> None:
        if self.lock:
            self.lock.release()


def lock(folder: pathlib.Path, seconds: float) -> filelock.BaseFileLock:
    """Locks an existing folder until release() or the end of this process. Raises ConfigError if
    another run still holds the lock after `seconds`, and OSError."""
    try:
        return system.lock(folder / ".lock", seconds)
    except filelock.Timeout:
        raise ConfigError(
            f"{folder}: another run works here; wait for it, or choose another run.name"
        ) from None


def read_status(folder: pathlib.Path) -> dict:
    """status.json of a run's folder; {} if it is missing or cannot be read."""
    return system.read_json(folder / "status.json")
