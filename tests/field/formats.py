"""Conversations and files in the forms that people have them."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.conftest import words
from tests.field.situation import DONE, Situation

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
CHAT = "base.toml --data.tokenizer={folder}/tok --train.global_batch_size=2"


def tokenizer(path: Path) -> None:
    """A folder with a tokenizer and a chat template."""
    from data.tokenizer_training import train_tokenizer

    path.mkdir()
    model = train_tokenizer([words(i, 60) for i in range(30)], 300)
    (path / "tokenizer.model").write_bytes(model)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def alpaca(number: int) -> dict:
    return {"instruction": words(number, 5), "input": "", "output": words(number + 1, 9)}


def sharegpt(number: int) -> dict:
    turns = [("human", words(number, 5)), ("gpt", words(number + 1, 9))]
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def array(row: Callable[[int], dict], count: int = 60) -> str:
    return json.dumps([row(number) for number in range(count)], indent=2)


def lines(row: Callable[[int], dict], count: int = 60) -> str:
    return "".join(json.dumps(row(number)) + "\n" for number in range(count))


def saved(path: Path) -> None:
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    rows = Dataset.from_list([alpaca(number) for number in range(60)])
    DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(path)


SITUATIONS = [
    Situation(
        "alpaca's columns in an array of JSON",
        f"{CHAT} --data.source=mine.json",
        ('data.format = "alpaca"', "59 conversations", DONE),
        {"tok": tokenizer, "mine.json": array(alpaca)},
        needs=("chat",),
    ),
    Situation(
        "ShareGPT's conversations, with validation of one's own",
        f"{CHAT} --data.source=mine.jsonl --data.validation=other.json --eval.every_steps=2",
        ('data.format = "messages"', "60 conversations", "validation loss", DONE),
        {"tok": tokenizer, "mine.jsonl": lines(sharegpt), "other.json": array(sharegpt, 9)},
        needs=("chat",),
    ),
    Situation(
        "a DatasetDict of save_to_disk",
        f"{CHAT} --data.source=saved --data.validation=test --eval.every_steps=2",
        ("60 conversations", "validation loss", DONE),
        {"tok": tokenizer, "saved": saved},
        needs=("chat",),
    ),
    Situation(
        "columns that no format has",
        f"{CHAT} --data.source=mine.json",
        ("columns of no data.format: question, answer; add --data.text_field=question",),
        {
            "tok": tokenizer,
            "mine.json": array(lambda number: {"question": words(number, 5), "answer": "yes"}),
        },
        exit_code=2,
        needs=("chat",),
    ),
    Situation(
        "one conversation alone",
        f"{CHAT} --data.source=mine.json",
        ("its 1 are held out for validation; bring more, or name data.validation",),
        {"tok": tokenizer, "mine.json": array(alpaca, 1)},
        exit_code=2,
        needs=("chat",),
    ),
    Situation(
        "an array with a comma too many",
        "base.toml --data.source=mine.json",
        ("mine.json: row 2, line 3: is not valid JSON",),
        {"mine.json": '[\n  {"text": "' + words(1, 4000) + '"},\n]'},
        exit_code=2,
    ),
]
