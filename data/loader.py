"""The batches of one data rank, in the order of data/order.py: a thread reads them ahead.

Loader yields training batches; validation_batches() those of an evaluation. Both read spans of
TextStreams into rows, and turn these into inputs and targets.

B: samples of a micro-batch. T: tokens of a sample (train.seq_len).
"""

import collections
import concurrent.futures
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import config
from config import DIGEST_MODULUS, IGNORE
from data.dataset import Dataset
from data.order import rank_samples
from data.tokens import Span, TextStream

READ_AHEAD = 3  # steps, the next one included


@dataclass(frozen=True)
class Batch:
    """One data rank's samples of one step."""

    micro_batches: list[tuple[Tensor, ...]]  # as inputs_and_targets() returns them
    valid_tokens: int  # valid targets of the full step, over all data ranks
    # of this rank's samples; the sum over data ranks modulo DIGEST_MODULUS is the step's
    digest: int


class Loader:
    """Iterates over a data rank's batches from first_step on.

    A thread reads ahead, and pins memory for the GPU.
    """

    def __init__(self, dataset: Dataset, world: Any, first_step: int):
        """world: a parallel.mesh.World."""
        self.dataset = dataset
        self.world = world
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "loader")
        self.pending: collections.deque[concurrent.futures.Future] = collections.deque()
        self.next_to_read = first_step

    def __next__(self) -> Batch:
        """Raises what the thread raised, such as ConfigError for a truncated token file."""
        while len(self.pending) < READ_AHEAD and self.next_to_read <= self.dataset.train.steps:
            self.pending.append(self.thread.submit(self.batch, self.next_to_read))
            self.next_to_read += 1
        return self.pending.popleft().result()

    def batch(self, step: int) -> Batch:
        """Reads a step's batch. Raises ConfigError."""
        train = self.dataset.train
        has_mask = self.dataset.data.document_mask
        digest = 0
        micro_batches = []
        for numbers in samples_of(step, train, self.world):
            spans = [self.dataset.span(number) for number in numbers]
            rows, documents = read(spans, train.seq_len, has_mask)
            digest += sum(map(sample_digest, numbers, rows))
            micro_batches.append(rank_tensors(rows, documents, self.world))
        return Batch(micro_batches, self._valid_tokens(step), digest % DIGEST_MODULUS)

    def _valid_tokens(self, step: int) -> int:
        """The targets of a step that have a loss, over all data ranks.

        Each rank counts those of the full step: which samples the other ranks read follows from
        their numbers, and this costs less than a collective.
        """
        batch_size = self.dataset.train.global_batch_size
        valid = config.tokens_per_step(self.dataset.train)
        if self.dataset.data.document_mask:
            for number in range((step - 1) * batch_size, step * batch_size):
                stream, start, stop = self.dataset.span(number)
                valid -= stream.targets_without_loss(start, stop)
        return valid

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def samples_of(step: int, train: config.Train, world: Any) -> list[range]:
    """The sample numbers of each micro-batch of a data rank in a step (from 1)."""
    micro_batch_size = config.micro_batch_size(train, world.dp_size)
    return rank_samples(
        step, train.global_batch_size, micro_batch_size, world.dp_rank, world.dp_size
    )


def read(spans: Sequence[Span], seq_len: int, document_mask: bool) -> tuple[Tensor, Tensor | None]:
    """(ids (B, T+1), document numbers (B, T+1) if there is a mask) of a micro-batch's samples.

    A token without a loss is its complement -1 - id. A span shorter than T+1 is padded with -1; one
    without a target isn't read. Raises ConfigError.
    """
    rows = torch.full((len(spans), seq_len + 1), -1)
    documents = torch.zeros_like(rows) if document_mask else None
    for row, (stream, start, stop) in enumerate(spans):
        if stop - start < 2:  # no input with a target
            continue
        rows[row, : stop - start] = torch.from_numpy(stream.read(start, stop))
        if documents is not None:
            for number, (begin, _) in enumerate(stream.documents(start, stop)):
                documents[row, begin - start :] = number
    return rows, documents


def rank_tensors(rows: Tensor, documents: Tensor | None, world: Any) -> tuple[Tensor, ...]:
    """inputs_and_targets() of this context parallel rank; for a GPU in pinned memory, which it
    copies asynchronously."""
    tensors = inputs_and_targets(rows, documents)
    if world.cp > 1:
        from parallel.context import shard_sequences

        tensors = shard_sequences(tensors, world)
    if world.device.type == "cuda":
        tensors = tuple(tensor.pin_memory() for tensor in tensors)
    return tensors


def inputs_and_targets(rows: Tensor, documents: Tensor | None = None) -> tuple[Tensor, ...]:
    """Windows (B, T+1) -> inputs (B, T) and targets (B, T), each the token after its input.

    A token without a loss is stored in `rows` as its complement -1 - id, and padding as -1: as
    targets, both become IGNORE. Given document numbers (B, T+1), a target in another document than
    its input becomes IGNORE too, and the inputs' positions (B, T) and document numbers (B, T) are
    also returned. All tensors are int64.
    """
    ids = torch.maximum(rows, ~rows)  # (B, T+1)  ~x = -1 - x
    inputs = ids[:, :-1].contiguous()
    targets = rows[:, 1:].clone()  # contiguous() of one row would be a view
    targets[targets < 0] = IGNORE
    if documents is None:
        return inputs, targets
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
    documents = documents[:, :-1].contiguous()
    return inputs, targets, positions(documents), documents


def positions(documents: Tensor) -> Tensor:
    """Document numbers (B, T), increasing along T -> each token's position (B, T) in its document,
    from 0. A document that began before the window counts from the window's start."""
    index = torch.arange(documents.shape[1]).expand_as(documents)  # (B, T)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    document_starts = (index * is_first).cummax(dim=1).values  # (B, T)
    return index - document_starts


def sample_digest(number: int, ids: Tensor) -> int:
    """A 40-bit hash of a sample's number and its tokens (T+1)."""
    salt = number.to_bytes(8, "little")
    digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=5, salt=salt).digest()
    return int.from_bytes(digest, "big")


def validation_batches(
    stream: TextStream,
    train: config.Train,
    evaluation: config.Eval | None,
    document_mask: bool,
    world: Any,
) -> Iterator[tuple[Tensor, ...]]:
    """A data rank's micro-batches of a validation stream, each target once over all data ranks.

    The last batch is padded with IGNORE, so that every rank runs the same number of forward passes.
    """
    targets = validation_tokens(stream, train, evaluation) - 1
    steps = math.ceil(targets / config.tokens_per_step(train))
    for step in range(1, steps + 1):
        for numbers in samples_of(step, train, world):
            spans = []
            for number in numbers:
                start = number * train.seq_len
                stop = min(start + train.seq_len + 1, stream.length)
                spans.append(Span(stream, start, stop))
            rows, documents = read(spans, train.seq_len, document_mask)
            yield rank_tensors(rows, documents, world)


def validation_tokens(
    stream: TextStream, train: config.Train, evaluation: config.Eval | None
) -> int:
    """How many tokens of a validation stream, from its first one, are read. All but the first are
    targets."""
    if evaluation and evaluation.batches:
        tokens = evaluation.batches * config.tokens_per_step(train) + 1
        return min(tokens, stream.length)
    return stream.length
