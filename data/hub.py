"""Repositories of the Hugging Face hub in place of folders: OWNER/NAME, or OWNER/NAME@REVISION. An id is pinned to a
commit, whose files are fetched once, into the hub's own cache: only safetensors, JSON, chat templates and sentencepiece
models, nothing that can run code."""

import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from files import print_error, python_command
from schema import ConfigError, Given, flatten, read_toml, toml

GIB = 2**30
ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
COMMIT = re.compile("[0-9a-f]{40}")
CONFIG = ("*config.json",)
SETTINGS = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = (*SETTINGS, "*.safetensors")
LEFT_OUT = ("*/*", "consolidated*")  # other formats of the same weights
SMALL = 2**24  # bytes; more are downloaded by a process of their own


def is_id(name: str) -> bool:
    """Whether an option names a repository. A local folder of that name comes first, and a file's name is none."""
    return (
        bool(ID.fullmatch(name))
        and not name.endswith((".model", ".json"))
        and not os.path.exists(name)
    )


def local(name: str, files: tuple[str, ...] = SETTINGS) -> pathlib.Path:
    """The folder that an option names; of a repository the snapshot in the cache, with its files of these patterns.
    Raises ConfigError."""
    return snapshot(name, files) if is_id(name) else pathlib.Path(name)


def absolute(name: str) -> str:
    """The absolute path of a folder, and the id of a repository as it is."""
    return name if is_id(name) else os.path.abspath(name)


def parts(name: str) -> tuple[str, str | None]:
    """(repository, revision) of an id."""
    found = ID.fullmatch(name)
    assert found, name
    return found["repo"], found["revision"]


def pin(given: Given, option: str) -> None:
    """Adds the commit to an option that is an id: the commit that the run began with, from its config.toml, or else the
    newest. A revision that is given is always looked up. Raises ConfigError."""
    name = given.values.get(option)
    if not name or not is_id(name) or COMMIT.fullmatch(parts(name)[1] or ""):
        return
    try:
        given.values[option] = (
            recorded(given, option) or f"{parts(name)[0]}@{snapshot(name, CONFIG).name}"
        )
    except ConfigError as error:
        section, _, key = option.partition(".")
        raise ConfigError(f"{given.origins[option]}: [{section}] {key} = {error}") from None


def recorded(given: Given, option: str) -> str | None:
    """The option in the run's config.toml, if that is the given repository at a commit."""
    folder, name = (
        given.values.get(f"run.{key}", given.schema.options[f"run.{key}"][1].default)
        for key in ("output_dir", "name")
    )
    with suppress(ConfigError):
        path = os.path.join(folder, name or pathlib.Path(given.path).stem, "config.toml")
        before = str(flatten(read_toml(path)).get(option))
        if before.startswith(f"{given.values[option]}@"):
            return before
    return None


@functools.cache
def snapshot(name: str, files: tuple[str, ...]) -> pathlib.Path:
    """A repository's folder in the cache, called by its commit, with its files of these patterns. The hub is asked for
    what the cache lacks, and for the commit of another revision. Raises ConfigError."""
    hub, (repo, revision) = import_hub(name), parts(name)
    hub.utils.disable_progress_bars()  # of this process
    look = functools.partial(
        hub.snapshot_download, repo, allow_patterns=[*files], ignore_patterns=[*LEFT_OUT]
    )
    with one_line(name, hub):
        try:
            found = look(revision=revision, dry_run=True)
        except hub.errors.DryRunError as error:  # the hub cannot be reached, or refuses
            with suppress(hub.errors.LocalEntryNotFoundError):
                return pathlib.Path(look(revision=revision, local_files_only=True))
            raise error.__cause__ or error from None
        if not found:
            raise ConfigError(
                f"{toml(name)}: has none of {', '.join(files)}, and nothing else is read"
            )
        commit = found[0].commit_hash
        lacking = [file for file in found if file.will_download]
        if (size := sum(file.file_size or 0 for file in lacking)) > SMALL:
            fetch(
                f"{repo}@{commit}",
                [file.filename for file in lacking],
                size,
                hub.constants.HF_HUB_CACHE,
            )
        return pathlib.Path(look(revision=commit))


def fetch(name: str, files: list[str], size: int, cache: str) -> None:
    """Downloads files of so many bytes in a process that ends with this one: a stop of this one would wait for threads
    that download. Raises ConfigError."""
    check_room(
        next(
            folder
            for folder in (pathlib.Path(cache), *pathlib.Path(cache).parents)
            if folder.exists()
        ),
        size,
    )
    print_error(f"fetching {name}: {size / GIB:,.2f} GiB into {cache}")
    command = python_command("from data import hub; hub.main(*sys.argv[1:])")
    with subprocess.Popen(
        [*command, name, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        # it ends, too, when the pipes are closed by an exception here
        problem = child.stdout.read().strip()
    if child.returncode:
        raise ConfigError(
            problem
            or f"{toml(name)}: fetching it failed with exit code {child.returncode}; start again "
            "to resume"
        )


def main(name: str, *files: str) -> NoReturn:
    """The process that downloads. Prints its progress to stderr, a problem to stdout."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the process that waits
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    hub, (repo, commit) = import_hub(name), parts(name)
    try:
        with one_line(name, hub):
            hub.snapshot_download(repo, revision=commit, allow_patterns=[*files])
    except ConfigError as error:
        print(error, flush=True)
        os._exit(2)
    os._exit(0)


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


@contextmanager
def one_line(name: str, hub: Any) -> Iterator[None]:
    """Turns any error of the hub's library into a ConfigError that says what to do."""
    errors, page = hub.errors, f"{hub.constants.ENDPOINT}/{parts(name)[0]}"
    log_in = "log in with `hf auth login` or HF_TOKEN"
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of the network, too, whose libraries change
        reasons = {
            errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set, and not all of its files are in "
            f"{hub.constants.HF_HUB_CACHE}: fetch them where there is a network",
            errors.GatedRepoError: f"is gated: ask for access on {page}, and {log_in}",
            errors.RepositoryNotFoundError: f"does not exist, or is private: check the name, or {log_in}",
            errors.RevisionNotFoundError: "has no such revision",
            Exception: f"cannot be fetched: {type(error).__name__}: {str(error).partition(chr(10))[0]}; start again to "
            "resume",
        }
        reason = next(reason for kind, reason in reasons.items() if isinstance(error, kind))
        raise ConfigError(
            f"{toml(name)}: is not on this machine; as a Hugging Face repository: {reason}"
        ) from None


def check_room(folder: pathlib.Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        raise ConfigError(
            f"{folder}: {needed / GIB:,.2f} GiB are needed, {free / GIB:,.2f} GiB are free"
        )


def import_hub(name: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ConfigError(
            f"{toml(name)}: is not on this machine; as a Hugging Face repository: needs huggingface_hub "
            f"({sys.executable} -m pip install huggingface_hub)"
        ) from None
    return huggingface_hub
