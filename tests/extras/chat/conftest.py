"""Fixtures of what prepares the conversations."""

from tests.tools.prepare.chat.conftest import theirs, tokenizer

__all__ = ["theirs", "tokenizer"]
