"""Which text each sample of a run is: a closed form of the sample's number, so that the step is the
only state. Nothing depends on the number of ranks.

The mixture says which source a sample comes from, and that it is the source's sample k. A source's
first epoch reads it segment by segment, each permuted by itself, so that training may begin while
text is prepared; later epochs are permuted over everything. Segments end at token 2^22, doubling to
2^28, then every 2^28.
"""

import bisect
import functools
import hashlib
from typing import NamedTuple

import config
from data.mixture import Mixture
from data.tokens import Windows

FIRST_BORDER = 1 << 22  # tokens; also: of how many documents are held out
BORDER_STEP = 1 << 28  # tokens
MASK64 = (1 << 64) - 1


def border_of(segment: int) -> int:
    """The token at which a segment ends; 0 before the first."""
    end = 0 if segment < 0 else FIRST_BORDER
    for _ in range(segment):
        end += min(end, BORDER_STEP)
    return end


class SamplePosition(NamedTuple):
    """Which window of which source a sample is."""

    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class SourceOrder:
    """Which window each sample of one source is, as far as it is prepared."""

    def __init__(self, seed: int, source: int):
        self.seed = seed
        self.source = source  # its number in the mixture
        # training windows up to the end of each segment that can be read
        self.segment_ends: list[int] = []
        self.windows: int | None = None  # training windows of the full text, once it is prepared
        # keeps those that are in use: making one takes longer than using it
        self.permutation = functools.lru_cache(4)(Permutation)

    def extend(self, numbering: Windows, segments: int, tokens: int, is_complete: bool) -> None:
        """As far as `segments` are recorded. tokens: of the stream."""
        self.numbering = numbering
        borders = [min(tokens, border_of(segment)) for segment in range(segments)]
        self.segment_ends = [numbering.count(border) for border in borders]
        if is_complete:
            self.windows = numbering.count(tokens)

    def covers(self, index: int) -> bool:
        """Whether it is known which window the source's sample `index` is."""
        return self.windows is not None or index < max(self.segment_ends, default=0)

    def segments_up_to(self, index: int) -> int:
        """How many segments' text decides which windows the samples up to this one are."""
        return min(bisect.bisect_right(self.segment_ends, index) + 1, len(self.segment_ends))

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, window of the stream) of the source's sample `index`, which covers() it."""
        segment = bisect.bisect_right(self.segment_ends, index)
        if segment < len(self.segment_ends):
            begin = self.segment_ends[segment - 1] if segment else 0
            count = self.segment_ends[segment] - begin
            permutation = self.permutation(count, f"{self.seed}/0/{self.source}/{segment}")
            return 0, self.numbering(begin + permutation(index - begin))
        assert self.windows
        epoch, position = divmod(index, self.windows)
        permutation = self.permutation(self.windows, f"{self.seed}/{epoch}/{self.source}")
        return epoch, self.numbering(permutation(position))


class Permutation:
    """A bijection of 0 ... n-1, keyed by a text, without a table.

    A Feistel network of eight rounds (https://doi.org/10.1137/0217022) over the next even power of
    two, cycle-walked until the result is below n.
    """

    def __init__(self, n: int, key: str):
        self.n = n
        self.half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(key.encode(), digest_size=64).digest()
        self.keys = [int.from_bytes(digest[i : i + 8], "big") for i in range(0, len(digest), 8)]

    def __call__(self, index: int) -> int:
        mask = (1 << self.half_bits) - 1
        while True:
            high = index >> self.half_bits
            low = index & mask
            for key in self.keys:
                high, low = low, high ^ (mix(low ^ key) & mask)
            index = high << self.half_bits | low
            if index < self.n:
                return index


def mix(x: int) -> int:
    """splitmix64's finalizer (https://prng.di.unimi.it/splitmix64.c): each bit depends on every bit
    of x, of 64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def make_mixture(cfg: config.Config) -> Mixture:
    """The mixture of [[data.sources]], or of the only source."""
    return Mixture([source.weight for source in cfg.data.sources] or [1.0])


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """The sample numbers of each micro-batch of a data rank in a step (from 1).

    batch, micro: samples of the global batch and of a micro-batch. rank, ranks: of the data ranks.
    """
    first = (step - 1) * batch + rank * micro
    starts = range(first, step * batch, micro * ranks)
    return [range(start, start + micro) for start in starts]
