"""From TOML tables and `--section.key=value` to frozen dataclasses: all problems at once, the nearest key, --help.

Knows no option: a Schema takes them from the dataclasses, whose fields option() makes. Needs no torch.
"""

import dataclasses
import difflib
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import reduce
from types import NoneType
from typing import Any, Literal

import tomli


class ConfigError(Exception):
    """What the user gave is wrong (a file, an option, the data). Carries every problem found, one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


def together(*checks: Callable[[], Any]) -> list[Any]:
    """What the checks return. Raises ConfigError with the problems of all of them."""
    problems, found = [], []
    for check in checks:
        try:
            found.append(check())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return found


def option(default: Any, doc: str, rule: tuple = (lambda v: True, ""), refused: tuple[str, str] = ("", "")) -> Any:
    """A dataclass field. rule: (does a value hold, what is demanded of it); refused: (a value, why it is no choice)."""
    return field(default=default, metadata={"doc": doc, "rule": rule, "refused": refused})


class Schema:
    """The options below a dataclass, by dotted name: {"run.seed": (annotation, field), ...}. A field whose type is a
    dataclass is a table, and off by default where None is allowed."""

    def __init__(self, kind: type):
        self.kind = kind
        rows = [*_walk(kind)]
        self.options = {name: (hint, f) for name, hint, f in rows if not is_dataclass(members(hint)[0])}
        self.tables = {name: NoneType in typing.get_args(hint) for name, hint, _ in rows if name not in self.options}
        # [[...]]: an option whose value is a list of tables
        self.lists = {name for name, (hint, _) in self.options.items()
                      if any(is_dataclass(inner) for inner in typing.get_args(members(hint)[0]))}

    def fit(self, name: str, value: Any) -> Any:
        """The value as the dataclass holds it. Raises ValueError saying what it must be."""
        hint, f = self.options[name]
        return _checked(value, hint, f)

    def read(self, raw: dict, path: str, overrides: Iterable[str]) -> "Given":
        """The tables of a file, with the command line's overrides on top. `path` says in errors where they are from."""
        flat, problems, wrong = flatten(raw), [], set()
        origins = dict.fromkeys(flat, path)
        for override in overrides:
            name, _, text = override[2:].partition("=")
            origins[name] = "command line"
            if text == "off" and self.tables.get(name):
                flat = {key: value for key, value in flat.items() if not f"{key}.".startswith(f"{name}.")}
            else:
                flat[name] = _parse(text, self.options.get(name, (None, None))[0])
        for name, value in flat.items():
            section, _, key = name.rpartition(".")
            at = f"{origins[name]}: {f'[{section}] ' if section else ''}{key} = {toml(value)}"
            if name in self.lists and value == {}:
                problems.append(f"{origins[name]}: [{name}]: is a list of tables; write [[{name}]]")
            elif name in self.tables and value != {}:
                problems.append(f"{at}: must be a table, written [{name}]"
                                + ("; off removes it from the command line" if self.tables[name] else ""))
            elif any(name.startswith(f"{listed}.") for listed in self.lists):
                pass  # reported already, as the list itself
            elif name not in self.options and name not in self.tables:
                if value != {} or not any(other.startswith(f"{name}.") for other in flat):  # else its options are named
                    problems.append(f"{at}: unknown {'option' if value != {} else 'section'}{self._nearest(name)}")
            elif name in self.options:
                try:
                    flat[name] = self.fit(name, value)
                except ValueError as error:
                    wrong.add(name)
                    problems.append(f"{at}: {error}")
        return Given(self, path, flat, origins, problems, wrong)

    def _nearest(self, name: str) -> str:
        key = name.rpartition(".")[2]  # the right key in the wrong section, else the closest spelling
        near = [known for known in self.options if known.endswith(f".{key}")] or difflib.get_close_matches(
            name, self.options if "." in name else self.tables, n=1, cutoff=0.5)
        return f"; did you mean {near[0]}?" if near else f"; sections are {', '.join(self.tables)}"

    def to_toml(self, tables: dict) -> str:
        """The text of tables, which read() takes for equal ones."""
        order, lines = [*self.tables], []
        for name, value in sorted(flatten(tables).items(), key=lambda item: order.index(
                item[0] if item[0] in self.tables else item[0].rpartition(".")[0])):
            lines.append(f"\n[{name}]" if name in self.tables else f"{name.rpartition('.')[2]} = {toml(value)}")
        return "\n".join(lines).strip() + "\n"

    def help(self) -> str:
        """Every option with its default, type and meaning."""
        lines = []
        for table, optional in self.tables.items():
            lines.append(f"\n[{table}]{'   (off unless given)' * optional}")
            inside = {name: row for name, row in self.options.items() if name.rpartition(".")[0] == table}
            lines += [_help_line(hint, f) for hint, f in inside.values()]
            for name in inside.keys() & self.lists:
                lines += ["", f"[[{name}]]   (one table each)"]
                lines += [_help_line(hint, f) for _, hint, f in _walk(typing.get_args(self.options[name][0])[0])]
        return "\n".join(lines).strip()


@dataclass
class Given:
    """What was given: values that fit by option, where each is from, the problems so far, the options that have one."""

    schema: Schema
    path: str
    values: dict[str, Any]
    origins: dict[str, str]
    problems: list[str]
    wrong: set[str]

    def build(self) -> Any:
        """The dataclass, with placeholders where values are wrong or missing: `problems` says which."""
        return self._build(self.schema.kind, "")

    def _build(self, kind: type, prefix: str) -> Any:
        found = {}
        for f, hint in _hints(kind):
            name = prefix + f.name
            if name in self.schema.tables:
                present = not self.schema.tables[name] or any(f"{key}.".startswith(f"{name}.") for key in self.values)
                found[f.name] = self._build(members(hint)[0], f"{name}.") if present else None
                continue
            found[f.name] = f.default if name in self.wrong else self.values.get(name, f.default)
            if found[f.name] is MISSING:
                if name not in self.wrong:
                    self.problems.append(f"{self.path}: [{prefix[:-1]}] {f.name}: is missing, and has no default")
                    self.wrong.add(name)
                found[f.name] = 1  # all of these are numbers; no rule looks at it
        return kind(**found)

    def check(self, built: Any, rules: list[tuple[str, str, Any, str]]) -> None:
        """Adds what is wrong by rules between options: (option to change, the options that the rule looks at, does it
        hold, what is demanded). A rule is left out where one of those is wrong by itself."""
        self.problems += broken(built, [(name, holds, demand) for name, others, holds, demand in rules
                                        if not {name, *others.split()} & self.wrong],
                                lambda name: f"{self.origins.get(name, self.path)}: ")


def broken(built: Any, rules: list[tuple[str, Any, str]], origin: Callable[[str], str] = lambda name: "") -> list[str]:
    """A line for each rule (option, does it hold, what is demanded of the option) that does not hold."""
    return [f"{origin(name)}[{name.rpartition('.')[0]}] {name.rpartition('.')[2]} = "
            f"{toml(reduce(getattr, name.split('.'), built))}: {demand}" for name, holds, demand in rules if not holds]


def read_toml(path: str) -> dict:
    """The tables of a file. Raises ConfigError where it cannot be read, is no TOML or is empty."""
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
        raw = tomli.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None
    except (ValueError, RecursionError) as error:  # tomli's own error is a ValueError
        hint = "; it begins with a byte order mark, save it without" if text.startswith("\ufeff") else ""
        raise ConfigError(f"{path}: is not valid TOML: {error}{hint}") from None
    if not raw:
        raise ConfigError(f"{path}: is empty; configs/tiny.toml shows what a run needs")
    return raw


def to_dict(built: Any) -> dict:
    """Plain tables of a dataclass, without what is absent."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return [plain(v) for v in value] if isinstance(value, tuple) else value
    return plain(dataclasses.asdict(built))


def flatten(table: dict, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a": {}, "a.b": 1}"""
    flat = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= {prefix + key: {}, **flatten(value, f"{prefix}{key}.")}
        else:
            flat[prefix + key] = value
    return flat


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        keys = {key: key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value}
        return "{" + ", ".join(f"{keys[key]} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if is_dataclass(value):
        return toml({key: v for key, v in dataclasses.asdict(value).items() if v is not None})
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def members(hint: Any) -> tuple:
    """The types that an annotation allows, None left out."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(m for m in typing.get_args(hint) if m is not NoneType) if union else (hint,)


def _hints(kind: type) -> list[tuple[Field, Any]]:
    hints = typing.get_type_hints(kind)
    return [(f, hints[f.name]) for f in fields(kind)]


def _walk(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Field]]:
    """(dotted name, annotation, field) of every table and, after it, of every option in it."""
    for f, hint in _hints(kind):
        yield prefix + f.name, hint, f
        if is_dataclass(members(hint)[0]):
            yield from _walk(members(hint)[0], f"{prefix}{f.name}.")


def _parse(text: str, hint: Any) -> Any:
    """The value of --name=text: text as it stands where the option is one, else TOML, else a word, as auto or full."""
    if hint and all(m is str or typing.get_origin(m) is Literal for m in members(hint)):
        return text
    try:
        return tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or more digits or brackets than anybody means
        return text


def _checked(value: Any, hint: Any, f: Field) -> Any:
    """The value of a field. Raises ValueError where its type or its rule does not take it."""
    (holds, rule), (refused, why) = f.metadata["rule"], f.metadata["refused"]
    try:
        fitted = _fit(value, hint)
    except TypeError:
        raise ValueError(f"must be {_describe(hint)}" + (f"; {why}" if refused and value == refused else "")) from None
    if not holds(fitted):
        raise ValueError(rule)
    return fitted


def _fit(value: Any, hint: Any) -> Any:
    """The value as the annotation says. Raises TypeError where it does not take it, and ValueError where it is a table
    with something wrong in it."""
    for member in members(hint):
        if is_dataclass(member) and isinstance(value, dict):
            return _fit_table(value, member)
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal and isinstance(value, str) and value in args:
            return value
        if origin is tuple and isinstance(value, list) and (args[-1] is ... or len(args) == len(value)):
            return tuple(_fit(v, args[0]) for v in value)
        if member is bool and isinstance(value, bool):
            return value
        if member is int and type(value) is int and abs(value) < 2**63:  # bool is an int in Python
            return value
        if member is float and type(value) in (int, float) and abs(value) < 1e300:  # no nan, no inf
            return float(value)
        if member is str and isinstance(value, str) and value and "\0" not in value:
            return value
    raise TypeError


def _fit_table(table: dict, kind: type) -> Any:
    """One table of a list, as a dataclass. Raises ValueError."""
    known, values = {f.name: (hint, f) for f, hint in _hints(kind)}, {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)
            raise ValueError(f"{key} is an unknown key of its tables; did you mean {near[0]}?")
        try:
            values[key] = _checked(value, *known[key])
        except ValueError as error:
            raise ValueError(f"{key} = {toml(value)} {error}") from None
    if missing := [name for name, (_, f) in known.items() if f.default is MISSING and name not in values]:
        raise ValueError(f"{toml(table)} lacks {', '.join(missing)}")
    return kind(**values)


def _describe(hint: Any) -> str:
    def one(member: Any) -> str:
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            return " or ".join(f'"{word}"' for word in args)
        if origin is tuple:
            return f"a list{'' if args[-1] is ... else f' of {len(args)}'}, of {_describe(args[0])} each"
        if is_dataclass(member):
            return f"a table of {', '.join(f.name for f in fields(member))}"
        return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[member]
    return " or ".join(map(one, members(hint)))


def _help_line(hint: Any, f: Field) -> str:
    default = "required" if f.default is MISSING else "absent" if f.default is None else toml(f.default)
    return f"  {f.name} = {default}".ljust(43) + f"# {_describe(hint)}: {f.metadata['doc']}"
