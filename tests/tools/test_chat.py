"""A conversation in the terminal, with the checkpoint's template."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import REPO, make_config, needs_extra, refuses, run_tool, train_run, words
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
from tools.prepare.chat.conversations import Chat

# context, most tokens of a reply, messages dropped: 105 tokens without any, then 75, then 5
FITS = [(107, 2, 0), (106, 2, 2), (139, 99, 0), (138, 99, 2), (7, 2, 4), (6, 2, 4)]


@pytest.mark.parametrize("context, most, dropped", FITS)
def test_the_oldest_exchanges_go_until_a_reply_fits(context, most, dropped):
    """The limit of a reply, or a quarter of the context and at least a token, is kept free for it."""
    chat: Any = SimpleNamespace(prompt=lambda lengths: [0] * sum(lengths))
    history: Any = [10, 20, 30, 40]
    last: Any = [5]
    prompt, count = terminal.fit(chat, history, last, context, most)
    assert (len(prompt), count) == (sum(history[dropped:]) + 5, dropped)
    with refuses("too long for a context of 5 tokens"):
        terminal.fit(chat, [], last, 5, 2)


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
    terminal.converse(chat, [], three + 3, 4, reply)
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
    typed = io.StringIO("the cat\n\n" + words(1, 300) + "\na dog\n/quit\nno\n")
    out: Any = io.StringIO()
    out.reconfigure = lambda **_: None
    with mock.patch("sys.stdin", typed), contextlib.redirect_stdout(out):
        assert run_tool(terminal.main, checkpoint, "--tokens", 8, "--temperature", 0) == 0
    printed = out.getvalue()
    assert printed.count("> ") == 5 and "too long for a context of 128 tokens" in printed


def test_arrow_keys_edit_a_message():
    ours, theirs = pty.openpty()
    code = "from tools.chat import user_messages; print([*user_messages()])"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdin=theirs, stdout=theirs)
    os.write(ours, b"ab\x1b[DX\n/quit\n")
    assert child.wait(60) == 0 and "['aXb']" in os.read(ours, 9999).decode()
