"""The benchmarks that set our step beside another: that they run, and fail where the two do not compute the same."""

import re
import subprocess
import sys

import pytest

from benchmarks import interval
from benchmarks.overhead import typical
from benchmarks.step import compose
from tests.conftest import REPO

NUMBER = r"(-?\d+\.\d+)"
SMALL = """--model.dim=48 --model.n_layers=2 --model.ffn_dim=80 --model.vocab_size=320
    --run.device=cpu --train.seq_len=32"""


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *words], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_overhead_is_printed_with_its_interval(corpus, prepared):
    data = [f"--data.source={corpus}", f"--data.path={prepared}", "--log.tensorboard=false"]
    batch = ["--train.global_batch_size=2", "--train.micro_batch_size=1"]
    done = run("-m", "benchmarks.overhead", "--steps=20", *SMALL.split(), *batch, *data)
    pattern = rf"^overhead {NUMBER} % \({NUMBER} % \.\.\. {NUMBER} %\), .* ms a step of .* ms$"
    share, low, high = map(float, re.findall(pattern, done.stdout, re.M)[0])
    assert low <= share <= high


def test_a_row_counts_by_its_share():
    steps = [(True, 5.0)] * 2 + [(False, 1.0)] * 17 + [(False, 900.0)]
    assert typical(steps) == pytest.approx(1.4)
    low, high = interval([(False, float(n)) for n in range(200)], typical)
    assert low < 99.5 < high and high - low < 60  # by order statistics: 86 ... 113


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_our_losses_are_those_of_transformers_with_ddp(replicas):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    mesh = [f"--parallel.dp_replicate={replicas}", f"--parallel.dp_shard={2 // replicas}"]
    done = run(*torchrun, "-m", "benchmarks.transformers_step", "--steps=3", *SMALL.split(), *mesh)
    pattern = rf"^ratio {NUMBER} \({NUMBER} \.\.\. {NUMBER}\)$"
    value, low, high = map(float, re.findall(pattern, done.stdout, re.M)[0])
    assert low <= value <= high


@pytest.mark.slow
def test_a_model_that_computes_something_else_is_noticed():
    program = """import sys; from benchmarks import transformers_step as benchmark, step
benchmark.sharded = lambda cfg, world, read: step.sharded(cfg, world)  # other weights
benchmark.main(["--steps=1", *sys.argv[1:]])"""
    done = run("-c", program, *SMALL.split(), code=1)
    assert re.search(r"ArithmeticError: step 1: loss .*, of transformers", done.stderr)


def test_a_step_from_two_sizes():
    parts = {"micro_batch_seconds": 0.4, "optimizer_seconds": 0.1, "step_seconds": 3.3}
    assert compose(0.5, 1.3, 8) == pytest.approx(parts)
    assert compose(0.5, 0.4, 8).keys() ^ parts.keys() == {"marked", "step_seconds"}
