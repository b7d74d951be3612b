"""The manifest of a checkpoint: size and SHA-256 of every file; and safe opening of untrusted
files.

torch.distributed.checkpoint has no checksums: of 40 bit flips in its files, 38 load silently as
wrong numbers.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from config import ConfigError
from system.machine import usable_cores

MANIFEST = "manifest.json"
STATE = "state.json"
MANIFEST_LIMIT = 256 * 2**20  # bytes; a manifest of a million parts takes a third of it
STATE_LIMIT = 2**20  # bytes
# bytes per SHA-256: parts of one file are hashed in parallel, on all cores and all ranks
PART = 64 * 2**20
CHUNK = 2**20  # bytes per read
# Errors of opening a file that prove the checkpoint corrupt.
DAMAGE = (
    errno.ENOENT,
    errno.ELOOP,
    errno.ENXIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EIO,
)


def _open_without_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class CorruptCheckpoint(ConfigError):
    """A checkpoint differs from what was written; names file, expected, found."""


@contextlib.contextmanager
def open_file(folder: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    """Opens a regular file of this folder for reading. Raises CorruptCheckpoint for anything else:
    paths cannot leave the folder, links are not followed, and pipes do not block."""
    if "/" in name or "\0" in name:
        raise CorruptCheckpoint(f"{folder}: {name!r} is no name of a file in it")
    path = folder / name
    try:
        with open(path, "rb", opener=_open_without_following) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CorruptCheckpoint(f"{path}: expected a regular file")
            yield file
    except OSError as error:
        if error.errno in DAMAGE:
            raise CorruptCheckpoint(f"{path}: expected a regular file: {error.strerror}") from None
        # not proof of corruption (another user, or a retry, may read it): nothing is set aside
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def size_of(folder: pathlib.Path, name: str) -> int:
    with open_file(folder, name) as file:
        return os.fstat(file.fileno()).st_size


def read_small(folder: pathlib.Path, name: str, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises CorruptCheckpoint."""
    with open_file(folder, name) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CorruptCheckpoint(f"{folder / name}: expected at most {limit} bytes")
    return content


def hash_part(folder: pathlib.Path, name: str, part: int) -> str:
    """SHA-256 of the part-th 64 MiB of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_file(folder, name) as file:
        file.seek(part * PART)
        for _ in range(PART // CHUNK):
            digest.update(file.read(CHUNK))  # releases the GIL
    return digest.hexdigest()


def in_threads(work: Callable, items: list[tuple]) -> list:
    """[work(*item) for item in items], on up to eight cores."""
    with ThreadPoolExecutor(min(8, usable_cores())) as pool:
        return list(pool.map(lambda item: work(*item), items))


def hash_files(folder: pathlib.Path, names: list[str]) -> dict[str, dict]:
    """The manifest entries of these files: {name: {"size": bytes, "sha256": [one per 64 MiB]}}."""
    entries = {name: {"size": size_of(folder, name), "sha256": []} for name in names}
    parts = []
    for name in names:
        parts += [(folder, name, part) for part in range(part_count(entries[name]["size"]))]
    for (_, name, _), digest in zip(parts, in_threads(hash_part, parts)):
        entries[name]["sha256"].append(digest)
    return entries


def part_count(size: int) -> int:
    """How many parts a file of this many bytes has: one SHA-256 each."""
    return -(-size // PART)  # rounded up, also for absurdly large integers


def render_manifest(files: dict[str, dict]) -> bytes:
    """The canonical text of a manifest. It has a hash of its entries and a fixed format, so any
    changed byte shows."""
    body = json.dumps(files, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"files": {body},\n"sha256": "{digest}"}}\n'.encode()


def is_entry(entry: dict) -> bool:
    """Whether an entry of a manifest has a hash for each part of its file."""
    return type(entry["size"]) is int and len(entry["sha256"]) == part_count(entry["size"])


def read_manifest(folder: pathlib.Path) -> dict[str, dict]:
    """The entries by file name. Raises CorruptCheckpoint if the manifest is missing, truncated or
    changed."""
    text = read_small(folder, MANIFEST, MANIFEST_LIMIT)
    # of a wrong form, reading it may raise any of these
    with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError, RecursionError):
        files = json.loads(text)["files"]
        is_complete = {STATE, ".metadata"} <= files.keys()
        if text == render_manifest(files) and is_complete and all(map(is_entry, files.values())):
            return files
    raise CorruptCheckpoint(
        f"{folder / MANIFEST}: is not as it was written: its own hash or form is wrong"
    )
