"""Token files and how they are read: one flat stream of token ids per split, cut into windows.

Window k of a stream holds tokens k*S ... k*S+S: S inputs and their targets, shifted by one.
TextStream is what the loader reads from: TokenStream for text, Packed for conversations.

S: sequence length.
"""

import array
import bisect
import functools
import io
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import files
from config import ConfigError
from data.record import complete_manifest, damaged, is_complete, training_range, validation_range

if TYPE_CHECKING:  # imported where it is used: preparing data needs no torch
    from torch import Tensor

WIDTH = {"uint16": 2, "int32": 4}  # bytes per token
END_BYTES = 8  # of a document's end in *.ends.bin, little-endian
ENDS_PER_BLOCK = 512  # of the index of documents' ends: one read finds a document


class TextStream(Protocol):
    """What the loader reads from: one split of one source.

    Positions count tokens from the stream's first. Every method that reads raises ConfigError if a
    file was truncated. Implemented by TokenStream and, for conversations, by Packed
    (extras/chat/packing.py).
    """

    @property
    def path(self) -> pathlib.Path: ...  # the token file, for messages

    @property
    def length(self) -> int: ...  # tokens

    @property
    def document_count(self) -> int: ...

    def training_windows(self, seq_len: int) -> "Windows":
        """The windows to train on: all but those that hold validation text."""
        ...

    def read(self, start: int, stop: int) -> "tuple[bytes, Tensor]":
        """Tokens start ... stop-1: the bytes as the file stores them, and the ids (stop - start) as
        int64. A token without a loss is returned as its complement -1 - id, padding as -1."""
        ...

    def documents(self, start: int, stop: int) -> Sequence[tuple[int, int, int]]:
        """(number, first token, one past its last) of each document that overlaps tokens start ...
        stop-1, in order."""
        ...

    def targets_without_loss(self, start: int, stop: int) -> int:
        """With a document mask: how many of a window's targets, tokens start+1 ... stop-1, have no
        loss."""
        ...


class Span(NamedTuple):
    """Tokens start ... stop-1 of a stream: what a sample is made of."""

    stream: TextStream
    start: int
    stop: int


def window_span(stream: TextStream, window: int, seq_len: int) -> Span:
    """The span of a window: seq_len inputs and one more token, the last target."""
    start = window * seq_len
    return Span(stream, start, start + seq_len + 1)


def window_count(tokens: int, seq_len: int) -> int:
    """The number of full windows that the first `tokens` tokens hold."""
    return max(0, (tokens - 1) // seq_len)


class Windows:
    """The windows of a training stream, numbered without those that hold a token of its validation
    range."""

    def __init__(self, seq_len: int, excluded: tuple[int, int] | None = None):
        """excluded: the validation range in the stream, (first position, one past the last)."""
        self.seq_len = seq_len
        # windows skip_from ... skip_to-1 are left out
        self.skip_from = 0
        self.skip_to = 0
        if excluded:
            first, end = excluded
            self.skip_from = window_count(first, seq_len)
            windows_that_begin_before_end = -(-end // seq_len)
            self.skip_to = max(self.skip_from, windows_that_begin_before_end)

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
    """A TextStream of a token file, or of a range of its tokens.

    Uses pread: with mmap, a random window of a cold file takes 13 ms instead of 0.05, and
    truncation means SIGBUS.
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
        return Windows(seq_len, self.excluded)

    def read(self, start: int, stop: int) -> "tuple[bytes, Tensor]":
        """Raises ConfigError for an id outside the model's vocabulary, too."""
        import torch

        width = WIDTH[self.dtype]
        begin = self.first + start  # in the file
        end = self.first + stop
        raw = pread(self.file, begin * width, end * width, f"token {end}")
        ids = torch.frombuffer(bytearray(raw), dtype=getattr(torch, self.dtype)).to(torch.int64)
        if ids.max() >= self.vocab_size or ids.min() < 0:
            is_wrong = (ids >= self.vocab_size) | (ids < 0)
            index = int(is_wrong.nonzero()[0])
            raise damaged(
                self.path,
                f"token {begin + index} has id {ids[index]}, but [model] vocab_size = "
                f"{self.vocab_size}",
            )
        return raw, ids

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Of a document that the range cuts, only the part inside the range is returned."""
        documents = []
        position = self.first + start  # in the file
        last = self.first + stop
        number = self._ended_by(position)
        begin = self.end(number - 1) if number else 0
        while position < last and number < self.document_count:
            end = self.end(number)
            first_inside = max(begin - self.first, 0)
            end_inside = min(end - self.first, self.length)
            documents.append((number, first_inside, end_inside))
            position = end
            begin = end
            number += 1
        return documents

    def targets_without_loss(self, start: int, stop: int) -> int:
        """The first tokens of documents: the document before does not predict them."""
        return self._ended_by(self.first + stop - 1) - self._ended_by(self.first + start)

    def end(self, number: int) -> int:
        """One past the last token of a document, in the file."""
        offset = END_BYTES * number
        raw = pread(self._ends, offset, offset + END_BYTES, f"document {number}")
        return int.from_bytes(raw, "little")

    @functools.cached_property
    def document_count(self) -> int:
        if self.documents_in_file is not None:
            return self.documents_in_file
        return os.fstat(self._ends.fileno()).st_size // END_BYTES

    def _ended_by(self, position: int) -> int:
        """How many documents end at this position of the file or before it."""
        block = bisect.bisect_right(self._last_of_blocks, position)
        first = block * ENDS_PER_BLOCK
        stop = min(first + ENDS_PER_BLOCK, self.document_count)
        if first >= stop:
            return self.document_count
        raw = pread(self._ends, END_BYTES * first, END_BYTES * stop, f"document {stop}")
        return first + bisect.bisect_right(array.array("q", raw), position)

    @functools.cached_property
    def _last_of_blocks(self) -> list[int]:
        """The end of the last document of each full block."""
        last_numbers = range(ENDS_PER_BLOCK - 1, self.document_count, ENDS_PER_BLOCK)
        return [self.end(number) for number in last_numbers]

    @functools.cached_property
    def _ends(self) -> io.FileIO:
        """Opened on first use: training without a document mask does not need it."""
        path = self.path.with_suffix(".ends.bin")
        file, size = _open(path)
        count = size // END_BYTES
        if self.documents_in_file is not None:  # the file may hold more
            count = self.documents_in_file
        last_end = 0
        if count:
            raw = os.pread(file.fileno(), END_BYTES, END_BYTES * (count - 1))
            last_end = int.from_bytes(raw, "little")
        has_wrong_size = size < END_BYTES * count or size % END_BYTES != 0
        if has_wrong_size or last_end != self.tokens_in_file:
            raise damaged(
                path,
                f"has {size} bytes and ends at token {last_end}, {self.path} at "
                f"{self.tokens_in_file}",
            )
        return file


def pread(file: io.FileIO, start: int, stop: int, end_name: str) -> bytes:
    """Bytes start ... stop-1. Raises ConfigError if the file ends before that; end_name names
    `stop` in its message."""
    raw = os.pread(file.fileno(), stop - start, start)
    if len(raw) != stop - start:
        raise damaged(
            pathlib.Path(str(file.name)),
            f"ends before {end_name}: it was cut while it was in use",
        )
    return raw


def open_stream(folder: pathlib.Path, split: str, vocab_size: int) -> TokenStream:
    """Opens "train" or "validation" of a complete folder. Raises ConfigError if files are
    missing, truncated, or of a larger vocabulary."""
    return stream_of(folder, complete_manifest(folder), split, vocab_size)


def stream_of(folder: pathlib.Path, manifest: dict, split: str, vocab_size: int) -> TokenStream:
    """The training or validation stream of a folder, as far as `manifest` records it. Raises
    ConfigError."""
    if manifest["vocab_size"] > vocab_size:
        entries = manifest["vocab_size"]
        raise ConfigError(
            f"[model] vocab_size = {vocab_size}: smaller than {folder}'s tokenizer, of {entries} "
            "entries"
        )
    validation = validation_range(manifest)
    excluded = None
    if split == "validation":
        assert validation, "the validation text is not decided yet"
        tokens = validation
    else:
        tokens = training_range(manifest)
        if validation and validation.file == "train":
            excluded = validation.first, validation.end
    path = folder / f"{tokens.file}.bin"
    tokens_in_file = manifest["tokens"][tokens.file]
    documents_in_file = None
    if not is_complete(manifest):  # the files may hold more than the record
        documents_in_file = manifest["documents"][tokens.file]
    file, size = _open(path)
    expected = tokens_in_file * WIDTH[manifest["dtype"]]
    if size < expected or (is_complete(manifest) and size != expected):
        raise damaged(
            path, f"has {size} bytes, its manifest says {expected}: it was cut or changed"
        )
    return TokenStream(
        path=path,
        length=tokens.end - tokens.first,
        dtype=manifest["dtype"],
        vocab_size=vocab_size,
        file=file,
        first=tokens.first,
        tokens_in_file=tokens_in_file,
        documents_in_file=documents_in_file,
        excluded=excluded,
    )


def _open(path: pathlib.Path) -> tuple[io.FileIO, int]:
    """Opens a file unbuffered. Returns it and its size in bytes. Raises ConfigError; OSError if a
    retry may help."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    except OSError as error:
        if error.errno in files.TRANSIENT_ERRORS:
            raise
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return file, os.fstat(file.fileno()).st_size
