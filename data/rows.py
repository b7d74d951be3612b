"""The rows of a file, from the first or where reading stopped: a reader for each kind of file."""

import codecs
import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple

from data.arrow import arrow_rows, decompressed, parquet_rows
from data.json_array import Element, elements, holds_array
from data.local_files import readable

COMPRESSED_SUFFIXES = (".gz", ".zst")
TEXT_BYTES = 1 << 16  # a longer .txt file becomes several documents
LARGEST_ROW = 64 << 20  # bytes; tokenizing takes some 50 times as much memory


@dataclass(frozen=True)
class BadRow:
    """What a source yields in place of a row that it cannot read."""

    problem: str


class FileRow(NamedTuple):
    """A row of a file, and how far the file is read with it."""

    number: int  # rows read, or lines
    byte: int  # bytes read
    where: str  # for messages
    value: object


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
