"""The first rows of public data sets in their real form: columns and nesting as their cards show them, texts of our
own. Each is read as its conversation written by hand, and transformers renders that to the same ids and mask."""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from data.identity import identity, open_source
from data.record import read_manifest

from config import ConfigError
from data.dataset import open_dataset
from data.formats import found_format, found_options
from data.prepare import prepare
from extras.chat.conversations import Chat
from extras.chat.messages import from_document
from tests.conftest import make_config, words
from tests.extras.chat import test_chat

ROWS = 6
MANY = 40  # enough to train on
tokenizer = test_chat.tokenizer
theirs = test_chat.theirs

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


def written(rows: list[dict], kind: str, folder: pathlib.Path) -> pathlib.Path:
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
    return path


KINDS = ("jsonl", "json", "parquet", "saved")


@pytest.fixture
def sections(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)

    def sections_of(**options) -> dict:
        data = {
            "tokenizer": str(tokenizer),
            "chat_template": str(tmp_path / "t.jinja"),
            "path": str(tmp_path / "out"),
            **options,
        }
        train = {"seq_len": 128, "global_batch_size": 4, "micro_batch_size": 1}
        return {"data": data, "train": train}

    return sections_of


def prepared(cfg) -> pathlib.Path:
    """prepare() in this process."""
    with mock.patch("data.prepare.worker_count", lambda: 0), mock.patch("data.prepare.report"):
        return prepare(cfg)[0]


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
    name,
    sections,
    tokenizer,
    theirs,
    tmp_path,
):
    published = SETS[name]
    rows = [published.row(i) for i in range(ROWS)]
    source = written([row.columns for row in rows], "jsonl", tmp_path)
    options = published.options or {"format": published.found}
    cfg = make_config(**sections(source=str(source), **options))
    chat = Chat(tokenizer, cfg.data.chat_template)
    documents = list(open_source(cfg.data))
    assert len(documents) == ROWS
    for row, document in zip(rows, documents):
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
def test_each_kind_of_file_has_the_same_digest(name, sections, tmp_path):
    published = SETS[name]
    rows = [published.row(i).columns for i in range(ROWS)]
    hashes = set()
    for kind in KINDS:
        source = written(rows, kind, tmp_path)
        given = sections(source=str(source), path=str(tmp_path / f"out-{kind}"))
        cfg = make_config(**given)
        if published.found is None:
            with pytest.raises(
                ConfigError, match="its first row has the columns of no data.format"
            ):
                found_format(cfg, ask_hub=False)
        else:
            assert found_format(cfg, ask_hub=False) == published.found
        options = published.options or {"format": published.found}
        folder = prepared(make_config(**{**given, "data": {**given["data"], **options}}))
        manifest = read_manifest(folder)
        assert sum(manifest["documents"].values()) == ROWS and not manifest.get("left_out")
        hashes.add((manifest["sha256"]["train.bin"], manifest["sha256"]["heldout.bin"]))
    assert len(hashes) == 1


# What is found


@pytest.mark.quick
def test_the_columns_decide_and_what_is_unclear_is_refused_with_options_to_paste(
    sections, tmp_path, capsys
):
    def found(*rows: dict, **options):
        source = written([*rows], "jsonl", tmp_path)
        return found_options(make_config(**sections(source=str(source), **options)))

    two = {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"}
    refused = {
        "of several formats: prompt, completion, instruction, output; "
        "add --data.format=alpaca or --data.format=prompt_completion": two,
        "of no data.format: prompt, chosen, rejected; add --data.text_field=prompt or": {
            "prompt": "a",
            "chosen": "b",
            "rejected": "c",
        },
        "of no data.format: dialog, n; add --data.messages_field=dialog$": {
            "dialog": [user("a")],
            "n": 1,
        },
        "of no data.format: messages, uuid; add --data.messages_field=messages or": (
            messages_as_text(0).columns
        ),
        "of no data.format: tokens; none of them holds text or messages": {"tokens": [1, 2]},
        "of no data.format: messages, output; add": {"messages": None, "output": "a"},
    }
    for message, row in refused.items():
        with pytest.raises(ConfigError, match=message):
            found(row, chat_template=None)
    assert found({"text": "a"}, chat_template=None) == []
    for row in (
        {"body": "a", "prompt": "b", "completion": "c"},
        {"prompt": "b", "completion": "c"},
    ):
        # which a template contradicts
        assert found(row, text_field="body") == ["--data.format=text"]
    assert found({**two, "text": "a"}, chat_template=None) == []
    assert "--data.format=alpaca or --data.format=prompt_completion trains on the answers" in (
        capsys.readouterr().err
    )
    # a first line that is wrong decides nothing
    (tmp_path / "rows.jsonl").write_text('{"prompt"\n{"prompt": "a", "completion": "b"}\n')
    source = str(tmp_path / "rows.jsonl")
    assert found_options(make_config(**sections(source=source))) == [
        "--data.format=prompt_completion"
    ]
    assert 'data.format = "prompt_completion", by its first' in capsys.readouterr().err
    # what is not there is reported by whoever prepares it; a folder that is there says it, too
    missing = sections(source="missing.jsonl")
    assert found_options(make_config(**missing)) == []
    rows = [tldr(i).columns for i in range(ROWS)]
    given = sections(source=str(written(rows, "jsonl", tmp_path)), format="prompt_completion")
    prepared(make_config(**given))
    (tmp_path / "rows.jsonl").unlink()
    del given["data"]["format"]
    assert found_options(make_config(**given)) == ["--data.format=prompt_completion"]


def test_a_mixture_finds_each_source_s_format_and_its_own_validation(sections, tmp_path):
    made = {}
    for name in ("alpaca-cleaned", "ShareGPT", "tldr"):
        for part, numbers in (("train", range(MANY)), ("valid", range(50, 53))):
            (tmp_path / name / part).mkdir(parents=True)
            rows = [SETS[name].row(i).columns for i in numbers]
            made[name, part] = str(written(rows, "json", tmp_path / name / part))
    sources = []
    for name, weight in (("alpaca-cleaned", 1.0), ("ShareGPT", 2.0), ("tldr", 1.0)):
        validation = made[name, "valid"]
        sources.append({"source": made[name, "train"], "weight": weight, "validation": validation})
    given = {**sections(sources=sources), "eval": {}}
    (option,) = found_options(make_config(**given))
    from config import from_dict
    from tests.conftest import tables

    cfg = from_dict(tables(**given), "t.toml", [option])
    assert [source.format for source in cfg.data.sources] == [
        "alpaca",
        "messages",
        "prompt_completion",
    ]
    assert cfg.data.document_mask and found_options(cfg) == []
    prepared(cfg)
    dataset = open_dataset(cfg)
    assert [stream.document_count for stream in dataset.train] == [MANY] * 3
    assert [stream.document_count for stream in dataset.validation] == [3] * 3
    # one source says its format, the others' are found
    said = [{**sources[0], "format": "alpaca"}, *sources[1:]]
    assert found_options(make_config(**{**given, **sections(sources=said)})) == [option]
    (tmp_path / "t.txt").write_text("a text")
    text = {"source": str(tmp_path / "t.txt"), "weight": 1.0}
    mixed = sections(sources=[said[0], text])
    (option,) = found_options(make_config(**{**given, **mixed}))
    with pytest.raises(
        ConfigError, match=r"mixes text and conversations \(format = alpaca, text\)"
    ):
        from_dict(tables(**{**given, **mixed}), "t.toml", [option])
    # of one that is not there, whoever prepares it reports that
    missing = sections(sources=[said[0], {"source": "missing.jsonl", "weight": 1.0}])
    assert found_options(make_config(**{**given, **missing})) == []


@pytest.mark.parametrize("name", ["alpaca-cleaned", "SlimOrca", "tldr"])
def test_validation_of_one_s_own(name, sections, tmp_path):
    rows = [SETS[name].row(i).columns for i in range(2 * MANY)]
    (tmp_path / "valid").mkdir()
    source = str(written(rows[:MANY], "json", tmp_path))
    validation = str(written(rows[MANY:], "jsonl", tmp_path / "valid"))
    given = sections(source=source, validation=validation, format=SETS[name].found)
    cfg = make_config(**given, eval={})
    folder = prepared(cfg)
    assert read_manifest(folder)["documents"] == {"train": MANY, "heldout": MANY}
    (train,), (heldout,) = open_dataset(cfg).train, open_dataset(cfg).validation
    assert train.document_count == heldout.document_count == MANY
    # as if it were a source itself
    alone = sections(source=validation, path=str(tmp_path / "alone"), format=SETS[name].found)
    with mock.patch("extras.chat.conversations.is_validation", lambda text: False):
        other = prepared(make_config(**alone))
    expected = np.fromfile(other / "train.bin", "<i4")
    assert np.array_equal(np.fromfile(folder / "heldout.bin", "<i4"), expected)
    # where it says nothing
    silent = [{**rows[0], "output": "", "completion": "", "conversations": []}]
    written(silent, "jsonl", tmp_path / "valid")
    with pytest.raises(
        ConfigError, match="validation = .*: holds nothing to evaluate on; 1 of its"
    ):
        prepared(make_config(**{**given, "data": {**given["data"], "path": str(tmp_path / "x")}}))


def test_a_template_without_blocks_leaves_out_the_same_turns(tokenizer, tmp_path):
    bare = TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    bare += "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    (tmp_path / "blocks.jinja").write_text(TEMPLATE)
    (tmp_path / "bare.jinja").write_text(bare)
    row = openai_weights(0)
    has_loss = [True, True, True, True, False]
    results = [
        Chat(tokenizer, str(tmp_path / name)).encode(row.messages, None, has_loss)
        for name in ("blocks.jinja", "bare.jinja")
    ]
    assert results[0] == results[1] and any(results[0][1])
    everything = Chat(tokenizer, str(tmp_path / "bare.jinja")).encode(row.messages)
    assert sum(everything[1]) > sum(results[0][1])
    none = [False] * 5
    assert Chat(tokenizer, str(tmp_path / "bare.jinja")).encode(row.messages, None, none) == (
        [],
        [],
    )


# What is wrong


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def called(**function) -> list[dict]:
    return [user("a"), {"role": "assistant", "tool_calls": [{"function": function}]}]


def test_a_value_may_be_nested_as_deeply_as_any_needs(sections, tokenizer, tmp_path):
    """Nothing that recurses fails below the limit."""
    messages = called(name="f", arguments=json.dumps(nested(98)))
    source = str(written([{"messages": messages}], "jsonl", tmp_path))
    cfg = make_config(**sections(source=source, format="messages"))
    (document,) = open_source(cfg.data)
    ids, _ = Chat(tokenizer, cfg.data.chat_template).encode(*from_document(document)[1])
    assert ids


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
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_one_line(name, sections, tmp_path):
    line = name.partition(" /")[0]
    row = {"messages": WRONG[name]}
    if "two system" in name:
        row["system"] = "a"
    if "tools" in name:
        row["tools"] = "weather(city)"
    good = {"messages": [user("a"), assistant("b")]}
    source = str(written([good, row, good, row], "json", tmp_path))
    with pytest.raises(ConfigError) as error:
        list(open_source(make_config(**sections(source=source, format="messages")).data))
    first, second = error.value.problems
    assert "rows.json: row 2, line " in first and "rows.json: row 4, line " in second
    assert line in first and line in second


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
def test_a_wrong_column_is_named(columns, format, message, sections, tmp_path):
    source = str(written([columns], "json", tmp_path))
    with pytest.raises(ConfigError) as error:
        list(open_source(make_config(**sections(source=source, format=format)).data))
    (problem,) = error.value.problems
    assert message in problem


def test_all_rows_that_a_template_refuses_are_listed(sections, tmp_path):
    """Of the file with the first of them, and from whatever chunk."""
    rows = [tulu(i).columns for i in range(60)]
    for number in (10, 30, 50):
        rows[number]["messages"][0]["content"] = "no"
    written(rows, "jsonl", tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "a.jsonl")
    written([*rows[:10], rows[10]], "jsonl", tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "b.jsonl")
    refusing = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    (tmp_path / "no.jinja").write_text(refusing)
    given = sections(
        source=str(tmp_path / "*.jsonl"),
        format="messages",
        chat_template=str(tmp_path / "no.jinja"),
    )
    with (
        mock.patch("data.encode.CHUNK", 300),
        pytest.raises(ConfigError) as error,
    ):
        prepared(make_config(**given))
    said = [problem.partition(": the chat")[0] for problem in error.value.problems]
    assert [name.rpartition("/")[2] for name in said] == [
        f"a.jsonl: line {number}" for number in (11, 31, 51)
    ]
    # mended, the same command goes on, and ends as if nothing had been
    for number in (10, 30, 50):
        rows[number]["messages"][0]["content"] = "yes"
    written(rows, "jsonl", tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps(tulu(99).columns))
    folder = prepared(make_config(**given))
    given["data"]["path"] = str(tmp_path / "again")
    assert (
        read_manifest(folder)["sha256"] == read_manifest(prepared(make_config(**given)))["sha256"]
    )


@pytest.mark.parametrize(
    "rows, listed, ends",
    [
        ("good " * 30 + "bad " * 25, 25, ""),
        ("bad " * 9 + "good " * 30 + "bad " * 25, 34, ""),
        ("bad " * 10, 10, ""),
        ("bad " * 11, 10, "the list ends here, after 10 wrong rows; more may follow"),
        ("bad " * 300, 10, "the list ends here, after 10 wrong rows; more may follow"),
        ("good " + "bad " * 50, 40, "the list ends here, after 40 wrong rows; more may follow"),
    ],
    ids=["good first", "good between", "ten", "eleven", "all", "more than are listed"],
)
@pytest.mark.parametrize("chunk", [1 << 18, 600], ids=["one chunk", "chunks"])
def test_a_list_of_wrong_rows_says_where_it_ends(rows, listed, ends, chunk, sections, tmp_path):
    """In the processes that tokenize, as always."""
    kinds = rows.split()
    rows = [tulu(i).columns for i in range(len(kinds))]
    for row, kind in zip(rows, kinds):
        row["messages"][0]["content"] = kind
    source = str(written(rows, "jsonl", tmp_path))
    refusing = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    (tmp_path / "no.jinja").write_text(refusing + TEMPLATE)
    template = str(tmp_path / "no.jinja")
    cfg = make_config(**sections(source=source, format="messages", chat_template=template))
    with (
        mock.patch("data.encode.CHUNK", chunk),
        mock.patch("data.prepare.MOST_PROBLEMS", 40),
        mock.patch("data.prepare.report"),
        pytest.raises(ConfigError) as error,
    ):
        prepare(cfg)
    problems = [*error.value.problems]
    assert problems[listed:] == ([ends] if ends else [])
    bad = [number for number, kind in enumerate(kinds, 1) if kind == "bad"][:listed]
    for number, problem in zip(bad, problems[:listed], strict=True):
        assert f"rows.jsonl: line {number}: the chat template fails" in problem


def test_folders_from_before_there_were_formats_stay_valid(sections):
    """Another key would give them another name."""
    before = {"source", "subset", "split", "text_field", "tokenizer", "vocab_size", "max_tokens"}
    before |= {"format", "messages_field", "chat_template"}
    chats = identity(make_config(**sections(source="a.jsonl", messages_field="messages")))
    assert chats.keys() == before
    given = sections(source="a.jsonl", messages_field="messages", format="messages")
    assert identity(make_config(**given)) == chats
    alpaca = identity(make_config(**sections(source="a.jsonl", format="alpaca")))
    assert alpaca.keys() == before - {"messages_field"} | {"data.format"}
    texts = [
        identity(make_config(**sections(source="a.jsonl", chat_template=None, format=name)))
        for name in (None, "text")
    ]
    assert texts[0] == texts[1] and texts[0].keys() == before - {"messages_field", "chat_template"}


def test_a_dataset_of_the_hub_is_asked_for_its_first_row_unless_it_is_prepared(
    sections, monkeypatch
):
    import datasets
    import huggingface_hub

    rows = datasets.Dataset.from_list([glaive_toolcall(i).columns for i in range(ROWS)])
    asked = []

    def load(*names, **options):
        asked.append(names)
        return rows.to_iterable_dataset()

    monkeypatch.setattr("datasets.load_dataset", load)
    info = SimpleNamespace(sha="first")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_: info)
    given = sections(source="owner/name", path=None)
    assert not found_options(make_config(**given), ask_hub=False) and not asked
    assert found_options(make_config(**given)) == ["--data.format=messages"] and len(asked) == 1
    with monkeypatch.context() as context:
        context.chdir(pathlib.Path(given["data"]["chat_template"]).parent)
        prepared(make_config(**{**given, "data": {**given["data"], "format": "messages"}}))
        asked.clear()
        assert found_options(make_config(**given)) == ["--data.format=messages"] and not asked
