"""Real ranks: all call NCCL's collectives in the same order, on as few communicators as suffice."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.fake_cuda import build, configurations
from tests.fake_cuda.configurations import LARGE_ENOUGH_FOR_FLOAT8, Text

# name: (ranks, communicators that a rank makes, options by section)
MESHES = {
    "fsdp": (2, 1, {}),
    "hsdp": (4, 2, {"parallel": {"dp_replicate": 2, "dp_shard": 2}}),
    "tp": (4, 2, {"parallel": {"tp": 2}}),
    "cp": (4, 2, {"parallel": {"cp": 2}}),
    "muon": (4, 1, {"optim": {"name": "muon"}}),
    "muon-hsdp": (
        4,
        2,
        {"optim": {"name": "muon"}, "parallel": {"dp_replicate": 2, "dp_shard": 2}},
    ),
    "float8": (
        2,
        1,
        {
            "parallel": {"float8": "tensorwise", "compile": True},
            "model": LARGE_ENOUGH_FOR_FLOAT8,
        },
    ),
    "lora": (2, 1, {"lora": {"rank": 4}}),
    "nf4": (2, 1, {"lora": {"rank": 4, "base_dtype": "nf4"}}),
}
QUICK = {"fsdp"}


def logs_of_ranks(
    ranks: int, path: pathlib.Path, folder: pathlib.Path, *options: str
) -> list[list[str]]:
    """Trains it on real ranks; what each called of NCCL."""
    log = folder / "nccl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    command += ["--standalone", "-m", "tests.fake_cuda.rank", *options, path]
    done = subprocess.run(
        [*map(str, command)],
        cwd=build.REPO,
        env=build.environment(devices=ranks, log=log),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise configurations.RunFailed(done.stdout + done.stderr)
    return [(folder / f"nccl.{rank}").read_text().splitlines() for rank in range(ranks)]


def without_rank(log: list[str]) -> list[str]:
    """What may differ between ranks is left out: their numbers, and what each sends to whom."""
    without_number = [re.sub(r"rank \d+ of", "rank of", line) for line in log]
    return [re.sub(r"(send|recv) \d+", "send or receive", line) for line in without_number]


def elements(logs: list[list[str]], operation: str) -> int:
    """How many the ranks send, or receive, together."""
    text = "\n".join(line for log in logs for line in log)
    return sum(map(int, re.findall(rf"\d+ {operation} (\d+) ", text)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in MESHES]
)
def test_all_ranks_call_the_same_collectives(name: str, text: Text, tmp_path: pathlib.Path) -> None:
    ranks, communicators, sections = MESHES[name]
    path = configurations.write_small(name, text, tmp_path, **sections)
    logs = logs_of_ranks(ranks, path, tmp_path)
    assert elements(logs, "send") == elements(logs, "recv")
    first, *others = map(without_rank, logs)
    for log in others:
        assert log == first
    made = [line for line in first if line.startswith("communicator")]
    assert len(made) == communicators, made
    assert len(first) > 20 * communicators


def test_a_rank_that_differs_is_seen(text: Text, tmp_path: pathlib.Path) -> None:
    """The control: one collective more on rank 1."""
    path = configurations.write_small("fsdp", text, tmp_path)
    first, second = map(without_rank, logs_of_ranks(2, path, tmp_path, "--plant-collective-on=1"))
    assert first != second
