"""[[data.sources]]: in which order the samples of several sources come, by the sources' weights.

A mixture of one source is the rule, not an exception: sample k of the run is its sample k.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from config import LONGEST_PERIOD


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
        counts = [0] * len(self.weights)
        for number in range(self.period):
            source = self._next_source(number, counts)
            self.table.append((source, counts[source]))
            counts[source] += 1

    def _next_source(self, number: int, counts: Sequence[int]) -> int:
        """The source of a sample of the first period; counts: earlier samples of each source."""
        eligible = []
        for source, (weight, count) in enumerate(zip(self.weights, counts)):
            release = count * self.period // weight
            if count < weight and release <= number:
                deadline = -(-(count + 1) * self.period // weight)
                eligible.append((deadline, source))
        return min(eligible)[1]

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
