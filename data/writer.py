"""Appends documents to a folder's token files, and records how far they are synced: what a reader
may read, and where a killed preparation resumes.

Writers can't hurt each other, even where locks don't exist. Each begins at the record, and the
bytes after it are a function of the text, so two writers write equal bytes. A writer that finds a
record ahead of its own gives up before it writes.
"""

import bisect
import hashlib
import os
import pathlib
from typing import Any

import files
from config import ConfigError
from data import record
from data.record import damaged, holds_out_documents, manifest_of, progress_of, write_manifest
from data.tokens import END_BYTES, WIDTH

BUFFER = 1 << 20  # bytes of a file that wait to be written
READ_BYTES = 1 << 24  # of a file that is hashed, at a time
SPLITS = ("train", "heldout")


class Overtaken(Exception):
    """Another process has recorded more of a folder, or has begun the folder anew: what this one
    would write may be wrong."""

    def __init__(self, folder: pathlib.Path, problem: str):
        super().__init__(f"{folder}: {problem}")
        self.folder = folder


class TokenWriter:
    """Writes a folder's token files from its record on.

    train.bin, heldout.bin: ids. *.ends.bin: for each document, the position after its last token,
    8 bytes little-endian. `tokens` and `documents` are the manifest's own dictionaries: append()
    counts in the manifest, record() writes it.
    """

    def __init__(self, folder: pathlib.Path, growing: bool, whole_documents: bool = False):
        """growing: the first tokens decide what is held out. whole_documents: no document is held
        out in part. Raises ConfigError and OSError."""
        self.folder = folder
        # the folder itself, even if its path leads to another one by now
        self.handle = os.open(folder, os.O_RDONLY)
        self.growing = growing
        self.whole_documents = whole_documents
        self.manifest = manifest_of(folder)
        self.recorded = progress_of(self.manifest)  # by this process, or before it
        self.width = WIDTH[self.manifest["dtype"]]
        self.tokens: dict[str, int] = self.manifest["tokens"]  # by split
        self.documents: dict[str, int] = self.manifest["documents"]  # by split
        self.is_due = False  # a reader may be waiting for what was appended
        self.bin: dict[str, TokenFile] = {}
        self.ends: dict[str, TokenFile] = {}
        for split in SPLITS:
            ends_size = END_BYTES * self.documents[split]
            self.bin[split] = TokenFile(folder / f"{split}.bin", self.width * self.tokens[split])
            self.ends[split] = TokenFile(folder / f"{split}.ends.bin", ends_size)
        self.files = [*self.bin.values(), *self.ends.values()]
        # the segment that is being written
        segments = len(self.manifest["segments"])
        self.next_border = record.border_of(segments)
        self.segment_hash = hashlib.sha256()  # of train.bin, from the last border on
        if not self.manifest.get("ended"):
            last_border = record.border_of(segments - 1) if segments else 0
            begin = self.width * last_border
            end = self.width * self.tokens["train"]
            self.bin["train"].hash_into(self.segment_hash, begin, end)

    def close(self) -> None:
        os.close(self.handle)
        for file in self.files:
            os.close(file.handle)

    @property
    def has_validation(self) -> bool:
        """Whether it is decided what the validation text is: all that follows is trained on."""
        return "validation" in self.manifest

    def append(self, split: str, ids: bytes) -> None:
        """Adds a document. ids: in the width of the folder's dtype."""
        if split == "train":
            self._hash(ids)
        self.bin[split].append(ids)
        self.tokens[split] += len(ids) // self.width
        self.documents[split] += 1
        self.ends[split].append(self.tokens[split].to_bytes(END_BYTES, "little"))
        is_beyond = self.growing and self.tokens["train"] >= record.HOLD_OUT_BEFORE
        if is_beyond and not self.has_validation:
            self.decide_validation()

    def _hash(self, ids: bytes) -> None:
        """Adds tokens to the segment's hash; at a border, lists it and begins the next."""
        position = self.tokens["train"]
        while position + len(ids) // self.width >= self.next_border:
            size = (self.next_border - position) * self.width
            self.segment_hash.update(ids[:size])
            self.manifest["segments"].append(self.segment_hash.hexdigest())
            self.segment_hash = hashlib.sha256()
            position = self.next_border
            ids = ids[size:]
            self.next_border = record.border_of(len(self.manifest["segments"]))
            self.is_due = True
        self.segment_hash.update(ids)

    def decide_validation(self) -> None:
        """Holds out what is in heldout.bin. If no document is held out, holds out the last
        hundredth of the first tokens: of conversations, the last ones in these tokens."""
        if holds_out_documents(self.manifest):
            split = "heldout"
            first = 0
            end = self.tokens["heldout"]
        else:
            split = "train"
            end = min(record.FIRST_BORDER, self.tokens["train"])
            first = max(0, end - max(2, end // 100))
            if self.whole_documents:
                first, end = self._document_borders(first, end)
        digest = hashlib.sha256()
        self.bin[split].hash_into(digest, first * self.width, end * self.width)
        self.manifest["validation"] = [split, first, end]
        self.manifest["validation_hash"] = digest.hexdigest()
        self.is_due = True

    def _document_borders(self, first: int, end: int) -> tuple[int, int]:
        """The range of documents that end in tokens first ... end."""
        borders = [0, *self.ends["train"].integers()]
        last = bisect.bisect_right(borders, end) - 1
        before = bisect.bisect_right(borders, first) - 1
        before = min(before, max(0, last - 1))  # at least one document, if there is one
        return borders[before], borders[last]

    def end(self) -> None:
        """Ends the text, and records that. Raises Overtaken and OSError."""
        self.check_record()
        if not self.has_validation:
            self.decide_validation()
        self.manifest["segments"].append(self.segment_hash.hexdigest())
        self.manifest["ended"] = True
        for file in self.files:
            file.cut_rest()  # of an attempt that wrote text that was mended since
        self.record()

    def check_record(self) -> None:
        """Raises Overtaken if another process has begun the folder anew, or recorded more than this
        one."""
        for file in self.files:
            if not file.is_in_place():
                problem = f"{file.path.name} was deleted or replaced while it was written"
                raise Overtaken(self.folder, problem)
        manifest = manifest_of(self.folder)
        for key in ("identity", "tokenizer"):
            if manifest.get(key) != self.manifest.get(key):
                raise Overtaken(self.folder, "was begun anew while it was written")
        if progress_of(manifest) > self.recorded:
            writer = manifest.get("writer", "another process")
            raise Overtaken(self.folder, f"{writer} has prepared more of it")

    def record(self) -> None:
        """Syncs the files, then says so in the manifest. Raises Overtaken and OSError."""
        self.check_record()
        for file in self.files:
            file.sync()
        self.check_record()  # again: a sync may take long, and no record is ever lowered
        self.manifest["writer"] = files.process_name()
        self.write_manifest()
        self.recorded = progress_of(self.manifest)
        self.is_due = False

    def write_manifest(self, indent: int | None = None) -> None:
        """Replaces the manifest in the folder that is open. One that was begun anew at its path, even
        after check_record(), is left alone. Raises Overtaken and OSError."""
        try:
            write_manifest(self.folder, self.manifest, indent, self.handle)
        except FileNotFoundError:
            problem = "was deleted or replaced while it was written"
            raise Overtaken(self.folder, problem) from None


class TokenFile:
    """A file that is written from an offset on, and never cut below what was recorded."""

    def __init__(self, path: pathlib.Path, size: int):
        """size: recorded bytes. Raises ConfigError if the file has fewer."""
        self.path = path
        self.size = size  # bytes that are recorded or written; `pending` follows
        self.pending = bytearray()
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._check_size(size)
        except ConfigError:
            os.close(self.handle)
            raise

    def _check_size(self, size: int) -> None:
        """Raises ConfigError if the file has fewer bytes than that."""
        size_on_disk = os.fstat(self.handle).st_size
        if size_on_disk < size:
            raise damaged(
                self.path,
                f"has {size_on_disk} bytes, of {size} that were written: it was cut or changed",
            )

    def append(self, raw: bytes) -> None:
        self.pending += raw
        if len(self.pending) >= BUFFER:
            self.write()

    def write(self) -> None:
        """Writes what is pending. Raises ConfigError if the file was cut, which the next bytes would hide
        behind zeros, and OSError, of a full disk too."""
        self._check_size(self.size)
        while self.pending:
            written = os.pwrite(self.handle, self.pending, self.size)
            self.size += written
            del self.pending[:written]

    def sync(self) -> None:
        self.write()
        files.sync_handle(self.handle)

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that is open."""
        try:
            at_path = self.path.stat()
            is_open = os.fstat(self.handle)
        except OSError:
            return False
        return os.path.samestat(at_path, is_open)

    def cut_rest(self) -> None:
        """Ends the file where writing ended."""
        self.write()
        os.ftruncate(self.handle, self.size)

    def hash_into(self, digest: Any, begin: int, end: int) -> None:
        """Adds bytes begin ... end-1 to a hash of hashlib."""
        self.write()
        offset = begin
        while block := os.pread(self.handle, min(READ_BYTES, end - offset), offset):
            digest.update(block)
            offset += len(block)

    def integers(self) -> list[int]:
        """The numbers in it, of END_BYTES each."""
        self.write()
        raw = os.pread(self.handle, self.size, 0)
        offsets = range(0, self.size, END_BYTES)
        return [int.from_bytes(raw[i : i + END_BYTES], "little") for i in offsets]


def segment_hashes(folder: pathlib.Path, manifest: dict) -> tuple[list[str], str]:
    """(the SHA-256 of each segment of train.bin, that of the file), of an ended text as it is on
    disk."""
    width = WIDTH[manifest["dtype"]]
    tokens = manifest["tokens"]["train"]
    file_hash = hashlib.sha256()
    hashes = []
    with (folder / "train.bin").open("rb") as file:
        position = 0  # tokens
        for segment in range(len(manifest["segments"])):
            segment_hash = hashlib.sha256()
            border = min(tokens, record.border_of(segment))
            while position < border:
                block = file.read(min(READ_BYTES, (border - position) * width))
                if not block:
                    break
                file_hash.update(block)
                segment_hash.update(block)
                position += len(block) // width
            hashes.append(segment_hash.hexdigest())
    return hashes, file_hash.hexdigest()
