"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does nothing.

    python -m data.prepare configs/tiny.toml

Writes train.bin, heldout.bin (validation), where their documents end, the tokenizer and manifest.json into
prepared/{source}-{hash}/, one for each source. The manifest is the record of how far it is: any process may resume
there, and data.order = "growing" trains on what is recorded. It has the files' hashes once all is there.
"""

import contextlib
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

import filelock

import config
import files
from config import ConfigError
from data.console import on_terminal, progress, report
from data.encode import (
    Chunk,
    Encoded,
    TokenizerCopy,
    chunks,
    encode_documents,
    encode_in_order,
    worker_count,
)
from data.folder import as_config_error, begin_all, lock_of, sha256_of, sweep
from data.identity import check_identity, open_source, validation_source
from data.record import (
    MANIFEST,
    damaged,
    is_complete,
    manifest_of,
    progress_of,
    read_manifest,
    write_manifest,
)
from data.sources import Source, local_files, source_files
from data.writer import Overtaken, TokenWriter, segment_hashes

# of each source its folder, and what it is prepared for
Parts = Sequence[tuple[pathlib.Path, config.Config]]

SYNC_SECONDS = 5.0  # between records; a killed preparation resumes from the last one
LOG_SECONDS = 10.0  # between progress lines if stderr is not a terminal
POLL_SECONDS = 0.2  # between looks at a folder that another process prepares
HOLDER_SECONDS = 60.0  # a process that records nothing for so long is no longer waited for
SMALL = 1 << 22  # bytes of text that is prepared before a run starts, also if it is growing


def prepare(cfg: config.Config, whole: bool = False) -> list[pathlib.Path]:
    """Begins missing folders of token files, checks existing ones, and completes them. Returns them, by source. Raises
    ConfigError. whole: also what data.order = "growing" would leave to the run."""
    parts = begin_all(cfg)
    growing = cfg.data.order == "growing" and not whole
    due = [part for part in parts if not growing or is_small(part[1].data.source)]
    with as_config_error(parts[0][0]):
        prepare_text(due, worker_count())
    return [folder for folder, _ in parts]


def is_small(source: str) -> bool:
    """Whether text takes a second or two to prepare: too little to train on is refused before ranks start."""
    if not local_files(source):
        return False
    return sum(file.size for file in source_files(source)) <= SMALL


def prepare_text(parts: Parts, workers: int) -> None:
    """Completes begun folders, side by side. What another process prepares is waited for as long as that one records
    something. workers: processes that tokenize. Raises ConfigError and OSError."""
    turns = {folder: Turn(folder) for folder, _ in parts}
    while True:
        left = [part for part in parts if not is_complete(read_manifest(part[0]))]
        if not left:
            return
        with contextlib.ExitStack() as locks:
            ours = [part for part in left if turns[part[0]].has_come(locks)]
            try:
                if ours:
                    _prepare_together(ours, workers)
            except Overtaken as error:
                report(str(error))
                for folder, _ in ours:
                    turns[folder].pass_on()
                continue
        if not ours:
            time.sleep(POLL_SECONDS)


class Turn:
    """Whose turn it is to prepare a folder: of the process that has its lock or, where that one stands still or locks
    don't exist, of the process that records first."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.waits = False  # for another process
        self.was_overtaken = False  # by it, perhaps since there are no locks
        self.seen: tuple[bool, int] | None = None  # its last record
        self.since = 0.0  # when that was seen first

    def has_come(self, locks: contextlib.ExitStack) -> bool:
        """Whether this process may write. locks: takes the folder's lock. Raises ConfigError and OSError."""
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ConfigError(
                f"{self.folder}: another process removed it, since its text is wrong (that "
                "process has said where) or to begin anew; start again"
            )
        if not self.waits and self._take_lock(locks):
            return True
        holder = manifest.get("writer", "another process")
        if not self.waits:
            report(f"waiting for another process that prepares {self.folder}: {holder}")
            self.waits = True
        if progress_of(manifest) != self.seen:
            self.seen, self.since = progress_of(manifest), time.monotonic()
        elif time.monotonic() > self.since + HOLDER_SECONDS:
            report(f"{holder} has not recorded anything for {HOLDER_SECONDS:.0f} s")
            report(f"preparing {self.folder} too")
            return True
        return not self.was_overtaken and self._take_lock(locks)

    def _take_lock(self, locks: contextlib.ExitStack) -> bool:
        try:
            locks.callback(files.lock(lock_of(self.folder)).release)
        except filelock.Timeout:
            return False
        return True

    def pass_on(self) -> None:
        """Waits for the process that has recorded more."""
        self.waits = self.was_overtaken = True
        self.seen = None


def _prepare_together(parts: Parts, workers: int) -> None:
    preparations: list[Preparation] = []
    folder = parts[0][0]
    try:
        for folder, cfg in parts:
            if not is_complete(read_manifest(folder)):  # since the look before the lock
                preparations.append(Preparation(folder, cfg))
        for chunk, encoded in encode_in_order(_in_turn(preparations), workers):
            preparation: Preparation = chunk.target
            folder = preparation.folder
            preparation.write(chunk, encoded)
    except ConfigError:
        for preparation in preparations:
            preparation.keep()
        for folder, cfg in parts:
            manifest = read_manifest(folder)
            if manifest and any(manifest["documents"].values()) and not is_complete(manifest):
                report(f"what was read of {cfg.data.source} stays; the same command resumes here")
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


def _in_turn(preparations: "list[Preparation]") -> Iterator[Chunk]:
    """The chunks of all folders: the next is of that of which the least was read."""
    left = {preparation: preparation.chunks() for preparation in preparations}
    read = dict.fromkeys(preparations, 0)  # characters
    while left:
        preparation = min(left, key=lambda each: read[each])
        chunk = next(left[preparation], None)
        if chunk is None:
            del left[preparation]
            continue
        read[preparation] += sum(map(len, chunk.documents))
        yield chunk


class Preparation:
    """A folder whose text this process prepares."""

    def __init__(self, folder: pathlib.Path, cfg: config.Config):
        """Raises ConfigError, also if text that was read has changed since, and OSError."""
        self.folder, self.d = folder, cfg.data
        self.limit = self.d.max_tokens or float("inf")
        sweep(folder)
        self.writer = TokenWriter(
            folder, self.d.order == "growing", whole_documents=bool(self.d.messages_field)
        )
        self.manifest = self.writer.manifest
        check_identity(folder, self.manifest, cfg)
        self.validation = validation_source(self.d)
        self.encode = self._encoder()
        self.source = self._open(self.d, "")
        self.tokens_before = sum(self.manifest["tokens"].values())
        if documents := sum(self.manifest["documents"].values()):
            report(f"resuming after {documents:,} documents of {self.d.source}")
        self.began = self.last_record = self.last_line = time.monotonic()

    def _open(self, d: config.Data, prefix: str) -> Source:
        """A source where the record ends. prefix: of its entries in the manifest."""
        known = {
            "files": self.manifest.get(f"{prefix}files"),
            "revision": self.manifest.get("revision"),
        }
        source = open_source(d, self.manifest.get(f"{prefix}place"), known)
        source.compare_with_text(self.folder)
        return source

    def _encoder(self) -> Callable[[list[str]], Encoded]:
        typecode = "H" if self.manifest["dtype"] == "uint16" else "i"
        template = self.manifest["identity"].get("chat_template")
        copy = TokenizerCopy(self.manifest["tokenizer"], template, self.folder)
        if self.d.messages_field:
            from extras.chat.conversations import encode_conversations

            return functools.partial(encode_conversations, copy, typecode)
        return functools.partial(encode_documents, copy, typecode)

    def chunks(self) -> Iterator[Chunk]:
        """What is left to tokenize: the validation text of one's own first."""
        if self.validation and not self.writer.has_validation:
            yield from chunks(self._open(self.validation, "validation_"), self.encode, self)
        if self.manifest.get("ended"):
            yield Chunk([], self.encode, self, self.source, is_last=True)
            return
        for chunk in chunks(self.source, self.encode, self):
            yield chunk
            if self.is_full():
                yield Chunk([], self.encode, self, self.source, is_last=True)
                return

    def reads_validation(self) -> bool:
        """Whether what is written is the validation text of one's own."""
        return self.validation is not None and not self.writer.has_validation

    def is_full(self) -> bool:
        return self.manifest["tokens"]["train"] >= self.limit

    def write(self, chunk: Chunk, encoded: Encoded) -> None:
        """Appends a chunk's documents, records when that is due, and completes the folder after the last. Raises
        ConfigError, Overtaken and OSError."""
        if is_complete(self.manifest):  # data.max_tokens was reached before this chunk
            return
        if time.monotonic() > self.last_record + SYNC_SECONDS:  # this process may have been stopped
            self.writer.check_record()
        if chunk.problem and not self.is_full():
            raise chunk.problem
        if chunk.is_last and self.reads_validation():
            self.writer.decide_validation()
        elif chunk.is_last:
            self.complete()
        else:
            self._append(chunk, encoded)

    def _append(self, chunk: Chunk, encoded: Encoded) -> None:
        for is_held_out, ids in encoded:
            if not ids:  # a tokenizer may produce no tokens for some texts
                self.manifest["left_out"] = self.manifest.get("left_out", 0) + 1
            elif self.reads_validation():
                self.writer.append("heldout", ids)
            elif not self.is_full():
                for_validation = is_held_out and not self.writer.has_validation
                self.writer.append("heldout" if for_validation else "train", ids)
        prefix = "validation_" if self.reads_validation() else ""
        self.manifest[f"{prefix}place"] = chunk.resume_state
        self.manifest[f"{prefix}files"] = chunk.source.files_to_record()
        self._show(chunk.fraction_read)
        if self.writer.is_due or time.monotonic() > self.last_record + SYNC_SECONDS:
            self.writer.record()
            self.last_record = time.monotonic()
            chunk.source.on_recorded(chunk.resume_state)

    def _show(self, share: float | None) -> None:
        """A line of progress, now and then."""
        now = time.monotonic()
        if now < self.last_line + (0.5 if on_terminal() else LOG_SECONDS):
            return
        done = max(share or 0.0, min(1.0, self.manifest["tokens"]["train"] / self.limit))
        name, seconds = self.d.source[-24:], now - self.began
        report(progress(name, self.manifest, done, self.tokens_before, seconds), stays=False)
        self.last_line = now

    def keep(self) -> None:
        """After wrong input: records what came before it. Of a folder without a document nothing is left, unless a run
        may be waiting for it."""
        if any(self.manifest["documents"].values()):
            with contextlib.suppress(Overtaken):
                self.writer.record()
        elif self.d.order == "global" and not any(manifest_of(self.folder)["documents"].values()):
            shutil.rmtree(self.folder, ignore_errors=True)

    def complete(self) -> None:
        """Records the end of the text, then hashes all files: with their hashes the manifest is complete. Raises
        ConfigError if the text, or what was written of it, has changed meanwhile."""
        self.source.compare_with_text(self.folder, refuse_new=False)
        if not self.manifest.get("ended"):
            self.writer.end()
        hashes, train = segment_hashes(self.folder, self.manifest)
        if hashes != self.manifest["segments"]:
            raise damaged(self.folder / "train.bin", "was changed while it was prepared")
        names = sorted(path.name for path in self.folder.glob("[!.]*"))
        sha256 = {
            name: train if name == "train.bin" else sha256_of(self.folder / name)
            for name in names
            if name != MANIFEST
        }
        self.writer.check_record()
        for key in ("ended", "writer"):
            self.manifest.pop(key, None)
        self.manifest["files"] = self.source.files_to_record()
        if self.manifest["files"] is None:
            # a place of `datasets`, perhaps, which nobody reads again
            for key in ("files", "place", "validation_files", "validation_place"):
                self.manifest.pop(key, None)
        self.manifest["sha256"] = sha256
        write_manifest(self.folder, self.manifest, indent=2)
        tokens = self.manifest["tokens"]
        report(
            f"prepared {self.folder}: {tokens['train']:,} tokens to train on, "
            f"{tokens['heldout']:,} for validation"
        )


def main(argv: list[str]) -> int:
    _, cfg = config.from_command_line(argv, __doc__, tool=True)
    try:
        prepare(cfg, whole=True)
    except KeyboardInterrupt:
        report("stopped; the same command resumes here")
        return 130
    return 0


if __name__ == "__main__":
    config.run_tool(main)
