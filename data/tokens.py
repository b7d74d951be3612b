"""Token files as streams of ids. A source has a stream for each split, train and validation.

TextStream is what the loader reads: TokenStream or, for conversations, Packed
(extras/chat/packing.py). Positions count tokens from the stream's first, 0.
"""

import bisect
import functools
import itertools
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

    @property
    def validation(self) -> tuple[int, int]:
        """Of a training stream, the tokens that are held out of it: first, one past the last."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of tokens start ... stop-1 as int64. A token without a loss is returned as its
        complement -1 - id, padding as -1. Raises ConfigError."""
        ...

    def documents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(first token, one past the last) of each document, of which tokens start ... stop-1
        alone, in order. Raises ConfigError."""
        ...

    def targets_without_loss(self, start: int, stop: int) -> int:
        """With a document mask: how many of a window's targets, tokens start+1 ... stop-1, have no
        loss. Raises ConfigError."""
        ...


class Span(NamedTuple):
    """Tokens start ... stop-1 of a stream: what a sample is made of."""

    stream: TextStream
    start: int
    stop: int


@dataclass(frozen=True, eq=False)  # by identity: a key of caches
class TokenFile:
    """A file of token ids, one after another. Positions count from its first token.

    Uses pread: with mmap, a random window of a cold file takes ten times as long, and truncation
    means SIGBUS.
    """

    path: pathlib.Path
    dtype: np.dtype  # of an id
    length: int  # tokens
    offset: int = 0  # bytes before the first token
    # One past the last token of each document, ascending. None: eos_id ends documents.
    ends: np.ndarray | None = None
    eos_id: int | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start ... stop-1. Raises ConfigError if the file was cut."""
        width = self.dtype.itemsize
        size = (stop - start) * width
        raw = os.pread(handle(self).fileno(), size, self.offset + start * width)
        if len(raw) < size:
            raise ConfigError(f"{self.path}: ends before token {stop}: it was cut while in use")
        return np.frombuffer(raw, self.dtype)

    def later_documents(self, start: int, stop: int) -> np.ndarray:
        """The first tokens of the documents that begin at start+1 ... stop-1."""
        if self.ends is not None:
            first = bisect.bisect_right(self.ends, start)
            last = bisect.bisect_left(self.ends, stop)
            # an empty document ends where the one before it does
            return np.unique(self.ends[first:last])
        if self.eos_id is None:
            return np.empty(0, np.int64)
        return start + 1 + np.flatnonzero(self.read(start, stop - 1) == self.eos_id)


@functools.lru_cache(OPEN_FILES)
def handle(file: TokenFile) -> IO[bytes]:
    return file.path.open("rb", buffering=0)


class TokenStream:
    """A TextStream of token files, one after another, or of a range of their tokens."""

    def __init__(
        self,
        files: list[TokenFile],
        vocab_size: int,
        first: int = 0,
        end: int | None = None,
        validation: tuple[int, int] = (0, 0),
    ):
        """vocab_size: of the model: ids must be smaller. first, end: the range; end=None: all."""
        self.files = files
        self.file_ends = list(itertools.accumulate(file.length for file in files))
        self.vocab_size = vocab_size
        self.first = first
        self.length = (self.file_ends[-1] if end is None else end) - first
        self.validation = validation

    def read(self, start: int, stop: int) -> np.ndarray:
        """Raises ConfigError if a file was cut, or has an id outside the model's vocabulary."""
        by_file = []
        for file, first, end in self._ranges(start, stop):
            ids = file.read(first, end).astype(np.int64)
            wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
            if len(wrong):
                raise ConfigError(
                    f"{file.path}: token {first + wrong[0]} has id {ids[wrong[0]]}, but [model] "
                    f"vocab_size = {self.vocab_size}"
                )
            by_file.append(ids)
        return np.concatenate(by_file)

    def documents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """A file begins with another document than the file before it ends with."""
        begins = []
        position = start
        for file, first, end in self._ranges(start, stop):
            begins += [position, *(position - first + file.later_documents(first, end)).tolist()]
            position += end - first
        return list(itertools.pairwise([*begins, stop]))

    def targets_without_loss(self, start: int, stop: int) -> int:
        """The first tokens of documents: the document before does not predict them."""
        return len(self.documents(start, stop)) - 1

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[TokenFile, int, int]]:
        """(file, first token, one past the last) of each file with some of these tokens. The
        tokens' positions are those in the file."""
        start += self.first
        stop += self.first
        number = bisect.bisect_right(self.file_ends, start)
        while start < stop:
            file = self.files[number]
            file_begin = self.file_ends[number] - file.length
            end = min(stop, self.file_ends[number])
            yield file, start - file_begin, end - file_begin
            start = end
            number += 1


def stream_of(folder: pathlib.Path, manifest: dict, split: str, vocab_size: int) -> TokenStream:
    """The stream "train" or "validation" of a folder, as far as `manifest` records it. Raises
    ConfigError and OSError."""
    held_out_of, first, end = manifest["validation"]
    if split == "validation":
        files = files_of(folder, manifest, held_out_of, vocab_size)
        return TokenStream(files, vocab_size, first, end)
    validation = (first, end) if held_out_of == "train" else (0, 0)
    files = files_of(folder, manifest, "train", vocab_size)
    end = manifest["tokens"]["train"]
    return TokenStream(files, vocab_size, end=end, validation=validation)


def files_of(
    folder: pathlib.Path, manifest: dict, name: str, vocab_size: int
) -> list[TokenFile]:
    """The token files "train" or "heldout" of a folder: its own, or another program's, which the
    record lists."""
    if manifest["identity"]:
        return [file_of(folder, manifest, name, vocab_size)]
    files = []
    for path, dtype, length, offset, eos_id, ends_name in manifest["token_files"][name]:
        ends = np.memmap(folder / ends_name, "<i8", "r") if ends_name else None
        files.append(TokenFile(pathlib.Path(path), np.dtype(dtype), length, offset, ends, eos_id))
    return files


def file_of(folder: pathlib.Path, manifest: dict, name: str, vocab_size: int) -> TokenFile:
    """The token file "train" or "heldout" of a prepared folder, as far as `manifest` records it.
    Raises ConfigError, also of files that aren't there, and OSError if a retry may help."""
    if manifest["vocab_size"] > vocab_size:
        raise ConfigError(
            f"[model] vocab_size = {vocab_size}: smaller than {folder}'s tokenizer, of "
            f"{manifest['vocab_size']} entries"
        )
    path = folder / f"{name}.bin"
    tokens = manifest["tokens"][name]
    documents = manifest["documents"][name]
    ends = np.empty(0, np.int64)
    try:
        if documents:
            ends = np.memmap(path.with_suffix(".ends.bin"), "<i8", "r", shape=(documents,))
        file = TokenFile(path, np.dtype(manifest["dtype"]), tokens, ends=ends)
        size = os.fstat(handle(file).fileno()).st_size
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path, f"cannot be read: {error}") from None
    if size < tokens * file.dtype.itemsize or (documents and ends[-1] != tokens):
        raise damaged(path, f"has other sizes than {tokens} tokens in {documents} documents")
    return file


def damaged(path: pathlib.Path, problem: str) -> ConfigError:
    """The error of a file of prepared data that is not as it was written."""
    return ConfigError(f"{path}: {problem}; delete {path.parent} to prepare it again")
