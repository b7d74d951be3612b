"""Prepared token files: one flat stream of ids per split, cut into windows."""

import bisect
import functools
import hashlib
import io
import json
import os
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from config import ConfigError

if TYPE_CHECKING:  # imported where it is used: preparing data needs no torch
    from torch import Tensor

MANIFEST = "manifest.json"
WIDTH = {"uint16": 2, "int32": 4}  # bytes per token


def damaged(path: pathlib.Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}; delete {path.parent} to prepare it again")


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's manifest, None if it has none. Raises ConfigError if it cannot be read, or is another program's."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or not {"identity", "vocab_size", "tokens", "dtype"} <= found.keys()
    ):
        raise ConfigError(
            f"{path}: is no manifest of prepared data; move {folder} away, or name another data.path"
        )
    return found


def manifest_of(folder: pathlib.Path) -> dict:
    """A prepared folder's manifest. Raises ConfigError if it has none, too."""
    if (manifest := read_manifest(folder)) is None:
        raise ConfigError(
            f"{folder}: holds no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return manifest


def short_hash(value: object) -> str:
    """Names a folder of prepared data by what determines it, a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def window_count(tokens: int, seq_len: int) -> int:
    """The number of full windows: window k is tokens k*S ... k*S+S, S inputs and S targets, shifted by one."""
    return max(0, (tokens - 1) // seq_len)


@dataclass(frozen=True)
class TokenStream:
    """A split's tokens, read window by window; every method raises ConfigError if a file was truncated.

    Uses pread: with mmap, a random window of a cold file takes 13 ms instead of 0.05, and truncation means SIGBUS.
    """

    path: pathlib.Path
    length: int  # tokens
    dtype: str
    vocab_size: int  # of the model: ids must be smaller
    file: io.FileIO

    def read(self, start: int, stop: int) -> "tuple[bytes, Tensor]":
        """(the bytes, the ids (stop - start) as int64) of tokens start ... stop-1."""
        import torch

        width = WIDTH[self.dtype]
        raw = pread(self.file, start * width, stop * width, f"token {stop}")
        ids = torch.frombuffer(bytearray(raw), dtype=getattr(torch, self.dtype)).to(torch.int64)
        if ids.max() >= self.vocab_size or ids.min() < 0:
            at = int(((ids >= self.vocab_size) | (ids < 0)).nonzero()[0])
            raise damaged(
                self.path,
                f"token {start + at} has id {ids[at]}, but [model] vocab_size = {self.vocab_size}",
            )
        return raw, ids

    def span(self, window: int, length: int) -> "tuple[TokenStream, int, int]":
        """(stream, first token, one past the last) of a window: `length` inputs and their targets, shifted by one."""
        return self, window * length, (window + 1) * length + 1

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(number, first token, one past its last) of each document that overlaps tokens start ... stop-1."""
        number = bisect.bisect_right(
            range(self.document_count), start, key=self.end
        )  # some thirty reads
        found, begin = [], self.end(number - 1) if number else 0
        while start < stop and number < self.document_count:
            end = self.end(number)
            found.append((number, begin, end))
            start, begin, number = end, end, number + 1
        return found

    def targets_without_loss(self, start: int, stop: int) -> int:
        """With a document mask: the first token of a document is no target."""
        return len(self.documents(start, stop)) - 1

    @functools.cached_property
    def document_count(self) -> int:
        return os.fstat(self._ends.fileno()).st_size // 8

    def end(self, number: int) -> int:
        """One past the last token of a document."""
        return int.from_bytes(
            pread(self._ends, 8 * number, 8 * number + 8, f"document {number}"), "little"
        )

    @functools.cached_property
    def _ends(self) -> io.FileIO:
        """Opened on first use: training without a document mask does not need it."""
        path = self.path.with_suffix(".ends.bin")
        file, size = _open(path)
        last = int.from_bytes(os.pread(file.fileno(), 8, max(0, size - 8)), "little")
        if size % 8 or last != self.length:
            raise damaged(
                path, f"has {size} bytes and ends at token {last}, {self.path} at {self.length}"
            )
        return file


def _open(path: pathlib.Path) -> tuple[io.FileIO, int]:
    """The open file and its size in bytes."""
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    return file, os.fstat(file.fileno()).st_size


def pread(file: io.FileIO, start: int, stop: int, what: str) -> bytes:
    raw = os.pread(file.fileno(), stop - start, start)
    if len(raw) != stop - start:
        raise damaged(
            pathlib.Path(file.name), f"ends before {what}: it was cut while it was in use"
        )
    return raw


def open_stream(folder: pathlib.Path, split: str, vocab_size: int) -> TokenStream:
    """Opens "train" or "heldout" (validation). Raises ConfigError if missing, truncated, or of a larger vocabulary."""
    manifest = manifest_of(folder)
    if manifest["vocab_size"] > vocab_size:
        entries = manifest["vocab_size"]
        raise ConfigError(
            f"[model] vocab_size = {vocab_size}: smaller than {folder}'s tokenizer, of {entries} entries"
        )
    path, length, dtype = folder / f"{split}.bin", manifest["tokens"][split], manifest["dtype"]
    file, size = _open(path)
    if size != length * WIDTH[dtype]:
        raise damaged(
            path,
            f"has {size} bytes, its manifest says {length * WIDTH[dtype]}: it was cut or changed",
        )
    return TokenStream(path, length, dtype, vocab_size, file)
