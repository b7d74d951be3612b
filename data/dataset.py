"""A run's data, opened: what it trains on and is evaluated on.

open_dataset() opens the folder of each source, which must be the configuration's. Dataset.span()
says which tokens of which stream a sample is. Text may still be prepared meanwhile:
Dataset.covers() says whether a step's is there.
"""

import contextlib
import math
import pathlib
import time
from dataclasses import dataclass
from typing import Any

import config
from config import ConfigError
from data.folder import check_identity, identity, manifest_of, prepare_command, source_folders
from data.mixture import Mixture
from data.order import SamplePosition, SourceOrder, Windows, border_of, growing_borders
from data.tokens import Span, TextStream, stream_of


class Source:
    """The folder of one source, as far as its text can be read."""

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
        self.folder = folder
        self.data = data
        self.number = number
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.seed = seed
        self.manifest = manifest_of(folder)
        check_identity(folder, self.manifest, identity(data, vocab_size))
        if data.order == "global" and not self.manifest["complete"]:
            raise ConfigError(f"{folder}: is not complete; {prepare_command()} prepares the rest")
        # what tells it from another before any of it is read
        self.identity = {key: self.manifest[key] for key in ("identity", "tokenizer", "revision")}
        # of the validation text and of each segment that was read, also by an earlier launch
        self.hashes = hashes_of(self.manifest)
        self.changed = time.monotonic()  # when the record was last seen to change
        self.stream: TextStream | None = None  # None: no segment can be read yet
        self.validation: TextStream | None = None  # None: not decided yet
        self.order = SourceOrder(seed, number, Windows(seq_len), [], False)
        self._open_text(self.manifest)

    def has_text(self, index: int, evaluates: bool) -> bool:
        """Whether the sample `index` can be read; evaluates: and the validation text."""
        return self.order.covers(index) and (not evaluates or self.validation is not None)

    def compare(self, hashes: list[str | None]) -> None:
        """Raises ConfigError if text differs from the one that was read before. hashes: of a
        folder, a checkpoint or rank 0."""
        for number, (one, other) in enumerate(zip(hashes, self.hashes)):
            if one and other and one != other:
                text = f"segment {number - 1}" if number else "the validation text"
                raise ConfigError(
                    f"{self.data.source}: {text} is not the one that the run has read before, "
                    "or that rank 0 reads; restore the source and prepare it anew, or choose "
                    "another run.name"
                )
        self.hashes = max(self.hashes, hashes, key=len)

    def require_size(self, mixture: Mixture, batch_size: int) -> None:
        """Raises ConfigError if all text is there, and too little for the source's share of a
        batch. batch_size: samples."""
        samples = self.order.epoch_length
        share = mixture.weights[self.number] / mixture.period * batch_size
        if samples is not None and samples < share:
            raise ConfigError(
                f"[data] source = {self.data.source}: has {samples} samples of train.seq_len = "
                f"{self.seq_len}, but one batch of train.global_batch_size = {batch_size} takes "
                f"{share:.3g} of them: choose a smaller batch, a shorter train.seq_len or, if too much "
                "is held out for validation, another text for that (data.validation)"
            )

    def refresh(self) -> None:
        """Reads the record again, and opens what it says is there. Raises ConfigError and
        OSError."""
        if self.manifest["complete"]:
            return
        manifest = manifest_of(self.folder)
        is_behind = manifest["tokens"]["train"] < self.manifest["tokens"]["train"]
        if manifest == self.manifest or is_behind:  # of two writers where locks don't exist
            return
        self.compare(hashes_of(manifest))
        with contextlib.suppress(ConfigError):  # a file system may show the record before the bytes
            self._open_text(manifest)
            self.manifest = manifest
            self.changed = time.monotonic()

    def progress(self) -> str:
        """How far the next segment is prepared, for a log."""
        tokens = self.manifest["tokens"]["train"]
        end = border_of(len(self.manifest["segments"]))
        return f"{self.folder}: {tokens:,} of {end:,} tokens are prepared"

    def _open_text(self, manifest: dict) -> None:
        """Opens the text that a record says is there. Raises ConfigError and OSError."""
        if manifest["validation"] and self.validation is None:
            self.validation = self._open_split("validation", manifest)
        segments = len(manifest["segments"])
        # where no document is held out, the last tokens of the first segments may be
        is_decided = manifest["validation"] or manifest["tokens"]["heldout"] > 1
        if segments and is_decided:
            # opened again: a network's file system shows new bytes to a new open() only
            stream = self._open_split("train", manifest)
            tokens = stream.length if manifest["complete"] else border_of(segments - 1)
            borders = growing_borders(tokens) if self.data.order == "growing" else [tokens]
            windows = Windows(self.seq_len, stream.validation)
            self.stream = stream
            self.order = SourceOrder(
                self.seed, self.number, windows, borders, manifest["complete"]
            )

    def _open_split(self, split: str, manifest: dict) -> TextStream:
        if self.data.has_conversations:
            from extras.chat.packing import open_packed

            return open_packed(
                self.folder, manifest, split, self.vocab_size, self.seq_len, self.seed
            )
        return stream_of(self.folder, manifest, split, self.vocab_size)

    @property
    def bytes_per_token(self) -> float:
        """Of the text that the validation tokens are of; NaN where it is unknown."""
        split = (self.manifest["validation"] or ["heldout"])[0]
        sizes = self.manifest["bytes"]
        tokens = self.manifest["tokens"][split]
        return sizes[split] / tokens if sizes and sizes[split] else math.nan


def hashes_of(manifest: dict) -> list[str | None]:
    """Of the validation text, None while it is not decided, and of each segment."""
    validation = manifest["validation"]
    return [validation[-1] if validation else None, *manifest["segments"]]


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
        stream = self.sources[position.source].stream
        assert stream  # covers() is true
        start = position.window * self.train.seq_len
        return Span(stream, start, start + self.train.seq_len + 1)

    def covers(self, step: int) -> bool:
        """Whether the text of a step's entire batch is prepared. Raises ConfigError if the text
        ended, and is too little, and OSError."""
        return self.missing(step) is None

    def missing(self, step: int, evaluates: bool = False) -> Source | None:
        """The source whose text a step waits for, as of now. evaluates: it also waits for the
        validation text. Raises as covers()."""
        samples = step * self.train.global_batch_size
        for source in self.sources:
            last = self.mixture.count(source.number, samples) - 1  # within the source; -1: none
            if source.has_text(last, evaluates):
                continue
            source.refresh()
            source.require_size(self.mixture, self.train.global_batch_size)
            if not source.has_text(last, evaluates):
                return source
        return None

    def notes(self) -> list[str]:
        """Lines for a launch's log."""
        streams: list[Any] = [source.stream for source in self.sources]
        return [stream.summary() for stream in streams] if self.data.has_conversations else []

    def epochs(self, tokens: int) -> float | dict[str, float | None] | None:
        """How often the text has been read once the run has read so many tokens; of a mixture, by
        source. None where it is not known yet how much text there is."""
        periods = tokens / self.train.seq_len / self.mixture.period
        epochs = []
        for source, weight in zip(self.sources, self.mixture.weights):
            samples = source.order.epoch_length
            epochs.append(periods * weight / samples if samples else None)
        return dict(zip(self.names, epochs)) if self.names else epochs[0]

    @property
    def validation(self) -> list[TextStream]:
        """The validation text of each source. Raises ConfigError if it is not decided yet; a run
        waits for it before an evaluation: missing()."""
        streams = []
        for source in self.sources:
            if source.validation is None:
                raise ConfigError(
                    f"{source.data.source}: its validation text is not prepared yet; "
                    f"{prepare_command()} prepares it"
                )
            streams.append(source.validation)
        return streams

    @property
    def identities(self) -> list[dict]:
        """What tells the data from another run's before any of it is read, by source."""
        return [source.identity for source in self.sources]

    def fingerprint(self) -> list[dict]:
        """Identifies the data that can be read now, by source: a checkpoint holds it, and a run
        that resumes compares."""
        return [source.identity | {"hashes": source.hashes} for source in self.sources]

    def require_same_text(self, fingerprint: list[dict] | None) -> None:
        """Refuses text other than that of a fingerprint(), a checkpoint's or rank 0's; what isn't
        prepared yet is compared when it is. Raises ConfigError."""
        for source, entry in zip(self.sources, fingerprint or ()):
            source.compare(entry["hashes"])


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
