"""Documents -> token ids, in order, by processes: sentencepiece's threads build the lists of ids under the GIL and gain
only a sixth on two cores."""

import array
import collections
import errno
import functools
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import files
from config import ConfigError
from data.console import report
from data.cores import usable_cores
from data.record import damaged
from data.sources import Source
from data.tokenizer import Tokenizer, tokenizer_hash

CHUNK = 1 << 18  # characters per task of a process, rounded up to full documents
AHEAD = 3  # chunks per process that are read ahead
MOST_LOSSES = 3  # times that a process is killed over the same chunk before preparing fails
MOST_WORKERS = 64  # one process that reads cannot feed more

Encoded = list[tuple[bool, bytes]]  # of each document: whether its hash holds it out; its ids


@dataclass(frozen=True)
class Chunk:
    """Documents that a process tokenizes together."""

    documents: list[str]
    encode: Callable[[list[str]], Encoded]  # runs in a process
    target: Any  # what the caller writes them to
    source: Source
    place: Any = None  # of the source, after the last of them
    share: float | None = None  # of the source that is read, after them
    is_last: bool = False  # of the source, with no documents
    problem: ConfigError | None = None  # what is wrong with the source there


def is_validation(text: str) -> bool:
    """Whether a document belongs to the validation set: one in a hundred does, by its hash."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 == 99


def chunks(
    source: Source, encode: Callable[[list[str]], Encoded], target: Any = None
) -> Iterator[Chunk]:
    """Yields a source's documents, and last a chunk without any: with what is wrong, if the source ends with that."""
    documents: list[str] = []
    size = 0
    problem = None
    try:
        for document in source:
            documents.append(document)
            size += len(document)
            if size >= CHUNK:
                yield Chunk(documents, encode, target, source, source.place(), source.share())
                documents, size = [], 0
    except ConfigError as error:
        problem = error
    # after a wrong row the place is right if the source looked for more of them
    if documents and (not problem or source.lists_wrong_rows):
        yield Chunk(documents, encode, target, source, source.place(), source.share())
    yield Chunk([], encode, target, source, is_last=True, problem=problem)


@dataclass(frozen=True)
class TokenizerCopy:
    """A tokenizer in a folder of prepared data. Of equal content, one is loaded."""

    sha256: str
    template: str | None  # the SHA-256 of a chat template
    folder: pathlib.Path = field(compare=False)


@functools.lru_cache(2)
def load_tokenizer(copy: TokenizerCopy) -> Tokenizer:
    """Once a process, whatever the folder. Raises ConfigError if it is another one."""
    tokenizer = Tokenizer(copy.folder)
    if tokenizer_hash(tokenizer.files) != copy.sha256:
        raise damaged(copy.folder / "tokenizer", "was changed since the folder was begun")
    return tokenizer


def encode_documents(copy: TokenizerCopy, typecode: str, documents: list[str]) -> Encoded:
    """Returns for each document whether its hash holds it out, and its ids between BOS and EOS as bytes, in the width
    of array's typecode. Raises ConfigError."""
    tokenizer = load_tokenizer(copy)
    return [
        (
            is_validation(text),
            array.array(typecode, [*tokenizer.bos, *ids, *tokenizer.eos]).tobytes(),
        )
        for text, ids in zip(documents, tokenizer.encode(documents))
    ]


def encode_in_order(chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Yields each chunk with what its encode() returns. workers: processes; 0: this one. A process that is killed is
    replaced. Raises ConfigError and OSError."""
    if workers == 0:
        for chunk in chunks:
            yield chunk, chunk.encode(chunk.documents)
        return
    ahead: collections.deque[tuple[Chunk, Future]] = collections.deque()
    pool = _start_pool(workers)
    losses = 0
    try:
        while True:
            for chunk in itertools.islice(chunks, max(0, AHEAD * workers - len(ahead))):
                ahead.append((chunk, _submit(pool, chunk)))
            if not ahead:
                return
            chunk, future = ahead[0]
            try:
                encoded = future.result()
            except BrokenProcessPool:
                losses += 1
                pool.shutdown(cancel_futures=True)
                _report_loss(losses)
                pool = _start_pool(workers)
                ahead = collections.deque((chunk, _submit(pool, chunk)) for chunk, _ in ahead)
                continue
            losses = 0
            ahead.popleft()
            yield chunk, encoded
    finally:
        pool.shutdown(cancel_futures=True)


def _report_loss(losses: int) -> None:
    """losses: of processes over the same chunk. Raises OSError if they are too many."""
    lost = "a process that tokenizes was killed (is the host out of memory?)"
    if losses == MOST_LOSSES:
        raise OSError(errno.ENOMEM, f"{lost}; the same command resumes here")
    report(f"{lost}; starting another")


def _start_pool(workers: int) -> ProcessPoolExecutor:
    # spawn: a forked process may inherit a lock that another thread holds
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)


def _submit(pool: ProcessPoolExecutor, chunk: Chunk) -> Future:
    try:
        return pool.submit(chunk.encode, chunk.documents)
    except BrokenProcessPool as error:  # since the last look
        broken: Future = Future()
        broken.set_exception(error)
        return broken


def _start_worker() -> None:
    """Initializes a pool's process: it leaves Ctrl-C to the parent, and ends with the parent, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is not the main process

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    files.die_with_parent(parent.pid)  # on Linux, also if it is stopped


def worker_count(ranks: int = 0) -> int:
    """How many processes tokenize beside `ranks` that train on this machine."""
    return min(MOST_WORKERS, max(1, usable_cores() - ranks))
