"""TOML tables and `--section.key=value` -> frozen dataclasses. Reports every problem at once.

Defines no options itself: a Schema collects those of dataclasses whose fields option() creates.
Needs no torch.

    @dataclass(frozen=True)
    class Train:
        steps: int = option(MISSING, "optimizer steps", POSITIVE)
        seq_len: int = option(2048, "tokens per sequence", POSITIVE)

    @dataclass(frozen=True)
    class Config:
        train: Train

    schema = Schema(Config)
    given = schema.read({"train": {"steps": 10}}, "my.toml", ["--train.seq_len=4096"])
    given.build()  # Config(train=Train(steps=10, seq_len=4096))
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import operator
import os
import pathlib
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple

import tomli


class ConfigError(Exception):
    """The user's input is invalid (a file, an option, the data). Holds every problem as a line."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


def together(*checks: Callable[[], Any]) -> list[Any]:
    """Runs all checks and returns their results. Raises a ConfigError with the problems of all."""
    problems = []
    results = []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return results


class Constraint(NamedTuple):
    """What the value of one option must satisfy: a predicate, and the same in words."""

    holds: Callable[[Any], Any]
    requirement: str


class Rule(NamedTuple):
    """A rule between options, evaluated for a configuration.

    options: the names of all options that it reads, first the one that its error shows, as in
    "model.n_kv_heads model.n_heads".
    """

    options: str
    holds: Any  # as the condition of an if
    requirement: str


def option(
    default: Any,
    doc: str,
    constraint: Constraint | None = None,
    note: str = "",
    extra: str | None = None,
    is_path: bool = False,
) -> Any:
    """A dataclass field. default: MISSING if the option is required.

    note: the end of the error for a wrong type. extra: the folder in extras/ that the option needs
    unless it is at its default. In a table that is off by default, it needs it at any value.
    is_path: its value may be a file or a folder.
    """
    metadata = {
        "doc": doc,
        "constraint": constraint,
        "note": note,
        "extra": extra,
        "is_path": is_path,
    }
    return field(default=default, metadata=metadata)


class Option(NamedTuple):
    annotation: Any
    field: Field  # as option() made it


class Table(NamedTuple):
    kind: type  # the dataclass
    is_optional: bool  # its field allows None: off unless given


class Schema:
    """The options and tables of a dataclass whose fields are options or dataclasses, by name.

    For the example above, schema.options has the keys "train.steps" and "train.seq_len", and
    schema.tables the keys "" (the root) and "train".
    """

    def __init__(self, kind: type, other_names: Mapping[str, str] | None = None):
        """other_names: what users may call an option, whole ("training.steps") or by its last part
        ("max_steps"), and what they are to write. For suggestions alone."""
        self.other_names = other_names or {}
        self.options: dict[str, Option] = {}
        self.tables: dict[str, Table] = {}
        self._add(kind, "", is_optional=False)

    def _add(self, kind: type, table: str, is_optional: bool) -> None:
        self.tables[table] = Table(kind, is_optional)
        for key, annotation in typing.get_type_hints(kind).items():
            name = f"{table}.{key}".strip(".")
            inner = members(annotation)[0]
            if is_dataclass(inner):
                self._add(inner, name, NoneType in typing.get_args(annotation))
            else:
                self.options[name] = Option(annotation, kind.__dataclass_fields__[key])

    def section(self, table: str) -> dict[str, Option]:
        """The options of one table, by key."""
        section = {}
        for name, option in self.options.items():
            prefix, _, key = name.rpartition(".")
            if prefix == table:
                section[key] = option
        return section

    def read(self, raw: dict, path: str, overrides: Iterable[str] = ()) -> "Given":
        """Reads the tables of a file, with the command line's overrides on top. `path` names their
        origin in errors."""
        given = Given(self, path)
        values = flatten(raw, self.options)
        given.origins = dict.fromkeys(values, path)
        for override in overrides:
            name, _, text = override.removeprefix("--").partition("=")
            overriding = flatten({name: self._parse(name, text)}, self.options)
            given.origins |= dict.fromkeys(overriding, "command line")
            if text == "off" and name in self.tables and self.tables[name].is_optional:
                values = {key: value for key, value in values.items() if not is_in(key, name)}
            else:
                values |= overriding
        for name, value in values.items():
            given.add(name, value)
        return given

    def _parse(self, name: str, text: str) -> Any:
        """The value of --name=text: the text itself if the option is a string, else TOML, else a
        word such as auto."""
        if name in self.options:
            kinds = members(self.options[name].annotation)
            if all(kind is str or typing.get_origin(kind) is Literal for kind in kinds):
                return text
        try:
            parsed = tomli.loads(f"value = {text}")
        except (ValueError, RecursionError):  # not TOML, or absurdly many digits or brackets
            return text
        if len(parsed) > 1:  # the text has a line break and more keys
            return text
        return parsed["value"]

    def fit(self, name: str, value: Any) -> Any:
        """The value converted for the dataclass. Raises ValueError saying what it must be."""
        if name in self.tables:
            if value == {}:
                return value
            off = ""
            if self.tables[name].is_optional:
                off = "; off removes it from the command line"
            raise ValueError(f"must be a table, written [{name}]{off}")
        if name not in self.options:
            kind = "section" if value == {} else "option"
            raise ValueError(f"unknown {kind}{self._suggestion(name)}")
        annotation, option_field = self.options[name]
        try:
            fitted = _fit(value, annotation)
        except TypeError:
            requirement = f"must be {_describe(annotation)}"
            if type(value) in members(annotation):
                requirement += ", neither empty nor infinite nor out of range"
            if isinstance(value, str) and not _is_unicode(value):
                requirement = "holds bytes that are not characters in this shell's encoding"
                with contextlib.suppress(ValueError):
                    os.fsencode(value).decode()
                    requirement += "; PYTHONUTF8=1 ./run_train.sh ... reads them as UTF-8"
            raise ValueError(requirement + option_field.metadata["note"]) from None
        except ConfigError as error:  # of tables in a list
            raise ValueError("; ".join(error.problems)) from None
        if option_field.metadata["is_path"]:
            fitted = fit_path(fitted)
        constraint = option_field.metadata["constraint"]
        if constraint and not constraint.holds(fitted):
            raise ValueError(constraint.requirement)
        return fitted

    def _suggestion(self, name: str) -> str:
        """What other trainers call by that name, the right key in the wrong section, else the
        closest spelling."""
        if name == "help":
            return "; write --help and the name as two words"
        key = name.rpartition(".")[2]
        same_key = [known for known in self.options if known.endswith(f".{key}")]
        # eval.steps is what others call eval_steps
        meant = self.other_names.get(name) or self.other_names.get(name.replace(".", "_"))
        if not meant and not same_key:
            meant = self.other_names.get(key)
        if meant:
            return f"; did you mean {meant}?"
        target = same_key[0] if same_key else name
        suggestion = nearest(target, [*self.tables, *self.options])
        if suggestion:
            return suggestion
        tables = [table for table in self.tables if table]
        return f"; there are {', '.join(tables or self.options)}"

    def extra_of(self, name: str, value: Any) -> str | None:
        """The extra that an option with this value needs. `name` may be a table that is given
        without options."""
        if name in self.tables:
            if not self.tables[name].is_optional:
                return None
            # all options of an optional table need the same extra
            first = next(iter(self.section(name).values()))
            return first.field.metadata["extra"]
        option_field = self.options[name].field
        table = self.tables[name.rpartition(".")[0]]
        if value == option_field.default and not table.is_optional:
            return None
        return option_field.metadata["extra"]

    def complete(self, tables: dict) -> dict[str, Any]:
        """Every option's value, by name, from tables that to_dict() made.

        An option that the tables lack, because they are older than it, gets its default. A key that
        is no longer an option is kept as is.
        """
        values = {}
        for name, option in self.options.items():
            default = option.field.default
            values[name] = None if default is MISSING else default
        for name, value in flatten(tables, self.options).items():
            try:
                values[name] = self.fit(name, value)
            except ValueError:  # rejected by a newer rule
                values[name] = value
        return values

    def to_toml(self, tables: dict) -> str:
        """Tables as TOML text, which read() reads back as equal ones."""
        values = flatten(tables, self.options)
        lines = []
        for table in self.tables:
            rows = []
            for key in self.section(table):
                name = f"{table}.{key}"
                if name in values:
                    rows.append(f"{key} = {toml(values[name])}")
            if rows or table in values:
                lines += ["", f"[{table}]", *rows]
        return "\n".join(lines).strip() + "\n"

    def help(self, subject: str | None = None) -> str:
        """Every option with its default, type and meaning; of a subject those of a section, or the
        options of that name, whole or without their section. Raises ConfigError if there are
        none."""
        lines = []
        for table, (_, is_optional) in self.tables.items():
            options = {}
            for key, option in self.section(table).items():
                if subject in (None, table, key, f"{table}.{key}"):
                    options[key] = option
            if table and (options or subject in (None, table)):
                off = "   (off unless given)" if is_optional else ""
                lines += ["", f"[{table}]{off}"]
            for key, option in options.items():
                lines += _help_lines(key, option)
            for key, option in options.items():
                for inner in typing.get_args(option.annotation):
                    if is_dataclass(inner):
                        lines += ["", f"[[{table}.{key}]]   (one table each)", Schema(inner).help()]
        if not lines:
            suggestion = self._suggestion(subject or "")
            raise ConfigError(f"--help {subject}: no such section or option{suggestion}")
        return "\n".join(lines).strip("\n")


def _help_lines(key: str, option: Option) -> list[str]:
    """An option as TOML, with its meaning as a comment that is wrapped at words."""
    default = option.field.default
    if default is MISSING:
        shown = "required"
    elif default is None:
        shown = "absent"
    else:
        shown = toml(default)
    assignment = f"  {key} = {shown}"
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    indent = 32 * " "
    meaning = f"{_describe(option.annotation)}: {option.field.metadata['doc']}"
    comments = textwrap.wrap(
        meaning,
        width,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    if len(assignment) < len(indent):
        comments[0] = assignment.ljust(len(indent)) + comments[0].lstrip()
        return comments
    return [assignment, *comments]


@dataclass
class Given:
    """The user's input by option: valid values, their origins, and the problems of the others.

    Of a file my.toml with [train] steps = 10, and --train.seq_len=0 on the command line:

        values    {"train.steps": 10}
        origins   {"train.steps": "my.toml", "train.seq_len": "command line"}
        problems  {"train.seq_len": "command line: [train] seq_len = 0: must be greater than 0"}
    """

    schema: Schema
    path: str  # of the file
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        try:
            self.values[name] = self.schema.fit(name, value)
        except ValueError as error:
            origin = self.origins[name]
            self.problems[name] = f"{origin}: {toml_name(name)} = {toml(value)}: {error}"

    def has_table(self, table: str) -> bool:
        """Whether the table, or an option in it, is given."""
        return any(is_in(name, table) for name in self.values)

    def build(self, table: str = "") -> Any:
        """The dataclass, with placeholders for invalid or missing values: `problems` names them."""
        kind, is_optional = self.schema.tables[table]
        if is_optional and not self.has_table(table):
            return None
        arguments = {}
        for f in fields(kind):
            name = f"{table}.{f.name}".strip(".")
            if name in self.schema.tables:
                arguments[f.name] = self.build(name)
                continue
            value = self.values.get(name, f.default)
            if value is MISSING:
                problem = f"{self.path}: {toml_name(name)}: is missing, and has no default"
                self.problems.setdefault(name, problem)
                value = 1  # required options are numbers; no rule reads this one
            arguments[f.name] = value
        return kind(**arguments)


def require(built: Any, rules: Iterable[Rule], given: Given | None = None) -> None:
    """Raises ConfigError with given's problems and the violated rules. Skips rules that read an
    invalid option."""
    problems = []
    invalid = set()
    if given:
        problems += given.problems.values()
        invalid |= given.problems.keys()
    for rule in rules:
        names = rule.options.split()
        if rule.holds or invalid & set(names):
            continue
        name = names[0]
        value = operator.attrgetter(name)(built)
        origin = f"{given.origins.get(name, given.path)}: " if given else ""
        problems.append(f"{origin}{toml_name(name)} = {toml(value)}: {rule.requirement}")
    if problems:
        raise ConfigError(*problems)


def fit_path(path: str) -> str:
    """The path with ~ replaced by the home folder: no shell does that in a file, nor behind the = of
    --run.output_dir=~/runs. Raises ValueError for what would make a folder of that name here."""
    if re.search(r"\$(\w|\{)", path):
        raise ValueError(
            "only a shell replaces variables; write the path itself or, on the command line, "
            'double quotes: "--section.key=$HOME/..."'
        )
    if re.match(r"\w+://", path):
        raise ValueError("is a URL; only paths on this machine are read and written, so copy it")
    return os.path.expanduser(path)


def repeated(overrides: Iterable[str]) -> list[str]:
    """A line for each option that has several values on the command line, as a shell makes of
    --data.source={a,b}.jsonl."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        values.setdefault(name, []).append(text)
    lines = []
    for name, texts in values.items():
        if len({*texts}) > 1:
            lines.append(f"{name} is given {len(texts)} times; the last counts: {texts[-1]}")
    return lines


def positive(text: str, kind: type = float) -> Any:
    """A positive finite number, as a type for argparse."""
    with contextlib.suppress(ValueError):
        number = kind(text)
        if 0 < number < math.inf:
            return number
    requirement = "an integer" if kind is int else "finite"
    raise argparse.ArgumentTypeError(f"{text} must be {requirement}, above 0")


def nearest(text: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def read_toml(path: str) -> dict:
    """The tables of a file. Raises ConfigError if it cannot be read, is not TOML, or is empty."""
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        raw = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # tomli's own error is a ValueError
        hint = ""
        if text.startswith("\ufeff"):
            hint = "; it begins with a byte order mark, save it without"
        problem = str(error).partition("; use sys.")[0]  # drops Python's advice to programmers
        raise ConfigError(f"{path}: is not valid TOML: {problem}{hint}") from None
    if not raw:
        raise ConfigError(f"{path}: is empty; configs/tiny.toml shows what a run needs")
    return raw


def to_dict(built: Any) -> dict:
    """A dataclass as plain tables, without None values."""
    return dataclasses.asdict(built, dict_factory=_to_table)


def _to_table(items: list[tuple[str, Any]]) -> dict[str, Any]:
    table = {}
    for key, value in items:
        if isinstance(value, tuple):
            value = [*value]
        if value is not None:
            table[key] = value
    return table


def flatten(table: dict, leaves: Container[str] = (), prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}, "c": {}} -> {"a.b": 1, "c": {}}; a table named in `leaves` stays nested."""
    flat = {}
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and value and name not in leaves:
            flat |= flatten(value, leaves, f"{name}.")
        else:
            flat[name] = value
    return flat


def is_in(name: str, table: str) -> bool:
    """Whether an option belongs to a table, or to one inside it. A table belongs to itself."""
    return f"{name}.".startswith(f"{table}.")


def toml_name(name: str) -> str:
    """train.steps -> [train] steps."""
    section, _, key = name.rpartition(".")
    return f"[{section}] {key}" if section else key


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if is_dataclass(value):
        value = to_dict(value)
    if isinstance(value, dict):
        pairs = [f"{_toml_key(key)} = {toml(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    is_bare = re.fullmatch("[A-Za-z0-9_-]+", key)
    return key if is_bare else json.dumps(key)


def members(annotation: Any) -> tuple:
    """The types that an annotation allows, None left out."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return (annotation,)
    return tuple(kind for kind in typing.get_args(annotation) if kind is not NoneType)


def _is_text(value: Any) -> bool:
    """Whether a file can hold the value as a string option."""
    if not isinstance(value, str) or value == "" or "\0" in value:
        return False
    # an argument that is not UTF-8 has surrogates in Python
    return value == value.encode(errors="ignore").decode()


SCALARS = {
    bool: Constraint(lambda v: isinstance(v, bool), "true or false"),
    # bool is an int in Python
    int: Constraint(lambda v: type(v) is int and abs(v) < 2**63, "an integer"),
    # no nan, no inf
    float: Constraint(lambda v: type(v) in (int, float) and abs(v) < 1e300, "a number"),
    str: Constraint(_is_text, "text"),
}


def _fit(value: Any, annotation: Any) -> Any:
    """The value converted to the annotation. Raises TypeError if it does not fit, and ConfigError
    if it is an invalid table, or a list with one."""
    for member in members(annotation):
        origin = typing.get_origin(member)
        args = typing.get_args(member)
        if member in SCALARS and SCALARS[member].holds(value):
            return member(value)
        if origin is Literal and value in args:
            return value
        if origin is tuple and isinstance(value, list):
            any_length = args[-1] is ...
            if any_length or len(args) == len(value):
                return tuple(together(*(partial(_fit, item, args[0]) for item in value)))
        if is_dataclass(member) and isinstance(value, dict):
            return _fit_table(value, member)
    raise TypeError


def _fit_table(table: dict, kind: Any) -> Any:
    given = Schema(kind).read(table, toml(table))
    built = given.build()
    if given.problems:
        raise ConfigError(*given.problems.values())
    return built


def _is_unicode(text: str) -> bool:
    """Whether Python could decode all of it: else it holds surrogates."""
    return all(not "\ud800" <= character <= "\udfff" for character in text)


def _describe(annotation: Any) -> str:
    """What an option of this annotation must be, in words."""
    words = []
    for member in members(annotation):
        origin = typing.get_origin(member)
        args = typing.get_args(member)
        if origin is Literal:
            words += [f'"{word}"' for word in args]
        elif origin is tuple:
            length = "" if args[-1] is ... else f" of {len(args)}"
            words.append(f"a list{length}, of {_describe(args[0])} each")
        elif is_dataclass(member):
            words.append(f"a table of {', '.join(f.name for f in fields(member))}")
        else:
            words.append(SCALARS[member].requirement)
    return " or ".join(words)
