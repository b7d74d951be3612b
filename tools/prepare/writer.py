"""Appends documents to a folder's token files, and records how far they are synced: what a reader
may read, and where a killed process resumes.

train.bin, heldout.bin hold ids; *.ends.bin, for each document, the position after its last token.
What follows the recorded bytes is written again. Bytes are a function of the text: of two writers
where locks don't exist, both write equal bytes.
"""

import bisect
import contextlib
import hashlib
import os
import pathlib
from typing import IO

import numpy as np

from config import ConfigError
from data.folder import MANIFEST, manifest_of
from data.order import last_hundredth
from data.tokens import damaged
from system import files
from tools.prepare.begin import write_manifest

SPLITS = ("train", "heldout")
WIDTH = {"uint16": 2, "int32": 4}  # bytes per token
END_BYTES = 8
BUFFER_BYTES = 1 << 20
HASH_BYTES = 1 << 24  # read at a time


class TokenWriter:
    """Writes a folder's token files from its record on. append() counts in the manifest, record()
    writes it."""

    def __init__(self, folder: pathlib.Path, whole_documents: bool = False):
        """whole_documents: no document is held out in part. Raises ConfigError and OSError."""
        for killed in folder.glob(f".{MANIFEST}.*.tmp"):
            killed.unlink(missing_ok=True)
        self.folder = folder
        self.whole_documents = whole_documents
        self.manifest = manifest_of(folder)
        self.width = WIDTH[self.manifest["dtype"]]
        self.bin = {}
        self.ends = {}
        for split in SPLITS:
            tokens = self.manifest["tokens"][split]
            documents = self.manifest["documents"][split]
            self.bin[split] = self._open(f"{split}.bin", self.width * tokens)
            self.ends[split] = self._open(f"{split}.ends.bin", END_BYTES * documents)
        self.files = (*self.bin.values(), *self.ends.values())

    def _open(self, name: str, size: int) -> IO[bytes]:
        """A file, at the end of its recorded bytes, of which there are `size`."""
        path = self.folder / name
        path.touch()
        file = path.open("r+b", BUFFER_BYTES)
        if os.fstat(file.fileno()).st_size < size:
            raise damaged(path, f"has fewer than its {size} recorded bytes")
        file.seek(size)
        return file

    def append(self, split: str, ids: bytes, size: int) -> None:
        """Adds a document of so many bytes. ids: in the width of the folder's dtype."""
        if not ids:  # a tokenizer may produce no tokens for some texts
            self.manifest["left_out"] += 1
            return
        tokens = self.manifest["tokens"]
        tokens[split] += len(ids) // self.width
        self.manifest["documents"][split] += 1
        self.manifest["bytes"][split] += size
        self.bin[split].write(ids)
        self.ends[split].write(tokens[split].to_bytes(END_BYTES, "little"))

    def decide_validation(self) -> None:
        """Holds out what is in heldout.bin. If no document is held out, holds out the last
        hundredth of the first tokens: of conversations, the last ones in these tokens. Does nothing
        if it was called before."""
        if self.manifest["validation"]:
            return
        split = "heldout"
        first = 0
        end = self.manifest["tokens"]["heldout"]
        if end < 2:  # an input and its target
            split = "train"
            first, end = last_hundredth(self.manifest["tokens"]["train"])
            if self.whole_documents:
                first, end = self._document_borders(first, end)
        self.manifest["validation"] = [split, first, end]

    def _document_borders(self, first: int, end: int) -> tuple[int, int]:
        """The range of the training documents that end in tokens first ... end."""
        self.ends["train"].flush()
        ends = np.fromfile(
            self.folder / "train.ends.bin", "<i8", self.manifest["documents"]["train"]
        )
        borders = [0, *ends.tolist()]
        last = bisect.bisect_right(borders, end) - 1
        before = bisect.bisect_right(borders, first) - 1
        before = min(before, max(0, last - 1))  # at least one document, if there is one
        return borders[before], borders[last]

    def complete(self) -> None:
        """Ends the text, and records that. Raises ConfigError, and OSError."""
        self.decide_validation()
        for file in self.files:
            file.truncate()  # of an attempt that wrote text that was mended since
            file.flush()
        self.manifest["sha256"] = {split: sha256(self.folder / f"{split}.bin") for split in SPLITS}
        self.manifest["complete"] = True
        self.record()

    def record(self) -> None:
        """Syncs the files, then says so in the manifest. Raises ConfigError if the folder was
        deleted or begun anew, and OSError."""
        for file in self.files:
            file.flush()
            files.sync_handle(file.fileno())
        path = self.folder / "train.bin"
        written = os.fstat(self.bin["train"].fileno())
        if not path.exists() or not os.path.samestat(path.stat(), written):
            raise ConfigError(f"{self.folder}: was deleted or begun anew while it was written")
        recorded = manifest_of(self.folder)["tokens"]
        if any(recorded[split] > self.manifest["tokens"][split] for split in SPLITS):
            return  # another process is ahead: no record is ever lowered
        write_manifest(self.folder, self.manifest)

    def close(self) -> None:
        for file in self.files:
            with contextlib.suppress(OSError):  # of a full disk: it is not recorded
                file.close()


def sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_hashes(folder: pathlib.Path) -> None:
    """Raises ConfigError if a complete folder's token files are not as they were written."""
    for split, digest in manifest_of(folder)["sha256"].items():
        path = folder / f"{split}.bin"
        if not path.exists():
            raise damaged(path, "is missing")
        if sha256(path) != digest:
            raise damaged(path, "was changed since it was written")
