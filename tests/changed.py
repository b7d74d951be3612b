"""The tests that a change needs: `./tests/run.sh --changed` runs those that reach the functions that you changed, and
`--quick` those that reach most of the code in about a minute. Both are read from tests/map.json:

    ./tests/run.sh --record        # 20 minutes: the whole suite, under coverage
    ./tests/run.sh --write-map     # tests/map.json from that

--changed compares with HEAD, or with the commit before where nothing is uncommitted; `--changed main` with main.
With a module, it runs the tests that the map does not know, too, or knows otherwise: a fork's own, from the day that
they are written.
"""

import argparse
import ast
import collections
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys

from tests import lines

REPO = lines.REPO
MAP = REPO / "tests/map.json"
QUICK_SECONDS = 150  # of one core, recorded: about a minute on two free ones
CHANGED_SECONDS = 120
PER_LINE = 2  # tests that reach each line of a function
PER_FUNCTION = 10
SHOWN = 8  # of the tests that take longer than CHANGED_SECONDS together
OTHERS = {  # what Python's coverage does not see: a pattern of paths, and the tests of it
    r"configs/.*|.*\.toml": ["tests/test_config.py"],
    r".*\.md|docs/.*": ["tests/test_repo.py", "tests/test_fork_docs.py"],
    r"run_train\.sh": ["tests/test_launching.py", "tests/test_config.py"],
    r"requirements\.txt": ["tests/test_repo.py"],
}


# --- functions --------------------------------------------------------------------------------------------------------


def functions(text: str, bodies: bool = False) -> dict[int, str]:
    """By line, the name of the function around it, with bodies of what runs when it is called; lines outside of
    functions are absent."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, (*names, child.name))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                head = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                first = child.body[0].lineno if bodies else head
                for line in range(first, child.end_lineno + 1):
                    found[line] = ".".join((*names, child.name))
            else:
                visit(child, names)

    visit(ast.parse(text), ())
    return found


def changed_lines(since: str) -> dict[str, set[int]]:
    """By file, as it is now: lines that were changed or added, and the line before one that was removed."""
    diff = ["git", "diff", "-U0", "--no-color", "--no-ext-diff", "--no-renames", since]
    found: dict[str, set[int]] = collections.defaultdict(set)
    file = ""
    for line in output_of(*diff).splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            found[file] |= {*range(start, start + max(count, 1))}
    for file in output_of("git", "ls-files", "--others", "--exclude-standard").splitlines():
        found[file] = set()
    found.pop("/dev/null", None)
    return found


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(2)  # git has said why: no repository, no such commit
    return done.stdout


def digests_of_tests() -> dict[str, str]:
    """By test function, a digest of its text. Without tests/fake_cuda, which has an environment of its own."""
    found = {}
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        if "fake_cuda" in path.parts:
            continue
        text = path.read_text()
        lines_of = collections.defaultdict(list)
        for line, name in functions(text).items():
            lines_of[name].append(text.splitlines()[line - 1])
        for name, of_function in lines_of.items():
            if name.startswith("test_"):
                digest = hashlib.sha256("\n".join(of_function).encode()).hexdigest()[:8]
                found[f"{path.relative_to(REPO).as_posix()}::{name}"] = digest
    return found


# --- the map ----------------------------------------------------------------------------------------------------------


def without_case(test: str) -> str:
    """The name of a test function, of its parametrized cases too."""
    return test.split("[")[0]


def write_map() -> None:
    if not lines.RECORD.exists():
        sys.exit(f"{lines.RECORD.name} is not there: first ./tests/run.sh --record")
    record = lines.read()
    seconds: collections.Counter[str] = collections.Counter()
    for test, value in record.seconds.items():
        seconds[without_case(test)] += value
    fixtures = {without_case(test): names for test, names in record.shared.items()}
    for test in seconds:
        seconds[test] += sum(record.fixtures.get(name, 0) for name in fixtures.get(test, ()))
    users = collections.defaultdict(set)  # by context, the tests whose lines those are
    for test in record.seconds:
        for context in (test, *record.shared.get(test, ())):
            users[context].add(without_case(test))

    reached = {}  # by file and line
    for file, places in record.lines.items():
        if not (REPO / file).exists():  # it was removed since
            continue
        names = functions((REPO / file).read_text(), bodies=True)
        for line in map(int, places):
            if line in names:
                tests = set().union(*(users[c] for c in record.contexts_of(file, line)))
                reached[file, names[line], line] = tests
    by_function = collections.defaultdict(lambda: collections.defaultdict(dict))
    for (file, name, line), tests in reached.items():
        by_function[file][name][line] = tests
    digests = digests_of_tests()
    # those that were skipped, too
    numbers = {test: number for number, test in enumerate({**seconds, **fixtures})}
    chosen = {
        file: {
            name: [numbers[test] for test in choose(file, places, seconds)]
            for name, places in sorted(of_file.items())
        }
        for file, of_file in sorted(by_function.items())
    }
    quick = choose_quick(reached, seconds)
    MAP.write_text(
        json.dumps(
            {
                "tests": [
                    [test, round(seconds[test], 2), digests.get(test, "")] for test in numbers
                ],
                "functions": chosen,
                "quick": sorted(quick),
            },
            separators=(",", ":"),
        ).replace('],"', '],\n"')
        + "\n"
    )


@functools.cache
def own_test_files(file: str) -> frozenset[str]:
    """Those that are named after a module: for config.py test_config.py and test_config_limits.py. Where there is none,
    those that import it."""
    module = file.removesuffix(".py").replace("/", ".")
    folder, _, name = module.rpartition(".")
    tests = REPO / "tests"
    if file.startswith("extras/"):
        tests = tests.joinpath(*file.split("/")[:2])  # tests/extras/lora
    texts = {
        path: path.read_text() for path in tests.rglob("test_*.py") if "fake_cuda" not in path.parts
    }
    found = [path for path in texts if f"{path.stem}_".startswith(f"test_{name}_")]
    if not found:
        imports = rf"^ *(from|import) {re.escape(module)}\b|^ *from {re.escape(folder)} import .*\b{name}\b"
        found = [path for path, text in texts.items() if re.search(imports, text, re.M)]
    return frozenset(path.relative_to(REPO).as_posix() for path in found)


def is_own(test: str, file: str) -> bool:
    """Whether a test is in one of a module's own files."""
    return test.split("::")[0] in own_test_files(file)


def choose(file: str, places: dict[int, set[str]], seconds: dict[str, float]) -> list[str]:
    """Of the tests that reach a function's lines, the module's own first and the cheapest first: until each line has
    PER_LINE; then the next, up to PER_FUNCTION."""

    def rank(test: str) -> tuple:
        return not is_own(test, file), seconds[test], test

    counts: collections.Counter[int] = collections.Counter()
    found = []
    for test in sorted(set().union(*places.values()), key=rank):
        needed = [line for line, tests in places.items() if test in tests]
        if len(found) < PER_FUNCTION or any(counts[line] < PER_LINE for line in needed):
            found.append(test)
            counts.update(needed)
    return found


def choose_quick(
    reached: dict[tuple[str, str, int], set[str]], seconds: dict[str, float]
) -> list[str]:
    """Again and again the test that adds most lines for its seconds, until QUICK_SECONDS are spent."""
    lines_of = collections.defaultdict(set)
    for place, tests in reached.items():
        for test in tests:
            lines_of[test].add(place)
    left = QUICK_SECONDS
    found = []
    while True:
        affordable = [test for test in lines_of if lines_of[test] and seconds[test] <= left]
        if not affordable:
            return found
        best = max(affordable, key=lambda test: len(lines_of[test]) / (seconds[test] + 0.01))
        left -= seconds[best]
        found.append(best)
        gained = lines_of.pop(best)
        for places in lines_of.values():
            places -= gained


# --- the commands -----------------------------------------------------------------------------------------------------


class Choice:
    """Of the map, the tests that reach what was changed."""

    def __init__(self, known: dict):
        self.names = [name for name, *_ in known["tests"]]
        self.seconds = {name: seconds for name, seconds, _ in known["tests"]}
        self.functions = known["functions"]
        digests = {name: digest for name, _, digest in known["tests"]}
        self.present = digests_of_tests()
        self.unrecorded = {t for t, digest in self.present.items() if digests.get(t) != digest}
        self.first: set[str] = set()  # before the cheapest: a module's own, and what was changed
        self.tests: set[str] = set()
        self.unknown: list[str] = []  # files that no test is known for

    def add(self, file: str, places: set[int]) -> None:
        path = REPO / file
        if not path.exists():
            return
        if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file):
            self.add_tests(file, functions(path.read_text()), places)
        elif file.endswith(".py"):
            self.add_functions(file, functions(path.read_text()), places)
        else:
            found = [tests for pattern, tests in OTHERS.items() if re.fullmatch(pattern, file)]
            for test_file in itertools.chain(*found):
                self.tests |= self.tests_in(test_file)

    def tests_in(self, file: str) -> set[str]:
        return {test for test in self.present if test.startswith(f"{file}::")}

    def add_tests(self, file: str, inside: dict[int, str], places: set[int]) -> None:
        """Those that were changed; of a table or a helper, all of the file."""
        of_file = self.tests_in(file)
        changed = {f"{file}::{inside.get(line, '')}" for line in places}
        self.first |= changed & of_file
        self.tests |= of_file if changed - of_file or not places else changed

    def add_functions(self, file: str, inside: dict[int, str], places: set[int]) -> None:
        if file.startswith(("tests/", "benchmarks/")):
            return
        self.first |= self.unrecorded
        self.tests |= self.unrecorded
        of_file = self.functions.get(file)
        if of_file is None:
            self.unknown.append(file)
            return
        # a class's body, a constant or a new function: those that reach anything of the file
        touched = {inside.get(line, "") for line in places}
        known = touched & {*of_file}
        names = known if known == touched else {*of_file}
        found = {self.names[number] for name in names for number in of_file[name]}
        own = {test for test in self.present if is_own(test, file)}
        self.first |= found & own
        self.tests |= found | own  # which also run what torch.compile makes of a line, unseen

    def within(self, limit: float) -> tuple[list[str], list[str]]:
        """Those that take so many seconds together, the cheapest first; the others. Of tests that are still there."""
        chosen, left_out = [], []
        for test in sorted(self.tests & {*self.present}, key=self.order):
            seconds = self.seconds.get(test, 0)
            if seconds <= limit:
                chosen.append(test)
                limit -= seconds
            else:
                left_out.append(test)
        return chosen, left_out

    def order(self, test: str) -> tuple:
        return test not in self.first, self.seconds.get(test, 0), test


def main() -> None:
    parser = argparse.ArgumentParser(prog="./tests/run.sh", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--quick", action="store_true")
    what.add_argument("--changed", nargs="?", const="", metavar="SINCE")
    what.add_argument("--write-map", action="store_true")
    arguments, for_pytest = parser.parse_known_args()
    if arguments.write_map:
        return write_map()
    if not MAP.exists():
        sys.exit("tests/map.json is not there: ./tests/run.sh --record, then --write-map")
    known = json.loads(MAP.read_text())
    if arguments.quick:
        present = digests_of_tests()
        tests = [test for test in known["quick"] if test in present]
    else:
        since = arguments.changed or ("HEAD" if changed_lines("HEAD") else "HEAD~1")
        choice = Choice(known)
        changes = changed_lines(since)
        for file, places in sorted(changes.items()):
            choice.add(file, places)
        tests, left_out = choice.within(CHANGED_SECONDS)
        print(f"changed since {since}: {', '.join(sorted(changes)) or 'nothing'}")
        if choice.unknown:
            print(f"no test is known to run {', '.join(choice.unknown)}")
        print(f"{len(tests)} tests; {len(left_out)} are left out, which take longer")
        for test in left_out[:SHOWN]:
            print(f"    {test} ({choice.seconds[test]:.0f} s)")
        sys.stdout.flush()
        if not tests:
            return
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *for_pytest, *tests])


if __name__ == "__main__":
    main()
