"""A Python that has loaded torch: its processes are forked from a server, and need not spend two seconds on that.

Each has the arguments, environment, folder, open files, signals and exit status that it would have if it were started.
What differs: its parent and its command line are the server's, limits (ulimit) do not reach it, and it ends without
the interpreter's own teardown. Tests of what that would change start sys.executable.
"""

import contextlib
import functools
import marshal
import os
import select
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "filelock",
    "numpy.ma",
    "tomli",
    "concurrent.futures.process",
    "encodings.idna",
    "html",
    "resource",
)


@functools.cache
def warm_python() -> str:
    """The path of a program that takes Python's arguments. Its server ends with this process."""
    if sys.platform != "linux":  # it needs pidfd_open() and /proc
        return sys.executable
    import pathlib
    import subprocess
    import tempfile

    folder, listener = tempfile.TemporaryDirectory(prefix="warm-"), socket.socket(socket.AF_UNIX)
    path, program = f"{folder.name}/socket", pathlib.Path(folder.name, "python")
    here = os.path.dirname(os.path.abspath(__file__))
    listener.bind(path)
    listener.listen(100)
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {here!r})\n"
        f"from warm import run_by_server\nrun_by_server({path!r})\n"
    )
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=[listener.fileno()],
    )
    warm_python.kept = folder, server  # the server ends when its standard input does
    return str(program)


def run_by_server(path: str) -> None:
    """The program: has the server start a process with all that this one was given, and ends as that does."""
    if sys.argv[1] not in ("-m", "-c", "-u") and sys.argv[1].startswith("-"):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    files = [
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if os.path.exists(f"/proc/self/fd/{number}")
    ]
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    request = marshal.dumps(
        {
            "argv": sys.argv,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": os.umask(0),
            "files": files,
            "blocked": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))],
            "ignored": ignored,
        }
    )
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # it has ended
            server.send(bytes([number]))

    for number in {*FORWARDED} - {*ignored}:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int.from_bytes(server.recv(4), "little", signed=True)
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL, which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(listener: int) -> None:
    """The server: imports, then forks for each request one process that runs it, and one that stands between it and
    the program that asked for it."""
    import gc
    import importlib
    import weakref

    for name in PRELOADED:
        importlib.import_module(name)
    for made in weakref.finalize._registry:
        # of torch's libraries: each process would unregister them, in 0.04 s
        made.atexit = False
    # torchrun logs the names of nine methods that call it, and looks through all modules for each, for 0.02 s
    sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"].get_method_name = (
        lambda depth=2: sys._getframe(depth).f_code.co_name
    )
    gc.collect()
    gc.freeze()
    # what a run unfreezes is its own: else it would go through all this, 0.15 s
    gc.freeze = gc.unfreeze = lambda: None
    client, request, files = accept(socket.socket(fileno=listener))
    # until it has taken over what its program blocks
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    if pid := os.fork():
        stand_between(client, pid, files)
    client.close()
    become(request, files)
    code = 0
    try:
        # raises to the end of the program: as in a Python that was started
        run(*request["argv"][1:])
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    leave(code)


def accept(listener: socket.socket) -> tuple[socket.socket, dict, list[int]]:
    """Returns, in a process forked for each, a connection, what it asks for, and the open files that came with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        if 0 in select.select([0, listener], [], [])[0]:  # its parent has ended
            os._exit(0)
        client, _ = listener.accept()
        if not os.fork():
            break
        client.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, *_ = socket.recv_fds(client, 8, 250)
    request = client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    return client, marshal.loads(request), files


def stand_between(client: socket.socket, pid: int, files: list[int]) -> None:
    """Passes on signals, and the exit status; a client that is gone was killed, and so is the process. No return."""
    for number in (0, 1, 2, *files):
        os.close(number)
    ended = os.pidfd_open(pid)
    while ended not in select.select([client, ended], [], [])[0]:
        os.kill(pid, (client.recv(1) or bytes([signal.SIGKILL]))[0])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def become(request: dict, files: list[int]) -> None:
    """Takes over what the client was started with."""
    import fcntl

    os.setsid()
    # away from the numbers they shall have
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, 1000) for number in files]
    for number, wanted in zip(moved, request["files"]):
        os.dup2(number, wanted)
    for number in {*files} - {*request["files"]} | {*moved}:
        os.close(number)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in FORWARDED:  # the server's may differ, under nohup
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.executable, sys.argv = request["argv"][0], request["argv"][1:]
    added = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [
        *filter(None, added),
        *(
            place
            for place in sys.path
            if place.startswith(sys.base_prefix) or "site-packages" in place
        ),
    ]


def leave(code: int) -> None:
    """Ends the process with all that a program asks for at its end, but without the interpreter's teardown: it writes
    to every page that the server's imports have filled, each to be copied first, which takes 0.25 s."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # it was closed
            stream.flush()
    os._exit(code)


def run(first: str, *rest: str) -> None:
    import pathlib
    import runpy

    if first == "-u":
        sys.stdout.reconfigure(write_through=True)
        sys.argv = sys.argv[1:]
        return run(*rest)
    safe = "PYTHONSAFEPATH" in os.environ
    if first == "-m":
        sys.argv = [*rest]
        sys.path[:0] = [] if safe else [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = [] if safe else [""]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:0] = [] if safe else [str(pathlib.Path(first).resolve().parent)]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
