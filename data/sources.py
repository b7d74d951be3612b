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
from collections.abc import Iterator

import config
from config import ConfigError

STDLIB = "python-stdlib"
LOCAL = (".jsonl", ".json", ".parquet", ".txt")
TEXT_BYTES = 1 << 16  # a longer .txt file becomes several documents


def kind_of(source: str) -> "type[Source]":
    """The class that reads a source."""
    return Hub if source != STDLIB and local_files(source) is None else Files


def open_source(d: config.Data, place: list | None = None) -> "Source":
    """Opens [data] source at its beginning, or at a value of place() to resume. Raises ConfigError if there is none."""
    return kind_of(d.source)(d, place)


class Source(abc.ABC):
    """Iterates over the non-empty documents. Subclasses define what is abstract."""

    revision: str | None = None  # commit of a Hugging Face dataset

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
                found = ", ".join(row) if isinstance(row, dict) else f"is of type {type(row).__name__}"
                raise ConfigError(f"{where}: has no field {field!r} (data.text_field), but {found}")
            if not isinstance(text := row[field], str):
                raise ConfigError(f"{where}: field {field!r} must be text, not {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
                raise ConfigError(f"{where}: is not valid Unicode: {error.reason} at character {error.start}") from None
            if text:
                empty = False
                yield text
        if empty:
            raise ConfigError(f"[data] source = {self.d.source}: holds no text")


class Files(Source):
    """Local files, one after the other, or pieces of them: (number of the file, begin, end), in bytes, of a parquet
    file in row groups. A piece of text has the lines that begin in it. A place is (piece, rows read, bytes read)."""

    def __init__(self, d: config.Data, place: list | None, pieces: list[list[int]] | None = None):
        super().__init__(d, place)
        self.paths = (_stdlib_files() if d.source == STDLIB else local_files(d.source)) or []
        if not self.paths:
            raise ConfigError(f"[data] source = {d.source}: no such file (or folder, or pattern) of {', '.join(LOCAL)}")
        self.sizes = [path.stat().st_size for path in self.paths]
        self.pieces = pieces or [[number, 0, size] for number, size in enumerate(self.sizes)]
        self.whole = pieces is None
        self.piece, self.row, self.byte = place or (0, 0, 0)

    def rows(self) -> Iterator[tuple[str, object]]:
        kinds = {".parquet": self._parquet, ".txt": self._text, ".py": self._python}
        while self.piece < len(self.pieces):
            number, begin, end = self.pieces[self.piece]
            path = self.paths[number]
            if path.suffix not in LOCAL and self.d.source != STDLIB:
                raise ConfigError(f"[data] source = {path}: must be one of {', '.join(LOCAL)}")
            yield from kinds.get(path.suffix, self._json_lines)(path, begin, end)
            self.piece, self.row, self.byte = self.piece + 1, 0, 0

    def place(self) -> list:
        return [self.piece, self.row, self.byte]

    def share(self) -> float | None:
        return (sum(self.sizes[: self.piece]) + self.byte) / max(1, sum(self.sizes)) if self.whole else None

    def units(self, number: int) -> tuple[int, int]:
        """A file's size, as pieces count it, and about how many bytes such a unit has. Raises ConfigError."""
        path, size = self.paths[number], self.sizes[number]
        if path.suffix != ".parquet":
            return size, 1
        with _readable(f"{path}:"):
            import pyarrow.parquet  # comes with `datasets`

            groups = pyarrow.parquet.ParquetFile(path).metadata.num_row_groups
            return groups, max(1, size // max(1, groups))

    def _open(self, path: pathlib.Path, begin: int) -> io.BufferedReader:
        """The file, at the first line that begins at `begin` or later, or where reading stopped."""
        file = path.open("rb")
        file.seek(self.byte or max(0, begin - 1))
        if begin and not self.byte:
            file.readline()  # the rest of a line that the piece before has, or the end of its last one
        self.byte = file.tell()
        return file

    def _json_lines(self, path: pathlib.Path, begin: int, end: int) -> Iterator[tuple[str, object]]:
        """Reads line by line and not through `datasets`, whose errors name neither line nor field."""
        with self._open(path, begin) as file:
            while self.byte < end and (line := file.readline()):
                self.row, self.byte = self.row + 1, self.byte + len(line)
                if line.strip():
                    line_number = f"{self.row}" + f" after byte {begin:,}" * bool(begin)
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise ConfigError(f"{path}: line {line_number}: is not valid JSON: {error}") from None
                    yield f"{path}: line {line_number}", row

    def _text(self, path: pathlib.Path, begin: int, end: int) -> Iterator[tuple[str, object]]:
        """A file is one document; a long one is split, at a line end if one is near, so that a part is validation."""
        ended = True  # at the end of a line: the next piece begins there
        with self._open(path, begin) as file:
            while (self.byte < end or not ended) and (
                    # to the end of the line with the piece's last byte
                    raw := file.read(max(0, min(TEXT_BYTES, end - self.byte - 1))) + file.readline(TEXT_BYTES)):
                try:
                    text, used = codecs.utf_8_decode(raw, "strict", not file.peek(1))  # leaves a partial character
                except UnicodeDecodeError as error:
                    line = f"{self.row + raw.count(10, 0, error.start) + 1}" + f" after byte {begin:,}" * bool(begin)
                    raise ConfigError(f"{path}: line {line}: is not UTF-8: {error.reason}") from None
                self.row, self.byte = self.row + raw.count(b"\n"), self.byte + used
                ended = raw[:used].endswith(b"\n")
                file.seek(self.byte)
                yield str(path), {self.d.text_field: text}

    def _python(self, path: pathlib.Path, begin: int, end: int) -> Iterator[tuple[str, object]]:
        if not self.byte:
            self.byte = end
            with contextlib.suppress(UnicodeDecodeError):
                yield str(path), {self.d.text_field: path.read_bytes().decode()}

    def _parquet(self, path: pathlib.Path, begin: int, end: int) -> Iterator[tuple[str, object]]:
        with _readable(f"{path}:"):
            import pyarrow.parquet  # comes with `datasets`

            field, table = self.d.text_field, pyarrow.parquet.ParquetFile(path)
            rows, skip = table.metadata.num_rows, self.row  # those read before
            groups = None if self.whole else [*range(begin, end)]
            first = sum(table.metadata.row_group(i).num_rows for i in range(begin)) if groups else 0
            if rows and field not in table.schema_arrow.names:
                yield f"{path}: row 1", dict.fromkeys(table.schema_arrow.names)
            for batch in table.iter_batches(1024, groups, [field]):
                for text in batch[field][skip:].to_pylist():
                    self.row += 1
                    self.byte = end * self.row // rows
                    yield f"{path}: row {first + self.row}", {field: text}
                skip = max(0, skip - batch.num_rows)


class Hub(Source):
    """A Hugging Face dataset, streamed. Its place is (rows read, the state of `datasets`, revision)."""

    def __init__(self, d: config.Data, place: list | None):
        super().__init__(d, place)
        with _readable(f"{d.source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset"):
            import datasets
            import huggingface_hub

            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported here, once
            # pinned to a commit, so that a later resume reads the same version of the dataset
            self.row, state, self.revision = place or (0, None, huggingface_hub.HfApi().dataset_info(d.source).sha)
            self.data = datasets.load_dataset(d.source, name=d.subset, split=d.split, streaming=True,
                                              revision=self.revision)
            if state:
                self.data.load_state_dict(state)

    def rows(self) -> Iterator[tuple[str, object]]:
        with _readable(f"{self.d.source}:"):
            for row in self.data:
                self.row += 1
                yield f"{self.d.source}: row {self.row}", row

    def place(self) -> list:
        return [self.row, self.data.state_dict(), self.revision]

    def share(self) -> float | None:
        split = (self.data.info.splits or {}).get(self.d.split)
        return self.row / split.num_examples if split and split.num_examples else None


@contextlib.contextmanager
def _readable(what: object) -> Iterator[None]:
    """Turns any exception of the libraries called inside into ConfigError. what: names the source in its message."""
    try:
        yield
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"[data] source = {what} cannot be read: {type(error).__name__}: {first_line}") from None


def local_files(source: str) -> list[pathlib.Path] | None:
    """The files of a file name, folder or glob pattern; None for the id of a Hugging Face dataset: [OWNER/]NAME without
    a file suffix. Raises ConfigError."""
    path, suffixes = pathlib.Path(source), (*LOCAL, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".arrow")
    with _readable(f"{source}:"):
        if path.is_dir():
            return sorted(p for p in path.iterdir() if p.suffix in LOCAL and not p.is_dir())
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
    with _readable(f"{source}:"):
        return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _stdlib_files() -> list[pathlib.Path]:
    """Real text that every machine has. Excludes tests: some are deliberately broken, and some systems omit them."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    return [path for path in sorted(root.rglob("*.py")) if not left_out.intersection(path.relative_to(root).parts)]
