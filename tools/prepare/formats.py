"""Chooses what a source's rows are, by data.format: texts or conversations."""

import json

import config
from tools.prepare.row_format import Texts

# The formats, by columns that each reads
COLUMNS = {
    ("messages",): "messages",
    ("conversations",): "messages",
    ("instruction", "output"): "alpaca",
    ("instruction", "response"): "alpaca",
    ("prompt", "completion"): "prompt_completion",
    ("prompt", "response"): "prompt_completion",
}


def row_format(data: config.Data) -> "Texts":
    """The format of the rows of one source."""
    if data.has_conversations:
        from tools.prepare.chat.rows import Conversations

        return Conversations(data)
    return Texts(data)


def options_for(row: dict) -> str:
    """The options that may read a row of these columns, for a message."""
    for columns, name in COLUMNS.items():
        if row.keys() >= {*columns}:
            return f'data.format = "{name}"'
    options = []
    for name, value in row.items():
        if isinstance(value, str):
            options.append(f"data.text_field = {json.dumps(name)}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            options.append(f"data.messages_field = {json.dumps(name)}")
    return " or ".join(options) or "another source: none of these columns holds text"
