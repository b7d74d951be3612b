"""Where text comes from: the documents of a source, in order, from any place on.

A new kind of source is a class like Files or Hub, and a branch in Source.
"""

import contextlib
import glob
import json
import pathlib
import re
import sysconfig
from collections.abc import Iterator
from typing import Any

import config
from config import ConfigError

STDLIB = "python-stdlib"
LOCAL = (".jsonl", ".json", ".parquet", ".txt")
TEXT_PIECE = 1 << 16  # bytes: a longer .txt file becomes several documents


class Source:
    """The documents of [data] source and their number, empty ones left out."""

    def __init__(self, d: config.Data, place: Any = None):
        """`place`: what place() gave, to go on from there. Raises ConfigError."""
        self.d, self.resumed = d, place is not None
        if d.source == STDLIB:
            self.reader = Files(d, _stdlib_files(), place)
        elif is_local(d.source):
            if not (files := local_files(d.source)):
                raise ConfigError(f"[data] source = {d.source}: no such file (or folder, or pattern) of "
                                  f"{', '.join(LOCAL)}")
            self.reader = Files(d, files, place)
        else:
            self.reader = Hub(d, place)

    def __iter__(self) -> Iterator[str]:
        """Raises ConfigError naming file and row."""
        found = self.resumed
        for where, text in self.reader:
            if not isinstance(text, str):
                raise ConfigError(f"{where}: field {self.d.text_field!r} must be text, not {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
                raise ConfigError(f"{where}: is not valid Unicode: {error.reason} at character {error.start}") from None
            found = found or bool(text)
            if text:
                yield text
        if not found:
            raise ConfigError(f"[data] source = {self.d.source}: holds no text")

    def place(self) -> Any:
        """Where reading goes on after the last document given, as JSON."""
        return self.reader.place()

    def revision(self) -> str | None:
        """Which commit of a Hugging Face dataset is read; None of files."""
        return getattr(self.reader, "revision", None)

    def share(self) -> float | None:
        """How much of the source has been read, from 0 to 1, where that can be told."""
        return self.reader.share()


def is_local(source: str) -> bool:
    """A path or pattern, not the id of a Hugging Face dataset: those are NAME or OWNER/NAME, with no file's suffix."""
    suffixes = (*LOCAL, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".arrow")
    return (source.endswith(suffixes) or pathlib.Path(source).exists()
            or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source))


def local_files(source: str) -> list[pathlib.Path]:
    path = pathlib.Path(source)
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in LOCAL and p.is_file())
    return [path] if path.exists() else sorted(map(pathlib.Path, glob.glob(source, recursive=True)))


def file_stamps(source: str) -> list[list]:
    """[path, bytes, modified in ns] of each of a local source's files, so that a change is noticed."""
    files = local_files(source) if is_local(source) else []
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _stdlib_files() -> list[pathlib.Path]:
    """Python's own standard library: real text that every machine has. Without its tests, which some systems leave
    out and which hold deliberately broken files."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    return [path for path in sorted(root.rglob("*.py")) if not left_out.intersection(path.relative_to(root).parts)]


class Files:
    """(where, text) of local files, one after the other; its place is (file, row, byte) or, of parquet, what
    `datasets` calls its state."""

    def __init__(self, d: config.Data, paths: list[pathlib.Path], place: list | None):
        self.d, self.paths = d, paths
        self.sizes = [path.stat().st_size for path in paths]
        self.file, self.row, self.byte, state = place or (0, 0, 0, None)
        self.table = _Table(d, self.paths[self.file], state) if state else None

    def __iter__(self) -> Iterator[tuple[str, object]]:
        kinds = {".parquet": self._parquet, ".jsonl": self._json_lines, ".json": self._json_lines,
                 ".txt": self._text_pieces}
        kinds = {".py": self._python} if self.d.source == STDLIB else kinds
        while self.file < len(self.paths):
            path = self.paths[self.file]
            if path.suffix not in kinds:
                raise ConfigError(f"[data] source = {path}: must be one of {', '.join(LOCAL)}")
            yield from kinds[path.suffix](path)
            self.file, self.row, self.byte, self.table = self.file + 1, 0, 0, None

    def place(self) -> list:
        return [self.file, self.row, self.byte, self.table and self.table.state()]

    def share(self) -> float | None:
        return (sum(self.sizes[: self.file]) + self.byte) / max(1, sum(self.sizes))

    def _json_lines(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """Line by line and not through `datasets`, which names neither line nor field of a bad one."""
        with path.open("rb") as file:
            file.seek(self.byte)
            for line in file:
                self.row, self.byte = self.row + 1, self.byte + len(line)
                if line.strip():
                    where = f"{path}: line {self.row}"
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise ConfigError(f"{where}: is not valid JSON: {error}") from None
                    yield where, _field(where, row, self.d.text_field)

    def _text_pieces(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        """A file is a document; a long one is cut, at line ends where it has some, so that part of it can be held out
        and its size does not matter."""
        with path.open("rb") as file:
            file.seek(self.byte)
            while piece := file.read(TEXT_PIECE) + file.readline(TEXT_PIECE):
                try:
                    text = piece.decode()
                except UnicodeDecodeError as error:
                    if error.reason != "unexpected end of data" or not error.start or not file.peek(1):
                        line = self.row + piece.count(b"\n", 0, error.start) + 1
                        raise ConfigError(f"{path}: line {line}: is not UTF-8: {error.reason}") from None
                    piece = piece[: error.start]  # the cut went through a character
                    file.seek(self.byte + len(piece))
                    text = piece.decode()
                self.row, self.byte = self.row + piece.count(b"\n"), self.byte + len(piece)
                yield str(path), text

    def _python(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        if not self.byte:
            self.byte = self.sizes[self.file]
            with contextlib.suppress(UnicodeDecodeError):
                yield str(path), path.read_bytes().decode()

    def _parquet(self, path: pathlib.Path) -> Iterator[tuple[str, object]]:
        with _told(path):
            import pyarrow.parquet

            rows = pyarrow.parquet.ParquetFile(path).metadata.num_rows
        if not rows:  # which `datasets` takes for a fault
            return
        self.table = self.table or _Table(self.d, path, None)
        for row in self.table:
            self.row += 1
            self.byte = self.sizes[self.file] * self.row // max(rows, self.row)
            yield f"{path}: row {self.row}", _field(f"{path}: row {self.row}", row, self.d.text_field)


class Hub:
    """(where, text) of a Hugging Face dataset, streamed; its place is (row, the state of `datasets`, revision)."""

    def __init__(self, d: config.Data, place: list | None):
        self.d = d
        self.row, state, self.revision = place or (0, None, _newest_revision(d.source))
        self.table = _Table(d, None, state, self.revision)

    def __iter__(self) -> Iterator[tuple[str, object]]:
        for row in self.table:
            self.row += 1
            where = f"{self.d.source}: row {self.row}"
            yield where, _field(where, row, self.d.text_field)

    def place(self) -> list:
        return [self.row, self.table.state(), self.revision]

    def share(self) -> float | None:
        splits = self.table.data.info.splits or {}
        rows = splits[self.d.split].num_examples if self.d.split in splits else None
        return self.row / rows if rows else None


def _newest_revision(dataset: str) -> str:
    """Its commit, so that what goes on tomorrow goes on in the dataset that was begun."""
    with _told(dataset):
        import huggingface_hub

        return huggingface_hub.HfApi().dataset_info(dataset).sha


class _Table:
    """Rows that `datasets` reads: of one parquet file or, without a path, of a dataset of the hub."""

    def __init__(self, d: config.Data, path: pathlib.Path | None, state: dict | None, revision: str | None = None):
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are told here, once
        self.what = path or d.source
        with _told(self.what):
            if path:
                self.data = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
            else:
                self.data = datasets.load_dataset(d.source, name=d.subset, split=d.split, streaming=True,
                                                  revision=revision)
            if state:
                self.data.load_state_dict(state)

    def __iter__(self) -> Iterator[object]:
        rows = iter(self.data)
        while True:
            with _told(self.what):
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row

    def state(self) -> dict:
        return self.data.state_dict()


@contextlib.contextmanager
def _told(what: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries raise whatever their many readers raise
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"[data] source = {what}: cannot be read: {type(error).__name__}: {first_line}") from None


def _field(where: str, row: object, field: str) -> object:
    if not isinstance(row, dict) or field not in row:
        found = (f"its fields are {', '.join(row)}" if isinstance(row, dict) else
                 f"it is {type(row).__name__}, and each line must be an object")
        raise ConfigError(f"{where}: has no field {field!r} (data.text_field); {found}")
    return row[field]
