"""A conversation in the terminal, with the checkpoint's template."""

import contextlib
import io
import json
from typing import Any
from unittest import mock

from tests.conftest import make_config, needs_extra, run_tool, train_run, words
from tests.distributed import distributed
from tests.tools.prepare.chat.conftest import (
    CHATML,
    SPECIAL,
    conversations,
    prepare_here,
    sections_of,
    talk,
)
from tools import chat as terminal
from tools.generate import load_tokenizer
from tools.prepare.chat.conversations import Chat


def test_a_conversation_keeps_what_fits_and_ends_turns(tokenizer, monkeypatch, capsys):
    chat = Chat(tokenizer)
    answer = chat.tokenizer.encode(["dog ö ✓"])[0]
    prompts = []

    def reply(ids, count):
        prompts.append(ids)
        yield from [*answer, chat.special["<|im_end|>"], 5]

    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n" * 3))
    three = len(chat.prompt(talk("the cat", "dog ö ✓", "the cat", "dog ö ✓", "the cat")))
    # the third no longer leaves room for four tokens
    terminal.converse(chat, [chat.special["<|im_end|>"]], three + 3, 4, reply)
    printed = capsys.readouterr().out
    assert printed.count("> dog ö ✓\n") == 2 and "(2 messages, the oldest, no longer fit" in printed
    two = chat.prompt(talk("the cat", "dog ö ✓", "the cat"))
    assert prompts == [chat.prompt(talk("the cat")), two, two]


@needs_extra("huggingface")
@distributed(ranks=1)
def test_the_template_goes_along_with_checkpoints_and_exports(world, tokenizer, tmp_path):
    """And `-m chat` speaks by it."""
    from tools import huggingface

    run = {"name": "r", "output_dir": str(tmp_path)}
    sections = sections_of(tokenizer, tmp_path, conversations(60), checkpoint={}, run=run)
    cfg = make_config(**sections)
    prepare_here(cfg)
    train_run(cfg, world)
    checkpoint = tmp_path / "r/checkpoints/step-00000004"
    assert run_tool(huggingface.main, "export", checkpoint, tmp_path / "hf") == 0
    for folder in (checkpoint, tmp_path / "hf"):
        assert (folder / "chat_template.jinja").read_text() == CHATML
    settings = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert settings["eos_token_id"] == SPECIAL.index("<|im_end|>")
    # -m generate ends there, too
    assert load_tokenizer(checkpoint).eos[-1] == SPECIAL.index("<|im_end|>")
    typed = io.StringIO("the cat\n\n" + words(1, 300) + "\na dog\n/quit\nno\n")
    out: Any = io.StringIO()
    out.reconfigure = lambda **_: None
    with mock.patch("sys.stdin", typed), contextlib.redirect_stdout(out):
        assert run_tool(terminal.main, checkpoint, "--tokens", 8, "--temperature", 0) == 0
    printed = out.getvalue()
    assert printed.count("> ") == 5 and "too long for a context of 128 tokens" in printed
