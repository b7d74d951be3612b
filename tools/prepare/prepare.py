"""Text -> token files, once. run_train.sh starts it where they are missing.

    ./run_train.sh -m prepare configs/tiny.toml

Writes train.bin, heldout.bin (validation), where their documents end, the tokenizer and
manifest.json into prepared/{source}-{hash}/, one folder for each source. One process reads and
writes; threads tokenize, since the tokenizers' libraries release Python's lock. A process that was
killed resumes from the record, manifest.json. Files that are complete are compared with their
hashes.
"""

import collections
import contextlib
import errno
import itertools
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import config
from config import ConfigError

from tools.prepare.begin import alone, begin_all, check_files, file_now, validation_source
from data.folder import manifest_of
from data.order import HELD_OUT_OF
from tools.prepare.row_format import Encoded, row_format
from tools.prepare.source import Position, RowCount, SourceFile, SourceReader
from tools.prepare.writer import TokenWriter, check_hashes
from system.machine import usable_cores
from system.processes import FINISHED, die_with_parent, print_error

BATCH_CHARACTERS = 1 << 18  # per task of a thread, rounded up to full documents
AHEAD = 3  # batches per thread that are read ahead
RECORD_SECONDS = 5.0  # between records; a killed process resumes from the last one
LOG_SECONDS = 10.0  # between lines of progress
MOST_WORKERS = 64  # one process that reads cannot feed more


@dataclass
class Batch:
    """Documents of a source that are tokenized together. The last batch of a source has none."""

    preparation: "Preparation"
    documents: list[str] = field(default_factory=list)
    position: Position = Position()  # of the source, after the last document
    count: RowCount = RowCount()  # of its rows up to there
    count_before_file: RowCount = RowCount()
    # why the documents cannot be tokenized or, of the last batch, no more can be read
    problem: ConfigError | OSError | None = None


def prepare(data: config.Data, vocab_size: int, workers: int | None = None) -> list[pathlib.Path]:
    """Begins missing folders of token files, checks existing ones, and completes them. Returns
    them, by source. vocab_size: of the model. workers: threads that tokenize. Raises ConfigError
    and OSError."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # threads of ours take one core each
    sources = begin_all(data, vocab_size)
    with contextlib.ExitStack() as stack:
        preparations = []
        # in one order for all processes: two mixtures may have sources in common
        for folder, source in sorted(sources, key=lambda each: each[0]):
            if manifest_of(folder)["complete"]:
                continue
            stack.enter_context(alone(folder))
            if not manifest_of(folder)["complete"]:
                preparation = Preparation(folder, source)
                stack.callback(preparation.close)
                preparations.append(preparation)
        if preparations:
            pool = start_pool(data, workers or worker_count())
            stack.callback(pool.shutdown, cancel_futures=True)
            prepare_together(preparations, pool)
    return [folder for folder, _ in sources]


def prepare_together(preparations: "list[Preparation]", pool: Executor) -> None:
    """Completes folders side by side. Raises ConfigError and OSError."""
    try:
        for batch, encoded in encoded_in_order(pool, interleaved(preparations)):
            batch.preparation.write(batch, encoded)
    except OSError as error:
        if error.filename is None:  # a write knows only its handle
            error.filename = str(preparations[0].folder)
        raise


def worker_count() -> int:
    """How many threads tokenize."""
    return min(MOST_WORKERS, usable_cores())


def start_pool(data: config.Data, workers: int) -> Executor:
    """Threads; for conversations, which Python renders, processes."""
    if not row_format(data).is_whole:
        return ThreadPoolExecutor(workers)
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too
    die_with_parent()
    if os.getppid() != parent:  # it died before
        os._exit(1)


def interleaved(preparations: "list[Preparation]") -> Iterator[Batch]:
    """The batches of all folders: the next is of the folder of which the least was read."""
    unread = {preparation: preparation.batches() for preparation in preparations}
    characters = dict.fromkeys(preparations, 0)
    while unread:
        preparation = min(unread, key=lambda each: characters[each])
        batch = next(unread[preparation], None)
        if batch is None:
            del unread[preparation]
            continue
        characters[preparation] += sum(map(len, batch.documents))
        yield batch


def encoded_in_order(pool: Executor, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
    """Yields each batch with its ids; one that cannot be tokenized with the problem. Raises
    OSError."""
    workers: int = pool._max_workers  # pyrefly: ignore[missing-attribute]  # of both kinds
    ahead: collections.deque = collections.deque()
    while True:
        for batch in itertools.islice(batches, AHEAD * workers - len(ahead)):
            ahead.append((batch, pool.submit(batch.preparation.encode, batch.documents)))
        if not ahead:
            return
        batch, future = ahead.popleft()
        encoded: Encoded = []
        try:
            encoded = future.result()
        except ConfigError as error:
            batch.problem = error
        except BrokenProcessPool:
            problem = "a process that tokenizes was killed (out of memory?)"
            raise OSError(errno.ENOMEM, problem) from None
        yield batch, encoded


class Preparation:
    """A folder whose text this process prepares: batches() are tokenized, and then given to write()
    in their order."""

    def __init__(self, folder: pathlib.Path, data: config.Data):
        """Raises ConfigError and OSError."""
        self.folder = folder
        self.data = data
        self.limit = self.data.max_tokens or float("inf")  # train tokens
        self.writer = TokenWriter(folder, whole_documents=row_format(self.data).is_whole)
        self.manifest = self.writer.manifest
        self.encode = row_format(self.data).encoder(folder)
        self.validation = validation_source(self.data)
        self.files = [SourceFile(*entry) for entry in self.manifest["files"]]
        self._note_changes()
        self.next_record = 0.0  # by time.monotonic()
        self.next_line = time.monotonic() + LOG_SECONDS

    def _note_changes(self) -> None:
        """What was not read yet may have changed. If the file that reading stopped in has, as when
        a wrong row was mended, it is read again."""
        if not self.manifest["validation"]:
            files = [file_now(SourceFile(*entry)) for entry in self.manifest["validation_files"]]
            self.manifest["validation_files"] = files
        number, row = self.manifest["position"]
        files_now = [file_now(file) for file in self.files[number:]]
        if row and files_now[0] != self.files[number]:
            path = files_now[0].path
            print_error(f"{path}: has changed; comparing it with what was prepared from it")
            self.writer.read_again(path)
        self.files[number:] = files_now
        self.manifest["files"] = self.files

    def batches(self) -> Iterator[Batch]:
        """What is left to tokenize: first the text of a validation source. Each source ends with a
        batch without documents."""
        position = Position(*self.manifest["position"])
        count = RowCount(*self.manifest.get("rows", ()))
        source = SourceReader(self.data, self.files, position, count)
        if self.validation and not self.manifest["validation"]:
            yield from self._batches(
                SourceReader(self.validation, self.manifest["validation_files"])
            )
        yield from self._batches(source)

    def _batches(self, source: SourceReader) -> Iterator[Batch]:
        """Each batch is of one file."""
        batch = Batch(self)
        last = Batch(self, position=Position(len(source.files)))
        size = 0
        try:
            for document in source:
                is_new_file = source.position.file != batch.position.file
                if size >= BATCH_CHARACTERS or (batch.documents and is_new_file):
                    yield batch
                    if self.is_full():
                        return
                    batch = Batch(self)
                    size = 0
                batch.documents.append(document)
                batch.position = source.position
                batch.count = source.count
                batch.count_before_file = source.count_before_file
                size += len(document)
        except (ConfigError, OSError) as error:
            last.problem = error
        last.count = source.count
        if batch.documents:
            yield batch
        yield last

    def is_full(self) -> bool:
        """Whether data.max_tokens is reached."""
        return self.manifest["tokens"]["train"] >= self.limit

    def write(self, batch: Batch, encoded: Encoded) -> None:
        """Appends a batch's documents, and records when that is due. Raises ConfigError and
        OSError."""
        if self.manifest["complete"]:  # data.max_tokens was reached before this batch
            return
        if batch.problem:
            raise batch.problem
        is_last = not batch.documents
        if self.validation and not self.manifest["validation"]:
            self._append(encoded, is_validation=True)
            self._count(batch.count, "validation_rows")
            if is_last:
                self._end_validation()
            return
        file, row = self.manifest["position"]
        if not row or batch.position.file != file:
            self._count(batch.count_before_file, "rows")
            self.writer.begin_file(batch.position.file)
        self._append(encoded, is_validation=False)
        self.manifest["position"] = batch.position
        self._count(batch.count, "rows")
        if is_last or self.is_full():
            self._complete()
        elif time.monotonic() > self.next_record:
            self.writer.record()
            self.next_record = time.monotonic() + RECORD_SECONDS
        self._log()

    def _count(self, count: RowCount, key: str) -> None:
        if key in self.manifest:  # data.bad_rows = "skip"
            self.manifest[key] = count

    def _append(self, encoded: Encoded, is_validation: bool) -> None:
        """is_validation: of the text of data.validation."""
        for is_held_out, ids, size in encoded:
            if self.is_full():
                return
            is_first_text = self.manifest["tokens"]["train"] < HELD_OUT_OF
            if not ids:  # a tokenizer may produce no tokens for some texts
                self.manifest["left_out"] += 1
            elif is_validation or (is_held_out and is_first_text and not self.validation):
                self.writer.append("heldout", ids, size)
            else:
                self.writer.append("train", ids, size)

    def _end_validation(self) -> None:
        if self.manifest["tokens"]["heldout"] < 2:  # an input and its target
            raise ConfigError(
                f"[data] validation = {self.data.validation}: holds nothing to evaluate on"
            )
        self.writer.decide_validation()
        self.writer.record()

    def _complete(self) -> None:
        if not any(self.manifest["documents"].values()):
            raise ConfigError(f"[data] source = {self.data.source}: holds no text")
        RowCount(*self.manifest.get("rows", ())).require_few(self.data.source)
        file, row = self.manifest["position"]
        if row:  # data.max_tokens was reached in this file
            self.manifest["position"] = Position(file + 1)
        check_files(self.folder, self.manifest, self.data)
        self.writer.complete()
        split, first, end = self.manifest["validation"]
        held_out = end - first
        trained_on = self.manifest["tokens"]["train"] - (held_out if split == "train" else 0)
        print_error(
            f"prepared {self.folder}: {trained_on:,} tokens to train on, {held_out:,} for validation"
        )
        for key in ("rows", "validation_rows"):
            count = RowCount(*self.manifest.get(key, ()))
            if count.wrong:
                share = count.wrong / count.read
                print_error(
                    f"{self.folder}: {count.wrong:,} of {count.read:,} {key} ({share:.3%}) are "
                    "wrong and left out"
                )

    def _log(self) -> None:
        if time.monotonic() > self.next_line:
            self.next_line = time.monotonic() + LOG_SECONDS
            tokens = self.manifest["tokens"]["train"]
            file = min(self.manifest["position"][0] + 1, len(self.files))
            progress = f"{tokens:,} tokens prepared, file {file} of {len(self.files)}"
            print_error(f"{self.data.source}: {progress}")

    def close(self) -> None:
        self.writer.close()


def main(argv: list[str]) -> int:
    _, cfg = config.from_command_line(argv, __doc__, config.argument_parser())
    check_complete(cfg.data, cfg.model.vocab_size)
    prepare(cfg.data, cfg.model.vocab_size)
    return FINISHED


def check_complete(data: config.Data, vocab_size: int) -> None:
    """Compares what is prepared already with its hashes. Raises ConfigError and OSError."""
    for folder, _ in begin_all(data, vocab_size):
        if manifest_of(folder)["complete"]:
            print_error(f"{folder} is prepared: comparing its hashes")
            check_hashes(folder)

