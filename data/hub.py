"""Repositories of the Hugging Face hub in place of folders: OWNER/NAME, or OWNER/NAME@REVISION. An
id is pinned to a commit, whose files are fetched once, into the hub's own cache: only safetensors,
JSON, chat templates and sentencepiece models, nothing that can run code."""

import functools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from files import end_with_stdin, print_error, python_command
from schema import ConfigError, Given, flatten, read_toml, toml

GIB = 2**30
ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
COMMIT = re.compile("[0-9a-f]{40}")
# patterns of file names
CONFIG = ("*config.json",)
SETTINGS = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = (*SETTINGS, "*.safetensors")
EXCLUDED = ("*/*", "consolidated*")  # other formats of the same weights
# how a git-lfs pointer begins, and the size that it stays below
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_SIZE = 1024
# classes of errors, of Python and of the libraries that the hub's library uses in turn, which say
# that a host has not answered
NETWORK_ERRORS = {"ConnectionError", "TimeoutError", "TransportError"}
# words of a run's command line that are options of its configuration
OVERRIDE = re.compile(r"--(\w+\.\w+=.*|\w+=off)")
CONNECT_SECONDS = 3.0
SMALL = 2**24  # bytes; another process downloads more than that


def is_id(name: str) -> bool:
    """Whether an option names a repository: not a local folder of that name, nor a file."""
    return (
        bool(ID.fullmatch(name))
        and not name.endswith((".model", ".json"))
        and not os.path.exists(name)
    )


def local(name: str, files: tuple[str, ...] = SETTINGS) -> pathlib.Path:
    """The folder that an option names. Of a repository it is the snapshot in the cache, with the
    files of these patterns. Raises ConfigError."""
    return snapshot(name, files) if is_id(name) else pathlib.Path(name)


def absolute(name: str) -> str:
    """The absolute path of a folder; the id of a repository as it is."""
    return name if is_id(name) else os.path.abspath(name)


def refuse_pointer(path: pathlib.Path) -> None:
    """Raises ConfigError if a file is what a clone without git-lfs has in place of a large one."""
    content = b""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size < LFS_SIZE:
            content = path.read_bytes()
    if content.startswith(LFS_POINTER):
        raise ConfigError(
            f"{path}: is a git-lfs pointer, not the file itself; fetch what its folder points to: "
            f"git -C {shlex.quote(str(path.parent))} lfs pull"
        )


def split_id(name: str) -> tuple[str, str | None]:
    """(repository, revision) of an id."""
    match = ID.fullmatch(name)
    assert match, name
    return match["repo"], match["revision"]


def pin(given: Given, option: str) -> None:
    """Adds the commit to an option that is an id: the one in the config.toml of a run that was
    begun, or else the newest. A branch or tag is always looked up. Raises ConfigError."""
    name = given.values.get(option)
    if not name or not is_id(name):
        return
    repo, revision = split_id(name)
    if revision and COMMIT.fullmatch(revision):
        return
    pinned = recorded(given, option)
    if pinned is None:
        try:
            pinned = f"{repo}@{snapshot(name, CONFIG).name}"
        except ConfigError as error:
            section, _, key = option.partition(".")
            raise ConfigError(f"{given.origins[option]}: [{section}] {key} = {error}") from None
    given.values[option] = pinned


def recorded(given: Given, option: str) -> str | None:
    """The option in the run's config.toml, if that is the given repository at a commit."""
    before = str(options_of_run(given).get(option))
    return before if before.startswith(f"{given.values[option]}@") else None


def options_of_run(given: Given) -> dict[str, Any]:
    """The options in the config.toml of the run that is to be started, by name; {} if it is new."""

    def value_of(name: str) -> str | None:
        return given.values.get(name, given.schema.options[name][1].default)

    output_dir = value_of("run.output_dir") or ""
    name = value_of("run.name") or pathlib.Path(given.path).stem
    try:
        return flatten(read_toml(os.path.join(output_dir, name, "config.toml")))
    except ConfigError:
        return {}


@functools.cache
def snapshot(name: str, files: tuple[str, ...]) -> pathlib.Path:
    """A repository's folder in the cache, which is named by its commit, with the files of these
    patterns. Asks the hub for what the cache lacks, and for the commit of another revision. Raises
    ConfigError."""
    hub = import_hub(name)
    repo, revision = split_id(name)
    hub.utils.disable_progress_bars()  # of this process
    download = functools.partial(
        hub.snapshot_download, repo, allow_patterns=[*files], ignore_patterns=[*EXCLUDED]
    )
    with one_line(name, hub):
        try:
            problem = connection_problem()
            if problem:
                raise ConnectionError(problem)
            listed = download(revision=revision, dry_run=True)
        except (hub.errors.DryRunError, ConnectionError) as error:  # no answer, or a refusal
            with suppress(hub.errors.LocalEntryNotFoundError):
                return pathlib.Path(download(revision=revision, local_files_only=True))
            raise error.__cause__ or error from None
        if not listed:
            raise ConfigError(
                f"{toml(name)}: has none of {', '.join(files)}, and nothing else is read"
            )
        commit = listed[0].commit_hash
        missing = [file for file in listed if file.will_download]
        size = sum(file.file_size or 0 for file in missing)
        if size > SMALL:
            names = [file.filename for file in missing]
            fetch(f"{repo}@{commit}", names, size, hub.constants.HF_HUB_CACHE)
        return pathlib.Path(download(revision=commit))


def fetch(name: str, files: list[str], size: int, cache: str) -> None:
    """Downloads files in a process that ends with this one. Threads would not: a stop of this
    process would wait for them. size: bytes of all files. Raises ConfigError."""
    check_room(pathlib.Path(cache), size)
    print_error(f"fetching {name}: {size / GIB:,.2f} GiB into {cache}")
    command = python_command("from data import hub; hub.main(*sys.argv[1:])")
    with subprocess.Popen(
        [*command, name, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        # an exception here closes the pipes, which ends the process, too
        problem = child.stdout.read().strip()
    if child.returncode:
        raise ConfigError(
            problem
            or f"{toml(name)}: fetching it failed with exit code {child.returncode}; start again "
            "to resume"
        )


def main(name: str, *files: str) -> NoReturn:
    """The process that downloads. Prints its progress to stderr, a problem to stdout."""
    # signals are for the process that waits
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end_with_stdin()
    hub = import_hub(name)
    repo, commit = split_id(name)
    try:
        with one_line(name, hub):
            hub.snapshot_download(repo, revision=commit, allow_patterns=[*files])
    except ConfigError as error:
        print(error, flush=True)
        os._exit(2)
    os._exit(0)


@contextmanager
def one_line(name: str, hub: Any) -> Iterator[None]:
    """Turns any error of the hub's library into a ConfigError that says what to do."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of the network, too, whose libraries change
        raise ConfigError(
            f"{toml(name)}: is not on this machine; as a Hugging Face repository: "
            f"{reason_of(error, name, hub)}{export_of(name)}"
        ) from None


def export_of(name: str) -> str:
    """The command that makes what is missing, if the name is rather that of a folder: one beside
    runs, whose end names {run}-hf for an export."""
    beside = name.rpartition("/")[0]
    if not os.path.isdir(beside) and beside != "outputs":  # the default of run.output_dir
        return ""
    run = name.removesuffix("-hf") if name.endswith("-hf") else f"{beside}/RUN"
    return f"; or run the export first: ./run_train.sh -m huggingface export {run} {name}"


def reason_of(error: Exception, name: str, hub: Any) -> str:
    """What an error of the hub's library means, and what to do."""
    repo, _ = split_id(name)
    log_in = "log in with `hf auth login` or HF_TOKEN"
    if isinstance(error, hub.errors.OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE is set, and not all of its files are in "
            f"{hub.constants.HF_HUB_CACHE}: {how_to_fetch()}"
        )
    # before RepositoryNotFoundError, of which it is a kind
    if isinstance(error, hub.errors.GatedRepoError):
        return f"is gated: ask for access on {hub.constants.ENDPOINT}/{repo}, and {log_in}"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return f"does not exist, or is private: check the name, or {log_in}"
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return "has no such revision"
    first_line = str(error).partition("\n")[0]
    reason = f"cannot be fetched: {type(error).__name__}: {first_line}; start again to resume"
    if is_unreachable(error):
        reason += f", or {how_to_fetch()}"
    return reason


def is_unreachable(error: BaseException) -> bool:
    """Whether the hub has not answered: there is no network, or HF_HUB_OFFLINE is set."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    causes = causes_of(error)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return True
    if any(isinstance(cause, HfHubHTTPError) for cause in causes):  # an answer
        return False
    for cause in causes:
        names = {kind.__name__ for kind in type(cause).__mro__}
        if names & NETWORK_ERRORS:
            return True
    return False


def causes_of(error: BaseException) -> list[BaseException]:
    """An exception, and those that led to it."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def how_to_fetch() -> str:
    """What helps a machine without a network, for messages."""
    from huggingface_hub import constants

    online = "HF_HUB_OFFLINE=0 " if constants.HF_HUB_OFFLINE else ""
    return (
        "run on a machine with a network (a cluster's login node): "
        f"HF_HOME={shlex.quote(constants.HF_HOME)} {online}{fetch_command()}"
    )


def fetch_command() -> str:
    """The command that fetches what this one reads from the hub; of a tool that takes no CONFIG,
    what any run reads."""
    words = sys.argv[1:]
    if words and words[0].endswith(".toml"):
        overrides = [word for word in words[1:] if OVERRIDE.fullmatch(word)]
        run = shlex.join([words[0], *overrides])
    else:
        run = "CONFIG"
    return f"./run_train.sh -m data.prepare {run} --fetch-only"


@functools.cache
def connection_problem() -> str | None:
    """Why the hub cannot be reached, for a message; None if something answers at one of its
    addresses, or of the proxy's. Asks once in a process: its library tries for minutes where a
    firewall keeps silent."""
    # here: importing them would take a tenth of the time in which a configuration is checked
    import urllib.parse
    import urllib.request

    try:
        from huggingface_hub import constants
    except ImportError:  # whoever needs it reports that
        return None
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if constants.HF_HUB_OFFLINE or not url.hostname:
        return None  # it says so itself
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        connect_to_any(url.hostname, port)
    except OSError as error:
        return f"{url.hostname}:{port} cannot be reached: {error.strerror or error}"
    return None


def connect_to_any(host: str, port: int) -> None:
    """Connects to one of a host's addresses. Tries all at once: a large host has a dozen, and one
    after the other each would have the timeout of its own. Raises OSError."""
    import queue
    import socket

    outcomes: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def connect(address: tuple[str, int]) -> None:
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
        except OSError as error:
            outcomes.put(error)
        else:
            outcomes.put(None)

    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = {entry[4][:2] for entry in entries}
    for address in addresses:
        threading.Thread(target=connect, args=[address], daemon=True).start()
    error = None
    for _ in addresses:
        error = outcomes.get()
        if error is None:
            return
    assert error, "a host has an address"
    raise error


def check_room(folder: pathlib.Path, needed: int) -> None:
    """folder: may be missing yet. needed: bytes. Raises ConfigError if its disk has fewer."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigError(
            f"{folder}: {needed / GIB:,.2f} GiB are needed, {free / GIB:,.2f} GiB are free"
        )


def import_hub(name: str) -> Any:
    """The module huggingface_hub. name: of the repository, for the message. Raises ConfigError."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ConfigError(
            f"{toml(name)}: is not on this machine; as a Hugging Face repository: needs "
            f"huggingface_hub ({sys.executable} -m pip install huggingface_hub)"
        ) from None
    return huggingface_hub
