"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does
nothing.

    python -m data.prepare configs/tiny.toml

Writes train.bin, heldout.bin (validation), where their documents end, the tokenizer and
manifest.json into prepared/{source}-{hash}/, one folder for each source. One process reads and
writes; threads tokenize, since the tokenizers' libraries free Python's lock. A process that was
killed resumes from the record. Training may begin once the first segment is recorded.
"""

import collections
import contextlib
import itertools
import multiprocessing
import os
import pathlib
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import config
from config import ConfigError
from data import formats
from data.cores import usable_cores
from data.folder import alone, begin_all, check_source, read_manifest, report, validation_source
from data.order import FIRST_BORDER
from data.row_format import Encoded, row_format
from data.source import Position, Source, SourceFile
from data.writer import TokenWriter
from files import die_with_parent

BATCH_CHARACTERS = 1 << 18  # per task of a thread, rounded up to full documents
AHEAD = 3  # batches per thread that are read ahead
SYNC_SECONDS = 5.0  # between records; a killed preparation resumes from the last one
LOG_SECONDS = 10.0  # between lines of progress
MOST_WORKERS = 64  # one process that reads cannot feed more


@dataclass
class Batch:
    """Documents of a source that are tokenized together."""

    preparation: "Preparation"
    documents: list[str] = field(default_factory=list)
    position: Position = Position()  # of the source, after the last document
    share_read: float = 0.0


def prepare(cfg: config.Config, workers: int | None = None) -> None:
    """Begins missing folders of token files, checks existing ones, and completes them, side by
    side. workers: threads that tokenize. Raises ConfigError and OSError."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of ours take one core each
    with contextlib.ExitStack() as stack:
        preparations = []
        for folder, source_cfg in begin_all(cfg):
            stack.enter_context(alone(folder))
            if not (read_manifest(folder) or {}).get("complete"):
                preparation = Preparation(folder, source_cfg)
                stack.callback(preparation.writer.close)
                preparations.append(preparation)
        if preparations:
            pool = stack.enter_context(start_pool(cfg, workers or worker_count()))
            try:
                for batch, encoded in encoded_in_order(pool, interleaved(preparations)):
                    batch.preparation.write(batch, encoded)
            except ConfigError:
                for preparation in preparations:  # what came before the wrong row stays
                    preparation.writer.record(preparation.manifest["position"])
                raise


def worker_count(ranks: int = 0) -> int:
    """How many threads tokenize next to so many ranks that train on this machine."""
    return min(MOST_WORKERS, max(1, usable_cores() - ranks))


def start_pool(cfg: config.Config, workers: int) -> Executor:
    """Threads; for conversations, which Python renders, processes."""
    if not row_format(cfg.data).is_whole:
        return ThreadPoolExecutor(workers)
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, die_with_parent, (os.getpid(),))


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
    """Yields each batch with its ids. What was read before a wrong row comes before its error.
    Raises ConfigError and OSError."""
    ahead: collections.deque = collections.deque()
    problem: Exception | None = None
    workers: int = pool._max_workers  # pyrefly: ignore[missing-attribute]  # of both kinds
    while True:
        try:
            for batch in itertools.islice(batches, AHEAD * workers - len(ahead)):
                ahead.append((batch, pool.submit(batch.preparation.encode, batch.documents)))
        except (ConfigError, OSError) as error:
            problem = error
        if not ahead:
            break
        batch, future = ahead.popleft()
        try:
            yield batch, future.result()
        except BrokenProcessPool:
            raise OSError("a process that tokenizes was killed (out of memory?)") from None
    if problem:
        raise problem


class Preparation:
    """A folder whose text this process prepares: batches() are tokenized, and then given to write()
    in their order."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config):
        """Raises ConfigError and OSError."""
        self.folder = folder
        self.d = cfg.data
        self.limit = self.d.max_tokens or float("inf")  # train tokens
        self.rows = row_format(self.d)
        self.writer = TokenWriter(folder, whole_documents=self.rows.is_whole)
        self.manifest = self.writer.manifest
        self.encode = self.rows.encoder(folder)
        self.validation = validation_source(self.d)
        self.position = Position(*self.manifest["position"])
        self.last_record = time.monotonic()
        self.last_line = self.last_record
        self._compare_if_changed()

    def _compare_if_changed(self) -> None:
        """Where the file that reading stopped in has changed, as when a wrong row was mended: reads
        it again from its beginning, and compares what comes with what was written."""
        recorded = [SourceFile(*entry) for entry in self.manifest["files"]]
        file = recorded[self.position.file]
        if self.manifest["revision"] or not self.position.row or not os.path.exists(file.path):
            return
        status = os.stat(file.path)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.time):
            report(f"{file.path}: has changed; comparing what was read of it")
            changed = SourceFile(file.path, status.st_size, status.st_mtime_ns)
            self.manifest["files"][self.position.file] = changed
            position, tokens, documents = self.manifest["file_start"]
            self.position = Position(*position)
            self.writer.go_back(file.path, tokens, documents)

    def batches(self) -> Iterator[Batch]:
        """What is left to tokenize: first the text of a validation source. Each source ends with a
        batch without documents."""
        if self.validation and "validation" not in self.manifest:
            files = [SourceFile(*entry) for entry in self.manifest["validation_files"]]
            yield from self._batches(Source(self.validation, files))
        files = [SourceFile(*entry) for entry in self.manifest["files"]]
        yield from self._batches(Source(self.d, files, self.position))

    def _batches(self, source: Source) -> Iterator[Batch]:
        batch = Batch(self)
        size = 0
        problem = None
        try:
            for document in source:
                batch.documents.append(document)
                batch.position = source.position
                size += len(document)
                if size >= BATCH_CHARACTERS:
                    batch.share_read = source.share_read()
                    yield batch
                    if self.is_full():
                        return
                    batch = Batch(self)
                    size = 0
        except (ConfigError, OSError) as error:
            problem = error
        if batch.documents:
            yield batch
        if problem:
            raise problem
        yield Batch(self, position=Position(len(source.files)))

    def is_full(self) -> bool:
        """Whether data.max_tokens is reached."""
        return self.manifest["tokens"]["train"] >= self.limit

    def holds_out(self) -> bool:
        """Whether documents are held out: those of the first tokens are."""
        return not self.validation and self.manifest["tokens"]["train"] < FIRST_BORDER

    def write(self, batch: Batch, encoded: Encoded) -> None:
        """Appends a batch's documents, and records when that is due. Raises ConfigError and
        OSError."""
        if self.manifest.get("complete"):  # data.max_tokens was reached before this batch
            return
        is_validation = self.validation is not None and "validation" not in self.manifest
        is_end = not batch.documents
        is_new_file = batch.position.file != self.manifest["position"][0]
        if not is_validation and (is_new_file or "file_start" not in self.manifest):
            tokens, documents = self.manifest["tokens"], self.manifest["documents"]
            self.manifest["file_start"] = [self.manifest["position"], {**tokens}, {**documents}]
        for is_held_out, ids in encoded:
            if not ids:  # a tokenizer may produce no tokens for some texts
                self.manifest["left_out"] = self.manifest.get("left_out", 0) + 1
            elif is_validation or (is_held_out and self.holds_out()):
                self.writer.append("heldout", ids)
            elif not self.is_full():
                self.writer.append("train", ids)
        if is_end and is_validation:
            self._end_validation()
        elif is_end or self.is_full():
            self._complete()
        elif not is_validation:
            self.manifest["position"] = batch.position
            if self.writer.is_due or time.monotonic() > self.last_record + SYNC_SECONDS:
                self.writer.record(batch.position)
                self.last_record = time.monotonic()
        self._log(batch)

    def _end_validation(self) -> None:
        if self.manifest["tokens"]["heldout"] < 2:
            raise ConfigError(
                f"[data] validation = {self.d.validation}: holds nothing to evaluate on"
            )
        self.writer.decide_validation()
        self.writer.record(self.position)

    def _complete(self) -> None:
        documents = sum(self.manifest["documents"].values())
        if not documents:
            raise ConfigError(f"[data] source = {self.d.source}: holds no text")
        check_source(self.folder, self.manifest, self.d)
        self.writer.record(self.manifest["position"], is_complete=True)
        tokens = self.manifest["tokens"]
        report(
            f"prepared {self.folder}: {tokens['train']:,} tokens to train on, "
            f"{tokens['heldout']:,} for validation"
        )

    def _log(self, batch: Batch) -> None:
        if time.monotonic() > self.last_line + LOG_SECONDS:
            self.last_line = time.monotonic()
            tokens = self.manifest["tokens"]["train"]
            share = max(batch.share_read, tokens / self.limit)
            report(f"{self.d.source}: {tokens:,} tokens prepared, {share:.0%}")


def main(argv: list[str]) -> int:
    words = [word for word in argv if not word.startswith("--beside=")]
    beside = [int(word.partition("=")[2]) for word in argv if word.startswith("--beside=")]
    args, cfg = config.from_command_line(words, __doc__, tool=True)
    if beside:  # data/preparer.py
        die_with_parent()
        os.nice(19)
    try:
        cfg, _ = formats.complete(args, cfg)
        prepare(cfg, worker_count(*beside))
    except ConfigError as error:
        report(str(error))
        return 2
    except KeyboardInterrupt:
        report("stopped; the same command resumes here")
        return 130
    except OSError as error:
        report(f"{error.filename or 'data'}: {error.strerror or error}; the same command resumes")
        return 1
    return 0


if __name__ == "__main__":
    config.run_tool(main)
