"""Appends documents to a folder's token files, and records how far they are synced: what a reader
may read, and where a killed preparation resumes.

train.bin, heldout.bin hold ids; *.ends.bin, for each document, the position after its last token.
Bytes are a function of the text: of two writers where locks don't exist, both write equal bytes.
"""

import bisect
import hashlib
import os
import pathlib

import numpy as np

import files
from config import ConfigError
from data import folder as folders
from data.order import FIRST_BORDER, border_of
from data.source import Position

SPLITS = ("train", "heldout")
WIDTH = {"uint16": 2, "int32": 4}  # bytes per token
END_BYTES = 8
READ_BYTES = 1 << 24  # of a file that is hashed, at a time


class TokenWriter:
    """Writes a folder's token files from its record on. append() counts in the manifest, record()
    writes it."""

    def __init__(self, folder: pathlib.Path, whole_documents: bool = False):
        """whole_documents: no document is held out in part. Raises ConfigError and OSError."""
        self.folder = folder
        self.whole_documents = whole_documents
        self.manifest = folders.manifest_of(folder)
        self.width = WIDTH[self.manifest["dtype"]]
        self.tokens: dict[str, int] = self.manifest["tokens"]
        self.documents: dict[str, int] = self.manifest["documents"]
        self.written = dict(self.tokens)  # append() compares what comes before with the file
        self.path_read_again = ""
        self.is_due = False  # a reader may be waiting for what was appended
        self.bin = {}
        self.ends = {}
        for split in SPLITS:
            self.bin[split] = self._open(f"{split}.bin", self.width * self.tokens[split])
            self.ends[split] = self._open(f"{split}.ends.bin", END_BYTES * self.documents[split])
        self.segments: list[str] = self.manifest["segments"]
        self.hash = hashlib.sha256()  # of the segment that is written
        begin = border_of(len(self.segments) - 1) * self.width
        self._hash_file(self.bin["train"], begin, self.bin["train"].tell(), self.hash)

    def _open(self, name: str, size: int):
        """A file, from its end on. size: recorded bytes; what comes after was not synced."""
        path = self.folder / name
        path.touch()
        file = path.open("r+b")
        if os.fstat(file.fileno()).st_size < size:
            raise folders.damaged(path, f"has fewer than its {size} recorded bytes")
        file.seek(size)
        return file

    def _hash_file(self, file, begin: int, end: int, digest) -> None:
        for offset in range(begin, end, READ_BYTES):
            digest.update(os.pread(file.fileno(), min(READ_BYTES, end - offset), offset))

    def go_back(self, path: str, tokens: dict[str, int], documents: dict[str, int]) -> None:
        """Before a file that is read again, since it has changed: what is appended next must be
        what is there."""
        self.path_read_again = path
        self.tokens.update(tokens)
        self.documents.update(documents)

    def append(self, split: str, ids: bytes) -> None:
        """Adds a document. ids: in the width of the folder's dtype. Raises ConfigError if other
        text was read here before."""
        begin = self.tokens[split]
        self.tokens[split] += len(ids) // self.width
        self.documents[split] += 1
        if begin < self.written[split]:
            if os.pread(self.bin[split].fileno(), len(ids), begin * self.width) != ids:
                raise ConfigError(
                    f"{self.path_read_again}: has other text than when {self.folder} was prepared "
                    "from it: restore it, or delete the folder to prepare all anew"
                )
            return
        self.bin[split].write(ids)
        self.ends[split].write(self.tokens[split].to_bytes(END_BYTES, "little"))
        if split == "train":
            self._hash(ids)

    def _hash(self, ids: bytes) -> None:
        """Adds tokens to the segment's hash; at a border, lists it and begins the next."""
        while True:
            beyond = (self.tokens["train"] - border_of(len(self.segments))) * self.width
            if beyond < 0:
                self.hash.update(ids)
                return
            self.hash.update(ids[: len(ids) - beyond])
            self._end_segment()
            ids = ids[len(ids) - beyond :]

    def _end_segment(self) -> None:
        self.segments.append(self.hash.hexdigest())
        self.hash = hashlib.sha256()
        self.is_due = True
        if "validation" not in self.manifest:
            self.decide_validation()

    def decide_validation(self) -> None:
        """Holds out what is in heldout.bin. If no document is held out, holds out the last
        hundredth of the first tokens: of conversations, the last ones in these tokens."""
        split = "heldout"
        first = 0
        end = self.tokens["heldout"]
        if end < 2:  # an input and its target
            split, end = "train", min(FIRST_BORDER, self.tokens["train"])
            first = max(0, end - max(2, end // 100))
            if self.whole_documents:
                self.ends["train"].flush()
                borders = [0, *np.fromfile(self.folder / "train.ends.bin", "<i8").tolist()]
                last = bisect.bisect_right(borders, end) - 1
                before = bisect.bisect_right(borders, first) - 1
                before = min(before, max(0, last - 1))  # at least one document, if there is one
                first, end = borders[before], borders[last]
        digest = hashlib.sha256()
        self.bin[split].flush()
        self._hash_file(self.bin[split], first * self.width, end * self.width, digest)
        self.manifest["validation"] = [split, first, end, digest.hexdigest()]

    def record(self, position: Position, is_complete: bool = False) -> None:
        """Syncs the files, then says so in the manifest. Raises ConfigError if the folder was
        deleted or begun anew, and OSError."""
        if is_complete:
            self._end_segment()
            self.manifest["complete"] = True
        for file in (*self.bin.values(), *self.ends.values()):
            file.flush()
            if is_complete:
                file.truncate()  # of an attempt that wrote text that was mended since
            files.sync_handle(file.fileno())
        now = folders.manifest_of(self.folder)
        if any(now[key] != self.manifest[key] for key in ("identity", "tokenizer")):
            raise ConfigError(f"{self.folder}: was begun anew while it was written")
        if any(now["tokens"][split] > self.tokens[split] for split in SPLITS):
            return  # a file is read again, or another process is ahead: no record is ever lowered
        self.manifest["position"] = position
        folders.write_manifest(self.folder, self.manifest)
        self.is_due = False

    def close(self) -> None:
        for file in (*self.bin.values(), *self.ends.values()):
            file.close()
