"""Which text each sample of a run is: a closed form of the sample's number, so that the step is the only state.

If a source's stream has n windows, its sample k is number k mod n of epoch k div n; each epoch has its own keyed
permutation. Nothing depends on the number of ranks.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import config
from config import LONGEST_PERIOD, ConfigError
from data.tokens import window_count

READY, WAITING, FAILED = range(3)  # what the text is that a rank reads next (Loader.state())


class Permutation:
    """A bijection of 0 ... n-1, keyed by (seed, epoch, source), without a table: a Feistel network of eight rounds
    (https://doi.org/10.1137/0217022) over the next even power of two, cycle-walked until the result is below n."""

    def __init__(self, n: int, seed: int, epoch: int, source: object = 0):
        self.n = n
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
        key = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=64).digest()
        self.keys = [int.from_bytes(key[i : i + 8], "big") for i in range(0, len(key), 8)]

    def __call__(self, index: int) -> int:
        mask = (1 << self.half) - 1
        while True:
            left, right = index >> self.half, index & mask
            for key in self.keys:
                x = right ^ key  # mixed by splitmix64's finaliser: each bit depends on every bit of x
                x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
                x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ ((x ^ x >> 31) & mask)
            index = left << self.half | right
            if index < self.n:
                return index


class Mixture:
    """Which source a sample of the run comes from, and how many of that source came before it.

    Of the first n samples, a source of share w gets w n, rounded up or down, for every n and source
    (https://doi.org/10.1007/BF01940883): its j-th sample may come at number floor((j-1) / w) or later and is due by
    ceil(j / w); the eligible one with the earliest deadline is next. The order is periodic; a table holds one period.
    """

    def __init__(self, weights: Sequence[float]):
        self.parts = whole_parts(weights)  # samples of each source in a period
        self.period = sum(self.parts)
        self.table: list[tuple[int, int]] = []  # (source, its earlier samples in the period)
        given = [0] * len(self.parts)
        for number in range(self.period):
            _, source = min((-(-(given[i] + 1) * self.period // part), i) for i, part in enumerate(self.parts)
                            if given[i] * self.period // part <= number and given[i] < part)
            self.table.append((source, given[source]))
            given[source] += 1

    def __call__(self, number: int) -> tuple[int, int]:
        turn, place = divmod(number, self.period)
        source, before = self.table[place]
        return source, turn * self.parts[source] + before


def whole_parts(weights: Sequence[float]) -> list[int]:
    """The weights as integers in the same ratio, or close to it, with a sum of at most LONGEST_PERIOD."""
    exact = [Fraction(repr(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    near = [share.limit_denominator(LONGEST_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in near))
    if sum(near) == 1 and period <= LONGEST_PERIOD:
        return [int(share * period) for share in near]
    parts = [int(share * LONGEST_PERIOD) for share in shares]
    by_rest = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i] * LONGEST_PERIOD)
    for i in by_rest[: LONGEST_PERIOD - sum(parts)]:
        parts[i] += 1
    return parts


class Place(NamedTuple):
    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class Order:
    """Maps a sample's number to its Place. windows: the number of full windows of each source."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float], seed: int):
        self.windows, self.mixture = windows, Mixture(weights)
        self.permutation = functools.lru_cache(2 * len(windows))(  # of the epochs under way, for speed alone
            lambda source, epoch: Permutation(windows[source], seed, epoch, source))

    def __call__(self, number: int) -> Place:
        source, index = self.mixture(number)
        epoch, position = divmod(index, self.windows[source])
        return Place(source, epoch, self.permutation(source, epoch)(position))

    def longest_epoch(self) -> float:
        """Samples of the run until every source has been read once."""
        period, parts = self.mixture.period, self.mixture.parts
        return max(windows * period / part for windows, part in zip(self.windows, parts))


class GrowingOrder(Order):
    """Of sources (data/growing.py: Parts) whose numbers of windows are not known yet."""

    def __init__(self, sources: Sequence[Any], weights: Sequence[float]):
        self.sources, self.mixture = sources, Mixture(weights)

    def __call__(self, number: int) -> Place:
        source, index = self.mixture(number)
        return Place(source, *self.sources[source].window(index))


def make_order(cfg: config.Config, streams: Sequence[Any], weights: Sequence[float]) -> Order:
    """The order of a run. Raises ConfigError if a source is too small for its share of one global batch."""
    t = cfg.train
    if cfg.data.order == "growing":
        for source in streams:
            source.check_size()
        return GrowingOrder(streams, weights)
    order = Order([window_count(stream.length, t.seq_len) for stream in streams], weights, cfg.run.seed)
    needed = [part / order.mixture.period * t.global_batch_size for part in order.mixture.parts]
    problems = [f"{stream.path}: {stream.length} tokens give {windows} samples of train.seq_len = {t.seq_len}, but one "
                f"batch of train.global_batch_size = {t.global_batch_size} takes {share:.3g} of them"
                for stream, windows, share in zip(streams, order.windows, needed) if windows < share]
    if cfg.data.document_mask:
        problems += [f"{stream.path}: has documents of one token each, of which data.document_mask leaves none to learn"
                     for stream in streams if stream.document_count == stream.length]
    if problems:
        raise ConfigError(*problems)
    return order


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """Sample numbers of each micro-batch of a rank in a step (from 1)."""
    first = (step - 1) * batch + rank * micro
    return [range(start, start + micro) for start in range(first, first + batch - rank * micro, micro * ranks)]
