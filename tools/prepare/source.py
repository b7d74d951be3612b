"""What a source names: its files, in the order in which they are read, and their documents."""

import collections
import errno
import glob
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
from data.order import name_hash
from system.files import TRANSIENT_ERRORS
from system.processes import print_error
from tools.prepare.formats import row_format
from tools.prepare.rows import READERS, is_plain_text, is_readable, read_rows

HUB = "hf://"
CONVERTED = "refs/convert/parquet"  # the hub's own copy of a dataset of other files
HUB_SECONDS = 10.0  # until the hub has to answer
DATASET_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
# other suffixes of files: what ends with one is not the id of a dataset
OTHER_SUFFIXES = (".gz", ".zst", ".zip", ".xz")
# of a folder these are not read: scripts that load the data, caches of `datasets`, and what its
# save_to_disk() writes next to rows
NOT_IN_FOLDERS = re.compile(r".*\.py|cache-.*\.arrow|(state|dataset_info|dataset_dict)\.json")
LOGGED_ROWS = 10  # of the wrong ones of a part


class SourceFile(NamedTuple):
    """A manifest stores it as a list of these fields in this order."""

    path: str  # or hf://datasets/OWNER/NAME@COMMIT/...
    size: int = 0  # bytes
    time: int = 0  # mtime in ns; of a dataset's file 0: its commit tells whether it has changed


class Range(NamedTuple):
    """The rows of a file that begin in these bytes of it; end=None: and all later ones."""

    file: SourceFile
    begin: int = 0
    end: int | None = None


def documents(
    data: config.Data, ranges: Iterable[Range], count: collections.Counter | None = None
) -> Iterator[str]:
    """Yields the documents that aren't empty. count: of "rows" and, with data.bad_rows, "wrong"
    ones. Raises ConfigError, which names file and row, and OSError if a retry may help."""
    count = collections.Counter() if count is None else count
    rows = row_format(data)
    for where, row in rows_of(ranges, rows.columns, data.text_field):
        count["rows"] += 1
        try:
            if isinstance(row, ConfigError):
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


def rows_of(
    ranges: Iterable[Range], columns: tuple[str, ...], text_field: str
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
    paths = local_paths(data.source)
    if paths is None:
        return hub_files(data, revision)
    for path in paths:
        if not is_readable(path):
            raise ConfigError(
                f"[data] source = {path}: must be one of {', '.join(READERS)}; for token ids: "
                f"{config.command('-m', 'import_tokens', '--help')}"
            )
    if not paths:
        problem = "no such file (or folder, or pattern) of"
        if os.path.isdir(data.source):
            if os.path.exists(os.path.join(data.source, "dataset_dict.json")):
                split = os.path.join(data.source, data.split)
                raise ConfigError(f"[data] source = {data.source}: holds splits; name one: {split}")
            problem = "holds no file of"
        raise ConfigError(f"[data] source = {data.source}: {problem} {', '.join(READERS)}")
    files = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from None
        files.append(SourceFile(path, status.st_size, status.st_mtime_ns))
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return sorted(files, key=lambda file: name_hash(os.path.relpath(file.path, root))), None


def local_paths(source: str) -> list[str] | None:
    """The files of a local source, by name; None for the id of a Hugging Face dataset. Raises
    ConfigError."""
    if source == STDLIB:
        return stdlib_files()
    if os.path.isdir(source):
        return folder_files(pathlib.Path(source))
    if os.path.exists(source):
        return [source]
    is_file_name = is_readable(source) or source.endswith(OTHER_SUFFIXES)
    if DATASET_ID.fullmatch(source) and not is_file_name:
        return None
    return sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))


def folder_files(folder: pathlib.Path) -> list[str]:
    """The files in a folder that are rows or texts. Of one that save_to_disk() wrote those of the
    last time. Raises OSError."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # another state.json
        state = json.loads((folder / "state.json").read_bytes())
        if state["_data_files"]:
            return sorted(str(folder / file["filename"]) for file in state["_data_files"])
    paths = []
    for path in sorted(map(str, folder.glob("[!.]*"))):  # no hidden ones: macOS's ._a.jsonl
        is_excluded = NOT_IN_FOLDERS.fullmatch(os.path.basename(path)) or os.path.isdir(path)
        if is_readable(path) and not is_excluded:
            paths.append(path)
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
