"""Conversations to try chat fine-tuning on, without a network: questions about Python's standard library.

    python -m data.make_chat outputs/chat.jsonl

What a function does, by the first line of its docstring, and which arguments it takes. {"messages": [...]} a line.
"""

import ast
import collections
import json
import pathlib
import random
import re
from collections.abc import Iterator

import files
from config import ConfigError, run_tool
from data.sources import stdlib_files

ANSWER = range(20, 120)  # characters of a docstring's first line
OFTEN = 2  # times that an answer may be given: docstrings repeat


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name, function) of a module's functions and its classes' methods, without private ones."""
    for node in tree.body:
        inner = (
            [(f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef)]
            if isinstance(node, ast.ClassDef)
            else [(node.name, node)]
            if isinstance(node, ast.FunctionDef)
            else []
        )
        yield from ((name, f) for name, f in inner if not re.search(r"(^|\.)_", name))


def answers() -> Iterator[tuple[str, str, str]]:
    """(name, what it does, which arguments it takes) of the library's functions."""
    given = collections.Counter()
    for path in stdlib_files():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for name, function in functions(tree):
            answer = (ast.get_docstring(function) or "").partition("\n")[0].strip()
            given[answer] += 1
            if len(answer) in ANSWER and answer.endswith(".") and given[answer] <= OFTEN:
                arguments = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
                takes = (
                    f"It takes {', '.join(arguments)}." if arguments else "It takes no arguments."
                )
                yield f"{path.stem}.{name}", answer, takes


def conversations() -> Iterator[list[dict[str, str]]]:
    """Of one to three functions each; after every other answer, which arguments the function takes."""
    draw = random.Random(0)
    left = [*answers()]
    draw.shuffle(left)
    while left:
        turns = []
        for name, does, takes in [left.pop() for _ in range(min(len(left), draw.randint(1, 3)))]:
            turns += [f"What does {name} do?", does]
            turns += ["Which arguments does it take?", takes] * draw.randint(0, 1)
        yield [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
        ]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("usage: python -m data.make_chat FILE.jsonl")
    path, lines = (
        pathlib.Path(argv[0]),
        [json.dumps({"messages": messages}) for messages in conversations()],
    )
    text = "\n".join(lines) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            # a file that is written anew must be prepared anew
            files.write_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    files.print_line(f"wrote {len(lines):,} conversations to {path}")
    return 0


if __name__ == "__main__":
    run_tool(main)
