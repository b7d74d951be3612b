"""Chat templates that are hard to mask, each a small one of its kind, against masks found by hand; what they lose, and
where they lie. benchmarks/chat_templates.py does the same with the templates of a folder."""

import itertools
import json
import pathlib
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import transformers

from benchmarks.chat_templates import (
    BOTH_REFUSE,
    CLOCK,
    CONVERSATIONS,
    EQUAL,
    EQUAL_IDS,
    ONLY_WE_REFUSE,
    QUESTION,
    SYSTEM,
    THREE_TURNS,
    Template,
    assistant,
    call,
    calls_tools,
    user,
)
from tests.conftest import REPO, refuses
from tools.prepare.chat.conversations import Chat
from tools.prepare.chat.messages import checked
from tools.prepare.chat.template import find_template

pytestmark = [pytest.mark.early, pytest.mark.quick]

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
BLOCK_IN_LAST = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
CLOSING_EOS = (
    LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# The system's text stands in the last question, and nothing is added for a prompt
SYSTEM_LAST = (
    "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set last = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last %}"
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
NO_EMPTY_LIST = "{{ '' if messages[0].role else '' }}" + CHATML
CALLS = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}{{ tools or '' }}"
)
QWEN3 = (REPO / "configs/qwen3.jinja").read_text()
# With tags, and with no text between two turns and between two blocks
ADJACENT = (
    LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ANSWERS = ["Jane Austen did.", "In 1815.", "In Steventon, Hampshire."]
GREETED = ["Hello! How can I help?<|im_end|>", "Jane Austen did.<|im_end|>"]


def ended(by: str) -> list[str]:
    return [answer + by for answer in ANSWERS]


def in_transformers(folder: pathlib.Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def equal_chats(folder: pathlib.Path) -> tuple[Chat, Any, list[int]]:
    """(ours, transformers' own, the ids that both make of three turns)."""
    chat = Chat(folder)
    theirs = in_transformers(folder)
    ids = theirs.apply_chat_template(THREE_TURNS, return_dict=True)["input_ids"]
    assert chat.encode(checked(THREE_TURNS))[0] == ids
    return chat, theirs, ids


@pytest.fixture
def template(tmp_path):
    """A function: text -> Template."""
    return lambda text: Template(text, tmp_path)


@pytest.mark.parametrize(
    "text, messages, learned",
    [
        (CHATML, THREE_TURNS, ended("<|im_end|>")),
        (CHATML, CONVERSATIONS["assistant first"], GREETED),
        (NO_EMPTY_LIST, CONVERSATIONS["assistant first"], GREETED),
        (STRIPS, CONVERSATIONS["white space"], ["Jane Austen\n  did.<|im_end|>"]),
        (PROMPT_OPENS_BLOCK, THREE_TURNS, ended("<|end|>")),
        (
            OTHER_BLOCK,
            THREE_TURNS[:4],
            ["<think></think>Jane Austen did.<|end|>", "<think></think>In 1815.<|end|></s>"],
        ),
        (
            OTHER_BLOCK.replace("</s>", "<|assist|>"),
            THREE_TURNS[:4],
            ["<think></think>Jane Austen did.<|end|>", "<think></think>In 1815.<|end|><|assist|>"],
        ),
        (
            OTHER_BLOCK.replace("<think>\n", "<|channel|>"),
            THREE_TURNS[:4],
            ["<think></think>Jane Austen did.<|end|>", "<think></think>In 1815.<|end|></s>"],
        ),
        # what the prompt has of it is the prompt's
        (
            OTHER_BLOCK.replace("<think>\n", "<think>"),
            THREE_TURNS[:4],
            ["</think>Jane Austen did.<|end|>", "</think>In 1815.<|end|></s>"],
        ),
        (
            BLOCK_IN_LAST,
            THREE_TURNS[:4],
            ["Jane Austen did.<|im_end|>", "<think>\n\n</think>\n\nIn 1815.<|im_end|>"],
        ),
        (CLOSING_EOS, THREE_TURNS[:4], ["Jane Austen did.<|end|>", "In 1815.<|end|>\n</s>"]),
        (SYSTEM_LAST, [SYSTEM, *THREE_TURNS], ended("</s>")),
        (CHATML, [user("<b>"), assistant(" <a></a>\n")], [" <a></a>\n<|im_end|>"]),
        (
            ENDS_DIFFER,
            [user("Which?"), assistant("This <b>one</b>."), *THREE_TURNS[2:4]],
            ["<|message|>This <b>one</b>.<|end|>", "<|message|>In 1815.<|return|>"],
        ),
        (ALWAYS_PROMPTS, THREE_TURNS, ended("<|turn_end|>")),
        # the model has to write what no prompt has
        (NEVER_PROMPTS, THREE_TURNS[:2], ["<|assistant|>Jane Austen did.<|end|>"]),
        (
            CALLS,
            CONVERSATIONS["tool call last"],
            ['<tool_call>{"name": "clock", "arguments": {"city": "Rome"}}</tool_call><|im_end|>'],
        ),
    ],
)
def test_masks_found_by_hand(template, text, messages, learned):
    made = template(text)
    assert made.compare(messages).kind == EQUAL_IDS
    assert made.learned(*made.encode(messages)) == learned


NO_END = "ends it with no special token of this tokenizer, and no model would learn to end its turn"
BEGINS_OTHERWISE = "the chat template starts it differently from its generation prompt"


@pytest.mark.parametrize(
    "text, title, problem",
    [
        (CHATML.replace("|", ""), "plain", f"message 2: .*{NO_END}: it is followed by '<im_end>'"),
        (LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}", "plain", "nothing follows it"),
        (
            ADJACENT.replace("<|end|>", "<im_end>"),
            "plain",
            f"the last turn: .*{NO_END}: its text ends with 'Jane Austen did.<im_end>'",
        ),
        (
            NEVER_PROMPTS.replace("<|end|>", "{{ eos_token if loop.last else '' }}")
            + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "three turns",
            rf"message 2: .*{NO_END}: it is followed by '<\|user\|>'",
        ),
        (STRIPS, "tool call last", r"message 2 \(assistant\): .* leaves out a tool call; name"),
        (CHATML, "reasoning", r"message 2 \(assistant\): .* leaves out its reasoning; name"),
        (PROMPT_OPENS_BLOCK, "<think> in content", "leaves out its reasoning; name"),
        (
            LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}",
            "plain",
            r"message 1 \(user\): the chat template leaves out text of it; name",
        ),
        (CALLS.replace("tools or ''", "''"), "tool call last", "leaves out the tools; name"),
        (
            LOOP + "{{ m.content | length }}{{ m.content }}<|im_end|>{% endfor %}",
            "plain",
            "renders the messages differently with marks in their texts",
        ),
        (
            NEVER_PROMPTS + "{% if add_generation_prompt %}ANSWER{% endif %}",
            "plain",
            f"message 2: {BEGINS_OTHERWISE}",
        ),
        (SYSTEM_LAST, "assistant first", f"message 1: {BEGINS_OTHERWISE}"),
    ],
)
def test_what_would_be_lost_is_refused(template, text, title, problem):
    made = template(text)
    with refuses(problem):
        made.encode(CONVERSATIONS[title])
    assert made.compare(CONVERSATIONS[title]).kind == ONLY_WE_REFUSE


@pytest.mark.parametrize(
    "number, key, value, left_out",
    [
        (1, "reasoning_details", [{"text": "so"}], "its key 'reasoning_details'"),
        (1, "loss_weight", 0.0, "its key 'loss_weight'"),
        (0, "mask", False, "its key 'mask'"),
        (1, "reasoning", "so", "its reasoning"),
        (0, "thinking", "so", "its reasoning"),
    ],
)
def test_a_key_of_a_message_is_rendered_or_refused(template, number, key, value, left_out):
    messages = [user("When?"), assistant("Noon."), user("Why?")]
    messages[number] |= {key: value}
    with refuses(rf"message {number + 1} \(.*\): the chat template leaves out {left_out}; name"):
        template(CHATML).encode(messages)
    name = "reasoning_content" if left_out == "its reasoning" else key
    shown = "{{ m.content }}{{ m.NAME if 'NAME' in m }}".replace("NAME", name)
    made = template(CHATML.replace("{{ m.content }}", shown))
    assert made.compare(messages).kind == EQUAL_IDS


# Shipped


def test_the_shipped_template_of_qwen3(template):
    made = template(QWEN3)
    for title, messages in CONVERSATIONS.items():
        assert made.compare(messages).kind == EQUAL, title

    def learned(title: str) -> list[str]:
        return made.learned(*made.encode(CONVERSATIONS[title]))

    # an empty block has no loss, one with reasoning has
    assert learned("plain") == ["Jane Austen did.<|im_end|>"]
    reasoning = "<think>\nThe sun stands high.\n</think>\n\nNoon.<|im_end|>"
    assert learned("reasoning") == learned("<think> in content") == [reasoning]
    assert learned("<think> in content, two turns") == learned("reasoning, two turns")
    assert learned("tool call")[0] == (
        '<tool_call>\n{"name": "clock", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    )
    prompt = made.theirs.decode(made.ours.prompt([QUESTION]))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_shipped_template_in_words(template):
    made = template((REPO / "configs/tiny-chat.jinja").read_text())
    for title, messages in CONVERSATIONS.items():
        kind = made.compare(messages).kind
        if "tool" in title or title.startswith("reasoning"):
            assert kind in (ONLY_WE_REFUSE, BOTH_REFUSE)
        else:
            assert kind == EQUAL


# Turns without a loss


@pytest.mark.parametrize("title", [title for title in CONVERSATIONS if "reasoning" not in title])
def test_a_block_of_a_turn_without_a_loss_has_none(template, title):
    """Whichever turns have one: transformers' mask less their blocks."""
    made = template(QWEN3)
    messages = CONVERSATIONS[title]
    tools = [CLOCK] if calls_tools(messages) else None
    rendered = made.theirs.apply_chat_template(
        messages,
        tools=tools,
        chat_template=QWEN3,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    blocks = [list(run) for _, run in itertools.groupby(rendered["assistant_masks"])]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert sum(block[0] for block in blocks) == len(turns)
    for chosen in itertools.product((False, True), repeat=len(turns)):
        has_loss = [chosen[turns.index(i)] if i in turns else True for i in range(len(messages))]
        remaining = iter(chosen)
        expected = []
        for block in blocks:
            is_learned = bool(block[0]) and next(remaining)
            expected += [is_learned] * len(block)
        ids, mask = made.ours.encode(checked(messages), tools, has_loss)
        assert (ids, mask) == ((rendered["input_ids"], expected) if any(chosen) else ([], []))


EOS_BLOCK = NEVER_PROMPTS.replace(
    "{{ m.content }}<|end|>", ADJACENT[len(LOOP) : -len("{% endfor %}")]
)
EOS_BLOCK += "{% generation %}{{ eos_token }}{% endgeneration %}"


@pytest.mark.parametrize("text, end", [(EOS_BLOCK, "<|end|></s>"), (CLOSING_EOS, "<|end|>\n</s>")])
def test_what_ends_a_conversation_has_the_loss_of_its_last_turn(template, text, end):
    made = template(text)
    for has_loss, learned in (
        ([True] * 4, ["Jane Austen did.<|end|>", "In 1815." + end]),
        ([True, False, True, True], ["In 1815." + end]),
        ([False, True, False, False], ["Jane Austen did.<|end|>"]),
    ):
        encoded = made.ours.encode(checked(THREE_TURNS[:4]), None, has_loss)
        assert made.learned(*encoded) == learned


def test_a_turn_without_a_loss_may_lack_something(template):
    made = template(CLOSING_EOS)
    messages = [user("a"), assistant("b", reasoning_content="c"), user("d"), assistant("e")]
    encoded = made.ours.encode(checked(messages), None, [False, False, False, True])
    assert made.learned(*encoded) == ["e<|end|>\n</s>"]


def test_a_turn_without_a_loss_needs_a_sign_of_its_block(template):
    text = ADJACENT.replace("m.content }}<|end|>", "m.content or '' }}<|end|>")
    called = {"role": "assistant", "tool_calls": [call("clock")]}
    messages = checked([QUESTION, called, user("b"), assistant("c")])
    with refuses(r"message 2 \(assistant\): the chat template leaves out all"):
        template(text).ours.encode(messages, None, [True, False, True, True])


def test_a_block_is_not_that_of_the_text_behind_it(template):
    made = template(ADJACENT)
    said = ["Who?", "Jane.", "Austen.", "When?", "In 1815."]
    messages = [assistant(text) if text.endswith(".") else user(text) for text in said]
    for i in (1, 2, 4):
        encoded = made.ours.encode(checked(messages), None, [j == i for j in range(5)])
        assert made.learned(*encoded) == [said[i] + "<|end|>"]


@pytest.mark.parametrize("text", [QWEN3, CHATML, ADJACENT], ids=["qwen3", "chatml", "adjacent"])
@pytest.mark.parametrize("content", [{"content": ""}, {"content": " \n"}, {}], ids=str)
def test_a_conversation_with_an_empty_turn_is_left_out(template, text, content):
    """With a loss or without."""
    made = template(text)
    empty = {"role": "assistant", "reasoning_content": "b", **content}
    last = [user("hi"), assistant("ok"), user("hello?"), empty]
    first = [user("hi"), empty, user("hello?"), assistant("ok")]
    for messages in (first, last):
        for has_loss in ([True] * 4, [message is not empty for message in messages]):
            assert made.ours.encode(messages, None, has_loss) == ([], [])


# Arguments, blocks, ends


@pytest.mark.parametrize(
    "shown, arguments, is_refused",
    [
        ("c.function.name", {"at": [True, {"b": None}]}, True),
        ("c.function.name", {}, False),
        ("c.function | tojson", {"at": 1}, False),
        ("c.function.name ~ c.function.arguments.at", {"at": 0.5}, False),
    ],
)
def test_arguments_that_are_no_text_are_not_left_out(template, shown, arguments, is_refused):
    made = template(CALLS.replace("c.function | tojson", shown))
    messages = [QUESTION, assistant("", tool_calls=[call("clock", **arguments)])]
    if not is_refused:
        assert made.compare(messages).kind == EQUAL_IDS
        return
    with refuses("leaves out the arguments of a tool call"):
        made.encode(messages)


def test_nested_blocks_are_one(template):
    inner = "{% generation %}{{ m.content }}{% endgeneration %}"
    outer = "{% generation %}" + inner + " ok<|end|>{% endgeneration %}"
    made = template(LOOP + "<|{{ m.role }}|>" + outer + "{% endfor %}")
    assert made.compare(CONVERSATIONS["plain"]).kind == EQUAL
    learned = made.learned(*made.encode(THREE_TURNS[:2]))
    assert learned == ["Who wrote Emma? ok<|end|>", "Jane Austen did. ok<|end|>"]


@pytest.mark.parametrize("part", ["[1:]", "[:-1]"])
def test_a_block_that_is_cut_is_refused(template, part):
    block = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    text = LOOP + "{% set said %}" + block + "{% endset %}{{ said" + part + " }}{% endfor %}"
    with refuses(r"cuts off an end of a {% generation %} block"):
        template(text).encode(THREE_TURNS)


def test_a_turn_ends_with_the_conversation_or_before(template):
    for text, ends in ((CLOSING_EOS, ["</s>", "<|end|>"]), (CHATML, ["<|im_end|>"])):
        made = template(text)
        assert made.ours.end_of_turn() == made.theirs.convert_tokens_to_ids(ends)


# Folders


@pytest.mark.parametrize(
    "files, inline",
    [
        ({"chat_template.jinja": "A", "additional_chat_templates/rag.jinja": "B"}, "C"),
        (
            {
                "additional_chat_templates/default.jinja": "A",
                "additional_chat_templates/rag.jinja": "B",
            },
            None,
        ),
        ({}, "A"),
        ({}, {"default": "A", "tool_use": "B"}),
        ({}, [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]),
    ],
    ids=str,
)
def test_the_default_template_of_a_folder(template, tmp_path, files, inline):
    template(CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = inline
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_template(tmp_path) == find_template(tmp_path / "tokenizer.json") == "A"
    theirs = in_transformers(tmp_path)
    assert theirs.get_chat_template() == "A"


@pytest.mark.parametrize(
    "inline, problem",
    [
        (
            {"tool_use": "B", "rag": "C"},
            "none of its chat templates, rag, tool_use, is named default",
        ),
        ([{"name": "rag"}], "a list of objects with name and template"),
        (7, "no JSON object whose chat_template is a text"),
        (None, "has no chat template; name a Jinja file, data.chat_template"),
    ],
)
def test_a_folder_without_a_default_template_is_refused(tmp_path, inline, problem):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    with refuses(problem):
        find_template(tmp_path)


@pytest.mark.parametrize("has_decoder", [False, True])
def test_special_tokens_of_an_older_folder(template, tmp_path, has_decoder):
    """They are named in special_tokens_map.json, which counts unless there is an added_tokens_decoder."""
    template("{{ bos_token }}{{ unk_token }}{{ image_token }}{{ boi }}" + CLOSING_EOS)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "image_token": "<|assistant|>",
        "extra_special_tokens": {"boi": "<|end|>"},
    }
    if has_decoder:
        settings["added_tokens_decoder"] = {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    named = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    chat, theirs, ids = equal_chats(tmp_path)
    assert (ids[0] == theirs.convert_tokens_to_ids("<s>")) != has_decoder
    assert chat.tokenizer.eos == [theirs.eos_token_id]


def test_a_token_that_the_settings_name_is_special(template, tmp_path):
    """As in transformers, even where tokenizer.json has it as an ordinary entry."""
    template(CHATML)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    (end,) = (token for token in made["added_tokens"] if token["content"] == "<|im_end|>")
    end["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with refuses(NO_END):
        Chat(tmp_path).encode(checked(THREE_TURNS))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<|im_end|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat, theirs, _ = equal_chats(tmp_path)
    assert chat.end_of_turn() == [theirs.eos_token_id]


@pytest.mark.parametrize(
    "settings", [{}, {"legacy": False}, {"legacy": True}, {"add_prefix_space": False}], ids=str
)
def test_a_tokenizer_of_llama_2_s_kind(tmp_path, settings):
    """Where transformers puts spaces, and where its tokenizer.json would."""
    pytest.importorskip("google.protobuf")
    from tests.conftest import sentencepiece_model

    (tmp_path / "made").mkdir()
    sentencepiece_model(tmp_path / "made/tokenizer.model", add_dummy_prefix=True)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **special, **settings}
    (tmp_path / "made/tokenizer_config.json").write_text(json.dumps(settings))
    in_transformers(tmp_path / "made").save_pretrained(tmp_path / "saved")
    content = json.loads((tmp_path / "saved/tokenizer.json").read_text())
    prefix = {"type": "Prepend", "prepend": "\u2581"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    content["pre_tokenizer"] = None
    content["normalizer"] = {"type": "Sequence", "normalizers": [prefix, spaces]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(SYSTEM_LAST)
    chat = Chat(tmp_path)
    theirs = in_transformers(tmp_path)
    assert type(theirs).__name__ == "LlamaTokenizer"
    for messages in (THREE_TURNS, CONVERSATIONS["white space"], CONVERSATIONS["Unicode, markup"]):
        expected = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        ids, mask = chat.encode(checked(messages))
        assert ids == expected
        said = theirs.decode([token for token, learned in zip(ids, mask) if learned])
        assert said.split("</s>")[0].strip() == messages[1]["content"].strip()
    texts = ["the cat", " the cat", "\n the", ""]
    encoded = theirs(texts, add_special_tokens=False)["input_ids"]
    assert chat.tokenizer.encode(texts) == encoded
