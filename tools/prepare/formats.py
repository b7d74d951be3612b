"""Selects the format of a source's rows, texts or conversations, by data.format."""

import json

import config
from tools.prepare.row_format import Texts

# Columns -> the value of data.format that reads them
COLUMNS = {
    ("messages",): "messages",
    ("conversations",): "messages",
    ("instruction", "output"): "alpaca",
    ("instruction", "response"): "alpaca",
    ("prompt", "completion"): "prompt_completion",
    ("prompt", "response"): "prompt_completion",
}


def row_format(data: config.Data) -> "Texts":
    """The format of a source's rows."""
    if data.has_conversations:
        from tools.prepare.chat.rows import Conversations

        return Conversations(data)
    return Texts(data)


def options_for(row: dict) -> str:
    """Options that may read a row with these columns, for an error message."""
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
