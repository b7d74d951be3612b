"""Folders of token files: begun with a tokenizer and a record of no text, found again, and checked."""

import contextlib
import functools
import glob
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence

import config
import files
from config import ConfigError
from data.console import report
from data.identity import check_identity, identity, open_source, short_hash, validation_source
from data.record import MANIFEST, damaged, is_complete, read_manifest, write_manifest
from data.sources import Files, FilesState, file_stamps, local_files
from data.tokenizer import Tokenizer, tokenizer_hash, train_tokenizer

# that another process may take to train a tokenizer: then it is not waited for
BEGIN_SECONDS = 900.0


def prepared_parts(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """The folder of each source, and the configuration that it is prepared for. Raises ConfigError if a mixture's
    tokenizer has not been trained yet."""
    root, parts = pathlib.Path(cfg.data.path or "prepared"), [cfg]
    if cfg.data.sources:
        from data.mixture import prepared_sources

        parts = prepared_sources(cfg)
    elif cfg.data.path:
        return [(root, cfg)]
    return [
        (
            root / f"{re.sub('[^A-Za-z0-9._-]+', '-', part.data.source).strip('-.')[-100:]}-"
            f"{short_hash(identity(part))}",
            part,
        )
        for part in parts
    ]


def data_folders(cfg: config.Config) -> list[pathlib.Path]:
    return [folder for folder, _ in prepared_parts(cfg)]


def is_prepared(cfg: config.Config) -> bool:
    """Whether all folders are complete, even if for another configuration. Raises ConfigError."""
    return is_tokenizer_there(cfg) and all(
        is_complete(read_manifest(folder)) for folder in data_folders(cfg)
    )


def is_tokenizer_there(cfg: config.Config) -> bool:
    """Whether the folders' names are known: a mixture's tokenizer, which is part of them, may have to be trained."""
    if not cfg.data.sources:
        return True
    from data.mixture import has_tokenizer

    return has_tokenizer(cfg)


def source_names(cfg: config.Config) -> list[str]:
    """The names of a mixture's sources; the names of their folders if two sources have the same name."""
    names = [s.source for s in cfg.data.sources]
    return names if len(set(names)) == len(names) else [folder.name for folder in data_folders(cfg)]


def begin_all(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """Begins the folder of each source, or checks the one that is there. Returns them, and what each is prepared for.
    Raises ConfigError."""
    if cfg.data.sources and not cfg.data.tokenizer:
        _train_common_tokenizer(cfg)
    parts = prepared_parts(cfg)
    for folder, part in parts:
        with as_config_error(folder):
            under_lock(
                folder,
                functools.partial(_is_begun, folder, part),
                functools.partial(_begin, folder, part),
            )
    return parts


def begin_on_this_machine(cfg: config.Config) -> None:
    """Begins missing folders: of a machine with a disk of its own, the launcher has not. By its first rank. Raises
    ConfigError."""
    from parallel.ranks import rank_and_size

    if rank_and_size()[1] != 0:
        return
    if not (is_tokenizer_there(cfg) and all(map(read_manifest, data_folders(cfg)))):
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
    """The lock file next to what is prepared: hidden, and never removed."""
    if not path.name:
        raise ConfigError(f"[data] path = {path}: is the current folder or /; name one in it")
    return path.with_name(f".{path.name}.lock")


def under_lock(path: pathlib.Path, made: Callable[[], bool], make: Callable[[], None]) -> None:
    """make() unless made(), with the lock of `path`. Raises ConfigError and OSError."""
    lock = lock_of(path)
    if made():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(files.lock(lock).release)
        except TimeoutError:
            report(f"waiting for another process that prepares {path}")
            try:
                stack.callback(files.lock(lock, timeout=BEGIN_SECONDS).release)
            except TimeoutError:  # it is stopped, perhaps
                report(f"{lock}: held for {BEGIN_SECONDS:.0f} s: preparing {path} too")
        if not made():  # else another process made it meanwhile
            make()


def _is_begun(folder: pathlib.Path, cfg: config.Config) -> bool:
    """Raises ConfigError if the folder is for another configuration or, complete, was changed."""
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
    for source, prefix in ((d, ""), (validation_source(d), "validation_")):
        recorded = manifest.get(f"{prefix}files")
        if not (source and recorded and local_files(source.source)):
            continue
        known = {"files": [[*entry, ""][:4] for entry in recorded]}
        end = FilesState(file=len(recorded))
        reader = Files(source, manifest.get(f"{prefix}place") or end, known)
        reader.compare_with_text(folder)
        manifest[f"{prefix}files"] = reader.files
    if json.dumps(manifest) != before:  # copied, and found equal
        with contextlib.suppress(OSError):  # of a disk that can only be read
            write_manifest(folder, manifest, indent=2)


def _check_hashes(folder: pathlib.Path, manifest: dict) -> None:
    """Raises ConfigError if a file is missing, or newer than the manifest and not what this says."""
    written_last = folder / MANIFEST
    for name, digest in manifest["sha256"].items():
        path = folder / name
        if not path.exists():
            raise damaged(path, "is missing")
        # Hashes only files newer than the manifest: hashing terabytes before each start would stall a cluster.
        if path.stat().st_mtime_ns > written_last.stat().st_mtime_ns:
            report(f"{path}: was copied or changed since it was prepared; comparing its hash")
            if sha256_of(path) != digest:
                raise damaged(path, "was changed since it was prepared")
            report(f"{path}: is unchanged; `touch {written_last}` spares this the next time")


def sha256_of(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _begin(folder: pathlib.Path, cfg: config.Config) -> None:
    """Makes a folder: beside it, then renamed, so that it is there with its record, or not at all."""
    sweep(folder)
    temporary = folder.with_name(f".{folder.name}.{files.process_name()}.tmp")
    contents, vocab_size = _tokenizer_of(cfg)
    manifest = _first_record(cfg, tokenizer_hash(contents), vocab_size)
    if cfg.data.messages_field:
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
            # else another process was faster, where there are no locks
            raise
        _is_begun(folder, cfg)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _first_record(cfg: config.Config, tokenizer: str, vocab_size: int) -> dict:
    """The manifest of a folder without text. tokenizer: its hash. Raises ConfigError."""
    source = open_source(cfg.data)
    is_wide = vocab_size > 1 << 16 or cfg.data.messages_field  # a sign stands for no loss
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
    }


def sweep(folder: pathlib.Path) -> None:
    """Removes what killed processes of this machine left of a folder, and of a preparation of earlier versions."""
    former = folder.with_name(f".{folder.name}.tmp")
    beginnings = f".{folder.name}.{platform.node()}-"
    records = f".{MANIFEST}.{platform.node()}-"
    left = [(former, "")]
    left += [(path, beginnings) for path in folder.parent.glob(f"{glob.escape(beginnings)}*.tmp")]
    left += [(path, records) for path in folder.glob(f"{glob.escape(records)}*.tmp")]
    for path, prefix in left:
        number = path.name.removeprefix(prefix).removesuffix(".tmp")
        if path == former or not _is_alive(number):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_alive(number: str) -> bool:
    """Whether a process of this machine has this number."""
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    except OSError:  # another user's
        return True
    return True


# Tokenizers


def _tokenizer_of(cfg: config.Config) -> tuple[dict[str, bytes], int]:
    """(the content of the files of a source's tokenizer by name, its vocabulary's size). Raises ConfigError."""
    name, rows = cfg.data.tokenizer, cfg.model.vocab_size
    if not name:
        return {"tokenizer.model": _train_tokenizer([cfg])}, rows
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
    """Trains the tokenizer of a mixture that names none, if it is missing. Raises ConfigError if a source is to be
    prepared with it that has changed since."""
    from data.mixture import common_tokenizer, sources_of

    path = common_tokenizer(cfg)
    stamps = path.with_suffix(".json")
    now = {source.source: file_stamps(source.source) for source in cfg.data.sources}

    def make() -> None:
        content = _train_tokenizer(sources_of(cfg, None), [s.weight for s in cfg.data.sources])
        for target, text in ((stamps, json.dumps(now)), (path, content)):
            temporary = target.with_name(f".{target.name}.{files.process_name()}.tmp")
            files.write_atomic(target, text, temporary)

    with as_config_error(path):
        under_lock(path, path.exists, make)
    before = files.read_json(stamps)
    changed = [
        part.data.source
        for folder, part in prepared_parts(cfg)
        if now[part.data.source]
        and now[part.data.source] != before.get(part.data.source)
        and read_manifest(folder) is None  # else its own record tells which text has changed
    ]
    if changed:
        raise ConfigError(
            f"{path}: {', '.join(changed)} changed since this tokenizer was trained on it; delete "
            "this file, to train it and prepare its sources anew, or name another data.path"
        )


def _train_tokenizer(parts: list[config.Config], weights: Sequence[float] = (1.0,)) -> bytes:
    """Trains on the start of each source, in proportion to its weight: 2,000 characters per vocabulary entry, at least
    4 million; more text hardly changes a BPE vocabulary. 800 if training waits for it. Returns the model file's
    content. Raises ConfigError."""
    size = parts[0].model.vocab_size
    characters = max(4_000_000, size * (800 if parts[0].data.order == "growing" else 2_000))
    names = ", ".join(part.data.source for part in parts)
    report(
        f"training a tokenizer of {size:,} vocabulary entries on up to {characters / 1e6:,.0f} MB "
        f"of {names}"
    )

    def sample() -> Iterator[str]:
        for part, weight in zip(parts, weights):
            read = 0
            for text in open_source(part.data):
                yield text
                read += len(text)
                if read >= characters * (weight / sum(weights)):
                    break

    return train_tokenizer(sample(), size)
