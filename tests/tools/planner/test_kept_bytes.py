"""The plan of what a block keeps for its backward, against real blocks."""

import pytest

from tests.distributed import run_on_ranks
from tests.parallel.test_activation_checkpoint import block_config, kept_by_mode
from tools.planner.simulate import simulate


@pytest.mark.parametrize("cp, tp", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_plan_knows_what_a_block_keeps(cp, tp):
    def planned(mode: str, sequences: int) -> int:
        cfg = block_config(mode, cp, tp, sequences, n_layers=3)
        ends = {phase.name: phase.end for phase in simulate(cfg, cp * tp, on_gpu=False).phases}
        second, first = ends["forward block 2"], ends["forward block 1"]
        return second["activations"] - first["activations"]

    for mode, kept in run_on_ranks(cp * tp, kept_by_mode, cp, tp)[-1].items():
        assert planned(mode, 4) - planned(mode, 2) == kept, mode
