"""Fixtures of the extras that tools build upon."""

import pathlib

import pytest

from tests.conftest import make_config, prepare_one
from tests.extras.lora.conftest import adapter, base, bases, run
from tests.tools.prepare.chat.conftest import tokenizer

__all__ = ["adapter", "base", "bases", "prepared", "run", "tokenizer"]


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory) -> pathlib.Path:
    """The corpus, prepared with a tokenizer that is trained on it."""
    path = tmp_path_factory.mktemp("prepared") / "words"
    return prepare_one(make_config(data={"source": str(corpus), "path": str(path)}))
