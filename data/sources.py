"""Text sources: iterate over a source's documents in order, from the beginning or from where reading stopped."""

import abc
import codecs
import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import config
from config import ConfigError

STDLIB = "python-stdlib"
LOCAL = (
    ".jsonl",
    ".json",
    ".parquet",
    ".txt",
    ".jsonl.gz",
    ".json.gz",
    ".jsonl.zst",
    ".json.zst",
)
BY_ARROW = (".parquet", ".gz", ".zst")
TEXT_BYTES = 1 << 16  # a longer .txt file becomes several documents
LARGEST_ROW = 64 << 20  # bytes; tokenizing takes some 50 times as much memory
# errors of a disk or a machine, not of a file
MAY_PASS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
MOST_PROBLEMS = 1000  # bad rows that are listed
FIRST_PROBLEMS = 10  # the same, of a file that has no good row before them


@dataclass(frozen=True)
class BadRow:
    """What a source yields in place of a row that it cannot read."""

    problem: str


class Source(abc.ABC):
    """Iterates over the non-empty documents. Subclasses define what is abstract."""

    # whether its text stands in files: else the class's code is part of the data's identity
    reads = False
    # whether rows() may be asked for more after a wrong row, to list them all
    lists_wrong_rows = False
    revision: str | None = None  # commit of a Hugging Face dataset

    def __init__(self, d: config.Data, place: Any = None):
        """place: as place() returned it, to resume there."""
        self.d = d
        self.column = d.messages_field or d.text_field
        self.resumed = place is not None
        self.problems: list[str] = []

    @abc.abstractmethod
    def rows(self) -> Iterator[tuple[str, object]]:
        """Yields (where, row)."""

    @abc.abstractmethod
    def place(self) -> Any:
        """Where to resume after the last document, as JSON."""

    @abc.abstractmethod
    def share(self) -> float | None:
        """The fraction read so far, from 0 to 1; None if unknown."""

    def document(self, where: str, row: object) -> str:
        """A row's document, "" if it has none. Raises ConfigError if the row is wrong."""
        field = self.column
        if self.d.messages_field:
            from extras.chat.messages import as_document

            return as_document(where, field_of(row, field, "data.messages_field"), field)
        text = field_of(row, field, "data.text_field")
        if not isinstance(text, str):
            raise ConfigError(f"field {field!r} must be text, not {type(text).__name__}")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
            raise ConfigError(
                f"is not valid Unicode: {error.reason} at character {error.start}"
            ) from None
        if size > LARGEST_ROW:
            raise ConfigError(f"is longer than {LARGEST_ROW >> 20} MiB; split it")
        return text

    def accept(self, document: str) -> None:
        """Called before a document is yielded: what came before the next one is read."""
        return

    def files_to_record(self) -> list | None:
        """The files that it reads, with what is known of each; None if it reads no files."""
        return None

    def on_recorded(self, place: Any) -> None:
        """Called when the documents before a place are on disk: they will not be read again."""
        return

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> None:
        """Raises ConfigError if text that `folder` was prepared from has changed since."""
        return

    def __iter__(self) -> Iterator[str]:
        """Raises ConfigError with a line for each bad row: of the file in which the first one is."""
        documents = 0
        for where, row in self.rows():
            try:
                if isinstance(row, BadRow):
                    raise ConfigError(row.problem)
                document = self.document(where, row)
            except ConfigError as error:
                self.problems += [f"{where}: {problem}" for problem in error.problems]
                most = MOST_PROBLEMS if documents or self.resumed else FIRST_PROBLEMS
                if not self.lists_wrong_rows:
                    break
                if len(self.problems) >= most:
                    self.problems.append(f"{where}: the file was not read beyond this row")
                    break
                continue
            if document and not self.problems:
                documents += 1
                self.accept(document)
                yield document
        if self.problems:
            raise ConfigError(*self.problems)
        if not documents and not self.resumed:
            kind = "conversation" if self.d.messages_field else "text"
            raise ConfigError(f"[data] source = {self.d.source}: holds no {kind}")


def field_of(row: object, field: str, option: str) -> object:
    """A column of a row. Raises ConfigError. option: names the column."""
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise ConfigError(f"has no field {field!r} ({option}), but is of type {kind}")
    if field not in row:
        raise ConfigError(f"has no field {field!r} ({option}), but {', '.join(row)}")
    return row[field]


class Files(Source):
    """Files, one after the other.

    files: of each [path, size in bytes, mtime in ns, digest of its documents or None while it isn't read].
    place(): [number of the file, documents read of it, rows, bytes, digest of these documents].
    """

    reads = True
    lists_wrong_rows = True

    def __init__(self, d: config.Data, place: list | None = None, known: dict | None = None):
        """known: "files" as an earlier preparation recorded them; absent: found now. Raises ConfigError if there are
        none."""
        super().__init__(d, place)
        recorded = known.get("files") if known else None
        self.files: list[Any] = [[*entry, None][:4] for entry in recorded or self.find()]
        if not self.files:
            kinds = ", ".join(LOCAL)
            raise ConfigError(
                f"[data] source = {d.source}: no such file (or folder, or pattern) of {kinds}"
            )
        self.begins = [0, *itertools.accumulate(entry[1] for entry in self.files)]  # bytes before
        self.number, self.documents, self.row, self.byte, digest = place or [0, 0, 0, 0, ""]
        self.digest = bytes.fromhex(digest)
        self.stop = len(self.files)  # the number of the first file that is not read
        self.position = self.row, self.byte  # after the row that rows() yielded last

    def find(self) -> list[list]:
        """The files in reading order: by name or, growing, by the hash of the name."""
        if self.d.source == STDLIB:
            root = pathlib.Path(sysconfig.get_paths()["stdlib"])
            stamps = [stamp(path) for path in stdlib_files()]
        else:
            root = fixed_folder(self.d.source)
            stamps = file_stamps(self.d.source)
        if self.d.order == "growing":
            stamps.sort(key=lambda entry: name_hash(os.path.relpath(entry[0], root)))
        return stamps

    def path_of(self, number: int) -> pathlib.Path:
        """A file's path, once it can be read. Raises ConfigError."""
        path = pathlib.Path(self.files[number][0])
        if not path.exists():
            raise ConfigError(f"{path}: is missing, and was not read yet")
        return path

    def rows(self) -> Iterator[tuple[str, object]]:
        while self.number < self.stop:
            path = self.path_of(self.number)
            entry = self.files[self.number]
            if not self.row and not self.byte:
                entry[1:3] = self.stamp_of(self.number, path)  # it may have changed until now
            yield from self.rows_of(path)
            if self.problems:
                return
            entry[3] = self.digest.hex()
            self.number += 1
            self.documents, self.row, self.byte, self.digest = 0, 0, 0, b""
            self.position = 0, 0

    def stamp_of(self, number: int, path: pathlib.Path) -> list:
        """[size, mtime] of a file."""
        return stamp(path)[1:]

    def accept(self, document: str) -> None:
        self.documents += 1
        self.row, self.byte = self.position
        self.digest = hashlib.blake2b(self.digest + document.encode(), digest_size=16).digest()

    def place(self) -> list:
        return [self.number, self.documents, self.row, self.byte, self.digest.hex()]

    def files_to_record(self) -> list | None:
        return self.files

    def share(self) -> float | None:
        if self.number >= len(self.files):
            return 1.0
        return (self.begins[self.number] + self.byte) / max(1, self.begins[-1])

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> None:
        """Compares what was read of each file that has another size or mtime than when it was read, by the digest of
        its documents, and takes over the new stamp. folder: was prepared from it. refuse_new: files, too, that the
        source did not have. Raises ConfigError naming the files whose text has changed."""
        now = {entry[0]: entry[1:3] for entry in self.find()}
        added = sorted(now.keys() - {entry[0] for entry in self.files})
        if refuse_new and added and len(added) < len(now):  # none in common: it was moved
            more = f" and {len(added) - 3:,} more" if len(added) > 3 else ""
            raise ConfigError(
                f"[data] source = {self.d.source}: {', '.join(added[:3])}{more} came after "
                f"{folder} was begun; move what is new away, delete the folder to prepare all "
                "anew, or name another data.path"
            )
        changed = []
        for number in range(min(self.number + 1, len(self.files))):
            path, *recorded, digest = self.files[number]
            under_way = number == self.number
            if path not in now or now[path] == recorded:  # the text of a file may be gone
                continue
            if under_way and not self.documents:
                continue
            again = Files(self.d, [number, 0, 0, 0, ""], {"files": self.files})
            again.stop = number + 1
            read = (self.documents, self.digest.hex()) if under_way else (None, digest)
            if not again.reads_as(*read):
                changed.append(path)
            elif under_way:
                self.row, self.byte = again.row, again.byte
                self.position = again.row, again.byte
            self.files[number][1:3] = now[path]
        if changed:
            raise ConfigError(
                *(
                    f"{path}: its text was changed after {folder} was prepared from it; restore "
                    "it, delete the folder to prepare all anew, or name another data.path"
                    for path in changed
                )
            )

    def reads_as(self, documents: int | None, digest: str | None) -> bool:
        """Whether the first `documents` of the file, None: all of them, have this digest."""
        number = self.number
        try:
            for _ in itertools.islice(self, documents):
                pass
        except ConfigError:
            return False
        if documents is None:
            return self.files[number][3] == digest
        return self.documents == documents and self.digest.hex() == digest

    def rows_of(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """The rows of a file, from where reading stopped. Keeps `position` after each of them."""
        if not path.name.endswith(LOCAL) and self.d.source != STDLIB:
            raise ConfigError(f"[data] source = {path}: must be one of {', '.join(LOCAL)}")
        if path.suffix == ".txt":
            return self._text(path)
        if path.suffix == ".py":
            return self._python(path)
        if path.suffix in BY_ARROW:
            return self._by_arrow(path)
        return self._json_lines(path)

    def _json_lines(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """Reads line by line and not through `datasets`, whose errors name neither line nor field."""
        with path.open("rb") as file:
            file.seek(self.byte)
            for number, line in numbered_lines(file, self.row):
                self.position = number, file.tell()
                yield from json_row(path, number, line)

    def _by_arrow(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        from data import arrow

        with readable(f"{path}:"):
            if path.suffix == ".parquet":
                yield from self._parquet(path, arrow)
            else:
                yield from self._compressed_lines(path, arrow)

    def _compressed_lines(self, path: pathlib.Path, arrow: Any) -> Iterator[tuple[str, object]]:
        read = self.row
        with path.open("rb") as file:
            for number, line in numbered_lines(arrow.decompressed(file, path.suffix), 0):
                if number > read:
                    self.position = number, file.tell()
                    yield from json_row(path, number, line)

    def _parquet(self, path: pathlib.Path, arrow: Any) -> Iterator[tuple[str, object]]:
        size = self.files[self.number][1]
        for number, rows, row in arrow.parquet_rows(path, self.column, self.row):
            self.position = number, size * number // rows
            yield f"{path}: row {number}", row

    def _text(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """A file is one document; a long one is split, at a line end if one is near, so that a part is validation."""
        row, byte = self.row, self.byte
        with path.open("rb") as file:
            file.seek(byte)
            while raw := file.read(TEXT_BYTES) + file.readline(TEXT_BYTES):
                try:  # leaves a partial character at the end
                    text, used = codecs.utf_8_decode(raw, "strict", not file.peek(1))
                except UnicodeDecodeError as error:
                    line = row + raw.count(10, 0, error.start) + 1
                    yield f"{path}: line {line}", BadRow(f"is not UTF-8: {error.reason}")
                    return
                row += raw.count(b"\n")
                byte += used
                file.seek(byte)
                self.position = row, byte
                yield str(path), {self.column: text}

    def _python(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        if not self.byte:
            with contextlib.suppress(UnicodeDecodeError):
                text = path.read_bytes().decode()
                self.position = 1, max(1, self.files[self.number][1])
                yield str(path), {self.column: text}


def numbered_lines(file: Any, number: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines of an open file, counted as an editor counts them, after `number` that were read; None for one that is
    too long."""
    while line := file.readline(LARGEST_ROW + 1):
        number += 1
        if len(line) <= LARGEST_ROW:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LARGEST_ROW)
        yield number, None


def json_row(path: pathlib.Path, number: int, line: bytes | None) -> Iterator[tuple[str, object]]:
    """Where a line is, and its row, if it isn't empty."""
    where = f"{path}: line {number}"
    if line is None:
        yield where, BadRow(f"is longer than {LARGEST_ROW >> 20} MiB; split it")
    elif line.strip():
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield where, BadRow(f"is not valid JSON: {error}")


@contextlib.contextmanager
def readable(what: object) -> Iterator[None]:
    """Turns any exception of the libraries called inside into ConfigError, unless it may pass. what: names the source
    in its message."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        if error.errno in MAY_PASS:
            raise OSError(error.errno, error.strerror, str(what).rstrip(":")) from None
        raise _unreadable(what, error) from None
    except Exception as error:
        raise _unreadable(what, error) from None


def _unreadable(what: object, error: Exception) -> ConfigError:
    first_line = str(error).partition("\n")[0]
    return ConfigError(
        f"[data] source = {what} cannot be read: {type(error).__name__}: {first_line}"
    )


def local_files(source: str) -> list[pathlib.Path] | None:
    """The files of a file name, folder or glob pattern; None for the id of a Hugging Face dataset: [OWNER/]NAME without
    a file suffix. Raises ConfigError."""
    path = pathlib.Path(source)
    suffixes = (*LOCAL, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".arrow")
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
        matches = sorted(map(pathlib.Path, glob.glob(source, recursive=True)))
        # each file of a folder once, also where a link to a folder above it leads ** around
        folders = {folder: folder.resolve() for folder in {path.parent for path in matches}}
        return sorted({folders[path.parent] / path.name: path for path in matches[::-1]}.values())


def fixed_folder(source: str) -> pathlib.Path:
    """The folder that the names of a local source's files are relative to: what stands before a pattern."""
    path = pathlib.Path(source)
    if path.is_dir():
        return path
    while glob.has_magic(str(path.parent)):
        path = path.parent
    return path.parent


def name_hash(name: str) -> bytes:
    """Decides the reading order of growing text: it depends on the files' names within the source alone."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def stamp(path: pathlib.Path) -> list:
    """[path, size in bytes, mtime in ns] of a file. Raises OSError."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def file_stamps(source: str) -> list[list]:
    """The stamp of each of a local source's files, to detect changes."""
    paths = local_files(source) or ()
    with readable(f"{source}:"):
        return [stamp(path) for path in paths]


def stdlib_files() -> list[pathlib.Path]:
    """Real text that every machine has. Excludes tests: some are deliberately broken, and some systems omit them."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out.intersection(path.relative_to(root).parts)
    ]
