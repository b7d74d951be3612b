"""Rows that hold conversations -> messages in one form."""

import json
from typing import Any

from config import ConfigError

ROLES = ("system", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # a model's: one of these names

Message = dict[str, Any]


def as_document(where: str, messages: object, field: str) -> str:
    """The conversation of a row as a document: the JSON of [where, messages].

    Raises ConfigError if it is not a conversation.
    """
    try:
        text = json.dumps([where, messages])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"field {field!r} is no JSON: {error}") from None
    checked(messages)
    return text


def checked(messages: Any) -> list[Message]:
    """The messages of a row in one form. Raises ConfigError if a message is malformed."""
    if not isinstance(messages, list):
        raise ConfigError(f"must be a list of messages, not {type(messages).__name__}")
    conversation = [checked_message(i, message) for i, message in enumerate(messages, 1)]
    try:
        json.dumps(conversation, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise ConfigError(f"is not valid Unicode: {error.reason}") from None
    return conversation


def checked_message(number: int, message: Any) -> Message:
    """A message without its keys of value None, which a parquet file stores for absent ones.

    Raises ConfigError if a key is missing or wrong.
    """
    needed = f"message {number}: needs the keys role and content, but"
    if not isinstance(message, dict):
        raise ConfigError(f"{needed} is of type {type(message).__name__}")
    if "role" not in message or not ("content" in message or "tool_calls" in message):
        raise ConfigError(f"{needed} has {', '.join(message)}")
    role = message["role"]
    content = message.get("content")
    if role not in ROLES:
        raise ConfigError(
            f"message {number}: role {role!r} is unknown; the roles are {', '.join(ROLES)}"
        )
    calls_tools_only = content is None and message.get("tool_calls")
    if not isinstance(content, str) and not calls_tools_only:
        raise ConfigError(
            f"message {number} ({role}): content must be text, not {type(content).__name__}"
        )
    present = {}
    for key, value in message.items():
        if value is not None or key == "content":
            present[key] = value
    return with_reasoning(present)


def with_reasoning(message: Message) -> Message:
    """The message with its reasoning, if it has any, under the names that templates read.

    Equals what transformers passes to a template.
    """
    for key in REASONING_KEYS:
        if key in message:
            return {"thinking": message[key], **message, "reasoning_content": message[key]}
    return message
