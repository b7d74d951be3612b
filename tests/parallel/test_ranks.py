"""How ranks agree."""

import pytest
from lifecycle.process_group import shared_options

from config import ConfigError
from parallel.ranks import check_same_on_all_ranks, on_each_rank, on_rank_zero
from tests.conftest import make_config, refuses
from tests.distributed import distributed


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
@distributed(ranks=3)
def test_ranks_with_another_value_are_named(world):
    check_same_on_all_ranks("options", {"a": 1})
    with refuses("rank 2 has a = 2, rank 0 1; b = 3, rank 0 .absent.: all nodes need"):
        check_same_on_all_ranks("options", {"a": 2, "b": 3} if world.rank == 2 else {"a": 1})


@pytest.mark.parametrize(
    "sections, may_differ",
    [
        ({"data": {"path": "/disk/of/this/node"}}, True),
        ({"data": {"source": "x.txt"}}, False),
        ({"log": {"every_steps": 7}}, False),
    ],
)
def test_nodes_may_keep_copies_elsewhere_and_nothing_else(sections, may_differ):
    ours = make_config(**sections)
    assert (shared_options(ours) == shared_options(make_config())) == may_differ
