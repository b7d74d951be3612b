"""What a run reads from the Hugging Face hub, fetched into the hub's cache before the run starts.

    python -m data.prepare CONFIG --fetch-only

On a machine with a network. It begins the folders of the data, whose records pin the commits and
list the files, and prepares nothing. After that neither the run nor what prepares its text needs a
network. What is fetched already is not fetched again.
"""

import bisect
import pathlib
import shlex
import time
from dataclasses import dataclass

import config
from data import hub
from data.console import report
from data.encode import chunks, encoder
from data.folder import as_config_error, begin_all
from data.hub_sources import Hub, HubFiles, cache_folder, is_cached
from data.identity import kind_of, open_recorded, validation_source
from data.local_files import SourceFile
from data.record import is_complete, manifest_of
from data.tokens import WIDTH

SAMPLE_TOKENS = 1 << 20  # that are tokenized to estimate how many the files hold
SURPLUS = 1.05  # of bytes, as files differ
LOG_SECONDS = 10.0  # between progress lines


@dataclass(frozen=True)
class Reading:
    """The files of a source that a run will read."""

    source: HubFiles
    first: int  # number of the first one
    end: int  # number of the last one, plus 1

    def missing(self) -> list[SourceFile]:
        """Those that are not in the cache."""
        assert self.source.revision
        return [
            file
            for file in self.source.files[self.first : self.end]
            if not is_cached(self.source.d.source, self.source.revision, file)
        ]


def fetch_all(cfg: config.Config) -> None:
    """Fetches base weights, tokenizer and data. Raises ConfigError."""
    from huggingface_hub.constants import HF_HOME

    if cfg.model.init_from:
        hub.local(cfg.model.init_from, hub.WEIGHTS)
    with as_config_error(cache_folder()):
        fetch_data(cfg)
    home = shlex.quote(HF_HOME)
    report(f"fetched; where there is no network, train with HF_HOME={home} HF_HUB_OFFLINE=1")


def fetch_data(cfg: config.Config) -> None:
    """Fetches the tokenizer and the files of all sources. Raises ConfigError and OSError."""
    readings: list[Reading] = []
    for folder, source_cfg in begin_all(cfg):  # which fetches the tokenizer
        if kind_of(source_cfg.data) is Hub and not is_complete(manifest_of(folder)):
            report(
                f'{source_cfg.data.source}: data.order = "{cfg.data.order}" reads it while it is '
                "prepared, before the run: prepare it here, by the same command without "
                "--fetch-only"
            )
        else:
            readings += readings_of(folder, source_cfg)
    missing = [file for reading in readings for file in reading.missing()]
    size = sum(file.size for file in missing)
    hub.check_room(cache_folder(), size)
    report(f"fetching {len(missing):,} files, {size / hub.GIB:,.2f} GiB, into {cache_folder()}")
    for reading in readings:
        fetch_files(reading)


def readings_of(folder: pathlib.Path, cfg: config.Config) -> list[Reading]:
    """What is still to be read for a folder: of its validation source all, of its source as much as
    data.max_tokens takes. Raises ConfigError."""
    manifest = manifest_of(folder)
    if is_complete(manifest):
        return []
    readings = []
    validation = validation_source(cfg.data)
    if validation:
        source = open_recorded(validation, manifest, "validation_")
        if isinstance(source, HubFiles):
            readings.append(Reading(source, source.state.file, len(source.files)))
    source = open_recorded(cfg.data, manifest)
    if isinstance(source, HubFiles):
        first = source.state.file
        end = end_of_needed(folder, manifest, cfg.data)
        needed = source.bytes_before[end] - source.bytes_before[first]
        report(
            f"{cfg.data.source}: {end - first:,} of {len(source.files):,} files are needed, "
            f"{needed / hub.GIB:,.2f} GiB"
        )
        readings.append(Reading(source, first, end))
    return readings


def end_of_needed(folder: pathlib.Path, manifest: dict, d: config.Data) -> int:
    """The number of the first file that data.max_tokens does not need, estimated from the text that
    is read next. Raises ConfigError."""
    source = open_recorded(d, manifest)
    assert isinstance(source, HubFiles)
    if not d.max_tokens:
        return len(source.files)
    size = source.bytes_before[-1]
    first = source.state.file
    first_byte = size * (source.fraction_read() or 0.0)
    byte = first_byte
    encode = encoder(folder, manifest, d)
    missing_tokens = d.max_tokens - manifest["tokens"]["train"]
    tokens = 0
    for chunk in chunks(source, encode):
        if chunk.problem:
            raise chunk.problem
        if chunk.is_last:
            return len(source.files)
        for _, ids in encode(chunk.documents):
            tokens += len(ids) // WIDTH[manifest["dtype"]]
        byte = size * (chunk.fraction_read or 0.0)
        if tokens >= min(SAMPLE_TOKENS, missing_tokens):
            break
    needed = first_byte + missing_tokens * (byte - first_byte) / max(1, tokens) * SURPLUS
    # at least one more: reading is ahead of tokenizing
    end = max(first, bisect.bisect_left(source.bytes_before, needed)) + 1
    return min(end, len(source.files))


def fetch_files(reading: Reading) -> None:
    """Fetches the files of a reading, one after the other. Raises ConfigError."""
    source = reading.source
    source.end = reading.end  # it fetches one ahead
    last_line = time.monotonic()
    for number in range(reading.first, reading.end):
        source.path_of(number)
        if time.monotonic() > last_line + LOG_SECONDS:
            done = number + 1 - reading.first
            report(f"{source.d.source}: {done:,} of {reading.end - reading.first:,} files fetched")
            last_line = time.monotonic()
