"""Preparations that are killed before each of their file-system events in turn; see test_prepare.py.

    python -m tests.kill_cases CONFIG FINAL      the folder that each of them must end as

Each dies in a process forked from this one, which has no threads; no pool, whose processes only make it slow.
"""

import json
import os
import pathlib
import shutil
import signal
import sys

import sentencepiece  # noqa: F401  before the forks, which would import it each
import tqdm  # noqa: F401

import config
import data.encode
import data.prepare
import data.record
from data.growing import GrowingSource
from data.mixture import Mixture
from data.prepare import prepare
from data.record import read_manifest

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


def run(cfg: config.Config, last: int) -> bool:
    """Prepares in a process that is killed before its event number `last` (from 1). Returns whether it ended before."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    seen, root = 0, str(pathlib.Path(cfg.data.path).parent)

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        # of a file only that is opened to be written; files that are cut are numbers, those of a
        # folder that is open have no folder in their path
        is_handle = isinstance(arguments[0], int)
        name = str(arguments[0])
        is_ours = is_handle or name.startswith(root) or "/" not in name
        writes = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in EVENTS and is_ours and writes:
            count()

    def pwrite(handle: int, content: bytes, offset: int) -> int:
        """Each write in two halves: a kill may come between them."""
        count()
        half = write(handle, content[: len(content) // 2], offset)
        count()
        return half + write(handle, content[half:], offset + half)

    write, os.pwrite = os.pwrite, pwrite
    sys.addaudithook(audit)
    try:
        prepare(cfg, whole=True)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def main(path: str, final: str) -> None:
    _, cfg = config.from_command_line([path], __doc__)
    folder = pathlib.Path(cfg.data.path)
    data.prepare.SYNC_SECONDS, data.encode.CHUNK = 0.0, 20_000  # characters
    data.prepare.worker_count = lambda: 0
    data.record.FIRST_BORDER, data.record.BORDER_STEP = 4096, 4096
    os.fsync = lambda handle: None  # a killed process leaves what it wrote in the page cache
    expected = tree(pathlib.Path(final))

    def check(last: int) -> None:
        assert tree(folder) == expected, last
        names = {path.name for path in folder.parent.iterdir()}
        assert names == {folder.name, f".{folder.name}.lock"}, last
        shutil.rmtree(folder.parent)

    def check_record(last: int) -> None:
        """What is recorded when a process was killed is there, and as it will be."""
        manifest = read_manifest(folder)
        if manifest is None:
            assert not folder.exists(), last
            return
        for split, tokens in manifest["tokens"].items():
            for name, size in (
                (f"{split}.bin", 2 * tokens),
                (f"{split}.ends.bin", 8 * manifest["documents"][split]),
            ):
                written = (folder / name).read_bytes()[:size] if size else b""
                assert written == expected[name][:size], (last, name)
        if cfg.data.order == "growing":
            source = GrowingSource(folder, cfg, 0, Mixture([1.0]))
            segments = len(source.order.segment_ends)
            assert segments in (0, len(manifest["segments"])), last

    last = 1
    while not run(cfg, last):  # killed, and continued to its end
        check_record(last)
        assert run(cfg, 0), last
        check(last)
        last += 1
    check(last)
    kills = 0
    while not run(cfg, 30):  # killed again and again, a few events further each time
        kills += 1
        assert kills < 1000
    check(0)
    print(json.dumps({"events": last - 1, "kills of one": kills}))


if __name__ == "__main__":
    main(*sys.argv[1:])
