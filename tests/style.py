"""The rules of style that a program can check; `./tests/run.sh --lint` does. The others are for readers.

python tests/style.py [FILE ...]        all tracked Python files, or these; 1 and a line for each offence, else 0
"""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of each."""
    allowed_walruses = set(map(id, walruses_of_tests(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and multiplies_text(node):
            yield node.lineno, "text multiplied by a condition: write an if"
        if isinstance(node, ast.Assign) and assigns_three(node):
            yield node.lineno, "three assignments in one: write three lines"
        if isinstance(node, ast.NamedExpr) and id(node) not in allowed_walruses:
            yield node.lineno, "a walrus inside a larger expression: assign first"
        if is_long_double_loop(node):
            yield node.lineno, "two `for`s in a comprehension of several lines: write loops"


def multiplies_text(node: ast.BinOp) -> bool:
    """Whether text is multiplied by what may be a condition, or a list by one. A character times a
    count is fine, as "-" * width, and so is text times a number."""
    for side, factor in ((node.left, node.right), (node.right, node.left)):
        if isinstance(factor, ast.Constant):
            continue
        if isinstance(side, ast.JoinedStr):
            return True
        if isinstance(side, ast.Constant) and isinstance(side.value, str):
            return len(side.value) > 1
        if isinstance(side, ast.List) and isinstance(
            factor, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            return True
    return False


def is_long_double_loop(node: ast.AST) -> bool:
    if not isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return False
    return len(node.generators) > 1 and node.end_lineno != node.lineno


def assigns_three(node: ast.Assign) -> bool:
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    return len(target.elts) > 2


def walruses_of_tests(tree: ast.AST) -> Iterator[ast.NamedExpr]:
    """Those that are the whole condition of an if, a while or a comprehension, its negation, or what it compares."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        else:
            continue
        for test in tests:
            if isinstance(test, ast.UnaryOp):
                test = test.operand
            elif isinstance(test, ast.Compare):
                test = test.left
            if isinstance(test, ast.NamedExpr):
                yield test


def main(files: list[str]) -> int:
    if not files:
        listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True)
        files = [name for name in listed.stdout.split() if pathlib.Path(name).exists()]
    failed = False
    for name in files:
        for line, problem in offences(ast.parse(pathlib.Path(name).read_text())):
            print(f"{name}:{line}: {problem}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
