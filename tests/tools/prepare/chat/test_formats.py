"""Rows of public data sets in their real form: columns and nesting as their cards show them, texts
of our own. Each is read as its conversation written by hand, and transformers renders that to the
same ids and mask."""

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import config
from data.folder import manifest_of
from tests.conftest import make_config, refuses
from tests.tools.prepare.chat.conftest import conversations, prepare_here, talk
from tools.prepare.chat.conversations import Chat
from tools.prepare.chat.messages import from_document
from tools.prepare.source import ByteRange, check_first_row, documents, list_files

# Renders tools, and whatever else it gets
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call | tojson) + '</tool_call>' }}{%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
"""

A, B, C, D = "the cat", "a dog ran", "under the mat", "then é ✓"


class Row(NamedTuple):
    """A row as it is published, and the conversation that it is."""

    columns: dict
    messages: list[dict]
    tools: list[dict] | None = None
    without_loss: tuple[int, ...] = ()  # turns of the assistant, counted from 0


class Published(NamedTuple):
    """A data set. options: of [data]."""

    options: dict[str, str]
    rows: tuple[Row, ...]


def published(format: str, *rows: Row, **options: str) -> Published:
    return Published({"format": format, **options}, rows)


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
TWO = [user(A), assistant(B), user(C), assistant(D)]
NOW = calls(name="now", arguments={})

SETS = {
    "tatsu-lab/alpaca, yahma/alpaca-cleaned": published(
        "alpaca",
        Row({"instruction": A, "input": "", "output": B, "text": f"{A}\n\n{B}"}, EXCHANGE),
        Row({"instruction": A, "input": C, "output": B}, [user(f"{A}\n{C}"), assistant(B)]),
    ),
    "databricks/databricks-dolly-15k": published(
        "alpaca",
        Row({"instruction": A, "context": "", "response": B}, EXCHANGE),
        Row({"instruction": A, "context": C, "response": B}, [user(f"{A}\n{C}"), assistant(B)]),
    ),
    "LLaMA-Factory's alpaca": published(
        "alpaca",
        Row({"instruction": A, "output": B, "system": "", "history": []}, EXCHANGE),
        Row({"instruction": C, "output": D, "system": A, "history": [[A, B]]}, [system(A), *TWO]),
    ),
    "teknium/OpenHermes-2.5": published(
        "messages",
        Row(sharegpt("human", A, "gpt", B, "human", C, "gpt", D, system_prompt=None), TWO),
    ),
    "Open-Orca/SlimOrca": published(
        "messages",
        Row(
            {
                "conversations": [
                    {"from": "system", "value": C, "weight": None},
                    {"from": "human", "value": A, "weight": 0.0},
                    {"from": "gpt", "value": B, "weight": 1.0},
                ]
            },
            [system(C), *EXCHANGE],
        ),
    ),
    "LLaMA-Factory's glaive_toolcall_en": published(
        "messages",
        Row(
            sharegpt(
                *("human", A, "function_call", json.dumps(CITY), "observation", B, "gpt", C),
                tools=json.dumps(FUNCTIONS),
            ),
            [user(A), calls(**CITY), tool(B), assistant(C)],
            ENVELOPED,
        ),
    ),
    "Team-ACE/ToolACE": published(
        "messages",
        Row(
            sharegpt("user", A, "assistant", B, "tool", C, "assistant", A, system=D),
            [system(D), *EXCHANGE, tool(C), assistant(A)],
        ),
    ),
    "lmsys/lmsys-chat-1m": published(
        "messages", Row({"conversation": TWO, "turn": 2}, TWO), messages_field="conversation"
    ),
    "names of the loss": published(
        "messages",
        *(
            Row(messages(*(turn | {name: turn["content"] == D} for turn in TWO)), TWO, None, (0,))
            for name in ("weight", "train", "loss", "loss_mask", "trainable", "training")
        ),
    ),
    "OpenAI's guide: tools": published(
        "messages",
        Row(
            messages(
                {"role": "developer", "content": D},
                user(A),
                calls(name="time", arguments=json.dumps(ZONE["arguments"])) | {"content": None},
                tool(B, tool_call_id="call_1"),
                assistant(C),
                tools=ENVELOPED,
            ),
            [system(D), user(A), calls(**ZONE), tool(B, tool_call_id="call_1"), assistant(C)],
            ENVELOPED,
        ),
    ),
    "OpenAI's functions": published(
        "messages",
        Row(
            messages(
                user(A),
                assistant(None, function_call={"name": "time", "arguments": '{"zone": null}'}),
                {"role": "function", "name": "time", "content": B},
                assistant(C),
                functions=FUNCTIONS,
            ),
            [
                user(A),
                calls(name="time", arguments={"zone": None}),
                tool(B, name="time"),
                assistant(C),
            ],
            ENVELOPED,
        ),
    ),
    # Arrow adds the keys of the other row's arguments
    "trl's tools": published(
        "messages",
        Row(messages(user(A), calls(**CITY), tool(B)), [user(A), calls(**CITY), tool(B)]),
        Row(messages(user(A), calls(**ZONE), tool(B)), [user(A), calls(**ZONE), tool(B)]),
    ),
    "parts of text": published(
        "messages",
        Row(messages(user([part(A), part(B)]), assistant([part(C)])), [user(A + B), assistant(C)]),
    ),
    # nulls of JSON are somebody's, those of a column may be Arrow's
    "JSON in columns": published(
        "messages",
        Row(
            {
                "messages": json.dumps([user(A, name=None), assistant(None, **calls(**NULLS))]),
                "tools": json.dumps(NULL_TOOLS),
            },
            [user(A), calls(**NULLS)],
            NULL_TOOLS,
        ),
    ),
    "ShareGPT's calls without arguments": published(
        "messages",
        Row(sharegpt("human", A, "function_call", '{"name": "now"}'), [user(A), NOW]),
        Row(
            sharegpt("human", A, "function_call", '{"name": "now", "arguments": null}'),
            [user(A), NOW],
        ),
    ),
    "OpenAI's calls without arguments": published(
        "messages",
        Row(messages(user(A), calls(name="now")), [user(A), NOW]),
        Row(messages(user(A), calls(name="now", arguments=" ")), [user(A), NOW]),
        Row(messages(user(A), calls(name="now", arguments="null")), [user(A), NOW]),
    ),
    "nampdn-ai/tiny-codes": published(
        "prompt_completion", Row({"idx": 1, "prompt": A, "response": B}, EXCHANGE)
    ),
    "trl's conversational prompt": published(
        "prompt_completion",
        Row({"prompt": TWO[:3], "completion": TWO[3:]}, TWO, without_loss=(0,)),
    ),
}
KINDS = ("jsonl", "json", "parquet", "saved")


def write(rows: list[dict], kind: str, folder: pathlib.Path) -> str:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        from pyarrow import Table

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


@pytest.fixture
def configured(tokenizer, tmp_path) -> Callable[..., config.Config]:
    """The configuration of a run on these options of [data]."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    defaults = {
        "tokenizer": str(tokenizer),
        "chat_template": str(tmp_path / "t.jinja"),
        "path": str(tmp_path / "out"),
    }
    return lambda **options: make_config(data={**defaults, **options})


def documents_of(cfg: config.Config) -> list[str]:
    return list(documents(cfg.data, map(ByteRange, list_files(cfg.data)[0])))


@pytest.mark.parametrize("name", SETS)
def test_each_kind_of_file_has_the_conversations_written_by_hand(name, configured, tmp_path):
    published = SETS[name]
    for kind in KINDS:
        source = write([row.columns for row in published.rows], kind, tmp_path)
        cfg = configured(source=source, **published.options)
        for row, document in zip(published.rows, documents_of(cfg), strict=True):
            _, conversation = from_document(document)
            assert conversation.messages == row.messages and conversation.tools == row.tools


@pytest.mark.quick
@pytest.mark.parametrize("name", SETS)
def test_ids_and_mask_are_those_of_transformers(name, configured, tokenizer, theirs, tmp_path):
    published = SETS[name]
    source = write([row.columns for row in published.rows], "jsonl", tmp_path)
    cfg = configured(source=source, **published.options)
    chat = Chat(tokenizer, cfg.data.chat_template)
    for row, document in zip(published.rows, documents_of(cfg), strict=True):
        rendered = theirs.apply_chat_template(
            row.messages,
            tools=row.tools,
            chat_template=TEMPLATE,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        expected = []
        turn = -1
        for learned, run in itertools.groupby(rendered["assistant_masks"]):
            turn += learned
            expected += [bool(learned) and turn not in row.without_loss for _ in run]
        ids, mask = chat.encode(*from_document(document)[1])
        assert ids == rendered["input_ids"] and mask == expected and any(mask)


# What is wrong


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


TOO_DEEP = "is nested too deeply"
NO_NAME = r"message 1 \(assistant\): a tool call needs a name"
NO_OBJECT = "the arguments of a tool call must be an object, or JSON of one: "
NO_LIST = "must be a list of messages, or JSON of one"
HISTORY = r"field 'history' must be a list of \[what the user said, the answer\]"


def alpaca(**columns: Any) -> dict:
    return {"instruction": "a", **columns}


def format_of(row: dict) -> str:
    if "instruction" in row:
        return "alpaca"
    return "prompt_completion" if "prompt" in row else "messages"


@pytest.mark.parametrize(
    "row, problem",
    [
        (messages(calls(name="f", arguments="[" * 10**5)), TOO_DEEP),
        (messages(calls(arguments={"a": 1})), NO_NAME),
        (messages(calls(name=5)), NO_NAME),
        (messages({"role": "assistant", "tool_calls": [{"function": "f"}]}), NO_NAME),
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
        (
            messages(user("a", loss=0.5)),
            r"message 1 \(user\): loss must be 0 or 1, false or true, not",
        ),
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
        (alpaca(), r"has no field 'output' or 'response' \(data.format = \"alpaca\"\)"),
        (alpaca(output=None), r"field 'output' is null"),
        (alpaca(output=4), "field 'output' must be text, not int"),
        (alpaca(output="b", history=["c"]), HISTORY),
        (alpaca(output="b", history=5), HISTORY),
        ({"prompt": "a"}, "has no field 'completion' or 'response'"),
        ({"prompt": 4, "completion": "b"}, f"field 'prompt' {NO_LIST}: 4"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_row_is_refused_in_one_line(row, problem, configured, tmp_path):
    source = write([row], "jsonl", tmp_path)
    with refuses("rows.jsonl: row 1: ", problem) as refused:
        documents_of(configured(source=source, format=format_of(row)))
    assert len(refused.value.problems) == 1 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "row, columns",
    [
        (messages(*EXCHANGE, id=1, tools=ENVELOPED, functions=FUNCTIONS), "id, functions"),
        (messages(*EXCHANGE, system=None, videos=["a.mp4"], label=1, images=[]), "videos"),
        (alpaca(input=C, context=D, output=B, system_prompt=A), "context, system_prompt"),
        ({"prompt": A, "completion": B, "step_mask": [0], "tools": None}, "step_mask"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_columns_that_nothing_reads_are_one_line(row, columns, configured, tmp_path, capsys):
    for kind in KINDS:
        source = write([row], kind, tmp_path)
        cfg = configured(source=source, format=format_of(row))
        check_first_row(cfg.data, list_files(cfg.data)[0])
        assert f"{source}: not read: {columns}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, value",
    [
        ("loss_mask", [0, 1]),
        ("weight", 0.5),
        ("label", False),
        ("images", ["a.png"]),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_column_that_changes_what_is_learned_is_refused(name, value, configured, tmp_path):
    for kind in KINDS:
        source = write([messages(*EXCHANGE, **{name: value})], kind, tmp_path)
        with refuses(f"row 1: field {name!r} may change what is learned, and is not read"):
            documents_of(configured(source=source, format="messages"))


def test_nothing_that_recurses_fails_below_the_limit_of_nesting(configured, tokenizer, tmp_path):
    row = messages(user("a"), calls(name="f", arguments=json.dumps(nested(98))))
    cfg = configured(source=write([row], "jsonl", tmp_path), format="messages")
    (document,) = documents_of(cfg)
    ids, _ = Chat(tokenizer, cfg.data.chat_template).encode(*from_document(document)[1])
    assert ids


def test_a_row_that_the_template_refuses_is_named_and_mended_it_resumes(configured, tmp_path):
    """To the same tokens as of rows that were right from the beginning."""
    right = [{"messages": each} for each in conversations(60)]
    wrong = [*right[:30], {"messages": talk("no", "b")}, *right[31:]]
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    (tmp_path / "t.jinja").write_text(refusing + TEMPLATE)
    cfg = configured(source=write(wrong, "jsonl", tmp_path), format="messages")
    with refuses("rows.jsonl: row 31: the chat template fails: TemplateError: no"):
        prepare_here(cfg)
    write(right, "jsonl", tmp_path)
    mended = prepare_here(cfg)
    options = {"source": cfg.data.source, "format": "messages", "path": str(tmp_path / "other")}
    at_once = prepare_here(configured(**options))
    assert manifest_of(mended)["sha256"] == manifest_of(at_once)["sha256"]
