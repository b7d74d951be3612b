"""Locates a source's folder of token files, and reads its manifest.json.

A source is a folder that has a manifest, or text that tools/prepare/ makes into one, named
prepared/{source}-{hash of the options that determine it}/. The manifest:

    identity          these options; null: another program wrote the tokens (tools/import_tokens.py)
    files, revision   of the source: [path, bytes, mtime] of each; commit of a Hugging Face dataset.
                      Imported ones: [path, bytes, mtime in ns, sample_hash()] of each token file
    validation_files  the same of data.validation
    tokenizer         its hash (tools/prepare/tokenizer.py); chat_template: that of conversations
    vocab_size, dtype of the ids: "uint16" or "int32"
    complete          whether all text is prepared, and the manifest final:

    token_files       of "train" and "heldout", in order: [path, dtype, tokens, bytes before the
                      first, path of the documents' ends, id that ends documents, path of the
                      bytes of the documents' texts] of each; the last three may be null. Paths are
                      relative to the folder, or absolute; dtypes little-endian, of any integers
    tokens            of "train" and "heldout"
    rows, wrong       rows that were read, and those that data.bad_rows left out
    left_out          rows of which the tokenizer made no token
    unknown           tokens that stand for what the vocabulary lacks
    sha256            of the hashes of all token files: tells the tokens from others

An import has no dtype of its own, validation_files, tokens, left_out.
"""

import hashlib
import json
import os
import pathlib
import platform
import re
from dataclasses import fields, replace
from typing import Any

import config
import system
from config import ConfigError

MANIFEST = "manifest.json"
FORMAT = 8  # version of the files; part of the identity
STDLIB = "python-stdlib"
SAMPLES = 64  # of an imported file, of so many bytes each
SAMPLE_BYTES = 512


def prepare_command() -> str:
    return config.command("-m", "prepare", "CONFIG")


def source_folders(data: config.Data, vocab_size: int) -> list[tuple[pathlib.Path, config.Data]]:
    """The folder of each source, and the options of this source alone. vocab_size: of the model."""
    root = pathlib.Path(data.path or "prepared")
    folders = []
    for source in sources_of(data, vocab_size):
        folder = root / folder_name(source, vocab_size)
        if (pathlib.Path(source.source) / MANIFEST).exists():
            folder = pathlib.Path(source.source)
        elif data.path and not data.sources:
            folder = root
        folders.append((folder, source))
    return folders


def folder_name(data: config.Data, vocab_size: int) -> str:
    """{source}-{hash}, of one source."""
    name = re.sub("[^A-Za-z0-9._-]+", "-", data.source).strip("-.")
    return f"{name[-100:]}-{short_hash(identity(data, vocab_size))}"


def sources_of(data: config.Data, vocab_size: int) -> list[config.Data]:
    """The options of each source alone. Those of a mixture share a tokenizer."""
    trained = common_tokenizer(data, vocab_size)
    sources = separated(data)
    if trained:
        sources = [
            replace(source, tokenizer=config.option.Path(str(trained))) for source in sources
        ]
    return sources


def separated(data: config.Data) -> list[config.Data]:
    """The options of each source alone, as they are given: without the tokenizer that is trained
    for a mixture."""
    if not data.sources:
        return [data]
    sources = []
    for entry in data.sources:
        options: dict[str, Any] = {"sources": (), "path": None}
        for field in fields(entry):
            if field.name != "weight":
                options[field.name] = getattr(entry, field.name) or getattr(data, field.name)
        sources.append(replace(data, **options))
    return sources


def common_tokenizer(data: config.Data, vocab_size: int) -> pathlib.Path | None:
    """The file of the tokenizer that is trained on all sources of a mixture; None without one."""
    if not data.sources or data.tokenizer:
        return None
    identities = [identity(source, vocab_size) for source in separated(data)]
    weights = [source.weight for source in data.sources]
    name = f"tokenizer-{short_hash([identities, weights])}.model"
    return pathlib.Path(data.path or "prepared") / name


def short_hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def identity(data: config.Data, vocab_size: int) -> dict[str, Any]:
    """The options that determine a source's prepared files."""
    names = ["source", "subset", "split", "text_field", "tokenizer", "max_tokens", "validation"]
    if data.has_conversations:
        names += ["format", "messages_field", "chat_template"]
    entries = {f"data.{name}": getattr(data, name) for name in names}
    # with a tokenizer of its own, the model may have more rows
    entries["model.vocab_size"] = None if data.tokenizer else vocab_size
    if data.source == STDLIB:
        entries["python"] = platform.python_version()
    return entries | {"version": FORMAT}


def check_matches_options(folder: pathlib.Path, manifest: dict, now: dict[str, Any]) -> None:
    """Raises ConfigError naming every option in which a prepared folder differs from its source's
    configuration. now: identity() of that."""
    before = manifest["identity"]
    if before is None:
        check_imported(folder, manifest)
    if before is None or pathlib.Path(now["data.source"]) == folder:
        check_named(folder, manifest, now)
        return
    problems = []
    for key in before | now:
        if before.get(key) != now.get(key):
            problems.append(
                f"{folder}: was prepared with {key} = {before.get(key)!r}, the configuration says "
                f"{now.get(key)!r}; delete the folder or name another, data.path"
            )
    if problems:
        raise ConfigError(*problems)


def check_named(folder: pathlib.Path, manifest: dict, now: dict[str, Any]) -> None:
    """Raises ConfigError if options contradict how a prepared folder, named as data.source, was made."""
    before = manifest["identity"] or {}
    tokens = sum(length for _path, _dtype, length, *_ in manifest["token_files"]["train"])
    for name in ("max_tokens", "validation", "format", "messages_field"):
        value = now.get(f"data.{name}")
        if name == "max_tokens" and value and value >= tokens:
            continue
        if value and value != before.get(f"data.{name}"):
            raise ConfigError(
                f"[data] {name} = {value}: has no effect on {folder}, which is prepared already"
            )
    if "data.format" in before and "data.format" not in now:
        raise ConfigError(
            f"[data] source = {folder}: holds conversations, so write as it was prepared with: "
            f'data.format = "{before["data.format"]}"'
        )


def check_imported(folder: pathlib.Path, manifest: dict) -> None:
    """Raises ConfigError if a file was written anew since it was imported: a run would resume in
    other text."""
    for path, size, mtime, sample in manifest["files"]:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise ConfigError(f"{path}: is missing, and {folder} names it") from None
        is_untouched = (status.st_size, status.st_mtime_ns) == (size, mtime)
        if not is_untouched and sample_hash(path) != sample:
            raise ConfigError(
                f"{path}: was written anew since {folder} was made: import the files again, into "
                "another folder"
            )


def sample_hash(path: str | pathlib.Path) -> str:
    """Of a file's size, and of its bytes in SAMPLES places from the first to the last."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            position = max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1)
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, position))
    return digest.hexdigest()


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's manifest, None if it has none. Raises ConfigError if it is of another version or
    cannot be read; OSError if a retry may help."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        identity = manifest["identity"]
        version = identity["version"] if identity else FORMAT
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in system.TRANSIENT_ERRORS:
            error.filename = str(path)  # a read knows only its handle
            raise
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path}: is no manifest of prepared data; move {folder} away") from None
    if version != FORMAT:
        raise ConfigError(
            f"{folder}: was prepared by another version, in format {version}, and this one reads "
            f"{FORMAT}; delete the folder or name another data.path"
        )
    return manifest


def manifest_of(folder: pathlib.Path) -> dict:
    """As read_manifest(), but raises ConfigError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder}: holds no prepared data; {prepare_command()} makes it")
    return manifest


def is_complete(folder: pathlib.Path) -> bool:
    """Whether all text of a source is prepared. Raises ConfigError and OSError."""
    return bool((read_manifest(folder) or {}).get("complete"))


def is_prepared(data: config.Data, vocab_size: int) -> bool:
    """is_complete() of all sources."""
    return all(is_complete(folder) for folder, _ in source_folders(data, vocab_size))
