"""Turns rows of text into token ids. chat/rows.py does it for conversations; formats.py chooses
between the two."""

import array
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import config
from config import ConfigError

if TYPE_CHECKING:  # functions import these where needed: preparing data must not import torch
    from data.tokens import Span
    from tools.prepare.tokenizer import Tokenizer

LARGEST_ROW = 64 << 20  # bytes; tokenizing needs about 50 times as much memory
HELD_OUT = 25  # one in so many of the first documents is held out for validation


class Encoded(NamedTuple):
    """A tokenized document."""

    is_held_out: bool  # whether its hash selects it for validation
    ids: bytes  # empty if the document is left out
    text_bytes: int = 0  # size of its text in UTF-8; 0 for a conversation
    unknown: int = 0  # number of UNK tokens


class MissingColumn(ConfigError):
    """A row lacks a column that its format reads."""


class Texts:
    """Rows with a column of text. Each row is a document. Training cuts windows from the
    concatenated documents."""

    part_bytes = 1 << 26  # minimum size of a part; one core needs a minute or two for it

    def __init__(self, data: config.Data):
        self.data = data

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read from a parquet or Arrow file."""
        return (self.data.text_field,)

    def not_read(self, row: dict) -> list[str]:
        """The columns of a row that the user should know are not read."""
        return []

    def document(self, where: str, row: dict) -> str:
        """A row's document; empty to leave it out. Raises ConfigError if the row is invalid."""
        field = self.data.text_field
        if field not in row:
            raise MissingColumn(f"has no field {field!r} (data.text_field), but {', '.join(row)}")
        text = row[field]
        if not isinstance(text, str):
            raise ConfigError(f"field {field!r} must be text, not {type(text).__name__}")
        check_text(text)
        return text

    def encoder(self, folder: pathlib.Path) -> Callable[[list[str]], list[Encoded]]:
        """A function that tokenizes documents with the tokenizer of a folder. For texts, it is
        thread-safe."""
        from tools.prepare.tokenizer import Tokenizer

        tokenizer = Tokenizer(folder)
        return functools.partial(encode_texts, tokenizer, self.dtype(tokenizer.vocab_size))

    def dtype(self, vocab_size: int) -> str:
        """The dtype of the ids in token files."""
        return "int32" if vocab_size > 1 << 16 else "uint16"

    def identity(self) -> dict[str, str]:
        """Hashes of the files, other than the tokenizer, that determine the token ids."""
        return {}

    def files(self) -> dict[str, bytes]:
        """The files, other than the tokenizer, to store in the folder, by name. Raises
        ConfigError."""
        return {}

    def lines(self, span: "Span", tokenizer: "Tokenizer") -> Iterator[str]:
        """Yields two lines for each document in a window: a heading and the text that is in the
        window."""
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
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can escape
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
    """Whether the document's hash selects it for validation."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0
