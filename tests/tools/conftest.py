"""Fixtures of the extras that tools build upon."""

from tests.extras.chat.conftest import tokenizer
from tests.extras.lora.conftest import adapter, base, bases, run

__all__ = ["adapter", "base", "bases", "run", "tokenizer"]
