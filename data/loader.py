"""The batches of one data rank: samples in the order of data/order.py, read ahead by a thread."""

import concurrent.futures
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import config
from config import DIGEST_MODULUS, IGNORE
from data.dataset import Dataset
from data.order import rank_samples
from data.tokens import TokenStream

READ_AHEAD = 2  # steps
READY, WAITING, FAILED = range(3)  # the greatest of any rank counts


@dataclass(frozen=True)
class Batch:
    """One data rank's part of one step."""

    micro_batches: list[tuple[Tensor, ...]]  # as inputs_and_targets() returns them
    valid_tokens: int  # valid targets of the whole step, over all data ranks
    digest: (
        int  # of this rank's samples; the sum over data ranks modulo DIGEST_MODULUS is the step's
    )


class Loader:
    """Iterates over a data rank's batches from first_step on; a thread reads ahead, and pins memory for the GPU."""

    def __init__(self, cfg: config.Config, dataset: Dataset, world: Any, first_step: int):
        """world: a parallel.mesh.World."""
        self.cfg, self.streams, self.order, self.world = cfg, dataset.train, dataset.order, world
        self.dataset = dataset
        self.micro_batch_size = config.micro_batch_size(cfg, world.dp_size)
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "loader")
        self.ahead: dict[int, concurrent.futures.Future] = {}  # batches, by step
        self.next_step = first_step  # the first that is not read ahead
        self.taken = first_step - 1  # the last that was returned
        self.waits = False
        self.failure: Exception | None = None  # why text cannot be read, once readiness() says so
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Has the thread read the batches of the next steps whose text is there: it never waits for text."""
        growing = self.dataset.growing
        while self.next_step <= self.taken + READ_AHEAD:
            if growing and not growing.covers(self.next_step):
                return
            self.ahead[self.next_step] = self.thread.submit(self.batch, self.next_step)
            self.next_step += 1

    def __next__(self) -> Batch:
        """Raises what the thread raised, such as ConfigError for a truncated token file."""
        self.taken += 1
        self._read_ahead()
        return self.ahead.pop(self.taken).result()

    def readiness(self, step: int) -> int:
        """Whether this rank can read what comes after `step`: the validation text if an evaluation is due, then the
        next batch. READY, WAITING or, with `failure`, FAILED."""
        growing = self.dataset.growing
        try:
            if growing:
                growing.poll(self.waits)
            self._read_ahead()
            following = self.ahead.get(step + 1)
            if following and following.done():
                following.result()
            is_last = step == self.cfg.train.steps
            evaluates = step > 0 and config.evaluation_is_due(self.cfg, step)
            self.waits = not (following or is_last) or (
                evaluates and not self.dataset.has_validation()
            )
        except Exception as error:
            self.failure = error
            return FAILED
        return WAITING if self.waits else READY

    def text_hash(self, step: int) -> int:
        """Equal on ranks that read equal text after `step`: of growing text, which each node may prepare on a disk of
        its own."""
        growing = self.dataset.growing
        if not growing:
            return 0
        text = repr(growing.segments(min(step + 1, self.cfg.train.steps)))
        if config.evaluation_is_due(self.cfg, step):
            text += repr(growing.validation_hashes())
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def waits_for(self, step: int) -> str:
        """What a step waits for, for a log."""
        growing = self.dataset.growing
        return growing.waits_for(step) if growing else "nothing"

    def close(self) -> None:
        if self.dataset.growing:
            self.dataset.growing.close()
        self.thread.shutdown(cancel_futures=True)

    def batch(self, step: int) -> Batch:
        t, w, digest, micro_batches = self.cfg.train, self.world, 0, []
        for numbers in rank_samples(
            step, t.global_batch_size, self.micro_batch_size, w.dp_rank, w.dp_size
        ):
            contents, tensors = read_windows([self.span(n) for n in numbers], self.cfg, w)
            digest += sum(map(sample_digest, numbers, contents))
            micro_batches.append(tensors)
        valid = config.tokens_per_step(self.cfg)
        if self.cfg.data.document_mask:
            # Not every token is a target. Which samples the other ranks have follows from their numbers
            # (self.order), so every rank counts those of the whole step: this costs less than a collective.
            for number in range((step - 1) * t.global_batch_size, step * t.global_batch_size):
                stream, first, stop = self.span(number)
                valid -= stream.targets_without_loss(first, stop)
        return Batch(micro_batches, valid, digest % DIGEST_MODULUS)

    def span(self, number: int) -> tuple[TokenStream, int, int]:
        """(stream, first token, one past the last) of a sample: seq_len inputs and their targets, shifted by one."""
        place = self.order(number)
        return self.streams[place.source].span(place.window, self.cfg.train.seq_len)


def read_windows(
    spans: list[tuple[TokenStream, int, int]], cfg: config.Config, world: Any
) -> tuple[list[bytes], tuple[Tensor, ...]]:
    """Reads windows (stream, first token, one past the last): their bytes; inputs_and_targets() of them, for a GPU in
    pinned memory, which it can copy asynchronously."""
    rows, contents = torch.full((len(spans), cfg.train.seq_len + 1), -1), []  # (B, T+1)
    documents = torch.zeros_like(rows) if cfg.data.document_mask else None
    for row, (stream, first, stop) in enumerate(spans):
        if stop - first > 1:  # an input and a target
            raw, rows[row, : stop - first] = stream.read(first, stop)
            contents.append(raw)
            if documents is not None:
                for number, begin, _ in stream.documents(first, stop):
                    documents[row, max(begin - first, 0) :] = number
    tensors = inputs_and_targets(rows, documents)
    if world.cp > 1:
        from parallel.context import shard_sequences

        tensors = shard_sequences(tensors, world)
    return contents, tuple(
        tensor.pin_memory() for tensor in tensors
    ) if world.device.type == "cuda" else tensors


def inputs_and_targets(rows: Tensor, documents: Tensor | None = None) -> tuple[Tensor, ...]:
    """Windows (B, T+1) -> inputs (B, T) and targets (B, T), each the token after its input. Windows hold a token that
    has no loss, and so is no target (IGNORE), as its complement -1 - id, and padding as -1. Given document numbers
    (B, T+1), a target in another document than its input becomes IGNORE, and the inputs' positions (B, T) and documents
    (B, T) are returned too. All int64."""
    inputs = torch.maximum(rows, ~rows)[:, :-1].contiguous()
    targets = rows[:, 1:].clone()  # contiguous() of one row would be a view
    targets[targets < 0] = IGNORE
    if documents is None:
        return inputs, targets
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
    documents = documents[:, :-1].contiguous()
    return inputs, targets, positions(documents), documents


def positions(documents: Tensor) -> Tensor:
    """Each token's position (B, T) in its document, from 0, or in the window if the document began before it. Takes
    document numbers (B, T) that increase along T."""
    place = torch.arange(documents.shape[1]).expand_as(documents)  # (B, T)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - (place * begins).cummax(dim=1).values


def sample_digest(number: int, raw: bytes) -> int:
    """A 40-bit hash of (sample number, its tokens)."""
    return int.from_bytes(
        hashlib.blake2b(raw, digest_size=5, salt=number.to_bytes(8, "little")).digest(), "big"
    )


def validation_tokens(stream: TokenStream, cfg: config.Config) -> int:
    """How many tokens of a validation stream, from its first one, are read. All but the first are targets."""
    read = (
        cfg.eval.batches * config.tokens_per_step(cfg) + 1
        if cfg.eval and cfg.eval.batches
        else stream.length
    )
    return min(read, stream.length)


def validation_batches(
    stream: TokenStream, cfg: config.Config, world: Any
) -> Iterator[tuple[Tensor, ...]]:
    """A data rank's micro-batches of a validation stream, each target once over all data ranks. The last batch
    is padded with IGNORE, so that every rank runs the same number of forward passes."""
    t, micro_batch_size = cfg.train, config.micro_batch_size(cfg, world.dp_size)
    for step in range(
        1, math.ceil((validation_tokens(stream, cfg) - 1) / config.tokens_per_step(cfg)) + 1
    ):
        for numbers in rank_samples(
            step, t.global_batch_size, micro_batch_size, world.dp_rank, world.dp_size
        ):
            spans = [
                (stream, n * t.seq_len, min((n + 1) * t.seq_len + 1, stream.length))
                for n in numbers
            ]
            yield read_windows(spans, cfg, world)[1]
