"""Documents to tokens on all cores, in their order: what data/prepare.py's processes do.

Processes and not sentencepiece's own threads: those speed it up by a sixth on two cores, since making the lists of ids
takes Python's lock.
"""

import array
import collections
import concurrent.futures
import concurrent.futures.process
import errno
import functools
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from data.sources import Source
from data.tokenizer import Tokenizer

CHUNK = 1 << 18  # characters that one process takes at once, in whole documents


class Encoded(NamedTuple):
    """Some documents, each between its begin and end marks."""

    held_out: list[bool]
    lengths: list[int]  # tokens
    tokens: bytes  # of all of them, little-endian
    characters: int


def is_held_out(text: str) -> bool:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 100 == 99


@functools.lru_cache(1)
def _tokenizer(path: pathlib.Path) -> Tokenizer:
    return Tokenizer(path)


def encode(path: pathlib.Path, small: bool, texts: list[str]) -> Encoded:
    """With the tokenizer at `path`; `small`: two bytes per token, else four."""
    tokenizer, tokens, lengths = _tokenizer(path), array.array("H" if small else "i"), []
    for ids in tokenizer.encode(texts):
        before = len(tokens)
        tokens.extend([*tokenizer.bos, *ids, *tokenizer.eos])
        lengths.append(len(tokens) - before)
    if sys.byteorder == "big":
        tokens.byteswap()
    return Encoded([is_held_out(text) for text in texts], lengths, tokens.tobytes(), sum(map(len, texts)))


class Chunk(NamedTuple):
    texts: list[str]
    place: Any  # of the source after them
    share: float | None


def chunks(source: Source) -> Iterator[Chunk]:
    texts, size = [], 0
    for text in source:
        texts.append(text)
        size += len(text)
        if size >= CHUNK:
            yield Chunk(texts, source.place(), source.share())
            texts, size = [], 0
    if texts:
        yield Chunk(texts, source.place(), source.share())


def _start() -> None:
    """A process of the pool leaves Ctrl-C to its parent, and ends with it, however that ends: by itself it would wait
    for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_all(path: pathlib.Path, small: bool, source: Source) -> Iterator[tuple[Chunk, Encoded]]:
    """Reads ahead of its processes by a few chunks, and no more. What reading raises is raised here."""
    workers = len(os.sched_getaffinity(0))
    # spawn: who calls may have threads, which a fork would cut off in the middle of anything
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start)
    with pool:
        waiting = ((chunk, pool.submit(encode, path, small, chunk.texts)) for chunk in chunks(source))
        try:
            ahead = collections.deque(itertools.islice(waiting, 3 * workers))
            while ahead:
                chunk, done = ahead.popleft()
                try:
                    encoded = done.result()
                except concurrent.futures.process.BrokenProcessPool:
                    raise OSError(errno.ENOMEM, "a process that tokenizes was killed (is the host out of memory?); the "
                                                "same command goes on from here") from None
                ahead.extend(itertools.islice(waiting, 1))
                yield chunk, encoded
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
