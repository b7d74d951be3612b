"""The files that a local data.source names: a file, a folder, a glob pattern, what
datasets.save_to_disk() wrote, or Python's own library."""

import contextlib
import glob
import itertools
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from config import ConfigError
from files import TRANSIENT_ERRORS

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
# a source that ends with one of these is a file, not the id of a Hugging Face dataset
FILE_SUFFIXES = (*TEXT_SUFFIXES, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz")
DATASET_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
# in a file's name, between other than letters: which split it is
TRAIN_WORDS = {"train", "training"}
OTHER_SPLIT_WORDS = {"val", "valid", "validation", "dev", "eval", "evaluation", "test", "testing"}
# files that datasets.save_to_disk() writes
SAVED_STATE = "state.json"
SAVED_INFO = "dataset_info.json"
SAVED_SPLITS = "dataset_dict.json"


class SourceFile(NamedTuple):
    """A file of a source. A manifest stores it as a list of these fields in this order."""

    path: str  # of a Hugging Face dataset: the name within it
    size: int  # bytes
    version: int | str  # mtime in ns; of a Hugging Face dataset: SHA-256 or git's SHA-1
    digest: str | None = None  # of its documents, once they are read


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
