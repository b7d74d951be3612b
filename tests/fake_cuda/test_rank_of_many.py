"""benchmarks.gpu.rank_of_many: every arm runs, and sends as often as a hand counts."""

import json
import pathlib
import subprocess
import sys

from tests.fake_cuda import build

PROGRAM = """
import runpy, sys
from tests.fake_cuda.rank import ignore_values
ignore_values()
sys.argv[0] = "benchmarks.gpu.rank_of_many"
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
SIZES = {
    "dim": 256,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 512,
    "vocab_size": 4096,
}
# all-gathers and reduce-scatters of three micro-batches of five units, unless the arm says otherwise
COLLECTIVES = {
    "as shipped": 3 * 7 + 1 + 15,
    "one unit less unsharded": 3 * 8 + 15,
    "not deferred": 3 * 7 + 1 + 15,
    "once": 5 + 15,
    "1 micro-batch": 8 + 5,
    "prefetch 0": 3 * 8 + 15,
    "prefetch 2": 3 * 6 + 2 + 15,
    "once, 1 micro-batch": 8 + 5,
    "once, reduced once": 5 + 5,
}


def test_every_arm_runs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rank_of_many.json"
    options = ["--rounds=1", f"--json={path}", "--train.seq_len=256", "--parallel.compile=false"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            *options,
            *(f"--model.{name}={size}" for name, size in SIZES.items()),
        ],
        cwd=build.REPO,
        env=build.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    arms = json.loads(path.read_text())["arms"]
    assert {arm["status"] for arm in arms.values()} == {"ok"}, done.stderr
    assert {name: arm["memory"]["collectives"] for name, arm in arms.items()} == COLLECTIVES
    allocated = {name: arm["memory"]["allocated_gib"] for name, arm in arms.items()}
    assert allocated["as shipped"] <= allocated["not deferred"]
    assert allocated["once"] < allocated["once, reduced once"]
    assert [*arms["as shipped"]["steps"]] == ["0.0", "360.0", "50.0"]
