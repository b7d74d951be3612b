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
    "muon-hsdp": (4, 2, f"--optim.name=muon {HSDP}"),
    "float8": (2, 1, FLOAT8),
    "nf4": (2, 1, "--lora.rank=4 --lora.base_dtype=nf4"),
}


@pytest.mark.parametrize("name", marked(MESHES, {"fsdp"}, "fsdp"))
def test_all_ranks_call_the_same_collectives(name, tmp_path):
    ranks, communicators, options = MESHES[name]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    program = ["-m", "tests.fake_cuda.rank", write_small(tmp_path, options)]
    python(*torchrun, *program, env=environment(devices=ranks, log=tmp_path / "nccl"))
    logs = [(tmp_path / f"nccl.{rank}").read_text() for rank in range(ranks)]
    sent, received = (re.findall(rf"\d+ {way} (\d+) ", "".join(logs)) for way in ("send", "recv"))
    assert sum(map(int, sent)) == sum(map(int, received))
    # ranks differ in their numbers, and in what each sends to whom
    alike = [re.sub(r"rank \d+ of", "rank of", log) for log in logs]
    alike = [re.sub(r"(send|recv) \d+", "send or receive", log) for log in alike]
    assert {*alike} == {alike[0]}
    first = alike[0].splitlines()
    assert len([line for line in first if line.startswith("communicator")]) == communicators
    assert len(first) > 20 * communicators
