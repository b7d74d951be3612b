"""Locates a source's folder of token files, and reads its manifest.json.

A source is a folder with a manifest, or text that tools/prepare/ turns into one. Its name is
prepared/{source}-{hash of the options that determine it}/. The manifest:

    identity          these options; null if another program wrote the tokens (tools/import_tokens.py)
    files             [path, bytes, mtime] of each file of the source; of an import,
                      [path, bytes, mtime in ns, sample_hash()] of each token file
    revision          the commit of a Hugging Face dataset
    validation_files  like files, of data.validation
    tokenizer         its hash (tools/prepare/tokenizer.py)
    chat_template     its hash; only for conversations
    vocab_size        of the tokenizer
    dtype             of the ids: "uint16" or "int32"
    complete          whether all text is prepared. Only then these follow:

    token_files       for "train" and "heldout", a list of [path, dtype, tokens, bytes before the
                      first token, path of the documents' ends, id that ends documents, path of the
                      sizes of the documents' texts]. The last three may be null. Paths are relative
                      to the folder, or absolute. The dtype is any little-endian integer
    tokens            for "train" and "heldout", their number
    rows, wrong       rows that were read, and rows that data.bad_rows left out
    left_out          rows that the tokenizer turned into no token
    unknown           tokens that stand for text that the vocabulary lacks
    sha256            hash of the hashes of all token files

An import has no dtype, validation_files, tokens and left_out.
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
# sample_hash() reads this many samples of an imported file.
SAMPLES = 64
SAMPLE_BYTES = 512


def prepare_command() -> str:
    return config.command("-m", "prepare", "CONFIG")


def source_folders(data: config.Data, vocab_size: int) -> list[tuple[pathlib.Path, config.Data]]:
    """Each source's folder and options, with the tokenizer that is trained for a mixture. vocab_size:
    the model's."""
    root = pathlib.Path(data.path or "prepared")
    trained = common_tokenizer(data, vocab_size)
    folders = []
    for source in separated(data):
        if trained:
            source = replace(source, tokenizer=config.option.Path(str(trained)))
        name = re.sub("[^A-Za-z0-9._-]+", "-", source.source).strip("-.")
        folder = root / f"{name[-100:]}-{short_hash(identity(source, vocab_size))}"
        if (pathlib.Path(source.source) / MANIFEST).exists():
            folder = pathlib.Path(source.source)
        elif data.path and not data.sources:
            folder = root
        folders.append((folder, source))
    return folders


def separated(data: config.Data) -> list[config.Data]:
    """The options of each source, without the tokenizer that is trained for a mixture."""
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
    """The path of the tokenizer that is trained on all sources of a mixture, or None."""
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
    # A given tokenizer may be smaller than the model's vocabulary.
    entries["model.vocab_size"] = None if data.tokenizer else vocab_size
    if data.source == STDLIB:
        entries["python"] = platform.python_version()
    return entries | {"version": FORMAT}


def check_matches_options(folder: pathlib.Path, manifest: dict, now: dict[str, Any]) -> None:
    """Raises ConfigError naming every option that differs from those that a folder was prepared with.
    now: identity() of the source."""
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
    """Raises ConfigError if options contradict those of a prepared folder that data.source names."""
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
    """Raises ConfigError if a file has changed since it was imported: a run would resume in other
    text."""
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
    """A hash of a file's size, and of its bytes at SAMPLES places from the first to the last."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            position = max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1)
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, position))
    return digest.hexdigest()


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's manifest, or None. Raises ConfigError if it is of another version or cannot be read,
    and OSError if a retry may help."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        identity = manifest["identity"]
        version = identity["version"] if identity else FORMAT
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in system.TRANSIENT_ERRORS:
            error.filename = str(path)  # read()'s errors have no file name
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
    """Like read_manifest(), but raises ConfigError if there is no manifest."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder}: holds no prepared data; {prepare_command()} makes it")
    return manifest


def is_prepared(data: config.Data, vocab_size: int) -> bool:
    """Whether all text of all sources is prepared. Raises ConfigError and OSError."""
    manifests = [read_manifest(folder) for folder, _ in source_folders(data, vocab_size)]
    return all(manifest and manifest.get("complete") for manifest in manifests)
