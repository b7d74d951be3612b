"""What a source names: its files, in the order in which they are read, and their documents."""

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, NamedTuple

import config
from config import ConfigError
from data.folder import STDLIB
from data.hub import refuse_pointer
from data.row_format import row_format
from data.rows import COMPRESSIONS, SUFFIXES, read_rows
from files import TRANSIENT_ERRORS

HUB = "hf://"
HOW_TO_FETCH = (
    "on a machine with a network: hf download --repo-type dataset NAME --local-dir FOLDER, then "
    "--data.source=FOLDER"
)
READABLE = (*SUFFIXES, *(f"{suffix}{packed}" for suffix in SUFFIXES for packed in COMPRESSIONS))
DATASET_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
OTHER_FILES = (".csv", ".tsv", ".gz", ".zst", ".zip", ".xz")
# in a file's name, between other than letters: which split it is
TRAIN_WORDS = {"train", "training"}
OTHER_SPLITS = {"val", "valid", "validation", "dev", "eval", "evaluation", "test", "testing"}


class SourceFile(NamedTuple):
    """A manifest stores it as a list of these fields in this order."""

    path: str  # or hf://datasets/OWNER/NAME@COMMIT/...
    size: int = 0  # bytes; of a dataset's file 0: its commit tells whether it has changed
    time: int = 0  # mtime in ns


class Position(NamedTuple):
    """Where reading stopped. A manifest stores it as a list of these fields in this order."""

    file: int = 0
    row: int = 0  # the last that was read


class Source:
    """The documents of a source, from a position on. After each, `position` is its own."""

    def __init__(self, d: config.Data, files: list[SourceFile], position: Position | None = None):
        self.d = d
        self.files = files
        self.position = position or Position()
        self.open_file: IO[bytes] | None = None  # the one that is read
        self.format = row_format(d)
        self.texts = row_format(replace(d, format="text", messages_field=None, text_field="text"))

    def rows(self) -> Iterator[tuple[str, object]]:
        """Yields (where the row stands, the row). Raises ConfigError, and OSError if a retry may
        help."""
        for number in range(self.position.file, len(self.files)):
            path = self.files[number].path
            skip = self.position.row if number == self.position.file else 0
            with readable(path), open_file(path) as self.open_file:
                for row_number, row in read_rows(self.open_file, path, self.format.columns, skip):
                    self.position = Position(number, row_number)
                    yield f"{path}: row {row_number}", row

    def __iter__(self) -> Iterator[str]:
        """Yields the documents that aren't empty."""
        for where, row in self.rows():
            try:
                document = self.document(where, row)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            if document:
                yield document

    def document(self, where: str, row: object) -> str:
        """A row's document. Raises ConfigError if the row is wrong."""
        if not isinstance(row, dict):
            raise ConfigError(f"has no field, but is of type {type(row).__name__}")
        if is_plain_text(self.files[self.position.file].path):
            return self.texts.document(where, row)
        return self.format.document(where, row)

    def share_read(self) -> float:
        """About how much of the source was read, from 0 to 1, as if its files were equally long."""
        share_of_file = 0.0
        if self.open_file and not self.open_file.closed:
            raw = getattr(self.open_file, "raw", None)
            size = self.files[self.position.file].size or getattr(raw, "size", 0)
            share_of_file = self.open_file.tell() / max(1, size)
        return min(1.0, (self.position.file + share_of_file) / len(self.files))


def is_plain_text(path: str) -> bool:
    """Whether a file's rows have a text and no columns."""
    return path.removesuffix(".gz").removesuffix(".zst").endswith((".txt", ".py"))


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns what the libraries raise into a ConfigError that names the file or, where a retry may
    help, an OSError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:
        is_local_trouble = isinstance(error, OSError) and error.errno in TRANSIENT_ERRORS
        problem = f"cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if is_local_trouble or path.startswith(HUB):
            raise OSError(errno.EIO, problem, path) from None
        raise ConfigError(f"{path}: {problem}") from None


def open_file(path: str) -> IO[bytes]:
    if path.startswith(HUB):
        from huggingface_hub import HfFileSystem

        # pyrefly: ignore[bad-argument-type]  # a raw file, whose readline() knows no limit
        return io.BufferedReader(HfFileSystem().open(path), 1 << 16)
    refuse_pointer(pathlib.Path(path))
    return open(path, "rb")


# Which files


def list_files(d: config.Data, revision: str | None = None) -> tuple[list[SourceFile], str | None]:
    """(the files of a source in reading order, the commit of a Hugging Face dataset).

    The order is that of a hash of their names within the source, so that a corpus of many files is
    mixed as it is read. revision: None for the newest commit. Raises ConfigError.
    """
    paths = local_paths(d.source, d.split)
    if paths is None:
        return hub_files(d, revision)
    if not paths:
        kinds = ", ".join(SUFFIXES)
        raise ConfigError(
            f"[data] source = {d.source}: no such file (or folder, or pattern) of {kinds}"
        )
    with readable(d.source):
        files = [
            SourceFile(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths
        ]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return sorted(files, key=lambda file: name_hash(os.path.relpath(file.path, root))), None


def name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def local_paths(source: str, split: str | None) -> list[str] | None:
    """The files of a local source; None for the id of a Hugging Face dataset. split: of a folder
    that datasets.save_to_disk() wrote with several. Raises ConfigError."""
    if source == STDLIB:
        return stdlib_files()
    folder = pathlib.Path(source)
    if not folder.is_dir():
        if os.path.exists(source):
            return [source]
        if DATASET_ID.fullmatch(source) and not source.endswith((*READABLE, *OTHER_FILES)):
            return None
        return sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
    if (folder / "dataset_dict.json").exists():
        with readable(source):
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if split not in splits:
            raise ConfigError(f"[data] split = {split}: {folder} has {', '.join(map(str, splits))}")
        folder = folder / str(split)
    if (folder / "state.json").exists():
        with readable(source):
            state = json.loads((folder / "state.json").read_bytes())
        return [str(folder / file["filename"]) for file in state["_data_files"]]
    # no hidden file, nor an .arrow file, which `datasets` leaves beside rows as its cache
    paths = sorted(str(path) for path in folder.glob("[!.]*") if path.name.endswith(READABLE))
    return refuse_splits(source, [path for path in paths if not path.endswith(".arrow")])


def refuse_splits(source: str, paths: list[str]) -> list[str]:
    """Raises ConfigError if a folder holds another split beside the training data, or texts, such
    as a license, beside rows. A pattern may select all of it."""
    words = {path: {*re.split("[^a-z]+", os.path.basename(path).lower())} for path in paths}
    train = [path for path in paths if words[path] & TRAIN_WORDS]
    others = [path for path in paths if words[path] & OTHER_SPLITS]
    texts = [path for path in paths if is_plain_text(path)]
    rows = [path for path in paths if not is_plain_text(path)]
    for these, those in ((train, others), (rows, texts)):
        if these and those:
            raise ConfigError(
                f"[data] source = {source}: holds {these[0]} and {those[0]}; name the files, or all "
                f"of them by a pattern: --data.source='{source}/*'"
            )
    return paths


def stdlib_files() -> list[str]:
    """Real text that every machine has. Excludes tests: some are deliberately broken, and some
    systems omit them."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests"}
    return [
        str(path)
        for path in sorted(root.rglob("*.py"))
        if not excluded.intersection(path.relative_to(root).parts)
    ]


def hub_files(d: config.Data, revision: str | None) -> tuple[list[SourceFile], str]:
    """list_files() of a Hugging Face dataset: as `datasets` resolves subset and split."""
    match = DATASET_ID.fullmatch(d.source)
    assert match
    repo = match["repo"]
    name = f"[data] source = {d.source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset"
    try:
        import datasets
        import huggingface_hub

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        revision = revision or match["revision"]
        commit = huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha
        splits = datasets.load_dataset_builder(repo, d.subset, revision=commit).config.data_files
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"{name} cannot be read: {problem}; {HOW_TO_FETCH}") from None
    if d.split not in splits:
        raise ConfigError(f"[data] split = {d.split}: {d.source} has {', '.join(map(str, splits))}")
    paths = [str(path) for path in splits[d.split]]
    for path in paths:
        if not (path.startswith(HUB) and path.endswith(READABLE)):
            raise ConfigError(
                f"{name} has {path}; files of {', '.join(SUFFIXES)} are read: try "
                f"--data.source={repo}@refs/convert/parquet"
            )
    return [
        SourceFile(path)
        for path in sorted(paths, key=lambda path: name_hash(path.split(commit)[1]))
    ], commit
