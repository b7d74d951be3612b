"""Chat templates and tokenizers as models bring them: what is learned of a conversation."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import REPO, words
from tests.field.situation import DONE, Situation

COMMAND = (
    "base.toml --data.source=chat.jsonl --data.messages_field=messages --data.tokenizer=model"
    " --data.document_mask=true --train.seq_len=256"
)
LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI3 = (
    LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# of DeepSeek-R1's form: reasoning is dropped, and the prompt begins what no answer begins with
R1 = (
    "{{ bos_token }}"
    + LOOP
    + "{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>') | last }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]


def conversations(*turns: dict) -> str:
    """A hundred conversations. In the turns' texts, {} stands for words."""
    rows = []
    for i in range(100):
        messages = [dict(turn, content=turn["content"].format(words(i, 4))) for turn in turns]
        rows.append(json.dumps({"messages": messages}) + "\n")
    return "".join(rows)


def says(role: str, text: str = "{}", **more: object) -> dict:
    return {"role": role, "content": text, **more}


TWO_TURNS = conversations(says("user"), says("assistant"), says("user"), says("assistant"))
REASONS = conversations(says("user"), says("assistant", "<think>\n{}\n</think>\n\nyes"))


def model(template: object = None, lacks: str = "", **settings: object) -> Callable[[Path], None]:
    """A function that makes a model's folder: a tokenizer of bytes and special tokens, and a template in its
    tokenizer_config.json. lacks: a special token that the tokenizer has not."""

    def make(folder: Path) -> None:
        pytest.importorskip("transformers")
        from benchmarks.chat_templates import save_tokenizer

        folder.mkdir()
        save_tokenizer([token for token in SPECIAL if token != lacks], folder)
        path = folder / "tokenizer_config.json"
        named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **settings}
        path.write_text(json.dumps({key: value for key, value in named.items() if value}))

    return make


def learns(*texts: str) -> Callable[[Path], None]:
    """A check that a prepared conversation has these texts, where « and » enclose what has a loss."""

    def check(folder: Path) -> None:
        from data.tokenizer import Tokenizer
        from extras.chat.conversations import spelled

        ids = np.fromfile(folder / "prepared/train.bin", "<i4")[:2000]
        shown = spelled(Tokenizer(folder / "prepared"), ids.tolist())
        for text in texts:
            assert text in shown, shown

    return check


OLDER = {
    "model": model(PHI3, bos_token=None, eos_token=None),
    "model/special_tokens_map.json": '{"bos_token": "<s>", "eos_token": {"content": "</s>"}}',
}

SITUATIONS = [
    Situation(
        "a template whose end of turn is no token of the tokenizer",
        COMMAND,
        (
            "message 2: the chat template ends it with no special token",
            "followed by '<|im_end|>\\n<|im_start|>user'",
        ),
        {"chat.jsonl": TWO_TURNS, "model": model(CHATML, lacks="<|im_end|>")},
        exit_code=2,
        needs=("chat",),
    ),
    Situation(
        "a tool call that the template does not render",
        COMMAND,
        (
            "message 2 (assistant): the chat template leaves out a tool call; name one that renders it",
        ),
        {
            "chat.jsonl": conversations(says("user"), says("assistant", tool_calls=[CALL])),
            "model": model(CHATML),
        },
        exit_code=2,
        needs=("chat",),
    ),
    Situation(
        "reasoning that the template drops",
        COMMAND,
        (
            "message 2 (assistant): the chat template leaves out its reasoning; name one that renders",
        ),
        {"chat.jsonl": REASONS, "model": model(R1)},
        exit_code=2,
        needs=("chat",),
    ),
    Situation(
        "a prompt that begins a block of reasoning, and answers without one",
        COMMAND,
        (DONE,),
        {"chat.jsonl": TWO_TURNS, "model": model(R1)},
        check=learns("<s><|user|>", "<|assistant|>«", "<|end|>»<|user|>", "<|end|>»<s>"),
        needs=("chat",),
    ),
    Situation(
        "a template that closes a conversation with EOS, and does so in an older folder",
        COMMAND,
        (DONE,),
        {"chat.jsonl": TWO_TURNS, **OLDER},
        check=learns("<|assistant|>\n«", "<|end|>»\n<|user|>", "<|end|>\n</s>»<|user|>"),
        needs=("chat",),
    ),
    Situation(
        "conversations that the assistant begins",
        COMMAND,
        (DONE,),
        {
            "chat.jsonl": conversations(
                says("assistant", "Hello!"), says("user"), says("assistant")
            ),
            "model": model("{{ '' if messages[0].role else '' }}" + CHATML),
        },
        check=learns("<|im_start|>assistant\n«Hello!<|im_end|>»\n<|im_start|>user"),
        needs=("chat",),
    ),
    Situation(
        "a tokenizer with several templates in a list",
        COMMAND,
        (DONE,),
        {
            "chat.jsonl": TWO_TURNS,
            "model": model(
                [{"name": "rag", "template": R1}, {"name": "default", "template": CHATML}]
            ),
        },
        check=learns("<|im_start|>assistant\n«"),
        needs=("chat",),
    ),
    Situation(
        "reasoning and a tool call with the shipped template of Qwen3",
        f"{COMMAND} --data.chat_template={REPO}/configs/qwen3.jinja",
        (DONE,),
        {
            "chat.jsonl": conversations(
                says("user"), says("assistant", "<think>\n{}\n</think>\n\nyes", tool_calls=[CALL])
            ),
            "model": model(CHATML),
        },
        check=learns(
            "<|im_start|>assistant\n«<think>\n",
            "\n</think>\n\nyes\n<tool_call>\n",
            "</tool_call><|im_end|>»",
        ),
        needs=("chat",),
    ),
]
