"""data.format where no option says it: found from the first row of each source."""

import json
import pathlib
from typing import Any

import pytest

import config
from config import ConfigError
from data import formats
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
    assert formats.format_of(cfg, tmp_path, is_plan=False) == name
    logged = f'data.format = "{name}", by its columns {", ".join(row)}'
    assert (logged in capsys.readouterr().err) == (list(row) != ["text"])


@pytest.mark.parametrize(
    "row, problem",
    [
        (TWO, "several formats; .*: --data.format=alpaca or --data.format=prompt_completion$"),
        (
            {"prompt": "a", "chosen": "b"},
            "no data.format; .*: --data.text_field=prompt or .*=chosen$",
        ),
        ({"dialog": CHAT, "n": 1}, "no data.format; .*: --data.messages_field=dialog$"),
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
        formats.format_of(cfg, tmp_path, is_plan=False)


def test_a_first_row_that_is_wrong_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt"\n{"prompt": "a", "completion": "b"}\n')
    cfg = make_config(data={"source": str(tmp_path / "a.jsonl")})
    with refuses("a.jsonl: row 1: is not valid JSON"):
        formats.format_of(cfg, tmp_path, is_plan=False)


def complete(
    tmp_path: pathlib.Path, *flags: str, tokenizer: str | None = None, **data: Any
) -> tuple[config.Config, list[str]]:
    """What a program finds that is called with a file of these options and with flags."""
    cfg = make_config(data={"tokenizer": tokenizer, "path": str(tmp_path / "out"), **data})
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(cfg).replace("document_mask = false\n", ""))
    args, cfg = config.from_command_line([str(path), *flags], "")
    return formats.complete(args, cfg)


def test_no_option_is_added_for_texts_or_what_an_option_says(tmp_path):
    source = write(tmp_path / "a.jsonl", {"text": "a", "body": "b", **TWO})
    for options in ({}, {"format": "text"}, {"text_field": "body"}, {"source": "python-stdlib"}):
        cfg, found = complete(tmp_path, **{"source": source, **options})
        assert found == [] and cfg.data.format == options.get("format")


@needs_extra("planner")
def test_a_plan_needs_no_rows(tmp_path):
    for source in (str(tmp_path / "missing.jsonl"), "owner/name"):
        assert complete(tmp_path, "--dry-run", source=source)[1] == []
        with pytest.raises(ConfigError):
            complete(tmp_path, source=source)


@needs_extra("chat")
def test_what_is_found_becomes_an_option(tmp_path, prepared):
    """Of a mixture, of each source; and what is prepared needs no rows any more."""
    tokenizer = str(prepared / "tokenizer.model")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    options = {"tokenizer": tokenizer, "chat_template": str(template)}
    alpaca = write(tmp_path / "a.jsonl", {"instruction": "a", "output": "b"})
    cfg, found = complete(tmp_path, source=alpaca, **options)
    assert found == ["--data.format=alpaca"]
    assert cfg.data.format == "alpaca" and cfg.data.document_mask
    sources = [
        {"source": alpaca, "weight": 1.0},
        {"source": write(tmp_path / "b.jsonl", {"messages": CHAT}), "weight": 2.0},
    ]
    cfg, found = complete(tmp_path, sources=sources, **options)
    assert [source.format for source in cfg.data.sources] == ["alpaca", "messages"]
    assert [source.weight for source in cfg.data.sources] == [1.0, 2.0]
    text = {"source": write(tmp_path / "c.jsonl", {"text": words(0, 9)}), "weight": 1.0}
    with refuses(r"mixes text and conversations \(format = alpaca, text\)"):
        complete(tmp_path, sources=[sources[0], text], **options)
    with refuses("chat_template", "renders conversations"):
        complete(tmp_path, source=text["source"], **options)
    cfg, _ = complete(tmp_path, source=alpaca, **options)
    prepare_one(cfg)
    (tmp_path / "a.jsonl").unlink()
    again, found = complete(tmp_path, source=alpaca, **options)
    assert again == cfg and found == ["--data.format=alpaca"]
