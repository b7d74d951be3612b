"""data.order = "growing": a run trains on the text that is recorded while the rest is prepared.

A segment is the text between two borders (data/record.py). Segment i holds the windows that end
between borders i-1 and i, the last segment those up to the text's end. Which window a sample is
depends on the text and the seed alone, and is known once the sample's segment is recorded.
"""

import bisect
import os
import pathlib
import time
from collections.abc import Sequence

import config
from config import ConfigError
from data import record
from data.background import Preparer, PreparingFailed
from data.mixture import Mixture
from data.order import Order, SourceOrder, make_mixture, problems_of
from data.record import (
    border_of,
    has_ended,
    holds_out_documents,
    is_complete,
    manifest_of,
    progress_of,
    read_manifest,
    stamp_of,
    validation_range,
)
from data.tokens import END_BYTES, WIDTH, TokenStream, Windows, stream_of


class GrowingText:
    """The sources of a run, how far they are prepared, and the process that prepares them."""

    def __init__(self, cfg: config.Config, folders: Sequence[pathlib.Path]):
        """folders: of the sources, begun. Raises ConfigError."""
        self.cfg = cfg
        self.mixture = make_mixture(cfg)
        self.sources = [
            GrowingSource(folder, cfg, number, self.mixture)
            for number, folder in enumerate(folders)
        ]
        self.order = Order([source.order for source in self.sources], self.mixture)
        self.preparer = Preparer(cfg)
        self.waited = 0.0  # seconds that a run has waited since anything was recorded
        self.last_stamps: list[tuple[int, ...]] = []  # of the records, at the last poll
        self.last_poll = time.monotonic()

    def stream(self, source: int) -> TokenStream:
        """A source's training stream, as far as it is recorded now."""
        stream = self.sources[source].stream
        assert stream, "covers() was not asked"
        return stream

    def covers(self, step: int) -> bool:
        """Whether a step's batch can be read, on all ranks."""
        return all(self._covers_source(source, step) for source in self.sources)

    def _covers_source(self, source: "GrowingSource", step: int) -> bool:
        return source.order.covers(self._last_sample(source, step))

    def _last_sample(self, source: "GrowingSource", step: int) -> int:
        """The number, within a source, of its last sample up to a step; -1: it has none."""
        samples = step * self.cfg.train.global_batch_size
        return self.mixture.count(source.number, samples) - 1

    def has_validation(self) -> bool:
        return all(source.has_validation() for source in self.sources)

    def segments(self, step: int) -> list[list[str]]:
        """The hashes of the segments that decide the samples up to a step, by source."""
        hashes = []
        for source in self.sources:
            count = source.segments_up_to(self._last_sample(source, step))
            hashes.append(source.manifest["segments"][:count])
        return hashes

    def validation_hashes(self) -> list[str | None]:
        """By source; None: it is not decided yet what the validation text is."""
        return [source.manifest.get("validation_hash") for source in self.sources]

    def poll(self, is_waiting: bool) -> None:
        """Reads the records again, and keeps a process running that prepares what is missing.

        is_waiting: whether the run waits for text. Raises ConfigError if the text cannot be
        prepared, PreparingFailed if nothing is recorded for run.start_timeout_seconds of waiting.
        """
        for source in self.sources:
            source.refresh()
        if not all(is_complete(source.manifest) for source in self.sources):
            is_needed = not all(source.is_recorded for source in self.sources)
            self.preparer.poll(is_needed)
        self._count_waiting(is_waiting)
        limit = self.cfg.run.start_timeout_seconds
        if self.waited > limit / 2:
            self.preparer.replace()  # it may be suspended (SIGSTOP)
        if self.waited > limit:
            writer = self.sources[0].manifest.get("writer", "a process that prepares")
            folders = ", ".join(str(source.folder) for source in self.sources)
            raise PreparingFailed(
                f"{folders}: nothing was recorded for {self.waited:.0f} s "
                f"(run.start_timeout_seconds), last by {writer}; the same command resumes"
            )

    def _count_waiting(self, is_waiting: bool) -> None:
        """Adds the time since the last poll to `waited`, unless something was recorded since."""
        now = time.monotonic()
        stamps = [source.manifest_stamp for source in self.sources]
        if is_waiting and stamps == self.last_stamps:
            # counts a second at most: a longer gap means that this process was suspended
            self.waited += min(1.0, now - self.last_poll)
        else:
            self.waited = 0.0
        self.last_stamps = stamps
        self.last_poll = now

    def waits_for(self, step: int) -> str:
        """What a step waits for, for a log."""
        missing = [source for source in self.sources if not self._covers_source(source, step)]
        return "; ".join(source.waits_for() for source in missing or self.sources)

    def close(self) -> None:
        self.preparer.close()


class GrowingSource:
    """One source's training text, up to the last border that is recorded.

    What can be read: `stream` and `order`, which refresh() extends.
    """

    def __init__(self, folder: pathlib.Path, cfg: config.Config, number: int, mixture: Mixture):
        """number: of the source in the mixture. Raises ConfigError."""
        self.folder = folder
        self.cfg = cfg
        self.number = number
        self.mixture = mixture
        self.manifest = manifest_of(folder)
        self.manifest_stamp: tuple[int, ...] = (0,)  # of the manifest that was read last
        self.order = SourceOrder(cfg.run.seed, number, Windows(cfg.train.seq_len))
        self.stream: TokenStream | None = None  # None: no segment can be read yet
        # as require() was told
        self.required_segments: Sequence[str] = ()
        self.required_validation: str | None = None
        # of a record without its bytes, refresh() looks again; a complete folder must have them
        if is_complete(self.manifest) or self._is_visible(self.manifest):
            self._extend()

    @property
    def is_recorded(self) -> bool:
        """Whether all of the text is recorded: no step waits for it any more."""
        return self.order.windows is not None

    def has_validation(self) -> bool:
        """Whether it is decided what the validation text is, and all of it is recorded."""
        return validation_range(self.manifest) is not None

    def segments_up_to(self, sample: int) -> int:
        """How many segments' text decides which windows the samples up to this one are. The same on
        all ranks that cover it, though one may see more segments. sample: -1 for none."""
        ends = self.order.segment_ends
        return min(bisect.bisect_right(ends, sample) + 1, len(ends))

    def require(self, segments: Sequence[str], validation_hash: str | None) -> None:
        """Refuses text other than a checkpoint was trained on, as soon as it is prepared.

        segments: hashes of those that the checkpoint has used. Raises ConfigError.
        """
        self.required_segments = segments
        self.required_validation = validation_hash
        self._check_required()

    def refresh(self) -> None:
        """Reads how far the text is recorded now. Raises ConfigError if the folder is gone, or was
        replaced by another one."""
        if is_complete(self.manifest):
            return
        try:
            stamp = stamp_of(self.folder)
            if stamp == self.manifest_stamp:
                return
            manifest = read_manifest(self.folder)
        except OSError:  # it may pass, as when another machine replaces the file meanwhile
            return
        if manifest is None:
            raise ConfigError(f"{self.folder}: was deleted while a run reads it; start again")
        for key in ("identity", "tokenizer"):
            if manifest.get(key) != self.manifest.get(key):
                raise ConfigError(
                    f"{self.folder}: was begun anew, with another {key}, while a run reads it"
                )
        self._check_segments(manifest["segments"], self.manifest["segments"])
        is_newer = progress_of(manifest) >= progress_of(self.manifest)
        if is_newer and self._is_visible(manifest):
            self.manifest_stamp = stamp
            self.manifest = manifest
            self._extend()

    def _is_visible(self, manifest: dict) -> bool:
        """Whether this machine sees the recorded bytes: a network's file system may show the
        manifest first."""
        width = WIDTH[manifest["dtype"]]
        try:
            for split, tokens in manifest["tokens"].items():
                ids = self.folder / f"{split}.bin"
                ends = self.folder / f"{split}.ends.bin"
                if os.stat(ids).st_size < tokens * width:
                    return False
                if os.stat(ends).st_size < manifest["documents"][split] * END_BYTES:
                    return False
        except OSError:
            return False
        return True

    def _extend(self) -> None:
        """Extends `stream` and `order` by the segments that the manifest now records. Raises
        ConfigError if all text is there, and too little to train on."""
        manifest = self.manifest
        if self.is_recorded or not manifest["segments"] or not self._can_be_read():
            return
        self._check_required()
        # opened again: a network's file system shows new bytes to a new open() only
        stream = stream_of(self.folder, manifest, "train", self.cfg.model.vocab_size)
        windows = stream.training_windows(self.cfg.train.seq_len)
        self.stream = stream
        self.order.numbering = windows
        segments = len(manifest["segments"])
        for segment in range(len(self.order.segment_ends), segments):
            is_last = has_ended(manifest) and segment == segments - 1
            end = stream.length if is_last else border_of(segment)
            self.order.segment_ends.append(windows.count(end))
        if has_ended(manifest):
            count = windows.count(stream.length)
            problems = problems_of(self.cfg, self.mixture, self.number, stream, count)
            if problems:
                raise ConfigError(*problems)
            self.order.windows = count

    def _can_be_read(self) -> bool:
        """Whether it is decided what is held out: until then the first tokens may become validation
        text."""
        return self.has_validation() or holds_out_documents(self.manifest)

    def _check_required(self) -> None:
        self._check_segments(self.manifest["segments"], self.required_segments)
        before = self.required_validation
        now = self.manifest.get("validation_hash")
        if before and now and before != now:
            raise ConfigError(
                f"{self.folder}: its validation text has changed since the run began; restore "
                "it and prepare it anew, or choose another run.name"
            )

    def _check_segments(self, now: Sequence[str], before: Sequence[str]) -> None:
        """Raises ConfigError if a segment that was read has other text now. now, before: hashes."""
        for segment, (new, old) in enumerate(zip(now, before)):
            if new != old:
                raise ConfigError(
                    f"{self.folder}: segment {segment} has other text than when it was trained on; "
                    "restore the source and prepare it anew, or choose another run.name"
                )

    def waits_for(self) -> str:
        """Which segment is prepared next, and how far it is, for a log."""
        segment = len(self.order.segment_ends)
        tokens = self.manifest["tokens"]["train"]
        end = border_of(segment)
        if tokens >= end and not self._can_be_read():
            return (
                f"{self.folder}: segment {segment}, {tokens:,} tokens prepared, none of them "
                f"validation text; {record.HOLD_OUT_BEFORE:,} at most are waited for"
            )
        return f"{self.folder}: segment {segment}, {tokens:,} of {end:,} tokens prepared"
