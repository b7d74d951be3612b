"""Rows that hold conversations -> messages in one form."""

import json
from typing import Any

from config import ConfigError

ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, Any]


def as_document(where: str, messages: object, field: str) -> str:
    """A row's conversation as a document: the JSON of [where, messages]. Raises ConfigError if it is none."""
    try:
        text = json.dumps([where, messages])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"field {field!r} is no JSON: {error}") from None
    checked(messages)
    return text


def checked(messages: Any) -> list[Message]:
    """A row's messages, without keys of value None, which a parquet file has for absent ones. Raises ConfigError."""
    if not isinstance(messages, list):
        raise ConfigError(f"must be a list of messages, not {type(messages).__name__}")
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not (
            "role" in message and {"content", "tool_calls"} & message.keys()
        ):
            keys = (
                f"has {', '.join(message)}"
                if isinstance(message, dict)
                else f"is of type {type(message).__name__}"
            )
            raise ConfigError(f"message {number}: needs the keys role and content, but {keys}")
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise ConfigError(
                f"message {number}: role {role!r} is unknown; the roles are {', '.join(ROLES)}"
            )
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ConfigError(
                f"message {number} ({role}): content must be text, not {type(content).__name__}"
            )
        message = {
            key: value for key, value in message.items() if value is not None or key == "content"
        }
        if reasons := [
            message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message
        ]:
            # as transformers does
            message = {
                "thinking": reasons[0],
                **message,
                "reasoning_content": reasons[0],
            }
        found.append(message)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise ConfigError(f"is not valid Unicode: {error.reason}") from None
    return found
