"""The batches of one data rank, in the order of the dataset's samples.

Loader yields training batches, which a thread reads ahead. validation_batches() yields those of an
evaluation.

B: samples of a micro-batch. T: tokens of a sample (train.seq_len).
"""

import collections
import concurrent.futures
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import config
from config import DIGEST_MODULUS, IGNORE, ConfigError
from data.dataset import Dataset, Sample

READ_AHEAD = 3  # steps, including the next one


@dataclass
class Batch:
    """One data rank's samples of one step."""

    micro_batches: list[tuple[Tensor, ...]]  # the tensors of inputs_and_targets()
    # Targets that have a loss: of this rank's samples, until train() sums them over all data ranks.
    valid_tokens: int
    # Of this rank's samples. The sum over data ranks modulo DIGEST_MODULUS is the step's digest.
    digest: int
    # For a mixture, how many samples of all ranks come from each source.
    by_source: dict[str, int] = field(default_factory=dict)


class Loader:
    """Iterates over a data rank's batches. A thread reads ahead, and pins memory for the GPU.

    Its only state is the number of the next sample, which a checkpoint stores (optim.Progress). So a
    run that resumes with another batch size still reads each sample once.
    """

    def __init__(
        self, dataset: Dataset, train: config.Train, world: Any, step: int = 0, samples: int = 0
    ):
        """world: a parallel.mesh.World. step: the last one trained. samples: how many were read until
        then."""
        self.dataset = dataset
        self.train = train
        self.world = world
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "loader")
        self.pending: collections.deque[concurrent.futures.Future] = collections.deque()
        self.unread_steps = train.steps - step
        self.next_sample = samples

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Raises the thread's exceptions, such as ConfigError for a truncated token file."""
        while self.unread_steps > 0 and len(self.pending) < READ_AHEAD:
            self.pending.append(self.thread.submit(self.batch, self.next_sample))
            self.next_sample += self.train.global_batch_size
            self.unread_steps -= 1
        return self.pending.popleft().result()

    def batch(self, first: int) -> Batch:
        """Reads the global batch that begins with sample `first`. Raises ConfigError."""
        digest = 0
        valid_tokens = 0
        micro_batches = []
        for numbers in rank_samples(first, self.train, self.world):
            samples = [self.dataset.sample(number) for number in numbers]
            length = len(samples[0].ids)
            if length != self.train.seq_len + 1:
                raise ConfigError(
                    f"sample {numbers[0]} has {length} ids, not train.seq_len + 1 = "
                    f"{self.train.seq_len + 1}: the last is only a target (Dataset.sample)"
                )
            tensors = inputs_and_targets(*stacked(samples))
            digest += sum(map(sample_digest, numbers, samples))
            valid_tokens += int((tensors[1] != IGNORE).sum())
            micro_batches.append(rank_tensors(tensors, self.world))
        by_source = self.dataset.by_source(first, first + self.train.global_batch_size)
        return Batch(micro_batches, valid_tokens, digest % DIGEST_MODULUS, by_source)

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def rank_samples(first: int, train: config.Train, world: Any) -> list[range]:
    """The sample numbers of each of a data rank's micro-batches. The global batch begins with sample
    `first`."""
    size = config.micro_batch_size(train, world.dp_size)
    end = first + train.global_batch_size
    starts = range(first + world.dp_rank * size, end, size * world.dp_size)
    return [range(start, start + size) for start in starts]


def stacked(samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
    """(ids (B, T+1), document numbers (B, T+1) or None) of a micro-batch."""
    rows = torch.from_numpy(np.stack([sample.ids for sample in samples]))
    documents = [sample.documents for sample in samples if sample.documents is not None]
    return rows, torch.from_numpy(np.stack(documents)) if documents else None


def rank_tensors(tensors: tuple[Tensor, ...], world: Any) -> tuple[Tensor, ...]:
    """This context parallel rank's part of inputs_and_targets(). For a GPU it is in pinned memory,
    from which copies are asynchronous."""
    if world.cp > 1:
        from parallel.context import shard_sequences

        tensors = shard_sequences(tensors, world)
    if world.device.type == "cuda":
        tensors = tuple(tensor.pin_memory() for tensor in tensors)
    return tensors


def inputs_and_targets(rows: Tensor, documents: Tensor | None = None) -> tuple[Tensor, ...]:
    """Windows (B, T+1) -> inputs (B, T) and targets (B, T), each the token after its input.

    In `rows`, a token without a loss is stored as its complement -1 - id, and padding as -1. Both
    become IGNORE as targets. With document numbers (B, T+1), a target in another document than its
    input becomes IGNORE, too. Then this also returns the inputs' positions (B, T) and document
    numbers (B, T). All tensors are int64.
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
    """Each token's position (B, T) in its document, from 0, given document numbers (B, T) that increase
    along T. In a document that began before the window, positions count from the window's start."""
    index = torch.arange(documents.shape[1]).expand_as(documents)  # (B, T)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    document_starts = (index * is_first).cummax(dim=1).values  # (B, T)
    return index - document_starts


def sample_digest(number: int, sample: Sample) -> int:
    """A 40-bit hash of a sample's number and its tokens (T+1)."""
    salt = number.to_bytes(8, "little")
    digest = hashlib.blake2b(sample.ids.tobytes(), digest_size=5, salt=salt).digest()
    return int.from_bytes(digest, "big")


def validation_batches(
    samples: Sequence[Sample], count: int, train: config.Train, world: Any
) -> Iterator[tuple[Tensor, ...]]:
    """A data rank's micro-batches of the first `count` validation samples, which all data ranks share.

    Padding fills the last batch, so that every rank runs the same number of forward passes.
    """
    for first in range(0, count, train.global_batch_size):
        for numbers in rank_samples(first, train, world):
            batch = [samples[n] if n < count else padding(samples[0]) for n in numbers]
            yield rank_tensors(inputs_and_targets(*stacked(batch)), world)


def padding(sample: Sample) -> Sample:
    """A sample like this one, without targets."""
    documents = None if sample.documents is None else np.zeros_like(sample.documents)
    return Sample(np.full_like(sample.ids, -1), documents)
