"""The order of a run's samples: which text a sample is, is a closed form of its number. So the number
of samples read is the only state. Nothing depends on the number of ranks.

The mixture maps the number of the run's sample to a source, and to the number of the source's sample.
A single source is a mixture of one. An epoch of a source is a permutation of its windows. Window w of
a stream is tokens w*S ... w*S+S: S inputs and their targets, shifted by one. S: sequence length
(train.seq_len).
"""

import bisect
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from config import LONGEST_PERIOD

MASK64 = (1 << 64) - 1


class SamplePosition(NamedTuple):
    """The window that a sample is."""

    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class WindowOrder:
    """The order of the windows of a source's training stream."""

    def __init__(self, seed: int, source: int, seq_len: int, tokens: int):
        """source: its number in the mixture. tokens: the length of its stream."""
        self.seed = seed
        self.source = source
        self.epoch_length = max(0, (tokens - 1) // seq_len)

    def locate(self, index: int) -> SamplePosition:
        """The window that is sample `index` of the source."""
        epoch, index = divmod(index, self.epoch_length)
        window = permute(index, self.epoch_length, f"{self.seed}/{epoch}/{self.source}/0")
        return SamplePosition(self.source, epoch, window)


def permute(index: int, count: int, key: str) -> int:
    """Element `index` of a permutation of 0 ... count-1, keyed by a text, computed without a table.

    An eight-round Feistel network (https://doi.org/10.1137/0217022) over the next even power of two.
    It is applied again until the result is below `count` (cycle walking).
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
    """splitmix64's finalizer (https://prng.di.unimi.it/splitmix64.c): each of the 64 bits depends on
    every bit of x."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


class Mixture:
    """Which source a sample of the run comes from, and how many of that source came before it.

    For every n, a source with share w gets w n of the first n samples, rounded up or down
    (https://doi.org/10.1007/BF01940883). Its j-th sample may come at number floor((j-1) / w) or
    later, and is due by ceil(j / w). The eligible sample with the earliest deadline is next. The
    order is periodic, and a table holds one period.
    """

    def __init__(self, weights: Sequence[float]):
        self.weights = integer_weights(weights)  # samples of each source in a period
        self.period = sum(self.weights)
        self.table: list[tuple[int, int]] = []  # (source, its earlier samples in the period)
        # The numbers of each source's samples in the first period.
        self.positions: list[list[int]] = [[] for _ in self.weights]
        for number in range(self.period):
            source = self._next_source(number)
            self.table.append((source, len(self.positions[source])))
            self.positions[source].append(number)

    def _next_source(self, number: int) -> int:
        """The source of the first period's sample `number`, once all earlier ones are in the table."""
        eligible = []
        for source, weight in enumerate(self.weights):
            count = len(self.positions[source])
            release = count * self.period // weight
            if count < weight and release <= number:
                deadline = -(-(count + 1) * self.period // weight)
                eligible.append((deadline, source))
        return min(eligible)[1]

    def count(self, source: int, samples: int) -> int:
        """How many of the run's first `samples` samples come from a source."""
        periods, position = divmod(samples, self.period)
        in_last_period = bisect.bisect_left(self.positions[source], position)
        return periods * self.weights[source] + in_last_period

    def __call__(self, number: int) -> tuple[int, int]:
        """(source, number of the source's sample) of the run's sample `number`."""
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
    # Round down, and give what is missing to the weights that lost most.
    integers = [int(share * LONGEST_PERIOD) for share in shares]
    losses = [share * LONGEST_PERIOD - integer for share, integer in zip(shares, integers)]
    by_loss = sorted(range(len(integers)), key=lambda source: losses[source], reverse=True)
    missing = LONGEST_PERIOD - sum(integers)
    for source in by_loss[:missing]:
        integers[source] += 1
    return integers
