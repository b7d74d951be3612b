"""Text sources: iterate over a source's documents in order, from the beginning or from where reading stopped."""

import abc
import codecs
import contextlib
import glob
import io
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import config
from config import ConfigError

STDLIB = "python-stdlib"
LOCAL = (".jsonl", ".json", ".parquet", ".txt", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
BY_ARROW = (".parquet", ".gz", ".zst")
TEXT_BYTES = 1 << 16  # a longer .txt file becomes several documents


class Source(abc.ABC):
    """Iterates over the non-empty documents. Subclasses define what is abstract."""

    reads, remote = (
        False,
        False,
    )  # whether its text is read, not generated; over a network, whose errors may pass
    revision: str | None = None  # commit of a Hugging Face dataset
    write_tokens: Callable | None = None  # instead of data/encode.py's

    def __init__(self, d: config.Data, place: list | None):
        self.d, self.resumed = d, place is not None

    @abc.abstractmethod
    def rows(self) -> Iterator[tuple[str, object]]:
        """Yields (where, row)."""

    @abc.abstractmethod
    def place(self) -> list:
        """Where to resume after the last row, as JSON."""

    @abc.abstractmethod
    def share(self) -> float | None:
        """The fraction read so far, from 0 to 1; None if unknown."""

    def __iter__(self) -> Iterator[str]:
        """Raises ConfigError naming file and row."""
        empty, field = not self.resumed, self.d.text_field
        for where, row in self.rows():
            if not isinstance(row, dict) or field not in row:
                found = (
                    ", ".join(row) if isinstance(row, dict) else f"is of type {type(row).__name__}"
                )
                raise ConfigError(f"{where}: has no field {field!r} (data.text_field), but {found}")
            if not isinstance(text := row[field], str):
                raise ConfigError(
                    f"{where}: field {field!r} must be text, not {type(text).__name__}"
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
                raise ConfigError(
                    f"{where}: is not valid Unicode: {error.reason} at character {error.start}"
                ) from None
            if text:
                empty = False
                yield text
        if empty:
            raise ConfigError(f"[data] source = {self.d.source}: holds no text")


class Files(Source):
    """Local files, one after the other. A place is (number of the file, rows read of it, bytes read of it)."""

    reads = True
    after = ""  # what the number of a line counts from, if not from the file's beginning (data/pieces.py)

    def __init__(self, d: config.Data, place: list | None):
        super().__init__(d, place)
        self.find()
        self.number, self.row, self.byte = place or (0, 0, 0)

    def find(self) -> None:
        """Sets the files' paths and sizes in bytes. Raises ConfigError if there are none."""
        self.paths = (
            _stdlib_files() if self.d.source == STDLIB else local_files(self.d.source)
        ) or []
        if not self.paths:
            raise ConfigError(
                f"[data] source = {self.d.source}: no such file (or folder, or pattern) of "
                f"{', '.join(LOCAL)}"
            )
        self.sizes = [path.stat().st_size for path in self.paths]

    def rows(self) -> Iterator[tuple[str, object]]:
        while self.number < len(self.paths):
            yield from self.rows_of(self.paths[self.number])
            self.number, self.row, self.byte = self.number + 1, 0, 0

    def place(self) -> list:
        return [self.number, self.row, self.byte]

    def share(self) -> float | None:
        return (sum(self.sizes[: self.number]) + self.byte) / max(1, sum(self.sizes))

    def rows_of(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """The rows of a file, from where reading stopped."""
        if not path.name.endswith(LOCAL) and self.d.source != STDLIB:
            raise ConfigError(f"[data] source = {path}: must be one of {', '.join(LOCAL)}")
        kinds = {".txt": self._text, ".py": self._python} | dict.fromkeys(BY_ARROW, self.by_arrow)
        return kinds.get(path.suffix, self._json_lines)(path)

    def open(self, path: pathlib.Path) -> io.BufferedReader:
        """A file of lines, where reading stopped."""
        file = path.open("rb")
        file.seek(self.byte)
        return file

    def _json_lines(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """Reads line by line and not through `datasets`, whose errors name neither line nor field."""
        with self.open(path) as file:
            while line := file.readline():
                self.row, self.byte = self.row + 1, self.byte + len(line)
                yield from json_rows(path, f"{self.row}{self.after}", line)

    def by_arrow(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        with readable(f"{path}:"):
            yield from arrow(path).rows(self, path, json_rows)

    def _text(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """A file is one document; a long one is split, at a line end if one is near, so that a part is validation."""
        with self.open(path) as file:
            while raw := file.read(TEXT_BYTES) + file.readline(TEXT_BYTES):
                try:
                    text, used = codecs.utf_8_decode(
                        raw, "strict", not file.peek(1)
                    )  # leaves a partial character
                except UnicodeDecodeError as error:
                    line = f"{self.row + raw.count(10, 0, error.start) + 1}{self.after}"
                    raise ConfigError(
                        f"{path}: line {line}: is not UTF-8: {error.reason}"
                    ) from None
                self.row, self.byte = self.row + raw.count(b"\n"), self.byte + used
                file.seek(self.byte)
                yield str(path), {self.d.text_field: text}

    def _python(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        if not self.byte:
            self.byte = self.sizes[self.number]
            with contextlib.suppress(UnicodeDecodeError):
                yield str(path), {self.d.text_field: path.read_bytes().decode()}


def arrow(path: pathlib.Path) -> Any:
    """data/arrow.py, to read this file with. Raises ConfigError without it."""
    if problem := config.lack_of("data/arrow.py"):
        raise ConfigError(f"[data] source = {path}: {problem}")
    from data import arrow

    return arrow


def json_rows(path: pathlib.Path, number: str, line: bytes) -> Iterator[tuple[str, object]]:
    """Where a line is, and its row, if it isn't empty. Raises ConfigError."""
    if line.strip():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: line {number}: is not valid JSON: {error}") from None
        yield f"{path}: line {number}", row


@contextlib.contextmanager
def readable(what: object) -> Iterator[None]:
    """Turns any exception of the libraries called inside into ConfigError. what: names the source in its message."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"[data] source = {what} cannot be read: {type(error).__name__}: {first_line}"
        ) from None


def local_files(source: str) -> list[pathlib.Path] | None:
    """The files of a file name, folder or glob pattern; None for the id of a Hugging Face dataset: [OWNER/]NAME without
    a file suffix. Raises ConfigError."""
    path, suffixes = (
        pathlib.Path(source),
        (*LOCAL, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".arrow"),
    )
    with readable(f"{source}:"):
        if path.is_dir():
            return sorted(p for p in path.iterdir() if p.name.endswith(LOCAL) and not p.is_dir())
        if path.exists():
            return [path]
        if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) and not source.endswith(suffixes):
            return None
        for part in (path, *path.parents):  # glob() skips folders that it may not search or list
            if glob.has_magic(str(part)):
                for folder in glob.glob(f"{part.parent}/", recursive=True):
                    os.stat(f"{folder}.")
                    if glob.has_magic(part.name) or part.parent.name == "**":
                        os.listdir(folder)
        found = sorted(map(pathlib.Path, glob.glob(source, recursive=True)))
        # each file of a folder once, also where a link to a folder above it leads ** around
        folders = {folder: folder.resolve() for folder in {path.parent for path in found}}
        return sorted({folders[path.parent] / path.name: path for path in reversed(found)}.values())


def file_stamps(source: str) -> list[list]:
    """[path, size in bytes, mtime in ns] of each of a local source's files, to detect changes."""
    paths = local_files(source) or ()
    with readable(f"{source}:"):
        return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _stdlib_files() -> list[pathlib.Path]:
    """Real text that every machine has. Excludes tests: some are deliberately broken, and some systems omit them."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out.intersection(path.relative_to(root).parts)
    ]
