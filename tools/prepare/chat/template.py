"""Finds chat templates and renders them as transformers does. A template is a Jinja program of
unknown origin, so it runs in a sandbox."""

import contextlib
import datetime
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

import config
from config import ConfigError

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of named templates
DEFAULT = "default"  # the name of the template to use
SETTINGS = "tokenizer_config.json"
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # never used in texts


class Marks(NamedTuple):
    """Four characters that a conversation does not contain."""

    begin: str  # where a {% generation %} block begins
    end: str
    guard: str  # splits the name of a special token in a message, see Chat._guard()
    mark: str  # encloses a number, see MarkedMessages


def files_of(data: config.Data) -> dict[str, bytes]:
    """The chat template's bytes, by file name, for the folder of prepared data.

    Raises ConfigError if there is no template or it has a syntax error.
    """
    assert data.tokenizer  # a rule of [data]
    template = find_template(data.tokenizer, data.chat_template)
    try:
        with template_errors():
            Sandbox().from_string(template)
    except ConfigError as error:
        raise ConfigError(f"{data.chat_template or data.tokenizer}: {error}") from None
    return {TEMPLATE: template.encode()}


def identity_of(data: config.Data) -> dict[str, str]:
    """The hash of the template, for the manifest of prepared data. Raises ConfigError."""
    return {"chat_template": hashlib.sha256(files_of(data)[TEMPLATE]).hexdigest()}


def find_template(tokenizer: str | pathlib.Path, chat_template: str | None = None) -> str:
    """The text of the Jinja file `chat_template` or, if that is None, of the tokenizer's template.

    Raises ConfigError.
    """
    if chat_template:
        return read_text(pathlib.Path(chat_template))
    from extras.huggingface.hub import local

    folder = local(str(tokenizer))
    if not folder.is_dir():
        folder = folder.parent
    templates = templates_in(folder)
    if not templates:
        raise ConfigError(
            f"{tokenizer}: has no chat template; name a Jinja file, data.chat_template"
        )
    if DEFAULT not in templates:
        raise ConfigError(
            f"{tokenizer}: none of its chat templates, {', '.join(sorted(templates))}, is named "
            f"{DEFAULT}; name a Jinja file, data.chat_template"
        )
    return templates[DEFAULT]


def templates_in(folder: pathlib.Path) -> dict[str, str]:
    """The chat templates in a tokenizer's folder, by name. Searches where transformers does.

    Jinja files take precedence over tokenizer_config.json. Its chat_template is a text, an object,
    or a list of objects with name and template. Raises ConfigError.
    """
    files = {path.stem: path for path in (folder / MORE_TEMPLATES).glob("*.jinja")}
    if (folder / TEMPLATE).exists():
        files[DEFAULT] = folder / TEMPLATE
    if files:
        return {name: read_text(path) for name, path in files.items()}
    path = folder / SETTINGS
    if not path.exists():
        return {}
    try:
        templates = json.loads(read_text(path)).get("chat_template") or {}
        if isinstance(templates, str):
            templates = {DEFAULT: templates}
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        return {name: template for name, template in templates.items() if isinstance(template, str)}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        raise ConfigError(
            f"{path}: chat template cannot be read: no JSON object whose chat_template is a text, an "
            "object, or a list of objects with name and template"
        ) from None


def read_text(path: pathlib.Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: chat template cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: chat template cannot be read: is not UTF-8") from None


@contextlib.contextmanager
def template_errors() -> Iterator[None]:
    """Converts the errors of a template to ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        where = ""
        if isinstance(error, jinja2.TemplateSyntaxError):
            where = f", line {error.lineno}"
        raise ConfigError(
            f"the chat template fails{where}: {type(error).__name__}: {first_line}"
        ) from None


class Generation(jinja2.ext.Extension):
    """Implements {% generation %}: encloses the text of the block in two marks."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        assert isinstance(self.environment, Sandbox)
        self.environment.has_blocks = True
        return jinja2.nodes.CallBlock(self.call_method("enclosed"), [], [], body).set_lineno(line)

    def enclosed(self, caller: Any) -> str:
        assert isinstance(self.environment, Sandbox)
        marks = self.environment.marks
        return marks.begin + caller() + marks.end


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that transformers gives a chat template.

    A template can neither read files nor reach Python's internals.
    """

    has_blocks = False  # whether the template has a {% generation %} block
    marks = Marks(*NONCHARACTERS[:4])  # set for each conversation

    def __init__(self) -> None:
        version = re.findall(r"\d+", jinja2.__version__)[:3]
        if tuple(map(int, version)) < (3, 1, 6):
            raise ConfigError(
                f"chat templates need jinja2 3.1.6 or later, whose sandbox has no known holes, not "
                f"{jinja2.__version__}: {sys.executable} -m pip install -U jinja2"
            )
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = tojson
        functions: dict[str, Any] = {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        self.globals.update(functions)


# Functions for templates, with transformers' names and defaults


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's filter, does not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
