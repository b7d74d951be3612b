"""Chat templates that are hard to mask, each a small one of its kind, against masks found by hand; what they lose, and
where they lie. benchmarks/chat_templates.py does the same with the templates of a folder."""

import itertools
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import transformers

from benchmarks import chat_templates
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
from config import ConfigError
from data.tokenizer import tokenizer_files, tokenizer_hash
from extras.chat.conversations import Chat
from extras.chat.messages import checked
from extras.chat.template import find_template
from tests.conftest import REPO

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
BLOCK_IN_LAST = (
    LOOP
    + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
    LOOP
    + "<|turn_start|><|{{ m.role }}|>{{ m.content }}<|turn_end|>{% endfor %}<|turn_start|><|assistant|>"
)
NEVER_PROMPTS = LOOP + "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
NO_EMPTY_LIST = "{{ '' if messages[0].role else '' }}" + CHATML
CALLS = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}{{ tools or '' }}"
)
ANSWERS = ["Jane Austen did.", "In 1815.", "In Steventon, Hampshire."]


def ended(by: str) -> list[str]:
    return [answer + by for answer in ANSWERS]


@pytest.fixture
def template(tmp_path):
    """A function: text -> Template."""

    def make(text: str) -> Template:
        return Template(text, tmp_path)

    return make


@pytest.mark.parametrize(
    "text, messages, learned",
    [
        (CHATML, THREE_TURNS, ended("<|im_end|>")),
        (CHATML, CONVERSATIONS["assistant first"], ["Hello! How can I help?<|im_end|>", ended("<|im_end|>")[0]]),
        (NO_EMPTY_LIST, CONVERSATIONS["assistant first"], ["Hello! How can I help?<|im_end|>", ended("<|im_end|>")[0]]),
        (STRIPS, CONVERSATIONS["white space"], ["Jane Austen\n  did.<|im_end|>"]),
        (PROMPT_OPENS_BLOCK, THREE_TURNS, ended("<|end|>")),
        (BLOCK_IN_LAST, THREE_TURNS[:4], ["Jane Austen did.<|im_end|>", "<think>\n\n</think>\n\nIn 1815.<|im_end|>"]),
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
    ids=[
        "plain", "assistant first", "no empty list", "strips", "prompt opens a block", "block in the last turn",
        "closing eos", "system last", "tags alone", "ends differ", "always prompts", "never prompts", "tool calls",
    ],
)  # fmt: skip
def test_masks_found_by_hand(template, text, messages, learned):
    made = template(text)
    assert made.compare(messages).kind == EQUAL_IDS
    assert made.learned(*made.encode(messages)) == learned


NO_END = "ends it with no special token of this tokenizer, and no model would learn to end its turn"


@pytest.mark.parametrize(
    "text, title, line",
    [
        (CHATML.replace("|", ""), "plain", rf"message 2: .*{NO_END}: it is followed by '<im_end>'"),
        (LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}", "plain", f"{NO_END}: nothing follows it"),
        (
            LOOP + "{% generation %}{{ m.content }}<im_end>{% endgeneration %}{% endfor %}",
            "plain",
            f"the last turn: .*{NO_END}: its text ends with 'Jane Austen did.<im_end>'",
        ),
        (
            LOOP + "<|{{ m.role }}|>{{ m.content }}{{ eos_token if loop.last else '' }}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "three turns",
            rf"message 2: .*{NO_END}: it is followed by '<\|user\|>'",
        ),
        (STRIPS, "tool call last", r"message 2 \(assistant\): the chat template leaves out a tool call; name"),
        (CHATML, "reasoning", r"message 2 \(assistant\): the chat template leaves out its reasoning; name"),
        (PROMPT_OPENS_BLOCK, "<think> in content", "the chat template leaves out its reasoning; name"),
        (
            LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}",
            "plain",
            r"message 1 \(user\): the chat template leaves out text of it; name",
        ),
        (
            LOOP + "{% if m.role != 'system' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            "system",
            r"message 1 \(system\): the chat template leaves out text of it; name",
        ),
        (CALLS.replace("tools or ''", "''"), "tool call last", "the chat template leaves out the tools; name"),
        (
            LOOP + "{{ m.content | length }}{{ m.content }}<|im_end|>{% endfor %}",
            "plain",
            "renders the messages differently with marks in their texts",
        ),
        (
            LOOP + "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}ANSWER{% endif %}",
            "plain",
            "message 2: the chat template begins it otherwise than its prompt for the assistant",
        ),
        (
            "{{ bos_token }}" + LOOP + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
            "{{ m.content }}</s>{% endif %}{% endfor %}",
            "assistant first",
            "message 1: the chat template begins it otherwise than its prompt for the assistant",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_lost_is_refused(template, text, title, line):
    made = template(text)
    with pytest.raises(ConfigError, match=line):
        made.encode(CONVERSATIONS[title])
    assert made.compare(CONVERSATIONS[title]).kind == ONLY_WE_REFUSE


# Shipped


def test_the_shipped_template_of_qwen3(template):
    made = template((REPO / "configs/qwen3.jinja").read_text())
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
    refused = []
    for title, messages in CONVERSATIONS.items():
        case = made.compare(messages)
        if case.kind == ONLY_WE_REFUSE:
            assert "leaves out a tool call" in case.reason or "its reasoning" in case.reason
        if case.kind != EQUAL:
            assert case.kind in (ONLY_WE_REFUSE, BOTH_REFUSE)
            refused.append(title)
    assert refused == [
        title for title in CONVERSATIONS if "tool" in title or title.startswith("reasoning")
    ]


def test_the_comparison_of_a_folder(tmp_path, capsys):
    tagged = CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '' }}",
    )
    (tmp_path / "chatml.jinja").write_text(CHATML)
    (tmp_path / "chatml_training.jinja").write_text(tagged)
    assert chat_templates.main([str(tmp_path), "--reasons"]) == 0
    printed = capsys.readouterr().out
    assert (
        "plain                            1 ids and mask equal,   1 ids equal, no tags\n" in printed
    )
    assert (
        "chatml, reasoning: only we refuse: message 2 (assistant): the chat template leaves out"
        in printed
    )
    assert (
        "10 equal, 0 begin after the prompt where the tags begin within it, 0 differ otherwise"
        in printed
    )


# Loss, blocks, folders


def test_turns_without_a_loss(template):
    tagged = (
        LOOP
        + "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    for text, last_end in ((tagged, "<|end|></s>"), (CLOSING_EOS, "<|end|>\n</s>")):
        made = template(text)
        for has_loss, learned in (
            ([True] * 4, ["Jane Austen did.<|end|>", "In 1815." + last_end]),
            ([True, False, True, True], ["In 1815." + last_end]),
            ([False, True, False, False], ["Jane Austen did.<|end|>"]),
            ([True, False, True, False], []),
        ):
            encoded = made.ours.encode(checked(THREE_TURNS[:4]), None, has_loss)
            assert made.learned(*encoded) == learned
    # what has no loss may lack something
    conversation = [user("a"), assistant("b", reasoning_content="c"), user("d"), assistant("e")]
    ids, mask = made.ours.encode(checked(conversation), None, [False, False, False, True])
    assert made.learned(ids, mask) == ["e<|end|>\n</s>"]


QWEN3 = (REPO / "configs/qwen3.jinja").read_text()
# No text stands between two turns, and between two blocks
ADJACENT = (
    LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


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
        wanted = []
        remaining = iter(chosen)
        for block in blocks:
            is_learned = bool(block[0]) and next(remaining)
            wanted += [is_learned] * len(block)
        ids, mask = made.ours.encode(checked(messages), tools, has_loss)
        assert (ids, mask) == ((rendered["input_ids"], wanted) if any(chosen) else ([], []))


def test_a_block_is_not_that_of_the_text_behind_it(template):
    made = template(ADJACENT)
    messages = [user("Who?"), assistant("Jane."), assistant("Austen.")]
    messages += [user("When?"), assistant("In 1815.")]
    said = {1: "Jane.<|end|>", 2: "Austen.<|end|>", 4: "In 1815.<|end|>"}
    for i, text in said.items():
        encoded = made.ours.encode(checked(messages), None, [j == i for j in range(5)])
        assert made.learned(*encoded) == [text]


@pytest.mark.parametrize("text", [QWEN3, CHATML, ADJACENT], ids=["qwen3", "chatml", "adjacent"])
@pytest.mark.parametrize("content", ["", " \n", None])
def test_a_conversation_with_an_empty_turn_is_left_out(template, text, content):
    """With a loss or without."""
    made = template(text)
    empty = {"role": "assistant", "content": content, "reasoning_content": "b"}
    for messages in (
        [user("hi"), empty, user("hello?"), assistant("ok")],
        [user("hi"), assistant("ok"), user("hello?"), empty],
    ):
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        spoken = [message.get("content", "").strip() != "" for message in messages]
        for has_loss in ([True] * 4, spoken):
            assert made.ours.encode(messages, None, has_loss) == ([], [])


def test_what_has_no_loss_needs_a_sign_of_its_block(template):
    text = ADJACENT.replace("m.content }}<|end|>", "m.content or '' }}<|end|>")
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call("clock")]}, user("b"), assistant("c")]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"message 2 \(assistant\): the chat template leaves out all"
    ):
        template(text).ours.encode(checked(messages), None, [True, False, True, True])


@pytest.mark.parametrize(
    "shown, arguments, is_refused",
    [
        ("c.function.name", {"at": 1}, True),
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
    with pytest.raises(ConfigError, match="leaves out the arguments of a tool call"):
        made.encode(messages)


def test_nested_blocks_are_one(template):
    made = template(
        LOOP
        + "<|{{ m.role }}|>{% generation %}{% generation %}{{ m.content }}{% endgeneration %} ok<|end|>"
        "{% endgeneration %}{% endfor %}"
    )
    assert made.compare(CONVERSATIONS["plain"]).kind == EQUAL
    assert made.learned(*made.encode(THREE_TURNS[:2])) == [
        "Who wrote Emma? ok<|end|>",
        "Jane Austen did. ok<|end|>",
    ]


@pytest.mark.parametrize("part", ["[1:]", "[:-1]"])
def test_a_block_that_is_cut_is_refused(template, part):
    text = (
        LOOP
        + "{% set said %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endset %}{{ said"
        f"{part} }}}}{{% endfor %}}"
    )
    with pytest.raises(ConfigError, match=r"cuts off an end of a {% generation %} block"):
        template(text).encode(THREE_TURNS)


def test_a_turn_ends_with_the_conversation_or_before(template):
    made = template(CLOSING_EOS)
    assert made.ours.end_of_turn() == made.theirs.convert_tokens_to_ids(["</s>", "<|end|>"])
    assert template(CHATML).ours.end_of_turn() == template(CHATML).theirs.convert_tokens_to_ids(
        ["<|im_end|>"]
    )


@pytest.mark.parametrize(
    "files, inline",
    [
        ({"chat_template.jinja": "A", "additional_chat_templates/rag.jinja": "B"}, "C"),
        ({"additional_chat_templates/default.jinja": "A", "additional_chat_templates/rag.jinja": "B"}, None),
        ({}, "A"),
        ({}, {"default": "A", "tool_use": "B"}),
        ({}, [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]),
    ],
    ids=str,
)  # fmt: skip
def test_the_default_template_of_a_folder(template, tmp_path, files, inline):
    made = template(CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": inline})
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_template(tmp_path) == find_template(tmp_path / "tokenizer.json") == "A"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.get_chat_template() == "A"
    assert made.has_tags is False


def test_templates_without_a_default_one(tmp_path):
    for inline, line in (
        (
            {"tool_use": "B", "rag": "C"},
            "none of its chat templates, rag, tool_use, is named default; name a Jinja",
        ),
        ([{"name": "rag"}], "a list of objects with name and template"),
        (7, "no JSON object whose chat_template is a text"),
        (None, "has no chat template; name a Jinja file, data.chat_template"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
        with pytest.raises(ConfigError, match=line):
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
    chat = Chat(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(THREE_TURNS, return_dict=True)["input_ids"]
    assert chat.encode(checked(THREE_TURNS))[0] == wanted
    assert (wanted[0] == theirs.convert_tokens_to_ids("<s>")) != has_decoder
    assert chat.tokenizer.eos == [theirs.eos_token_id]
    # data of versions that did not read this file stays valid
    with_map = tokenizer_hash(chat.tokenizer.files)
    (tmp_path / "special_tokens_map.json").unlink()
    assert tokenizer_hash(tokenizer_files(tmp_path)) == with_map


def test_a_token_that_the_settings_name_is_special(template, tmp_path):
    """As in transformers, even where tokenizer.json has it as an ordinary entry."""
    template(CHATML)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    (end,) = (token for token in made["added_tokens"] if token["content"] == "<|im_end|>")
    end["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ConfigError, match=NO_END):
        Chat(tmp_path).encode(checked(THREE_TURNS))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"eos_token": "<|im_end|>"})
    )
    chat = Chat(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(THREE_TURNS, return_dict=True)["input_ids"]
    assert chat.encode(checked(THREE_TURNS))[0] == wanted
    assert chat.end_of_turn() == [theirs.eos_token_id]


@pytest.mark.parametrize(
    "settings", [{}, {"legacy": False}, {"legacy": True}, {"add_prefix_space": False}], ids=str
)
def test_a_tokenizer_of_llama_2_s_kind(tmp_path, settings):
    """Where transformers puts spaces, and where its tokenizer.json would."""
    pytest.importorskip("google.protobuf")
    made = pytest.importorskip("tools.fast_tokenizer")
    from tests.conftest import sentencepiece_model

    sentencepiece_model(tmp_path / "made.model", add_dummy_prefix=True)
    files = made.fast_tokenizer_files(made.read_sentencepiece(tmp_path / "made.model"))
    files["tokenizer_config.json"] |= {"tokenizer_class": "LlamaTokenizer", **settings}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text(SYSTEM_LAST)
    chat = Chat(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaTokenizer"
    for messages in (THREE_TURNS, CONVERSATIONS["white space"], CONVERSATIONS["Unicode, markup"]):
        wanted = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        ids, mask = chat.encode(checked(messages))
        assert ids == wanted
        said = theirs.decode([token for token, learned in zip(ids, mask) if learned])
        assert said.split("</s>")[0].strip() == messages[1]["content"].strip()
    texts = ["the cat", " the cat", "\n the", ""]
    assert chat.tokenizer.encode(texts) == [
        theirs(text, add_special_tokens=False)["input_ids"] for text in texts
    ]
