"""Creates a source's folder, with its list of files, its tokenizer and a manifest without text.

Checks an existing folder against the configuration and the source's files.
"""

import contextlib
import glob
import json
import os
import pathlib
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace

import config
import system
from config import ConfigError
from data.folder import (
    MANIFEST,
    STDLIB,
    check_matches_options,
    common_tokenizer,
    identity,
    manifest_of,
    read_manifest,
    separated,
    source_folders,
)
from tools.prepare.formats import row_format
from tools.prepare.parts import temporary
from tools.prepare.source import (
    HUB,
    SourceFile,
    check_first_row,
    is_dataset,
    list_files,
    local_files,
)
from tools.prepare.tokenizer import Tokenizer, tokenizer_files, tokenizer_hash
from tools.prepare.tokenizer_training import train_on_sources

RARE = "\U00010330"  # a Gothic letter, absent from the training text of every vocabulary


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Replaces a folder's manifest, with one key per line. Raises OSError."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    content = "{\n" + ",\n".join(lines) + "\n}\n"
    # on a file system without locks, another process may write it at the same time
    system.write_atomic(folder / MANIFEST, content, temporary(folder / MANIFEST))


def beside(folder: pathlib.Path) -> str:
    """An unused --data.path, for messages that suggest preparing the data again."""
    if re.fullmatch(r".*-[0-9a-f]{12}", folder.name) and folder.parent.name:
        folder = folder.parent
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return f"--data.path={shlex.quote(f'{folder}-{number}')}"


def create_folders(data: config.Data, vocab_size: int) -> list[tuple[pathlib.Path, config.Data]]:
    """Creates the folder of each source, or checks an existing one. Returns source_folders().

    vocab_size is the model's. Raises ConfigError and OSError.
    """
    sources = source_folders(data, vocab_size)
    local = [local_splits(folder, source) for folder, source in sources]
    refuse_overlaps(local)
    path = common_tokenizer(data, vocab_size)
    if path and not path.exists():
        with locked(path):
            if not path.exists():
                for source in separated(data):
                    check_first_row(source, list_files(source)[0])
                weights = [source.weight for source in data.sources]
                model = train_on_sources(separated(data), weights, vocab_size)
                system.write_atomic(path, model)
    for (folder, source), files_now in zip(sources, local):
        if not read_manifest(folder):  # an existing folder may be on a read-only disk: don't lock
            with locked(folder):
                if not read_manifest(folder):
                    create(folder, source, vocab_size)
        manifest = manifest_of(folder)
        if manifest["identity"]:  # import_tokens or another program writes none
            check_matches_options(folder, manifest, identity(source, vocab_size))
            check_contents(folder, manifest, source)
            check_files(folder, manifest, files_now)
    return sources


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Waits for the lock on `path`, then holds it. Raises ConfigError and OSError."""
    if not path.name:
        raise ConfigError(f"[data] path = {path}: is the current folder or /; name one in it")
    lock_file = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = system.lock(lock_file)
    except TimeoutError:
        holder = lock_file.read_text() or "another process"
        system.print_error(f"waiting for {holder}, which prepares {path}")
        lock = system.lock(lock_file, timeout=-1)
    try:
        lock_file.write_text(system.process_name())
        yield
    finally:
        lock.release()


def create(folder: pathlib.Path, data: config.Data, vocab_size: int) -> None:
    """Creates a source's folder under a temporary name, then renames it. So the folder exists with
    its manifest, or not at all. Raises ConfigError and OSError."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: exists but holds no prepared data; move it away")
    if folder.resolve().is_relative_to(pathlib.Path(data.source).resolve()):
        raise ConfigError(
            f"[data] path: {folder} lies in data.source = {data.source}, whose files it would join; "
            "name a folder outside"
        )
    source_files, revision = list_files(data)
    validation_files = _validation_files(data, revision)
    check_first_row(data, source_files)
    check_first_row(data, validation_files)
    contents, entries = _tokenizer_of(data, vocab_size)
    manifest = {
        "identity": identity(data, vocab_size),
        "revision": revision,
        "tokenizer": tokenizer_hash(contents),
        "vocab_size": entries,
        "dtype": row_format(data).dtype(entries),
        "complete": False,
        "validation_files": validation_files,
        "files": source_files,
    }
    manifest |= row_format(data).identity()
    for killed in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        shutil.rmtree(killed, ignore_errors=True)
    created = temporary(folder)
    created.mkdir()
    for name, content in (contents | row_format(data).files()).items():
        system.write_atomic(created / name, content)
    write_manifest(created, manifest)
    try:
        system.publish(created, folder)
    except OSError:
        if not read_manifest(folder):  # without locks, another process may have created it
            raise


def _tokenizer_of(data: config.Data, vocab_size: int) -> tuple[dict[str, bytes], int]:
    """Loads or trains a source's tokenizer. Returns (its files' bytes by name, its vocabulary
    size). vocab_size is the model's. Raises ConfigError."""
    name = data.tokenizer
    if not name:
        return {"tokenizer.model": train_on_sources([data], [1.0], vocab_size)}, vocab_size
    tokenizer = Tokenizer(name)
    if not tokenizer.eos:
        system.print_error(
            f"warning: {name}: has no EOS token that is known, so nothing separates documents; name it "
            'in tokenizer_config.json beside it: {"eos_token": "..."}'
        )
    if not tokenizer.encode([RARE])[0]:
        system.print_error(f"{name}: silently drops characters that are not in its vocabulary")
    tokenizer.require_size(vocab_size)
    return tokenizer.files, tokenizer.vocab_size


def validation_source(data: config.Data) -> config.Data | None:
    """The options of the source that data.validation names; None without that option.

    data.validation names files, or a split of a Hugging Face dataset. Raises ConfigError.
    """
    if not data.validation:
        return None
    validation = replace(data, validation=None, max_tokens=None)
    if is_dataset(data.validation):
        return replace(validation, split=data.validation)
    return replace(validation, source=data.validation)


def _validation_files(data: config.Data, revision: str | None) -> list[SourceFile]:
    """The files that data.validation names. Raises ConfigError."""
    validation = validation_source(data)
    if validation is None:
        return []
    assert data.validation
    if is_dataset(data.validation) and not is_dataset(data.source):
        raise ConfigError(
            f"[data] validation = {data.validation}: no such file, folder or pattern; a Hugging Face "
            "dataset alone has splits"
        )
    return list_files(validation, revision)[0]


# Compare a folder with its source


def check_contents(folder: pathlib.Path, manifest: dict, data: config.Data) -> None:
    """Raises ConfigError if the tokenizer or the chat template changed after the folder was
    created."""
    now = row_format(data).identity()
    if data.tokenizer:
        now["tokenizer"] = tokenizer_hash(tokenizer_files(data.tokenizer))
    for key, digest in now.items():
        if manifest[key] != digest:
            raise _changed(folder, f"the {key} of {data.tokenizer} was changed")


def local_splits(folder: pathlib.Path, data: config.Data) -> dict[str, list[SourceFile]]:
    """The current local files of a source, by split. Raises ConfigError."""
    splits = {}
    for split, name in {"train": data.source, "heldout": data.validation}.items():
        if name and name != STDLIB and pathlib.Path(name) != folder:
            splits[split] = local_files(name) or []
    return splits


def refuse_overlaps(sources: list[dict[str, list[SourceFile]]]) -> None:
    """Raises ConfigError if training would read a file twice, or a file of the validation text.

    sources: local_splits() of each source.
    """
    if sum(map(len, sources)) < 2:
        return
    readers: dict[str, tuple[int, str]] = {}
    for number, splits in enumerate(sources):
        for split, entries in splits.items():
            for file in entries:
                path = os.path.realpath(file.path)
                other = readers.setdefault(path, (number, split))
                if other != (number, split) and "train" in (other[1], split):
                    in_both = "data.source and data.validation"
                    if split == other[1]:
                        in_both = f"sources {other[0] + 1} and {number + 1} of data.sources"
                    raise ConfigError(f"{path}: is in {in_both}; leave it out of one of them")


def check_files(
    folder: pathlib.Path, manifest: dict, files_now: dict[str, list[SourceFile]]
) -> None:
    """Raises ConfigError if local files of the source were added or removed.

    Also raises it if a complete folder's files changed in size. (While a folder is incomplete, the
    parts of a changed file are prepared again.) Warns if only modification times changed, and if
    all files are gone. files_now: local_splits().
    """
    for split, entries in files_now.items():
        before = {}
        for entry in manifest["files" if split == "train" else "validation_files"]:
            file = SourceFile(*entry)
            before[file.path] = file
        now = {file.path: file for file in entries}
        if not now:
            if not any(path.startswith(HUB) for path in before):
                system.warn_once(
                    f"{folder}: the files of its {split} text are gone: it is used as it is"
                )
            continue
        for path in sorted(before.keys() ^ now.keys()):
            raise _changed(folder, f"{path} was {'added' if path in now else 'removed'}")
        if not manifest["complete"]:
            continue
        touched = [path for path in before if now[path].time != before[path].time]
        for path in touched:
            if now[path].size != before[path].size:
                raise _changed(folder, f"{path} was changed")
        if touched:
            system.warn_once(
                f"{len(touched)} of {len(before)} files were written anew at equal sizes after {folder} "
                f"was prepared, {touched[0]} for one; the text of before is used; to prepare anew: "
                f"{beside(folder)}"
            )


def _changed(folder: pathlib.Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{problem} after {folder} was created: restore the source, or prepare it anew: "
        f"{beside(folder)}"
    )
