"""A configuration's prepared data, opened: what a run trains on and is evaluated on.

open_dataset() checks that each source's folder was prepared for the configuration and opens its
streams; Dataset.span() says which tokens of which stream a sample is. Text may still be prepared
meanwhile: Dataset.covers() says whether a step's is there.
"""

import functools
import pathlib
import time
from dataclasses import dataclass, field

import config
from config import ConfigError
from data.folder import check_identity, manifest_of, source_folders, source_names
from data.mixture import Mixture
from data.order import SamplePosition, SourceOrder, border_of, make_mixture
from data.row_format import row_format
from data.tokens import Span, TextStream


class PreparedSource:
    """One source's folder, as far as it is prepared."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config, number: int):
        """number: of the source in the mixture. Raises ConfigError."""
        self.folder = folder
        self.cfg = cfg
        self.order = SourceOrder(cfg.run.seed, number)
        self.manifest: dict = {}
        self.segments: list[str] = []  # hashes of those that were read, also by an earlier launch
        self.changed = time.monotonic()  # when the record was last seen to change
        self.refresh()
        check_identity(folder, self.manifest, cfg)

    def refresh(self) -> None:
        """Reads how far the text is recorded now. Raises ConfigError and OSError."""
        if self.manifest.get("complete"):
            return
        manifest = manifest_of(self.folder)
        known_tokens = self.manifest["tokens"]["train"] if self.manifest else -1
        if manifest["tokens"]["train"] < known_tokens or manifest == self.manifest:
            return  # where locks don't exist, a second process may be behind
        if not manifest["segments"]:
            raise ConfigError(f"{self.folder}: `python -m data.prepare CONFIG` has just begun it")
        self.compare(manifest["segments"])
        try:
            # opened again: a network's file system shows new bytes to a new open() only
            stream = self._open("train", manifest)
        except ConfigError:
            if not self.manifest:
                raise
            return  # and may show the record before the bytes
        self.changed = time.monotonic()
        self.manifest = manifest
        self.stream = stream
        windows = stream.training_windows(self.cfg.train.seq_len)
        is_complete = bool(manifest.get("complete"))
        self.order.extend(windows, len(manifest["segments"]), stream.length, is_complete)

    def compare(self, segments: list[str]) -> None:
        """Raises ConfigError if segments have other text than those that were read before.
        segments: hashes, of the record or of a checkpoint."""
        for number, (one, other) in enumerate(zip(segments, self.segments)):
            if one != other:
                raise ConfigError(
                    f"{self.folder}: segment {number} has other text than when it was trained on; "
                    "restore the source and prepare it anew, or choose another run.name"
                )
        self.segments = max(self.segments, segments, key=len)

    def _open(self, split: str, manifest: dict) -> TextStream:
        return row_format(self.cfg.data).open(self.folder, manifest, split, self.cfg)

    def validation(self) -> TextStream:
        return self._open("validation", self.manifest)

    def require_size(self, mixture: Mixture) -> None:
        """Raises ConfigError if there is too little to train on: known once all is prepared."""
        cfg = self.cfg
        if self.order.windows is None:
            return
        batch_size = cfg.train.global_batch_size
        share = mixture.weights[self.order.source] / mixture.period * batch_size
        if self.order.windows < share:
            raise ConfigError(
                f"{self.stream.path}: {self.stream.length} tokens give {self.order.windows} "
                f"samples of train.seq_len = {cfg.train.seq_len}, but one batch of "
                f"train.global_batch_size = {batch_size} takes {share:.3g} of them"
            )
        if cfg.data.document_mask and self.stream.document_count == self.stream.length:
            raise ConfigError(
                f"{self.stream.path}: has documents of one token each, of which data.document_mask "
                "leaves none to learn"
            )


@dataclass
class Dataset:
    """The opened data of a run. Each list is by source; without a mixture there is one."""

    cfg: config.Config
    sources: list[PreparedSource]
    mixture: Mixture
    names: list[str] = field(default_factory=list)  # of a mixture's sources; else empty
    tokenizer_files: list[pathlib.Path] = field(default_factory=list)

    def position(self, number: int) -> SamplePosition:
        """Which window a sample of the run is."""
        source, index = self.mixture(number)
        return SamplePosition(source, *self.sources[source].order.locate(index))

    def span(self, number: int) -> Span:
        """The tokens of a sample of the run: seq_len inputs and their targets, shifted by one."""
        position = self.position(number)
        start = position.window * self.cfg.train.seq_len
        stream = self.sources[position.source].stream
        return Span(stream, start, start + self.cfg.train.seq_len + 1)

    def last_samples(self, step: int) -> list[int]:
        """The number, within each source, of its last sample up to a step; -1: it has none."""
        samples = step * self.cfg.train.global_batch_size
        return [self.mixture.count(source, samples) - 1 for source in range(len(self.sources))]

    def covers(self, step: int) -> bool:
        """Whether a step's batch can be read, on all ranks. Raises ConfigError if the text ended,
        and is too little."""
        return self.missing(step) is None

    def missing(self, step: int) -> PreparedSource | None:
        """The source whose text a step waits for, as of now."""
        for source, last in zip(self.sources, self.last_samples(step)):
            if not source.order.covers(last):
                source.refresh()
                source.require_size(self.mixture)
            if not source.order.covers(last):
                return source
        return None

    def waits_for(self, step: int) -> str:
        """What a step waits for, for a log."""
        source = self.missing(step)
        if source is None:
            return "nothing"
        tokens = source.manifest["tokens"]["train"]
        end = border_of(len(source.manifest["segments"]))
        return f"{source.folder}: {tokens:,} of {end:,} tokens are prepared"

    def epochs(self, step: int) -> float | dict[str, float | None] | None:
        """How often the text has been read after a step; of a mixture, by source. None where it is
        not known yet how much text there is."""
        periods = step * self.cfg.train.global_batch_size / self.mixture.period
        epochs = []
        for source, weight in zip(self.sources, self.mixture.weights):
            windows = source.order.windows
            epochs.append(periods * weight / windows if windows else None)
        return dict(zip(self.names, epochs)) if self.names else epochs[0]

    @functools.cached_property
    def validation(self) -> list[TextStream]:
        return [source.validation() for source in self.sources]

    @property
    def identities(self) -> list[dict]:
        """What tells the data from another run's before any of it is read, by source."""
        keys = ("identity", "tokenizer", "revision", "validation")
        return [{key: source.manifest[key] for key in keys} for source in self.sources]

    def fingerprint(self, step: int) -> list[dict]:
        """Identifies the data that the steps up to `step` have read, by source: a checkpoint holds
        it, and a run that resumes compares."""
        segments = []
        for source, last in zip(self.sources, self.last_samples(step)):
            count = source.order.segments_up_to(last)
            segments.append(source.manifest["segments"][:count])
        return [entry | {"segments": each} for entry, each in zip(self.identities, segments)]

    def require_same_text(self, fingerprint: list[dict] | None) -> None:
        """Refuses text other than that of a checkpoint's fingerprint(); what isn't prepared yet is
        compared when it is. Raises ConfigError."""
        for source, entry in zip(self.sources, fingerprint or ()):
            source.compare(entry["segments"])


def open_dataset(cfg: config.Config, train: bool = True) -> Dataset:
    """Raises ConfigError if the data is not prepared, was prepared for another configuration, or is
    known to be too small for one batch. train=False: to evaluate."""
    mixture = make_mixture(cfg)
    sources = []
    for number, (folder, source_cfg) in enumerate(source_folders(cfg)):
        source = PreparedSource(folder, source_cfg, number)
        if train:
            source.require_size(mixture)
        sources.append(source)
    folder = sources[0].folder
    tokenizer_files = sorted([*folder.glob("tokenizer*"), *folder.glob("chat_template.jinja")])
    return Dataset(cfg, sources, mixture, source_names(cfg), tokenizer_files)
