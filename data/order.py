"""Which text each sample of a run is: a closed form of the sample's number, so that the step is the only state.

If a source's stream has n windows, its sample k is number k mod n of epoch k div n; each epoch has its own keyed
permutation. Nothing depends on the number of ranks.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import config
from config import ConfigError
from data.tokens import window_count

READY, WAITING, FAILED = range(3)  # what the text is that a rank reads next (Loader.readiness())


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
                x = (
                    right ^ key
                )  # mixed by splitmix64's finaliser: each bit depends on every bit of x
                x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
                x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ ((x ^ x >> 31) & mask)
            index = left << self.half | right
            if index < self.n:
                return index


class OneSource:
    """What data/mixture.py's Mixture is, where there is one source: all samples are its, in their order."""

    period, parts = 1, (1,)

    def __call__(self, number: int) -> tuple[int, int]:
        return 0, number


class Place(NamedTuple):
    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class Order:
    """Maps a sample's number to its Place. windows: the number of full windows of each source. mixture: OneSource, or a
    Mixture of data/mixture.py."""

    def __init__(self, windows: Sequence[int], mixture: Any, seed: int):
        self.windows, self.mixture = windows, mixture
        self.permutation = functools.lru_cache(
            2 * len(windows)
        )(  # of the epochs under way, for speed alone
            lambda source, epoch: Permutation(windows[source], seed, epoch, source)
        )

    def __call__(self, number: int) -> Place:
        source, index = self.mixture(number)
        epoch, position = divmod(index, self.windows[source])
        return Place(source, epoch, self.permutation(source, epoch)(position))

    def readiness(self, loader: Any, step: int, seconds: float) -> int:
        """Loader.readiness(): prepared text need not be waited for."""
        return READY

    def close(self) -> None:
        """Called when the loader reads no more: nothing waits for text."""


def make_order(cfg: config.Config, streams: Sequence[Any]) -> Order:
    """The order of a run. Raises ConfigError if a source is too small for its share of one global batch."""
    t, mixture = cfg.train, OneSource()
    if cfg.data.sources:
        from data.mixture import Mixture

        mixture = Mixture([source.weight for source in cfg.data.sources])
    if cfg.data.order == "growing":
        return streams[0].order_of(streams, mixture)  # data/growing.py: Parts
    order = Order(
        [window_count(stream.length, t.seq_len) for stream in streams], mixture, cfg.run.seed
    )
    needed = [part / order.mixture.period * t.global_batch_size for part in order.mixture.parts]
    problems = [
        f"{stream.path}: {stream.length} tokens give {windows} samples of train.seq_len = {t.seq_len}, but one "
        f"batch of train.global_batch_size = {t.global_batch_size} takes {share:.3g} of them"
        for stream, windows, share in zip(streams, order.windows, needed)
        if windows < share
    ]
    if cfg.data.document_mask:
        problems += [
            f"{stream.path}: has documents of one token each, of which data.document_mask leaves none to learn"
            for stream in streams
            if stream.document_count == stream.length
        ]
    if problems:
        raise ConfigError(*problems)
    return order


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """Sample numbers of each micro-batch of a rank in a step (from 1)."""
    first = (step - 1) * batch + rank * micro
    return [
        range(start, start + micro)
        for start in range(first, first + batch - rank * micro, micro * ranks)
    ]
