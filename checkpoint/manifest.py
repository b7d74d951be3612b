"""The manifest of a checkpoint: size and SHA-256 of every file, in parts of 64 MiB. Also reads the
files, which may be untrusted, or on a disk that fails temporarily.

torch.distributed.checkpoint has no checksums: of 40 bit flips in its files, 38 load silently as
wrong numbers.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from config import ConfigError, Problems
from system import TRANSIENT_ERRORS, usable_cores

MANIFEST = "manifest.json"
STATE = "state.json"
METADATA = ".metadata"  # DCP's: which tensor lies where
LIMIT = 256 * 2**20  # bytes of a file that is read at once; a million parts take a third of it
PART = 64 * 2**20  # bytes per SHA-256: all cores and ranks verify parts of one file in parallel
CHUNK = 2**20  # bytes per read
# Pieces of this many bytes are hashed in a thread. Starting one costs as much as hashing 100 kB.
THREADED = 8 * 2**20


class CorruptCheckpoint(ConfigError):
    """A checkpoint differs from what was written; names file, expected, found."""


class UnreadableCheckpoint(Problems):
    """A disk or a network fails, perhaps temporarily. The checkpoint may be good, and a restart may
    help."""


def unreadable(path: pathlib.Path, error: OSError, problem: str = "cannot be read") -> Problems:
    """The exception for an error that does not prove corruption."""
    kind = UnreadableCheckpoint if error.errno in TRANSIENT_ERRORS else ConfigError
    return kind(f"{path}: {problem}: {error.strerror}")


@contextlib.contextmanager
def open_file(folder: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    """Opens a regular file of this folder for reading. A name cannot lead out of the folder, and a
    pipe cannot block. Raises CorruptCheckpoint for anything else, ConfigError if the folder is gone,
    and unreadable() for other errors."""
    path = folder / name
    if "/" in name or "\0" in name:
        raise CorruptCheckpoint(f"{folder}: {name!r} is no name of a file in it")
    try:
        with open(path, "rb", opener=open_without_blocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CorruptCheckpoint(f"{path}: expected a regular file")
            yield file
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if not os.path.lexists(folder):
            raise ConfigError(f"{folder}: was removed while it was read") from None
        if not folder.exists():
            raise ConfigError(
                f"{folder}: is a link to {os.readlink(folder)}, which is not there; mount it, or "
                "remove the link"
            ) from None
        raise CorruptCheckpoint(f"{path}: expected a regular file: {error.strerror}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def size_of(folder: pathlib.Path, name: str) -> int:
    with open_file(folder, name) as file:
        return file.seek(0, os.SEEK_END)


def read_file(folder: pathlib.Path, name: str) -> bytes:
    """The content of a file without tensors. Raises CorruptCheckpoint if it is too large, and what
    open_file() raises."""
    with open_file(folder, name) as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise CorruptCheckpoint(f"{folder / name}: expected at most {LIMIT} bytes")
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


class HashedFile:
    """A new file that is hashed while it is written sequentially."""

    def __init__(self, path: pathlib.Path):
        self.file = path.open("wb")
        self.size = 0
        self.digests: list[str] = []  # of complete parts
        self.digest = hashlib.sha256()  # of the current part

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            length = min(len(view) - written, PART - self.size % PART)
            self._write(view[written : written + length])
            written += length
            self.size += length
            if self.size % PART == 0:
                self.digests.append(self.digest.hexdigest())
                self.digest = hashlib.sha256()
        return written

    def _write(self, piece: memoryview) -> None:
        if len(piece) < THREADED:
            self.digest.update(piece)
            self.file.write(piece)
            return
        hashing = threading.Thread(target=self.digest.update, args=[piece])
        hashing.start()  # both release the GIL
        try:
            self.file.write(piece)
        finally:
            hashing.join()

    def flush(self) -> None:
        self.file.flush()

    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest: {"size": bytes, "sha256": [one per part]}."""
        rest = [self.digest.hexdigest()] if self.size % PART else []
        return {"size": self.size, "sha256": self.digests + rest}


def entry_of(content: bytes) -> dict[str, Any]:
    """The manifest's entry for a file with this content."""
    parts = [content[begin : begin + PART] for begin in range(0, len(content), PART)]
    return {"size": len(content), "sha256": [hashlib.sha256(part).hexdigest() for part in parts]}


def render_manifest(files: dict[str, dict]) -> bytes:
    """The canonical text of a manifest. It has a fixed format and a hash of its entries, so that
    read_manifest() notices any changed byte."""
    body = json.dumps(files, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"files": {body},\n"sha256": "{digest}"}}\n'.encode()


def read_manifest(folder: pathlib.Path) -> dict[str, dict]:
    """The entries by file name. Raises CorruptCheckpoint if the manifest is missing, truncated or
    changed."""
    text = read_file(folder, MANIFEST)
    # A malformed manifest may raise any of these.
    with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError, RecursionError):
        files = json.loads(text)["files"]
        is_complete = {STATE, METADATA} <= files.keys()
        if text == render_manifest(files) and is_complete and all(map(is_entry, files.values())):
            return files
    raise CorruptCheckpoint(
        f"{folder / MANIFEST}: is not as it was written: its own hash or form is wrong"
    )


def is_entry(entry: dict) -> bool:
    """Whether an entry of a manifest has a hash for each part of its file."""
    parts = -(-entry["size"] // PART)  # rounded up, without floats: the integer may be huge
    return type(entry["size"]) is int and len(entry["sha256"]) == parts
