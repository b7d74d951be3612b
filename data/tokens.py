"""Prepared token files: one flat stream of ids per split, cut into windows.

Window k of a stream: tokens k*S ... k*S+S, S inputs and their targets, shifted by one.
"""

import array
import bisect
import functools
import io
import os
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from config import ConfigError
from data.record import complete_manifest, damaged, is_complete, validation_range

if TYPE_CHECKING:  # imported where it is used: preparing data needs no torch
    from torch import Tensor

WIDTH = {"uint16": 2, "int32": 4}  # bytes per token
ENDS_PER_BLOCK = 512  # of the index of documents' ends: one read finds a document


def window_count(tokens: int, seq_len: int) -> int:
    """The number of full windows that the first `tokens` tokens hold."""
    return max(0, (tokens - 1) // seq_len)


class Windows:
    """The windows of a training stream, numbered without those that hold a token of its validation range."""

    def __init__(self, seq_len: int, excluded: tuple[int, int] | None = None):
        """excluded: the validation range in the stream, (first position, one past the last)."""
        self.seq_len = seq_len
        self.skip_from = self.skip_to = 0  # windows between these are left out
        if excluded:
            first, end = excluded
            self.skip_from = window_count(first, seq_len)
            self.skip_to = max(self.skip_from, -(-end // seq_len))

    def count(self, tokens: int) -> int:
        """How many of the first `tokens` tokens' windows are for training."""
        windows = window_count(tokens, self.seq_len)
        return min(windows, self.skip_from) + max(0, windows - self.skip_to)

    def __call__(self, number: int) -> int:
        """The window with this number."""
        if number < self.skip_from:
            return number
        return number + self.skip_to - self.skip_from


@dataclass(frozen=True)
class TokenStream:
    """A split's tokens, or a range of them, read window by window. Positions count from the range's first token.
    Every method raises ConfigError if a file was truncated.

    Uses pread: with mmap, a random window of a cold file takes 13 ms instead of 0.05, and truncation means SIGBUS.
    """

    path: pathlib.Path
    length: int  # tokens
    dtype: str
    vocab_size: int  # of the model: ids must be smaller
    file: io.FileIO
    first: int  # the range's first token in the file
    tokens_in_file: int
    documents_in_file: int | None  # None: as many as *.ends.bin holds
    excluded: tuple[int, int] | None = None  # of a training stream: its validation range

    def training_windows(self, seq_len: int) -> Windows:
        """The windows to train on."""
        return Windows(seq_len, self.excluded)

    def read(self, start: int, stop: int) -> "tuple[bytes, Tensor]":
        """(the bytes, the ids (stop - start) as int64) of tokens start ... stop-1."""
        import torch

        width = WIDTH[self.dtype]
        begin, end = self.first + start, self.first + stop
        raw = pread(self.file, begin * width, end * width, f"token {end}")
        ids = torch.frombuffer(bytearray(raw), dtype=getattr(torch, self.dtype)).to(torch.int64)
        if ids.max() >= self.vocab_size or ids.min() < 0:
            wrong = int(((ids >= self.vocab_size) | (ids < 0)).nonzero()[0])
            raise damaged(
                self.path,
                f"token {begin + wrong} has id {ids[wrong]}, but [model] vocab_size = "
                f"{self.vocab_size}",
            )
        return raw, ids

    def span(self, window: int, seq_len: int) -> "tuple[TokenStream, int, int]":
        """(stream, first token, one past the last) of a window. The stream: growing text opens its file again."""
        return self, window * seq_len, (window + 1) * seq_len + 1

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(number, first token, one past its last) of each document that overlaps tokens start ... stop-1. Of a
        document that the range cuts, the part inside it."""
        documents = []
        position, last = self.first + start, self.first + stop  # in the file
        number = self._ended_by(position)
        begin = self.end(number - 1) if number else 0
        while position < last and number < self.document_count:
            end = self.end(number)
            inside = max(begin - self.first, 0), min(end - self.first, self.length)
            documents.append((number, *inside))
            position = begin = end
            number += 1
        return documents

    def targets_without_loss(self, start: int, stop: int) -> int:
        """With a document mask, of the window of tokens start ... stop-1: the first token of a document is no
        target."""
        return self._ended_by(self.first + stop - 1) - self._ended_by(self.first + start)

    def end(self, number: int) -> int:
        """One past the last token of a document, in the file."""
        raw = pread(self._ends, 8 * number, 8 * number + 8, f"document {number}")
        return int.from_bytes(raw, "little")

    @functools.cached_property
    def document_count(self) -> int:
        if self.documents_in_file is not None:
            return self.documents_in_file
        return os.fstat(self._ends.fileno()).st_size // 8

    def _ended_by(self, position: int) -> int:
        """How many documents end at this position of the file or before it."""
        block = bisect.bisect_right(self._last_of_blocks, position)
        first = block * ENDS_PER_BLOCK
        stop = min(first + ENDS_PER_BLOCK, self.document_count)
        if first >= stop:
            return self.document_count
        raw = pread(self._ends, 8 * first, 8 * stop, f"document {stop}")
        return first + bisect.bisect_right(array.array("q", raw), position)

    @functools.cached_property
    def _last_of_blocks(self) -> list[int]:
        """The end of the last document of each full block."""
        lasts = range(ENDS_PER_BLOCK - 1, self.document_count, ENDS_PER_BLOCK)
        return [self.end(number) for number in lasts]

    @functools.cached_property
    def _ends(self) -> io.FileIO:
        """Opened on first use: training without a document mask does not need it."""
        path = self.path.with_suffix(".ends.bin")
        file, size = _open(path)
        count = size // 8 if self.documents_in_file is None else self.documents_in_file
        raw = os.pread(file.fileno(), 8, max(0, 8 * count - 8))
        last = int.from_bytes(raw, "little") if count else 0
        if size < 8 * count or size % 8 or last != self.tokens_in_file:
            raise damaged(
                path,
                f"has {size} bytes and ends at token {last}, {self.path} at {self.tokens_in_file}",
            )
        return file


def _open(path: pathlib.Path) -> tuple[io.FileIO, int]:
    """The open file and its size in bytes."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return file, os.fstat(file.fileno()).st_size


def pread(file: io.FileIO, start: int, stop: int, what: str) -> bytes:
    """Bytes start ... stop-1. Raises ConfigError if the file ends before; what: names their end."""
    raw = os.pread(file.fileno(), stop - start, start)
    if len(raw) != stop - start:
        raise damaged(
            pathlib.Path(str(file.name)),
            f"ends before {what}: it was cut while it was in use",
        )
    return raw


def open_stream(folder: pathlib.Path, split: str, vocab_size: int) -> TokenStream:
    """Opens "train" or "heldout" (validation) of a complete folder. Raises ConfigError if files are missing, truncated,
    or of a larger vocabulary."""
    return stream_of(folder, complete_manifest(folder), split, vocab_size)


def stream_of(folder: pathlib.Path, manifest: dict, split: str, vocab_size: int) -> TokenStream:
    """The training or validation stream of a folder, as far as this manifest of it says."""
    if manifest["vocab_size"] > vocab_size:
        entries = manifest["vocab_size"]
        raise ConfigError(
            f"[model] vocab_size = {vocab_size}: smaller than {folder}'s tokenizer, of {entries} "
            "entries"
        )
    validation = validation_range(manifest)
    if split == "heldout":
        assert validation, "the validation text is not decided yet"
        file_split, first, end, excluded = validation.split, validation.first, validation.end, None
    else:
        file_split, first, end, excluded = "train", 0, manifest["tokens"]["train"], None
        if validation and validation.split == "train":
            excluded = validation.first, validation.end
    path = folder / f"{file_split}.bin"
    tokens = manifest["tokens"][file_split]
    file, size = _open(path)
    expected = tokens * WIDTH[manifest["dtype"]]
    documents = None
    if not is_complete(manifest):  # the files may hold more than the record
        documents = manifest["documents"][file_split]
    if size < expected or (documents is None and size != expected):
        raise damaged(
            path, f"has {size} bytes, its manifest says {expected}: it was cut or changed"
        )
    return TokenStream(
        path, end - first, manifest["dtype"], vocab_size, file, first, tokens, documents, excluded
    )
