"""Tests on the fake CUDA, by `./tests/run.sh --fake-cuda` alone: they need torch's CUDA wheel."""

import pytest

from tests.fake_cuda import build


@pytest.fixture(scope="session", autouse=True)
def fake() -> None:
    try:
        build.build()
    except build.CannotBuild as error:
        pytest.exit(str(error), returncode=2)
