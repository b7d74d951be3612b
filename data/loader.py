"""The batches of one data rank: samples in the order of data/order.py, read ahead by a thread."""

import contextlib
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
    """One data rank's part of one step."""

    micro_batches: list[tuple[Tensor, ...]]  # as split() gives them: what the model takes
    valid_tokens: int  # valid targets of the whole step, over all data ranks
    digest: int  # of this rank's samples; the sum over data ranks modulo DIGEST_MODULUS is the step's


class Loader:
    """Iterates over a data rank's batches from a step on; a thread reads, and pins for the GPU, two steps ahead."""

    def __init__(self, cfg: config.Config, streams: Sequence[TokenStream], weights: Sequence[float], dp_rank: int,
                 dp_size: int, first_step: int, pin: bool):
        self.cfg, self.streams, self.dp_rank, self.dp_size, self.pin = cfg, streams, dp_rank, dp_size, pin
        self.order = make_order(cfg, streams, weights)
        self.ready: queue.Queue = queue.Queue(maxsize=2)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._produce, args=(first_step,), daemon=True, name="loader")
        self.thread.start()

    def __next__(self) -> Batch:
        """Raises what the thread met, as ConfigError for a token file that was cut."""
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
            except BaseException as error:  # raised in the training thread: a dead thread would look like a slow disk
                item = error
            while not self.stopped.is_set():
                with contextlib.suppress(queue.Full):
                    self.ready.put(item, timeout=0.1)
                    break
            if isinstance(item, BaseException):
                return
            step += 1

    def batch(self, step: int) -> Batch:
        t, mask, digest, micro_batches = self.cfg.train, self.cfg.data.document_mask, 0, []
        for numbers in rank_samples(step, t.global_batch_size, t.micro_batch_size, self.dp_rank, self.dp_size):
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
        """Of all data ranks. Every window is full; under a document mask the first token of a document is no target.

        Each rank counts for all, some ten microseconds a sample: less than a collective would cost.
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
    """Windows (B, T+1) -> inputs (B, T) and targets (B, T), each the token after its input.

    With the windows' documents (B, T+1) a target in another document than its input is IGNORE, and the inputs'
    positions (B, T) and documents (B, T) follow. All int64.
    """
    inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()  # of a single row contiguous() would be a view
    if documents is None:
        return inputs, targets
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
    documents = documents[:, :-1].contiguous()
    return inputs, targets, positions(documents), documents


def positions(documents: Tensor) -> Tensor:
    """Each token's place in its document (B, T), from 0, of document numbers (B, T) that rise along T. A document that
    began before the window counts from the window's start."""
    place = torch.arange(documents.shape[1]).expand_as(documents)  # (B, T)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - (place * begins).cummax(dim=1).values


def sample_digest(number: int, raw: bytes) -> int:
    """A 40-bit hash of (sample number, its tokens)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=5, salt=number.to_bytes(8, "little")).digest(), "big")


def heldout_batches(stream: TokenStream, cfg: config.Config, dp_rank: int,
                    dp_size: int) -> Iterator[tuple[Tensor, ...]]:
    """A data rank's micro-batches of a validation stream, as split() gives them, in order; each target once over all
    data ranks.

    The last window may be short, and so may the last batch: the rest is padded with IGNORE, so that every rank runs
    the same number of forward passes and the token-weighted loss is the same for any number of them.
    """
    t, mask = cfg.train, cfg.data.document_mask
    windows = -(-max(0, stream.length - 1) // t.seq_len)
    steps = -(-windows // t.global_batch_size)
    if cfg.eval and cfg.eval.batches is not None:
        steps = min(steps, cfg.eval.batches)
    for step in range(1, steps + 1):
        for numbers in rank_samples(step, t.global_batch_size, t.micro_batch_size, dp_rank, dp_size):
            rows = torch.zeros((len(numbers), t.seq_len + 1), dtype=torch.int64)
            documents = torch.zeros_like(rows) if mask else None
            padding = torch.ones_like(rows[:, 1:], dtype=torch.bool)  # among the targets
            for row, window in enumerate(numbers):
                start, stop = window * t.seq_len, min((window + 1) * t.seq_len + 1, stream.length)
                if (length := stop - start) > 1:
                    _, rows[row, :length] = stream.read(start, stop)
                    padding[row, : length - 1] = False
                    if mask:
                        documents[row, :length] = document_numbers(stream, start, stop)
                        documents[row, length:] = documents[row, length - 1]
            inputs, targets, *rest = split(rows, documents)
            yield inputs, targets.masked_fill(padding, IGNORE), *rest
