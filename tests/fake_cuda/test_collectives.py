"""Real ranks: all call NCCL's collectives in the same order, on as few communicators as suffice."""

import re

import pytest

from tests.fake_cuda.build import environment, python
from tests.fake_cuda.configurations import LARGE_ENOUGH_FOR_FLOAT8, marked, write_small

HSDP = "--parallel.dp_replicate=2 --parallel.dp_shard=2"
FLOAT8 = f"--parallel.float8=tensorwise --parallel.compile=true {LARGE_ENOUGH_FOR_FLOAT8}"
MESHES = {  # (ranks, communicators that a rank makes, options)
    "fsdp": (2, 1, ""),
    "hsdp": (4, 2, HSDP),
    "tp": (4, 2, "--parallel.tp=2"),
    "cp": (4, 2, "--parallel.cp=2"),
    "muon": (4, 1, "--optim.name=muon"),
    "muon-hsdp": (4, 2, f"--optim.name=muon {HSDP}"),
    "float8": (2, 1, FLOAT8),
    "lora": (2, 1, "--lora.rank=4"),
    "nf4": (2, 1, "--lora.rank=4 --lora.base_dtype=nf4"),
}


def without_rank(log: list[str]) -> list[str]:
    """What may differ between ranks is left out: their numbers, and what each sends to whom."""
    lines = [re.sub(r"rank \d+ of", "rank of", line) for line in log]
    return [re.sub(r"(send|recv) \d+", "send or receive", line) for line in lines]


@pytest.mark.parametrize("name", marked(MESHES, {"fsdp"}, "fsdp"))
def test_all_ranks_call_the_same_collectives(name, tmp_path):
    ranks, communicators, options = MESHES[name]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    program = ["-m", "tests.fake_cuda.rank", write_small(tmp_path, options)]
    python(*torchrun, *program, env=environment(devices=ranks, log=tmp_path / "nccl"))
    logs = [(tmp_path / f"nccl.{rank}").read_text().splitlines() for rank in range(ranks)]
    everything = "\n".join(line for log in logs for line in log)
    sent, received = (re.findall(rf"\d+ {way} (\d+) ", everything) for way in ("send", "recv"))
    assert sum(map(int, sent)) == sum(map(int, received))
    first, *others = map(without_rank, logs)
    assert all(log == first for log in others)
    assert len([line for line in first if line.startswith("communicator")]) == communicators
    assert len(first) > 20 * communicators
