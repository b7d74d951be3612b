"""--help: every option with its default, type and description."""

import itertools
import shutil
import textwrap
import typing
from dataclasses import MISSING, is_dataclass

from config.option import ConfigError, Option, Schema
from config.options import SCHEMA
from config.read import describe, search, suggestion
from config.show import is_in, toml
from system import print_line

HELP_COLUMN = 32  # where the descriptions begin


def print_help(argv: list[str], usage: str) -> None:
    """Prints the usage and all options, or the options that --help WORD or --help=WORD asks for.
    Raises ConfigError if there are none."""
    words = " ".join(argv).replace("--help=", "--help ").split()
    following = dict(itertools.pairwise(words))
    subject = following.get("--help") or following.get("-h") or "--"
    if subject.startswith("-") or subject.endswith(".toml"):
        print_line(f"{usage.strip()}\n\nOptions, in the file or as --section.key=value:\n")
        subject = None
    print_line(help_text(subject))


def help_text(subject: str | None = None, schema: Schema = SCHEMA) -> str:
    """Every option with its default, type and description. A subject restricts them to a section, to
    one option by its full name, or to those that mention its words. Raises ConfigError if there are
    none."""
    names = [name for name in schema.options if subject is None or is_in(name, subject)]
    if not names:
        names = search(subject or "", schema)
    if not names:
        raise ConfigError(f"--help {subject}: no such section or option{suggestion(subject or '')}")
    lines = []
    for table, (_, is_optional, all_options) in schema.tables.items():
        options = {}
        for key, option in all_options.items():
            if f"{table}.{key}".strip(".") in names:
                options[key] = option
        if table and options:
            lines += ["", f"[{table}]" + ("   (off unless given)" if is_optional else "")]
        for key, option in options.items():
            lines += _help_lines(key, option)
        for key, option in options.items():
            for inner in filter(is_dataclass, typing.get_args(option.kind)):
                lines += ["", f"[[{table}.{key}]]   (one table each)"]
                lines.append(help_text(schema=Schema(inner)))
    return "\n".join(lines).strip("\n")


def _help_lines(key: str, option: Option) -> list[str]:
    """An option as TOML, with its description as a wrapped comment."""
    default = {MISSING: "required", None: "absent"}.get(option.default) or toml(option.default)
    assignment = f"  {key} = {default}"
    indent = f"{HELP_COLUMN * ' '}# "
    comments = textwrap.wrap(
        f"{describe(option.kind)}: {option.help}",
        min(100, shutil.get_terminal_size((100, 24)).columns),
        initial_indent=indent,
        subsequent_indent=indent,
    )
    if len(assignment) < HELP_COLUMN:
        comments[0] = assignment.ljust(HELP_COLUMN) + comments[0].lstrip()
        return comments
    return [assignment, *comments]
