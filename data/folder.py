"""The folder of a source's token files: which one it is, and its record.

data/begin.py makes prepared/{source}-{hash}/, with the tokenizer and a record of no text;
data/prepare.py fills it. The record is manifest.json:

    identity          the options that determine the files
    files, revision   of the source: [path, bytes, mtime] of each; commit of a Hugging Face dataset
    validation_files  the same of data.validation
    tokenizer         its hash: data/tokenizer.py
    vocab_size, dtype of the ids: "uint16" or "int32"
    tokens, documents by token file, "train" and "heldout": so many are synced
    left_out          rows of which the tokenizer made nothing
    rows              [read, wrong], with data.bad_rows = "skip"; validation_rows: of data.validation
    position          [file, row]: the last row that was read
    file_start        these before the file of that row was read
    segments          SHA-256 of each segment of train.bin up to the last border
    validation        [token file, first token, one past the last, SHA-256]; null: not decided yet
    complete          whether all text is recorded
"""

import hashlib
import json
import pathlib
import platform
import re
import shlex
from dataclasses import fields, replace
from typing import Any

import config
from config import ConfigError
from data.row_format import row_format
from data.tokenizer import tokenizer_files, tokenizer_hash
from system import files, processes

MANIFEST = "manifest.json"
FORMAT = 5  # version of the files; part of the identity
STDLIB = "python-stdlib"


# Names


def prepare_command() -> str:
    return config.command("-m", "data.prepare", "CONFIG")


def source_folders(data: config.Data, vocab_size: int) -> list[tuple[pathlib.Path, config.Data]]:
    """The folder of each source, and the options of this source alone, for which the folder is
    prepared; that of token files is never made. vocab_size: of the model. Raises ConfigError if a
    mixture's tokenizer has not been trained yet."""
    if data.path and not data.sources:
        return [(pathlib.Path(data.path), data)]
    trained = common_tokenizer(data, vocab_size)
    if trained and not trained.exists():
        raise ConfigError(f"{trained}: no prepared data; {prepare_command()} makes it")
    root = pathlib.Path(data.path or "prepared")
    sources = sources_of(data, vocab_size)
    return [(root / folder_name(source, vocab_size), source) for source in sources]


def prepared_folders(data: config.Data, vocab_size: int) -> list[tuple[pathlib.Path, config.Data]]:
    """source_folders() of the sources that are prepared: all but token files."""
    sources = source_folders(data, vocab_size)
    return [(folder, source) for folder, source in sources if source.format != "tokens"]


def folder_name(data: config.Data, vocab_size: int) -> str:
    """{source}-{hash}, of one source. Raises ConfigError."""
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
    """The file of the tokenizer that is trained on all sources of a mixture. None without a
    mixture, and for one that names a tokenizer or has token files alone."""
    sources = separated(data)
    is_trained = any(source.format != "tokens" for source in sources) and not data.tokenizer
    if not (data.sources and is_trained):
        return None
    identities = [identity(source, vocab_size) for source in sources]
    weights = [source.weight for source in data.sources]
    name = f"tokenizer-{short_hash([identities, weights])}.model"
    return pathlib.Path(data.path or "prepared") / name


def short_hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# Identity


def identity(data: config.Data, vocab_size: int) -> dict[str, Any]:
    """The options that determine a source's prepared files. Raises ConfigError if the tokenizer
    cannot be read."""
    entries: dict[str, Any] = {
        "source": data.source,
        "subset": data.subset,
        "split": data.split,
        "text_field": data.text_field,
        "tokenizer": "trained here",
        "vocab_size": vocab_size,
        "max_tokens": data.max_tokens,
        "validation": data.validation,
        "format": FORMAT,
    }
    if data.tokenizer:
        entries["tokenizer"] = tokenizer_hash(tokenizer_files(data.tokenizer))
        entries["vocab_size"] = None  # the tokenizer's; the model may have more rows
    entries |= row_format(data).identity()
    if data.bad_rows != config.Data.bad_rows:
        entries["bad_rows"] = data.bad_rows
    if data.source == STDLIB:
        entries["python"] = platform.python_version()
    return entries


def beside(folder: pathlib.Path) -> str:
    """The option that prepares anew next to a folder or, of one that folder_name() names, next to
    those of all sources, for a message."""
    if re.fullmatch(r".*-[0-9a-f]{12}", folder.name) and folder.parent.name:
        folder = folder.parent
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return f"--data.path={shlex.quote(f'{folder}-{number}')}"


def check_identity(folder: pathlib.Path, manifest: dict, now: dict[str, Any]) -> None:
    """Raises ConfigError naming every option in which a prepared folder differs from its source's
    configuration. now: identity() of that."""
    before = manifest["identity"]
    if manifest["tokenizer"] == now["tokenizer"]:
        # it was trained for this folder, and now it is named: the files are the same
        before = before | {key: now[key] for key in ("tokenizer", "vocab_size")}
    problems = []
    for key in before | now:
        if before.get(key) != now.get(key):
            problems.append(
                f"{folder}: was prepared with {key} = {before.get(key)!r}, the configuration says "
                f"{now.get(key)!r}; delete the folder or name another: {beside(folder)}"
            )
    if problems:
        raise ConfigError(*problems)


# The record


def read_manifest(folder: pathlib.Path) -> dict | None:
    """A folder's record, None if it has none. Raises ConfigError if it is of another version or
    cannot be read; OSError if a retry may help."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["identity"]["format"]
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in files.TRANSIENT_ERRORS:
            error.filename = str(path)  # a read knows only its handle
            raise
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path}: is no record of prepared data; move {folder} away") from None
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


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Replaces a folder's record, a key a line. Raises OSError."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    content = "{\n" + ",\n".join(lines) + "\n}\n"
    # where locks don't exist, another process may write it at the same time
    temporary = folder / f".{MANIFEST}.{processes.process_name()}.tmp"
    files.write_atomic(folder / MANIFEST, content, temporary)


def is_prepared(data: config.Data, vocab_size: int) -> bool:
    """Whether all text of all sources is recorded. Raises ConfigError and OSError."""
    trained = common_tokenizer(data, vocab_size)
    if trained and not trained.exists():
        return False
    folders = [folder for folder, _ in prepared_folders(data, vocab_size)]
    return all((read_manifest(folder) or {}).get("complete") for folder in folders)
