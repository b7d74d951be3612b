"""The conversations to try chat fine-tuning on."""

import json

import pytest

from tests.conftest import run_tool
from tools import make_chat

LIBRARY = '''
def add(a, /, b, *rest, sign=1, **others):
    """Return the sum of all arguments.

    And more."""

def none_of_its_own():
    """Return the time of day, in s."""

def _private(a):
    """Return what nobody sees there."""

def no_sentence(a):
    """Return the sum of all arguments"""

class Clock:
    def now(self, zone):
        """Return the time in a time zone."""
'''
PURPOSES = {
    "a.add": ("Return the sum of all arguments.", "It takes a, b, *rest, sign, **others."),
    "a.none_of_its_own": ("Return the time of day, in s.", "It takes no arguments."),
    "a.Clock.now": ("Return the time in a time zone.", "It takes zone."),
    "b.first": ("Return what many others return.", "It takes no arguments."),
    "b.second": ("Return what many others return.", "It takes no arguments."),
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    same = '"""Return what many others return."""'
    (tmp_path / "a.py").write_text(LIBRARY)
    (tmp_path / "b.py").write_text(
        "".join(f"def {name}():\n    {same}\n" for name in ("first", "second", "third"))
    )
    (tmp_path / "c.py").write_text("this is no Python")
    files = [str(tmp_path / name) for name in ("a.py", "b.py", "c.py")]
    monkeypatch.setattr(make_chat, "stdlib_files", lambda: files)


def test_each_public_function_is_asked_about_once(library, tmp_path):
    """And some about their arguments; an answer of many functions at most twice."""
    path = tmp_path / "made/chat.jsonl"
    assert run_tool(make_chat.main, path) == 0
    asked = []
    for line in path.read_text().splitlines():
        messages = json.loads(line)["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        texts = [m["content"] for m in messages]
        for question, answer in zip(texts[::2], texts[1::2]):
            if question == "Which arguments does it take?":
                assert answer == PURPOSES[asked[-1]][1]
            else:
                asked.append(question.removeprefix("What does ").removesuffix(" do?"))
                assert answer == PURPOSES[asked[-1]][0]
    assert sorted(asked) == sorted(PURPOSES)
    assert 0 < path.read_text().count("Which arguments") < len(PURPOSES)


def test_an_equal_file_is_left_alone(library, tmp_path):
    path = tmp_path / "chat.jsonl"
    assert run_tool(make_chat.main, path) == 0
    before = path.stat()
    assert run_tool(make_chat.main, path) == 0 and path.stat() == before
