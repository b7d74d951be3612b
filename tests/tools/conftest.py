"""Fixtures of the extras that tools build upon."""

from tests.extras.conftest import prepared
from tests.extras.lora.conftest import adapter, base, bases, run
from tests.tools.prepare.chat.conftest import tokenizer

__all__ = ["adapter", "base", "bases", "prepared", "run", "tokenizer"]
