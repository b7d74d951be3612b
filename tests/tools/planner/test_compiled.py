"""The plan keeps for backward what the graphs of a compiled block keep; in the plan, blocks run eagerly."""

import pytest

import config
from tests.compiled_block import kept_bytes_per_token
from tests.conftest import REPO
from tools.planner.simulate import simulate

LLAMA1B = str(REPO / "configs/llama1b.toml")


def planned(*options: str, ranks: int = 8) -> float:
    """Bytes that a block keeps of a token, and of the tokens that cp gathers."""
    cfg = config.load(LLAMA1B, ["--parallel.param_dtype=bfloat16", *options])
    ends = {phase.name: phase.end["activations"] for phase in simulate(cfg, ranks).phases}
    tokens = cfg.train.seq_len * config.micro_batch_size(cfg.train, ranks // cfg.parallel.cp)
    return (ends["forward block 2"] - ends["forward block 1"]) / tokens * cfg.parallel.cp


@pytest.mark.parametrize("setting", ["none", "elementwise", "selective", "full"])
def test_a_block_keeps_what_its_graphs_keep(setting):
    kept = kept_bytes_per_token(config.load(LLAMA1B).model, 1024, setting)
    assert planned(f"--parallel.recompute={setting}") == pytest.approx(kept, rel=0.001)


@pytest.mark.parametrize("cp", [2, 4])
def test_it_keeps_the_keys_and_values_that_cp_has_gathered(cp):
    """Compiled, without activation checkpointing, backward does not gather them again."""

    def kept(cp: int) -> float:
        sizes = ["--train.global_batch_size=1", "--train.micro_batch_size=1"]
        mesh = [f"--parallel.cp={cp}", f"--train.seq_len={1024 * cp}"]
        return 1024 * planned("--parallel.recompute=none", *mesh, *sizes, ranks=cp)

    assert kept(cp) - kept(1) == 2 * 1024 * cp * 8 * 64 * 2  # K and V, tokens, heads, width, bytes
