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
import data.pieces
from data import growing
from data.dataset import prepared_parts
from data.prepare import prepare

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def run(cfg: config.Config, last: int) -> bool:
    """Prepares in a process that is killed before its event number `last` (from 1). Returns whether it ended before."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    seen, root = 0, str(pathlib.Path(cfg.data.path).parent)

    def audit(event: str, arguments: tuple) -> None:
        nonlocal seen
        # of a file only that is opened to be written
        if (
            event in EVENTS
            and str(arguments[0]).startswith(root)
            and (event != "open" or arguments[2] & os.O_WRONLY)
        ):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    try:
        prepare(cfg)
        if cfg.data.order == "growing":
            growing.prepare_parts(prepared_parts(cfg), cfg.run.seed)
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
    data.encode.SYNC_SECONDS, data.encode.CHUNK = 0.0, 20_000  # characters
    os.fsync = lambda handle: None  # a killed process leaves what it wrote in the page cache
    data.encode.encode_all = lambda folder, typecode, source, encode: (
        (encode(folder, typecode, texts), place) for texts, place in data.encode.chunks(source)
    )
    data.pieces.SMALLEST = 40_000
    expected = tree(pathlib.Path(final))

    def check(last: int) -> None:
        assert tree(folder) == expected, last
        assert {p.name for p in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}, (
            last
        )
        shutil.rmtree(folder.parent)

    last = 1
    while not run(cfg, last):  # killed, and continued to its end
        assert cfg.data.order == "growing" or not folder.exists(), last
        assert run(cfg, 0), last
        check(last)
        last += 1
    check(last)
    kills = 0
    while not run(cfg, 12):  # killed again and again, a few events further each time
        kills += 1
    check(0)
    print(json.dumps({"events": last - 1, "kills of one": kills}))


if __name__ == "__main__":
    main(*sys.argv[1:])
