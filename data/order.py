"""Which text each sample of a run is: a closed form of the sample's number, so that the number of
samples read is the only state. Nothing depends on the number of ranks.

The mixture maps the number of a sample of the run to a source, and to the number of a sample of
that source. A single source is a mixture of one. An epoch of a source is a permutation of its windows.
Window w of a stream is tokens w*S ... w*S+S: S inputs and their targets, shifted by one. S: sequence
length (train.seq_len).
"""

import bisect
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from config import LONGEST_PERIOD

MASK64 = (1 << 64) - 1


def name_hash(name: str) -> bytes:
    """A source's files are read in the order of this hash of their names within the source, so that
    a corpus of many files is mixed as it is read."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


class SamplePosition(NamedTuple):
    """Which window of which source a sample is."""

    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class WindowOrder:
    """Which window of a source's training stream each of its samples is."""

    def __init__(self, seed: int, source: int, seq_len: int, tokens: int):
        """source: its number in the mixture. tokens: of its stream."""
        self.seed = seed
        self.source = source
        self.epoch_length = max(0, (tokens - 1) // seq_len)

    def locate(self, index: int) -> SamplePosition:
        """The source's sample `index`."""
        epoch, index = divmod(index, self.epoch_length)
        window = permute(index, self.epoch_length, f"{self.seed}/{epoch}/{self.source}/0")
        return SamplePosition(self.source, epoch, window)


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


def rank_samples(first: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """The sample numbers of each micro-batch of a data rank, of the global batch that begins with
    sample `first`.

    batch, micro: samples of the global batch and of a micro-batch. rank, ranks: of the data ranks.
    """
    starts = range(first + rank * micro, first + batch, micro * ranks)
    return [range(start, start + micro) for start in starts]


class Mixture:
    """Which source a sample of the run comes from, and how many of that source came before it.

    Of the first n samples, a source of share w gets w n, rounded up or down, for every n and source
    (https://doi.org/10.1007/BF01940883). Its j-th sample may come at number floor((j-1) / w) or
    later and is due by ceil(j / w); the eligible one with the earliest deadline is next. The order
    is periodic; a table holds one period.
    """

    def __init__(self, weights: Sequence[float]):
        self.weights = integer_weights(weights)  # samples of each source in a period
        self.period = sum(self.weights)
        self.table: list[tuple[int, int]] = []  # (source, its earlier samples in the period)
        # of each source: its samples in the first period
        self.positions: list[list[int]] = [[] for _ in self.weights]
        for number in range(self.period):
            source = self._next_source(number)
            self.table.append((source, len(self.positions[source])))
            self.positions[source].append(number)

    def _next_source(self, number: int) -> int:
        """The source of a sample of the first period, of which those before it are known."""
        eligible = []
        for source, weight in enumerate(self.weights):
            count = len(self.positions[source])
            release = count * self.period // weight
            if count < weight and release <= number:
                deadline = -(-(count + 1) * self.period // weight)
                eligible.append((deadline, source))
        return min(eligible)[1]

    def count(self, source: int, samples: int) -> int:
        """How many of the run's first samples come from a source."""
        periods, position = divmod(samples, self.period)
        in_last_period = bisect.bisect_left(self.positions[source], position)
        return periods * self.weights[source] + in_last_period

    def __call__(self, number: int) -> tuple[int, int]:
        """Sample of the run -> (source, sample of this source)."""
        periods, position = divmod(number, self.period)
        source, earlier = self.table[position]
        return source, periods * self.weights[source] + earlier


def integer_weights(weights: Sequence[float]) -> list[int]:
    """The weights as integers in the same ratio, or close to it, with a sum of at most
    LONGEST_PERIOD."""
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    simple = [share.limit_denominator(LONGEST_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in simple))
    if sum(simple) == 1 and period <= LONGEST_PERIOD:
        return [int(share * period) for share in simple]
    # rounded down, what is missing goes to those that lost most
    integers = [int(share * LONGEST_PERIOD) for share in shares]
    losses = [share * LONGEST_PERIOD - integer for share, integer in zip(shares, integers)]
    by_loss = sorted(range(len(integers)), key=lambda source: losses[source], reverse=True)
    missing = LONGEST_PERIOD - sum(integers)
    for source in by_loss[:missing]:
        integers[source] += 1
    return integers
