"""The record of a folder of token files, manifest.json: what is prepared, and how far it is synced.

Segment: the tokens of a text between two borders; growing text is read segment by segment.
Complete: all text is there, and the record has the SHA-256 of every file ("sha256").
"""

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import files
from config import ConfigError

MANIFEST = "manifest.json"
FIRST_BORDER, BORDER_STEP = 1 << 20, 1 << 28  # tokens
HOLD_OUT_BEFORE = 1 << 24  # train tokens: growing text holds out documents that begin before


def border_of(segment: int) -> int:
    """The token at which a segment ends: 2^20, doubling to 2^29, then every 2^28."""
    end = FIRST_BORDER
    for _ in range(segment):
        end += min(end, BORDER_STEP)
    return end


def damaged(path: pathlib.Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}; delete {path.parent} to prepare it again")


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's manifest, None if it has none. Raises ConfigError if it cannot be read, or is another program's."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        manifest = None
    required = {"identity", "vocab_size", "tokens", "dtype"}
    is_ours = isinstance(manifest, dict) and required <= manifest.keys()
    if not is_ours or not ({"sha256", "segments"} & manifest.keys()):
        raise ConfigError(
            f"{path}: is no manifest of prepared data; move {folder} away, or name another "
            "data.path"
        )
    return manifest


def manifest_of(folder: pathlib.Path) -> dict:
    """A prepared folder's manifest. Raises ConfigError if it has none, too."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"{folder}: holds no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return manifest


def complete_manifest(folder: pathlib.Path) -> dict:
    """manifest_of(), and a ConfigError if the text is still being prepared."""
    manifest = manifest_of(folder)
    if not is_complete(manifest):
        tokens = manifest["tokens"]["train"]
        raise ConfigError(
            f"{folder}: is prepared up to {tokens:,} tokens; `python -m data.prepare CONFIG` "
            "completes it"
        )
    return manifest


def write_manifest(folder: pathlib.Path, manifest: dict, **layout: Any) -> None:
    """Replaces a folder's manifest, which other processes may do at the same time. Raises OSError."""
    temporary = folder / f".{MANIFEST}.{files.process_name()}.tmp"
    files.write_atomic(folder / MANIFEST, json.dumps(manifest, **layout), temporary)


def is_complete(manifest: dict | None) -> bool:
    return manifest is not None and "sha256" in manifest


def has_ended(manifest: dict) -> bool:
    """Whether all of the text is recorded; the files may not be hashed yet."""
    return is_complete(manifest) or manifest.get("ended", False)


def progress_of(manifest: dict) -> tuple[bool, int]:
    """Grows from record to record."""
    return is_complete(manifest), sum(manifest["tokens"].values())


@dataclass(frozen=True)
class ValidationRange:
    """Where a folder's validation text stands: tokens first ... end-1 of a file.

    Usually all of heldout.bin. Of a text without a document that is held out: some of train.bin.
    """

    split: str  # the file: "heldout" or "train"
    first: int
    end: int


def validation_range(manifest: dict) -> ValidationRange | None:
    """None if it isn't decided yet, since too little is prepared."""
    if "validation" in manifest:
        return ValidationRange(*manifest["validation"])
    if is_complete(manifest):  # of a version that held out documents alone
        return ValidationRange("heldout", 0, manifest["tokens"].get("heldout", 0))
    return None


def holds_out_documents(manifest: dict) -> bool:
    """Whether heldout.bin has an input and its target: then no token of train.bin will be for validation."""
    return manifest["tokens"]["heldout"] >= 2
