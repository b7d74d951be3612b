"""Tokenizes conversations for training; only the assistant's tokens have a loss.

A chat template renders each conversation as transformers does, and the full text is tokenized. The
assistant's characters are those in the template's {% generation %} blocks. If the template has no
such block, marks in a second rendering locate them (turns.py). A token with at least one of these
characters has a loss. Token files store a token without a loss as its complement, -1 - id, so
the sign is the loss mask.

Special tokens come from the template alone. The name of one in a message is encoded as plain text.
"""

import array
import contextlib
import functools
import itertools
import json
import pathlib
import re
from typing import Any, NamedTuple

from config import ConfigError
from tools.prepare.chat.messages import TOO_DEEP, Message, from_document, with_reasoning
from tools.prepare.chat.template import (
    NONCHARACTERS,
    Marks,
    Sandbox,
    find_template,
    template_errors,
)
from tools.prepare.chat.turns import Rendering, Spans, Turns, differs, no_end
from tools.prepare.row_format import Encoded, is_held_out
from tools.prepare.tokenizer import SPACE, Tokenizer
from tools.prepare.tokenizer_json import settings_of, token_name


class Tokens(NamedTuple):
    """The token ids of a text, and the range of characters of each token."""

    ids: list[int]
    offsets: Spans

    def extend(self, tokens: "Tokens", position: int) -> None:
        """Appends the tokens of the text that begins at this position."""
        self.ids.extend(tokens.ids)
        for begin, end in tokens.offsets:
            self.offsets.append((position + begin, position + end))


class Chat:
    """Turns conversations into ids with a tokenizer and a chat template. Raises ConfigError."""

    def __init__(self, tokenizer: str | pathlib.Path, template: str | None = None):
        """tokenizer: as for Tokenizer. template: a Jinja file; None selects the tokenizer's own."""
        self.tokenizer = Tokenizer(tokenizer)
        self.is_json = "tokenizer.json" in self.tokenizer.files
        # special: name -> id. variables: variable of the template -> name
        if self.is_json:
            self.model = self.tokenizer.model.inner
            variables = json_token_variables(settings_of(self.tokenizer.files))
            # transformers treats them as special even if tokenizer.json does not
            known = [
                name for name in variables.values() if self.model.token_to_id(name) is not None
            ]
            self.model.add_special_tokens(known)
            self.special = json_special_tokens(self.model)
        else:
            self.model = self.tokenizer.model
            if self.tokenizer.space is None:
                raise ConfigError(
                    f"{self.tokenizer.path}: this sentencepiece model adds a space before every "
                    "text, and does not say whether after a special token, too; name its "
                    "tokenizer.json"
                )
            self.special = sentencepiece_special_tokens(self.model)
            variables = sentencepiece_token_variables(self.model)
        # ids that only the name of a special token may produce; unknown text produces UNK
        unk = self.special.get(variables.get("unk_token", ""))
        self.reserved = set(self.special.values()) - {unk}

        # longest first, because one name may contain another
        names = sorted(self.special, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, names)) or "(?!)"  # (?!) never matches
        self.pattern = re.compile(f"({alternatives})")
        # proper prefixes and suffixes of the names
        self.prefixes: set[str] = set()
        self.suffixes: set[str] = set()
        for name in names:
            for i in range(1, len(name)):
                self.prefixes.add(name[:i])
                self.suffixes.add(name[i:])

        self.sandbox = Sandbox()
        text = find_template(tokenizer, template)
        with template_errors():
            self.template = self.sandbox.from_string(text, variables)

    def encode(
        self,
        messages: list[Message],
        tools: list | None = None,
        has_loss: list[bool] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Returns the ids of a conversation, and for each id whether it has a loss.

        messages: as checked() returns them. has_loss selects among the assistant's messages; None
        selects all. Both results are empty if no message has a loss. They are also empty if a turn
        of the assistant has neither text nor tool calls: it would teach the model to end its turn
        at once, and nothing would show which characters belong to it.
        """
        learned = learned_turns(messages, has_loss)
        if not any(learned) or not assistant_always_speaks(messages):
            return [], []
        self._choose_marks(messages, tools)
        rendering, guarded = self._render_guarded(messages, tools)
        spans = self._spans(messages, tools, learned, rendering)
        ids, offsets = self._tokenize_guarded(guarded)
        mask = overlap(offsets, spans)
        if not any(mask):
            return [], []
        return ids, mask

    def _spans(
        self,
        messages: list[Message],
        tools: list | None,
        has_loss: list[bool],
        rendering: Rendering,
    ) -> Spans:
        """The ranges of characters with a loss in a rendering. Raises ConfigError."""
        turns = Turns(
            messages,
            self.sandbox.marks.mark,
            lambda messages, prompt: self._render(messages, tools, prompt),
            self.pattern,
        )
        if turns.text != rendering.text:
            raise ConfigError(
                "the chat template renders the messages differently with marks in their texts, so "
                "where they stand is unclear; name another one, data.chat_template"
            )
        turns.check_complete(has_loss)
        if tools and not differs(rendering.text, lambda: self._render(messages, None)):
            raise ConfigError(
                "the chat template leaves out the tools; name one that renders them, "
                "data.chat_template, or leave them out of the data"
            )
        if not self.sandbox.has_blocks:
            return turns.spans(has_loss)
        self._check_ends_of_turns(rendering.text, rendering.blocks)
        return turns.with_loss(rendering.blocks, has_loss)

    def prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation, with the generation prompt at its end."""
        self._choose_marks(messages, None)
        _, guarded = self._render_guarded(messages, None, prompt=True)
        return self._tokenize_guarded(guarded).ids

    def end_of_turn(self) -> list[int]:
        """The ids of the special tokens that end an assistant's turn, both before another turn and
        at the end of a conversation. Empty if the template has none, or cannot be rendered."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        ends = []
        for messages in (turn, turn + turn):
            first_turn = [i < len(turn) for i in range(len(messages))]
            with contextlib.suppress(ConfigError):  # some end a turn in only one case
                ids, has_loss = self.encode(messages, None, first_turn)
                learned = itertools.compress(ids, has_loss)
                ends += [token for token in learned if token in self.special.values()][-1:]
        return list(dict.fromkeys(ends))

    # Rendering

    def _render(
        self, messages: list[Message], tools: list | None, prompt: bool = False
    ) -> Rendering:
        """Renders a conversation. prompt=True adds the generation prompt."""
        begin, end, _, mark = self.sandbox.marks
        with template_errors():
            marked = self.template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            )
        text = ""
        blocks = []
        marks = []
        open_blocks = 0
        for piece in re.split(f"({mark}\\d+{mark}|[{begin}{end}])", marked):
            if piece == begin:
                open_blocks += 1
                if open_blocks == 1:
                    blocks.append((len(text), len(text)))
            elif piece == end:
                open_blocks -= 1
                if blocks:
                    blocks[-1] = (blocks[-1][0], len(text))
            elif piece.startswith(mark):
                marks.append((int(piece.strip(mark)), len(text)))
            else:
                text += piece
        if open_blocks:
            raise ConfigError("the chat template cuts off an end of a {% generation %} block")
        return Rendering(text, blocks, marks)

    def _choose_marks(self, messages: list[Message], tools: list | None) -> None:
        """Chooses characters that the conversation does not contain. Raises ConfigError."""
        characters = json.dumps([messages, tools], ensure_ascii=False)
        unused = [c for c in NONCHARACTERS if c not in characters]
        if len(unused) < len(Marks._fields):
            raise ConfigError("has all of Unicode's noncharacters U+FDD0 to U+FDEF")
        self.sandbox.marks = Marks(*unused[: len(Marks._fields)])

    def _render_guarded(
        self, messages: list[Message], tools: list | None, prompt: bool = False
    ) -> tuple[Rendering, str]:
        """Returns the rendering, and its text with a guard in each special token's name that a
        message contains. Raises ConfigError if the guards change the rendering."""
        rendering = self._render(messages, tools, prompt)
        guarded = rendering.text
        guarded_messages = self._guard(messages)
        guarded_tools = self._guard(tools)
        if guarded_messages != messages or guarded_tools != tools:
            guarded = self._render(guarded_messages, guarded_tools, prompt).text
        if guarded.replace(self.sandbox.marks.guard, "") != rendering.text:
            raise ConfigError(
                "spells out a special token, and the chat template renders the message differently "
                "without it; leave it out"
            )
        return rendering, guarded

    def _guard(self, value: Any) -> Any:
        """Inserts guards into the strings of messages, so that none produces a special token.

        A guard splits each name of a special token. The template's text next to a string could also
        complete a name. So a guard precedes a string that begins with the end of a name, and
        follows a string that ends with the beginning of a name.
        """
        if isinstance(value, list):
            return [self._guard(entry) for entry in value]
        if isinstance(value, dict):
            guarded = {}
            for key, entry in value.items():
                guarded[self._guard(key)] = entry if key == "role" else self._guard(entry)
            return guarded
        if not isinstance(value, str) or not value.strip():
            return value
        text = value.strip()  # a template may strip it, too
        guard = self.sandbox.marks.guard
        # repeat, since names may overlap
        while self.pattern.search(text):
            text = self.pattern.sub(lambda name: f"{name[0][0]}{guard}{name[0][1:]}", text)
        lengths = range(1, max(map(len, self.special), default=1))
        may_end_a_name = any(text[:n] in self.suffixes for n in lengths)
        may_begin_a_name = any(text[-n:] in self.prefixes for n in lengths)
        if may_end_a_name:
            text = guard + text
        if may_begin_a_name:
            text += guard
        return value.replace(value.strip(), text)

    def _check_ends_of_turns(self, text: str, blocks: Spans) -> None:
        """Raises ConfigError if a turn does not end with a special token, or if that token is
        outside the turn's {% generation %} block."""
        names = tuple(self.special)
        for begin, end in blocks:
            special = self.pattern.match(text, end)
            if special and not text[begin:end].rstrip().endswith(names):
                raise ConfigError(
                    f"the chat template ends the assistant's turn before {special[0]}, and no "
                    "model would learn to end its turn; put that into the {% generation %} block"
                )
        last = text[slice(*blocks[-1])].rstrip() if blocks else ""
        if last and not last.endswith(names):
            raise ConfigError(no_end("the last turn", f"its text ends with {last[-30:]!r}"))

    # Tokenizing

    def _tokenize_guarded(self, guarded: str) -> Tokens:
        """The tokens of a text with guards, as if the guards were not in the text."""
        guard = self.sandbox.marks.guard
        if self.is_json and guard not in guarded:
            tokens = self._tokenize(guarded, special=True)
        else:
            tokens = self._tokenize_by_pieces(guarded, guard_becomes="")
            if self.is_json:
                self._check_pieces(guarded)
        names = [self.special[name] for name in self.pattern.findall(guarded)]
        expected = [token for token in names if token in self.reserved]
        reserved = [token for token in tokens.ids if token in self.reserved]
        if reserved != expected:
            raise ConfigError("its tokenizer makes special tokens of other text than their names")
        return tokens

    def _check_pieces(self, guarded: str) -> None:
        """Raises ConfigError if the tokenizer encodes the text between two special tokens
        differently from the same text alone.

        Compares the two with a letter in place of each guard, which splits names as well.
        """
        by_pieces = self._tokenize_by_pieces(guarded, guard_becomes="a")
        at_once = self._tokenize(guarded.replace(self.sandbox.marks.guard, "a"), special=True)
        if by_pieces.ids != at_once.ids:
            raise ConfigError(
                "spells out a special token, and this tokenizer encodes the text between two "
                "special tokens differently where it stands alone; leave the conversation out"
            )

    def _tokenize_by_pieces(self, guarded: str, guard_becomes: str) -> Tokens:
        """Encodes each piece of text between special tokens on its own."""
        tokens = Tokens([], [])
        position = 0
        for number, piece in enumerate(self.pattern.split(guarded)):
            piece = piece.replace(self.sandbox.marks.guard, guard_becomes)
            if number % 2:  # split() alternates between text and names
                piece_tokens = Tokens([self.special[piece]], [(0, len(piece))])
            else:
                piece_tokens = self._tokenize(piece)
            tokens.extend(piece_tokens, position)
            position += len(piece)
        return tokens

    def _tokenize(self, text: str, special: bool = False) -> Tokens:
        """The tokens of a text. special=True encodes names of special tokens as those tokens; only
        a tokenizer.json supports it."""
        if not self.is_json:
            return self._tokenize_by_sentencepiece(text)
        self.model.encode_special_tokens = not special
        try:
            encoding = self.model.encode(text, add_special_tokens=False)
        except Exception as error:  # e.g. an unknown word, if the vocabulary has no UNK entry
            raise ConfigError(
                f"{self.tokenizer.path}: its tokenizer fails on a text: {error}"
            ) from None
        finally:
            self.model.encode_special_tokens = True
        return Tokens(encoding.ids, encoding.offsets)

    def _tokenize_by_sentencepiece(self, text: str) -> Tokens:
        """The tokens of a text. Encodes SPACE as byte tokens, as Tokenizer.encode() does."""
        space = self.tokenizer.space or []
        space_tokens = Tokens(space, [(0, 1)] * len(space))
        tokens = Tokens([], [])
        position = 0
        for number, piece in enumerate(text.split(SPACE)):
            if number:
                tokens.extend(space_tokens, position)
                position += 1
            encoding = self.model.encode_as_offset_mapping(piece)
            tokens.extend(Tokens(encoding["ids"], encoding["offsets"]), position)
            position += len(piece)
        return tokens


def json_special_tokens(model: Any) -> dict[str, int]:
    """The ids of a tokenizer.json's special tokens, by name."""
    special = {}
    for token_id, token in model.get_added_tokens_decoder().items():
        if token.special and len(token.content) > 1:
            special[token.content] = token_id
    return special


def json_token_variables(settings: bytes) -> dict[str, str]:
    """The variables bos_token, eos_token, ... that transformers reads from a tokenizer_config.json
    and passes to a template."""
    named = json.loads(settings)
    extra = named.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    variables = {}
    for key, value in named.items():
        name = token_name(value)
        if name is not None and (key.endswith("_token") or key in (extra or ())):
            variables[key] = name
    return variables


def sentencepiece_special_tokens(model: Any) -> dict[str, int]:
    """The ids of a sentencepiece model's control tokens, by name."""
    control = filter(model.is_control, range(model.vocab_size()))
    return {model.id_to_piece(token): token for token in control}


def sentencepiece_token_variables(model: Any) -> dict[str, str]:
    ids = {
        "bos_token": model.bos_id(),
        "eos_token": model.eos_id(),
        "unk_token": model.unk_id(),
        "pad_token": model.pad_id(),
    }
    return {key: model.id_to_piece(token) for key, token in ids.items() if token >= 0}


def learned_turns(messages: list[Message], has_loss: list[bool] | None) -> list[bool]:
    """For each message, whether it has a loss: it is the assistant's, and has_loss selects it."""
    by_assistant = [message["role"] == "assistant" for message in messages]
    if has_loss is None:
        return by_assistant
    return [says and learned for says, learned in zip(by_assistant, has_loss, strict=True)]


def assistant_always_speaks(messages: list[Message]) -> bool:
    """Whether each turn of the assistant has text or tool calls."""
    for message in messages:
        text = message.get("content") or ""
        is_silent = not text.strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and is_silent:
            return False
    return True


def overlap(offsets: Spans, spans: Spans) -> list[bool]:
    """For each token, whether it contains a character of a span."""
    overlaps = []
    previous_end = 0
    span = 0
    for begin, end in offsets:
        # offsets may leave out white space, which belongs to the token after it
        first = min(begin, previous_end)
        while span < len(spans) and spans[span][1] <= first:
            span += 1
        overlaps.append(span < len(spans) and spans[span][0] < max(end, first + 1))
        previous_end = end
    return overlaps


@functools.lru_cache(2)
def load_chat(folder: pathlib.Path) -> Chat:
    """Loads a folder's tokenizer and template, once per process. Raises ConfigError."""
    return Chat(folder)


def encode_conversations(folder: pathlib.Path, documents: list[str]) -> list[Encoded]:
    """Does for conversations what row_format.encode_texts() does for texts.

    Complements ids without a loss. A conversation that is left out has no ids. Raises ConfigError,
    which names the row of the first invalid conversation.
    """
    chat = load_chat(folder)
    encoded = []
    for document in documents:
        where, conversation = from_document(document)
        messages = [with_reasoning(message) for message in conversation.messages]
        try:
            ids, has_loss = chat.encode(messages, conversation.tools, conversation.has_loss)
        except ConfigError as error:
            raise ConfigError(*(f"{where}: {problem}" for problem in error.problems)) from None
        except RecursionError:
            raise ConfigError(f"{where}: {TOO_DEEP}") from None
        signed = [token if learned else ~token for token, learned in zip(ids, has_loss)]
        stored = array.array("i", signed).tobytes()
        is_first = is_held_out(json.dumps(conversation.messages))
        encoded.append(Encoded(is_first, stored, unknown=ids.count(chat.tokenizer.unknown)))
    return encoded


def spelled(tokenizer: Tokenizer, stored: list[int]) -> str:
    """The text of ids from a token file, with the names of special tokens. « and » enclose text
    with a loss."""
    text = ""
    for has_loss, run in itertools.groupby(stored, lambda token: token >= 0):
        if has_loss:
            text += f"«{decode_with_special(tokenizer, list(run))}»"
        else:
            text += decode_with_special(tokenizer, [~token for token in run])
    return text


def decode_with_special(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids, with the names of special tokens."""
    if "tokenizer.json" in tokenizer.files:
        return tokenizer.model.inner.decode(ids, skip_special_tokens=False)
    text = ""
    for is_control, run in itertools.groupby(ids, tokenizer.model.is_control):
        if is_control:  # decodes to nothing
            text += "".join(map(tokenizer.model.id_to_piece, run))
        else:
            text += tokenizer.decode(list(run))
    return text
