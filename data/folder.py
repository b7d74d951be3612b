"""The folder of each source's token files: its beginning, and checks of one that exists.

A folder begins with a tokenizer and a record of no text; data/prepare.py fills it.
"""

import contextlib
import glob
import hashlib
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator

import config
import files
from config import ConfigError
from data.console import report
from data.folder_names import (
    are_folders_known,
    common_tokenizer,
    data_folders,
    source_folders,
    sources_of,
)
from data.hub_sources import HubFiles
from data.identity import (
    check_identity,
    check_validation,
    identity,
    kind_of,
    open_source,
    validation_source,
)
from data.local_files import file_stamps, local_files
from data.record import MANIFEST, damaged, is_complete, read_manifest, write_manifest
from data.sources import Files, FilesState
from data.tokenizer import Tokenizer, tokenizer_hash
from data.tokenizer_training import train_on_sources

# that another process may take to train a tokenizer: then it is not waited for
BEGIN_SECONDS = 900.0


# Beginning


def begin_all(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """Begins the folder of each source, or checks the one that exists. Returns source_folders().
    Raises ConfigError."""
    if cfg.data.sources and not cfg.data.tokenizer:
        _train_common_tokenizer(cfg)
    sources = source_folders(cfg)
    for folder, source_cfg in sources:
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(f"{folder}: is a link to {os.readlink(folder)}, which is not there")
        with as_config_error(folder):
            _begin_or_check(folder, source_cfg)
    return sources


def begin_on_this_machine(cfg: config.Config) -> None:
    """On the machine's first rank: begins folders that are missing, as on a machine with a disk of
    its own, where the launcher did not begin them. Raises ConfigError."""
    from parallel.ranks import rank_and_size  # imports torch, which the launcher does without

    _, local_rank, _ = rank_and_size()
    if local_rank != 0:
        return
    if not are_folders_known(cfg) or not all(map(read_manifest, data_folders(cfg))):
        begin_all(cfg)


@contextlib.contextmanager
def as_config_error(path: pathlib.Path) -> Iterator[None]:
    """Turns OSError into ConfigError. path: what is prepared, if the error names no file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: data could not be prepared: {error.strerror}"
        ) from None


def lock_of(path: pathlib.Path) -> pathlib.Path:
    """The lock file next to what is prepared: hidden, and never removed. Raises ConfigError."""
    if not path.name:
        raise ConfigError(f"[data] path = {path}: is the current folder or /; name one in it")
    return path.with_name(f".{path.name}.lock")


@contextlib.contextmanager
def _exclusive(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock of what is prepared at `path`; goes on without it if another process holds it
    for BEGIN_SECONDS. Raises ConfigError and OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_file = lock_of(path)
    lock = None
    try:
        lock = files.lock(lock_file)
    except TimeoutError:
        report(f"waiting for another process that prepares {path}")
        try:
            lock = files.lock(lock_file, timeout=BEGIN_SECONDS)
        except TimeoutError:  # the other process is stopped, perhaps
            report(f"{lock_file}: held for {BEGIN_SECONDS:.0f} s: preparing {path} too")
    try:
        yield
    finally:
        if lock:
            lock.release()


def _begin_or_check(folder: pathlib.Path, cfg: config.Config) -> None:
    """begin_all() of one source. Raises ConfigError and OSError."""
    lock_of(folder)  # raises for a path without a name, before it is looked at
    if _exists_for(folder, cfg):
        return
    with _exclusive(folder):
        if not _exists_for(folder, cfg):  # else another process began it meanwhile
            _begin(folder, cfg)


def _begin(folder: pathlib.Path, cfg: config.Config) -> None:
    """Makes a folder next to it, then renames: the folder exists with its record, or not at all.
    Raises ConfigError and OSError."""
    check_validation(cfg.data)
    sweep(folder)
    temporary = folder.with_name(f".{folder.name}.{files.process_name()}.tmp")
    contents, vocab_size = _tokenizer_of(cfg)
    manifest = _first_record(cfg, tokenizer_hash(contents), vocab_size)
    if cfg.data.has_conversations:
        from extras.chat.template import files_of

        contents |= files_of(cfg.data)
    try:
        temporary.mkdir()
        for name, content in contents.items():
            files.write_atomic(temporary / name, content)
        files.write_atomic(temporary / MANIFEST, json.dumps(manifest))
        files.publish(temporary, folder)
    except OSError:
        if read_manifest(folder) is None:
            raise
        # another process was faster, where there are no locks
        _exists_for(folder, cfg)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _first_record(cfg: config.Config, tokenizer: str, vocab_size: int) -> dict:
    """The manifest of a folder without text. tokenizer: its hash. Raises ConfigError."""
    source = open_source(cfg.data)
    if isinstance(source, HubFiles):
        source.report_size()
    # of conversations, the sign of a token says that it has no loss
    is_wide = vocab_size > 1 << 16 or cfg.data.has_conversations
    return {
        "identity": identity(cfg),
        "files": source.files_to_record() or [],
        "revision": source.revision,
        "vocab_size": vocab_size,
        "dtype": "int32" if is_wide else "uint16",
        "tokenizer": tokenizer,
        "tokens": {"train": 0, "heldout": 0},
        "documents": {"train": 0, "heldout": 0},
        "segments": [],
        "place": None,
        **validation_record(cfg.data, source.revision),
        **reader_of(cfg.data),
    }


def validation_record(d: config.Data, revision: str | None) -> dict:
    """What a folder's first record has of its validation source: the files of a Hugging Face
    dataset's split, which a machine without a network could not list. Raises ConfigError."""
    validation = validation_source(d)
    if validation is None or kind_of(validation) is not HubFiles:
        return {}
    source = open_source(validation, None, {"revision": revision})
    return {"validation_files": source.files_to_record()}


def reader_of(d: config.Data) -> dict:
    """What a manifest says of the code that read its rows: nothing of texts."""
    if not d.has_conversations:
        return {}
    from extras.chat.packing import READS

    return {"reads": READS}


def sweep(folder: pathlib.Path) -> None:
    """Removes what killed processes of this machine left of a folder, and of a preparation of
    earlier versions."""
    _remove(folder.with_name(f".{folder.name}.tmp"))  # of earlier versions
    _sweep_temporaries(folder.parent, f".{folder.name}.{platform.node()}-")
    _sweep_temporaries(folder, f".{MANIFEST}.{platform.node()}-")


def _sweep_temporaries(folder: pathlib.Path, prefix: str) -> None:
    """Removes {prefix}{pid}.tmp of each process that has ended."""
    for path in folder.glob(f"{glob.escape(prefix)}*.tmp"):
        pid = path.name.removeprefix(prefix).removesuffix(".tmp")
        if not _is_alive(pid):
            _remove(path)


def _remove(path: pathlib.Path) -> None:
    """Removes a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_alive(pid: str) -> bool:
    """Whether a process of this machine has this number."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except OSError:  # another user's
        return True
    return True


# Checks


def _exists_for(folder: pathlib.Path, cfg: config.Config) -> bool:
    """Whether the folder exists, with a record. Raises ConfigError if it is for another
    configuration, or is complete and was changed."""
    manifest = read_manifest(folder)
    if manifest is None:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: is there but holds no prepared data ({MANIFEST} is missing); move it "
                "away"
            )
        return False
    check_identity(folder, manifest, cfg)
    if is_complete(manifest):
        _check_text(folder, manifest, cfg.data)
        _check_hashes(folder, manifest)
    return True


def _check_text(folder: pathlib.Path, manifest: dict, d: config.Data) -> None:
    """Raises ConfigError if the text of a complete folder was changed; it may be gone."""
    before = json.dumps(manifest)
    _compare_with_source(folder, manifest, d, "")
    validation = validation_source(d)
    if validation:
        _compare_with_source(folder, manifest, validation, "validation_")
    if json.dumps(manifest) != before:  # files were copied, and their text is equal
        with contextlib.suppress(OSError):  # of a disk that can only be read
            write_manifest(folder, manifest, indent=2)


def _compare_with_source(folder: pathlib.Path, manifest: dict, d: config.Data, prefix: str) -> None:
    """Compares a source's files with what the manifest has of them, and takes over new stamps.
    prefix: of the source's entries in the manifest. Raises ConfigError."""
    recorded = manifest.get(f"{prefix}files")
    if not recorded or not local_files(d.source, d.split):
        return
    record = {"files": [[*entry, ""][:4] for entry in recorded]}
    end = FilesState(file=len(recorded))
    reader = Files(d, manifest.get(f"{prefix}place") or end, record)
    for _ in reader.compare_with_text(folder):
        pass
    manifest[f"{prefix}files"] = reader.files


def _check_hashes(folder: pathlib.Path, manifest: dict) -> None:
    """Raises ConfigError if a file is missing, or was changed after the manifest was written."""
    written_last = folder / MANIFEST
    for name, digest in manifest["sha256"].items():
        path = folder / name
        if not path.exists():
            raise damaged(path, "is missing")
        # Hashes only files newer than the manifest: hashing terabytes before each start would stall
        # a cluster.
        if path.stat().st_mtime_ns > written_last.stat().st_mtime_ns:
            report(f"{path}: was copied or changed since it was prepared; comparing its hash")
            if sha256_of(path) != digest:
                raise damaged(path, "was changed since it was prepared")
            report(f"{path}: is unchanged; `touch {written_last}` spares this the next time")


def sha256_of(path: pathlib.Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


# Tokenizers


def _tokenizer_of(cfg: config.Config) -> tuple[dict[str, bytes], int]:
    """(the content of the files of a source's tokenizer by name, its vocabulary's size). Raises
    ConfigError."""
    name = cfg.data.tokenizer
    rows = cfg.model.vocab_size
    if not name:
        return {"tokenizer.model": train_on_sources([cfg])}, rows
    tokenizer = Tokenizer(name)
    if not tokenizer.eos:
        report(f"{name}: has no EOS token that is known, so nothing separates documents")
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"[model] vocab_size = {rows}: smaller than the tokenizer {name}, of "
            f"{tokenizer.vocab_size} entries"
        )
    return tokenizer.files, tokenizer.vocab_size


def _train_common_tokenizer(cfg: config.Config) -> None:
    """Trains the tokenizer of a mixture that names none, if it is missing. Raises ConfigError if a
    source is to be prepared with it that has changed since."""
    path = common_tokenizer(cfg)
    stamps_path = path.with_suffix(".json")
    stamps = {source.source: file_stamps(source.source) for source in cfg.data.sources}
    with as_config_error(path):
        if not path.exists():
            with _exclusive(path):
                if not path.exists():  # else another process trained it meanwhile
                    weights = [source.weight for source in cfg.data.sources]
                    content = train_on_sources(sources_of(cfg, None), weights)
                    _write_common(stamps_path, json.dumps(stamps))
                    _write_common(path, content)
    trained_on = files.read_json(stamps_path)
    changed = []
    for folder, source_cfg in source_folders(cfg):
        source = source_cfg.data.source
        is_changed = stamps[source] and stamps[source] != trained_on.get(source)
        if is_changed and read_manifest(folder) is None:
            # else the folder's own record tells which text has changed
            changed.append(source)
    if changed:
        raise ConfigError(
            f"{path}: {', '.join(changed)} changed since this tokenizer was trained on it; delete "
            "this file, to train it and prepare its sources anew, or name another data.path"
        )


def _write_common(path: pathlib.Path, content: bytes | str) -> None:
    """Writes a file that several processes may write at once. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{files.process_name()}.tmp")
    files.write_atomic(path, content, temporary)
