"""Hugging Face datasets: streamed through `datasets`, or by file, each fetched by the process that reads it."""

import hashlib
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import config
from config import ConfigError
from data.encode import report
from data.sources import LOCAL, STDLIB, Source, readable

PATIENCE, AT_FIRST = (
    300.0,
    10.0,
)  # seconds during which a lost network is tried again: in a run, and before it
T = TypeVar("T")


class Hub(Source):
    """A dataset, streamed. Its place is (rows read, the state of `datasets`, revision)."""

    reads, remote = True, True

    def __init__(self, d: config.Data, place: list | None):
        super().__init__(d, place)
        with readable(
            f"{d.source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset"
        ):
            import datasets
            import huggingface_hub

            datasets.logging.set_verbosity(
                datasets.logging.CRITICAL
            )  # its errors are reported here, once
            # pinned to a commit, so that a later resume reads the same version of the dataset
            self.row, state, self.revision = place or (
                0,
                None,
                huggingface_hub.HfApi().dataset_info(d.source).sha,
            )
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


class HubFiles:
    """A dataset's data files, in the hub's cache, as find_files() found them. Of a parquet file's n units, by its size
    alone, each is an n-th of its rows."""

    def __init__(self, source: str, found: dict):
        self.source, self.found = source, found
        self.paths = [pathlib.Path(name) for name, _, _ in found["files"]]
        self.sizes = [size for _, size, _ in found["files"]]

    def fetch(self, number: int) -> pathlib.Path:
        return fetch(self.source, self.found["revision"], *self.found["files"][number])

    def parquet_units(self, size: int) -> tuple[int, int]:
        """How many units a parquet file of so many bytes has, and about how many bytes of text are one."""
        from data.arrow import COMPRESSED_UNIT

        return max(1, size // COMPRESSED_UNIT), 2 * COMPRESSED_UNIT

    def parquet_rows(
        self, ends: list[int], path: pathlib.Path, begin: int, end: int
    ) -> tuple[int, int]:
        """As data/pieces.py's Pieces has it."""
        units, _ = self.parquet_units(path.stat().st_size)
        return ends[-1] * begin // units, ends[-1] * end // units


def find_files(d: config.Data) -> dict:
    """A dataset's newest commit and, as `datasets` resolves subset and split in it, its data files: {"revision": ...,
    "files": [[path, size in bytes, SHA-256 or git's SHA-1], ...]}. Raises ConfigError, also for files of other kinds.
    """

    def find() -> dict:
        import datasets
        import huggingface_hub

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        revision = (api := huggingface_hub.HfApi()).dataset_info(d.source).sha
        options = datasets.load_dataset_builder(d.source, d.subset, revision=revision).config
        splits, root = options.data_files, f"hf://datasets/{d.source}@{revision}/"
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
                d.source, names[i : i + 500], revision=revision, repo_type="dataset"
            )
        }
        return {"revision": revision, "files": [found[name] for name in names]}

    return patiently(
        f"{d.source}: is neither {STDLIB} nor a local file, and as a Hugging Face dataset",
        find,
        AT_FIRST,
    )


def fetch(source: str, revision: str, name: str, size: int, digest: str) -> pathlib.Path:
    """A file of a dataset's commit in the hub's cache, downloaded if it isn't there. Raises ConfigError."""

    def download() -> pathlib.Path:
        import huggingface_hub

        huggingface_hub.logging.set_verbosity_error()  # its retries are reported here, once
        huggingface_hub.utils.disable_progress_bars()
        place = {"revision": revision, "repo_type": "dataset"}
        cached = huggingface_hub.try_to_load_from_cache(source, name, **place)
        try:
            path = pathlib.Path(huggingface_hub.hf_hub_download(source, name, **place))
        except huggingface_hub.errors.LocalEntryNotFoundError as error:
            raise error.__cause__ or error from None  # which says why
        if path.stat().st_size != size or (
            str(path) != cached and digest_of(path, digest) != digest
        ):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise OSError(f"what was downloaded is not the file of commit {revision[:12]}")
        return path

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
