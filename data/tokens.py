"""Token files and how they are read: one flat stream of token ids per split, cut into windows.

Window k of a stream holds tokens k*S ... k*S+S: S inputs and their targets, shifted by one.
TextStream is what the loader reads from: TokenStream for text, Packed for conversations.

S: sequence length.
"""

import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from config import ConfigError
from data.folder import damaged

if TYPE_CHECKING:  # imported where it is used: preparing data needs no torch
    from torch import Tensor


class TextStream(Protocol):
    """What the loader reads from: one split of one source. Positions count tokens from the stream's
    first. Implemented by TokenStream and, for conversations, by Packed (extras/chat/packing.py)."""

    path: pathlib.Path  # the token file, for messages

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


class Windows:
    """The windows of a training stream, numbered without those that hold a token of its validation
    range."""

    def __init__(self, seq_len: int, first: int = 0, end: int = 0):
        """first, end: the validation range in the stream."""
        self.seq_len = seq_len
        # windows skip_from ... skip_to-1 are left out
        self.skip_from = max(0, (first - 1) // seq_len)
        self.skip_to = -(-end // seq_len)

    def count(self, tokens: int) -> int:
        """How many of the first `tokens` tokens' windows are for training."""
        windows = max(0, (tokens - 1) // self.seq_len)
        return min(windows, self.skip_from) + max(0, windows - self.skip_to)

    def __call__(self, number: int) -> int:
        """The window with this number."""
        if number < self.skip_from:
            return number
        return number + self.skip_to - self.skip_from


@dataclass(frozen=True, eq=False)  # by identity: a key of caches
class TokenStream:
    """A TextStream of a token file, or of a range of its tokens.

    Uses pread: with mmap, a random window of a cold file takes 13 ms instead of 0.05, and
    truncation means SIGBUS.
    """

    path: pathlib.Path
    file: IO[bytes]
    dtype: str
    ends: np.ndarray  # of each document, in the file: one past its last token
    first: int  # the range's first token in the file
    length: int  # tokens
    vocab_size: int  # of the model: ids must be smaller
    validation: tuple[int, int] = (0, 0)  # of a training stream: the range that is held out of it

    @property
    def document_count(self) -> int:
        return len(self.ends)

    def training_windows(self, seq_len: int) -> Windows:
        return Windows(seq_len, *self.validation)

    def read(self, start: int, stop: int) -> "tuple[bytes, Tensor]":
        """Raises ConfigError if the file was cut, or has an id outside the model's vocabulary."""
        import torch

        width = np.dtype(self.dtype).itemsize
        begin = self.first + start  # in the file
        raw = os.pread(self.file.fileno(), (stop - start) * width, begin * width)
        if len(raw) != (stop - start) * width:
            raise damaged(self.path, "was cut while it was in use")
        ids = torch.frombuffer(bytearray(raw), dtype=getattr(torch, self.dtype)).to(torch.int64)
        is_wrong = (ids >= self.vocab_size) | (ids < 0)
        if is_wrong.any():
            index = int(is_wrong.nonzero()[0])
            raise damaged(
                self.path,
                f"token {begin + index} has id {ids[index]}, but [model] vocab_size = "
                f"{self.vocab_size}",
            )
        return raw, ids

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Of a document that the range cuts, only the part inside the range is returned."""
        first = self._ended_by(start)
        last = self._ended_by(stop - 1)
        ends = self.ends[first : last + 1].tolist()
        documents = []
        begin = int(self.ends[first - 1]) if first else 0
        for number, end in enumerate(ends, first):
            inside = (max(begin - self.first, 0), min(end - self.first, self.length))
            documents.append((number, *inside))
            begin = end
        return documents

    def targets_without_loss(self, start: int, stop: int) -> int:
        """The first tokens of documents: the document before does not predict them."""
        return self._ended_by(stop - 1) - self._ended_by(start)

    def _ended_by(self, position: int) -> int:
        """How many documents end at this position of the stream or before it."""
        return int(np.searchsorted(self.ends, self.first + position, "right"))


def stream_of(folder: pathlib.Path, manifest: dict, split: str, vocab_size: int) -> TokenStream:
    """The training or validation stream of a folder, as far as `manifest` records it. Raises
    ConfigError, also of files that aren't there, and OSError if a retry may help."""
    if manifest["vocab_size"] > vocab_size:
        raise ConfigError(
            f"[model] vocab_size = {vocab_size}: smaller than {folder}'s tokenizer, of "
            f"{manifest['vocab_size']} entries"
        )
    held_out_of, first, end, _ = manifest["validation"]
    name = held_out_of if split == "validation" else "train"
    path = folder / f"{name}.bin"
    tokens = manifest["tokens"][name]
    documents = manifest["documents"][name]
    try:
        file = path.open("rb", buffering=0)
        size = os.fstat(file.fileno()).st_size
        ends = np.empty(0, np.int64)
        if documents:
            ends = np.memmap(path.with_suffix(".ends.bin"), "<i8", "r", shape=(documents,))
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path, f"cannot be read: {error}") from None
    if size < tokens * np.dtype(manifest["dtype"]).itemsize or (documents and ends[-1] != tokens):
        raise damaged(path, f"has other sizes than {tokens} tokens in {documents} documents")
    stream = {"path": path, "file": file, "dtype": manifest["dtype"], "ends": ends}
    if split == "validation":
        return TokenStream(**stream, first=first, length=end - first, vocab_size=vocab_size)
    excluded = (first, end) if held_out_of == "train" else (0, 0)
    return TokenStream(**stream, first=0, length=tokens, vocab_size=vocab_size, validation=excluded)
