"""Conversations to try chat fine-tuning on, without a network: questions about Python's standard library.

    python -m data.make_chat outputs/chat.jsonl

What a function does, by the first line of its docstring; then which arguments it takes. {"messages": [...]} a line.
"""

import ast
import collections
import json
import pathlib
import re
from collections.abc import Iterator

import config
import files
from config import ConfigError, run_tool
from data.sources import Files

ANSWER = range(20, 120)  # characters of a docstring's first line
OFTEN = 2  # times that an answer may be given: docstrings repeat


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name, function) of a module's functions and its classes' methods, without private ones."""
    for node in tree.body:
        inner = [(f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef)] if isinstance(
            node, ast.ClassDef) else [(node.name, node)] if isinstance(node, ast.FunctionDef) else []
        yield from ((name, f) for name, f in inner if not re.search(r"(^|\.)_", name))


def conversations() -> Iterator[list[dict[str, str]]]:
    given = collections.Counter()
    for path in Files(config.Data(), None).paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for name, function in functions(tree):
            answer = (ast.get_docstring(function) or "").partition("\n")[0].strip()
            given[answer] += 1
            if len(answer) in ANSWER and answer.endswith(".") and given[answer] <= OFTEN:
                arguments = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
                takes = f"It takes {', '.join(arguments)}." if arguments else "It takes no arguments."
                yield [{"role": role, "content": text} for role, text in (
                    ("user", f"What does {path.stem}.{name} do?"), ("assistant", answer),
                    ("user", "Which arguments does it take?"), ("assistant", takes))]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("usage: python -m data.make_chat FILE.jsonl")
    path, lines = pathlib.Path(argv[0]), [json.dumps({"messages": messages}) for messages in conversations()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    files.print_line(f"wrote {len(lines):,} conversations to {path}")
    return 0


if __name__ == "__main__":
    run_tool(main)
