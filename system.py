"""The operating system: processes, files, cores and GPUs. Imports nothing from this repository."""

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import pathlib
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import filelock

# Processes: exit codes, printing, signals, and how a process ends with its parent

FINISHED = 0
INPUT_IS_WRONG = 2
STOPPED = 75  # EX_TEMPFAIL: start again to resume

MACOS_FILES = 10_240  # OPEN_MAX of macOS: how many files a process may open

# Signals that ask to stop. XCPU: the soft limit of CPU time is reached.
SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)


def printable(text: str) -> str:
    """Text that is safe on a terminal: escapes control characters except newlines and tabs."""
    safe = []
    for character in text:
        if character.isprintable() or character in "\n\t":
            safe.append(character)
        else:
            safe.append(character.encode("unicode_escape").decode())
    return "".join(safe)


def print_line(text: str) -> None:
    """Prints a line. It is not an error if the reader closes the pipe early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(text: str) -> None:
    """Prints a line to stderr. It is not an error if the terminal is closed, or the reader has ended.
    Escapes control characters, as the text may quote a path or the command line."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # Otherwise Python would try to flush the line again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@functools.cache
def warn_once(text: str) -> None:
    """Prints a line to stderr, only once in this process."""
    print_error(text)


def process_name() -> str:
    """A name for this process that is unique among those that share a disk, for temporary files."""
    return f"{platform.node()}-{os.getpid()}"


def listen(handler: Callable | signal.Handlers) -> None:
    """Installs the handler of all signals that ask to stop, and unblocks them."""
    for number in SIGNALS:
        # Under nohup, HUP is ignored, and stays so.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def raise_file_limit() -> None:
    """Raises this process's limit of open files, usually 1,024, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:  # on macOS, which refuses to set it
        hard = max(soft, MACOS_FILES)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def python_command(statements: str) -> list[str]:
    """A command that runs statements in a new Python process, with this repository's modules, which
    need not be on Python's path."""
    repo = str(pathlib.Path(__file__).parent)
    # Python 3.10 has the caller's folder in sys.path, as "".
    modules = f"import sys; sys.path[:] = [{repo!r}, *filter(None, sys.path)]"
    return [sys.executable, "-c", f"{modules}; {statements}"]


def die_with_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent dies, even if this process is suspended: else a
    rank could outlive a killed launcher and keep the folder's lock. parent: its pid, if known before
    the fork, as it may have died since. On other systems a thread polls, which exec would end."""
    if sys.platform == "linux":
        import ctypes

        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
    elif parent is None:
        threading.Thread(target=_poll_parent, args=[os.getppid()], daemon=True).start()


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# Files and folders: atomic and durable writes, and locks. A file appears complete or not at all, and
# survives a power cut.

# Errors of syncing a parent folder that this process cannot have created.
NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL)
# Errors of a disk, a machine or a network, which may be temporary. On NFS a read fails with ESTALE if
# another machine has replaced the file since it was opened. A client of Lustre or FUSE that has lost
# its server reports ENOTCONN or ESHUTDOWN.
TRANSIENT_NAMES = (
    "EIO EREMOTEIO ESTALE EAGAIN EBUSY EMFILE ENFILE ENOMEM ENOSPC EDQUOT EROFS EHOSTDOWN "
    "EHOSTUNREACH ENETDOWN ENETUNREACH ECONNRESET ENOTCONN ESHUTDOWN ETIMEDOUT"
)
# macOS has no EREMOTEIO.
TRANSIENT_ERRORS = {getattr(errno, name, errno.EIO) for name in TRANSIENT_NAMES.split()}
# Errors of syncing a folder on a file system that only syncs files: CIFS, gocryptfs.
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
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, whose fsync() leaves data in the disk's cache
        with contextlib.suppress(OSError):  # some file systems do not support it
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def write_atomic(
    path: pathlib.Path, content: bytes | str, temporary: pathlib.Path | None = None
) -> None:
    """Replaces a file atomically: a reader sees the old content or the new one, even after a crash.
    temporary: a file name of this process, if several may write at once. Raises OSError, which names
    a file."""
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Without this, a power cut may leave the new name without its content.
            sync_handle(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # errors of write() have no file name
        raise
    temporary.replace(path)


def write_if_possible(path: pathlib.Path, content: bytes | str) -> None:
    """Replaces a small file atomically. If that fails, it prints a line, and the run continues."""
    try:
        write_atomic(path, content)
    except OSError as error:
        print_error(f"{path}: not written: {error.strerror}")


def read_json(path: pathlib.Path) -> dict:
    """The object in a JSON file, or {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            return value
    return {}


def publish(temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Renames a folder, whose files are synced, to its final name. If it raises OSError, the old name
    remains."""
    sync(temporary)
    for folder in final.absolute().parents:  # any of them may be new
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
    """Locks a file until release() or the end of this process. Creates it if necessary. timeout:
    seconds to wait, -1 to wait forever. Raises filelock.Timeout, and OSError if the file cannot be
    opened. On a file system without locks, it prints a warning and locks nothing."""
    # filelock would wait for some files that cannot be created.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    held = filelock.FileLock(path, timeout=timeout, thread_local=False)
    try:
        try:  # without flock (ENOSYS), filelock would treat the existing file as a lock
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


# The machine: the cores and GPUs that this process may use

MEMBERSHIP = pathlib.Path("/proc/self/cgroup")
GROUPS = pathlib.Path("/sys/fs/cgroup")
NVIDIA = "/dev/nvidiactl"
DRIVERS = (NVIDIA, "/dev/dxg", "/dev/kfd")  # of GPUs; the others are under WSL, and AMD's


def usable_cores() -> int:
    """The number of cores in this process's affinity or, if that is less, its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    for group in control_groups("cpu", "cpu,cpuacct"):
        quota = _quota(group)
        if quota:
            cores = min(cores, quota)
    return max(1, cores)


def control_groups(*names: str) -> Iterator[pathlib.Path]:
    """The folders of this process's control group and of the groups around it. names: the controller's
    in version 1, where each controller has its own groups."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", *names):
            continue
        root = GROUPS / controllers
        group = root / name.lstrip("/")
        while root in group.parents:
            yield group
            group = group.parent
        # In a container, its own group.
        yield root


def _quota(group: pathlib.Path) -> int | None:
    """A control group's limit in cores, rounded up; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        # version 2: "max" in place of the quota means no limit
        quota, period = (group / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):
        # version 1: -1 means no limit
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        if quota > 0:
            return math.ceil(quota / period)
    return None


def has_driver() -> bool:
    """Whether there may be GPUs that CUDA_VISIBLE_DEVICES does not hide."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return not is_hidden and any(map(os.path.exists, DRIVERS))


def visible_gpus() -> int:
    """How many GPUs a process can use. Imports torch, which takes seconds, only if there is a driver."""
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()  # creates no context on a GPU
