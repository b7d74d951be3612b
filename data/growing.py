"""data.order = "growing": training reads text up to the last recorded border while the rest is being prepared.

Segment i holds the windows that end between borders i-1 and i (data/record.py), the last one those up to the text's
end. A sample depends on the text and the seed alone, and waits for its segment alone.
"""

import bisect
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import config
from config import ConfigError
from data.background import Preparer, PreparingFailed
from data.order import Order, SourceOrder, make_mixture, problems_of
from data.record import (
    MANIFEST,
    border_of,
    has_ended,
    holds_out_documents,
    is_complete,
    manifest_of,
    progress_of,
    read_manifest,
    validation_range,
)
from data.tokens import WIDTH, TokenStream, Windows, stream_of


class GrowingStream:
    """A source's training stream, up to the last border that is recorded."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config, number: int, mixture: Any):
        """number: of the source in the mixture. Raises ConfigError."""
        self.folder, self.cfg, self.number, self.mixture = folder, cfg, number, mixture
        self.path = folder / "train.bin"
        self.manifest = manifest_of(folder)
        self.order = SourceOrder(cfg.run.seed, number, Windows(cfg.train.seq_len))
        self.stream: TokenStream | None = None
        self.required: tuple[Sequence[str], str | None] = (), None  # as require() was told
        self.stamp: tuple[int, ...] = (0,)  # of the manifest that was read last
        self._read_to_record()

    @property
    def is_recorded(self) -> bool:
        """Whether all of the text is: no step waits for it any more."""
        return self.order.windows is not None

    def refresh(self) -> None:
        """Looks how far the text is recorded now. Raises ConfigError if the folder is gone, or is another one."""
        if is_complete(self.manifest):
            return
        stamp = self._stamp_of_record()
        if stamp == self.stamp:
            return
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ConfigError(f"{self.folder}: was deleted while a run reads it; start again")
        for key in ("identity", "tokenizer"):
            if manifest.get(key) != self.manifest.get(key):
                raise ConfigError(
                    f"{self.folder}: was begun anew, with another {key}, while a run reads it"
                )
        self._check_segments(manifest["segments"], self.manifest["segments"])
        if progress_of(manifest) >= progress_of(self.manifest) and self._is_there(manifest):
            self.stamp = stamp
            self.manifest = manifest
            self._read_to_record()

    def _stamp_of_record(self) -> tuple[int, ...]:
        """Changes with the record."""
        try:
            status = (self.folder / MANIFEST).stat()
        except FileNotFoundError:
            return ()
        except OSError:  # of a network's file system: it may pass
            return self.stamp
        return status.st_mtime_ns, status.st_ino, status.st_size

    def require(self, segments: Sequence[str], validation_hash: str | None) -> None:
        """Text other than a checkpoint was trained on is refused, as soon as it is prepared. segments: their hashes.
        Raises ConfigError."""
        self.required = segments, validation_hash
        self._check_required()

    def _check_required(self) -> None:
        segments, before = self.required
        self._check_segments(self.manifest["segments"], segments)
        now = self.manifest.get("validation_hash")
        if before and now and before != now:
            raise ConfigError(
                f"{self.folder}: its validation text is another than when the run began; restore "
                "it and prepare it anew, or choose another run.name"
            )

    def _check_segments(self, now: Sequence[str], before: Sequence[str]) -> None:
        """Raises ConfigError if segments that were read have other text now. now, before: their hashes."""
        for segment, (new, old) in enumerate(zip(now, before)):
            if new != old:
                raise ConfigError(
                    f"{self.folder}: segment {segment} has other text than when it was trained on; "
                    "restore the source and prepare it anew, or choose another run.name"
                )

    def _is_there(self, manifest: dict) -> bool:
        """Whether the recorded bytes are visible here: a network's file system may show the manifest first."""
        width = WIDTH[manifest["dtype"]]
        sizes = {}
        for split, tokens in manifest["tokens"].items():
            sizes[f"{split}.bin"] = tokens * width
            sizes[f"{split}.ends.bin"] = 8 * manifest["documents"][split]
        try:
            return all(os.stat(self.folder / name).st_size >= size for name, size in sizes.items())
        except OSError:
            return False

    def _read_to_record(self) -> None:
        """Makes the segments readable that the manifest covers."""
        manifest = self.manifest
        # until it is decided what is held out, the first tokens may become validation text
        is_decided = validation_range(manifest) or holds_out_documents(manifest)
        if self.is_recorded or not manifest["segments"] or not is_decided:
            return
        self._check_required()
        # opened again: a network's file system shows new content to a new open() only
        stream = stream_of(self.folder, manifest, "train", self.cfg.model.vocab_size)
        windows = stream.training_windows(self.cfg.train.seq_len)
        self.stream, self.order.numbering = stream, windows
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

    def segments_needed(self, index: int) -> int:
        """How many segments' text decides which windows the samples up to this index are."""
        ends = self.order.segment_ends
        return min(bisect.bisect_right(ends, index) + 1, len(ends))

    def span(self, window: int, seq_len: int) -> tuple[TokenStream, int, int]:
        """As TokenStream.span()."""
        assert self.stream
        return self.stream.span(window, seq_len)

    def has_validation(self) -> bool:
        """Whether it is decided what the validation text is, and all of it is there."""
        return validation_range(self.manifest) is not None


class GrowingText:
    """The sources of a run, how far they are prepared, and the process that prepares them."""

    def __init__(self, cfg: config.Config, folders: Sequence[pathlib.Path]):
        """Raises ConfigError."""
        self.cfg = cfg
        self.mixture = make_mixture(cfg)
        self.streams = [
            GrowingStream(folder, cfg, number, self.mixture)
            for number, folder in enumerate(folders)
        ]
        self.order = Order([stream.order for stream in self.streams], self.mixture)
        # of each source's samples in a period
        self.positions: list[list[int]] = [[] for _ in folders]
        for position, (source, _) in enumerate(self.mixture.table):
            self.positions[source].append(position)
        self.preparer = Preparer(cfg)
        self.waited = 0.0  # seconds without a record, while a run waits for one
        self.last_record: Any = None
        self.last_poll = time.monotonic()

    def _last_index(self, source: int, step: int) -> int:
        """The index of a source's last sample up to a step; -1: it has none."""
        period, position = divmod(step * self.cfg.train.global_batch_size, self.mixture.period)
        before = bisect.bisect_left(self.positions[source], position)
        return period * self.mixture.parts[source] + before - 1

    def covers(self, step: int) -> bool:
        """Whether a step's batch can be read, on all ranks."""
        return all(
            stream.is_recorded or stream.order.covers(self._last_index(stream.number, step))
            for stream in self.streams
        )

    def has_validation(self) -> bool:
        return all(stream.has_validation() for stream in self.streams)

    def segments(self, step: int) -> list[list[str]]:
        """Of each source, the hashes of the segments that decide the samples up to a step."""
        used = []
        for stream in self.streams:
            index = self._last_index(stream.number, step)
            used.append(stream.manifest["segments"][: stream.segments_needed(max(0, index))])
        return used

    def validation_hashes(self) -> list[str]:
        return [stream.manifest.get("validation_hash", "") for stream in self.streams]

    def poll(self, waits: bool) -> None:
        """Reads the records again, and sees to it that what is missing is being prepared. waits: whether a run waits
        for it. Raises ConfigError if the text cannot be prepared, PreparingFailed if it isn't for too long."""
        for stream in self.streams:
            stream.refresh()
        if not all(is_complete(stream.manifest) for stream in self.streams):
            is_needed = not all(stream.is_recorded for stream in self.streams)
            self.preparer.poll(is_needed)
        record = [progress_of(stream.manifest) for stream in self.streams]
        # counts a second at most: a longer gap means that this process was suspended
        now = time.monotonic()
        if waits and record == self.last_record:
            self.waited += min(1.0, now - self.last_poll)
        else:
            self.waited = 0.0
        self.last_record, self.last_poll = record, now
        limit = self.cfg.run.start_timeout_seconds
        if self.waited > limit / 2:
            self.preparer.replace()  # it may be stopped
        if self.waited > limit:
            writer = self.streams[0].manifest.get("writer", "a process that prepares")
            folders = ", ".join(str(stream.folder) for stream in self.streams)
            raise PreparingFailed(
                f"{folders}: nothing was recorded for {self.waited:.0f} s "
                f"(run.start_timeout_seconds), last by {writer}; the same command resumes"
            )

    def waits_for(self, step: int) -> str:
        """What a step waits for, for a log."""
        missing = [
            stream
            for stream in self.streams
            if not stream.order.covers(self._last_index(stream.number, step))
        ]
        return "; ".join(
            f"{stream.folder}: segment {len(stream.order.segment_ends)}, "
            f"{stream.manifest['tokens']['train']:,} of "
            f"{border_of(len(stream.order.segment_ends)):,} tokens prepared"
            for stream in missing or self.streams
        )

    def close(self) -> None:
        self.preparer.close()
