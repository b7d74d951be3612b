"""Small wrong changes to the core, drawn by a seed, and whether the tests notice them; prints the survivors.

    python -m tests.mutants --count 300             two hours on two cores
    python -m tests.mutants --count 40 --of checkpoint/ --only tests/checkpoint

Each mutant is one edit in a copy of the repository: a comparison negated, an integer off by one, a statement dropped,
or two arguments swapped. The tests of the mutant's own folder run first, then all that are quick, then the pairs.
A mutant survives if they pass; a test that hangs notices it, too.
"""

import argparse
import ast
import pathlib
import queue
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.conftest import REPO, copy_tracked
from tests.test_house import CORE, FILES

SECONDS = 600  # for the tests of one mutant
NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


class Mutant(NamedTuple):
    path: str
    line: int
    before: str
    after: str
    text: str  # the whole file with the edit


def edits_of(source: str, node: ast.AST) -> list[tuple[ast.expr | ast.stmt, str]]:
    """(node to replace, what stands there instead), for each edit of this node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left = ast.get_source_segment(source, node.left)
        right = ast.get_source_segment(source, node.comparators[0])
        return [(node, f"{left} {NEGATED[type(node.ops[0])]} {right}")]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [(node, str(node.value + 1))]
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = (ast.get_source_segment(source, argument) for argument in node.args)
        if first != second and "*" not in f"{first}{second}"[:1]:
            function = ast.get_source_segment(source, node.func)
            return [(node, f"{function}({second}, {first})")]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return [(node, "pass")]
    if isinstance(node, (ast.AugAssign, ast.Continue)):
        return [(node, "pass")]
    return []


def mutants_of(path: str) -> list[Mutant]:
    source = (REPO / path).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    mutants = []
    for node in ast.walk(ast.parse(source)):
        for target, after in edits_of(source, node):
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
            data = source.encode()
            changed = (data[:begin] + after.encode() + data[end:]).decode()
            before = data[begin:end].decode()
            try:
                ast.parse(changed)
            except SyntaxError:  # of several lines without their brackets
                continue
            mutants.append(Mutant(path, target.lineno, before, after, changed))
    return mutants


def is_noticed(mutant: Mutant, copy: pathlib.Path, only: list[str]) -> bool:
    """Whether a test of this copy fails with the mutant."""
    path = copy / mutant.path
    original = path.read_text()
    path.write_text(mutant.text)
    room = f"tests/{mutant.path.split('/')[0]}"
    mirrored = [room] if (copy / room).is_dir() else [f"tests/test_{mutant.path}"]
    runs = [only] if only else [mirrored, ["tests", "-m", "quick"], ["tests/test_pairs.py"]]
    try:
        for arguments in runs:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, *arguments], cwd=copy, timeout=SECONDS, capture_output=True
            )
            if done.returncode not in (0, 5):  # 5: no test was selected
                return True
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", default="", help="files whose path begins so")
    parser.add_argument("--only", nargs="*", default=[], help="the tests to run, for pytest")
    given = parser.parse_args()
    files = [FILES[module] for module in CORE if FILES[module].startswith(given.of)]
    every = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        copies = queue.SimpleQueue()
        for name in "ab":
            copies.put(copy_tracked(pathlib.Path(folder, name)))

        def notice(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return is_noticed(mutant, copy, given.only)
            finally:
                copies.put(copy)

        unchanged = Mutant("train.py", 1, "", "", (REPO / "train.py").read_text())
        assert not notice(unchanged), "the tests fail without a mutant"
        survivors = 0
        for mutant, noticed in zip(drawn, pool.map(notice, drawn)):
            if not noticed:
                survivors += 1
                print(f"{mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    print(f"{len(drawn) - survivors} of {len(drawn)} mutants were noticed")


if __name__ == "__main__":
    main()
