"""The prepared data of a configuration: which folders hold it, and whether they were prepared for it."""

import hashlib
import inspect
import pathlib
import platform
import re
from dataclasses import dataclass
from typing import Any

import config
from config import ConfigError
from data.order import make_order
from data.sources import STDLIB, Files, Source, local_files
from data.tokenizer import tokenizer_files
from data.tokens import manifest_of, open_stream, read_manifest, short_hash

FORMAT = 3  # version of the file format; part of the identity


def kind_of(source: str) -> type[Source]:
    """The class that reads a source. Raises ConfigError."""
    if source == STDLIB or local_files(source) is not None:
        return Files
    if problem := config.lack_of("data/hub.py"):
        raise ConfigError(f"[data] source = {source}: {problem}")
    from data.hub import Hub

    return Hub


def open_source(d: config.Data, place: list | None = None) -> Source:
    """Opens [data] source at its beginning, or at a value of place() to resume. Raises ConfigError if there is none."""
    if d.order == "growing":
        from data.pieces import Pieces

        return Pieces(d)
    if d.messages_field:
        from data.chat import Conversations

        return Conversations(open_source, d, place)
    return kind_of(d.source)(d, place)


def identity(cfg: config.Config) -> dict:
    """Everything that determines a source's prepared files. Raises ConfigError if the tokenizer cannot be read."""
    d = cfg.data
    content = b"".join(tokenizer_files(d.tokenizer).values()) if d.tokenizer else b""
    found = {
        "source": d.source,
        "subset": d.subset,
        "split": d.split,
        "text_field": d.text_field,
        "tokenizer": hashlib.sha256(content).hexdigest() if d.tokenizer else "trained here",
        # a tokenizer file defines its vocabulary; the model may have more rows
        "vocab_size": None if d.tokenizer else cfg.model.vocab_size,
        "max_tokens": d.max_tokens,
        "format": FORMAT,
    }
    if d.order != "global":
        found["order"] = d.order
    if d.messages_field:
        from data.template import identity_of

        found |= identity_of(d)
    if d.source == STDLIB:
        found["python"] = platform.python_version()
    if not (
        kind := kind_of(d.source)
    ).reads:  # one that generates its text: its code is the content
        found["code"] = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()
    return found


def check_identity(folder: pathlib.Path, manifest: dict, cfg: config.Config) -> None:
    """Raises ConfigError naming every option in which a prepared folder differs from its source's configuration."""
    before, now = manifest["identity"], identity(cfg)

    def value(of: dict, key: str) -> str:
        return repr(of[key]) if key in of else "absent"

    # of both: data prepared with an option on is not that of a configuration without it. Absent counts as None.
    changed = [
        f"{folder}: was prepared with {key} = {value(before, key)}, the configuration says {value(now, key)}; "
        "delete the folder or name another data.path"
        for key in before | now
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(*changed)


def prepared_parts(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """The folder of each source, and the configuration that it is prepared for. Raises ConfigError if a mixture's
    tokenizer has not been trained yet."""
    root, parts = pathlib.Path(cfg.data.path or "prepared"), [cfg]
    if cfg.data.sources:
        from data.mixture import prepared_sources

        parts = prepared_sources(cfg, identity)
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
    """Whether all folders are prepared, even if for another configuration. Raises ConfigError."""
    if cfg.data.sources:
        from data.mixture import has_tokenizer

        if not has_tokenizer(cfg, identity):
            return False
    return all(read_manifest(folder) for folder in data_folders(cfg))


def open_data(cfg: config.Config, split: str) -> list[Any]:
    """The TokenStream of each source, or its conversations (data/packing.py: Packed), or its parts (data/growing.py).
    Raises ConfigError if one is not prepared, or for another configuration."""
    parts = prepared_parts(cfg)
    for folder, part in parts:
        check_identity(folder, manifest_of(folder), part)
    if cfg.data.order == "growing":
        from data.growing import open_parts

        return open_parts(parts, split, cfg)
    if cfg.data.messages_field:
        from data.packing import open_packed

        return [open_packed(folder, split, cfg) for folder, _ in parts]
    return [open_stream(folder, split, cfg.model.vocab_size) for folder, _ in parts]


def source_names(cfg: config.Config) -> list[str]:
    """The names of a mixture's sources; the names of their folders if two sources have the same name."""
    names = [s.source for s in cfg.data.sources]
    return names if len(set(names)) == len(names) else [folder.name for folder in data_folders(cfg)]


@dataclass(frozen=True)
class Dataset:
    """A configuration's prepared data, opened."""

    train: list[
        Any
    ]  # a TokenStream per source, or data/growing.py's Parts; without a mixture, [data] is the only one
    validation: list[Any]
    order: Any  # data/order.py's, of the training data
    names: list[str]  # of a mixture's sources
    tokenizer_files: list[pathlib.Path]
    fingerprint: list[dict]  # distinguishes the prepared data of two runs
    notes: list[str]  # warnings for the user


def open_dataset(cfg: config.Config, train: bool = True) -> Dataset:
    """Opens the training data and, with [eval], the validation data; train=False: only the latter. Raises ConfigError
    if it is not prepared, was prepared for another configuration, or is too small for one batch."""
    training = open_data(cfg, "train") if train else []
    validation = open_data(cfg, "heldout") if cfg.eval or not train else []
    order = make_order(cfg, training) if train else None
    folders = data_folders(cfg)
    manifests = [manifest_of(folder) for folder in folders]
    tokenizer = sorted([*folders[0].glob("tokenizer*"), *folders[0].glob("chat_template.jinja")])
    notes = [stream.summary() for stream in training if cfg.data.messages_field]
    if (entries := manifests[0]["vocab_size"]) < cfg.model.vocab_size:
        notes.append(
            f"the tokenizer of {folders[0]} has {entries:,} entries, the model {cfg.model.vocab_size:,} rows"
        )
    notes += [
        f"{stream.path.parent}: none of its documents (one in a hundred) is held out: it has no validation loss"
        for stream in validation
        if cfg.data.order == "global" and stream.length < 2
    ]
    if cfg.model.init_from:
        from huggingface.tokenizer import note_on_tokenizer

        notes += note_on_tokenizer(cfg.model.init_from, folders[0], tokenizer)
    fingerprint = [
        {key: manifest.get(key) for key in ("identity", "tokens", "sha256")}
        for manifest in manifests
    ]
    return Dataset(training, validation, order, source_names(cfg), tokenizer, fingerprint, notes)
