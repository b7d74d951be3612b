"""Which text each sample of a run is: a closed form of the sample's number, so that the step is the only state.

If a source has n windows, its sample k is number k mod n of epoch k div n; each epoch has its own keyed permutation.
Nothing depends on the number of ranks.

data.order = "growing" reads the first epoch segment by segment, each permuted by itself.
"""

import bisect
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import config
from config import ConfigError


class Permutation:
    """A bijection of 0 ... n-1, keyed by (seed, epoch, source), without a table: a Feistel network of eight rounds
    (https://doi.org/10.1137/0217022) over the next even power of two, cycle-walked until the result is below n."""

    def __init__(self, n: int, seed: int, epoch: int, source: object = 0):
        """source: its number; of a segment of growing text "source/segment"."""
        self.n = n
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
        key = f"{seed}/{epoch}/{source}"
        digest = hashlib.blake2b(key.encode(), digest_size=64).digest()
        self.keys = [int.from_bytes(digest[i : i + 8], "big") for i in range(0, len(digest), 8)]

    def __call__(self, index: int) -> int:
        mask = (1 << self.half) - 1
        while True:
            left, right = index >> self.half, index & mask
            for key in self.keys:
                # mixed by splitmix64's finaliser: each bit depends on every bit of x
                x = right ^ key
                x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
                x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ ((x ^ x >> 31) & mask)
            index = left << self.half | right
            if index < self.n:
                return index


class OneSource:
    """What data/mixture.py's Mixture is, where there is one source: all samples are its, in their order."""

    period, parts, table = 1, (1,), ((0, 0),)

    def __call__(self, number: int) -> tuple[int, int]:
        return 0, number


class Place(NamedTuple):
    """Where the text of a sample stands."""

    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class SourceOrder:
    """Which window of a source its samples are. Of growing text, in the first epoch one segment after the other."""

    def __init__(self, seed: int, source: int, numbering: Callable[[int], int]):
        """source: its number. numbering: the window of the stream that has a number among those to train on."""
        self.seed, self.source, self.numbering = seed, source, numbering
        self.segment_ends: list[int] = []  # windows up to the end of each segment that can be read
        self.windows: int | None = None  # of the whole text, once they are known
        # of what is being read, for speed alone
        self.permutation = functools.lru_cache(4)(Permutation)

    def covers(self, index: int) -> bool:
        """Whether it is known which window the source's sample of this index is."""
        return self.windows is not None or bool(self.segment_ends and index < self.segment_ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, window of the stream) of the source's sample of this index, which covers() it."""
        segment = bisect.bisect_right(self.segment_ends, index)
        if segment < len(self.segment_ends):
            begin = self.segment_ends[segment - 1] if segment else 0
            count = self.segment_ends[segment] - begin
            order = self.permutation(count, self.seed, 0, f"{self.source}/{segment}")
            return 0, self.numbering(begin + order(index - begin))
        assert self.windows
        epoch, position = divmod(index, self.windows)
        order = self.permutation(self.windows, self.seed, epoch, self.source)
        return epoch, self.numbering(order(position))


class Order:
    """Maps a sample's number to its Place."""

    def __init__(self, sources: Sequence[SourceOrder], mixture: Any):
        """mixture: OneSource, or a Mixture of data/mixture.py."""
        self.sources, self.mixture = sources, mixture

    def __call__(self, number: int) -> Place:
        source, index = self.mixture(number)
        return Place(source, *self.sources[source].locate(index))


def make_mixture(cfg: config.Config) -> Any:
    """Maps a sample's number to (source, how many of that source came before)."""
    if not cfg.data.sources:
        return OneSource()
    from data.mixture import Mixture

    return Mixture([source.weight for source in cfg.data.sources])


def make_order(cfg: config.Config, streams: Sequence[Any]) -> Order:
    """The order of a run on prepared text. Raises ConfigError if a source is too small for its share of one global
    batch."""
    mixture = make_mixture(cfg)
    sources: list[SourceOrder] = []
    problems: list[str] = []
    for number, stream in enumerate(streams):
        windows = stream.training_windows(cfg.train.seq_len)
        order = SourceOrder(cfg.run.seed, number, windows)
        order.windows = windows.count(stream.length)
        problems += problems_of(cfg, mixture, number, stream, order.windows)
        sources.append(order)
    if problems:
        raise ConfigError(*problems)
    return Order(sources, mixture)


def problems_of(
    cfg: config.Config, mixture: Any, source: int, stream: Any, windows: int
) -> list[str]:
    """Why a source cannot be trained on, once all of it is prepared. windows: for training."""
    t, problems = cfg.train, []
    share = mixture.parts[source] / mixture.period * t.global_batch_size
    if windows < share:
        problems.append(
            f"{stream.path}: {stream.length} tokens give {windows} samples of train.seq_len = "
            f"{t.seq_len}, but one batch of train.global_batch_size = {t.global_batch_size} takes "
            f"{share:.3g} of them"
        )
    if cfg.data.document_mask and stream.document_count == stream.length:
        problems.append(
            f"{stream.path}: has documents of one token each, of which data.document_mask leaves "
            "none to learn"
        )
    return problems


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """Sample numbers of each micro-batch of a rank in a step (from 1)."""
    first = (step - 1) * batch + rank * micro
    return [
        range(start, start + micro)
        for start in range(first, first + batch - rank * micro, micro * ranks)
    ]
