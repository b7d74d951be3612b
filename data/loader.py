"""The batches of one rank: what data/order.py says, read ahead by a thread."""

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import config
from config import DIGEST_MODULUS, IGNORE
from data.order import make_order, rank_samples
from data.tokens import TokenStream


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step."""

    # inputs (B, T), targets (B, T) and, under a document mask, documents (B, T), all int64: what the model takes
    micro_batches: list[tuple[Tensor, ...]]
    valid_tokens: int  # valid targets of the whole step, over all ranks
    digest: int  # of this rank's samples; the sum over ranks modulo DIGEST_MODULUS is the step's


class Loader:
    """Iterates over this rank's batches from a step on; a thread reads, and pins for the GPU, two steps ahead."""

    def __init__(self, cfg: config.Config, streams: Sequence[TokenStream], weights: Sequence[float], rank: int,
                 ranks: int, first_step: int, pin: bool):
        self.cfg, self.streams, self.rank, self.ranks, self.pin = cfg, streams, rank, ranks, pin
        self.order = make_order(cfg, streams, weights)
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
        t, mask, digest, micro_batches = self.cfg.train, self.cfg.data.document_mask, 0, []
        for numbers in rank_samples(step, t.global_batch_size, t.micro_batch_size, self.rank, self.ranks):
            rows, documents = [], []
            for number in numbers:
                stream, first, stop = self.span(number)
                raw, ids = stream.read(first, stop)
                rows.append(ids)
                digest += sample_digest(number, raw)
                if mask:
                    documents.append(document_numbers(stream, first, stop))
            tensors = split(torch.stack(rows), torch.stack(documents) if mask else None)
            micro_batches.append(tuple(tensor.pin_memory() for tensor in tensors) if self.pin else tensors)
        return Batch(micro_batches, self.valid_targets(step), digest % DIGEST_MODULUS)

    def span(self, number: int) -> tuple[TokenStream, int, int]:
        """(stream, first token, one past the last) of a sample: seq_len inputs and, one further, their targets."""
        place, length = self.order(number), self.cfg.train.seq_len
        return self.streams[place.source], place.window * length, (place.window + 1) * length + 1

    def valid_targets(self, step: int) -> int:
        """Of all ranks. Every window is full; under a document mask the first token of a document is no target.

        Counted by every rank for all, some ten microseconds a sample: less than agreeing on it would cost.
        """
        t = self.cfg.train
        total = t.global_batch_size * t.seq_len
        if self.cfg.data.document_mask:
            for number in range((step - 1) * t.global_batch_size, step * t.global_batch_size):
                stream, first, stop = self.span(number)
                total -= stream.boundaries(first, stop)
        return total


def document_numbers(stream: TokenStream, start: int, stop: int) -> Tensor:
    """The number of each token's document (stop - start), for tokens start ... stop-1."""
    numbers = torch.empty(stop - start, dtype=torch.int64)
    for number, begin, end in stream.documents(start, stop):
        numbers[max(begin - start, 0) : end - start] = number
    return numbers


def split(rows: Tensor, documents: Tensor | None = None) -> tuple[Tensor, ...]:
    """(B, T+1) -> inputs (B, T), targets (B, T): each position's target is the next token. With the documents (B, T+1)
    of the rows a target of another document than its input is IGNORE, and the inputs' documents (B, T) come third."""
    inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()  # of a single row contiguous() would be a view
    if documents is None:
        return inputs, targets
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
    return inputs, targets, documents[:, :-1].contiguous()


def sample_digest(number: int, raw: bytes) -> int:
    """A 40-bit hash of (sample number, its tokens)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=5, salt=number.to_bytes(8, "little")).digest(), "big")


def heldout_batches(stream: TokenStream, cfg: config.Config, rank: int, ranks: int) -> Iterator[tuple[Tensor, ...]]:
    """This rank's micro-batches, as those of Batch, of a held-out stream, in order, each target once over all ranks.

    The last window may be short, and so may the last batch: what is missing is filled with IGNORE, so that every rank
    runs the same number of forward passes and the token-weighted loss is the same for any number of them.
    """
    t, mask, batches = cfg.train, cfg.data.document_mask, cfg.eval.batches if cfg.eval else None
    windows = -(-max(0, stream.length - 1) // t.seq_len)
    per_batch = t.global_batch_size
    total = -(-windows // per_batch) if batches is None else min(batches, -(-windows // per_batch))
    for step in range(1, total + 1):
        for numbers in rank_samples(step, per_batch, t.micro_batch_size, rank, ranks):
            ids = torch.zeros((len(numbers), t.seq_len + 1), dtype=torch.int64)
            documents = torch.zeros_like(ids) if mask else None
            length = [0] * len(numbers)
            for row, window in enumerate(numbers):
                start, stop = window * t.seq_len, min((window + 1) * t.seq_len + 1, stream.length)
                if stop - start > 1:
                    length[row] = stop - start
                    _, ids[row, : length[row]] = stream.read(start, stop)
                    if mask:
                        documents[row, : length[row]] = document_numbers(stream, start, stop)
                        documents[row, length[row] :] = documents[row, length[row] - 1]
            inputs, targets, *rest = split(ids, documents)
            for row in range(len(numbers)):
                targets[row, max(0, length[row] - 1) :] = IGNORE
            yield inputs, targets, *rest
