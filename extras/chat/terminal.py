"""A conversation in the terminal with a checkpoint: python -m generate CKPT_OR_RUN --chat

The checkpoint's chat template renders the messages so far. The reply is streamed and stops at the
template's end-of-turn token.
"""

import pathlib
import sys
from collections.abc import Callable, Iterator

from config import ConfigError
from extras.chat.conversations import Chat
from extras.chat.messages import Message, checked
from files import printable

# (ids of the prompt, maximum number of tokens) -> steps, each a list of one token
Reply = Callable[[list[int], int], Iterator[list[int]]]


def converse(
    folder: pathlib.Path, eos: list[int], context: int, max_tokens: int, reply: Reply
) -> None:
    """Reads messages from stdin, one a line, and prints the replies.

    eos: tokens that end a turn, in addition to the template's own. max_tokens: of a reply.
    Raises ConfigError.
    """
    chat = Chat(folder)
    stop_tokens = [*eos, *chat.end_of_turn()]
    history: list[Message] = []
    show("/quit, or the end of the input, ends the conversation\n")
    for line in user_messages():
        try:
            turn = checked([{"role": "user", "content": line}])
            prompt, dropped = fit(chat, history, turn, context, max_tokens)
        except ConfigError as error:
            show(f"({error})\n")
            continue
        if dropped:
            show(
                f"({dropped} messages, the oldest, no longer fit into the context of "
                f"{context:,} tokens)\n"
            )
        steps = reply(prompt, min(max_tokens, context - len(prompt)))
        text = stream_reply(chat, steps, stop_tokens)
        history = [*history[dropped:], *turn, {"role": "assistant", "content": text}]


def user_messages() -> Iterator[str]:
    """Asks for messages until the input ends or a line is /quit. Skips blank lines."""
    while True:
        show("> ")
        line = sys.stdin.readline()
        if not line:
            show("\n")
            return
        if line.strip() == "/quit":
            return
        if line.strip():
            yield line.rstrip("\n")


def fit(
    chat: Chat, history: list[Message], turn: list[Message], context: int, max_tokens: int
) -> tuple[list[int], int]:
    """Drops the oldest messages until a reply fits behind the prompt.

    Reserves a quarter of the context for the reply, or max_tokens if they are fewer. Returns the
    ids of the prompt and the number of messages dropped. Raises ConfigError if the new message
    alone is too long.
    """
    reserved = min(max_tokens, max(1, context // 4))
    for dropped in range(0, len(history) + 1, 2):  # a message and its reply at a time
        prompt = chat.prompt([*history[dropped:], *turn])
        if len(prompt) <= context - reserved:
            return prompt, dropped
    raise ConfigError(
        f"this message is too long for a context of {context:,} tokens (train.seq_len); say it in "
        "fewer words"
    )


def stream_reply(chat: Chat, steps: Iterator[list[int]], stop_tokens: list[int]) -> str:
    """Prints a reply while it is generated, up to a stop token. Returns its text."""
    tokens: list[int] = []
    printed = ""
    for (token,) in steps:
        if token in stop_tokens:
            break
        tokens.append(token)
        # Some templates leave a leading space to the reply. An incomplete character at the end
        # decodes to U+FFFD; it is printed once it is complete.
        text = chat.tokenizer.decode(tokens).lstrip().rstrip("\N{REPLACEMENT CHARACTER}")
        show(printable(text[len(printed) :]))
        printed = text
    show("\n")
    return printed


def show(text: str) -> None:
    print(text, end="", flush=True)
