"""Conversations -> ids and loss masks, against transformers' templates; what is refused."""

import json

import pytest

from tests.conftest import make_config, refuses, sentencepiece_model, words
from tests.tools.prepare.chat.conftest import (
    TEMPLATES,
    conversations,
    prepare_here,
    sections_of,
    talk,
)
from tools.prepare.chat.conversations import Chat, spelled
from tools.prepare.chat.messages import checked
from tools.prepare.tokenizer_training import train_tokenizer

TOOL_CALL = {"function": {"name": "now", "arguments": {"at": "é"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}
TOOLS = [*talk("the time?"), CALLED, {"role": "tool", "content": "12:00"}, *talk("", "noon")[1:]]
LOOP = "{% for m in messages %}"


@pytest.mark.quick
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(tokenizer, theirs, name):
    blank = talk("  a \n\n", "\n b\n\n", "ö ✓", "c")
    for messages in [*conversations(6), TOOLS if name == "qwen3" else blank]:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        rendered = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], **options)
        for template in (f"{name}.jinja", f"{name}-bare.jinja"):
            ids, mask = Chat(tokenizer, str(tokenizer / template)).encode(checked(messages))
            assert ids == rendered["input_ids"], template
            assert mask == [*map(bool, rendered["assistant_masks"])], template


SPELLED = [
    ("say <|im_end|> now", "<|im_start|>assistant no"),
    ("<|im_<|im_end|>end|>", "a|im_end|> <"),
    ("<|im_end", "|> x"),
]


@pytest.mark.parametrize("texts", SPELLED, ids=str)
def test_special_tokens_that_a_message_spells_out_are_text(tokenizer, theirs, texts):
    """As with transformers' sanitize_control_tokens, which is off by default."""
    chat = Chat(tokenizer)
    ids, mask = chat.encode(talk(*texts))
    options = {"return_dict": True, "sanitize_control_tokens": True}
    rendered = theirs.apply_chat_template(talk(*texts), **options)
    assert ids == rendered["input_ids"] and chat.tokenizer.decode(ids).count(texts[0]) == 1
    # two turns, each with a begin and an end
    assert sum(token in chat.special.values() for token in ids) == 4
    learned = [token for token, has_loss in zip(ids, mask) if has_loss]
    assert chat.tokenizer.decode(learned) == texts[1]


def test_special_tokens_in_any_other_text_of_a_conversation_are_text(tokenizer, tmp_path):
    """Of a call's arguments and their keys, of reasoning, of tools; completed by the template."""
    (tmp_path / "t.jinja").write_text(
        LOOP + "{{ m.content + '|im_end|>' }}{{ m.reasoning_content or '' }}"
        "{{ m.tool_calls | tojson }}<|eot_id|>{% endfor %}{{ tools | tojson }}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    chat = Chat(tokenizer, str(tmp_path / "t.jinja"))
    end = "<|im_end|>"
    call = {"function": {"name": "now", "arguments": {end: end}}}
    answer = {"role": "assistant", "content": "b", "thinking": end, "tool_calls": [call]}
    given = checked([{"role": "user", "content": "a <", "tool_calls": []}, answer])
    ids, _ = chat.encode(given, [{"function": {"name": "now", "description": end}}])
    special = [token for token in ids if token in chat.special.values()]
    assert special == [chat.special["<|eot_id|>"]] * 2


def test_ids_of_a_sentencepiece_model_are_those_of_the_text_between_special_tokens(tmp_path):
    model = train_tokenizer([words(i, 60) for i in range(30)], 300)
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}" + LOOP + "{% if m.role == 'assistant' %}Answer: {% generation %}"
        "{{ m.content + eos_token }}{% endgeneration %}{% else %}Question: {{ m.content + '\n' }}"
        "{% endif %}{% endfor %}"
    )
    chat = Chat(tmp_path)
    ids, mask = chat.encode(talk("the cat </s> ö", "a dog ▁ ✓", "b", "c"))
    one, two = chat.tokenizer.encode(
        ["Question: the cat </s> ö\nAnswer: a dog ▁ ✓", "Question: b\nAnswer: c"]
    )
    assert ids == [1, *one, 2, *two, 2]
    stored = [token if has_loss else ~token for token, has_loss in zip(ids, mask)]
    # " a" is one token
    assert spelled(chat.tokenizer, stored) == (
        "<s>Question: the cat </s> ö\nAnswer:« a dog ▁ ✓</s>»Question: b\nAnswer: «c</s>»"
    )
    assert chat.end_of_turn() == [2]


def test_a_template_cannot_run_commands(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template = "{{ cycler.__init__.__globals__.os.system('touch ran') }}"
    (tmp_path / "t.jinja").write_text(template)
    data = {"chat_template": "t.jinja"}
    with refuses("chat.jsonl: row 1: the chat template fails: SecurityError"):
        prepare_here(make_config(**sections_of(tokenizer, tmp_path, [talk("a", "b")], data=data)))
    assert not (tmp_path / "ran").exists()


def test_a_template_that_counts_characters_is_refused_a_special_token_in_a_text(
    tokenizer, tmp_path
):
    (tmp_path / "t.jinja").write_text(LOOP + "{{ m.content | length }}{% endfor %}")
    with refuses("spells out a special token, and the chat template renders"):
        Chat(tokenizer, str(tmp_path / "t.jinja")).encode(talk("<|im_end|>", "b"))


def test_a_tokenizer_that_leaves_unclear_what_is_special_is_refused(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    with refuses("adds a space before every text, and does not say whether after a special"):
        Chat(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    made = json.loads((tokenizer / "tokenizer.json").read_text())
    made["normalizer"] = {"type": "Lowercase"}
    made["added_tokens"] = [{**token, "normalized": True} for token in made["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    chat = Chat(tmp_path)
    assert chat.encode(talk("a", "b"))[0]
    with refuses("makes special tokens of other text than their names"):
        chat.encode(talk("<|IM_END|>", "b"))
