"""The first rows of public data sets in their real form: columns and nesting as their cards show
them, texts of our own. Each is read as its conversation written by hand, and transformers renders
that to the same ids and mask."""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import config
from data import formats
from data.folder import manifest_of
from data.source import SourceReader, list_files
from extras.chat.conversations import Chat
from extras.chat.messages import from_document
from tests.conftest import make_config, refuses, words
from tests.extras.chat.conftest import prepare_here

ROWS = 6

# With tools, and without a template's usual helpfulness: it renders what it gets.
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


@dataclass
class Row:
    """A row as it is published, and the conversation that it is."""

    columns: dict
    messages: list[dict]
    tools: list[dict] | None = None
    without_loss: tuple[int, ...] = ()  # turns of the assistant, counted from 0


@dataclass
class Published:
    """A data set. row: of any number. found: the format that its first row says; None: `options` must say it."""

    row: Callable[[int], Row]
    found: str | None
    options: dict = field(default_factory=dict)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def texts(i: int) -> Iterator[str]:
    """Texts that no other row has."""
    return (words(1000 * i + n, 3 + n) for n in itertools.count())


# alpaca


def alpaca_cleaned(i: int) -> Row:  # yahma/alpaca-cleaned
    a, b, c = itertools.islice(texts(i), 3)
    given = b if i % 2 else ""
    asked = f"{a}\n{b}" if i % 2 else a
    return Row({"output": c, "input": given, "instruction": a}, [user(asked), assistant(c)])


def alpaca(i: int) -> Row:  # tatsu-lab/alpaca: the column text has all of it
    row = alpaca_cleaned(i)
    row.columns["text"] = f"Below is an instruction ... {row.columns['output']}"
    return row


def dolly(i: int) -> Row:  # databricks/databricks-dolly-15k
    a, b, c = itertools.islice(texts(i), 3)
    asked = f"{a}\n{b}" if i % 2 else a
    columns = {"instruction": a, "context": b if i % 2 else "", "response": c, "category": "qa"}
    return Row(columns, [user(asked), assistant(c)])


def llama_factory(i: int) -> Row:  # LLaMA-Factory's alpaca with system and history
    a, b, c, d, e = itertools.islice(texts(i), 5)
    columns = {
        "instruction": a,
        "input": "",
        "output": b,
        "system": e if i % 2 else "",
        "history": [[c, d]] if i else [],
    }
    messages = [system(e)] if i % 2 else []
    if i:
        messages += [user(c), assistant(d)]
    return Row(columns, [*messages, user(a), assistant(b)])


# ShareGPT


def sharegpt(i: int) -> Row:  # anon8231489123/ShareGPT_Vicuna_unfiltered
    a, b, c, d = itertools.islice(texts(i), 4)
    said = zip(("human", "gpt", "human", "gpt"), (a, b, c, d))
    turns = [{"from": who, "value": text} for who, text in said]
    columns = {"id": f"x{i}_0", "conversations": turns}
    return Row(columns, [user(a), assistant(b), user(c), assistant(d)])


def slim_orca(i: int) -> Row:  # Open-Orca/SlimOrca: weights of all turns
    a, b, c = itertools.islice(texts(i), 3)
    turns = [
        {"from": "system", "value": a, "weight": None},
        {"from": "human", "value": b, "weight": 0.0},
        {"from": "gpt", "value": c, "weight": 1.0},
    ]
    return Row({"conversations": turns}, [system(a), user(b), assistant(c)])


def open_hermes(i: int) -> Row:  # teknium/OpenHermes-2.5
    a, b = itertools.islice(texts(i), 2)
    columns = {
        "custom_instruction": None,
        "topic": None,
        "model": "x",
        "category": "orca",
        "conversations": [
            {"from": "human", "value": a, "weight": None},
            {"from": "gpt", "value": b, "weight": None},
        ],
        "views": None,
        "system_prompt": None,
        "source": "y",
    }
    return Row(columns, [user(a), assistant(b)])


FUNCTIONS = [
    {
        "name": "weather",
        "description": "now",
        "parameters": {"type": "object", "required": ["city"]},
    },
    {"name": "time", "description": "é", "parameters": {"type": "object", "required": ["zone"]}},
]
ENVELOPED = [{"type": "function", "function": function} for function in FUNCTIONS]
ARGUMENTS = [{"city": "Ulm"}, {"zone": "CET", "hours": 12}]


def glaive_toolcall(i: int) -> Row:  # LLaMA-Factory's glaive_toolcall_en
    a, b, c = itertools.islice(texts(i), 3)
    call = {"name": FUNCTIONS[i % 2]["name"], "arguments": ARGUMENTS[i % 2]}
    columns = {
        "conversations": [
            {"from": "human", "value": a},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": b},
            {"from": "gpt", "value": c},
        ],
        "tools": json.dumps(FUNCTIONS),
    }
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    messages = [user(a), calls, {"role": "tool", "content": b}, assistant(c)]
    return Row(columns, messages, ENVELOPED)


def tool_ace(i: int) -> Row:  # Team-ACE/ToolACE: system is a column
    a, b, c, d = itertools.islice(texts(i), 4)
    turns = [
        {"from": "user", "value": b},
        {"from": "assistant", "value": c},
        {"from": "tool", "value": d},
        {"from": "assistant", "value": a},
    ]
    messages = [system(a), user(b), assistant(c), {"role": "tool", "content": d}, assistant(a)]
    return Row({"system": a, "conversations": turns}, messages)


def hermes_functions(i: int) -> Row:  # NousResearch/hermes-function-calling-v1
    a, b, c = itertools.islice(texts(i), 3)
    said = zip(("system", "human", "gpt"), (a, b, c))
    columns = {
        "id": f"{i}",
        "conversations": [{"from": who, "value": text} for who, text in said],
        "tools": json.dumps(ENVELOPED),
        "category": "x",
        "task": "y",
    }
    return Row(columns, [system(a), user(b), assistant(c)], ENVELOPED)


# OpenAI's messages


def ultrachat(i: int) -> Row:  # HuggingFaceH4/ultrachat_200k: prompt is the first message, too
    a, b, c, d = itertools.islice(texts(i), 4)
    messages = [user(a), assistant(b), user(c), assistant(d)]
    turned = [{"content": m["content"], "role": m["role"]} for m in messages]
    return Row({"prompt": a, "prompt_id": f"{i}", "messages": turned}, messages)


def tulu(i: int) -> Row:  # allenai/tulu-3-sft-mixture
    a, b = itertools.islice(texts(i), 2)
    messages = [user(a), assistant(b)]
    return Row({"id": f"x_{i}", "messages": messages, "source": "y"}, messages)


def lmsys(i: int) -> Row:  # lmsys/lmsys-chat-1m: its column is called conversation
    row = tulu(i)
    columns = {"conversation_id": f"{i}", "model": "x", "conversation": row.messages, "turn": 1}
    return Row(columns, row.messages)


def openai_weights(i: int) -> Row:  # OpenAI's fine-tuning guide
    a, b, c, d = itertools.islice(texts(i), 4)
    weights = (0, 1) if i % 2 else (1, 0)
    columns = {
        "messages": [
            system("Marv is factual."),
            user(a),
            assistant(b, weight=weights[0]),
            user(c),
            assistant(d, weight=weights[1]),
        ]
    }
    messages = [system("Marv is factual."), user(a), assistant(b), user(c), assistant(d)]
    return Row(columns, messages, without_loss=(weights.index(0),))


def openai_tools(i: int) -> Row:  # OpenAI's fine-tuning guide: arguments are text, content is null
    a, b, c = itertools.islice(texts(i), 3)
    function = {"name": FUNCTIONS[i % 2]["name"], "arguments": json.dumps(ARGUMENTS[i % 2])}
    call = {"id": "call_1", "type": "function", "function": function}
    columns = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            user(a),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": b},
            assistant(c),
        ],
        "parallel_tool_calls": True,
        "tools": ENVELOPED,
    }
    parsed = {**call, "function": {**function, "arguments": ARGUMENTS[i % 2]}}
    messages = [
        system("be brief"),
        user(a),
        {"role": "assistant", "tool_calls": [parsed]},
        {"role": "tool", "tool_call_id": "call_1", "content": b},
        assistant(c),
    ]
    return Row(columns, messages, ENVELOPED)


def openai_functions(i: int) -> Row:  # OpenAI's form before tools
    a, b, c = itertools.islice(texts(i), 3)
    call = {"name": "weather", "arguments": '{"city": "Ulm", "unit": null}'}
    said = [
        user(a),
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": b},
        assistant(c),
    ]
    parsed = {"name": "weather", "arguments": {"city": "Ulm", "unit": None}}
    messages = [
        user(a),
        {"role": "assistant", "tool_calls": [{"type": "function", "function": parsed}]},
        {"role": "tool", "name": "weather", "content": b},
        assistant(c),
    ]
    return Row({"messages": said}, messages)


def object_arguments(i: int) -> Row:  # trl's form of calls: Arrow adds the keys of the other rows
    a, b = itertools.islice(texts(i), 2)
    call = {"name": FUNCTIONS[i % 2]["name"], "arguments": ARGUMENTS[i % 2]}
    said = [
        user(a),
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": call["name"], "content": b},
        assistant(b),
    ]
    return Row({"messages": said, "tools": ENVELOPED}, said, ENVELOPED)


def parts(i: int) -> Row:  # the form of HuggingFaceH4/llava-instruct-mix-vsft, texts alone
    a, b, c = itertools.islice(texts(i), 3)
    said = [
        {"role": "user", "content": [{"type": "text", "text": a}, {"type": "text", "text": b}]},
        {"role": "assistant", "content": [{"type": "text", "text": c}]},
    ]
    return Row({"messages": said}, [user(a + b), assistant(c)])


def messages_as_text(i: int) -> Row:  # nvidia's and others' way round nested columns
    a, b = itertools.islice(texts(i), 2)
    messages = [user(a), assistant(b)]
    return Row({"messages": json.dumps(messages), "uuid": f"{i}"}, messages)


def axolotl_train(i: int) -> Row:  # axolotl's train of a turn
    a, b, c, d = itertools.islice(texts(i), 4)
    said = [user(a), assistant(b, train=False), user(c), assistant(d, train=True)]
    messages = [user(a), assistant(b), user(c), assistant(d)]
    return Row({"messages": said}, messages, without_loss=(0,))


def numbers_as_train(i: int) -> Row:  # a framework that writes 0 and 1
    row = axolotl_train(i)
    for said, train in zip(row.columns["messages"][1::2], (0, 1)):
        said["train"] = train
    return row


def nulls_in_json(
    i: int,
) -> Row:  # the nulls of JSON are somebody's, those of a column may be Arrow's
    a, b, c = itertools.islice(texts(i), 3)
    parameters = {"zone": {"enum": ["CET", None], "default": None}}
    tools = [{"type": "function", "function": {"name": "time", "parameters": parameters}}]
    function = {"name": "time", "arguments": {"zone": None, "more": [{"day": None}]}}
    call = {"type": "function", "function": function}
    said = [
        user(a),
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": b, "weight": None},
        assistant(c),
    ]
    messages = [
        user(a),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": b},
        assistant(c),
    ]
    columns = {"messages": json.dumps(said), "tools": json.dumps(tools)}
    return Row(columns, messages, tools)


def calls_without_arguments(
    i: int,
) -> Row:  # OpenAI's and ShareGPT's calls of a function without parameters
    a, b, c = itertools.islice(texts(i), 3)
    function = {"name": "now", "arguments": {}}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    written_as = [
        {"from": "function_call", "value": '{"name": "now"}'},
        {"from": "function_call", "value": '{"name": "now", "arguments": null}'},
        {"from": "gpt", "tool_calls": [{"type": "function", "function": {"name": "now"}}]},
        {"from": "gpt", "tool_calls": [{"type": "function", "function": {**function, "arguments": None}}]},
        {"from": "gpt", "tool_calls": [{"type": "function", "function": {**function, "arguments": " "}}]},
        {"from": "gpt", "tool_calls": [{"type": "function", "function": {**function, "arguments": "null"}}]},
    ]  # fmt: skip
    said = [
        {"from": "human", "value": a},
        written_as[i % len(written_as)],
        {"from": "observation", "value": b},
        {"from": "gpt", "value": c},
    ]
    messages = [user(a), called, {"role": "tool", "content": b}, assistant(c)]
    return Row({"conversations": said}, messages)


# prompt and completion


def tldr(i: int) -> Row:  # trl-lib/tldr
    a, b = itertools.islice(texts(i), 2)
    return Row({"prompt": a, "completion": b}, [user(a), assistant(b)])


def prompt_response(i: int) -> Row:  # nampdn-ai/tiny-codes
    a, b = itertools.islice(texts(i), 2)
    return Row({"idx": i, "prompt": a, "response": b}, [user(a), assistant(b)])


def conversational_prompt(i: int) -> Row:  # trl's conversational prompt and completion
    a, b, c, d = itertools.islice(texts(i), 4)
    columns = {"prompt": [user(a), assistant(b), user(c)], "completion": [assistant(d)]}
    messages = [user(a), assistant(b), user(c), assistant(d)]
    return Row(columns, messages, without_loss=(0,))


SETS = {
    "alpaca": Published(alpaca, "text", {"format": "alpaca"}),
    "alpaca-cleaned": Published(alpaca_cleaned, "alpaca"),
    "dolly": Published(dolly, None, {"format": "alpaca"}),
    "LLaMA-Factory": Published(llama_factory, "alpaca"),
    "ShareGPT": Published(sharegpt, "messages"),
    "SlimOrca": Published(slim_orca, "messages"),
    "OpenHermes": Published(open_hermes, "messages"),
    "glaive": Published(glaive_toolcall, "messages"),
    "ToolACE": Published(tool_ace, "messages"),
    "hermes functions": Published(hermes_functions, "messages"),
    "ultrachat": Published(ultrachat, "messages"),
    "tulu": Published(tulu, "messages"),
    "lmsys": Published(lmsys, None, {"messages_field": "conversation"}),
    "OpenAI weights": Published(openai_weights, "messages"),
    "OpenAI tools": Published(openai_tools, "messages"),
    "OpenAI functions": Published(openai_functions, "messages"),
    "trl tools": Published(object_arguments, "messages"),
    "parts": Published(parts, "messages"),
    "messages as text": Published(messages_as_text, None, {"format": "messages"}),
    "axolotl": Published(axolotl_train, "messages"),
    "train of numbers": Published(numbers_as_train, "messages"),
    "nulls in JSON": Published(nulls_in_json, None, {"format": "messages"}),
    "calls without arguments": Published(calls_without_arguments, "messages"),
    "tldr": Published(tldr, "prompt_completion"),
    "tiny-codes": Published(prompt_response, "prompt_completion"),
    "conversational prompt": Published(conversational_prompt, "prompt_completion"),
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

    def configure(**options: Any) -> config.Config:
        data = {
            "tokenizer": str(tokenizer),
            "chat_template": str(tmp_path / "t.jinja"),
            "path": str(tmp_path / "out"),
            **options,
        }
        return make_config(data=data)

    return configure


def documents(cfg: config.Config) -> list[str]:
    return list(SourceReader(cfg.data, list_files(cfg.data)[0]))


def mask_of(rendered: dict, without_loss: tuple[int, ...]) -> list[bool]:
    """transformers' mask, less the turns that have no loss."""
    mask = []
    turn = -1
    for learned, run in itertools.groupby(rendered["assistant_masks"]):
        turn += learned
        mask += [bool(learned) and turn not in without_loss for _ in run]
    return mask


@pytest.mark.quick
@pytest.mark.parametrize("name", SETS)
def test_ids_and_mask_are_those_of_the_conversation_written_by_hand(
    name, configured, tokenizer, theirs, tmp_path
):
    published = SETS[name]
    rows = [published.row(i) for i in range(ROWS)]
    source = write([row.columns for row in rows], "jsonl", tmp_path)
    cfg = configured(source=source, **(published.options or {"format": published.found}))
    chat = Chat(tokenizer, cfg.data.chat_template)
    for row, document in zip(rows, documents(cfg), strict=True):
        _, conversation = from_document(document)
        assert conversation.messages == row.messages and conversation.tools == row.tools
        rendered = theirs.apply_chat_template(
            row.messages,
            tools=row.tools,
            chat_template=TEMPLATE,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = chat.encode(*conversation)
        assert ids == rendered["input_ids"] and mask == mask_of(rendered, row.without_loss)
        assert any(mask)


@pytest.mark.parametrize("name", SETS)
def test_each_kind_of_file_has_the_same_conversations_and_format(name, configured, tmp_path):
    published = SETS[name]
    rows = [published.row(i).columns for i in range(ROWS)]
    by_kind = []
    for kind in KINDS:
        source = write(rows, kind, tmp_path)
        cfg = configured(source=source, chat_template=None)
        if published.found is None:
            with refuses("the columns of its first row, .*, are those of no data.format"):
                formats.format_of(cfg.data, cfg.model.vocab_size, tmp_path)
        else:
            assert formats.format_of(cfg.data, cfg.model.vocab_size, tmp_path) == published.found
        cfg = configured(source=source, **(published.options or {"format": published.found}))
        by_kind.append([from_document(document)[1] for document in documents(cfg)])
    assert len(by_kind[0]) == ROWS and all(each == by_kind[0] for each in by_kind)


@pytest.mark.parametrize("name", ["alpaca-cleaned", "SlimOrca", "tldr"])
def test_validation_of_ones_own(name, configured, tmp_path):
    """Is as if it were a source itself, and nothing of the source is held out."""
    rows = [SETS[name].row(i).columns for i in range(40)]
    (tmp_path / "valid").mkdir()
    validation = write(rows[30:], "jsonl", tmp_path / "valid")
    options = {"source": write(rows[:30], "json", tmp_path), "format": SETS[name].found}
    folder = prepare_here(configured(validation=validation, **options))
    assert manifest_of(folder)["documents"] == {"train": 30, "heldout": 10}
    options = {"source": validation, "validation": options["source"], "format": SETS[name].found}
    swapped = prepare_here(configured(path=str(tmp_path / "swapped"), **options))
    expected = np.fromfile(swapped / "train.bin", "<i4")
    assert np.array_equal(np.fromfile(folder / "heldout.bin", "<i4"), expected)


def test_a_template_without_blocks_leaves_out_the_same_turns(tokenizer, tmp_path):
    bare = TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    bare += "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    (tmp_path / "blocks.jinja").write_text(TEMPLATE)
    (tmp_path / "bare.jinja").write_text(bare)
    messages = openai_weights(0).messages
    blocks = Chat(tokenizer, str(tmp_path / "blocks.jinja"))
    without = Chat(tokenizer, str(tmp_path / "bare.jinja"))
    last_learned = [True, True, True, True, False]
    one, other = (chat.encode(messages, None, last_learned) for chat in (blocks, without))
    assert one == other and 0 < sum(one[1]) < sum(without.encode(messages)[1])
    assert without.encode(messages, None, [False] * 5) == ([], [])


# What is wrong


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def called(**function) -> list[dict]:
    return [user("a"), {"role": "assistant", "tool_calls": [{"function": function}]}]


WRONG = {
    "is nested more than 100 deep / structured": called(name="f", arguments=nested(900)),
    "is nested more than 100 deep / JSON": called(name="f", arguments=json.dumps(nested(900))),
    "is nested more than 100 deep / too deep to parse": called(name="f", arguments="[" * 10**5),
    "is nested more than 100 deep / part": [{"role": "user", "content": [{"type": nested(900)}]}],
    "message 2 (assistant): a tool call needs a name / none": called(arguments={"a": 1}),
    "message 2 (assistant): a tool call needs a name / number": called(name=5),
    "message 2 (assistant): a tool call needs a name / text": [
        user("a"),
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
    ],
    "message 2 (assistant): a tool call has its arguments in arguments, not in parameters": called(
        name="f", parameters={"a": 1}
    ),
    "message 2 (assistant): the arguments of a tool call must be an object": called(
        name="f", arguments=[1]
    ),
    "message 1 (user): content has a part of type 'text' without a text": [
        {"role": "user", "content": [{"type": "text", "text": None}]}
    ],
    "has two system prompts: in its field 'system'": [
        {"role": "system", "tool_calls": [{"function": {"name": "f"}}]},
        user("a"),
    ],
    "message 1 (user): weight must be 0 or 1, not 0.5": [{**user("a"), "weight": 0.5}],
    "message 1 (user): train is true, but only what the assistant says": [
        {**user("a"), "train": True}
    ],
    "message 1 (user): train must be true or false, not 'no'": [{**user("a"), "train": "no"}],
    'message 1 (assistant): must be JSON of a call, {"name"': [
        {"from": "function_call", "value": "weather(Ulm)"}
    ],
    "message 1 (assistant): the arguments of a tool call must be an object": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "Ulm"}}]}
    ],
    "message 1 (assistant): tool_calls must be a list of objects": [
        {"role": "assistant", "tool_calls": ["weather"]}
    ],
    "has two system prompts: in its field 'system', and as a message": [system("b"), user("a")],
    "field 'tools' must be a list of functions, or JSON of one": [user("a"), assistant("b")],
    "message 1: needs the keys role and content, but is of type str": ["hello"],
    "message 1: needs the keys role and content, but has human": [{"human": "a"}],
    "message 1 (user): has no content": [{"role": "user", "tool_calls": []}],
    "message 1 (assistant): has no content": [{"role": "assistant", "content": None}],
    "message 1: role 'robot' is unknown; the roles are system, developer, user": [
        {"role": "robot", "content": "a"}
    ],
    "message 1: role ['user'] is unknown": [{"role": ["user"], "content": "a"}],
    "message 1 (user): content has a part of type 'image'; only text is read": [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_one_line(name, configured, tmp_path):
    row: dict[str, Any] = {"messages": WRONG[name]}
    if "two system" in name:
        row["system"] = "a"
    if "tools" in name:
        row["tools"] = "weather(city)"
    good = {"messages": [user("a"), assistant("b")]}
    source = write([good, row, good], "json", tmp_path)
    with refuses(r"rows.json: row 2: ") as refused:
        documents(configured(source=source, format="messages"))
    assert name.partition(" /")[0] in str(refused.value)
    assert len(refused.value.problems) == 1 and "\n" not in str(refused.value)


def test_a_value_may_be_nested_as_deeply_as_any_needs(configured, tokenizer, tmp_path):
    """Nothing that recurses fails below the limit."""
    messages = called(name="f", arguments=json.dumps(nested(98)))
    cfg = configured(source=write([{"messages": messages}], "jsonl", tmp_path), format="messages")
    (document,) = documents(cfg)
    ids, _ = Chat(tokenizer, cfg.data.chat_template).encode(*from_document(document)[1])
    assert ids


@pytest.mark.parametrize(
    "columns, format, message",
    [
        ({"instruction": "a"}, "alpaca", "has no field 'output' or 'response' (data.format = "),
        ({"instruction": "a", "output": None}, "alpaca", "field 'output' is null (data.format"),
        ({"instruction": "a", "output": 4}, "alpaca", "field 'output' must be text, not int"),
        (
            {"instruction": "a", "output": "b", "history": ["c"]},
            "alpaca",
            "field 'history' must be a list of [what the user said, the answer]",
        ),
        ({"prompt": "a"}, "prompt_completion", "has no field 'completion' or 'response'"),
        (
            {"instruction": "a", "output": "b", "history": 5},
            "alpaca",
            "field 'history' must be a list of [what the user said, the answer]",
        ),
        (
            {"messages": '[{"role": "user"'},
            "messages",
            "field 'messages' must be a list of messages, or JSON of one, but its text is no valid",
        ),
        (
            {"conversations": '{"role": "user"}'},
            "messages",
            "field 'conversations' must be a list of messages, or JSON of one, but its text is of type dict",
        ),
        (
            {"prompt": 4, "completion": "b"},
            "prompt_completion",
            "field 'prompt' must be a list of messages, or",
        ),
        ({"text": "a"}, "messages", "has no field 'messages' or 'conversations' (data.messages"),
    ],
)
def test_a_wrong_column_is_named(columns, format, message, configured, tmp_path):
    source = write([columns], "json", tmp_path)
    with refuses("rows.json: row 1: ") as refused:
        documents(configured(source=source, format=format))
    assert message in str(refused.value)


@pytest.mark.parametrize("number", [0, 30])
def test_a_row_that_the_template_refuses_is_named_and_mended_it_resumes(
    number, configured, tmp_path
):
    """To the same tokens as of rows that were right from the beginning."""
    rows = [tulu(i).columns for i in range(60)]
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    (tmp_path / "no.jinja").write_text(refusing + TEMPLATE)
    cfg = configured(
        source=str(tmp_path / "rows.jsonl"),
        format="messages",
        chat_template=str(tmp_path / "no.jinja"),
    )
    right = rows[number]["messages"][0]["content"]
    rows[number]["messages"][0]["content"] = "no"
    write(rows, "jsonl", tmp_path)
    with refuses(f"rows.jsonl: row {number + 1}: the chat template fails: TemplateError: no"):
        prepare_here(cfg)
    rows[number]["messages"][0]["content"] = right
    write(rows, "jsonl", tmp_path)
    mended = prepare_here(cfg)
    options = {"source": cfg.data.source, "format": "messages", "path": str(tmp_path / "other")}
    alone = prepare_here(configured(chat_template=cfg.data.chat_template, **options))
    assert (mended / "train.bin").read_bytes() == (alone / "train.bin").read_bytes()
    assert manifest_of(mended)["segments"] == manifest_of(alone)["segments"]


def test_a_lone_surrogate_is_refused(configured, tmp_path):
    rows = [{"messages": [user("a"), assistant("b \ud800")]}]
    with refuses("rows.jsonl: row 1: is not valid Unicode"):
        documents(configured(source=write(rows, "jsonl", tmp_path), format="messages"))
