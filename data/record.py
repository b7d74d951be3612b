"""The record of a folder of token files, manifest.json: what is prepared, and how far it is synced.

Growing text is read segment by segment: a segment is the text between two borders.

    identity          the options that determine the files: data/identity.py
    tokenizer         its hash: data/tokenizer.py
    vocab_size, dtype of the ids: "uint16" or "int32"
    revision          commit of a Hugging Face dataset
    files             what was read of each source file: data/local_files.py, SourceFile
    place             where reading goes on: the source's resume_state()
    tokens, documents by token file, "train" and "heldout": so many are synced
    left_out          rows of which the tokenizer made nothing
    segments          the SHA-256 of each segment of train.bin up to the last border
    validation        [file, first token, one past the last], once it is decided
    validation_hash   SHA-256 of these tokens
    validation_files, validation_place    as above, of data.validation
    writer            who wrote the record: host and pid
    reads             of conversations: extras/chat/packing.py
    ended             true once all text is recorded, and the files' hashes are still missing
    sha256            of every file, by name: with it the record is complete
"""

import json
import pathlib
from dataclasses import dataclass

import files
from config import ConfigError

MANIFEST = "manifest.json"
FIRST_BORDER = 1 << 20  # tokens
BORDER_STEP = 1 << 28  # tokens; up to twice as many, borders double
HOLD_OUT_BEFORE = 1 << 24  # train tokens: growing text holds out documents that begin before


def border_of(segment: int) -> int:
    """The token at which a segment ends: 2^20, doubling to 2^29, then every 2^28."""
    end = FIRST_BORDER
    for _ in range(segment):
        end += min(end, BORDER_STEP)
    return end


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's manifest, None if it has none. Raises ConfigError if it cannot be read, or is not
    one of prepared data; OSError if a retry may help."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in files.TRANSIENT_ERRORS:
            error.filename = str(path)  # a read knows only its handle
            raise
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        manifest = None
    if not _is_of_prepared_data(manifest):
        raise ConfigError(
            f"{path}: is no manifest of prepared data; move {folder} away, or name another "
            "data.path"
        )
    return manifest


def _is_of_prepared_data(manifest: object) -> bool:
    if not isinstance(manifest, dict):
        return False
    if not {"identity", "vocab_size", "tokens", "dtype"} <= manifest.keys():
        return False
    return "sha256" in manifest or "segments" in manifest


def manifest_of(folder: pathlib.Path) -> dict:
    """A prepared folder's manifest. As read_manifest(), but raises ConfigError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"{folder}: holds no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return manifest


def complete_manifest(folder: pathlib.Path) -> dict:
    """As manifest_of(), but raises ConfigError if the text is still being prepared."""
    manifest = manifest_of(folder)
    if not is_complete(manifest):
        tokens = manifest["tokens"]["train"]
        raise ConfigError(
            f"{folder}: is prepared up to {tokens:,} tokens; `python -m data.prepare CONFIG` "
            "completes it"
        )
    return manifest


def stamp_of(folder: pathlib.Path) -> tuple[int, ...]:
    """Changes whenever a folder's manifest is replaced. () if it has none. Raises OSError."""
    try:
        status = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def write_manifest(
    folder: pathlib.Path, manifest: dict, indent: int | None = None, handle: int | None = None
) -> None:
    """Replaces a folder's manifest; other processes may do so at the same time. handle: of the
    folder, if another one may lie at its path by now. Raises OSError."""
    temporary = folder / f".{MANIFEST}.{files.process_name()}.tmp"
    files.write_atomic(folder / MANIFEST, json.dumps(manifest, indent=indent), temporary, handle)


def is_complete(manifest: dict | None) -> bool:
    return manifest is not None and "sha256" in manifest


def has_ended(manifest: dict) -> bool:
    """Whether all of the text is recorded; the files may not be hashed yet."""
    return is_complete(manifest) or manifest.get("ended", False)


def progress_of(manifest: dict) -> tuple[bool, int]:
    """(complete, tokens). Grows from record to record."""
    return is_complete(manifest), sum(manifest["tokens"].values())


@dataclass(frozen=True)
class TokenRange:
    """Tokens first ... end-1 of one of a folder's token files."""

    file: str  # "train" or "heldout", of .bin and .ends.bin
    first: int
    end: int


def validation_range(manifest: dict) -> TokenRange | None:
    """Which tokens are a folder's validation text: all of heldout.bin or, if no document was held
    out, some of train.bin. None if it isn't decided yet, since too little is prepared."""
    if "validation" in manifest:
        return TokenRange(*manifest["validation"])
    if is_complete(manifest):  # of a version that held out documents alone
        return TokenRange("heldout", 0, manifest["tokens"].get("heldout", 0))
    return None


def training_range(manifest: dict) -> TokenRange:
    """All of train.bin, validation text in it included."""
    return TokenRange("train", 0, manifest["tokens"]["train"])


def holds_out_documents(manifest: dict) -> bool:
    """Whether heldout.bin has an input and its target: then all of train.bin is trained on."""
    return manifest["tokens"]["heldout"] >= 2


def damaged(path: pathlib.Path, problem: str) -> ConfigError:
    """The error of a file of prepared data that is not as it was written."""
    return ConfigError(f"{path}: {problem}; delete {path.parent} to prepare it again")
