"""Which text each sample of a run is: a closed form of the sample's number, so that the number of
samples read is the only state. Nothing depends on the number of ranks.

The mixture (data/mixture.py) says which source a sample comes from, and that it is the source's
sample k. An epoch of a source is a permutation of its windows. Window w of a stream is tokens w*S
... w*S+S: S inputs and their targets, shifted by one. S: sequence length (train.seq_len).
"""

import hashlib
from typing import NamedTuple

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


class SourceOrder:
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
