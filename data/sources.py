"""Text sources: iterate over documents in order, from the beginning or where reading stopped."""

import abc
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import config
from config import ConfigError
from data.hub import refuse_pointer
from data.local_files import (
    STDLIB,
    TEXT_SUFFIXES,
    SourceFile,
    check_kinds,
    fixed_folder,
    source_file,
    source_files,
    stdlib_files,
    stdlib_folder,
)
from data.rows import (
    COMPRESSED_SUFFIXES,
    LARGEST_ROW,
    BadRow,
    FileRow,
    read_arrow,
    read_compressed_json,
    read_json,
    read_parquet,
    read_python,
    read_text,
)

MOST_PROBLEMS = 1000  # wrong rows that one error lists
FIRST_PROBLEMS = 10  # the same, if no good row came before them


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
        """Where to resume after the last document that was yielded, as JSON other than null."""

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

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> Iterator[None]:
        """Raises ConfigError if text that was prepared into `folder` has changed since. refuse_new:
        also if files were added to the source. Yields while it reads: what was compared until then
        may be recorded."""
        yield from ()

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


class FilesState(NamedTuple):
    """Where reading files stopped. A manifest stores it as a list of these fields in this order."""

    file: int = 0  # number of the file that is read next
    documents: int = 0  # read of this file
    row: int = 0  # rows read of this file, or lines
    byte: int = 0  # bytes read of this file
    digest: str = ""  # of the documents read of this file


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

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> Iterator[None]:
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
            again = Files(self.d, FilesState(file=number), {"files": self.files})
            again.end = number + 1
            is_same = False
            documents = self.state.documents if is_under_way else None
            try:
                for _ in itertools.islice(again, documents):
                    yield
                is_same = again.digest_of(number) == self.digest_of(number)
            except ConfigError:  # a row is wrong now
                pass
            if not is_same:
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

    def digest_of(self, number: int) -> str | None:
        """The digest of the documents that were read of a file."""
        if number == self.state.file:
            return self.state.digest
        return self.files[number].digest


def name_hash(name: str) -> bytes:
    """Decides the reading order of growing text, which depends on the files' names within the
    source alone."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()
