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
    position          [file, row]: the last row that was read
    file_start        these four before the file of that row was read
    segments          SHA-256 of each segment of train.bin up to the last border
    validation        [token file, first token, one past the last, SHA-256]; null: not decided yet
    complete          whether all text is recorded
"""

import hashlib
import json
import pathlib
import platform
import re
from dataclasses import replace
from typing import Any

import config
from config import ConfigError
from data.row_format import row_format
from data.tokenizer import tokenizer_files, tokenizer_hash
from system import files, processes

MANIFEST = "manifest.json"
FORMAT = 5  # version of the files; part of the identity
STDLIB = "python-stdlib"
# a source of a mixture has these options of its own, or else those of [data]
SOURCE_OPTIONS = ("subset", "split", "text_field", "max_tokens", "validation", "format")


# Names


def source_folders(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """The folder of each source, and the configuration of this source alone, which the folder is
    prepared for; that of token files is never made. Raises ConfigError if a mixture's tokenizer has
    not been trained yet."""
    root = pathlib.Path(cfg.data.path or "prepared")
    if not cfg.data.sources:
        return [(root if cfg.data.path else root / folder_name(cfg), cfg)]
    trained = common_tokenizer(cfg)
    if trained and not trained.exists():
        raise ConfigError(f"{trained}: no prepared data; `python -m data.prepare CONFIG` makes it")
    tokenizer = str(trained) if trained else cfg.data.tokenizer
    return [(root / folder_name(each), each) for each in sources_of(cfg, tokenizer)]


def prepared_folders(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """source_folders() of the sources that are prepared: all but token files."""
    return [each for each in source_folders(cfg) if each[1].data.format != "tokens"]


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


def common_tokenizer(cfg: config.Config) -> pathlib.Path | None:
    """The file of the tokenizer that is trained on all sources of a mixture. None where it names
    one, or has token files alone."""
    source_cfgs = sources_of(cfg, None)
    if cfg.data.tokenizer or all(each.data.format == "tokens" for each in source_cfgs):
        return None
    identities = [identity(source_cfg) for source_cfg in source_cfgs]
    weights = [source.weight for source in cfg.data.sources]
    name = f"tokenizer-{short_hash([identities, weights])}.model"
    return pathlib.Path(cfg.data.path or "prepared") / name


def short_hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def source_names(cfg: config.Config) -> list[str]:
    """The names of a mixture's sources; of their folders if two sources have the same name."""
    names = [str(source.source) for source in cfg.data.sources]
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
        raise ConfigError(
            f"{folder}: holds no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return manifest


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Replaces a folder's record, a key a line. Raises OSError."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    content = "{\n" + ",\n".join(lines) + "\n}\n"
    # where locks don't exist, another process may write it at the same time
    temporary = folder / f".{MANIFEST}.{processes.process_name()}.tmp"
    files.write_atomic(folder / MANIFEST, content, temporary)


def is_prepared(cfg: config.Config) -> bool:
    """Whether all text of all sources is recorded. Raises ConfigError and OSError."""
    trained = common_tokenizer(cfg)
    if trained and not trained.exists():
        return False
    manifests = [read_manifest(folder) or {} for folder, _ in prepared_folders(cfg)]
    return all(manifest.get("complete") for manifest in manifests)
