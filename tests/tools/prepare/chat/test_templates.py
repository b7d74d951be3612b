"""Chat templates that are hard to mask, each a small one of its kind, against masks found by hand; what they lose, and
where they lie."""

import itertools
import json
import pathlib
import re
from typing import Any

import pytest

from tests.conftest import REPO, refuses, sentencepiece_model
from tests.tools.prepare.chat.conftest import QWEN3, assistant, talk, user
from tests.tools.prepare.test_tokenizer import byte_level
from tools.prepare.chat.conversations import Chat
from tools.prepare.chat.messages import checked
from tools.prepare.chat.template import find_template

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.early, pytest.mark.quick]


def call(number: int = 1, **arguments: Any) -> dict[str, Any]:
    function = {"name": "clock", "arguments": arguments}
    return {"id": f"call{number}", "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "Be brief, and kind."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": CITY}}
QUESTION = user("What time is it in Rome?")
CALLED = assistant("", tool_calls=[call(city="Rome")])
SILENT = {"role": "assistant", "tool_calls": [call()]}
BOTH = assistant("Both:", tool_calls=[call(city="Rome"), call(2, city="Oslo")])
RESULT = {"role": "tool", "content": "12:05", "tool_call_id": "call1", "name": "clock"}
SECOND = {**RESULT, "tool_call_id": "call2"}
ANSWER = assistant("It is five past noon.")
ANSWERS = ["Jane Austen did.", "In 1815.", "In Steventon, Hampshire."]
TWO_TURNS = talk("Who wrote Emma?", ANSWERS[0], "When?", ANSWERS[1])
THREE_TURNS = [*TWO_TURNS, *talk("Where was she born?", ANSWERS[2])]
SUN = {"reasoning_content": "The sun stands high."}
THOUGHT = assistant("<think>\nThe sun stands high.\n</think>\n\nNoon.")
OSLO = [user("And in Oslo?"), assistant("Too.", reasoning_content="The same zone.")]
OSLO_THOUGHT = [OSLO[0], assistant("<think>\nThe same zone.\n</think>\n\nToo.")]
CONVERSATIONS: dict[str, list[dict]] = {
    "plain": THREE_TURNS[:2],
    "three turns": THREE_TURNS,
    "system": [SYSTEM, *THREE_TURNS],
    "tool call": [QUESTION, CALLED, RESULT, ANSWER],
    "tool call last": [QUESTION, CALLED],
    "two tool calls": [QUESTION, BOTH, RESULT, SECOND, ANSWER],
    "tool call, no content": [QUESTION, SILENT, RESULT, ANSWER],
    "reasoning": [QUESTION, assistant("Noon.", **SUN)],
    "reasoning, two turns": [QUESTION, assistant("Noon.", **SUN), *OSLO],
    "<think>": [QUESTION, THOUGHT],
    "<think>, two turns": [QUESTION, THOUGHT, *OSLO_THOUGHT],
    "white space": [user("  Who wrote\n\n Emma? \n"), assistant("\n Jane Austen\n  did. \n\n")],
    "Unicode, markup": [user("¿Qué es ✓ & <b>?"), assistant("Häkchen: ✓ « 了 » & `List<T>`")],
    "assistant first": [assistant("Hello! How can I help?"), *THREE_TURNS[:2]],
    "empty question": [user(""), assistant("You said nothing.")],
}

LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = CHATML.replace("m.content", "m.content | trim")
# An answer's reasoning is dropped, and the prompt opens a block that no answer has
PROMPT_OPENS_BLOCK = (
    LOOP + "{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>') | last }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# An answer has another block, and a text without a prompt has an end of its own
OTHER_BLOCK = PROMPT_OPENS_BLOCK.replace(
    "else %}<|assistant|>", "else %}<|assistant|><think></think>"
).replace("\n{% endif", "\n{% else %}</s>{% endif")
IN_LAST = "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last }}{{ m.content }}"
CLOSING_EOS = (
    LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# The system's text stands in the last question, and nothing is added for a prompt
SYSTEM_LAST = (
    "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set last = (messages | selectattr('role', 'equalto', 'user') | list | last).content %}"
    + LOOP
    + "{% if m.role == 'user' %}[INST]{{ s + '\n' if s and m.content == last else '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
ENDS_DIFFER = (
    LOOP + "<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ALWAYS_PROMPTS = (
    LOOP + "<|turn_start|><|{{ m.role }}|>{{ m.content }}<|turn_end|>{% endfor %}"
    "<|turn_start|><|assistant|>"
)
NEVER_PROMPTS = LOOP + "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CALLS = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}{{ tools or '' }}"
)
# With tags, and with no text between two turns and between two blocks
BLOCK = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
SAID = "{% if m.role == 'assistant' %}" + BLOCK + "{% else %}{{ m.content }}{% endif %}"
ADJACENT = LOOP + SAID + "{% endfor %}"


class Template:
    """A chat template with a tokenizer of bytes and special tokens, here and in transformers."""

    def __init__(self, text: str, folder: pathlib.Path, **settings: Any):
        names = re.findall(r"<\|[a-z_]+\|>", text.replace("{{ m.role }}", "user"))
        byte_level(folder, "<s>", "</s>", *dict.fromkeys([*names, "<|assistant|>", "<|system|>"]))
        (folder / "chat_template.jinja").write_text(text)
        named = {"bos_token": "<s>", "eos_token": "</s>", **settings}
        named["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        self.has_tags = bool(re.search("{%-? generation", text))
        self.ours = Chat(folder)
        self.theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, messages: list[dict], has_loss: list[bool] | None = None) -> tuple:
        return self.ours.encode(checked(messages), tools_for(messages), has_loss)

    def rendered(self, messages: list[dict]) -> tuple[list[int], list[bool]]:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        made = self.theirs.apply_chat_template(messages, tools=tools_for(messages), **options)
        return made["input_ids"], [*map(bool, made["assistant_masks"])]

    def check(self, messages: list[dict]) -> None:
        """Our ids are transformers' and, if the template has tags, our mask."""
        ours, theirs = self.encode(messages), self.rendered(messages)
        assert ours == theirs if self.has_tags else ours[0] == theirs[0]

    def learned(self, messages: list[dict], has_loss: list[bool] | None = None) -> list[str]:
        """Each run of text that has a loss, without white space at its end."""
        texts = []
        pairs = zip(*self.encode(messages, has_loss))
        for is_learned, run in itertools.groupby(pairs, lambda pair: pair[1]):
            if is_learned:
                texts.append(self.theirs.decode([token for token, _ in run]).rstrip())
        return texts


def tools_for(messages: list[dict]) -> list[dict] | None:
    return [CLOCK] if any(message.get("tool_calls") for message in messages) else None


@pytest.fixture
def template(tmp_path):
    """A function: text -> Template."""
    return lambda text: Template(text, tmp_path)


def ended(by: str, *answers: str) -> list[str]:
    return [answer + by for answer in answers or ANSWERS]


GREETED = ended("<|im_end|>", "Hello! How can I help?", ANSWERS[0])
NO_THOUGHT = ["<think></think>Jane Austen did.<|end|>", "<think></think>In 1815.<|end|></s>"]
IN_PROMPT = ["</think>Jane Austen did.<|end|>", "</think>In 1815.<|end|></s>"]
LAST_THOUGHT = ["Jane Austen did.<|im_end|>", "<think>\n\n</think>\n\nIn 1815.<|im_end|>"]
ROME = '<tool_call>{"name": "clock", "arguments": {"city": "Rome"}}</tool_call><|im_end|>'
MARKUP = [user("Which?"), assistant("This <b>one</b>."), *THREE_TURNS[2:4]]
MASKS = [
    (CHATML, THREE_TURNS, ended("<|im_end|>")),
    (CHATML, CONVERSATIONS["assistant first"], GREETED),
    (STRIPS, CONVERSATIONS["white space"], ["Jane Austen\n  did.<|im_end|>"]),
    (PROMPT_OPENS_BLOCK, THREE_TURNS, ended("<|end|>")),
    (OTHER_BLOCK, TWO_TURNS, NO_THOUGHT),
    (OTHER_BLOCK.replace("<think>\n", "<think>"), TWO_TURNS, IN_PROMPT),  # what the prompt has
    (CHATML.replace("{{ m.content }}", IN_LAST), TWO_TURNS, LAST_THOUGHT),
    (SYSTEM_LAST, [SYSTEM, *THREE_TURNS], ended("</s>")),
    (ENDS_DIFFER, MARKUP, ["<|message|>This <b>one</b>.<|end|>", "<|message|>In 1815.<|return|>"]),
    (ALWAYS_PROMPTS, THREE_TURNS, ended("<|turn_end|>")),
    (NEVER_PROMPTS, THREE_TURNS[:2], ["<|assistant|>Jane Austen did.<|end|>"]),  # no prompt has it
    (CALLS, CONVERSATIONS["tool call last"], [ROME]),
]


@pytest.mark.parametrize("text, messages, learned", MASKS)
def test_masks_found_by_hand(template, text, messages, learned):
    made = template(text)
    made.check(messages)
    assert made.learned(messages) == learned


NO_END = "ends it with no special token of this tokenizer, and no model would learn to end its turn"
BEGINS_OTHERWISE = "the chat template starts it differently from its generation prompt"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
EARLY = LOOP + "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
PARTS = LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
LOST = [
    (CHATML.replace("|", ""), "plain", f"message 2: .*{NO_END}: it is followed by '<im_end>'"),
    (ADJACENT.replace("<|end|>", "<end>"), "plain", f"the last turn: .*{NO_END}: .*did.<end>'"),
    (EARLY, "plain", r"ends the assistant's turn before <\|im_end\|>"),
    (STRIPS, "tool call last", r"message 2 \(assistant\): .* leaves out a tool call; name"),
    (CHATML, "reasoning", r"message 2 \(assistant\): .* leaves out its reasoning; name"),
    (PARTS, "plain", r"message 1 \(user\): the chat template leaves out text of it; name"),
    (CALLS.replace("tools or ''", "''"), "tool call last", "leaves out the tools; name"),
    (NEVER_PROMPTS + PROMPT.replace("<|assistant|>", "ANSWER"), "plain", BEGINS_OTHERWISE),
    (SYSTEM_LAST, "assistant first", f"message 1: {BEGINS_OTHERWISE}"),
]


@pytest.mark.parametrize("text, title, problem", LOST)
def test_what_would_be_lost_is_refused(template, text, title, problem):
    made = template(text)
    assert made.rendered(CONVERSATIONS[title])  # only we refuse
    with refuses(problem):
        made.encode(CONVERSATIONS[title])


KEYS = [(1, "reasoning_details", [{"text": "so"}]), (0, "mask", False)]


@pytest.mark.parametrize("number, key, value", KEYS)
def test_a_key_of_a_message_is_rendered_or_refused(template, number, key, value):
    messages = [user("When?"), assistant("Noon."), user("Why?")]
    messages[number] |= {key: value}
    with refuses(
        rf"message {number + 1} \(.*\): the chat template leaves out its key '{key}'; name"
    ):
        template(CHATML).encode(messages)
    shown = "{{ m.content }}{{ m.NAME if 'NAME' in m }}".replace("NAME", key)
    template(CHATML.replace("{{ m.content }}", shown)).check(messages)


def test_arguments_that_are_no_text_are_not_left_out(template):
    messages = [QUESTION, assistant("", tool_calls=[call(at=[True, 1])])]
    template(CALLS).check(messages)
    with refuses("leaves out the arguments of a tool call"):
        template(CALLS.replace("c.function | tojson", "c.function.name")).encode(messages)


def test_the_shipped_template_of_qwen3(template):
    """An empty block has no loss, one with reasoning has."""
    made = template(QWEN3)
    learned = {}
    for title, messages in CONVERSATIONS.items():
        made.check(messages)
        learned[title] = made.learned(messages)
    assert learned["plain"] == ["Jane Austen did.<|im_end|>"]
    reasoning = "<think>\nThe sun stands high.\n</think>\n\nNoon.<|im_end|>"
    assert learned["reasoning"] == learned["<think>"] == [reasoning]
    assert learned["<think>, two turns"] == learned["reasoning, two turns"]
    assert learned["tool call"][0] == ROME.replace(">{", ">\n{").replace("}</", "}\n</")
    prompt = made.theirs.decode(made.ours.prompt([QUESTION]))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_shipped_template_in_words(template):
    made = template((REPO / "configs/tiny-chat.jinja").read_text())
    for title, messages in CONVERSATIONS.items():
        if "tool" not in title and "reasoning" not in title:
            made.check(messages)


@pytest.mark.parametrize("title", [title for title in CONVERSATIONS if "reasoning" not in title])
def test_a_block_of_a_turn_without_a_loss_has_none(template, title):
    """Whichever turns have one: transformers' mask less their blocks."""
    made = template(QWEN3)
    messages = CONVERSATIONS[title]
    ids, mask = made.rendered(messages)
    blocks = [list(run) for _, run in itertools.groupby(mask)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert sum(block[0] for block in blocks) == len(turns)
    for chosen in itertools.product((False, True), repeat=len(turns)):
        has_loss = [i not in turns or chosen[turns.index(i)] for i in range(len(messages))]
        remaining = iter(chosen)
        expected: list[bool] = []
        for block in blocks:
            expected += [block[0] and next(remaining)] * len(block)
        assert made.encode(messages, has_loss) == ((ids, expected) if any(chosen) else ([], []))


EOS_BLOCK = NEVER_PROMPTS.replace("{{ m.content }}<|end|>", SAID)
EOS_BLOCK += "{% generation %}{{ eos_token }}{% endgeneration %}"
LACKS = [user("a"), assistant("b", reasoning_content="c"), user("d"), assistant("e")]
FIVE = [user("Who?"), assistant("Jane."), assistant("Austen."), *TWO_TURNS[2:]]
PARTLY = [  # which messages have a loss
    (EOS_BLOCK, TWO_TURNS, "1111", ["Jane Austen did.<|end|>", "In 1815.<|end|></s>"]),
    (EOS_BLOCK, TWO_TURNS, "1011", ["In 1815.<|end|></s>"]),
    (CLOSING_EOS, TWO_TURNS, "1011", ["In 1815.<|end|>\n</s>"]),
    (CLOSING_EOS, LACKS, "0001", ["e<|end|>\n</s>"]),
    (ADJACENT, FIVE, "01000", ["Jane.<|end|>"]),
    (ADJACENT, FIVE, "00100", ["Austen.<|end|>"]),
]


@pytest.mark.parametrize("text, messages, has_loss, learned", PARTLY)
def test_only_turns_with_a_loss_are_learned(template, text, messages, has_loss, learned):
    """What ends a conversation has that of its last turn; a turn without a loss may lack reasoning; a block is not that
    of the text behind it."""
    assert template(text).learned(messages, [flag == "1" for flag in has_loss]) == learned


def test_a_turn_without_a_loss_needs_a_sign_of_its_block(template):
    made = template(ADJACENT.replace("m.content }}<|end|>", "m.content or '' }}<|end|>"))
    called = {"role": "assistant", "tool_calls": [call()]}
    messages = checked([QUESTION, called, user("b"), assistant("c")])
    with refuses(r"message 2 \(assistant\): the chat template leaves out all"):
        made.ours.encode(messages, None, [True, False, True, True])


@pytest.mark.parametrize("text", [QWEN3, CHATML, ADJACENT], ids=["qwen3", "chatml", "adjacent"])
@pytest.mark.parametrize("content", [{"content": " \n"}, {}], ids=str)
def test_a_conversation_with_an_empty_turn_is_left_out(template, text, content):
    """With a loss or without."""
    made = template(text)
    empty = {"role": "assistant", "reasoning_content": "b", **content}
    messages = [user("hi"), empty, user("hello?"), assistant("ok")]
    for has_loss in ([True] * 4, [True, False, True, True]):
        assert made.ours.encode(messages, None, has_loss) == ([], [])


@pytest.mark.parametrize("text, ends", [(CLOSING_EOS, "</s> <|end|>"), (CHATML, "<|im_end|>")])
def test_a_turn_ends_with_the_conversation_or_before(template, text, ends):
    made = template(text)
    assert made.ours.end_of_turn() == made.theirs.convert_tokens_to_ids(ends.split())


# Folders

RAG = {"additional_chat_templates/rag.jinja": "B"}
FOLDERS = [  # files, the chat_template of tokenizer_config.json
    ({"chat_template.jinja": "A", **RAG}, "C"),
    ({"additional_chat_templates/default.jinja": "A", **RAG}, None),
    ({}, "A"),
    ({}, [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]),
]


@pytest.mark.parametrize("files, inline", FOLDERS, ids=str)
def test_the_default_template_of_a_folder(tmp_path, files, inline):
    Template(CHATML, tmp_path, chat_template=inline)
    (tmp_path / "chat_template.jinja").unlink()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_template(tmp_path) == find_template(tmp_path / "tokenizer.json") == "A"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.get_chat_template() == "A"


def test_special_tokens_of_an_older_folder(tmp_path):
    """They are named in special_tokens_map.json."""
    named = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    made = Template("{{ bos_token or 'B' }}" + CLOSING_EOS, tmp_path, bos_token=None)
    made.check(THREE_TURNS)
    assert made.theirs.decode(made.encode(THREE_TURNS)[0]).startswith("<s>")


@pytest.mark.parametrize("settings", [{}, {"legacy": True}, {"add_prefix_space": False}], ids=str)
def test_a_tokenizer_of_llama_2_s_kind(tmp_path, settings):
    """Where transformers puts spaces, and where its tokenizer.json would."""
    pytest.importorskip("google.protobuf")
    sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **special, **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    (tmp_path / "tokenizer.model").unlink()
    content = json.loads((tmp_path / "saved/tokenizer.json").read_text())
    prefix = {"type": "Prepend", "prepend": "\u2581"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    content["pre_tokenizer"] = None
    content["normalizer"] = {"type": "Sequence", "normalizers": [prefix, spaces]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text(SYSTEM_LAST)
    chat = Chat(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaTokenizer"
    for messages in (THREE_TURNS, CONVERSATIONS["white space"], CONVERSATIONS["Unicode, markup"]):
        ids, mask = chat.encode(checked(messages))
        assert ids == theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        said = theirs.decode([token for token, learned in zip(ids, mask) if learned])
        assert said.split("</s>")[0].strip() == messages[1]["content"].strip()
    texts = ["the cat", " the cat", "\n the", ""]
    assert chat.tokenizer.encode(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
