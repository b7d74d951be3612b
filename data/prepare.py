"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does
nothing.

    python -m data.prepare configs/tiny.toml
    python -m data.prepare CONFIG --fetch-only

Writes train.bin, heldout.bin (validation), where their documents end, the tokenizer and
manifest.json into prepared/{source}-{hash}/, one folder for each source. The manifest is the record
of how far the folder is prepared: any process may resume there, and data.order = "growing" trains
on what is recorded. Once all text is prepared, it has the files' hashes.

--fetch-only only fetches what the run reads from the Hugging Face hub, into HF_HOME: for machines
without a network. See data/fetch.py.
"""

import contextlib
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import filelock

import config
import files
from config import ConfigError
from data import formats
from data.console import on_terminal, progress, report
from data.encode import (
    Chunk,
    Encoded,
    chunks,
    encode_in_order,
    encoder,
    worker_count,
)
from data.fetch import fetch_all
from data.folder import as_config_error, begin_all, lock_of, sha256_of, sweep
from data.identity import check_identity, open_recorded, validation_source
from data.local_files import local_files, source_files
from data.record import (
    MANIFEST,
    damaged,
    holds_out_documents,
    is_complete,
    manifest_of,
    read_manifest,
    stamp_of,
)
from data.sources import FIRST_PROBLEMS, MOST_PROBLEMS, FilesState, Source
from data.writer import Overtaken, TokenWriter, segment_hashes

# as source_folders() of data/folder.py returns them
SourceFolders = Sequence[tuple[pathlib.Path, config.Config]]

SYNC_SECONDS = 5.0  # between records; a killed preparation resumes from the last one
LOG_SECONDS = 10.0  # between progress lines if stderr is not a terminal
REDRAW_SECONDS = 0.5  # between them on a terminal
POLL_SECONDS = 0.2  # between looks at a folder that another process prepares
HOLDER_SECONDS = 60.0  # a process that records nothing for so long is no longer waited for
SMALL = 1 << 22  # bytes of text that is prepared before a run starts, also if it is growing


def prepare(cfg: config.Config, whole: bool = False) -> list[pathlib.Path]:
    """Begins missing folders of token files, checks existing ones, and completes them.

    whole: completes growing text too, which is otherwise left to the run. Returns the folders, by
    source. Raises ConfigError.
    """
    sources = begin_all(cfg)
    is_left_to_run = cfg.data.order == "growing" and not whole
    to_complete = []
    for folder, source_cfg in sources:
        if not is_left_to_run or is_small(source_cfg.data):
            to_complete.append((folder, source_cfg))
    first_folder, _ = sources[0]
    with as_config_error(first_folder):
        prepare_text(to_complete, worker_count())
    return [folder for folder, _ in sources]


def is_small(d: config.Data) -> bool:
    """Whether text takes a second or two to prepare. It is prepared before ranks start, so that too
    little to train on is refused by then."""
    if not local_files(d.source, d.split):
        return False
    return sum(file.size for file in source_files(d.source, d.split)) <= SMALL


def prepare_text(sources: SourceFolders, workers: int) -> None:
    """Completes begun folders, side by side.

    A folder that another process prepares is left to it as long as it records something. workers:
    processes that tokenize. Raises ConfigError and OSError.
    """
    turns = {folder: Turn(folder) for folder, _ in sources}
    while True:
        incomplete = []
        for folder, cfg in sources:
            if not is_complete(read_manifest(folder)):
                incomplete.append((folder, cfg))
        if not incomplete:
            return
        with contextlib.ExitStack() as locks:
            ours = []
            for folder, cfg in incomplete:
                if turns[folder].has_come(locks):
                    ours.append((folder, cfg))
            try:
                if ours:
                    _prepare_together(ours, workers)
            except Overtaken as error:
                report(str(error))
                turns[error.folder].leave_to_other()
        if not ours:
            time.sleep(POLL_SECONDS)


class Turn:
    """Whose turn it is to prepare a folder: the process that has its lock. Where that process
    records nothing for HOLDER_SECONDS or locks don't exist, the one that records first."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.is_waiting = False  # for another process
        self.was_overtaken = False  # by it, perhaps since there are no locks
        self.last_stamp: tuple[int, ...] | None = None  # of its record
        self.record_time = 0.0  # when that was seen first

    def has_come(self, locks: contextlib.ExitStack) -> bool:
        """Whether this process may write. locks: holds the folder's lock, if it can be had. Raises
        ConfigError and OSError."""
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ConfigError(
                f"{self.folder}: another process removed it, since its text is wrong (that "
                "process has said where) or to begin anew; start again"
            )
        if not self.is_waiting and self._take_lock(locks):
            return True
        writer = manifest.get("writer", "another process")
        if not self.is_waiting:
            report(f"waiting for another process that prepares {self.folder}: {writer}")
            self.is_waiting = True
        stamp = stamp_of(self.folder)
        if stamp != self.last_stamp:
            self.last_stamp = stamp
            self.record_time = time.monotonic()
        elif time.monotonic() > self.record_time + HOLDER_SECONDS:
            report(f"{writer} has not recorded anything for {HOLDER_SECONDS:.0f} s")
            report(f"preparing {self.folder} too")
            return True
        return not self.was_overtaken and self._take_lock(locks)

    def _take_lock(self, locks: contextlib.ExitStack) -> bool:
        try:
            lock = files.lock(lock_of(self.folder))
        except filelock.Timeout:
            return False
        locks.callback(lock.release)
        return True

    def leave_to_other(self) -> None:
        """Notes that another process has recorded more: this one waits for it from now on."""
        self.is_waiting = True
        self.was_overtaken = True
        self.last_stamp = None


def _prepare_together(sources: SourceFolders, workers: int) -> None:
    """prepare_text() of folders whose turn has come. Raises Overtaken, too."""
    preparations: list[Preparation] = []
    folder = sources[0][0]
    try:
        for folder, cfg in sources:
            if not is_complete(read_manifest(folder)):  # since the look before the lock
                preparations.append(Preparation(folder, cfg))
        for chunk, encoded in encode_in_order(_interleave(preparations), workers):
            preparation: Preparation = chunk.target
            folder = preparation.folder
            preparation.write(chunk, encoded)
    except ConfigError:
        _keep(preparations, sources)
        raise
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise
    finally:
        for preparation in preparations:
            preparation.writer.close()
        if preparations and on_terminal():
            report("", stays=False)  # clears the line of progress


def _keep(preparations: "list[Preparation]", sources: SourceFolders) -> None:
    """After wrong input: records what was read before it."""
    for preparation in preparations:
        preparation.keep()
    for folder, cfg in sources:
        manifest = read_manifest(folder)
        if manifest and any(manifest["documents"].values()) and not is_complete(manifest):
            report(f"what was read of {cfg.data.source} stays; the same command resumes here")


def _interleave(preparations: "list[Preparation]") -> Iterator[Chunk]:
    """The chunks of all folders: the next is of the folder of which the least was read."""
    readers = {preparation: preparation.chunks() for preparation in preparations}
    characters = dict.fromkeys(preparations, 0)  # read of each
    while readers:
        preparation = min(readers, key=lambda each: characters[each])
        chunk = next(readers[preparation], None)
        if chunk is None:
            del readers[preparation]
            continue
        characters[preparation] += sum(map(len, chunk.documents))
        yield chunk


class WrongRows:
    """The problems of a source's rows, which are collected up to the end of the file that has the
    first one. From that on nothing is written."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.first_state: Any = None  # of the source, after the chunk with the first problem
        self.has_good_row = False  # before a wrong one, or among them
        self.is_enough = False

    def add(self, chunk: Chunk, error: ConfigError, is_cut: bool) -> None:
        """is_cut: the rows behind those of the error were not looked at."""
        if not self.problems:
            self.first_state = chunk.resume_state
        if set(error.problems) <= set(self.problems):
            # it names no row, such as a tokenizer's: each chunk would have it
            self.is_enough = True
            return
        self.problems += error.problems
        limit = MOST_PROBLEMS if self.has_good_row else FIRST_PROBLEMS
        self.is_enough = is_cut or len(self.problems) > limit
        if self.is_enough and not chunk.is_last:  # a source ends its own list
            listed = self.problems[:limit]
            end = f"the list ends here, after {len(listed):,} wrong rows; more may follow"
            self.problems = [*listed, end]

    def raise_after(self, chunk: Chunk) -> None:
        """Raises ConfigError unless more wrong rows may follow in the same file."""
        state = chunk.resume_state
        is_in_file = isinstance(state, FilesState) and state.file == self.first_state.file
        if chunk.is_last or self.is_enough or not is_in_file:
            raise ConfigError(*self.problems)


class Preparation:
    """A folder whose text this process prepares: chunks() are tokenized, and then given to write()
    in their order."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config):
        """Raises ConfigError, also if text that was read has changed since, and OSError."""
        self.folder = folder
        self.d = cfg.data
        self.limit = self.d.max_tokens or float("inf")  # train tokens
        sweep(folder)
        is_growing = self.d.order == "growing"
        self.writer = TokenWriter(
            folder, growing=is_growing, whole_documents=self.d.has_conversations
        )
        self.manifest = self.writer.manifest
        check_identity(folder, self.manifest, cfg)
        self.validation = validation_source(self.d)  # the options of a validation source, or None
        self.encode = encoder(folder, self.manifest, self.d)
        self.wrong_rows = WrongRows()
        self.last_record = time.monotonic()
        self.source = self._open(self.d, "")
        documents = sum(self.manifest["documents"].values())
        if documents:
            report(f"resuming after {documents:,} documents of {self.d.source}")
        # for the line of progress
        self.tokens_before = sum(self.manifest["tokens"].values())
        self.began = time.monotonic()
        self.last_line = self.began

    def _open(self, d: config.Data, prefix: str) -> Source:
        """A source where the record ends. prefix: of its entries in the manifest."""
        source = open_recorded(d, self.manifest, prefix)
        for _ in source.compare_with_text(self.folder):
            if self._sync_is_due():
                # to compare terabytes that were only copied takes hours: others see that this
                # process goes on, and the next one begins at the file that was not yet compared
                self._note_place(source, source.resume_state(), prefix)
                self._record()
        return source

    def chunks(self) -> Iterator[Chunk]:
        """What is left to tokenize: first the text of a validation source."""
        if self.validation and self.reads_validation():
            yield from chunks(self._open(self.validation, "validation_"), self.encode, self)
        last_chunk = Chunk([], self.encode, self, self.source, is_last=True)
        if self.manifest.get("ended"):
            yield last_chunk
            return
        for chunk in chunks(self.source, self.encode, self):
            yield chunk
            if self.is_full():
                yield last_chunk
                return

    def reads_validation(self) -> bool:
        """Whether the text that is written next is that of a validation source."""
        return self.validation is not None and not self.writer.has_validation

    def is_full(self) -> bool:
        """Whether data.max_tokens is reached."""
        return self.manifest["tokens"]["train"] >= self.limit

    def write(self, chunk: Chunk, encoded: Encoded) -> None:
        """Appends a chunk's documents, records when that is due, and completes the folder after the
        last. Raises ConfigError, Overtaken and OSError."""
        if is_complete(self.manifest):  # data.max_tokens was reached before this chunk
            return
        if chunk.problem or self._sync_is_due():
            # this process may have been stopped for long: it does not write what another process
            # has completed, and what is wrong may be in another folder
            self.writer.check_record()
        if chunk.problem and not self.is_full():
            self._note_problem(chunk, chunk.problem)
        if self.wrong_rows.problems:
            self.wrong_rows.has_good_row |= bool(encoded)
            self.wrong_rows.raise_after(chunk)
        elif chunk.is_last and self.reads_validation():
            self._decide_validation()
        elif chunk.is_last:
            self.complete()
        else:
            self._append(encoded)
            self._note_progress(chunk)

    def _note_problem(self, chunk: Chunk, problem: ConfigError) -> None:
        has_good = any(self.manifest["documents"].values())
        is_cut = False
        if self.d.has_conversations:
            from extras.chat.conversations import WrongConversations

            if isinstance(problem, WrongConversations):
                has_good |= problem.has_good
                is_cut = problem.is_cut
        self.wrong_rows.has_good_row |= has_good
        self.wrong_rows.add(chunk, problem, is_cut)

    def _decide_validation(self) -> None:
        """After the text of a validation source. Raises ConfigError if nothing of it has a loss."""
        if not holds_out_documents(self.manifest):
            raise ConfigError(
                f"[data] validation = {self.d.validation}: holds nothing to evaluate on; "
                f"{self.manifest.get('left_out', 0):,} of its rows were left out"
            )
        self.writer.decide_validation()

    def _sync_is_due(self) -> bool:
        return time.monotonic() > self.last_record + SYNC_SECONDS

    def _append(self, encoded: Encoded) -> None:
        for is_held_out, ids in encoded:
            if not ids:  # a tokenizer may produce no tokens for some texts
                self.manifest["left_out"] = self.manifest.get("left_out", 0) + 1
            elif self.reads_validation():
                self.writer.append("heldout", ids)
            elif self.is_full():
                continue
            elif is_held_out and not self.writer.has_validation:
                self.writer.append("heldout", ids)
            else:
                self.writer.append("train", ids)

    def _note_progress(self, chunk: Chunk) -> None:
        """After a chunk was appended: notes where to resume, and records that if it is due."""
        prefix = "validation_" if self.reads_validation() else ""
        self._note_place(chunk.source, chunk.resume_state, prefix)
        self._log_progress(chunk.fraction_read)
        if self.writer.is_due or self._sync_is_due():
            self._record()
            chunk.source.on_recorded(chunk.resume_state)

    def _note_place(self, source: Source, state: Any, prefix: str) -> None:
        """Has the manifest say where to resume. prefix: of the source's entries in it."""
        self.manifest[f"{prefix}place"] = state
        self.manifest[f"{prefix}files"] = source.files_to_record()

    def _record(self) -> None:
        self.writer.record()
        self.last_record = time.monotonic()

    def _log_progress(self, share: float | None) -> None:
        """A line of progress, now and then. share: of the source that is read; None if unknown."""
        now = time.monotonic()
        pause = REDRAW_SECONDS if on_terminal() else LOG_SECONDS
        if now < self.last_line + pause:
            return
        share_of_limit = min(1.0, self.manifest["tokens"]["train"] / self.limit)
        done = max(share or 0.0, share_of_limit)
        name = self.d.source[-24:]
        line = progress(name, self.manifest, done, self.tokens_before, now - self.began)
        report(line, stays=False)
        self.last_line = now

    def keep(self) -> None:
        """After wrong input: records what came before it. A folder without a document is removed,
        unless a run may be waiting for it."""
        if any(self.manifest["documents"].values()):
            with contextlib.suppress(Overtaken):
                self.writer.record()
        elif self.d.order == "global" and not any(manifest_of(self.folder)["documents"].values()):
            shutil.rmtree(self.folder, ignore_errors=True)

    def complete(self) -> None:
        """Records the end of the text, then hashes all files: with their hashes the manifest is
        complete. Raises ConfigError if the text, or a file that was written, has changed since."""
        for _ in self.source.compare_with_text(self.folder, refuse_new=False):
            pass
        if not self.manifest.get("ended"):
            self.writer.end()
        sha256 = self._hash_files()
        self.writer.check_record()
        for key in ("ended", "writer"):
            self.manifest.pop(key, None)
        self.manifest["files"] = self.source.files_to_record()
        if self.manifest["files"] is None:
            # the resume state is of `datasets`, perhaps, and nobody reads it again
            for key in ("files", "place", "validation_files", "validation_place"):
                self.manifest.pop(key, None)
        self.manifest["sha256"] = sha256
        self.writer.write_manifest(indent=2)
        tokens = self.manifest["tokens"]
        report(
            f"prepared {self.folder}: {tokens['train']:,} tokens to train on, "
            f"{tokens['heldout']:,} for validation"
        )

    def _hash_files(self) -> dict[str, str]:
        """The SHA-256 of each file but the manifest, by name. Raises ConfigError if a segment is
        not as it was written."""
        segments, train_hash = segment_hashes(self.folder, self.manifest)
        if segments != self.manifest["segments"]:
            raise damaged(self.folder / "train.bin", "was changed while it was prepared")
        hashes = {}
        for path in sorted(self.folder.glob("[!.]*")):
            if path.name == "train.bin":
                hashes[path.name] = train_hash
            elif path.name != MANIFEST:
                hashes[path.name] = sha256_of(path)
        return hashes


def main(argv: list[str]) -> int:
    words = [word for word in argv if word != "--fetch-only"]
    args, cfg = config.from_command_line(words, __doc__, tool=True)
    cfg, _ = formats.complete(args, cfg)
    try:
        if "--fetch-only" in argv:
            fetch_all(cfg)
        else:
            prepare(cfg, whole=True)
    except KeyboardInterrupt:
        report("stopped; the same command resumes here")
        return 130
    return 0


if __name__ == "__main__":
    config.run_tool(main)
