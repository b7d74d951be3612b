"""The manifest of a checkpoint: the size and SHA-256 of every file, and the comparison of a folder with it.

torch.distributed.checkpoint has none of its own: of 40 bits flipped in its files 38 load silently as wrong numbers.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from config import ConfigError

MANIFEST = "manifest.json"
PART = 64 * 2**20  # bytes per SHA-256: parts of one file are hashed side by side, on all cores and all ranks
MANIFEST_LIMIT = 256 * 2**20  # bytes; a manifest of a million parts has a third of it


class CorruptCheckpoint(Exception):
    """A checkpoint is not what it was when it was written: file, expected, found."""


@contextlib.contextmanager
def opened(folder: pathlib.Path, name: str) -> Iterator[int]:
    """The descriptor of a regular file that lies in this folder itself. Raises CorruptCheckpoint for anything else: no
    path leads out of a checkpoint, no link is followed, no pipe or device opened."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CorruptCheckpoint(f"{folder}: {name!r} is no name of a file in it")
    try:
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{folder / name}: expected a file, found none") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EIO):
            raise CorruptCheckpoint(f"{folder / name}: expected a regular file: {error.strerror}") from None
        # who may not read it, or cannot now, does not know whether it is good: nothing is set aside for that
        raise ConfigError(f"{folder / name}: cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CorruptCheckpoint(f"{folder / name}: expected a regular file, found another kind")
        yield handle
    finally:
        os.close(handle)


def read_json(folder: pathlib.Path, name: str, limit: int) -> tuple[Any, bytes]:
    """The content of a JSON file of at most `limit` bytes, and its bytes. Raises CorruptCheckpoint."""
    with opened(folder, name) as handle:
        if (size := os.fstat(handle).st_size) > limit:
            raise CorruptCheckpoint(f"{folder / name}: {size} bytes, expected at most {limit}")
        try:
            with open(handle, "rb", closefd=False) as file:
                text = file.read()
            return json.loads(text), text
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{folder / name}: expected JSON: {error}") from None


def hash_part(folder: pathlib.Path, name: str, part: int) -> str:
    """SHA-256 of the part-th 64 MiB of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(PART, 2**22)))
    with opened(folder, name) as handle:
        offset, end = part * PART, min((part + 1) * PART, os.fstat(handle).st_size)
        while offset < end:
            got = os.preadv(handle, [buffer[: end - offset]], offset)
            if not got:
                raise CorruptCheckpoint(f"{folder / name}: ends at byte {offset}, while it is read")
            digest.update(buffer[:got])  # lets go of the interpreter's lock
            offset += got
    return digest.hexdigest()


def in_threads(work: Any, items: list) -> list:
    """[work(*item) for item in items], on up to eight cores."""
    with concurrent.futures.ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda item: work(*item), items))


def hash_files(folder: pathlib.Path, names: list[str]) -> dict[str, dict]:
    """The manifest's entries of some files: {name: {"size": bytes, "sha256": [one per 64 MiB]}}."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    parts = [(folder, name, part) for name in names for part in range(-(-sizes[name] // PART))]
    digests = in_threads(hash_part, parts)
    return {name: {"size": sizes[name], "sha256": [d for d, (_, of, _) in zip(digests, parts) if of == name]}
            for name in names}


def render_manifest(files: dict[str, dict]) -> bytes:
    """The one spelling of a manifest. It protects itself: a hash of its entries, and no byte that is free to change."""
    body = json.dumps(files, indent=1, sort_keys=True)
    return f'{{"files": {body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'.encode()


def read_manifest(folder: pathlib.Path) -> dict[str, dict]:
    """The entries by file name. Raises CorruptCheckpoint where the manifest is missing, cut or changed."""
    content, text = read_json(folder, MANIFEST, MANIFEST_LIMIT)
    try:
        files = content["files"]
        well_formed = text == render_manifest(files) and all(
            type(entry["size"]) is int and len(entry["sha256"]) == -(-entry["size"] // PART)
            for entry in files.values())
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        well_formed = False
    if not well_formed:
        raise CorruptCheckpoint(f"{folder / MANIFEST}: is not as it was written: its own hash or form is wrong")
    return files


def check_sizes(folder: pathlib.Path, files: dict[str, dict]) -> dict[str, str]:
    """What is wrong at first sight, by file: those that are missing, cut, or no regular files."""
    problems = {}
    for name, entry in files.items():
        try:
            with opened(folder, name) as handle:
                if (size := os.fstat(handle).st_size) != entry["size"]:
                    problems[name] = f"{folder / name}: expected {entry['size']} bytes, found {size}"
        except CorruptCheckpoint as error:
            problems[name] = str(error)
    return problems


def verify(folder: pathlib.Path, share: int = 0, shares: int = 1) -> list[str]:
    """All that is wrong with a checkpoint, a line each: file, expected, found. Of `shares` callers each hashes its
    share of the parts."""
    try:
        files = read_manifest(folder)
    except CorruptCheckpoint as error:
        return [str(error)]
    problems = check_sizes(folder, files)
    parts = [(name, part) for name, entry in sorted(files.items()) if name not in problems
             for part in range(len(entry["sha256"]))]

    def check(name: str, part: int) -> str | None:
        expected = files[name]["sha256"][part]
        try:
            found = hash_part(folder, name, part)
        except (CorruptCheckpoint, OSError) as error:
            return f"{folder / name}: cannot be read: {error}"
        if found != expected:
            span = f"bytes {part * PART} to {min((part + 1) * PART, files[name]['size']) - 1}"
            return f"{folder / name}: {span}: expected SHA-256 {expected}, found {found}"
        return None

    return [*problems.values(), *filter(None, in_threads(check, parts[share::shares]))]
