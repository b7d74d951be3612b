"""Hugging Face datasets: streamed through `datasets` or, for growing text, read by file."""

import hashlib
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import config
from config import ConfigError
from data.console import report
from data.sources import LOCAL, STDLIB, Files, Source, name_hash, readable

# seconds during which a lost network is tried again: in a run, and before it
PATIENCE, AT_FIRST = 300.0, 10.0
T = TypeVar("T")


class Hub(Source):
    """A dataset, streamed. place(): [rows read, the state of `datasets`, revision]."""

    reads = True

    def __init__(self, d: config.Data, place: list | None = None, known: dict | None = None):
        """known: "revision" as an earlier preparation recorded it."""
        super().__init__(d, place)
        with readable(
            f"{d.source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset"
        ):
            import datasets
            import huggingface_hub

            # its errors are reported here, once
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)
            # pinned to a commit, so that a later resume reads the same version of the dataset
            revision = known.get("revision") if known else None
            if not place and not revision:
                revision = huggingface_hub.HfApi().dataset_info(d.source).sha
            self.row, state, self.revision = place or (0, None, revision)
            self.data = datasets.load_dataset(
                d.source, name=d.subset, split=d.split, streaming=True, revision=self.revision
            )
            if state:
                self.data.load_state_dict(state)

    def rows(self) -> Iterator[tuple[str, object]]:
        with readable(f"{self.d.source}:"):
            for row in self.data:
                self.row += 1
                yield f"{self.d.source}: row {self.row}", row

    def place(self) -> list:
        return [self.row, self.data.state_dict(), self.revision]

    def share(self) -> float | None:
        split = (self.data.info.splits or {}).get(self.d.split)
        return self.row / split.num_examples if split and split.num_examples else None


class HubFiles(Files):
    """A dataset's data files at one commit, each fetched into the hub's cache while the one before is read.

    files: of each [path, size in bytes, SHA-256 or git's SHA-1, digest of its documents or None].
    """

    def __init__(self, d: config.Data, place: list | None = None, known: dict | None = None):
        """known: "files" and "revision" as an earlier preparation recorded them; absent: found now. Raises
        ConfigError."""
        self.revision = known.get("revision") if known else None
        super().__init__(d, place, known)
        self.fetches: dict[int, Fetch] = {}

    def find(self) -> list[list]:
        self.revision, files = find_files(self.d, self.revision)
        return sorted(files, key=lambda entry: name_hash(entry[0]))

    def path_of(self, number: int) -> pathlib.Path:
        path = self._fetched(number).result()
        following = number + 1
        if following < self.stop and room_beside(path) > self.files[following][1]:
            self._fetched(following)
        return path

    def _fetched(self, number: int) -> "Fetch":
        if number not in self.fetches:
            assert self.revision
            name, size, digest, _ = self.files[number]
            self.fetches[number] = Fetch(self.d.source, self.revision, name, size, digest)
        return self.fetches[number]

    def stamp_of(self, number: int, path: pathlib.Path) -> list:
        return self.files[number][1:3]  # the commit's: path_of() compares the content with them

    def compare_with_text(self, folder: pathlib.Path, refuse_new: bool = True) -> None:
        """A commit does not change."""

    def on_recorded(self, place: list) -> None:
        """Removes the files before this place from the cache, where there is no room for those after it: only what
        was fetched here, since another program may read the rest."""
        for number in [number for number in self.fetches if number < place[0]]:
            fetched = self.fetches.pop(number)
            path = fetched.result()
            left = self.begins[-1] - self.begins[place[0]]
            if fetched.is_new and room_beside(path) < left:
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)


class Fetch(threading.Thread):
    """A file of a dataset's commit, brought into the hub's cache in the background."""

    def __init__(self, source: str, revision: str, name: str, size: int, digest: str):
        super().__init__(daemon=True)
        self.wanted = source, revision, name, size, digest
        self.path: pathlib.Path | None = None
        self.is_new = False  # it was not in the cache
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.path, self.is_new = fetch(*self.wanted)
        except BaseException as error:
            self.error = error

    def result(self) -> pathlib.Path:
        """The file's path. Waits for it. Raises ConfigError."""
        self.join()
        if self.error:
            raise self.error
        assert self.path
        return self.path


def room_beside(path: pathlib.Path) -> int:
    """Free bytes of a file's disk."""
    return shutil.disk_usage(path.parent).free


def find_files(d: config.Data, revision: str | None = None) -> tuple[str, list[list]]:
    """(a dataset's commit, absent: the newest; its data files, as `datasets` resolves subset and split in it: of each
    [path, size in bytes, SHA-256 or git's SHA-1]). Raises ConfigError, also for files of other kinds."""

    def find() -> tuple[str, list[list]]:
        import datasets
        import huggingface_hub

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        api = huggingface_hub.HfApi()
        commit = revision or api.dataset_info(d.source).sha
        options = datasets.load_dataset_builder(d.source, d.subset, revision=commit).config
        splits, root = options.data_files, f"hf://datasets/{d.source}@{commit}/"
        if d.split not in splits:
            raise ConfigError(f"[data] split = {d.split}: {d.source} has {', '.join(splits)}")
        names = [str(name).removeprefix(root) for name in splits[d.split]]
        other = next((name for name in names if not name.endswith(LOCAL) or "://" in name), None)
        if other or getattr(options, "field", None):
            raise ConfigError(
                f'[data] order = "growing": reads files of {", ".join(LOCAL)}, and {d.source} has '
                f'{other or "its rows in a field of its files"}; set order = "global"'
            )
        found = {
            file.path: [file.path, file.size, file.lfs.sha256 if file.lfs else file.blob_id]
            for i in range(0, len(names), 500)
            for file in api.get_paths_info(
                d.source, names[i : i + 500], revision=commit, repo_type="dataset"
            )
        }
        return commit, [found[name] for name in names]

    return patiently(
        f"{d.source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset",
        find,
        AT_FIRST,
    )


def fetch(
    source: str, revision: str, name: str, size: int, digest: str
) -> tuple[pathlib.Path, bool]:
    """(a file of a dataset's commit in the hub's cache, whether it had to be downloaded). Raises ConfigError."""

    def download() -> tuple[pathlib.Path, bool]:
        import huggingface_hub

        huggingface_hub.logging.set_verbosity_error()  # its retries are reported here, once
        huggingface_hub.utils.disable_progress_bars()
        at = {"revision": revision, "repo_type": "dataset"}
        cached = huggingface_hub.try_to_load_from_cache(source, name, **at)
        try:
            path = pathlib.Path(huggingface_hub.hf_hub_download(source, name, **at))
        except huggingface_hub.errors.LocalEntryNotFoundError as error:
            raise error.__cause__ or error from None  # which says why
        is_new = str(path) != cached
        if path.stat().st_size != size or (is_new and digest_of(path, digest) != digest):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise OSError(f"what was downloaded is not the file of commit {revision[:12]}")
        return path, is_new

    return patiently(f"{source}: {name}", download, PATIENCE)


def digest_of(path: pathlib.Path, like: str) -> str:
    """A file's SHA-256 or, if `like` is one, git's SHA-1."""
    found = (
        hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    )
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def patiently(what: str, call: Callable[[], T], seconds: float) -> T:
    """Returns call(), repeated for so long if the network or the hub fails. Raises ConfigError."""
    began, wait = time.monotonic(), 1.0
    with readable(what):
        while True:
            try:
                return call()
            except Exception as error:
                if is_lasting(error) or time.monotonic() + wait > began + seconds:
                    raise
                if wait == 1.0:
                    why = f"{type(error).__name__}: " + str(error).partition("\n")[0]
                    report(f"{what} cannot be read: {why}; trying again for {seconds:.0f} s")
            time.sleep(wait)
            wait = min(30.0, 2 * wait)


def is_lasting(error: BaseException | None) -> bool:
    """Whether the same call would fail again: not for want of a network, or because the hub is overloaded."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    first, found = error, []
    while error and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(e, OfflineModeIsEnabled) for e in found):
        return True
    for e in found:
        if isinstance(e, HfHubHTTPError):
            return e.response.status_code < 500 and e.response.status_code not in (408, 429)
    return isinstance(first, ConfigError | ValueError | FileNotFoundError) or (
        isinstance(first, OSError)
        and not isinstance(first, ConnectionError | TimeoutError)
        and bool(first.errno)
    )
