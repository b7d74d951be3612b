"""Atomic, durable writes: files and folders appear complete or not at all, and survive a power cut.
Also locks, and errors that may pass."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib

import filelock

from system.processes import print_error, warn_once

# Errors of syncing a parent folder that we cannot have created.
NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL)
# Errors of a disk, a machine or a network, not of a file: they may pass. On NFS a read fails
# (ESTALE) where another machine has replaced the file since it was opened; a client of Lustre or
# FUSE that has lost its server says that its endpoint is shut down or not connected.
TRANSIENT_NAMES = (
    "EIO EREMOTEIO ESTALE EAGAIN EBUSY EMFILE ENFILE ENOMEM ENOSPC EDQUOT EROFS EHOSTDOWN "
    "EHOSTUNREACH ENETDOWN ENETUNREACH ECONNRESET ENOTCONN ESHUTDOWN ETIMEDOUT"
)
# macOS has no EREMOTEIO
TRANSIENT_ERRORS = {getattr(errno, name, errno.EIO) for name in TRANSIENT_NAMES.split()}
# Errors of syncing a folder on a file system that syncs files alone: CIFS, gocryptfs.
NO_FOLDERS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def sync(path: pathlib.Path) -> None:
    """Syncs a file's content, or a folder's entries, to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync_handle(handle)
    except OSError as error:
        if error.errno not in NO_FOLDERS or not path.is_dir():
            raise
        warn_once("this file system does not sync folders: a power cut may undo the last rename")
    finally:
        os.close(handle)


def sync_handle(handle: int) -> None:
    """Syncs an open file to disk. Raises OSError."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, whose fsync() leaves it in the disk's own cache
        with contextlib.suppress(OSError):  # not on every file system
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def write_atomic(
    path: pathlib.Path, content: bytes | str, temporary: pathlib.Path | None = None
) -> None:
    """Replaces a file atomically: a reader, also after a crash, sees either the old content or the
    new one. Raises OSError, which names a file. temporary: where it is written first, if several
    processes may write it at once."""
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # else a power cut may leave the new name without its content
            sync_handle(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a write knows only its handle
        raise
    temporary.replace(path)


def write_if_possible(path: pathlib.Path, content: bytes | str) -> None:
    """Replaces a small file beside a run atomically. One that cannot be written costs a line, never
    the run."""
    try:
        write_atomic(path, content)
    except OSError as error:
        print_error(f"{path}: not written: {error.strerror}")


def read_json(path: pathlib.Path) -> dict:
    """The object in a JSON file; {} if there is none, or none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            return value
    return {}


def publish(temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Renames a folder whose files are synced to its final name. On OSError, which it raises, the
    old name remains."""
    sync(temporary)
    for folder in final.absolute().parents:  # each may have been created just now, too
        try:
            sync(folder)
        except OSError as error:
            if error.errno not in NOT_OURS:
                raise
    temporary.rename(final)
    try:
        sync(final.parent)
    except OSError:
        final.rename(temporary)
        raise


def lock(path: pathlib.Path, timeout: float = 0) -> filelock.BaseFileLock:
    """Locks a file until release() or the end of this process, however it ends; an existing file is
    kept. timeout: seconds to wait, -1 to wait forever. Raises filelock.Timeout, and OSError if the
    file cannot be created or opened; on a file system without locks, prints a warning and locks
    nothing."""
    # filelock would wait for some files that cannot be created
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    held = filelock.FileLock(path, timeout=timeout, thread_local=False)
    try:
        try:  # without flock (ENOSYS), filelock would take the file itself for a lock that is held
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)
        held.acquire()
    except filelock.Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        warn_once(
            f"{path.parent}: no locks on this file system, nothing keeps a second run out: {error}"
        )
    return held
