"""data.format where no option says it: found from the first row of each source."""

import json
import pathlib
from typing import Any

import pytest

import config
from config import ConfigError

from tests.conftest import make_config, needs_extra, prepare_one, refuses, words

pytestmark = pytest.mark.quick

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TWO = {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"}


def write(path: pathlib.Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "row, name",
    [
        ({"text": "a"}, "text"),
        ({"text": "a", **TWO}, "text"),
        ({"messages": CHAT}, "messages"),
        ({"prompt": "a", "prompt_id": "b", "messages": CHAT}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}], "text": None}, "messages"),
        ({"output": "a", "input": "", "instruction": "b"}, "alpaca"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"idx": 1, "prompt": [CHAT[0]], "response": "b"}, "prompt_completion"),
        ({"instruction": "a", "output": "b", "messages": None}, "alpaca"),
    ],
)
def test_the_first_row_s_columns_say_the_format(row, name, tmp_path, capsys):
    cfg = make_config(data={"source": write(tmp_path / "a.jsonl", row, {"other": 1})})
    assert formats.format_of(cfg.data, 320, tmp_path) == name
    logged = f'data.format = "{name}", by its columns {", ".join(row)}'
    assert (logged in capsys.readouterr().err) == (list(row) != ["text"])


@pytest.mark.parametrize(
    "row, problem",
    [
        (TWO, "several formats; .*: --data.format=alpaca or --data.format=prompt_completion$"),
        (
            {"prompt": "a", "the chosen": "b"},
            "no data.format; .*: --data.text_field=prompt or .*='the chosen'$",
        ),
        ({"a;b": CHAT, "n": 1}, "no data.format; .*: --data.messages_field='a;b'$"),
        ({"messages": json.dumps(CHAT)}, "no data.format; .*: --data.messages_field=messages$"),
        ({"instruction": "a", "response": "b"}, "no data.format; .*: --data.format=alpaca or "),
        ({"tokens": [1, 2]}, "no data.format; .*: none of them holds text or messages"),
        ({"messages": None, "output": "a"}, "no data.format; .*: --data.text_field=output"),
        ({"text": None, "n": 1}, "no data.format; .*: none of them holds text"),
    ],
)
def test_unclear_columns_are_refused_with_options_to_paste(row, problem, tmp_path):
    cfg = make_config(data={"source": write(tmp_path / "a.jsonl", row)})
    with refuses("source = .*a.jsonl: the columns of its first row, ", ", ".join(row), problem):
        formats.format_of(cfg.data, 320, tmp_path)


def data_config(tmp_path: pathlib.Path, **data: Any) -> config.Config:
    """Without an option that is None."""
    return make_config(data={"path": str(tmp_path / "out"), **data})


@pytest.mark.parametrize(
    "options", [{}, {"format": "text"}, {"text_field": "body"}, {"source": "python-stdlib"}]
)
def test_texts_need_no_option(options, tmp_path):
    source = write(tmp_path / "a.jsonl", {"text": "a", "body": "b", **TWO})
    cfg = data_config(tmp_path, **{"source": source, **options})
    assert formats.complete(cfg) == cfg


def test_a_plan_needs_no_rows(tmp_path):
    for source in (str(tmp_path / "missing.jsonl"), "owner/name"):
        cfg = data_config(tmp_path, source=source)
        assert formats.complete(cfg, is_plan=True) == cfg
        with pytest.raises(ConfigError):
            formats.complete(cfg)


@needs_extra("chat")
def test_what_is_found_becomes_an_option(tmp_path, prepared):
    """Of a mixture, of each source; and what is prepared needs no rows any more."""
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    options = {"tokenizer": str(prepared / "tokenizer.model"), "chat_template": str(template)}
    alpaca = write(tmp_path / "a.jsonl", {"instruction": "a", "output": "b"})
    cfg = data_config(tmp_path, source=alpaca, **options)
    completed = formats.complete(cfg)
    assert completed == data_config(tmp_path, source=alpaca, format="alpaca", **options)
    assert completed.data.document_mask
    sources = [
        {"source": alpaca, "weight": 1.0},
        {"source": write(tmp_path / "b.jsonl", {"messages": CHAT}), "weight": 2.0},
    ]
    mixture = formats.complete(data_config(tmp_path, sources=sources, **options)).data.sources
    assert [(source.format, source.weight) for source in mixture] == [
        ("alpaca", 1.0),
        ("messages", 2.0),
    ]
    text = {"source": write(tmp_path / "c.jsonl", {"text": words(0, 9)}), "weight": 1.0}
    with refuses(r"mixes text and conversations \(format = alpaca, text\)"):
        formats.complete(data_config(tmp_path, sources=[sources[0], text], **options))
    with refuses("chat_template", "renders conversations"):
        formats.complete(data_config(tmp_path, source=text["source"], **options))
    prepare_one(completed)
    (tmp_path / "a.jsonl").unlink()
    assert formats.complete(cfg) == completed
