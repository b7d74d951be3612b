"""Fixtures of the extras that tools build upon."""

from tests.extras.chat.conftest import tokenizer
from tests.extras.lora.conftest import base, run

__all__ = ["base", "run", "tokenizer"]
