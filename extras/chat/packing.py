"""Conversations in windows: whole, several to one, planned once for all ranks from lengths, window length and seed.

Best-fit decreasing (https://doi.org/10.1137/0203025) over the histogram of lengths, as in https://arxiv.org/abs/2107.02027:
each conversation, the longest first, goes into the window with the least free space that holds it. Windows of one
history are kept as a range, so the plan costs a pass over the conversations and some work per length. Of equal lengths
a hash of (seed, number) decides.
"""

import hashlib
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import config
from config import ConfigError
from data.record import complete_manifest, damaged, validation_range
from data.tokenizer import Tokenizer
from data.tokens import TokenStream, Windows, open_stream, pread
from extras.chat.conversations import spelled

if TYPE_CHECKING:
    from torch import Tensor

SAMPLED = 2000  # conversations whose tokens with a loss are counted at a launch


def pack(lengths: np.ndarray, room: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plans windows of `room` tokens for conversations of these lengths, from 1 to `room`. Returns (members, starts):
    window w holds conversations members[starts[w] : starts[w + 1]]."""
    longest_first = (room - lengths).astype(np.uint64) << np.uint64(40)
    order = np.argsort(longest_first | hashes(len(lengths), seed), kind="stable")
    counts = np.bincount(lengths, minlength=room + 1).tolist()
    window = np.empty(len(lengths), np.int32)  # of each conversation, in `order`
    # (first window, count), by free space
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(room + 1)]
    free = windows = placed = 0  # free: bit s is set if ranges[s] is not empty
    for length in range(room, 0, -1):
        left = counts[length]
        while left:
            if fitting := free >> length:
                space = length + (fitting & -fitting).bit_length() - 1  # the least that fits
                first, count = ranges[space].pop()
                if not ranges[space]:
                    free ^= 1 << space
            else:
                space, first, count = room, windows, -(-left // (room // length))
                windows += count
            taken = min(count, left)
            for rest, begin, of in (
                (space, first + taken, count - taken),
                (space - length, first, taken),
            ):
                if of and rest:
                    ranges[rest].append((begin, of))
                    free |= 1 << rest
            window[placed : placed + taken] = np.arange(first, first + taken, dtype=np.int32)
            placed, left = placed + taken, left - taken
    starts = np.zeros(windows + 1, np.int64)
    np.cumsum(np.bincount(window, minlength=windows), out=starts[1:])
    return order[np.argsort(window, kind="stable")].astype(np.int32), starts


def hashes(count: int, seed: int) -> np.ndarray:
    """A hash of 40 bits for each number below count, by splitmix64: numpy's own generators may change."""
    key = int.from_bytes(hashlib.blake2b(f"packing {seed}".encode(), digest_size=8).digest(), "big")
    x = np.arange(count, dtype=np.uint64) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(24)


@dataclass(frozen=True)
class Packed:
    """A split's conversations in windows, as a TokenStream of windows that do not overlap: window k is tokens k*S ...
    k*S+S-1, padded at its end. Nothing is copied: reading window k reads its conversations."""

    stream: TokenStream
    seq_len: int
    members: np.ndarray
    starts: np.ndarray
    left_out: int
    cut: int
    filled: int  # tokens that the windows hold

    @property
    def path(self) -> pathlib.Path:
        return self.stream.path

    @property
    def windows(self) -> int:
        return len(self.starts) - 1

    @property
    def length(self) -> int:
        # one more, as a stream's last target
        return self.windows * self.seq_len + bool(self.windows)

    @property
    def document_count(self) -> int:
        return len(self.members)

    def training_windows(self, seq_len: int) -> Windows:
        """As TokenStream.training_windows(): all."""
        return Windows(seq_len)

    def conversations(self, window: int) -> list[tuple[int, int, int]]:
        """(number, first token, one past its last in this window) of each in a window, by the stream's tokens."""
        found = []
        for number in self.members[self.starts[window] : self.starts[window + 1]].tolist():
            begin = self.stream.end(number - 1) if number else 0
            found.append((number, begin, min(self.stream.end(number), begin + self.seq_len)))
        return found

    def stored(self, begin: int, end: int) -> np.ndarray:
        """The stream's tokens begin ... end-1, complements where they have no loss."""
        return np.frombuffer(pread(self.stream.file, 4 * begin, 4 * end, f"token {end}"), "<i4")

    def read(self, start: int, stop: int) -> "tuple[bytes, Tensor]":
        """(the bytes, the ids (stop - start)) of one window: complements where a token has no loss, -1 for padding."""
        import torch

        raw = b"".join(
            self.stored(begin, end).tobytes()
            for _, begin, end in self.conversations(start // self.seq_len)
        )
        found = torch.full((stop - start,), -1)
        found[: len(raw) // 4] = ids = torch.frombuffer(bytearray(raw), dtype=torch.int32).to(
            torch.int64
        )
        if (largest := int(torch.maximum(ids, ~ids).max())) >= self.stream.vocab_size:
            raise damaged(
                self.path, f"has id {largest}, but [model] vocab_size = {self.stream.vocab_size}"
            )
        return raw, found

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(place in the window, first token, one past its last) of each of a window's conversations, and of the
        padding, by this stream's tokens."""
        found, at = [], start
        for place, (_, begin, end) in enumerate(self.conversations(start // self.seq_len)):
            found.append((place, at, at + end - begin))
            at += end - begin
        return [*found, (len(found), at, stop)]

    def targets_without_loss(self, start: int, stop: int) -> int:
        """Of the seq_len targets of a window: those that are no token of the assistant, padding, and the ends."""
        firsts = [begin - start for _, begin, _ in self.documents(start, stop)[:-1]]
        ids = self.read(start, stop)[1]
        return self.seq_len - int((ids >= 0).sum()) + int((ids[firsts] >= 0).sum())

    def summary(self) -> str:
        """What a launch logs."""
        step = max(1, -(-self.document_count // SAMPLED))
        learned = tokens = 0
        for number in np.sort(self.members)[::step].tolist():
            begin = self.stream.end(number - 1) if number else 0
            ids = self.stored(begin, min(self.stream.end(number), begin + self.seq_len))
            learned, tokens = learned + int((ids >= 0).sum()), tokens + len(ids)
        return (
            f"{self.path.parent}: {self.document_count:,} conversations in {self.windows:,} windows of "
            f"{self.seq_len:,} tokens, {self.filled / (self.windows * self.seq_len):.1%} full; {self.cut:,} cut at "
            f"a window's end; {self.left_out:,} left out, without an assistant's turn or with an empty one; "
            f"{'about ' * (step > 1)}{learned / tokens:.0%} of the tokens have a loss"
        )


def open_packed(folder: pathlib.Path, split: str, cfg: config.Config) -> Packed:
    """Opens "train" or "heldout" (validation) and plans its windows. Raises ConfigError."""
    manifest = complete_manifest(folder)
    validation = validation_range(manifest)
    assert validation
    from_train = validation.split == "train"  # validation is some of train.bin's conversations
    stream = open_stream(folder, "train" if from_train else split, cfg.model.vocab_size)
    ends = np.empty(0, np.int64)
    if stream.document_count:
        ends = np.fromfile(stream.path.with_suffix(".ends.bin"), "<i8")
    lengths = np.diff(ends, prepend=0)
    numbers = np.arange(len(ends))
    if from_train:
        is_validation = (ends > validation.first) & (ends <= validation.end)
        numbers = numbers[is_validation == (split == "heldout")]
    left_out, room = manifest.get("left_out", 0), cfg.train.seq_len
    if split == "train" and not len(numbers):
        why = f"all {left_out:,} were left out, without an assistant's turn or with an empty one"
        if any(manifest["documents"].values()):
            why = "what there is, is held out for validation; bring more"
        raise ConfigError(f"{folder}: holds no conversation to train on: {why}")
    lengths = lengths[numbers]
    cut = int((lengths > room).sum())
    np.minimum(lengths, room, out=lengths)
    members, starts = pack(lengths, room, cfg.run.seed)
    filled = int(lengths.sum())
    return Packed(stream, room, numbers[members], starts, left_out, cut, filled)


def show_conversations(
    stream: Packed, first: int, stop: int, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yields the lines of each conversation in a window."""
    for number, begin, end in stream.conversations(first // stream.seq_len):
        ids = stream.stored(begin, end)
        yield (
            f"--- conversation {number}, {end - begin} of its {stream.stream.end(number) - begin} tokens, "
            f"{int((ids >= 0).sum())} with a loss, between « and »"
        )
        yield spelled(tokenizer, ids.tolist())
