"""Documents to tokens on all cores, in their order: what data/prepare.py's processes do.

Processes and not sentencepiece's own threads: those speed it up by a sixth on two cores, since making the lists of ids
takes Python's lock.
"""

import array
import collections
import concurrent.futures
import functools
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start() -> None:
    """A process of the pool leaves Ctrl-C to its parent, and ends with it, however that ends: by itself it would wait
    for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_all(path: pathlib.Path, small: bool, texts: Iterable[str]) -> Iterator[Encoded]:
    """Reads ahead of its processes by a few chunks, and no more. What reading raises is raised here."""
    workers = len(os.sched_getaffinity(0))
    # spawn: who calls may have threads, which a fork would cut off in the middle of anything
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start)
    with pool:
        source = chunks(texts)
        try:
            ahead = collections.deque(pool.submit(encode, path, small, chunk)
                                      for chunk in itertools.islice(source, 3 * workers))
            while ahead:
                done = ahead.popleft().result()
                ahead.extend(pool.submit(encode, path, small, chunk) for chunk in itertools.islice(source, 1))
                yield done
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
