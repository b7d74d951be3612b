"""Token files as streams of ids. A source has one stream for training and one for validation.

The loader reads a TextStream. This is a TokenStream or, for conversations, Packed
(extras/chat/packing.py). Positions count tokens from the stream's first token, 0.
"""

import bisect
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple, Protocol

import numpy as np

from config import ConfigError

OPEN_FILES = 128  # a corpus may have more files than a process may open


class TextStream(Protocol):
    """One split of one source."""

    @property
    def length(self) -> int: ...  # tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of tokens start ... stop-1 as int64. A token without a loss is returned as its
        complement -1 - id, padding as -1. Raises ConfigError."""
        ...

    def documents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The range (first token, one past the last) of each document in tokens start ... stop-1,
        clipped to these tokens. Raises ConfigError."""
        ...

    def text_bytes(self, tokens: int) -> float:
        """The number of UTF-8 bytes in the text of the stream's first tokens; NaN if it was not
        counted. Raises ConfigError."""
        ...


class Span(NamedTuple):
    """Tokens start ... stop-1 of a stream, from which a sample is made."""

    stream: TextStream
    start: int
    stop: int


@dataclass(frozen=True, eq=False)  # by identity: a key of caches
class TokenFile:
    """A file of token ids. Positions count from its first token.

    The file is opened when it is first read. Reads use pread: with mmap a random window of a cold file
    takes ten times as long, and a truncated file causes SIGBUS.
    """

    path: pathlib.Path
    dtype: str  # of an id
    length: int  # tokens
    offset: int = 0  # bytes before the first token
    # A file with the position after each document's last token. None: eos_id ends documents.
    ends: pathlib.Path | None = None
    eos_id: int | None = None
    # A file with the number of UTF-8 bytes in each document's text.
    text_bytes: pathlib.Path | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start ... stop-1. Raises ConfigError if the file was truncated."""
        dtype = np.dtype(self.dtype)
        size = (stop - start) * dtype.itemsize
        raw = os.pread(handle(self).fileno(), size, self.offset + start * dtype.itemsize)
        if len(raw) < size:
            raise damaged(self.path, f"ends before token {stop}: it was cut")
        return np.frombuffer(raw, dtype)

    def later_documents(self, start: int, stop: int) -> np.ndarray:
        """The positions in start+1 ... stop-1 at which documents begin."""
        if self.ends:
            ends = mapped(self.ends)
            first = bisect.bisect_right(ends, start)
            last = bisect.bisect_left(ends, stop)
            # An empty document ends where the previous one does.
            return np.unique(ends[first:last])
        if self.eos_id is None:
            return np.empty(0, np.int64)
        return start + 1 + np.flatnonzero(self.read(start, stop - 1) == self.eos_id)


@functools.lru_cache(OPEN_FILES)
def handle(file: TokenFile) -> IO[bytes]:
    try:
        return file.path.open("rb", buffering=0)
    except FileNotFoundError:
        raise damaged(file.path, "is missing") from None


@functools.lru_cache(OPEN_FILES)
def mapped(path: pathlib.Path) -> np.ndarray:
    """Maps a file with one number for each document."""
    try:
        return np.memmap(path, "<i8", "r")
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path, f"cannot be read: {error}") from None


class TokenStream:
    """A TextStream of token files, one after another."""

    def __init__(self, files: list[TokenFile], vocab_size: int, has_complements: bool = True):
        """vocab_size: the model's; ids must be smaller. has_complements: whether ids may be complements
        of tokens without a loss."""
        self.files = files
        self.file_ends = list(itertools.accumulate(file.length for file in files))
        self.vocab_size = vocab_size
        self.least_id = -vocab_size if has_complements else 0
        self.length = self.file_ends[-1] if files else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Raises ConfigError if a file was truncated, or has an id outside the model's vocabulary."""
        by_file = []
        for file, first, end in self._ranges(start, stop):
            ids = file.read(first, end).astype(np.int64)
            wrong = np.flatnonzero((ids < self.least_id) | (ids >= self.vocab_size))
            if len(wrong):
                raise ConfigError(
                    f"{file.path}: token {first + wrong[0]} has id {ids[wrong[0]]}, but [model] "
                    f"vocab_size = {self.vocab_size}"
                )
            by_file.append(ids)
        return np.concatenate(by_file)

    def documents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """No document continues from one file to the next."""
        begins = []
        position = start
        for file, first, end in self._ranges(start, stop):
            begins += [position, *(position - first + file.later_documents(first, end)).tolist()]
            position += end - first
        return list(itertools.pairwise([*begins, stop]))

    def text_bytes(self, tokens: int) -> float:
        """Preparing the text has counted each document's bytes. A document that is cut counts in
        proportion to its tokens."""
        total = 0.0
        for file, _, stop in self._ranges(0, tokens):
            if not (file.ends and file.text_bytes):
                return math.nan
            ends = mapped(file.ends)
            sizes = mapped(file.text_bytes)
            number = bisect.bisect_right(ends, stop)  # of the document that is cut
            total += int(sizes[:number].sum())
            begin = int(ends[number - 1]) if number else 0
            if begin < stop:
                total += int(sizes[number]) * (stop - begin) / int(ends[number] - begin)
        return total

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[TokenFile, int, int]]:
        """(file, first token, one past the last) of each file with some of these tokens. Positions
        count from the file's first token."""
        number = bisect.bisect_right(self.file_ends, start)
        while start < stop:
            file = self.files[number]
            file_begin = self.file_ends[number] - file.length
            end = min(stop, self.file_ends[number])
            yield file, start - file_begin, end - file_begin
            start = end
            number += 1


def stream_of(folder: pathlib.Path, manifest: dict, split: str, vocab_size: int) -> TokenStream:
    """Opens the stream "train" or "heldout" of a folder. vocab_size: the model's. Raises ConfigError."""
    if manifest["vocab_size"] > vocab_size:
        raise ConfigError(
            f"[model] vocab_size = {vocab_size}: smaller than {folder}'s tokenizer, of "
            f"{manifest['vocab_size']} entries"
        )
    files = []
    for path, dtype, length, offset, ends, eos_id, text_bytes in manifest["token_files"][split]:
        ends_path = folder / ends if ends else None
        bytes_path = folder / text_bytes if text_bytes else None
        files.append(TokenFile(folder / path, dtype, length, offset, ends_path, eos_id, bytes_path))
    is_imported = manifest["identity"] is None
    return TokenStream(files, vocab_size, has_complements=not is_imported)


def damaged(path: pathlib.Path, problem: str) -> ConfigError:
    """The error for a file of prepared data that is not as it was written."""
    return ConfigError(f"{path}: {problem}; delete {path.parent} to prepare it again")
