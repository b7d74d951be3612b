"""Compares chat templates, rendered, tokenized and masked here, with transformers' apply_chat_template.

    python -m benchmarks.chat_templates FOLDER
    python -m benchmarks.chat_templates FOLDER --reasons

Renders 16 conversations by each .jinja file in a folder, with a tokenizer of bytes and of the
special tokens that the template spells. Prints the counts for each conversation and, with
--reasons, why we refuse one that transformers renders. Ids must be equal where both render, and
masks too where the template has {% generation %}.

The mask of a template without {% generation %} has no counterpart in transformers. Where the folder
has NAME.jinja and NAME_training.jinja, as trl's wheel does, and both render to the same ids, the
mask of the first is compared with that of the second, white space at the ends of turns aside.

Exits with 1 where something differs. Needs transformers (tests/requirements.txt).
"""

import argparse
import collections
import itertools
import json
import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple

import tokenizers
import transformers

from config import ConfigError
from tools.prepare.chat.conversations import Chat
from tools.prepare.chat.messages import checked

Messages = list[dict[str, Any]]

SPELLINGS = re.compile(
    r"""
    <([|\uff5c])[^<>\s'"|\uff5c]{1,40}\1>    # <|im_end|>, and DeepSeek's with a wide bar
    | <\|[a-z_"]+> | <[a-z_"]+\|>           # <|turn>, <turn|>
    | <(?:start|end|begin|beginning)_of_[a-z]+> | <seed:[bet]os>
    | </assistant> | <extra_id_\d> | <SPECIAL_\d+> | <sep>
    | \[/?[A-Z_]{3,}\] | \[\|[a-z]+\|\]     # [INST], [|assistant|]
    | \]~!?b[\]\[] | \[e~\[                 # MiniMax's
    """,
    re.VERBOSE,
)
BOS = "<s>"
EOS = "</s>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


SYSTEM = {"role": "system", "content": "Be brief, and kind."}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION = user("What time is it in Rome?")
CALLS = assistant("", tool_calls=[call("clock", city="Rome")])
RESULT = {"role": "tool", "content": "12:05", "tool_call_id": "call00001", "name": "clock"}
THREE_TURNS = [
    user("Who wrote Emma?"),
    assistant("Jane Austen did."),
    user("When?"),
    assistant("In 1815."),
    user("Where was she born?"),
    assistant("In Steventon, Hampshire."),
]

CONVERSATIONS: dict[str, Messages] = {
    "plain": [user("Who wrote Emma?"), assistant("Jane Austen did.")],
    "three turns": THREE_TURNS,
    "system": [SYSTEM, *THREE_TURNS[:2]],
    "system, three turns": [SYSTEM, *THREE_TURNS],
    "tool call": [QUESTION, CALLS, RESULT, assistant("It is five past noon.")],
    "tool call last": [QUESTION, CALLS],
    "two tool calls": [
        QUESTION,
        assistant("Both:", tool_calls=[call("clock", city="Rome"), call("clock", 2, city="Oslo")]),
        RESULT,
        {**RESULT, "tool_call_id": "call00002"},
        assistant("The same in both."),
    ],
    "tool call without content": [
        QUESTION,
        {"role": "assistant", "tool_calls": CALLS["tool_calls"]},
        RESULT,
        assistant("It is five past noon."),
    ],
    "reasoning": [QUESTION, assistant("Noon.", reasoning_content="The sun stands high.")],
    "reasoning, two turns": [
        QUESTION,
        assistant("Noon.", reasoning_content="The sun stands high."),
        user("And in Oslo?"),
        assistant("Noon, too.", reasoning_content="The same zone."),
    ],
    "<think> in content": [QUESTION, assistant("<think>\nThe sun stands high.\n</think>\n\nNoon.")],
    "<think> in content, two turns": [
        QUESTION,
        assistant("<think>\nThe sun stands high.\n</think>\n\nNoon."),
        user("And in Oslo?"),
        assistant("<think>\nThe same zone.\n</think>\n\nNoon, too."),
    ],
    "white space": [user("  Who wrote\n\n Emma? \n"), assistant("\n Jane Austen\n  did. \n\n")],
    "Unicode, markup": [user("¿Qué es ✓ & <b>?"), assistant("Ein Häkchen: ✓ « 了 » & `List<T>`")],
    "assistant first": [assistant("Hello! How can I help?"), *THREE_TURNS[:2]],
    "empty question": [user(""), assistant("You said nothing.")],
}


class Case(NamedTuple):
    """What became of a conversation."""

    kind: str
    reason: str = ""


EQUAL = "ids and mask equal"
EQUAL_IDS = "ids equal, no tags"
LEFT_OUT = "left out here"
ONLY_WE_REFUSE = "only we refuse"
BOTH_REFUSE = "both refuse"
IDS_DIFFER = "ids differ"
MASK_DIFFERS = "mask differs"
ONLY_WE_RENDER = "only we render"
KINDS = (EQUAL, EQUAL_IDS, LEFT_OUT, ONLY_WE_REFUSE, BOTH_REFUSE)
FAULTS = (IDS_DIFFER, MASK_DIFFERS, ONLY_WE_RENDER)


class Template:
    """A chat template with a tokenizer of its own, here and in transformers."""

    def __init__(self, text: str, folder: pathlib.Path):
        """folder: receives the tokenizer."""
        self.text = text
        special = [BOS, EOS, *dict.fromkeys(match[0] for match in SPELLINGS.finditer(text))]
        save_tokenizer(special, folder)
        (folder / "chat_template.jinja").write_text(text)
        self.ours = Chat(folder)
        self.theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token=BOS, eos_token=EOS
        )
        self.has_tags = bool(re.search(r"\{%[-+]?\s*generation\b", text))

    def compare(self, messages: Messages) -> Case:
        try:
            wanted = self.theirs.apply_chat_template(
                messages,
                tools=[CLOCK] if calls_tools(messages) else None,
                chat_template=self.text,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:  # whatever a template raises
            wanted = None
            reason = str(error)
        try:
            ids, mask = self.encode(messages)
        except ConfigError as error:
            kind = BOTH_REFUSE if wanted is None else ONLY_WE_REFUSE
            return Case(kind, "; ".join(error.problems))
        if wanted is None:
            return Case(ONLY_WE_RENDER, reason)
        if not ids:
            return Case(LEFT_OUT)
        if ids != wanted["input_ids"]:
            return Case(IDS_DIFFER, self.theirs.decode(wanted["input_ids"]))
        if not self.has_tags:
            return Case(EQUAL_IDS)
        if mask != list(map(bool, wanted["assistant_masks"])):
            return Case(MASK_DIFFERS, str(self.learned(ids, mask)))
        return Case(EQUAL)

    def encode(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Raises ConfigError."""
        return self.ours.encode(checked(messages), [CLOCK] if calls_tools(messages) else None)

    def learned(self, ids: list[int], mask: list[bool]) -> list[str]:
        """Each run of text that has a loss, without white space at its end."""
        runs = []
        for is_learned, group in itertools.groupby(zip(ids, mask), lambda pair: pair[1]):
            if is_learned:
                text = self.theirs.decode([token for token, _ in group])
                runs.append(text.rstrip())
        return runs


def calls_tools(messages: Messages) -> bool:
    return any(message.get("tool_calls") for message in messages)


def save_tokenizer(special: list[str], folder: pathlib.Path) -> None:
    """Writes a tokenizer whose vocabulary is the bytes and these special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: number for number, byte in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def compare_all(templates: dict[str, Template]) -> dict[tuple[str, str], Case]:
    """By the names of the template and of the conversation."""
    cases = {}
    for name, template in templates.items():
        for title, messages in CONVERSATIONS.items():
            cases[name, title] = template.compare(messages)
    return cases


class MaskCounts(NamedTuple):
    """Masks of templates without tags, against their variants with tags."""

    equal: int
    shorter: int  # as ours begin after the prompt for the assistant, the tags within it
    others: list[str]  # what each holds


def compare_masks(templates: dict[str, Template]) -> MaskCounts:
    equal = 0
    shorter = 0
    others = []
    for name, with_tags in templates.items():
        plain = templates.get(name.replace("_training", ""))
        if plain is None or plain.has_tags or not with_tags.has_tags:
            continue
        prompt = plain.theirs.decode(plain.ours.prompt([QUESTION]))
        for title, messages in CONVERSATIONS.items():
            try:
                ids, mask = plain.encode(messages)
                their_ids, their_mask = with_tags.encode(messages)
            except ConfigError:
                continue
            if plain.theirs.decode(ids) != with_tags.theirs.decode(their_ids):
                continue
            ours = plain.learned(ids, mask)
            theirs = with_tags.learned(their_ids, their_mask)
            if ours == theirs:
                equal += 1
            elif all_shorter(ours, theirs, prompt):
                shorter += 1
            else:
                others.append(f"{name}, {title}: {ours}, with tags: {theirs}")
    return MaskCounts(equal, shorter, others)


def all_shorter(ours: list[str], theirs: list[str], prompt: str) -> bool:
    """Whether theirs are ours with some text before each that the prompt holds."""
    if len(ours) != len(theirs):
        return False
    for our_run, their_run in zip(ours, theirs):
        before = their_run.removesuffix(our_run)
        if not their_run.endswith(our_run) or before not in prompt:
            return False
    return True


def report(cases: dict[tuple[str, str], Case], reasons: bool) -> None:
    for title in CONVERSATIONS:
        counts = collections.Counter(case.kind for (_, of), case in cases.items() if of == title)
        listed = [f"{counts[kind]:4} {kind}" for kind in (*KINDS, *FAULTS) if counts[kind]]
        print(f"{title:30}" + ",".join(listed))
    total = collections.Counter(case.kind for case in cases.values())
    print(", ".join(f"{count:,} {kind}" for kind, count in total.most_common()))
    for (name, title), case in cases.items():
        if case.kind in FAULTS or (reasons and case.kind == ONLY_WE_REFUSE):
            print(f"{name}, {title}: {case.kind}: {case.reason}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--reasons", action="store_true")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    templates = {}
    refused = {}
    for path in sorted(args.folder.glob("*.jinja")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                templates[path.stem] = Template(path.read_text(), pathlib.Path(folder))
            except ConfigError as error:
                refused[path.stem] = str(error)
    cases = compare_all(templates)
    report(cases, args.reasons)
    for name, problem in refused.items():
        print(f"{name}: {problem}")
    masks = compare_masks(templates)
    print(
        f"masks without tags against those with tags: {masks.equal} equal, {masks.shorter} begin "
        f"after the prompt where the tags begin within it, {len(masks.others)} differ otherwise"
    )
    print("\n".join(masks.others))
    return int(any(case.kind in FAULTS for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
