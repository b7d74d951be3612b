"""Which text each sample of a run is: a closed form of the sample's number, so that the step is the
only state. Nothing depends on the number of ranks.

The mixture says which source a sample comes from, and that it is the source's sample k. If the
source has n windows, this is number k mod n of its epoch k div n; each epoch has its own keyed
permutation. data.order = "growing" reads the first epoch segment by segment, each permuted by
itself.
"""

import bisect
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import config
from config import ConfigError
from data.mixture import Mixture
from data.tokens import TextStream

MASK64 = (1 << 64) - 1


class SamplePosition(NamedTuple):
    """Which window of which source a sample is."""

    source: int
    epoch: int  # of the source
    window: int  # of the source's stream


class Order:
    """Maps a sample's number to its SamplePosition."""

    def __init__(self, sources: Sequence["SourceOrder"], mixture: Mixture):
        self.sources = sources
        self.mixture = mixture

    def __call__(self, number: int) -> SamplePosition:
        source, index = self.mixture(number)
        epoch, window = self.sources[source].locate(index)
        return SamplePosition(source, epoch, window)


class SourceOrder:
    """Which window each sample of one source is.

    Growing text sets `numbering`, `segment_ends` and `windows` while it is being prepared.
    """

    def __init__(self, seed: int, source: int, numbering: Callable[[int], int]):
        """source: its number. numbering: training window -> window of the stream, as
        data/tokens.py: Windows."""
        self.seed = seed
        self.source = source
        self.numbering = numbering
        # training windows up to the end of each segment that can be read; empty in global order
        self.segment_ends: list[int] = []
        self.windows: int | None = None  # training windows of the full text, once it is prepared
        # keeps those that are in use: making one takes longer than using it
        self.permutation = functools.lru_cache(4)(Permutation)

    def covers(self, index: int) -> bool:
        """Whether it is known which window the source's sample `index` is."""
        if self.windows is not None:
            return True
        return bool(self.segment_ends) and index < self.segment_ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, window of the stream) of the source's sample `index`, which covers() it."""
        segment = bisect.bisect_right(self.segment_ends, index)
        if segment < len(self.segment_ends):
            begin = self.segment_ends[segment - 1] if segment else 0
            count = self.segment_ends[segment] - begin
            permutation = self.permutation(count, self.seed, 0, f"{self.source}/{segment}")
            return 0, self.numbering(begin + permutation(index - begin))
        assert self.windows
        epoch, position = divmod(index, self.windows)
        permutation = self.permutation(self.windows, self.seed, epoch, self.source)
        return epoch, self.numbering(permutation(position))


class Permutation:
    """A bijection of 0 ... n-1, keyed by (seed, epoch, source), without a table.

    A Feistel network of eight rounds (https://doi.org/10.1137/0217022) over the next even power of
    two, cycle-walked until the result is below n.
    """

    def __init__(self, n: int, seed: int, epoch: int, source: int | str = 0):
        """source: its number; of a segment of growing text "source/segment"."""
        self.n = n
        self.half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        text = f"{seed}/{epoch}/{source}"
        digest = hashlib.blake2b(text.encode(), digest_size=64).digest()
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
    if not cfg.data.sources:
        return Mixture([1.0])
    return Mixture([source.weight for source in cfg.data.sources])


def make_order(cfg: config.Config, streams: Sequence[TextStream]) -> Order:
    """The order of a run on prepared text. Raises ConfigError if a source is too small for its
    share of one global batch."""
    mixture = make_mixture(cfg)
    sources: list[SourceOrder] = []
    problems: list[str] = []
    for number, stream in enumerate(streams):
        windows = stream.training_windows(cfg.train.seq_len)
        source = SourceOrder(cfg.run.seed, number, windows)
        source.windows = windows.count(stream.length)
        problems += problems_of(cfg, mixture, number, stream, source.windows)
        sources.append(source)
    if problems:
        raise ConfigError(*problems)
    return Order(sources, mixture)


def problems_of(
    cfg: config.Config, mixture: Mixture, source: int, stream: TextStream, windows: int
) -> list[str]:
    """Why a source cannot be trained on, once all of it is prepared. windows: for training."""
    batch_size = cfg.train.global_batch_size
    problems = []
    share = mixture.weights[source] / mixture.period * batch_size
    if windows < share:
        problems.append(
            f"{stream.path}: {stream.length} tokens give {windows} samples of train.seq_len = "
            f"{cfg.train.seq_len}, but one batch of train.global_batch_size = {batch_size} takes "
            f"{share:.3g} of them"
        )
    if cfg.data.document_mask and stream.document_count == stream.length:
        problems.append(
            f"{stream.path}: has documents of one token each, of which data.document_mask leaves "
            "none to learn"
        )
    return problems


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """The sample numbers of each micro-batch of a data rank in a step (from 1).

    batch, micro: samples of the global batch and of a micro-batch. rank, ranks: of the data ranks.
    """
    first = (step - 1) * batch + rank * micro
    starts = range(first, step * batch, micro * ranks)
    return [range(start, start + micro) for start in starts]
