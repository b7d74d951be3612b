"""Rows that are conversations: what tools/prepare/row_format.py asks of them."""

import functools
import pathlib
from collections.abc import Callable, Iterator

from data.tokens import Span
from extras.chat.packing import Packed
from tools.prepare.chat import messages, template
from tools.prepare.chat.conversations import spelled
from tools.prepare.row_format import Encoded, Texts
from tools.prepare.tokenizer import Tokenizer


class Conversations(Texts):
    part_bytes = 1 << 24  # Python renders them: one process, one core

    @property
    def columns(self) -> tuple[str, ...]:
        return messages.columns_of(self.data)

    def document(self, where: str, row: dict) -> str:
        return messages.as_document(where, row, self.data)

    def encoder(self, folder: pathlib.Path) -> Callable[[list[str]], list[Encoded]]:
        from tools.prepare.chat.conversations import encode_conversations

        return functools.partial(encode_conversations, folder)

    def dtype(self, vocab_size: int) -> str:
        """The sign of a token says that it has no loss."""
        return "int32"

    def identity(self) -> dict[str, str]:
        return template.identity_of(self.data)

    def files(self) -> dict[str, bytes]:
        return template.files_of(self.data)

    def lines(self, span: Span, tokenizer: Tokenizer) -> Iterator[str]:
        assert isinstance(span.stream, Packed)
        return show_conversations(span.stream, span.start, span.stop, tokenizer)


def show_conversations(
    stream: Packed, first: int, stop: int, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yields the lines of each conversation in a window."""
    for number, begin, end in stream.conversations(first // stream.seq_len):
        ids = stream.stream.read(begin, end)
        learned = int((ids >= 0).sum())
        yield (
            f"--- conversation {number}, {end - begin} tokens, {learned} with a loss, between « "
            "and »"
        )
        yield spelled(tokenizer, ids.tolist())
