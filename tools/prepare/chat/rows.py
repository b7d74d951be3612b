"""Turns rows with conversations into token ids, with the interface of row_format.py."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator

from data.tokens import Span
from extras.chat.packing import Packed
from tools.prepare.chat import messages, template
from tools.prepare.chat.conversations import encode_conversations, spelled
from tools.prepare.row_format import Encoded, Texts
from tools.prepare.tokenizer import Tokenizer


class Conversations(Texts):
    part_bytes = 1 << 24  # smaller than for texts: Python renders conversations on one core

    @property
    def columns(self) -> tuple[str, ...]:
        read = itertools.chain(*messages.columns_of(self.data))
        return (*read, *messages.REFUSED)

    def not_read(self, row: dict) -> list[str]:
        return messages.not_read(row, self.data)

    def document(self, where: str, row: dict) -> str:
        return messages.as_document(where, row, self.data)

    def encoder(self, folder: pathlib.Path) -> Callable[[list[str]], list[Encoded]]:
        return functools.partial(encode_conversations, folder)

    def dtype(self, vocab_size: int) -> str:
        """Signed, because a token without a loss is stored as a negative number."""
        return "int32"

    def identity(self) -> dict[str, str]:
        return template.identity_of(self.data)

    def files(self) -> dict[str, bytes]:
        return template.files_of(self.data)

    def lines(self, span: Span, tokenizer: Tokenizer) -> Iterator[str]:
        """Yields two lines for each conversation in a window."""
        stream = span.stream
        assert isinstance(stream, Packed)
        for number, begin, end in stream.conversations(span.start // stream.seq_len):
            ids = stream.stream.read(begin, end)
            learned = int((ids >= 0).sum())
            line = f"--- conversation {number}, {end - begin} tokens, {learned} with a loss"
            yield f"{line}, between « and »"
            yield spelled(tokenizer, ids.tolist())
