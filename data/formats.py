"""data.format where no option says it: found from the columns of a source's first row.

The launcher and the tools that take a CONFIG call found_options() before they prepare data. What it
returns becomes an option like any other, so that a run's config.toml says it.
"""

import argparse
import contextlib
import itertools
import json
import os
import typing
from collections.abc import Iterator
from dataclasses import replace

import config
import schema
from config import ConfigError, RowFormat
from data import hub
from data.console import report
from data.folder_names import common_tokenizer, source_folders, sources_of
from data.identity import kind_of, open_source, reads_hub
from data.local_files import STDLIB, local_files
from data.record import read_manifest
from data.sources import Files

FIRST_ROWS = 10  # of which the first that can be read counts
ROLE_KEYS = ("role", "from")
MOST_OFFERED = 3  # options to paste, in a message


def complete(
    args: argparse.Namespace, cfg: config.Config, ask_hub: bool = True
) -> tuple[config.Config, list[str]]:
    """The configuration with the formats that no option says, and the options that say them. Raises
    ConfigError."""
    options = found_options(cfg, ask_hub)
    if options:
        args.overrides += options
        cfg = config.load(args.config, args.overrides)
    return cfg, options


def found_options(cfg: config.Config, ask_hub: bool = True) -> list[str]:
    """Options that say the formats of the sources' rows: none where they are texts, or where an
    option says it already. ask_hub: whether a dataset may be read for it that is not on this
    machine. Raises ConfigError if a first row has the columns of none, or of several."""
    d = cfg.data
    are_said = d.sources and all(source.format for source in d.sources)
    if d.format or d.messages_field or are_said:
        return []
    source_cfgs = [cfg]
    if d.sources:
        tokenizer = d.tokenizer
        if not tokenizer and os.path.exists(common_tokenizer(cfg)):
            tokenizer = str(common_tokenizer(cfg))
        source_cfgs = sources_of(cfg, tokenizer)
    found = [each.data.format or found_format(each, ask_hub) for each in source_cfgs]
    if set(found) == {"text"}:
        # the option is only needed to be refused
        return ["--data.format=text"] if d.chat_template else []
    if None in found:  # whoever prepares that source reports why it cannot be read
        return []
    if not d.sources:
        return [f"--data.format={found[0]}"]
    sources = [replace(source, format=name) for source, name in zip(d.sources, found)]
    return [f"--data.sources={schema.toml(sources)}"]


def found_format(cfg: config.Config, ask_hub: bool) -> RowFormat | None:
    """The format of one source's rows. None if they cannot be read now: whoever prepares them
    reports why. Raises ConfigError."""
    d = cfg.data
    if d.source == STDLIB or d.text_field != config.Data.text_field:
        return "text"
    with contextlib.suppress(ConfigError):
        is_gone = kind_of(d) is Files and not local_files(d.source, d.split)
        if is_gone or reads_hub(d):
            begun = list(begun_formats(cfg))
            if begun or not ask_hub or hub.connection_problem():
                return begun[0] if begun else None
    row = first_row(d)
    if row is None:
        return None
    formats = formats_of(row)
    if row.get(d.text_field) is not None or (d.text_field in row and not formats):
        if formats:
            options = " or ".join(f"--data.format={name}" for name in formats)
            report(
                f"{d.source}: the text to train on is its column {d.text_field!r}; {options} "
                "trains on the answers in its other columns"
            )
        return "text"
    if len(formats) != 1:
        raise ambiguous(d, row, formats)
    columns = ", ".join(row)
    report(f'{d.source}: data.format = "{formats[0]}", by its first row\'s columns: {columns}')
    return formats[0]


def begun_formats(cfg: config.Config) -> Iterator[RowFormat]:
    """The formats for which a source's folder is there: what was prepared before need not be here
    any more. Texts come first."""
    for name in typing.get_args(RowFormat):
        if name != "text" and not cfg.data.tokenizer:
            return
        candidate = replace(cfg, data=replace(cfg.data, format=name))
        with contextlib.suppress(ConfigError):  # a tokenizer without a chat template, perhaps
            folder, _ = source_folders(candidate)[0]
            manifest = read_manifest(folder)
            # a folder that data.path names is the same for all formats
            if manifest and format_of(manifest["identity"]) == name:
                yield name


def format_of(identity: dict) -> str:
    """The format of the rows of a folder with this identity."""
    if identity.get("messages_field"):
        return "messages"
    return identity.get("data.format", "text")


def first_row(d: config.Data) -> dict | None:
    """The first row of a source that can be read, with all of its columns."""
    try:
        # in its own order: the row that is prepared first
        source = open_source(replace(d, validation=None))
        source.columns = ()
        for _, row in itertools.islice(source.rows(), FIRST_ROWS):
            if isinstance(row, dict):
                return row
    except (ConfigError, OSError):
        pass
    return None


def formats_of(row: dict) -> list[RowFormat]:
    """The formats of conversations whose columns a row has."""
    columns = {name for name, value in row.items() if value is not None}
    formats: list[RowFormat] = []
    if any(isinstance(row.get(name), list) for name in ("messages", "conversations")):
        formats.append("messages")
    if {"instruction", "output"} <= columns:
        formats.append("alpaca")
    if "prompt" in columns and columns & {"completion", "response"}:
        formats.append("prompt_completion")
    return formats


def ambiguous(d: config.Data, row: dict, formats: list[RowFormat]) -> ConfigError:
    """The error of a row that has the columns of no format, or of several."""
    options = [f"--data.format={name}" for name in formats] or options_for(row)
    if options:
        advice = f"add {' or '.join(options[:MOST_OFFERED])}"
    else:
        advice = "none of them holds text or messages"
    several = "several formats" if formats else "no data.format"
    return ConfigError(
        f"[data] source = {d.source}: its first row has the columns of {several}: "
        f"{', '.join(row)}; {advice}"
    )


def options_for(row: dict) -> list[str]:
    """Options that could say what a row is whose columns no format has."""
    options = []
    for name, value in row.items():
        if holds_messages(value):
            options.append(f"--data.messages_field={name}")
    if {"instruction", "response"} <= row.keys():
        options.append("--data.format=alpaca")
    for name, value in row.items():
        if isinstance(value, str):
            options.append(f"--data.text_field={name}")
    return options


def holds_messages(value: object) -> bool:
    """Whether a column's value is a list of messages, or JSON of one."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return any(key in value[0] for key in ROLE_KEYS)
