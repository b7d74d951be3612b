"""The benchmarks that set our step beside another: that they run, and fail where the two do not compute the same."""

import re
import subprocess
import sys

import pytest

from benchmarks.overhead import typical
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


@pytest.mark.slow
def test_a_model_that_computes_something_else_is_noticed():
    program = """import sys; from benchmarks import transformers_step as benchmark, step
benchmark.sharded = lambda cfg, world, read: step.sharded(cfg, world)  # other weights
benchmark.main(["--steps=1", *sys.argv[1:]])"""
    done = run("-c", program, *SMALL.split(), code=1)
    assert re.search(r"ArithmeticError: step 1: loss .*, of transformers", done.stderr)


def test_a_row_counts_by_its_share():
    steps = [(True, 5.0)] * 2 + [(False, 1.0)] * 17 + [(False, 900.0)]
    assert typical(steps) == pytest.approx(1.4)


@pytest.mark.slow
def test_our_losses_are_those_of_transformers_with_ddp():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    mesh = ["--parallel.dp_replicate=2", "--parallel.dp_shard=1"]
    done = run(*torchrun, "-m", "benchmarks.transformers_step", "--steps=3", *SMALL.split(), *mesh)
    assert re.search(rf"^ratio {NUMBER} \({NUMBER} \.\.\. {NUMBER}\)$", done.stdout, re.M)
