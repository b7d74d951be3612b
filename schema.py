"""TOML tables and `--section.key=value` -> frozen dataclasses: reports all problems at once, suggests keys, --help.

Defines no options itself: a Schema takes them from dataclasses whose fields option() creates. Needs no torch.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable, Container, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial, reduce
from types import NoneType
from typing import Any, Literal

import tomli


class ConfigError(Exception):
    """The user's input is invalid (a file, an option, the data). Carries every problem found, one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


def together(*checks: Callable[[], Any]) -> list[Any]:
    """Runs all checks and returns their results. Raises one ConfigError with the problems of all of them."""
    problems, found = [], []
    for check in checks:
        try:
            found.append(check())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return found


def option(
    default: Any,
    doc: str,
    rule: tuple = (lambda v: True, ""),
    note: str = "",
    extra: str | None = None,
) -> Any:
    """A dataclass field. rule: (predicate, the requirement in words); note: added to the error for a wrong type; extra:
    what the option needs where it is not at its default, or its table, off by default, is on."""
    metadata = {"doc": doc, "rule": rule, "note": note, "extra": extra}
    return field(default=default, metadata=metadata)


class Schema:
    """The options of a dataclass, {"run.seed": (annotation, field), ...}, and its tables: the fields whose type is a
    dataclass, {"run": (dataclass, optional), ...}. A table that allows None is off by default. Table "" is the root."""

    def __init__(self, kind: type):
        self.options, self.tables = {}, {}
        self._add(kind, "", False)

    def _add(self, kind: type, table: str, optional: bool) -> None:
        self.tables[table] = kind, optional
        for key, hint in typing.get_type_hints(kind).items():
            name, inner = f"{table}.{key}".strip("."), members(hint)[0]
            if is_dataclass(inner):
                self._add(inner, name, NoneType in typing.get_args(hint))
            else:
                self.options[name] = hint, kind.__dataclass_fields__[key]

    def fit(self, name: str, value: Any) -> Any:
        """The value converted for the dataclass. Raises ValueError saying what it must be."""
        if name in self.tables and value == {}:
            return value
        if name in self.tables:
            off = "; off removes it from the command line" if self.tables[name][1] else ""
            raise ValueError(f"must be a table, written [{name}]{off}")
        if name not in self.options:
            raise ValueError(
                f"unknown {'section' if value == {} else 'option'}{self._nearest(name)}"
            )
        hint, f = self.options[name]
        holds, rule = f.metadata["rule"]
        try:
            fitted = _fit(value, hint)
        except TypeError:
            limits = ", neither empty nor infinite nor out of range" * (
                type(value) in members(hint)
            )
            raise ValueError(f"must be {_describe(hint)}{limits}{f.metadata['note']}") from None
        except ConfigError as error:  # of tables in a list
            raise ValueError("; ".join(error.problems)) from None
        if not holds(fitted):
            raise ValueError(rule)
        return fitted

    def extra_of(self, name: str, value: Any) -> str | None:
        """The extra that an option of this value needs, or a table that is given without options."""
        if name in self.tables:
            extras = {f.metadata["extra"] for _, f in self.section(name).values()}
            return next(iter(extras), None)
        _, option_field = self.options[name]
        _, is_off_by_default = self.tables[name.rpartition(".")[0]]
        if value == option_field.default and not is_off_by_default:
            return None
        return option_field.metadata["extra"]

    def read(self, raw: dict, path: str, overrides: Iterable[str] = ()) -> "Given":
        """Reads the tables of a file, with the command line's overrides on top. `path` names their origin in errors."""
        values, given = flatten(raw, self.options), Given(self, path)
        given.origins = dict.fromkeys(values, path)
        for override in overrides:
            name, _, text = override[2:].partition("=")
            found = flatten({name: self._parse(name, text)}, self.options)
            if text == "off" and name in self.tables and self.tables[name][1]:
                values = {
                    key: value
                    for key, value in values.items()
                    if not f"{key}.".startswith(f"{name}.")
                }
            else:
                values |= found
            given.origins |= dict.fromkeys(found, "command line")
        for name, value in values.items():
            given.add(name, value)
        return given

    def _parse(self, name: str, text: str) -> Any:
        """The value of --name=text: the text itself if the option is a string, else TOML, else a word such as auto."""
        hint, _ = self.options.get(name, (None, None))
        if hint and all(m is str or typing.get_origin(m) is Literal for m in members(hint)):
            return text
        try:
            found = tomli.loads(f"value = {text}")
        except (ValueError, RecursionError):  # not TOML, or absurdly many digits or brackets
            return text
        # the text has a line break and more keys
        return found["value"] if len(found) == 1 else text

    def _nearest(self, name: str) -> str:
        """The right key in the wrong section, else the closest spelling."""
        elsewhere = [
            known for known in self.options if known.endswith(f".{name.rpartition('.')[2]}")
        ]
        return (
            nearest(elsewhere[0] if elsewhere else name, [*self.tables, *self.options])
            or f"; there are {', '.join([*self.tables][1:] or self.options)}"
        )

    def section(self, table: str) -> dict[str, tuple[Any, Field]]:
        """The options of one table, by key."""
        return {
            name.rpartition(".")[2]: row
            for name, row in self.options.items()
            if name.rpartition(".")[0] == table
        }

    def complete(self, tables: dict) -> dict[str, Any]:
        """Every option's value, by name, from tables that to_dict() made. A missing option gets its default: the tables
        may be older than it. A key that is no longer an option is kept as is."""
        found = {
            name: None if f.default is MISSING else f.default
            for name, (_, f) in self.options.items()
        }
        for name, value in flatten(tables, self.options).items():
            try:
                found[name] = self.fit(name, value)
            except ValueError:  # rejected by a newer rule
                found[name] = value
        return found

    def to_toml(self, tables: dict) -> str:
        """Tables as TOML text, which read() reads back as equal ones."""
        flat, lines = flatten(tables, self.options), []
        for table in self.tables:
            inside = {key: f"{table}.{key}" for key in self.section(table)}
            rows = [f"{key} = {toml(flat[name])}" for key, name in inside.items() if name in flat]
            lines += [f"\n[{table}]", *rows] if rows or table in flat else []
        return "\n".join(lines).strip() + "\n"

    def help(self) -> str:
        """Every option with its default, type and meaning."""
        lines = []
        for table, (_, optional) in self.tables.items():
            lines += [f"\n[{table}]{'   (off unless given)' * optional}"] if table else []
            for key, (hint, f) in self.section(table).items():
                default = (
                    "required"
                    if f.default is MISSING
                    else "absent"
                    if f.default is None
                    else toml(f.default)
                )
                lines.append(
                    f"  {key} = {default}".ljust(42) + f" # {_describe(hint)}: {f.metadata['doc']}"
                )
            lines += [
                f"\n[[{table}.{key}]]   (one table each)\n{Schema(inner).help()}"
                for key, (hint, _) in self.section(table).items()
                for inner in typing.get_args(hint)
                if is_dataclass(inner)
            ]
        return "\n".join(lines).strip("\n")


@dataclass
class Given:
    """The user's input, by option: the valid values, the origin of each, and the problems of the others."""

    schema: Schema
    path: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)  # as given, before add() fitted it

    def add(self, name: str, value: Any) -> None:
        self.raw[name] = value
        try:
            self.values[name] = self.schema.fit(name, value)
        except ValueError as error:
            self.problems[name] = f"{self.origins[name]}: {place(name)} = {toml(value)}: {error}"

    def build(self, table: str = "") -> Any:
        """The dataclass, with placeholders for invalid or missing values: `problems` names them."""
        kind, optional = self.schema.tables[table]
        if optional and not any(f"{name}.".startswith(f"{table}.") for name in self.values):
            return None
        found = {}
        for f in fields(kind):
            name = f"{table}.{f.name}".strip(".")
            found[f.name] = (
                self.build(name) if name in self.schema.tables else self.values.get(name, f.default)
            )
            if found[f.name] is MISSING:
                self.problems.setdefault(
                    name, f"{self.path}: {place(name)}: is missing, and has no default"
                )
                found[f.name] = 1  # required options are numbers; no rule reads this one
        return kind(**found)


def require(built: Any, rules: list[tuple[str, Any, str]], given: Given | None = None) -> None:
    """Raises ConfigError with given's problems and the violated rules: ("option.to_change others.it_reads", holds, the
    requirement in words). Skips rules that read an option which is itself invalid."""
    problems = [*given.problems.values()] if given else []
    for names, holds, demand in rules:
        name = names.split()[0]
        if not holds and not (given and given.problems.keys() & set(names.split())):
            origin = f"{given.origins.get(name, given.path)}: " if given else ""
            problems.append(
                f"{origin}{place(name)} = {toml(reduce(getattr, name.split('.'), built))}: {demand}"
            )
    if problems:
        raise ConfigError(*problems)


def positive(text: str, kind: type = float) -> Any:
    """A positive finite number, as a type for argparse."""
    with contextlib.suppress(ValueError):
        if 0 < (number := kind(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(
        f"{text} must be {'an integer' if kind is int else 'finite'}, above 0"
    )


def nearest(text: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def read_toml(path: str) -> dict:
    """The tables of a file. Raises ConfigError if it cannot be read, is not valid TOML, or is empty."""
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'is not UTF-8'}"
        ) from None
    try:
        raw = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # tomli's own error is a ValueError
        hint = (
            "; it begins with a byte order mark, save it without"
            if text.startswith("\ufeff")
            else ""
        )
        problem = str(error).partition("; use sys.")[0]  # drops Python's advice to programmers
        raise ConfigError(f"{path}: is not valid TOML: {problem}{hint}") from None
    if not raw:
        raise ConfigError(f"{path}: is empty; configs/tiny.toml shows what a run needs")
    return raw


def to_dict(built: Any) -> dict:
    """A dataclass as plain tables, without None values."""
    return dataclasses.asdict(
        built,
        dict_factory=lambda items: {
            key: [*value] if isinstance(value, tuple) else value
            for key, value in items
            if value is not None
        },
    )


def flatten(table: dict, leaves: Container[str] = (), prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}, "c": {}} -> {"a.b": 1, "c": {}}; a table named in `leaves` stays nested."""
    flat = {}
    for key, value in table.items():
        name = prefix + key
        inside = isinstance(value, dict) and value and name not in leaves
        flat |= flatten(value, leaves, f"{name}.") if inside else {name: value}
    return flat


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if is_dataclass(value):
        value = to_dict(value)
    if isinstance(value, dict):
        keys = {
            key: key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value
        }
        return "{" + ", ".join(f"{keys[key]} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def members(hint: Any) -> tuple:
    """The types that an annotation allows, None left out."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(m for m in typing.get_args(hint) if m is not NoneType) if union else (hint,)


# type: (description, predicate of a valid value)
SCALARS = {
    bool: ("true or false", lambda v: isinstance(v, bool)),
    int: ("an integer", lambda v: type(v) is int and abs(v) < 2**63),  # bool is an int in Python
    float: ("a number", lambda v: type(v) in (int, float) and abs(v) < 1e300),  # no nan, no inf
    str: (
        "text",
        lambda v: (
            isinstance(v, str) and v and "\0" not in v and v == v.encode(errors="ignore").decode()
        ),
    ),
}


def _fit(value: Any, hint: Any) -> Any:
    """The value converted to the annotation. Raises TypeError if it does not fit, and ConfigError if it is an invalid
    table, or a list with one."""
    for member in members(hint):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if member in SCALARS and SCALARS[member][1](value):
            return member(value)
        if origin is Literal and value in args:
            return value
        if (
            origin is tuple
            and isinstance(value, list)
            and (args[-1] is ... or len(args) == len(value))
        ):
            return tuple(together(*(partial(_fit, v, args[0]) for v in value)))
        if is_dataclass(member) and isinstance(value, dict):
            given = Schema(member).read(value, toml(value))
            built = given.build()
            if given.problems:
                raise ConfigError(*given.problems.values())
            return built
    raise TypeError


def _describe(hint: Any) -> str:
    words = []
    for member in members(hint):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            words += [f'"{word}"' for word in args]
        elif origin is tuple:
            words.append(
                f"a list{'' if args[-1] is ... else f' of {len(args)}'}, of {_describe(args[0])} each"
            )
        elif is_dataclass(member):
            words.append(f"a table of {', '.join(f.name for f in fields(member))}")
        else:
            words.append(SCALARS[member][0])
    return " or ".join(words)


def place(name: str) -> str:
    section, _, key = name.rpartition(".")
    return f"[{section}] {key}" if section else key
