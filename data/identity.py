"""What determines prepared data: the class that reads a source, and the identity of a folder."""

import hashlib
import inspect
import json
import pathlib
import platform
from dataclasses import replace
from typing import Any

import config
from config import ConfigError
from data.hub_sources import Hub, HubFiles
from data.local_files import STDLIB, has_saved_splits, local_files
from data.sources import Files, Source
from data.tokenizer import tokenizer_files, tokenizer_hash

# versions of the file format; part of the identity
FORMAT = 3
GROWING_FORMAT = 4  # one stream with borders
# The code of any other source belongs to its data's identity. These read text that is stored
# elsewhere: a change of the reader changes no text.
READERS = (Files, Hub, HubFiles)


def kind_of(d: config.Data) -> type[Source]:
    """The class that reads a source. Raises ConfigError."""
    if d.source == STDLIB or local_files(d.source) is not None:
        return Files
    return HubFiles if d.order == "growing" else Hub


def reads_hub(d: config.Data) -> bool:
    """Whether a source is a dataset of the Hugging Face hub. Raises ConfigError."""
    return issubclass(kind_of(d), (Hub, HubFiles))


def open_source(d: config.Data, state: Any = None, record: dict | None = None) -> Source:
    """Opens [data] source, with the arguments of Source. Raises ConfigError if it does not
    exist."""
    return kind_of(d)(d, state, record)


def open_recorded(d: config.Data, manifest: dict, prefix: str = "") -> Source:
    """Opens a source where a folder's record ends. prefix: of its entries in the manifest. Raises
    ConfigError."""
    record = {
        "files": manifest.get(f"{prefix}files"),
        "revision": manifest.get("revision"),
    }
    was_local = record["files"] and not record["revision"]
    if was_local and kind_of(d) is not Files:
        raise ConfigError(
            f"[data] source = {d.source}: is not here, and was not read to its end; a relative path "
            f"is one of the folder that the command is started in, {pathlib.Path.cwd()}"
        )
    return open_source(d, manifest.get(f"{prefix}place"), record)


def short_hash(value: object) -> str:
    """Names a folder of prepared data by what determines it, a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def validation_source(d: config.Data) -> config.Data | None:
    """The options of the source that data.validation names: files or, of a Hugging Face dataset, a
    split. None without that option. It may be gone, if it was read before. Raises ConfigError."""
    if not d.validation:
        return None
    all_of_it = replace(d, validation=None, max_tokens=None)
    if local_files(d.validation) is None and _has_splits(d):
        return replace(all_of_it, split=d.validation)
    return replace(all_of_it, source=d.validation)


def check_validation(d: config.Data) -> None:
    """Raises ConfigError if data.validation names nothing that is there. (Of a dataset on the hub
    its source does, when it is opened.)"""
    if d.validation and local_files(d.validation) is None and not _has_splits(d):
        raise ConfigError(
            f"[data] validation = {d.validation}: no such file, folder or pattern; a split can be "
            f"named of a Hugging Face dataset alone, and {d.source} is none"
        )


def _has_splits(d: config.Data) -> bool:
    """Whether a source is a Hugging Face dataset, on the hub or saved. Raises ConfigError."""
    return has_saved_splits(d.source) or reads_hub(d)


def identity(cfg: config.Config) -> dict:
    """Everything that determines a source's prepared files. Raises ConfigError if the tokenizer
    cannot be read."""
    d = cfg.data
    if d.tokenizer:
        tokenizer = tokenizer_hash(tokenizer_files(d.tokenizer))
        vocab_size = None  # the tokenizer's; the model may have more rows
    else:
        tokenizer = "trained here"
        vocab_size = cfg.model.vocab_size
    # options that came later have a key only where they are set, so that older folders stay valid
    entries: dict[str, Any] = {
        "source": d.source,
        "subset": d.subset,
        "split": d.split,
        "text_field": d.text_field,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "max_tokens": d.max_tokens,
        "format": FORMAT if d.order == "global" else GROWING_FORMAT,
    }
    if d.order != "global":
        entries["order"] = d.order
    if d.validation:
        entries["validation"] = d.validation
    if d.has_conversations:
        from extras.chat.template import identity_of

        entries |= identity_of(d)
    if d.source == STDLIB:
        entries["python"] = platform.python_version()
    kind = kind_of(d)
    if kind not in READERS:
        entries["code"] = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()
    return entries


def check_identity(folder: pathlib.Path, manifest: dict, cfg: config.Config) -> None:
    """Raises ConfigError naming every option in which a prepared folder differs from its source's
    configuration."""
    before = manifest["identity"]
    now = identity(cfg)
    if manifest.get("tokenizer") == now["tokenizer"]:
        # it was trained for this folder, and now it is named: the files are the same
        before = before | {key: now[key] for key in ("tokenizer", "vocab_size")}
    problems = []
    # the keys of both: an option may be in one of them only; absent counts as None
    for key in before | now:
        if before.get(key) != now.get(key):
            problems.append(
                f"{folder}: was prepared with {key} = {_shown(before, key)}, the configuration "
                f"says {_shown(now, key)}; delete the folder or name another data.path"
            )
    if problems:
        raise ConfigError(*problems)


def _shown(entries: dict, key: str) -> str:
    """An entry of an identity, for messages."""
    return repr(entries[key]) if key in entries else "absent"
