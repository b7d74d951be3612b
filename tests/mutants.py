"""Would a test notice? Small wrong changes, at random places, each against the tests that run the changed line:

    ./tests/run.sh --mutants 40 data/ --seed 3

In copies of the repository, so that yours stays as it is. Which tests run a line is known from ./tests/run.sh --record
(tests/lines.py), which a first call makes. The cheapest come first, --seconds of them for a change (60), and the first
that fails ends it: the change is noticed. Those that nobody noticed are printed as diffs; the last line counts.

No library does this here: mutmut and cosmic-ray know which tests to run from one process alone, and most of these tests
start others.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import ctypes
import difflib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests import lines, warm
from tests.changed import functions, is_own

REPO = lines.REPO
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.And: "or",
    ast.Or: "and",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
NAMES = {
    "any": "all",
    "all": "any",
    "min": "max",
    "max": "min",
    "sorted": "list",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float64": "float32",
    "int64": "int32",
    "int32": "int16",
}
FORKED = multiprocessing.get_context("fork")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
IN_TWOS = ["-n", "2", "--dist", "loadfile"]
HANGS = (30, 6)  # a test that takes 30 s, and 6 times as long as it did, hangs


@dataclass(frozen=True)
class Change:
    file: str
    line: int  # from 1
    statement: int  # its first line
    start: int  # in characters of the file's text
    end: int
    text: str  # instead of what stands there
    kind: str
    key: str  # names it, and does not depend on other lines

    def applied(self) -> str:
        text = (REPO / self.file).read_text()
        return text[: self.start] + self.text + text[self.end :]

    def compiles(self) -> bool:
        """And is a change: not of a bracket alone."""
        before = ast.parse((REPO / self.file).read_text())
        try:
            return ast.dump(ast.parse(self.applied())) != ast.dump(before)
        except SyntaxError:
            return False

    def diff(self) -> str:
        before = (REPO / self.file).read_text().splitlines(keepends=True)
        after = self.applied().splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.file, self.file, n=1))


# --- what could go wrong ----------------------------------------------------------------------------------------------


class Source:
    """A file, and all that this tool can do to it. Annotations, docstrings, assertions, the texts of errors and pieces
    of f-strings stay as they are."""

    def __init__(self, file: str):
        self.file = file
        self.text = (REPO / file).read_text()
        self.rows = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.rows))]
        self.seen: collections.Counter[str] = collections.Counter()
        self.changes: list[Change] = []
        for node, statement in walk(ast.parse(self.text)):
            self.statement = statement
            self.change_operator(node)
            self.change_value(node)
            self.leave_out(node)

    def place(self, line: int, column: int) -> int:
        """In the text, of ast's column, which counts bytes."""
        return self.starts[line - 1] + len(self.rows[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.place(node.lineno, node.col_offset)
        return start, self.place(node.end_lineno, node.end_col_offset)

    def add(self, kind: str, node: ast.AST, span: tuple[int, int], instead: str) -> None:
        row, was = self.rows[node.lineno - 1].strip(), self.text[slice(*span)]
        key = f"{self.file}: {kind}: {row}: {was} -> {instead}"
        self.seen[key] += 1
        key = f"{key} {self.seen[key]}"
        self.changes.append(
            Change(self.file, node.lineno, self.statement, *span, instead, kind, key)
        )

    def change_operator(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operands = [node.left, node.comparators[0]]
            operator = COMPARISONS[type(node.ops[0])]
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            operands = [node.left, node.right]
            operator = OPERATORS[type(node.op)]
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            operands = node.values
            operator = OPERATORS[type(node.op)]
        else:
            return
        # between its operands, whose brackets stay
        start, end = self.span(operands[0])[1], self.span(operands[1])[0]
        was = self.text[start:end].strip(" ()\n")
        if was.isprintable():  # no comment stands there
            start += self.text[start:end].index(was)
            self.add("operator", node, (start, start + len(was)), operator)

    def change_value(self, node: ast.AST) -> None:
        start, end = self.span(node) if hasattr(node, "lineno") else (0, 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self.add("constant", node, (start, end), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            self.add("constant", node, (start, end), repr(node.value + 1))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in NAMES:
                self.add("name", node, (end - len(name), end), NAMES[name])
        elif isinstance(node, ast.Slice):
            for border in filter(None, (node.lower, node.upper)):
                span = self.span(border)
                self.add("border", border, span, f"{self.text[slice(*span)]} + 1")
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            span = self.span(node.test)
            self.add("condition", node.test, span, f"(not ({self.text[slice(*span)]}))")

    def leave_out(self, node: ast.AST) -> None:
        """The last argument of a call; a statement that others see the effect of."""
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword for keyword in node.keywords if keyword.arg)]
            if len(arguments) > 1:
                end = self.span(arguments[-1])[1]
                self.add("argument", node, (self.span(arguments[-2])[1], end), "")
        statement = isinstance(node, ast.Expr | ast.AugAssign | ast.Continue | ast.Break)
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if statement or isinstance(target, ast.Attribute | ast.Subscript):
            self.add("statement", node, self.span(node), "pass")


def walk(node: ast.AST, first: int = 1) -> Iterator[tuple[ast.AST, int]]:
    """What runs, in a file's order, each with the first line of its statement."""
    if isinstance(node, ast.stmt):
        first = node.lineno
    yield node, first
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr | ast.Assert | ast.Raise) or is_text(child):
                continue
            if isinstance(child, ast.AST):
                yield from walk(child, first)


def is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# --- whether a test notices -------------------------------------------------------------------------------------------


class Plan:
    """Which tests to run for a change."""

    def __init__(self, record: lines.Record, seconds: float):
        self.record, self.seconds = record, seconds

    def tests(self, change: Change) -> dict[str, int]:
        """Those that run the line, the module's own first and the cheapest first; then its own that do not, or run what
        torch.compile made of it, unseen. Until the seconds are spent. Each with the seconds after which it hangs."""
        own = {test for test in self.record.seconds if is_own(test, change.file)}

        def rank(test: str) -> tuple:
            return test not in found, test not in own, self.cost(test, set()), test

        found = self.reaching(change)
        chosen: dict[str, int] = {}
        paid: set[str] = set()
        left = self.seconds
        for test in sorted((found | own) - {*self.record.failed}, key=rank):
            cost = self.cost(test, paid)
            if cost <= left:
                left -= cost
                paid |= {*self.record.shared.get(test, ())}
                chosen[test] = int(HANGS[0] + HANGS[1] * self.cost(test, set()))
        return chosen

    def reaching(self, change: Change) -> set[str]:
        text = (REPO / change.file).read_text()
        bodies = functions(text, bodies=True)
        if change.line in bodies:
            return self.record.tests_of(change.file, change.line) or self.record.tests_of(
                change.file, change.statement
            )
        # What an import runs. Of a default: those that call its function; else those of the file.
        name = functions(text).get(change.line)
        body = [line for line in bodies if name and bodies[line] == name]
        return self.record.tests_of(change.file, *body)

    def cost(self, test: str, paid: set[str]) -> float:
        """Seconds, with those of the fixtures that are not there yet."""
        fixtures = {*self.record.shared.get(test, ())} - paid
        return self.record.seconds[test] + sum(self.record.fixtures.get(f, 0) for f in fixtures)


class Copy:
    """A clone with what is not committed, in which one change at a time is made and taken back."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.writes = 0
        subprocess.run(["git", "clone", "-q", "--shared", REPO, folder], check=True)
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO)
        for name in listed.decode().splitlines():
            if (REPO / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, folder / name)

    def write(self, file: str, text: str) -> None:
        """With a time that it never had: by its time and size Python knows whether what it compiled is still true."""
        self.writes += 1
        (self.folder / file).write_text(text)
        os.utime(self.folder / file, (self.writes, self.writes))

    def noticed_by(self, change: Change, limits: dict[str, int]) -> str:
        """The test that fails with the change, and without it does not; or what else goes wrong with it alone, such as
        a file that cannot be imported; else nothing."""
        while limits:
            self.write(change.file, change.applied())
            failed = self.first_failure(limits)
            self.write(change.file, (REPO / change.file).read_text())
            again = {failed: limits[failed]} if failed in limits else limits
            if not failed or not self.first_failure(again):
                return failed
            if failed not in limits:
                return ""
            tried = [*limits].index(failed) + 1
            limits = dict(itertools.islice(limits.items(), tried, None))
        return ""

    def first_failure(self, limits: dict[str, int]) -> str:
        """Of these tests, each with the seconds that it may take; or what else went wrong. Empty if all pass."""
        told = self.folder / ".failed"
        told.write_text("")
        process = FORKED.Process(target=run_tests, args=(limits, self.folder, told))
        process.start()
        process.join(sum(limits.values()))
        left = psutil.Process().children(recursive=True)
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.join()
        psutil.wait_procs(left, timeout=5)  # no zombies
        if told.read_text():
            return told.read_text()
        nothing_ran = process.exitcode == pytest.ExitCode.NO_TESTS_COLLECTED
        return "" if not process.exitcode or nothing_ran else f"exit code {process.exitcode}"


class FirstFailure:
    """A plugin: these tests in this order; tells the first that fails."""

    def __init__(self, limits: dict[str, int], told: pathlib.Path):
        self.limits, self.told = limits, told
        self.order = {test: number for number, test in enumerate(limits)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that takes far longer than it did hangs."""
        signal.signal(signal.SIGALRM, lambda *_: self.told.write_text(nodeid) and os._exit(1))
        signal.alarm(self.limits[nodeid])

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.told.write_text(report.nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.told.write_text(report.nodeid)


def run_tests(limits: dict[str, int], folder: pathlib.Path, told: pathlib.Path) -> None:
    os.setsid()
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(place for place in sys.path if place not in ("", str(REPO)))]
    files = dict.fromkeys(test.split("::")[0] for test in limits)
    files = [file for file in files if (folder / file).exists()]  # since --record
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={folder}"]
    os._exit(pytest.main([*options, *files], plugins=[FirstFailure(limits, told)]))


# --- the command ------------------------------------------------------------------------------------------------------


def chosen(folders: list[str], count: int, seed: str) -> list[Change]:
    """Drawn by a digest of each, so that they remain the same when other lines are edited."""
    listed = subprocess.check_output(["git", "ls-files", "--", *folders], cwd=REPO, text=True)
    files = [name for name in listed.splitlines() if name.endswith(".py")]
    drawn = list(itertools.chain.from_iterable(Source(file).changes for file in files))
    drawn.sort(key=lambda change: hashlib.sha256(f"{seed} {change.key}".encode()).digest())
    return list(itertools.islice(filter(Change.compiles, drawn), count))


def start_worker(place: str, record: lines.Record, seconds: float) -> None:
    """In each process that judges."""
    global copy, plan
    if sys.platform == "linux":
        # what a test leaves behind becomes a child of this process, which ends it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    copy = Copy(pathlib.Path(tempfile.mkdtemp(dir=place), "copy"))
    plan = Plan(record, seconds)


def judge(change: Change) -> dict:
    tests = plan.tests(change)
    started = time.monotonic()
    noticed_by = copy.noticed_by(change, tests)
    return {
        "where": f"{change.file}:{change.line}",
        "kind": change.kind,
        "diff": change.diff(),
        "tests": len(tests),
        "noticed_by": noticed_by,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("folders", nargs="+", help="folders or files, as git knows them")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for a change, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=pathlib.Path, help="kept here; continues what is there")
    arguments = parser.parse_args()
    if not lines.RECORD.exists():
        print("first, the lines that each test runs: ./tests/run.sh --record", file=sys.stderr)
        lines.record(IN_TWOS)
    record = lines.read()
    drawn = chosen(arguments.folders, arguments.count, arguments.seed)
    moved = {change.file for change in drawn if record.has_changed(change.file)}
    if moved:
        print(f"other lines than --record saw: {', '.join(sorted(moved))}", file=sys.stderr)
    results: dict[str, dict] = {}
    if arguments.results and arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    noticed = {key for key, result in results.items() if result["noticed_by"]}
    remaining = [change for change in drawn if change.key not in noticed]
    preload()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as place,
        concurrent.futures.ProcessPoolExecutor(
            arguments.jobs,
            FORKED,
            initializer=start_worker,
            initargs=(place, record, arguments.seconds),
        ) as pool,
    ):
        waiting = {pool.submit(judge, change): change for change in remaining}
        for done in concurrent.futures.as_completed(waiting):
            result = results[waiting[done].key] = done.result()
            print(described(result), flush=True)
            if arguments.results:
                arguments.results.write_text(json.dumps(results, indent=1))
    survivors = [change for change in drawn if not results[change.key]["noticed_by"]]
    for change in survivors:
        print(f"\nnot noticed by {results[change.key]['tests']} tests:\n{change.diff()}", end="")
    print(f"\n{len(drawn) - len(survivors)} of {len(drawn)} noticed")


def described(result: dict) -> str:
    noticed_by = result["noticed_by"] or f"NOT NOTICED by {result['tests']} tests"
    return f"{result['where']}: {result['kind']}: {noticed_by} ({result['seconds']} s)"


def preload() -> None:
    """What the tests import, once for all that are forked."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in (*warm.PRELOADED, "transformers.models.llama.modeling_llama", "peft", "datasets"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os.environ["WARM_PYTHON"] = warm.warm_python()
    os.environ["PYTHON"] = sys.executable


if __name__ == "__main__":
    main()
