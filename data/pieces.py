"""data.order = "growing": how a source's text is cut into parts, by its files' sizes alone, and how a part is read."""

import hashlib
import io
import json
import pathlib
from collections.abc import Iterator

import config
import files
from data.sources import (
    BY_ARROW,
    STDLIB,
    TEXT_BYTES,
    Files,
    arrow,
    json_rows,
    local_files,
    readable,
)

SMALLEST, LARGEST = 1 << 16, 1 << 25  # bytes of text in a part: a 64th of the whole, within these
SAMPLES = 16  # blocks of a file, of TEXT_BYTES, by which its text is recognized
PLAN = "plan.json"


class Piece(io.BufferedReader):
    """A file's lines that begin in its bytes begin ... end-1. read() stops before the last of these bytes, so that the
    readline() after it ends the line that has it."""

    def __init__(self, path: pathlib.Path, begin: int, end: int):
        super().__init__(io.FileIO(path))
        self.end = end
        self.seek(max(0, begin - 1))
        rest = b"" if begin else b"\n"  # of a line that the piece before has
        while not rest.endswith(b"\n") and self.tell() < end:
            rest = super().readline(TEXT_BYTES)
        self.ended = True  # at the end of a line: the next piece begins there

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None and size > 0  # as Files reads text
        return super().read(max(0, min(size, self.end - self.tell() - 1)))

    def readline(self, size: int | None = -1) -> bytes:
        if self.ended and self.tell() >= self.end:
            return b""
        line = super().readline(size)
        self.ended = line.endswith(b"\n")
        return line


class Pieces(Files):
    """A source's files or, read once and in full, pieces of them: (number of the file, begin, end) in the file's units.

    A unit of text is a byte, and a piece has the lines that begin in it; of a parquet file it is a row group. Where a
    line of a compressed file stands is known only once all before it is decompressed, and how many there are when all
    is: of n units, each is every n-th line."""

    def __init__(
        self, d: config.Data, plan: dict | None = None, pieces: list[list[int]] | None = None
    ):
        """plan: of files that the hub has, as find_files() found them; absent: found now. Raises ConfigError."""
        self.hub = None
        if d.source != STDLIB and local_files(d.source) is None:
            from data.hub import HubFiles, find_files

            self.hub = HubFiles(d.source, plan or find_files(d))
        super().__init__(d, None)
        self.pieces = pieces or [[number, 0, size] for number, size in enumerate(self.sizes)]
        self.whole, self.resumed = (
            pieces is None,
            pieces is not None,
        )  # as if resumed: a part may be empty
        self.write_tokens = write_plan

    def find(self) -> None:
        if self.hub:
            self.paths, self.sizes = self.hub.paths, self.hub.sizes
        else:
            super().find()

    def fetch(self, number: int) -> pathlib.Path:
        """A file's path, once it can be read."""
        return self.hub.fetch(number) if self.hub else self.paths[number]

    def rows(self) -> Iterator[tuple[str, object]]:
        for number, begin, end in self.pieces:
            self.number, self.row, self.byte, self.piece = number, 0, 0, (begin, end)
            self.after = f" after byte {begin:,}" * bool(begin)
            yield from self.rows_of(self.fetch(number))

    def open(self, path: pathlib.Path) -> io.BufferedReader:
        file = Piece(path, *self.piece)
        self.byte = file.tell()
        return file

    def by_arrow(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        with readable(f"{path}:"):
            yield from arrow(path).rows(self, path, json_rows, None if self.whole else self.piece)

    def parquet_rows(
        self, ends: list[int], path: pathlib.Path, begin: int, end: int
    ) -> tuple[int, int]:
        """The first row and one past the last of a piece. ends: the rows up to the end of each row group, from 0."""
        return (
            self.hub.parquet_rows(ends, path, begin, end) if self.hub else (ends[begin], ends[end])
        )


def cut(source: Pieces) -> list[list[list[int]]]:
    """The pieces (see Pieces) of each part: pieces of large files, several small ones together. A large file that must
    be fetched shares no part with another: the first part needs one alone."""
    total = sum(source.sizes)
    size = min(LARGEST, max(SMALLEST, total // 64))
    parts: list[list[list[int]]] = [[]]
    room = size
    for number in range(len(source.sizes)):
        units, step = units_of(source, number)
        alone = source.hub is not None and units * step > size
        begin = 0
        while begin < units:
            if room <= 0 or (alone and not begin and room < size):
                parts.append([])
                room = size
            whole = source.d.source == STDLIB or (units - begin) * step <= room + size // 2
            end = units if whole else min(units, begin + max(1, room // step))
            parts[-1].append([number, begin, end])
            room -= (end - begin) * step
            begin = end
        room = 0 if alone else room
    return [part for part in parts if part]


def units_of(source: Pieces, number: int) -> tuple[int, int]:
    """How many units a file has, and about how many bytes of text are one. Raises ConfigError."""
    path, size = source.paths[number], source.sizes[number]
    if path.suffix not in BY_ARROW:
        return size, 1
    if source.hub and path.suffix == ".parquet":
        return source.hub.parquet_units(size)
    with readable(f"{path}:"):
        return arrow(path).units(path, size)


def sample_of(source: Pieces) -> str:
    """What tells text from other text in files of the same sizes: a hash of some blocks of each."""
    digest = hashlib.sha256()
    for path, size in zip(source.paths, source.sizes):
        with path.open("rb") as file:
            for begin in sorted({size * i // SAMPLES for i in range(SAMPLES)}):
                file.seek(begin)
                digest.update(file.read(TEXT_BYTES))
    return digest.hexdigest()


def write_plan(folder: pathlib.Path, source: Pieces, *_: object) -> None:
    """Writes what determines the parts: their pieces, and of which text. Raises ConfigError and OSError."""
    text = source.hub.found if source.hub else {"sample": sample_of(source)}
    files.write_atomic(folder / PLAN, json.dumps({"parts": cut(source), **text}))


def read_plan(folder: pathlib.Path) -> dict:
    found = json.loads((folder / PLAN).read_bytes())
    return found if isinstance(found, dict) else {"parts": found}  # as it was at first
