"""data.order = "growing": training reads the parts of the text that are prepared while others are being prepared.

A source's text is cut into parts of about the same size, by its files' sizes alone (plan.json). A process takes the
next part that nobody works on, writes it to a folder of its own and renames that into place: whole, or not at all. Two
processes on one part do no harm, since its bytes are the same.

The first epoch reads the parts in an order keyed by (seed, source), in segments of 1, 1, 2, 4, ... parts up to
LARGEST_SEGMENT, each permuted by itself; later epochs are permuted over everything. So which window a sample is depends
on the source's files and the seed, and a sample waits for its segment alone.
"""

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import filelock

import config
import files
from config import ConfigError
from data.encode import encode, report
from data.order import Permutation
from data.sources import STDLIB, Files, file_stamps, kind_of
from data.tokens import MANIFEST, WIDTH, TokenStream, manifest_of, open_stream, window_count

SMALLEST, LARGEST = 1 << 16, 1 << 25  # bytes of text in a part: a 64th of the whole, within these
LARGEST_SEGMENT = 16  # parts: one process prepares them within a step's timeout
VALIDATION_PARTS = 16  # the first ones, in reading order, whose held-out documents are the validation set
POLL_SECONDS = 0.2
PLAN, FAILED = "plan.json", "failed.json"


def cut(source: Files) -> list[list[list[int]]]:
    """The pieces (see Files) of each part: pieces of large files, several small ones together."""
    total = sum(source.sizes)
    size = min(LARGEST, max(SMALLEST, total // 64))
    parts: list[list[list[int]]] = [[]]
    room = size
    for number in range(len(source.paths)):
        units, step = source.units(number)
        begin = 0
        while begin < units:
            whole = source.d.source == STDLIB or (units - begin) * step <= room + size // 2
            end = units if whole else min(units, begin + max(1, room // step))
            parts[-1].append([number, begin, end])
            room -= (end - begin) * step
            begin = end
            if room <= 0:
                parts.append([])
                room = size
    return [part for part in parts if part]


def check_source(d: config.Data) -> None:
    """Raises ConfigError if a source cannot be cut into parts."""
    if kind_of(d.source) is not Files:
        raise ConfigError(f'[data] order = "growing": needs local files, and {d.source} is a Hugging Face dataset; '
                          'download its files, or set order = "global"')
    if d.max_tokens:
        raise ConfigError('[data] order = "growing": prepares all of the text, without max_tokens')


def write_plan(folder: pathlib.Path, d: config.Data) -> None:
    files.write_atomic(folder / PLAN, json.dumps(cut(Files(d, None))))


# Preparing


def write_part(folder: pathlib.Path, d: config.Data, number: int, pieces: list[list[int]]) -> None:
    """Writes a part, token files as data/encode.py's, and publishes it. Raises ConfigError and OSError."""
    final = part_folder(folder, number)
    temporary = final.with_name(f".{final.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with the same number
        temporary.mkdir(parents=True)
        _write_tokens(temporary, d, pieces, folder)
        if file_stamps(d.source) != manifest_of(folder)["files"]:  # pieces are those of the files at the beginning
            raise ConfigError(f"[data] source = {d.source}: changed since {folder} was begun; delete the folder")
        files.publish(temporary, final)
    except OSError:
        if not final.exists():  # else another process was faster, where there are no locks
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokens(temporary: pathlib.Path, d: config.Data, pieces: list[list[int]], folder: pathlib.Path) -> None:
    about, digests, tokens = manifest_of(folder), {}, {"train": 0, "heldout": 0}
    width, typecode = WIDTH[about["dtype"]], "H" if about["dtype"] == "uint16" else "i"
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context((temporary / name).open("wb")) for split in tokens
                  for name in (f"{split}.bin", f"{split}.ends.bin")}
        texts = iter(Files(d, [0, 0, 0], pieces))  # as if resumed: a part may be empty
        while batch := [*itertools.islice(texts, 256)]:
            for validation, content in encode(folder, typecode, batch):
                if content:  # a tokenizer may produce no tokens for some texts
                    split = "heldout" if validation else "train"
                    opened[f"{split}.bin"].write(content)
                    tokens[split] += len(content) // width
                    opened[f"{split}.ends.bin"].write(tokens[split].to_bytes(8, "little"))
        for name, file in opened.items():
            file.flush()
            os.fsync(file.fileno())
            digests[name] = hashlib.sha256((temporary / name).read_bytes()).hexdigest()
    files.write_atomic(temporary / MANIFEST, json.dumps(about | {"tokens": tokens, "sha256": digests}))


def part_folder(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / "parts" / f"{number:05d}"


def read_plan(folder: pathlib.Path) -> list[list[list[int]]]:
    return json.loads((folder / PLAN).read_bytes())


def reading_order(parts: int, seed: int, source: int) -> list[int]:
    order = Permutation(parts, seed, -1, source)  # no epoch has this number
    return [order(i) for i in range(parts)]


@contextlib.contextmanager
def claimed(path: pathlib.Path) -> Iterator[bool]:
    """Whether nobody else works on what this file stands for; the claim of a process that dies ends with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = files.lock(path)
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


Sources = list[tuple[pathlib.Path, config.Config]]  # as data/dataset.py: prepared_parts() finds them


def prepare_parts(found: Sources, seed: int) -> None:
    """Prepares the parts of all sources that nobody else prepares, in reading order, until all are there. Sources take
    turns. Raises ConfigError and OSError, and leaves its text in the folder for who waits."""
    left = [(place, folder, part.data, number)
            for source, (folder, part) in enumerate(found)
            for place, number in enumerate(reading_order(len(read_plan(folder)), seed, source))]
    left.sort(key=lambda work: work[0])
    while left:
        for work in [*left]:
            _, folder, d, number = work
            if (final := part_folder(folder, number)).exists():
                left.remove(work)
                continue
            try:
                with claimed(final.with_name(f".{final.name}.lock")) as ours:
                    if ours and not final.exists():
                        write_part(folder, d, number, read_plan(folder)[number])
                        break  # and look again from the front, where a process may have died
            except Exception as error:
                with contextlib.suppress(OSError):
                    files.write_atomic(folder / FAILED, json.dumps(str(error)))
                raise
        else:  # others have claimed all that is left
            time.sleep(POLL_SECONDS)
    for folder, _ in found:  # all is there: claims, and what killed processes left
        for path in (folder / "parts").glob(".*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def report_prepared(found: Sources) -> None:
    for folder, _ in found:
        parts, tokens = len(read_plan(folder)), Counter()
        for number in range(parts):
            tokens.update(manifest_of(part_folder(folder, number))["tokens"])
        report(f"prepared {folder}: {parts} parts, {tokens['train']:,} tokens to train on, {tokens['heldout']:,} for "
               "validation")


# Reading


class Parts:
    """A source's parts in reading order, for a data rank; waits for those that are not there yet."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config, source: int):
        self.path, self.cfg, self.source = folder, cfg, source
        self.turn = reading_order(len(read_plan(folder)), cfg.run.seed, source)
        self.before = [0]  # windows of the parts before each of those known so far, and of all of them
        sizes = itertools.chain((1,), (min(1 << i, LARGEST_SEGMENT) for i in itertools.count()))
        self.segments = [0]  # the first part of each, and their number
        while self.segments[-1] < len(self.turn):
            self.segments.append(min(len(self.turn), self.segments[-1] + next(sizes)))
        self.began, self.closed = time.time(), threading.Event()
        self.permutation = functools.lru_cache(4)(Permutation)
        self.stream = functools.lru_cache(64)(self.stream)  # open files

    def stream(self, place: int, split: str = "train") -> TokenStream:
        """Opens the part at this place of the reading order, once it is there. ConfigError: preparing failed."""
        final, waited, child = part_folder(self.path, self.turn[place]), 0.0, None
        if not final.exists():
            child = self.prepare_rest()
        while not final.exists():
            failed = self.path / FAILED
            with contextlib.suppress(FileNotFoundError, ValueError):
                if failed.stat().st_mtime > self.began:
                    raise ConfigError(json.loads(failed.read_bytes()))
            if child and child.poll():
                raise ConfigError(f"{self.path}: the process that prepares it ended with code {child.returncode}")
            if waited <= 2 < waited + POLL_SECONDS:
                report(f"{self.path}: waiting for part {place + 1} of {len(self.turn)} in reading order")
            if self.closed.wait(POLL_SECONDS):
                raise InterruptedError("closed")
            waited += POLL_SECONDS
        return open_stream(final, split, self.cfg.model.vocab_size)

    def prepare_rest(self) -> subprocess.Popen | None:
        """Starts to prepare what is missing, if this process is its node's first rank, or no rank."""
        from ranks import local_world_size, rank_and_size

        if rank_and_size()[1] == 0 and not all(part_folder(self.path, number).exists() for number in self.turn):
            workers = max(1, len(os.sched_getaffinity(0)) - max(1, local_world_size()))
            return start_once(json.dumps(config.to_dict(self.cfg)), workers)
        return None

    def know(self, parts: int) -> None:
        """Makes `before` cover so many parts."""
        while len(self.before) <= parts:
            stream = self.stream(len(self.before) - 1)
            self.before.append(self.before[-1] + window_count(stream.length, self.cfg.train.seq_len))

    def window(self, index: int) -> tuple[int, int]:
        """(epoch, window) of the source's sample of this index. Windows count over all parts in reading order."""
        for number, (first, end) in enumerate(itertools.pairwise(self.segments)):
            self.know(end)
            if index < self.before[end]:
                windows = self.before[end] - self.before[first]
                order = self.permutation(windows, self.cfg.run.seed, 0, (self.source, number))
                return 0, self.before[first] + order(index - self.before[first])
        if not self.before[-1]:
            raise ConfigError(f"{self.path}: no part has a window of train.seq_len = {self.cfg.train.seq_len}")
        epoch, position = divmod(index, self.before[-1])
        return epoch, self.permutation(self.before[-1], self.cfg.run.seed, epoch, self.source)(position)

    def span(self, window: int, length: int) -> tuple[TokenStream, int, int]:
        """As TokenStream.span()."""
        place = bisect.bisect_right(self.before, window) - 1
        return self.stream(place).span(window - self.before[place], length)


class HeldOut:
    """The validation stream, of the first parts in reading order: a TokenStream once it is used, which waits."""

    def __init__(self, parts: Parts):
        self.parts, self.path = parts, parts.path

    @functools.cached_property
    def streams(self) -> list[TokenStream]:
        return [self.parts.stream(place, "heldout") for place in range(min(VALIDATION_PARTS, len(self.parts.turn)))]

    @functools.cached_property
    def begins(self) -> list[int]:
        return [0, *itertools.accumulate(stream.length for stream in self.streams)]

    @property
    def length(self) -> int:
        return self.begins[-1]

    def read(self, start: int, stop: int) -> tuple[bytes, Any]:
        import torch

        found = [stream.read(max(start, begin) - begin, min(stop, end) - begin) for stream, (begin, end) in zip(
            self.streams, itertools.pairwise(self.begins)) if max(start, begin) < min(stop, end)]
        return b"".join(raw for raw, _ in found), torch.cat([ids for _, ids in found])

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        found, number = [], 0
        for stream, (begin, end) in zip(self.streams, itertools.pairwise(self.begins)):
            if max(start, begin) < min(stop, end):
                found += [(number + n, begin + first, begin + last) for n, first, last in stream.documents(
                    max(0, start - begin), min(stop, end) - begin)]
            number += stream.document_count
        return found


def start_preparing(settings: str, workers: int) -> subprocess.Popen:
    """Starts to prepare what is missing, at low priority, in so many processes that end with this one. settings: a
    configuration as JSON."""
    repo = str(pathlib.Path(__file__).parent.parent)  # as torchrun starts a rank, it need not be on Python's path
    code = f"import sys; sys.path.insert(0, {repo!r}); from data import growing; sys.exit(growing.main({workers}))"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    assert child.stdin is not None
    child.stdin.write(settings + "\n")
    child.stdin.flush()
    return child


start_once = functools.cache(start_preparing)  # in this process


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


def main(workers: int) -> int:
    """workers: processes that prepare, this one included; 0: this is one of another's."""
    from data.dataset import prepared_parts

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the process that waits, with which this ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)  # among the processes of this session: in one of its own, Linux would share the cores evenly
    settings = sys.stdin.readline()
    threading.Thread(target=end_with_stdin, daemon=True).start()
    cfg = config.from_dict(json.loads(settings), "of the run that waits")
    found = prepared_parts(cfg)
    for folder, _ in found if workers else ():
        (folder / FAILED).unlink(missing_ok=True)
    others = [start_preparing(settings, 0) for _ in range(workers - 1)]
    try:
        prepare_parts(found, cfg.run.seed)
    except (ConfigError, OSError) as error:
        report(str(error))
        return 2
    return max((other.wait() for other in others), default=0)

