"""Each patch of parallel/torch_patches.py, in the versions of torch that need it: without it these tests fail.

That of set_default_timeout() is in tests/run/test_rank.py, what share_classes() is for in test_fsdp.py.
"""

import datetime
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from parallel.activation_checkpoint import checkpoint_selectively
from parallel.mesh import fsdp_mesh
from parallel.torch_patches import (
    accept_integer_parameters,
    share_classes,
    shorten_nccl_timeout,
)
from run.rank import distributed as run_environment
from tests.conftest import REPO, make_config
from tests.distributed import distributed


@pytest.mark.quick
@distributed(ranks=2, fake=True)
def test_frozen_integers_are_sharded(world):
    module = nn.Linear(8, 4, device="meta")
    codes = torch.empty(4, 4, dtype=torch.uint8, device="meta")
    module.codes = nn.Parameter(codes, requires_grad=False)
    accept_integer_parameters()
    fully_shard(module, mesh=fsdp_mesh(world))
    assert isinstance(module.codes, DTensor)
    assert module.codes.to_local().shape == (2, 4)
    assert not module.codes.requires_grad and module.weight.requires_grad


@pytest.mark.quick
def test_modules_parametrized_alike_share_a_class():
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    first, second, other = model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for module, name in (first, "weight"), (second, "weight"), (other, "bias"):
        parametrize.register_parametrization(module, name, Doubled())
    assert len({*map(type, model)}) == 3  # as torch leaves them
    share_classes(model)
    assert type(first) is type(second) is not type(other)
    assert second.weight.equal(2 * second.parametrizations.weight.original)


def test_advice_on_compiled_policies_is_silenced(monkeypatch):
    """Of a block with selective checkpointing. Without the patch torch gives it."""
    heard = []
    log = logging.getLogger("torch._higher_order_ops.wrap")
    monkeypatch.setattr(log, "disabled", False)
    monkeypatch.setattr(log, "handle", lambda record: heard.append(record.getMessage()))
    log.setLevel(logging.WARNING)
    block: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    checkpointed = checkpoint_selectively(block, "selective", compiled=True)
    for level, count in (log.level, 0), (logging.WARNING, 1):
        log.setLevel(level)
        torch._logging.warning_once.cache_clear()
        torch._dynamo.reset()
        torch.compile(checkpointed, backend="aot_eager")(torch.ones(2, 3, requires_grad=True))
        assert len(heard) == count
    assert "context_fn is passed" in heard[0]


COMPILING = """
import os, signal, sys, time

os.setsid()
from system import SIGNALS

received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
if sys.argv[1] == "shielded":
    from parallel.torch_patches import shield_compilers

    shield_compilers(SIGNALS)
if sys.argv[2] == "worker":
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    assert pool.submit(max, 1, 2).result(60) == 2  # it has started
    future = pool.submit(time.sleep, 1)
    time.sleep(0.2)
    os.killpg(0, signal.SIGTERM)
    future.result(20)
    pool.shutdown()
elif sys.argv[2] == "driver":
    import threading
    from triton.runtime import build

    threading.Timer(0.5, os.killpg, (0, signal.SIGTERM)).start()
    build._build("name", "1", "/tmp", [], [], [], [])  # CC's first argument
else:
    import threading
    from torch._inductor import cpp_builder

    threading.Timer(0.5, os.killpg, (0, signal.SIGTERM)).start()
    cpp_builder.run_compile_cmd("sleep 1", "/")
assert received
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "process", [pytest.param("worker", marks=pytest.mark.nightly), "compiler", "driver"]
)
def test_a_stop_does_not_reach_what_compiles(process, tmp_path):
    """SIGTERM to the whole process group. What compiles finishes, and the rank has the signal."""
    if process == "driver":
        pytest.importorskip("triton")
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec sleep "$1"\n')
    compiler.chmod(0o755)
    for shield, fails in (("shielded", False), ("bare", True)):
        done = subprocess.run(
            [sys.executable, "-c", COMPILING, shield, process],
            env=os.environ | {"PYTHONPATH": str(REPO), "CC": str(compiler)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode != 0) == fails, done.stderr


@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_that_compiles_shields_its_compilers(compiles):
    from torch._inductor import cpp_builder
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    with (
        mock.patch.object(cpp_builder, "run_compile_cmd", cpp_builder._run_compile_cmd),
        mock.patch.object(SubprocPool, "__init__", SubprocPool.__init__),
        run_environment(make_config(run={"device": "cpu"}, parallel={"compile": compiles})),
    ):
        for start in (cpp_builder.run_compile_cmd, SubprocPool.__init__):
            assert ("shielded" in start.__code__.co_name) == compiles


@pytest.mark.quick
def test_nccl_times_out_before_the_watchdog(monkeypatch):
    """In all groups, and gloo beside it as before: a save may wait longer for the disk."""

    class Nccl:  # a build for CPUs has none
        seconds = 1860.0

        def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
            self.seconds = timeout.total_seconds()

    backends = {"cuda": Nccl(), "cpu": SimpleNamespace()}
    devices = [torch.device(name) for name in backends]
    both = SimpleNamespace(_device_types=devices, _get_backend=lambda device: backends[device.type])
    gloo_alone = SimpleNamespace(_device_types=devices[1:])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    world = SimpleNamespace(pg_map=[both, gloo_alone])
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    shorten_nccl_timeout(540.0)
    assert backends["cuda"].seconds == 540.0
