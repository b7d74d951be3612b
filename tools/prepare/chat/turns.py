"""Locates the messages in a rendered conversation. Finds what the template leaves out. If the
template has no {% generation %} blocks, finds the characters of the assistant's turns.

Renders the conversation once more, with a mark before and after each piece of text in its messages.
Without the marks, both renderings must be equal. The marks then show where the template puts each
message. A template may strip a text, or split it at a tag such as </think>. So the marks are inside
the white space at the text's ends, and enclose the text between two tags.

A turn begins where the generation prompt ends after the previous message. It ends with the special
token that follows its text whether or not the conversation continues.
"""

import difflib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from config import ConfigError
from tools.prepare.chat.messages import EMPTY, MESSAGE_KEYS, REASONING_KEYS, Message

TAGS = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")  # <think>, [THINK]; a template may split at one
CLOSES_REASONING = ("/think", "/thinking")


class Piece(NamedTuple):
    """A piece of text in a message; two marks enclose it."""

    message: int
    what: str  # TEXT, REASONING or TOOL_CALL


TEXT = "text of it"
REASONING = "its reasoning"
TOOL_CALL = "a tool call"
REMEDY = (
    "; mark what the assistant says with {% generation %} in a template of your own, "
    "data.chat_template"
)

Spans = list[tuple[int, int]]  # (first character, one past the last), in order


class MarkedMessages:
    """Messages with a mark before and after each piece of text."""

    def __init__(self, messages: list[Message], mark: str):
        """mark: a character that the messages do not contain."""
        self.mark = mark
        self.pieces: list[Piece] = []
        self.reasoning: dict[tuple[int, str], int] = {}  # (message, text) -> number of the piece
        self.messages = [self._message(i, message) for i, message in enumerate(messages)]
        # inserted if the assistant speaks first, since some templates expect a user's message
        unused = 2 * len(self.pieces) + 1
        self.question = {"role": "user", "content": f"a{mark}{unused}{mark}"}

    def _message(self, i: int, message: Message) -> Message:
        marked = dict(message)
        if isinstance(message.get("content"), str):
            marked["content"] = self._content(i, message["content"])
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                marked[key] = self._text(message[key], Piece(i, REASONING))
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(i, call) for call in message["tool_calls"]]
        return marked

    def _content(self, i: int, content: str) -> str:
        """Marks the texts between tags. Text before a closing tag such as </think> is reasoning."""
        marked = ""
        parts = [*TAGS.split(content), ""]  # alternates between text and tags
        if not "".join(parts[::2]).strip():
            return self._text(content, Piece(i, TEXT))
        for text, tag in zip(parts[::2], parts[1::2]):
            what = REASONING if tag.strip("<>[]").casefold() in CLOSES_REASONING else TEXT
            marked += self._text(text, Piece(i, what)) + tag
        return marked

    def _call(self, i: int, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": self._call(i, call["function"])}
        marked = dict(call)
        for key in ("name", "arguments"):
            if key in call:
                marked[key] = self._strings(call[key], Piece(i, TOOL_CALL))
        return marked

    def _strings(self, value: Any, piece: Piece) -> Any:
        if isinstance(value, dict):
            return {key: self._strings(entry, piece) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._strings(entry, piece) for entry in value]
        return self._text(value, piece) if isinstance(value, str) else value

    def _text(self, text: str, piece: Piece) -> str:
        core = text.strip()
        if not core:
            return text
        number = len(self.pieces)
        if piece.what == REASONING:
            # a message has the same reasoning under several keys; a template reads one of them
            number = self.reasoning.setdefault((piece.message, core), number)
        if number == len(self.pieces):
            self.pieces.append(piece)
        begin = f"{self.mark}{2 * number}{self.mark}"
        end = f"{self.mark}{2 * number + 1}{self.mark}"
        return text.replace(core, begin + core + end, 1)


class Rendering(NamedTuple):
    """The text that a template makes of a conversation."""

    text: str
    blocks: Spans  # the characters of {% generation %} blocks; only the outermost of nested ones
    marks: list[tuple[int, int]]  # (number, position in the text), in order


class Turns:
    """The assistant's turns in a rendering."""

    def __init__(
        self,
        messages: list[Message],
        mark: str,
        render: Callable[[list[Message], bool], Rendering],
        special: re.Pattern,
    ):
        """mark: a character that the messages do not contain. render: (messages, whether to add the
        generation prompt) -> Rendering. special: a pattern that matches the special tokens. Raises
        ConfigError."""
        self.marked = MarkedMessages(messages, mark)
        self.render = render
        self.special = special
        self.boundaries = re.compile(rf"{special.pattern}|\s")
        self.rendering = render(self.marked.messages, False)
        self.text = self.rendering.text
        # the special tokens that the text begins with
        self.openers: list[str] = []
        while token := special.match(self.text, sum(map(len, self.openers))):
            self.openers.append(token[0])
        self.positions: dict[int, int] = {}  # mark number -> its first position in the text
        for number, position in self.rendering.marks:
            self.positions.setdefault(number, position)

    def check_complete(self, has_loss: list[bool]) -> None:
        """Raises ConfigError if the template leaves out a part of a message.

        It may leave out text, reasoning and calls of an assistant's turn without a loss, but no
        other key.
        """
        for piece_number, (i, what) in enumerate(self.marked.pieces):
            message = self.marked.messages[i]
            matters = has_loss[i] or message["role"] != "assistant"
            if matters and 2 * piece_number not in self.positions:
                raise self._left_out(i, what)
        for i, learned in enumerate(has_loss):
            if learned and not self._shows_arguments(i):
                raise self._left_out(i, "the arguments of a tool call")
        for i, message in enumerate(self.marked.messages):
            for key, entry in message.items():
                if key in MESSAGE_KEYS or entry in EMPTY:
                    continue
                rest = {name: message[name] for name in message if name != key}
                if not self._changes_with(i, rest):
                    raise self._left_out(i, f"its key {key!r}")

    def _left_out(self, i: int, what: str) -> ConfigError:
        role = self.marked.messages[i]["role"]
        return ConfigError(
            f"message {i + 1} ({role}): the chat template leaves out {what}; name one that renders "
            "it, data.chat_template, or leave it out of the data"
        )

    def _shows_arguments(self, i: int) -> bool:
        """Whether the template renders the arguments of a turn's tool calls.

        check_complete() has found the marks of arguments with text. For others, this renders the
        conversation without the arguments and compares.
        """
        message = self.marked.messages[i]
        for number, call in enumerate(message.get("tool_calls") or []):
            arguments = call["function"]["arguments"]
            has_marks = self.marked.mark in json.dumps(arguments, ensure_ascii=False)
            if has_marks or not arguments:
                continue
            calls = [*message["tool_calls"]]
            calls[number] = {**call, "function": {**call["function"], "arguments": {}}}
            if not self._changes_with(i, {**message, "tool_calls": calls}):
                return False
        return True

    def _changes_with(self, i: int, message: Message) -> bool:
        """Whether replacing the i-th message by this one changes the rendered text."""
        messages = [*self.marked.messages]
        messages[i] = message
        return differs(self.text, lambda: self.render(messages, False))

    def spans(self, has_loss: list[bool]) -> Spans:
        """The ranges of characters of the turns with a loss. Raises ConfigError."""
        return [self._span(i) for i, learned in enumerate(has_loss) if learned]

    def with_loss(self, blocks: Spans, has_loss: list[bool]) -> Spans:
        """The {% generation %} blocks, except those of the assistant's turns without a loss.

        A block belongs to the turn whose text it contains or follows, or else precedes. Raises
        ConfigError if the rendering has no text of a turn.
        """
        shown = {self._message(n) for n in self.positions}
        for i, message in enumerate(self.marked.messages):
            if message["role"] == "assistant" and i not in shown:
                raise self._left_out(i, "all of it, and perhaps not its {% generation %} block")
        chosen = []
        for begin, end in blocks:
            # the next text may begin where the block ends
            before = [n for n, position in self.positions.items() if position - n % 2 < end]
            after = [n for n, position in self.positions.items() if position - n % 2 >= end]
            owners = [self._message(n) for n in [*before[-1:], *after[:1]]]
            turns = [i for i in owners if self.marked.messages[i]["role"] == "assistant"]
            if not turns or has_loss[turns[0]]:
                chosen.append((begin, end))
        return chosen

    def _message(self, mark_number: int) -> int:
        return self.marked.pieces[mark_number // 2].message

    def _span(self, i: int) -> tuple[int, int]:
        numbers = [n for n in self.positions if self._message(n) == i]
        first = min(numbers, key=self.positions.__getitem__)
        last = max(numbers, key=self.positions.__getitem__)
        begin = self._begin(i, self.positions[first])
        return begin, self._end(i, self.positions[first], last)

    def _begin(self, i: int, first: int) -> int:
        """Where the i-th message's turn begins. `first` is where its first text begins."""
        previous, start = self._text_before(first)
        between = self.text[start:first]
        messages = self._first_messages(i)
        asked = self.render(messages, True)
        number, position = asked.marks[-1] if asked.marks else (None, 0)
        prompt = asked.text[position:]
        if number == previous and between.startswith(prompt):
            return start + len(prompt)
        # The turn begins differently from the prompt. It may have a tool call where the prompt has
        # <think>, or no user's turn before it.
        unasked = self.render(messages, False).text
        common = common_prefix(asked.text, unasked)
        if common != unasked:  # without a prompt, the template adds other text
            common = common[: self._last_boundary(common, 0, len(common))]
        prompt = asked.text[len(common) :] or prompt
        shared = self._shared(prompt, between)
        if not shared:
            raise ConfigError(
                f"message {i + 1}: the chat template starts it differently from its generation "
                f"prompt, so where it begins is unclear{REMEDY}"
            )
        return start + shared

    def _text_before(self, first: int) -> tuple[int | None, int]:
        """Returns (the number of the last end mark before a position, that mark's position)."""
        previous = None
        start = 0
        for number, position in self.positions.items():
            if position <= first and number % 2:
                previous = number
                start = position
        return previous, start

    def _first_messages(self, count: int) -> list[Message]:
        """The first `count` messages. Inserts a user's message before the assistant's first if
        there is none, because templates expect one."""
        messages = self.marked.messages[:count]
        roles = [message["role"] for message in messages]
        turn = roles.index("assistant") if "assistant" in roles else count
        if "user" not in roles[:turn]:
            messages.insert(turn, self.marked.question)
        return messages

    def _shared(self, prompt: str, text: str) -> int:
        """Where the longest substring that a text shares with the prompt ends in the text. Excludes
        an incomplete word or special token at its end. 0 if they share nothing."""
        matcher = difflib.SequenceMatcher(None, prompt, text, autojunk=False)
        in_prompt, begin, size = matcher.find_longest_match()
        end = begin + size
        if end < len(text) and in_prompt + size < len(prompt):
            end = self._last_boundary(text, begin, end)
        return end if text[begin:end].strip() else 0

    def _last_boundary(self, text: str, begin: int, end: int) -> int:
        """Where the last special token or white space character between two positions ends."""
        boundaries = [match.end() for match in self.boundaries.finditer(text, begin, end)]
        return boundaries[-1] if boundaries else begin

    def _end(self, i: int, first: int, last: int) -> int:
        """One past the special token that ends the turn.

        This token follows the turn's text whether or not the conversation continues, or it also
        ends the previous message. `first` is where the turn's first text begins; `last` is the
        number of the mark where its last text ends.
        """
        start = self.positions[last]
        follows = self.text[start:]
        alone = self.rendering
        if i + 1 < len(self.marked.messages):
            alone = self.render(self._first_messages(i + 1), False)
        closing = ""
        for number, position in alone.marks:
            if number == last:
                closing = common_prefix(alone.text[position:], follows)
        ends = [end.end() for end in self._ends(closing)]
        if ends:
            return start + ends[-1]
        end = self.special.match(follows)
        previous_end = self.special.match(self.text, self._text_before(first)[1])
        if end and previous_end and end[0] == previous_end[0]:
            return start + end.end()
        later = [position for position in self.positions.values() if position > start]
        behind = self.text[start : min(later, default=None)].strip()
        shown = f"it is followed by {behind!r}" if behind else "nothing follows it"
        raise ConfigError(no_end(f"message {i + 1}", shown))

    def _ends(self, closing: str) -> list[re.Match]:
        """The special tokens after a turn, up to one that may begin another turn: some templates
        add the generation prompt even if it was not requested."""
        ends: list[re.Match] = []
        for token in self.special.finditer(closing):
            if ends and token[0] in self.openers:
                break
            ends.append(token)
        return ends


def differs(text: str, render: Callable[[], Rendering]) -> bool:
    """Whether a rendering's text differs from this text."""
    try:
        return render().text != text
    except ConfigError:  # the template requires the missing part
        return True


def common_prefix(first: str, second: str) -> str:
    for i, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return first[:i]
    return min(first, second, key=len)


def no_end(turn: str, shown: str) -> str:
    """The message for a turn that no special token ends. `shown` quotes the text at its end."""
    return (
        f"{turn}: the chat template ends it with no special token of this tokenizer, and no model "
        f"would learn to end its turn: {shown}; data.chat_template names another template, "
        "data.tokenizer a tokenizer that has its tokens"
    )
