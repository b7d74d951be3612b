"""Which tests run which line, their processes included: `./tests/run.sh --record` runs the whole suite under coverage,
a third slower, and writes .tests-lines.json, from which tests/mutants.py and tests/changed.py choose tests. With paths
of tests it runs those and adds what they show.

As a plugin of pytest (-p tests.lines) this module names what is running: a test, or the set-up of a fixture that
several tests share. Processes hear it from CONTEXT in their environment; tests/warm.py and tests/gloo.py pass it on to
those that they fork. What a process ran that was killed, or in a copy of the repository, is not seen.
"""

import collections
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

REPO = pathlib.Path(__file__).parent.parent
RECORD = REPO / ".tests-lines.json"
PARTS = REPO / ".tests-lines"  # of its processes, until it is written
CONTEXT = "TESTS_LINES_CONTEXT"
SETTINGS = """\
[run]
branch = false
context = ${TESTS_LINES_CONTEXT-}
data_file = FOLDER/data
parallel = true
patch = _exit, fork
include = REPO/*
omit = REPO/tests/*, REPO/.venv/*, REPO/benchmarks/*
disable_warnings = no-data-collected, module-not-measured, couldnt-parse
"""


def follow(context: str) -> None:
    """In a process that was forked: what it runs from here on belongs to this context."""
    if "COVERAGE_PROCESS_START" not in os.environ:
        return
    import coverage

    os.environ[CONTEXT] = context
    current = coverage.Coverage.current() or coverage.process_startup(force=True)
    if current is not None:
        current.switch_context(context)


# --- the plugin -------------------------------------------------------------------------------------------------------


def pytest_configure(config) -> None:
    os.register_at_fork(after_in_child=lambda: follow(os.environ.get(CONTEXT, "")))
    config.lines_seconds = {}
    config.lines_fixtures = {}
    config.lines_failed = set()


def pytest_runtest_logstart(nodeid: str) -> None:
    follow(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Of a wrapper: what several tests share is recorded under the fixture's name."""
    if fixturedef.scope == "function":
        return (yield)
    outside, started = os.environ.get(CONTEXT, ""), time.perf_counter()
    follow(name_of(fixturedef))
    try:
        return (yield)
    finally:
        request.config.lines_fixtures[name_of(fixturedef)] = time.perf_counter() - started
        follow(outside)


def name_of(fixture) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def pytest_collection_finish(session) -> None:
    """By test, the fixtures that it shares with others."""
    if getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"] != "gw0":
        return
    shared = {
        item.nodeid: [
            name_of(found[-1])
            for found in item._fixtureinfo.name2fixturedefs.values()
            if found[-1].scope != "function"
        ]
        for item in session.items
    }
    if shared:
        (PARTS / "shared.json").write_text(json.dumps(shared))


def pytest_report_teststatus(report, config) -> None:
    """Called for each phase of each test, in the process that prints."""
    if report.when == "call":
        config.lines_seconds[report.nodeid] = report.duration
    if report.failed:
        config.lines_failed.add(report.nodeid)


def pytest_unconfigure(config) -> None:
    worker = getattr(config, "workerinput", {"workerid": "main"})["workerid"]
    found = {
        "seconds": config.lines_seconds,
        "fixtures": config.lines_fixtures,
        "failed": sorted(config.lines_failed),
    }
    (PARTS / f"seconds-{worker}.json").write_text(json.dumps(found))


# --- the record -------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What a run of the suite showed."""

    seconds: dict[str, float]  # by test
    fixtures: dict[str, float]  # seconds by shared fixture
    shared: dict[str, list[str]]  # by test, the fixtures that it shares with others
    failed: list[str]
    digests: dict[str, str]  # by file, of the text whose lines were recorded
    contexts: list[str]  # tests and fixtures
    # by file and line number, the contexts that ran it, as a hexadecimal set of bits
    lines: dict[str, dict[str, str]]

    def tests_of(self, file: str, *numbers: int) -> set[str]:
        """Those that ran one of these lines, or any of the file, themselves or through a fixture."""
        every = map(int, self.lines.get(file, {}))
        ran = set().union(*(self.contexts_of(file, line) for line in numbers or every))
        return {
            test
            for test in self.seconds
            if test in ran or not ran.isdisjoint(self.shared.get(test, ()))
        }

    def contexts_of(self, file: str, line: int) -> set[str]:
        bits = int(self.lines.get(file, {}).get(str(line), "0"), 16)
        return {name for number, name in enumerate(self.contexts) if bits >> number & 1}

    def has_changed(self, file: str) -> bool:
        """Whether it has other lines now."""
        return self.digests.get(file, digest(file)) != digest(file)

    def updated(self, newer: "Record") -> "Record":
        """With what a run of some tests showed; of files that it found changed, only that."""
        kept = {
            file
            for file in self.lines
            if newer.digests.get(file, digest(file)) == self.digests[file]
        }
        contexts = [*dict.fromkeys([*self.contexts, *newer.contexts])]
        bit = {name: 1 << number for number, name in enumerate(contexts)}
        lines: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for record in (self, newer):
            for file in record.lines:
                if record is self and file not in kept:
                    continue
                for line in record.lines[file]:
                    names = record.contexts_of(file, int(line))
                    if record is newer and file in kept:
                        names |= self.contexts_of(file, int(line))
                    lines[file][line] = f"{sum(bit[name] for name in names):x}"
        return Record(
            seconds=self.seconds | newer.seconds,
            fixtures=self.fixtures | newer.fixtures,
            shared=self.shared | newer.shared,
            failed=sorted({*self.failed} - {*newer.seconds} | {*newer.failed}),
            digests=self.digests | newer.digests,
            contexts=contexts,
            lines=lines,
        )


def digest(file: str) -> str:
    return hashlib.sha256((REPO / file).read_bytes()).hexdigest()


def read() -> Record:
    return Record(**json.loads(RECORD.read_text()))


def record(arguments: list[str]) -> int:
    """Runs the suite and writes RECORD; pytest's exit code."""
    shutil.rmtree(PARTS, ignore_errors=True)
    PARTS.mkdir()
    settings = PARTS / "settings"
    settings.write_text(SETTINGS.replace("FOLDER", str(PARTS)).replace("REPO", str(REPO)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.lines", *arguments],
        cwd=REPO,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "COVERAGE_PROCESS_START": str(settings),
            CONTEXT: "",
        },
    )
    found = gather()
    if RECORD.exists() and any(argument.startswith("tests/") for argument in arguments):
        found = read().updated(found)
    RECORD.write_text(json.dumps(vars(found)))
    shutil.rmtree(PARTS)
    return done.returncode


def gather() -> Record:
    """From what the processes left in PARTS."""
    import coverage

    seconds: dict[str, float] = {}
    fixtures: dict[str, float] = {}
    failed: set[str] = set()
    for path in PARTS.glob("seconds-*.json"):
        part = json.loads(path.read_text())
        seconds |= part["seconds"]
        fixtures |= part["fixtures"]
        failed |= {*part["failed"]}
    contexts: dict[str, int] = {}
    lines: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for path in PARTS.glob("data.*"):
        with contextlib.suppress(coverage.exceptions.DataError):  # of a process killed as it wrote
            data = coverage.CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                place = lines[os.path.relpath(file, REPO)]
                for line, names in data.contexts_by_lineno(file).items():
                    # "static|dynamic" of a process that was forked: what it was told last
                    for name in {name.rsplit("|", 1)[-1] for name in names} - {""}:
                        place[line] |= 1 << contexts.setdefault(name, len(contexts))
    return Record(
        seconds=seconds,
        fixtures=fixtures,
        shared=json.loads((PARTS / "shared.json").read_text()),
        failed=sorted(failed),
        digests={file: digest(file) for file in lines},
        contexts=[*contexts],
        lines={
            file: {str(line): f"{bits:x}" for line, bits in sorted(place.items())}
            for file, place in lines.items()
        },
    )


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:]))
