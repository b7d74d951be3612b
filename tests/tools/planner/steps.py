"""What tests of the planner share: a GPU's configuration, and whether few blocks gave the step of all."""

from unittest import mock

import pytest

import config
from tests.conftest import make_config
from tools.planner import simulate as module
from tools.planner.simulate import Step, simulate

MODEL = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 176, "vocab_size": 328}
LONG = {"seq_len": 1024, "global_batch_size": 8, "micro_batch_size": 1}


def of_a_gpu(
    model: dict | None = None, parallel: dict | None = None, **sections: dict
) -> config.Config:
    """Ten blocks, a step of two micro-batches on eight GPUs."""
    defaults = {
        "run": {"device": "cuda"},
        "train": {"seq_len": 256, "global_batch_size": 16, "micro_batch_size": 1},
        "model": {**MODEL, "n_layers": 10, **(model or {})},
        "parallel": {"param_dtype": "bfloat16", **(parallel or {})},
    }
    return make_config(**{**defaults, **sections})


def step_and_models(cfg: config.Config, ranks: int = 8) -> tuple[Step, list[int]]:
    """The step, and how many blocks the models had that ran for it."""
    with mock.patch.object(module, "run", wraps=module.run) as run:
        step = simulate(cfg, ranks)
    return step, [call.args[0].model.n_layers for call in run.call_args_list]


def assert_equal(few: Step, all_blocks: Step) -> None:
    """All that a plan says of each phase. Bytes may be off by what the gradients' norm takes at the end."""
    assert few.held == all_blocks.held
    assert [phase.name for phase in few.phases] == [phase.name for phase in all_blocks.phases]
    for a, b in zip(few.phases, all_blocks.phases):
        assert a.times == b.times and +a.sent == +b.sent and +a.uncounted == +b.uncounted, a.name
        assert a.gathered_before == b.gathered_before and a.ends_reduced == b.ends_reduced, a.name
        for kind in ("matmuls", "float8", "attention", "model"):
            assert a.work[kind] == b.work[kind], (a.name, kind)
        assert a.work["moved"] == pytest.approx(b.work["moved"], rel=0.05, abs=2**16), a.name
        for peak, of_all in ((a.peak, b.peak), (a.peak_of_pools, b.peak_of_pools)):
            assert peak.total() == pytest.approx(of_all.total(), rel=0.01, abs=2**17), a.name
    assert few.peak().name == all_blocks.peak().name
