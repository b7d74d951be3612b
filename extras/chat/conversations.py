"""data.messages_field: conversations as training data, of which only the assistant's tokens have a loss.

A chat template renders each conversation as transformers does, and the text is tokenized as a whole. The assistant's
characters are those of the template's {% generation %} blocks or, if it has none, what each of the assistant's turns
adds to the text; a token that holds one of them has a loss. In token files a token without a loss is stored as its
complement, -1 - id: the sign is the loss mask.

Special tokens are the template's alone: one that a message spells out is encoded as plain text.
"""

import array
import functools
import itertools
import json
import pathlib
import re
from typing import Any

from config import ConfigError
from data.encode import Encoded, TokenizerCopy, is_validation
from data.tokenizer import SPACE, Tokenizer
from extras.chat.messages import Message, checked
from extras.chat.template import NONCHARACTERS, SETTINGS, Sandbox, bounded, find_template

# conversations that are listed if they cannot be rendered: a template may fail on all
MOST_PROBLEMS = 10

Spans = list[tuple[int, int]]  # (first character, one past the last)


class Chat:
    """A tokenizer and a chat template: conversations -> ids. Raises ConfigError."""

    def __init__(self, tokenizer: str | pathlib.Path, template: str | None = None):
        """tokenizer: as Tokenizer's; template: a Jinja file, absent: the tokenizer's own."""
        self.tokenizer = Tokenizer(tokenizer)
        self.fast = "tokenizer.json" in self.tokenizer.files
        self.model = self.tokenizer.model.inner if self.fast else self.tokenizer.model
        self.special: dict[str, int]  # ids by name
        if self.fast:
            self.special = {
                t.content: i
                for i, t in self.model.get_added_tokens_decoder().items()
                if t.special and len(t.content) > 1
            }
            settings = json.loads(self.tokenizer.files.get(SETTINGS, b"{}"))
            named = {
                key: value["content"] if isinstance(value, dict) else value
                for key, value in settings.items()
                if key.endswith("_token")
                and (
                    isinstance(value, str)
                    or (isinstance(value, dict) and isinstance(value.get("content"), str))
                )
            }
        else:
            pieces = {i: self.model.id_to_piece(i) for i in range(self.tokenizer.vocab_size)}
            self.special = {piece: i for i, piece in pieces.items() if self.model.is_control(i)}
            ids = {
                "bos_token": self.model.bos_id(),
                "eos_token": self.model.eos_id(),
                "unk_token": self.model.unk_id(),
                "pad_token": self.model.pad_id(),
            }
            named = {key: pieces[i] for key, i in ids.items() if i >= 0}
            if self.tokenizer.space is None:
                raise ConfigError(
                    f"{tokenizer}: this sentencepiece model adds a space before every text, and does not "
                    "say whether after a special token, too; name its tokenizer.json"
                )
            if not hasattr(self.model, "encode_as_offset_mapping"):
                raise ConfigError(
                    f"{tokenizer}: this version of sentencepiece cannot say which characters a token "
                    "stands for, as the loss mask needs; use 0.2.3 or later, or a tokenizer.json"
                )
        # of unknown text
        self.reserved = {*self.special.values()} - {self.special.get(named.get("unk_token", ""))}
        # a name that contains another counts
        names: list[str] = sorted(self.special, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
        self.heads = {name[:i] for name in names for i in range(1, len(name))}
        self.tails = {name[i:] for name in names for i in range(1, len(name))}
        self.sandbox = Sandbox()
        text = find_template(tokenizer, template)
        with bounded():
            self.template = self.sandbox.from_string(text, named)

    def rendered(self, messages: list[Message], prompt: bool = False) -> tuple[str, Spans]:
        """The text, and the characters of its {% generation %} blocks; prompt: up to where the assistant speaks."""
        begin, end, _ = self.sandbox.marks
        text = self.template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt
        )
        parts, spans, at = re.split(f"([{begin}{end}])", text), [], 0
        for part in parts:
            if part == begin:
                spans.append((at, at))
            elif part == end:
                spans[-1] = (spans[-1][0], at)
            else:
                at += len(part)
        return "".join(part for part in parts if part not in (begin, end)), spans

    def encode(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and which have a loss: none if the assistant says nothing in a turn, or has no
        turn. The messages as checked() returns them."""
        turns = [message for message in messages if message["role"] == "assistant"]
        if not turns or not all(
            (turn.get("content") or "").strip() or turn.get("tool_calls") for turn in turns
        ):
            return [], []
        whole, spans, marked = self.marked(messages)
        if not self.sandbox.has_blocks:
            with bounded():
                spans = self.turns(messages, whole)
        for first, stop in spans:
            after = self.pattern.match(whole, stop)
            if after and not whole[first:stop].rstrip().endswith(tuple(self.special)):
                raise ConfigError(
                    f"the chat template ends the assistant's turn before {after[0]}, and no model would "
                    "learn to end its turn; put that into the {% generation %} block"
                )
        ids, places = self.tokens(marked)
        learned, before, span = [], 0, 0
        for begin, end in places:
            # offsets may leave out white space, which belongs to the token after it
            first = min(begin, before)
            while span < len(spans) and spans[span][1] <= first:
                span += 1
            learned.append(span < len(spans) and spans[span][0] < max(end, first + 1))
            before = end
        return (ids, learned) if any(learned) else ([], [])

    def prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation up to where the assistant speaks."""
        return self.tokens(self.marked(messages, prompt=True)[2])[0]

    def end_of_turn(self) -> list[int]:
        """The special token that ends an assistant's turn; none if the template has none."""
        ids, learned = self.encode(
            [{"role": role, "content": "a"} for role in ("user", "assistant")]
        )
        last = [
            token
            for token, has_loss in zip(ids, learned)
            if has_loss and token in self.special.values()
        ]
        return last[-1:]

    def turns(self, messages: list[Message], whole: str) -> Spans:
        """The assistant's characters by prefixes: what its turn adds after the prompt for it, up to its last special
        token where only white space follows."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = (
                    self.rendered(messages[:i], True)[0],
                    self.rendered(messages[: i + 1])[0],
                )
                if not (whole.startswith(after) and after.startswith(before)):
                    raise ConfigError(
                        f"the chat template renders the first {i + 1} messages differently once others follow, or adds "
                        "no prompt before the assistant's turn (some leave out earlier reasoning): what the assistant "
                        "said is unclear; mark it with {% generation %} in a template of your own, data.chat_template"
                    )
                ends = [
                    found.end() for found in self.pattern.finditer(whole, len(before), len(after))
                ]
                only_space = ends and not whole[ends[-1] : len(after)].strip()
                spans.append((len(before), ends[-1] if only_space else len(after)))
        return spans

    def marked(self, messages: list[Message], prompt: bool = False) -> tuple[str, Spans, str]:
        """rendered(), and the text with a guard in each special token that a message spells out."""
        said = json.dumps(messages, ensure_ascii=False)
        self.sandbox.marks = "".join([c for c in NONCHARACTERS if c not in said][:3])
        if len(self.sandbox.marks) < 3:
            raise ConfigError("has all of Unicode's noncharacters U+FDD0 to U+FDEF")
        safe = self.guarded(messages)
        with bounded():
            whole, spans = self.rendered(messages, prompt)
            marked = self.rendered(safe, prompt)[0] if safe != messages else whole
        if marked.replace(self.sandbox.marks[2], "") != whole:
            raise ConfigError(
                "spells out a special token, and the chat template renders the message differently "
                "without it; leave it out"
            )
        return whole, spans, marked

    def guarded(self, value: Any) -> Any:
        """Messages whose strings have a guard, a character that the text lacks, in each special token that they spell
        out, and where they begin or end like one, which what the template writes beside them could complete."""
        if isinstance(value, list):
            return [self.guarded(entry) for entry in value]
        if isinstance(value, dict):
            return {
                self.guarded(key): part if key == "role" else self.guarded(part)
                for key, part in value.items()
            }
        if not isinstance(value, str) or not (body := value.strip()):
            return value
        guard, reach = self.sandbox.marks[2], range(1, 1 + max(map(len, self.heads), default=0))
        while (
            broken := self.pattern.sub(lambda name: f"{name[0][0]}{guard}{name[0][1:]}", body)
        ) != body:
            body = broken
        body = guard * any(body[:n] in self.tails for n in reach) + body
        body += guard * any(body[-n:] in self.heads for n in reach)
        return value.replace(value.strip(), body)

    def tokens(self, marked: str) -> tuple[list[int], Spans]:
        """The ids of a text with guards, which it does not contain, and the characters of each."""
        guard = self.sandbox.marks[2]
        if self.fast and guard not in marked:
            found = self._offsets(marked, special=True)
        else:
            found = self._split(marked, "")
            # Between special tokens, as if each part stood alone; is that the same for this tokenizer? By the twin that
            # has a letter for each guard, and so spells out none.
            if (
                self.fast
                and self._split(marked, "a")[0]
                != self._offsets(marked.replace(guard, "a"), special=True)[0]
            ):
                raise ConfigError(
                    "spells out a special token, and this tokenizer encodes the text between two special "
                    "tokens differently where it stands alone; leave the conversation out"
                )
        written = [self.special[name] for name in self.pattern.findall(marked)]
        if [token for token in found[0] if token in self.reserved] != [
            i for i in written if i in self.reserved
        ]:
            raise ConfigError("its tokenizer makes special tokens of other text than their names")
        return found

    def _split(self, marked: str, instead: str) -> tuple[list[int], Spans]:
        ids, places, at = [], [], 0
        for number, part in enumerate(self.pattern.split(marked)):
            part = part.replace(self.sandbox.marks[2], instead)
            more, where = (
                ([self.special[part]], [(0, len(part))]) if number % 2 else self._offsets(part)
            )
            ids += more
            places += [(at + begin, at + end) for begin, end in where]
            at += len(part)
        return ids, places

    def _offsets(self, text: str, special: bool = False) -> tuple[list[int], Spans]:
        """The ids of a text and the characters of each; special: names of special tokens become those."""
        if self.fast:
            self.model.encode_special_tokens = not special
            try:
                found = self.model.encode(text, add_special_tokens=False)
            except Exception as error:  # e.g. an unknown word, if the vocabulary has no UNK entry
                raise ConfigError(
                    f"{self.tokenizer.path}: its tokenizer fails on a text: {error}"
                ) from None
            finally:
                self.model.encode_special_tokens = True
            return found.ids, found.offsets
        ids, places, at = [], [], 0
        for number, part in enumerate(text.split(SPACE)):  # as Tokenizer.encode() does
            if number:
                ids += (space := self.tokenizer.space or [])
                places += [(at, at + 1)] * len(space)
                at += 1
            found = self.model.encode_as_offset_mapping(part)
            ids += found["ids"]
            places += [(at + begin, at + end) for begin, end in found["offsets"]]
            at += len(part)
        return ids, places


@functools.lru_cache(2)
def load_chat(copy: TokenizerCopy) -> Chat:
    """The tokenizer and template of a folder. Raises ConfigError."""
    return Chat(copy.folder)


def encode_conversations(copy: TokenizerCopy, typecode: str, documents: list[str]) -> Encoded:
    """data.encode.encode_documents() of conversations: ids are complemented where they have no loss, and there are none
    if the conversation is left out. Raises ConfigError."""
    chat = load_chat(copy)
    encoded, problems = [], []
    for document in documents:
        where, messages = json.loads(document)
        try:
            ids, learned = chat.encode(checked(messages))
        except ConfigError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
            if len(problems) >= MOST_PROBLEMS:
                break
            continue
        stored = array.array(
            typecode, [token if has_loss else ~token for token, has_loss in zip(ids, learned)]
        )
        encoded.append((is_validation(json.dumps(messages)), stored.tobytes()))
    if problems:
        raise ConfigError(*problems)
    return encoded


def spelled(tokenizer: Tokenizer, stored: list[int]) -> str:
    """The text of ids as token files store them, special tokens included; what has a loss is between « and »."""
    parts = []
    for has_loss, run in itertools.groupby(stored, lambda token: token >= 0):
        ids = [token if has_loss else ~token for token in run]
        if "tokenizer.json" in tokenizer.files:
            text = tokenizer.model.inner.decode(ids, skip_special_tokens=False)
        else:  # decodes control tokens to nothing
            text = "".join(
                "".join(tokenizer.model.id_to_piece([*group]))
                if control
                else tokenizer.decode([*group])
                for control, group in itertools.groupby(ids, tokenizer.model.is_control)
            )
        parts.append(f"«{text}»" if has_loss else text)
    return "".join(parts)
