"""Conversations to try chat fine-tuning on, offline: questions about Python's standard library.

    ./run_train.sh -m data.make_chat outputs/chat.jsonl

Each asks what a function does, which the first line of its docstring answers, or which arguments it
takes. Each line of the file is {"messages": [...]}.
"""

import ast
import collections
import json
import pathlib
import random
from collections.abc import Iterator

import files
from config import ConfigError, run_tool
from data.sources import stdlib_files

ANSWER_LENGTHS = range(20, 120)  # characters of a docstring's first line
MAX_REPEATS = 2  # of an answer: many docstrings are equal

Message = dict[str, str]


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name, function) of a module's public functions and of its public classes' public methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and is_public(node):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and is_public(node):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and is_public(method):
                    yield f"{node.name}.{method.name}", method


def is_public(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return not node.name.startswith("_")


def answers() -> Iterator[tuple[str, str, str]]:
    """(name, what it does, which arguments it takes) of the library's functions."""
    times_seen = collections.Counter()
    for path in stdlib_files():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for name, function in functions(tree):
            docstring = ast.get_docstring(function) or ""
            purpose = docstring.partition("\n")[0].strip()
            times_seen[purpose] += 1
            is_sentence = len(purpose) in ANSWER_LENGTHS and purpose.endswith(".")
            if is_sentence and times_seen[purpose] <= MAX_REPEATS:
                yield f"{path.stem}.{name}", purpose, describe_arguments(function)


def describe_arguments(function: ast.FunctionDef) -> str:
    signature = function.args
    names = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
    names = [name for name in names if name not in ("self", "cls")]
    if signature.vararg:
        names.append(f"*{signature.vararg.arg}")
    names += [argument.arg for argument in signature.kwonlyargs]
    if signature.kwarg:
        names.append(f"**{signature.kwarg.arg}")
    if not names:
        return "It takes no arguments."
    return f"It takes {', '.join(names)}."


def conversations() -> Iterator[list[Message]]:
    """Conversations about one to three functions each. About every other one of the functions they
    also ask which arguments it takes."""
    draw = random.Random(0)
    remaining = list(answers())
    draw.shuffle(remaining)
    while remaining:
        messages = []
        for _ in range(min(len(remaining), draw.randint(1, 3))):
            name, purpose, arguments = remaining.pop()
            messages += exchange(f"What does {name} do?", purpose)
            if draw.randint(0, 1):
                messages += exchange("Which arguments does it take?", arguments)
        yield messages


def exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("usage: ./run_train.sh -m data.make_chat FILE.jsonl")
    path = pathlib.Path(argv[0])
    lines = [json.dumps({"messages": messages}) for messages in conversations()]
    text = "\n".join(lines) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # leave an equal file alone: a newer one would have to be prepared again
        if not path.exists() or path.read_text() != text:
            files.write_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    files.print_line(f"wrote {len(lines):,} conversations to {path}")
    return 0


if __name__ == "__main__":
    run_tool(main)
