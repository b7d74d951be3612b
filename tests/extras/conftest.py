"""The tests of an extra that was removed are not collected."""

import pathlib

import pytest

from tests.conftest import has_extra, make_config, prepare_one

HERE = pathlib.Path(__file__).parent
collect_ignore = [path.name for path in HERE.iterdir() if not has_extra(path.name)]


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory) -> pathlib.Path:
    """The corpus, prepared with a tokenizer that is trained on it."""
    path = tmp_path_factory.mktemp("prepared") / "words"
    return prepare_one(make_config(data={"source": str(corpus), "path": str(path)}))
