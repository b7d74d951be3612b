"""Which text each sample of a run is: a closed form of the sample's number, so that the step is the
only state. Nothing depends on the number of ranks.

The mixture (data/mixture.py) says which source a sample comes from, and that it is the source's
sample k. An epoch of a source is a list of segments, each permuted by itself. Every epoch is one
segment, everything, except the first one with data.order = "growing": there segments end at token
2^20, doubling to 2^29, then every 2^28, so that training may begin while text is prepared.

S: sequence length (train.seq_len).
"""

import bisect
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

FIRST_BORDER = 1 << 20  # tokens
BORDER_STEP = 1 << 28  # tokens
HELD_OUT_OF = 1 << 22  # tokens: documents of the first ones are held out; a border, too
MASK64 = (1 << 64) - 1


def name_hash(name: str) -> bytes:
    """A source's files are read in the order of this hash of their names within the source, so that
    a corpus of many files is mixed as it is read."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def border_of(segment: int) -> int:
    """The token at which a segment ends with data.order = "growing"; 0 before the first."""
    if segment < 0:
        return 0
    doublings = min(segment, (2 * BORDER_STEP // FIRST_BORDER).bit_length() - 1)
    return (FIRST_BORDER << doublings) + (segment - doublings) * BORDER_STEP


def growing_borders(tokens: int) -> list[int]:
    """border_of() each segment of so many tokens; the last ends with them."""
    borders = []
    while border_of(len(borders) - 1) < tokens:
        borders.append(min(tokens, border_of(len(borders))))
    return borders


def last_hundredth(tokens: int) -> tuple[int, int]:
    """(first, one past the last) of the tokens that are held out of a text where nothing else is:
    the last hundredth of the first ones."""
    end = min(HELD_OUT_OF, tokens)
    return max(0, end - max(2, end // 100)), end


class Windows:
    """The windows of a training stream, numbered without those that hold a token of its validation
    range. Window k of a stream is tokens k*S ... k*S+S: S inputs and their targets, shifted by one.
    """

    def __init__(self, seq_len: int, validation: tuple[int, int] = (0, 0)):
        """validation: of the stream: first token, one past the last."""
        first, end = validation
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


class SamplePosition(NamedTuple):
    """Which window of which source a sample is."""

    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class SourceOrder:
    """Which window each sample of one source is, as far as its text can be read."""

    def __init__(
        self, seed: int, source: int, windows: Windows, borders: Sequence[int], is_complete: bool
    ):
        """source: its number in the mixture. borders: the token at which each segment of the first
        epoch ends, up to the last one that can be read."""
        self.seed = seed
        self.source = source
        self.windows = windows
        # training windows up to the end of each segment of the first epoch
        self.segment_ends = [windows.count(border) for border in borders]
        # training windows of an epoch, once all text can be read
        self.epoch_length = max(self.segment_ends, default=0) if is_complete else None

    def covers(self, index: int) -> bool:
        """Whether the source's sample `index` can be located; -1, no sample, can."""
        return self.epoch_length is not None or index < max(self.segment_ends, default=0)

    def locate(self, index: int) -> SamplePosition:
        """The source's sample `index`, which covers() it."""
        epoch = 0
        ends = self.segment_ends
        if self.epoch_length is not None:
            epoch, index = divmod(index, self.epoch_length)
            if epoch > 0:
                ends = [self.epoch_length]
        segment = bisect.bisect_right(ends, index)
        begin = ends[segment - 1] if segment else 0
        key = f"{self.seed}/{epoch}/{self.source}/{segment}"
        number = begin + permute(index - begin, ends[segment] - begin, key)
        return SamplePosition(self.source, epoch, self.windows(number))


def permute(index: int, count: int, key: str) -> int:
    """Element `index` of a permutation of 0 ... count-1, keyed by a text, without a table.

    A Feistel network of eight rounds (https://doi.org/10.1137/0217022) over the next even power of
    two, cycle-walked until the result is below `count`.
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    round_keys = hashlib.blake2b(key.encode(), digest_size=64).digest()
    while True:
        high = index >> half_bits
        low = index & mask
        for begin in range(0, 64, 8):
            round_key = int.from_bytes(round_keys[begin : begin + 8], "big")
            high, low = low, high ^ (mix(low ^ round_key) & mask)
        index = high << half_bits | low
        if index < count:
            return index


def mix(x: int) -> int:
    """splitmix64's finalizer (https://prng.di.unimi.it/splitmix64.c): each bit depends on every bit
    of x, of 64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """The sample numbers of each micro-batch of a data rank in a step (from 1).

    batch, micro: samples of the global batch and of a micro-batch. rank, ranks: of the data ranks.
    """
    first = (step - 1) * batch + rank * micro
    starts = range(first, step * batch, micro * ranks)
    return [range(start, start + micro) for start in starts]
