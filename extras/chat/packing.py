"""Packs conversations into windows, with padding at the end of each. No conversation continues in
another window.

Every rank plans the windows once, from the lengths, the window length and the seed. The plan is
best-fit decreasing (https://doi.org/10.1137/0203025) over the histogram of lengths, as in
https://arxiv.org/abs/2107.02027. Each conversation, the longest first, goes into the window with
the least free space that fits it. Windows filled with the same lengths are planned together, as a
range. So the plan costs one pass over the conversations, and little work per length. A hash of
(seed, number) orders conversations of equal length.

S: sequence length.
"""

import hashlib
import itertools
import math
import pathlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from config import ConfigError
from data.tokens import TokenStream, mapped, stream_of

SAMPLED = 2000  # a launch counts the tokens with a loss in so many conversations


def pack(lengths: np.ndarray, room: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plans windows of `room` tokens for conversations of these lengths, from 1 to `room`.

    Returns (members, starts): window w contains conversations members[starts[w] : starts[w + 1]].
    """
    # sort keys have 24 bits of length and 40 bits of hash
    longest_first = (room - lengths).astype(np.uint64) << np.uint64(40)
    order = np.argsort(longest_first | hashes(len(lengths), seed), kind="stable")
    counts = np.bincount(lengths, minlength=room + 1).tolist()
    window = best_fit_decreasing(counts, room)  # one per conversation, in `order`
    starts = np.concatenate(([0], np.cumsum(np.bincount(window))))
    members = order[np.argsort(window, kind="stable")].astype(np.int32)
    return members, starts


def hashes(count: int, seed: int) -> np.ndarray:
    """A 40-bit hash of each number below `count`, by splitmix64
    (https://doi.org/10.1145/2660193.2660195). NumPy's own generators may change."""
    key = int.from_bytes(hashlib.blake2b(f"packing {seed}".encode(), digest_size=8).digest(), "big")
    x = np.arange(count, dtype=np.uint64) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(24)


class WindowRange(NamedTuple):
    """The windows first ... first+count-1, which have equal free space."""

    first: int
    count: int
    space: int  # tokens


class FreeSpace:
    """The windows with free space, indexed by its size."""

    def __init__(self, room: int):
        self.ranges: list[list[WindowRange]] = [[] for _ in range(room + 1)]  # by space
        self.spaces = 0  # bit s is set if ranges[s] is not empty

    def add(self, windows: WindowRange) -> None:
        if windows.count and windows.space:
            self.ranges[windows.space].append(windows)
            self.spaces |= 1 << windows.space

    def take_best_fit(self, length: int) -> WindowRange | None:
        """Removes and returns a range of windows: those with the least space that fits `length`
        tokens. None if there are none."""
        fitting = self.spaces >> length
        if not fitting:
            return None
        lowest_bit = fitting & -fitting
        space = length + lowest_bit.bit_length() - 1
        windows = self.ranges[space].pop()
        if not self.ranges[space]:
            self.spaces ^= 1 << space
        return windows


def best_fit_decreasing(counts: list[int], room: int) -> np.ndarray:
    """The window of each conversation, the longest first. counts[n] is the number of conversations
    of n tokens."""
    window = np.empty(sum(counts), np.int32)
    free = FreeSpace(room)
    opened_windows = 0
    placed = 0  # number of conversations
    for length in range(room, 0, -1):
        remaining = counts[length]
        while remaining:
            windows = free.take_best_fit(length)
            if windows is None:
                per_window = room // length
                windows = WindowRange(opened_windows, -(-remaining // per_window), room)
                opened_windows += windows.count
            first, count, space = windows
            # put one conversation into each window
            filled = min(count, remaining)
            window[placed : placed + filled] = np.arange(first, first + filled, dtype=np.int32)
            free.add(WindowRange(first + filled, count - filled, space))
            free.add(WindowRange(first, filled, space - length))
            placed += filled
            remaining -= filled
    return window


class Conversation(NamedTuple):
    """A conversation in a window. Positions refer to the stream of all conversations."""

    number: int
    begin: int  # first token
    end: int  # one past the last token in the window


@dataclass(eq=False)  # compared by identity, as a key of caches
class Packed:
    """A TextStream (data/tokens.py) of a split's windows, which do not overlap.

    Window k has tokens k*S ... k*S+S-1, with padding at its end. Reading a window reads its
    conversations from the token files.
    """

    folder: pathlib.Path
    stream: TokenStream  # of all conversations
    ends: np.ndarray  # for each conversation, one past its last token
    seq_len: int
    members: np.ndarray  # numbers of conversations, window by window
    starts: np.ndarray  # where each window starts in `members`, and the end
    left_out: int  # number of conversations without an assistant's turn, or with an empty one
    cut: int  # number of conversations longer than a window
    filled: int  # number of tokens in all windows, without padding

    def __post_init__(self) -> None:
        self.windows = len(self.starts) - 1
        # plus one, for the last target of a stream
        self.length = self.windows * self.seq_len + 1 if self.windows else 0

    def conversation(self, number: int) -> Conversation:
        begin = int(self.ends[number - 1]) if number else 0
        return Conversation(number, begin, min(int(self.ends[number]), begin + self.seq_len))

    def conversations(self, window: int) -> list[Conversation]:
        """The conversations in a window, in order."""
        numbers = self.members[self.starts[window] : self.starts[window + 1]]
        return [self.conversation(number) for number in numbers.tolist()]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids (stop - start) of one window; padding is -1."""
        conversations = self.conversations(start // self.seq_len)
        tokens = np.concatenate([self.stream.read(c.begin, c.end) for c in conversations])
        ids = np.full(stop - start, -1)
        ids[: len(tokens)] = tokens
        return ids

    def documents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The (begin, end) of each conversation in one window, and of its padding."""
        lengths = [c.end - c.begin for c in self.conversations(start // self.seq_len)]
        ends = itertools.accumulate(lengths, initial=start)
        return list(itertools.pairwise([*ends, stop]))

    def text_bytes(self, tokens: int) -> float:
        return math.nan  # undefined: a template renders the text

    def summary(self) -> str:
        """The line that a launch logs."""
        count = len(self.members)
        step = max(1, -(-count // SAMPLED))
        sampled = np.sort(self.members)[::step].tolist()
        learned = 0
        tokens = 0
        without_target = 0  # conversations
        for number in sampled:
            conversation = self.conversation(number)
            ids = self.stream.read(conversation.begin, conversation.end)
            with_loss = int((ids >= 0).sum())
            learned += with_loss
            tokens += len(ids)
            without_target += with_loss == 0
        about = "about " if step > 1 else ""
        full = self.filled / (self.windows * self.seq_len)
        line = (
            f"{self.folder}: {count:,} conversations in {self.windows:,} "
            f"windows of {self.seq_len:,} tokens, {full:.1%} full; "
            f"{self.cut:,} cut at a window's end; {self.left_out:,} left out, without an "
            f"assistant's turn to learn or with an empty one; {about}{learned / tokens:.0%} of the tokens "
            "have a loss"
        )
        if without_target:
            line += f"; {about}{without_target * step:,} cut before any answer: raise train.seq_len"
        return line


def document_ends(stream: TokenStream) -> np.ndarray:
    """For each document, the position after its last token. Reads all files of ends."""
    ends = [np.empty(0, np.int64)]
    for file, file_end in zip(stream.files, stream.file_ends):
        assert file.ends, "conversations have a file of ends"
        of_file = mapped(file.ends)
        ends.append(of_file[of_file <= file.length] + (file_end - file.length))
    return np.concatenate(ends)


def open_packed(
    folder: pathlib.Path, manifest: dict, split: str, vocab_size: int, seq_len: int, seed: int
) -> Packed:
    """Opens "train" or "heldout" and plans its windows. Raises ConfigError and OSError."""
    stream = stream_of(folder, manifest, split, vocab_size)
    ends = document_ends(stream)
    left_out = manifest["left_out"]
    if split == "train" and not len(ends):
        raise ConfigError(
            f"{folder}: holds no conversation to train on: {left_out:,} were left out, without an "
            "assistant's turn to learn or with an empty one, and the others are held out for "
            "validation; bring more, or name data.validation"
        )
    lengths = np.diff(ends, prepend=0)
    cut = int((lengths > seq_len).sum())
    lengths = np.minimum(lengths, seq_len)
    members, starts = pack(lengths, seq_len, seed)
    return Packed(
        folder,
        stream,
        ends,
        seq_len,
        members,
        starts,
        left_out,
        cut,
        filled=int(lengths.sum()),
    )
