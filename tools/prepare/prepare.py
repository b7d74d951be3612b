"""Text -> token files, once. run_train.sh starts it where they are missing.

    ./run_train.sh -m prepare configs/tiny.toml

Writes train.bin, heldout.bin (validation), where their documents end, the tokenizer and
manifest.json into prepared/{source}-{hash}/, one folder for each source. One process reads and
writes; threads tokenize, since the tokenizers' libraries release Python's lock. A process that was
killed resumes from the record, manifest.json. Files that are complete are compared with their
hashes.
"""

import collections
import copy
import errno
import itertools
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import config
from config import ConfigError
from data.folder import manifest_of
from data.order import HELD_OUT_OF
from system.machine import usable_cores
from system.processes import FINISHED, die_with_parent, print_error
from tools.prepare.begin import (
    alone,
    begin_all,
    check_files,
    file_now,
    validation_source,
    write_manifest,
)
from tools.prepare.row_format import Encoded, row_format
from tools.prepare.source import Position, SourceFile, SourceReader
from tools.prepare.writer import TokenWriter, check_hashes

CHUNK_CHARACTERS = 1 << 18  # per task of a thread, rounded up to full documents
AHEAD = 3  # chunks per thread that are read ahead
RECORD_SECONDS = 5.0  # between records; a killed process resumes from the last one
LOG_SECONDS = 10.0  # between lines of progress
MOST_WORKERS = 64  # one process that reads cannot feed more


class Chunk(NamedTuple):
    """Documents that are tokenized together, and where their source stands after them."""

    documents: list[str]
    position: Position


def prepare(data: config.Data, vocab_size: int, workers: int | None = None) -> list[pathlib.Path]:
    """Begins missing folders of token files, checks existing ones, and completes them. Returns
    them, by source. vocab_size: of the model. workers: threads that tokenize. Raises ConfigError
    and OSError."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # threads of ours take one core each
    folders = begin_all(data, vocab_size)
    for folder, source in folders:
        if manifest_of(folder)["complete"]:
            continue
        with alone(folder):
            if not manifest_of(folder)["complete"]:
                with start_pool(source, workers or min(MOST_WORKERS, usable_cores())) as pool:
                    fill(folder, source, pool)
    return [folder for folder, _ in folders]


def start_pool(data: config.Data, workers: int) -> Executor:
    """Threads; for conversations, which Python renders, processes."""
    if not data.has_conversations:
        return ThreadPoolExecutor(workers)
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too
    die_with_parent()
    if os.getppid() != parent:  # it died before
        os._exit(1)


def fill(folder: pathlib.Path, data: config.Data, pool: Executor) -> None:
    """Tokenizes the text that a folder's record lacks. Raises ConfigError and OSError."""
    note_changes(folder)
    writer = TokenWriter(folder, whole_documents=data.has_conversations)
    try:
        encode = row_format(data).encoder(folder)
        add_validation(writer, data, encode, pool)
        add_text(writer, data, encode, pool)
        complete(writer, data)
    except OSError as error:
        error.filename = error.filename or str(folder)  # a write knows only its handle
        raise
    finally:
        writer.close()


def note_changes(folder: pathlib.Path) -> None:
    """Files that were not read yet may have changed; the one that reading stopped in, as when a
    wrong row was mended, is read again from its beginning."""
    manifest = manifest_of(folder)
    files = [SourceFile(*entry) for entry in manifest["files"]]
    number, row = manifest["position"]
    now = [file_now(file) for file in files[number:]]
    if row and now[0] != files[number]:
        print_error(f"{now[0].path}: has changed, and is read again")
        manifest |= manifest["file_start"]
    manifest["files"] = [*files[:number], *now]
    write_manifest(folder, manifest)


def add_validation(
    writer: TokenWriter, data: config.Data, encode: Callable, pool: Executor
) -> None:
    """The text of data.validation, if that names some."""
    manifest = writer.manifest
    validation = validation_source(data)
    if validation is None or manifest["validation"]:
        return
    files = [SourceFile(*entry) for entry in manifest["validation_files"]]
    for _, encoded in encoded_in_order(pool, encode, chunks(SourceReader(validation, files))):
        for _, ids, size in encoded:
            writer.append("heldout", ids, size)
    if manifest["tokens"]["heldout"] < 2:  # an input and its target
        raise ConfigError(f"[data] validation = {data.validation}: holds nothing to evaluate on")
    writer.decide_validation()
    writer.record()


def add_text(writer: TokenWriter, data: config.Data, encode: Callable, pool: Executor) -> None:
    manifest = writer.manifest
    files = [SourceFile(*entry) for entry in manifest["files"]]
    limit = data.max_tokens or float("inf")
    next_record = 0.0
    next_line = time.monotonic() + LOG_SECONDS
    reader = SourceReader(data, files, Position(*manifest["position"]))
    for chunk, encoded in encoded_in_order(pool, encode, chunks(reader)):
        if chunk.position.file != manifest["position"][0] or not manifest["position"][1]:
            start = {key: manifest[key] for key in ("tokens", "bytes", "documents", "left_out")}
            manifest["file_start"] = copy.deepcopy(start) | {"position": [chunk.position.file, 0]}
        for is_held_out, ids, size in encoded:
            if manifest["tokens"]["train"] >= limit:
                manifest["position"] = Position(chunk.position.file + 1)
                return
            is_first_text = manifest["tokens"]["train"] < HELD_OUT_OF
            held_out = is_held_out and is_first_text and not data.validation
            writer.append("heldout" if held_out else "train", ids, size)
        manifest["position"] = chunk.position
        if time.monotonic() > next_record:
            writer.record()
            next_record = time.monotonic() + RECORD_SECONDS
        if time.monotonic() > next_line:
            next_line = time.monotonic() + LOG_SECONDS
            file = min(chunk.position.file + 1, len(files))
            tokens = manifest["tokens"]["train"]
            print_error(f"{data.source}: {tokens:,} tokens prepared, file {file} of {len(files)}")
    manifest["position"] = Position(len(files))


def complete(writer: TokenWriter, data: config.Data) -> None:
    manifest = writer.manifest
    if not any(manifest["documents"].values()):
        raise ConfigError(f"[data] source = {data.source}: holds no text")
    check_files(writer.folder, manifest, data)
    writer.complete()
    split, first, end = manifest["validation"]
    trained_on = manifest["tokens"]["train"] - (end - first if split == "train" else 0)
    print_error(
        f"prepared {writer.folder}: {trained_on:,} tokens to train on, {end - first:,} for validation"
    )


def chunks(reader: SourceReader) -> Iterator[Chunk]:
    """Each is of one file."""
    documents: list[str] = []
    position = reader.position
    size = 0
    for document in reader:
        if documents and (size >= CHUNK_CHARACTERS or reader.position.file != position.file):
            yield Chunk(documents, position)
            documents = []
            size = 0
        documents.append(document)
        position = reader.position
        size += len(document)
    if documents:
        yield Chunk(documents, position)


def encoded_in_order(
    pool: Executor, encode: Callable, source: Iterator[Chunk]
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yields each chunk with its ids. Raises ConfigError and OSError."""
    workers: int = pool._max_workers  # pyrefly: ignore[missing-attribute]  # of both kinds
    ahead: collections.deque = collections.deque()
    while True:
        for chunk in itertools.islice(source, AHEAD * workers - len(ahead)):
            ahead.append((chunk, pool.submit(encode, chunk.documents)))
        if not ahead:
            return
        chunk, future = ahead.popleft()
        try:
            yield chunk, future.result()
        except BrokenProcessPool:
            problem = "a process that tokenizes was killed (out of memory?)"
            raise OSError(errno.ENOMEM, problem) from None


def main(argv: list[str]) -> int:
    _, cfg = config.from_command_line(argv, __doc__, config.argument_parser())
    for folder, _ in begin_all(cfg.data, cfg.model.vocab_size):
        if manifest_of(folder)["complete"]:
            print_error(f"{folder} is prepared: comparing its hashes")
            check_hashes(folder)
    prepare(cfg.data, cfg.model.vocab_size)
    return FINISHED
