"""Converts rows of every conversation format to one form, the class Conversation.

The formats are the values "messages", "alpaca" and "prompt_completion" of data.format. The form has
OpenAI's messages, whose content is text; the arguments of their tool calls are objects. It also has
the tools, if any, and says which messages have a loss.
"""

import json
import textwrap
from typing import Any, NamedTuple

import config
from config import ConfigError
from tools.prepare.row_format import MissingColumn, check_text

# A role in a row -> the name that chat templates use
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
SHAREGPT = {"from": "role", "value": "content"}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # a message uses one of them
LOSS_KEYS = ("weight", "train", "loss", "loss_mask", "trainable", "training")
# A template must render all other keys. Of these it may leave out who speaks and which call is
# answered
MESSAGE_KEYS = ("role", "content", "tool_calls", *REASONING_KEYS, "name", "tool_call_id", "id")
PART_KEYS = ("type", "text")
CALL_KEYS = ("id", "type", "index", "function", "name", "arguments")
EMPTY = (None, "", [], {})  # values without information
# The columns that each format reads, besides SYSTEM and TOOLS. A column with several names is read
# under the first name that a row has.
MESSAGES = ("messages", "conversations")
INSTRUCTION = ("instruction",)
INPUT = ("input", "context")
OUTPUT = ("output", "response")
HISTORY = ("history",)
PROMPT = ("prompt",)
COMPLETION = ("completion", "response")
SYSTEM = ("system",)
TOOLS = ("tools", "functions")
# Columns that may change what the model learns; an error unless they are empty or 1
REFUSED = (*LOSS_KEYS, "label", "images", "chat_template_kwargs")
TOO_DEEP = "is nested too deeply"

Message = dict[str, Any]


class Conversation(NamedTuple):
    """A conversation in the one form.

    Messages have the keys that templates read, and no nulls. has_loss has one entry per message;
    only entries of the assistant's messages matter.
    """

    messages: list[Message]
    tools: list[dict] | None
    has_loss: list[bool]


def columns_of(data: config.Data) -> tuple[tuple[str, ...], ...]:
    """The columns that the format reads. Each entry holds a column's alternative names."""
    if data.row_format == "alpaca":
        columns = (INSTRUCTION, INPUT, OUTPUT, HISTORY)
    elif data.row_format == "prompt_completion":
        columns = (PROMPT, COMPLETION)
    else:
        columns = (messages_columns(data),)
    return (*columns, SYSTEM, TOOLS)


def not_read(row: dict[str, Any], data: config.Data) -> list[str]:
    """The columns of a row that nothing reads."""
    known = [*REFUSED]
    for names in columns_of(data):
        name = name_of(row, names)
        known += [name] if name else names
    return [name for name in row if name not in known]


def messages_columns(data: config.Data) -> tuple[str, ...]:
    return (data.messages_field,) if data.messages_field else MESSAGES


def as_document(where: str, row: dict[str, Any], data: config.Data) -> str:
    """A row's conversation as a document, which from_document() reads. Raises ConfigError if the
    row is invalid."""
    try:
        messages, tools, has_loss = conversation_of(row, data)
        entries: list[Any] = [where, messages]
        if tools or not all(has_loss):
            entries.append({"tools": tools, "has_loss": has_loss})
        text = json.dumps(entries, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # e.g. a date in a parquet file
        raise ConfigError(f"has what JSON cannot hold: {error}") from None
    except RecursionError:
        raise ConfigError(TOO_DEEP) from None
    check_text(text)
    return text


def from_document(document: str) -> tuple[str, Conversation]:
    """Returns (the row's file and number, its conversation)."""
    where, messages, *rest = json.loads(document)
    more = rest[0] if rest else {}
    has_loss = more.get("has_loss", [True] * len(messages))
    return where, Conversation(messages, more.get("tools"), has_loss)


def conversation_of(row: dict[str, Any], data: config.Data) -> Conversation:
    """The conversation of a row. Raises ConfigError."""
    for name in REFUSED:
        if name in row and row[name] not in (*EMPTY, 1):
            shown = textwrap.shorten(str(row[name]), 60)
            raise ConfigError(
                f"field {name!r} may change what is learned, and is not read: {shown}; leave out "
                "such rows, or the column"
            )
    if data.row_format == "alpaca":
        messages = of_alpaca(row)
    elif data.row_format == "prompt_completion":
        messages = of_prompt_and_completion(row)
    else:
        messages = of_messages(row, data)
    system = first_of(row, SYSTEM)
    if system is not None:
        messages = with_system(messages, system)
    conversation = Conversation([], tools_of(first_of(row, TOOLS)), [])
    for number, message in enumerate(messages, 1):
        message_in_one_form, has_loss = in_one_form(number, message)
        conversation.messages.append(message_in_one_form)
        conversation.has_loss.append(has_loss)
    return conversation


def checked(messages: Any) -> list[Message]:
    """Converts a list of messages to the one form that templates read. Raises ConfigError."""
    conversation = conversation_of({"messages": messages}, config.Data(format="messages"))
    return [with_reasoning(message) for message in conversation.messages]


# Columns


def name_of(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these columns that the row has; None if it has none."""
    for name in names:
        if row.get(name) is not None:
            return name
    return None


def first_of(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the first of these columns that the row has; None if it has none."""
    name = name_of(row, names)
    return None if name is None else row[name]


def required(row: dict[str, Any], names: tuple[str, ...], option: str) -> tuple[str, Any]:
    """Returns (the first of these columns that the row has, its value).

    Raises ConfigError if the row has none; the message names `option`.
    """
    name = name_of(row, names)
    if name is None:
        for empty in names:
            if empty in row:
                raise ConfigError(f"field {empty!r} is null ({option})")
        fields = " or ".join(map(repr, names))
        raise MissingColumn(f"has no field {fields} ({option}), but {', '.join(row)}")
    return name, row[name]


def text_of(row: dict[str, Any], names: tuple[str, ...], option: str) -> str:
    """The value of a column that must hold text. Raises ConfigError."""
    name, value = required(row, names, option)
    if not isinstance(value, str):
        raise ConfigError(f"field {name!r} must be text, not {type(value).__name__}")
    return value


def of_messages(row: dict[str, Any], data: config.Data) -> list[Any]:
    name, messages = required(row, messages_columns(data), "data.messages_field")
    return list_of_messages(name, messages)


def list_of_messages(name: str, value: Any) -> list[Any]:
    """The messages of a column that holds a list, or JSON of a list. Raises ConfigError."""
    if isinstance(value, list):
        return without_nulls(value)
    messages = parsed(value)
    if not isinstance(messages, list):
        shown = textwrap.shorten(str(value), 60)
        raise ConfigError(f"field {name!r} must be a list of messages, or JSON of one: {shown}")
    return messages


def of_alpaca(row: dict[str, Any]) -> list[Message]:
    """The exchanges of `history`, which are pairs of texts, followed by the row's exchange."""
    option = 'data.format = "alpaca"'
    messages = []
    history = first_of(row, HISTORY) or []
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise ConfigError("field 'history' must be a list of [what the user said, the answer]")
        question, answer = exchange
        messages += [said_by("user", question), said_by("assistant", answer)]
    question = text_of(row, INSTRUCTION, option)
    if first_of(row, INPUT) is not None:
        given = text_of(row, INPUT, option)
        if given.strip():
            question += f"\n{given}"
    answer = text_of(row, OUTPUT, option)
    return [*messages, said_by("user", question), said_by("assistant", answer)]


def of_prompt_and_completion(row: dict[str, Any]) -> list[Message]:
    """The prompt's messages, then the completion's. Each column holds a text or a list of messages.
    Messages in the prompt's list have no loss."""
    option = 'data.format = "prompt_completion"'
    messages = []
    for names, role in ((PROMPT, "user"), (COMPLETION, "assistant")):
        name, value = required(row, names, option)
        if isinstance(value, str):
            messages.append(said_by(role, value))
            continue
        for message in list_of_messages(name, value):
            is_prompts = names == PROMPT and isinstance(message, dict)
            messages.append({**message, "train": False} if is_prompts else message)
    return messages


def said_by(role: str, text: Any) -> Message:
    return {"role": role, "content": text}


def with_system(messages: list[Any], system: Any) -> list[Any]:
    """Prepends the system message of a row's column. Raises ConfigError if the messages begin with
    a different one."""
    if not isinstance(system, str):
        raise ConfigError(f"field 'system' must be text, not {type(system).__name__}")
    if not system.strip():
        return messages
    if messages and isinstance(messages[0], dict):
        first, _ = in_one_form(1, messages[0])
        if first["role"] == "system":
            if first.get("content") == system:
                return messages
            raise ConfigError("has two system prompts: in its field 'system', and as a message")
    return [said_by("system", system), *messages]


def tools_of(value: Any) -> list[dict] | None:
    """The tools of a row, which are a list of functions, or JSON of a list. Raises ConfigError."""
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    value = parsed(value) if isinstance(value, str) else without_nulls(value)
    tools = [parsed(tool) for tool in value] if isinstance(value, list) else [None]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError("field 'tools' must be a list of functions, or JSON of one")
    return [as_function(tool) for tool in tools] or None


# Messages


def in_one_form(number: int, message: Any) -> tuple[Message, bool]:
    """Returns (a row's message in the one form, whether its loss keys allow a loss).

    Raises ConfigError if a key is missing or invalid.
    """
    needed = f"message {number}: needs the keys role and content, but"
    if not isinstance(message, dict):
        raise ConfigError(f"{needed} is of type {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message:
        message = {SHAREGPT.get(key, key): value for key, value in message.items()}
    if "role" not in message:
        raise ConfigError(f"{needed} has {', '.join(message)}")
    given_role = message["role"]
    if not isinstance(given_role, str) or given_role not in ROLES:
        raise ConfigError(
            f"message {number}: role {given_role!r} is unknown; the roles are {', '.join(ROLES)}"
        )
    role = ROLES[given_role]
    message["role"] = role
    try:
        if given_role == "function_call":
            message["tool_calls"] = calls_of_text(message.pop("content", ""))
        if "function_call" in message:  # OpenAI's, before tool_calls
            message["tool_calls"] = [message.pop("function_call")]
        if "content" in message:
            message["content"] = joined(message["content"])
        elif not message.get("tool_calls"):
            raise ConfigError("has no content")
        if "tool_calls" in message:
            message["tool_calls"] = calls_of(message["tool_calls"])
        for key in REASONING_KEYS:
            if not isinstance(message.get(key, ""), str):
                raise ConfigError(f"{key} must be text, not {type(message[key]).__name__}")
        has_loss = take_loss(message)
    except ConfigError as error:
        raise ConfigError(f"message {number} ({role}): {error}") from None
    return message, has_loss


def joined(content: Any) -> str:
    """The text of a message's content, which is a text or a list of parts. Raises ConfigError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind == "text":
                raise ConfigError("content has a part of type 'text' without a text")
            raise ConfigError(f"content has a part of type {kind!r}; only text is read")
        if isinstance(part, dict):
            refuse_other_keys("a part of its content", part, PART_KEYS)
        texts.append(text)
    return "".join(texts)


def calls_of(calls: Any) -> list[dict]:
    """Converts tool calls so that their arguments are objects, as templates expect. Raises
    ConfigError."""
    calls = parsed(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError("tool_calls must be a list of objects")
    return [as_call(call) for call in calls]


def calls_of_text(text: Any) -> list[dict]:
    """The tool calls in the text of ShareGPT's function_call, which is JSON of a call or of a list
    of calls. Raises ConfigError."""
    calls = parsed(text)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise ConfigError('must be JSON of a call, {"name": ..., "arguments": ...}')
    return calls


def as_function(entry: dict) -> dict:
    """A tool, or a call of a tool, in OpenAI's envelope."""
    if "name" in entry and entry.get("function") is None:
        return {"type": "function", "function": entry}
    return entry


def as_call(call: dict) -> dict:
    """A tool call in OpenAI's envelope. Its arguments become an object, which is empty if there are
    none; OpenAI writes JSON instead. Raises ConfigError if the call has no name."""
    call = as_function(call)
    function: Any = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ConfigError("a tool call needs a name")
    refuse_other_keys("a tool call", call | function, CALL_KEYS)
    return {**call, "function": {**function, "arguments": arguments_of(function)}}


def arguments_of(function: dict) -> dict:
    """The arguments of a call. Raises ConfigError."""
    given = function.get("arguments")
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        return {}
    arguments = parsed(given)
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"the arguments of a tool call must be an object, or JSON of one: {given}"
        )
    return arguments


def refuse_other_keys(owner: str, value: dict, known: tuple[str, ...]) -> None:
    """Raises ConfigError for a key that nothing reads."""
    for key, entry in value.items():
        if key not in known and entry not in EMPTY:
            raise ConfigError(
                f"{owner} has the key {key!r}, which is not read; leave it out (its keys are "
                f"{', '.join(known)})"
            )


def take_loss(message: Message) -> bool:
    """Removes LOSS_KEYS from a message. Returns False if one of them turns off its loss. Raises
    ConfigError."""
    values = {key: message.pop(key) for key in LOSS_KEYS if key in message}
    for key, value in values.items():
        if value not in (0, 1):  # also accepts False and True, which equal them
            raise ConfigError(f"{key} must be 0 or 1, false or true, not {value!r}")
        if value and message["role"] != "assistant":
            raise ConfigError(f"{key} is {value!r}, but only what the assistant says has a loss")
    return all(values.values())


def without_nulls(value: Any) -> Any:
    """Removes keys whose value is null, at any depth.

    Arrow adds every key of a column to every row. In values parsed from JSON, somebody wrote the
    nulls, so callers keep those.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def parsed(value: Any) -> Any:
    """Parses a str as JSON; None if it is invalid. Returns any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def with_reasoning(message: Message) -> Message:
    """Copies a message's reasoning, if any, to both names that templates read. The result equals
    what transformers passes to a template."""
    for key in REASONING_KEYS:
        if key in message:
            return {"thinking": message[key], **message, "reasoning_content": message[key]}
    return message
