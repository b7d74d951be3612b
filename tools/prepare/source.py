"""What a source names: its files, in the order in which they are read, and their documents."""

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
CONVERTED = "refs/convert/parquet"  # the hub's own copy of a dataset of other files
HUB_SECONDS = 10.0  # until the hub has to answer
DATASET_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
# other suffixes of files: what ends with one is not the id of a dataset
OTHER_SUFFIXES = (".gz", ".zst", ".zip", ".xz")
# of a folder these are not read: scripts that load the data, caches of `datasets`, and what its
# save_to_disk() writes next to rows
NOT_IN_FOLDERS = re.compile(r".*\.py|cache-.*\.arrow|(state|dataset_info|dataset_dict)\.json")
# what is about a text, and not read with it
CARD = re.compile(r"(README|(LICEN[CS]E|COPYING)\b).*", re.IGNORECASE)
LOGGED_ROWS = 10  # of the wrong ones of a part


class SourceFile(NamedTuple):
    """A manifest stores it as a list of these fields in this order."""

    path: str  # or hf://datasets/OWNER/NAME@COMMIT/...
    size: int = 0  # bytes
    time: int = 0  # mtime in ns; of a dataset's file 0: its commit tells whether it has changed


class ByteRange(NamedTuple):
    """The rows of a file that begin in these bytes of it; end=None: and all later ones."""

    file: SourceFile
    begin: int = 0
    end: int | None = None


def name_hash(name: str) -> bytes:
    """The sort key of a source's files, from the name within the source: files are read in the order of
    a hash, so that a corpus of many files is shuffled."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def documents(
    data: config.Data, ranges: Iterable[ByteRange], count: collections.Counter | None = None
) -> Iterator[str]:
    """Yields the documents that aren't empty. count: of "rows" and, with data.bad_rows, "wrong"
    ones. Raises ConfigError, which names file and row, and OSError if a retry may help."""
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
    """Raises ConfigError, with the option that may help, if a source's first row lacks a column that
    data.format reads: all others will, too. Reports columns of it that nothing reads. OSError if a
    retry may help."""
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
    except ConfigError:  # which its part will raise, and others with it
        pass


def rows_of(
    ranges: Iterable[ByteRange], columns: tuple[str, ...], text_field: str
) -> Iterator[tuple[str, Any]]:
    """Yields (where the row stands, the row) as the readers of rows.py do."""
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
    """Raises ConfigError, and whatever the hub's library raises."""
    if path.startswith(HUB):
        from huggingface_hub import HfFileSystem

        # pyrefly: ignore[bad-argument-type]  # a raw file, whose readline() knows no limit
        return io.BufferedReader(HfFileSystem().open(path), 1 << 16)
    return open(path, "rb")


def unreadable(path: str, error: Exception, where: str = "") -> Exception:
    """What to raise for an exception of a library: an OSError if a retry may help. where: in the
    file, for the message."""
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


# Which files


def list_files(
    data: config.Data, revision: str | None = None
) -> tuple[list[SourceFile], str | None]:
    """(the files of a source in reading order, the commit of a Hugging Face dataset).

    The order is that of a hash of their names within the source, so that a corpus of many files is
    mixed as it is read. revision: None for the newest commit. Raises ConfigError, and OSError if a
    retry may help.
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
    """The files of a local source as they are now, in reading order; None for the id of a Hugging
    Face dataset. Raises ConfigError."""
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
    """The files of a local source, by name; None for the id of a Hugging Face dataset. Raises
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
    if CARD.fullmatch(os.path.basename(source)):  # a pattern that asks for them
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
    """The files of a pattern, or those below a folder, by name. Leaves out hidden ones, such as
    macOS's ._a.jsonl, and what save_to_disk() wrote before the last time. Raises ConfigError."""
    if not os.path.isdir(source):
        return sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))
    paths = []
    folders: dict[str, str] = {}  # by their real paths
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
    """What save_to_disk() wrote into a folder the last time."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # another state.json
        state = json.loads(pathlib.Path(folder, "state.json").read_bytes())
        return [file["filename"] for file in state["_data_files"]]
    return []


def ending(path: str) -> str:
    name = os.path.basename(path)
    return name if is_card(path) else os.path.splitext(name)[1] or "without an ending"


def refuse_copies(paths: list[str]) -> None:
    """Raises ConfigError for a link next to its file, and for files of rows that differ in their
    endings alone, or texts in their compression."""
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
    """Real text that every machine has. Excludes tests: some are deliberately broken, and some
    systems omit them."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests"}
    return [
        str(path)
        for path in sorted(root.rglob("*.py"))
        if not excluded.intersection(path.relative_to(root).parts)
    ]


def hub_files(data: config.Data, revision: str | None) -> tuple[list[SourceFile], str]:
    """list_files() of a Hugging Face dataset: as `datasets` resolves subset and split."""
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

    # SUBSET/SPLIT/0000.parquet, which `datasets` would take for one subset
    splits = collections.defaultdict(list)
    subsets = set()
    for path in HfFileSystem().glob(f"datasets/{repo}@{commit}/{subset or '*'}/*/*.parquet"):
        *_, name, split, _ = path.split("/")
        subsets.add(name)
        splits[split].append(f"{HUB}{path}")
    if len(subsets) > 1:
        raise ValueError(f"data.subset must select one of {', '.join(sorted(subsets))}")
    return splits
