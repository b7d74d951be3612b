"""Splits a source's files into parts. One process prepares one part, and writes its files.

    train-00007.bin         token ids
    train-00007.ends.bin    for each document, the position after its last token
    train-00007.sizes.bin   for each document of validation text, its text's size in UTF-8 bytes
    train-00007.json        the part's manifest, written last: the part is complete

The files' sizes alone determine the parts, and a complete part is never rewritten. So any number
of processes and machines can prepare parts at the same time, in any order. A process that is killed
loses only its current part. Two processes that prepare the same part write the same bytes.
"""

import array
import bisect
import collections
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple

import config
import system
from config import ConfigError
from data.folder import short_hash
from tools.prepare.formats import row_format
from tools.prepare.row_format import Encoded
from tools.prepare.rows import is_divisible
from tools.prepare.source import ByteRange, SourceFile, documents

HELD_OUT_OF = 1 << 22  # validation documents are chosen from the first so many tokens
CHUNK_CHARACTERS = 1 << 18  # tokenized in one call, rounded up to full documents
AHEAD = 3  # chunks per thread to read ahead
HASH_BYTES = 1 << 24  # read size


class Part(NamedTuple):
    """A share of a source's text, which one process prepares."""

    folder: pathlib.Path
    split: str  # "train" or "heldout"
    number: int
    ranges: list[ByteRange]

    def path(self, suffix: str, split: str = "") -> pathlib.Path:
        return self.folder / f"{split or self.split}-{self.number:05}{suffix}"

    @property
    def size(self) -> int:
        """The part's size in bytes of the source."""
        return sum((end or file.size) - begin for file, begin, end in self.ranges)

    def stamp(self) -> str:
        """A hash of the part's files: their current names, sizes and modification times."""
        return short_hash([(file_now(file), begin, end) for file, begin, end in self.ranges])

    def manifest(self) -> dict:
        """The part's manifest; {} if the part is incomplete or its files have changed since."""
        manifest = system.read_json(self.path(".json"))
        return manifest if manifest and manifest["stamp"] == self.stamp() else {}


def parts_of(
    folder: pathlib.Path, split: str, source: Iterable[SourceFile], part_bytes: int
) -> list[Part]:
    """Splits a source into parts of at least `part_bytes` each; only the last may be smaller.

    Combines small files into one part, and splits large files of a divisible kind into ranges.
    """
    parts: list[Part] = []
    size = part_bytes
    for file in source:
        count = max(1, file.size // part_bytes) if is_divisible(file.path) else 1
        borders = [file.size * i // count for i in range(count)]
        for begin, end in itertools.zip_longest(borders, borders[1:]):
            if size >= part_bytes:
                parts.append(Part(folder, split, len(parts), []))
                size = 0
            parts[-1].ranges.append(ByteRange(file, begin, end))
            size += (end or file.size) - begin
    return parts


def file_now(file: SourceFile) -> SourceFile:
    """A source file with its current size and modification time. Returns a file that does not exist
    locally (one of a dataset, or a deleted one) unchanged."""
    try:
        status = os.stat(file.path)
    except OSError:
        return file
    return SourceFile(file.path, status.st_size, status.st_mtime_ns)


def prepare_part(part: Part, data: config.Data, dtype: str, threads: int) -> int:
    """Tokenizes a part and writes its files, unless the part is complete already.

    Returns the number of the part's tokens that count towards data.max_tokens. Raises ConfigError
    and OSError.
    """
    manifest = part.manifest()
    if manifest:
        return manifest["read"]
    stamp = part.stamp()
    count = collections.Counter(rows=0, wrong=0, left_out=0, unknown=0)
    # only the first part holds out validation text, so that no part depends on another
    holds_out = part.split == "train" and not part.number and not data.validation
    train = TokenWriter(part.path(".bin"), dtype)
    heldout = TokenWriter(part.path(".bin", "heldout"), dtype) if holds_out else None
    limit = (data.max_tokens if part.split == "train" else None) or float("inf")
    encode = encoder(part.folder, data)
    source = chunks(documents(data, part.ranges, count))
    # Chat is not thread-safe: it sets its marks for each conversation
    with InThisThread() if data.has_conversations else ThreadPoolExecutor(threads) as pool:
        for document in encoded_in_order(pool, encode, source, AHEAD * threads):
            if train.tokens >= limit:
                break
            count["unknown"] += document.unknown
            if not document.ids:  # some texts have no tokens
                count["left_out"] += 1
            elif heldout and document.is_held_out and train.tokens < HELD_OUT_OF:
                heldout.append(document.ids, document.text_bytes)
            else:
                train.append(document.ids, document.text_bytes)
    read = train.tokens  # before hold_out_end() moves some of them
    if heldout and heldout.tokens < 2:  # evaluation needs an input and its target
        hold_out_end(train, heldout, whole_documents=data.has_conversations)
    counts_bytes = part.split == "heldout" and not data.has_conversations
    token_files = {part.split: train.publish(counts_bytes)}
    if heldout:
        token_files["heldout"] = heldout.publish(not data.has_conversations)
    system.sync(part.folder)
    manifest = {"stamp": stamp, "read": read, **count, "token_files": token_files}
    system.write_atomic(part.path(".json"), json.dumps(manifest), temporary(part.path(".json")))
    return read


@functools.lru_cache(1)
def encoder(folder: pathlib.Path, data: config.Data) -> Callable[[list[str]], list[Encoded]]:
    return row_format(data).encoder(folder)


def chunks(source: Iterator[str]) -> Iterator[list[str] | Exception]:
    """Groups documents into chunks to tokenize in one call. If reading the source raises an error,
    yields the error last."""
    chunk: list[str] = []
    size = 0
    error = None
    try:
        for document in source:
            chunk.append(document)
            size += len(document)
            if size >= CHUNK_CHARACTERS:
                yield chunk
                chunk = []
                size = 0
    except (ConfigError, OSError) as wrong:
        error = wrong
    if chunk:
        yield chunk
    if error:
        yield error


def encoded_in_order(
    pool: Executor,
    encode: Callable[[list[str]], list[Encoded]],
    source: Iterator[list[str] | Exception],
    most: int,
) -> Iterator[Encoded]:
    """Yields the tokenized documents in order. Raises an error of the source once it has yielded
    all documents before it. most: the number of chunks to read ahead."""
    ahead: collections.deque[Future] = collections.deque()
    while True:
        for chunk in itertools.islice(source, most - len(ahead)):
            if isinstance(chunk, list):
                ahead.append(pool.submit(encode, chunk))
            else:
                ahead.append(Future())
                ahead[-1].set_exception(chunk)
        if not ahead:
            return
        yield from ahead.popleft().result()


class InThisThread(Executor):
    """Runs each call at submit(), in the calling thread."""

    def submit(self, fn, /, *args, **kwargs) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class TokenWriter:
    """Writes a token file under a temporary name; publish() renames it."""

    def __init__(self, path: pathlib.Path, dtype: str):
        self.path = path
        self.dtype = dtype
        self.width = {"uint16": 2, "int32": 4}[dtype]
        self.file = temporary(path).open("w+b", 1 << 20)
        self.ends = array.array("q")
        self.text_bytes = array.array("q")

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def append(self, ids: bytes, text_bytes: int) -> None:
        """Adds a document. text_bytes: the size of its text in UTF-8."""
        self.ends.append(self.tokens + len(ids) // self.width)
        self.text_bytes.append(text_bytes)
        self.file.write(ids)

    def publish(self, counts_bytes: bool) -> tuple[list, int, str]:
        """Syncs and renames the file. Returns (its entry in a manifest, its number of documents,
        its hash). counts_bytes=True also writes the sizes of the texts. Raises OSError."""
        self.file.flush()
        system.sync_handle(self.file.fileno())
        self.file.close()
        temporary(self.path).replace(self.path)
        entry = [self.path.name, self.dtype, self.tokens, 0, self._write(".ends.bin", self.ends)]
        entry += [None, self._write(".sizes.bin", self.text_bytes) if counts_bytes else None]
        return entry, len(self.ends), sha256(self.path)

    def _write(self, suffix: str, by_document: array.array) -> str:
        """Writes an array with one entry per document. Returns the name of its file."""
        path = self.path.with_suffix(suffix)
        system.write_atomic(path, by_document.tobytes(), temporary(path))
        return path.name


def hold_out_end(train: TokenWriter, heldout: TokenWriter, whole_documents: bool) -> None:
    """Moves the last hundredth of the tokens from `train` to `heldout`. whole_documents=True cuts
    only between documents."""
    first = max(0, train.tokens - last_hundredth(train.tokens))
    borders = array.array("q", [0, *train.ends])
    number = max(0, bisect.bisect_right(borders, first) - 1)  # the document that is cut
    first = borders[number] if whole_documents else first
    moved = itertools.pairwise([first, *train.ends[number:]])
    for (begin, end), size in zip(moved, train.text_bytes[number:]):
        if begin == first:  # a cut document: scale its text size by the share of its tokens
            size = round(size * (end - begin) / (end - borders[number]))
        train.file.seek(begin * train.width)
        heldout.append(train.file.read((end - begin) * train.width), size)
    train.file.truncate(first * train.width)
    del train.ends[number:]
    if first > train.tokens:
        train.ends.append(first)


def last_hundredth(tokens: int) -> int:
    """How many tokens hold_out_end() moves. It runs when no document's hash selected it."""
    return max(2, min(HELD_OUT_OF, tokens) // 100)


def temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{system.process_name()}.tmp")


def sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
