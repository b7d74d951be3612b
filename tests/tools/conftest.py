"""Fixtures of the extras that tools build upon."""

from tests.extras.chat.conftest import tokenizer

__all__ = ["tokenizer"]
