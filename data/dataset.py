"""A run's data: the protocol Dataset, and PreparedDataset, which reads folders of prepared sources.

For other data, a fork writes a subclass of Dataset with three methods: sample(), validation() and
identities(). docs/fork.md has an example.

T: tokens of a sample (train.seq_len).
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

import config
from config import ConfigError
from data.folder import (
    check_matches_options,
    identity,
    manifest_of,
    prepare_command,
    source_folders,
)
from data.order import Mixture, SamplePosition, WindowOrder
from data.tokens import Span, TextStream, stream_of


class Sample(NamedTuple):
    """A window of text: T inputs and their targets, shifted by one."""

    # (T+1) int64. A token without a loss is stored as its complement -1 - id. Padding is -1, which
    # reads as token 0 without a loss.
    ids: np.ndarray
    # (T+1) the number of each token's document, increasing; None without data.document_mask.
    documents: np.ndarray | None = None


class Dataset(Protocol):
    """The data as the loader, evaluation and checkpoints use it. Each rank opens it. What it returns
    must not depend on the rank."""

    tokenizer_files: Sequence[pathlib.Path] = ()  # copied into the run's folder and each checkpoint
    source_names: Sequence[str] = ()  # only for a mixture

    def sample(self, number: int) -> Sample:
        """A sample of the run. It trains on samples 0, 1, ... in this order, once each. Called in a
        thread. Raises ConfigError."""
        ...

    def validation(self) -> list[Sequence[Sample]]:
        """The validation samples of each source. Without a mixture there is one source."""
        ...

    def identities(self) -> list[dict]:
        """What identifies each source's data, as JSON. A checkpoint stores it, and a resume with other
        data is refused. An evaluation compares only "tokenizer"."""
        ...

    def text_bytes(self, source: int, samples: int) -> float:
        """The UTF-8 bytes of the text of a source's first validation samples; NaN if unknown."""
        return math.nan

    def by_source(self, first: int, stop: int) -> dict[str, int]:
        """How many of the samples first ... stop-1 come from each source of a mixture."""
        return {}

    def epochs(self, samples: int, by_source: dict[str, int]) -> float | dict[str, float] | None:
        """How many times the text has been read after this number of samples; for a mixture, by
        source. None if the text has no end."""
        return None

    def notes(self) -> list[str]:
        """Lines for the log at the start of a launch."""
        return []


class PreparedSource:
    """A source's folder, checked and opened: its training and validation streams, the order of its
    training windows, and its identity."""

    def __init__(self, folder: pathlib.Path, data: config.Data, number: int, cfg: config.Config):
        """data: this source's options. number: its position in the mixture. Raises ConfigError and
        OSError."""
        self.data = data
        self.number = number
        vocab_size = cfg.model.vocab_size
        seq_len = cfg.train.seq_len
        seed = cfg.run.seed
        self.manifest = manifest_of(folder)
        check_matches_options(folder, self.manifest, identity(data, vocab_size))
        if not self.manifest["complete"]:
            raise ConfigError(f"{folder}: is not complete; {prepare_command()} prepares the rest")
        keys = ("identity", "tokenizer", "revision", "sha256")
        self.identity = {key: self.manifest[key] for key in keys}
        args = (folder, self.manifest)
        if data.has_conversations:
            from extras.chat.packing import open_packed

            self.stream: TextStream = open_packed(*args, "train", vocab_size, seq_len, seed)
            self.validation: TextStream = open_packed(*args, "heldout", vocab_size, seq_len, seed)
        else:
            self.stream = stream_of(*args, "train", vocab_size)
            self.validation = stream_of(*args, "heldout", vocab_size)
        self.order = WindowOrder(seed, number, seq_len, self.stream.length)

    def require_size(self, mixture: Mixture, train: config.Train) -> None:
        """Raises ConfigError if there is too little text for the source's share of one batch."""
        samples = self.order.epoch_length
        batch_size = train.global_batch_size
        share = mixture.weights[self.number] / mixture.period * batch_size
        if samples < share:
            raise ConfigError(
                f"[data] source = {self.data.source}: has {samples} samples of train.seq_len = "
                f"{train.seq_len}, but one batch of train.global_batch_size = {batch_size} takes "
                f"{share:.3g} of them: choose a smaller batch, a shorter train.seq_len or, if too much "
                "is held out for validation, another text for that (data.validation)"
            )


class Windows(Sequence[Sample]):
    """A stream's windows in order. The last one may be shorter, and is padded."""

    def __init__(self, stream: TextStream, seq_len: int, document_mask: bool):
        self.stream = stream
        self.seq_len = seq_len
        self.document_mask = document_mask

    def __len__(self) -> int:
        return max(0, math.ceil((self.stream.length - 1) / self.seq_len))

    def span(self, number: int) -> Span:
        start = number * self.seq_len
        return Span(self.stream, start, min(start + self.seq_len + 1, self.stream.length))

    def __getitem__(self, number: int) -> Sample:  # pyrefly: ignore[bad-override]  # no slices
        if not number < len(self):
            raise IndexError(number)
        stream, start, stop = self.span(number)
        ids = np.full(self.seq_len + 1, -1)
        ids[: stop - start] = stream.read(start, stop)
        if not self.document_mask:
            return Sample(ids)
        documents = np.zeros_like(ids)
        for document, (begin, _) in enumerate(stream.documents(start, stop)):
            documents[begin - start :] = document
        return Sample(ids, documents)


class PreparedDataset(Dataset):
    """The data in the folders of a configuration's sources."""

    def __init__(self, cfg: config.Config, train: bool = True):
        """Raises ConfigError if the data is not prepared, was prepared for another configuration,
        or is too small for one batch. train=False: to evaluate, whatever its size."""
        self.data = cfg.data
        self.seq_len = cfg.train.seq_len
        self.mixture = Mixture([source.weight for source in cfg.data.sources] or [1.0])
        self.sources: list[PreparedSource] = []
        folders = source_folders(cfg.data, cfg.model.vocab_size)
        for number, (folder, options) in enumerate(folders):
            source = PreparedSource(folder, options, number, cfg)
            if train:
                source.require_size(self.mixture, cfg.train)
            self.sources.append(source)
            templates = folder.glob("chat_template.jinja")
            self.tokenizer_files = [*sorted(folder.glob("tokenizer*")), *templates]
        self.source_names = [str(entry.source) for entry in cfg.data.sources]
        if len(set(self.source_names)) < len(self.source_names):
            self.source_names = [folder.name for folder, _ in folders]

    def windows(self, stream: TextStream) -> Windows:
        return Windows(stream, self.seq_len, self.data.document_mask)

    def position(self, number: int) -> SamplePosition:
        """The window that is this sample of the run."""
        source, index = self.mixture(number)
        return self.sources[source].order.locate(index)

    def sample(self, number: int) -> Sample:
        position = self.position(number)
        return self.windows(self.sources[position.source].stream)[position.window]

    def validation(self) -> list[Sequence[Sample]]:
        return [self.windows(source.validation) for source in self.sources]

    def identities(self) -> list[dict]:
        return [source.identity for source in self.sources]

    def text_bytes(self, source: int, samples: int) -> float:
        stream = self.sources[source].validation
        return stream.text_bytes(min(samples * self.seq_len + 1, stream.length))

    def by_source(self, first: int, stop: int) -> dict[str, int]:
        counts = {}
        for number, name in enumerate(self.source_names):
            counts[name] = self.mixture.count(number, stop) - self.mixture.count(number, first)
        return counts

    def epochs(self, samples: int, by_source: dict[str, int]) -> float | dict[str, float]:
        lengths = [source.order.epoch_length for source in self.sources]
        if not self.source_names:
            return samples / lengths[0]
        return {name: by_source.get(name, 0) / n for name, n in zip(self.source_names, lengths)}

    def notes(self) -> list[str]:
        streams: list[Any] = [source.stream for source in self.sources]
        return [stream.summary() for stream in streams] if self.data.has_conversations else []


def open_dataset(cfg: config.Config, train: bool = True) -> Dataset:
    """Opens the run's data. A fork opens its own class here. train=False: to evaluate. Raises
    ConfigError and OSError."""
    return PreparedDataset(cfg, train)
