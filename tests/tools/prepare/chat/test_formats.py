"""Rows of public data sets in their real form: columns and nesting as their cards show them, texts of our own. Each is
read as its conversation written by hand."""

import json
import pathlib
from typing import Any, NamedTuple

import pytest

import config
from tests.conftest import make_config, refuses
from tools.prepare.chat.conversations import Chat
from tools.prepare.chat.messages import from_document
from tools.prepare.source import ByteRange, check_first_row, documents, list_files

A, B, C, D = "the cat", "a dog ran", "under the mat", "then é ✓"


class Row(NamedTuple):
    """A row as it is published, and the conversation that it is."""

    columns: dict
    messages: list[dict]
    tools: list[dict] | None = None
    without_loss: tuple[int, ...] = ()  # messages


def user(text: Any, **more: Any) -> dict:
    return {"role": "user", "content": text, **more}


def assistant(text: Any, **more: Any) -> dict:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def tool(text: str, **more: Any) -> dict:
    return {"role": "tool", "content": text, **more}


def calls(**function: Any) -> dict:
    """A message that calls a function."""
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def part(text: str) -> dict:
    return {"type": "text", "text": text}


def messages(*given: Any, **columns: Any) -> dict:
    """A row of OpenAI's messages."""
    return {"messages": [*given], **columns}


def sharegpt(*turns: str, **columns: Any) -> dict:
    """A row of ShareGPT's turns: who, text, who, text, ..."""
    said = [{"from": who, "value": text} for who, text in zip(turns[::2], turns[1::2])]
    return {"conversations": said, **columns}


def alpaca(**columns: Any) -> dict:
    return {"instruction": A, **columns}


FUNCTIONS = [
    {"name": "weather", "parameters": {"required": ["city"]}},
    {"name": "time", "description": "é", "parameters": {"required": ["zone"]}},
]
ENVELOPED = [{"type": "function", "function": function} for function in FUNCTIONS]
CITY = {"name": "weather", "arguments": {"city": "Ulm"}}
ZONE = {"name": "time", "arguments": {"zone": "CET", "hours": 12}}
ZONE_AS_TEXT = {"name": "time", "arguments": json.dumps(ZONE["arguments"])}
NO_ZONE = {"name": "time", "arguments": {"zone": None}}
NULLS = {"name": "time", "arguments": {"zone": None, "more": [{"day": None}]}}
NULL_TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"default": None}}}]
EXCHANGE = [user(A), assistant(B)]
WITH_INPUT = [user(f"{A}\n{C}"), assistant(B)]
TWO = [user(A), assistant(B), user(C), assistant(D)]
NOW = [user(A), calls(name="now", arguments={})]
NOW_AS_TEXT = sharegpt("human", A, "function_call", '{"name": "now", "arguments": null}')
DEVELOPER = {"role": "developer", "content": D}
ANSWERED = [tool(B, tool_call_id="call_1"), assistant(C)]
GUIDED = [system(D), user(A), calls(**ZONE), *ANSWERED]
NULL = [user(A), calls(**NULLS)]
OLD = [user(A), calls(**NO_ZONE), tool(B, name="time"), assistant(C)]
OLD_CALL = {"function_call": {"name": "time", "arguments": '{"zone": null}'}}
OLD_RESULT = {"role": "function", "name": "time", "content": B}
SLIMORCA = [
    {"from": "system", "value": C, "weight": None},
    {"from": "human", "value": A, "weight": 0.0},
    {"from": "gpt", "value": B, "weight": 1.0},
]
CITY_AS_TEXT = ("human", A, "function_call", json.dumps(CITY), "observation", B, "gpt", C)
GLAIVE = sharegpt(*CITY_AS_TEXT, tools=json.dumps(FUNCTIONS))
ACE = sharegpt("user", A, "assistant", B, "tool", C, "assistant", A, system=D)
IN_JSON = json.dumps([user(A, name=None), assistant(None, **calls(**NULLS))])
ALL_IN_JSON = {"messages": IN_JSON, "tools": json.dumps(NULL_TOOLS)}
DIVIDED = {"prompt": TWO[:3], "completion": TWO[3:]}
HERMES = sharegpt("human", A, "gpt", B, "human", C, "gpt", D, system_prompt=None)
WITH_HISTORY = {"instruction": C, "output": D, "system": A, "history": [[A, B]]}
GUIDE = [DEVELOPER, user(A), calls(**ZONE_AS_TEXT) | {"content": None}, *ANSWERED]
FUNCTION_CALL = [user(A), assistant(None, **OLD_CALL), OLD_RESULT, assistant(C)]
IN_PARTS = messages(user([part(A), part(B)]), assistant([part(C)]))
WEATHER = [user(A), calls(**CITY), tool(B)]
TIME = [user(A), calls(**ZONE), tool(B)]
LOSSES = "weight train loss loss_mask trainable training"


def named(name: str) -> Row:
    """Turns of which the last alone has a loss, in a key of this name."""
    turns = [turn | {name: turn["content"] == D} for turn in TWO]
    return Row(messages(*turns), TWO, None, (0, 1, 2))


SETS = {
    "tatsu-lab/alpaca": [Row(alpaca(input="", output=B, text=f"{A}\n\n{B}"), EXCHANGE)],
    "yahma/alpaca-cleaned": [Row(alpaca(input=C, output=B), WITH_INPUT)],
    "databricks/databricks-dolly-15k": [Row(alpaca(context=C, response=B), WITH_INPUT)],
    "LLaMA-Factory's alpaca": [Row(alpaca(output=B, system="", history=[]), EXCHANGE)],
    "LLaMA-Factory's history": [Row(WITH_HISTORY, [system(A), *TWO])],
    "teknium/OpenHermes-2.5": [Row(HERMES, TWO)],
    "Open-Orca/SlimOrca": [Row({"conversations": SLIMORCA}, [system(C), *EXCHANGE], None, (1,))],
    "LLaMA-Factory's glaive_toolcall_en": [Row(GLAIVE, [*WEATHER, assistant(C)], ENVELOPED)],
    "Team-ACE/ToolACE": [Row(ACE, [system(D), *EXCHANGE, tool(C), assistant(A)])],
    "lmsys/lmsys-chat-1m": [Row({"conversation": TWO, "turn": 2}, TWO)],
    "names of the loss": [*map(named, LOSSES.split())],
    "OpenAI's guide: tools": [Row(messages(*GUIDE, tools=ENVELOPED), GUIDED, ENVELOPED)],
    "OpenAI's functions": [Row(messages(*FUNCTION_CALL, functions=FUNCTIONS), OLD, ENVELOPED)],
    # Arrow adds the keys of the other row's arguments
    "trl's tools": [Row(messages(*WEATHER), WEATHER), Row(messages(*TIME), TIME)],
    "parts of text": [Row(IN_PARTS, [user(A + B), assistant(C)])],
    # nulls of JSON are somebody's, those of a column may be Arrow's
    "JSON in columns": [Row(ALL_IN_JSON, NULL, NULL_TOOLS)],
    "ShareGPT's call without arguments": [Row(NOW_AS_TEXT, NOW)],
    "OpenAI's call without arguments": [Row(messages(user(A), calls(name="now")), NOW)],
    "its arguments are blank": [Row(messages(user(A), calls(name="now", arguments=" ")), NOW)],
    "its arguments are null": [Row(messages(user(A), calls(name="now", arguments="null")), NOW)],
    "nampdn-ai/tiny-codes": [Row({"idx": 1, "prompt": A, "response": B}, EXCHANGE)],
    "trl's conversational prompt": [Row(DIVIDED, TWO, None, (0, 1, 2))],
}
KINDS = ("jsonl", "json", "parquet", "saved")


def configured(rows: list[dict], kind: str, folder: pathlib.Path) -> config.Config:
    """The configuration of a run on these rows in a file of this kind."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    elif kind == "parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(path)
    form = "prompt_completion" if "prompt" in rows[0] else "messages"
    data = {"format": "alpaca" if "instruction" in rows[0] else form, "tokenizer": "t"}
    if "conversation" in rows[0]:
        data["messages_field"] = "conversation"
    return make_config(data={"source": str(path), **data})


def documents_of(cfg: config.Config) -> list[str]:
    return list(documents(cfg.data, map(ByteRange, list_files(cfg.data)[0])))


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_each_kind_of_file_has_the_conversations_written_by_hand(name, kind, tmp_path):
    rows = SETS[name]
    cfg = configured([row.columns for row in rows], kind, tmp_path)
    for row, document in zip(rows, documents_of(cfg), strict=True):
        _, conversation = from_document(document)
        assert conversation.messages == row.messages and conversation.tools == row.tools
        assert conversation.has_loss == [
            i not in row.without_loss for i in range(len(row.messages))
        ]


# What is wrong


def nested(depth: int) -> dict:
    return {"a": nested(depth - 1)} if depth else {}


NO_NAME = r"message 1 \(assistant\): a tool call needs a name"
NO_OBJECT = "the arguments of a tool call must be an object, or JSON of one: "
NO_LIST = "must be a list of messages, or JSON of one"
HISTORY = r"field 'history' must be a list of \[what the user said, the answer\]"
ALPACA = "has no field 'output' or 'response' .data.format = \"alpaca\""
CALL_OF_TEXT = {"role": "assistant", "tool_calls": [{"function": "f"}]}
WRONG = [
    (messages(calls(name="f", arguments="[" * 10**5)), "is nested too deeply"),
    (messages(calls(arguments={"a": 1})), NO_NAME),
    (messages(calls(name=5)), NO_NAME),
    (messages(CALL_OF_TEXT), NO_NAME),
    (messages(calls(name="f", parameters={"a": 1})), "call has the key 'parameters', .* argum"),
    (messages(calls(name="f", result="5")), "a tool call has the key 'result', which is not"),
    (messages(calls(name="f", arguments=[1])), NO_OBJECT + r"\[1\]"),
    (messages(calls(name="f", arguments="Ulm")), NO_OBJECT + "Ulm"),
    (messages({"role": "assistant", "tool_calls": ["f"]}), "must be a list of objects"),
    (messages({"from": "function_call", "value": "f(Ulm)"}), 'must be JSON of a call, {"name"'),
    (messages(*EXCHANGE, tools="weather(city)"), "'tools' must be a list of functions"),
    (messages(*EXCHANGE, tools=["weather"]), "'tools' must be a list of functions"),
    (messages(system("b"), user("a"), system="a"), "two system prompts"),
    (messages(*EXCHANGE, system=5), "field 'system' must be text, not int"),
    (messages(user("a", trainable=True)), "trainable is True, but only what the assistant"),
    (messages(user("a", loss=0.5)), r"message 1 \(user\): loss must be 0 or 1, false or true, not"),
    (messages(assistant("a", loss_mask=[1, 0])), r"loss_mask must be .*, not \[1, 0\]"),
    (messages(assistant("a", thinking=["b"])), "thinking must be text, not list"),
    (messages(assistant([part("a") | {"weight": 0}])), "part of its content has the key 'wei"),
    (messages("hello"), "message 1: needs the keys role and content, but is of type str"),
    (messages({"human": "a"}), "message 1: needs the keys role and content, but has human"),
    (messages(user("a"), assistant(None)), r"message 2 \(assistant\): has no content"),
    (messages({"role": "robot"}), "role 'robot' is unknown; the roles are system, developer"),
    (messages({"role": ["user"], "content": "a"}), r"role \['user'\] is unknown"),
    (messages(user([{"type": "text", "text": None}])), "'text' without a text"),
    (messages(user([{"type": "image"}])), "a part of type 'image'; only text is read"),
    (messages(assistant("b \ud800")), "is not valid Unicode"),
    ({"messages": '[{"role": "user"'}, f"field 'messages' {NO_LIST}"),
    ({"conversations": '{"role": "user"}'}, f"field 'conversations' {NO_LIST}: "),
    ({"text": "a"}, r"has no field 'messages' or 'conversations' \(data.messages_field\)"),
    (alpaca(), ALPACA),
    (alpaca(output=None), "field 'output' is null"),
    (alpaca(output=4), "field 'output' must be text, not int"),
    (alpaca(output="b", history=["c"]), HISTORY),
    (alpaca(output="b", history=5), HISTORY),
    ({"prompt": "a"}, "has no field 'completion' or 'response'"),
    ({"prompt": 4, "completion": "b"}, f"field 'prompt' {NO_LIST}: 4"),
    *(
        (messages(*EXCHANGE, **{name: value}), f"field '{name}' may change what is learned")
        for name, value in {"loss_mask": [0, 1], "weight": 0.5, "label": False}.items()
    ),
]


@pytest.mark.parametrize("row, problem", WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_row_is_refused_in_one_line(row, problem, tmp_path):
    with refuses("rows.jsonl: row 1: ", problem) as refused:
        documents_of(configured([row], "jsonl", tmp_path))
    assert len(refused.value.problems) == 1 and "\n" not in str(refused.value)


NOT_READ = [
    (messages(*EXCHANGE, id=1, tools=ENVELOPED, functions=FUNCTIONS), "id, functions"),
    (messages(*EXCHANGE, system=None, videos=["a.mp4"], label=1, images=[]), "videos"),
    (alpaca(input=C, context=D, output=B, system_prompt=A), "context, system_prompt"),
    ({"prompt": A, "completion": B, "step_mask": [0], "tools": None}, "step_mask"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row, columns", NOT_READ, ids=lambda value: str(value)[:60])
def test_columns_that_nothing_reads_are_one_line(row, columns, kind, tmp_path, capsys):
    data = configured([row], kind, tmp_path).data
    check_first_row(data, list_files(data)[0])
    assert f"{data.source}: not read: {columns}\n" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, value", [("images", ["a.png"]), ("chat_template_kwargs", {"b": 1})])
def test_a_column_that_changes_what_is_learned_is_refused(name, value, kind, tmp_path):
    with refuses(f"row 1: field '{name}' may change what is learned, and is not read"):
        documents_of(configured([messages(*EXCHANGE, **{name: value})], kind, tmp_path))


def test_nothing_that_recurses_fails_below_the_limit_of_nesting(tokenizer, tmp_path):
    row = messages(user("a"), calls(name="f", arguments=json.dumps(nested(98))))
    (document,) = documents_of(configured([row], "jsonl", tmp_path))
    assert Chat(tokenizer, str(tokenizer / "qwen3.jinja")).encode(*from_document(document)[1])[0]
