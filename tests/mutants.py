"""Small wrong changes to the core, drawn by a seed, and whether the tests notice them; prints the survivors.

    python -m tests.mutants --count 300             four hours on two cores
    python -m tests.mutants --count 40 --of checkpoint/ --only tests/checkpoint

Each mutant is one edit in a copy of the repository: a comparison negated, an integer off by one, a statement dropped,
or two arguments swapped. The tests of the mutant's own folder run first, then all that are quick, then the pairs.
A mutant survives if they pass; a test that hangs notices it, too.
"""

import argparse
import ast
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tests.conftest import REPO, copy_tracked
from tests.test_house import CORE, FILES

SECONDS = 600  # for the tests of one mutant
NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
NEGATED |= {after: before for before, after in NEGATED.items()}


class Mutant(NamedTuple):
    path: str
    line: int
    before: str
    after: str
    text: str  # the whole file with the edit


def edit_of(node: ast.AST) -> ast.AST | None:
    """What replaces this node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [NEGATED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = node.args
        if ast.dump(first) != ast.dump(second) and not isinstance(first, ast.Starred):
            return ast.Call(node.func, [second, first], [])
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ast.Pass() if is_call or isinstance(node, (ast.AugAssign, ast.Continue)) else None


def mutants_of(path: str) -> list[Mutant]:
    source = (REPO / path).read_text()
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in ast.walk(ast.parse(source)):
        edit = edit_of(node)
        if edit is not None and isinstance(node, (ast.expr, ast.stmt)):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            after = ast.unparse(edit)
            text = (data[:begin] + after.encode() + data[end:]).decode()
            mutants.append(Mutant(path, node.lineno, data[begin:end].decode(), after, text))
    return mutants


def is_noticed(mutant: Mutant, copy: pathlib.Path, only: list[str]) -> bool:
    """Whether a test of this copy fails with the mutant."""
    path = copy / mutant.path
    original = path.read_text()
    path.write_text(mutant.text)
    room = f"tests/{mutant.path.split('/')[0]}"
    mirrored = [path for path in (room, f"tests/test_{mutant.path}") if (copy / path).exists()]
    every = [*([path] for path in mirrored), ["tests", "-m", "quick"], ["tests/test_pairs.py"]]
    options = ["-x", "-q", "-n", "2", "-p", "no:cacheprovider"]
    try:
        for arguments in [only] if only else every:
            command = [sys.executable, "-m", "pytest", *options, *arguments]
            done = subprocess.run(command, cwd=copy, timeout=SECONDS, capture_output=True)
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
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_tracked(pathlib.Path(folder))
        # some tests list the tracked files
        subprocess.run("git init -q && git add -A", shell=True, cwd=copy, check=True)
        unchanged = Mutant("train.py", 1, "", "", (REPO / "train.py").read_text())
        assert not is_noticed(unchanged, copy, given.only), "the tests fail without a mutant"
        survivors = 0
        for mutant in drawn:
            if not is_noticed(mutant, copy, given.only):
                survivors += 1
                print(f"{mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    print(f"{len(drawn) - survivors} of {len(drawn)} mutants were noticed")


if __name__ == "__main__":
    main()
