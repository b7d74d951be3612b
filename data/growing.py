"""data.order = "growing": training reads the parts of the text that are prepared while others are being prepared.

A source's text is cut into parts of about the same size, by its files' sizes alone (plan.json). A process takes the
next part that nobody works on, writes it to a folder of its own and renames that into place: whole, or not at all. Two
processes on one part do no harm, since its bytes are the same.

The first epoch reads the parts in an order keyed by (seed, source), in segments of 1, 1, 2, 4, ... parts up to
LARGEST_SEGMENT, each permuted by itself; later epochs are permuted over everything. So which window a sample is depends
on the source's files and the seed, and a sample waits for its segment alone.
"""

import bisect
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import filelock

import config
import files
from config import ConfigError
from data.encode import encode, report
from data.order import FAILED, READY, WAITING, Order, Permutation, Place
from data.pieces import Pieces, read_plan
from data.sources import file_stamps
from data.tokens import MANIFEST, WIDTH, TokenStream, manifest_of, open_stream, window_count

LARGEST_SEGMENT = 16  # parts: one process prepares them within a step's timeout
VALIDATION_PARTS = (
    16  # the first ones, in reading order, whose held-out documents are the validation set
)
POLL_SECONDS = 0.2
FAILURE = "failed.json"


# Preparing


def write_part(folder: pathlib.Path, d: config.Data, number: int) -> None:
    """Writes a part, token files as data/encode.py's, and publishes it. Raises ConfigError and OSError."""
    final = part_folder(folder, number)
    temporary = final.with_name(f".{final.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with the same number
        temporary.mkdir(parents=True)
        plan = read_plan(folder)
        _write_tokens(temporary, folder, Pieces(d, plan, plan["parts"][number]))
        if (
            file_stamps(d.source) != manifest_of(folder)["files"]
        ):  # pieces are those of the files at the beginning
            raise ConfigError(
                f"[data] source = {d.source}: changed since {folder} was begun; delete the folder"
            )
        files.publish(temporary, final)
    except OSError:
        if not final.exists():  # else another process was faster, where there are no locks
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokens(temporary: pathlib.Path, folder: pathlib.Path, source: Pieces) -> None:
    about, digests, tokens = manifest_of(folder), {}, {"train": 0, "heldout": 0}
    width, typecode = WIDTH[about["dtype"]], "H" if about["dtype"] == "uint16" else "i"
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context((temporary / name).open("wb"))
            for split in tokens
            for name in (f"{split}.bin", f"{split}.ends.bin")
        }
        texts = iter(source)
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
    files.write_atomic(
        temporary / MANIFEST, json.dumps(about | {"tokens": tokens, "sha256": digests})
    )


def part_folder(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / "parts" / f"{number:05d}"


def published(folder: pathlib.Path) -> list[pathlib.Path]:
    """The parts that are there."""
    return sorted(path for path in (folder / "parts").glob("[!.]*"))


def reading_order(plan: dict, seed: int, source: int) -> list[int]:
    """The numbers of all parts. Those of a file that must be fetched stand together."""
    groups = [[number] for number in range(len(plan["parts"]))]
    if "revision" in plan:
        groups = [
            [*group]
            for _, group in itertools.groupby(groups, lambda number: plan["parts"][number[0]][0][0])
        ]
        groups = [[*itertools.chain(*group)] for group in groups]
    order = Permutation(len(groups), seed, -1, source)  # no epoch has this number
    return [number for i in range(len(groups)) for number in groups[order(i)]]


class Reading:
    """The parts of a source that a run reads, in reading order, and how many of the first ones are there."""

    def __init__(self, folder: pathlib.Path, d: config.Data, seed: int, source: int):
        self.path, self.limit = folder, d.max_tokens or math.inf
        self.turn = reading_order(read_plan(folder), seed, source)
        self.there, self.tokens, self.lock = 0, 0, threading.Lock()

    def complete(self) -> bool:
        """Whether all are there. The last is the one that reaches data.max_tokens, as is known once it is there."""
        with self.lock:
            while (
                self.there < len(self.turn)
                and (part := part_folder(self.path, self.turn[self.there])).exists()
            ):
                self.there, self.tokens = (
                    self.there + 1,
                    self.tokens + manifest_of(part)["tokens"]["train"],
                )
                if self.tokens >= self.limit:
                    self.turn = self.turn[: self.there]
            return self.there == len(self.turn)


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


Sources = list[
    tuple[pathlib.Path, config.Config]
]  # as data/dataset.py: prepared_parts() finds them


def prepare_parts(found: Sources, seed: int) -> None:
    """Prepares the parts of all sources that nobody else prepares, in reading order, until all are there. Sources take
    turns. Raises ConfigError and OSError, and leaves its text in the folder for who waits."""
    readings = [
        (Reading(folder, part.data, seed, source), part.data)
        for source, (folder, part) in enumerate(found)
    ]
    left = sorted(
        (
            (place, source)
            for source, (reading, _) in enumerate(readings)
            for place in range(len(reading.turn))
        )
    )
    while not all([reading.complete() for reading, _ in readings]):
        for work in [*left]:
            place, (reading, d) = work[0], readings[work[1]]
            if (
                place >= len(reading.turn)
                or (final := part_folder(reading.path, reading.turn[place])).exists()
            ):
                left.remove(work)
                continue
            try:
                with claimed(lock_of(final)) as ours:
                    if ours and not final.exists():
                        write_part(reading.path, d, reading.turn[place])
                        break  # and look again from the front, where a process may have died
            except Exception as error:
                with contextlib.suppress(OSError):
                    files.write_atomic(reading.path / FAILURE, json.dumps(str(error)))
                raise
        else:  # others have claimed all that is left
            time.sleep(POLL_SECONDS)
    for folder, _ in found:  # all is there: claims, and what killed processes left
        for lock in (folder / "parts").glob(".*.lock"):
            with claimed(lock) as ours:
                for path in lock.parent.glob(f"{lock.stem}.*") if ours else ():
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                        missing_ok=True
                    )


def prepare_ahead(
    cfg: config.Config,
    found: Sources,
    whole: bool,
    check_hashes: Callable[[pathlib.Path, dict], None],
) -> None:
    """Checks the parts that are there, and prepares the sources of one part, as prepare_parts(): before the ranks
    start, to refuse too little text. whole: all that is missing, on all cores, and reports it; exits with the code of
    the process that prepares, which has said why, if it fails."""
    for folder, _ in found:
        for part in published(folder):
            check_hashes(part, manifest_of(part))
    prepare_parts(
        [(folder, part) for folder, part in found if len(read_plan(folder)["parts"]) == 1],
        cfg.run.seed,
    )
    if whole:
        if code := start_preparing(
            json.dumps(config.to_dict(cfg)), len(os.sched_getaffinity(0))
        ).wait():
            sys.exit(code)
        report_prepared(cfg, found)


def lock_of(part: pathlib.Path) -> pathlib.Path:
    return part.with_name(f".{part.name}.lock")


def report_prepared(cfg: config.Config, found: Sources) -> None:
    for source, (folder, part) in enumerate(found):
        tokens, lost = Counter(), 0
        (reading := Reading(folder, part.data, cfg.run.seed, source)).complete()
        for number in reading.turn:
            tokens.update(counts := manifest_of(part_folder(folder, number))["tokens"])
            lost += counts["train"] - cfg.train.seq_len * window_count(
                counts["train"], cfg.train.seq_len
            )
        report(
            f"prepared {folder}: {len(reading.turn)} parts, {tokens['train']:,} tokens to train on, "
            f"{tokens['heldout']:,} for validation; windows of {cfg.train.seq_len:,} leave {lost:,} at the parts' "
            "ends unread"
        )


# Reading


class Parts(Reading):
    """A source's parts, for a data rank; waits for those that are not there yet."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config, d: config.Data, source: int):
        """d: of this source."""
        super().__init__(folder, d, cfg.run.seed, source)
        self.cfg, self.source = cfg, source
        self.before = [
            0
        ]  # windows of the parts before each of those known so far, and of all of them
        self.ends = [0]  # windows up to the end of each segment known so far
        sizes = itertools.chain((1,), (min(1 << i, LARGEST_SEGMENT) for i in itertools.count()))
        self.segments = [0]  # the first part of each, and their number
        while self.segments[-1] < len(self.turn):
            self.segments.append(min(len(self.turn), self.segments[-1] + next(sizes)))
        self.began, self.closed = time.time(), threading.Event()
        self.child: subprocess.Popen | None = None  # that prepares what is missing
        self.permutation = functools.lru_cache(4)(Permutation)
        self.stream = functools.lru_cache(64)(self.stream)  # open files

    def stream(self, place: int, split: str = "train") -> TokenStream:
        """Opens the part at this place of the reading order, once it is there. ConfigError: preparing failed."""
        final, waited = part_folder(self.path, self.turn[place]), 0.0
        if not final.exists():
            self.prepare_rest()
        while not final.exists():
            self.check()
            if waited <= 2 < waited + POLL_SECONDS:
                report(
                    f"{self.path}: waiting for part {place + 1} of {len(self.turn)} in reading order"
                )
            if self.closed.wait(POLL_SECONDS):
                raise InterruptedError("closed")
            waited += POLL_SECONDS
        return open_stream(final, split, self.cfg.model.vocab_size)

    def prepare_rest(self) -> None:
        """Starts to prepare what is missing, if this process is its node's first rank, or no rank."""
        from ranks import local_world_size, rank_and_size

        if rank_and_size()[1] == 0 and not self.complete():
            workers = max(1, len(os.sched_getaffinity(0)) - max(1, local_world_size()))
            with STARTING:
                self.child = start_once(json.dumps(config.to_dict(self.cfg)), workers)

    def check(self) -> None:
        """Raises ConfigError if what is missing cannot be prepared."""
        failed = self.path / FAILURE
        with contextlib.suppress(FileNotFoundError, ValueError):
            if failed.stat().st_mtime > self.began:
                raise ConfigError(json.loads(failed.read_bytes()))
        if self.child and self.child.poll():
            raise ConfigError(
                f"{self.path}: the process that prepares it ended with code {self.child.returncode}"
            )

    def know(self, parts: int) -> int:
        """Makes `before` cover so many parts, or all if there are fewer, and returns their windows."""
        while len(self.before) <= min(parts, len(self.turn)):
            stream = self.stream(len(self.before) - 1)
            self.before.append(
                self.before[-1] + window_count(stream.length, self.cfg.train.seq_len)
            )
            self.complete()  # this part may be the last
        return self.before[min(parts, len(self.turn))]

    def check_size(self) -> None:
        """Raises ConfigError if no part has a window, as far as that is known and quickly found."""
        if len(self.turn) <= 64 and self.complete() and not self.know(len(self.turn)):
            raise ConfigError(
                f"{self.path}: no part has a window of train.seq_len = {self.cfg.train.seq_len}"
            )

    def window(self, index: int) -> tuple[int, int]:
        """(epoch, window) of the source's sample of this index. Windows count over all parts in reading order."""
        while index >= self.ends[-1] and len(self.ends) < len(self.segments):
            self.ends.append(self.know(self.segments[len(self.ends)]))
        segment = bisect.bisect_right(self.ends, index) - 1
        if segment < len(self.ends) - 1:
            begin, end = self.ends[segment : segment + 2]
            return 0, begin + self.permutation(
                end - begin, self.cfg.run.seed, 0, (self.source, segment)
            )(index - begin)
        if not self.before[-1]:
            raise ConfigError(
                f"{self.path}: no part has a window of train.seq_len = {self.cfg.train.seq_len}"
            )
        epoch, position = divmod(index, self.before[-1])
        return epoch, self.permutation(self.before[-1], self.cfg.run.seed, epoch, self.source)(
            position
        )

    @staticmethod
    def order_of(sources: "Sequence[Parts]", mixture: Any) -> Order:
        return GrowingOrder(sources, mixture)

    def has_validation(self) -> bool:
        """Whether the parts are there that the validation set is of."""
        return self.complete() or self.there >= VALIDATION_PARTS

    def span(self, window: int, length: int) -> tuple[TokenStream, int, int]:
        """As TokenStream.span()."""
        place = bisect.bisect_right(self.before, window) - 1
        return self.stream(place).span(window - self.before[place], length)


class GrowingOrder(Order):
    """Of sources whose numbers of windows are not known yet."""

    def __init__(self, sources: Sequence[Parts], mixture: Any):
        """Raises ConfigError if a source is known to be too small."""
        for source in sources:
            source.check_size()
        self.sources, self.mixture = sources, mixture

    def __call__(self, number: int) -> Place:
        source, index = self.mixture(number)
        return Place(source, *self.sources[source].window(index))

    def readiness(self, loader: Any, step: int, seconds: float) -> int:
        """data.loader.Loader.readiness(): READY, WAITING (after so many seconds) or FAILED, and then sets the loader's
        failure. Starts to prepare what is missing."""
        cfg, sources = loader.cfg, self.sources
        batch = (
            loader.ahead[step + 1 - loader.next_step] if step < cfg.train.steps else None
        )  # the last: next_step - 1
        evaluates = step > 0 and config.evaluation_is_due(
            cfg, step
        )  # the validation set is read before the batch

        def waits() -> bool:
            return (
                batch is not None
                and not batch.done()
                and not all([source.complete() for source in sources])
            ) or (evaluates and not all([source.has_validation() for source in sources]))

        try:
            for source in sources:
                source.prepare_rest()
            if waits():
                if batch and not batch.done():  # it fails only if what it needs is not there
                    concurrent.futures.wait([batch], seconds)
                else:
                    time.sleep(seconds)
                    for source in sources:
                        source.check()
            if batch and batch.done():
                batch.result()
            return WAITING if waits() else READY
        except Exception as error:
            loader.failure = error
            return FAILED

    def close(self) -> None:
        """Ends the wait of the loader's thread for text that no step will read."""
        for source in self.sources:
            source.closed.set()


def open_parts(parts: Sources, split: str, cfg: config.Config) -> "list[Parts] | list[HeldOut]":
    """Of each source "train" or "heldout" (validation). Raises ConfigError."""
    found = [Parts(folder, cfg, part.data, number) for number, (folder, part) in enumerate(parts)]
    return [*map(HeldOut, found)] if split == "heldout" else found


class HeldOut:
    """The validation stream, of the first parts in reading order: a TokenStream once it is used, which waits."""

    def __init__(self, parts: Parts):
        self.parts, self.path = parts, parts.path

    @functools.cached_property
    def streams(self) -> list[TokenStream]:
        found: list[TokenStream] = []
        while len(found) < min(VALIDATION_PARTS, len(self.parts.turn)):
            found.append(self.parts.stream(len(found), "heldout"))
            self.parts.complete()  # this part may be the last
        return found

    @functools.cached_property
    def begins(self) -> list[int]:
        return [0, *itertools.accumulate(stream.length for stream in self.streams)]

    @property
    def length(self) -> int:
        return self.begins[-1]

    def read(self, start: int, stop: int) -> tuple[bytes, Any]:
        import torch

        found = [
            stream.read(max(start, begin) - begin, min(stop, end) - begin)
            for stream, (begin, end) in zip(self.streams, itertools.pairwise(self.begins))
            if max(start, begin) < min(stop, end)
        ]
        return b"".join(raw for raw, _ in found), torch.cat([ids for _, ids in found])

    def documents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        found, number = [], 0
        for stream, (begin, end) in zip(self.streams, itertools.pairwise(self.begins)):
            if max(start, begin) < min(stop, end):
                found += [
                    (number + n, begin + first, begin + last)
                    for n, first, last in stream.documents(
                        max(0, start - begin), min(stop, end) - begin
                    )
                ]
            number += stream.document_count
        return found


def start_preparing(settings: str, workers: int) -> subprocess.Popen:
    """Starts to prepare what is missing, at low priority, in so many processes that end with this one. settings: a
    configuration as JSON."""
    repo = str(
        pathlib.Path(__file__).parent.parent
    )  # as torchrun starts a rank, it need not be on Python's path
    code = (
        f"import sys; sys.path.insert(0, {repo!r}); from data.growing import main; from data.dataset import "
        f"prepared_parts; sys.exit(main({workers}, prepared_parts))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    assert child.stdin is not None
    child.stdin.write(settings + "\n")
    child.stdin.flush()
    return child


start_once = functools.cache(start_preparing)  # in this process
STARTING = (
    threading.Lock()
)  # held to call it: by the loader's thread too, and a cache alone would let both start one


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


def main(workers: int, find: Callable[[config.Config], Sources]) -> int:
    """workers: processes that prepare, this one included; 0: this is one of another's. find: prepared_parts()."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # for the process that waits, with which this ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(
        19
    )  # among the processes of this session: in one of its own, Linux would share the cores evenly
    settings = sys.stdin.readline()
    threading.Thread(target=end_with_stdin, daemon=True).start()
    cfg = config.from_dict(json.loads(settings), "of the run that waits")
    found = find(cfg)
    for folder, _ in found if workers else ():
        (folder / FAILURE).unlink(missing_ok=True)
    others = [start_preparing(settings, 0) for _ in range(workers - 1)]
    try:
        prepare_parts(found, cfg.run.seed)
    except (ConfigError, OSError) as error:
        report(str(error))
        return 2
    return max((other.wait() for other in others), default=0)
