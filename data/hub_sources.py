"""Hugging Face datasets: streamed through `datasets` or, for growing text, read by file."""

import errno
import functools
import hashlib
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import config
from config import ConfigError
from data.console import report
from data.hub import GIB, causes_of, connection_problem, how_to_fetch, is_unreachable
from data.local_files import STDLIB, TEXT_SUFFIXES, SourceFile, readable
from data.sources import Files, FilesState, Source, name_hash

# how long a lost network is retried: in a run, and before it
RETRY_SECONDS = 300.0
FIRST_RETRY_SECONDS = 10.0
LONGEST_PAUSE = 30.0  # seconds between two tries
PATHS_PER_REQUEST = 500
T = TypeVar("T")


class HubState(NamedTuple):
    """Where streaming a dataset stopped. A manifest stores it as a list of these fields in this
    order."""

    row: int  # rows read
    datasets_state: dict  # IterableDataset.state_dict()
    revision: str


class Hub(Source):
    """A dataset, streamed."""

    def __init__(self, d: config.Data, state: Any = None, record: dict | None = None):
        """The commit is that of the state or the record; without these, the newest. Raises
        ConfigError."""
        super().__init__(d, state, record)
        require_hub(d.source)
        before = HubState(*state) if state else None
        self.row = before.row if before else 0  # rows read
        with readable(not_local(d.source)):
            import datasets
            import huggingface_hub

            # its errors are reported here, once
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)
            # pinned to a commit, so that a later resume reads the same version of the dataset
            if before:
                self.revision = before.revision
            elif not self.revision:
                self.revision = huggingface_hub.HfApi().dataset_info(d.source).sha
            self.data = datasets.load_dataset(
                d.source, name=d.subset, split=d.split, streaming=True, revision=self.revision
            )
            if before and before.datasets_state:
                self.data.load_state_dict(before.datasets_state)

    def rows(self) -> Iterator[tuple[str, object]]:
        with readable(f"{self.d.source}:"):
            for row in self.data:
                self.row += 1
                yield f"{self.d.source}: row {self.row}", row

    def resume_state(self) -> HubState:
        assert self.revision
        return HubState(self.row, self.data.state_dict(), self.revision)

    def fraction_read(self) -> float | None:
        splits = self.data.info.splits or {}
        split = splits.get(self.d.split)
        if not split or not split.num_examples:
            return None
        return self.row / split.num_examples


class HubFiles(Files):
    """A dataset's data files at one commit, each fetched into the hub's cache while the one before
    is read."""

    def __init__(self, d: config.Data, state: Any = None, record: dict | None = None):
        """The commit and its files are those of the record or, without one, the newest. Raises
        ConfigError."""
        super().__init__(d, state, record)
        self.fetches: dict[int, Fetch] = {}  # by the number of the file

    def list_files(self) -> list[SourceFile]:
        self.revision, files = find_files(self.d, self.revision)
        return sorted(files, key=lambda file: name_hash(file.path))

    def report_size(self) -> None:
        """Says how much there is, and where it goes."""
        size = self.bytes_before[-1] / GIB
        report(
            f"{self.d.source}: {len(self.files):,} files, {size:,.2f} GiB; each is fetched when it "
            f"is needed, into {cache_folder()}"
        )

    def path_of(self, number: int) -> pathlib.Path:
        path = self._fetch(number).result()
        following = number + 1
        if following < self.end and free_bytes(path) > self.files[following].size:
            self._fetch(following)
        return path

    def _fetch(self, number: int) -> "Fetch":
        """The fetch of a file, which begins here unless it has begun."""
        if number not in self.fetches:
            assert self.revision
            self.fetches[number] = Fetch(self.d.source, self.revision, self.files[number])
        return self.fetches[number]

    def with_current_version(self, file: SourceFile) -> SourceFile:
        """A commit does not change: path_of() compares what was downloaded with its size and
        hash."""
        return file

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> Iterator[None]:
        """A commit does not change."""
        yield from ()

    def on_recorded(self, state: FilesState) -> None:
        """Removes the files before this state from the cache if there is no room for those after
        it. Files that were in the cache before stay, since another program may read them."""
        unread_bytes = self.bytes_before[-1] - self.bytes_before[state.file]
        done = [number for number in self.fetches if number < state.file]
        for number in done:
            fetched = self.fetches.pop(number)
            path = fetched.result()
            if fetched.is_new and free_bytes(path) < unread_bytes:
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)


class Fetch(threading.Thread):
    """Brings a file of a dataset's commit into the hub's cache, in the background."""

    def __init__(self, source: str, revision: str, file: SourceFile):
        super().__init__(daemon=True)
        self.source = source
        self.revision = revision
        self.file = file
        self.path: pathlib.Path | None = None
        self.is_new = False  # it was not in the cache
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.path, self.is_new = fetch(self.source, self.revision, self.file)
        except BaseException as error:
            self.error = error

    def result(self) -> pathlib.Path:
        """Waits for the file. Returns its path. Raises ConfigError and OSError."""
        self.join()
        if self.error:
            raise self.error
        assert self.path
        return self.path


def free_bytes(path: pathlib.Path) -> int:
    """Free bytes of a file's disk."""
    return shutil.disk_usage(path.parent).free


def cache_folder() -> pathlib.Path:
    """The hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return pathlib.Path(HF_HUB_CACHE)


def not_local(source: str) -> str:
    """Names a dataset in messages, also for those who meant a file."""
    return f"{source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset"


def require_hub(source: str) -> None:
    """Raises ConfigError if the hub cannot be reached: its library would try for minutes."""
    problem = connection_problem()
    if problem:
        raise ConfigError(f"[data] source = {not_local(source)}: {problem}; {how_to_fetch()}")


def find_files(d: config.Data, revision: str | None = None) -> tuple[str, list[SourceFile]]:
    """(a dataset's commit, its data files as `datasets` resolves subset and split). revision: None
    for the newest commit. Raises ConfigError, also for files of other kinds, and OSError."""
    require_hub(d.source)
    look_up = functools.partial(_find_files, d, revision)
    return with_retries(not_local(d.source), look_up, FIRST_RETRY_SECONDS)


def _find_files(d: config.Data, revision: str | None) -> tuple[str, list[SourceFile]]:
    import datasets
    import huggingface_hub

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    api = huggingface_hub.HfApi()
    commit = revision or api.dataset_info(d.source).sha
    options = datasets.load_dataset_builder(d.source, d.subset, revision=commit).config
    splits = options.data_files
    if d.split not in splits:
        raise ConfigError(f"[data] split = {d.split}: {d.source} has {', '.join(splits)}")
    root = f"hf://datasets/{d.source}@{commit}/"
    names = [str(name).removeprefix(root) for name in splits[d.split]]
    _check_kinds(d, names, has_field=bool(getattr(options, "field", None)))
    files = {}
    for i in range(0, len(names), PATHS_PER_REQUEST):
        request = names[i : i + PATHS_PER_REQUEST]
        for file in api.get_paths_info(d.source, request, revision=commit, repo_type="dataset"):
            version = file.lfs.sha256 if file.lfs else file.blob_id
            files[file.path] = SourceFile(file.path, file.size, version)
    return commit, [files[name] for name in names]


def _check_kinds(d: config.Data, names: list[str], has_field: bool) -> None:
    """Raises ConfigError if a dataset's files are not of the kinds that Files reads. has_field: its
    JSON files hold the rows in a field."""
    unreadable = [name for name in names if not name.endswith(TEXT_SUFFIXES) or "://" in name]
    if unreadable:
        problem = unreadable[0]
    elif has_field:
        problem = "its rows in a field of its files"
    else:
        return
    raise ConfigError(
        f'[data] order = "growing": reads files of {", ".join(TEXT_SUFFIXES)}, and {d.source} has '
        f'{problem}; set order = "global"'
    )


def fetch(source: str, revision: str, file: SourceFile) -> tuple[pathlib.Path, bool]:
    """(a file of a dataset's commit in the hub's cache, whether it had to be downloaded). Raises
    ConfigError and OSError."""
    download = functools.partial(_fetch, source, revision, file)
    return with_retries(f"{source}: {file.path}", download, RETRY_SECONDS)


def _fetch(source: str, revision: str, file: SourceFile) -> tuple[pathlib.Path, bool]:
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # its retries are reported here, once
    huggingface_hub.utils.disable_progress_bars()
    commit = {"revision": revision, "repo_type": "dataset"}
    was_cached = is_cached(source, revision, file)
    try:
        path = pathlib.Path(huggingface_hub.hf_hub_download(source, file.path, **commit))
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise error.__cause__ or error from None  # which says why
    is_new = not was_cached
    is_right = path.stat().st_size == file.size
    if is_right and is_new:
        expected = str(file.version)
        is_right = hash_like(expected, path) == expected
    if not is_right:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise OSError(f"what was downloaded is not the file of commit {revision[:12]}")
    return path, is_new


def is_cached(source: str, revision: str, file: SourceFile) -> bool:
    """Whether a file of a dataset's commit is in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source, file.path, revision=revision, repo_type="dataset")
    return isinstance(path, str)


def hash_like(expected: str, path: pathlib.Path) -> str:
    """A file's SHA-256 or, if `expected` is one, git's SHA-1."""
    digest = hashlib.sha256()
    if len(expected) != 64:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def with_retries(what: str, call: Callable[[], T], seconds: float) -> T:
    """Returns call(), retried for so long while the network or the hub fails. what: names it in
    messages. Raises OSError if they still fail then, ConfigError for what a retry cannot mend."""
    end = time.monotonic() + seconds
    pause = 1.0
    is_reported = False
    with readable(what):
        while True:
            try:
                return call()
            except Exception as error:
                first_line = str(error).partition("\n")[0]
                problem = f"cannot be read: {type(error).__name__}: {first_line}"
                advice = f"; {how_to_fetch()}" if is_unreachable(error) else ""
                if is_lasting(error):
                    if advice:
                        raise ConfigError(f"[data] source = {what} {problem}{advice}") from None
                    raise
                if time.monotonic() + pause > end:
                    raise OSError(errno.EHOSTUNREACH, f"{problem}{advice}", what) from None
                if not is_reported:
                    report(f"{what} {problem}; trying again for {seconds:.0f} s")
                    is_reported = True
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)


def is_lasting(error: Exception) -> bool:
    """Whether the same call would fail again: the reason is neither a lost network nor an
    overloaded hub."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    causes = causes_of(error)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return True
    for cause in causes:
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            return status < 500 and status not in (408, 429)
    if isinstance(error, ConfigError | ValueError | FileNotFoundError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    # an OSError with a number is of this machine: a full disk, perhaps
    return isinstance(error, OSError) and bool(error.errno)
