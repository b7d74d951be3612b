"""Lists the files of a source in reading order, and reads their documents."""

import collections
import errno
import glob
import hashlib
import io
import json
import math
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any, NamedTuple

import config
from config import ConfigError
from data.folder import STDLIB
from system import TRANSIENT_ERRORS, print_error, warn_once
from tools.prepare.formats import options_for, row_format
from tools.prepare.row_format import MissingColumn
from tools.prepare.rows import COMPRESSIONS, READERS, is_plain_text, is_readable, read_rows

HUB = "hf://"
CONVERTED = "refs/convert/parquet"  # the hub converts datasets of other file types to this branch
HUB_SECONDS = 10.0  # timeout of a request to the hub
DATASET_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
# a name with one of these suffixes is a file's, not the id of a dataset
OTHER_SUFFIXES = (".gz", ".zst", ".zip", ".xz")
# skipped in folders: loading scripts, caches of `datasets`, and the metadata that its
# save_to_disk() writes
NOT_IN_FOLDERS = re.compile(r".*\.py|cache-.*\.arrow|(state|dataset_info|dataset_dict)\.json")
# skipped in folders: files about the text
CARD = re.compile(r"(README|(LICEN[CS]E|COPYING)\b).*", re.IGNORECASE)
LOGGED_ROWS = 10  # log at most so many invalid rows per part


class SourceFile(NamedTuple):
    """A file of a source. A manifest stores it as a list of these fields, in this order."""

    path: str  # or hf://datasets/OWNER/NAME@COMMIT/...
    size: int = 0  # bytes
    time: int = 0  # mtime in ns; 0 for a file of a dataset, which its commit identifies


class ByteRange(NamedTuple):
    """The rows of a file that begin at these bytes. end=None includes all later rows."""

    file: SourceFile
    begin: int = 0
    end: int | None = None


def name_hash(name: str) -> bytes:
    """The sort key of a source's files: the hash of a file's name within the source. This order
    shuffles a corpus of many files."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def documents(
    data: config.Data, ranges: Iterable[ByteRange], count: collections.Counter | None = None
) -> Iterator[str]:
    """Yields the documents, without empty ones.

    Counts "rows" in `count` and, unless data.bad_rows is "refuse", "wrong" (invalid) rows. Raises
    ConfigError, which names file and row, and OSError if a retry may help.
    """
    count = collections.Counter() if count is None else count
    rows = row_format(data)
    for where, row in rows_of(ranges, rows.columns, data.text_field):
        count["rows"] += 1
        try:
            if isinstance(row, ConfigError):
                if data.source == STDLIB:  # not every module is in UTF-8
                    continue
                raise row
            if not isinstance(row, dict):
                raise ConfigError(f"must be an object, not {type(row).__name__}")
            document = rows.document(where, row)
        except ConfigError as error:
            if data.bad_rows == "refuse":
                raise ConfigError(f"{where}: {error}") from None
            count["wrong"] += 1
            if count["wrong"] <= LOGGED_ROWS:
                print_error(f"{where}: {error}; left out, as data.bad_rows says")
            continue
        if document:
            yield document


def check_first_row(data: config.Data, files: Iterable[SourceFile]) -> None:
    """Raises ConfigError if a source's first row lacks a column that data.format reads.

    The other rows will lack it, too; the message suggests options that may read them. Warns about
    columns that nothing reads. Raises OSError if a retry may help.
    """
    where = ""
    row: Any = {}
    try:
        for where, row in rows_of(map(ByteRange, files), (), data.text_field):
            if isinstance(row, dict):
                rows = row_format(data)
                rows.document(where, row)
                if columns := rows.not_read(row):
                    warn_once(f"{data.source}: not read: {', '.join(columns)}")
            return
    except MissingColumn as error:
        raise ConfigError(f"{where}: {error}; try {options_for(row)}") from None
    except ConfigError:  # preparing the part will report it, with the problems of other parts
        pass


def rows_of(
    ranges: Iterable[ByteRange], columns: tuple[str, ...], text_field: str
) -> Iterator[tuple[str, Any]]:
    """Yields (the row's file and number, the row). Rows are those of rows.py's readers, but a plain
    text becomes a row with the one column `text_field`."""
    for (path, *_), begin, end in ranges:
        origin = f" from byte {begin} on" if begin else ""
        number = 0
        try:
            with open_file(path) as file:
                for number, row in read_rows(file, path, columns, begin, end or math.inf):
                    if is_plain_text(path) and isinstance(row, str):
                        row = {text_field: row}
                    yield f"{path}: row {number}{origin}", row
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except Exception as error:
            raise unreadable(path, error, f"rows from {number + 1}{origin}: ") from None


def open_file(path: str) -> IO[bytes]:
    """Opens a local file or one on the hub. Raises OSError, and whatever the hub's library
    raises."""
    if path.startswith(HUB):
        from huggingface_hub import HfFileSystem

        # pyrefly: ignore[bad-argument-type]  # a raw file, whose readline() ignores its limit
        return io.BufferedReader(HfFileSystem().open(path), 1 << 16)
    return open(path, "rb")


def unreadable(path: str, error: Exception, where: str = "") -> Exception:
    """Converts a library's exception to an OSError if a retry may help, else to a ConfigError.

    `where` is the place in the file, for the message.
    """
    problem = f"{where}cannot be read: {type(error).__name__}: {first_line(error)}"
    if path.startswith(HUB):
        may_pass = not isinstance(error, ValueError | FileNotFoundError)
    else:
        may_pass = isinstance(error, OSError) and error.errno in TRANSIENT_ERRORS
    if may_pass:
        return OSError(errno.EIO, problem, path)
    return ConfigError(f"{path}: {problem}")


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# List the files


def list_files(
    data: config.Data, revision: str | None = None
) -> tuple[list[SourceFile], str | None]:
    """Returns (the files of a source in reading order, the commit of a Hugging Face dataset).

    name_hash() gives the order. revision=None selects the newest commit. Raises ConfigError, and
    OSError if a retry may help.
    """
    files = local_files(data.source)
    if files is None:
        return hub_files(data, revision)
    paths = [file.path for file in files]
    for path in paths:
        if not is_readable(path):
            raise ConfigError(
                f"[data] source = {path}: must be one of {', '.join(READERS)}; for token ids: "
                f"{config.command('-m', 'import_tokens', '--help')}"
            )
    visible = visible_files(data.source)
    not_read = collections.Counter(map(ending, sorted({*visible} - {*paths})))
    counts = ", ".join(f"{count} {name}" for name, count in not_read.most_common(10))
    if not paths:
        problem = "no such file (or folder, or pattern) of"
        if os.path.isdir(data.source):
            problem = f"holds {counts or 'nothing'}, and no file (scripts: by a pattern alone) of"
        raise ConfigError(f"[data] source = {data.source}: {problem} {', '.join(READERS)}")
    refuse_copies(paths)
    if counts:
        warn_once(f"{data.source}: not read: {counts}")
    return files, None


def local_files(source: str) -> list[SourceFile] | None:
    """The current files of a local source, in reading order; None for the id of a Hugging Face
    dataset. Raises ConfigError."""
    paths = local_paths(source)
    if paths is None:
        return None
    files = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from None
        files.append(SourceFile(path, status.st_size, status.st_mtime_ns))
    root = os.path.commonpath([os.path.dirname(path) for path in paths] or [""])
    return sorted(files, key=lambda file: name_hash(os.path.relpath(file.path, root)))


def local_paths(source: str) -> list[str] | None:
    """The paths of a local source's files; None for the id of a Hugging Face dataset. Raises
    ConfigError."""
    if is_dataset(source):
        return None
    if source == STDLIB:
        return stdlib_files()
    if os.path.isfile(source):
        return [source]
    paths = visible_files(source)
    if os.path.isdir(source):
        paths = [path for path in paths if is_readable(path)]
        paths = [path for path in paths if not NOT_IN_FOLDERS.fullmatch(os.path.basename(path))]
    if CARD.fullmatch(os.path.basename(source)):  # the pattern asks for cards
        return paths
    return [path for path in paths if not is_card(path)]


def is_dataset(source: str) -> bool:
    """Whether a source is the id of a Hugging Face dataset."""
    if source == STDLIB or os.path.exists(source):
        return False
    is_file_name = is_readable(source) or source.endswith(OTHER_SUFFIXES)
    return bool(DATASET_ID.fullmatch(source)) and not is_file_name


def is_card(path: str) -> bool:
    return is_plain_text(path) and bool(CARD.fullmatch(os.path.basename(path)))


def visible_files(source: str) -> list[str]:
    """The files that match a pattern, or all files below a folder, sorted by name.

    In a folder, skips hidden files, such as macOS's ._a.jsonl, and files that an earlier
    save_to_disk() left behind. Raises ConfigError.
    """
    if not os.path.isdir(source):
        return sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))
    paths = []
    folders: dict[str, str] = {}  # real path -> path
    for folder, subfolders, names in os.walk(source, onerror=raise_error, followlinks=True):
        same = folders.setdefault(os.path.realpath(folder), folder)
        if same != folder:
            raise ConfigError(f"{folder}: is the same folder as {same}; remove the link")
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        if "dataset_dict.json" in names:
            splits = ", ".join(os.path.join(folder, name) for name in sorted(subfolders))
            raise ConfigError(f"[data] source = {source}: holds splits; name one: {splits}")
        names = saved_files(folder) or [name for name in names if not name.startswith(".")]
        paths += [os.path.join(folder, name) for name in names]
    return sorted(paths)


def raise_error(error: OSError) -> None:
    raise unreadable(error.filename, error)


def saved_files(folder: str) -> list[str]:
    """The files that the last save_to_disk() wrote into a folder."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # a state.json of something else
        state = json.loads(pathlib.Path(folder, "state.json").read_bytes())
        return [file["filename"] for file in state["_data_files"]]
    return []


def ending(path: str) -> str:
    name = os.path.basename(path)
    return name if is_card(path) else os.path.splitext(name)[1] or "without an ending"


def refuse_copies(paths: list[str]) -> None:
    """Raises ConfigError if two files seem to hold the same text.

    These are a link and its target, files of rows whose names differ only in their suffixes, and
    plain texts whose names differ only in the suffix of their compression.
    """
    copies: dict[str, str] = {}
    for path in paths:
        stem, suffix = os.path.splitext(path)
        if suffix.lower() not in COMPRESSIONS:
            stem = path
        if not is_plain_text(path):
            stem = os.path.splitext(stem)[0]
        for key in {f"stem {stem}", f"file {os.path.realpath(path)}"}:
            same = copies.setdefault(key, path)
            if same != path:
                raise ConfigError(
                    f"{path}: holds the text of {same}, it seems; remove or rename one of them, or "
                    "name the files by a pattern, data.source"
                )


def stdlib_files() -> list[str]:
    """The modules of Python's standard library: real text that every machine has. Excludes its
    tests, because some are deliberately broken and some systems omit them."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests"}
    return [
        str(path)
        for path in sorted(root.rglob("*.py"))
        if not excluded.intersection(path.relative_to(root).parts)
    ]


def hub_files(data: config.Data, revision: str | None) -> tuple[list[SourceFile], str]:
    """list_files() for a Hugging Face dataset. `datasets` resolves subset and split."""
    match = DATASET_ID.fullmatch(data.source)
    assert match
    repo = match["repo"]
    try:
        import huggingface_hub

        revision = revision or match["revision"]
        api = huggingface_hub.HfApi()
        info = api.dataset_info(repo, revision=revision, timeout=HUB_SECONDS, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        splits = dataset_splits(repo, data.subset, info.sha, is_converted=revision == CONVERTED)
    except Exception as error:
        raise ConfigError(
            f"[data] source = {data.source}: is neither {STDLIB} nor a local file, and as a Hugging "
            f"Face dataset cannot be read: {type(error).__name__}: {first_line(error)}; check the "
            "name, log in with `hf auth login` or, if there is no network here, run `hf download "
            f"--repo-type dataset {repo} --local-dir FOLDER` where there is one, and name the "
            "files in it: --data.source='FOLDER/...'"
        ) from None
    if data.split not in splits:
        raise ConfigError(f"[data] split = {data.split}: {data.source} has {', '.join(splits)}")
    paths = splits[data.split]
    for path in paths:
        if not (path.startswith(HUB) and is_readable(path)):
            raise ConfigError(
                f"[data] source = {data.source}: has {path}; of a dataset, {', '.join(READERS)} are "
                f"read: try --data.source={repo}@{CONVERTED}"
            )
    names = {path: path.partition(f"{info.sha}/")[2] for path in paths}
    paths.sort(key=lambda path: name_hash(names[path]))
    return [SourceFile(path, sizes.get(names[path], 0)) for path in paths], info.sha


def dataset_splits(
    repo: str, subset: str | None, commit: str, is_converted: bool
) -> dict[str, list[str]]:
    """The files of a dataset by split. Raises whatever the libraries raise."""
    if not is_converted:
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        files = datasets.load_dataset_builder(repo, subset, revision=commit).config.data_files
        return {str(split): [*map(str, paths)] for split, paths in files.items()}
    from huggingface_hub import HfFileSystem

    # `datasets` would read all of SUBSET/SPLIT/0000.parquet as one subset
    splits = collections.defaultdict(list)
    subsets = set()
    for path in HfFileSystem().glob(f"datasets/{repo}@{commit}/{subset or '*'}/*/*.parquet"):
        *_, name, split, _ = path.split("/")
        subsets.add(name)
        splits[split].append(f"{HUB}{path}")
    if len(subsets) > 1:
        raise ValueError(f"data.subset must select one of {', '.join(sorted(subsets))}")
    return splits
