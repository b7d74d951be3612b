"""Documents -> token ids, in order, by several processes.

Each of them takes one core. The tokenizers' own threads would take those of the ranks, too.
"""

import array
import collections
import errno
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import config
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

# of each document: whether its hash holds it out for validation; its ids as bytes
Encoded = list[tuple[bool, bytes]]


@dataclass(frozen=True)
class Chunk:
    """Documents of a source that a process tokenizes together."""

    documents: list[str]
    encode: Callable[[list[str]], Encoded]  # runs in the process
    target: Any  # the caller's: where the ids go
    source: Source
    resume_state: Any = None  # of the source, after the last document
    fraction_read: float | None = None  # of the source, with these documents
    is_last: bool = False  # ends the source, and has no documents
    problem: ConfigError | None = None  # in place of its documents, or of those that follow


def is_validation(text: str) -> bool:
    """Whether a document belongs to the validation set: one in a hundred does, by its hash."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 == 99


def chunks(
    source: Source, encode: Callable[[list[str]], Encoded], target: Any = None
) -> Iterator[Chunk]:
    """Yields a source's documents in chunks. The last chunk has none, but the problem that ends the
    source, if any."""
    documents: list[str] = []
    size = 0  # characters
    problem = None

    def chunk() -> Chunk:
        return Chunk(documents, encode, target, source, state_of(source), source.fraction_read())

    try:
        for document in source:
            documents.append(document)
            size += len(document)
            if size >= CHUNK:
                yield chunk()
                documents = []
                size = 0
    except ConfigError as error:
        problem = error
    # after a wrong row, the state of a source that lists them is still that of the last document
    has_state = problem is None or source.lists_wrong_rows
    if documents and has_state:
        yield chunk()
    yield Chunk([], encode, target, source, is_last=True, problem=problem)


def state_of(source: Source) -> Any:
    """A source's resume state after a document: a copy, as the source may change its own when it
    reads on. Raises ConfigError if the source cannot resume there."""
    state = source.resume_state()
    name = f"{type(source).__name__}.resume_state()"
    if state is None:
        raise ConfigError(
            f"{name}: None after a document, but that stands for the beginning; return where to go "
            "on, such as the row's number"
        )
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}; return what JSON can hold") from None
    return deepcopy(state)


@dataclass(frozen=True)
class TokenizerCopy:
    """A tokenizer in a folder of prepared data. Copies are equal if their files are, so that each
    process loads one."""

    sha256: str
    template: str | None  # SHA-256 of the chat template
    folder: pathlib.Path = field(compare=False)


@functools.lru_cache(2)
def load_tokenizer(copy: TokenizerCopy) -> Tokenizer:
    """Loads a tokenizer, once per process. Raises ConfigError if its files have changed."""
    tokenizer = Tokenizer(copy.folder)
    if tokenizer_hash(tokenizer.files) != copy.sha256:
        raise damaged(copy.folder / "tokenizer", "was changed since the folder was begun")
    return tokenizer


def encode_documents(copy: TokenizerCopy, typecode: str, documents: list[str]) -> Encoded:
    """Tokenizes documents, each between BOS and EOS. typecode: of the array module, for the width
    of an id. Raises ConfigError."""
    tokenizer = load_tokenizer(copy)
    encoded = []
    for text, ids in zip(documents, tokenizer.encode(documents)):
        tokens = array.array(typecode, [*tokenizer.bos, *ids, *tokenizer.eos])
        encoded.append((is_validation(text), tokens.tobytes()))
    return encoded


def encoder(folder: pathlib.Path, manifest: dict, d: config.Data) -> Callable[[list[str]], Encoded]:
    """Documents -> their ids, with a folder's tokenizer; runs in any process."""
    typecode = "H" if manifest["dtype"] == "uint16" else "i"
    template = manifest["identity"].get("chat_template")
    copy = TokenizerCopy(manifest["tokenizer"], template, folder)
    if d.has_conversations:
        from extras.chat.conversations import encode_conversations

        return functools.partial(encode_conversations, copy, typecode)
    return functools.partial(encode_documents, copy, typecode)


def encode_in_order(chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Yields each chunk with what its encode() returns, or with the ConfigError that it raises as
    the chunk's problem. workers: processes; 0 encodes in this one. Replaces processes that are
    killed. Raises OSError."""
    if workers == 0 or not _has_semaphores():
        for chunk in chunks:
            yield _with_result(chunk, functools.partial(chunk.encode, chunk.documents))
        return
    ahead: collections.deque[tuple[Chunk, Future]] = collections.deque()
    pool = _start_pool(workers)
    losses = 0
    try:
        while True:
            free = max(0, AHEAD * workers - len(ahead))
            for chunk in itertools.islice(chunks, free):
                ahead.append((chunk, _submit(pool, chunk)))
            if not ahead:
                return
            chunk, future = ahead[0]
            try:
                result = _with_result(chunk, future.result)
            except BrokenProcessPool:
                losses += 1
                pool.shutdown(cancel_futures=True)
                _report_loss(losses)
                pool = _start_pool(workers)
                ahead = collections.deque((chunk, _submit(pool, chunk)) for chunk, _ in ahead)
                continue
            losses = 0
            ahead.popleft()
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def _with_result(chunk: Chunk, result: Callable[[], Encoded]) -> tuple[Chunk, Encoded]:
    try:
        return chunk, result()
    except ConfigError as error:
        return replace(chunk, problem=error), []


def _report_loss(losses: int) -> None:
    """losses: processes that were killed over the same chunk. Raises OSError if they are too
    many."""
    lost = "a process that tokenizes was killed (is the host out of memory?)"
    if losses == MOST_LOSSES:
        raise OSError(errno.ENOMEM, f"{lost}; the same command resumes here")
    report(f"{lost}; starting another")


def _has_semaphores() -> bool:
    """Whether processes can have semaphores in common; reports it if they cannot."""
    try:
        multiprocessing.get_context("spawn").Lock()
        return True
    except (OSError, ImportError) as error:
        report(f"only one process tokenizes: others would need a writable /dev/shm: {error}")
        return False


def _start_pool(workers: int) -> ProcessPoolExecutor:
    # spawn: a forked process may inherit a lock that another thread holds
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)


def _submit(pool: ProcessPoolExecutor, chunk: Chunk) -> Future:
    try:
        return pool.submit(chunk.encode, chunk.documents)
    except BrokenProcessPool as error:
        # encode_in_order() meets the error in the future's result
        broken: Future = Future()
        broken.set_exception(error)
        return broken


def _start_worker() -> None:
    """Initializes a process of the pool. It leaves Ctrl-C to the parent, and ends when the parent
    does, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # of the library `tokenizers`: each process takes one core
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is not the main process

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # on Linux, also if this process is stopped
    files.die_with_parent(parent.pid)


def worker_count(ranks: int = 0) -> int:
    """How many processes tokenize next to so many ranks that train on this machine."""
    return min(MOST_WORKERS, max(1, usable_cores() - ranks))
