"""A conversation in the terminal with a checkpoint: python -m generate CKPT_OR_RUN --chat

The checkpoint's chat template renders what has been said. Generation streams, and ends with the template's end of turn.
"""

import pathlib
import sys
from collections.abc import Callable, Iterator

from config import ConfigError
from extras.chat.conversations import Chat, Message, checked
from files import printable

# (prompt, tokens at most) -> one list of one token each
Reply = Callable[[list[int], int], Iterator[list[int]]]


def converse(folder: pathlib.Path, ends: list[int], context: int, most: int, reply: Reply) -> None:
    """Reads messages from stdin, one a line, until it ends or a line is /quit, and prints the replies. ends: tokens
    that end a turn, besides the template's own; most: tokens of a reply. Raises ConfigError."""
    chat, history = Chat(folder), []
    ends = [*ends, *chat.end_of_turn()]
    show("/quit, or the end of the input, ends the conversation\n")
    while (said := ask()) is not None:
        try:
            turn = checked([{"role": "user", "content": said}])
            ids, dropped = fitting(chat, history, turn, context, most)
        except ConfigError as error:
            show(f"({error})\n")
            continue
        history = [*history[dropped:], *turn]
        if dropped:
            show(
                f"({dropped} messages, the oldest, no longer fit into the context of {context:,} tokens)\n"
            )
        tokens: list[int] = []
        text = ""
        for (token,) in reply(ids, min(most, context - len(ids))):
            if token in ends:
                break
            tokens.append(token)
            # without the space that some templates leave to the answer, and an incomplete character at the end
            whole = chat.tokenizer.decode(tokens).lstrip().rstrip("\N{REPLACEMENT CHARACTER}")
            show(printable(whole[len(text) :]))
            text = whole
        show("\n")
        history.append({"role": "assistant", "content": text})


def fitting(
    chat: Chat, history: list[Message], turn: list[Message], context: int, most: int
) -> tuple[list[int], int]:
    """The ids of the prompt, and how many messages, the oldest, are left out of it so that a quarter of the context, or
    a shorter reply, still fits. Raises ConfigError if the new message alone is too long."""
    room = context - min(most, max(1, context // 4))
    for dropped in range(0, len(history) + 1, 2):
        if len(ids := chat.prompt([*history[dropped:], *turn])) <= room:
            return ids, dropped
    raise ConfigError(
        f"this message is too long for a context of {context:,} tokens (train.seq_len); say it in fewer "
        "words"
    )


def ask() -> str | None:
    """The next message; None at the end."""
    while True:
        show("> ")
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            show("\n" * (not line))
            return None
        if line.strip():
            return line.rstrip("\n")


def show(text: str) -> None:
    print(text, end="", flush=True)
