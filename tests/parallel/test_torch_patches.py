"""Each patch of parallel/torch_patches.py, in the versions of torch that need it: without it these tests fail. That of
set_default_timeout() is in tests/run/test_rank.py, what share_classes() is for in test_fsdp.py."""

import datetime
import logging
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel.activation_checkpoint import checkpoint_selectively
from parallel.mesh import fsdp_mesh
from parallel.torch_patches import accept_integer_parameters, shield_compilers, shorten_nccl_timeout
from run.rank import distributed as run_environment
from system import SIGNALS
from tests.conftest import make_config
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


@pytest.fixture
def unpatched(monkeypatch):
    """Afterwards torch's functions are as they were."""
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", cpp_builder._run_compile_cmd)
    monkeypatch.setattr(SubprocPool, "__init__", SubprocPool.__init__)


@pytest.mark.parametrize("shielded", [True, False])
@pytest.mark.parametrize("process", ["compiler", "driver"])
def test_a_stop_does_not_reach_what_compiles(unpatched, monkeypatch, tmp_path, process, shielded):
    """A compiler that stops itself finishes; the signals reach the rank again afterwards."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nkill -TERM $$\n")
    compiler.chmod(0o755)
    start = lambda: cpp_builder.run_compile_cmd(str(compiler), "/")  # noqa: E731
    if process == "driver":
        build = pytest.importorskip("triton.runtime.build")
        monkeypatch.setattr(build, "_build", build._build)
        monkeypatch.setenv("CC", str(compiler))
        start = lambda: build._build("name", "", "/tmp", [], [], [], [])  # noqa: E731
    if shielded:
        shield_compilers(SIGNALS)
        start()
    else:
        with pytest.raises((RuntimeError, subprocess.CalledProcessError)):
            start()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*SIGNALS}


@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_that_compiles_shields_its_compilers(unpatched, compiles):
    with run_environment(make_config(run={"device": "cpu"}, parallel={"compile": compiles})):
        for start in (cpp_builder.run_compile_cmd, SubprocPool.__init__):
            assert ("shielded" in start.__code__.co_name) == compiles


@pytest.mark.quick
def test_nccl_times_out_before_the_watchdog(monkeypatch):
    """In all groups, and gloo in the same group as before: a save may wait longer for the disk."""

    class Nccl:  # a build for CPUs has none
        def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
            self.seconds = timeout.total_seconds()

    backends = {"cuda": Nccl(), "cpu": SimpleNamespace()}
    devices = [torch.device(name) for name in backends]
    both = SimpleNamespace(_device_types=devices, _get_backend=lambda device: backends[device.type])
    gloo_alone = SimpleNamespace(_device_types=devices[1:])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=[both, gloo_alone]))
    shorten_nccl_timeout(540.0)
    assert backends["cuda"].seconds == 540.0
