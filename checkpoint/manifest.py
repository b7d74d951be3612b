"""The manifest of a checkpoint: size and SHA-256 of every file; and safe opening of untrusted files.

torch.distributed.checkpoint has no checksums: of 40 bit flips in its files, 38 load silently as wrong numbers.
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

MANIFEST, STATE = "manifest.json", "state.json"
# bytes; a manifest of a million parts takes a third of its limit
MANIFEST_LIMIT, STATE_LIMIT = (256 * 2**20, 2**20)
# bytes per SHA-256: parts of one file are hashed in parallel, on all cores and all ranks
PART = 64 * 2**20
CHUNK = 2**20  # bytes per read
DAMAGE = (
    errno.ENOENT,
    errno.ELOOP,
    errno.ENXIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EIO,
)


class CorruptCheckpoint(ConfigError):
    """A checkpoint differs from what was written; names file, expected, found."""


@contextlib.contextmanager
def opened(folder: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    """Opens a regular file of this folder for reading. Raises CorruptCheckpoint for anything else: paths cannot leave
    the folder, links are not followed, and pipes do not block."""
    if "/" in name or "\0" in name:
        raise CorruptCheckpoint(f"{folder}: {name!r} is no name of a file in it")
    path = folder / name
    try:
        with open(
            path,
            "rb",
            opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK),
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CorruptCheckpoint(f"{path}: expected a regular file")
            yield file
    except OSError as error:
        if error.errno in DAMAGE:
            raise CorruptCheckpoint(f"{path}: expected a regular file: {error.strerror}") from None
        # not proof of corruption (another user, or a retry, may read it): nothing is set aside
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def size_of(folder: pathlib.Path, name: str) -> int:
    with opened(folder, name) as file:
        return os.fstat(file.fileno()).st_size


def read_small(folder: pathlib.Path, name: str, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises CorruptCheckpoint."""
    with opened(folder, name) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CorruptCheckpoint(f"{folder / name}: expected at most {limit} bytes")
    return content


def hash_part(folder: pathlib.Path, name: str, part: int) -> str:
    """SHA-256 of the part-th 64 MiB of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with opened(folder, name) as file:
        file.seek(part * PART)
        for _ in range(PART // CHUNK):
            digest.update(file.read(CHUNK))  # releases the GIL
    return digest.hexdigest()


def in_threads(work: Callable, items: list[tuple]) -> list:
    """[work(*item) for item in items], on up to eight cores."""
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda item: work(*item), items))


def hash_files(folder: pathlib.Path, names: list[str]) -> dict[str, dict]:
    """The manifest entries of these files: {name: {"size": bytes, "sha256": [one per 64 MiB]}}."""
    entries = {name: {"size": size_of(folder, name), "sha256": []} for name in names}
    parts = [
        (folder, name, part) for name in names for part in range(-(-entries[name]["size"] // PART))
    ]
    for (_, name, _), digest in zip(parts, in_threads(hash_part, parts)):
        entries[name]["sha256"].append(digest)
    return entries


def render_manifest(files: dict[str, dict]) -> bytes:
    """The canonical text of a manifest. It has a hash of its entries and a fixed format, so any changed byte shows."""
    body = json.dumps(files, indent=1, sort_keys=True)
    return (
        f'{{"files": {body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'.encode()
    )


def read_manifest(folder: pathlib.Path) -> dict[str, dict]:
    """The entries by file name. Raises CorruptCheckpoint if the manifest is missing, truncated or changed."""
    text = read_small(folder, MANIFEST, MANIFEST_LIMIT)
    with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError, RecursionError):
        files = json.loads(text)["files"]
        if (
            text == render_manifest(files)
            and {STATE, ".metadata"} <= files.keys()
            and all(
                type(entry["size"]) is int and len(entry["sha256"]) == -(-entry["size"] // PART)
                for entry in files.values()
            )
        ):
            return files
    raise CorruptCheckpoint(
        f"{folder / MANIFEST}: is not as it was written: its own hash or form is wrong"
    )
