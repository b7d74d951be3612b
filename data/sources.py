"""Text sources: iterate over documents in order, from the beginning or where reading stopped."""

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
from typing import IO, Any, NamedTuple

import config
from config import ConfigError
from data.arrow import arrow_rows, decompressed, parquet_rows
from data.hub import refuse_pointer
from data.json_array import Element, elements, holds_array

STDLIB = "python-stdlib"
TEXT_SUFFIXES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".txt",
    ".jsonl.gz",
    ".json.gz",
    ".jsonl.zst",
    ".json.zst",
    ".arrow",
)
COMPRESSED_SUFFIXES = (".gz", ".zst")
# a source that ends with one of these is a file, not the id of a Hugging Face dataset
FILE_SUFFIXES = (*TEXT_SUFFIXES, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz")
# in a file's name, between other than letters: which split it is
TRAIN_WORDS = {"train", "training"}
OTHER_SPLIT_WORDS = {"val", "valid", "validation", "dev", "eval", "evaluation", "test", "testing"}
DATASET_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
TEXT_BYTES = 1 << 16  # a longer .txt file becomes several documents
LARGEST_ROW = 64 << 20  # bytes; tokenizing takes some 50 times as much memory
# errors of a disk or a machine, not of a file: a retry may help
TRANSIENT_ERRORS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
MOST_PROBLEMS = 1000  # wrong rows that one error lists
FIRST_PROBLEMS = 10  # the same, if no good row came before them
# files that datasets.save_to_disk() writes
SAVED_STATE = "state.json"
SAVED_INFO = "dataset_info.json"
SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class BadRow:
    """What a source yields in place of a row that it cannot read."""

    problem: str


class Source(abc.ABC):
    """Text. Iterating yields the non-empty documents, always in the same order.

    A new source subclasses this and defines the three abstract methods. data/identity.py: kind_of()
    chooses it. The methods that follow them are optional hooks of sources that read files.
    """

    # Whether rows() can continue after a wrong row. Then one error lists all wrong rows of a file.
    lists_wrong_rows = False

    def __init__(self, d: config.Data, state: Any = None, record: dict | None = None):
        """d: the options of the source. state: the result of resume_state(), as read from JSON;
        None starts at the beginning. record: "files" and "revision" as an earlier preparation
        recorded them in its manifest."""
        self.d = d
        # the columns of a row that are read; empty: all
        self.columns: tuple[str, ...] = (d.text_field,)
        if d.has_conversations:
            from extras.chat.messages import columns_of

            self.columns = columns_of(d)
        self.is_resumed = state is not None
        self.problems: list[str] = []  # of wrong rows; no document is yielded after the first
        # the commit of a Hugging Face dataset, for the manifest
        self.revision: str | None = record.get("revision") if record else None

    @abc.abstractmethod
    def rows(self) -> Iterator[tuple[str, object]]:
        """Yields (where the row stands, for messages; the row) from the resume state on. A row is a
        dictionary that holds some of `columns`, or a BadRow."""

    @abc.abstractmethod
    def resume_state(self) -> Any:
        """Where to resume after the last document that was yielded, as JSON."""

    @abc.abstractmethod
    def fraction_read(self) -> float | None:
        """How much of the source was read, from 0 to 1; None if unknown."""

    def on_document(self, document: str) -> None:
        """Called before a document is yielded."""
        return

    def files_to_record(self) -> "list[SourceFile] | None":
        """The files that it reads, for the manifest; None if it reads no files."""
        return None

    def on_recorded(self, state: Any) -> None:
        """Called when the documents before a resume state are on disk. They will not be read
        again."""
        return

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> None:
        """Raises ConfigError if text that was prepared into `folder` has changed since. refuse_new:
        also if files were added to the source."""
        return

    def document(self, where: str, row: object) -> str:
        """A row's document, "" if it has none. Raises ConfigError if the row is wrong."""
        if isinstance(row, BadRow):
            raise ConfigError(row.problem)
        if not isinstance(row, dict):
            raise ConfigError(f"has no field, but is of type {type(row).__name__}")
        if self.d.has_conversations:
            from extras.chat.messages import as_document

            return as_document(where, row, self.d)
        field = self.d.text_field
        if field not in row:
            raise ConfigError(f"has no field {field!r} (data.text_field), but {', '.join(row)}")
        text = row[field]
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

    def __iter__(self) -> Iterator[str]:
        """Raises ConfigError with a line for each wrong row of the file in which the first one
        stands."""
        documents = 0
        for where, row in self.rows():
            try:
                document = self.document(where, row)
            except ConfigError as error:
                self.problems += [f"{where}: {problem}" for problem in error.problems]
                if not self.lists_wrong_rows:
                    break
                limit = FIRST_PROBLEMS
                if documents or self.is_resumed:
                    limit = MOST_PROBLEMS
                if len(self.problems) >= limit:
                    self.problems.append(f"{where}: the file was not read beyond this row")
                    break
                continue
            if document and not self.problems:
                documents += 1
                self.on_document(document)
                yield document
        if self.problems:
            raise ConfigError(*self.problems)
        if not documents and not self.is_resumed:
            kind = "conversation" if self.d.has_conversations else "text"
            raise ConfigError(f"[data] source = {self.d.source}: holds no {kind}")


class SourceFile(NamedTuple):
    """A file of a source. A manifest stores it as a list of these fields in this order."""

    path: str  # of a Hugging Face dataset: the name within it
    size: int  # bytes
    version: int | str  # mtime in ns; of a Hugging Face dataset: SHA-256 or git's SHA-1
    digest: str | None = None  # of its documents, once they are read


class FilesState(NamedTuple):
    """Where reading files stopped. A manifest stores it as a list of these fields in this order."""

    file: int = 0  # number of the file that is read next
    documents: int = 0  # read of this file
    row: int = 0  # rows read of this file, or lines
    byte: int = 0  # bytes read of this file
    digest: str = ""  # of the documents read of this file


class FileRow(NamedTuple):
    """A row of a file, and how far the file is read with it."""

    number: int  # rows read, or lines
    byte: int  # bytes read
    where: str  # for messages
    value: object


class Files(Source):
    """Local files, one after the other."""

    lists_wrong_rows = True

    def __init__(self, d: config.Data, state: Any = None, record: dict | None = None):
        """The files are those of the record or, without one, those found now. Raises ConfigError if
        there are none."""
        super().__init__(d, state, record)
        recorded = record.get("files") if record else None
        if recorded:
            self.files = [SourceFile(*entry) for entry in recorded]
        else:
            self.files = self.list_files()
            check_kinds(d.source, [pathlib.Path(file.path) for file in self.files])
        if not self.files:
            kinds = ", ".join(TEXT_SUFFIXES)
            raise ConfigError(
                f"[data] source = {d.source}: no such file (or folder, or pattern) of {kinds}"
            )
        self.state = FilesState(*state) if state else FilesState()
        self.end = len(self.files)  # the number of the first file that is not read
        # bytes of the files before each file, and of all files
        self.bytes_before = [0, *itertools.accumulate(file.size for file in self.files)]
        self.last_row: FileRow | None = None  # that rows() yielded

    def list_files(self) -> list[SourceFile]:
        """The files in reading order: by name or, growing, by the hash of the name."""
        if self.d.source == STDLIB:
            root = stdlib_folder()
            files = [source_file(path) for path in stdlib_files()]
        else:
            root = fixed_folder(self.d.source)
            files = source_files(self.d.source, self.d.split)
        if self.d.order == "growing":
            files.sort(key=lambda file: name_hash(os.path.relpath(file.path, root)))
        return files

    def path_of(self, number: int) -> pathlib.Path:
        """A file's path, once it can be read. Raises ConfigError."""
        path = pathlib.Path(self.files[number].path)
        if not path.exists():
            raise ConfigError(f"{path}: is missing, and was not read yet")
        refuse_pointer(path)
        return path

    def with_current_version(self, file: SourceFile) -> SourceFile:
        """The file with the size and the version that it has now."""
        now = source_file(pathlib.Path(file.path))
        return file._replace(size=now.size, version=now.version)

    def rows(self) -> Iterator[tuple[str, object]]:
        while self.state.file < self.end:
            number = self.state.file
            path = self.path_of(number)
            is_begun = self.state.row or self.state.byte
            if not is_begun:
                # it may have changed since it was listed
                self.files[number] = self.with_current_version(self.files[number])
            for row in self._rows_of(path):
                self.last_row = row
                yield row.where, row.value
            if self.problems:
                return
            self.files[number] = self.files[number]._replace(digest=self.state.digest)
            self.state = FilesState(file=number + 1)

    def _rows_of(self, path: pathlib.Path) -> Iterator[FileRow]:
        """Yields the rows of the current file that were not read yet. Raises ConfigError."""
        row = self.state.row
        byte = self.state.byte
        size = self.files[self.state.file].size
        if self.d.source == STDLIB:
            return read_python(path, byte, size, self.d.text_field)
        if not path.name.endswith(TEXT_SUFFIXES):
            raise ConfigError(f"[data] source = {path}: must be one of {', '.join(TEXT_SUFFIXES)}")
        if path.suffix == ".txt":
            return read_text(path, row, byte, self.d.text_field)
        if path.suffix == ".parquet":
            return read_parquet(path, row, size, self.columns)
        if path.suffix == ".arrow":
            return read_arrow(path, row, self.columns)
        if path.suffix in COMPRESSED_SUFFIXES:
            return read_compressed_json(path, row)
        return read_json(path, row, byte)

    def on_document(self, document: str) -> None:
        assert self.last_row
        before = bytes.fromhex(self.state.digest)
        digest = hashlib.blake2b(before + document.encode(), digest_size=16).hexdigest()
        self.state = self.state._replace(
            documents=self.state.documents + 1,
            row=self.last_row.number,
            byte=self.last_row.byte,
            digest=digest,
        )

    def resume_state(self) -> FilesState:
        return self.state

    def files_to_record(self) -> list[SourceFile] | None:
        return self.files

    def fraction_read(self) -> float | None:
        if self.state.file >= len(self.files):
            return 1.0
        read = self.bytes_before[self.state.file] + self.state.byte
        return read / max(1, self.bytes_before[-1])

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> None:
        """Reads the files again whose size or mtime has changed, as far as they were read, and
        compares the digests of their documents. Stores the new version of a file with the same
        documents. A file that was read may be gone."""
        now = {file.path: file for file in self.list_files()}
        if refuse_new:
            self._refuse_new_files(now, folder)
        problems = []
        for number, file in enumerate(self.files[: self.state.file + 1]):
            is_under_way = number == self.state.file
            if is_under_way and not self.state.documents:
                continue
            current = now.get(file.path)
            if current is None or (current.size, current.version) == (file.size, file.version):
                continue
            again = self._read_again(number)
            if again is None or again.digest_of(number) != self.digest_of(number):
                problems.append(
                    f"{file.path}: its text was changed after {folder} was prepared from it; "
                    "restore it, delete the folder to prepare all anew, or name another data.path"
                )
                continue
            self.files[number] = file._replace(size=current.size, version=current.version)
            if is_under_way:
                # the same documents may end at another byte
                self.state = again.state
        if problems:
            raise ConfigError(*problems)

    def _refuse_new_files(self, now: dict[str, SourceFile], folder: pathlib.Path) -> None:
        """Raises ConfigError if files were added to the source. now: its files by path."""
        new = sorted(now.keys() - {file.path for file in self.files})
        was_moved = len(new) == len(now)  # no file in common
        if not new or was_moved:
            return
        names = ", ".join(new[:3])
        if len(new) > 3:
            names += f" and {len(new) - 3:,} more"
        raise ConfigError(
            f"[data] source = {self.d.source}: {names} came after {folder} was begun; move what is "
            "new away, delete the folder to prepare all anew, or name another data.path"
        )

    def _read_again(self, number: int) -> "Files | None":
        """Reads a file from its beginning to where this source has read it. Returns the reader,
        None if a row is wrong."""
        documents = self.state.documents if number == self.state.file else None
        again = Files(self.d, FilesState(file=number), {"files": self.files})
        again.end = number + 1
        try:
            for _ in itertools.islice(again, documents):
                pass
        except ConfigError:
            return None
        return again

    def digest_of(self, number: int) -> str | None:
        """The digest of the documents that were read of a file."""
        if number == self.state.file:
            return self.state.digest
        return self.files[number].digest


# Readers, one for each kind of file. row, byte: how far a file was read before.


def read_json(path: pathlib.Path, row: int, byte: int) -> Iterator[FileRow]:
    """Reads one row a line, or an array of rows. Not through `datasets`, whose errors name neither
    line nor field."""
    with path.open("rb") as file:
        is_array = holds_array(file)
        file.seek(0 if is_array else byte)
        if is_array:
            for element in elements(file, LARGEST_ROW, row, byte):
                yield file_row(path, element, element.byte)
            return
        for number, line in numbered_lines(file, row):
            yield FileRow(number, file.tell(), f"{path}: line {number}", parse_json(line))


def read_compressed_json(path: pathlib.Path, row: int) -> Iterator[FileRow]:
    """Decompresses the rows that were read before, too, and skips them. FileRow.byte counts in the
    compressed file. Raises ConfigError."""
    with readable(f"{path}:"), path.open("rb") as first, path.open("rb") as file:
        is_array = holds_array(decompressed(first, path.suffix))
        stream = decompressed(file, path.suffix)
        if is_array:
            for element in elements(stream, LARGEST_ROW):
                if element.number > row:
                    yield file_row(path, element, file.tell())
            return
        for number, line in numbered_lines(stream):
            if number > row:
                yield FileRow(number, file.tell(), f"{path}: line {number}", parse_json(line))


def file_row(path: pathlib.Path, element: Element, byte: int) -> FileRow:
    """A row of an array."""
    value = element.value
    if element.problem:
        value = BadRow(f"{element.problem}; the file was not read beyond it")
    where = f"{path}: row {element.number}, line {element.line}"
    return FileRow(element.number, byte, where, value)


def read_parquet(
    path: pathlib.Path, row: int, size: int, columns: tuple[str, ...]
) -> Iterator[FileRow]:
    """FileRow.byte is an estimate, as if all rows were equally long. Raises ConfigError."""
    with readable(f"{path}:"):
        for number, rows, value in parquet_rows(path, columns, row):
            yield FileRow(number, size * number // rows, f"{path}: row {number}", value)


def read_arrow(path: pathlib.Path, row: int, columns: tuple[str, ...]) -> Iterator[FileRow]:
    """FileRow.byte is the end of the batch that the row stands in. Raises ConfigError."""
    with readable(f"{path}:"):
        for number, byte, value in arrow_rows(path, columns, row):
            yield FileRow(number, byte, f"{path}: row {number}", value)


def read_text(path: pathlib.Path, row: int, byte: int, column: str) -> Iterator[FileRow]:
    """Yields one document, or several of a long file, so that some can be held out for validation.
    These end between two lines if a line ends nearby, otherwise between two characters."""
    with path.open("rb") as file:
        file.seek(byte)
        while True:
            raw = file.read(TEXT_BYTES) + file.readline(TEXT_BYTES)
            if not raw:
                return
            is_end = not file.peek(1)
            try:
                # leaves the bytes of a character that is cut to the next document
                text, used = codecs.utf_8_decode(raw, "strict", is_end)
            except UnicodeDecodeError as error:
                line = row + raw.count(b"\n", 0, error.start) + 1
                problem = BadRow(f"is not UTF-8: {error.reason}")
                yield FileRow(line, byte, f"{path}: line {line}", problem)
                return
            row += raw.count(b"\n")
            byte += used
            file.seek(byte)
            yield FileRow(row, byte, str(path), {column: text})


def read_python(path: pathlib.Path, byte: int, size: int, column: str) -> Iterator[FileRow]:
    """Yields the module as one document, unless its encoding is not UTF-8."""
    if byte:
        return
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return
    yield FileRow(1, max(1, size), str(path), {column: text})


def numbered_lines(file: IO[bytes], number: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """Yields the lines that aren't blank, None for one that is too long, with their numbers as an
    editor counts them. number: of the last line that was read before."""
    while True:
        line = file.readline(LARGEST_ROW + 1)
        if not line:
            return
        number += 1
        if len(line) > LARGEST_ROW:
            while line and not line.endswith(b"\n"):
                line = file.readline(LARGEST_ROW)
            yield number, None
        elif line.strip():
            yield number, line


def parse_json(line: bytes | None) -> object:
    """The row of a line that numbered_lines() yields, or BadRow."""
    if line is None:
        return BadRow(f"is longer than {LARGEST_ROW >> 20} MiB; split it")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"is not valid JSON: {error}"
    if line.strip() in (b"{", b"\xef\xbb\xbf{"):
        problem += "; an object of several lines: write each row on one line, or all in an array"
    return BadRow(problem)


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """Turns any exception of the libraries called inside into a ConfigError. An OSError that a
    retry may mend stays one. source: its name in the message."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRORS:
            raise OSError(error.errno, error.strerror, source.rstrip(":")) from None
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"[data] source = {source} cannot be read: {type(error).__name__}: {first_line}"
        ) from None


# Local files


def local_files(source: str, split: str | None = None) -> list[pathlib.Path] | None:
    """The files of a file name, folder or glob pattern; None for the id of a Hugging Face dataset:
    [OWNER/]NAME without a file suffix. split: of a folder that datasets.save_to_disk() wrote with
    several; None: files of any. Raises ConfigError."""
    path = pathlib.Path(source)
    with readable(f"{source}:"):
        if path.is_dir():
            if (path / SAVED_SPLITS).exists():
                return saved_split(path, split)
            if (path / SAVED_STATE).exists() and (path / SAVED_INFO).exists():
                return saved_files(path)
            return sorted(file for file in path.iterdir() if is_text_file(file))
        if path.exists():
            return [path]
        if DATASET_ID.fullmatch(source) and not source.endswith(FILE_SUFFIXES):
            return None
        return matching_files(source)


def saved_split(folder: pathlib.Path, split: str | None) -> list[pathlib.Path]:
    """The files of a split of a DatasetDict that was saved. Raises ConfigError, if there is no such
    split, and whatever a damaged file raises."""
    splits = json.loads((folder / SAVED_SPLITS).read_bytes())["splits"]
    if split is None:
        split = splits[0]
    if split not in splits:
        raise ConfigError(f"[data] split = {split}: {folder} has {', '.join(splits)}")
    return saved_files(folder / split)


def saved_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a dataset that was saved, in the order of its rows."""
    state = json.loads((folder / SAVED_STATE).read_bytes())
    return [folder / file["filename"] for file in state["_data_files"]]


def has_saved_splits(source: str) -> bool:
    """Whether a local source is a DatasetDict that was saved."""
    return (pathlib.Path(source) / SAVED_SPLITS).exists()


def is_text_file(path: pathlib.Path) -> bool:
    """Whether a file of a folder is read. A hidden one is not, as with a pattern: macOS stores
    metadata beside a.jsonl as ._a.jsonl. Nor is an .arrow file, which `datasets` leaves beside rows
    as its cache."""
    if path.name.startswith(".") or path.suffix == ".arrow":
        return False
    return path.name.endswith(TEXT_SUFFIXES) and not path.is_dir()


def check_kinds(source: str, paths: list[pathlib.Path]) -> None:
    """Raises ConfigError if a folder holds what is hardly meant to be trained on: another split
    beside the training data, or .txt files, such as a license, beside rows. A pattern may select
    all of it. paths: the files that would be read."""
    if not pathlib.Path(source).is_dir():
        return
    text_files = [path.name for path in paths if path.suffix == ".txt"]
    row_files = [path.name for path in paths if path.suffix != ".txt"]
    for names, others in (split_names(paths), (row_files, text_files)):
        if names and others:
            pattern = common_pattern(names)
            raise ConfigError(
                f"[data] source = {source}: holds {names[0]} and {others[0]}; which of them? Train on "
                f"--data.source='{source}/{pattern}' or on all, --data.source='{source}/*'; "
                "--data.validation names files to evaluate on"
            )


def split_names(paths: list[pathlib.Path]) -> tuple[list[str], list[str]]:
    """The names that say train, and those that say another split."""
    names = [path.name for path in paths]
    words = {name: {*re.split("[^a-z]+", name.lower())} for name in names}
    train = [name for name in names if words[name] & TRAIN_WORDS]
    others = [name for name in names if words[name] & OTHER_SPLIT_WORDS]
    return train, others


def common_pattern(names: list[str]) -> str:
    """A glob pattern of these names, or of one of them."""
    if len(names) == 1:
        return names[0]
    same = itertools.takewhile(lambda characters: len({*characters}) == 1, zip(*names))
    prefix = "".join(characters[0] for characters in same)
    return f"{prefix}*{pathlib.Path(names[0]).suffix}"


def matching_files(pattern: str) -> list[pathlib.Path]:
    """The files that match a glob pattern. Raises OSError."""
    check_folders(pathlib.Path(pattern))
    matches = sorted(pathlib.Path(name) for name in glob.glob(pattern, recursive=True))
    real_folders: dict[pathlib.Path, pathlib.Path] = {}
    # by their real paths: ** may follow a link to a folder above it, and find a file twice
    files: dict[pathlib.Path, pathlib.Path] = {}
    for path in matches:
        folder = path.parent
        if folder not in real_folders:
            real_folders[folder] = folder.resolve()
        files.setdefault(real_folders[folder] / path.name, path)
    return list(files.values())


def check_folders(pattern: pathlib.Path) -> None:
    """Raises OSError if a folder of the pattern may not be searched or listed: glob() would skip
    it."""
    for part in (pattern, *pattern.parents):
        if not glob.has_magic(str(part)):
            continue
        must_be_listed = glob.has_magic(part.name) or part.parent.name == "**"
        for folder in glob.glob(f"{part.parent}/", recursive=True):
            os.stat(f"{folder}.")
            if must_be_listed:
                os.listdir(folder)


def fixed_folder(source: str) -> pathlib.Path:
    """The folder that the names of a local source's files are relative to: what stands before a
    pattern."""
    path = pathlib.Path(source)
    if path.is_dir():
        return path
    while glob.has_magic(str(path.parent)):
        path = path.parent
    return path.parent


def name_hash(name: str) -> bytes:
    """Decides the reading order of growing text, which depends on the files' names within the
    source alone."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def source_file(path: pathlib.Path) -> SourceFile:
    """A local file as it is now. Raises OSError."""
    status = path.stat()
    return SourceFile(str(path), status.st_size, status.st_mtime_ns)


def source_files(source: str, split: str | None = None) -> list[SourceFile]:
    """The files of a local source as they are now, by name; none of a Hugging Face dataset. Raises
    ConfigError."""
    paths = local_files(source, split) or []
    with readable(f"{source}:"):
        return [source_file(path) for path in paths]


def file_stamps(source: str) -> list[list]:
    """[path, size in bytes, mtime in ns] of each file of a local source, to detect changes. Raises
    ConfigError."""
    return [[file.path, file.size, file.version] for file in source_files(source)]


def stdlib_folder() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[pathlib.Path]:
    """Real text that every machine has. Excludes tests: some are deliberately broken, and some
    systems omit them."""
    root = stdlib_folder()
    excluded = {"site-packages", "dist-packages", "test", "tests"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not excluded.intersection(path.relative_to(root).parts)
    ]
