"""Chat templates: Jinja programs by others, rendered as transformers renders them, in a sandbox with bounds."""

import contextlib
import datetime
import hashlib
import json
import pathlib
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

import config
from config import ConfigError
from data.hub import local

TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
SECONDS, BYTES = 5.0, 1 << 30  # processor time and memory that rendering one conversation may take
LARGEST = 1 << 63  # integer that a template may multiply
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # no text has a use for them


def files_of(d: config.Data) -> dict[str, bytes]:
    """The template of a configuration's data, by its file's name. Raises ConfigError, also if it is no template."""
    assert d.tokenizer  # config.py requires it
    text = find_template(d.tokenizer, d.chat_template)
    try:
        with bounded():
            Sandbox().from_string(text)
    except ConfigError as error:
        raise ConfigError(f"{d.chat_template or d.tokenizer}: {error}") from None
    return {TEMPLATE: text.encode()}


def identity_of(d: config.Data) -> dict[str, str | None]:
    """What conversations add to the identity of prepared data. Raises ConfigError."""
    return {
        "messages_field": d.messages_field,
        "chat_template": hashlib.sha256(files_of(d)[TEMPLATE]).hexdigest(),
    }


def find_template(tokenizer: str | pathlib.Path, given: str | None = None) -> str:
    """The text of data.chat_template or, if that is absent, of the tokenizer's own template: chat_template.jinja beside
    it, else chat_template of its tokenizer_config.json. Raises ConfigError."""
    found = local(str(tokenizer))
    folder = found if found.is_dir() else found.parent
    path = pathlib.Path(given) if given else folder / TEMPLATE
    try:
        if given or path.exists():
            return path.read_bytes().decode()
        path = folder / SETTINGS
        found = json.loads(path.read_bytes()).get("chat_template") if path.exists() else None
    except OSError as error:
        raise ConfigError(f"{path}: chat template cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path}: chat template cannot be read: is not UTF-8, or no JSON object"
        ) from None
    if isinstance(found, list):  # several, by name
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get(
            "default"
        )
    if not isinstance(found, str):
        raise ConfigError(
            f"{tokenizer}: has no chat template; name a Jinja file, data.chat_template"
        )
    return found


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bounds processor time and memory. Turns whatever the body raises into ConfigError. Main thread only."""

    def end(*_: object) -> None:
        raise TimeoutError(f"takes more than {SECONDS:g} seconds")

    handler, (soft, hard) = (
        signal.signal(signal.SIGPROF, end),
        resource.getrlimit(resource.RLIMIT_AS),
    )
    limit = (
        int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        + BYTES
    )
    try:
        resource.setrlimit(
            resource.RLIMIT_AS,
            (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard),
        )
        signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)
        yield
    except ConfigError:
        raise
    except MemoryError:
        raise ConfigError(f"the chat template takes more than {BYTES >> 20:,} MiB") from None
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"the chat template fails{line}: {type(error).__name__}: {text}"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Generation(jinja2.ext.Extension):
    """{% generation %}: encloses what it renders in two marks."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        assert isinstance(self.environment, Sandbox)
        self.environment.has_blocks = True
        return jinja2.nodes.CallBlock(self.call_method("enclosed"), [], [], body).set_lineno(line)

    def enclosed(self, caller: Any) -> str:
        assert isinstance(self.environment, Sandbox)
        begin, end, _ = self.environment.marks
        return begin + caller() + end


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What transformers gives a chat template: no files, no attribute that leads to Python's internals."""

    # no signal ends the multiplication of integers as long as memory
    intercepted_binops = frozenset({"*", "**"})
    has_blocks = False  # {% generation %}
    marks = NONCHARACTERS[:3]  # begin and end of a block; guard, see Chat.guarded()

    def __init__(self) -> None:
        if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < (3, 1, 6):
            raise ConfigError(
                f"chat templates need jinja2 3.1.6 or later, whose sandbox has no known holes, not "
                f"{jinja2.__version__}: {sys.executable} -m pip install -U jinja2"
            )
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )

        def raise_exception(message: object) -> None:
            raise jinja2.TemplateError(str(message))

        def tojson(
            value: Any,
            ensure_ascii: bool = False,
            indent: Any = None,
            separators: Any = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value,
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )

        self.filters["tojson"] = tojson
        added: dict[str, Any] = {
            "raise_exception": raise_exception,
            "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
        }
        self.globals.update(added)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if any(
            isinstance(v, int) and abs(v) > (64 if operator == "**" and v is right else LARGEST)
            for v in (left, right)
        ):
            raise jinja2.sandbox.SecurityError(f"{operator} of a number as large as that")
        return super().call_binop(context, operator, left, right)
