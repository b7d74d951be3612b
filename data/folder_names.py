"""Which folder of prepared data belongs to which source: {source}-{hash of what determines it}. The
sources of a mixture, and the tokenizer that they share."""

import os
import pathlib
import re
from dataclasses import replace
from typing import Any

import config
from config import ConfigError
from data.identity import identity, short_hash
from data.record import is_complete, read_manifest

# a source of a mixture has these options of its own, or else those of [data]
SOURCE_OPTIONS = ("subset", "split", "text_field", "max_tokens", "validation", "format")


def source_folders(cfg: config.Config) -> list[tuple[pathlib.Path, config.Config]]:
    """The folder of each source, and the configuration of this source alone, which the folder is
    prepared for. Raises ConfigError if a mixture's tokenizer has not been trained yet."""
    root = pathlib.Path(cfg.data.path or "prepared")
    if cfg.data.path and not cfg.data.sources:
        return [(root, cfg)]
    source_cfgs = [cfg]
    if cfg.data.sources:
        tokenizer = cfg.data.tokenizer or str(common_tokenizer(cfg))
        if not are_folders_known(cfg):
            raise ConfigError(
                f"{tokenizer}: no prepared data; `python -m data.prepare CONFIG` makes it"
            )
        source_cfgs = sources_of(cfg, tokenizer)
    return [(root / _folder_name(source_cfg), source_cfg) for source_cfg in source_cfgs]


def _folder_name(cfg: config.Config) -> str:
    """{source}-{hash}, of one source. Raises ConfigError."""
    name = re.sub("[^A-Za-z0-9._-]+", "-", cfg.data.source).strip("-.")
    return f"{name[-100:]}-{short_hash(identity(cfg))}"


def sources_of(cfg: config.Config, tokenizer: str | None) -> list[config.Config]:
    """The configuration of each source of a mixture alone, with this tokenizer."""
    source_cfgs = []
    for source in cfg.data.sources:
        options: dict[str, Any] = {
            "sources": (),
            "path": None,
            "tokenizer": tokenizer,
            "source": source.source,
        }
        for name in SOURCE_OPTIONS:
            options[name] = getattr(source, name) or getattr(cfg.data, name)
        source_cfgs.append(replace(cfg, data=replace(cfg.data, **options)))
    return source_cfgs


def common_tokenizer(cfg: config.Config) -> pathlib.Path:
    """The file of the tokenizer that is trained on all sources, if the mixture names none."""
    identities = [identity(source_cfg) for source_cfg in sources_of(cfg, None)]
    weights = [source.weight for source in cfg.data.sources]
    digest = short_hash([identities, weights])
    return pathlib.Path(cfg.data.path or "prepared") / f"tokenizer-{digest}.model"


def are_folders_known(cfg: config.Config) -> bool:
    """Whether the folders' names are known: a mixture's tokenizer, on which they depend, may have
    to be trained."""
    if cfg.data.tokenizer or not cfg.data.sources:
        return True
    # unlike pathlib's, no error for an unreadable folder
    return os.path.exists(common_tokenizer(cfg))


def data_folders(cfg: config.Config) -> list[pathlib.Path]:
    """The folder of each source. Raises ConfigError."""
    return [folder for folder, _ in source_folders(cfg)]


def source_names(cfg: config.Config) -> list[str]:
    """The names of a mixture's sources; the names of their folders if two sources have the same
    name."""
    names = [source.source for source in cfg.data.sources]
    if len(set(names)) < len(names):
        return [folder.name for folder in data_folders(cfg)]
    return names


def is_prepared(cfg: config.Config) -> bool:
    """Whether all folders are complete, even if for another configuration. Raises ConfigError."""
    if not are_folders_known(cfg):
        return False
    return all(is_complete(read_manifest(folder)) for folder in data_folders(cfg))
