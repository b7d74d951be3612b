"""The folder of a source's token files: which one it is, its beginning, and its record.

prepared/{source}-{hash}/ is there from the beginning, with the tokenizer and a record of no text;
data/prepare.py fills it. The record is manifest.json:

    identity          the options that determine the files
    files, revision   of the source: [path, size, mtime] of each; commit of a Hugging Face dataset
    validation_files  the same of data.validation
    tokenizer         its hash: data/tokenizer.py
    vocab_size, dtype of the ids: "uint16" or "int32"
    tokens, documents by token file, "train" and "heldout": so many are synced
    position, file_start where reading goes on: [file, row]; tokens and documents before that file
    segments          SHA-256 of each segment of train.bin up to the last border
    validation        [file, first token, one past the last, SHA-256], once it is decided
    left_out          rows of which the tokenizer made nothing
    complete          true once all text is recorded
"""

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import config
import files
from config import ConfigError
from data.row_format import row_format
from data.source import STDLIB, SourceFile, list_files, local_paths
from data.tokenizer import Tokenizer, tokenizer_files, tokenizer_hash

MANIFEST = "manifest.json"
FORMAT = 5  # version of the files; part of the identity
# a source of a mixture has these options of its own, or else those of [data]
SOURCE_OPTIONS = ("subset", "split", "text_field", "max_tokens", "validation", "format")


def report(text: str, end: str = "\n") -> None:
    """Prints to stderr, and ignores that it is closed or full."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


# Names


def source_folders(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """The folder of each source, and the configuration of this source alone, which the folder is
    prepared for. Raises ConfigError if a mixture's tokenizer has not been trained yet."""
    root = pathlib.Path(cfg.data.path or "prepared")
    if not cfg.data.sources:
        return [(root if cfg.data.path else root / folder_name(cfg), cfg)]
    tokenizer = cfg.data.tokenizer or str(common_tokenizer(cfg))
    if not os.path.exists(tokenizer) and not cfg.data.tokenizer:
        raise ConfigError(
            f"{tokenizer}: no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return [(root / folder_name(each), each) for each in sources_of(cfg, tokenizer)]


def folder_name(cfg: config.Config) -> str:
    """{source}-{hash}, of one source. Raises ConfigError."""
    name = re.sub("[^A-Za-z0-9._-]+", "-", cfg.data.source).strip("-.")
    return f"{name[-100:]}-{short_hash(identity(cfg))}"


def sources_of(cfg: config.Config, tokenizer: str | None) -> list[config.Config]:
    """The configuration of each source of a mixture alone, with this tokenizer."""
    source_cfgs = []
    for source in cfg.data.sources:
        options: dict[str, Any] = {"sources": (), "path": None, "tokenizer": tokenizer}
        for name in SOURCE_OPTIONS:
            options[name] = getattr(source, name) or getattr(cfg.data, name)
        data = replace(cfg.data, source=source.source, **options)
        source_cfgs.append(replace(cfg, data=data))
    return source_cfgs


def common_tokenizer(cfg: config.Config) -> pathlib.Path:
    """The file of the tokenizer that is trained on all sources, if the mixture names none."""
    identities = [identity(source_cfg) for source_cfg in sources_of(cfg, None)]
    weights = [source.weight for source in cfg.data.sources]
    name = f"tokenizer-{short_hash([identities, weights])}.model"
    return pathlib.Path(cfg.data.path or "prepared") / name


def short_hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def source_names(cfg: config.Config) -> list[str]:
    """The names of a mixture's sources; of their folders if two sources have the same name."""
    names = [source.source for source in cfg.data.sources]
    if len(set(names)) < len(names):
        return [folder.name for folder, _ in source_folders(cfg)]
    return names


# Identity


def identity(cfg: config.Config) -> dict[str, Any]:
    """The options that determine a source's prepared files. Raises ConfigError if the tokenizer
    cannot be read."""
    d = cfg.data
    entries: dict[str, Any] = {
        "source": d.source,
        "subset": d.subset,
        "split": d.split,
        "text_field": d.text_field,
        "tokenizer": "trained here",
        "vocab_size": cfg.model.vocab_size,
        "max_tokens": d.max_tokens,
        "validation": d.validation,
        "format": FORMAT,
    }
    if d.tokenizer:
        entries["tokenizer"] = tokenizer_hash(tokenizer_files(d.tokenizer))
        entries["vocab_size"] = None  # the tokenizer's; the model may have more rows
    entries |= row_format(d).identity()
    if d.source == STDLIB:
        entries["python"] = platform.python_version()
    return entries


def check_identity(folder: pathlib.Path, manifest: dict, cfg: config.Config) -> None:
    """Raises ConfigError naming every option in which a prepared folder differs from its source's
    configuration."""
    now = identity(cfg)
    before = manifest["identity"]
    if manifest["tokenizer"] == now["tokenizer"]:
        # it was trained for this folder, and now it is named: the files are the same
        before = before | {key: now[key] for key in ("tokenizer", "vocab_size")}
    problems = []
    for key in before | now:
        if before.get(key) != now.get(key):
            problems.append(
                f"{folder}: was prepared with {key} = {before.get(key)!r}, the configuration says "
                f"{now.get(key)!r}; delete the folder or name another data.path"
            )
    if problems:
        raise ConfigError(*problems)


# The record


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's record, None if it has none. Raises ConfigError if it cannot be read; OSError if a
    retry may help."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["identity"] and manifest["tokens"]:
            return manifest
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in files.TRANSIENT_ERRORS:
            raise
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(f"{path}: is no record of prepared data; move {folder} away")


def manifest_of(folder: pathlib.Path) -> dict:
    """As read_manifest(), but raises ConfigError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"{folder}: holds no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return manifest


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    temporary = folder / f".{MANIFEST}.{files.process_name()}.tmp"
    files.write_atomic(folder / MANIFEST, json.dumps(manifest), temporary)


def is_prepared(cfg: config.Config, whole: bool = True) -> bool:
    """Whether all folders are complete, or have text to begin with. Raises ConfigError."""
    if cfg.data.sources and not cfg.data.tokenizer and not common_tokenizer(cfg).exists():
        return False
    manifests = [read_manifest(folder) or {} for folder, _ in source_folders(cfg)]
    if whole:
        return all(manifest.get("complete") for manifest in manifests)
    return all(manifest.get("segments") for manifest in manifests)


def damaged(path: pathlib.Path, problem: str) -> ConfigError:
    """The error of a file of prepared data that is not as it was written."""
    return ConfigError(f"{path}: {problem}; delete {path.parent} to prepare it again")


# Beginning


def begin_all(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """Begins the folder of each source, or checks the one that exists. Returns source_folders().
    Raises ConfigError."""
    from data.tokenizer_training import train_on_sources

    if cfg.data.sources and not cfg.data.tokenizer:
        path = common_tokenizer(cfg)
        with alone(path):
            if not path.exists():
                weights = [source.weight for source in cfg.data.sources]
                files.write_atomic(path, train_on_sources(sources_of(cfg, None), weights))
    sources = source_folders(cfg)
    for folder, source_cfg in sources:
        with alone(folder):
            manifest = read_manifest(folder)
            if manifest:
                check_identity(folder, manifest, source_cfg)
                check_source(folder, manifest, source_cfg.data)
            elif folder.exists() and any(folder.iterdir()):
                raise ConfigError(f"{folder}: is there but holds no prepared data; move it away")
            else:
                _begin(folder, source_cfg)
    return sources


@contextlib.contextmanager
def alone(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock of what is prepared at `path`, for which it waits. Raises ConfigError and
    OSError."""
    if not path.name:
        raise ConfigError(f"[data] path = {path}: is the current folder or /; name one in it")
    lock_file = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = lock_file.read_text() if lock_file.exists() else ""
    try:
        lock = files.lock(lock_file)
    except TimeoutError:
        report(f"waiting for {holder or 'another process'}, which prepares {path}")
        lock = files.lock(lock_file, timeout=-1)
    lock_file.write_text(files.process_name())
    try:
        yield
    finally:
        lock.release()


def _begin(folder: pathlib.Path, cfg: config.Config) -> None:
    """Makes a folder next to it, then renames: the folder exists with its record, or not at all.
    Raises ConfigError and OSError."""
    d = cfg.data
    source_files, revision = list_files(d)
    validation = validation_source(d)
    validation_files, _ = list_files(validation, revision) if validation else ([], None)
    tokenizer, vocab_size = _tokenizer_of(cfg)
    rows = row_format(d)
    contents = tokenizer | rows.files()
    manifest = {
        "identity": identity(cfg),
        "files": source_files,
        "revision": revision,
        "validation_files": validation_files,
        "tokenizer": tokenizer_hash(tokenizer),
        "vocab_size": vocab_size,
        "dtype": rows.dtype(vocab_size),
        "tokens": {"train": 0, "heldout": 0},
        "documents": {"train": 0, "heldout": 0},
        "position": [0, 0],
        "segments": [],
    }
    temporary = folder.with_name(f".{folder.name}.{files.process_name()}.tmp")
    temporary.mkdir(parents=True)
    for name, content in contents.items():
        files.write_atomic(temporary / name, content)
    write_manifest(temporary, manifest)
    files.publish(temporary, folder)


def _tokenizer_of(cfg: config.Config) -> tuple[dict[str, bytes], int]:
    """(the content of the files of a source's tokenizer by name, its vocabulary's size). Raises
    ConfigError."""
    from data.tokenizer_training import train_on_sources

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


def validation_source(d: config.Data) -> config.Data | None:
    """The options of the source that data.validation names: files or, of a dataset, a split. None
    without that option. Raises ConfigError."""
    if not d.validation:
        return None
    d_validation = replace(d, validation=None, max_tokens=None)
    if local_paths(d.validation, None) is not None:
        return replace(d_validation, source=d.validation)
    return replace(d_validation, split=d.validation)


def check_source(folder: pathlib.Path, manifest: dict, d: config.Data) -> None:
    """Raises ConfigError if a local source's files were changed, or files came, since the folder
    was begun. Files that were read may be gone, and what was not read yet may change; the file that
    reading stopped in is compared by whoever goes on."""
    if manifest["revision"] or not local_paths(d.source, d.split):
        return
    now, _ = list_files(d)
    sizes = {file.path: file for file in now}
    recorded = [SourceFile(*entry) for entry in manifest["files"]]
    new = sorted(sizes.keys() - {file.path for file in recorded})
    if new and len(new) < len(now):  # else all of them were moved
        raise _changed(folder, f"{new[0]} came")
    read = recorded if manifest.get("complete") else recorded[: manifest["position"][0]]
    for file in read:
        current = sizes.get(file.path, file)
        if current.size != file.size:
            raise _changed(folder, f"{file.path} was changed")
        if current.time != file.time:
            report(f"{file.path}: is newer than {folder}, and of the same size: taken as unchanged")


def _changed(folder: pathlib.Path, what: str) -> ConfigError:
    return ConfigError(
        f"{what} after {folder} was begun: restore that, delete the folder to prepare all anew, or "
        "name another data.path"
    )
