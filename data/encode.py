"""Documents -> token files, on all cores, in their order.

In processes, not in sentencepiece's threads: those gain a sixth on two cores, since they make the lists of ids under
Python's lock.
"""

import array
import collections
import concurrent.futures.process
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import config
import files
from data.sources import Source, open_source
from data.tokenizer import Tokenizer
from data.tokens import WIDTH

PROGRESS = "progress.json"  # of an unfinished preparation: what it prepares, and how far it is
SYNC_SECONDS = 5.0  # between two points from which a killed preparation resumes
LOG_SECONDS = 10.0  # between two lines of progress where stderr is not a terminal
CHUNK = 1 << 18  # characters that a process takes at once, in whole documents


def is_validation(text: str) -> bool:
    """Whether a document belongs to the validation set: one in a hundred does, by its hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 100 == 99


class Chunk(NamedTuple):
    texts: list[str]
    place: Any  # of the source after them
    share: float | None


def chunks(source: Source) -> Iterator[Chunk]:
    """Raises ConfigError, as reading the source does."""
    texts, size = [], 0
    for text in source:
        texts.append(text)
        size += len(text)
        if size >= CHUNK:
            yield Chunk(texts, source.place(), source.share())
            texts, size = [], 0
    if texts:
        yield Chunk(texts, source.place(), source.share())


@functools.lru_cache(1)
def _tokenizer(path: pathlib.Path) -> Tokenizer:
    return Tokenizer(path)


def encode(path: pathlib.Path, typecode: str, texts: list[str]) -> list[tuple[bool, bytes]]:
    """Tokenizes documents with the tokenizer at `path`. Returns for each whether it is a validation document, and its
    ids between BOS and EOS, little-endian in the width of array's typecode."""
    tokenizer, found = _tokenizer(path), []
    for text, ids in zip(texts, tokenizer.encode(texts)):
        tokens = array.array(typecode, [*tokenizer.bos, *ids, *tokenizer.eos])
        if sys.byteorder == "big":
            tokens.byteswap()
        found.append((is_validation(text), tokens.tobytes()))
    return found


def _start() -> None:
    """In a process of the pool: leaves Ctrl-C to the parent, and ends when the parent has ended, even by kill -9; the
    pool's own loop would wait for work forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_all(path: pathlib.Path, typecode: str, source: Source) -> Iterator[tuple[Chunk, list[tuple[bool, bytes]]]]:
    """encode() of each chunk, reading at most three chunks per process ahead. Raises ConfigError, and OSError where a
    process was killed."""
    workers = len(os.sched_getaffinity(0))
    # spawn: the caller may have threads, and a fork would stop those anywhere, perhaps holding a lock
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start)
    with pool:
        submitted = ((chunk, pool.submit(encode, path, typecode, chunk.texts)) for chunk in chunks(source))
        try:
            ahead = collections.deque(itertools.islice(submitted, 3 * workers))
            while ahead:
                chunk, future = ahead.popleft()
                documents = future.result()
                ahead.extend(itertools.islice(submitted, 1))
                yield chunk, documents
        except concurrent.futures.process.BrokenProcessPool:
            raise OSError(errno.ENOMEM, "a process that tokenizes was killed (is the host out of memory?); the same "
                                        "command resumes here") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def write_tokens(folder: pathlib.Path, d: config.Data, dtype: str, state: dict) -> str | None:
    """Appends to train.bin and heldout.bin each document between BOS and EOS, and to train.ends.bin and
    heldout.ends.bin the position after its last token, 8 bytes little-endian. Returns the source's revision. Raises
    ConfigError and OSError.

    Begins where `state` says: the place in the source, tokens and documents of each split. It is kept up to date; every
    few seconds the files are synced, and then it is written into progress.json.
    """
    limit, tokens, documents = d.max_tokens or math.inf, state["tokens"], state["documents"]
    if before := sum(documents.values()):
        report(f"resuming after {before:,} documents of {d.source}, which were prepared before")
    with contextlib.ExitStack() as stack:
        def append(name: str, size: int) -> BinaryIO:
            file = stack.enter_context((folder / name).open("ab"))
            file.truncate(size)  # what was written after the last sync may be torn
            return file

        ids = {split: append(f"{split}.bin", WIDTH[dtype] * tokens[split]) for split in tokens}
        ends = {split: append(f"{split}.ends.bin", 8 * documents[split]) for split in documents}

        def sync() -> float:
            for file in (*ids.values(), *ends.values()):
                file.flush()
                os.fsync(file.fileno())
            files.write_whole(folder / PROGRESS, json.dumps(state))
            return time.monotonic()

        source, synced = open_source(d, state["place"]), time.monotonic()
        encoded = stack.enter_context(contextlib.closing(encode_all(folder, "H" if dtype == "uint16" else "i", source)))
        bar = stack.enter_context(_progress_bar(d.source[-24:], sum(tokens.values())))
        for chunk, found in encoded if tokens["train"] < limit else ():
            for validation, content in found:
                if not content:  # text that its tokenizer makes nothing of
                    continue
                split = "heldout" if validation else "train"
                ids[split].write(content)
                tokens[split] += len(content) // WIDTH[dtype]
                documents[split] += 1
                ends[split].write(tokens[split].to_bytes(8, "little"))
                if tokens["train"] >= limit:
                    break
            state["place"] = chunk.place
            share = max(chunk.share or 0.0, min(1.0, tokens["train"] / limit))
            bar.total = sum(tokens.values()) / share if share else None
            bar.set_postfix_str(f"{sum(documents.values()):,} documents", refresh=False)
            bar.update(sum(tokens.values()) - bar.n)
            if tokens["train"] >= limit:
                break
            if time.monotonic() - synced > SYNC_SECONDS:
                synced = sync()
        sync()
    return source.revision


def report(text: str, end: str = "\n") -> None:
    """Prints to stderr. That it is closed or full must not end a preparation, nor the training that called it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


class _Stderr:
    """For tqdm: stderr as report() writes it; off a terminal each refresh of a bar becomes a line."""

    def __init__(self) -> None:
        self.terminal = bool(sys.stderr) and sys.stderr.isatty()

    def write(self, text: str) -> None:
        if self.terminal:
            report(text, end="")
        elif text.strip():
            report(text.strip())

    def flush(self) -> None:
        pass  # report() has done it


def _progress_bar(name: str, tokens: int) -> "tqdm":  # noqa: F821
    """Of a preparation that has made so many tokens before."""
    from tqdm import tqdm  # comes with `datasets`, which a machine that only trains need not have

    stream = _Stderr()
    seconds = 0.5 if stream.terminal else LOG_SECONDS
    return tqdm(desc=name, initial=tokens, unit=" tokens", unit_scale=True, smoothing=0, leave=False, file=stream,
                mininterval=seconds, delay=seconds, miniters=1,
                ncols=shutil.get_terminal_size().columns - 1 if stream.terminal else None)
