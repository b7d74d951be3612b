"""Appends documents to a folder's token files, and records how far they are synced: what a reader may read, and where a
killed preparation resumes.

Writers can't hurt each other, also where locks don't exist. Each begins at the record, and what stands behind it is a
function of the text, so two write equal bytes. One that finds a record ahead of its own gives up before it writes.
"""

import bisect
import hashlib
import os
import pathlib
from typing import Any

import files
from config import ConfigError
from data import record
from data.record import holds_out_documents, manifest_of, progress_of, write_manifest
from data.tokens import WIDTH

BUFFER = 1 << 20  # bytes of a file that wait to be written
SPLITS = ("train", "heldout")


class Overtaken(Exception):
    """Another process has recorded more of a folder, or has begun it anew: what this one would write may be wrong."""


class TokenWriter:
    """Writes a folder's token files from its record on.

    train.bin, heldout.bin: ids. *.ends.bin: of each document, the position after its last token, 8 bytes little-endian.
    `tokens` and `documents` are the manifest's own dictionaries.
    """

    def __init__(self, folder: pathlib.Path, growing: bool, whole_documents: bool = False):
        """growing: the first tokens decide what is held out. whole_documents: no document is held out in part. Raises
        ConfigError and OSError."""
        self.folder, self.growing, self.whole_documents = folder, growing, whole_documents
        self.manifest = manifest_of(folder)
        self.recorded = progress_of(self.manifest)  # by this process, or before it
        self.width = WIDTH[self.manifest["dtype"]]
        self.tokens = self.manifest["tokens"]
        self.documents = self.manifest["documents"]
        self.is_due = False  # a reader may be waiting for what was appended
        self.bin: dict[str, TokenFile] = {}
        self.ends: dict[str, TokenFile] = {}
        for split in SPLITS:
            self.bin[split] = TokenFile(folder / f"{split}.bin", self.width * self.tokens[split])
            self.ends[split] = TokenFile(folder / f"{split}.ends.bin", 8 * self.documents[split])
        self.files = [*self.bin.values(), *self.ends.values()]
        hashes = self.manifest["segments"]
        self.next_border = record.border_of(len(hashes))
        last_border = record.border_of(len(hashes) - 1) if hashes else 0
        self.segment_hash = hashlib.sha256()  # of train.bin, from the last border on
        if not self.manifest.get("ended"):
            end = self.width * self.tokens["train"]
            self.bin["train"].hash_into(self.segment_hash, last_border * self.width, end)

    def close(self) -> None:
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
        self.ends[split].append(self.tokens[split].to_bytes(8, "little"))
        is_beyond = self.growing and self.tokens["train"] >= record.HOLD_OUT_BEFORE
        if is_beyond and not self.has_validation:
            self.decide_validation()

    def _hash(self, ids: bytes) -> None:
        """Adds tokens to the segment's hash, and lists it at a border."""
        position = self.tokens["train"]
        while position + len(ids) // self.width >= self.next_border:
            before = (self.next_border - position) * self.width
            self.segment_hash.update(ids[:before])
            self.manifest["segments"].append(self.segment_hash.hexdigest())
            self.segment_hash = hashlib.sha256()
            position, ids = self.next_border, ids[before:]
            self.next_border = record.border_of(len(self.manifest["segments"]))
            self.is_due = True
        self.segment_hash.update(ids)

    def decide_validation(self) -> None:
        """Holds out what stands in heldout.bin or, of a text without such a document, the last hundredth of its first
        tokens: in conversations, the last ones of these."""
        if holds_out_documents(self.manifest):
            split, first, end = "heldout", 0, self.tokens["heldout"]
        else:
            split, end = "train", min(record.FIRST_BORDER, self.tokens["train"])
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
        ends = [0, *self.ends["train"].integers()]
        last = bisect.bisect_right(ends, end) - 1
        before = bisect.bisect_right(ends, first) - 1
        return ends[min(before, max(0, last - 1))], ends[last]

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
        """Raises Overtaken if another process has begun the folder anew, or recorded more than this one."""
        for file in self.files:
            if not file.is_in_place():
                raise Overtaken(f"{file.path}: was deleted or replaced while it was written")
        now = manifest_of(self.folder)
        for key in ("identity", "tokenizer"):
            if now.get(key) != self.manifest.get(key):
                raise Overtaken(f"{self.folder}: was begun anew while it was written")
        if progress_of(now) > self.recorded:
            holder = now.get("writer", "another process")
            raise Overtaken(f"{self.folder}: {holder} has prepared more of it")

    def record(self) -> None:
        """Syncs the files, then says so in the manifest. Raises Overtaken and OSError."""
        self.check_record()
        for file in self.files:
            file.sync()
        self.manifest["writer"] = files.process_name()
        write_manifest(self.folder, self.manifest)
        self.recorded = progress_of(self.manifest)
        self.is_due = False


class TokenFile:
    """A file that is written from an offset on, and never cut below what was recorded."""

    def __init__(self, path: pathlib.Path, size: int):
        """size: recorded bytes. Raises ConfigError if the file has fewer."""
        self.path, self.size = path, size
        self.pending = bytearray()
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        there = os.fstat(self.handle).st_size
        if there < size:
            os.close(self.handle)
            raise ConfigError(
                f"{path}: has {there} bytes, its manifest says {size}: it was cut or changed; "
                f"delete {path.parent} to prepare it again"
            )

    def append(self, raw: bytes) -> None:
        self.pending += raw
        if len(self.pending) >= BUFFER:
            self.write()

    def write(self) -> None:
        """Writes what is pending. Raises OSError, of a full disk too."""
        while self.pending:
            written = os.pwrite(self.handle, self.pending, self.size)
            self.size += written
            del self.pending[:written]

    def sync(self) -> None:
        self.write()
        os.fsync(self.handle)

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that is open."""
        try:
            there, ours = self.path.stat(), os.fstat(self.handle)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def cut_rest(self) -> None:
        """Ends the file where writing ended."""
        self.write()
        os.ftruncate(self.handle, self.size)

    def hash_into(self, digest: Any, offset: int, end: int) -> None:
        """Adds bytes offset ... end-1 to a hash."""
        self.write()
        while block := os.pread(self.handle, min(1 << 24, end - offset), offset):
            digest.update(block)
            offset += len(block)

    def integers(self) -> list[int]:
        """Its content, of numbers of 8 bytes."""
        self.write()
        content = os.pread(self.handle, self.size, 0)
        return [int.from_bytes(content[i : i + 8], "little") for i in range(0, self.size, 8)]


def segment_hashes(folder: pathlib.Path, manifest: dict) -> tuple[list[str], str]:
    """(the SHA-256 of each segment of train.bin, that of all of it), of an ended text as it is on disk."""
    width, end = WIDTH[manifest["dtype"]], manifest["tokens"]["train"]
    whole, hashes = hashlib.sha256(), []
    with (folder / "train.bin").open("rb") as file:
        position = 0
        for segment in range(len(manifest["segments"])):
            segment_hash = hashlib.sha256()
            border = min(end, record.border_of(segment))
            while position < border:
                block = file.read(min(1 << 24, (border - position) * width))
                if not block:
                    break
                whole.update(block)
                segment_hash.update(block)
                position += len(block) // width
            hashes.append(segment_hash.hexdigest())
    return hashes, whole.hexdigest()
