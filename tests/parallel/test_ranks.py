"""How ranks agree."""

import threading

import pytest

from config import ConfigError
from parallel.ranks import check_same_on_all_ranks, on_each_rank, on_rank_zero, printed_if_long
from tests.conftest import refuses
from tests.distributed import distributed


class NoDisk(ConfigError):
    """No disk is there."""


@pytest.mark.quick
@distributed(ranks=3)
def test_error_of_one_rank_is_raised_on_all(world):
    def work() -> int:
        if world.rank == 1:
            raise ConfigError("no disk")
        return world.rank

    with refuses("no disk"):
        on_each_rank(work)
    assert on_each_rank(lambda: world.rank) == world.rank
    assert on_rank_zero(lambda: world.rank) == 0


@pytest.mark.quick
@distributed(ranks=2)
def test_error_keeps_its_type_and_several_ranks_their_problems(world):
    def work() -> None:
        raise NoDisk("no disk", f"on rank {world.rank}")

    with pytest.raises(NoDisk) as caught:
        on_each_rank(work)
    assert caught.value.problems == ("no disk", "on rank 0", "on rank 1")


@pytest.mark.quick
@distributed(ranks=3)
def test_ranks_with_another_value_are_named(world):
    check_same_on_all_ranks("options", {"a": 1})
    with refuses("rank 2 has a = 2, rank 0 1; b = 3, rank 0 .absent.: all nodes need"):
        check_same_on_all_ranks("options", {"a": 2, "b": 3} if world.rank == 2 else {"a": 1})


def test_long_wait_is_reported(monkeypatch):
    is_printed = threading.Event()
    monkeypatch.setattr("parallel.ranks.print_error", lambda text: is_printed.set())
    monkeypatch.setattr("parallel.ranks.NOTICE_SECONDS", 0.01)
    with printed_if_long("waiting for rank 3"):
        assert is_printed.wait(60)
