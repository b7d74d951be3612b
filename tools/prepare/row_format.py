"""What depends on the kind of a source's rows: here texts. formats.py chooses; conversations are in
chat/rows.py."""

import array
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import config
from config import ConfigError

if TYPE_CHECKING:  # imported where they are used: reading needs no tokenizer, preparing no torch
    from data.tokens import Span
    from tools.prepare.tokenizer import Tokenizer

LARGEST_ROW = 64 << 20  # bytes; tokenizing takes some 50 times as much memory
HELD_OUT = 25  # one of so many documents, of the first ones


class Encoded(NamedTuple):
    """A tokenized document."""

    is_held_out: bool  # for validation, by its hash
    ids: bytes  # empty: it is left out
    text_bytes: int = 0  # in UTF-8; of a conversation unknown
    unknown: int = 0  # ids of what the vocabulary lacks


class MissingColumn(ConfigError):
    """A row lacks a column that its format reads."""


class Texts:
    """Rows with a column of text. Each is a document, and windows are cut from their stream."""

    part_bytes = 1 << 26  # of the source; in a minute or two, on one core

    def __init__(self, data: config.Data):
        self.data = data

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of a parquet or Arrow file that are read."""
        return (self.data.text_field,)

    def not_read(self, row: dict) -> list[str]:
        """The columns of a row to report as not read."""
        return []

    def document(self, where: str, row: dict) -> str:
        """A row's document; empty: it is left out. Raises ConfigError if the row is wrong."""
        field = self.data.text_field
        if field not in row:
            raise MissingColumn(f"has no field {field!r} (data.text_field), but {', '.join(row)}")
        text = row[field]
        if not isinstance(text, str):
            raise ConfigError(f"field {field!r} must be text, not {type(text).__name__}")
        check_text(text)
        return text

    def encoder(self, folder: pathlib.Path) -> Callable[[list[str]], list[Encoded]]:
        """Documents -> ids, with the tokenizer of a folder; runs in any thread."""
        from tools.prepare.tokenizer import Tokenizer

        tokenizer = Tokenizer(folder)
        return functools.partial(encode_texts, tokenizer, self.dtype(tokenizer.vocab_size))

    def dtype(self, vocab_size: int) -> str:
        """Of the ids in token files."""
        return "int32" if vocab_size > 1 << 16 else "uint16"

    def identity(self) -> dict[str, str]:
        """Hashes of files that the token files depend on besides the tokenizer."""
        return {}

    def files(self) -> dict[str, bytes]:
        """What a folder keeps besides the tokenizer, by name. Raises ConfigError."""
        return {}

    def lines(self, span: "Span", tokenizer: "Tokenizer") -> Iterator[str]:
        """Yields two lines for each document in a window: what of it is there, and its text."""
        stream, start, stop = span
        ids = stream.read(start, stop)
        around = stream.documents(max(0, start - 1), min(stop + 1, stream.length))
        for begin, end in around:
            first = max(begin, start)
            last = min(end, stop)
            if first >= last:
                continue
            line = f"--- document, {last - first} tokens"
            if begin < start:
                line += " (begins before)"
            if end > stop:
                line += " (continues)"
            yield line
            yield tokenizer.decode(ids[first - start : last - start].tolist())


def check_text(text: str) -> None:
    """Raises ConfigError if a row's text cannot be tokenized."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise ConfigError(f"is not valid Unicode: {error.reason}") from None
    if size > LARGEST_ROW:
        raise ConfigError(f"is longer than {LARGEST_ROW >> 20} MiB; split it")


def encode_texts(tokenizer: "Tokenizer", dtype: str, documents: list[str]) -> list[Encoded]:
    """Tokenizes documents, each between BOS and EOS. Raises ConfigError."""
    typecode = "i" if dtype == "int32" else "H"
    encoded = []
    for text, ids in zip(documents, tokenizer.encode(documents)):
        tokens = array.array(typecode, [*tokenizer.bos, *ids, *tokenizer.eos])
        unknown = ids.count(tokenizer.unknown)
        encoded.append(Encoded(is_held_out(text), tokens.tobytes(), len(text.encode()), unknown))
    return encoded


def is_held_out(document: str) -> bool:
    """Whether a document belongs to the validation text, by its hash."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0
