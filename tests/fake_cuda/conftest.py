"""Tests on the fake CUDA. `./tests/run.sh --fake-cuda` runs them; the default suite leaves them out, as
they need torch's CUDA wheel."""

import pytest

from tests.fake_cuda import build, configurations

# ./tests/run.sh --fake-cuda --quick
QUICK = {
    "test_waits_and_launches_are_counted",
    "test_memory_is_limited_and_costs_the_host_nothing",
    "test_all_ranks_call_the_same_collectives[fsdp]",
    "test_full_size[tiny-compiled]",
    "test_save_restore_evaluate[llama8b]",
    "test_no_memory_is_used_by_two_streams_at_once[one-pool]",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in QUICK:
            item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def fake() -> None:
    try:
        build.build()
    except build.CannotBuild as error:
        pytest.exit(str(error), returncode=2)


@pytest.fixture(scope="session")
def text() -> configurations.Text:
    return configurations.make_text()
