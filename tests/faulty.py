"""train.py with a fault, as a rank's script: FAULT is "what" or "what:rank:step"; see the table at the end."""

import atexit
import ctypes
import functools
import gc
import os
import pathlib
import runpy
import signal
import sys
import time

# as of train.py: Python put tests/ here, whose extras/ would hide the repository's
sys.path[0] = str(pathlib.Path(__file__).parent.parent)
gc.disable()  # while importing, as train.py does, which enables it
# this script's folder has an `extras` of its own: that of the tests
sys.path[0] = str(pathlib.Path(__file__).parent.parent)

import torch  # noqa: E402

import checkpoint.save  # noqa: E402
import config  # noqa: E402
import lifecycle.run  # noqa: E402
from data.loader import Loader  # noqa: E402
from lifecycle import watchdog  # noqa: E402
from lifecycle.stop import StopRequest  # noqa: E402
from model.llama import Block, Llama  # noqa: E402

what, on_rank, at_step = [*os.environ["FAULT"].split(":"), "0", "3"][:3]
HERE = os.getenv("RANK", "0") == on_rank
calls = {}


def nth_call(name: str) -> bool:
    """Whether this is the at_step-th call, on the rank that the fault is for."""
    calls[name] = calls.get(name, 0) + 1
    return HERE and calls[name] == int(at_step)


def before(kind: type, method: str, fault) -> None:
    original = getattr(kind, method)

    def faulty(*arguments, **keywords):
        if nth_call(method):
            fault()
        return original(*arguments, **keywords)

    setattr(kind, method, faulty)


def after(kind: type, method: str, fault) -> None:
    original = getattr(kind, method)

    def faulty(*arguments, **keywords):
        result = original(*arguments, **keywords)
        return fault(result) if nth_call(method) else result

    setattr(kind, method, faulty)


def throw(error: BaseException) -> None:
    raise error


def slowly(method):
    return lambda *arguments, **keywords: (time.sleep(8), method(*arguments, **keywords))[1]


def with_a_gate(init):
    def made(self, *arguments) -> None:
        init(self, *arguments)
        self.gate = torch.nn.Parameter(torch.empty(3))

    return made


def give(*options: str) -> None:
    if HERE:
        config.load = functools.partial(
            lambda load, path, overrides: load(path, [*overrides, *options]), config.load
        )


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_slowly() -> None:
    terminate()
    time.sleep(1)


def freeze() -> None:
    """Never returns, nor lets another thread run: a mutex locked twice, in a call that keeps Python's lock."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


FAULTS = {
    "none": lambda: None,
    "hang in data": lambda: before(Loader, "__next__", lambda: time.sleep(1000)),
    "frozen in data": lambda: (
        setattr(watchdog, "FROZEN_SECONDS", 3.0),
        before(Loader, "__next__", freeze),
    ),
    "hang in teardown": lambda: (
        setattr(lifecycle.run, "EXIT_SECONDS", 3.0),
        HERE and setattr(torch.distributed, "destroy_process_group", lambda: time.sleep(1000)),
    ),
    "hang at exit": lambda: (
        setattr(lifecycle.run, "EXIT_SECONDS", 3.0),
        HERE and atexit.register(time.sleep, 1000),
    ),
    "slow save and hang": lambda: (
        setattr(checkpoint.save.Writer, "finish", slowly(checkpoint.save.Writer.finish)),
        before(Loader, "__next__", lambda: time.sleep(1000)),
    ),
    "error in data": lambda: before(
        Loader, "__next__", lambda: throw(RuntimeError("the disk is gone"))
    ),
    "killed": lambda: before(Loader, "__next__", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "killed once": lambda: (
        os.path.exists(os.environ["ONCE"])
        or before(
            Loader,
            "__next__",
            lambda: (
                pathlib.Path(os.environ["ONCE"]).touch(),
                os.kill(os.getpid(), signal.SIGKILL),
            ),
        )
    ),
    "infinite loss": lambda: after(
        Llama, "forward", lambda out: ({"loss": out[0]["loss"] + float("inf")}, out[1])
    ),
    "forgotten parameter": lambda: setattr(Block, "__init__", with_a_gate(Block.__init__)),
    "out of memory": lambda: before(
        Llama, "forward", lambda: throw(torch.OutOfMemoryError("Tried to allocate 9 GiB."))
    ),
    "out of memory once": lambda: (
        os.path.exists(os.environ["ONCE"])
        or before(
            Llama,
            "forward",
            lambda: (
                pathlib.Path(os.environ["ONCE"]).touch(),
                throw(torch.OutOfMemoryError("Tried to allocate 9 GiB.")),
            ),
        )
    ),
    "another rate": lambda: give("--optim.lr=1.0"),
    "another mesh": lambda: give("--parallel.tp=2"),
    "term after check": lambda: after(StopRequest, "start_sync", terminate),
    "term before step 1": lambda: before(StopRequest, "start_sync", terminate),
    "term in data": lambda: before(Loader, "__next__", terminate_slowly),
    "term in forward": lambda: before(Llama, "forward", terminate_slowly),
    "term in save": lambda: before(checkpoint.save.Writer, "finish", terminate_slowly),
    "save error": lambda: before(
        checkpoint.save.Writer, "write_data", lambda: throw(OSError(5, "injected"))
    ),
}

FAULTS[what]()
sys.argv[0] = str(pathlib.Path(__file__).parent.parent / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
