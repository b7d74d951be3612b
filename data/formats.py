"""data.format where no option says it: found from the columns of each source's first row.

Whatever prepares or opens data calls complete() first. What it finds becomes an option like any
other, so that a run's config.toml says it.
"""

import contextlib
import pathlib
import shlex
from typing import Any

import config
from config import ConfigError, RowFormat
from data import folder as folders
from data.source import SourceReader, list_files, local_paths
from system.processes import print_error


def complete(cfg: config.Config, is_plan: bool = False) -> config.Config:
    """The configuration with the formats that no option says. is_plan: for a plan, which does not
    need rows. Raises ConfigError if a first row has the columns of no format, or of several, and
    OSError."""
    data = cfg.data
    if data.format or data.messages_field:
        return cfg
    root = pathlib.Path(data.path or "prepared")
    vocab_size = cfg.model.vocab_size
    formats = []
    for source in folders.sources_of(data, vocab_size):
        formats.append(source.format or format_of(source, vocab_size, root, is_plan))
    if set(formats) == {"text"} and not data.chat_template:  # which is refused with text
        return cfg
    tables = config.to_dict(cfg)
    for entry, name in zip(tables["data"].get("sources") or [tables["data"]], formats):
        entry["format"] = name
    if not data.document_mask:
        del tables["data"]["document_mask"]  # conversations imply it
    return config.from_dict(tables, "by the first row")


def format_of(
    data: config.Data, vocab_size: int, root: pathlib.Path, is_plan: bool = False
) -> RowFormat:
    """The format of a source's rows, by its first one. root: of the prepared folders. is_plan: as
    of complete(). Raises ConfigError and OSError."""
    if data.text_field != config.Data.text_field:
        return "text"
    if not local_paths(data.source):
        name = recorded_format(data, vocab_size, root)
        if name or is_plan:
            return name or "text"
    files, _ = list_files(data)
    rows = SourceReader(data, files).read((), lambda where, row: row)
    row = next(rows, {data.text_field: ""})
    formats = formats_with(row)
    if isinstance(row.get(data.text_field), str):
        formats.insert(0, "text")
    elif len(formats) != 1:
        raise ConfigError(
            f"[data] source = {data.source}: the columns of its first row, {', '.join(row)}, are those "
            f"of {'several formats' if formats else 'no data.format'}; name what to train on: "
            f"{' or '.join(options_for(row, formats)) or 'none of them holds text or messages'}"
        )
    if formats != ["text"]:
        print_error(f'{data.source}: data.format = "{formats[0]}", by its columns {", ".join(row)}')
    return formats[0]


def recorded_format(data: config.Data, vocab_size: int, root: pathlib.Path) -> RowFormat | None:
    """The format in which a source was prepared whose rows are on a hub, or gone."""
    with contextlib.suppress(ConfigError):  # a tokenizer that is still to be trained, perhaps
        options = folders.identity(data, vocab_size).items()
        name = folders.folder_name(data, vocab_size)
        others = root.glob(f"{name.rpartition('-')[0]}-*")
        for folder in (root, root / name, *others):  # as texts first
            manifest = folders.read_manifest(folder)
            if manifest and options <= manifest["identity"].items():
                return manifest["identity"].get("data.format", "text")
    return None


def formats_with(row: dict[str, Any]) -> list[RowFormat]:
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


def options_for(row: dict[str, Any], formats: list[RowFormat]) -> list[str]:
    """Options to paste that say what a row is."""
    options = [f"--data.format={name}" for name in formats]
    if {"instruction", "response"} <= row.keys():
        options.append("--data.format=alpaca")
    for name, value in row.items():
        if str(value).lstrip().startswith("[{"):  # a list of messages, or JSON of one
            options.append(f"--data.messages_field={shlex.quote(name)}")
        elif isinstance(value, str) and not formats:
            options.append(f"--data.text_field={shlex.quote(name)}")
    return options
