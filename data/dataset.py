"""A run's data, opened: what it trains on and is evaluated on.

open_dataset() opens the folder of each source, which must be the configuration's. Dataset.span()
says which tokens of which stream a sample is.
"""

import math
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

import config
from config import ConfigError
from data.folder import (
    TOKEN_BYTES,
    check_identity,
    identity,
    manifest_of,
    prepare_command,
    source_folders,
)
from data.mixture import Mixture
from data.order import SamplePosition, SourceOrder
from data.tokens import Span, TextStream, stream_of


class Source:
    """The folder of one source."""

    def __init__(
        self,
        folder: pathlib.Path,
        data: config.Data,
        number: int,
        vocab_size: int,
        seq_len: int,
        seed: int,
    ):
        """data: of this source alone. number: of the source in the mixture. Raises ConfigError and
        OSError."""
        self.data = data
        self.number = number
        self.seq_len = seq_len
        self.manifest = manifest_of(folder)
        check_identity(folder, self.manifest, identity(data, vocab_size))
        if not self.manifest["complete"]:
            raise ConfigError(f"{folder}: is not complete; {prepare_command()} prepares the rest")
        # what tells it from another
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
        self.order = SourceOrder(seed, number, seq_len, self.stream.length)
        self.token_bytes = token_bytes(folder, vocab_size)

    def require_size(self, mixture: Mixture, batch_size: int) -> None:
        """Raises ConfigError if there is too little text for the source's share of a batch.
        batch_size: samples."""
        samples = self.order.epoch_length
        share = mixture.weights[self.number] / mixture.period * batch_size
        if samples < share:
            raise ConfigError(
                f"[data] source = {self.data.source}: has {samples} samples of train.seq_len = "
                f"{self.seq_len}, but one batch of train.global_batch_size = {batch_size} takes "
                f"{share:.3g} of them: choose a smaller batch, a shorter train.seq_len or, if too much "
                "is held out for validation, another text for that (data.validation)"
            )


def token_bytes(folder: pathlib.Path, vocab_size: int) -> np.ndarray:
    """(2, vocab_size): the bytes of text that each id stands for, and what is to be added to those
    of the target where it is the input. NaN where they are unknown."""
    path = folder / TOKEN_BYTES
    if not path.exists():
        return np.full((2, vocab_size), math.nan)
    sizes = np.fromfile(path, "<i2").reshape(2, -1)
    return np.pad(sizes.astype(np.float64), ((0, 0), (0, vocab_size - sizes.shape[1])))


@dataclass
class Dataset:
    """The opened data of a run. Each list is by source; without a mixture there is one."""

    data: config.Data
    train: config.Train
    sources: list[Source]
    mixture: Mixture
    names: list[str]  # of a mixture's sources; of their folders if two sources have one name
    tokenizer_files: list[pathlib.Path]

    def position(self, number: int) -> SamplePosition:
        """Which window a sample of the run is."""
        source, index = self.mixture(number)
        return self.sources[source].order.locate(index)

    def span(self, number: int) -> Span:
        """The tokens of a sample of the run: seq_len inputs and their targets, shifted by one."""
        position = self.position(number)
        start = position.window * self.train.seq_len
        stream = self.sources[position.source].stream
        return Span(stream, start, start + self.train.seq_len + 1)

    def notes(self) -> list[str]:
        """Lines for a launch's log."""
        streams: list[Any] = [source.stream for source in self.sources]
        return [stream.summary() for stream in streams] if self.data.has_conversations else []

    def epochs(self, tokens: int) -> float | dict[str, float]:
        """How often the text has been read once the run has read so many tokens; of a mixture, by
        source."""
        periods = tokens / self.train.seq_len / self.mixture.period
        epochs = []
        for source, weight in zip(self.sources, self.mixture.weights):
            epochs.append(periods * weight / source.order.epoch_length)
        return dict(zip(self.names, epochs)) if self.names else epochs[0]

    @property
    def validation(self) -> list[TextStream]:
        """The validation text of each source."""
        return [source.validation for source in self.sources]

    @property
    def identities(self) -> list[dict]:
        """What tells the data from another run's, by source: a checkpoint holds it."""
        return [source.identity for source in self.sources]


def open_dataset(cfg: config.Config, train: bool = True) -> Dataset:
    """Raises ConfigError if the data is not prepared, was prepared for another configuration, or is
    known to be too small for one batch. train=False: to evaluate."""
    data = cfg.data
    mixture = Mixture([source.weight for source in data.sources] or [1.0])
    folders = source_folders(data, cfg.model.vocab_size)
    sources = []
    tokenizer_paths = []
    for number, (folder, options) in enumerate(folders):
        source = Source(
            folder, options, number, cfg.model.vocab_size, cfg.train.seq_len, cfg.run.seed
        )
        if train:
            source.require_size(mixture, cfg.train.global_batch_size)
        sources.append(source)
        tokenizer_paths = sorted([*folder.glob("tokenizer*"), *folder.glob("chat_template.jinja")])
    names = [str(entry.source) for entry in data.sources]
    if len(set(names)) < len(names):
        names = [folder.name for folder, _ in folders]
    return Dataset(data, cfg.train, sources, mixture, names, tokenizer_paths)
