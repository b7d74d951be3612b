"""A configuration's prepared data, opened: what a run trains on and is evaluated on.

open_dataset() checks that each source's folder was prepared for the configuration and opens its
streams; Dataset.span() says which tokens of which stream a sample is.
"""

import functools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import config
from config import ConfigError
from data.folder_names import data_folders, source_folders, source_names
from data.growing import GrowingText
from data.identity import check_identity
from data.order import Order, make_order
from data.record import manifest_of, validation_range
from data.tokens import Span, TextStream, open_stream, stream_of, window_span


@dataclass
class Dataset:
    """The opened data of a run. Each list is by source; without a mixture there is one."""

    cfg: config.Config
    order: Order | None = None  # None if only the validation data was opened
    train: list[TextStream] = field(default_factory=list)  # empty with data.order = "growing"
    growing: GrowingText | None = None  # in place of `train` with data.order = "growing"
    folders: list[pathlib.Path] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of a mixture's sources; else empty
    # what tells the data from another run's before any of it is read, by source
    identities: list[dict] = field(default_factory=list)
    tokenizer_files: list[pathlib.Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # warnings for the user

    def span(self, number: int) -> Span:
        """The tokens of a sample of the run: seq_len inputs and their targets, shifted by one."""
        assert self.order
        position = self.order(number)
        stream = self._training_stream(position.source)
        return window_span(stream, position.window, self.cfg.train.seq_len)

    def _training_stream(self, source: int) -> TextStream:
        if self.growing:
            return self.growing.stream(source)
        return self.train[source]

    def epochs(self, step: int) -> float | dict[str, float | None] | None:
        """How often the text has been read after a step; of a mixture, by source. None where it is
        not known yet how much text there is."""
        assert self.order
        mixture = self.order.mixture
        periods = step * self.cfg.train.global_batch_size / mixture.period
        epochs: list[float | None] = []
        for source, weight in zip(self.order.sources, mixture.weights):
            epochs.append(periods * weight / source.windows if source.windows else None)
        return dict(zip(self.names, epochs)) if self.names else epochs[0]

    @functools.cached_property
    def validation(self) -> list[TextStream]:
        """The validation streams. Raises ConfigError if one is missing, or not prepared yet."""
        return open_data(self.cfg, "validation")

    def has_validation(self) -> bool:
        """Whether the validation streams can be opened: of growing text, not from the beginning."""
        return self.growing is None or self.growing.has_validation()

    def fingerprint(self, step: int) -> list[dict]:
        """Identifies the data that the steps up to `step` have read, by source: a run that resumes
        compares it, to notice that it would read other data."""
        fingerprint = [dict(entry) for entry in self.identities]
        if self.growing:
            segments = self.growing.segments(step)
            validation_hashes = self.growing.validation_hashes()
            for source, entry in enumerate(fingerprint):
                entry["segments"] = segments[source]
                entry["validation_hash"] = validation_hashes[source]
        return fingerprint

    def require_same_text(self, fingerprint: list[dict] | None) -> None:
        """Refuses growing text other than that of a checkpoint's fingerprint(); what isn't prepared
        yet is compared when it is. Raises ConfigError."""
        if not self.growing or not fingerprint:
            return
        for source, entry in zip(self.growing.sources, fingerprint):
            source.require(entry["segments"], entry["validation_hash"])


def open_dataset(cfg: config.Config, train: bool = True) -> Dataset:
    """Opens the training data and, with [eval], the validation data; train=False: only the latter.

    Raises ConfigError if the data is not prepared, was prepared for another configuration, or is
    known to be too small for one batch.
    """
    dataset = Dataset(cfg, folders=data_folders(cfg), names=source_names(cfg))
    first_folder = dataset.folders[0]
    if cfg.data.order == "growing":
        for folder, source_cfg in source_folders(cfg):
            check_identity(folder, manifest_of(folder), source_cfg)
        dataset.growing = GrowingText(cfg, dataset.folders)
        dataset.order = dataset.growing.order
    elif train:
        dataset.train = open_data(cfg, "train")
        dataset.order = make_order(cfg, dataset.train)
    # of the text that was opened: the folder may be deleted or replaced while the run reads on
    dataset.identities = _identities(cfg, dataset.folders)
    templates = first_folder.glob("chat_template.jinja")
    dataset.tokenizer_files = sorted([*first_folder.glob("tokenizer*"), *templates])
    dataset.notes = _notes(dataset)
    if not train or (cfg.eval and dataset.has_validation()):
        for stream in dataset.validation:
            if stream.length < 2:
                dataset.notes.append(
                    f"{stream.path}: holds no validation text: it has no validation loss"
                )
    return dataset


def _identities(cfg: config.Config, folders: Sequence[pathlib.Path]) -> list[dict]:
    """Dataset.identities. Raises ConfigError."""
    is_growing = cfg.data.order == "growing"
    keys = ("identity", "tokenizer") if is_growing else ("identity", "tokens", "sha256")
    identities = []
    for folder in folders:
        manifest = manifest_of(folder)
        identities.append({key: manifest.get(key) for key in keys})
    return identities


def _notes(dataset: Dataset) -> list[str]:
    """What a launch logs of the training data and the tokenizer."""
    cfg = dataset.cfg
    folder = dataset.folders[0]
    notes = []
    if cfg.data.has_conversations:
        from extras.chat.packing import Packed

        for stream in dataset.train:
            assert isinstance(stream, Packed)
            notes.append(stream.summary())
    entries = manifest_of(folder)["vocab_size"]
    if entries < cfg.model.vocab_size:
        notes.append(
            f"the tokenizer of {folder} has {entries:,} entries, the model "
            f"{cfg.model.vocab_size:,} rows"
        )
    if cfg.model.init_from:
        from extras.huggingface.config import note_on_context
        from extras.huggingface.tokenizer import note_on_tokenizer

        notes += note_on_context(cfg.model.init_from, cfg.train.seq_len)
        notes += note_on_tokenizer(cfg.model.init_from, folder, dataset.tokenizer_files)
    return notes


def open_data(cfg: config.Config, split: str) -> list[TextStream]:
    """Opens the stream of each source, "train" or "validation". Raises ConfigError if one
    is not prepared as far as that, or for another configuration."""
    streams = []
    for folder, source_cfg in source_folders(cfg):
        streams.append(_open_source(folder, source_cfg, split))
    return streams


def _open_source(folder: pathlib.Path, cfg: config.Config, split: str) -> TextStream:
    """open_data() of one source."""
    manifest = manifest_of(folder)
    check_identity(folder, manifest, cfg)
    if cfg.data.has_conversations:
        from extras.chat.packing import open_packed

        return open_packed(folder, split, cfg)
    if split == "validation" and cfg.data.order == "growing":
        if validation_range(manifest) is None:
            tokens = manifest["tokens"]["train"]
            raise ConfigError(
                f"{folder}: its validation text is not prepared yet, at {tokens:,} tokens; `python "
                "-m data.prepare CONFIG` prepares it"
            )
        return stream_of(folder, manifest, split, cfg.model.vocab_size)
    return open_stream(folder, split, cfg.model.vocab_size)
