"""Documents -> token files, in order, on all cores. Uses processes, since sentencepiece's threads build the lists of
ids under the GIL and gain only a sixth on two cores."""

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
from collections.abc import Callable, Generator, Iterator

import files
from data.sources import Source
from data.tokenizer import Tokenizer
from data.tokens import MANIFEST, WIDTH

SYNC_SECONDS = 5.0  # between syncs; a killed preparation resumes from the last one
LOG_SECONDS = 10.0  # between progress lines if stderr is not a terminal
CHUNK = 1 << 18  # characters per task of a process, rounded up to full documents


def is_validation(text: str) -> bool:
    """Whether a document belongs to the validation set: one in a hundred does, by its hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 100 == 99


def chunks(source: Source) -> Iterator[tuple[list[str], tuple]]:
    """Yields (documents, the source's place() and share() after them). Raises ConfigError, as the source does."""
    texts, size = [], 0
    for text in source:
        texts.append(text)
        size += len(text)
        if size >= CHUNK:
            yield texts, (source.place(), source.share())
            texts, size = [], 0
    if texts:
        yield texts, (source.place(), source.share())


_tokenizer = functools.lru_cache(1)(Tokenizer)  # of this process


def encode(folder: pathlib.Path, typecode: str, texts: list[str]) -> list[tuple[bool, bytes]]:
    """Tokenizes texts with the tokenizer in `folder`. Returns for each whether it is a validation document, and its ids
    between BOS and EOS as bytes, in the width of array's typecode."""
    tokenizer = _tokenizer(folder)
    return [
        (
            is_validation(text),
            array.array(typecode, [*tokenizer.bos, *ids, *tokenizer.eos]).tobytes(),
        )
        for text, ids in zip(texts, tokenizer.encode(texts))
    ]


def _start() -> None:
    """Initializes a pool process: it leaves Ctrl-C to the parent, and exits when the parent ends, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is not the main process
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_all(
    folder: pathlib.Path, typecode: str, source: Source, encode: Callable
) -> Generator[tuple[list[tuple[bool, bytes]], tuple], None, None]:
    """Yields (encode(), place and share) per chunk; reads ahead three per process. Raises ConfigError and OSError."""
    workers = len(os.sched_getaffinity(0))
    # spawn: a forked process may inherit a lock that another thread holds
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start
    )
    try:
        work = functools.partial(encode, folder, typecode)
        submitted = ((pool.submit(work, texts), place) for texts, place in chunks(source))
        ahead = collections.deque(itertools.islice(submitted, 3 * workers))
        while ahead:
            future, place = ahead.popleft()
            documents = future.result()
            ahead.extend(itertools.islice(submitted, 1))
            yield documents, place
    except concurrent.futures.process.BrokenProcessPool:
        why = "a process that tokenizes was killed (is the host out of memory?); the same command resumes here"
        raise OSError(errno.ENOMEM, why) from None
    finally:
        pool.shutdown(cancel_futures=True)


def write_tokens(
    folder: pathlib.Path, source: Source, dtype: str, manifest: dict, encode: Callable = encode
) -> None:
    """Appends to train.bin and heldout.bin each document between BOS and EOS, and to *.ends.bin the position after its
    last token, 8 bytes little-endian. Raises ConfigError and OSError.

    Resumes from the counts in `manifest`, whose place the source was opened at, and keeps both up to date; every few
    seconds, syncs the files and writes it to the folder. Adds the source's revision.
    """
    d, width, tokens, documents = source.d, WIDTH[dtype], manifest["tokens"], manifest["documents"]
    limit = d.max_tokens or math.inf
    if before := sum(documents.values()):
        report(f"resuming after {before:,} documents of {d.source}, which were prepared before")
    with contextlib.ExitStack() as stack:
        if on_terminal():
            stack.callback(
                report, "", stays=False
            )  # clears the line of progress, whatever comes next
        opened = {}
        for split in tokens:
            for name, size in (
                (f"{split}.bin", width * tokens[split]),
                (f"{split}.ends.bin", 8 * documents[split]),
            ):
                opened[name] = stack.enter_context((folder / name).open("ab"))
                opened[name].truncate(size)  # data written after the last sync may be incomplete

        def sync() -> None:
            for file in opened.values():
                file.flush()
                os.fsync(file.fileno())
            files.write_atomic(folder / MANIFEST, json.dumps(manifest))

        encoded = encode_all(folder, "H" if dtype == "uint16" else "i", source, encode)
        stack.callback(encoded.close)
        began = synced = shown = time.monotonic()
        made = sum(tokens.values())  # by an earlier preparation
        while tokens["train"] < limit and (chunk := next(encoded, None)):
            found, (manifest["place"], share) = chunk
            for validation, content in found:
                if not content:  # a tokenizer may produce no tokens for some texts
                    manifest["left_out"] = manifest.get("left_out", 0) + 1
                elif tokens["train"] < limit:
                    split = "heldout" if validation else "train"
                    opened[f"{split}.bin"].write(content)
                    tokens[split] += len(content) // width
                    documents[split] += 1
                    opened[f"{split}.ends.bin"].write(tokens[split].to_bytes(8, "little"))
            now = time.monotonic()
            if now - shown > (0.5 if on_terminal() else LOG_SECONDS):
                share = max(share or 0.0, min(1.0, tokens["train"] / limit))
                report(progress(d.source[-24:], manifest, share, made, now - began), stays=False)
                shown = now
            if now - synced > SYNC_SECONDS:
                sync()
                synced = now
        sync()
    manifest["revision"] = source.revision


def progress(name: str, manifest: dict, share: float, before: int, seconds: float) -> str:
    """A tqdm progress bar. share: fraction done, from 0 to 1; before: tokens from an earlier preparation."""
    from tqdm import tqdm  # comes with `datasets`, which a machine that only trains need not have

    tokens, documents = sum(manifest["tokens"].values()), sum(manifest["documents"].values())
    return tqdm.format_meter(
        tokens,
        tokens / share if share else None,
        seconds,
        initial=before,
        prefix=name,
        unit=" tokens",
        unit_scale=True,
        postfix=f"{documents:,} documents",
        ncols=shutil.get_terminal_size().columns - 1 if on_terminal() else None,
    )


def report(text: str, stays: bool = True) -> None:
    """Prints to stderr; on a terminal, overwrites a line with stays=False. Ignores a closed or full stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(
            "\x1b[K" * on_terminal() + text,
            end="\n" if stays or not on_terminal() else "\r",
            file=sys.stderr,
            flush=True,
        )


def on_terminal() -> bool:
    return bool(sys.stderr) and sys.stderr.isatty()
