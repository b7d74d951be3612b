"""benchmarks.gpu.rank_of_many: every arm runs, and sends as often as a hand counts."""

import json

from tests.fake_cuda.build import environment, python

PROGRAM = """import runpy, sys; from tests.fake_cuda.rank import ignore_values; ignore_values()
sys.argv[0] = "benchmarks.gpu.rank_of_many"
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)"""
OPTIONS = """--rounds=1 --train.seq_len=256 --parallel.compile=false --model.dim=256 --model.n_layers=3
    --model.n_heads=4 --model.n_kv_heads=2 --model.ffn_dim=512 --model.vocab_size=4096"""
# all-gathers and reduce-scatters of three micro-batches of five units, unless the arm says otherwise
COLLECTIVES = {"as shipped": 3 * 7 + 1 + 15, "one unit less unsharded": 3 * 8 + 15}
COLLECTIVES |= {"not deferred": 3 * 7 + 1 + 15, "once": 5 + 15, "1 micro-batch": 8 + 5}
COLLECTIVES |= {"prefetch 0": 3 * 8 + 15, "prefetch 2": 3 * 6 + 2 + 15}
COLLECTIVES |= {"once, 1 micro-batch": 8 + 5, "once, reduced once": 5 + 5}


def test_every_arm_runs(tmp_path):
    path = tmp_path / "rank_of_many.json"
    python("-c", PROGRAM, *OPTIONS.split(), f"--json={path}", env=environment())
    arms = json.loads(path.read_text())["arms"]
    assert {arm["status"] for arm in arms.values()} == {"ok"}
    assert {name: arm["memory"]["collectives"] for name, arm in arms.items()} == COLLECTIVES
    allocated = {name: arm["memory"]["allocated_gib"] for name, arm in arms.items()}
    assert allocated["as shipped"] <= allocated["not deferred"]
    assert allocated["once"] < allocated["once, reduced once"]
    assert [*arms["as shipped"]["steps"]] == ["0.0", "360.0", "50.0"]
