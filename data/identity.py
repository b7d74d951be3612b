"""What determines prepared data: the class that reads a source, and the identity of a folder of token files."""

import hashlib
import inspect
import json
import pathlib
import platform
from dataclasses import replace
from typing import Any

import config
from config import ConfigError
from data.sources import STDLIB, Files, Source, local_files
from data.tokenizer import tokenizer_files, tokenizer_hash

# versions of the file format; part of the identity
FORMAT = 3
GROWING_FORMAT = 4  # one stream with borders


def kind_of(d: config.Data) -> type[Source]:
    """The class that reads a source. Raises ConfigError."""
    if d.source == STDLIB or local_files(d.source) is not None:
        return Files
    from data.hub_sources import Hub, HubFiles

    return HubFiles if d.order == "growing" else Hub


def open_source(d: config.Data, place: Any = None, known: dict | None = None) -> Source:
    """Opens [data] source at its beginning, or at a value of place() to resume. known: "files" and "revision" as the
    record of a folder that is prepared from it has them. Raises ConfigError if there is none."""
    kind: Any = kind_of(d)
    if kind.reads:
        return kind(d, place, known)
    return kind(d, place)


def short_hash(value: object) -> str:
    """Names a folder of prepared data by what determines it, a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def own_validation(d: config.Data) -> config.Data | None:
    """The options of the source data.validation: files or, of a Hugging Face dataset, a split. None without that
    option. Raises ConfigError."""
    if not d.validation:
        return None
    is_file = local_files(d.validation) is not None
    remote = d.source != STDLIB and local_files(d.source) is None
    if not is_file and not remote:
        raise ConfigError(
            f"[data] validation = {d.validation}: no such file, folder or pattern; a split can be "
            f"named of a Hugging Face dataset alone, and {d.source} is none"
        )
    whole = replace(d, validation=None, max_tokens=None)
    if is_file:
        return replace(whole, source=d.validation)
    return replace(whole, split=d.validation)


def identity(cfg: config.Config) -> dict:
    """Everything that determines a source's prepared files. Raises ConfigError if the tokenizer cannot be read."""
    d = cfg.data
    tokenizer = tokenizer_hash(tokenizer_files(d.tokenizer)) if d.tokenizer else "trained here"
    found = {
        "source": d.source,
        "subset": d.subset,
        "split": d.split,
        "text_field": d.text_field,
        "tokenizer": tokenizer,
        # a tokenizer file defines its vocabulary; the model may have more rows
        "vocab_size": None if d.tokenizer else cfg.model.vocab_size,
        "max_tokens": d.max_tokens,
        "format": FORMAT if d.order == "global" else GROWING_FORMAT,
    }
    if d.order != "global":
        found["order"] = d.order
    if d.validation:
        found["validation"] = d.validation
    if d.messages_field:
        from extras.chat.template import identity_of

        found |= identity_of(d)
    if d.source == STDLIB:
        found["python"] = platform.python_version()
    kind = kind_of(d)
    if not kind.reads:  # one that generates its text: its code is the content
        found["code"] = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()
    return found


def check_identity(folder: pathlib.Path, manifest: dict, cfg: config.Config) -> None:
    """Raises ConfigError naming every option in which a prepared folder differs from its source's configuration."""
    before, now = manifest["identity"], identity(cfg)

    def value(of: dict, key: str) -> str:
        return repr(of[key]) if key in of else "absent"

    # the keys of both, so that an option which only one of them has is noticed; absent counts as None
    changed = [
        f"{folder}: was prepared with {key} = {value(before, key)}, the configuration says "
        f"{value(now, key)}; delete the folder or name another data.path"
        for key in before | now
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(*changed)
