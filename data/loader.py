"""Which sample at which step on which rank. The whole state is one integer, the step.

Sample k of a run is number k mod n of epoch k div n, with n windows in the stream; within an epoch the windows come in
an order of their own, a keyed permutation computed on the fly. Nothing depends on the number of ranks: they split the
samples of a step among them.
"""

import hashlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import config
from config import IGNORE, ConfigError
from data.tokens import TokenStream, window_count

DIGEST_MODULUS = 2**53  # exact in JSON


class Permutation:
    """A bijection of 0 ... n-1, keyed by (seed, epoch), without a table.

    A Feistel network (https://doi.org/10.1137/0217022) over the next even power of two, walked on until it lands
    below n: fewer than four turns on average. Eight rounds of a 64-bit mixing function.
    """

    ROUNDS = 8

    def __init__(self, n: int, seed: int, epoch: int):
        self.n = n
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * self.ROUNDS).digest()
        self.keys = [int.from_bytes(key[i : i + 8], "big") for i in range(0, len(key), 8)]

    def __call__(self, index: int) -> int:
        mask = (1 << self.half) - 1
        while True:
            left, right = index >> self.half, index & mask
            for key in self.keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            index = left << self.half | right
            if index < self.n:
                return index


def _mix(x: int) -> int:
    """The finaliser of splitmix64: each bit of the result depends on every bit of x."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def place_of(number: int, windows: int, seed: int) -> tuple[int, int]:
    """(epoch, window) of a sample of the run."""
    epoch, position = divmod(number, windows)
    return epoch, Permutation(windows, seed, epoch)(position)


def rank_samples(step: int, batch: int, micro: int, rank: int, ranks: int) -> list[range]:
    """Sample numbers of each micro-batch of a rank in a step (from 1). Together the ranks have
    (step-1) * batch ... step * batch - 1, each once."""
    first = (step - 1) * batch + rank * micro
    return [range(start, start + micro) for start in range(first, first + batch - rank * micro, micro * ranks)]


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step."""

    micro_batches: list[tuple[Tensor, Tensor]]  # inputs (B, T) and targets (B, T), int64
    tokens: int  # valid targets of the whole step, over all ranks
    digest: int  # of this rank's samples; the sum over ranks modulo DIGEST_MODULUS is the step's


def check_enough(stream: TokenStream, t: config.Train) -> int:
    """The number of windows, samples of an epoch. Raises ConfigError where they do not fill one global batch."""
    windows = window_count(stream.length, t.seq_len)
    if windows < t.global_batch_size:
        raise ConfigError(f"{stream.path}: {stream.length} tokens give {windows} samples of train.seq_len = "
                          f"{t.seq_len}, fewer than one batch of train.global_batch_size = {t.global_batch_size}")
    return windows


class Loader:
    """Iterates over this rank's batches from a step on; a thread reads, and pins for the GPU, two steps ahead."""

    def __init__(self, stream: TokenStream, t: config.Train, seed: int, rank: int, ranks: int, first_step: int,
                 pin: bool):
        self.stream, self.train, self.seed, self.rank, self.ranks, self.pin = stream, t, seed, rank, ranks, pin
        self.windows = check_enough(stream, t)
        self.permutation = (-1, None)  # (epoch, its Permutation), for the thread alone
        self.ready: queue.Queue = queue.Queue(maxsize=2)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._produce, args=(first_step,), daemon=True, name="loader")
        self.thread.start()

    def __next__(self) -> Batch:
        batch = self.ready.get()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def close(self) -> None:
        self.stopped.set()
        while not self.ready.empty():
            self.ready.get_nowait()
        self.thread.join()

    def _produce(self, step: int) -> None:
        while not self.stopped.is_set():
            try:
                item = self.batch(step)
            except BaseException as error:  # the training thread raises it: a dead thread would look like a slow disk
                item = error
            while not self.stopped.is_set():
                try:
                    self.ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1

    def batch(self, step: int) -> Batch:
        t, digest, micro_batches = self.train, 0, []
        for numbers in rank_samples(step, t.global_batch_size, t.micro_batch_size, self.rank, self.ranks):
            rows = []
            for number in numbers:
                window = self.window(number)
                raw, ids = self.stream.read(window * t.seq_len, (window + 1) * t.seq_len + 1)
                rows.append(ids)
                digest += sample_digest(number, raw)
            inputs, targets = split(torch.stack(rows))
            micro_batches.append((inputs.pin_memory(), targets.pin_memory()) if self.pin else (inputs, targets))
        # Every training window is full, so every target counts.
        return Batch(micro_batches, t.global_batch_size * t.seq_len, digest % DIGEST_MODULUS)

    def window(self, number: int) -> int:
        epoch, position = divmod(number, self.windows)
        if self.permutation[0] != epoch:
            self.permutation = (epoch, Permutation(self.windows, self.seed, epoch))
        return self.permutation[1](position)


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T+1) -> inputs (B, T), targets (B, T): each position's target is the next token."""
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def sample_digest(number: int, raw: bytes) -> int:
    """A 40-bit hash of (sample number, its tokens)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=5, salt=number.to_bytes(8, "little")).digest(), "big")


def heldout_batches(stream: TokenStream, t: config.Train, batches: int | None, rank: int, ranks: int
                    ) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches (inputs, targets) of the held-out stream, in order, each target once over all ranks.

    The last window may be short, and so may the last batch: what is missing is filled with IGNORE, so that every rank
    runs the same number of forward passes and the token-weighted loss is the same for any number of them.
    """
    windows = -(-max(0, stream.length - 1) // t.seq_len)
    per_batch = t.global_batch_size
    total = -(-windows // per_batch) if batches is None else min(batches, -(-windows // per_batch))
    for step in range(1, total + 1):
        for numbers in rank_samples(step, per_batch, t.micro_batch_size, rank, ranks):
            inputs = torch.zeros((len(numbers), t.seq_len), dtype=torch.int64)
            targets = torch.full((len(numbers), t.seq_len), IGNORE)
            for row, window in enumerate(numbers):
                start, stop = window * t.seq_len, min((window + 1) * t.seq_len + 1, stream.length)
                if stop - start > 1:
                    _, ids = stream.read(start, stop)
                    inputs[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
            yield inputs, targets
