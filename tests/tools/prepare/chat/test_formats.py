"""Rows of public data sets in their real form: columns and nesting as their cards show them, texts of our own. Each is
read as its conversation written by hand."""

import json
import pathlib
from typing import Any, NamedTuple

import pytest

import config
from tests.conftest import make_config, refuses
from tests.tools.prepare.chat.conftest import assistant, user
from tools.prepare.chat.messages import from_document
from tools.prepare.source import ByteRange, documents, list_files

A, B, C, D = "the cat", "a dog ran", "under the mat", "then é ✓"


class Row(NamedTuple):
    """A row as it is published, and the conversation that it is."""

    columns: dict
    messages: list[dict]
    tools: list[dict] | None = None
    without_loss: tuple[int, ...] = ()  # messages


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def tool(text: str, **more: Any) -> dict:
    return {"role": "tool", "content": text, **more}


def calls(**function: Any) -> dict:
    """A message that calls a function."""
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


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
NULLS = {"name": "time", "arguments": {"zone": None, "more": [{"day": None}]}}
NULL_TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"default": None}}}]
EXCHANGE = [user(A), assistant(B)]
WITH_INPUT = [user(f"{A}\n{C}"), assistant(B)]
TWO = [user(A), assistant(B), user(C), assistant(D)]
NOW = [user(A), calls(name="now", arguments={})]
ANSWERED = [tool(B, tool_call_id="call_1"), assistant(C)]
GUIDED = [system(D), user(A), calls(**ZONE), *ANSWERED]
OLD = [user(A), calls(name="time", arguments={"zone": None}), tool(B, name="time"), assistant(C)]
OLD_CALL = {"function_call": {"name": "time", "arguments": '{"zone": null}'}}
OLD_RESULT = {"role": "function", "name": "time", "content": B}
SLIMORCA = [
    {"from": "system", "value": C, "weight": None},
    {"from": "human", "value": A, "weight": 0.0},
    {"from": "gpt", "value": B, "weight": 1.0},
]
CITY_AS_TEXT = ("human", A, "function_call", json.dumps(CITY), "observation", B, "gpt", C)
GLAIVE = sharegpt(*CITY_AS_TEXT, tools=json.dumps(FUNCTIONS))
IN_JSON = json.dumps([user(A, name=None), assistant(None, **calls(**NULLS))])
ALL_IN_JSON = {"messages": IN_JSON, "tools": json.dumps(NULL_TOOLS)}
DIVIDED = {"prompt": TWO[:3], "completion": TWO[3:]}
HERMES = sharegpt("human", A, "gpt", B, "human", C, "gpt", D, system_prompt=None)
WITH_HISTORY = {"instruction": C, "output": D, "system": A, "history": [[A, B]]}
AS_TEXT = {"content": None, **calls(name="time", arguments=json.dumps(ZONE["arguments"]))}
GUIDE = [{"role": "developer", "content": D}, user(A), AS_TEXT, *ANSWERED]
FUNCTION_CALL = [user(A), assistant(None, **OLD_CALL), OLD_RESULT, assistant(C)]
PARTS = [{"type": "text", "text": text} for text in (A, B)]
WEATHER = [user(A), calls(**CITY), tool(B)]
TIME = [user(A), calls(**ZONE), tool(B)]


LOSSES = ["weight", "train", "loss", "loss_mask", "trainable", "training"]


def named(name: str) -> Row:
    """Turns of which the last alone has a loss, in a key of this name."""
    turns = [turn | {name: turn["content"] == D} for turn in TWO]
    return Row(messages(*turns), TWO, None, (0, 1, 2))


SETS = {
    "tatsu-lab/alpaca": [Row(alpaca(input="", output=B, text=f"{A}\n\n{B}"), EXCHANGE)],
    "yahma/alpaca-cleaned": [Row(alpaca(input=C, output=B), WITH_INPUT)],
    "databricks/databricks-dolly-15k": [Row(alpaca(context=C, response=B), WITH_INPUT)],
    "nampdn-ai/tiny-codes": [Row({"idx": 1, "prompt": A, "response": B}, EXCHANGE)],
    "LLaMA-Factory's history": [Row(WITH_HISTORY, [system(A), *TWO])],
    "teknium/OpenHermes-2.5": [Row(HERMES, TWO)],
    "Open-Orca/SlimOrca": [Row({"conversations": SLIMORCA}, [system(C), *EXCHANGE], None, (1,))],
    "LLaMA-Factory's glaive_toolcall_en": [Row(GLAIVE, [*WEATHER, assistant(C)], ENVELOPED)],
    "names of the loss": [named(name) for name in LOSSES],
    "OpenAI's guide: tools": [Row(messages(*GUIDE, tools=ENVELOPED), GUIDED, ENVELOPED)],
    "OpenAI's functions": [Row(messages(*FUNCTION_CALL, functions=FUNCTIONS), OLD, ENVELOPED)],
    # Arrow adds the keys of the other row's arguments
    "trl's tools": [Row(messages(*WEATHER), WEATHER), Row(messages(*TIME), TIME)],
    "parts of text": [
        Row(messages(user(PARTS), assistant(PARTS[1:])), [user(A + B), assistant(B)])
    ],
    # nulls of JSON are somebody's, those of a column may be Arrow's
    "JSON in columns": [Row(ALL_IN_JSON, [user(A), calls(**NULLS)], NULL_TOOLS)],
    "OpenAI's call without arguments": [Row(messages(user(A), calls(name="now")), NOW)],
    "trl's conversational prompt": [Row(DIVIDED, TWO, None, (0, 1, 2))],
}


def configured(rows: list[dict], kind: str, folder: pathlib.Path) -> config.Config:
    """The configuration of a run on these rows in a file of this kind."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    form = "prompt_completion" if "prompt" in rows[0] else "messages"
    data = {"format": "alpaca" if "instruction" in rows[0] else form, "tokenizer": "t"}
    return make_config(data={"source": str(path), **data})


def documents_of(cfg: config.Config) -> list[str]:
    return list(documents(cfg.data, map(ByteRange, list_files(cfg.data)[0])))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", SETS)
def test_each_kind_of_file_has_the_conversations_written_by_hand(name, kind, tmp_path):
    rows = SETS[name]
    cfg = configured([row.columns for row in rows], kind, tmp_path)
    for row, document in zip(rows, documents_of(cfg), strict=True):
        _, conversation = from_document(document)
        assert conversation.messages == row.messages and conversation.tools == row.tools
        has_loss = [i not in row.without_loss for i in range(len(row.messages))]
        assert conversation.has_loss == has_loss


WRONG = [
    (messages(calls(name="f", parameters={"a": 1})), "call has the key 'parameters', .* argum"),
    (messages(calls(name="f", arguments="Ulm")), "call must be an object, or JSON of one: Ulm"),
    (messages(system("b"), user("a"), system="a"), "two system prompts"),
    (messages(user("a", trainable=True)), "trainable is True, but only what the assistant"),
    (messages(assistant("a", loss_mask=[1, 0])), r"loss_mask must be .*, not \[1, 0\]"),
    (messages(assistant([PARTS[0] | {"weight": 0}])), "part of its content has the key 'wei"),
    (messages({"role": "robot"}), "role 'robot' is unknown; the roles are system, developer"),
    (messages(user([{"type": "image"}])), "a part of type 'image'; only text is read"),
    (messages(*EXCHANGE, loss_mask=[0, 1]), "field 'loss_mask' may change what is learned"),
]


@pytest.mark.parametrize("row, problem", WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_row_is_refused_in_one_line(row, problem, tmp_path):
    with refuses("rows.jsonl: row 1: ", problem) as refused:
        documents_of(configured([row], "jsonl", tmp_path))
    assert len(refused.value.problems) == 1 and "\n" not in str(refused.value)


def test_a_column_that_changes_what_is_learned_is_refused(tmp_path):
    """Though of a parquet file no column is read that nothing needs."""
    with refuses("row 1: field 'images' may change what is learned, and is not read"):
        documents_of(configured([messages(*EXCHANGE, images=["a.png"])], "parquet", tmp_path))
